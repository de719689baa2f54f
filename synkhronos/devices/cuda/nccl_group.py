"""NCCL communicators of some of the ranks.

The members of a group create one at the same point of their programs, by NCCL's init.  Two ranks that send each other
arrays are a group, too: the sender's message has the data to connect, and the receiver does not reply, as its reply
could queue behind unread messages.  So a connected sender must be sure that its receiver is connected.

Invariant: after a failed command, all ranks drop the connections of their groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from synkhronos.devices.cuda.nccl import NCCL_OPS, NcclCommunicator


class NcclGroup(NcclCommunicator):
    """Reduces arrays over a group of ranks, and sends them between two of its members.

    Every operation starts on an idle stream and waits for its result.  The group connects at its first use, and again
    after any command has failed.

    Parameters
    ----------
    parent : NcclCommunicator
        This rank's communicator of all ranks.
    """

    def __init__(self, parent: NcclCommunicator):
        super().__init__(parent._rank, parent._staging, parent._watchdog)

    def connect_members(
        self, members: Sequence[int], generations: Sequence[int], exchange: Callable[[Any], Sequence[Any]]
    ) -> None:
        """Connect the members unless they share a connection.

        Parameters
        ----------
        members : sequence of int
            Ranks in NCCL's order; the first provides the connection's id.
        generations : sequence of int
            Each member's `generation`.
        exchange : callable
            Sends a value to all members, and returns one value per member; only the first one's is used.
        """
        self._wait_idle()
        self._connect_ranks(generations, members, exchange)

    def all_reduce(self, array: Any, op: str) -> bool:
        """Replace every member's array by the reduction over all members, in place, and wait for it."""
        address, count, dtype = self._describe_array(array)
        if count:
            self._run_blocking(
                lambda handle: self._nccl.all_reduce(address, address, count, dtype, NCCL_OPS[op], handle, self._stream)
            )
        return True

    def send(self, array: Any, target: int) -> None:
        """Send an array to a rank, which receives it at the same time."""
        address, count, dtype = self._describe_array(array)
        target = self._connection.members.index(target)
        self._run_blocking(lambda handle: self._nccl.send(address, count, dtype, target, handle, self._stream))

    def receive(self, array: Any, source: int) -> None:
        """Receive an array from a rank, which sends it at the same time, in place."""
        address, count, dtype = self._describe_array(array)
        source = self._connection.members.index(source)
        self._run_blocking(lambda handle: self._nccl.recv(address, count, dtype, source, handle, self._stream))
