"""From host memory to the GPU.

`Staging`
    Copies rows of shared memory into arrays on the GPU, on a stream of its own.
`Part`
    A run of an array's items.

The shared memory of a Data object is page-locked when it is first used, so that the GPU reads it by itself, at the full
rate of the bus: runs of rows by its copy engine, rows by index by a kernel whose threads read host memory directly.
The processor only says which rows.

Inputs go into memory that is used again: an array for each input and shape, and a second one where the GPU still
computes from the first when the next rows come.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from synkhronos.devices.host import Selection
from synkhronos.devices.jax.stream import compute_stream
from synkhronos.ranks import Rank, SharedArray

#: Shapes of one input for which memory is kept: a call has two at most, and the last minibatch of an epoch others.
_SHAPES = 4
_THREADS = 256
_BLOCKS = 2048

_GATHER = r"""
template <typename Item>
__global__ void gather(const Item* source, const long long* index, Item* target,
                       unsigned long long count, unsigned int width)
{
    unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
        unsigned long long row = i / width;
        target[i] = source[(unsigned long long)index[row] * width + (i - row * width)];
    }
}
"""
#: The kernel's types of items, widest first: each with its size in bytes.
_ITEMS = {16: "uint4", 8: "unsigned long long", 4: "unsigned int", 2: "unsigned short", 1: "unsigned char"}


class Part(NamedTuple):
    """A run of an array's items, to be written in place."""

    array: Any
    start: int
    size: int

    @property
    def pointer(self) -> int:
        """Where it begins on the GPU."""
        return pointer(self.array) + self.start * self.array.dtype.itemsize


def pointer(array: Any) -> int:
    """Return where a JAX array lies on the GPU, once it has been computed."""
    return int(array.block_until_ready().unsafe_buffer_pointer())


def check(results: Any) -> Any:
    """Return what a function of the CUDA driver returned, or raise its error."""
    from cuda.bindings import driver

    error, *values = results
    if error != driver.CUresult.CUDA_SUCCESS:
        _, name = driver.cuGetErrorName(error)
        raise RuntimeError(f"CUDA: {name.decode() if isinstance(name, bytes) else error}")
    return values[0] if values else None


class _Buffer:
    """An array on the GPU to copy rows into, and a token of the launch that last read it."""

    __slots__ = ("array", "at", "token")

    def __init__(self, array: Any):
        self.array = array
        self.at = pointer(array)
        self.token: Any = None


class _Slot:
    """Memory for one input of one shape.

    One array as long as the launch that reads it is done when the next rows come (XLA records launches, and has to
    record them anew when addresses change), else two in turn, so that one is filled while the other is read.
    """

    def __init__(self, make: Callable[[], Any]):
        self._make = make
        self._buffers = [_Buffer(make())]

    def next(self) -> _Buffer:
        """Return the array to fill now, once nothing reads it any more."""
        first = self._buffers[0]
        if first.token is None or first.token.is_ready():
            return first
        if len(self._buffers) == 1:
            self._buffers.append(_Buffer(self._make()))
        self._buffers.reverse()
        now = self._buffers[0]
        if now.token is not None:
            now.token.block_until_ready()
        return now


