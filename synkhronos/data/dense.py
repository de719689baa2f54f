"""What NumPy would take for an array and lose a part of.

`check_dense`
    Refuses masked and sparse values.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def check_dense(value: Any, argument: str) -> None:
    """Refuse a value that isn't the array that NumPy would make of it.

    Parameters
    ----------
    value
        What the user passed.
    argument : str
        What to call it in an error.

    Raises
    ------
    TypeError
        For an array some of whose items are masked, or a list of such arrays: shared memory has no masks.  For a sparse
        matrix.
    """
    parts = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(part, np.ma.MaskedArray) and np.ma.is_masked(part) for part in parts):
        raise TypeError(
            f"{argument}: expected an array, got a masked one, whose mask would be lost: pass .filled(value), or .data "
            "and .mask as two arrays"
        )
    if type(value).__module__.startswith("scipy.sparse"):
        raise TypeError(f"{argument}: expected an array, got a sparse matrix: pass .toarray()")
