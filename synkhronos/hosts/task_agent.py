"""Tasks on several hosts: messages between ranks, and locks with the rows that are used under them.

CHANNEL_UPDATE carries the bytes that a rank has sent to a rank of another host, or the number of bytes that the other
rank has received.  STOP is a rank's request that all ranks stop.

A lock, and the only valid copy of the rows that are used under it, is on one host.  A rank of another host reads the
rows after it has acquired the lock, and writes them back before it releases it.  Agents carry requests and bytes, and
compute nothing::

    rank          its agent                              agent of the lock's host
    acquire       LOCK_REQUEST(ACQUIRE)           ->     queues; acquires the lock for the rank
                                                  <-     LOCK_REPLY: how often it had been acquired
    read          LOCK_REQUEST(READ, rows)        ->
                  into memory                     <-     LOCK_ROWS, chunk by chunk, from memory; LOCK_REPLY
    write         LOCK_ROWS, chunk by chunk       ->     into memory
                  LOCK_REQUEST(WRITE)             ->
                                                  <-     LOCK_REPLY: all bytes have arrived
    release       LOCK_REQUEST(RELEASE)           ->     releases it

Rows travel from memory to memory; the message before them names their offset.

Invariant: messages of a host are processed in order.  None is processed before the bytes announced ahead of it have
arrived, or before this host has received the command to which it belongs.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from synkhronos.hosts.mail import (
    CHANNEL_UPDATE,
    CHUNK_NBYTES,
    LOCK_REPLY,
    LOCK_REQUEST,
    LOCK_ROWS,
    MAX_PENDING,
    STOP,
    Mail,
)
from synkhronos.hosts.names import find_host
from synkhronos.ranks.control import AWAITS_PEER, Control
from synkhronos.ranks.rank_task import ACQUIRE, READ, RELEASE, WRITE, Span
from synkhronos.ranks.segments import Segment
from synkhronos.ranks.task_memory import WORD_NBYTES, TaskMemory, read_prefixed, read_ring, write_ring


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
        self._command = 0
        self._bridge: Bridge | None = None
        #: Hosts and ranks that wait for each lock, in order.
        self._queues: dict[int, deque[tuple[int, int]]] = {}
        #: Transfers in progress; each step of a generator sends a chunk.
        self._transfers: deque[Iterator[None]] = deque()
        #: Actions by host, in order: the request of the bytes to wait for, the command, the action.
        self._actions: list[deque[tuple[Any, int, Callable[[Bridge], object]]]] = [deque() for _ in range(mail.size)]
        self.handlers: dict[int, Callable[..., None]] = {
            CHANNEL_UPDATE: self._on_channel_update, STOP: self._on_stop,
            LOCK_REQUEST: self._on_lock_request, LOCK_REPLY: self._on_lock_reply, LOCK_ROWS: self._on_lock_rows,
        }  # fmt: skip

    def start_command(self, command: int, task: TaskMemory | None) -> None:
        """Start a command, which may be a task, and drop the remains of the previous one."""
        self._command, self._bridge = command, None
        self._queues.clear()
        self._transfers.clear()
        if task is not None and task.key in self._segments:  # its memory may not have been mapped
            segment = self._segments[task.key]
            if self._mail.host > 0:  # on the first host the master prepares it
                task.initialise_locks(segment)
            self._bridge = Bridge(task, segment, self._control.local_ranks)

    @property
    def has_waiting_ranks(self) -> bool:
        """Whether a rank of another host waits for a lock of this one, or a transfer is in progress."""
        return any(self._queues.values()) or bool(self._transfers) or any(self._actions)

    def progress(self) -> bool:
        """Process requests and transfers without waiting; return True if anything was done."""
        has_events = False
        for actions in self._actions:
            while actions and actions[0][1] <= self._command and (actions[0][0] is None or actions[0][0].Test()):
                _, command, action = actions.popleft()
                if command == self._command and self._bridge is not None:  # else its command has failed
                    action(self._bridge)
                has_events = True
        if self._bridge is not None:
            has_events |= self._forward_messages(self._bridge)
            for request in self._bridge.poll_requests():
                self._forward_request(self._bridge, *request)
                has_events = True
            for lock, queue in self._queues.items():
                has_events |= bool(queue) and self._grant(self._bridge, lock, queue)
        while self._transfers and not self._mail.has_pending(MAX_PENDING):
            transfer = self._transfers.popleft()
            if next(transfer, self) is not self:
                self._transfers.append(transfer)  # one chunk of each in turn
            has_events = True
        return has_events

    def _schedule(self, source: int, command: int, action: Callable[[Bridge], object], content: Any = None) -> None:
        """Schedule an action to run after the earlier ones of the same host, and after its bytes have arrived."""
        self._actions[source].append((content, command, action))

    def _wake(self, rank: int) -> None:
        self._control.fence()
        self._control.wake(rank, AWAITS_PEER)

    # -- messages between ranks ----------------------------------------------------------------------------------

    def _forward_messages(self, bridge: Bridge) -> bool:
        """Forward the messages, receipts and stop requests of this host's ranks."""
        has_events = False
        for source, target, count, content in bridge.poll_channels():
            peer = target if content is not None else source
            self._mail.send(find_host(self._ranks, peer), CHANNEL_UPDATE, self._command, source, target, count, content)
            has_events = True
        if bridge.take_stop_request():
            self._mail.send_all(self._mail.other_hosts, STOP, self._command)
        return has_events

    def _on_channel_update(self, source: int, command: int, *update: Any) -> None:
        self._schedule(source, command, lambda bridge: self._wake(bridge.update_channel(*update)))

    def _on_stop(self, source: int, command: int) -> None:
        self._schedule(source, command, Bridge.stop)

    # -- ranks of this host that use locks of another -------------------------------------------------

    def _forward_request(self, bridge: Bridge, rank: int, operation: int, lock: int, spans: Sequence[Span]) -> None:
        home, command = find_host(self._ranks, bridge.get_home_rank(lock)), self._command
        if operation == WRITE:
            self._transfers.append(self._send_rows(home, spans, LOCK_REQUEST, command, rank, operation, lock, ()))
            return
        self._mail.send(home, LOCK_REQUEST, command, rank, operation, lock, spans)
        if operation == RELEASE:
            self._deliver_reply(bridge, rank, 0)

    def _on_lock_reply(self, source: int, command: int, rank: int, value: int) -> None:
        self._schedule(source, command, lambda bridge: self._deliver_reply(bridge, rank, value))

    def _deliver_reply(self, bridge: Bridge, rank: int, value: int) -> None:
        """Deliver the lock's host's answer to a rank."""
        bridge.reply(rank, value)
        self._wake(rank)

    # -- locks of this host ------------------------------------------------------------------------------

    def _on_lock_request(
        self, source: int, command: int, rank: int, operation: int, lock: int, spans: Sequence[Span]
    ) -> None:
        self._schedule(
            source, command, lambda bridge: self._process_request(bridge, source, rank, operation, lock, spans)
        )

    def _process_request(
        self, bridge: Bridge, source: int, rank: int, operation: int, lock: int, spans: Sequence[Span]
    ) -> None:
        """Process the request of a rank of another host."""
        command = self._command
        if operation == ACQUIRE:
            self._queues.setdefault(lock, deque()).append((source, rank))
            bridge.set_wanted(lock, True)
        elif operation == READ:
            self._transfers.append(self._send_rows(source, spans, LOCK_REPLY, command, rank, 0))
        elif operation == WRITE:  # the bytes announced before it have arrived
            self._mail.send(source, LOCK_REPLY, command, rank, 0)
        else:
            bridge.release(lock)

    def _grant(self, bridge: Bridge, lock: int, queue: deque[tuple[int, int]]) -> bool:
        """Grant a lock to the first rank in line if it is free."""
        source, rank = queue[0]
        turn = bridge.try_acquire(lock, rank)
        if turn is None:
            return False
        queue.popleft()
        bridge.set_wanted(lock, bool(queue))
        self._mail.send(source, LOCK_REPLY, self._command, rank, turn)
        return True

    # -- transfers -------------------------------------------------------------------------------------------------

    def _send_rows(self, host: int, spans: Sequence[Span], *message: Any) -> Iterator[None]:
        """Send rows to another host, a chunk at each step, and then a message."""
        for key, start, nbytes in spans:
            memory = memoryview(self._segments[key].buffer)
            for offset in range(start, start + nbytes, CHUNK_NBYTES):
                chunk = memory[offset : min(offset + CHUNK_NBYTES, start + nbytes)]
                self._mail.send(host, LOCK_ROWS, self._command, key, offset, len(chunk))
                self._mail.send_bytes(host, chunk)
                if self._mail.host == 0:
                    self._control.words[Control.BYTES_SENT] += len(chunk)
                yield
        self._mail.send(host, *message)

    def _on_lock_rows(self, source: int, command: int, key: int, offset: int, nbytes: int) -> None:
        """Receive a chunk of rows into their place in memory."""
        buffer: Any = bytearray(nbytes)
        if command == self._command and key in self._segments:  # else the command has failed
            buffer = memoryview(self._segments[key].buffer)[offset : offset + nbytes]
        self._schedule(source, command, lambda bridge: None, self._mail.receive_bytes(source, buffer))


