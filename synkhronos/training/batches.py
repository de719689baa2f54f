"""The rows of several steps, and which of these one launch can take.

`rows_of_ranks`, `sliceable_rows_of_ranks`
    The rows of each step on each rank: of data that are scattered, and of data that the ranks hold.
`runs`
    Steps that one launch can take.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from synkhronos.data.rows import select
from synkhronos.function.inputs import check_indexes, split_by_rank

#: One step's rows: an array of indexes for each rank, or None where there can't be one.
StepRows: TypeAlias = list[np.ndarray] | None


def rows_of_ranks(batches: Sequence[Any], length: int, size: int) -> list[StepRows]:
    """Return the rows of steps on scattered data; None for a step in which ranks would not have equally many.

    Each of ``batches`` is as for ``batch``.  What is wrong with one is said by its number.

    Examples
    --------
    >>> rows_of_ranks([slice(0, 4), [7]], 8, 2)
    [[array([0, 1]), array([2, 3])], None]
    """
    steps: list[StepRows] = []
    for i, batch in enumerate(batches):
        rows = np.asarray(select(batch, length, f"batches[{i}]"), np.int64)
        if not len(rows):
            raise ValueError(f"batches[{i}]: expected at least one row, got {batch!r}")
        steps.append(None if len(rows) % size else list(rows.reshape(size, -1)))
    return steps


def sliceable_rows_of_ranks(batches_s: Sequence[Any], size: int) -> list[StepRows]:
    """Return the rows of steps on data that the ranks hold; None for a step by slices.

    Each of ``batches_s`` is as for ``batch_s``.  What is wrong with one is said by its number.

    Examples
    --------
    >>> sliceable_rows_of_ranks([[[0, 1], [5]], slice(0, 2)], 2)
    [[array([0, 1]), array([5])], None]
    """
    steps: list[StepRows] = []
    for i, batch_s in enumerate(batches_s):
        name = f"batches_s[{i}]"
        each = split_by_rank(batch_s, size, name) or [batch_s] * size
        rows = [None if one is None or isinstance(one, slice) else check_indexes(one, name) for one in each]
        known = [one for one in rows if one is not None and len(one)]
        steps.append(known if len(known) == size else None)
    return steps


def runs(steps: Sequence[StepRows], most: int) -> Iterator[tuple[int, int]]:
    """Cut steps into runs that one launch can take: of equally many rows on each rank, and at most so many steps.

    Yields where each begins and ends.

    Examples
    --------
    >>> a, b = [np.arange(2)], [np.arange(3)]
    >>> list(runs([a, a, a, b, None, None, a], most=2))
    [(0, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7)]
    """
    start = 0
    for stop in range(1, len(steps) + 1):
        if stop == len(steps) or stop - start == most or not _alike(steps[start], steps[stop]):
            yield start, stop
            start = stop


def _alike(one: StepRows, other: StepRows) -> bool:
    return one is not None and other is not None and list(map(len, one)) == list(map(len, other))
