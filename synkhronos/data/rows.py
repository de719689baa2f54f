"""Which rows each rank reads.

A selection of rows is a ``range`` or an array of indexes, and both are cut by slicing.

`select`, `select_unbounded`, `flat`
    What ``batch`` means for data of some length, or of any; a list of indexes as an array.
`share`
    One rank's part of so many rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from synkhronos.casts import check_dense
from synkhronos.devices import Selection


def select(batch: Any, length: int, name: str = "batch") -> Selection:
    """Return the rows that ``batch`` picks of ``length``: their indexes in order, none of them negative.

    Parameters
    ----------
    batch : None, int, slice, or array_like
        None for all rows, an int for the first that many, a slice, a list or array of indexes (negative ones count
        from the end), or a boolean mask of ``length``.
    length : int
    name : str
        What to call ``batch`` in an error.
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
            raise IndexError(f"{name}={batch}: expected a number of rows from 0 to {length}, which is all there are")
        return range(int(batch))
    if isinstance(batch, range):
        if not batch:
            return range(0)
        low, high = _in_range(min(batch[0], batch[-1]), max(batch[0], batch[-1]), length, name)
        if low >= 0:
            return batch
        batch = np.arange(batch.start, batch.stop, batch.step)
    index = flat(batch, name)
    if index.dtype == bool:
        if len(index) != length:
            raise ValueError(f"{name}: a mask needs one entry for each of the {length} rows, got {len(index)}")
        return np.flatnonzero(index)
    if index.size == 0:
        return index
    # Read without their signs, negative indexes are larger than any length: one look at all of them is enough, mostly.
    if int(index.view(np.uint64).max()) < length:
        return index
    low, _ = _in_range(int(index.min()), int(index.max()), length, name)
    return np.where(index < 0, index + length, index) if low < 0 else index


def select_unbounded(batch: Any, name: str = "batch") -> Selection:
    """Return the rows that ``batch`` picks where nothing says how many there are.

    As `select`, but rows can't be counted from the end.
    """
    if isinstance(batch, slice):
        select(batch, 0, name)  # complains of bounds that are no integers
        far = batch.start if (batch.step or 1) < 0 else batch.stop
        if far is None or min(far, batch.start or 0, batch.stop or 0) < 0:
            raise ValueError(f"{name}: with minibatch inputs alone a slice needs bounds from the start, got {batch!r}")
        return select(batch, far + 1, name)
    if isinstance(batch, int | np.integer) and not isinstance(batch, bool):
        return select(batch, max(0, int(batch)), name)
    if not isinstance(batch, range | bool | np.bool_):
        index = flat(batch, name)
        if index.dtype == bool:
            return np.flatnonzero(index)
    endless = int(np.iinfo(np.int64).max)
    rows = select(batch, endless, name)
    if highest(rows) > endless // 2:
        raise IndexError(f"{name}: with minibatch inputs alone indexes need to be from the start, got {batch!r:.80}")
    return rows


_ANY = "None, an int, a slice, a list or array of indexes, or a boolean mask"


def flat(batch: Any, name: str, expected: str = _ANY) -> np.ndarray:
    """Return a list of indexes as an array of int64, or a mask as one of bool; neither is compared with a length."""
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
        raise TypeError(f"{name}: expected integer indexes or a boolean mask, got dtype {index.dtype}")
    if index.dtype == np.uint64 and int(index.max()) > np.iinfo(np.int64).max:
        raise IndexError(f"{name}: index {index.max()} is out of range for any data")
    return index if index.dtype == bool else index.astype(np.int64, copy=False)


def _in_range(low: int, high: int, length: int, name: str) -> tuple[int, int]:
    """Return the lowest and the highest of some indexes, if there are such rows."""
    if low < -length or high >= length:
        raise IndexError(f"{name}: index {low if low < -length else high} is out of range for {length} rows")
    return low, high


def share(count: int, parts: int, part: int) -> slice:
    """Return one part of ``count`` rows in ``parts`` runs, as even as possible: the first parts take the odd rows.

    Examples
    --------
    >>> [share(7, 3, r) for r in range(3)]
    [slice(0, 3, None), slice(3, 5, None), slice(5, 7, None)]
    """
    each, odd = divmod(count, parts)
    start = part * each + min(part, odd)
    return slice(start, start + each + (part < odd))


def pieces(rows: Selection, count: int) -> Iterator[Selection]:
    """Cut rows into ``count`` nearly equal pieces."""
    for piece in range(count):
        yield rows[share(len(rows), count, piece)]


def lowest(rows: Selection) -> int:
    """Return the lowest index of a selection, 0 for an empty one."""
    if isinstance(rows, range):
        return min(rows[0], rows[-1]) if rows else 0
    return int(rows.min()) if rows.size else 0


def highest(rows: Selection) -> int:
    """Return the highest index of a selection, -1 for an empty one."""
    if isinstance(rows, range):
        return max(rows[0], rows[-1]) if rows else -1
    return int(rows.max()) if rows.size else -1
