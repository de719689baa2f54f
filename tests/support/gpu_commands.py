"""Commands, programs and checks that the tests of GPUs and `gpus/programs` share."""

import os
import signal
import time
from dataclasses import dataclass

import numpy as np
import pytest
from library import DEVICE, GPU_DEVICE, NAME, compute_digest, read_results, shared
from library import tensor as T

import synkhronos as synk
from synkhronos import ranks
from synkhronos.devices import get_rank_device
from synkhronos.programs.rank_context import get_rank
from synkhronos.ranks import ArrayLocation, Command

#: Marks of a file of tests on GPUs.
ON_GPUS = [pytest.mark.gpu, pytest.mark.skipif(DEVICE != "gpu", reason="needs GPUs")]
needs_real_gpus = pytest.mark.skipif("FAKE_GPUS" in os.environ, reason="about what fake GPUs lack")
needs_jax = pytest.mark.skipif(NAME != "pytensor", reason="about JAX arrays")

RNG = np.random.default_rng(11)
#: Ranks in the tests of collectives and faults.
N_RANKS = int(os.environ.get("SYNKHRONOS_TEST_RANKS", "2"))
#: Maximal seconds from a fault to its error: a process that has used a GPU takes one or two to exit.
FAULT_LIMIT = 5
#: Seconds for which `make_busy_function` may keep a GPU busy that other processes use, too.
BUSY_LIMIT = 30


def raise_error():
    raise ArithmeticError("the sum is odd")


FAULTS = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "exit": lambda: os._exit(3),
    "raise": raise_error,
}


def make_filled_variable(dtype, shape=(3, 5)):
    """Return a variable with a different value on each rank, and the values."""
    values = [np.asarray(RNG.integers(0, 5, shape)).astype(dtype) for _ in range(ranks.get_session().size)]
    w = shared(values[0], "w")
    read_results(synk.function([], (w.sum(), None))())
    for rank, value in enumerate(values):
        synk.set_value(rank, w, value)
    return w, values


def make_busy_function():
    """Return a function that keeps every rank's GPU busy for some tenths of a second, and does not wait for it."""
    matrix = shared(np.full((4096, 4096), 1 / 4096), "matrix")
    product = matrix
    for _ in range(200):
        product = product.dot(matrix)
    keep_busy = synk.function([], updates=[(matrix, product)])
    keep_busy()  # compiles it
    return keep_busy


def check_ranks_work():
    """Check the results of calls and collectives."""
    x = T.dvector("x")
    w = shared(np.ones(3), "w")
    f = synk.function([x], (x.sum(), "sum"), updates=[(w, w + x.sum())])
    value = np.arange(1.0, 1 + ranks.get_session().size)
    assert f(value) == value.sum()
    synk.all_reduce(w, "sum")
    np.testing.assert_array_equal(synk.gather(w), np.full((len(value), 3), len(value) + value.sum()))


class FailInAllReduce(Command):
    """Command of an all-reduce in which one rank fails by one of `FAULTS`: before its launch, or after it if late."""

    def __init__(self, action, failing_rank, is_late=False, waits_until_started=False):
        self.action, self.failing_rank = action, failing_rank
        self.is_late, self.waits_until_started = is_late, waits_until_started

    def run(self, rank):
        communicator = get_rank_device(rank).get_communicator(rank)
        communicator.connect(rank.all_gather(communicator.generation))
        array = get_rank_device(rank).from_numpy(np.ones(1 << 20, "float32"))
        if rank.number == self.failing_rank and not self.is_late:
            time.sleep(0.1)  # the other ranks have started it
            FAULTS[self.action]()
        communicator.all_reduce(array, "sum")
        if self.waits_until_started:
            communicator.wait_until_started()
        else:
            communicator.notify_started()
        if rank.number == self.failing_rank:
            FAULTS[self.action]()


class FailBeforeCollectives(Command):
    """Command in which one rank fails before any collective."""

    def run(self, rank):
        if rank.number == 1:
            raise_error()


@dataclass(frozen=True)
class AllReduceRows(Command):
    """Command that all-reduces rows times the rank's number plus 1, and returns the ends of each rank's result."""

    op: str
    rows: ArrayLocation

    def run(self, rank):
        device = get_rank_device(rank)
        communicator = device.get_communicator(rank)
        communicator.connect(rank.all_gather(communicator.generation))
        rows = device.to_numpy(device.transfers.read_rows(rank, self.rows, None))
        array = device.from_numpy(rows * (rank.number + 1))
        communicator.all_reduce(array, self.op)
        communicator.wait_until_started()
        result = device.to_numpy(array)
        return rank.all_gather((float(result[1]), float(result[-1])))


def run_in_groups(context):
    """Run collectives in a group, and send between two ranks; return digests of the results."""
    device, n = get_rank_device(get_rank(context)), context.size
    array = device.from_numpy(np.random.default_rng(context.number).integers(-9, 9, 50_000).astype("float32"))
    results = []
    for members in ([0, n - 1], [n - 1, *range(n - 1)]):
        if context.number in members:
            result = context.group(members).all_reduce(array, "sum")
            assert device.owns(result)
            results.append(compute_digest(result))
    for source, target in ((0, n - 1), (n - 1, 0)):
        if context.number == source:
            context.send(array, target)
        elif context.number == target:
            result = context.receive(source)
            assert device.owns(result)
            results.append(compute_digest(result))
    return results


def exchange_arrays(context):
    """Exchange an array on the GPU with the other rank, and all-reduce it; return an element of each result."""
    array = GPU_DEVICE.from_numpy(np.arange(30_000, dtype="float32") + context.number)
    if context.number == 0:
        context.send(array, 1)
    received = context.receive(1 - context.number)
    if context.number == 1:
        context.send(array, 0)
    total = context.group([0, 1]).all_reduce(array, "sum")
    return [float(GPU_DEVICE.to_numpy(array)[7]) for array in (array, received, total) if GPU_DEVICE.owns(array)]
