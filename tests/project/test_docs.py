"""Examples in the documentation run and print the stated output.

Those of the docstrings need PyTensor, which they import.  Those of the pages in docs/ run with Theano as well, with its
name in place of PyTensor's, but for pages that say ``.. needs: pytensor``.  A page that says ``.. needs: pymc`` runs
where PyMC is installed.  Scripts without a prompt, the README's
among them, run in a process of their own.
"""

import ast
import contextlib
import csv
import doctest
import hashlib
import importlib
import importlib.util
import inspect
import io
import json
import pkgutil
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from library import DEVICE, tensor
from paths import ROOT
from system import run_code

import synkhronos as synk
from synkhronos.devices.reduce_op import REDUCE_OPS, ReduceOp

pytestmark = pytest.mark.starts_programs

PAGES = sorted((ROOT / "docs").glob("*.rst"))
HAS_PYTENSOR = importlib.util.find_spec("pytensor") is not None
HAS_PYMC = importlib.util.find_spec("pymc") is not None
HAS_THEANO = importlib.util.find_spec("theano") is not None


def run_example(example: doctest.DocTest) -> None:
    report = io.StringIO()
    try:
        with np.printoptions():
            failed, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=report.write)
    finally:
        synk.close()  # an example may fail before its own call of close()
    assert failed == 0, report.getvalue()


def list_modules(path, prefix: str) -> list[str]:
    """Return the modules in a package and below, except those of the other environment and of other libraries' names.

    The latter change the meaning of ``import theano``; compat/test_examples.py runs their examples.
    """
    names = []
    for module in pkgutil.iter_modules(path, prefix):
        if module.name == "synkhronos.extensions.pymc.data_parallel_model" and not HAS_PYMC:
            continue
        if module.name not in (
            "synkhronos.graph_libraries.theano",
            "synkhronos.extensions.rank_mean.theano",
            "synkhronos.compat",
            "synkhronos.platoon",
            "synkhronos.theanompi",
        ):
            names.append(module.name)
            if module.ispkg:
                names += list_modules([str(Path(path[0]) / module.name.rsplit(".", 1)[1])], f"{module.name}.")
    return names


def find_docstring_examples() -> list[doctest.DocTest]:
    tests_by_name = {}
    for name in ["synkhronos", *list_modules(synk.__path__, "synkhronos.")]:
        for test in doctest.DocTestFinder().find(importlib.import_module(name), name):
            if test.examples and (HAS_PYMC or not name.startswith("synkhronos.extensions.pymc")):
                tests_by_name[test.name] = test
    return list(tests_by_name.values())


@pytest.mark.skipif(not HAS_PYTENSOR, reason="docstrings import PyTensor")
@pytest.mark.parametrize("example", find_docstring_examples() if HAS_PYTENSOR else [], ids=lambda test: test.name)
def test_docstring_example_prints_its_output(example):
    run_example(example)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_examples_print_their_output(page):
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
    run_example(example)


def find_code_blocks() -> dict[str, str]:
    scripts_by_name = {}
    for page in [ROOT / "README.rst", *PAGES]:
        blocks = re.findall(r"^\.\. code-block:: python\n\n((?: +.*\n|\n)+)", page.read_text(), re.MULTILINE)
        scripts_by_name |= {f"{page.stem}-{i}": textwrap.dedent(block) for i, block in enumerate(blocks)}
    return scripts_by_name


@pytest.mark.parametrize("script", find_code_blocks().values(), ids=find_code_blocks())
def test_code_block_runs(script):
    if not HAS_THEANO and "theano" in script:
        pytest.skip("the script is about Theano")
    if not HAS_PYTENSOR:
        script = re.sub("^import pytensor$", "import theano as pytensor", script, flags=re.MULTILINE)
        script = script.replace("import pytensor.tensor", "import theano.tensor")
    assert run_code(script, cwd=ROOT)


