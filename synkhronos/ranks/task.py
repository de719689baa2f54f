"""A command that does not join at each step: each rank goes at its own pace.

`TaskMemory`
    What the ranks of one task share: locks, channels between any two ranks, and what each of them waits for.
`Task`
    One rank's part in it: progress, meetings, messages, locks.
`Lock`
    One of the locks.
`Bridge`
    One host's end of it, where ranks are on several.

::

             begin ─── the program's own work ─── wait ─── ... ─── end
                         │                          │                │
                       progress()       meet, send, receive, lock    meets all the others

Every wait looks at the peers' lives, and leaves when one of them has failed.  A rank that waits says for what.  So a
rank can see that all of them wait for each other, and says so instead of waiting for ever; not where they are on
several hosts: words on their way would make it seem so.

The memory is new in each task: a lock that a failed task has left closed is nobody's trouble.

On several hosts each has memory like this.  A lock is that of one host, whose ranks take it as on one machine.  A rank
of another host asks its agent, by a channel from itself to itself: the agent of the lock's host then stands in the
line for it.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from time import perf_counter
from types import TracebackType
from typing import Any

import numpy as np

from synkhronos.ranks.control import FOR_TASK, POLL, Mutex
from synkhronos.ranks.errors import Cancelled
from synkhronos.ranks.rank import Rank
from synkhronos.ranks.segments import Segment

#: Seconds between two looks of a busy rank at its peers' lives.
_LOOK = 0.01
#: Bytes of the text in which a rank says what it waits for.
_TEXT = 120
#: Bytes of a channel: at most, and at least.
_LARGEST, _SMALLEST = 1 << 17, 1 << 13
#: Bytes of the channels of all pairs together, unless each has its smallest size.
_CHANNELS = 1 << 24
_PAGE = 4096
_WORD = 8
_LINE = 64

#: What a rank waits for: a step of all ranks, bytes that another rank sends, bytes that another rank receives, a lock.
NOTHING, STEP, SENT, RECEIVED, LOCK = range(5)
#: What a rank asks of a lock on another host.
TAKE, READ, WRITE, GIVE = range(4)

#: A run of bytes in shared memory: the segment's key, where it begins, how long it is.
Span = tuple[int, int, int]


@dataclass(frozen=True)
class TaskMemory:
    """Where in shared memory the ranks of a task find what they share."""

    #: The segment's.
    key: int
    #: The number of ranks.
    size: int
    #: The number of locks.
    locks: int

    @cached_property
    def capacity(self) -> int:
        """Bytes that are on their way from one rank to another at most."""
        return int(min(_LARGEST, max(_SMALLEST, _CHANNELS // self.size**2 // _PAGE * _PAGE)))

    @cached_property
    def _words(self) -> tuple[int, ...]:
        return (
            1,  # whether to stop
            # of each rank: what it waits for, of which channel or lock, the count that ends the wait, and how often it
            # began or ended to wait
            4 * self.size,
            self.locks,  # the owner of each, counted from 1; 0 without
            self.locks,  # how often each was taken
            self.locks,  # whether the agent wants it for a rank of another host
            self.size**2,  # bytes sent from each rank to each; from a rank to itself, requests to its agent
            self.size**2,  # bytes received; answers of the agent
        )

    @cached_property
    def _texts_at(self) -> int:
        return -(-sum(self._words) * _WORD // _LINE) * _LINE

    @cached_property
    def _locks_at(self) -> int:
        return -(-(self._texts_at + (_TEXT + _WORD) * self.size) // _LINE) * _LINE

    @cached_property
    def _channels_at(self) -> int:
        return -(-(self._locks_at + _LINE * self.locks) // _PAGE) * _PAGE

    @property
    def nbytes(self) -> int:
        """The size of all of it."""
        return self._channels_at + self.capacity * self.size**2

    @property
    def handed(self) -> int:
        """The owner of a lock that a rank has left to its host's agent."""
        return self.size + 1

    def home(self, lock: int) -> int:
        """Return the rank on whose host a lock is: lock 1 + r is rank r's, the others are on the first."""
        return lock - 1 if 1 <= lock <= self.size else 0

    def prepare(self, segment: Segment) -> None:
        """Open the locks; once on each host, before its ranks have the memory."""
        for lock in range(self.locks):
            Mutex(segment.buffer, self._locks_at + _LINE * lock, made=False).ring()

    def words(self, segment: Segment) -> list[memoryview]:
        """Return the words: one view for each kind of them, in the order of `_words`."""
        words, ends = memoryview(segment.buffer)[: sum(self._words) * _WORD].cast("Q"), accumulate(self._words)
        return [words[end - size : end] for size, end in zip(self._words, ends, strict=True)]

    def mutex(self, segment: Segment, lock: int) -> Mutex:
        """Return a lock's semaphore."""
        return Mutex(segment.buffer, self._locks_at + _LINE * lock, made=True)

    def text(self, segment: Segment, rank: int) -> memoryview:
        """Return where a rank says what it waits for."""
        at = self._texts_at + (_TEXT + _WORD) * rank
        return memoryview(segment.buffer)[at : at + _TEXT + _WORD]

    def channel(self, segment: Segment, source: int, target: int) -> memoryview:
        """Return the ring buffer through which one rank sends bytes to another.

        From a rank to itself it holds one request to the rank's agent, and then the answer.
        """
        at = self._channels_at + self.capacity * (source * self.size + target)
        return memoryview(segment.buffer)[at : at + self.capacity]


