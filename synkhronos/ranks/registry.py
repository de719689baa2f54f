"""Objects that live longer than one command: per-class singletons of a rank, and pending operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Registry:
    """One object for each class, created when it is first asked for.

    A layer above stores its state on a rank, or in a session, under a class of its own; it ends with the session.
    """

    def __init__(self) -> None:
        self._by_class: dict[type, Any] = {}

    def get(self, kind: type[T], make: Callable[[], T] | None = None) -> T:
        """Return the object of class ``kind``; the first call creates it with ``make``, or with ``kind`` itself."""
        found: T | None = self._by_class.get(kind)
        if found is None:
            found = self._by_class[kind] = (make or kind)()
        return found

    def clear(self) -> None:
        """Remove all objects."""
        self._by_class.clear()


class PendingOperation:
    """An operation that a command starts and that may outlast it.

    Examples are a collective on GPUs that nobody waits for, and outputs that have not been read yet.  Each rank has a
    list of its pending operations, `Rank.pending`.  The methods of this class do nothing; a subclass overrides those
    that apply.
    """

    def finish(self) -> None:
        """Wait for completion.  Called in the master, while the workers still run, before an orderly end."""

    def cancel(self, command: int) -> None:
        """Cancel the part that a command started which has failed on some rank: it could wait forever for a peer."""

    def end(self) -> None:
        """Release everything that could wait for a peer: the ranks end, and memory is freed after this call."""

    def is_unfinished(self) -> bool:
        """Whether an operation in which the peers take part has not completed."""
        return False