def find_arguments(code):
    """Yield the calls in a piece of code, each as the function's name and the names of its arguments.

    Arguments outside of a call, such as ``seed=1``, belong to ``options``.
    """
    for form in ("options({})", "{}: pass"):
        with contextlib.suppress(SyntaxError):
            calls = [node for node in ast.walk(ast.parse(form.format(code))) if isinstance(node, ast.Call)]
            yield from ((ast.unparse(call.func), {keyword.arg for keyword in call.keywords}) for call in calls)


@pytest.mark.skipif(not HAS_PYTENSOR, reason="the library that graphs are of does not matter")
def test_training_table_names_existing_options():
    """The right column has only existing arguments, as in ``CheckpointFolder(folder, keep_best="error")``."""
    from synkhronos import training
    from synkhronos.extensions import attention

    page = (ROOT / "docs" / "training.rst").read_text()
    (table,) = re.findall(r"\* - PyTorch Lightning, optax\n.*?(?=\n\n)", page, re.DOTALL)
    cells = re.findall(r"^     - (.*(?:\n       .*)*)", table, re.MULTILINE)
    functions = {**vars(training), **vars(training.schedules), **vars(training.updates)}
    functions |= {"trainer.epochs": training.Trainer.epochs, "synk.fork": synk.fork}
    functions |= {"dot_product_attention": attention.dot_product_attention}
    # The first two are an environment variable, and an argument of the demos' layer.
    options = {"JAX_DEFAULT_MATMUL_PRECISION", "sync"}
    options |= {*inspect.signature(training.make_trainer).parameters}
    options |= {*inspect.signature(training.Trainer.epochs).parameters}
    calls = [call for cell in cells for code in re.findall("``(.+?)``", cell) for call in find_arguments(code)]
    unknown = [
        (name, used - (options if name == "options" else {*inspect.signature(functions[name]).parameters}))
        for name, used in calls
        if used
    ]
    assert len(unknown) > 20 and [name for name in unknown if name[1]] == []


#: Snippets of pages: the page, the start of the snippet, the script of the page that it extends, and its changes there.
PIECES = [
    ("exchange_rules", "class Halfway", "exchange_rules-0", ("exchange_rules.LocalSGD(period=10)", "Halfway()")),
    ("training", "class Wandb", "training-0", ("recorder=Recorder(folder)", "recorder=Wandb()")),
    ("loading", "def add_noise", "loading-0", ("processes=2)", "processes=2, augment=add_noise)")),
    (
        "programs",
        "def count",
        "programs-0",
        ("print(synk.run(", "synk.run(count, synk.data(np.zeros(3)))\nprint(synk.run("),
    ),
]
#: Replaces the module that the script on Weights & Biases imports.
WANDB = "class wandb:\n    log = lambda record, step: print(step)\n\n"


@pytest.mark.skipif(not HAS_PYTENSOR, reason="the scripts that these pieces belong to import PyTensor")
@pytest.mark.parametrize(
    ("page", "first_words", "script", "change"), PIECES, ids=[first_words for _, first_words, _, _ in PIECES]
)
def test_code_fragment_runs(page, first_words, script, change):
    """Code that a page shows beside its script runs in that script."""
    blocks = re.findall(r"^\.\. code-block:: text\n\n((?: +.*\n|\n)+)", (ROOT / f"docs/{page}.rst").read_text(), re.M)
    (piece,) = [textwrap.dedent(block) for block in blocks if textwrap.dedent(block).startswith(first_words)]
    whole = find_code_blocks()[script]
    assert change[0] in whole
    before, fork, after = whole.replace(*change).partition("synk.fork(")
    before, _, assigned = before.rpartition("\n")
    test_code_block_runs(f"{before}\n{WANDB}{piece}\n{assigned}{fork}{after}")