class Bridge:
    """The agent's access to a task's memory on its host: channels to ranks of other hosts, and the host's locks.

    The ranks of this host write their words and channels in the segment.  The agent writes those of ranks of other
    hosts.

    Parameters
    ----------
    memory : TaskMemory
    segment : Segment
    local_ranks : range
        Ranks of this host.
    """

    def __init__(self, memory: TaskMemory, segment: Segment, local_ranks: range):
        self._memory, self._segment, self._local_ranks = memory, segment, local_ranks
        n = memory.size
        self._stop, _, self._owners, self._turns, self._wanted, *channels = memory.view_words(segment)
        self._sent, self._received = (np.frombuffer(words, np.uint64).reshape(n, n) for words in channels)
        self._n_requests = [0] * len(local_ranks)
        remote_ranks = [r for r in range(n) if r not in local_ranks]
        # Counters, sources, targets and the counts of the last poll: of channels from this host, of channels to it.
        self._polled_channels = [
            (self._sent, list(local_ranks), remote_ranks, np.zeros((len(local_ranks), len(remote_ranks)), np.uint64)),
            (
                self._received,
                remote_ranks,
                list(local_ranks),
                np.zeros((len(remote_ranks), len(local_ranks)), np.uint64),
            ),
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
        for words, sources, targets, last_counts in self._polled_channels:
            counts = words[np.ix_(sources, targets)]
            for i, j in np.argwhere(last_counts < counts):
                source, target, start, stop = sources[i], targets[j], int(last_counts[i, j]), int(counts[i, j])
                content = bytearray(stop - start) if words is self._sent else None
                if content is not None:
                    read_ring(self._view_ring(source, target), start, memoryview(content))
                yield source, target, stop, content
            last_counts[:] = counts

    def update_channel(self, source: int, target: int, count: int, content: bytearray | None) -> int:
        """Apply progress that `poll_channels` of another host yielded; return the rank that may wait for it."""
        if content is None:
            self._received[source, target] = count
            return source
        write_ring(self._view_ring(source, target), count - len(content), content)
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
        for i, rank in enumerate(self._local_ranks):
            if self._sent[rank, rank] > self._n_requests[i]:
                request = read_prefixed(self._view_ring(rank, rank))
                self._n_requests[i] += 1
                yield rank, *pickle.loads(request)

    def reply(self, rank: int, value: int) -> None:
        """Write the answer to a request of a rank of this host."""
        self._view_ring(rank, rank)[:WORD_NBYTES] = value.to_bytes(WORD_NBYTES, "little")
        self._received[rank, rank] += 1

    def get_home_rank(self, lock: int) -> int:
        """Return a rank on the host of a lock."""
        return self._memory.get_home_rank(lock)

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

    def _view_ring(self, source: int, target: int) -> memoryview:
        return self._memory.view_channel(self._segment, source, target)
