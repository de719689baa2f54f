"""``synkhronos.compat``, whose tests are in compat/.

Each of its modules runs in a process of its own, since `synkhronos.compat` changes what ``import theano`` finds; the
other tests must not see that.  To see one by itself:

    python -m pytest tests/support/compat_checks/check_ops.py

Lasagne's own tests are downloaded and take minutes. Programs of Theano's time compile large networks. ``python3 run.py
test -m lasagne`` runs these alone.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT, SUPPORT

MODULES = sorted(path.stem for path in (SUPPORT / "compat_checks").glob("check_*.py"))
NEEDS = {
    "check_cases": "pytensor",
    "check_examples": "pytensor",
    "check_hook": "pytensor",
    "check_lengths": "jax",
    "check_ops": "jax",
    "check_precision": "jax",
    "check_streams": "jax",
}
SUITE, PROGRAMS = "check_lasagne", "check_programs"
#: What its functions compute is looked at after PyTensor's rewrites and its own; the last two are what PyTensor has by
#: default, for what asks for its default mode.
REWRITTEN = "mode=FAST_COMPILE,linker=auto,optimizer=o4"


def run(module, selection="not lasagne", flags="", **variables):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "timeout=1800"]
    result = subprocess.run(
        [*command, "-rs", "-m", selection, f"tests/support/compat_checks/{module}.py"],
        cwd=ROOT,
        env={**os.environ, "PYTENSOR_FLAGS": f"{os.environ['PYTENSOR_FLAGS']},{REWRITTEN}{flags}", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode in (0, 5), result.stdout
    if "SKIPPED" in result.stdout:
        pytest.skip(next(line for line in result.stdout.splitlines() if line.startswith("SKIPPED")))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("module", [name for name in MODULES if name not in (SUITE, PROGRAMS)])
def test_compat(module):
    needed = NEEDS.get(module)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"about {needed}, which is not installed")
    run(module)


@pytest.mark.lasagne
@pytest.mark.timeout(1800)
def test_lasagnes_own_tests():
    run(SUITE)


@pytest.mark.lasagne
@pytest.mark.timeout(1800)
def test_programs_of_theanos_time():
    run(PROGRAMS)


@pytest.mark.lasagne
@pytest.mark.timeout(1800)
def test_programs_in_the_default_mode():
    # LLVM compiles for as long as the rest of Numba, and its last optimizations are not what is looked at: what it makes
    # without them is kept by itself, away from what users' programs load.
    folder = Path.home() / ".pytensor" / "synkhronos-tests"
    run(PROGRAMS, "lasagne", f",base_compiledir={folder}", NUMBA_OPT="1")
