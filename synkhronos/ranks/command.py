"""The commands that ranks run, and the shared memory that a command accesses."""

from __future__ import annotations

import dataclasses
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

        The default is all rows of all arrays in the command's fields, and the accesses of commands in its fields.
        ``size`` is the number of all ranks.
        """
        return find_nested_row_accesses(_get_nested_values(self), size, host_ranks)

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


def find_nested_row_accesses(value: object, size: int, host_ranks: range) -> Iterator[RowAccess]:
    """Yield the row accesses of a value in a command, and of its items and fields.

    For the parameters see `Command.find_row_accesses`.
    """
    if isinstance(value, ArrayLocation):
        yield RowAccess(value)
    elif isinstance(value, Command):
        yield from value.find_row_accesses(size, host_ranks)
    else:
        for nested in _get_nested_values(value):
            yield from find_nested_row_accesses(nested, size, host_ranks)


def _get_nested_values(value: object) -> list[Any]:
    """Return the items of a sequence, or the values of the fields of a dataclass or a class with slots."""
    if isinstance(value, tuple | list):
        return list(value)
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, range | slice):
        return []
    return [getattr(value, name) for name in getattr(value, "__slots__", ())]
