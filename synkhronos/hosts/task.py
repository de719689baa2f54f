"""Tasks on several hosts: messages between ranks, and locks with the rows that are used under them.

A message of a rank to a rank of another host travels as PART; its receipt is another PART.  STOP is a rank's request
that all ranks stop.

A lock, and the only valid copy of the rows that are used under it, is on one host.  A rank of another host has a copy
in its own host's memory while it holds the lock: it reads rows after it has acquired the lock, and writes them back
before it releases it.  Agents carry requests and bytes, and compute nothing::

    rank          its agent                       agent of the lock's host
    acquire       ASK(ACQUIRE)               ->      queues; acquires the lock for the rank
                                          <-      ANSWER: how often it had been acquired
    read          ASK(READ, rows)         ->
                  into memory             <-      CONTENT, chunk by chunk, from memory; ANSWER
    write         CONTENT, chunk by chunk ->      into memory
                  ASK(WRITE)              ->
                                          <-      ANSWER: all bytes have arrived
    release       ASK(RELEASE)               ->      releases it

Bytes travel from memory to memory; the message before them names their place.

Invariant: messages of a host are processed in order.  None is processed before the bytes announced ahead of it have
arrived, or before this host has received the command to which it belongs.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from synkhronos.hosts.mail import ANSWER, ASK, CHUNK_NBYTES, CONTENT, MAX_PENDING, PART, STOP, Mail
from synkhronos.hosts.names import find_host
from synkhronos.ranks.control import FOR_TASK, Control
from synkhronos.ranks.segments import Segment
from synkhronos.ranks.task import ACQUIRE, READ, RELEASE, WRITE, Span
from synkhronos.ranks.task_memory import WORD, TaskMemory, read_prefixed, read_ring, write_ring


class TaskAgent:
    """An agent's part in tasks, for ranks of its host and for ranks that use its host's locks.

    Parameters
    ----------
    mail : Mail
    control : Control
    ranks : sequence of range
        Ranks of each host.
    segments : dict of int to Segment
        Shared memory of this host, by key.

    Attributes
    ----------
    handlers : dict of int to callable
        Handler of each kind of message.
    """

    def __init__(self, mail: Mail, control: Control, ranks: Sequence[range], segments: dict[int, Segment]):
        self._mail, self._control, self._ranks, self._segments = mail, control, ranks, segments
        self._number = 0
        self._bridge: Bridge | None = None
        #: Hosts and ranks that wait for each lock, in order.
        self._queues: dict[int, deque[tuple[int, int]]] = {}
        #: Transfers in progress; each step of a generator sends a chunk.
        self._transfers: deque[Iterator[None]] = deque()
        #: Actions by host, in order: the request of the bytes to wait for, the command, the action.
        self._actions: list[deque[tuple[Any, int, Callable[[Bridge], object]]]] = [deque() for _ in range(mail.size)]
        self.handlers: dict[int, Callable[..., None]] = {
            PART: self._on_part, STOP: self._on_stop,
            ASK: self._on_ask, ANSWER: self._on_answer, CONTENT: self._on_content,
        }  # fmt: skip

    def begin(self, number: int, task: TaskMemory | None) -> None:
        """Start a command, which may be a task, and drop the remains of the previous one."""
        self._number, self._bridge = number, None
        self._queues.clear()
        self._transfers.clear()
        if task is not None and task.key in self._segments:  # its memory may not have been mapped
            segment = self._segments[task.key]
            if self._mail.me > 0:  # on the first host the master prepares it
                task.initialise_locks(segment)
            self._bridge = Bridge(task, segment, self._control.local_ranks)

    @property
    def has_waiting_ranks(self) -> bool:
        """Whether a rank of another host waits for a lock of this one, or a transfer is in progress."""
        return any(self._queues.values()) or bool(self._transfers) or any(self._actions)

    def progress(self) -> bool:
        """Process requests and transfers without waiting; return True if anything was done."""
        news = False
        for coming in self._actions:
            while coming and coming[0][1] <= self._number and (coming[0][0] is None or coming[0][0].Test()):
                _, number, act = coming.popleft()
                if number == self._number and self._bridge is not None:  # else its command has failed
                    act(self._bridge)
                news = True
        if self._bridge is not None:
            news |= self._forward(self._bridge)
            for request in self._bridge.poll_requests():
                self._request(self._bridge, *request)
                news = True
            for lock, line in self._queues.items():
                news |= bool(line) and self._grant(self._bridge, lock, line)
        while self._transfers and not self._mail.has_pending(MAX_PENDING):
            one = self._transfers.popleft()
            if next(one, self) is not self:
                self._transfers.append(one)  # one chunk of each in turn
            news = True
        return news

    def _schedule(self, source: int, number: int, act: Callable[[Bridge], object], content: Any = None) -> None:
        """Schedule an action to run after the earlier ones of the same host, and after its bytes have arrived."""
        self._actions[source].append((content, number, act))

    def _wake(self, rank: int) -> None:
        self._control.fence()
        self._control.ring(rank, FOR_TASK)

    # -- messages between ranks ----------------------------------------------------------------------------------

    def _forward(self, bridge: Bridge) -> bool:
        """Forward the messages, receipts and stop requests of this host's ranks."""
        news = False
        for source, target, turn, content in bridge.poll_channels():
            to = target if content is not None else source
            self._mail.send(find_host(self._ranks, to), PART, self._number, source, target, turn, content)
            news = True
        if bridge.take_stop_request():
            self._mail.send_all(self._mail.others, STOP, self._number)
        return news

    def _on_part(self, source: int, number: int, *part: Any) -> None:
        self._schedule(source, number, lambda bridge: self._wake(bridge.update_channel(*part)))

    def _on_stop(self, source: int, number: int) -> None:
        self._schedule(source, number, Bridge.stop)

    # -- ranks of this host that use locks of another -------------------------------------------------

    def _request(self, bridge: Bridge, rank: int, what: int, lock: int, spans: Sequence[Span]) -> None:
        home, number = find_host(self._ranks, bridge.find_home(lock)), self._number
        if what == WRITE:
            self._transfers.append(self._send(home, spans, ASK, number, rank, what, lock, ()))
            return
        self._mail.send(home, ASK, number, rank, what, lock, spans)
        if what == RELEASE:
            self._answer(bridge, rank, 0)

    def _on_answer(self, source: int, number: int, rank: int, value: int) -> None:
        self._schedule(source, number, lambda bridge: self._answer(bridge, rank, value))

    def _answer(self, bridge: Bridge, rank: int, value: int) -> None:
        """Deliver the lock's host's answer to a rank."""
        bridge.answer(rank, value)
        self._wake(rank)

    # -- locks of this host ------------------------------------------------------------------------------

    def _on_ask(self, source: int, number: int, rank: int, what: int, lock: int, spans: Sequence[Span]) -> None:
        self._schedule(source, number, lambda bridge: self._process(bridge, source, rank, what, lock, spans))

    def _process(self, bridge: Bridge, source: int, rank: int, what: int, lock: int, spans: Sequence[Span]) -> None:
        """Process the request of a rank of another host."""
        number = self._number
        if what == ACQUIRE:
            self._queues.setdefault(lock, deque()).append((source, rank))
            bridge.set_wanted(lock, True)
        elif what == READ:
            self._transfers.append(self._send(source, spans, ANSWER, number, rank, 0))
        elif what == WRITE:  # the bytes announced before it have arrived
            self._mail.send(source, ANSWER, number, rank, 0)
        else:
            bridge.release(lock)

    def _grant(self, bridge: Bridge, lock: int, line: deque[tuple[int, int]]) -> bool:
        """Grant a lock to the first rank in line if it is free."""
        source, rank = line[0]
        turn = bridge.try_acquire(lock, rank)
        if turn is None:
            return False
        line.popleft()
        bridge.set_wanted(lock, bool(line))
        self._mail.send(source, ANSWER, self._number, rank, turn)
        return True

    # -- transfers -------------------------------------------------------------------------------------------------

    def _send(self, to: int, spans: Sequence[Span], *message: Any) -> Iterator[None]:
        """Send rows to another host, a chunk at each step, and then a message."""
        for key, start, nbytes in spans:
            memory = memoryview(self._segments[key].buffer)
            for at in range(start, start + nbytes, CHUNK_NBYTES):
                part = memory[at : min(at + CHUNK_NBYTES, start + nbytes)]
                self._mail.send(to, CONTENT, self._number, key, at, len(part))
                self._mail.send_bytes(to, part)
                if self._mail.me == 0:
                    self._control.words[Control.SENT] += len(part)
                yield
        self._mail.send(to, *message)

    def _on_content(self, source: int, number: int, key: int, at: int, nbytes: int) -> None:
        """Receive a chunk of rows into their place in memory."""
        buffer: Any = bytearray(nbytes)
        if number == self._number and key in self._segments:  # else the command has failed
            buffer = memoryview(self._segments[key].buffer)[at : at + nbytes]
        self._schedule(source, number, lambda bridge: None, self._mail.receive_bytes(source, buffer))


