"""Lifetime of shared memory and of object copies, which all ranks have until the master releases them.

The master creates a segment under a key that is the same on every rank.  Workers receive it with the next command.

- The master *releases* a segment or an object that it no longer uses.  The master drops it at once, the workers drop it
  with a later command.
- A rank *drops* a segment or an object by removing it from its own table.
- The master *frees* all segments and objects when the ranks have ended.
"""

from __future__ import annotations

import errno
import gc
import io
import os
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from socket import socket
from typing import Any, Literal

from synkhronos.ranks.command import Command
from synkhronos.ranks.interrupts import defer_signals
from synkhronos.ranks.rank import Rank
from synkhronos.ranks.segments import Segment, create_unlinked_file, send_segment

#: Kind of an entry: a segment, or an object in `Rank.objects`.
EntryKind = Literal["segment", "object"]

#: Maximal number of segments that wait to be sent; each keeps a file descriptor open.
_MAX_UNSENT = 64
#: Maximal number of open files that are sent and not received yet: workers receive them when they run the next command.
#: The kernel allows all processes of a user together as many of them as one process may have open, often 1,024.
_MAX_FILES_IN_FLIGHT = 128


@dataclass(frozen=True, slots=True)
class Release(Command):
    """Drop segments and objects that the master has released."""

    released: list[tuple[EntryKind, Any]]

    def run(self, rank: Rank) -> None:
        references = [rank.segments.drop(key) for kind, key in self.released if kind == "segment"]
        if not rank.is_master and any(memory is not None and memory() is not None for memory in references):
            # Compilers leave reference cycles to inputs, and an idle worker allocates nothing that starts a collection.
            gc.collect()
        for kind, key in self.released:
            if kind == "object":
                rank.objects.pop(key, None)


