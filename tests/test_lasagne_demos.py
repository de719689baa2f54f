"""The Lasagne demos, whose tests are in demos/.

Each of its modules runs in a process of its own, since the demos import `synkhronos.compat`, which changes what
``import theano`` finds; the other tests must not see that.  To see one by itself:

    python -m pytest tests/demos/check_training.py
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
MODULES = sorted((HERE / "demos").glob("check_*.py"))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_lasagne_demos(module):
    for name in ("lasagne", "tqdm"):
        if importlib.util.find_spec(name) is None:
            pytest.skip("the extra `lasagne` is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(module)]
    result = subprocess.run(command, cwd=HERE.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert result.returncode == 0, result.stdout