class Staging:
    """Copies rows of shared memory to the GPU.

    Parameters
    ----------
    zeros : callable
        Makes an array on the GPU.
    """

    def __init__(self, zeros: Callable[..., Any]):
        from cuda.bindings import driver
        from cuda.core import Device, launch

        self._zeros = zeros
        self._start = launch
        self._driver = driver
        self._device = Device(0)
        self._device.set_current()
        self.stream = self._device.create_stream()
        self.handle = int(self.stream.handle)
        #: XLA's own stream, behind whose work other work may be put; None if it is not known.
        self.compute = compute_stream()
        self._event = check(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        self._kernels: dict[int, Any] = {}
        self._configs: dict[int, Any] = {}
        self._registered: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._filled: list[_Buffer] = []
        self._pending = False
        self._vector = _Pinned(self)
        #: The selection whose indexes were pinned last, and where.
        self._pinned: tuple[Selection | None, int] = None, 0

    def scratch(self, nbytes: int) -> int:
        """Return the address of some bytes on the GPU, of no meaning."""
        self._scratch = self._zeros((nbytes,), np.uint8)
        return pointer(self._scratch)

    def enter(self) -> None:
        """Make the GPU this thread's, as CUDA wants it of every thread."""
        self._device.set_current()

    def input(self, rank: Rank, kept: dict[Any, Any], key: Any, where: SharedArray, rows: Selection | None) -> Any:
        """Start to copy rows into kept memory, and return the array that they will be in."""
        shape = where.shape if rows is None else (len(rows), *where.shape[1:])
        buffer = self._slot(kept, key, shape, where.dtype).next()
        self._copy(rank, where, rows, buffer.at)
        self._filled.append(buffer)
        return buffer.array

    def vector(self, kept: dict[Any, Any], key: Any, values: np.ndarray) -> Any:
        """Start to copy a vector of indexes into kept memory, and return the array that they will be in."""
        self.enter()
        buffer = self._slot(kept, key, values.shape, values.dtype.str).next()
        if values.size:
            check(self._driver.cuMemcpyAsync(buffer.at, self._vector.put(values), values.nbytes, self.handle))
            self._pending = True
        self._filled.append(buffer)
        return buffer.array

    def load(self, rank: Rank, where: SharedArray, rows: Selection | None) -> Any:
        """Copy rows into a new array."""
        shape = where.shape if rows is None else (len(rows), *where.shape[1:])
        array = self._zeros(shape, np.dtype(where.dtype))
        self._copy(rank, where, rows, pointer(array))
        self._arrived()
        return array

    def arrive(self) -> None:
        """Have the launch that comes now wait for all copies that were started."""
        if self._pending:
            if self.compute is None:
                self._arrived()
            else:
                check(self._driver.cuEventRecord(self._event, self.handle))
                check(self._driver.cuStreamWaitEvent(self.compute, self._event, 0))

    def launched(self, token: Any) -> None:
        """Note that a launch reads what was filled since the last, until its token is ready.

        The copies are waited for: from now on the user may write into the memory that they read.
        """
        for buffer in self._filled:
            buffer.token = token
        self._filled.clear()
        self._arrived()

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
                del slots[next(iter(slots))]  # JAX frees the memory when the launches that read it are done
            slot = slots[shape, dtype] = _Slot(lambda: self._zeros(shape, np.dtype(dtype)))
        return slot

    def _copy(self, rank: Rank, where: SharedArray, rows: Selection | None, target: int) -> None:
        """Start to copy rows to an address on the GPU."""
        self.enter()
        n_rows = 1 if not where.shape else where.shape[0] if rows is None else len(rows)
        width = math.prod(where.shape[1:]) * int(where.dtype[2:])
        if not n_rows * width:
            return
        source = self._locked(rank, where.key) + where.offset
        self._pending = True
        if rows is None or isinstance(rows, range) and (rows.step == 1 or len(rows) == 1):
            start = 0 if rows is None else rows[0] * width
            check(self._driver.cuMemcpyAsync(target, source + start, n_rows * width, self.handle))
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
        name = f"gather<{item}>"
        return Program(_GATHER, "c++", options).compile("cubin", name_expressions=(name,)).get_kernel(name)

    def _locked(self, rank: Rank, key: int) -> int:
        """Return a segment's address, which the GPU shares, and lock its pages in memory if they aren't yet."""
        segment = rank.segments[key]
        address = self._registered.get(segment.buffer)
        if address is None:
            address = segment.array((0,), np.uint8).ctypes.data
            self.lock(segment.buffer, address, segment.nbytes)
            self._registered[segment.buffer] = address
        return address

    def lock(self, memory: mmap.mmap, address: int, nbytes: int) -> None:
        """Lock the pages of some memory, as long as it is mapped: until the last reference to it goes."""
        flags = self._driver.CU_MEMHOSTREGISTER_PORTABLE | self._driver.CU_MEMHOSTREGISTER_DEVICEMAP
        check(self._driver.cuMemHostRegister(address, nbytes, flags))
        weakref.finalize(memory, self._driver.cuMemHostUnregister, address).atexit = False


class _Pinned:
    """Page-locked memory for vectors of indexes on their way, until all have arrived."""

    def __init__(self, staging: Staging):
        self._staging = staging
        self._memory: np.ndarray = np.empty(0, np.uint8)
        self._full: list[np.ndarray] = []
        self.used = 0

    def put(self, values: np.ndarray) -> int:
        """Copy a vector there, and return its address."""
        if self.used == 0:
            self._full.clear()
        if self.used + values.nbytes > self._memory.size:
            # What is on its way stays where it is; from the next time on there is room for all of it.
            self._full.append(self._memory)
            size = -(-max(1 << 20, 2 * (self.used + values.nbytes)) // mmap.PAGESIZE) * mmap.PAGESIZE
            memory = mmap.mmap(-1, size)
            self._memory = np.frombuffer(memory, np.uint8)
            self._staging.lock(memory, self._memory.ctypes.data, size)
            self.used = 0
        target = self._memory[self.used : self.used + values.nbytes]
        target.view(values.dtype)[:] = values
        self.used += -(-values.nbytes // 64) * 64
        return int(target.ctypes.data)
