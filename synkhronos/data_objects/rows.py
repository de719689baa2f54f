"""Selections of rows by ``batch``, and their division among ranks.

A selection is a ``range`` or an array of int64 indexes.  A slice of either is a selection again, so the code that
divides a selection does not depend on its type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from synkhronos.casts import check_dense
from synkhronos.devices import Selection

SelectionT = TypeVar("SelectionT", range, np.ndarray, Selection)
#: Argument ``batch``: all rows, the first ones, a slice, indexes, or a mask.
BatchArgument = int | slice | Sequence[int] | npt.NDArray[Any] | None


def select_rows(batch: BatchArgument, length: int, name: str = "batch") -> Selection:
    """Return the rows that ``batch`` selects from ``length`` rows, in the order of ``batch``.

    None selects all rows, an int n the first n rows.  Negative indexes count from the end.  A boolean mask has one
    entry for each row.  TypeError or ValueError is raised for another type or shape, IndexError for a missing row.
    ``name`` is the argument's name in errors.
    """
    if batch is None:
        return range(length)
    if isinstance(batch, slice):
        try:
            return range(length)[batch]
        except TypeError:
            raise TypeError(f"{name}: the bounds of a slice have to be integers or None, got {batch!r}") from None
        except ValueError:
            raise ValueError(f"{name}: the step of a slice can't be zero, got {batch!r}") from None
    if isinstance(batch, bool | np.bool_):
        raise TypeError(f"{name}: expected a number of rows, a slice, a list of indexes or a mask, got {batch!r}")
    if isinstance(batch, int | np.integer):
        if not 0 <= batch <= length:
            raise IndexError(f"{name}={batch}: expected an int from 0 to {length}, the number of rows")
        return range(int(batch))
    if isinstance(batch, range):
        if not batch:
            return range(0)
        _check_bounds(min(batch[0], batch[-1]), max(batch[0], batch[-1]), length, name)
        if min(batch[0], batch[-1]) >= 0:
            return batch
        batch = np.arange(batch.start, batch.stop, batch.step)
    index = as_indexes_or_mask(batch, name)
    if index.dtype == bool:
        if len(index) != length:
            raise ValueError(f"{name}: a mask needs one entry for each of the {length} rows, got {len(index)}")
        return np.flatnonzero(index)
    if index.size == 0:
        return index
    # Negative indexes are larger than any length as unsigned numbers, so one pass usually checks both bounds.
    if int(index.view(np.uint64).max()) < length:
        return index
    _check_bounds(int(index.min()), int(index.max()), length, name)
    return np.where(index < 0, index + length, index)


def check_slice_bounds(selection: slice, name: str) -> None:
    """Raise TypeError if the bounds of a slice are not integers, and ValueError if its step is zero."""
    select_rows(selection, 0, name)


def select_rows_unbounded(batch: BatchArgument) -> Selection:
    """Return the rows that ``batch`` selects if the number of rows is unknown.

    Raise ValueError or IndexError for bounds or indexes that count from the end.
    """
    name = "batch"
    if isinstance(batch, slice):
        check_slice_bounds(batch, name)
        bound = batch.start if (batch.step or 1) < 0 else batch.stop
        if bound is None or min(bound, batch.start or 0, batch.stop or 0) < 0:
            raise ValueError(f"{name}: with minibatch inputs alone a slice needs bounds from the start, got {batch!r}")
        return select_rows(batch, bound + 1, name)
    if isinstance(batch, int | np.integer) and not isinstance(batch, bool):
        if batch < 0:
            raise IndexError(f"{name}={batch}: expected a number of rows, at least 0")
        return range(int(batch))
    if not isinstance(batch, range | bool | np.bool_):
        index = as_indexes_or_mask(batch, name)
        if index.dtype == bool:
            return np.flatnonzero(index)
    max_length = int(np.iinfo(np.int64).max)
    rows = select_rows(batch, max_length, name)
    if find_max_row(rows) > max_length // 2:  # a negative index
        raise IndexError(f"{name}: with minibatch inputs alone indexes need to be from the start, got {batch!r:.80}")
    return rows


_INT64 = np.dtype(np.int64)
_VALID_BATCHES = "None, an int, a slice, a list or array of indexes, or a boolean mask"


def as_indexes_or_mask(batch: BatchArgument, name: str, expected: str = _VALID_BATCHES) -> np.ndarray:
    """Return a list of indexes as an array of int64, or a mask as an array of bool, without a check of bounds.

    ``name`` and ``expected`` are the argument and the description of its valid values in errors.
    """
    if type(batch) is np.ndarray and batch.dtype == _INT64 and batch.ndim == 1:
        return batch  # the usual case, in which the checks below take longer than the rows of a small batch
    if isinstance(batch, int | np.integer | str | bytes | dict | set) or not hasattr(batch, "__len__"):
        raise TypeError(f"{name}: expected {expected}, got {batch!r}")
    check_dense(batch, name)
    try:
        index = np.asarray(batch)
    except ValueError as error:
        raise TypeError(f"{name}: expected a flat list of indexes, got {batch!r}") from error
    if index.ndim != 1:
        raise ValueError(f"{name}: expected indexes in one dimension, got an array of shape {index.shape}")
    if index.size == 0 and index.dtype != bool:
        return np.empty(0, np.int64)
    if index.dtype.kind not in "biu":
        raise TypeError(f"{name}: expected {expected}, got dtype {index.dtype}")
    if index.dtype.kind == "u" and int(index.max()) > np.iinfo(np.int64).max:
        raise IndexError(f"{name}: index {index.max()} is out of range for any data")
    return index if index.dtype == bool else index.astype(np.int64, copy=False)


def _check_bounds(low: int, high: int, length: int, name: str) -> None:
    """Raise IndexError if the lowest or the highest index is out of range."""
    if low < -length or high >= length:
        raise IndexError(f"{name}: index {low if low < -length else high} is out of range for {length} rows")


def get_share_slice(n_rows: int, n_shares: int, index: int) -> slice:
    """Return the slice of one of ``n_shares`` contiguous shares, into which rows are divided as evenly as possible.

    If the number of rows is not a multiple of the number of shares, the first shares have one row more.

    Examples
    --------
    >>> [get_share_slice(7, 3, rank) for rank in range(3)]
    [slice(0, 3, None), slice(3, 5, None), slice(5, 7, None)]
    """
    quotient, remainder = divmod(n_rows, n_shares)
    start = index * quotient + min(index, remainder)
    return slice(start, start + quotient + (index < remainder))


def split_selection(rows: SelectionT, n_shares: int) -> list[SelectionT]:
    """Return the shares of a selection; see `get_share_slice`."""
    n_rows = len(rows)
    return [rows[get_share_slice(n_rows, n_shares, index)] for index in range(n_shares)]


def find_min_row(rows: Selection) -> int:
    """Return the lowest index of a selection, 0 for an empty one."""
    if isinstance(rows, range):
        return min(rows[0], rows[-1]) if rows else 0
    return int(rows.min()) if rows.size else 0


def find_max_row(rows: Selection) -> int:
    """Return the highest index of a selection, -1 for an empty one."""
    if isinstance(rows, range):
        return max(rows[0], rows[-1]) if rows else -1
    return int(rows.max()) if rows.size else -1
