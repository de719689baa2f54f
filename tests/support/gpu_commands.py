"""Commands, programs and checks that the tests of GPUs share."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from library import ARRAYS, DEVICE, NAME, read_results, shared
from library import tensor as T

import synkhronos as synk
from synkhronos.ranks import Command

#: Marks of a file of tests on GPUs.
ON_GPUS = [pytest.mark.gpu, pytest.mark.skipif(DEVICE != "gpu", reason="needs GPUs")]
needs_real_gpus = pytest.mark.skipif("PRETENDED_GPUS" in os.environ, reason="about what pretended GPUs lack")
needs_jax = pytest.mark.skipif(NAME != "pytensor", reason="about JAX arrays")

RNG = np.random.default_rng(11)
#: Maximal seconds from a fault to its error: a process that has used a GPU takes one or two to exit.
PROMPT = 5


def raise_error():
    raise ArithmeticError("the sum is odd")


FAULTS = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "exit": lambda: os._exit(3),
    "raise": raise_error,
}


def run_program(code, **environment):
    """Run a program in a new process; return its output."""
    path = os.pathsep.join([str(Path(synk.__file__).parent.parent), *sys.path])
    variables = {name: value for name, value in os.environ.items() if name != "JAX_DEFAULT_MATMUL_PRECISION"}
    head = f"import numpy as np, synkhronos as synk, {NAME} as package, {NAME}.tensor as T"
    done = subprocess.run(
        [sys.executable, "-c", f"{head}\n{textwrap.dedent(code)}"],
        env={**variables, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def make_filled_variable(dtype, shape=(3, 5)):
    """Return a variable with different values on two ranks, and the two values."""
    values = [np.asarray(RNG.integers(0, 5, shape)).astype(dtype) for _ in range(2)]
    w = shared(values[0], "w")
    read_results(synk.function([], (w.sum(), None))())
    for rank, value in enumerate(values):
        synk.set_value(rank, w, value)
    return w, values


def check_ranks_work():
    """Check the results of calls and collectives."""
    x = T.dvector("x")
    w = shared(np.ones(3), "w")
    f = synk.function([x], (x.sum(), "sum"), updates=[(w, w + x.sum())])
    assert f(np.array([1.0, 2.0])) == 3
    synk.all_reduce(w, "sum")
    np.testing.assert_array_equal(synk.gather(w), np.full((2, 3), 5.0))


def is_on_gpu(value, expected):
    """Return whether a value is an array on the GPU with these elements."""
    return bool(ARRAYS.owns(value)) and np.array_equal(np.asarray(value), expected)


class SkipAllReduce(Command):
    """Command of an all-reduce that one rank never launches: a fault of `FAULTS` strikes it before."""

    def __init__(self, action, failing_rank):
        self.action, self.failing_rank = action, failing_rank

    def run(self, rank):
        communicator = ARRAYS.get_communicator(rank)
        communicator.connect(rank.all_gather(communicator.generation))
        array = ARRAYS.from_host(np.ones(1 << 20, "float32"))
        if rank.number == self.failing_rank:
            time.sleep(0.1)  # the other ranks have started it
            FAULTS[self.action]()
        communicator.all_reduce(array, "sum")


class FailBeforeCollectives(Command):
    """Command in which one rank fails before any collective."""

    def run(self, rank):
        if rank.number == 1:
            raise_error()
