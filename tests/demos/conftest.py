"""Makes the demos' modules importable, and Theano's convolutions fast to test."""

import sys
from pathlib import Path

import pytest

import synkhronos.compat  # before anything imports theano

DEMOS = Path(__file__).resolve().parents[2] / "demos"
sys.path[1:1] = [str(DEMOS / folder) for folder in ("", "mnist", "lasagne_mnist", "resnet")]


def compile_always(operation):
    """Have an operation compiled, even in the mode FAST_COMPILE, which uses Python's versions of all others."""
    make_thunk = operation.make_thunk

    def make_compiled(self, node, storage_map, compute_map, no_recycling, impl=None):
        return make_thunk(self, node, storage_map, compute_map, no_recycling, impl="c")

    operation.make_thunk = make_compiled


if synkhronos.compat.chosen == "theano":
    from theano.tensor.nnet import corr
    from theano.tensor.signal import pool

    # The first have no Python version, the second have one that NumPy 1.23 refuses.
    for operation in (corr.BaseCorrMM, pool.Pool, pool.PoolGrad):
        compile_always(operation)


@pytest.fixture
def float64():
    """Use double precision, for numerical gradients."""
    from lasagne_tools.library import theano

    theano.config.floatX = "float64"
    yield
    theano.config.floatX = "float32"
