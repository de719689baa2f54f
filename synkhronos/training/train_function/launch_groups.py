"""Partition of successive steps into launches.

A launch of several steps is compiled for a fixed number of rows, so each rank needs equally many rows in all of its
steps.  First the rows of each step are assigned to ranks, then steps with equal numbers of rows are grouped::

    batches            [0..4)   [4..8)   [7]      [0..4)
    rows of 2 ranks    2, 2     2, 2     None     2, 2
    launches           ---------------   ------   ------

If the rows of a step cannot be assigned in advance, or not evenly, they are None, and the step is a launch of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from synkhronos.data_objects.rows import select_rows
from synkhronos.functions.inputs import split_selections_by_rank, to_integer_indexes

#: Maximal number of bytes of a rank's rows in one launch of several steps.
MAX_LAUNCH_NBYTES = 1 << 30
#: Rows of one step: an array of indexes per rank; None for a step that cannot share a launch.
StepRows: TypeAlias = list[np.ndarray] | None


def assign_rows(batches: Sequence[Any], length: int, n_ranks: int) -> list[StepRows]:
    """Return the row indexes of each step on each rank, for scattered data, or None for a step of uneven shares."""
    steps: list[StepRows] = []
    for i, batch in enumerate(batches):
        rows = np.asarray(select_rows(batch, length, f"batches[{i}]"), np.int64)
        if not len(rows):
            raise ValueError(f"batches[{i}]: expected at least one row, got {batch!r}")
        steps.append(None if len(rows) % n_ranks else list(rows.reshape(n_ranks, -1)))
    return steps


def assign_sliceable_rows(batches_s: Sequence[Any], n_ranks: int) -> list[StepRows]:
    """Return the row indexes of each step on each rank, for data in shared variables of the ranks.

    Only a rank knows the length of its data.  The result is therefore None for a step in which some rank takes a slice,
    all of its rows, or no row.  For the same reason, the range of indexes is not checked.
    """
    steps: list[StepRows] = []
    for i, batch_s in enumerate(batches_s):
        name = f"batches_s[{i}]"
        by_rank = split_selections_by_rank(batch_s, n_ranks, name) or [batch_s] * n_ranks
        rows = [
            None if selection is None or isinstance(selection, slice) else to_integer_indexes(selection, name)
            for selection in by_rank
        ]
        index_arrays = [selection for selection in rows if selection is not None and len(selection)]
        steps.append(index_arrays if len(index_arrays) == n_ranks else None)
    return steps


def group_steps(steps: Sequence[StepRows], max_steps: int) -> Iterator[tuple[int, int]]:
    """Yield the range of each group of successive steps with equally many rows on each rank, for one launch per group.

    A step whose rows are None is a separate group.

    Examples
    --------
    >>> a, b = [np.arange(2)], [np.arange(3)]
    >>> list(group_steps([a, a, a, b, None, None, a], max_steps=2))
    [(0, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7)]
    """
    start = 0
    for stop in range(1, len(steps) + 1):
        if stop == len(steps) or stop - start == max_steps or not _can_share_launch(steps[start], steps[stop]):
            yield start, stop
            start = stop


def _can_share_launch(first: StepRows, second: StepRows) -> bool:
    """Whether two steps can share a launch: each rank has equally many rows in both."""
    return first is not None and second is not None and list(map(len, first)) == list(map(len, second))
