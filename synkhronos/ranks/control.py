"""Shared counters and semaphores by which ranks synchronise.

The master creates them before it forks, and nothing has a name: the memory is anonymous, and the semaphores lie in it.

Counters only grow, and each has one writer, so reading them needs no lock.  A rank that waits for a counter spins for
some microseconds and then sleeps on its own semaphore, its *bell*; the writer of the counter rings the bell if the
rank sleeps.  A ring is only a hint: the sleeper checks the counter again, so a spurious ring does no harm, and it wakes
every `POLL_SECONDS` seconds to check whether its peers are alive.
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
from synkhronos.ranks.segments import create_unlinked, map_file

#: Number of bytes of the mailbox; a longer command is written into a segment of its own.
MAILBOX_NBYTES = 1 << 18
#: Number of bytes of a slot, in which a rank publishes a value at a step.
SLOT_NBYTES = 1 << 16
#: Index of a rank's slot for its failure report; steps use slots 0 and 1 in turn.
_REPORT = 2
#: Number of bytes of one half of a rank's scratch memory, through which collectives on the host stream.
SCRATCH_NBYTES = 1 << 20
#: Seconds after which a sleeping rank checks whether its peers are alive.
POLL_SECONDS = 0.05
#: Seconds for which a rank spins on a counter before it sleeps, if every rank has a core of its own.  Longer than the
#: wake-up of a process whose core is idle (about 0.1 ms on a virtual machine): otherwise two ranks that take turns
#: would sleep every time.
SPIN_SECONDS = 250e-6

#: Reasons for which a rank sleeps; a writer rings the ranks that sleep for its reason.
AWAKE, FOR_COMMAND, FOR_STEP, FOR_DONE, FOR_TASK = range(5)

_N_WORDS = 10  # words before the counters of the ranks
_SEMAPHORE_NBYTES = 64  # bytes for a semaphore: more than any system's takes, and a cache line


def _compute_offsets(size: int, n_local: int, link_nbytes: int) -> tuple[int, int, int, int, int]:
    """Return the offsets of the mailbox, scratch memory, semaphores, the link's memory, and slots."""
    mailbox = _round_to_pages((_N_WORDS + 7 * size) * 8)
    scratch = mailbox + MAILBOX_NBYTES
    semaphores = scratch + 2 * n_local * SCRATCH_NBYTES
    link = semaphores + (size + 1) * _SEMAPHORE_NBYTES
    return mailbox, scratch, semaphores, link, _round_to_pages(link + link_nbytes)


