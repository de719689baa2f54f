"""Programs of Theano's time (programs/) compute the same losses in their first steps as on Theano 1.0.5.

``tests/support/tables/make_theano_tables.py programs`` wrote the losses, in Theano's environment.
"""

import importlib
import json
import warnings
from pathlib import Path

import numpy as np
import programs
import pytest
import theano
import theano_convolutions  # noqa: F401 - compiles them in C on Theano

import synkhronos.compat

TABLE = json.loads((Path(__file__).parent / "theano_programs.json").read_text())
if synkhronos.compat.library == "theano":
    MODES = ["FAST_COMPILE"]
else:
    from pytensor.compile.mode import Mode, get_mode

    # Both get smaller forms, where there are some.
    MODES = ["JAX", "Mode"]
    #: The graphs that PyTensor's default mode gives to Numba, run by Python. Numba would compile for minutes, and
    #: Python's Elemwise has at most 32 inputs, so operations are not fused.
    REWRITTEN = Mode(linker="py", optimizer=get_mode("NUMBA").provided_optimizer).excluding("fusion")
    #: Modes of programs that draw random numbers, which Python's linker refuses after all of these rewrites. Numba
    #: compiles one program; of a network with convolutions (test_ops.py has their Numba) it would compile for a minute.
    MODES_WITH_RANDOM_NUMBERS = {"autoencoder": "Mode", "vgg": REWRITTEN.excluding("numba", "random_make_inplace")}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", programs.NAMES)
def test_program_losses_equal_theano(name, mode):
    if mode == "JAX":
        pytest.importorskip("jax")
    theano.config.floatX = "float32"
    theano.config.mode = MODES_WITH_RANDOM_NUMBERS.get(name, REWRITTEN) if mode == "Mode" else mode
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Skipping Assert")
        smaller = {} if mode == "FAST_COMPILE" else programs.SMALLER.get(name, {})
        losses = importlib.import_module(f"programs.{name}").run(programs.STEPS, **smaller)
    np.testing.assert_allclose(losses, TABLE[f"{name}, smaller" if smaller else name], rtol=1e-4, atol=1e-4)


def test_programs_are_all_listed():
    files = {path.stem for path in Path(programs.__file__).parent.glob("*.py")}
    assert files == {*programs.NAMES, "__init__"}
