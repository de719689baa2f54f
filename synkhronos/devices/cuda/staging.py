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

import math
import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from synkhronos.devices.cuda.gpu_context import GpuArrays, GpuContext, unwrap_cuda_result
from synkhronos.devices.cuda.pinned_memory import PinnedMemory, PinnedRing, PinnedSegments
from synkhronos.devices.device import HostTransfers
from synkhronos.devices.selection import Buffers, Selection
from synkhronos.ranks import ArrayLocation, Rank, count_available_cores
from synkhronos.variable_types import Array

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

#: Maximal number of threads that make the pages of an array in host memory.
_MAX_PAGE_THREADS = 4
#: Maximal number of bytes of an array whose pages a single thread makes.
_MAX_SINGLE_THREAD_NBYTES = 1 << 22

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


class GpuBytes:
    """Bytes of a computed array on the GPU."""

    def __init__(self, staging: Staging, array: Any):
        self._staging, self._array = staging, array
        self.size = math.prod(array.shape) * array.dtype.itemsize

    def copy_to(self, target: np.ndarray, start: int) -> None:
        """Fill ``target``, a vector of uint8, with the bytes from offset ``start`` on, and wait for the copy."""
        self._staging.copy_to_host(self._array, start, target)


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


class Staging(HostTransfers):
    """Copies rows of shared memory to the GPU, and small arrays back, on the copy stream of a `GpuContext`."""

    def __init__(self, gpu: GpuContext):
        from cuda.core import launch

        super().__init__(gpu.array_device)
        self._device: GpuArrays = gpu.array_device
        self._gpu, self._driver = gpu, gpu.driver
        self._launch = launch
        self._kernels: dict[int, Any] = {}
        self._launch_configs: dict[int, Any] = {}
        self.pinned_segments = PinnedSegments(gpu)
        #: Buffers filled since the last launch.
        self._filled_buffers: list[_InputBuffer] = []
        self._has_pending_copies = False
        self._rank: Rank | None = None
        #: Last command in which a function was launched.
        self._last_command_number = 0
        self._index_memory, self._fetch_memory = PinnedMemory(gpu), PinnedMemory(gpu)
        self._index_ring = PinnedRing(gpu)
        #: Last selection whose row numbers were copied to page-locked memory, and their address there.
        self._pinned_rows: tuple[Selection | None, int] = None, 0

    # -- to the GPU ------------------------------------------------------------------------------------------

    def stage_input(
        self, rank: Rank, location: ArrayLocation, rows: Selection | None, buffers: Buffers, must_copy: bool
    ) -> Any:
        """Start a copy of rows (None: all) to a reused buffer, and return the buffer's array.

        With ``must_copy``, the result is a new array if the device's library may return an input as an output.
        """
        if must_copy and self._device.may_return_inputs:
            return self.read_rows(rank, location, rows)
        self._rank = rank
        shape = location.shape if rows is None else (len(rows), *location.shape[1:])
        buffer = self._get_or_allocate(buffers, shape, location.dtype, self._allocate_double_buffer).acquire()
        self._copy_rows(rank, location, rows, buffer.address)
        self._filled_buffers.append(buffer)
        return buffer.array

    def stage_indexes(self, values: np.ndarray, buffers: Buffers) -> Array:
        """Enqueue a copy of a vector of indexes to a reused buffer, before the next launch.  Return its array."""
        self._gpu.set_current_gpu()
        buffer = self._get_or_allocate(buffers, values.shape, values.dtype.str, self._allocate_buffer)
        if values.size:
            stream = self._device.stream
            source = self._index_ring.store(values)
            unwrap_cuda_result(
                self._driver.cuMemcpyAsync(
                    buffer.address, source, values.nbytes, self._gpu.copy_stream_handle if stream is None else stream
                )
            )
            if stream is None:  # each launch is waited for, so none reads the buffer
                self._gpu.copy_stream.sync()
        return buffer.array

    def read_rows(self, rank: Rank, location: ArrayLocation, rows: Selection | None) -> Array:
        """Copy rows (None: all) into a new array, and wait for the copy."""
        shape = location.shape if rows is None else (len(rows), *location.shape[1:])
        array = self._allocate(shape, location.dtype)
        self._copy_rows(rank, location, rows, self._device.get_address(array))
        self.wait_for_copies()
        return array

    # -- to host memory --------------------------------------------------------------------------------------

    def write_segment(self, rank: Rank, segment_key: int, offset: int, value: Array) -> None:
        """Copy an array into a segment of shared memory, at a byte offset, and wait for the copy."""
        array = self._device.as_contiguous(value)
        self._device.wait([array])
        self._gpu.set_current_gpu()
        target = self.pinned_segments.pin(rank, segment_key) + offset
        source, nbytes = self._device.get_address(array), array.size * array.dtype.itemsize
        unwrap_cuda_result(self._driver.cuMemcpyAsync(target, source, nbytes, self._gpu.copy_stream_handle))
        self._gpu.copy_stream.sync()

    def empty_in_host_memory(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return a new NumPy array of undefined content whose pages exist, for a large result.

        The system makes new pages at their first use.  For a single thread this takes several times as long as the
        copy from the GPU.
        """
        array = np.empty(shape, dtype)
        n_threads = min(_MAX_PAGE_THREADS, count_available_cores() // 2)
        if array.nbytes > _MAX_SINGLE_THREAD_NBYTES and n_threads > 1:
            pages = array.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE]
            with ThreadPoolExecutor(n_threads) as threads:
                list(threads.map(lambda part: part.fill(0), np.array_split(pages, n_threads)))
        return array

    def as_byte_source(self, value: Array) -> GpuBytes:
        """Wait until an array is computed, and return its bytes."""
        self._device.wait([value])
        return GpuBytes(self, self._device.as_contiguous(value))

    def copy_to_host(self, array: Array, start: int, target: np.ndarray) -> None:
        """Copy bytes of a computed array, from offset ``start``, into host memory, and wait for the copy."""
        if target.size:
            self._gpu.set_current_gpu()
            source = self._device.get_address(array) + start
            unwrap_cuda_result(
                self._driver.cuMemcpyAsync(target.ctypes.data, source, target.nbytes, self._gpu.copy_stream_handle)
            )
            self._gpu.copy_stream.sync()

    def to_numpy_if_small(self, arrays: Sequence[Array]) -> list[np.ndarray] | None:
        """Copy small arrays to host memory once they are computed, and wait for the copies.

        None is returned if the arrays are not small.  The compute stream must be known.
        """
        if sum(array.nbytes for array in arrays) > MAX_FETCH_NBYTES:
            return None
        self._gpu.set_current_gpu()
        if self._fetch_memory.used_nbytes:  # an interrupt has ended the last call before its copies were complete
            unwrap_cuda_result(self._driver.cuStreamSynchronize(self._device.stream))
            self._fetch_memory.used_nbytes = 0
        targets = [self._fetch_memory.allocate(array.nbytes) for array in arrays]
        for array, target in zip(arrays, targets, strict=True):
            if array.nbytes:
                source = self._device.get_address(array)
                unwrap_cuda_result(
                    self._driver.cuMemcpyAsync(target.ctypes.data, source, array.nbytes, self._device.stream)
                )
        unwrap_cuda_result(self._driver.cuStreamSynchronize(self._device.stream))
        self._fetch_memory.used_nbytes = 0
        return [
            target.view(array.dtype).reshape(array.shape).copy() for array, target in zip(arrays, targets, strict=True)
        ]

    # -- order of copies and launches ------------------------------------------------------------------------

    def order_launch_after_copies(self) -> None:
        """Make the next launch wait for all pending copies, on the GPU if the compute stream is known, or else here."""
        if self._has_pending_copies:
            if self._device.stream is None:
                self.wait_for_copies()
            else:
                self._gpu.order_after(self._device.stream, self._gpu.copy_stream_handle)

    def finish_launch(self) -> None:
        """Order later copies after the last launch, which reads the buffers filled since the previous one.

        From the second launch of a command on, also wait for the copies, as they occupy page-locked memory.  Copies for
        a single launch are waited for at the end of the command, so that the rank goes on meanwhile.
        """
        if self._filled_buffers:
            event = self._gpu.record_event()
            for buffer in self._filled_buffers:
                buffer.last_read = event
        self._filled_buffers.clear()
        if self._rank is None or self._last_command_number == self._rank.command_number:
            self.wait_for_copies()
        else:
            self._last_command_number = self._rank.command_number

    def _mark_pending(self, rank: Rank) -> None:
        """Record that copies have been started, so that the command waits for them at its end, even if it fails."""
        if not self._has_pending_copies:
            rank.finish_callbacks.append(self.wait_for_copies)
            self._has_pending_copies = True

    def wait_for_copies(self) -> None:
        """Wait for all pending copies."""
        if self._has_pending_copies:
            self._gpu.copy_stream.sync()
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
        return _InputBuffer(array, self._device.get_address(array))

    def _allocate(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Allocate an array.  Copies into it wait for earlier launches, which may still read memory that it reuses."""
        self._gpu.set_current_gpu()
        array = self._device.empty(shape, np.dtype(dtype))
        if self._device.stream is not None:
            self._gpu.order_after(self._gpu.copy_stream_handle, self._device.stream)
        return array

    # -- rows ------------------------------------------------------------------------------------------------

    def _copy_rows(self, rank: Rank, location: ArrayLocation, rows: Selection | None, target: int) -> None:
        """Start a copy of rows to an address on the GPU."""
        self._gpu.set_current_gpu()
        n_rows = 1 if not location.shape else location.shape[0] if rows is None else len(rows)
        row_nbytes = math.prod(location.shape[1:]) * int(location.dtype[2:])
        if not n_rows * row_nbytes:
            return
        source = self.pinned_segments.pin(rank, location.segment_key) + location.offset
        self._mark_pending(rank)
        if rows is None or isinstance(rows, range) and (rows.step == 1 or len(rows) == 1):
            start = 0 if rows is None else rows[0] * row_nbytes
            unwrap_cuda_result(
                self._driver.cuMemcpyAsync(target, source + start, n_rows * row_nbytes, self._gpu.copy_stream_handle)
            )
            return
        if rows is not self._pinned_rows[0]:
            indexes = rows if isinstance(rows, np.ndarray) else np.asarray(rows, np.int64)
            self._pinned_rows = rows, self._index_memory.store(indexes)
        itemsize = next(size for size in _ITEM_TYPES if not (row_nbytes | source | target) % size)
        width = row_nbytes // itemsize
        self._gather_rows(itemsize, source, self._pinned_rows[1], target, n_rows * width, width)

    def _gather_rows(
        self, itemsize: int, source: int, row_numbers_address: int, target: int, count: int, width: int
    ) -> None:
        """Launch the gather kernel for ``count`` items, ``width`` per row, from one address to another."""
        kernel = self._kernels.get(itemsize)
        if kernel is None:
            kernel = self._kernels[itemsize] = self._compile_gather(_ITEM_TYPES[itemsize])
        blocks = min(_N_BLOCKS, -(-count // _THREADS_PER_BLOCK))
        config = self._launch_configs.get(blocks)
        if config is None:
            from cuda.core import LaunchConfig

            config = self._launch_configs[blocks] = LaunchConfig(grid=blocks, block=_THREADS_PER_BLOCK)
        self._launch(
            self._gpu.copy_stream,
            config,
            kernel,
            source,
            row_numbers_address,
            target,
            np.uint64(count),
            np.uint32(width),
        )

    def _compile_gather(self, item_type: str) -> Any:
        from cuda.core import Program, ProgramOptions

        capability = self._gpu.device.compute_capability
        options = ProgramOptions(std="c++17", arch=f"sm_{capability.major}{capability.minor}")
        name = f"gather<{item_type}, {_LOADS_PER_THREAD}>"
        return Program(_GATHER, "c++", options).compile("cubin", name_expressions=(name,)).get_kernel(name)
