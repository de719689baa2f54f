"""Programs: commands during which each rank proceeds at its own pace.

The ranks of a program synchronize only where the user's code asks for it::

    begin ─── the rank's own work ───── wait ─── ... ─── end
                      │                    │               │
                  report_progress()  barrier, send, receive,   barrier of all ranks
                                 lock

Invariant: no wait is unbounded.  A rank that waits checks its peers, and raises `Cancelled` if one has failed.  It also
publishes the condition that it waits for in shared memory, so that a deadlock of all ranks is detected and raised as an
error.  Deadlocks are not detected across hosts, where published conditions arrive with a delay.

Each program has new shared memory, so that a lock held by a rank of a failed program does not block the next one.

On several hosts, each host has such memory for its own ranks.  A lock belongs to one host.  Ranks of that host acquire
it as on one host.  A rank of another host writes a request into its channel to itself.  The rank's agent passes the
request to the agent of the lock's host, and that agent queues for the lock on behalf of the rank (see
`synkhronos.hosts.program_agent`).
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Hashable, Sequence
from enum import IntEnum
from functools import singledispatch
from time import perf_counter
from typing import Any

from synkhronos.ranks.control_memory import AWAITS_PEER, POLL_SECONDS, Semaphore
from synkhronos.ranks.errors import Cancelled
from synkhronos.ranks.program_memory import (
    DESCRIPTION_NBYTES,
    WORD_NBYTES,
    ProgramMemoryLayout,
    read_ring,
    read_with_length,
    write_ring,
    write_with_length,
)
from synkhronos.ranks.rank import Rank

#: Seconds between two checks of a busy rank that its peers are alive.
_CHECK_SECONDS = 0.01


class WaitCondition(IntEnum):
    """Condition that a rank waits for.  A wait without a condition ends by itself.

    `SENT` and `RECEIVED` are counts of bytes, or of requests in a rank's channel to itself.
    """

    NONE = 0
    BARRIER_REACHED = 1
    SENT = 2
    RECEIVED = 3
    LOCK_FREE = 4


class LockOperation(IntEnum):
    """Request of a rank to the agent of a lock's host."""

    ACQUIRE = 0
    PULL = 1
    PUSH = 2
    RELEASE = 3


#: Contiguous bytes in shared memory: key of the segment, offset, number of bytes.
ByteRange = tuple[int, int, int]


@singledispatch
def find_byte_range(rows: Any) -> ByteRange:
    """Return the location of the bytes of contiguous rows in shared memory.

    Each class of rows registers an implementation.  Raise ValueError if the rows are not contiguous, or belong to a
    file.
    """
    raise TypeError(f"rows: expected rows of a Data object, got {type(rows).__name__}")