def _round_to_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Control:
    """Memory that the ranks of a session share from the fork on, and the wait for a change of it.

    Parameters
    ----------
    size : int
        Number of ranks.
    spin : float
        Seconds for which to spin on a counter before sleeping.
    fd : int, optional
        File descriptor of shared memory to use, for processes that do not inherit this one's.
    initialised : bool
        Whether another process has initialised that memory.
    local_ranks : range, optional
        Ranks of this machine; the agents of `synkhronos.hosts` write the counters of the others.  Default: all.
    link_nbytes : int
        Number of bytes for the link.

    Attributes
    ----------
    words : memoryview of uint64
        Single words, indexed by the constants of this class: number of the last command that was posted and of the last
        that failed, length of the message in the mailbox, and others.  `COMMON_STEP` and the next word belong to
        `agreement`.
    done : memoryview of uint64
        Last command that each rank has finished.
    arrived : memoryview of uint64
        Last step that each rank has reached.
    sleeping : memoryview of uint64
        Reason for which each rank sleeps.
    report_length : memoryview of uint64
        Number of bytes of each rank's report of a failure.
    core : memoryview of uint64
        Core on which each rank was last seen, counted from 1.
    committed : memoryview of uint64
        Last command whose effect each rank has applied.
    progress : memoryview of uint64
        Time of each rank's last sign of progress, in nanoseconds of the monotonic clock.
    deciding : Semaphore
        Lock of the rank that decides a failed command: see `agreement`.
    """

    POSTED, FAILED, LENGTH, NEWEST_KEY, PLAN_LENGTH, ENDING, LOSS_LENGTH, BYTES_SENT, COMMON_STEP = range(9)

    def __init__(
        self,
        size: int,
        spin: float,
        fd: int = -1,
        initialised: bool = False,
        local_ranks: range | None = None,
        link_nbytes: int = 0,
    ):
        self.size = size
        self.local_ranks = range(size) if local_ranks is None else local_ranks
        self.spin = spin
        n_words = _N_WORDS + 7 * size
        mailbox, self._scratch_offset, semaphores, link, slots = _compute_offsets(
            size, len(self.local_ranks), link_nbytes
        )
        nbytes = slots + 3 * size * SLOT_NBYTES
        self._memory = mmap.mmap(-1, nbytes) if fd < 0 else map_file(fd, nbytes)
        memory = memoryview(self._memory)
        self.words = memory[: n_words * 8].cast("Q")
        self.done, self.arrived, self.sleeping, self.report_length, self.core, self.committed, self.progress = (
            self.words[_N_WORDS + i * size : _N_WORDS + (i + 1) * size] for i in range(7)
        )
        self.mailbox = memory[mailbox : mailbox + MAILBOX_NBYTES]
        self.link_memory = memory[link : link + link_nbytes]
        *self._bells, self.deciding = (
            Semaphore(self._memory, semaphores + i * _SEMAPHORE_NBYTES, initialised) for i in range(size + 1)
        )
        if not initialised:
            self.deciding.release()
        self._fence_lock = threading.Lock()
        # The slots of this machine's ranks come first.
        starts = [slots + 3 * ((rank - self.local_ranks.start) % size) * SLOT_NBYTES for rank in range(size)]
        self._slots = [
            [memory[start + i * SLOT_NBYTES : start + (i + 1) * SLOT_NBYTES] for i in range(3)] for start in starts
        ]

    @staticmethod
    def create(size: int, n_local: int, link_nbytes: int = 0) -> io.FileIO:
        """Create the memory as an open file, for ``n_local`` ranks of this machine and their peers on others.

        One page of each slot of the others is allocated: values that ranks publish are rarely longer.
        """
        slots = _compute_offsets(size, n_local, link_nbytes)[-1]
        others = range(slots + 3 * n_local * SLOT_NBYTES, slots + 3 * size * SLOT_NBYTES, SLOT_NBYTES)
        return create_unlinked(
            others.stop, [range(others.start), *(range(start, start + mmap.PAGESIZE) for start in others)]
        )

    def get_slot(self, rank: int, index: int) -> memoryview:
        """Return slot 0 or 1 of a rank; successive steps use them in turn."""
        return self._slots[rank][index]

    def write_report(self, rank: int, report: bytes) -> None:
        """Store a rank's failure report."""
        self._slots[rank][_REPORT][: len(report)] = report
        self.report_length[rank] = len(report)

    def read_report(self, rank: int) -> bytes:
        """Return a rank's failure report; empty if it has none."""
        return bytes(self._slots[rank][_REPORT][: self.report_length[rank]])

    def get_scratch(self, rank: int, half: int) -> memoryview:
        """Return one half of the scratch memory of a rank of this machine."""
        start = self._scratch_offset + (2 * (rank - self.local_ranks.start) + half) * SCRATCH_NBYTES
        return memoryview(self._memory)[start : start + SCRATCH_NBYTES]

    def fence(self) -> None:
        """Order this rank's writes before its later reads.

        One rank writes its word and then reads who sleeps; another writes that it sleeps and then reads the word.
        Without a fence each could miss the other's write.  Acquiring a lock is an atomic operation and orders memory.
        """
        with self._fence_lock:
            pass

    def ring(self, rank: int, reason: int) -> None:
        """Wake a rank if it sleeps for this reason.  Call `fence` between the write and this."""
        if self.sleeping[rank] == reason:
            self._bells[rank].release()

    def ring_local(self, reason: int) -> None:
        """Wake the ranks of this machine that sleep for this reason; call it after the write that they wait for."""
        self.fence()
        for rank in self.local_ranks:
            self.ring(rank, reason)

    def ring_all(self) -> None:
        """Wake every sleeping rank."""
        self.fence()
        for rank in range(self.size):
            if self.sleeping[rank] != AWAKE:
                self._bells[rank].release()

    def wait(
        self, rank: int, is_ready: Callable[[], bool], reason: int, check_peers: Callable[[], None], poll: float
    ) -> None:
        """Wait until a condition on the counters holds.

        Parameters
        ----------
        rank : int
            Rank that waits.
        is_ready : callable
            Returns whether the condition holds: cheap, and monotonic.
        reason : int
            Reason that is published while the rank sleeps.
        check_peers : callable
            Called every ``poll`` seconds; raises, or ends the process, when a peer has died.
        poll : float
        """
        if is_ready():
            return
        if self.spin:
            self.core[rank] = _get_current_core()
            deadline = perf_counter() + self.spin
            while perf_counter() < deadline:
                if is_ready():
                    return
                os.sched_yield()  # the scheduler may have put the peer on this very core
        bell = self._bells[rank]
        next_check = perf_counter() + poll
        try:
            while True:
                self.sleeping[rank] = reason
                self.fence()
                if is_ready():
                    return
                rang = bell.wait(poll)
                if not rang or perf_counter() > next_check:  # signals, too, end the wait
                    check_peers()
                    next_check = perf_counter() + poll
                if rang and self.spin:
                    self._leave_shared_core(rank)
        finally:
            self.sleeping[rank] = AWAKE

    def _leave_shared_core(self, rank: int) -> None:
        """Move to a core without another rank, if there is one.

        Schedulers tend to wake a process on the core of the process that woke it.  There the two would take turns, each
        spinning while the other waits for the core.  The process is moved, and not bound afterwards: other programs may
        need the cores too.
        """
        core = self.core[rank] = _get_current_core()
        busy_cores = {self.core[r] for r in range(self.size) if r != rank and self.sleeping[r] == AWAKE}
        if core not in busy_cores:
            return
        allowed = os.sched_getaffinity(0)
        free = {number for number in allowed if number + 1 not in busy_cores}
        if free:
            with defer_signals():  # an interrupt in between would leave it bound
                os.sched_setaffinity(0, free)
                os.sched_setaffinity(0, allowed)
            self.core[rank] = _get_current_core()


