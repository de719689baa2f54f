"""Notes on objects that don't keep them.

`WeakKeys`
    A dictionary by objects that are held weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class WeakKeys(Generic[K, V]):
    """A dictionary whose entries go with their keys.

    Python has `weakref.WeakKeyDictionary`.  But when a key is collected that runs code which is written in Python, and
    an interrupt that comes in the middle of it is swallowed.  Here nothing runs but a dictionary's own method.
    """

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: dict[weakref.ref[K], V] = {}

    def __setitem__(self, key: K, value: V) -> None:
        self._values[weakref.ref(key, self._values.pop)] = value

    def __contains__(self, key: K) -> bool:
        return weakref.ref(key) in self._values

    def __iter__(self) -> Iterator[K]:
        found = [reference() for reference in list(self._values)]
        return iter([key for key in found if key is not None])

    def get(self, key: K) -> V | None:
        """Return the value of a key, None if it has none."""
        return self._values.get(weakref.ref(key))

    def discard(self, key: K) -> None:
        """Remove a key, if it is there."""
        self._values.pop(weakref.ref(key), None)
