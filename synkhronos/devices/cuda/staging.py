"""Between host memory and the GPU.

`Staging`
    Copies rows of shared memory into arrays on the GPU, on a stream of its own, and small arrays back.
`Arrays`
    What it has to know of them.
`Items`
    A run of an array's items.

The shared memory of a Data object is page-locked when it is first used, so that the GPU reads it by itself, at the full
rate of the bus: runs of rows by its copy engine, rows by index by a kernel whose threads read host memory directly.
The processor only says which rows.

Inputs go into memory that is used again: an array for each input and shape, and a second one where the GPU still
computes from the first when the next rows come.
"""

from __future__ import annotations

import logging
import math
import mmap
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from synkhronos.devices.host import Selection
from synkhronos.ranks import Rank, Segment, SharedArray

_log = logging.getLogger("synkhronos")

#: Shapes of one input for which memory is kept: a call has two at most, and the last minibatch of an epoch others.
_SHAPES = 4
#: Enough to fill the bus, as each thread has several loads on their way, and few enough to leave the GPU to others.
_BLOCKS, _THREADS, _LOADS = 32, 512, 4
#: Bytes up to which arrays are small.
_SMALL = 1 << 20
#: CUDA_SUCCESS: CUDA's own results are integers.
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
            Index at = i + k * step;
            if (at < count) {
                Index row = at / width;
                items[k] = source[(Index)rows[row] * width + (at - row * width)];
            }
        }
        #pragma unroll
        for (int k = 0; k < LOADS; k++)
            if (i + k * step < count) target[i + k * step] = items[k];
    }
}
"""
#: The kernel's types of items, widest first: each with its size in bytes.
_ITEMS = {16: "uint4", 8: "unsigned long long", 4: "unsigned int", 2: "unsigned short", 1: "unsigned char"}


class Arrays(Protocol):
    """One kind of array on a GPU."""

    @property
    def stream(self) -> int | None:
        """The stream on which these arrays are computed, behind whose work other work may be put; None if not known."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return a new array, of whatever there is."""

    def pointer(self, array: Any) -> int:
        """Return where an array lies on the GPU."""

    def wait_for(self, array: Any) -> None:
        """Wait until an array has been computed: where the stream is not known."""


class Items(NamedTuple):
    """A run of an array's items, to be written in place."""

    array: Any
    pointer: int
    nbytes: int


def check(results: Any) -> Any:
    """Return what a function of the CUDA driver returned, or raise its error."""
    error, *values = results
    if error != _SUCCESS:
        from cuda.bindings import driver

        _, name = driver.cuGetErrorName(error)
        raise RuntimeError(f"CUDA: {name.decode() if isinstance(name, bytes) else error}")
    return values[0] if values else None


class _Buffer:
    """An array on the GPU to copy rows into, and the event at which the launch that last read it was done."""

    __slots__ = ("array", "at", "read")

    def __init__(self, array: Any, at: int):
        self.array = array
        self.at = at
        self.read: Any = None


class _Slot:
    """Memory for one input of one shape.

    One array as long as the launch that reads it is done when the next rows come (XLA records launches, and has to
    record them anew when addresses change), else two in turn, so that one is filled while the other is read.
    """

    def __init__(self, make: Callable[[], _Buffer]):
        self._make = make
        self._buffers = [make()]

    def next(self) -> _Buffer:
        """Return the array to fill now, once nothing reads it any more."""
        first = self._buffers[0]
        if first.read is None or first.read.is_done:
            return first
        if len(self._buffers) == 1:
            self._buffers.append(self._make())
        self._buffers.reverse()
        now = self._buffers[0]
        if now.read is not None:
            now.read.sync()
        return now


