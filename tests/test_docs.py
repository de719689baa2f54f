"""The examples in the documentation: they run, and print what they say.

Those of the docstrings need PyTensor, which they import.  Those of the pages in docs/ run with Theano as well, with its
name in the place of PyTensor's, but for pages that say ``.. needs: pytensor``.  A page that says ``.. needs: pymc`` runs
where PyMC is installed.  Scripts without a prompt, the README's
among them, run in a process of their own.
"""

import doctest
import importlib
import importlib.util
import io
import pkgutil
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import synkhronos as synk

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("*.rst"))
HAS_PYTENSOR = importlib.util.find_spec("pytensor") is not None
HAS_PYMC = importlib.util.find_spec("pymc") is not None
HAS_THEANO = importlib.util.find_spec("theano") is not None


def run(example: doctest.DocTest) -> None:
    report = io.StringIO()
    try:
        with np.printoptions():
            failed, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=report.write)
    finally:
        synk.close()  # where an example stopped short of it
    assert failed == 0, report.getvalue()


def modules(path, prefix: str) -> list[str]:
    """Return the modules in a package and below, but for one of the other environment and for those of compat/.

    The latter change what ``import theano`` finds; compat/check_examples.py runs theirs.
    """
    names = []
    for module in pkgutil.iter_modules(path, prefix):
        if module.name not in ("synkhronos.graphs.theano", "synkhronos.compat"):
            names.append(module.name)
            if module.ispkg:
                names += modules([str(Path(path[0]) / module.name.rsplit(".", 1)[1])], f"{module.name}.")
    return names


def docstrings() -> list[doctest.DocTest]:
    found = {}
    for name in ["synkhronos", *modules(synk.__path__, "synkhronos.")]:
        for test in doctest.DocTestFinder().find(importlib.import_module(name), name):
            if test.examples and (HAS_PYMC or name != "synkhronos.extensions.pymc"):
                found[test.name] = test
    return list(found.values())


@pytest.mark.skipif(not HAS_PYTENSOR, reason="docstrings import PyTensor")
@pytest.mark.parametrize("example", docstrings() if HAS_PYTENSOR else [], ids=lambda test: test.name)
def test_docstring(example):
    run(example)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page(page):
    text = page.read_text()
    if ".. needs: pymc" in text and not HAS_PYMC:
        pytest.skip("the page is about PyMC")
    if not HAS_PYTENSOR:
        if ".. needs: pytensor" in text:
            pytest.skip("the page is about PyTensor")
        text = re.sub("import pytensor\\b", "import theano", text)
        text = re.sub("\\bpytensor\\.", "theano.", text)
    example = doctest.DocTestParser().get_doctest(text, {}, page.stem, str(page), 0)
    if not example.examples:
        pytest.skip("no examples")
    run(example)


def scripts() -> dict[str, str]:
    found = {}
    for page in [ROOT / "README.rst", *PAGES]:
        blocks = re.findall(r"^\.\. code-block:: python\n\n((?: +.*\n|\n)+)", page.read_text(), re.MULTILINE)
        found |= {f"{page.stem}-{i}": textwrap.dedent(block) for i, block in enumerate(blocks)}
    return found


@pytest.mark.parametrize("script", scripts().values(), ids=scripts())
def test_script(script):
    if not HAS_THEANO and "theano" in script:
        pytest.skip("the script is about Theano")
    if not HAS_PYTENSOR:
        script = re.sub("^import pytensor$", "import theano as pytensor", script, flags=re.MULTILINE)
        script = script.replace("import pytensor.tensor", "import theano.tensor")
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_the_readme_has_a_complete_script():
    assert "README-0" in scripts()


def test_every_public_name_is_in_the_reference():
    text = (ROOT / "docs" / "api.rst").read_text()
    documented = set(re.findall(r"^\.\. auto\w+:: (\w+)$", text, re.MULTILINE))
    assert set(synk.__all__) <= documented
