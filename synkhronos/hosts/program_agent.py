"""Programs on several hosts: messages between ranks, and locks with the rows that they guard.

CHANNEL_UPDATE carries the bytes that a rank has sent to a rank of another host, or the number of bytes that the other
rank has received.

A lock belongs to one host, which has the only valid copy of the rows that the lock guards.  A rank of another host
pulls the rows after it has acquired the lock, and pushes them before it releases the lock.  Agents transfer
requests and bytes, and do not compute::

    rank          its agent                              agent of the lock's host
    acquire       LOCK_REQUEST(ACQUIRE)           ->     queues; acquires the lock for the rank
                                                  <-     LOCK_REPLY: number of earlier acquisitions
    pull          LOCK_REQUEST(PULL, rows)        ->
                  into memory                     <-     LOCK_BYTES, chunk by chunk, from memory; LOCK_REPLY
    push          LOCK_BYTES, chunk by chunk       ->     into memory
                  LOCK_REQUEST(PUSH)             ->
                                                  <-     LOCK_REPLY: all bytes have arrived
    release       LOCK_REQUEST(RELEASE)           ->     releases it

Rows are sent from memory to memory, after a message with their offset.

Invariant: messages of a host are processed in order.  Before a message is processed, the bytes that were announced
earlier have arrived, and this host has received the command to which the message belongs.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from synkhronos.hosts.host_list import find_host
from synkhronos.hosts.messenger import CHUNK_NBYTES, MAX_UNSENT_MESSAGES, MessageType, Messenger
from synkhronos.ranks.control_memory import AWAITS_PEER, ControlMemory
from synkhronos.ranks.program_memory import WORD_NBYTES, ProgramMemoryLayout, read_ring, read_with_length, write_ring
from synkhronos.ranks.program_peers import ByteRange, LockOperation
from synkhronos.ranks.segments import Segment


class _ScheduledAction(NamedTuple):
    """A call that waits for its command to start, and for bytes from another host."""

    command_number: int
    #: MPI request of these bytes; None if there are none.
    receive_request: Any
    #: Function that is called with the command's `ProgramBridge`, the number of the other host, and ``arguments``.
    function: Callable[..., object]
    arguments: tuple[Any, ...]

    def has_received_bytes(self) -> bool:
        """Whether the bytes have arrived."""
        return self.receive_request is None or bool(self.receive_request.Test())


class ProgramAgent:
    """The part of an agent that serves programs: ranks of its host, and ranks of other hosts that use its host's locks.

    ``handlers`` has the functions that process messages, by their types.
    """

    def __init__(
        self,
        messenger: Messenger,
        control: ControlMemory,
        ranks_by_host: Sequence[range],
        segments: dict[int, Segment],
    ):
        self._messenger, self._control = messenger, control
        self._ranks_by_host, self._segments = ranks_by_host, segments
        self._command_number = 0
        self._bridge: ProgramBridge | None = None
        #: Hosts and ranks that wait for each lock, in order.
        self._queues: dict[int, deque[tuple[int, int]]] = {}
        #: Transfers in progress: generators that send a chunk at each step.
        self._transfers: deque[Iterator[None]] = deque()
        #: Scheduled actions by host, in order.
        self._actions: list[deque[_ScheduledAction]] = [deque() for _ in range(messenger.n_hosts)]
        self.handlers: dict[int, Callable[..., None]] = {
            MessageType.CHANNEL_UPDATE: partial(self._schedule, self._update_channel),
            MessageType.LOCK_REQUEST: partial(self._schedule, self._process_request),
            MessageType.LOCK_REPLY: partial(self._schedule, self._deliver_reply),
            MessageType.LOCK_BYTES: self._on_lock_bytes,
        }

    def start_command(self, command_number: int, program_layout: ProgramMemoryLayout | None) -> None:
        """Start serving a command, which may run a program, and discard the state of the previous one."""
        self._command_number, self._bridge = command_number, None
        self._queues.clear()
        self._transfers.clear()
        # A segment is missing if its memory could not be mapped.
        if program_layout is not None and program_layout.segment_key in self._segments:
            segment = self._segments[program_layout.segment_key]
            if self._messenger.host > 0:  # on the first host the master initializes them
                program_layout.initialize_locks(segment)
            self._bridge = ProgramBridge(program_layout, segment, self._control.local_ranks)

    @property
    def has_unfinished_work(self) -> bool:
        """Whether a rank of another host waits for a lock of this one, or a transfer is in progress."""
        return any(self._queues.values()) or bool(self._transfers) or any(self._actions)

    def advance(self) -> bool:
        """Process requests and transfers without blocking.  Return True if at least one was processed."""
        has_events = False
        for source, actions in enumerate(self._actions):
            while actions and actions[0].command_number <= self._command_number and actions[0].has_received_bytes():
                action = actions.popleft()
                if action.command_number == self._command_number and self._bridge is not None:  # else it has failed
                    action.function(self._bridge, source, *action.arguments)
                has_events = True
        if self._bridge is not None:
            has_events |= self._forward_messages(self._bridge)
            for request in self._bridge.poll_requests():
                self._forward_request(self._bridge, *request)
                has_events = True
            for lock, queue in self._queues.items():
                has_events |= bool(queue) and self._grant(self._bridge, lock, queue)
        while self._transfers and self._messenger.complete_sends() <= MAX_UNSENT_MESSAGES:
            transfer = self._transfers.popleft()
            if not next(transfer, True):
                self._transfers.append(transfer)  # the transfers send a chunk each in turn
            has_events = True
        return has_events

    def _schedule(self, function: Callable[..., object], source: int, command_number: int, *arguments: Any) -> None:
        """Schedule the call of a function after the earlier actions of a host."""
        self._actions[source].append(_ScheduledAction(command_number, None, function, arguments))

    def _wake(self, rank: int) -> None:
        self._control.fence()
        self._control.wake(rank, AWAITS_PEER)

    # -- messages between ranks ----------------------------------------------------------------------------------

    def _forward_messages(self, bridge: ProgramBridge) -> bool:
        """Forward the messages and receipts of this host's ranks."""
        has_events = False
        for source, target, count, content in bridge.poll_channels():
            peer = target if content is not None else source
            self._messenger.send(
                find_host(self._ranks_by_host, peer),
                MessageType.CHANNEL_UPDATE,
                self._command_number,
                source,
                target,
                count,
                content,
            )
            has_events = True
        return has_events

    def _update_channel(self, bridge: ProgramBridge, source: int, *update: Any) -> None:
        self._wake(bridge.update_channel(*update))

    # -- ranks of this host that use locks of another -------------------------------------------------

    def _forward_request(
        self, bridge: ProgramBridge, rank: int, operation: int, lock: int, ranges: Sequence[ByteRange]
    ) -> None:
        """Send a request of this host's rank to the lock's host, preceded by the rows that it writes back."""
        lock_host = find_host(self._ranks_by_host, bridge.layout.find_rank_on_lock_host(lock))
        command_number = self._command_number
        if operation == LockOperation.PUSH:
            self._transfers.append(
                self._send_bytes(lock_host, ranges, MessageType.LOCK_REQUEST, command_number, rank, operation, lock, ())
            )
            return
        self._messenger.send(lock_host, MessageType.LOCK_REQUEST, command_number, rank, operation, lock, ranges)
        if operation == LockOperation.RELEASE:
            self._deliver_reply(bridge, lock_host, rank, 0)

    def _deliver_reply(self, bridge: ProgramBridge, source: int, rank: int, answer: int) -> None:
        """Pass the answer of a lock's host to the rank that waits for it."""
        bridge.write_reply(rank, answer)
        self._wake(rank)

    # -- locks of this host ------------------------------------------------------------------------------

    def _process_request(
        self, bridge: ProgramBridge, source: int, rank: int, operation: int, lock: int, ranges: Sequence[ByteRange]
    ) -> None:
        """Process a request of a rank of another host for a lock of this host."""
        command_number = self._command_number
        if operation == LockOperation.ACQUIRE:
            self._queues.setdefault(lock, deque()).append((source, rank))
            bridge.set_agent_waiting(lock, True)
        elif operation == LockOperation.PULL:
            self._transfers.append(self._send_bytes(source, ranges, MessageType.LOCK_REPLY, command_number, rank, 0))
        elif operation == LockOperation.PUSH:  # the bytes announced before it have arrived
            self._messenger.send(source, MessageType.LOCK_REPLY, command_number, rank, 0)
        else:
            bridge.release(lock)

    def _grant(self, bridge: ProgramBridge, lock: int, queue: deque[tuple[int, int]]) -> bool:
        """Acquire a lock for the first rank in its queue if the lock is free.  Return True if it was."""
        source, rank = queue[0]
        n_earlier_acquisitions = bridge.try_acquire(lock, rank)
        if n_earlier_acquisitions is None:
            return False
        queue.popleft()
        bridge.set_agent_waiting(lock, bool(queue))
        self._messenger.send(source, MessageType.LOCK_REPLY, self._command_number, rank, n_earlier_acquisitions)
        return True

    # -- transfers -------------------------------------------------------------------------------------------------

    def _send_bytes(self, host: int, ranges: Sequence[ByteRange], *message: Any) -> Iterator[None]:
        """Send rows to another host, a chunk at each step of the generator, and then a message."""
        for key, start, nbytes in ranges:
            memory = memoryview(self._segments[key].buffer)
            for offset in range(start, start + nbytes, CHUNK_NBYTES):
                chunk = memory[offset : min(offset + CHUNK_NBYTES, start + nbytes)]
                self._messenger.send(host, MessageType.LOCK_BYTES, self._command_number, key, offset, len(chunk))
                self._messenger.send_bytes(host, chunk)
                if self._messenger.host == 0:
                    self._control.words[ControlMemory.BYTES_SENT] += len(chunk)
                yield
        self._messenger.send(host, *message)

    def _on_lock_bytes(self, source: int, command_number: int, key: int, offset: int, nbytes: int) -> None:
        """Receive a chunk of rows at its offset in memory."""
        buffer: Any = bytearray(nbytes)
        if command_number == self._command_number and key in self._segments:  # else the command has failed
            buffer = memoryview(self._segments[key].buffer)[offset : offset + nbytes]
        request = self._messenger.receive_bytes(source, buffer)
        self._actions[source].append(_ScheduledAction(command_number, request, lambda bridge, source: None, ()))


