"""run.py divides the tests into jobs and reports their failures.

It, and docs/theano_gpu_bundle.sh, exit with a line that names a wrong argument or a missing requirement.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from library import DEVICE
from paths import ROOT

pytestmark = [pytest.mark.skipif(DEVICE != "host", reason="run.py does not depend on the device")]


def run(root, *arguments, before=(), **variables):
    """Run a copy of run.py that has no environments; return its exit status and output."""
    for name in ("run.py", "pyproject.toml", "setup.py", "README.rst"):
        shutil.copy(ROOT / name, root / name)
    process = subprocess.run(
        [*before, sys.executable, "run.py", *arguments],
        cwd=root,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    return process.returncode, process.stdout.splitlines()


@pytest.mark.parametrize(
    "arguments, line",
    [
        ([], "run.py: expected a command, such as mnist, demo or test; see python3 run.py --help"),
        (["nope"], "run.py: argument COMMAND: invalid choice: 'nope' (choose from "),
        (["lint", "--fast"], "run.py: unrecognized arguments: --fast; see "),
        (["demo"], "run.py: the following arguments are required: script; see python3 run.py demo --help"),
        (["demo", "9"], "run.py: there is no demo '9'; there are: "),
        (["bench", "nope"], "run.py: there is no benchmark 'nope'; there are: "),
        (["env", "jax"], "run.py: argument name: invalid choice: 'jax'"),
        (["test", "--device", "tpu"], "run.py: argument --device: invalid choice: 'tpu'"),
        (["test", "--all", "-k", "rows"], "run.py: --all takes no further arguments but --env."),
    ],
)
def test_run_py_argument_errors_are_one_line(tmp_path, arguments, line):
    status, output = run(tmp_path, *arguments)
    assert status != 0
    assert len(output) == 1 and output[0].startswith(line), output


def test_run_py_on_a_full_disk_says_so(tmp_path):
    mount = [
        "unshare",
        "-rm",
        "sh",
        "-c",
        'mount -t tmpfs -o size=600k tmpfs "$0" && cp * "$0" && cd "$0" && exec "$@"',
    ]
    full = tmp_path / "full"
    full.mkdir()
    if subprocess.run([*mount, str(full), "true"], cwd=ROOT / "docs", capture_output=True).returncode:
        pytest.skip("no file system may be mounted here")
    (tmp_path / "copy").mkdir()
    status, output = run(tmp_path / "copy", "env", "pytensor", before=[*mount, str(full)])
    assert status != 0
    assert output[-1].startswith("run.py: no space left on the disk: the three environments in "), output
    assert all(line.startswith("run.py: ") for line in output), output


@pytest.fixture
def run_py(tmp_path, monkeypatch):
    """Import run.py with fake environments, whose interpreters print their arguments, and fail with --fails."""
    spec = importlib.util.spec_from_file_location("run", ROOT / "run.py")
    run_py = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "run", run_py)  # dataclasses look it up there
    spec.loader.exec_module(run_py)
    for name in run_py.ENVIRONMENTS_BY_NAME:
        (tmp_path / name / "bin").mkdir(parents=True)
        python = tmp_path / name / "bin" / "python"
        python.write_text('#!/bin/sh\necho "on $SYNKHRONOS_TEST_DEVICE: $*"\ncase "$*" in *--fails*) exit 3; esac\n')
        python.chmod(0o755)
    monkeypatch.setattr(run_py, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(run_py, "prepare_environment", lambda environment, *extras: environment)
    monkeypatch.setattr(run_py, "NEWEST_PYTHON_FOR_THEANO", sys.version_info[:2])
    return run_py


@pytest.mark.parametrize(
    ("printed", "line"),
    [
        ("ERROR: No matching distribution found (from versions: none)", "no network: pip could not reach"),
        ("OSError: [Errno 28] No space left on device", "no space left on the disk: "),
        ("/usr/bin/python3: No module named ensurepip", "could not make a virtual environment: "),
        ("error: subprocess-exited-with-error", "could not install the packages; the messages of sh are above"),
    ],
)
def test_run_py_names_the_cause_of_a_failed_installation(run_py, printed, line):
    with pytest.raises(SystemExit, match=f"^run.py: {line}"):
        run_py.run_installer(["sh", "-c", 'echo "$0"; exit 1', printed])


def make_options(**values):
    """Return the parsed options of ``run.py test``: the defaults, but for these values."""
    return argparse.Namespace(**{"env": None, "device": "host", "here": False, "quick": False, "all": False, **values})


def test_run_py_prefixes_lines_of_parallel_jobs(run_py, capfd):
    assert run_py.test(make_options(), ["-k", "nothing", "--fails"]) == 3
    printed = capfd.readouterr().out.splitlines()
    for name in ("pytensor", "theano"):
        (line,) = (line for line in printed if line.startswith(f"{name}, -k nothing --fails: on host: -m pytest "))
        assert line.endswith("-k nothing --fails")
        assert f"{name}, -k nothing --fails: no result, pytest ended with exit status 3" in printed


def test_run_py_prints_failures_at_the_end(run_py, tmp_path):
    (tmp_path / "test_three.py").write_text(
        "import pytest\n@pytest.fixture\ndef broken(): raise KeyError('no such thing')\n"
        "def test_well(): pass\ndef test_sum(): assert 1 + 1 == 3\ndef test_with(broken): pass\n"
    )
    report = tmp_path / "report.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--confcutdir=.",
        f"--junit-xml={report}",
        "test_three.py",
    ]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 1
    failed, broken = run_py.list_failures(report)
    assert failed.startswith("FAILED test_three::test_sum\n") and "assert (1 + 1) == 3" in failed
    assert broken.startswith("FAILED test_three::test_with\n") and "KeyError: 'no such thing'" in broken
    assert run_py.describe_counts(report, 1) == "1 passed, 2 failed"
    assert run_py.list_failures(tmp_path / "none.xml") == []


def test_run_py_prints_a_single_job_unchanged(run_py, capfd):
    assert run_py.test(make_options(device="jax"), []) == 0
    assert capfd.readouterr().out.startswith("on jax: -m pytest ")


def make_interpreter(path, line):
    """Make a fake Python, whose answer is a line of shell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return str(path)


