"""Scalar outputs of many launches, in memory at fixed addresses.

XLA records a launch as a CUDA graph.  As long as no address changes, it replays the graph, which takes less time.  If
each loss were an array of its own, its address would change at every launch.  Each launch therefore appends its scalars
to one array per output, which is donated from launch to launch.  One copy to host memory reads the scalars of many
launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos.ranks.interrupts import defer_signals
from synkhronos.variable_types import Array

#: Maximal number of entries; a launch that computes n times appends n.
LOG_CAPACITY = 256


class ScalarLog:
    """Scalar outputs of consecutive launches, one vector for each of ``dtypes``.

    The first of ``storages`` contains the number of entries, and each of the others a vector of `LOG_CAPACITY` scalars
    of one output.  A launch takes these arrays as arguments, and its caller replaces them by the returned arrays:
    each is in a list of its own, the form in which `Executable` replaces donated arrays.
    """

    def __init__(self, dtypes: Sequence[np.dtype]):
        import jax.numpy as jnp

        with defer_signals():  # an exception raised within JAX's Python code leaves JAX unusable
            arrays = [jnp.zeros((), np.int32), *(jnp.zeros((LOG_CAPACITY,), dtype) for dtype in dtypes)]
        self.storages: list[list[Any]] = [[array] for array in arrays]
        self._n_entries = 0
        #: Copies of the outputs' vectors in host memory, and the number of entries when they were made.
        self._host_vectors: list[np.ndarray] = []
        self._n_entries_copied = 0

    def has_capacity(self, n_repeats: int) -> bool:
        """Whether there is space for the entries of a launch that computes ``n_repeats`` times."""
        return self._n_entries + n_repeats <= LOG_CAPACITY

    @staticmethod
    def trace_append(arrays: Sequence[Array], scalars: Sequence[Any]) -> list[Any]:
        """Return the arrays of `storages` with a scalar of each output appended; traced by JAX."""
        from jax import lax

        count, *logs = arrays
        return [
            count + 1,
            *(
                lax.dynamic_update_index_in_dim(log, scalar, count, 0)
                for log, scalar in zip(logs, scalars, strict=True)
            ),
        ]

    def record_launch(self, n_repeats: int) -> list[list[LogEntry]]:
        """Record a launch, which appended ``n_repeats`` scalars to each vector.  Return its entries, by output."""
        start = self._n_entries
        self._n_entries += n_repeats
        return [
            [LogEntry(self, output_index, start + i) for i in range(n_repeats)]
            for output_index in range(len(self.storages) - 1)
        ]

    def get_arrays_to_copy(self) -> list[Any]:
        """Return the arrays to copy before `LogEntry.read`, or an empty list if the last copy is up to date."""
        if self._n_entries_copied == self._n_entries:
            return []
        if any(array.is_deleted() for (array,) in self.storages):
            raise RuntimeError("this output was lost when a later launch of its function failed")
        return [array for (array,) in self.storages[1:]]

    def store_copies(self, arrays: Sequence[np.ndarray]) -> None:
        """Set the host copies of all outputs' vectors: of the arrays that `get_arrays_to_copy` has returned."""
        # These copies are not views: a JAX array with a NumPy view can't be donated.
        self._host_vectors, self._n_entries_copied = [np.array(array) for array in arrays], self._n_entries

    def read(self, output_index: int, index: int) -> np.ndarray:
        """Return one scalar as an array without dimensions; the log's arrays must have been copied before."""
        return self._host_vectors[output_index][index, ...].copy()


class LogEntry:
    """A scalar output of one launch, which may not be computed yet."""

    __slots__ = ("_index", "_output_index", "log")

    #: Bytes that count towards the limit of unread outputs, whatever the dtype.
    nbytes = 8

    def __init__(self, log: ScalarLog, output_index: int, index: int):
        self.log, self._output_index, self._index = log, output_index, index

    def read(self) -> np.ndarray:
        """Return the scalar as an array without dimensions, as `ScalarLog.read`."""
        return self.log.read(self._output_index, self._index)
