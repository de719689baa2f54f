"""What ranks read of shared memory in one command: what other machines have to be sent before it runs.

`Read`
    Rows of an array, or all of it.
`reads`
    All that some ranks read in a command.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from synkhronos.ranks.segments import SharedArray


class Read(NamedTuple):
    """Rows of an array in shared memory."""

    array: SharedArray
    #: None is the whole array.
    rows: range | SharedArray | None = None
    #: The index that row 0 stands for.
    base: int = 0


def reads(value: Any, size: int, ranks: range) -> Iterator[Read]:
    """Yield what some ranks of ``size`` read in a command, or in what it is made of.

    An array is read whole, unless what holds it has a method ``reads(size, ranks)`` that knows better.
    """
    if isinstance(value, SharedArray):
        yield Read(value)
    elif hasattr(value, "reads"):
        yield from value.reads(size, ranks)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from reads(each, size, ranks)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from reads(getattr(value, field.name), size, ranks)
    elif hasattr(value, "__slots__") and not isinstance(value, range | slice):
        for name in value.__slots__:
            yield from reads(getattr(value, name), size, ranks)
