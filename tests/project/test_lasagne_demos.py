"""The Lasagne demos, whose tests are in demos/.

Each of its modules runs in a process of its own, since the demos import `synkhronos.compat`, which changes what
``import theano`` finds; the other tests must not see that.  To see one by itself:

    python -m pytest tests/support/demo_checks/check_training.py

The zoo's networks compile for a minute, and the large ones for longer: ``python3 run.py test -m lasagne`` runs these
alone.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
from paths import ROOT, SUPPORT

MODULES = sorted((SUPPORT / "demo_checks").glob("check_*.py"))
ZOO = SUPPORT / "demo_checks" / "check_zoo.py"


def run(module, *options):
    for name in ("lasagne", "tqdm"):
        if importlib.util.find_spec(name) is None:
            pytest.skip("the extra `lasagne` is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(module)]
    flags = os.environ["PYTENSOR_FLAGS"]
    if module.stem == "check_zoo":  # networks that compute for longer than their rewrites take
        flags += ",mode=FAST_COMPILE,linker=auto"
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTENSOR_FLAGS": flags},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("module", [path for path in MODULES if path != ZOO], ids=lambda path: path.stem)
def test_lasagne_demos(module):
    run(module)


@pytest.mark.lasagne
@pytest.mark.timeout(1800)
def test_the_zoo():
    run(ZOO)


@pytest.mark.lasagne
@pytest.mark.timeout(1800)
def test_the_whole_networks_of_the_zoo():
    run(ZOO, "-m", "lasagne", "-o", "timeout=900")