def test_run_py_finds_the_newest_python_that_runs(run_py, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(run_py, "NEWER_PYTHONS", (99, 98, 97, sys.version_info[1]))
    make_interpreter(tmp_path / "bin" / f"python3.{sys.version_info[1]}", f"echo 3.{sys.version_info[1]}.0")
    assert run_py.find_newer_environment() is None
    make_interpreter(tmp_path / "bin" / "python3.99", "exit 127")  # as pyenv's for a version that is not chosen
    make_interpreter(tmp_path / "bin" / "python3.97", "echo 3.97.0")
    newest = make_interpreter(tmp_path / ".pyenv" / "versions" / "3.98.1" / "bin" / "python", "echo 3.98.1")
    environment = run_py.find_newer_environment()
    assert environment == run_py.Environment("pytensor-3.98", newest)
    jobs = run_py.list_jobs([environment], make_options(all=True), [])
    assert [(job.name, job.device) for job in jobs] == [("pytensor-3.98", "host"), ("pytensor-3.98, jax", "jax")]
    assert [job.arguments for job in jobs] == [run_py.NEWER, run_py.NEWER_ON_JAX]


@pytest.mark.parametrize("is_all", [False, True])
def test_run_py_jobs_have_unique_names_and_existing_files(run_py, is_all):
    jobs = run_py.list_jobs([run_py.PYTENSOR, run_py.THEANO, run_py.PYMC, run_py.BAMBI], make_options(all=is_all), [])
    names = [job.name for job in jobs]
    assert len(set(names)) == len(names)
    assert not is_all or set(run_py.LONGEST_JOBS) <= set(names)
    words = [*run_py.NEWER, *run_py.NEWER_ON_JAX, *(word for job in jobs for word in job.arguments)]
    paths = {word.removeprefix("--ignore=").split("::")[0] for word in words}
    missing = [path for path in paths if path.startswith("tests/") and not (ROOT / path).exists()]
    assert any(path.startswith("tests/") for path in paths) and missing == []


TEST_FILES = {str(file.relative_to(ROOT)) for file in ROOT.glob("tests/*/test_*.py")}


def list_collected_files(job):
    """Return the paths of the test files that a job's pytest collects."""
    paths = {word for word in job.arguments if word.startswith("tests/")}
    ignored = {word.removeprefix("--ignore=") for word in job.arguments if word.startswith("--ignore=")}
    if not paths:
        paths, ignored = {"tests"}, ignored | {"tests/compat", "tests/lasagne_demos", "tests/update_rules_optax"}
    parents = {file: {file, *map(str, Path(file).parents)} for file in TEST_FILES}
    return {file for file in TEST_FILES if parents[file] & paths and not parents[file] & ignored}


@pytest.mark.parametrize("is_all", [False, True])
@pytest.mark.parametrize("name", ["PYTENSOR", "THEANO"])
def test_run_py_jobs_of_a_library_collect_each_file_once(run_py, name, is_all):
    jobs = {job.part: job for job in run_py.list_library_jobs(getattr(run_py, name), is_all)}
    marked = {part: jobs.pop(part).arguments[1] for part in ("faults", "hosts") if part in jobs}
    assert marked == ({"faults": "faults", "hosts": "hosts and not faults"} if is_all else {})
    expressions = {job.arguments[1] for part, job in jobs.items() if part not in run_py.COMPILING_TESTS}
    assert expressions == {"not hosts and not faults" + ("" if is_all else " and not slow")}
    left_out = {file for file in TEST_FILES if file.startswith(run_py.OPTAX_TESTS)}  # in PyMC's environment
    left_out |= set() if is_all else set(run_py.COMPILING_TESTS.values())
    collected = [file for job in jobs.values() for file in list_collected_files(job)]
    assert sorted(collected) == sorted(TEST_FILES - left_out)


@pytest.mark.parametrize("is_all", [False, True])
def test_run_py_theano_runs_a_selection_beside_pytensor(run_py, is_all):
    jobs = run_py.list_jobs([run_py.PYTENSOR, run_py.THEANO], make_options(all=is_all), [])
    files = [file for job in jobs if job.environment is run_py.THEANO for file in list_collected_files(job)]
    assert 20 < len(set(files)) == len(files) < len(TEST_FILES) / 3


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "expected pack FOLDER or install FOLDER"),
        (["unpack", "folder"], "expected pack or install, got unpack"),
        (["install", "folder"], "folder holds no debs and wheels: run pack first"),
    ],
)
def test_bundle_script_names_missing_arguments(tmp_path, arguments, words):
    if shutil.which("python3.11") is None:
        pytest.skip("needs Python 3.11")
    script = ["bash", str(ROOT / "docs" / "theano_gpu_bundle.sh")]
    process = subprocess.run([*script, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == 1
    assert process.stdout + process.stderr == f"theano_gpu_bundle.sh: {process.stderr.split(': ', 1)[1]}"
    assert words in process.stderr and len(process.stderr.splitlines()) == 1


@pytest.mark.parametrize(("condition", "status"), [("(Path(__file__).parent / 'retried').exists()", 0), ("False", 1)])
def test_run_py_retries_failures_alone(run_py, tmp_path, condition, status):
    """A retry runs only the tests that failed, and fails if one fails again."""
    tests = tmp_path / "test_two.py"
    tests.write_text(
        "from pathlib import Path\n"
        f"def test_fails():\n    passes = {condition}\n    (Path(__file__).parent / 'retried').touch()\n    assert passes\n"
        "def test_passes():\n    with open(Path(__file__).parent / 'runs', 'a') as file:\n        file.write('x')\n"
    )
    environment = argparse.Namespace(name="this", python=sys.executable)
    # Without confcutdir pytest reads every file in the temporary folder, of which there may be many.
    folders = [f"--rootdir={tmp_path}", f"--confcutdir={tmp_path}"]
    job = run_py.Job(environment, "", ["-q", *folders, "-c", os.devnull, str(tests)])
    report = tmp_path / "report.xml"
    assert job.run(report, alone=True) == 1
    assert run_py.count_failures(report) == 1
    assert job.retry(report) == status
    assert (tmp_path / "runs").read_text() == "x"
