"""Shared memory that a command accesses.

Other machines do not see this one's memory: before a command runs there, the rows that their ranks access are sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from synkhronos.ranks.segments import SharedArray


class RowAccess(NamedTuple):
    """Rows of an array in shared memory that a rank reads.

    Attributes
    ----------
    array : SharedArray
    rows : range, SharedArray of int64, or None
        Indexes of the rows; None for the whole array.
    base : int
        Number that is subtracted from each index: the index of the array's first row.
    """

    array: SharedArray
    rows: range | SharedArray | None = None
    base: int = 0


def find_row_accesses(value: Any, size: int, ranks: range) -> Iterator[RowAccess]:
    """Yield all accesses of some ranks in a command.

    The command's tuples, lists, dataclasses and slots are searched for arrays.  An array counts as accessed as a whole,
    unless an object that holds it has a method ``row_accesses(size, ranks)``, which then yields its accesses.

    Parameters
    ----------
    value : object
        The command, or a part of it.
    size : int
        Number of all ranks.
    ranks : range
        The ranks in question.
    """
    if isinstance(value, SharedArray):
        yield RowAccess(value)
    elif hasattr(value, "row_accesses"):
        yield from value.row_accesses(size, ranks)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from find_row_accesses(each, size, ranks)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from find_row_accesses(getattr(value, field.name), size, ranks)
    elif hasattr(value, "__slots__") and not isinstance(value, range | slice):
        for name in value.__slots__:
            yield from find_row_accesses(getattr(value, name), size, ranks)