def _write_ring(ring: memoryview, at: int, content: Any) -> None:
    """Write bytes into a ring buffer, ``at`` bytes after its first use."""
    at %= len(ring)
    before_end = len(ring) - at
    ring[at : at + len(content)] = content[:before_end]
    ring[: max(0, len(content) - before_end)] = content[before_end:]


def _read_ring(ring: memoryview, at: int, into: memoryview) -> None:
    """Fill memory with what `_write_ring` has written there."""
    at %= len(ring)
    before_end = ring[at : at + len(into)]
    into[: len(before_end)] = before_end
    into[len(before_end) :] = ring[: len(into) - len(before_end)]


def _put(room: memoryview, content: Any) -> None:
    """Write bytes, and before them how many they are."""
    room[:_WORD] = len(content).to_bytes(_WORD, "little")
    room[_WORD : _WORD + len(content)] = content


def _content(room: memoryview) -> memoryview:
    """Return what `_put` has written."""
    return room[_WORD : _WORD + int.from_bytes(room[:_WORD], "little")]


class Task:
    """One rank's part in a task."""

    def __init__(self, rank: Rank, memory: TaskMemory):
        self.rank = rank
        self.memory = memory
        self._segment = segment = rank.segments[memory.key]
        self._stop, self._waits, self._owners, self._turns, self._wanted, self._sent, self._received = memory.words(
            segment
        )
        self._texts = [memory.text(segment, r) for r in range(memory.size)]
        #: Seconds for which this rank has waited for others.
        self.waited = 0.0
        self._next_look = 0.0

    # -- going on --------------------------------------------------------------------------------------------

    def progress(self) -> None:
        """Say that this rank goes on, and hear whether the others do: `Cancelled` if one failed."""
        control = self.rank.control
        if control.words[control.FAILED] == self.rank.command:
            raise Cancelled
        now = perf_counter()
        if now > self._next_look:
            self._next_look = now + _LOOK
            control.progress[self.rank.number] = time.monotonic_ns()
            self.rank.watch()

    def stop(self) -> None:
        """Ask all ranks to stop: they see it in `is_stopped`."""
        self._stop[0] = 1

    @property
    def is_stopped(self) -> bool:
        """Whether some rank has asked all to stop."""
        return bool(self._stop[0])

    # -- all ranks together ----------------------------------------------------------------------------------

    def meet(self, word: str, what: Hashable = None) -> list[Any]:
        """Wait until all ranks have come here, and return what each has brought: something small, and seldom new.

        Raises
        ------
        RuntimeError
            If another rank is elsewhere: at another ``word``.
        """
        with _Waiting(self, STEP, self.rank.next_step, f"at {word}"):
            shown = self.rank.exchange_cached((word, what))
        self.progress()
        if any(other != word for other, _ in shown):
            self.refuse(
                "the ranks wait for each other in different places: "
                + ", ".join(f"rank {r} is at {other}" for r, (other, _) in enumerate(shown))
            )
        return [each for _, each in shown]

    def exchange(self, word: str, value: Any) -> list[Any]:
        """Return every rank's value, in rank order; any that can be pickled."""
        payload = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        self.meet(word)
        with _Waiting(self, STEP, self.rank.next_step, f"at {word}"):
            return [pickle.loads(whole) for whole in self.rank.exchange_bytes(payload)]

    def refuse(self, message: str) -> None:
        """Leave on every rank, as all see the same: the master says why."""
        raise RuntimeError(message) if self.rank.is_master else Cancelled

    # -- two ranks -------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Bytes of a channel: parts, and 8 bytes more for each."""
        return self.memory.capacity

    @property
    def part(self) -> int:
        """Bytes of the longest part: two of them fit into a channel, so that one is filled while one is emptied."""
        return self.memory.capacity // 2 - _WORD

    def send(self, to: int, part: Any, what: str) -> None:
        """Send at most `part` bytes to a rank; wait while the channel has no room for them."""
        me, sent = self.rank.number, self._sent
        number = me * self.memory.size + to
        end = sent[number] + _WORD + len(part)
        self._wait_for(RECEIVED, number, end - self.memory.capacity, f"until rank {to} receives {what}")
        ring = self.memory.channel(self._segment, me, to)
        _write_ring(ring, sent[number], len(part).to_bytes(_WORD, "little"))
        _write_ring(ring, sent[number] + _WORD, part)
        sent[number] = end
        self._tell(to)

    def wait_until_received(self, to: int, what: str) -> None:
        """Wait until a rank has received all that this one has sent to it."""
        number = self.rank.number * self.memory.size + to
        self._wait_for(RECEIVED, number, self._sent[number], f"until rank {to} receives {what}")

    def receive(self, source: int, what: str, into: memoryview | None = None) -> memoryview:
        """Receive a part that a rank has sent, ``into`` memory of its length or into new memory, and return it."""
        me, received = self.rank.number, self._received
        number = source * self.memory.size + me
        self._wait_for(SENT, number, received[number] + 1, f"for {what} of rank {source}")
        ring, at = self.memory.channel(self._segment, source, me), received[number]
        length = bytearray(_WORD)
        _read_ring(ring, at, memoryview(length))
        nbytes = int.from_bytes(length, "little")
        into = memoryview(bytearray(nbytes)) if into is None else into
        if len(into) != nbytes:
            raise ValueError(f"expected {len(into):,} bytes from rank {source}, got {nbytes:,}")
        _read_ring(ring, at + _WORD, into)
        received[number] = at + _WORD + nbytes
        self._tell(source)
        return into

    def _tell(self, peer: int) -> None:
        self.rank.control.fence()
        self.rank.control.ring(peer, FOR_TASK)

    # -- locks -----------------------------------------------------------------------------------------------

    def lock(self, number: int) -> Lock:
        """Return a lock, to be used in a ``with`` statement."""
        if not 0 <= number < self.memory.locks:
            raise ValueError(f"expected a lock from 0 to {self.memory.locks - 1}, got {number}")
        is_here = self.memory.home(number) in self.rank.control.here
        return Lock(self, number, self.memory.mutex(self._segment, number) if is_here else None)

    def _take(self, number: int, mutex: Mutex, timeout: float | None = None) -> int | None:
        """Return the lock's turn; None if another rank has held it for ``timeout`` seconds."""
        if not mutex.take(0):
            deadline = float("inf") if timeout is None else time.monotonic() + timeout
            # A rank with a time limit waits for nobody in the sense of `_all_are_stuck`.
            with _Waiting(self, LOCK if timeout is None else NOTHING, 0, f"for lock {number}", number):
                while not mutex.take(max(0.0, min(POLL, deadline - time.monotonic()))):
                    self.rank.check()
                    if time.monotonic() >= deadline:
                        return None
                    if timeout is None:
                        self._refuse_to_be_stuck()
        self._owners[number] = self.rank.number + 1
        turn = self._turns[number]
        self._turns[number] = turn + 1
        return turn

    def _let_go(self, number: int, mutex: Mutex) -> None:
        if self._wanted[number]:  # else ranks of this host, which are quicker, would have it again and again
            self.rank.control.fence()
            self._owners[number] = self.memory.handed
        else:
            self._owners[number] = 0
            mutex.ring()

    def _ask(self, what: int, number: int, spans: Sequence[Span] = ()) -> int:
        """Have the agents do something about a lock of another host; return the answer, but to GIVE, which has none."""
        me, sent = self.rank.number, self._sent
        to_me = me * self.memory.size + me
        said = f"for lock {number}"
        self._wait_for(RECEIVED, to_me, sent[to_me], said)  # what this rank has given may be on its way
        room = self.memory.channel(self._segment, me, me)
        _put(room, pickle.dumps((what, number, spans), pickle.HIGHEST_PROTOCOL))
        self.rank.control.fence()
        sent[to_me] += 1
        if what == GIVE:
            return 0
        self._wait_for(RECEIVED, to_me, sent[to_me], said)
        return int.from_bytes(room[:_WORD], "little")

    # -- waiting ---------------------------------------------------------------------------------------------

    def _wait_for(self, kind: int, channel: int, count: int, text: str) -> None:
        """Wait until so many bytes of a channel have been SENT or RECEIVED."""
        counts = self._sent if kind == SENT else self._received
        if counts[channel] >= count:
            return
        with _Waiting(self, kind, count, text, channel):
            self.rank.wait(lambda: counts[channel] >= count, self._refuse_to_be_stuck, FOR_TASK)
        self.progress()

    def _refuse_to_be_stuck(self) -> None:
        """Leave if all ranks wait for each other."""
        if self._all_are_stuck():
            raise RuntimeError(
                "the ranks wait for each other: "
                + ", ".join(f"rank {r} waits {self._said(r)}" for r in range(self.memory.size))
            )

    def _said(self, rank: int) -> str:
        return bytes(_content(self._texts[rank])).decode(errors="replace")

    def _all_are_stuck(self) -> bool:
        """Whether every rank waits for what no rank will do, as all of them wait.

        Looked at twice: if nobody has begun or ended to wait in between, it was so at one moment.
        """
        before = self._waits.tolist()
        if any(self._may_go_on(*before[4 * r : 4 * r + 3]) for r in range(self.memory.size)):
            return False
        return self._waits.tolist() == before

    def _may_go_on(self, kind: int, which: int, count: int) -> bool:
        if kind == STEP:
            return min(self.rank.control.arrived) >= count
        if kind == SENT:
            return self._sent[which] >= count
        if kind == RECEIVED:
            return self._received[which] >= count
        return kind != LOCK or not self._owners[which]