class Bridge:
    """The agent's access to a task's memory on its host: channels to ranks of other hosts, and the host's locks.

    The words and channels in the segment are written by the ranks of this host.  For messages of other hosts' ranks to
    them, the agent writes.

    Parameters
    ----------
    memory : TaskMemory
    segment : Segment
    here : range
        Ranks of this host.
    """

    def __init__(self, memory: TaskMemory, segment: Segment, here: range):
        self._memory, self._segment, self._here = memory, segment, here
        n = memory.size
        self._stop, _, self._owners, self._turns, self._wanted, *channels = memory.view_words(segment)
        self._sent, self._received = (np.frombuffer(words, np.uint64).reshape(n, n) for words in channels)
        self._n_requests = [0] * len(here)
        there = [r for r in range(n) if r not in here]
        # Counters, their sources and targets, and their values at the last poll: of the channels out of this host, and
        # of those into it.
        self._polled = [
            (self._sent, list(here), there, np.zeros((len(here), len(there)), np.uint64)),
            (self._received, there, list(here), np.zeros((len(there), len(here)), np.uint64)),
        ]
        self._has_sent_stop = False

    def poll_channels(self) -> Iterator[tuple[int, int, int, bytearray | None]]:
        """Yield the progress of each channel to or from another host since the last call.

        Yields
        ------
        source, target : int
            Ranks of the channel.
        count : int
            Number of bytes sent or received through the channel so far.
        content : bytearray or None
            Bytes sent since the last call; None for bytes that a rank of this host has received.
        """
        for words, sources, targets, last in self._polled:
            now = words[np.ix_(sources, targets)]
            for i, j in np.argwhere(last < now):
                source, target, begin, end = sources[i], targets[j], int(last[i, j]), int(now[i, j])
                content = bytearray(end - begin) if words is self._sent else None
                if content is not None:
                    read_ring(self._ring(source, target), begin, memoryview(content))
                yield source, target, end, content
            last[:] = now

    def update_channel(self, source: int, target: int, count: int, content: bytearray | None) -> int:
        """Apply progress that `poll_channels` of another host yielded; return the rank that may wait for it."""
        if content is None:
            self._received[source, target] = count
            return source
        write_ring(self._ring(source, target), count - len(content), content)
        self._sent[source, target] = count
        return target

    def take_stop_request(self) -> bool:
        """Return True once after a rank of this host has asked all ranks to stop."""
        if self._stop[0] and not self._has_sent_stop:
            self._has_sent_stop = True
            return True
        return False

    def stop(self) -> None:
        """Pass on a stop request of another host to the ranks of this host."""
        self._stop[0], self._has_sent_stop = 1, True

    # -- locks -----------------------------------------------------------------------------------------------

    def poll_requests(self) -> Iterator[tuple[int, int, int, Sequence[Span]]]:
        """Yield new requests of this host's ranks about locks of other hosts: rank, request, lock and spans of rows."""
        for i, rank in enumerate(self._here):
            if self._sent[rank, rank] > self._n_requests[i]:
                request = read_prefixed(self._ring(rank, rank))
                self._n_requests[i] += 1
                yield rank, *pickle.loads(request)

    def answer(self, rank: int, value: int) -> None:
        """Write the answer to a request of a rank of this host."""
        self._ring(rank, rank)[:WORD] = value.to_bytes(WORD, "little")
        self._received[rank, rank] += 1

    def find_home(self, lock: int) -> int:
        """Return a rank on the host of a lock."""
        return self._memory.find_home(lock)

    def set_wanted(self, lock: int, is_wanted: bool) -> None:
        """Publish whether a rank of another host waits for a lock of this host."""
        self._wanted[lock] = is_wanted

    def try_acquire(self, lock: int, rank: int) -> int | None:
        """Acquire a lock of this host for a rank of another host; return its turn, or None if it is not free."""
        if self._owners[lock] != self._memory.agent_owner and not self._memory.get_semaphore(
            self._segment, lock
        ).acquire(0):
            return None
        self._owners[lock] = rank + 1
        turn = self._turns[lock]
        self._turns[lock] = turn + 1
        return turn

    def release(self, lock: int) -> None:
        """Release a lock of this host that a rank of another host held."""
        self._owners[lock] = 0
        self._memory.get_semaphore(self._segment, lock).release()

    def _ring(self, source: int, target: int) -> memoryview:
        return self._memory.view_channel(self._segment, source, target)
