"""What some of the ranks do alone on their GPUs, over NCCL.

`NcclGroup`
    Combines arrays of some ranks; of two, sends them from one to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from synkhronos.devices.cuda.nccl import OPS, NcclCommunicator


class NcclGroup(NcclCommunicator):
    """Combines arrays of some ranks, and sends them: begun when nothing else is under way, and waited for.

    It connects when the ranks meet the first time, and anew after a failure of whatever command.

    Parameters
    ----------
    of_all : NcclCommunicator
        The rank's communicator of all ranks.
    """

    def __init__(self, of_all: NcclCommunicator):
        super().__init__(of_all._rank, of_all._staging, of_all._guard)

    def join(self, members: Sequence[int], epochs: Sequence[int], exchange: Callable[[Any], Sequence[Any]]) -> None:
        """Connect some ranks anew, unless all of them have the same connection.

        Parameters
        ----------
        members : sequence of int
            The ranks; the first one says how to connect.
        epochs : list of int
            Each member's `epoch`.
        exchange : callable
            Shows the members a value; returns theirs, of which the first one's is looked at.
        """
        self._await_others()
        self._connect(epochs, members, exchange)

    def all_reduce(self, array: Any, op: str) -> bool:
        """Replace every member's array by the reduction of all members', which is there then."""
        at, count, dtype = self._span(array)
        if count:
            self._do(lambda handle: self._nccl.all_reduce(at, at, count, dtype, OPS[op], handle, self._stream))
        return True

    def send(self, array: Any, to: int) -> None:
        """Send an array to a rank, which receives it now."""
        at, count, dtype = self._span(array)
        to = self._connection.members.index(to)
        self._do(lambda handle: self._nccl.send(at, count, dtype, to, handle, self._stream))

    def receive(self, array: Any, source: int) -> None:
        """Receive into an array what a rank sends now."""
        at, count, dtype = self._span(array)
        source = self._connection.members.index(source)
        self._do(lambda handle: self._nccl.recv(at, count, dtype, source, handle, self._stream))
