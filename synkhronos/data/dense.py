"""What NumPy would take for an array and lose a part of.

`check_dense`
    Refuses masked and sparse values.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def check_dense(value: Any, argument: str) -> None:
    """Refuse a value that isn't the array that NumPy would make of it: a sparse matrix, or one with masked items.

    Shared memory has no masks.  Lists of such arrays are refused, too.
    """
    parts = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(part, np.ma.MaskedArray) and np.ma.is_masked(part) for part in parts):
        raise TypeError(
            f"{argument}: expected an array, got a masked one, whose mask would be lost: pass .filled(value), or .data "
            "and .mask as two arrays"
        )
    if type(value).__module__.startswith("scipy.sparse"):
        raise TypeError(f"{argument}: expected an array, got a sparse matrix: pass .toarray()")