class ProgramBridge:
    """An agent's access to a program's memory: channels from and to ranks of other hosts, and its host's locks.

    The ranks of the host write their own words and channels in the memory; the agent writes the words and
    channels of ranks of other hosts.
    """

    def __init__(self, layout: ProgramMemoryLayout, segment: Segment, local_ranks: range):
        self.layout, self._segment, self._local_ranks = layout, segment, local_ranks
        n = layout.n_ranks
        self._words = words = layout.view_words(segment)
        self._sent, self._received = (
            np.frombuffer(array, np.uint64).reshape(n, n) for array in (words.sent, words.received)
        )
        self._n_requests = [0] * len(local_ranks)
        remote_ranks = [r for r in range(n) if r not in local_ranks]
        # Counters, sources, targets and counts at the last poll: for channels from this host, and for channels to it.
        self._polled_channels = [
            (self._sent, list(local_ranks), remote_ranks, np.zeros((len(local_ranks), len(remote_ranks)), np.uint64)),
            (
                self._received,
                remote_ranks,
                list(local_ranks),
                np.zeros((len(remote_ranks), len(local_ranks)), np.uint64),
            ),
        ]

    def poll_channels(self) -> Iterator[tuple[int, int, int, bytearray | None]]:
        """Yield the progress since the last call of each channel between this host and others.

        An element has the channel's source and target, a count, and content.  If a rank of this host is the source, the
        count is the number of bytes sent so far, and the content has the bytes sent since the last call.  If a rank of
        this host is the target, the count is the number of bytes received so far, and the content is None.
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
        """Apply progress that `poll_channels` has yielded on another host.  Return the rank that may wait for it."""
        if content is None:
            self._received[source, target] = count
            return source
        write_ring(self._view_ring(source, target), count - len(content), content)
        self._sent[source, target] = count
        return target

    # -- locks -----------------------------------------------------------------------------------------------

    def poll_requests(self) -> Iterator[tuple[int, int, int, Sequence[ByteRange]]]:
        """Yield new requests of this host's ranks for locks of other hosts: rank, operation, lock, ranges of bytes."""
        for i, rank in enumerate(self._local_ranks):
            if self._sent[rank, rank] > self._n_requests[i]:
                request = read_with_length(self._view_ring(rank, rank))
                self._n_requests[i] += 1
                yield rank, *pickle.loads(request)

    def write_reply(self, rank: int, answer: int) -> None:
        """Write the answer to the request of a rank of this host."""
        self._view_ring(rank, rank)[:WORD_NBYTES] = answer.to_bytes(WORD_NBYTES, "little")
        self._received[rank, rank] += 1

    def set_agent_waiting(self, lock: int, is_waiting: bool) -> None:
        """Publish to this host's ranks whether a rank of another host waits for one of this host's locks."""
        self._words.agent_waits[lock] = is_waiting

    def try_acquire(self, lock: int, rank: int) -> int | None:
        """Acquire a lock of this host for a rank of another host.  Return the number of its earlier acquisitions.

        Return None if the lock is not free.
        """
        if self._words.owners[lock] != self.layout.agent_owner_number:
            if not self.layout.get_semaphore(self._segment, lock).acquire(0):
                return None
        self._words.owners[lock] = rank + 1
        n_earlier_acquisitions = self._words.acquisitions[lock]
        self._words.acquisitions[lock] = n_earlier_acquisitions + 1
        return n_earlier_acquisitions

    def release(self, lock: int) -> None:
        """Release a lock of this host that a rank of another host held."""
        self._words.owners[lock] = 0
        self.layout.get_semaphore(self._segment, lock).release()

    def _view_ring(self, source: int, target: int) -> memoryview:
        return self.layout.view_channel(self._segment, source, target)
