"""Dictionaries that forget items: all of them when they are full, or those whose keys are collected."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(dict[K, V]):
    """A dictionary that forgets all items when it is full and a new key is assigned.

    Ranks that assign the same items in the same order have equal caches, whatever they have read from them.

    Examples
    --------
    >>> cache = BoundedCache(2)
    >>> for key in "abc":
    ...     cache[key] = key.upper()
    >>> cache
    {'c': 'C'}
    """

    __slots__ = ("max_items",)

    def __init__(self, max_items: int = 64):
        super().__init__()
        self.max_items = max_items

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self.max_items and key not in self:
            self.clear()
        super().__setitem__(key, value)


class WeakKeyDict(Generic[K, V]):
    """A dictionary that drops an entry when its key is collected.

    `weakref.WeakKeyDictionary` runs Python code when a key is collected, where an interrupt that arrives is lost.  Here
    only a method of `dict` runs, which is written in C.
    """

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: dict[weakref.ref[K], V] = {}

    def __setitem__(self, key: K, value: V) -> None:
        self._values[weakref.ref(key, self._values.pop)] = value

    def __contains__(self, key: K) -> bool:
        return weakref.ref(key) in self._values

    def __iter__(self) -> Iterator[K]:
        keys = [reference() for reference in list(self._values)]
        return iter([key for key in keys if key is not None])

    def get(self, key: K) -> V | None:
        """Return the value of a key, or None if it has none."""
        return self._values.get(weakref.ref(key))

    def discard(self, key: K) -> None:
        """Remove a key if the dictionary has it."""
        self._values.pop(weakref.ref(key), None)
