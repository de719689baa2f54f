"""The commands that ranks run, and the shared memory that a command accesses."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from synkhronos.ranks.program_memory import ProgramMemoryLayout
from synkhronos.ranks.rank import Rank
from synkhronos.ranks.segments import ArrayLocation

#: Maximal number of commands that the master caches pickled, and a worker unpickled: a training loop repeats a few.
MAX_CACHED_COMMANDS = 32
#: Maximal number of bytes of a cached command.
MAX_CACHED_NBYTES = 1 << 14


class RowAccess(NamedTuple):
    """Rows of an array in shared memory that a rank accesses, None for all.

    ``first_row`` is the index of the array's first row; it is subtracted from each index.
    """

    array: ArrayLocation
    rows: range | ArrayLocation | None = None
    first_row: int = 0


class Command(ABC):
    """A small picklable object whose method `run` every rank runs, including the master's.

    A command is sent once and may run many times from the same object, so `run` must not change it.  It is a frozen
    dataclass, or, if it is posted at every call, a named tuple, which is faster to create, hash and compare.
    """

    __slots__ = ()

    @property
    def effect_sentence(self) -> str | None:
        """Effect of the command, as a sentence for errors such as "The function's updates were applied"; or None.

        A command with an effect calls `Rank.record_effect` once the effect is applied.  The error of a failed command
        names the ranks on which it was applied.
        """
        return None

    @property
    def partial_effect_sentence(self) -> str | None:
        """Sentence for errors if ranks may have applied a part of the effect, or None if that is impossible."""
        return None

    @property
    def program_layout(self) -> ProgramMemoryLayout | None:
        """Layout of the memory of the program that the command runs, or None if it runs none."""
        return None

    def find_row_accesses(self, size: int, host_ranks: range) -> Iterator[RowAccess]:
        """Yield the rows of shared memory that the command accesses on ``host_ranks``, the ranks of a host.

        The default is all rows of all arrays that the command's pickle contains, and the accesses of commands in it.
        ``size`` is the number of all ranks.
        """
        finder = _RowAccessFinder(self, size, host_ranks)
        finder.dump(self)
        yield from finder.accesses

    def without_rank(self, rank_number: int) -> Command:
        """Return this command without the entries of a rank that is left out; the entries of later ranks move down."""
        return self

    @abstractmethod
    def run(self, rank: Rank) -> Any:
        """Run this rank's part and return its result.  `Session.run` returns the result of the master's part."""


@dataclass(frozen=True, slots=True)
class OversizedCommand(Command):
    """Stand-in for a command that is too long for the mailbox: a segment has the command's pickle."""

    location: ArrayLocation

    def run(self, rank: Rank) -> object:
        command: Command = pickle.loads(self.location.view(rank.segments).data)
        return command.run(rank)


class _DiscardingWriter:
    """File whose content is discarded: a pickler passes long values to it without a copy."""

    def write(self, content: object) -> None:
        """Discard the content."""


class _RowAccessFinder(pickle.Pickler):
    """Pickler that finds the row accesses of a command, for the parameters of `Command.find_row_accesses`.

    A pickle reaches everything that ranks receive: items, attributes, slots, and what ``__reduce__`` returns.
    """

    def __init__(self, command: Command, size: int, host_ranks: range):
        super().__init__(_DiscardingWriter(), pickle.HIGHEST_PROTOCOL)
        self._command, self._size, self._host_ranks = command, size, host_ranks
        self.accesses: list[RowAccess] = []

    def persistent_id(self, value: object) -> str | None:
        """Record an array or a nested command, and return a name in place of its pickle; None for other values."""
        if isinstance(value, ArrayLocation):
            self.accesses.append(RowAccess(value))
        elif isinstance(value, Command) and value is not self._command:
            self.accesses += value.find_row_accesses(self._size, self._host_ranks)
        else:
            return None
        return "recorded"
