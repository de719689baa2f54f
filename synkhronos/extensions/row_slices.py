"""Sums over rows that ranks on CPU cores compute slice by slice, for functions that are called many times.

The parameters lie in shared memory.  Each rank computes slices of the rows, and writes the result of a slice into its
row of a table, also in shared memory.  At the end the master adds the rows of the table::

    master   write parameters │ slices 0, 3, 4 │ add the table's rows
    rank 1                    │ slices 1, 5    │
    rank 2                    │ slices 2, 6    │

A rank on a slow core would delay the others.  Therefore ranks that have all rows, as the ranks of a chain do, take
slices from a queue, the large ones first.  The sum does not depend on which rank computed a slice.
"""

from __future__ import annotations

import io
import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from synkhronos.data_objects.data_access import copy_to_shared, get_array_location
from synkhronos.data_objects.rows import get_share_slice
from synkhronos.engines.outputs import RankOutputs
from synkhronos.functions.call import Call
from synkhronos.functions.dispatcher import Dispatcher
from synkhronos.graph_libraries.library import get_storage
from synkhronos.ranks import ArrayLocation, Command, Rank, Session
from synkhronos.replication.replicator import distribute_variables

__all__ = [
    "PreparedSum",
    "create_slice_queue",
    "compute_queued_slice_bounds",
    "compute_slice_bounds_by_rank",
]

#: Maximal number of slices in a `SliceQueue`: a number is one byte.
MAX_QUEUED_SLICES = 256

#: Bytes of rows in the largest slice.  A slice and its intermediate values fit into a core's caches, so that the
#: gradient does not read the rows from memory again.
_MAX_SLICE_NBYTES = 4 << 20
#: Bytes of rows in the smallest slice of a queue, if each rank has more.  With smaller slices ranks wait less for the
#: last one, but start more of them.
_MIN_SLICE_NBYTES = 64 << 10
#: A slice of a queue is at least a rank's share divided by this number.
_MAX_SLICES_PER_SHARE = 25


