"""Selections of rows, and their use with NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

#: Row numbers, in order: an evenly spaced range, or an int64 array of any non-negative numbers.
Selection = range | np.ndarray
#: Buffers of a device for one input, which calls reuse.
Buffers = dict[Any, Any]


def take_rows(array: np.ndarray, rows: Selection, out: np.ndarray | None = None) -> np.ndarray:
    """Return the selected rows of an array.  Their numbers are non-negative and within the array.

    With ``out``, the result is written into it.  Without, a range returns a view of the array.

    Examples
    --------
    >>> take_rows(np.array([10, 20, 30, 40]), range(1, 4, 2))
    array([20, 40])
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
    # Row numbers were checked before.  With mode="raise", NumPy would copy through an internal buffer.
    return np.take(array, rows, axis=0, out=out, mode="clip")
