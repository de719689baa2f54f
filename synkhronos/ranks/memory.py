"""Shared memory and copies of objects that all ranks keep until the master releases them.

The master creates a segment under a key that is the same on every rank; workers receive it with the next command.  What
the master releases is dropped on the other ranks with a later command.
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

#: Kind of a thing that is released: a segment, or an object in `Rank.objects`.
Kind = Literal["segment", "object"]

#: Maximal number of segments that are not announced yet: each holds a file descriptor.
_UNANNOUNCED = 64


class Release(Command):
    """Drop segments and objects on every rank, after the master has."""

    __slots__ = ("released",)

    def __init__(self, released: list[tuple[Kind, Any]]):
        self.released = released

    def run(self, rank: Rank) -> None:
        """Drop them on this rank."""
        memory = [rank.segments.drop(key) for what, key in self.released if what == "segment"]
        if not rank.is_master and any(one is not None and one() is not None for one in memory):
            # Compilers leave cycles that hold the inputs for which they compiled, and an idle worker collects none.
            gc.collect()
        for what, key in self.released:
            if what == "object":
                rank.objects.pop(key, None)


class Memory:
    """The master's table of shared memory and objects.  Used under a session's lock.

    Parameters
    ----------
    rank : Rank
        The master's rank.
    channels : dict of int to socket
        The master's ends of the workers' socket pairs, by rank.
    run : callable
        Runs a command on all ranks; raises if one is running.

    Attributes
    ----------
    last_key : int
        Key of the newest segment.
    last_announced : int
        Key of the newest segment that the workers have.
    """

    def __init__(self, rank: Rank, channels: Mapping[int, socket], run: Callable[[Command], Any]):
        self.last_key = self.last_announced = 0
        self._rank = rank
        self._channels = channels
        self._run = run
        self._is_freed = False
        self._unannounced: list[tuple[Segment, io.FileIO, set[int]]] = []
        self._garbage: list[tuple[Kind, Any]] = []
        self._owned: dict[tuple[Kind, Any], weakref.ref[Any]] = {}
        self._orphaned: list[Any] = []

    def create(self, nbytes: int, in_command: bool = False) -> Segment:
        """Create a segment, which every rank has under the same key from the next command on.

        Parameters
        ----------
        nbytes : int
        in_command : bool
            Whether a command is being sent, so that none can be run to free memory.

        Raises
        ------
        MemoryError
            If ``/dev/shm`` is full.
        OSError
            If this process has too many files open.
        """
        return self.add_file(self.create_file(nbytes, in_command), max(1, nbytes), in_command)

    def create_file(self, nbytes: int, in_command: bool = False) -> io.FileIO:
        """Create shared memory as an open file, which `add_file` makes a segment; errors are those of `create`."""
        nbytes = max(1, nbytes)
        self.notice_orphans()
        try:
            return create_unlinked(nbytes)
        except (MemoryError, OSError) as error:
            useful = self._garbage if isinstance(error, MemoryError) else error.errno == errno.EMFILE
            if not useful or in_command:
                raise
            self.flush(force=True)  # also closes the files that wait to be announced
            return create_unlinked(nbytes)

    def add_file(self, file: io.FileIO, nbytes: int, in_command: bool = False) -> Segment:
        """Make a file a segment, which every rank has under the same key from the next command on."""
        return self._add(Segment(self.last_key + 1, file.fileno(), nbytes), file, in_command)

    def open(self, path: str) -> Segment:
        """Map a user's file as a segment, which every rank has under the same key from the next command on.

        The file has to be the same on every host.

        Raises
        ------
        OSError
            If there is no such file, or it is not readable.
        """
        self.notice_orphans()
        with defer_signals():
            file = io.FileIO(path)
        nbytes = os.fstat(file.fileno()).st_size
        return self._add(Segment(self.last_key + 1, file.fileno(), nbytes, is_file=True), file, False)

    def create_parts_key(self) -> int:
        """Return a key for memory that the ranks of each host create themselves within a command."""
        with defer_signals():
            self.last_key += 1
            return self.last_key

    def _add(self, segment: Segment, file: io.FileIO, in_command: bool) -> Segment:
        with defer_signals():  # a worker would wait forever for a key that is never announced
            self.last_key += 1
            self._rank.segments.add(segment)
            if self._channels:
                self._unannounced.append((segment, file, set(self._channels)))
            else:
                file.close()
                self.last_announced = segment.key
        if len(self._unannounced) > _UNANNOUNCED and not in_command:
            self.flush(force=True)
        return segment

    def announce(self) -> None:
        """Send the workers the segments that they do not have yet."""
        while self._unannounced:
            segment, file, waiting = self._unannounced[0]
            while waiting:
                number = next(iter(waiting))
                announce(self._channels[number], segment, file.fileno())
                waiting.discard(number)
            del self._unannounced[0]
            file.close()
            self.last_announced = segment.key

    def release(self, what: Kind, key: Any) -> None:
        """Release a segment or an object: here at once, on the other ranks with the next command."""
        if self._is_freed:
            return
        self._owned.pop((what, key), None)
        if what == "segment":
            self._rank.segments.drop(key)
        else:
            self._rank.objects.pop(key, None)
        self._garbage.append((what, key))

    def release_with(self, owner: object, what: Kind, key: Any) -> None:
        """Release a segment or an object after its owner is collected: at the next command or creation of memory.

        No Python code runs at the collection itself: an interrupt in the middle of it would be swallowed.
        """
        self._owned[what, key] = weakref.KeyedRef(owner, self._orphaned.append, (what, key))

    def notice_orphans(self) -> None:
        """Release the segments and objects of owners that have been collected."""
        while self._orphaned:
            self.release(*self._orphaned[0].key)
            del self._orphaned[0]

    def flush(self, force: bool = False) -> None:
        """Release on the workers what was released here; ``force``: announce new segments even if nothing was."""
        if self._garbage or force:
            release = Release(self._garbage[:])
            self._run(release)
            del self._garbage[: len(release.released)]  # only now: an interrupt may come at any moment

    def send_again(self) -> None:
        """Send all segments to new workers that are no forks of this process."""
        for segment, file in self._rank.segments.replace_files():
            self._unannounced.append((segment, file, set(self._channels)))
            if len(self._unannounced) > _UNANNOUNCED:
                self.flush(force=True)
        self.flush(force=True)

    def forget_workers(self, is_inherited: bool) -> None:
        """Forget the old workers: new ones inherit the present segments and objects, or have none of them."""
        self.last_announced = self.last_key if is_inherited else 0
        for _, file, _ in self._unannounced:
            file.close()
        self._unannounced.clear()
        self._garbage.clear()

    def free(self) -> None:
        """Free everything in this process: the ranks have ended."""
        self._is_freed = True
        for _, file, _ in self._unannounced:
            file.close()
        self._unannounced.clear()
        self._rank.segments.clear()
        self._rank.objects.clear()
        self._owned.clear()
