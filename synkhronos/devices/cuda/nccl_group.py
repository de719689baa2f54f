"""NCCL communicators of groups of ranks.

The members of a group connect at the same point of their programs, by NCCL's init.  A sender and its receiver are a
group, too.  The sender's message contains the data to connect.  The receiver does not reply, since its reply could be
queued behind unread messages.  So a connected sender has to know that its receiver is connected.

Invariant: after a failed command, all ranks drop the connections of their groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from synkhronos.devices.cuda.nccl import NCCL_OPS, NcclCommunicator
from synkhronos.variable_types import Array


class NcclGroupCommunicator(NcclCommunicator):
    """Communicator of a group of ranks: all-reduces, and messages between two members.

    Every operation starts on an idle stream and waits for completion.  The group connects at its first use, and again
    after any command has failed.  It uses the watchdog of ``parent``, this rank's communicator of all ranks.
    """

    def __init__(self, parent: NcclCommunicator):
        super().__init__(parent._rank, parent._staging, watchdog=parent._watchdog)

    def connect_members(
        self, members: Sequence[int], generations: Sequence[int], all_gather: Callable[[Any], Sequence[Any]]
    ) -> None:
        """Connect the members, unless their ``generations`` show that they share a connection.

        ``members`` are ranks in NCCL's order, of which the first one provides the connection's id; ``all_gather`` is as
        in `NcclConnection.connect`.
        """
        self._wait_for_earlier_work()
        self._connect_ranks(generations, members, all_gather)

    def all_reduce(self, array: Array, op: str) -> None:
        """Replace every member's array by the reduction over all members, in place, and wait for completion."""
        address, count, dtype = self._prepare_buffer(array)
        if count:
            self._run_blocking(
                lambda handle: self._nccl.all_reduce(address, address, count, dtype, NCCL_OPS[op], handle, self._stream)
            )

    def send(self, array: Array, dest: int) -> None:
        """Send an array to a rank, and wait until the rank has received it."""
        address, count, dtype = self._prepare_buffer(array)
        nccl_rank = self._connection.members.index(dest)
        self._run_blocking(lambda handle: self._nccl.send(address, count, dtype, nccl_rank, handle, self._stream))

    def receive(self, array: Array, source: int) -> None:
        """Receive an array from a rank, in place, and wait for completion."""
        address, count, dtype = self._prepare_buffer(array)
        nccl_rank = self._connection.members.index(source)
        self._run_blocking(lambda handle: self._nccl.recv(address, count, dtype, nccl_rank, handle, self._stream))