_libc = ctypes.CDLL(None, use_errno=True)
_CLOCK, _sem_wait = time.CLOCK_MONOTONIC, cast(Any, getattr(_libc, "sem_clockwait", None))
if _sem_wait is None:  # glibc before 2.30: setting back the system's clock lengthens a wait
    _CLOCK, _sem_wait = time.CLOCK_REALTIME, lambda semaphore, clock, until: _libc.sem_timedwait(semaphore, until)
_getcpu = getattr(_libc, "sched_getcpu", None)  # Linux only


def _get_current_core() -> int:
    """Return the number of the current core, counted from 1; 0 if the system does not provide it."""
    return _getcpu() + 1 if _getcpu is not None else 0


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("ns", ctypes.c_long)]


class Semaphore:
    """An unnamed semaphore in shared memory: a rank's bell, or a lock between processes, which starts locked.

    A named semaphore would leave its name behind if the process were killed before it is unlinked.

    Parameters
    ----------
    memory : buffer
    offset : int
        First byte in the memory.
    initialised : bool
        Whether another process has initialised it.
    """

    def __init__(self, memory: Any, offset: int, initialised: bool):
        self._memory = (ctypes.c_char * _SEMAPHORE_NBYTES).from_buffer(memory, offset)  # this reference keeps it mapped
        self._semaphore = ctypes.c_void_p(ctypes.addressof(self._memory))
        self._deadline = _Timespec()
        self._until = ctypes.byref(self._deadline)
        if not initialised and _libc.sem_init(self._semaphore, 1, 0):
            raise OSError(ctypes.get_errno(), "a semaphore could not be initialised")

    def release(self) -> None:
        """Increment the semaphore: wake the process that waits, or the next one that does."""
        _libc.sem_post(self._semaphore)

    def acquire(self, seconds: float) -> bool:
        """Decrement the semaphore; return False if it is zero for ``seconds``, or a signal handler runs."""
        deadline, until = self._deadline, time.clock_gettime(_CLOCK) + seconds
        deadline.seconds = seconds_part = int(until)
        deadline.ns = int((until - seconds_part) * 1e9)
        return not _sem_wait(self._semaphore, _CLOCK, self._until)

    def wait(self, seconds: float) -> bool:
        """Decrement the semaphore, or wait for a signal handler to run; return False after ``seconds``."""
        return self.acquire(seconds) or ctypes.get_errno() != errno.ETIMEDOUT
