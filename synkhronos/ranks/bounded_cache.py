"""A cache with a maximal number of items."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(dict[K, V]):
    """A dictionary that is emptied when an item is assigned and it is full.

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
        if len(self) >= self.max_items:
            self.clear()
        super().__setitem__(key, value)