class Bridge:
    """One host's end of the channels between its ranks and those of other hosts, and of its locks; its agent's.

    The segment is this host's: its words and channels are those of its own ranks, and copies of what others have
    sent these.
    """

    def __init__(self, memory: TaskMemory, segment: Segment, here: range):
        self._memory, self._segment, self._here = memory, segment, here
        n = memory.size
        self._stop, _, self._owners, self._turns, self._wanted, *channels = memory.words(segment)
        self._sent, self._received = (np.frombuffer(words, np.uint64).reshape(n, n) for words in channels)
        self._asked = [0] * len(here)
        there = [r for r in range(n) if r not in here]
        # What was told of each channel that leads out of the host, and of each that leads into it.
        self._told = [
            (self._sent, list(here), there, np.zeros((len(here), len(there)), np.uint64)),
            (self._received, there, list(here), np.zeros((len(there), len(here)), np.uint64)),
        ]
        self._told_stop = False

    def news(self) -> Iterator[tuple[int, int, int, bytearray | None]]:
        """Yield the progress of each channel to or from another host since the last call.

        Yields
        ------
        source, target : int
            The channel's ranks.
        count : int
            Bytes sent or received through the channel so far.
        content : bytearray or None
            The last of these bytes, those not yielded before; None for bytes that a rank of this host has received.
        """
        for words, sources, targets, told in self._told:
            now = words[np.ix_(sources, targets)]
            for i, j in np.argwhere(told < now):
                source, target, begin, end = sources[i], targets[j], int(told[i, j]), int(now[i, j])
                content = bytearray(end - begin) if words is self._sent else None
                if content is not None:
                    _read_ring(self._ring(source, target), begin, memoryview(content))
                yield source, target, end, content
            told[:] = now

    def take(self, source: int, target: int, count: int, content: bytearray | None) -> int:
        """Enter what `news` of another host has yielded, and return the rank that may wait for it."""
        if content is None:
            self._received[source, target] = count
            return source
        _write_ring(self._ring(source, target), count - len(content), content)
        self._sent[source, target] = count
        return target

    def is_stopped_here(self) -> bool:
        """Whether a rank of this host has asked all to stop, and the others have not been told."""
        if self._stop[0] and not self._told_stop:
            self._told_stop = True
            return True
        return False

    def stop(self) -> None:
        """Ask the ranks of this host to stop: one on another has."""
        self._stop[0], self._told_stop = 1, True

    # -- locks -----------------------------------------------------------------------------------------------

    def asked(self) -> Iterator[tuple[int, int, int, Sequence[Span]]]:
        """Yield what ranks of this host ask of locks of other hosts: the rank, what, the lock, the rows."""
        for i, rank in enumerate(self._here):
            if self._sent[rank, rank] > self._asked[i]:
                request = _content(self._ring(rank, rank))
                self._asked[i] += 1
                yield rank, *pickle.loads(request)

    def answer(self, rank: int, value: int) -> None:
        """Answer a rank of this host."""
        self._ring(rank, rank)[:_WORD] = value.to_bytes(_WORD, "little")
        self._received[rank, rank] += 1

    def home(self, lock: int) -> int:
        """Return the rank on whose host a lock is."""
        return self._memory.home(lock)

    def want(self, lock: int, is_wanted: bool) -> None:
        """Say whether a rank of another host waits for a lock of this one."""
        self._wanted[lock] = is_wanted

    def take_lock(self, lock: int, rank: int) -> int | None:
        """Take a lock of this host for a rank of another; return its turn, or None if it is not free."""
        if self._owners[lock] != self._memory.handed and not self._memory.mutex(self._segment, lock).take(0):
            return None
        self._owners[lock] = rank + 1
        turn = self._turns[lock]
        self._turns[lock] = turn + 1
        return turn

    def give_lock(self, lock: int) -> None:
        """Give a lock back."""
        self._owners[lock] = 0
        self._memory.mutex(self._segment, lock).ring()

    def _ring(self, source: int, target: int) -> memoryview:
        return self._memory.channel(self._segment, source, target)