def test_model_of_the_launcher_page_is_complete(tmp_path):
    """``check`` finds the class on the launcher's page complete."""
    if importlib.util.find_spec("lasagne") is None:
        pytest.skip("the class is made of Lasagne's layers")
    page = (ROOT / "docs" / "launcher.rst").read_text()
    (block,) = [text for text in re.findall(r"code-block:: text\n\n((?: +.*\n|\n)+)", page) if "class Digits" in text]
    data = """
        import numpy as np
        rng = np.random.default_rng(0)  # two ranks that see the same rows would be an error
        x_train, y_train = x_valid, y_valid = rng.random((100, 784), "float32"), np.zeros(100, "int32")
    """
    (tmp_path / "digits.py").write_text(textwrap.dedent(block) + textwrap.dedent(data))
    result = subprocess.run(
        [sys.executable, "-m", "synkhronos", "check", f"{tmp_path}/digits.py:Digits"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "Digits: no problem found, on one rank and on two" in result.stdout, result.stdout + result.stderr


@pytest.mark.skipif(DEVICE != "host", reason="where XLA was used, workers start anew and lack the row")
def test_contributing_first_change_works(fork, monkeypatch):
    """The rows and the test work, and the test fails without the row of `REDUCE_OPS`."""
    page = (ROOT / "docs" / "contributing.rst").read_text()
    row, test = (
        textwrap.dedent(block) for block in re.findall(r"code-block:: python3\n\n((?: +.*\n|\n)+?)(?=\d\. )", page)
    )
    names = {"np": np, "synk": synk, "tensor": tensor, "ReduceOp": ReduceOp}
    exec(test, names)
    monkeypatch.delitem(REDUCE_OPS, "fmax", raising=False)  # who follows the page has added it
    with pytest.raises(ValueError, match="fmax"):
        names["test_fmax_ignores_nan"](fork)
    synk.close()
    (added,) = eval(f"{{{row}}}", names).items()
    monkeypatch.setitem(REDUCE_OPS, *added)
    names["test_fmax_ignores_nan"](fork)
    monkeypatch.syspath_prepend(ROOT / "tests" / "programs")
    test_rank_programs = importlib.import_module("test_rank_programs")
    test_rank_programs.test_program_all_reduce_accepts_all_ops(2)  # it reads the table, and needs no change
    (documented,) = re.findall(r'^ +(``"fmax"`` .*\n)', page, re.MULTILINE)
    before, gather, after = re.split(r'^(``"gather"``.*\n)', FUNCTIONS.read_text(), flags=re.MULTILINE)
    assert list_documented_ops(before + gather + documented + after.replace(documented, "")) == list(REDUCE_OPS)
    columns, expected = ([match.end() for match in re.finditer(" {2,}", line)] for line in (documented, gather))
    assert columns == expected
    monkeypatch.syspath_prepend(ROOT / "tests" / "devices")
    test_reduce_op = importlib.import_module("test_reduce_op")  # the file to which the page adds a test
    monkeypatch.setitem(REDUCE_OPS, *next(iter(test_reduce_op.ROW.items())))
    synk.close()
    fork(2)
    test_reduce_op.test_own_reduction_is_listed_in_error_messages(None, None)


def test_contributing_complete_test_passes(fork):
    page = (ROOT / "docs" / "contributing.rst").read_text()
    (test,) = re.findall(r'::\n\n(    """Sums over all ranks.*?)\n\n\S', page, re.DOTALL)
    names = {}
    exec(textwrap.dedent(test), names)
    names["test_sum_is_over_all_rows"](fork)


def list_commands() -> list[str]:
    """Return the lines of the pages that call the launcher."""
    lines = [line.strip() for page in [ROOT / "README.rst", *PAGES] for line in page.read_text().splitlines()]
    return [
        line.removeprefix("$ ") for line in lines if re.match(r"\$ python -m synkhronos (train|check|doctor) ", line)
    ]


@pytest.mark.parametrize("line", list_commands())
def test_launcher_lines_are_parsed(line):
    from synkhronos.launcher import train

    command, *arguments = shlex.split(line)[3:]
    if command == "train":
        train._make_parser().parse_args(arguments)
    else:
        assert re.fullmatch(r"doctor|check \S+:\w+", " ".join([command, *arguments]))


def test_readme_has_a_complete_script():
    assert "README-0" in find_code_blocks()


def test_reference_has_all_public_names():
    text = (ROOT / "docs" / "api.rst").read_text()
    documented = set(re.findall(r"^\.\. auto\w+:: (\w+)$", text, re.MULTILINE))
    assert set(synk.__all__) <= documented


def list_documented_members():
    """Yield the dotted names in the reference: each class, and its members that are listed; "*" stands for all."""
    text = "\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.rst")))
    for match in re.finditer(r"^\.\. auto(?:class|exception):: ([\w.]+)((?:\n   .*)*)", text, re.MULTILINE):
        members = re.search(r":members:(.*(?:\n {6}.*)*)", match[2])
        name = match[1].rpartition(".")[2]
        yield name
        for member in re.findall(r"\w+", members[1]) or ["*"] if members else []:
            yield f"{name}.{member}"


