"""run.py and docs/theano_gpu_bundle.sh, where something is missing: they end with one line that says what."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from library import DEVICE, NAME

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(DEVICE != "host" or NAME == "theano", reason="once is enough")


def run(root, *arguments, before=(), **variables):
    """Run a copy of run.py that has no environments; return its exit status and what it says."""
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
    ],
)
def test_wrong_arguments_are_told_in_one_line(tmp_path, arguments, line):
    status, said = run(tmp_path, *arguments)
    assert status != 0
    assert len(said) == 1 and said[0].startswith(line), said


def test_without_a_network_it_says_so(tmp_path):
    nobody = {
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_RETRIES": "0",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": "",
    }
    status, said = run(tmp_path, "env", "pytensor", **nobody)
    assert status != 0
    assert said[-1].startswith("run.py: no network: pip could not reach the package index. With one, run this again")
    assert all(line.startswith("run.py: ") for line in said), said


def test_on_a_full_disk_it_says_so(tmp_path):
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
    status, said = run(tmp_path / "copy", "env", "pytensor", before=[*mount, str(full)])
    assert status != 0
    assert said[-1].startswith("run.py: no space left on the disk: the two environments in "), said
    assert all(line.startswith("run.py: ") for line in said), said


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "expected pack FOLDER or install FOLDER"),
        (["unpack", "folder"], "expected pack or install, got unpack"),
        (["install", "folder"], "folder holds no debs and wheels: run pack first"),
    ],
)
def test_the_bundle_is_told_what_is_missing(tmp_path, arguments, words):
    if shutil.which("python3.11") is None:
        pytest.skip("needs Python 3.11")
    script = ["bash", str(ROOT / "docs" / "theano_gpu_bundle.sh")]
    done = subprocess.run([*script, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout + done.stderr == f"theano_gpu_bundle.sh: {done.stderr.split(': ', 1)[1]}"
    assert words in done.stderr and len(done.stderr.splitlines()) == 1
