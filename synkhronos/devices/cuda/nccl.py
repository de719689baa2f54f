"""Collectives between GPUs, over NCCL.

NCCL's operations are enqueued on the stream on which the library computes, after the kernels that compute the arrays.
`all_reduce` does not wait for completion, as later work on the stream is ordered after it.  All other operations
start on an idle stream, and wait for completion with regular checks of the peers.  An operation that can't complete,
because a peer has failed or exited, is aborted.

`nccl_connection` describes how ranks connect, `watchdog` how pending operations are aborted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from synkhronos.devices.communicator import ArrayLayout, Communicator
from synkhronos.devices.cuda.gpu_context import GpuContext, unwrap_cuda_result
from synkhronos.devices.cuda.nccl_connection import NCCL_UINT8, PEER_POLL_SECONDS, NcclConnection
from synkhronos.devices.cuda.watchdog import GPU_POLL_SECONDS, CollectiveWatchdog
from synkhronos.devices.reduce_op import REDUCE_OPS
from synkhronos.ranks import Rank
from synkhronos.variable_types import Array

#: NCCL's numbers of dtypes (ncclDataType_t, from 0), by their names in NumPy and JAX.
_DTYPE_NAMES = "int8 uint8 int32 uint32 int64 uint64 float16 float32 float64 bfloat16"
NCCL_DTYPES = {name: number for number, name in enumerate(_DTYPE_NAMES.split())}
#: NCCL's numbers of reductions (ncclRedOp_t); other reductions use host memory.
NCCL_OPS = {name: op.nccl_op for name, op in REDUCE_OPS.items() if op.nccl_op is not None}
#: Maximal number of bytes of an all-reduce that takes no longer than a launch.
_QUICK_NBYTES = 1 << 16
#: Maximal number of seconds for which `wait_briefly` waits for such an all-reduce.
_QUICK_SECONDS = 50e-6


@cache
def to_nccl_dtype(dtype: np.dtype) -> int | None:
    """Return NCCL's number of a dtype, or None if NCCL does not support it."""
    return NCCL_DTYPES.get(str(dtype))  # cached, as the conversion to str is slow


class ItemRange(NamedTuple):
    """Consecutive items of an array, to be written in place: the first one's address, and their bytes."""

    array: Any
    address: int
    nbytes: int