def list_public_names(kind):
    """Return a class's public names: methods, class attributes, and attributes that methods set."""
    names = set(vars(kind)) | set(kind.__dict__.get("__annotations__", {}))
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(kind)))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return {name for name in names if not name.startswith("_")}


#: Internal attributes with public names, as the packages training and launch share the training loop.
UNDOCUMENTED = {
    "CheckpointFolder": {"check_no_newer"},
    "Model": {"next_batch", "prepare", "train_fn", "val_fn"},
    "Recorder": {"write_rank_record"},
    "Report": {"to_record"},
    "TrainFunction": {"gather_state_vector", "set_state_vector", "take_steps_with_weights"},
}


def test_reference_has_all_public_attributes():
    """Each public method is on a page or in its class's docstring; internal methods begin with an underscore."""
    documented = set(list_documented_members())
    pages = "\n".join(page.read_text() for page in (ROOT / "docs").glob("*.rst"))
    names = {"": vars(synk)}
    for package in "data_objects functions launcher loading programs exchange_rules timelines training".split():
        names[package] = vars(importlib.import_module(f"synkhronos.{package}"))
    classes = {value for space in names.values() for value in space.values() if inspect.isclass(value)}
    missing = {}
    for kind in classes:
        if not kind.__module__.startswith("synkhronos") or kind.__name__.startswith("_"):
            continue
        if kind.__name__ not in documented:
            continue  # internal
        bases = [base for base in kind.__mro__ if base.__module__.startswith("synkhronos")]
        text = "\n".join(inspect.getdoc(base) or "" for base in bases)
        undocumented = set().union(*map(list_public_names, bases))
        undocumented -= {
            name
            for name in undocumented
            for base in bases
            if {f"{base.__name__}.{name}", f"{base.__name__}.*"} & documented
        }
        undocumented -= {
            name for name in undocumented if re.search(rf"^(\w+, )*{name}(, \w+)* :|`{name}`", text, re.MULTILINE)
        }
        undocumented -= {name for name in undocumented if re.search(rf"(\.|``){name}\b", pages)}
        if undocumented - UNDOCUMENTED.get(kind.__name__, set()):
            missing[kind.__qualname__] = sorted(undocumented)
    assert missing == {}


FUNCTIONS = ROOT / "docs" / "functions.rst"


def list_documented_ops(page):
    """Return the names of the ops in the table of docs/functions.rst, from the page's text."""
    return re.findall(r'^``"(\w+)"`` ', page, re.MULTILINE)


def test_ops_are_listed_in_one_table_and_documented_in_one():
    """A new op needs no edit in other files: their docstrings, pages and messages refer to the tables."""
    assert list_documented_ops(FUNCTIONS.read_text()) == list(REDUCE_OPS), "the table below Ops in docs/functions.rst"
    files = [*(ROOT / "synkhronos").rglob("*.py"), *(ROOT / "docs").glob("*.rst"), ROOT / "tests" / "messages.txt"]
    naming = {str(path.relative_to(ROOT)) for path in files if re.search("""(["'])prod\\1""", path.read_text())}
    platoon = {f"synkhronos/platoon/{name}.py" for name in ("ops", "channel/worker")}  # Platoon's own ops
    assert naming - platoon == {"synkhronos/devices/reduce_op.py", "docs/functions.rst"}


