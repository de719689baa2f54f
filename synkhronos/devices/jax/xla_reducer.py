"""Sums over the ranks within XLA programs that all ranks run at the same time, such as a sampler.

A program may compute millions of sums, in loops whose lengths depend on the sums.  All ranks run the same program and
get the same bits, so that their loops have the same lengths.  An `FfiCollectives` calls one of these reducers::

    XLA program     local sum ──> foreign function ──> sum over all ranks ──> next evaluation
                                        |
    on GPUs                       `GpuReducer`: NCCL on XLA's stream; Python does not wait
    on the CPU                    `SharedMemoryReducer`: through shared memory, in rank order

An error, or an interrupt in the master, ends the launch: the reducer raises it within the foreign function.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Iterator, Sequence

import numpy as np

from synkhronos.devices.jax.ffi_collectives import LaunchCollectives
from synkhronos.devices.jax.xla_communicator import BufferSpan, XlaCommunicator
from synkhronos.devices.multi_host_communicator import get_numpy_communicator
from synkhronos.ranks import Rank
from synkhronos.ranks.control_memory import AWAITS_BARRIER

DIVERGED_MESSAGE = (
    "the ranks' programs have diverged: their results differ, although all had the same arguments and sums. If the "
    "program draws random numbers, pass a seed; otherwise please report this"
)


class InterruptDetector:
    """Detects SIGINT while compiled code runs in the main thread, where Python cannot call the handler.

    The part of Python's handler that is written in C writes the signal's number into a pipe, in any thread.
    """

    def __init__(self) -> None:
        self._read_fd = -1

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Detect SIGINT in the ``with`` block, if this is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._read_fd, write = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(write, False)
        old_fd = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(old_fd)
            os.close(write)
            os.close(self._read_fd)
            self._read_fd = -1

    def raise_if_interrupted(self) -> None:
        """Raise KeyboardInterrupt if SIGINT has arrived."""
        if self._read_fd < 0:
            return
        try:
            arrived = os.read(self._read_fd, 64)
        except BlockingIOError:
            return
        if signal.SIGINT in arrived:
            raise KeyboardInterrupt


class XlaReducer(LaunchCollectives):
    """Base class of the reducers of one program.  Reducers start no chunks, and an error ends the launch.

    ``n_sums`` is the number of sums so far.  A sum is a round of the program in `ControlMemory.rounds_begun`.
    """

    def __init__(self, rank: Rank, detector: InterruptDetector):
        self._rank, self._interrupt_detector = rank, detector
        self.n_sums = 0
        control, local_ranks = rank.control, slice(rank.local_ranks.start, rank.local_ranks.stop)
        self._sums_begun, self._sums_ended = control.rounds_begun[local_ranks], control.rounds_ended[local_ranks]
        control.rounds_begun[rank.number] = control.rounds_ended[rank.number] = 0
        rank.barrier()

    def begin_sum(self) -> None:
        """Count a sum, and raise KeyboardInterrupt if SIGINT has arrived."""
        self._interrupt_detector.raise_if_interrupted()
        self.n_sums += 1
        self._rank.control.rounds_begun[self._rank.number] = self.n_sums

    def wait_until_ended(self) -> None:
        """Wait until the programs of all ranks have ended.  Raise RuntimeError if one waits for a further sum."""

        def raise_if_diverged() -> None:
            if max(self._sums_begun) > self.n_sums:
                raise RuntimeError(DIVERGED_MESSAGE)

        self._rank.control.rounds_ended[self._rank.number] = self.n_sums + 1
        self._rank.control.wake_local_ranks(AWAITS_BARRIER)
        self._rank.barriers.wait_until(lambda: all(self._sums_ended), raise_if_diverged)


class SharedMemoryReducer(XlaReducer):
    """Sums of arrays in host memory, in rank order, between ranks of one host."""

    def __init__(self, rank: Rank, detector: InterruptDetector):
        super().__init__(rank, detector)
        assert not rank.spans_hosts
        self._communicator = get_numpy_communicator(rank)

    def finish(self, spans: Sequence[BufferSpan], valid_flag_address: int, stream: int | None) -> None:
        self.begin_sum()
        for span in spans:
            target = view_span(span.target, span)
            if span.source != span.target:
                target[:] = view_span(span.source, span)
            self._communicator.all_reduce(target, "sum")
        ctypes.c_int32.from_address(valid_flag_address).value = 1


class GpuReducer(XlaReducer):
    """Sums of arrays on GPUs by NCCL, in XLA's stream.  The communicator is connected."""

    def __init__(self, rank: Rank, detector: InterruptDetector, communicator: XlaCommunicator):
        super().__init__(rank, detector)
        self._communicator = communicator

    def finish(self, spans: Sequence[BufferSpan], valid_flag_address: int, stream: int | None) -> None:
        self.begin_sum()
        self._rank.barriers.check_cancelled()
        self._communicator.enqueue_on_xla_stream(spans, "sum", valid_flag_address, stream)

    def wait_until_ended(self) -> None:
        super().wait_until_ended()
        self._communicator.wait_until_started()


def view_span(address: int, span: BufferSpan) -> np.ndarray:
    """Return a view of memory at an address as an array, with the number of items and dtype of a span."""
    dtype = np.dtype(span.dtype)
    memory = (ctypes.c_char * (span.n_items * dtype.itemsize)).from_address(address)
    return np.frombuffer(memoryview(memory), dtype)
