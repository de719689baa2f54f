"""Page-locked host memory, which the GPU reads and writes at the full rate of the bus."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from synkhronos.devices.cuda.gpu_context import GpuContext
from synkhronos.ranks import Rank, Segment

#: Minimal number of bytes of a block of page-locked memory for small arrays.
_MIN_PINNED_NBYTES = 1 << 20


class PinnedSegments:
    """Segments of shared memory whose pages are locked, from their first use by the GPU until they are unmapped."""

    def __init__(self, gpu: GpuContext):
        self._gpu = gpu
        #: Address of the mapping, and of its first locked page, by segment.
        self._addresses: dict[Segment, tuple[int, int]] = {}

    def pin(self, rank: Rank, segment_key: int) -> int:
        """Lock the pages of a segment unless they are locked.  Return its address, which is also valid on the GPU."""
        segment = rank.segments[segment_key]
        address, _ = self._addresses.get(segment, (None, 0))
        if address is None:
            if self._unpin not in rank.segments.before_unmap_callbacks:
                rank.segments.before_unmap_callbacks.append(self._unpin)
            address = segment.view_array((0,), np.uint8).ctypes.data
            first_page = segment.allocated_bytes.start // mmap.PAGESIZE * mmap.PAGESIZE
            end = segment.allocated_bytes.stop
            try:
                self._addresses[segment] = address, address + first_page
                self._gpu.pin_pages(address + first_page, end - first_page)
            except BaseException:
                self._unpin(segment)
                raise
        return address

    def _unpin(self, segment: Segment) -> None:
        """Unlock a segment that is about to be unmapped."""
        if segment in self._addresses:
            self._gpu.unpin_pages(self._addresses[segment][1])
            del self._addresses[segment]


class PinnedMemory:
    """Page-locked memory for small arrays that are being copied.

    ``used_nbytes`` is the number of bytes in use.  The user of this object sets it to 0 when all copies are complete.
    """

    def __init__(self, gpu: GpuContext):
        self._gpu = gpu
        self._memory: np.ndarray = np.empty(0, np.uint8)
        self._address = 0
        #: Earlier memory that was too small; in use until all copies are complete.
        self._outgrown: list[np.ndarray] = []
        self.used_nbytes = 0

    def store(self, values: np.ndarray) -> int:
        """Copy a vector into the memory, and return its address."""
        start = self._reserve(values.nbytes)
        self._memory[start : start + values.nbytes].view(values.dtype)[:] = values
        return self._address + start

    def allocate(self, nbytes: int) -> np.ndarray:
        """Return a block of ``nbytes`` bytes."""
        start = self._reserve(nbytes)
        return self._memory[start : start + nbytes]

    def _reserve(self, nbytes: int) -> int:
        """Return the offset of an unused block of ``nbytes`` bytes."""
        if self.used_nbytes == 0:
            while self._outgrown:
                if self._outgrown[-1].size and self._outgrown[-1] is not self._memory:
                    self._gpu.unpin_pages(self._outgrown[-1].ctypes.data)
                del self._outgrown[-1]
        if self.used_nbytes + nbytes > self._memory.size:
            size = -(-max(_MIN_PINNED_NBYTES, 2 * (self.used_nbytes + nbytes)) // mmap.PAGESIZE) * mmap.PAGESIZE
            memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)
            try:
                self._gpu.pin_pages(memory.ctypes.data, size)
                # Arrays in the old memory stay there until they are copied.
                self._outgrown.append(self._memory)
                self._memory, self._address, self.used_nbytes = memory, memory.ctypes.data, 0
            except BaseException:
                if self._memory is not memory:
                    self._gpu.unpin_pages(memory.ctypes.data)
                raise
        start = self.used_nbytes
        self.used_nbytes += -(-nbytes // 64) * 64
        return start


class PinnedRing:
    """Page-locked memory for small arrays that are copied on the compute stream.

    It has two halves: one of them is filled, while the arrays in the other one are copied.
    """

    def __init__(self, gpu: GpuContext):
        self._gpu = gpu
        self._halves = [PinnedMemory(gpu), PinnedMemory(gpu)]
        #: For each half, an event after the copies of its arrays.
        self._events: list[Any] = [None, None]
        self._current = 0

    def store(self, values: np.ndarray) -> int:
        """Copy a vector into the memory, and return its address.  Its copy has to be enqueued before the next call."""
        if self._halves[self._current].used_nbytes + values.nbytes > _MIN_PINNED_NBYTES:
            self._events[self._current] = self._gpu.record_event()
            self._current = 1 - self._current
            if (event := self._events[self._current]) is not None:
                event.sync()
            self._halves[self._current].used_nbytes = 0
        return self._halves[self._current].store(values)
