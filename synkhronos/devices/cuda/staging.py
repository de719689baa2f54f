"""Copies between shared memory and the GPU.

The pages of a Data object are locked when the object is first used, so that the GPU reads them at the full rate of the
bus: ranges of rows by its copy engine, indexed rows by a kernel whose threads read host memory.  The host only enqueues
these copies.

Input buffers on the GPU are reused::

    copy stream      rows 0 -> buffer A     rows 1 -> buffer B     rows 2 -> buffer A
                               |  event               |  event     ^
    compute stream             `-> launch 0 reads A   `-> launch 1 | reads B
                                        `--------- event ---------'

The second buffer is allocated only if a launch still reads the first one when the next rows are copied.

Indexes of rows that are on the GPU have few bytes.  They are copied on the compute stream, between two launches, into a
single buffer.  The host does not wait for this copy, as its source is page-locked memory that belongs to this module.
"""

from __future__ import annotations

import logging
import math
import mmap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np

from synkhronos.devices.selection import Buffers, Selection
from synkhronos.ranks import ArrayLocation, Rank, Segment
from synkhronos.variable_types import Array

_log = logging.getLogger("synkhronos")

T = TypeVar("T")

#: Maximal number of shapes for which an input has buffers: two for the slices of a call, and two for the last,
#: smaller batch of an epoch.
_MAX_SHAPES = 4
#: Number of blocks of the gather kernel: few, so that other kernels run at the same time.
_N_BLOCKS = 32
#: Number of threads of a block of the gather kernel.
_THREADS_PER_BLOCK = 512
#: Number of concurrent loads of a thread of the gather kernel: enough to fill the bus.
_LOADS_PER_THREAD = 4
#: Maximal number of bytes of arrays that are fetched through page-locked memory.
MAX_FETCH_NBYTES = 1 << 20
#: Minimal number of bytes of a block of page-locked memory for small arrays.
_MIN_PINNED_NBYTES = 1 << 20
#: CUDA_SUCCESS, as an integer.
_SUCCESS = 0

_GATHER = r"""
typedef unsigned long long Index;

template <typename Item, int LOADS>
__global__ void gather(const Item* source, const long long* rows, Item* target, Index count, unsigned int width)
{
    Index step = (Index)gridDim.x * blockDim.x;
    for (Index i = (Index)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += LOADS * step) {
        Item items[LOADS];
        #pragma unroll
        for (int k = 0; k < LOADS; k++) {
            Index position = i + k * step;
            if (position < count) {
                Index row = position / width;
                items[k] = source[(Index)rows[row] * width + (position - row * width)];
            }
        }
        #pragma unroll
        for (int k = 0; k < LOADS; k++)
            if (i + k * step < count) target[i + k * step] = items[k];
    }
}
"""
#: C types that the kernel copies, by size in bytes, widest first.
_ITEM_TYPES = {16: "uint4", 8: "unsigned long long", 4: "unsigned int", 2: "unsigned short", 1: "unsigned char"}


class ItemRange(NamedTuple):
    """Consecutive items of an array, to be written in place: the first one's address, and their bytes."""

    array: Any
    address: int
    nbytes: int


class GpuBytes:
    """Bytes of a computed array on the GPU."""

    def __init__(self, staging: Staging, array: Any):
        self._staging, self._array = staging, array
        self.size = math.prod(array.shape) * array.dtype.itemsize

    def copy_to(self, target: np.ndarray, start: int) -> None:
        """Copy as many bytes as a target in host memory has, from offset ``start``, and wait for the copy."""
        self._staging.copy_to_host(self._array, start, target)


def unwrap_cuda_result(results: Any) -> Any:
    """Return the value of a call of the CUDA driver.  Raise RuntimeError if the call has failed."""
    error, *values = results
    if error != _SUCCESS:
        from cuda.bindings import driver

        _, name = driver.cuGetErrorName(error)
        raise RuntimeError(f"CUDA: {name.decode() if isinstance(name, bytes) else error}")
    return values[0] if values else None


@dataclass(slots=True, eq=False)
class _InputBuffer:
    """A buffer on the GPU for an input; the event ``last_read`` is recorded after the last launch that reads it."""

    array: Any
    address: int
    last_read: Any = None


