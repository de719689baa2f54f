"""The connection between the ranks' GPUs: how they meet, and how it is given up.

`Connection`
    NCCL's communicator, and whether it holds.

States on one rank, and who moves it::

    none ──────> meeting ──────────> joining ─────────────────> held
      ^  `make`  the first shows     a thread is in NCCL's        │ `epoch` is not 0,
      │          others an id        init, for 40 s at most       │ the same on all
      │             │                   │                         │
      └─────────────┴───────────────────┴─────────────────────────┘
         `abort`, by any thread: this rank or another has failed, or died;
         it took too long; the guard gives it up; the end

*Meeting* is a step of the command, so that a rank that fails or dies before it ends it for all; where some ranks meet
it is messages between them.  NCCL's init can't be ended: it returns when all ranks are in it, or not at all.  Whoever
is in it looks after the peers meanwhile, and leaves the thread behind when one of them has failed; an attempt that
comes to its end late is aborted there.  So a rank is in NCCL's init only if all will be, or all are told to leave.  A
rank that was told when it had left it already may have an `epoch` that others lack: every collective begins with a
comparison.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from synkhronos.devices.cuda.nccl_log import NcclLog
from synkhronos.devices.cuda.staging import Staging, check
from synkhronos.ranks import Rank
from synkhronos.ranks.interrupts import defer_signals

#: NCCL's numbers for a dtype (ncclUint8) and a reduction (ncclSum).
BYTES, SUM = 1, 0
#: Seconds between two looks at the peers.
LOOK = 0.02
#: Seconds after which it is given up to connect: it takes one or two.
PATIENCE = 40
#: Seconds after which a call of CUDA or NCCL that should return at once is taken to wait for a peer that is gone.
STUCK = 0.5


class Connection:
    """NCCL's communicator among all ranks, or some.

    Parameters
    ----------
    rank : Rank
    staging : Staging
        Knows the GPU.
    stream : int
        On which NCCL is tried.
    holds : ndarray
        As below.

    Attributes
    ----------
    epoch : int
        Counts the connections, alike on all ranks that share one; 0 without any.
    members : tuple of int
        The ranks that share the last one, in NCCL's order.
    calls : threading.RLock
        Held while NCCL is called: it must not lose its connection then.
    holds : ndarray
        One int32, 1 as long as the connection holds: the GPU reads it when it has combined something within a launch.
    """

    def __init__(self, rank: Rank, staging: Staging, stream: int, holds: np.ndarray):
        from nccl.bindings import nccl

        self.nccl = nccl
        self.epoch = 0
        self.calls = threading.RLock()
        self.holds = holds
        self.members: tuple[int, ...] = ()
        self._rank, self._staging, self._stream = rank, staging, stream
        self._comm: Any = None
        self._handle: Any = None
        #: The attempt to connect that counts: an earlier one may come to its end late.
        self._attempt = 0
        self._swap = threading.Lock()

    def make(self, epoch: int, members: Sequence[int], exchange: Callable[[Any], Sequence[Any]]) -> None:
        """Connect ranks; none of them is connected.

        Parameters
        ----------
        epoch : int
            The new connection's, the same on all of them.
        members : sequence of int
            The ranks, in one order on all of them.
        exchange : callable
            Shows them a value; returns theirs, of which the first one's is looked at.

        Raises
        ------
        RuntimeError
            If this rank could not be connected; with several hosts the message says which interfaces NCCL took.
        """
        from nccl.core import get_unique_id

        self.members = tuple(members)
        with NcclLog(self._rank.spans_hosts) as log:
            try:
                mine = bytes(get_unique_id()) if self._rank.number == members[0] else b""
                unique_id, of_first = exchange((mine, log.interface()))[0]
                failure = self._join(unique_id)
                if failure is not None:
                    words = f"{failure}{_where(log.interface(), of_first, members[0])}{log.warnings()}"
                    raise RuntimeError(f"NCCL did not connect the ranks' GPUs: {words}")
            except BaseException:
                self.abort()
                raise
        self.epoch = epoch

    def _join(self, unique_id: bytes) -> str | None:
        """Go into NCCL's init, and return why this rank is not connected; None if it is.

        NCCL blocks while it connects, and a peer that dies meanwhile would keep it for ever: so it does so in a thread,
        which may be left behind.  (A communicator that doesn't block starts a thread for each collective.)
        """
        errors: list[BaseException] = []
        thread = threading.Thread(target=self._connect, args=(self._attempt, unique_id, errors), daemon=True)
        deadline = perf_counter() + PATIENCE
        thread.start()
        while thread.is_alive():
            thread.join(LOOK)
            self._rank.check()
            if perf_counter() > deadline:
                return f"it took longer than {PATIENCE} seconds"
        return f"{type(errors[0]).__name__}: {errors[0]}" if errors else None

    def _connect(self, attempt: int, unique_id: bytes, errors: list[BaseException]) -> None:
        from nccl.core import Communicator, UniqueId

        nccl, stream, size, mine = self.nccl, self._stream, len(self.members), self.members.index(self._rank.number)
        try:
            self._staging.enter()
            comm = Communicator.init(size, mine, UniqueId.from_bytes(unique_id))
            at = comm._comm  # what the bindings take; the class around it looks at every array anew
            room = self._staging.scratch(size)
            with self.calls:
                if not self._take(attempt, comm):
                    comm.abort()
                    return
                # What NCCL sets up at the first collective of each kind, it sets up here.
                nccl.all_reduce(room, room, 1, BYTES, SUM, at, stream)
                nccl.broadcast(room, room, 1, BYTES, 0, at, stream)
                nccl.reduce(room, room, 1, BYTES, SUM, 0, at, stream)
                nccl.group_start()
                for other in range(size):
                    if other != mine:
                        nccl.send(room, 1, BYTES, other, at, stream)
                        nccl.recv(room + other, 1, BYTES, other, at, stream)
                nccl.group_end()
            check(self._staging.driver.cuStreamSynchronize(stream))
        except BaseException as error:
            errors.append(error)

    def _take(self, attempt: int, comm: Any) -> bool:
        """Take what an attempt has brought, unless it was given up meanwhile."""
        with self._swap:
            if attempt != self._attempt:
                return False
            self._comm, self._handle = comm, comm._comm
            self.holds[0] = 1
            return True

    def abort(self) -> None:
        """Give up the connection, or the attempt to connect, and what is on its way."""
        with defer_signals():  # in between nobody knows of the connection, and what waits on it would do so for ever
            with self._swap:  # by one thread alone
                comm, self._comm, self.epoch = self._comm, None, 0
                self._attempt += 1
                self.holds[0] = 0  # before what waits for a peer goes on, and would take what there is for combined
            if comm is not None:
                self._staging.enter()
                is_free = self.calls.acquire(timeout=STUCK)
                try:
                    comm.abort()
                finally:
                    if is_free:
                        self.calls.release()

    @property
    def handle(self) -> Any:
        """What NCCL's functions take, unless the connection was given up since the ranks agreed on it."""
        if self._comm is None:
            self._rank.check()
            raise RuntimeError("the connection between the ranks' GPUs was given up")
        return self._handle

    def error(self) -> int | None:
        """Return what went wrong meanwhile, as an ncclResult_t; None if nothing has."""
        with self.calls:
            if self._comm is None:
                return None
            state: int = self.nccl.comm_get_async_error(self._handle)
        return None if state in (0, 7) else state  # success, in progress


def _where(mine: str, of_first: str, first: int) -> str:
    """Say by which interfaces this rank has tried to reach the first one, if that is known."""
    if not (mine and of_first):
        return ""
    return (
        f". NCCL took the network interface {mine} here, and {of_first} on rank {first}, which all ranks have to "
        "reach; NCCL_SOCKET_IFNAME names the one to take, for all hosts"
    )
