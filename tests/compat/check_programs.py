"""Programs of Theano's time (programs/) compute what they did on Theano 1.0.5: the losses of the first steps.

``tests/tables/make_program_losses.py`` wrote the losses, in Theano's environment.
"""

import importlib
import json
import warnings
from pathlib import Path

import numpy as np
import programs
import pytest
import theano

import synkhronos.compat

TABLE = json.loads((Path(__file__).parent / "theano_programs.json").read_text())
if synkhronos.compat.chosen == "theano":
    programs.prepare_theano()
    MODES = ["FAST_COMPILE"]
else:
    # The second is PyTensor's default, in which Numba compiles for minutes: it gets smaller forms, where there are some.
    MODES = ["JAX", pytest.param("Mode", marks=pytest.mark.lasagne)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", programs.NAMES)
def test_a_program_learns_as_on_theano(name, mode):
    if mode == "JAX":
        pytest.importorskip("jax")
    theano.config.floatX, theano.config.mode = "float32", mode
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Skipping Assert")
        smaller = programs.SMALLER.get(name, {}) if mode == "Mode" else {}
        losses = importlib.import_module(f"programs.{name}").run(programs.STEPS, **smaller)
    np.testing.assert_allclose(losses, TABLE[f"{name}, smaller" if smaller else name], rtol=1e-4, atol=1e-4)


def test_every_program_is_listed():
    files = {path.stem for path in Path(programs.__file__).parent.glob("*.py")}
    assert files == {*programs.NAMES, "__init__"}