def compute_slice_bounds_by_rank(n_rows: int, nbytes: int, n_ranks: int) -> list[int]:
    """Return the first row of each slice, then the number of rows.  Each rank's share is divided into equal slices.

    ``nbytes`` is the size of all rows.
    """
    slices_per_rank = max(1, nbytes // (n_ranks * _MAX_SLICE_NBYTES))
    starts = []
    for rank in range(min(n_ranks, n_rows)):
        share = get_share_slice(n_rows, n_ranks, rank)
        size = share.stop - share.start
        n_slices = min(slices_per_rank, size)
        starts += [share.start + get_share_slice(size, n_slices, i).start for i in range(n_slices)]
    return [*starts, n_rows]


def compute_queued_slice_bounds(n_rows: int, nbytes: int, n_ranks: int) -> list[int]:
    """Return the first row of each slice of a queue, then the number of rows.  No slice is longer than the one before.

    ``nbytes`` is the size of all rows.
    """
    share, row_nbytes = -(-n_rows // n_ranks), max(1, nbytes // n_rows)
    smallest = max(1, min(share, max(share // _MAX_SLICES_PER_SHARE, _MIN_SLICE_NBYTES // row_nbytes)))
    largest = max(_MAX_SLICE_NBYTES // row_nbytes, n_rows // (MAX_QUEUED_SLICES // 2))
    while True:
        bounds = [0]
        while (remaining := n_rows - bounds[-1]) > 0:
            # The first slices are shorter than a share by more than cores differ in speed.
            size = min(max(smallest, min(largest, 2 * remaining // (3 * n_ranks))), remaining)
            bounds.append(bounds[-1] + size)
        if len(bounds) <= MAX_QUEUED_SLICES + 1:
            return bounds
        smallest += 1 + smallest // 32  # with many ranks, the queue has no room for as many


class SliceQueue:
    """Queue of numbers from which each rank takes the next one.

    The numbers are the bytes of a pipe: the kernel gives each of them to one reader.
    """

    def __init__(self) -> None:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        self._reader, self._writer = io.FileIO(reader), io.FileIO(writer, "w")

    def fill(self, count: int) -> None:
        """Replace the numbers in the queue by those below ``count``.  No rank may read it meanwhile."""
        while self._reader.read(MAX_QUEUED_SLICES):  # a failed command may have left some
            pass
        self._writer.write(bytes(range(count)))

    def __iter__(self) -> Iterator[int]:
        read = self._reader.read
        while number := read(1):
            yield number[0]


#: Queue of the ranks of this process's chain.
_slice_queue: SliceQueue | None = None


def create_slice_queue() -> None:
    """Create the queue of ranks that this process forks next."""
    global _slice_queue
    _slice_queue = SliceQueue()


def _get_slice_queue() -> SliceQueue:
    assert _slice_queue is not None
    return _slice_queue


class _ComputeSlicesFields(NamedTuple):
    """Fields of `ComputeSlices`; a named tuple cannot have a second base class."""

    call: Call
    #: Array with the result of each slice.
    table: ArrayLocation
    #: First row of each slice, and the number of rows.
    bounds: tuple[int, ...]
    #: Keys of the shared variables with the rows.
    row_keys: tuple[Any, ...]
    #: The `rows_sum.DistributedSum`, if each rank has inherited all of its rows; None if a rank has only its share.
    distributed_sum: Any


class ComputeSlices(_ComputeSlicesFields, Command):
    """Compute a function of the rows slice by slice, and write the results into the table."""

    __slots__ = ()

    def run(self, rank: Rank) -> Any:
        """Compute this rank's slices.  With ranks on several hosts, return the sum in the master."""
        call, bounds, table = self.call, self.bounds, self.table.view(rank.segments)
        compiled = rank.get_object(call.computation_key).get_or_compile(call.variant)
        compiled.function.trust_input = True  # the inputs have been checked once
        inputs = [location.view(rank.segments) for location in call.inputs if isinstance(location, ArrayLocation)]
        storages = [get_storage(rank.get_object(key)) for key in self.row_keys]
        own_rows = [storage[0] for storage in storages]
        if self.distributed_sum is None:
            share = get_share_slice(bounds[-1], rank.size, rank.number)
            rows, first_row = own_rows, share.start
            slice_numbers: Iterable[int] = range(bisect_left(bounds, share.start), bisect_left(bounds, share.stop))
        else:
            rows, first_row, slice_numbers = self.distributed_sum.rows.inherited_rows, 0, _get_slice_queue()
        try:
            for i in slice_numbers:
                slice_range = slice(bounds[i] - first_row, bounds[i + 1] - first_row)
                for storage, values in zip(storages, rows, strict=True):
                    storage[0] = values[slice_range]
                (result,) = compiled.runner(*inputs)
                if result.shape != table.shape[1:]:
                    raise ValueError(f"expected a result of shape {table.shape[1:]}, got {result.shape}")
                table[i] = result
        finally:
            for storage, values in zip(storages, own_rows, strict=True):
                storage[0] = values
        if rank.spans_hosts:
            assert isinstance(slice_numbers, range)
            total = np.add.reduce(table[slice_numbers.start : slice_numbers.stop], axis=0)
            # The outputs are added, not averaged, so any positive number of rows has the same effect.
            return RankOutputs(len(slice_numbers), [total], compiled.output_spec).reduce(rank)
        return None


class PreparedSum:
    """A function of the rows that all ranks have compiled, prepared for many calls with arguments of the same shapes.

    The session's call lock is held.  ``arguments`` are the arguments of the first call.  The function reads the rows of
    a `rows_sum.DistributedSum`.  Its result is a scalar or a vector of ``result_size`` elements.
    """

    def __init__(
        self,
        session: Session,
        dispatcher: Dispatcher,
        arguments: Sequence[np.ndarray],
        result_size: int,
        distributed_sum: Any,
    ):
        rows = distributed_sum.rows
        self._session, self._dispatcher = session, dispatcher
        self._data = [copy_to_shared(argument) for argument in arguments]
        output_type = dispatcher.computation.outputs[0].type
        shape = (len(rows.slice_bounds) - 1, result_size)[: 1 + output_type.ndim]
        self._data.append(copy_to_shared(np.zeros(shape, output_type.dtype)))
        *self._inputs, self._table = [shared.data for shared in self._data]
        call = dispatcher.build_call(session, self._data[:-1])
        self._command = ComputeSlices(
            call,
            get_array_location(self._data[-1]),
            tuple(rows.slice_bounds),
            distribute_variables(session, rows.shareds),
            distributed_sum if rows.ranks_have_all_rows else None,
        )

    def can_compute(self, arguments: Sequence[np.ndarray]) -> bool:
        """Whether the arguments have the same shapes and dtypes as in the first call."""
        return all(
            argument.shape == array.shape and argument.dtype == array.dtype
            for argument, array in zip(arguments, self._inputs, strict=True)
        )

    def compute(self, arguments: Sequence[np.ndarray]) -> np.ndarray:
        """Return the sum of the function's results over all rows."""
        for array, argument in zip(self._inputs, arguments, strict=True):
            array[...] = argument
        if self._command.distributed_sum is not None:
            _get_slice_queue().fill(len(self._table))
        outputs = self._session.run(self._command)
        return outputs[0] if outputs else np.add.reduce(self._table, axis=0)
