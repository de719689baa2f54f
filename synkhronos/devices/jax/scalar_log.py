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
    """Scalar outputs of consecutive launches, with these dtypes.

    ``storages`` have the number of entries, then one vector of `LOG_CAPACITY` scalars per output.  A launch takes these
    arrays as arguments, and its caller replaces them by the arrays that it returns.
    """

    def __init__(self, dtypes: Sequence[np.dtype]):
        import jax.numpy as jnp

        with defer_signals():  # an exception raised within JAX's Python code leaves JAX unusable
            arrays = [jnp.zeros((), np.int32), *(jnp.zeros((LOG_CAPACITY,), dtype) for dtype in dtypes)]
        self.storages: list[list[Any]] = [[array] for array in arrays]
        self._n_entries = 0
        #: Number of entries at the last read, and the vectors read.
        self._copies: tuple[int, list[np.ndarray]] = 0, []

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

    def make_entries(self, n_repeats: int) -> list[list[LogEntry]]:
        """Return ``n_repeats`` new entries for each output.  Call this once after each launch."""
        start = self._n_entries
        self._n_entries += n_repeats
        return [
            [LogEntry(self, output, start + i) for i in range(n_repeats)] for output in range(len(self.storages) - 1)
        ]

    def get_arrays_to_copy(self) -> list[Any]:
        """Return the arrays to copy before `LogEntry.read`, or an empty list if the last copy is up to date."""
        if self._copies[0] == self._n_entries:
            return []
        if any(array.is_deleted() for (array,) in self.storages):
            raise RuntimeError("this output was lost when a later launch of its function failed")
        return [array for (array,) in self.storages[1:]]

    def store_copies(self, arrays: Sequence[np.ndarray]) -> None:
        """Store copies of the unread arrays."""
        # These copies are not views: a JAX array with a NumPy view can't be donated.
        self._copies = self._n_entries, [np.array(array) for array in arrays]

    def read(self, output: int, index: int) -> np.ndarray:
        """Return one scalar as an array without dimensions; the log's arrays must have been copied before."""
        return self._copies[1][output][index, ...].copy()


class LogEntry:
    """A scalar output of one launch, which may not be computed yet."""

    __slots__ = ("_index", "_output", "log")

    #: Bytes that count towards the limit of unread outputs, whatever the dtype.
    nbytes = 8

    def __init__(self, log: ScalarLog, output: int, index: int):
        self.log, self._output, self._index = log, output, index

    def read(self) -> np.ndarray:
        """Return the scalar as an array without dimensions, as `ScalarLog.read`."""
        return self.log.read(self._output, self._index)