class _DoubleBuffer:
    """One or two buffers for one input of one shape.

    XLA's recorded launches depend on addresses, so there is one buffer as long as each launch completes before the next
    copy starts.  Otherwise there are two: one is filled while the other one is read.
    """

    def __init__(self, allocate: Callable[[], _InputBuffer]):
        self._allocate = allocate
        self._buffers = [allocate()]

    def acquire(self) -> _InputBuffer:
        """Return a buffer that no launch reads any more.  Wait for a launch if necessary."""
        buffer = self._buffers[0]
        if buffer.last_read is None or buffer.last_read.is_done:
            return buffer
        if len(self._buffers) == 1:
            self._buffers.append(self._allocate())
        self._buffers.reverse()
        buffer = self._buffers[0]
        if buffer.last_read is not None:
            buffer.last_read.sync()
        return buffer


class Staging:
    """Copies rows of shared memory to the GPU, and small arrays back.

    The priority of ``copy_stream`` is higher than that of computations, so that the next step's rows are copied during
    a step.  ``array_device`` is the `CudaDevice` of the arrays.  ``event`` is reused by `order_after`.  The first int32
    of ``host_valid_flag`` is the ``valid_flag`` of `NcclConnection`, in page-locked memory, which the GPU can read.
    """

    def __init__(self, array_device: Any):
        from cuda.bindings import driver
        from cuda.core import Device, Stream, StreamOptions, launch

        self.array_device = array_device
        self._launch = launch
        self.driver = driver
        self._device = Device(0)
        self._thread_locals = threading.local()
        self.set_current_gpu()
        self.copy_stream = self._device.create_stream(options=StreamOptions(priority=-1))
        self.copy_stream_handle = int(self.copy_stream.handle)
        self._compute_stream = None if array_device.stream is None else Stream.from_handle(array_device.stream)
        self.event = unwrap_cuda_result(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        self._kernels: dict[int, Any] = {}
        self._launch_configs: dict[int, Any] = {}
        #: Locked segments: address of the mapping, and of its first locked page.
        self._pinned_segments: dict[Segment, tuple[int, int]] = {}
        #: Buffers filled since the last launch.
        self._filled_buffers: list[_InputBuffer] = []
        self._has_pending_copies = False
        self._rank: Rank | None = None
        #: Last command in which a function was launched.
        self._last_command_number = 0
        self._index_memory, self._fetch_memory = _PinnedMemory(self), _PinnedMemory(self)
        self._index_ring = _PinnedRing(self)
        self.host_valid_flag = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.int32)
        self.pin_pages(self.host_valid_flag.ctypes.data, self.host_valid_flag.nbytes)
        #: Last selection whose row numbers were copied to page-locked memory, and their address there.
        self._pinned_rows: tuple[Selection | None, int] = None, 0

    def allocate_scratch(self, nbytes: int) -> int:
        """Free the last block of scratch memory on the GPU, and return the address of a new one."""
        self._scratch = self.array_device.empty((nbytes,), np.dtype(np.uint8))
        return self.array_device.get_address(self._scratch)

    @cached_property
    def side_stream(self) -> int:
        """Handle of a high-priority stream for communication that overlaps the library's computations."""
        from cuda.core import StreamOptions

        self._side_stream = self._device.create_stream(options=StreamOptions(priority=-1))
        return int(self._side_stream.handle)

    def set_current_gpu(self) -> None:
        """Make the GPU current in this thread; CUDA requires it once per thread."""
        if not hasattr(self._thread_locals, "is_set"):
            self._device.set_current()
            self._thread_locals.is_set = True

    # -- to the GPU ------------------------------------------------------------------------------------------

    def stage_input(self, rank: Rank, location: ArrayLocation, rows: Selection | None, buffers: Buffers) -> Any:
        """Start a copy of rows (None: all) to a reused buffer.  Return the buffer's array."""
        self._rank = rank
        shape = location.shape if rows is None else (len(rows), *location.shape[1:])
        buffer = self._get_or_allocate(buffers, shape, location.dtype, self._allocate_double_buffer).acquire()
        self._copy_rows(rank, location, rows, buffer.address)
        self._filled_buffers.append(buffer)
        return buffer.array

    def stage_indexes(self, values: np.ndarray, buffers: Buffers) -> Array:
        """Enqueue a copy of a vector of indexes to a reused buffer, before the next launch.  Return its array."""
        self.set_current_gpu()
        buffer = self._get_or_allocate(buffers, values.shape, values.dtype.str, self._allocate_buffer)
        if values.size:
            stream = self.array_device.stream
            source = self._index_ring.store(values)
            unwrap_cuda_result(
                self.driver.cuMemcpyAsync(
                    buffer.address, source, values.nbytes, self.copy_stream_handle if stream is None else stream
                )
            )
            if stream is None:  # each launch is waited for, so none reads the buffer
                self.copy_stream.sync()
        return buffer.array

    def read_segment(self, rank: Rank, location: ArrayLocation, rows: Selection | None) -> Array:
        """Copy rows (None: all) into a new array, and wait for the copy."""
        shape = location.shape if rows is None else (len(rows), *location.shape[1:])
        array = self._allocate(shape, location.dtype)
        self._copy_rows(rank, location, rows, self.array_device.get_address(array))
        self._wait_for_copies()
        return array

    # -- to host memory --------------------------------------------------------------------------------------

    def write_segment(self, rank: Rank, segment_key: int, offset: int, array: Array) -> None:
        """Copy an array into a segment of shared memory, at a byte offset, and wait for the copy."""
        self.array_device.wait([array])
        self.set_current_gpu()
        target = self.pin_segment(rank, segment_key) + offset
        source, nbytes = self.array_device.get_address(array), array.size * array.dtype.itemsize
        unwrap_cuda_result(self.driver.cuMemcpyAsync(target, source, nbytes, self.copy_stream_handle))
        self.copy_stream.sync()

    def copy_to_host(self, array: Array, start: int, target: np.ndarray) -> None:
        """Copy bytes of a computed array, from offset ``start``, into host memory, and wait for the copy."""
        if target.size:
            self.set_current_gpu()
            source = self.array_device.get_address(array) + start
            unwrap_cuda_result(
                self.driver.cuMemcpyAsync(target.ctypes.data, source, target.nbytes, self.copy_stream_handle)
            )
            self.copy_stream.sync()

    def to_numpy_if_small(self, arrays: Sequence[Array]) -> list[np.ndarray] | None:
        """Copy small arrays to host memory once they are computed, and wait for the copies.

        None is returned if the arrays are not small.  The compute stream must be known.
        """
        if sum(array.nbytes for array in arrays) > MAX_FETCH_NBYTES:
            return None
        self.set_current_gpu()
        if self._fetch_memory.used_nbytes:  # an interrupt has ended the last call before its copies were complete
            unwrap_cuda_result(self.driver.cuStreamSynchronize(self.array_device.stream))
            self._fetch_memory.used_nbytes = 0
        targets = [self._fetch_memory.allocate(array.nbytes) for array in arrays]
        for array, target in zip(arrays, targets, strict=True):
            if array.nbytes:
                source = self.array_device.get_address(array)
                unwrap_cuda_result(
                    self.driver.cuMemcpyAsync(target.ctypes.data, source, array.nbytes, self.array_device.stream)
                )
        unwrap_cuda_result(self.driver.cuStreamSynchronize(self.array_device.stream))
        self._fetch_memory.used_nbytes = 0
        return [
            target.view(array.dtype).reshape(array.shape).copy() for array, target in zip(arrays, targets, strict=True)
        ]

    # -- order of copies and launches ------------------------------------------------------------------------

    def record_event(self) -> Any:
        """Return an event on the compute stream, or None if the stream is unknown, as each launch is waited for."""
        return None if self._compute_stream is None else self._compute_stream.record()

    def order_after(self, stream: int | None, earlier_stream: int | None) -> None:
        """Make a stream wait for the work enqueued so far on another stream."""
        unwrap_cuda_result(self.driver.cuEventRecord(self.event, earlier_stream))
        unwrap_cuda_result(self.driver.cuStreamWaitEvent(stream, self.event, 0))

    def order_launch_after_copies(self) -> None:
        """Make the next launch wait for all pending copies, on the GPU if the compute stream is known, or else here."""
        if self._has_pending_copies:
            if self.array_device.stream is None:
                self._wait_for_copies()
            else:
                self.order_after(self.array_device.stream, self.copy_stream_handle)

    def record_launch(self) -> None:
        """Record that the last launch reads the buffers filled since the previous one, and wait for copies if needed.

        Copies have to complete before the end of the command, when the user may write into the memory that they read.
        From the second launch of a command on, this method waits for them.
        """
        if self._filled_buffers:
            event = self.record_event()
            for buffer in self._filled_buffers:
                buffer.last_read = event
        self._filled_buffers.clear()
        if self._rank is None or self._last_command_number == self._rank.command_number:
            self._wait_for_copies()
        else:
            self._last_command_number = self._rank.command_number

    def _mark_pending(self, rank: Rank) -> None:
        """Record that copies have been started, so that the command waits for them at its end, even if it fails."""
        if not self._has_pending_copies:
            self._has_pending_copies = True
            rank.finish_callbacks.append(self._wait_for_copies)

    def _wait_for_copies(self) -> None:
        if self._has_pending_copies:
            self.copy_stream.sync()
            self._has_pending_copies = False
            self._index_memory.used_nbytes = 0
            self._pinned_rows = None, 0

    # -- buffers ---------------------------------------------------------------------------------------------

    def _get_or_allocate(
        self, buffers: Buffers, shape: tuple[int, ...], dtype: str, allocate: Callable[[tuple[int, ...], str], T]
    ) -> T:
        """Return the buffer, or buffers, of an input for a shape, newly allocated if there are none."""
        buffer: T | None = buffers.get((shape, dtype))
        if buffer is None:
            while len(buffers) >= _MAX_SHAPES:
                # The library reuses the memory after the launches that read it.
                del buffers[next(iter(buffers))]
            buffer = buffers[shape, dtype] = allocate(shape, dtype)
        return buffer

    def _allocate_double_buffer(self, shape: tuple[int, ...], dtype: str) -> _DoubleBuffer:
        return _DoubleBuffer(lambda: self._allocate_buffer(shape, dtype))

    def _allocate_buffer(self, shape: tuple[int, ...], dtype: str) -> _InputBuffer:
        array = self._allocate(shape, dtype)
        return _InputBuffer(array, self.array_device.get_address(array))

    def _allocate(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Allocate an array.  Copies into it wait for earlier launches, which may still read memory that it reuses."""
        self.set_current_gpu()
        array = self.array_device.empty(shape, np.dtype(dtype))
        if self.array_device.stream is not None:
            self.order_after(self.copy_stream_handle, self.array_device.stream)
        return array

    # -- rows ------------------------------------------------------------------------------------------------

    def _copy_rows(self, rank: Rank, location: ArrayLocation, rows: Selection | None, target: int) -> None:
        """Start a copy of rows to an address on the GPU."""
        self.set_current_gpu()
        n_rows = 1 if not location.shape else location.shape[0] if rows is None else len(rows)
        row_nbytes = math.prod(location.shape[1:]) * int(location.dtype[2:])
        if not n_rows * row_nbytes:
            return
        source = self.pin_segment(rank, location.segment_key) + location.offset
        self._mark_pending(rank)
        if rows is None or isinstance(rows, range) and (rows.step == 1 or len(rows) == 1):
            start = 0 if rows is None else rows[0] * row_nbytes
            unwrap_cuda_result(
                self.driver.cuMemcpyAsync(target, source + start, n_rows * row_nbytes, self.copy_stream_handle)
            )
            return
        if rows is not self._pinned_rows[0]:
            indexes = rows if isinstance(rows, np.ndarray) else np.asarray(rows, np.int64)
            self._pinned_rows = rows, self._index_memory.store(indexes)
        itemsize = next(size for size in _ITEM_TYPES if not (row_nbytes | source | target) % size)
        width = row_nbytes // itemsize
        self._gather_rows(itemsize, source, self._pinned_rows[1], target, n_rows * width, width)

    def _gather_rows(self, itemsize: int, source: int, row_numbers: int, target: int, count: int, width: int) -> None:
        """Launch the gather kernel for ``count`` items, ``width`` per row.  The other arguments are addresses."""
        kernel = self._kernels.get(itemsize)
        if kernel is None:
            kernel = self._kernels[itemsize] = self._compile_gather(_ITEM_TYPES[itemsize])
        blocks = min(_N_BLOCKS, -(-count // _THREADS_PER_BLOCK))
        config = self._launch_configs.get(blocks)
        if config is None:
            from cuda.core import LaunchConfig

            config = self._launch_configs[blocks] = LaunchConfig(grid=blocks, block=_THREADS_PER_BLOCK)
        self._launch(self.copy_stream, config, kernel, source, row_numbers, target, np.uint64(count), np.uint32(width))

    def _compile_gather(self, item_type: str) -> Any:
        from cuda.core import Program, ProgramOptions

        capability = self._device.compute_capability
        options = ProgramOptions(std="c++17", arch=f"sm_{capability.major}{capability.minor}")
        name = f"gather<{item_type}, {_LOADS_PER_THREAD}>"
        return Program(_GATHER, "c++", options).compile("cubin", name_expressions=(name,)).get_kernel(name)

    # -- page-locked memory ----------------------------------------------------------------------------------

    def pin_segment(self, rank: Rank, segment_key: int) -> int:
        """Lock the pages of a segment unless they are locked.  Return its address, which is also valid on the GPU."""
        segment = rank.segments[segment_key]
        address, _ = self._pinned_segments.get(segment, (None, 0))
        if address is None:
            if self._unpin_segment not in rank.segments.before_unmap_callbacks:
                rank.segments.before_unmap_callbacks.append(self._unpin_segment)
            address = segment.view_array((0,), np.uint8).ctypes.data
            first_page = segment.allocated_bytes.start // mmap.PAGESIZE * mmap.PAGESIZE
            end = segment.allocated_bytes.stop
            try:
                self._pinned_segments[segment] = address, address + first_page
                self.pin_pages(address + first_page, end - first_page)
            except BaseException:
                self._unpin_segment(segment)
                raise
        return address

    def _unpin_segment(self, segment: Segment) -> None:
        """Unlock a segment that is about to be unmapped."""
        if segment in self._pinned_segments:
            self.unpin_pages(self._pinned_segments[segment][1])
            del self._pinned_segments[segment]

    def pin_pages(self, address: int, nbytes: int) -> None:
        """Lock the pages of a range of host memory, and map them on the GPU."""
        flags = self.driver.CU_MEMHOSTREGISTER_PORTABLE | self.driver.CU_MEMHOSTREGISTER_DEVICEMAP
        results = self.driver.cuMemHostRegister(address, nbytes, flags)
        if results[0] == self.driver.CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED:
            # An interrupt has ended an earlier call between the registration and its record.
            self.unpin_pages(address)
            results = self.driver.cuMemHostRegister(address, nbytes, flags)
        unwrap_cuda_result(results)

    def unpin_pages(self, address: int) -> None:
        """Unlock pages before they are unmapped.  Errors are only logged, as memory may be freed at any point."""
        try:
            self.set_current_gpu()
            (error,) = self.driver.cuMemHostUnregister(address)
        except Exception as raised:
            error = raised
        if error != self.driver.CUresult.CUDA_SUCCESS:
            _log.debug("page-locked memory could not be unlocked: %s", error)


class _PinnedMemory:
    """Page-locked memory for small arrays that are being copied.

    ``used_nbytes`` is the number of bytes in use.  The user of this object sets it to 0 when all copies are complete.
    """

    def __init__(self, staging: Staging):
        self._staging = staging
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
                    self._staging.unpin_pages(self._outgrown[-1].ctypes.data)
                del self._outgrown[-1]
        if self.used_nbytes + nbytes > self._memory.size:
            size = -(-max(_MIN_PINNED_NBYTES, 2 * (self.used_nbytes + nbytes)) // mmap.PAGESIZE) * mmap.PAGESIZE
            memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)
            try:
                self._staging.pin_pages(memory.ctypes.data, size)
                # Arrays in the old memory stay there until they are copied.
                self._outgrown.append(self._memory)
                self._memory, self._address, self.used_nbytes = memory, memory.ctypes.data, 0
            except BaseException:
                if self._memory is not memory:
                    self._staging.unpin_pages(memory.ctypes.data)
                raise
        start = self.used_nbytes
        self.used_nbytes += -(-nbytes // 64) * 64
        return start


class _PinnedRing:
    """Page-locked memory for small arrays that are copied on the compute stream.

    It has two halves: one of them is filled, while the arrays in the other one are copied.
    """

    def __init__(self, staging: Staging):
        self._staging = staging
        self._halves = [_PinnedMemory(staging), _PinnedMemory(staging)]
        #: For each half, an event after the copies of its arrays.
        self._events: list[Any] = [None, None]
        self._current = 0

    def store(self, values: np.ndarray) -> int:
        """Copy a vector into the memory, and return its address.  Its copy has to be enqueued before the next call."""
        if self._halves[self._current].used_nbytes + values.nbytes > _MIN_PINNED_NBYTES:
            self._events[self._current] = self._staging.record_event()
            self._current = 1 - self._current
            if (event := self._events[self._current]) is not None:
                event.sync()
            self._halves[self._current].used_nbytes = 0
        return self._halves[self._current].store(values)
