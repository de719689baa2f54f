"""Commands and programs for `programs`, which workers of other hosts can import."""

import hashlib
import os
import signal
import time
from dataclasses import dataclass

import numpy as np

from synkhronos.ranks import ArrayLocation, Command


class FailInAllReduce(Command):
    """Command of an all-reduce in which one rank fails: before its launch, or after it if the action is "late"."""

    def __init__(self, action, failing_rank, waits_started):
        self.action, self.failing_rank, self.waits_started = action, failing_rank, waits_started

    def run(self, rank):
        device = rank.device
        communicator = device.get_communicator(rank)
        communicator.connect(rank.all_gather(communicator.generation))
        array = device.from_host(np.ones(1000, "float32"))
        if rank.number == self.failing_rank and self.action != "late":
            time.sleep(0.2)  # the other ranks have started it
            if self.action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("the sum is odd")
        communicator.all_reduce(array, "sum")
        if self.waits_started:
            communicator.wait_until_started()
        else:
            communicator.notify_started()
        if rank.number == self.failing_rank:
            raise ArithmeticError("the sum is odd")


@dataclass(frozen=True)
class AllReduceRows(Command):
    """Command that all-reduces rows times the rank's number plus 1, and returns the ends of each rank's result."""

    op: str
    rows: ArrayLocation

    def run(self, rank):
        device = rank.device
        communicator = device.get_communicator(rank)
        communicator.connect(rank.all_gather(communicator.generation))
        rows = device.to_host(device.load(rank, self.rows, None))
        array = device.from_host(rows * (rank.number + 1))
        communicator.all_reduce(array, self.op)
        communicator.wait_until_started()
        result = device.to_host(array)
        return rank.all_gather((float(result[1]), float(result[-1])))


def run_in_groups(worker):
    """Run collectives in a group, and send between two ranks; return digests of the results."""
    device, n = worker._rank.device, worker.size
    array = device.from_host(np.random.default_rng(worker.number).integers(-9, 9, 50_000).astype("float32"))
    results = []
    for members in ([0, n - 1], [n - 1, *range(n - 1)]):
        if worker.number in members:
            result = worker.group(members).all_reduce(array, "sum")
            assert device.owns(result)
            results.append(compute_digest(result))
    for source, target in ((0, n - 1), (n - 1, 0)):
        if worker.number == source:
            worker.send(array, target)
        elif worker.number == target:
            result = worker.receive(source)
            assert device.owns(result)
            results.append(compute_digest(result))
    return results


def compute_digest(*arrays):
    """Return a digest of arrays."""
    return hashlib.blake2b(b"".join(np.asarray(a).tobytes() for a in arrays), digest_size=8).hexdigest()


def exchange_arrays(worker):
    """Exchange an array on the GPU with the other rank, and all-reduce it; return an element of each result."""
    from synkhronos.devices import PYGPU

    array = PYGPU.from_host(np.arange(30_000, dtype="float32") + worker.number)
    if worker.number == 0:
        worker.send(array, 1)
    received = worker.receive(1 - worker.number)
    if worker.number == 1:
        worker.send(array, 0)
    total = worker.group([0, 1]).all_reduce(array, "sum")
    return [float(PYGPU.to_host(array)[7]) for array in (array, received, total) if PYGPU.owns(array)]
