"""Search of data for NaN and infinity.

A loss may be NaN because training diverges, or because the data have such values.  The error's message names the
first such row, so that users need not look for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from synkhronos.data_objects.parts import PartsData

#: Maximal number of bytes of rows that are searched at once: the search copies them.
_BLOCK_NBYTES = 1 << 26


def describe_nonfinite(arrays: Mapping[str, Any], rows: Any = None) -> str:
    """Describe the first row with NaN or infinity, for an error message.  Return "" if all values are finite.

    ``arrays`` maps names in the message to arrays.  Integers are skipped, and of `synkhronos.data_parts` only the rows
    of this host are searched.  ``rows`` are the indexes to search, by default all.

    Examples
    --------
    >>> describe_nonfinite({"x_data": np.array([0.0, np.nan, np.inf]), "y_data": np.arange(3)})
    'row 1 of x_data has nan, the first of 2 such rows'
    """
    for name, array in arrays.items():
        if array.dtype.kind not in "fc":
            continue
        indexes = np.arange(len(array)) if rows is None else np.sort(rows)
        if isinstance(array, PartsData):
            local = array.local_rows
            indexes = indexes[(indexes >= local.start) & (indexes < local.stop)]
        step = max(1, _BLOCK_NBYTES // max(1, int(np.prod(array.shape[1:])) * array.dtype.itemsize))
        blocks = [indexes[i : i + step] for i in range(0, len(indexes), step)]
        nonfinite_blocks = [block[~np.isfinite(array[block]).reshape(len(block), -1).all(1)] for block in blocks]
        nonfinite_rows = np.concatenate(nonfinite_blocks or [indexes])
        if len(nonfinite_rows):
            row = np.asarray(array[nonfinite_rows[:1]])
            count = f", the first of {len(nonfinite_rows):,} such rows" if len(nonfinite_rows) > 1 else ""
            return f"row {nonfinite_rows[0]:,} of {name} has {row[~np.isfinite(row)][0]}{count}"
    return ""
