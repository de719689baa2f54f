"""Run Lasagne 0.1's own tests, from its source package, on the ``theano`` of this environment.

    python tests/compat/lasagne_suite.py

prints the outcome of each test as JSON.  The tests are neither copied into this repository nor changed: pip downloads
the package, and what is older than today's pytest is put around them: ``mock``, which is in the standard library now,
and a ``conftest.py`` that chooses files by an interface that pytest has dropped.
"""

import argparse
import collections
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree
from pathlib import Path

PACKAGE = "Lasagne==0.1"
ROOT = Path(__file__).resolve().parents[2]
#: Python of the pip that run.py installs, as there is none in the environments that it makes.
RUN_PY_PIP = ROOT / ".venv" / "pip" / "bin" / "python"
PLUGIN = """
import sys
import unittest.mock

import theano_convolutions

sys.modules.setdefault("mock", unittest.mock)
"""


#: Python's versions of Ops: Theano would have g++ compile a module for each of them. See theano_convolutions.py.
THEANO = f"mode=FAST_COMPILE,cxx={shutil.which('g++') or ''}"


class NoPackage(Exception):
    """The source package could not be downloaded."""


def download(directory):
    """Return the source package's path."""
    python = RUN_PY_PIP if RUN_PY_PIP.exists() else sys.executable
    command = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", PACKAGE]
    run = subprocess.run([*command, "--dest", directory], capture_output=True, text=True, timeout=300)
    found = list(Path(directory).glob("Lasagne-*.tar.gz"))
    if not found:
        raise NoPackage(f"pip could not download {PACKAGE}: {run.stderr.strip()[-500:]}")
    return found[0]


def unpack(package, directory):
    """Unpack it, and add modules that its tests need; return its directory."""
    with tarfile.open(package) as archive:
        # Python 3.11.4 and newer know filters.
        archive.extractall(directory, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (source,) = Path(directory).glob("Lasagne-*/")
    (source / "lasagne" / "conftest.py").unlink()
    (source / "setup.cfg").unlink()
    (source / "pytest.ini").write_text("[pytest]\npython_files = test*.py\nmarkers = slow\n")
    (source / "around_the_tests.py").write_text(PLUGIN)
    # Lasagne asks for its own version when it is imported.
    metadata = source / "Lasagne-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: Lasagne\nVersion: 0.1\n")
    return source


def run(selection=(), timeout=1500):
    """Return the outcome of each test by its name: passed, failed or skipped.

    Parameters
    ----------
    selection : sequence of str
        Arguments for pytest.
    timeout : float
        Seconds.
    """
    with tempfile.TemporaryDirectory() as directory:
        source = unpack(download(directory), directory)
        report = Path(directory) / "report.xml"
        paths = [
            str(source),
            str(ROOT),
            str(ROOT / "tests" / "support"),
            os.environ.get("PYTHONPATH", ""),
        ]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        # Graphs without rewrites compile fastest, and loops without g++.  Of flags that contradict each other, as those of the tests around these,
        # the last one counts.
        flags = {"PYTENSOR_FLAGS": "mode=Mode,linker=py,optimizer=None,cxx=", "THEANO_FLAGS": THEANO}
        for name, mine in flags.items():
            variables[name] = ",".join(filter(None, [variables.get(name, ""), mine]))
        command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["-p", "around_the_tests", f"--junit-xml={report}", *(selection or ["lasagne/tests"])]
        with open(Path(directory) / "output", "w+") as output:
            try:
                subprocess.run(command, cwd=source, env=variables, stdout=output, stderr=output, timeout=timeout)
            finally:
                output.seek(0)
                sys.stderr.write(output.read())
        return dict(read_outcomes(report))


def read_outcomes(report):
    """Yield names and outcomes from pytest's report."""
    for test in xml.etree.ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{test.get('classname').removeprefix('lasagne.tests.')}::{test.get('name')}"
        kinds = {child.tag for child in test}
        failed = kinds & {"failure", "error"}
        yield name, "failed" if failed else "skipped" if "skipped" in kinds else "passed"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("selection", nargs="*", help="for pytest, as lasagne/tests/test_init.py")
    found = run(parser.parse_args().selection)
    print(json.dumps(found, indent=1, sort_keys=True))
    print(collections.Counter(found.values()), file=sys.stderr)