class MemoryTable:
    """The master's table of segments and replicated objects, for use under the session's lock.

    ``channels`` are the master's ends of the workers' socket pairs, by rank.  ``run`` runs a command on all ranks, and
    raises if another one is running.  ``last_key`` is the key of the newest segment, ``last_sent_key`` the key of the
    newest segment that the workers have.  ``unsent_releases`` are released segments and objects that the workers still
    have.
    """

    def __init__(self, rank: Rank, channels: Mapping[int, socket], run: Callable[[Command], Any]):
        self.last_key = self.last_sent_key = 0
        self._rank, self.segments = rank, rank.segments
        self._channels = channels
        self._run_command = run
        self._is_freed = False
        self._unsent_segments: list[tuple[Segment, io.FileIO, set[int]]] = []
        self.unsent_releases: list[tuple[EntryKind, Any]] = []
        self._owners: dict[tuple[EntryKind, Any], weakref.ref[Any]] = {}
        #: Weak references to owners that were deleted and not released yet; their keys are those of `_owners`.
        self.deleted_owners: list[Any] = []

    def create_segment(self, nbytes: int, may_run_command: bool = True) -> Segment:
        """Create a segment, which every rank has under the same key from the next command on.

        ``may_run_command`` is False if a command is being posted: then no other one can run to make the workers drop
        what was released.  MemoryError is raised if memory is short, OSError if too many files are open.
        """
        return self.add_file(self.create_file(nbytes, may_run_command), max(1, nbytes), may_run_command)

    def create_file(self, nbytes: int, may_run_command: bool = True) -> io.FileIO:
        """Create shared memory as an open file, for `add_file`.  Raise the errors of `create_segment`."""
        nbytes = max(1, nbytes)
        self.release_unused()
        try:
            return create_unlinked_file(nbytes)
        except (MemoryError, OSError) as error:
            # Sending also closes the files of new segments.
            can_free = self.unsent_releases if isinstance(error, MemoryError) else error.errno == errno.EMFILE
            if not (can_free and may_run_command):
                raise
            self.send_changes()
            return create_unlinked_file(nbytes)

    def add_file(self, file: io.FileIO, nbytes: int, may_run_command: bool = True) -> Segment:
        """Register a file of `create_file`, which the table closes, as a segment; see `create_segment`."""
        return self._add(Segment(self.last_key + 1, file.fileno(), nbytes), file, may_run_command)

    def map_user_file(self, path: str) -> Segment:
        """Map a user's file, the same on every host, as a segment.  Raise OSError if it is missing or not readable."""
        self.release_unused()
        with defer_signals():
            file = io.FileIO(path)
        nbytes = os.fstat(file.fileno()).st_size
        return self._add(Segment(self.last_key + 1, file.fileno(), nbytes, is_user_file=True), file, True)

    def reserve_key(self) -> int:
        """Return a key for memory that the ranks of each host create themselves within a command."""
        with defer_signals():
            self.last_key += 1
            return self.last_key

    def _add(self, segment: Segment, file: io.FileIO, may_run_command: bool) -> Segment:
        with defer_signals():  # a worker would wait forever for a key that is never sent
            self.last_key += 1
            self.segments.add(segment)
            self._queue_segment(segment, file, self._channels)
        if self._has_many_unsent() and may_run_command:
            self.send_changes()
        return segment

    def _has_many_unsent(self) -> bool:
        return len(self._unsent_segments) > min(_MAX_UNSENT, _MAX_FILES_IN_FLIGHT // self._rank.size)

    def _queue_segment(self, segment: Segment, file: io.FileIO, receivers: Collection[int]) -> None:
        """Queue a segment that the next command sends to the receivers, or close its file if there are none."""
        if receivers:
            self._unsent_segments.append((segment, file, set(receivers)))
        else:
            file.close()
            self.last_sent_key = segment.key

    def send_segments(self) -> None:
        """Send the workers the segments that they do not have yet."""
        while self._unsent_segments:
            segment, file, receivers = self._unsent_segments[0]
            while receivers:
                receiver = next(iter(receivers))
                send_segment(self._channels[receiver], segment, file.fileno())
                receivers.discard(receiver)
            del self._unsent_segments[0]
            file.close()
            self.last_sent_key = segment.key

    def release(self, kind: EntryKind, key: Any) -> None:
        """Release a segment or an object: in this process at once, on the other ranks with the next command."""
        if self._is_freed:
            return
        self.unsent_releases.append((kind, key))  # first: after an interrupt, the command completes the release
        self._owners.pop((kind, key), None)
        if kind == "segment":
            self.segments.drop(key)
        else:
            self._rank.objects.pop(key, None)

    def release_when_deleted(self, owner: object, kind: EntryKind, key: Any) -> None:
        """Release a segment or an object after its owner is deleted: at the next command or creation of memory.

        No Python code runs at the deletion itself: an interrupt in the middle of it would be swallowed.
        """
        self._owners[kind, key] = weakref.KeyedRef(owner, self.deleted_owners.append, (kind, key))

    def release_unused(self) -> None:
        """Release the segments and objects whose owners have been deleted."""
        while self.deleted_owners:
            self.release(*self.deleted_owners[0].key)
            del self.deleted_owners[0]

    def send_changes(self) -> None:
        """Send new segments to the workers, and make them drop released segments and objects, by a command."""
        release = Release(self.unsent_releases[:])
        self._run_command(release)
        # The list is shortened after the command, which an interrupt may have prevented.
        del self.unsent_releases[: len(release.released)]

    def reopen_segments(self) -> list[tuple[Segment, io.FileIO]] | None:
        """Reopen the files of all segments, for `resend_segments`.  Return None if they are too many."""
        return list(self.segments.reopen_files()) if len(self.segments) <= _MAX_UNSENT else None

    def resend_segments(self, receivers: Collection[int], files: list[tuple[Segment, io.FileIO]] | None) -> None:
        """Send all segments over the channels of new workers, or of an agent, which do not inherit any.

        ``files`` is the result of `reopen_segments`; None to reopen them now.
        """
        for segment, file in self.segments.reopen_files() if files is None else files:
            self._queue_segment(segment, file, receivers)
            if self._has_many_unsent():
                self.send_changes()
        self.send_changes()

    def connect_workers(self, channels: Mapping[int, socket], is_inherited: bool) -> None:
        """Use new workers' channels: they inherit all present segments and objects, or have none."""
        self._channels = channels
        self.last_sent_key = self.last_key if is_inherited else 0
        self._discard_unsent_segments()
        self.unsent_releases.clear()

    def free(self) -> None:
        """Free all segments and objects in this process, after the ranks have ended."""
        self._is_freed = True
        self._discard_unsent_segments()
        self.segments.clear()
        self._rank.objects.clear()
        self._owners.clear()

    def _discard_unsent_segments(self) -> None:
        for _, file, _ in self._unsent_segments:
            file.close()
        self._unsent_segments.clear()
