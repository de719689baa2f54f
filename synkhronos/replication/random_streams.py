"""Streams of random numbers: each worker draws from a stream of its own, far ahead of the master's.

The master's generators are those of a serial program.  Copies on the workers jump ahead, by another number of jumps on
each rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from synkhronos.containers import WeakKeyDict
from synkhronos.graph_libraries import GraphLibrary, get_library
from synkhronos.ranks import Command, Rank, Session
from synkhronos.variable_types import SharedVariable

#: Largest number of jumps of any rank's stream from the master's, by random generator.  A later session's streams start
#: after it, since workers may have drawn more numbers than the master.
_max_jumps: WeakKeyDict[Any, int] = WeakKeyDict()


@dataclass(frozen=True, slots=True)
class JumpStreams(Command):
    """Make the random generators of each worker jump to the rank's own streams."""

    keys_and_offsets: tuple[tuple[Any, int], ...]

    def run(self, rank: Rank) -> None:
        for key, offset in self.keys_and_offsets:
            jump_shared_to_rank(rank.get_object(key), rank, offset)


def reserve_streams(session: Session, shared: SharedVariable) -> int:
    """Reserve one stream of a random generator for each worker.  Return their offset, as in `JumpStreams`.

    For a shared variable that is not a random generator, return 0 and reserve nothing.  Raise TypeError or ValueError
    for a generator that can't jump.
    """
    library = get_library(shared)
    if not library.is_generator(shared):
        return 0
    library.check_generator(shared, library.copy_generator(shared), must_jump=True)
    offset = _max_jumps.get(shared) or 0
    _max_jumps[shared] = offset + session.size - 1
    return offset


def jump_to_rank(library: GraphLibrary, generator: Any, rank: Rank, offset: int = 0) -> Any:
    """Return a random generator that has jumped to a rank's stream, after ``offset`` jumps of earlier workers.

    The master keeps the given generator, so it draws the numbers of a serial program.
    """
    n_jumps = (rank.number - rank.master_rank) % rank.size
    return library.jump_generator(generator, offset + n_jumps) if n_jumps else generator


def jump_shared_to_rank(shared: SharedVariable, rank: Rank, offset: int) -> None:
    """Make the random generator of a shared variable jump to a rank's stream; see `jump_to_rank`."""
    library = get_library(shared)
    library.set_generator(shared, jump_to_rank(library, library.copy_generator(shared), rank, offset))


def record_new_seeds(session: Session, generators: Iterable[SharedVariable]) -> None:
    """Record that the user has set the generators' states: only this session's workers have streams from them."""
    for shared in generators:
        _max_jumps[shared] = session.size - 1
