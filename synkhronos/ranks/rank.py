"""A rank, as the commands that run in its process see it.

Small values are exchanged at a barrier through shared memory, which has one slot per rank.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NoReturn, TypeVar

from synkhronos.containers import BoundedCache
from synkhronos.ranks.agreement import BARRIER_BITS, BARRIER_MASK
from synkhronos.ranks.command_barriers import CommandBarriers
from synkhronos.ranks.control_memory import SLOT_NBYTES, ControlMemory
from synkhronos.ranks.errors import Cancelled
from synkhronos.ranks.interrupts import defer_signals
from synkhronos.ranks.pending_operation import PendingOperations
from synkhronos.ranks.segments import SegmentTable
from synkhronos.ranks.thread_limit import ThreadLimit

T = TypeVar("T")

#: Maximal number of values whose pickles `Rank.all_gather_if_different` caches.
_MAX_CACHED_PICKLES = 64
#: Header of a slot: number of bytes of the whole message, and number of the barrier for which it was written.
SLOT_HEADER = struct.Struct("=QQ")
#: Number of bytes of a digest, which `Rank.compare_digests` compares.
_DIGEST_NBYTES = 16
#: Maximal number of bytes that one `Rank.gather_bytes`, or one round of `Rank.all_gather_bytes`, transports.
MAX_PAYLOAD_NBYTES = SLOT_NBYTES - SLOT_HEADER.size


class SingletonRegistry:
    """One object for each class, created at its first use.

    Packages of higher layers store their state of a rank, or of a session, under classes of their own.  The state of a
    rank ends when it joins another group, the state of a session when the workers are replaced by new processes.  Both
    end with the session.
    """

    def __init__(self) -> None:
        self._by_class: dict[type, Any] = {}

    def get_or_create(self, cls: type[T], factory: Callable[[], T] | None = None) -> T:
        """Return the object of a class.  The first call creates it with ``factory``, or with the class itself."""
        instance: T | None = self._by_class.get(cls)
        if instance is None:
            instance = self._by_class[cls] = (factory or cls)()
        return instance

    def clear(self) -> None:
        """Remove all objects."""
        self._by_class.clear()


class Rank:
    """A rank: the objects that it stores, its group, the command that it runs, and its communication with the others.

    ``has_peer_died``, of the master's rank alone, returns True once a peer process has exited.  For ``check_peers`` see
    `CommandBarriers`.

    Attributes
    ----------
    number : int
        Number of this rank in the session, from 0.
    size : int
        Number of ranks on all hosts.
    is_master : bool
        Whether this is the rank of the process that called `fork`.
    master_rank : int
        Number of the master's rank.
    local_ranks : range
        Numbers of the ranks on this host.
    control : ControlMemory
        Counters, semaphores and slots that all ranks share.
    segments : SegmentTable
        Shared memory that this rank has mapped.
    thread_limit : ThreadLimit
        Limit of the threads of this rank's libraries.
    spans_hosts : bool
        Whether there are ranks on other hosts; their agents then decide failed commands.
    command_number : int
        Number of the command that this rank runs; it is unique in a session.
    objects : dict
        References to this rank's copies of replicated objects, by key; see `add_object`.
    registry : SingletonRegistry
        State of packages of higher layers; empty after `join_group`.
    barriers : CommandBarriers
        Barriers of the current command.
    pending_operations : PendingOperations
        Operations that commands have started and that may not have completed.
    finish_callbacks : list of callable
        Called at the end of the current command.
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
        self.registry = SingletonRegistry()
        self.command_number = 0
        self._pickles: BoundedCache[Any, tuple[bytes, bytes]] = BoundedCache(_MAX_CACHED_PICKLES)
        self.finish_callbacks: list[Callable[[], None]] = []
        self.pending_operations = PendingOperations()
        self.join_group(number, master_rank, control, check_peers, has_peer_died)

    # -- replicated objects --------------------------------------------------------------------------------

    def add_object(self, key: Hashable, value: object, is_weak: bool = False) -> None:
        """Add this rank's copy of a replicated object.  If ``is_weak``, only the user's references keep it alive."""
        self.objects[key] = weakref.ref(value) if is_weak else lambda: value

    def get_object(self, key: Hashable) -> Any:
        """Return this rank's copy of a replicated object: in the master, the object itself."""
        return self.objects[key]()

    def get_or_add_object(self, key: Hashable, factory: Callable[[], object]) -> Any:
        """Return an object that this rank may have, or add a new one, which belongs to this rank alone."""
        if key not in self.objects:
            self.add_object(key, factory())
        return self.get_object(key)

    def get_objects(self, keys: Iterable[Hashable]) -> list[Any]:
        """Return this rank's copies of several replicated objects."""
        return [self.objects[key]() for key in keys]

    # -- the group of ranks --------------------------------------------------------------------------------

    def join_group(
        self,
        number: int,
        master_rank: int,
        control: ControlMemory,
        check_peers: Callable[[], None],
        has_peer_died: Callable[[], bool],
    ) -> None:
        """Use another group's counters, as after replacing the workers.  Segments and replicated objects stay."""
        self.number, self.master_rank, self.control = number, master_rank, control
        self.size, self.local_ranks = control.size, control.local_ranks
        self.spans_hosts = len(self.local_ranks) < self.size
        self.barriers = CommandBarriers(number, master_rank, control, check_peers)
        self.has_peer_died = has_peer_died
        #: The beginnings of all ranks' slots for even and for odd barriers: header and digest.
        self._digest_slots = [
            [control.get_slot(r, parity)[: SLOT_HEADER.size + _DIGEST_NBYTES] for r in range(self.size)]
            for parity in range(2)
        ]
        self.registry.clear()
        self._pickles.clear()

    def leave_group(self) -> None:
        """Leave the group, whose other ranks have exited."""
        self.barriers.cancel_all_waits()
        self.has_peer_died = lambda: False  # a reference to the session would be a cycle

    def inherit_from(self, master: Rank) -> None:
        """Take over the segments and replicated objects of the master, which this process is a fork of.

        Other objects of the master are not copied.
        """
        self.segments = master.segments.copy()
        self.objects = {key: value for key, value in master.objects.items() if isinstance(value, weakref.ref)}

    # -- commands ------------------------------------------------------------------------------------------

    def begin_command(self, command_number: int) -> None:
        """Start counting the barriers of a new command.

        If the last command failed, its pending operations are aborted or completed first.  This may wait until the
        other ranks, or their agents, have decided the last common barrier (see `agreement`).
        """
        self.resolve_operations_of_failed_command()
        self.barriers.last_arrived = command_number << BARRIER_BITS
        # Set last: an interrupt before this would mark the previous command, which has not failed, as failed.
        self.command_number = command_number

    def resolve_operations_of_failed_command(self) -> None:
        """Abort or complete the pending operations of the last command if it failed on some rank."""
        failed = self.control.words[ControlMemory.FAILED]
        if not 0 < self.command_number <= failed:
            return
        self.barriers.wait_until_decided(failed)  # it may be the next one, which is decided after this one
        if self.barriers.read_last_common_barrier(self.command_number) is not None:
            self.pending_operations.resolve_failed_command(self.command_number)

    def record_effect(self) -> None:
        """Record that this rank has applied the command's effect, for the message of an error."""
        self.control.applied[self.number] = self.command_number

    def run_finish_callbacks(self) -> None:
        """Call and remove the functions in `finish_callbacks`.  Called at the end of every command, failed or not.

        A function that an interrupt has ended stays, and the next call of `wait_until_idle` calls it again.
        """
        while self.finish_callbacks:
            self.finish_callbacks[-1]()
            del self.finish_callbacks[-1]

    # -- barriers, and exchange of values at them ----------------------------------------------------------

    def barrier(self) -> None:
        """Return when every rank has arrived at this barrier.  Raise `Cancelled` if a rank failed in this command."""
        self.barriers.arrive_and_wait()

    def run_on_all_or_no_rank(self, operation: Callable[[], T], is_collective: bool = False) -> T:
        """Run an operation on all ranks, even if a signal's handler raises an exception in the master, or on none.

        All ranks call it, after work that a handler may interrupt.  An operation is collective if ranks wait for each
        other in it.
        """
        if self.size == 1:
            return operation()
        barriers = self.barriers
        with defer_signals() as signals:
            if self.is_master:  # its arrival, the last one, decides: a handler may interrupt the wait before it
                barriers.wait_for_barrier(barriers.next_number, self.number, signals.run_deferred_handlers)
            barriers.arrive_and_wait()
            result = operation()
            if is_collective:
                self.barrier()  # the master may only fail once no other rank waits for a peer
            return result

    def raise_common_error(self, error: Exception) -> NoReturn:
        """Raise an error that all ranks have found at the same point: itself in the master, `Cancelled` in workers.

        All ranks call it: none sends the error to the others.
        """
        raise error if self.is_master else Cancelled

    def all_gather(self, value: object) -> list[Any]:
        """All-gather a picklable value: return every rank's value, in rank order."""
        payload = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        return [pickle.loads(pickled) for pickled in self.all_gather_bytes(payload)]

    def all_gather_if_different(self, value: Hashable) -> list[Any]:
        """All-gather an immutable value that is often the same.  Return every rank's value, in rank order.

        If all values are equal, the ranks send only a digest of it.
        """
        if self.size == 1:
            return [value]
        payload, digest = self._pickle_cached(value)
        if self.compare_digests(digest):  # nearly always
            return [value] * self.size
        return [pickle.loads(pickled) for pickled in self.all_gather_bytes(payload)]

    def compute_digest(self, value: Hashable) -> bytes:
        """Return the digest of a value that `all_gather_if_different` compares."""
        return self._pickle_cached(value)[1]

    def _pickle_cached(self, value: Hashable) -> tuple[bytes, bytes]:
        cached = self._pickles.get(value)
        if cached is None:
            payload = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
            cached = self._pickles[value] = payload, hashlib.blake2b(payload, digest_size=_DIGEST_NBYTES).digest()
        return cached

    def compare_digests(self, digest: bytes) -> bool:
        """Exchange digests at the next barrier, a collective operation.  Return True if all ranks pass the same one."""
        barrier_number = self.publish_digest(digest)
        self.barriers.arrive_and_wait()
        return self.has_equal_digests(barrier_number)

    def publish_digest(self, digest: bytes) -> int:
        """Publish a digest that the other ranks read after the next barrier.  Return the number of this barrier."""
        return self._write_slot(digest)

    def has_equal_digests(self, barrier_number: int) -> bool:
        """Whether all ranks have passed the same digest at a barrier: the last that all of them have reached."""
        slots = self._digest_slots[barrier_number & 1]
        return slots.count(slots[self.number]) == self.size

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """All-gather bytes, `MAX_PAYLOAD_NBYTES` of them per barrier, and return every rank's bytes in rank order."""
        chunks: list[list[bytes]] = [[] for _ in range(self.size)]
        start = longest = 0
        while not start or start < longest:
            barrier_number = self._write_slot(memoryview(payload)[start : start + MAX_PAYLOAD_NBYTES], len(payload))
            self.barriers.arrive_and_wait()
            for r, chunks_of_rank in enumerate(chunks):
                slot = self.control.get_slot(r, barrier_number & 1)
                length, _ = SLOT_HEADER.unpack_from(slot)
                chunk_nbytes = max(0, min(length - start, MAX_PAYLOAD_NBYTES))
                chunks_of_rank.append(bytes(slot[SLOT_HEADER.size : SLOT_HEADER.size + chunk_nbytes]))
                longest = max(longest, length)
            start += MAX_PAYLOAD_NBYTES
        return [b"".join(chunks_of_rank) for chunks_of_rank in chunks]

    def gather_bytes(self, payload: bytes) -> list[bytes] | None:
        """Gather at most `MAX_PAYLOAD_NBYTES` bytes of each rank in the master, in rank order; workers do not wait."""
        if self.size == 1:
            return [payload]
        barrier_number = self._write_slot(payload)
        if not self.is_master:
            self.barriers.arrive()
            return None
        self.barriers.wait_for_barrier(barrier_number, excluded=self.number)
        payloads = [payload if r == self.number else self._read_slot(r, barrier_number) for r in range(self.size)]
        self.barriers.arrive()
        return payloads

    def _write_slot(self, payload: bytes | memoryview, message_nbytes: int | None = None) -> int:
        """Write into this rank's slot for the next barrier, and return that barrier's number.

        Invariant: slot[number & 1] was last written two barriers ago, and its readers have passed the barrier in
        between.  Ranks do not wait at a `gather_bytes`, so this method waits for the barrier in between.
        """
        barriers, last_number = self.barriers, self.barriers.last_arrived
        if last_number & BARRIER_MASK and not barriers.have_all_arrived(last_number):
            barriers.wait_for_barrier(last_number)
        barrier_number = last_number + 1
        slot = self.control.get_slot(self.number, barrier_number & 1)
        SLOT_HEADER.pack_into(slot, 0, len(payload) if message_nbytes is None else message_nbytes, barrier_number)
        slot[SLOT_HEADER.size : SLOT_HEADER.size + len(payload)] = payload
        return barrier_number

    def _read_slot(self, rank_number: int, barrier_number: int) -> bytes:
        slot = self.control.get_slot(rank_number, barrier_number & 1)
        length, _ = SLOT_HEADER.unpack_from(slot)
        return bytes(slot[SLOT_HEADER.size : SLOT_HEADER.size + length])
