"""Counters and semaphores in shared memory, by which ranks synchronize.

The master creates the memory before it forks.  The memory is anonymous and contains the semaphores, so no name outlives
a crash.

Each counter of a rank has one writer and only grows, so readers need no lock.  Several ranks may write `FAILED`, all of
them the number of the command that is running.  A rank that waits for a counter spins for
`SPIN_SECONDS`.  Then it publishes its sleep reason, and sleeps on its own semaphore.  After the write, the counter's
writer releases the semaphores of the ranks that sleep for this reason.  A spurious wake-up does no harm, as the rank
checks the counter again.  A sleeping rank also wakes every `POLL_SECONDS`, to check whether its peers are alive.
"""

from __future__ import annotations

import ctypes
import errno
import io
import mmap
import os
import threading
import time
from collections.abc import Callable
from time import perf_counter
from typing import Any, cast

from synkhronos.ranks.interrupts import defer_signals
from synkhronos.ranks.segments import create_unlinked_file, map_file

#: Number of bytes of the mailbox; a longer command is written into a segment of its own.
MAILBOX_NBYTES = 1 << 18
#: Number of bytes of a slot, in which a rank publishes a value at a barrier.
SLOT_NBYTES = 1 << 16
#: Index of a rank's slot for its exception report; barriers use slots 0 and 1 in turn.
_REPORT_SLOT = 2
#: Number of bytes of one half of a rank's scratch memory, through which host-memory collectives stream arrays.
SCRATCH_NBYTES = 1 << 20
#: Seconds after which a sleeping rank checks whether its peers are alive.
POLL_SECONDS = 0.05
#: Seconds for which a rank spins on a counter before it sleeps, if every rank has a core of its own.  Longer than the
#: wake-up of a process whose core is idle (about 0.1 ms on a virtual machine): otherwise two ranks that take turns
#: would sleep every time.  Longer, too, than a sampler in Python needs between two evaluations (0.3 ms).
SPIN_SECONDS = 500e-6
#: Number of reads of a counter between two yields of a spinning rank.  A yield takes as long as several reads.
_CHECKS_PER_YIELD = 8

#: Sleep reasons: none; a command is posted; ranks reach a barrier; ranks finish a command; a peer sends or receives
#: bytes in a program.
AWAKE, AWAITS_COMMAND, AWAITS_BARRIER, AWAITS_COMPLETION, AWAITS_PEER = range(5)

_N_WORDS = 10  # words of the whole session; the words of the ranks follow
_N_RANK_WORDS = 9
_SEMAPHORE_NBYTES = 64  # a cache line; no system's semaphore is larger


def _compute_offsets(size: int, n_local: int, link_nbytes: int) -> tuple[int, int, int, int, int, int]:
    """Return the offsets of the valid flags, the mailbox, scratch memory, semaphores, the link's memory, and slots."""
    flags = _round_to_pages((_N_WORDS + _N_RANK_WORDS * size) * 8)
    mailbox = flags + mmap.PAGESIZE
    scratch = mailbox + MAILBOX_NBYTES
    semaphores = scratch + 2 * n_local * SCRATCH_NBYTES
    link = semaphores + (size + 1) * _SEMAPHORE_NBYTES
    return flags, mailbox, scratch, semaphores, link, _round_to_pages(link + link_nbytes)


