"""A rank's view of the other ranks.

Ranks synchronize at barriers, which have numbers: each rank counts the barriers of a command, and passes a barrier once
every counter has reached its number.  Small values are exchanged at a barrier through shared memory, which has one slot
per rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import pickle
import struct
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NoReturn, TypeVar

from synkhronos.containers import BoundedCache
from synkhronos.ranks.agreement import BARRIER_BITS, MAX_BARRIERS, read_last_common_barrier, record_last_common_barrier
from synkhronos.ranks.control_memory import AWAITS_BARRIER, POLL_SECONDS, SLOT_NBYTES, ControlMemory
from synkhronos.ranks.errors import Cancelled
from synkhronos.ranks.interrupts import defer_signals
from synkhronos.ranks.segments import SegmentTable
from synkhronos.ranks.thread_limit import ThreadLimit

T = TypeVar("T")
_log = logging.getLogger("synkhronos")

#: Maximal number of values whose pickles `Rank.all_gather_cached` caches.
_MAX_CACHED_PICKLES = 64
#: Header of a slot: number of bytes of the whole message, and number of the barrier for which it was written.
SLOT_HEADER = struct.Struct("=QQ")
#: Number of bytes of a digest, which `Rank.compare_digests` compares.
_DIGEST_NBYTES = 16
#: Maximal number of bytes that one `Rank.gather_bytes`, or one round of `Rank.all_gather_bytes`, transports.
MAX_SLOT_NBYTES = SLOT_NBYTES - SLOT_HEADER.size


class Registry:
    """One object for each class, created at its first use.

    Packages of higher layers store their state of a rank, or of a session, under classes of their own.  The state ends
    with the session.
    """

    def __init__(self) -> None:
        self._by_class: dict[type, Any] = {}

    def get_or_create(self, cls: type[T], factory: Callable[[], T] | None = None) -> T:
        """Return the object of a class; the first call creates it with ``factory``, or with the class itself."""
        instance: T | None = self._by_class.get(cls)
        if instance is None:
            instance = self._by_class[cls] = (factory or cls)()
        return instance

    def clear(self) -> None:
        """Remove all objects."""
        self._by_class.clear()


class PendingOperation:
    """An operation that a command starts and that may outlast it.

    Examples are a collective on GPUs for which no rank has waited, and outputs that have not been read yet.  Each rank
    has a list of them, `Rank.pending_operations`.  The methods of this class do nothing; a subclass overrides the ones
    that apply.
    """

    def finish(self) -> None:
        """Wait for completion.  Called in the master, while the workers still run, before an orderly end."""

    def cancel(self, command_number: int) -> None:
        """Cancel everything that a failed command has started, as it could wait for a peer forever."""

    def close(self) -> None:
        """Release everything that could wait for a peer: the ranks end, and memory is freed after this call."""

    def is_unfinished(self) -> bool:
        """Whether an operation in which the peers take part has not completed."""
        return False


class Rank:
    """A rank, as the commands that run in its process see it.

    ``check_peers`` raises, or ends this process, when a peer has died.  ``has_peer_died``, of the master's rank alone,
    returns True once a peer process has exited.

    Attributes
    ----------
    spans_hosts : bool
        Whether there are ranks on other hosts; their agents then decide failed commands.
    command_number : int
        Number of the command that this rank runs; it is unique in a session.
    objects : dict
        References to this rank's copies of replicated objects, by key; see `add_object`.
    registry : Registry
        State of packages of higher layers.
    finish_callbacks : list of callable
        Called at the end of the current command.
    device : Device or None
        Device whose arrays this rank computes with, set by the first command after `fork`; None before it.
    """

    def __init__(
        self,
        number: int,
        master_rank: int,
        control: ControlMemory,
        check_peers: Callable[[], None],
        thread_limit: ThreadLimit,
        has_peer_died: Callable[[], bool] = lambda: False,
    ):
        self.is_master = number == master_rank
        self.thread_limit = thread_limit
        self.segments = SegmentTable()
        self.objects: dict[Any, Any] = {}
        self.registry = Registry()
        self.device: Any = None
        self.command_number = 0
        self._barrier_number = 0
        self._pickles: BoundedCache[Any, tuple[bytes, bytes]] = BoundedCache(_MAX_CACHED_PICKLES)
        self._is_recording_enabled = True
        self.finish_callbacks: list[Callable[[], None]] = []
        self.pending_operations: list[PendingOperation] = []
        self.join_group(number, master_rank, control, check_peers, has_peer_died)

    def add_object(self, key: Hashable, value: object, is_weak: bool = False) -> None:
        """Add this rank's copy of a replicated object; ``is_weak`` if the user's references alone keep it alive."""
        self.objects[key] = weakref.ref(value) if is_weak else lambda: value

    def get_object(self, key: Hashable) -> Any:
        """Return this rank's copy of a replicated object: in the master, the object itself."""
        return self.objects[key]()

    def join_group(
        self,
        number: int,
        master_rank: int,
        control: ControlMemory,
        check_peers: Callable[[], None],
        has_peer_died: Callable[[], bool],
    ) -> None:
        """Use another group's counters, as after a replacement of the workers; segments and replicated objects stay."""
        self.number, self.master_rank, self.control = number, master_rank, control
        self.size, self.local_ranks = control.size, control.local_ranks
        self.spans_hosts = len(self.local_ranks) < self.size
        self.check_peers, self.has_peer_died = check_peers, has_peer_died
        #: The beginnings of all ranks' slots for even and for odd barriers: header and digest.
        self._digest_slots = [
            [control.get_slot(r, parity)[: SLOT_HEADER.size + _DIGEST_NBYTES] for r in range(self.size)]
            for parity in range(2)
        ]
        self.registry.clear()
        self._pickles.clear()

    def leave_group(self) -> None:
        """Leave the group, whose other ranks have exited.

        The command is marked as failed, which ends all waits of this process for them.
        """
        self.control.mark_all_done()
        self.spans_hosts = False  # the agents have exited
        self.fail_command()
        # They refer to the session: a cycle would delay the release of memory until the next collection.
        self.check_peers, self.has_peer_died = lambda: None, lambda: False

    def inherit_from(self, master: Rank) -> None:
        """Take over the segments and replicated objects of the master, which this process is a fork of.

        Other objects of the master are not copied.
        """
        self.segments = master.segments.copy()
        self.objects = {key: value for key, value in master.objects.items() if isinstance(value, weakref.ref)}

    def begin_command(self, command_number: int) -> None:
        """Start counting the barriers of a new command.

        If the last command failed, its pending operations are cancelled first.  This may wait until the other ranks,
        or their agents, have decided the last common barrier (see `agreement`).
        """
        self.cancel_failed_operations()
        self.command_number = command_number
        self._is_recording_enabled = True
        self._barrier_number = command_number << BARRIER_BITS

    def cancel_failed_operations(self) -> None:
        """Cancel the pending operations of the last command if it failed on some rank."""
        failed = self.control.words[ControlMemory.FAILED]
        if not 0 < self.command_number <= failed:
            return
        self._wait_until_decided(failed)  # it may be the next one, which is decided after this one
        if self.read_last_common_barrier(self.command_number) is None:
            return
        for operation in self.pending_operations:
            try:
                operation.cancel(self.command_number)
            except Exception as error:
                _log.warning("an operation of a failed command could not be cancelled: %s", error)

    @property
    def last_failed_command(self) -> int:
        """Number of the last command that has failed on some rank; 0 if none has."""
        return int(self.control.words[ControlMemory.FAILED])

    def is_last_failed_command(self, command_number: int) -> bool:
        """Whether a command is the last one that has failed on some rank; False once a later command fails."""
        return bool(self.control.words[ControlMemory.FAILED] == command_number)

    def record_applied(self) -> None:
        """Record that this rank has applied the command's effect, for the message of an error."""
        if self._is_recording_enabled:
            self.control.applied[self.number] = self.command_number

    @contextlib.contextmanager
    def suspend_recording(self) -> Iterator[None]:
        """Make `record_applied` do nothing within the ``with`` block."""
        self._is_recording_enabled = False
        try:
            yield
        finally:
            self._is_recording_enabled = True

    def finish_command(self) -> None:
        """Call and remove the functions in `finish_callbacks`.  Called at the end of every command, failed or not."""
        while self.finish_callbacks:
            self.finish_callbacks.pop()()

    def arrive(self) -> bool:
        """Arrive at the next barrier without waiting for the others; return whether they have all arrived before."""
        control = self.control
        if self._barrier_number & MAX_BARRIERS == MAX_BARRIERS:  # the next number is one of the next command
            raise RuntimeError(f"a command, or a program of synkhronos.run, can have at most {MAX_BARRIERS:,} barriers")
        self._barrier_number += 1
        control.arrived[self.number] = self._barrier_number
        control.fence()
        # The last rank to arrive wakes all others.  In a `gather_bytes` the master arrives after the workers: the last
        # worker wakes it.
        is_last = self._has_reached(self._barrier_number)
        if is_last:
            control.wake_local_ranks(AWAITS_BARRIER)
        elif not self.is_master and self._has_reached(self._barrier_number, excluded=self.master_rank):
            control.wake(self.master_rank, AWAITS_BARRIER)
        return is_last

    def barrier(self, on_poll: Callable[[], None] | None = None) -> None:
        """Return when every rank has arrived at this barrier; raise `Cancelled` if a rank failed in this command.

        ``on_poll`` is called repeatedly while waiting, and may raise.
        """
        if not self.arrive():
            self.wait_for_barrier(self._barrier_number, on_poll=on_poll)
        elif self.is_last_failed_command(self.command_number):
            raise Cancelled

    def wait_for_barrier(
        self, barrier_number: int, excluded: int | None = None, on_poll: Callable[[], None] | None = None
    ) -> None:
        """Wait until all ranks, or all but one, have arrived at a barrier; otherwise as `barrier`."""
        reached = self._has_reached
        self.wait(lambda: reached(barrier_number, excluded), on_poll)

    def raise_common_error(self, error: Exception) -> NoReturn:
        """Raise an error that all ranks have found at the same point: itself in the master, `Cancelled` in workers.

        All ranks call it, as no rank is told of the error.
        """
        raise error if self.is_master else Cancelled

    def fail_command(self) -> None:
        """Mark the command as failed, wake all waiting ranks, and record the last barrier that every rank reached."""
        control, words, command_number = self.control, self.control.words, self.command_number
        with defer_signals():  # peers wait for all of it once the first line is done
            words[ControlMemory.FAILED] = command_number
            control.fence()
            # One of the ranks that fail at the same time decides the command; on several hosts the agents do.
            if not self.spans_hosts and control.decision_lock.acquire(0):
                if read_last_common_barrier(words, command_number) is None:
                    record_last_common_barrier(words, command_number, min(control.arrived))
                control.decision_lock.release()
            control.wake_all_ranks()

    @property
    def next_barrier_number(self) -> int:
        """Number of the next barrier."""
        return self._barrier_number + 1

    def read_last_common_barrier(self, command_number: int) -> int | None:
        """Return the number of the last barrier that all ranks reached in a failed command; None until decided."""
        return read_last_common_barrier(self.control.words, command_number)

    def wait_and_check_reached(self, barrier_number: int) -> bool:
        """Wait until this failed command is decided; return whether all ranks had reached a barrier before the failure.

        The answer is the same on all ranks.
        """
        self._wait_until_decided(self.command_number)
        return (self.read_last_common_barrier(self.command_number) or 0) >= barrier_number

    def _wait_until_decided(self, command_number: int) -> None:
        words = self.control.words

        def is_decided() -> bool:
            return read_last_common_barrier(words, command_number) is not None

        self.control.wait(self.number, is_decided, AWAITS_BARRIER, self.check_peers, POLL_SECONDS)

    def all_gather(self, value: object) -> list[Any]:
        """All-gather a picklable value: return every rank's value, in rank order."""
        payload = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        return [pickle.loads(pickled) for pickled in self.all_gather_bytes(payload)]

    def all_gather_cached(self, value: Hashable) -> list[Any]:
        """All-gather an immutable value that is often the same: if all values are equal, ranks send only a digest."""
        payload, digest = self._pickle_cached(value)
        if self.compare_digests(digest):  # nearly always
            return [value] * self.size
        return [pickle.loads(pickled) for pickled in self.all_gather_bytes(payload)]

    def compute_digest(self, value: Hashable) -> bytes:
        """Return the digest of a value that `all_gather_cached` compares."""
        return self._pickle_cached(value)[1]

    def _pickle_cached(self, value: Hashable) -> tuple[bytes, bytes]:
        cached = self._pickles.get(value)
        if cached is None:
            payload = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
            cached = self._pickles[value] = payload, hashlib.blake2b(payload, digest_size=_DIGEST_NBYTES).digest()
        return cached

    def compare_digests(self, digest: bytes) -> bool:
        """Exchange digests at the next barrier, a collective operation; return True if all ranks pass the same one."""
        barrier_number = self._write_slot(digest)
        self.barrier()
        slots = self._digest_slots[barrier_number & 1]
        return slots.count(slots[self.number]) == self.size

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """All-gather bytes, `MAX_SLOT_NBYTES` of them per barrier, and return every rank's bytes in rank order."""
        chunks: list[list[bytes]] = [[] for _ in range(self.size)]
        start = longest = 0
        while not start or start < longest:
            barrier_number = self._write_slot(memoryview(payload)[start : start + MAX_SLOT_NBYTES], len(payload))
            self.barrier()
            for r, chunks_of_rank in enumerate(chunks):
                slot = self.control.get_slot(r, barrier_number & 1)
                length, _ = SLOT_HEADER.unpack_from(slot)
                chunk_nbytes = max(0, min(length - start, MAX_SLOT_NBYTES))
                chunks_of_rank.append(bytes(slot[SLOT_HEADER.size : SLOT_HEADER.size + chunk_nbytes]))
                longest = max(longest, length)
            start += MAX_SLOT_NBYTES
        return [b"".join(chunks_of_rank) for chunks_of_rank in chunks]

    def gather_bytes(self, payload: bytes) -> list[bytes] | None:
        """Gather at most `MAX_SLOT_NBYTES` bytes of each rank in the master, in rank order; workers do not wait."""
        barrier_number = self._write_slot(payload)
        if not self.is_master:
            self.arrive()
            return None
        self.wait_for_barrier(barrier_number, excluded=self.number)
        payloads = [payload if r == self.number else self._read_slot(r, barrier_number) for r in range(self.size)]
        self.arrive()
        return payloads

    def has_pending_operation(self) -> bool:
        """Whether a pending operation in which peers take part has not completed."""
        return any(operation.is_unfinished() for operation in self.pending_operations)

    def close_pending_operations(self) -> None:
        """Close all pending operations before the ranks exit."""
        while self.pending_operations:
            try:
                self.pending_operations.pop().close()
            except Exception as error:
                _log.warning("a pending operation of the ranks could not be closed: %s", error)

    def check_cancelled(self) -> None:
        """Raise `Cancelled` if a peer has failed, and call `check_peers`: for waits that are not for a barrier."""
        if self.control.words[ControlMemory.FAILED] == self.command_number:
            raise Cancelled
        self.check_peers()

    # -- barriers --------------------------------------------------------------------------------------------

    def _has_reached(self, barrier_number: int, excluded: int | None = None) -> bool:
        """Whether all ranks, or all but one, have arrived at a barrier."""
        arrived = self.control.arrived
        if excluded is None:
            return min(arrived) >= barrier_number
        return min([barrier_number, *arrived[:excluded], *arrived[excluded + 1 :]]) >= barrier_number

    def wait(
        self, is_ready: Callable[[], bool], on_poll: Callable[[], None] | None = None, reason: int = AWAITS_BARRIER
    ) -> None:
        """Wait until a condition on shared memory holds; raise `Cancelled` if a rank failed in this command.

        ``on_poll`` is called repeatedly while waiting, and may raise.  The rank that makes the condition true wakes the
        ranks that sleep for this reason.
        """
        words, failed, command_number = self.control.words, ControlMemory.FAILED, self.command_number
        poll = self.check_peers
        if on_poll is not None:

            def poll() -> None:
                self.check_peers()
                on_poll()

        def is_over() -> bool:
            return is_ready() or words[failed] == command_number

        self.control.wait(self.number, is_over, reason, poll, POLL_SECONDS)
        if words[failed] == command_number:
            raise Cancelled

    def _write_slot(self, payload: bytes | memoryview, message_nbytes: int | None = None) -> int:
        """Write into this rank's slot for the next barrier, and return that barrier's number.

        Invariant: slot[number & 1] was last written two barriers ago, and its readers have passed the barrier in
        between.  Ranks do not wait at a `gather_bytes`, so this method waits for the barrier in between.
        """
        barrier_number = self._barrier_number + 1
        if self._barrier_number & MAX_BARRIERS and not self._has_reached(barrier_number - 1):
            self.wait_for_barrier(barrier_number - 1)
        slot = self.control.get_slot(self.number, barrier_number & 1)
        SLOT_HEADER.pack_into(slot, 0, len(payload) if message_nbytes is None else message_nbytes, barrier_number)
        slot[SLOT_HEADER.size : SLOT_HEADER.size + len(payload)] = payload
        return barrier_number

    def _read_slot(self, rank: int, barrier_number: int) -> bytes:
        slot = self.control.get_slot(rank, barrier_number & 1)
        length, _ = SLOT_HEADER.unpack_from(slot)
        return bytes(slot[SLOT_HEADER.size : SLOT_HEADER.size + length])