class NcclCommunicator(Communicator):
    """Collectives over arrays on the ranks' GPUs.

    A failure in the middle of a collective aborts the connection, but only on the ranks that have started it.  Before
    every collective, callers therefore compare the ranks' generations and call `connect`.  The communicator of all
    ranks makes the rank's ``watchdog``, which is passed to the communicators of groups.
    """

    def __init__(self, rank: Rank, gpu: GpuContext, watchdog: CollectiveWatchdog | None = None):
        self._rank = rank
        self._gpu = gpu
        self._array_device = gpu.array_device
        compute_stream = gpu.array_device.stream
        #: Whether NCCL uses the stream on which the library computes, which is ordered before and after its work.
        self._is_on_compute_stream = compute_stream is not None
        self.max_speculative_nbytes = 0 if compute_stream is None else _QUICK_NBYTES  # without one, `all_reduce` waits
        self._stream = gpu.copy_stream_handle if compute_stream is None else compute_stream
        self._connection = NcclConnection(rank, gpu, self._stream)
        self._nccl, self._nccl_lock = self._connection.nccl, self._connection.nccl_lock
        if watchdog is None:
            watchdog = CollectiveWatchdog(rank, gpu, self._connection, self._stream)
            # A collective that waits for a missing rank occupies the GPU, and calls that free GPU memory would block.
            rank.pending_operations.append(watchdog)
        else:
            watchdog.connections.append(self._connection)
        self._watchdog = watchdog
        #: Bytes that `all_reduce` has enqueued since the last `wait_briefly`; infinite on a busy stream.
        self._enqueued_nbytes: float = 0

    @property
    def generation(self) -> int:
        return self._connection.generation

    def connect(self, generations: Sequence[int]) -> None:
        def all_gather(value: Any) -> Sequence[Any]:
            values = self._rank.all_gather(value)
            self._watchdog.restart_epochs()  # all ranks have waited for their earlier work
            return values

        self._connect_ranks(generations, range(self._rank.size), all_gather)

    def _connect_ranks(
        self, generations: Sequence[int], members: Sequence[int], all_gather: Callable[[Any], Sequence[Any]]
    ) -> None:
        """Connect ``members``, unless their ``generations`` show that they share a connection."""
        if self.generation and set(generations) == {self.generation}:
            return
        # All ranks have started the earlier collectives, which therefore complete.  Also, earlier work must not count
        # against the timeout of the connection.
        self._wait_for_earlier_work()
        self._watchdog.abort(self._connection)
        self._connection.connect(max(generations) + 1, members, all_gather)

    def wait_until_started(self) -> None:
        self._watchdog.wait_until_started()
        self._connection.check_connected()

    def notify_started(self) -> None:
        self._watchdog.notify_started()

    # -- all_reduce, which does not wait for completion ------------------------------------------------------

    def all_reduce(self, array: Array, op: str) -> None:
        """Enqueue an all-reduce of every rank's array, in place."""
        self.all_reduce_into(array, op, array)

    def all_reduce_into(self, array: Array, op: str, out: Array) -> None:
        """Enqueue an all-reduce of every rank's array into ``out``, which may be the array itself."""
        address, n_items, dtype = self._prepare_buffer(array)
        if not n_items:
            return
        target = address if out is array else self._array_device.get_address(out)
        self._gpu.set_current_gpu()
        nbytes = n_items * array.dtype.itemsize
        watchdog = self._watchdog
        is_idle = not self._enqueued_nbytes and watchdog.is_stream_idle()
        if nbytes > _QUICK_NBYTES or not (self._enqueued_nbytes or is_idle):
            self._enqueued_nbytes = math.inf
        self._enqueued_nbytes += nbytes
        if out is array:
            self.record_pending_writes()
        elif is_idle and not watchdog.has_lost_peer:
            watchdog.writes_in_place = False  # earlier writes are complete
        watchdog.mark_started(self._connection, is_idle)
        with self._nccl_lock:
            handle = self._connection.get_handle()
            self._nccl.all_reduce(address, target, n_items, dtype, NCCL_OPS[op], handle, self._stream)
        if not self._is_on_compute_stream:
            self._wait_until_idle()

    def wait_briefly(self) -> bool:
        """Wait for at most `_QUICK_SECONDS` for small all-reduces on a stream that was idle.  Return True if complete.

        On an idle stream, small all-reduces take less time than the launch that `rewrap` needs without their results.
        """
        nbytes, self._enqueued_nbytes = self._enqueued_nbytes, 0
        if not 0 < nbytes <= _QUICK_NBYTES:
            return not nbytes
        driver, deadline = self._gpu.driver, perf_counter() + _QUICK_SECONDS
        while (result := driver.cuStreamQuery(self._stream)[0]) != driver.CUresult.CUDA_SUCCESS:
            if result != driver.CUresult.CUDA_ERROR_NOT_READY or perf_counter() > deadline:
                return False
        if not self.generation:  # aborted: the result is undefined
            return False
        self._watchdog.writes_in_place = False
        return True

    def compare_digests_after_start(self, digest: bytes) -> bool:
        """Compare the ranks' digests once this rank has started its collectives.  Abort them if the digests differ."""
        have_all_started = self._watchdog.compare_digests_after_start(digest)
        if not have_all_started:
            self.abort()
        return have_all_started

    def record_pending_writes(self) -> None:
        """Record that variables have arrays that collectives in progress write: a peer's exit makes them invalid."""
        self._watchdog.writes_in_place = True

    def abort(self) -> None:
        """Abort the connection and its collectives in progress."""
        self._enqueued_nbytes = 0
        self._watchdog.abort_pending()

    # -- blocking operations ---------------------------------------------------------------------------------

    def broadcast(self, array: Array, root: int) -> None:
        address, n_items, dtype = self._prepare_buffer(array)
        if n_items:
            self._run_blocking(
                lambda handle: self._nccl.broadcast(address, address, n_items, dtype, root, handle, self._stream)
            )

    def reduce(
        self, array: Array, op: str, root: int, out: Array | None, layout: ArrayLayout, contributors: Sequence[int]
    ) -> None:
        """Write the reduction of all ranks' arrays into the root's ``out``; the contributors are all ranks."""
        assert len(contributors) == self._rank.size
        address, n_items, dtype = self._prepare_buffer(array)
        if n_items:
            target = address if out is None else self._prepare_buffer(out)[0]
            self._run_blocking(
                lambda handle: self._nccl.reduce(
                    address, target, n_items, dtype, NCCL_OPS[op], root, handle, self._stream
                )
            )

    def reduce_scatter(self, array: Array, op: str, bounds: Sequence[int], out: Array) -> None:
        address, n_items, dtype = self._prepare_buffer(array)
        nccl_op, itemsize = NCCL_OPS[op], array.dtype.itemsize
        target = self._array_device.get_address(out) if out.size else 0
        counts = [stop - start for start, stop in pairwise(bounds)]

        def enqueue(handle: Any) -> None:
            nccl = self._nccl
            if len(set(counts)) == 1:
                nccl.reduce_scatter(address, target, counts[0], dtype, nccl_op, handle, self._stream)
                return
            nccl.group_start()
            try:
                for r, (start, n_rank_items) in enumerate(zip(bounds, counts, strict=False)):
                    if n_rank_items:
                        source = address + start * itemsize
                        nccl.reduce(source, target, n_rank_items, dtype, nccl_op, r, handle, self._stream)
            finally:
                nccl.group_end()

        if n_items:
            self._run_blocking(enqueue)

    def gather(
        self, array: Array, root: int, layouts: Sequence[ArrayLayout | None], out: Sequence[Any | None] | None
    ) -> None:
        self._gather_to([root], array, out)

    def all_gather(self, array: Array, layouts: Sequence[ArrayLayout], out: Sequence[Any]) -> None:
        self._gather_to(range(self._rank.size), array, out)

    def _gather_to(self, receivers: Sequence[int], array: Array, out: Sequence[Any | None] | None) -> None:
        """Copy rank r's array into ``out[r]`` on the receivers."""
        address, n_items, _ = self._prepare_buffer(array)
        nbytes = n_items * array.dtype.itemsize
        targets: list[ItemRange | None] = list(out) if out is not None else [None] * self._rank.size

        def send_and_receive(handle: Any) -> None:
            # A receiver sends to itself, too: NCCL copies its array at the same time as it receives the others.
            self._nccl.group_start()
            try:
                for r in receivers:
                    if nbytes:
                        self._nccl.send(address, nbytes, NCCL_UINT8, r, handle, self._stream)
                for r, target in enumerate(targets):
                    if target is not None and target.nbytes:
                        self._nccl.recv(target.address, target.nbytes, NCCL_UINT8, r, handle, self._stream)
            finally:
                self._nccl.group_end()

        self._run_blocking(send_and_receive)

    def _run_blocking(self, enqueue: Callable[[Any], None]) -> None:
        """Enqueue an operation on an idle stream, and wait for its completion.  An exception aborts the connection."""
        self._wait_for_earlier_work()
        try:
            self._watchdog.mark_started(self._connection, is_idle=True)
            with self._nccl_lock:
                enqueue(self._connection.get_handle())
            self._wait_until_idle()
            self._connection.check_connected()  # an abort leaves the result undefined
        except BaseException:
            self._watchdog.abort(self._connection)
            raise
        self._watchdog.mark_completed(self._connection)

    def _wait_for_earlier_work(self) -> None:
        """Wait until earlier work on the stream is done, without aborting it if a peer has failed."""
        self._gpu.set_current_gpu()
        self._wait_until_idle(self._rank.barriers.check_cancelled)

    def _prepare_buffer(self, array: Array) -> tuple[int, int, int | None]:
        """Wait for an array unless NCCL uses the library's stream.  Return its address, length, and NCCL dtype."""
        if not self._is_on_compute_stream:
            self._array_device.wait([array])
        return self._array_device.get_address(array), array.size, to_nccl_dtype(array.dtype)

    def _wait_until_idle(self, check_peers: Callable[[], None] | None = None) -> None:
        """Wait until the stream is idle; poll ``check_peers``, by default `_abort_on_failure`, which may raise."""
        check_peers = check_peers or self._abort_on_failure
        start = last_check = perf_counter()
        while not self._watchdog.is_stream_idle():
            now = perf_counter()
            if now > last_check + PEER_POLL_SECONDS:
                check_peers()
                last_check = now
            if now > start + PEER_POLL_SECONDS:
                time.sleep(GPU_POLL_SECONDS)
        unwrap_cuda_result(self._gpu.driver.cuStreamQuery(self._stream))
        if not self._watchdog.has_lost_peer:  # else the work was aborted, and results are undefined
            self._watchdog.writes_in_place = False

    def _abort_on_failure(self) -> None:
        """Abort the connection and raise if a peer has failed or exited, or NCCL has failed."""
        try:
            self._rank.barriers.check_cancelled()
        except BaseException:
            self._watchdog.abort(self._connection)
            raise
        error = self._connection.get_async_error()
        if error is not None:
            self._watchdog.abort(self._connection)
            raise RuntimeError(f"NCCL failed in the middle of a collective (ncclResult_t {error})")


