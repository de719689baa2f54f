"""Collectives between GPUs, over NCCL.

`NcclCommunicator`
    Combines arrays where they lie.

NCCL's work goes to the stream on which the arrays are computed, behind what computes them.  An all_reduce is not waited
for, since what is put on the stream later comes after it.  Other collectives begin on an idle stream, and are waited
for, with a look at the peers from time to time.  What a peer that has failed or died would leave waiting for ever is
aborted.

For a small all_reduce on an idle stream a moment is waited all the same: it is there sooner than JAX has launched what
tells it that the array will be.

How ranks are connected is told in `connection`, who gives up what is under way in `guard`, what some of the ranks do
alone in `group`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from time import perf_counter
from typing import Any

import numpy as np

from synkhronos.devices.cuda.connection import BYTES, LOOK, Connection
from synkhronos.devices.cuda.guard import PAUSE, Guard
from synkhronos.devices.cuda.staging import Items, Staging, check
from synkhronos.devices.host import Layout
from synkhronos.devices.reductions import REDUCTIONS
from synkhronos.ranks import Rank

#: NCCL's numbers for dtypes (ncclDataType_t), by NumPy's and JAX's names.
NUMBERS = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
#: NCCL's numbers for reductions; the others don't come here.
OPS = {name: row.nccl for name, row in REDUCTIONS.items() if row.nccl is not None}
#: Bytes up to which an all_reduce takes no longer than a launch, and the seconds in which it is there.
_SMALL, _SOON = 1 << 16, 50e-6
#: Items on the GPU: where they are, where their combination goes (maybe there too), how many, and their dtype's name.
Piece = tuple[int, int, int, str]


@cache
def number_of(dtype: np.dtype) -> int | None:
    """Return NCCL's number for a dtype, None if it has none."""
    return NUMBERS.get(str(dtype))  # to make the name takes longer than all that is done with it


