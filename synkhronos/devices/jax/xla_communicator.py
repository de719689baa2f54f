"""Collectives between GPUs within a launch of XLA, over NCCL.

Part of a gradient can be reduced on a second stream while the rest is still computed::

    XLA's stream    backward, layer 3 ──> backward, layers 2, 1 ──> all-reduce of the rest ──> update
                              └ event ┐                      event ┘
    side stream                       └──> all-reduce of layer 3 ──┘
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, assert_never

from synkhronos.devices.cuda.gpu_context import unwrap_cuda_result
from synkhronos.devices.cuda.launch_state import LaunchState, find_function_addresses
from synkhronos.devices.cuda.nccl import NCCL_DTYPES, NCCL_OPS, NcclCommunicator

#: A collective within a launch of XLA.
Collective = Literal["all_reduce", "reduce_scatter", "all_gather"]


class BufferSpan(NamedTuple):
    """Consecutive items on the GPU, an operand of a collective.

    ``source`` and ``target`` are the addresses of the items and of the memory for the result; they may be equal.
    """

    source: int
    target: int
    n_items: int
    dtype: str


class XlaCommunicator(NcclCommunicator):
    """Collectives over JAX arrays on the ranks' GPUs, which XLA calls in the middle of a program."""

    #: Whether the side stream has work for which XLA's stream does not wait yet.
    _has_side_work = False

    def begin_native_calls(self) -> LaunchState:
        """Let the handlers of the next launch call NCCL without Python, until `end_native_calls`.

        Return the state for them.
        """
        state = self._connection.launch_state
        if not state.all_reduce_address:  # at the first launch
            for name, address in find_function_addresses().items():
                setattr(state, name, address)
            state.side_stream, state.event = self._gpu.side_stream, int(self._gpu.event)
        self._mark_started()
        self._nccl_lock.acquire()
        state.reset()
        return state

    def end_native_calls(self) -> None:
        """End the calls of a launch, also after an error."""
        self._connection.launch_state.is_active = 0
        self._nccl_lock.release()

    def check_native_calls(self) -> None:
        """Raise RuntimeError if NCCL or CUDA has failed in the last launch, or the connection was aborted."""
        state = self._connection.launch_state
        if state.failure_kind:
            self._connection.check_connected()
        state.raise_if_failed()

    def enqueue_on_side_stream(
        self, spans: Sequence[BufferSpan], op: str, xla_stream: int | None, collective: Collective = "all_reduce"
    ) -> None:
        """Enqueue collectives on the side stream, ordered after the work enqueued so far on XLA's.

        A reduce-scatter divides the items into equal parts, one for each rank, and writes this rank's part.  An
        all-gather has no ``op``, and writes the items of all ranks.
        """
        self._gpu.order_after(self._gpu.side_stream, xla_stream)
        self._has_side_work = True
        self._enqueue_collectives(spans, op, self._gpu.side_stream, collective)

    def enqueue_on_xla_stream(
        self,
        spans: Sequence[BufferSpan],
        op: str,
        valid_flag_address: int,
        xla_stream: int | None,
        collective: Collective = "all_reduce",
    ) -> None:
        """Enqueue collectives on XLA's stream, and make it wait for those on the side stream.

        The int32 at ``valid_flag_address`` on the GPU becomes 1, or 0 if a rank has aborted the collectives, so that
        all targets are undefined.  The other parameters are as in `enqueue_on_side_stream`.
        """
        self.join_side_stream(xla_stream)
        self._enqueue_collectives(spans, op, xla_stream, collective)
        host_flag_address = self._connection.launch_state.valid_flag_address
        unwrap_cuda_result(self._gpu.driver.cuMemcpyAsync(valid_flag_address, host_flag_address, 4, xla_stream))

    def join_side_stream(self, xla_stream: int | None) -> None:
        """Make XLA's stream wait for the collectives on the side stream."""
        if self._has_side_work:
            self._has_side_work = False
            self._gpu.order_after(xla_stream, self._gpu.side_stream)

    def _enqueue_collectives(
        self, spans: Sequence[BufferSpan], op: str, stream: int | None, collective: Collective
    ) -> None:
        """Enqueue a collective on each span, on a stream.  The parameters are those of `enqueue_on_side_stream`."""
        self._mark_started()
        nccl = self._nccl
        with self._nccl_lock:
            handle = self._connection.get_handle()  # XLA has made the GPU current in this thread
            for source, target, n_items, dtype in spans:
                nccl_dtype = NCCL_DTYPES[dtype]
                if collective == "all_reduce":
                    nccl.all_reduce(source, target, n_items, nccl_dtype, NCCL_OPS[op], handle, stream)
                elif collective == "all_gather":
                    nccl.all_gather(source, target, n_items, nccl_dtype, handle, stream)
                elif collective == "reduce_scatter":
                    n_own_items = n_items // self._rank.size
                    nccl.reduce_scatter(source, target, n_own_items, nccl_dtype, NCCL_OPS[op], handle, stream)
                else:
                    assert_never(collective)

    def _mark_started(self) -> None:
        """Tell the watchdog that collectives are enqueued now, and whether earlier writes in place are complete."""
        watchdog = self._watchdog
        if watchdog.writes_in_place and not watchdog.has_lost_peer and watchdog.is_stream_idle():
            watchdog.writes_in_place = False
        watchdog.mark_started(self._connection)
        self._connection.launch_state.valid_flag_address = watchdog.get_valid_flag_address()