class ProgramPeers:
    """The other ranks of a program, with which one rank synchronizes.  ``wait_seconds`` is the total of its waits."""

    def __init__(self, rank: Rank, layout: ProgramMemoryLayout):
        self.rank = rank
        self.layout = layout
        self._segment = segment = rank.segments[layout.segment_key]
        self._words = layout.view_words(segment)
        self._wait_descriptions = [layout.view_description(segment, r) for r in range(layout.n_ranks)]
        self.wait_seconds = 0.0
        self._next_check = 0.0

    # -- progress --------------------------------------------------------------------------------------------

    def report_progress(self) -> None:
        """Publish that this rank makes progress.  Raise `Cancelled` if a peer has failed."""
        if self.rank.barriers.has_failed:
            raise Cancelled
        now = perf_counter()
        if now > self._next_check:
            self._next_check = now + _CHECK_SECONDS
            self.rank.control.last_progress[self.rank.number] = time.monotonic_ns()
            self.rank.barriers.check_peers()

    # -- all ranks together ----------------------------------------------------------------------------------

    def barrier(self, place: str) -> None:
        """Wait until all ranks have arrived at this barrier.

        RuntimeError is raised if another rank is at a barrier at another ``place`` of the program.
        """
        self.all_gather_if_different(None, place)

    def all_gather_if_different(self, value: Hashable, place: str) -> list[Any]:
        """All-gather a small immutable value that is often the same.  This is a barrier, as `barrier` is."""
        with _PublishedWait(self, WaitCondition.BARRIER_REACHED, self.rank.barriers.next_number, f"at {place}"):
            by_rank = self.rank.all_gather_if_different((place, value))
        self.report_progress()
        if any(other != place for other, _ in by_rank):
            places = ", ".join(f"rank {r} is at {other}" for r, (other, _) in enumerate(by_rank))
            self.rank.raise_common_error(RuntimeError(f"the ranks wait for each other in different places: {places}"))
        return [rank_value for _, rank_value in by_rank]

    def all_gather(self, value: object, place: str) -> list[Any]:
        """All-gather a picklable value: return every rank's value, in rank order."""
        payload = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        self.barrier(place)
        with _PublishedWait(self, WaitCondition.BARRIER_REACHED, self.rank.barriers.next_number, f"at {place}"):
            return [pickle.loads(pickled) for pickled in self.rank.all_gather_bytes(payload)]

    # -- two ranks -------------------------------------------------------------------------------------------

    @property
    def max_chunk_nbytes(self) -> int:
        """Maximal number of bytes of a chunk: two fit into a channel, so one can be written while the other is read."""
        return self.layout.channel_nbytes // 2 - WORD_NBYTES

    def send(self, dest: int, chunk: Any, content_name: str) -> None:
        """Wait for space, and send a rank at most `max_chunk_nbytes` bytes, called ``content_name`` in errors."""
        me, sent = self.rank.number, self._words.sent
        channel = me * self.layout.n_ranks + dest
        end = sent[channel] + WORD_NBYTES + len(chunk)
        min_received = end - self.layout.channel_nbytes
        wait_description = f"until rank {dest} receives {content_name}"
        self._wait_for_count(WaitCondition.RECEIVED, channel, min_received, wait_description)
        ring = self.layout.view_channel(self._segment, me, dest)
        write_ring(ring, sent[channel], len(chunk).to_bytes(WORD_NBYTES, "little"))
        write_ring(ring, sent[channel] + WORD_NBYTES, chunk)
        sent[channel] = end
        self._wake(dest)

    def wait_until_received(self, dest: int) -> None:
        """Wait until a rank has received everything that this rank has sent to it."""
        channel = self.rank.number * self.layout.n_ranks + dest
        self._wait_for_count(
            WaitCondition.RECEIVED, channel, self._words.sent[channel], f"until rank {dest} receives a message"
        )

    def receive(self, source: int, content_name: str, out: memoryview | None = None) -> memoryview:
        """Receive a chunk from a rank and return it.  ``out`` is memory of its length to receive it in."""
        me, received = self.rank.number, self._words.received
        channel = source * self.layout.n_ranks + me
        self._wait_for_count(WaitCondition.SENT, channel, received[channel] + 1, f"for {content_name} of rank {source}")
        ring, position = self.layout.view_channel(self._segment, source, me), received[channel]
        length = bytearray(WORD_NBYTES)
        read_ring(ring, position, memoryview(length))
        nbytes = int.from_bytes(length, "little")
        out = memoryview(bytearray(nbytes)) if out is None else out
        if len(out) != nbytes:
            raise ValueError(f"expected {len(out):,} bytes from rank {source}, got {nbytes:,}")
        read_ring(ring, position + WORD_NBYTES, out)
        received[channel] = position + WORD_NBYTES + nbytes
        self._wake(source)
        return out

    def _wake(self, peer: int) -> None:
        """Wake a rank that waits for this rank's write."""
        self.rank.control.fence()
        self.rank.control.wake(peer, AWAITS_PEER)

    # -- locks -----------------------------------------------------------------------------------------------

    def get_lock(self, lock_number: int) -> Lock:
        """Return a lock, to be used in a ``with`` statement.  Raise ValueError for a number out of range."""
        if not 0 <= lock_number < self.layout.n_locks:
            raise ValueError(f"expected a lock from 0 to {self.layout.n_locks - 1}, got {lock_number}")
        is_local = self.layout.find_rank_on_lock_host(lock_number) in self.rank.local_ranks
        return Lock(self, lock_number, self.layout.get_semaphore(self._segment, lock_number) if is_local else None)

    def _acquire(self, lock_number: int, semaphore: Semaphore, timeout: float | None) -> int | None:
        """Acquire a lock of this host and return its turn, or None if it was not free within ``timeout`` seconds."""
        # Without this check, a rank that finds all its locks free would not notice a failure until its program ends.
        if self.rank.barriers.has_failed:
            raise Cancelled
        if not semaphore.acquire(0):
            deadline = float("inf") if timeout is None else time.monotonic() + timeout
            # A wait with a time limit ends by itself, so it can't be part of a deadlock.
            condition = WaitCondition.LOCK_FREE if timeout is None else WaitCondition.NONE
            with _PublishedWait(self, condition, 0, f"for lock {lock_number}", lock_number):
                while not semaphore.acquire(max(0.0, min(POLL_SECONDS, deadline - time.monotonic()))):
                    self.rank.barriers.check_cancelled()
                    if time.monotonic() >= deadline:
                        return None
                    if timeout is None:
                        self._raise_if_deadlocked()
        self._words.owners[lock_number] = self.rank.number + 1
        turn = self._words.acquisitions[lock_number]
        self._words.acquisitions[lock_number] = turn + 1
        return turn

    def _release(self, lock_number: int, semaphore: Semaphore) -> None:
        """Release a lock of this host, or pass it to the agent if a rank of another host waits for it.

        Otherwise ranks of this host, which are faster, could starve the others.
        """
        if self._words.agent_waits[lock_number]:
            self.rank.control.fence()
            self._words.owners[lock_number] = self.layout.agent_owner_number
        else:
            self._words.owners[lock_number] = 0
            semaphore.release()

    def _request(self, operation: LockOperation, lock_number: int, ranges: Sequence[ByteRange] = ()) -> int:
        """Send a request for a lock of another host to this host's agent.  Return the answer, 0 for RELEASE."""
        me, sent = self.rank.number, self._words.sent
        own_channel = me * self.layout.n_ranks + me
        description = f"for lock {lock_number}"
        # The agent may still process a release.
        self._wait_for_count(WaitCondition.RECEIVED, own_channel, sent[own_channel], description)
        memory = self.layout.view_channel(self._segment, me, me)
        write_with_length(memory, pickle.dumps((operation, lock_number, ranges), pickle.HIGHEST_PROTOCOL))
        self.rank.control.fence()
        sent[own_channel] += 1
        if operation == LockOperation.RELEASE:
            return 0
        self._wait_for_count(WaitCondition.RECEIVED, own_channel, sent[own_channel], description)
        return int.from_bytes(memory[:WORD_NBYTES], "little")

    # -- waiting ---------------------------------------------------------------------------------------------

    def _wait_for_count(self, condition: WaitCondition, channel: int, count: int, description: str) -> None:
        """Wait until a channel's count of `SENT` or `RECEIVED` is at least ``count``."""
        counts = self._words.sent if condition == WaitCondition.SENT else self._words.received
        if counts[channel] >= count:
            return
        with _PublishedWait(self, condition, count, description, channel):
            self.rank.barriers.wait_until(lambda: counts[channel] >= count, self._raise_if_deadlocked, AWAITS_PEER)
        self.report_progress()

    def _raise_if_deadlocked(self) -> None:
        """Raise RuntimeError if all ranks wait for each other."""
        if self._is_deadlocked():
            raise RuntimeError(
                "the ranks wait for each other: "
                + ", ".join(f"rank {r} waits {self._read_wait_description(r)}" for r in range(self.layout.n_ranks))
            )

    def _read_wait_description(self, rank: int) -> str:
        """Return the description of a rank's wait."""
        return bytes(read_with_length(self._wait_descriptions[rank])).decode(errors="replace")

    def _is_deadlocked(self) -> bool:
        """Whether no rank can continue.

        The published waits are read twice.  If no rank has begun or ended a wait in between, they all held at the same
        time.
        """
        before = self._read_waits()
        if any(self._is_condition_met(*wait) for *wait, _ in before):
            return False
        return self._read_waits() == before

    def _read_waits(self) -> list[tuple[int, int, int, int]]:
        """Return the condition, channel or lock, count and number of changes of every rank's published wait.

        The numbers of changes are read last: if two readings are equal, the waits held at the time in between.
        """
        words = self._words
        arrays = words.conditions, words.channels_or_locks, words.awaited_counts, words.n_changes
        return list(zip(*[array.tolist() for array in arrays], strict=True))

    def _is_condition_met(self, condition: int, channel_or_lock: int, count: int) -> bool:
        """Whether the condition of a published wait holds."""
        if condition == WaitCondition.BARRIER_REACHED:
            return min(self.rank.control.arrived) >= count
        if condition == WaitCondition.SENT:
            return self._words.sent[channel_or_lock] >= count
        if condition == WaitCondition.RECEIVED:
            return self._words.received[channel_or_lock] >= count
        return condition != WaitCondition.LOCK_FREE or not self._words.owners[channel_or_lock]