def _round_to_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class ControlMemory:
    """Shared memory of a session's ranks: counters, semaphores, mailbox, slots and scratch memory.

    Parameters
    ----------
    size : int
        Number of ranks of the session, on all hosts.
    spin_seconds : float
        Seconds for which to spin on a counter before sleeping.
    fd : int
        File descriptor of the memory, for processes that do not inherit it; negative to allocate anonymous memory.
    is_initialized : bool
        Whether another process has initialized the memory.
    local_ranks : range, optional
        Ranks of this host; its agent (`synkhronos.hosts`) writes the counters of the others.  Default: all ranks.
    link_nbytes : int
        Number of bytes of `link_memory`.

    Attributes
    ----------
    words : memoryview of uint64
        Words of the whole session, indexed by the constants of this class.
    done, arrived, applied : memoryview of uint64
        For each rank: the last command that it has finished; the number of the last barrier that it has arrived at;
        the last command whose effect it has applied.
    sleep_reason, report_nbytes : memoryview of uint64
        Reason for which each rank sleeps (`AWAKE` if it does not), and number of bytes of its exception report.
    last_core, last_progress : memoryview of uint64
        Core, counted from 1, on which each rank last began to wait, and monotonic time of its last sign of progress in
        ns.
    rounds_begun, rounds_ended : memoryview of uint64
        Counters of compiled code that runs in rounds, without barriers of the command: for each rank, the number of
        rounds that it has begun, and once the code has ended the number of all of them plus 1.
    valid_flags : memoryview of int32
        Page that GPUs read, in which ranks invalidate collectives before they abort them (`devices.cuda.watchdog`).
    scratch : memoryview
        Scratch memory of this host's ranks, two halves for each.
    link_memory : memoryview
        Memory that the session's link shares with this host's agent.
    decision_lock : Semaphore
        Held by the rank that decides a failed command: see `agreement`.
    """

    #: Number of the last posted command.
    POSTED = 0
    #: Number of the last failed command.
    FAILED = 1
    #: Number of bytes of the pickled command in the mailbox.
    MESSAGE_NBYTES = 2
    #: Key of the newest segment that was sent.
    NEWEST_KEY = 3
    #: Number of bytes of the link's plan, behind the command in the mailbox.
    PLAN_NBYTES = 4
    #: `END_WORKERS` or `KILL_WORKERS` once agents have to do so, and 0 before.
    END_REQUEST = 5
    #: Number of bytes of a failure that an agent reports.
    FAILURE_NBYTES = 6
    #: Number of bytes sent to other hosts.
    BYTES_SENT = 7
    #: Last common barriers of failed commands with even and with odd numbers; see `agreement`.
    COMMON_BARRIER_EVEN, COMMON_BARRIER_ODD = 8, 9
    #: Values of `END_REQUEST`.
    END_WORKERS, KILL_WORKERS = 1, 2

    def __init__(
        self,
        size: int,
        spin_seconds: float,
        fd: int = -1,
        is_initialized: bool = False,
        local_ranks: range | None = None,
        link_nbytes: int = 0,
    ):
        self.size = size
        self.local_ranks = range(size) if local_ranks is None else local_ranks
        self.spin_seconds = spin_seconds
        n_words = _N_WORDS + _N_RANK_WORDS * size
        flags, mailbox, scratch, semaphores, link, slots = _compute_offsets(size, len(self.local_ranks), link_nbytes)
        nbytes = slots + 3 * size * SLOT_NBYTES
        self._memory = mmap.mmap(-1, nbytes) if fd < 0 else map_file(fd, nbytes)
        memory = memoryview(self._memory)
        self.words = memory[: n_words * 8].cast("Q")
        (
            self.done,
            self.arrived,
            self.sleep_reason,
            self.report_nbytes,
            self.last_core,
            self.applied,
            self.last_progress,
            self.rounds_begun,
            self.rounds_ended,
        ) = (self.words[_N_WORDS + i * size : _N_WORDS + (i + 1) * size] for i in range(_N_RANK_WORDS))
        self.valid_flags = memory[flags:mailbox].cast("i")
        self.mailbox = memory[mailbox : mailbox + MAILBOX_NBYTES]
        self.scratch = memory[scratch : scratch + 2 * len(self.local_ranks) * SCRATCH_NBYTES]
        self.link_memory = memory[link : link + link_nbytes]
        *self._wake_semaphores, self.decision_lock = (
            Semaphore(self._memory, semaphores + i * _SEMAPHORE_NBYTES, is_initialized) for i in range(size + 1)
        )
        if not is_initialized:
            self.decision_lock.release()
        self._fence_lock = threading.Lock()
        # The slots of this host's ranks come first.
        starts = [slots + 3 * ((rank - self.local_ranks.start) % size) * SLOT_NBYTES for rank in range(size)]
        self._slots = [
            [memory[start + i * SLOT_NBYTES : start + (i + 1) * SLOT_NBYTES] for i in range(3)] for start in starts
        ]

    @staticmethod
    def create_file(size: int, n_local: int, link_nbytes: int = 0) -> io.FileIO:
        """Create the memory as an open file, for ``n_local`` of ``size`` ranks on this host.

        A slot of a rank on another host gets only one page: published values are rarely longer.
        """
        slots = _compute_offsets(size, n_local, link_nbytes)[-1]
        remote_slots = range(slots + 3 * n_local * SLOT_NBYTES, slots + 3 * size * SLOT_NBYTES, SLOT_NBYTES)
        first_pages = [range(start, start + mmap.PAGESIZE) for start in remote_slots]
        return create_unlinked_file(remote_slots.stop, [range(remote_slots.start), *first_pages])

    def get_slot(self, rank: int, parity: int) -> memoryview:
        """Return the slot of a rank for barriers with even numbers (0) or odd ones (1)."""
        return self._slots[rank][parity]

    def write_report(self, rank: int, report: bytes) -> None:
        """Store a rank's exception report."""
        self._slots[rank][_REPORT_SLOT][: len(report)] = report
        self.report_nbytes[rank] = len(report)

    def read_report(self, rank: int) -> bytes:
        """Return a rank's exception report, or an empty one if it has none."""
        return bytes(self._slots[rank][_REPORT_SLOT][: self.report_nbytes[rank]])

    def fence(self) -> None:
        """Order this rank's earlier writes before its later reads.

        A writer writes a word and then reads the sleep reasons; a waiting rank writes its sleep reason and then reads
        the word.  Without fences each could miss the other's write, and `agreement` would read old counters.

        Invariant: acquiring a lock orders writes before later reads.  On x86-64 it does, as it executes a locked
        instruction.  On ARM an acquire need not.
        """
        with self._fence_lock:
            pass

    def wake(self, rank: int, reason: int) -> None:
        """Wake a rank if it sleeps for this reason.  Call `fence` first, after the write that the rank waits for."""
        if self.sleep_reason[rank] == reason:
            self._wake_semaphores[rank].release()

    def wake_local_ranks(self, reason: int) -> None:
        """Wake the ranks of this host that sleep for this reason.  Call it after the write that they wait for."""
        self.fence()
        self.wake_local_ranks_after_fence(reason)

    def wake_local_ranks_after_fence(self, reason: int) -> None:
        """Wake ranks as `wake_local_ranks`, after a `fence` that followed the write."""
        reasons = self.sleep_reason.tolist()
        if reason in reasons:  # ranks that spin are nearly always more
            for rank in self.local_ranks:
                if reasons[rank] == reason:
                    self._wake_semaphores[rank].release()

    def wake_all_ranks(self) -> None:
        """Wake every sleeping rank."""
        self.fence()
        for rank in range(self.size):
            if self.sleep_reason[rank] != AWAKE:
                self._wake_semaphores[rank].release()

    def mark_all_done(self) -> None:
        """Mark the last command as finished, after all ranks have exited, to end the wait of another thread."""
        for rank in range(self.size):
            self.done[rank] = self.words[ControlMemory.POSTED]
        self.decision_lock.release()  # its holder has exited

    def wait(
        self, rank: int, is_ready: Callable[[], bool], reason: int, check_peers: Callable[[], None], poll_seconds: float
    ) -> None:
        """Wait until a condition on the counters holds.

        ``is_ready`` returns whether it does: it is cheap, and stays true.  ``reason`` is the sleep reason to publish.
        ``check_peers`` is called every ``poll_seconds`` seconds; it raises, or ends the process, when a peer has died.
        """
        if is_ready():
            return
        if self.spin_seconds:
            deadline = perf_counter() + self.spin_seconds
            while perf_counter() < deadline:
                for _ in range(_CHECKS_PER_YIELD):
                    if is_ready():
                        return
                self.last_core[rank] = _get_current_core()
                os.sched_yield()  # the scheduler may have put the peer on this very core
        semaphore = self._wake_semaphores[rank]
        next_check = perf_counter() + poll_seconds
        try:
            while True:
                self.sleep_reason[rank] = reason
                self.fence()
                if is_ready():
                    return
                is_woken = semaphore.wait_for_wakeup(poll_seconds)
                if not is_woken or perf_counter() > next_check:  # signals wake, too, and may be frequent
                    check_peers()
                    next_check = perf_counter() + poll_seconds
                if is_woken and self.spin_seconds:
                    self._leave_shared_core(rank)
        finally:
            self.sleep_reason[rank] = AWAKE

    def _leave_shared_core(self, rank: int) -> None:
        """Move to a core on which no other rank runs, if there is one.

        Schedulers tend to wake a process on the core of the process that woke it.  The two would then take turns, each
        spinning while the other waits for the core.  The process is moved but not bound to its new core, as other
        programs may need the cores too.
        """
        core = self.last_core[rank] = _get_current_core()
        busy_cores = {self.last_core[r] for r in range(self.size) if r != rank and self.sleep_reason[r] == AWAKE}
        if core not in busy_cores:
            return
        allowed_cores = os.sched_getaffinity(0)
        free_cores = {number for number in allowed_cores if number + 1 not in busy_cores}
        if free_cores:
            with defer_signals():  # an interrupt in between would leave the process bound
                os.sched_setaffinity(0, free_cores)
                os.sched_setaffinity(0, allowed_cores)
            self.last_core[rank] = _get_current_core()


