"""What all ranks keep until the master lets go of it: shared memory, and copies of objects.

`Memory`
    Makes segments, tells the workers of them, and has the ranks let go.

A segment is made by the master and has a key, the same on every rank.  Workers hear of it with the next command.  What
the master lets go of goes on the other ranks with the next command that comes.
"""

from __future__ import annotations

import errno
import gc
import io
import os
import weakref
from collections.abc import Callable, Mapping
from socket import socket
from typing import Any, Literal

from synkhronos.ranks.interrupts import defer_signals
from synkhronos.ranks.rank import Command, Rank
from synkhronos.ranks.segments import Segment, announce, create_unlinked

#: A segment, or an object in the ranks' stores.
What = Literal["segment", "object"]

#: Segments made but not announced yet, at most: each holds a file descriptor.
_UNANNOUNCED = 64


class Release(Command):
    """Let go of segments and stored objects on every rank, as the master has."""

    __slots__ = ("let_go",)

    def __init__(self, let_go: list[tuple[What, Any]]):
        self.let_go = let_go

    def run(self, rank: Rank) -> None:
        """Drop them from this rank's tables."""
        memory = [rank.segments.drop(key) for what, key in self.let_go if what == "segment"]
        if not rank.is_master and any(one is not None and one() is not None for one in memory):
            # Compilers leave garbage that holds the inputs for which they compiled, and an idle worker collects none.
            gc.collect()
        for what, key in self.let_go:
            if what == "object":
                rank.objects.pop(key, None)


class Memory:
    """What the master and the workers share, seen from the master.  Used in a session's turn.

    Parameters
    ----------
    rank : Rank
        The master's.
    channels : dict of int to socket
        The master's ends of the workers' socket pairs, by rank.
    run : callable
        Runs a command on all ranks, if none is running.
    """

    def __init__(self, rank: Rank, channels: Mapping[int, socket], run: Callable[[Command], Any]):
        #: Of the segment that was made last.
        self.last_key = self._last_part = 0
        self._rank = rank
        self._channels = channels
        self._run = run
        self._is_freed = False
        self._unannounced: list[tuple[Segment, io.FileIO, set[int]]] = []
        self._garbage: list[tuple[What, Any]] = []
        self._owned: dict[tuple[What, Any], weakref.ref[Any]] = {}
        self._orphaned: list[Any] = []

    def create(self, nbytes: int, in_command: bool = False) -> Segment:
        """Make shared memory that every rank finds under the returned segment's key from the next command on.

        While a command is being sent (``in_command``) none can be run to make room.

        Raises
        ------
        MemoryError
            If there is no room in ``/dev/shm``.
        OSError
            If this process has too many files open.
        """
        return self.enter(self.file(nbytes, in_command), max(1, nbytes), in_command)

    def file(self, nbytes: int, in_command: bool = False) -> io.FileIO:
        """Return memory as an open file, for what `enter` makes of it; as `create` does."""
        nbytes = max(1, nbytes)
        self.notice_orphans()
        try:
            return create_unlinked(nbytes)
        except (MemoryError, OSError) as error:
            useful = self._garbage if isinstance(error, MemoryError) else error.errno == errno.EMFILE
            if not useful or in_command:
                raise
            self.flush(in_any_case=True)  # closes the files that wait to be announced, too
            return create_unlinked(nbytes)

    def enter(self, file: io.FileIO, nbytes: int, in_command: bool = False) -> Segment:
        """Have every rank find a file's memory under the returned segment's key from the next command on."""
        return self._added(Segment(self.last_key + 1, file.fileno(), nbytes), file, in_command)

    def open(self, path: str) -> Segment:
        """Map a file, which every rank finds under the returned segment's key from the next command on.

        It is the same file on every host.  OSError if there is none, or it may not be read.
        """
        self.notice_orphans()
        with defer_signals():
            file = io.FileIO(path)
        nbytes = os.fstat(file.fileno()).st_size
        return self._added(Segment(self.last_key + 1, file.fileno(), nbytes, is_file=True), file, False)

    def key_of_parts(self) -> int:
        """Return a key for memory that the ranks of each host make themselves, in a command, and nobody announces."""
        self._last_part -= 1
        return self._last_part

    def _added(self, segment: Segment, file: io.FileIO, in_command: bool) -> Segment:
        with defer_signals():  # a worker would wait for ever for a key that is never announced
            self.last_key += 1
            self._rank.segments.add(segment)
            if self._channels:
                self._unannounced.append((segment, file, set(self._channels)))
            else:
                file.close()
        if len(self._unannounced) > _UNANNOUNCED and not in_command:
            self.flush(in_any_case=True)
        return segment

    def announce(self) -> None:
        """Send the workers the segments that are new to them."""
        while self._unannounced:
            segment, file, waiting = self._unannounced[0]
            while waiting:
                number = next(iter(waiting))
                announce(self._channels[number], segment, file.fileno())
                waiting.discard(number)
            del self._unannounced[0]
            file.close()

    def release(self, what: What, key: Any) -> None:
        """Let go of a segment, or a stored object, on every rank: here at once, elsewhere with the next command."""
        if self._is_freed:
            return
        self._owned.pop((what, key), None)
        if what == "segment":
            self._rank.segments.drop(key)
        else:
            self._rank.objects.pop(key, None)
        self._garbage.append((what, key))

    def release_with(self, owner: object, what: What, key: Any) -> None:
        """Let go of a segment, or a stored object, some time after the owner is collected.

        At the next command, or when memory is made next.  At the collection itself nothing runs that is written in
        Python: an interrupt that came in the middle of it would be swallowed.
        """
        self._owned[what, key] = weakref.KeyedRef(owner, self._orphaned.append, (what, key))

    def notice_orphans(self) -> None:
        """Let go of what belonged to owners that have been collected."""
        while self._orphaned:
            self.release(*self._orphaned[0].key)
            del self._orphaned[0]

    def flush(self, in_any_case: bool = False) -> None:
        """Have the workers let go of what was released; ``in_any_case`` announces segments though nothing was."""
        if self._garbage or in_any_case:
            release = Release(self._garbage[:])
            self._run(release)
            del self._garbage[: len(release.let_go)]  # not before: an interrupt comes at any moment

    def free(self) -> None:
        """Let go of everything in this process: the ranks have ended."""
        self._is_freed = True
        for _, file, _ in self._unannounced:
            file.close()
        self._unannounced.clear()
        self._rank.segments.clear()
        self._rank.objects.clear()
        self._owned.clear()
