"""What the rooms above keep on a rank, or in a session.

`Kept`
    One object of each class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

T = TypeVar("T")


class Kept:
    """One object of each class, made when it is first asked for."""

    def __init__(self) -> None:
        self._by_class: dict[type, Any] = {}

    def __call__(self, kind: type[T], make: Callable[[], T]) -> T:
        """Return the object of a class; ``make`` makes it if there is none."""
        found = self._by_class.get(kind)
        if found is None:
            found = self._by_class[kind] = make()
        return cast(T, found)

    def clear(self) -> None:
        """Forget all of them."""
        self._by_class.clear()