class _PublishedWait:
    """Context manager that publishes the condition for which this rank waits, and adds up the seconds of its waits.

    ``count`` is the number of the barrier, or the count of a channel, that ends the wait.  ``channel_or_lock`` is the
    number of either.  ``description`` is shown in the error message of a deadlock.
    """

    def __init__(
        self, peers: ProgramPeers, condition: WaitCondition, count: int, description: str, channel_or_lock: int = 0
    ):
        self._peers, self._condition, self._count = peers, condition, count
        self._channel_or_lock = channel_or_lock
        self._description = description.encode()[:DESCRIPTION_NBYTES]
        self._start_time = 0.0

    def __enter__(self) -> None:
        self._start_time = perf_counter()
        words, me = self._peers._words, self._peers.rank.number
        write_with_length(self._peers._wait_descriptions[me], self._description)
        words.channels_or_locks[me] = self._channel_or_lock
        words.awaited_counts[me] = self._count
        words.n_changes[me] += 1
        words.conditions[me] = self._condition

    def __exit__(self, *_: object) -> None:
        words, me = self._peers._words, self._peers.rank.number
        self._peers.wait_seconds += perf_counter() - self._start_time
        words.conditions[me] = WaitCondition.NONE
        words.n_changes[me] += 1


class Lock:
    """A lock that all ranks share, made by `RankContext.lock`.

    Ranks of several hosts share no memory.  While a rank holds the lock, `pull` copies the rows that it needs from the
    lock's host, and `push` copies the rows that it has changed back.  Between ranks of one host both do nothing.

    Attributes
    ----------
    turn : int
        Number of times that ranks had acquired the lock before; no two turns are equal.
    """

    def __init__(self, peers: ProgramPeers, lock_number: int, semaphore: Semaphore | None):
        self._peers, self._lock_number, self._semaphore = peers, lock_number, semaphore
        self.turn = -1

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self, timeout: float | None = None) -> bool:
        """Acquire the lock without a ``with`` statement.  Return False if it was not free within ``timeout`` seconds.

        Parameters
        ----------
        timeout : float, optional
            Maximal number of seconds to wait, by default without a limit.  A limit is possible only for locks of this
            rank's host.

        Raises
        ------
        ValueError
            If there is a time limit and the lock is on another host.
        """
        if self._semaphore is not None:
            turn = self._peers._acquire(self._lock_number, self._semaphore, timeout)
        elif timeout is None:
            turn = self._peers._request(LockOperation.ACQUIRE, self._lock_number)
        else:
            raise ValueError(f"timeout: lock {self._lock_number} is on another host, where no time limit is possible")
        if turn is None:
            return False
        self.turn = turn
        return True

    def release(self) -> None:
        """Release the lock."""
        if self._semaphore is None:
            self._peers._request(LockOperation.RELEASE, self._lock_number)
        else:
            self._peers._release(self._lock_number, self._semaphore)

    def pull(self, *rows: Any) -> None:
        """Copy rows from the lock's host to this rank's host.  Call this only while this rank holds the lock.

        Parameters
        ----------
        *rows : LocalRows
            All rows of an array, or contiguous ones, ``rows[start:stop]``.  Always use the same lock for them.

        Raises
        ------
        ValueError
            If rows are not contiguous, or belong to a file.
        """
        self._request_copy(LockOperation.PULL, rows)

    def push(self, *rows: Any) -> None:
        """Copy rows from this rank's host to the lock's host; see `pull`."""
        self._request_copy(LockOperation.PUSH, rows)

    def _request_copy(self, operation: LockOperation, rows: Sequence[Any]) -> None:
        ranges = [find_byte_range(array) for array in rows]
        if self._semaphore is None:
            self._peers._request(operation, self._lock_number, ranges)