SPEED = ROOT / "docs" / "speed.csv"


@pytest.mark.parametrize("theme", ["light", "dark", "light_narrow", "dark_narrow"])
def test_speed_picture_matches_its_table(theme):
    """After a change of the table, ``python docs/speed.py`` must draw the picture again."""
    assert hashlib.sha256(SPEED.read_bytes()).hexdigest() in SPEED.with_name(f"speed_{theme}.svg").read_text()


def test_speed_table_commands_exist():
    with SPEED.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for program, *options in (row["Command"].strip("`").split() for row in rows):
        source = ROOT / ("run.py" if program == "run.py" else f"benchmarks/{program}.py")
        text = source.read_text()
        if program == "run.py" and options[0] == "demo":
            (script,) = (ROOT / "demos").glob(f"*/{options[1]}.py")
            text = "".join(path.read_text() for path in script.parent.parent.glob("*/*.py"))
        assert [option for option in options if option.startswith("--") and f'"{option}"' not in text] == []


def test_readme_has_rows_of_the_speed_table():
    """The README has some rows in the same order.

    Losses are marked in words, and commands are whole.
    """
    columns = ["Work", "On", "Compared with", "Times as fast", "Command"]
    with SPEED.open(newline="") as file:
        table_rows = list(csv.DictReader(file))
    for row in table_rows:
        row["Times as fast"] += " (slower)" if float(row["Times as fast"]) < 1 else ""
        command = row["Command"].strip("`")
        row["Command"] = f"``{'python3 ' if command.startswith('run.py') else 'python -m benchmarks.'}{command}``"
    rows = [[row[column] for column in columns] for row in table_rows]
    readme = (ROOT / "README.rst").read_text()
    (table,) = re.findall(rf":header: {','.join(columns)}\n.*\n\n((?:   .*\n)+)", readme)
    shown = list(csv.reader(textwrap.dedent(table).splitlines()))
    assert 6 <= len(shown) <= 8 and shown == [row for row in rows if row in shown]
    assert "docs/speed.rst" in readme


def test_speed_table_ratios_match_its_figures():
    with SPEED.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["Theirs"] != "\\ "]
    for row in rows:
        figure, other_figure = (float(row[side].split()[0].replace(",", "")) for side in ("Ours", "Theirs"))
        ratio = figure / other_figure if "/s" in row["Ours"] else other_figure / figure
        assert f"{ratio:.2f}" == row["Times as fast"], row


def test_readme_and_front_page_agree():
    rows = (ROOT / "docs" / "who_gains.txt").read_text().partition("\n\n")[2]
    assert len(rows) > 500 and rows in (ROOT / "README.rst").read_text()


@pytest.mark.parametrize(
    "page", [page for page in PAGES if not page.stem.startswith("benchmarks")], ids=lambda page: page.stem
)
def test_commits_and_dates_are_only_in_benchmarks(page):
    matches = re.findall(r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,12}\b|\b202\d-\d\d-\d\d\b", page.read_text())
    assert matches == []


def test_exchange_rules_table_matches_its_picture():
    curves = json.loads((ROOT / "docs" / "exchange_rules.json").read_text())
    table = re.findall(
        r"^([\w ]+?) (?:\(.*\))?((?: +\d+\.\d){4})$", (ROOT / "docs" / "exchange_rules.rst").read_text(), re.M
    )
    assert {name.strip(): row.split() for name, row in table} == {
        name: [f"{100 * curves[f'{name} {period}'][-1][3]:.1f}" for period in (1, 4, 16, 64)]
        for name in ("local SGD", "SlowMo", "DiLoCo", "EASGD", "EAMSGD", "Downpour", "GoSGD")
    }