_libc = ctypes.CDLL(None, use_errno=True)
_CLOCK, _sem_wait = time.CLOCK_MONOTONIC, cast(Any, getattr(_libc, "sem_clockwait", None))
if _sem_wait is None:  # glibc before 2.30: setting back the system's clock lengthens a wait
    _CLOCK, _sem_wait = time.CLOCK_REALTIME, lambda semaphore, clock, until: _libc.sem_timedwait(semaphore, until)
_getcpu: Callable[[], int] = _libc.sched_getcpu


def _get_current_core() -> int:
    """Return the number of the current core, counted from 1."""
    return _getcpu() + 1


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("ns", ctypes.c_long)]


class Semaphore:
    """A POSIX semaphore in shared memory, between processes, with the initial value 0.

    The semaphore has no name: a name would outlive a process that is killed before it unlinks the name.
    """

    def __init__(self, memory: Any, offset: int, is_initialized: bool):
        self._memory = (ctypes.c_char * _SEMAPHORE_NBYTES).from_buffer(memory, offset)  # this reference keeps it mapped
        self._semaphore = ctypes.c_void_p(ctypes.addressof(self._memory))
        self._deadline = _Timespec()
        self._until = ctypes.byref(self._deadline)
        if not is_initialized and _libc.sem_init(self._semaphore, 1, 0):
            raise OSError(ctypes.get_errno(), "a semaphore could not be initialized")

    def release(self) -> None:
        """Increment the semaphore, which wakes one waiting process."""
        _libc.sem_post(self._semaphore)

    def acquire(self, timeout: float) -> bool:
        """Decrement the semaphore.  Return False if it stays zero for ``timeout`` seconds, or a signal arrives."""
        deadline, until = self._deadline, time.clock_gettime(_CLOCK) + timeout
        deadline.seconds = seconds_part = int(until)
        deadline.ns = int((until - seconds_part) * 1e9)
        return not _sem_wait(self._semaphore, _CLOCK, self._until)

    def wait_for_wakeup(self, timeout: float) -> bool:
        """Decrement the semaphore unless a signal arrives first.  Return False after ``timeout`` seconds."""
        return self.acquire(timeout) or ctypes.get_errno() != errno.ETIMEDOUT
