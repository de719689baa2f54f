"""Collectives between GPUs, over NCCL.

`NcclCommunicator`
    Combines arrays where they lie.

NCCL's work goes to the stream on which the arrays are computed, behind what computes them.  An all_reduce is not waited
for, since what is put on the stream later comes after it; other collectives are, with a look at the peers from time to
time.  What a peer that has failed or died would leave waiting for ever is aborted: by the rank that waits, or by a
thread that each rank has for the purpose, since a rank may be waiting for its GPU, where it hears of nothing.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from synkhronos.devices.cuda.staging import Part, Staging, check
from synkhronos.devices.host import Layout
from synkhronos.devices.reductions import REDUCTIONS
from synkhronos.ranks import Cancelled, Rank, UnderWay
from synkhronos.ranks.interrupts import undisturbed

#: NCCL's numbers for dtypes (ncclDataType_t).
DTYPES = {
    np.dtype(np.int8): 0,
    np.dtype(np.uint8): 1,
    np.dtype(np.int32): 2,
    np.dtype(np.uint32): 3,
    np.dtype(np.int64): 4,
    np.dtype(np.uint64): 5,
    np.dtype(np.float16): 6,
    np.dtype(np.float32): 7,
    np.dtype(np.float64): 8,
}
#: The same by names, and of what NumPy alone doesn't know.
NUMBERS = {"bfloat16": 9, **{str(dtype): number for dtype, number in DTYPES.items()}}
#: NCCL's numbers for reductions; the others don't come here.
OPS = {name: row.nccl for name, row in REDUCTIONS.items() if row.nccl is not None}
_BYTES = DTYPES[np.dtype(np.uint8)]
#: Items on the GPU: where they are, where their combination goes (maybe there too), how many, and their dtype's name.
Span = tuple[int, int, int, str]
#: Seconds between two looks at the peers while NCCL works.
_LOOK = 0.02
#: The same once a peer has failed or died and nothing was under way.
_LATER = 0.2
#: Seconds between two looks at the GPU, when it has been waited for as long as that.
_PAUSE = 0.0002
#: Seconds after which it is given up to connect: it takes one or two.
_PATIENCE = 40
#: Seconds after which a call of CUDA or NCCL that should return at once is taken to wait for a peer that is gone.
_STUCK = 0.5


class NcclCommunicator(UnderWay):
    """Combines arrays on GPUs.

    Connected at its first use, and anew after a failure in the middle of a collective, which ends in `abort` on the
    ranks that were in it: every collective begins with a look whether all ranks still have the same connection.

    Parameters
    ----------
    rank : Rank
    staging : Staging
        Knows the arrays and the GPU.
    """

    def __init__(self, rank: Rank, staging: Staging):
        from nccl.bindings import nccl

        self._rank = rank
        self._staging = staging
        self._nccl = nccl
        self._comm: Any = None
        self._arrays = staging.arrays
        self._stream = staging.handle if staging.arrays.stream is None else staging.arrays.stream
        # A collective that waits for a dead rank keeps the GPU busy, and whatever is to be freed there waits for it.
        rank.under_way.append(self)
        #: The last command that started a collective without waiting for it, 0 without.
        self._under_way = 0
        #: That command, as long as some rank may fail in it before it comes to the collective.
        self._exposed = 0
        #: The step at which the ranks meet when all have come to the collective; 0 as long as this one hasn't.
        self._meeting = 0
        #: Whether what may be under way leaves variables wrong if it is given up.
        self._leaves_wrong = False
        #: The attempt to connect that counts: an earlier one may come to its end late.
        self._attempt = 0
        #: Whether something is under way beside the arrays' stream, for which that one does not wait yet.
        self._has_begun = False
        self._guard: threading.Thread | None = None
        self._asking: threading.Thread | None = None
        self._swap = threading.Lock()
        #: Held while NCCL is called: it must not lose its connection then.
        self._calls = threading.RLock()
        #: Whether a worker's death has ended a collective.
        self._lost = False
        self._ended = threading.Event()
        #: Counts the connections, alike on all ranks that share one; 0 without any.
        self.epoch = 0
        #: 1 as long as the connection holds, which the GPU reads when it has combined something within a launch.
        self._holds = np.zeros(1, np.int32)

    def connect(self, epochs: Sequence[int]) -> None:
        """Connect all ranks anew, unless all have the same connection.

        Parameters
        ----------
        epochs : list of int
            Each rank's `epoch`.
        """
        if len(set(epochs)) == 1 and self.epoch:
            return
        from nccl.core import get_unique_id

        self.abort()
        self._staging.enter()
        # What was put on the stream before has its own time.
        self._wait()
        mine = bytes(get_unique_id()) if self._rank.number == 0 else b""
        unique_id = self._rank.exchange(mine)[0]
        # NCCL blocks while it connects, and a peer that dies meanwhile would keep it for ever: so it does so in a
        # thread, which may be left behind.  (A communicator that doesn't block starts a thread for each collective.)
        errors: list[BaseException] = []
        thread = threading.Thread(target=self._connect, args=(self._attempt, unique_id, errors), daemon=True)
        deadline = perf_counter() + _PATIENCE
        thread.start()
        try:
            while thread.is_alive():
                thread.join(_LOOK)
                self._rank.check()
                if perf_counter() > deadline:
                    raise RuntimeError(f"NCCL did not connect the ranks' GPUs within {_PATIENCE} seconds")
            if errors:
                raise errors[0]
        except BaseException:
            self.abort()
            raise
        self.epoch = max(epochs) + 1

    def _connect(self, attempt: int, unique_id: bytes, errors: list[BaseException]) -> None:
        from nccl.core import Communicator, UniqueId

        rank, nccl, stream = self._rank, self._nccl, self._stream
        try:
            self._staging.enter()
            comm = Communicator.init(rank.size, rank.number, UniqueId.from_bytes(unique_id))
            at = comm._comm  # what the bindings take; the class around it looks at every array anew
            room = self._staging.scratch(rank.size)
            with self._calls:
                with self._swap:
                    is_late = attempt != self._attempt  # given up meanwhile
                    if not is_late:
                        self._comm, self._handle = comm, at
                        self._holds = self._staging.page
                        self._holds[0] = 1
                if is_late:
                    comm.abort()
                    return
                # What NCCL sets up at the first collective of each kind, it sets up here.
                nccl.all_reduce(room, room, 1, _BYTES, OPS["sum"], at, stream)
                nccl.broadcast(room, room, 1, _BYTES, 0, at, stream)
                nccl.reduce(room, room, 1, _BYTES, OPS["sum"], 0, at, stream)
                nccl.group_start()
                for r in range(rank.size):
                    if r != rank.number:
                        nccl.send(room, 1, _BYTES, r, at, stream)
                        nccl.recv(room + r, 1, _BYTES, r, at, stream)
                nccl.group_end()
            check(self._staging.driver.cuStreamSynchronize(stream))
        except BaseException as error:
            errors.append(error)

    def abort(self) -> None:
        """Give up the connection, and what is on its way."""
        with undisturbed():  # in between nobody knows of the connection, and what waits on it would do so for ever
            with self._swap:  # by one thread alone
                comm, self._comm, self.epoch = self._comm, None, 0
                self._under_way = self._exposed = 0
                self._attempt += 1
                self._holds[0] = 0  # before what waits for a peer goes on, and would take what there is for combined
            if comm is not None:
                self._staging.enter()
                is_free = self._calls.acquire(timeout=_STUCK)
                try:
                    comm.abort()
                finally:
                    if is_free:
                        self._calls.release()

    def broadcast(self, array: Any, root: int) -> None:
        """Copy the root's array into every other rank's, in place."""
        at, count, dtype = self._span(array)
        if count:
            with self._calls:
                self._nccl.broadcast(at, at, count, dtype, root, self._connected(), self._stream)
            self._wait()

    def all_reduce(self, array: Any, op: str) -> None:
        """Replace every rank's array by the reduction of all ranks', which is not waited for."""
        at, count, dtype = self._span(array)
        if count:
            self._leaves_wrong = True
            self._leave()
            with self._calls:
                self._nccl.all_reduce(at, at, count, dtype, OPS[op], self._connected(), self._stream)
            if self._arrays.stream is None:
                self._wait()

    def start_within(self, spans: Sequence[Span], op: str, stream: int) -> None:
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

    def all_reduce_within(self, spans: Sequence[Span], op: str, counts: int, stream: int) -> None:
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
        check(self._staging.driver.cuMemcpyAsync(counts, self._holds.ctypes.data, 4, stream))

    def wait_within(self, stream: int) -> None:
        """Have a stream wait for what was begun."""
        if self._has_begun:
            self._has_begun = False
            self._follow(stream, self._staging.beside)

    def _combine(self, spans: Sequence[Span], op: str, stream: int) -> None:
        if self._leaves_wrong and not self._lost and self._is_done():
            self._leaves_wrong = False
        self._leave()
        with self._calls:
            # XLA has made the GPU this thread's already.
            handle = self._connected() if self._comm is None else self._handle
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
            with self._calls:
                self._nccl.reduce(at, to, count, dtype, OPS[op], root, self._connected(), self._stream)
            self._wait()

    def gather(
        self, array: Any, root: int | None, layouts: Sequence[Layout | None], out: Sequence[Any | None] | None
    ) -> None:
        """Copy rank r's array into ``out[r]`` on the root, or on every rank if ``root`` is None."""
        here, everyone = self._rank.number, range(self._rank.size)
        takers = everyone if root is None else [root]
        at, count, _ = self._span(array)
        size = count * array.dtype.itemsize
        parts: list[Part | None] = list(out) if out is not None else [None] * self._rank.size
        own = parts[here]
        with self._calls:
            handle = self._connected()
            if own is not None and size:
                check(self._staging.driver.cuMemcpyAsync(own.pointer, at, size, self._stream))
            self._nccl.group_start()
            try:
                for r in takers:
                    if r != here and size:
                        self._nccl.send(at, size, _BYTES, r, handle, self._stream)
                for r, part in enumerate(parts):
                    if part is not None and r != here and part.nbytes:
                        self._nccl.recv(part.pointer, part.nbytes, _BYTES, r, handle, self._stream)
            finally:
                self._nccl.group_end()
        self._wait()

    def _connected(self) -> Any:
        """Return the connection for a call of NCCL, unless it was given up since the ranks agreed on it."""
        self._staging.enter()
        if self._comm is None:
            self._rank.check()
            raise RuntimeError("the connection between the ranks' GPUs was given up")
        return self._handle

    # -- waiting ---------------------------------------------------------------------------------------------

    def _span(self, array: Any) -> tuple[int, int, int]:
        """Return an array's address, its number of items, and NCCL's number for its dtype."""
        if self._arrays.stream is None:
            self._arrays.wait_for(array)
        return self._arrays.pointer(array), array.size, NUMBERS[str(array.dtype)]

    def _leave(self) -> None:
        """Note that what is put on the stream now is not waited for."""
        self._meeting = 0
        self._under_way = self._exposed = self._rank.command
        if self._guard is None:
            self._guard = threading.Thread(target=self._keep_guard, daemon=True)
            self._guard.start()

    def _keep_guard(self) -> None:
        """Abort what is under way when a peer has died, or failed in the command that started it."""
        self._staging.enter()
        failed, since, pause = 0, 0.0, _LOOK
        while not self._ended.wait(pause):
            command, pause = self._under_way, _LOOK
            is_bereft = bool(command) and self._rank.bereft()
            if not (is_bereft or (command and self._rank.has_failed(command))):
                failed = 0
                continue
            if self._seems_done():
                failed, pause = 0, _LATER
                continue
            if is_bereft:
                self._lost = True
                self.abort()
                # The master may have heard of the death when nothing was to be said of it, and not listen now.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)
                return
            self.give_up(command)
            # Whatever has kept a peer from it: nothing waits for ever.
            if failed != command:
                failed, since = command, perf_counter()
            elif perf_counter() > since + _PATIENCE:
                self.abort()

    def meet(self, look: Callable[[], None] | None = None) -> None:
        """Wait until every rank has started what this one has: from then on only a death can keep it from its end.

        Parameters
        ----------
        look : callable, optional
            Called now and then while others are late; may raise, and this rank has not come then.
        """
        if self._exposed:
            step = self._meeting = self._rank.coming_step
            try:
                self._rank.barrier(look)
            except BaseException as error:
                # A rank may fail when all have come: none must give up then what the others wait for.
                is_cancelled = isinstance(error, Cancelled)
                have_all_come = self._rank.have_all_come(step) if is_cancelled else not self._rank.withdraw(step)
                if have_all_come:
                    self._exposed = 0
                self._meeting = 0
                if have_all_come and is_cancelled:
                    return
                raise
            self._exposed = 0

    def come(self) -> None:
        """Tell the others that this rank has started what they wait for, and wait for nobody.

        As good as `meet` at the end of a command, whose end the master waits for.
        """
        if self._exposed:
            self._meeting = self._rank.coming_step
            self._rank.arrive()

    def _is_done(self) -> bool:
        """Whether all that was put on the stream is done."""
        (result,) = self._staging.driver.cuStreamQuery(self._stream)
        return bool(result != self._staging.driver.CUresult.CUDA_ERROR_NOT_READY)

    def _seems_done(self) -> bool:
        """Whether all that was put on the stream is done, as far as CUDA says so at once.

        A stream has room for a thousand launches.  Whoever puts another one on a full stream waits inside of CUDA, for
        ever if what is under way waits for a peer that is gone; and whoever asks CUDA anything meanwhile waits with it.
        """
        answers: list[bool] = []

        def ask() -> None:
            self._staging.enter()
            answers.append(self._is_done())

        if self._asking is not None and self._asking.is_alive():
            return False
        self._asking = threading.Thread(target=ask, daemon=True)
        self._asking.start()
        self._asking.join(_STUCK)
        return bool(answers and answers[0])

    def unfinished(self) -> bool:
        """Whether a collective is under way, or did not come to its end."""
        if self._under_way and not self._lost:
            self._staging.enter()
            return self._leaves_wrong and not self._is_done()
        return self._lost and self._leaves_wrong

    def finish(self) -> None:
        """Let what is under way come to its end, one way or the other."""
        self._staging.enter()
        while self._under_way and not self._is_done() and not self._rank.bereft():
            time.sleep(_PAUSE)

    def end(self) -> None:
        """Disconnect."""
        self._ended.set()
        if self._guard is not None and self._guard is not threading.current_thread():
            self._guard.join(1.0)
        self.abort()

    def give_up(self, command: int) -> None:
        """Abort what a command that failed has started, unless all ranks have come to it: none does so then."""
        if self._exposed == command and not (self._meeting and self._rank.have_all_come(self._meeting)):
            self.abort()

    def _wait(self) -> None:
        """Wait for the stream, and watch the peers."""
        start = look = perf_counter()
        while not self._is_done():
            now = perf_counter()
            if now > look + _LOOK:
                self._look()
                look = now
            if now > start + _LOOK:
                time.sleep(_PAUSE)
        check(self._staging.driver.cuStreamQuery(self._stream))
        if not self._lost:  # else it was given up
            self._leaves_wrong = False

    def _look(self) -> None:
        """Abort, and leave the command, if a peer has failed or died."""
        try:
            self._rank.check()
        except BaseException:
            self.abort()
            raise
        with self._calls:
            if self._comm is None:
                return
            state = self._nccl.comm_get_async_error(self._handle)
        if state not in (0, 7):  # success, in progress
            self.abort()
            raise RuntimeError(f"NCCL failed in the middle of a collective (ncclResult_t {state})")
