"""Streams of random numbers: each worker draws from a stream of its own, far ahead of the master's.

The master's generators are those of a serial program.  Copies on the workers jump ahead, by another number of jumps on
each rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from synkhronos.graphs import GraphLibrary, library_of
from synkhronos.ranks import Command, Rank, Session, WeakKeyDict

#: Largest number of jumps of any rank's stream from the master's, by random generator.  A later session's streams start
#: after it, since workers may have drawn more numbers than the master.
_max_jumps: WeakKeyDict[Any, int] = WeakKeyDict()


@dataclass(frozen=True, slots=True)
class JumpStreams(Command):
    """Let the workers' random generators jump to each rank's streams.

    Attributes
    ----------
    starts : tuple of (key, int)
        Key of each generator, and the number of jumps before the ranks' streams.
    """

    starts: tuple[tuple[Any, int], ...]

    def run(self, rank: Rank) -> None:
        """Jump on this rank.  The master's streams don't change."""
        for key, start in self.starts:
            jump_shared(rank.get_object(key), rank, start)


def reserve_streams(session: Session, shared: Any) -> int:
    """Reserve one stream of a random generator for each worker; return the number of jumps to the first, less 1.

    For a shared variable that is no random generator, return 0 and reserve nothing.

    Raises
    ------
    TypeError, ValueError
        If the generator can't jump.
    """
    library = library_of(shared)
    if not library.is_generator(shared):
        return 0
    library.check_generator(shared, library.copy_generator(shared), must_jump=True)
    start = _max_jumps.get(shared) or 0
    _max_jumps[shared] = start + session.size - 1
    return start


def jump_to_rank(library: GraphLibrary, value: Any, rank: Rank, start: int = 0) -> Any:
    """Return a random generator that has jumped to a rank's stream.

    The master keeps the given generator, so it draws the numbers of a serial program.

    Parameters
    ----------
    library : GraphLibrary
    value : object
        State of the generator.
    rank : Rank
    start : int
        Number of jumps that earlier workers have used.
    """
    n_jumps = (rank.number - rank.master_rank) % rank.size
    return library.jump_generator(value, start + n_jumps) if n_jumps else value


def jump_shared(shared: Any, rank: Rank, start: int) -> None:
    """Let the random generator of a shared variable jump to a rank's stream; see `jump_to_rank`."""
    library = library_of(shared)
    library.set_generator(shared, jump_to_rank(library, library.copy_generator(shared), rank, start))


def reset_streams(session: Session, generators: Iterable[Any]) -> None:
    """Record that the user has set the generators' states: only this session's workers have streams from them."""
    for shared in generators:
        _max_jumps[shared] = session.size - 1
