"""Host memory: NumPy arrays, combined through memory that all ranks share.

`Device`
    What a kind of array can do; NumPy's, from which the others derive.
`take`
    The selected rows of an array.
`HostCommunicator`
    Streams arrays of any size through the ranks' scratch memory, each rank reducing its own share of the elements.
`combine`
    Reduces arrays that this rank sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from synkhronos.devices.reductions import REDUCTIONS, Reduction
from synkhronos.ranks import Rank, SharedArray
from synkhronos.ranks.control import SCRATCH

#: An array's shape and dtype.
Layout = tuple[tuple[int, ...], np.dtype]

#: Rows, in order: evenly spaced ones, or any, by their indexes.
Selection = range | np.ndarray


class Device:
    """One kind of array.  This one's are NumPy's, and it holds whatever NumPy can read; the others derive from it."""

    name = "host"
    #: Whether shared variables' values are moved here before a function is called; where not, they come by themselves.
    takes_shareds = False

    def places(self, size: int, root: int) -> list[str]:
        """Return for each rank a word for its own device; called in the master.  Here any core will do."""
        return [""] * size

    def bind(self, rank: Rank, place: str) -> None:
        """Make this process use its own device; runs once on every rank, after the fork."""

    def communicator(self, rank: Rank) -> Any:
        """Return what combines the ranks' arrays of this kind (see `HostCommunicator`), the same one each time."""
        if len(rank.control.here) == rank.size:
            return rank.registry.get(HostCommunicator, lambda: HostCommunicator(rank))
        from synkhronos.devices.chain import ChainCommunicator

        return rank.registry.get(ChainCommunicator, lambda: ChainCommunicator(rank))

    def communicates(self, dtype: np.dtype) -> bool:
        """Whether it combines arrays of this dtype; if not, they go through host memory."""
        return True

    def group(self, rank: Rank, members: Iterable[int]) -> Any:
        """Return what combines and sends arrays among some ranks (`cuda.group`); None: they go through host memory."""
        return None

    def holds(self, value: Any) -> bool:
        """Whether a value is an array of this kind."""
        return isinstance(value, np.ndarray | np.generic) or hasattr(value, "__array__")

    def writable(self, value: Any, is_referenced: bool) -> Any:
        """Return a container's value as a contiguous array that may be written in place: itself, or else a copy.

        ``is_referenced`` says whether anybody else than the container has the value.
        """
        if isinstance(value, np.ndarray) and value.flags.c_contiguous and value.flags.writeable:
            return value
        return np.array(value, order="C")

    def written(self, value: Any, is_there: bool = False) -> Any:
        """Return an array that a communicator has written in place, or will have, for its container."""
        return value

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return a new array of this kind."""
        return np.empty(shape, dtype)

    def part(self, array: Any, start: int, shape: tuple[int, ...]) -> Any:
        """Return a run of an array's items, from item ``start`` on, as the communicator's `gather` takes it."""
        return array.reshape(-1)[start : start + math.prod(shape)].reshape(shape)

    def contiguous(self, value: Any) -> Any:
        """Return the value, or else a contiguous copy."""
        return np.ascontiguousarray(value)

    def to_host(self, value: Any) -> np.ndarray:
        """Return the value as a NumPy array, without a copy where there can be one."""
        return np.asarray(value)

    def fetch(self, values: Sequence[Any]) -> list[Any]:
        """Return values as NumPy arrays, all at once; what is no array of this kind stays."""
        return list(values)

    def from_host(self, array: np.ndarray) -> Any:
        """Return a NumPy array as one of this kind, which nobody else holds."""
        return np.array(array, order="C")

    def load(self, rank: Rank, location: SharedArray, rows: Selection | None) -> Any:
        """Return rows of an array in shared memory, or all of it, as a new array."""
        view = location.view(rank.segments)
        return self.from_host(view if rows is None else take(view, rows))

    def combine(self, op: Reduction, one: Any, other: Any) -> Any:
        """Return what a reduction makes of two arrays of one shape; it may be written into the first."""
        assert op.combine is not None
        return op.combine(one, other, out=one)

    def join(self, parts: Sequence[Any]) -> Any:
        """Return arrays joined along axis 0."""
        return np.concatenate(parts)

    def array(self, value: Any) -> Any:
        """Return the value as an array of this kind."""
        return np.asarray(value)

    def input(
        self, rank: Rank, kept: dict[Any, Any], key: Any, location: SharedArray, rows: Selection | None, copy: bool
    ) -> Any:
        """Return rows of an array in shared memory, or all of it, as an input of the next launch.

        ``kept`` is where memory may be kept from call to call, under ``key``; ``copy`` says that the function may
        overwrite what it gets.
        """
        array = location.view(rank.segments)
        if rows is None:
            return array.copy() if copy else array
        if isinstance(rows, range):
            part = take(array, rows)
            return part.copy() if copy else part
        # Memory that is touched for the first time costs more than the copy: keep it from call to call.  Compiled
        # functions hand out nothing that aliases their inputs.
        shape = (len(rows), *array.shape[1:])
        size = math.prod(shape)
        buffer = kept.get(key)
        if buffer is None or buffer.size < size or buffer.dtype != array.dtype:
            buffer = kept[key] = np.empty(size, array.dtype)
        return take(array, rows, buffer[:size].reshape(shape))

    def indexes(self, rank: Rank, kept: dict[Any, Any], key: Any, values: np.ndarray) -> Any:
        """Return a vector of indexes as an input of the next launch."""
        return values

    def wait(self, values: Sequence[Any]) -> None:
        """Wait until values have been computed."""


DEVICE = Device()


def take(array: np.ndarray, rows: Selection, out: np.ndarray | None = None) -> np.ndarray:
    """Return the selected rows of an array.

    Parameters
    ----------
    array : ndarray
    rows : range or ndarray
        Non-negative, and in range.
    out : ndarray, optional
        Where to put them.  Without it a range gives a view of ``array``.

    Returns
    -------
    ndarray
    """
    if isinstance(rows, range):
        if not rows:
            view = array[:0]
        else:
            stop: int | None = rows[-1] + (1 if rows.step > 0 else -1)
            view = array[rows[0] : None if stop is not None and stop < 0 else stop : rows.step]
        if out is None:
            return view
        out[...] = view
        return out
    # The indexes are known to be in range; with mode="raise" NumPy would go through a buffer of its own.
    return np.take(array, rows, axis=0, out=out, mode="clip")


class HostCommunicator:
    """Collectives over NumPy arrays in shared memory.

    Another device's communicator has the same methods.  Each is called on every rank, with arguments that agree: arrays
    are contiguous, and shapes are known to all ranks beforehand.

    Each rank has scratch memory in two halves that every rank sees.  Arrays of any size go through it in chunks, the
    halves in turn, so that nothing is allocated and what ranks hand to each other stays in the processors' caches.
    The turns also save waiting: a half is written again only two chunks later, and by then everybody has passed the
    barrier of the chunk between and with it has read the old content.  So the turns go on from one array to the next:
    the first chunk of the second must not meet readers of the last chunk of the first.

    Results are the same on every rank and the same each time: for each element one rank applies the operation, in
    rank order.
    """

    #: Counts the connections that this rank has made: none here, as the fork connects the ranks.
    epoch = 0

    def __init__(self, rank: Rank):
        self._rank = rank
        self._halves = [
            [np.frombuffer(rank.control.scratch(r, half), np.uint8) for r in rank.control.here] for half in range(2)
        ]
        self._command = self._turn = 0

    def connect(self, epochs: Sequence[int]) -> None:
        """Connect the ranks unless they are; ``epochs`` has each rank's."""

    def _next_halves(self) -> list[np.ndarray]:
        """Return every rank's half for the next chunk of this command.

        Turns are counted anew for each command: ranks that were cancelled may have left at different ones.
        """
        if self._command != self._rank.command:
            self._command, self._turn = self._rank.command, 0
        self._turn ^= 1
        return self._halves[self._turn]

    def broadcast(self, array: np.ndarray, root: int) -> None:
        """Copy the root's array into every other rank's, in place."""
        rank, mine = self._rank, as_bytes(array)
        if rank.size == 1:
            return
        for at in range(0, mine.size, SCRATCH):
            part = mine[at : at + SCRATCH]
            shared = self._next_halves()[root][: part.size]
            if rank.number == root:
                shared[:] = part
            rank.barrier()
            if rank.number != root:
                part[:] = shared

    def all_reduce(self, array: np.ndarray, op: str) -> bool:
        """Replace every rank's array by the reduction of all ranks', and return whether it is there.

        Where it may come later than this returns, ``Device.written`` gives the array that tells when.
        """
        flat = array.reshape(-1)
        self._reduce(flat, flat, op, flat.size, flat.dtype, range(self._rank.size))
        return True

    def meet(self, look: Callable[[], None] | None = None) -> None:
        """Wait until every rank has started what this one has; ``look`` is called now and then, and may raise."""

    def come(self) -> None:
        """Tell the others that this rank has started what it has: at the end of a command, in the place of `meet`."""

    def reduce(
        self,
        array: np.ndarray | None,
        op: str,
        root: int,
        out: np.ndarray | None,
        layout: Layout,
        contributors: Sequence[int],
    ) -> None:
        """Write the reduction of the contributors' arrays into the root's ``out``."""
        (shape, dtype), here = layout, self._rank.number
        source = array.reshape(-1) if array is not None and here in contributors else None
        target = out.reshape(-1) if out is not None and here == root else None
        self._reduce(source, target, op, math.prod(shape), dtype, contributors)

    def gather(
        self,
        array: np.ndarray | None,
        root: int | None,
        layouts: Sequence[Layout | None],
        out: Sequence[np.ndarray | None] | None,
    ) -> None:
        """Copy rank r's array into ``out[r]`` on the root, or on every rank if ``root`` is None.

        ``layouts`` has None for a rank that gives nothing, ``out`` is None on ranks that take nothing.
        """
        rank = self._rank
        sizes = [0 if layout is None else nbytes(layout) for layout in layouts]
        mine = None if array is None else as_bytes(array)
        targets = [None if a is None else as_bytes(a) for a in out] if out is not None else [None] * rank.size
        own = targets[rank.number]
        if mine is not None and own is not None:
            own[:] = mine
        gives = mine is not None and rank.number != root
        # The root's own array goes nowhere.
        for at in range(0, max((s for r, s in enumerate(sizes) if r != root), default=0), SCRATCH):
            halves = self._next_halves()
            if gives and mine is not None:
                part = mine[at : at + SCRATCH]
                halves[rank.number][: part.size] = part
            rank.barrier()
            for r, target in enumerate(targets):
                if target is not None and r != rank.number:
                    part = target[at : at + SCRATCH]
                    part[:] = halves[r][: part.size]

    def _reduce(
        self,
        source: np.ndarray | None,
        target: np.ndarray | None,
        op: str,
        size: int,
        dtype: np.dtype,
        contributors: Sequence[int],
    ) -> None:
        """Reduce ``source`` over the contributors into every rank's ``target``, where there is one.

        A chunk takes two steps.  Each rank shows its elements, but for its own share, which only itself will read;
        each reduces its share of all ranks' elements; each takes what it wants of the shares.
        """
        rank, row = self._rank, REDUCTIONS[op]
        if len(contributors) == 1 and rank.size == 1:
            if target is not None and source is not None and target is not source:
                target[:] = source
            return
        here, n_elements = rank.number, SCRATCH // dtype.itemsize
        for at in range(0, size, n_elements):
            count = min(n_elements, size - at)
            bounds = [count * r // rank.size for r in range(rank.size + 1)]
            shared = [half[: count * dtype.itemsize].view(dtype) for half in self._next_halves()]
            low, high = bounds[here], bounds[here + 1]
            if source is not None:
                part = source[at : at + count]
                shared[here][:low] = part[:low]
                shared[here][high:] = part[high:]
            rank.barrier()
            if high > low:
                inputs = [part[low:high] if r == here else shared[r][low:high] for r in contributors]
                result = shared[here][low:high]
                working = row.working(dtype)
                wide = result if working == dtype else np.empty(high - low, working)
                combine(inputs, row, wide)
                if row.divides:
                    np.true_divide(wide, len(contributors), out=wide)
                if wide is not result:
                    result[:] = wide
            rank.barrier()
            if target is not None:
                part = target[at : at + count]
                for r in range(rank.size):
                    part[bounds[r] : bounds[r + 1]] = shared[r][bounds[r] : bounds[r + 1]]


def combine(inputs: Sequence[np.ndarray], row: Reduction, out: np.ndarray) -> None:
    """Combine arrays in order into another one, in its dtype."""
    assert row.combine is not None
    if len(inputs) == 1:
        out[:] = inputs[0]
    elif inputs:
        row.combine(inputs[0], inputs[1], out=out, dtype=out.dtype.type)
        for values in inputs[2:]:
            row.combine(out, values, out=out)


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Return a contiguous array's memory as a vector of bytes."""
    return array.reshape(-1).view(np.uint8)


def nbytes(layout: Layout) -> int:
    """Return the size of an array in bytes."""
    shape, dtype = layout
    return math.prod(shape) * dtype.itemsize