class Staging:
    """Copies rows of shared memory to the GPU.

    Parameters
    ----------
    arrays : Arrays
        The kind of array to copy into.
    """

    def __init__(self, arrays: Arrays):
        from cuda.bindings import driver
        from cuda.core import Device, Stream, StreamOptions, launch

        self.arrays = arrays
        self._start = launch
        self.driver = driver
        self._device = Device(0)
        self._entered = threading.local()
        self.enter()
        # Before what waits for room on the GPU: the rows of the next step come while this one is computed.
        self.stream = self._device.create_stream(options=StreamOptions(priority=-1))
        self.handle = int(self.stream.handle)
        self._of_arrays = None if arrays.stream is None else Stream.from_handle(arrays.stream)
        self.event = check(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        self._kernels: dict[int, Any] = {}
        self._configs: dict[int, Any] = {}
        #: Segments whose pages are locked, their addresses, and those of the first pages that are locked.
        self._locked: dict[Segment, tuple[int, int]] = {}
        self._filled: list[_Buffer] = []
        self._pending = False
        self._rank: Rank | None = None
        #: The last command in which something was launched.
        self._last = 0
        self._vector, self._fetched = _Pinned(self), _Pinned(self)
        #: Some int32 that the GPU reads.
        self.page = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.int32)
        self.lock(self.page.ctypes.data, self.page.nbytes)
        #: The selection whose indexes were pinned last, and where.
        self._pinned: tuple[Selection | None, int] = None, 0

    def scratch(self, nbytes: int) -> int:
        """Return the address of some bytes on the GPU, of no meaning."""
        self._scratch = self.arrays.empty((nbytes,), np.dtype(np.uint8))
        return self.arrays.pointer(self._scratch)

    @cached_property
    def beside(self) -> int:
        """A stream for what is computed beside XLA's or Theano's work, and before what waits for room on the GPU."""
        from cuda.core import StreamOptions

        self._beside = self._device.create_stream(options=StreamOptions(priority=-1))
        return int(self._beside.handle)

    def enter(self) -> None:
        """Make the GPU this thread's, as CUDA wants it of every thread, once."""
        if not hasattr(self._entered, "at"):
            self._device.set_current()
            self._entered.at = True

    def input(self, rank: Rank, kept: dict[Any, Any], key: Any, location: SharedArray, rows: Selection | None) -> Any:
        """Start to copy rows into kept memory, and return the array that they will be in."""
        self._rank = rank
        shape = location.shape if rows is None else (len(rows), *location.shape[1:])
        buffer = self._slot(kept, key, shape, location.dtype).next()
        self._copy(rank, location, rows, buffer.at)
        self._filled.append(buffer)
        return buffer.array

    def vector(self, rank: Rank, kept: dict[Any, Any], key: Any, values: np.ndarray) -> Any:
        """Start to copy a vector of indexes into kept memory, and return the array that they will be in."""
        self._rank = rank
        self.enter()
        self._started(rank)
        buffer = self._slot(kept, key, values.shape, values.dtype.str).next()
        if values.size:
            check(self.driver.cuMemcpyAsync(buffer.at, self._vector.put(values), values.nbytes, self.handle))
        self._filled.append(buffer)
        return buffer.array

    def load(self, rank: Rank, location: SharedArray, rows: Selection | None) -> Any:
        """Copy rows into a new array."""
        shape = location.shape if rows is None else (len(rows), *location.shape[1:])
        array = self._made(shape, location.dtype)
        self._copy(rank, location, rows, self.arrays.pointer(array))
        self._arrived()
        return array

    def write(self, rank: Rank, key: int, offset: int, array: Any) -> None:
        """Copy an array to a place in a segment of shared memory, and wait until it is there."""
        self.arrays.wait_for(array)
        self.enter()
        target = self.locked(rank, key) + offset
        check(self.driver.cuMemcpyAsync(target, self.arrays.pointer(array), array.nbytes, self.handle))
        self.stream.sync()

    def fetch(self, arrays: Sequence[Any]) -> list[np.ndarray] | None:
        """Copy small arrays to the host behind what computes them, and wait until they are there; None if they are not.

        Only where the arrays' stream is known.
        """
        if sum(array.nbytes for array in arrays) > _SMALL:
            return None
        self.enter()
        if self._fetched.used:  # an interrupt came before the last copies had arrived
            check(self.driver.cuStreamSynchronize(self.arrays.stream))
            self._fetched.used = 0
        targets = [self._fetched.room(array.nbytes) for array in arrays]
        for array, target in zip(arrays, targets, strict=True):
            if array.nbytes:
                source = self.arrays.pointer(array)
                check(self.driver.cuMemcpyAsync(target.ctypes.data, source, array.nbytes, self.arrays.stream))
        check(self.driver.cuStreamSynchronize(self.arrays.stream))
        self._fetched.used = 0
        return [
            target.view(array.dtype).reshape(array.shape).copy() for array, target in zip(arrays, targets, strict=True)
        ]

    def arrive(self) -> None:
        """Have the launch that comes now wait for all copies that were started."""
        if self._pending:
            if self.arrays.stream is None:
                self._arrived()
            else:
                check(self.driver.cuEventRecord(self.event, self.handle))
                check(self.driver.cuStreamWaitEvent(self.arrays.stream, self.event, 0))

    def launched(self) -> None:
        """Note that the last launch reads what was filled since the one before, until it has computed.

        The copies are waited for by the end of the command: from then on the user may write into the memory that they
        read.  The second launch in one command waits for them at once, and so do all that follow.
        """
        if self._filled and self._of_arrays is not None:
            done = self._of_arrays.record()
            for buffer in self._filled:
                buffer.read = done
        self._filled.clear()
        if self._rank is None or self._last == self._rank.command:
            self._arrived()
        else:
            self._last = self._rank.command

    def _started(self, rank: Rank) -> None:
        """Note that copies are on their way, which are waited for by the end of the command, however that goes."""
        if not self._pending:
            self._pending = True
            rank.at_finish.append(self._arrived)

    def _arrived(self) -> None:
        if self._pending:
            self.stream.sync()
            self._pending = False
            self._vector.used = 0
            self._pinned = None, 0

    def _slot(self, kept: dict[Any, Any], key: Any, shape: tuple[int, ...], dtype: str) -> _Slot:
        slots: dict[Any, _Slot] = kept.setdefault(key, {})
        slot = slots.get((shape, dtype))
        if slot is None:
            while len(slots) >= _SHAPES:
                del slots[next(iter(slots))]  # the memory is used again when the launches that read it are done

            def make() -> _Buffer:
                array = self._made(shape, dtype)
                return _Buffer(array, self.arrays.pointer(array))

            slot = slots[shape, dtype] = _Slot(make)
        return slot

    def _made(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Return a new array to copy into: once what was there before is no longer read."""
        self.enter()
        array = self.arrays.empty(shape, np.dtype(dtype))
        if self.arrays.stream is not None:
            check(self.driver.cuEventRecord(self.event, self.arrays.stream))
            check(self.driver.cuStreamWaitEvent(self.handle, self.event, 0))
        return array

    def _copy(self, rank: Rank, location: SharedArray, rows: Selection | None, target: int) -> None:
        """Start to copy rows to an address on the GPU."""
        self.enter()
        n_rows = 1 if not location.shape else location.shape[0] if rows is None else len(rows)
        width = math.prod(location.shape[1:]) * int(location.dtype[2:])
        if not n_rows * width:
            return
        source = self.locked(rank, location.key) + location.offset
        self._started(rank)
        if rows is None or isinstance(rows, range) and (rows.step == 1 or len(rows) == 1):
            start = 0 if rows is None else rows[0] * width
            check(self.driver.cuMemcpyAsync(target, source + start, n_rows * width, self.handle))
            return
        if rows is not self._pinned[0]:
            self._pinned = rows, self._vector.put(rows if isinstance(rows, np.ndarray) else np.asarray(rows, np.int64))
        item = next(size for size in _ITEMS if not (width | source | target) % size)
        self._gather(item, source, self._pinned[1], target, n_rows * (width // item), width // item)

    def _gather(self, item: int, source: int, index: int, target: int, count: int, width: int) -> None:
        """Start the kernel on items of a size in bytes: so many in all, and so many in a row."""
        kernel = self._kernels.get(item)
        if kernel is None:
            kernel = self._kernels[item] = self._compiled(_ITEMS[item])
        blocks = min(_BLOCKS, -(-count // _THREADS))
        config = self._configs.get(blocks)
        if config is None:
            from cuda.core import LaunchConfig

            config = self._configs[blocks] = LaunchConfig(grid=blocks, block=_THREADS)
        self._start(self.stream, config, kernel, source, index, target, np.uint64(count), np.uint32(width))

    def _compiled(self, item: str) -> Any:
        from cuda.core import Program, ProgramOptions

        capability = self._device.compute_capability
        options = ProgramOptions(std="c++17", arch=f"sm_{capability.major}{capability.minor}")
        name = f"gather<{item}, {_LOADS}>"
        return Program(_GATHER, "c++", options).compile("cubin", name_expressions=(name,)).get_kernel(name)

    def locked(self, rank: Rank, key: int) -> int:
        """Return a segment's address, which the GPU shares, and lock its pages in memory if they aren't yet."""
        segment = rank.segments[key]
        address, _ = self._locked.get(segment, (None, 0))
        if address is None:
            if self._forget not in rank.segments.at_drop:
                rank.segments.at_drop.append(self._forget)
            address = segment.array((0,), np.uint8).ctypes.data
            first, last = segment.here.start // mmap.PAGESIZE * mmap.PAGESIZE, segment.here.stop
            try:
                self._locked[segment] = address, address + first
                self.lock(address + first, last - first)
            except BaseException:
                self._forget(segment)
                raise
        return address

    def _forget(self, segment: Segment) -> None:
        """Unlock a segment that is about to be unmapped."""
        if segment in self._locked:
            self.unlock(self._locked[segment][1])
            del self._locked[segment]

    def lock(self, address: int, nbytes: int) -> None:
        """Lock the pages of some memory."""
        flags = self.driver.CU_MEMHOSTREGISTER_PORTABLE | self.driver.CU_MEMHOSTREGISTER_DEVICEMAP
        results = self.driver.cuMemHostRegister(address, nbytes, flags)
        if results[0] == self.driver.CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED:
            # An interrupt came before anybody had noted it.
            self.unlock(address)
            results = self.driver.cuMemHostRegister(address, nbytes, flags)
        check(results)

    def unlock(self, address: int) -> None:
        """Unlock pages before they are unmapped: the memory may go in the middle of anything, so this doesn't fail."""
        try:
            self.enter()
            (error,) = self.driver.cuMemHostUnregister(address)
        except Exception as raised:
            error = raised
        if error != self.driver.CUresult.CUDA_SUCCESS:
            _log.debug("page-locked memory could not be unlocked: %s", error)


class _Pinned:
    """Page-locked memory for small arrays on their way, until all have arrived."""

    def __init__(self, staging: Staging):
        self._staging = staging
        self._memory: np.ndarray = np.empty(0, np.uint8)
        self._full: list[np.ndarray] = []
        self.used = 0

    def put(self, values: np.ndarray) -> int:
        """Copy a vector there, and return its address."""
        target = self.room(values.nbytes)
        target.view(values.dtype)[:] = values
        return int(target.ctypes.data)

    def room(self, nbytes: int) -> np.ndarray:
        """Return so many bytes of it."""
        if self.used == 0:
            while self._full:
                if self._full[-1].size and self._full[-1] is not self._memory:
                    self._staging.unlock(self._full[-1].ctypes.data)
                del self._full[-1]
        if self.used + nbytes > self._memory.size:
            size = -(-max(1 << 20, 2 * (self.used + nbytes)) // mmap.PAGESIZE) * mmap.PAGESIZE
            memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)
            try:
                self._staging.lock(memory.ctypes.data, size)
                # What is on its way stays where it is; from the next time on there is room for all of it.
                self._full.append(self._memory)
                self._memory, self.used = memory, 0
            except BaseException:
                if self._memory is not memory:
                    self._staging.unlock(memory.ctypes.data)
                raise
        target = self._memory[self.used : self.used + nbytes]
        self.used += -(-nbytes // 64) * 64
        return target