class NcclCommunicator:
    """Combines arrays on GPUs.

    Connected at its first use, and anew after a failure in the middle of a collective, which ends in an abort on the
    ranks that were in it: every collective begins with a look whether all ranks still have the same connection.

    Parameters
    ----------
    rank : Rank
    staging : Staging
        Knows the arrays and the GPU.
    guard : Guard, optional
        Of the communicator of all ranks, if this is not that one.
    """

    def __init__(self, rank: Rank, staging: Staging, guard: Guard | None = None):
        self._rank = rank
        self._staging = staging
        self._arrays = staging.arrays
        self._stream = staging.handle if staging.arrays.stream is None else staging.arrays.stream
        self._connection = Connection(rank, staging, self._stream, np.zeros(1, np.int32) if guard else staging.page)
        self._nccl, self._calls = self._connection.nccl, self._connection.calls
        if guard is None:
            guard = Guard(rank, staging, self._connection, self._stream)
            # What waits for a dead rank keeps the GPU busy, and whatever is to be freed there waits for it.
            rank.pending.append(guard)
        else:
            guard.connections.append(self._connection)
        self._guard = guard
        #: Whether something is under way beside the arrays' stream, for which that one does not wait yet.
        self._has_begun = False

    @property
    def epoch(self) -> int:
        """Counts the connections, alike on all ranks that share one; 0 without any."""
        return self._connection.epoch

    def connect(self, epochs: Sequence[int]) -> None:
        """Connect all ranks anew, unless all have the same connection.

        Parameters
        ----------
        epochs : list of int
            Each rank's `epoch`.
        """
        self._connect(epochs, range(self._rank.size), self._rank.exchange)

    def _connect(self, epochs: Sequence[int], members: Sequence[int], exchange: Callable[[Any], Sequence[Any]]) -> None:
        if self.epoch and set(epochs) == {self.epoch}:
            return
        self._guard.abort(self._connection)
        self._staging.enter()
        # What was put on the stream before has its own time.
        self._wait()
        self._connection.make(max(epochs) + 1, members, exchange)

    def meet(self, look: Callable[[], None] | None = None) -> None:
        """Wait until every rank has started what this one has; ``look`` is called now and then, and may raise."""
        self._guard.meet(look)

    def come(self) -> None:
        """Tell the others that this rank has started what it has: at the end of a command, in the place of `meet`."""
        self._guard.come()

    def broadcast(self, array: Any, root: int) -> None:
        """Copy the root's array into every other rank's, in place."""
        at, count, dtype = self._span(array)
        if count:
            self._do(lambda handle: self._nccl.broadcast(at, at, count, dtype, root, handle, self._stream))

    def all_reduce(self, array: Any, op: str) -> bool:
        """Replace every rank's array by the reduction of all ranks', and return whether it is there."""
        at, count, dtype = self._span(array)
        if not count:
            return True
        self._staging.enter()
        is_quick = count * array.dtype.itemsize <= _SMALL and self._guard.is_done()
        self._guard.leaves_wrong = True
        self._guard.started(self._connection)
        with self._calls:
            self._nccl.all_reduce(at, at, count, dtype, OPS[op], self._connection.handle, self._stream)
        if self._arrays.stream is None:
            self._wait()
        return is_quick and self._is_soon_there()

    def _is_soon_there(self) -> bool:
        """Wait a moment for the stream, and return whether all that was put on it has come to its end."""
        driver, deadline = self._staging.driver, perf_counter() + _SOON
        while (result := driver.cuStreamQuery(self._stream)[0]) != driver.CUresult.CUDA_SUCCESS:
            if result != driver.CUresult.CUDA_ERROR_NOT_READY or perf_counter() > deadline:
                return False
        if not self.epoch:  # it was given up: what is there is of no meaning
            return False
        self._guard.leaves_wrong = False
        return True

    def start_within(self, spans: Sequence[Piece], op: str, stream: int) -> None:
        """Begin to combine items on the GPU when a stream has come to here, beside what it does next.

        Parameters
        ----------
        spans : list of Span
        op : str
        stream : int
        """
        self._follow(self._staging.beside, stream)
        self._has_begun = True
        self._combine(spans, op, self._staging.beside)

    def all_reduce_within(self, spans: Sequence[Piece], op: str, counts: int, stream: int) -> None:
        """Combine items on the GPU in the middle of what is being put on a stream, and wait there for what was begun.

        Parameters
        ----------
        spans, op, stream
            As for `start_within`.
        counts : int
            Where on the GPU an int32 goes when that has been done: 1, or 0 if the connection was given up before. Then
            what is at the targets is of no meaning.
        """
        self.wait_within(stream)
        self._combine(spans, op, stream)
        check(self._staging.driver.cuMemcpyAsync(counts, self._connection.holds.ctypes.data, 4, stream))

    def wait_within(self, stream: int) -> None:
        """Have a stream wait for what was begun."""
        if self._has_begun:
            self._has_begun = False
            self._follow(stream, self._staging.beside)

    def _combine(self, spans: Sequence[Piece], op: str, stream: int) -> None:
        guard = self._guard
        if guard.leaves_wrong and not guard.is_lost and guard.is_done():
            guard.leaves_wrong = False
        guard.started(self._connection)
        with self._calls:
            handle = self._connection.handle  # XLA has made the GPU this thread's already
            for source, target, count, dtype in spans:
                self._nccl.all_reduce(source, target, count, NUMBERS[dtype], OPS[op], handle, stream)

    def _follow(self, stream: int, other: int) -> None:
        """Have a stream wait for what is on another one by now."""
        driver = self._staging.driver
        check(driver.cuEventRecord(self._staging.event, other))
        check(driver.cuStreamWaitEvent(stream, self._staging.event, 0))

    def reduce(
        self, array: Any, op: str, root: int, out: Any | None, layout: Layout, contributors: Sequence[int]
    ) -> None:
        """Write the reduction of all ranks' arrays into the root's ``out``."""
        assert len(contributors) == self._rank.size
        at, count, dtype = self._span(array)
        if count:
            to = at if out is None else self._span(out)[0]
            self._do(lambda handle: self._nccl.reduce(at, to, count, dtype, OPS[op], root, handle, self._stream))

    def gather(
        self, array: Any, root: int | None, layouts: Sequence[Layout | None], out: Sequence[Any | None] | None
    ) -> None:
        """Copy rank r's array into ``out[r]`` on the root, or on every rank if ``root`` is None."""
        here, everyone = self._rank.number, range(self._rank.size)
        takers = everyone if root is None else [root]
        at, count, _ = self._span(array)
        size = count * array.dtype.itemsize
        parts: list[Items | None] = list(out) if out is not None else [None] * self._rank.size
        own = parts[here]

        def exchange(handle: Any) -> None:
            if own is not None and size:
                check(self._staging.driver.cuMemcpyAsync(own.pointer, at, size, self._stream))
            self._nccl.group_start()
            try:
                for r in takers:
                    if r != here and size:
                        self._nccl.send(at, size, BYTES, r, handle, self._stream)
                for r, part in enumerate(parts):
                    if part is not None and r != here and part.nbytes:
                        self._nccl.recv(part.pointer, part.nbytes, BYTES, r, handle, self._stream)
            finally:
                self._nccl.group_end()

        self._do(exchange)

    def _do(self, call: Callable[[Any], None]) -> None:
        """Have NCCL do something that all its ranks come to, and wait until it is done; what is raised gives it up."""
        self._await_others()
        try:
            self._guard.started(self._connection)
            with self._calls:
                call(self._connection.handle)
            self._wait()
            _ = self._connection.handle  # unless it was given up meanwhile: what is there has no meaning then
        except BaseException:
            self._guard.abort(self._connection)
            raise
        self._guard.done_here(self._connection)

    def _await_others(self) -> None:
        """Wait until what was put on the stream before is done; it is not given up here."""
        self._staging.enter()
        self._wait(self._rank.check)

    def _span(self, array: Any) -> tuple[int, int, int | None]:
        """Return an array's address, its number of items, and NCCL's number for its dtype."""
        if self._arrays.stream is None:
            self._arrays.wait_for(array)
        return self._arrays.pointer(array), array.size, number_of(array.dtype)

    def _wait(self, see: Callable[[], None] | None = None) -> None:
        """Wait for the stream, and watch the peers; by default abort what is under way if one has failed or died."""
        see = see or self._look
        start = look = perf_counter()
        while not self._guard.is_done():
            now = perf_counter()
            if now > look + LOOK:
                see()
                look = now
            if now > start + LOOK:
                time.sleep(PAUSE)
        check(self._staging.driver.cuStreamQuery(self._stream))
        if not self._guard.is_lost:  # else it was given up
            self._guard.leaves_wrong = False

    def _look(self) -> None:
        """Abort, and leave the command, if a peer has failed or died."""
        try:
            self._rank.check()
        except BaseException:
            self._guard.abort(self._connection)
            raise
        error = self._connection.error()
        if error is not None:
            self._guard.abort(self._connection)
            raise RuntimeError(f"NCCL failed in the middle of a collective (ncclResult_t {error})")