class _Waiting:
    """Says, in a ``with`` statement, what this rank waits for."""

    def __init__(self, task: Task, kind: int, count: int, text: str, which: int = 0):
        self._task, self._kind, self._which, self._count = task, kind, which, count
        self._text = text.encode()[:_TEXT]
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = perf_counter()
        task, me = self._task, self._task.rank.number
        _put(task._texts[me], self._text)
        task._waits[4 * me + 1] = self._which
        task._waits[4 * me + 2] = self._count
        task._waits[4 * me + 3] += 1
        task._waits[4 * me] = self._kind

    def __exit__(self, *_: object) -> None:
        task, me = self._task, self._task.rank.number
        task.waited += perf_counter() - self._began
        task._waits[4 * me] = NOTHING
        task._waits[4 * me + 3] += 1


class Lock:
    """A lock that ranks share.

    Ranks of several hosts share no memory.  What they see of rows under the lock is what they `read`, and what others
    shall see they `write`.  Between ranks of one host both do nothing.

    Attributes
    ----------
    turn : int
        How often it had been taken before this rank got it: the order in which ranks have had it.
    """

    def __init__(self, task: Task, number: int, mutex: Mutex | None):
        self._task, self._number, self._mutex = task, number, mutex
        self.turn = -1

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def acquire(self, timeout: float | None = None) -> bool:
        """Take the lock, without a ``with`` statement.

        Parameters
        ----------
        timeout : float, optional
            Maximal number of seconds to wait, for a lock of this rank's host; by default as long as it takes.

        Returns
        -------
        bool
            False if another rank held the lock until the time was over.

        Raises
        ------
        ValueError
            For a time limit where the lock is on another host.
        """
        if self._mutex is not None:
            turn = self._task._take(self._number, self._mutex, timeout)
        elif timeout is None:
            turn = self._task._ask(TAKE, self._number)
        else:
            raise ValueError(f"timeout: lock {self._number} is on another host, which knows no time limit")
        if turn is None:
            return False
        self.turn = turn
        return True

    def release(self) -> None:
        """Give the lock back."""
        if self._mutex is None:
            self._task._ask(GIVE, self._number)
        else:
            self._task._let_go(self._number, self._mutex)

    def read(self, *rows: Any) -> None:
        """Have rows be here as they are on the lock's host; within the ``with`` statement.

        Parameters
        ----------
        *rows : LocalRows
            All rows of an array, or a run of them, ``rows[start:stop]``.  They are always used under the same lock.

        Raises
        ------
        ValueError
            If rows do not lie one after the other, or are those of a file.
        """
        self._move(READ, rows)

    def write(self, *rows: Any) -> None:
        """Have rows be on the lock's host as they are here; as `read`."""
        self._move(WRITE, rows)

    def _move(self, what: int, rows: Sequence[Any]) -> None:
        spans = [each.span for each in rows]
        if self._mutex is None:
            self._task._ask(what, self._number, spans)
