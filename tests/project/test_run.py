"""run.py and docs/theano_gpu_bundle.sh exit with a line that names a missing requirement."""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from library import DEVICE

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.any_library, pytest.mark.skipif(DEVICE != "host", reason="once is enough")]


def run(root, *arguments, before=(), **variables):
    """Run a copy of run.py that has no environments; return its exit status and output."""
    for name in ("run.py", "pyproject.toml", "setup.py", "README.rst"):
        shutil.copy(ROOT / name, root / name)
    done = subprocess.run(
        [*before, sys.executable, "run.py", *arguments],
        cwd=root,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    return done.returncode, done.stdout.splitlines()


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


@pytest.mark.slow
def test_run_py_without_a_network_says_so(tmp_path):
    nobody = {
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_RETRIES": "0",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": "",
    }
    status, output = run(tmp_path, "env", "pytensor", **nobody)
    assert status != 0
    assert output[-1].startswith("run.py: no network: pip could not reach the package index. With one, run this again")
    assert all(line.startswith("run.py: ") for line in output), output


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
    assert output[-1].startswith("run.py: no space left on the disk: the two environments in "), output
    assert all(line.startswith("run.py: ") for line in output), output


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Import run.py with stand-in environments, whose interpreters print their arguments, and fail with --fails."""
    spec = importlib.util.spec_from_file_location("run", ROOT / "run.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "run", module)  # dataclasses look it up there
    spec.loader.exec_module(module)
    for name in module.BY_NAME:
        (tmp_path / name / "bin").mkdir(parents=True)
        python = tmp_path / name / "bin" / "python"
        python.write_text('#!/bin/sh\necho "on $SYNKHRONOS_TEST_DEVICE: $*"\ncase "$*" in *--fails*) exit 3; esac\n')
        python.chmod(0o755)
    monkeypatch.setattr(module, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(module, "prepare", lambda name, *extras: module.BY_NAME[name])
    monkeypatch.setattr(module, "NEWEST_PYTHON_FOR_THEANO", sys.version_info[:2])
    return module


def options(**given):
    return argparse.Namespace(**{"env": None, "device": "host", "here": False, "quick": False, "all": False, **given})


def test_run_py_prefixes_lines_of_parallel_jobs(module, capfd):
    assert module.test(options(), ["-k", "nothing", "--fails"]) == 3
    printed = capfd.readouterr().out.splitlines()
    for name in ("pytensor", "theano"):
        (line,) = (line for line in printed if line.startswith(f"{name}, -k nothing --fails: on host: -m pytest "))
        assert line.endswith("-k nothing --fails")
        assert f"{name}, -k nothing --fails: no result, pytest ended with exit status 3" in printed


def test_run_py_prints_failures_at_the_end(module, tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import pytest\n@pytest.fixture\ndef broken(): raise KeyError('no such thing')\n"
        "def test_well(): pass\ndef test_sum(): assert 1 + 1 == 3\ndef test_with(broken): pass\n"
    )
    report = tmp_path / "report.xml"
    pytest_ = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--confcutdir=.",
        f"--junit-xml={report}",
        "test_it.py",
    ]
    assert subprocess.run(pytest_, cwd=tmp_path, capture_output=True).returncode == 1
    failed, broken = module.list_failures(report)
    assert failed.startswith("FAILED test_it::test_sum\n") and "assert (1 + 1) == 3" in failed
    assert broken.startswith("FAILED test_it::test_with\n") and "KeyError: 'no such thing'" in broken
    assert module.describe_counts(report, 1) == "1 passed, 2 failed"
    assert module.list_failures(tmp_path / "none.xml") == []


def test_run_py_prints_a_single_job_unchanged(module, capfd):
    assert module.test(options(device="jax"), []) == 0
    assert capfd.readouterr().out.startswith("on jax: -m pytest ")


@pytest.mark.parametrize("all_of_them", [False, True])
def test_run_py_jobs_run_each_file_once(module, capfd, all_of_them):
    environments = [module.PYTENSOR, module.THEANO, module.PYMC]
    jobs = module.list_jobs(environments, options(all=all_of_them), [])
    slow = "" if all_of_them else " and not slow"
    names = [job.name for job in jobs]
    assert len(set(names)) == len(names)
    assert not all_of_them or set(module.LONGEST) <= set(names)
    named = {path for job in jobs for word in job.arguments for path in [word.removeprefix("--ignore=").split("::")[0]]}
    for path in (path for path in named if path.startswith("tests/")):
        assert (ROOT / path).exists(), path
    for environment, else_ in ((module.PYTENSOR, ""), (module.THEANO, " and not any_library")):
        usual = f"not lasagne and not hosts and not faults{slow}{else_}"
        own = {job.part: job.arguments for job in jobs if job.environment is environment and "-m" in job.arguments}
        parts = {part for part, arguments in own.items() if arguments[1] == usual}
        brief = {"", "compat", *module.PARTS}
        assert parts == (
            brief if environment is module.THEANO and not all_of_them else {*brief, "programs", "lasagne demos"}
        )
        # The files that the job without a name ignores have jobs of their own.
        folders = [path for part in module.PARTS for path in own[part][2:]]
        assert len(set(folders)) == len(folders)
        assert own[""][2:] == [f"--ignore={path}" for path in [*module.PROGRAMS, *folders]]
        marked = {arguments[1] for part, arguments in own.items() if part in ("faults", "hosts")}
        assert marked == ({f"faults{else_}", f"hosts and not faults{else_}"} if all_of_them else set())
        # Files in folders of support/ that the job of their folder leaves out have jobs of their own.
        for folder, part in ((module.COMPAT, "compat"), (module.LASAGNE_DEMOS, "lasagne demos")):
            if part not in parts:
                continue
            assert own[part][-1] == folder
            left_out = {word.removeprefix("--ignore=") for word in own[part] if word.startswith("--ignore=")}
            alone = {word for arguments in own.values() for word in arguments if word.startswith(f"{folder}/")}
            # PyTensor's results are compared with tables of Theano's.
            assert alone == (left_out if all_of_them and environment is module.PYTENSOR else set())
    alone = module.list_jobs([module.THEANO], options(), [])
    assert alone and not any("any_library" in word for job in alone for word in job.arguments)


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
    done = subprocess.run([*script, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout + done.stderr == f"theano_gpu_bundle.sh: {done.stderr.split(': ', 1)[1]}"
    assert words in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("text", "status"), [("(Path(__file__).parent / 'seen').exists()", 0), ("False", 1)])
def test_run_py_retries_failures_alone(module, tmp_path, text, status):
    """A retry runs only the tests that failed, and fails if one fails again."""
    tests = tmp_path / "test_some.py"
    tests.write_text(
        "from pathlib import Path\n"
        f"def test_fails():\n    ok = {text}\n    (Path(__file__).parent / 'seen').touch()\n    assert ok\n"
        "def test_passes():\n    with open(Path(__file__).parent / 'runs', 'a') as file:\n        file.write('x')\n"
    )
    environment = argparse.Namespace(name="this", python=sys.executable)
    # Without confcutdir pytest reads every file in the temporary folder, of which there may be many.
    folders = [f"--rootdir={tmp_path}", f"--confcutdir={tmp_path}"]
    job = module.Job(environment, "", ["-q", *folders, "-c", os.devnull, str(tests)])
    report = tmp_path / "report.xml"
    assert job.run(report, alone=True) == 1
    assert module.count_failures(report) == 1
    assert job.retry(report) == status
    assert (tmp_path / "runs").read_text() == "x"
