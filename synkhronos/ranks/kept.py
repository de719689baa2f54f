"""What the rooms above keep on a rank, or in a session, from one command to the next.

`Kept`
    One object of each class.
`UnderWay`
    What goes on when the command that started it has ended: a collective on GPUs that is not waited for, say, or
    outputs that nobody has read yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Kept:
    """One object of each class, made when it is first asked for."""

    def __init__(self) -> None:
        self._by_class: dict[type, Any] = {}

    def __call__(self, kind: type[T], make: Callable[[], T] | None = None) -> T:
        """Return the object of a class; if there is none, ``make``, or the class itself, makes it."""
        found: T | None = self._by_class.get(kind)
        if found is None:
            found = self._by_class[kind] = (make or kind)()
        return found

    def clear(self) -> None:
        """Forget all of them."""
        self._by_class.clear()


class UnderWay:
    """Something that commands start and that may outlast them; each rank has a list of them.

    What a kind of it has no answer to, it leaves as it is here.
    """

    def finish(self) -> None:
        """Wait for its end: in the master, while the workers still run, before they are ended in an orderly way."""

    def give_up(self, command: int) -> None:
        """End what a command has started that has failed on some rank: it may wait for ever for a peer."""

    def end(self) -> None:
        """Let go of what may wait for a peer: the ranks end, and after this everything is freed."""

    def unfinished(self) -> bool:
        """Whether something is under way in which the peers have a part."""
        return False
