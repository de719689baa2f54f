"""Layout of sharded parameters: the bounds of each shard, and a matrix with a row of shards for each rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from synkhronos.graph_libraries import get_library
from synkhronos.training.updates.shared_variables import get_shape
from synkhronos.variable_types import SharedVariable, Variable


class ShardLayout:
    """Layout of the shards of parameters, or of their gradients, in a matrix with a row for each rank.

    ``vector`` has the gradients of whole parameters, in their order, followed by a tail of ``n_tail`` elements, which
    each row of the matrix repeats.

    Attributes
    ----------
    shapes, sizes : list of tuple, list of int
        Shapes and numbers of elements of the whole parameters.
    is_sharded : list of bool
        Whether each parameter is sharded.  Every row has the whole of a parameter that is not.
    lengths : list of int
        Number of columns of each parameter.
    matrix, row, rank_number : shared variable
        The matrix; this rank's row; this rank's number.
    """

    def __init__(self, vector: SharedVariable, params: Sequence[SharedVariable], n_ranks: int):
        self._library, self._n_ranks = get_library(vector), n_ranks
        self._tensor = self._library.tensor
        self.shapes = [get_shape(p) for p in params]
        self.sizes = [int(np.prod(shape)) for shape in self.shapes]
        # A parameter is not sharded if it is empty, or if its type has a single element.
        are_arrays = [not all(p.type.broadcastable) for p in params]
        self.is_sharded = [size > 0 and is_array for size, is_array in zip(self.sizes, are_arrays, strict=True)]
        self.lengths = [
            _compute_shard_length(size, n_ranks) if is_sharded else size
            for size, is_sharded in zip(self.sizes, self.is_sharded, strict=True)
        ]
        self._columns = np.cumsum([0, *self.lengths]).tolist()
        self.n_tail = get_shape(vector)[0] - sum(self.sizes)
        # The tail has at least one element, since a row of a single element would be broadcastable.
        dtype, width = vector.type.dtype, self._columns[-1] + max(1, self.n_tail)
        self.matrix = self._library.shared(np.zeros((n_ranks, width), dtype), name="grad_shared")
        self.row = self._library.shared(np.zeros(width, dtype), name="grad_row")
        self.rank_number = self._library.shared(np.asarray(0, "int64"), name="rank")

    def get_columns(self, i: int) -> Variable:
        """Return the elements of parameter ``i`` in this rank's row."""
        return self.row[self._columns[i] : self._columns[i + 1]]

    @property
    def tail(self) -> Variable:
        """Elements after all parameters in this rank's row, or a single unused element if the vector has no tail."""
        return self.row[self._columns[-1] :]

    def stack_shards(self, vector: Variable) -> Variable:
        """Return the matrix of a vector of gradients."""
        columns, start = [], 0
        for i, size in enumerate(self.sizes):
            columns.append(self._to_rows(i, vector[start : start + size]))
            start += size
        columns.append(self._repeat_rows(vector[start:] if self.n_tail else self._tensor.zeros((1,), vector.dtype)))
        return self._library.convert_to_type_of(self.matrix, self._tensor.concatenate(columns, axis=1))

    def join_rows(self, i: int) -> Variable:
        """Return a vector with the shards of parameter ``i`` in the rows of `matrix`."""
        size, length = self.sizes[i], self.lengths[i]
        rows = self.matrix[:, self._columns[i] : self._columns[i + 1]]
        if not self.is_sharded[i]:
            return rows[0]
        n_full = size // length
        vector = rows[:n_full].reshape((n_full * length,))
        rest = size - n_full * length
        return self._tensor.concatenate([vector, rows[n_full, length - rest :]]) if rest else vector

    def take_shard(self, i: int, variable: Variable) -> Variable:
        """Return this rank's elements of an array with as many elements as parameter ``i``."""
        # A row is selected by an index instead of the bounds of a slice, so that XLA knows the shape.
        return self._to_rows(i, variable.flatten())[self.rank_number]

    def _to_rows(self, i: int, flat: Variable) -> Variable:
        """Return a matrix whose rows are the ranks' shards of a vector with the elements of parameter ``i``."""
        if not self.is_sharded[i]:
            return self._repeat_rows(flat)
        size, length = self.sizes[i], self.lengths[i]
        n_full = size // length
        if n_full == self._n_ranks:
            return flat.reshape((self._n_ranks, length))
        last = self._tensor.zeros((self._n_ranks - n_full, 1), flat.dtype) + flat[size - length :].dimshuffle("x", 0)
        return self._tensor.concatenate([flat[: n_full * length].reshape((n_full, length)), last], axis=0)

    def _repeat_rows(self, flat: Variable) -> Variable:
        return self._tensor.zeros((self._n_ranks, 1), flat.dtype) + flat.dimshuffle("x", 0)


def get_shard_bounds(size: int, n_shards: int) -> list[tuple[int, int]]:
    """Return the start and stop of each shard of an array; shards have equal lengths, and the last ones overlap."""
    length = _compute_shard_length(size, n_shards)
    starts = [min(r * length, size - length) for r in range(n_shards)]
    return [(start, start + length) for start in starts]


def _compute_shard_length(size: int, n_shards: int) -> int:
    """Compute the length of each shard, at least 2 if possible: libraries simplify arithmetic with single elements."""
    return min(size, max(2, -(-size // n_shards)))