class NcclGroupCommunicator(NcclCommunicator):
    """Communicator of a group of ranks: all-reduces, and messages between two members.

    Every operation starts on an idle stream and waits for completion.  The members connect at the same point of their
    programs: at the first use, and again after any command has failed, when all ranks drop the connections of their
    groups.  The group uses the watchdog of ``parent``, this rank's communicator of all ranks.

    A sender and its receiver are a group, too.  The sender's message contains the data to connect.  The receiver does
    not reply, since its reply could be queued behind unread messages.  So a connected sender has to know that its
    receiver is connected.
    """

    def __init__(self, parent: NcclCommunicator):
        super().__init__(parent._rank, parent._gpu, watchdog=parent._watchdog)

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
        address, n_items, dtype = self._prepare_buffer(array)
        if n_items:
            self._run_blocking(
                lambda handle: self._nccl.all_reduce(
                    address, address, n_items, dtype, NCCL_OPS[op], handle, self._stream
                )
            )

    def send(self, array: Array, dest: int) -> None:
        """Send an array to a rank, and wait until the rank has received it."""
        address, n_items, dtype = self._prepare_buffer(array)
        nccl_rank = self._connection.members.index(dest)
        self._run_blocking(lambda handle: self._nccl.send(address, n_items, dtype, nccl_rank, handle, self._stream))

    def receive(self, array: Array, source: int) -> None:
        """Receive an array from a rank, in place, and wait for completion."""
        address, n_items, dtype = self._prepare_buffer(array)
        nccl_rank = self._connection.members.index(source)
        self._run_blocking(lambda handle: self._nccl.recv(address, n_items, dtype, nccl_rank, handle, self._stream))
