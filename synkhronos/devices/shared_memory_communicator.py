"""Collectives over NumPy arrays of ranks on one host, through shared memory.

Each rank has a scratch area with two halves, which all ranks map.  An array of any size is copied in chunks of half a
scratch area, so that nothing is allocated and the data stay in the processors' caches::

    chunk          0        1        2        3
    half           A        B        A        B
    ranks        write -> barrier -> read, write -> barrier -> read, ...

Invariant: a half is written again only after the barrier of the chunk in between.  Every rank that arrives at that
barrier has read the half's old content.  For this reason, halves also alternate between the arrays of a command.

Results are identical on all ranks and reproducible: each element is reduced by one rank, in rank order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from synkhronos.devices.communicator import ArrayLayout, ByteSource, Communicator
from synkhronos.devices.reduce_op import REDUCE_OPS, ReduceOp, divide_in_place
from synkhronos.ranks import Rank
from synkhronos.ranks.control_memory import SCRATCH_NBYTES

#: Maximal number of bytes of all contributions to a reduction that each rank reduces completely, to save a barrier.
_MAX_SMALL_NBYTES = 1 << 17
#: Alignment of small arrays in scratch memory: a cache line; no item of an array is larger.
_ALIGNMENT_NBYTES = 64


class SharedMemoryCommunicator(Communicator):
    """Collectives over NumPy arrays, through shared memory."""

    def __init__(self, rank: Rank):
        self._rank = rank
        #: One half of the scratch memory of all ranks of this host each, of shape (ranks, bytes).
        self._halves = np.frombuffer(rank.control.scratch, np.uint8).reshape(-1, 2, SCRATCH_NBYTES).swapaxes(0, 1)
        self._command_number = self._half = 0

    def switch_scratch_halves(self) -> np.ndarray:
        """Switch to the other halves of all scratch areas for the next chunk, and return them in rank order.

        Alternation restarts with each command, as ranks may have left a cancelled command at different chunks.
        """
        self._half, self._command_number = self.get_next_half(), self._rank.command_number
        return self._halves[self._half]

    @property
    def max_small_nbytes(self) -> int:
        """Maximal total size in bytes of arrays that every rank reduces completely, after one barrier."""
        return _MAX_SMALL_NBYTES // self._rank.size

    def map_small_arrays(self, layouts: Sequence[ArrayLayout]) -> list[list[np.ndarray]]:
        """Return views of scratch memory for small arrays of all ranks: for both halves, an array for each layout.

        Axis 0 is the rank's.
        """
        views_by_half = []
        for halves in self._halves:
            views, start = [], 0
            for shape, dtype in layouts:
                memory = halves[:, start : start + compute_nbytes((shape, dtype))]
                views.append(memory.view(dtype).reshape(len(halves), *shape))
                start += compute_aligned_nbytes((shape, dtype))
            views_by_half.append(views)
        return views_by_half

    def get_next_half(self) -> int:
        """Return the index of the half of the next chunk, to which `switch_scratch_halves` will switch."""
        return self._half ^ 1 if self._command_number == self._rank.command_number else 1

    def broadcast(self, array: np.ndarray, root: int) -> None:
        rank, source = self._rank, view_bytes(array)
        if rank.size == 1:
            return
        for offset in range(0, source.size, SCRATCH_NBYTES):
            chunk = source[offset : offset + SCRATCH_NBYTES]
            shared = self.switch_scratch_halves()[root][: chunk.size]
            if rank.number == root:
                shared[:] = chunk
            rank.barrier()
            if rank.number != root:
                chunk[:] = shared

    def all_reduce(self, array: np.ndarray, op: str) -> None:
        flat = array.reshape(-1)
        self._reduce(flat, flat, op, flat.size, flat.dtype, range(self._rank.size))

    def reduce(
        self,
        array: Any,
        op: str,
        root: int,
        out: np.ndarray | None,
        layout: ArrayLayout,
        contributors: Sequence[int],
    ) -> None:
        """Write the reduction of the contributors' arrays into the root's ``out``."""
        (shape, dtype), number = layout, self._rank.number
        source = None
        if array is not None and number in contributors:
            source = array.reshape(-1) if isinstance(array, np.ndarray) else array
        target = out.reshape(-1) if out is not None and number == root else None
        self._reduce(source, target, op, math.prod(shape), dtype, contributors)

    def reduce_scatter(self, array: np.ndarray, op: str, bounds: Sequence[int], out: np.ndarray) -> None:
        rank, reduce_op, source, target = self._rank, REDUCE_OPS[op], array.reshape(-1), out.reshape(-1)
        number, dtype = rank.number, array.dtype
        chunk_items = SCRATCH_NBYTES // dtype.itemsize // rank.size
        longest = max(stop - start for start, stop in pairwise(bounds))
        for offset in range(0, longest, chunk_items):
            # A rank's half holds the next items of all ranks' shares; each rank reads its own items from all halves.
            shared = self.switch_scratch_halves().view(dtype)
            chunks = [source[start:stop][offset : offset + chunk_items] for start, stop in pairwise(bounds)]
            for r, chunk in enumerate(chunks):
                if r != number:
                    shared[number][r * chunk_items :][: chunk.size] = chunk
            rank.barrier()
            own_chunk = chunks[number]
            inputs = [
                own_chunk if r == number else shared[r][number * chunk_items :][: own_chunk.size]
                for r in range(rank.size)
            ]
            reduce_arrays(inputs, reduce_op, target[offset : offset + chunk_items])

    def gather(
        self,
        array: np.ndarray | None,
        root: int,
        layouts: Sequence[ArrayLayout | None],
        out: Sequence[np.ndarray | None] | None,
    ) -> None:
        self._gather_to(range(root, root + 1), array, layouts, out)

    def all_gather(self, array: np.ndarray, layouts: Sequence[ArrayLayout], out: Sequence[np.ndarray]) -> None:
        self._gather_to(range(self._rank.size), array, layouts, out)

    def _gather_to(
        self,
        receivers: range,
        array: np.ndarray | None,
        layouts: Sequence[ArrayLayout | None],
        out: Sequence[np.ndarray | None] | None,
    ) -> None:
        """Copy rank r's array into ``out[r]`` on the receivers, which are consecutive ranks."""
        rank = self._rank
        lengths = [0 if layout is None else compute_nbytes(layout) for layout in layouts]
        source = None if array is None else view_bytes(array)
        targets = [None if a is None else view_bytes(a) for a in out] if out is not None else [None] * rank.size
        own_target = targets[rank.number]
        if source is not None and own_target is not None:
            copy_bytes(source, 0, own_target)
        only_receiver = receivers[0] if len(receivers) == 1 else None  # its own array needs no scratch area
        contributes = source is not None and rank.number != only_receiver
        for offset in range(
            0, max((n for r, n in enumerate(lengths) if r != only_receiver), default=0), SCRATCH_NBYTES
        ):
            halves = self.switch_scratch_halves()
            if contributes and source is not None:
                copy_bytes(source, offset, halves[rank.number][: max(0, source.size - offset)])
            rank.barrier()
            for r, target in enumerate(targets):
                if target is not None and r != rank.number:
                    chunk = target[offset : offset + SCRATCH_NBYTES]
                    chunk[:] = halves[r][: chunk.size]

    def _reduce(
        self,
        source: Any,
        target: np.ndarray | None,
        op: str,
        n_items: int,
        dtype: np.dtype,
        contributors: Sequence[int],
    ) -> None:
        """Reduce ``source`` over the contributors into every ``target`` that is not None.

        A small array takes one barrier: each rank reduces all contributions.

        Each chunk of a large array is divided into one share per rank, and takes two barriers.  Contributors publish
        their elements before the first one.  After it each rank reduces its share.  Ranks with a target copy all shares
        after the second one.  In an all-reduce a rank writes its result into its own scratch area, whose cache lines no
        other rank writes.  For a single target, it is faster to write over rank 0's elements, which have been read.

        ``source`` may be bytes of another kind, as in `Communicator.gather`: then chunks are copied as a whole.
        """
        rank, reduce_op = self._rank, REDUCE_OPS[op]
        if len(contributors) == 1 and rank.size == 1:
            if target is not None and source is not None and target is not source:
                copy_bytes(view_bytes(source), 0, view_bytes(target))
            return
        number, max_chunk_items = rank.number, SCRATCH_NBYTES // dtype.itemsize
        if n_items * dtype.itemsize * rank.size <= _MAX_SMALL_NBYTES:
            shared = self.switch_scratch_halves().view(dtype)
            if source is not None:
                copy_bytes(view_bytes(source), 0, view_bytes(shared[number, :n_items]))
            rank.barrier()
            if target is not None:
                rows = slice(None) if len(contributors) == rank.size else list(contributors)
                target[:] = reduce_op.reduce_first_axis(shared[rows, :n_items])
            return
        is_array, is_all_reduce = isinstance(source, np.ndarray), source is not None and source is target
        for offset in range(0, n_items, max_chunk_items):
            count = min(max_chunk_items, n_items - offset)
            bounds = [count * r // rank.size for r in range(rank.size + 1)]
            low, high = bounds[number], bounds[number + 1]
            shared = self.switch_scratch_halves().view(dtype)
            if source is not None and not is_array:
                source.copy_to(view_bytes(shared[number, :count]), offset * dtype.itemsize)
            elif source is not None:  # no other rank reads the elements of this rank's share
                chunk = source[offset : offset + count]
                shared[number, :low] = chunk[:low]
                shared[number, high:count] = chunk[high:]
            rank.barrier()
            if high > low:
                inputs = [chunk[low:high] if r == number and is_array else shared[r, low:high] for r in contributors]
                reduce_arrays(inputs, reduce_op, shared[number if is_all_reduce else 0, low:high])
            rank.barrier()
            if is_all_reduce:
                for r, (start, stop) in enumerate(pairwise(bounds)):
                    chunk[start:stop] = shared[r, start:stop]
            elif target is not None:
                target[offset : offset + count] = shared[0, :count]


def reduce_arrays(inputs: Sequence[np.ndarray], reduce_op: ReduceOp, out: np.ndarray) -> None:
    """Write the reduction of arrays, one for each contributor, into ``out``, which may be the first of them."""
    accumulator = reduce_op.choose_accumulator_dtype(out.dtype)
    wide = out if accumulator == out.dtype else np.empty(out.size, accumulator)
    accumulate_arrays(inputs, reduce_op, wide)
    if reduce_op.is_mean:
        divide_in_place(wide, len(inputs))
    if wide is not out:
        out[:] = wide


def accumulate_arrays(inputs: Sequence[np.ndarray], reduce_op: ReduceOp, out: np.ndarray) -> None:
    """Reduce arrays in order into ``out``, in its dtype.  A mean is not divided by the number of arrays yet."""
    assert reduce_op.ufunc is not None
    if len(inputs) == 1:
        out[:] = inputs[0]
    elif inputs:
        reduce_op.ufunc(inputs[0], inputs[1], out=out, dtype=out.dtype.type)
        for values in inputs[2:]:
            reduce_op.ufunc(out, values, out=out)


def view_bytes(array: Any) -> Any:
    """Return a contiguous array's memory as a vector of uint8.  A `ByteSource` is returned unchanged."""
    return array.reshape(-1).view(np.uint8) if isinstance(array, np.ndarray) else array


def copy_bytes(source: np.ndarray | ByteSource, start: int, target: np.ndarray) -> None:
    """Fill ``target``, a vector of uint8, with the bytes of a source from offset ``start`` on."""
    if isinstance(source, np.ndarray):
        target[:] = source[start : start + target.size]
    else:
        source.copy_to(target, start)


def compute_nbytes(layout: ArrayLayout) -> int:
    """Return the number of bytes of an array."""
    shape, dtype = layout
    return math.prod(shape) * dtype.itemsize


def compute_aligned_nbytes(layout: ArrayLayout) -> int:
    """Return the number of bytes of an aligned memory area for an array."""
    return -(-compute_nbytes(layout) // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
