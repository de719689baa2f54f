"""Layout of the shared memory through which ranks of a program synchronize (see `synkhronos.ranks.program_peers`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Generic, NamedTuple, TypeVar

from synkhronos.ranks.control_memory import Semaphore
from synkhronos.ranks.segments import Segment

T = TypeVar("T")

#: Number of bytes of the description of a rank's wait.
DESCRIPTION_NBYTES = 120
#: Number of bytes of a word.
WORD_NBYTES = 8
#: Maximal number of bytes of a channel.
_MAX_CHANNEL_NBYTES = 1 << 17
#: Minimal number of bytes of a channel.
_MIN_CHANNEL_NBYTES = 1 << 13
#: Maximal number of bytes of all channels together, unless each has the minimal size.
_ALL_CHANNELS_NBYTES = 1 << 24
_PAGE_NBYTES = 4096
_CACHE_LINE_NBYTES = 64


class ProgramWords(NamedTuple, Generic[T]):
    """Arrays of words that the memory of a program starts with, or a value for each array.

    Attributes
    ----------
    conditions, channels_or_locks, awaited_counts : memoryview of uint64
        For each rank: the condition of its wait, the number of the channel or lock, and the count that ends the wait.
    n_changes : memoryview of uint64
        Number of times that each rank has begun or ended a wait.
    owners, acquisitions : memoryview of uint64
        Owner of each lock, counted from 1 (0 if it is free), and number of times that it was acquired.
    agent_waits : memoryview of uint64
        Whether the agent waits for each lock on behalf of a rank of another host.
    sent, received : memoryview of uint64
        Bytes sent through each channel, and bytes received from it.  For a rank's channel to itself: requests to its
        agent, and answers.
    """

    conditions: T
    channels_or_locks: T
    awaited_counts: T
    n_changes: T
    owners: T
    acquisitions: T
    agent_waits: T
    sent: T
    received: T


@dataclass(frozen=True)
class ProgramMemoryLayout:
    """Layout of a program's shared memory: words, descriptions of waits, locks, a channel from each rank to each."""

    segment_key: int
    n_ranks: int
    n_locks: int

    @cached_property
    def channel_nbytes(self) -> int:
        """Number of bytes of a channel; each chunk takes 8 bytes more than its length."""
        return int(
            min(
                _MAX_CHANNEL_NBYTES,
                max(_MIN_CHANNEL_NBYTES, _ALL_CHANNELS_NBYTES // self.n_ranks**2 // _PAGE_NBYTES * _PAGE_NBYTES),
            )
        )

    @cached_property
    def _word_counts(self) -> ProgramWords[int]:
        """Number of words of each array that the memory starts with."""
        return ProgramWords(*[self.n_ranks] * 4, *[self.n_locks] * 3, *[self.n_ranks**2] * 2)

    @cached_property
    def _descriptions_offset(self) -> int:
        return _round_up(sum(self._word_counts) * WORD_NBYTES, _CACHE_LINE_NBYTES)

    @cached_property
    def _locks_offset(self) -> int:
        return _round_up(
            self._descriptions_offset + (DESCRIPTION_NBYTES + WORD_NBYTES) * self.n_ranks, _CACHE_LINE_NBYTES
        )

    @cached_property
    def _channels_offset(self) -> int:
        return _round_up(self._locks_offset + _CACHE_LINE_NBYTES * self.n_locks, _PAGE_NBYTES)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the segment."""
        return self._channels_offset + self.channel_nbytes * self.n_ranks**2

    @property
    def agent_owner_number(self) -> int:
        """Number that marks the host's agent as the owner of a lock."""
        return self.n_ranks + 1

    def find_rank_on_lock_host(self, lock: int) -> int:
        """Return a rank on the host of a lock: lock 1 + r belongs to rank r's host, other locks to the first host."""
        return lock - 1 if 1 <= lock <= self.n_ranks else 0

    def initialize_locks(self, segment: Segment) -> None:
        """Initialize the locks as free.  Called once on each host, before its ranks use the memory."""
        for lock in range(self.n_locks):
            Semaphore(segment.buffer, self._locks_offset + _CACHE_LINE_NBYTES * lock, is_initialized=False).release()

    def view_words(self, segment: Segment) -> ProgramWords[memoryview]:
        """Return the arrays of words."""
        counts = self._word_counts
        words = memoryview(segment.buffer)[: sum(counts) * WORD_NBYTES].cast("Q")
        return ProgramWords(*(words[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)))

    def get_semaphore(self, segment: Segment, lock: int) -> Semaphore:
        """Return the semaphore of a lock."""
        return Semaphore(segment.buffer, self._locks_offset + _CACHE_LINE_NBYTES * lock, is_initialized=True)

    def view_description(self, segment: Segment, rank: int) -> memoryview:
        """Return the memory of the description of a rank's wait."""
        start = self._descriptions_offset + (DESCRIPTION_NBYTES + WORD_NBYTES) * rank
        return memoryview(segment.buffer)[start : start + DESCRIPTION_NBYTES + WORD_NBYTES]

    def view_channel(self, segment: Segment, source: int, target: int) -> memoryview:
        """Return the ring buffer through which one rank sends bytes to another.

        The channel of a rank to itself holds a request to the rank's agent, and later the answer.
        """
        start = self._channels_offset + self.channel_nbytes * (source * self.n_ranks + target)
        return memoryview(segment.buffer)[start : start + self.channel_nbytes]


def _round_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


def write_ring(ring: memoryview, position: int, content: Any) -> None:
    """Write bytes into a ring buffer.  ``position`` is the number of bytes written into it before."""
    start = position % len(ring)
    before_end = len(ring) - start
    ring[start : start + len(content)] = content[:before_end]
    ring[: max(0, len(content) - before_end)] = content[before_end:]


def read_ring(ring: memoryview, position: int, out: memoryview) -> None:
    """Fill memory with bytes of a ring buffer.  ``position`` is the number of bytes read from it before."""
    start = position % len(ring)
    before_end = ring[start : start + len(out)]
    out[: len(before_end)] = before_end
    out[len(before_end) :] = ring[: len(out) - len(before_end)]


def write_with_length(memory: memoryview, content: Any) -> None:
    """Write the number of bytes, followed by the bytes."""
    memory[:WORD_NBYTES] = len(content).to_bytes(WORD_NBYTES, "little")
    memory[WORD_NBYTES : WORD_NBYTES + len(content)] = content


def read_with_length(memory: memoryview) -> memoryview:
    """Return the bytes that `write_with_length` wrote."""
    return memory[WORD_NBYTES : WORD_NBYTES + int.from_bytes(memory[:WORD_NBYTES], "little")]
