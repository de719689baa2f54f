"""Commands for `programs`, which workers of other hosts can import.

`InCollective`
    Something goes wrong in a collective on GPUs, or just behind it.
`Reduced`
    An all_reduce of arrays on GPUs, of whatever kind.
"""

import os
import signal
import time
from dataclasses import dataclass

import numpy as np

from synkhronos.ranks import SharedArray


class InCollective:
    """A command: an all_reduce into which one rank does not come."""

    def __init__(self, deed, culprit, meets):
        self.deed, self.culprit, self.meets = deed, culprit, meets

    def run(self, rank):
        device = rank.device
        communicator = device.communicator(rank)
        communicator.connect(rank.exchange(communicator.epoch))
        array = device.from_host(np.ones(1000, "float32"))
        if rank.number == self.culprit and self.deed != "late":
            time.sleep(0.2)  # the others are inside by now
            if self.deed == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("the sum is odd")
        communicator.all_reduce(array, "sum")
        if self.meets:
            communicator.meet()
        else:
            communicator.come()
        if rank.number == self.culprit:
            raise ArithmeticError("the sum is odd")


@dataclass(frozen=True)
class Reduced:
    """A command: an all_reduce of rows times the rank's number and 1; each rank shows the ends of what it has got."""

    op: str
    rows: SharedArray

    def run(self, rank):
        device = rank.device
        communicator = device.communicator(rank)
        communicator.connect(rank.exchange(communicator.epoch))
        rows = device.to_host(device.load(rank, self.rows, None))
        array = device.from_host(rows * (rank.number + 1))
        communicator.all_reduce(array, self.op)
        communicator.meet()
        found = device.to_host(array)
        return rank.exchange((float(found[1]), float(found[-1])))
