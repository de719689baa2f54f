"""Shared counters and semaphores by which ranks synchronise.

The master creates them before it forks, and nothing has a name: the memory is anonymous, and the semaphores lie in it.

Counters only grow, and each has one writer, so reading them needs no lock.  A rank that waits for a counter spins for
some microseconds and then sleeps on its own semaphore, its *bell*; whoever writes the counter rings the bell if the
rank sleeps.  A ring is only a hint: the sleeper checks the counter again, so a spurious ring does no harm, and it wakes
every `POLL` seconds to check whether its peers are alive.
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
MAILBOX = 1 << 18
#: Number of bytes of a slot, in which a rank publishes a value at a step.
SLOT = 1 << 16
#: Index of a rank's slot for its failure report; steps use slots 0 and 1 in turn.
_REPORT = 2
#: Number of bytes of one half of a rank's scratch memory, through which collectives on the host stream.
SCRATCH = 1 << 20
#: Seconds after which a sleeping rank checks whether its peers are alive.
POLL = 0.05
#: Seconds for which a rank spins on a counter before it sleeps, if every rank has a core of its own.  Longer than the
#: wake-up of a process whose core is idle (about 0.1 ms on a virtual machine): otherwise two ranks that take turns
#: would sleep every time.
SPIN = 250e-6

#: Reasons for which a rank sleeps; a writer rings the ranks that sleep for its reason.
AWAKE, FOR_COMMAND, FOR_STEP, FOR_JOIN, FOR_TASK = range(5)

_FIXED = 10  # words before the counters of the ranks
_BELL = 64  # bytes for a semaphore: more than any system's takes, and a cache line


def _places(size: int, n_here: int, extra: int) -> tuple[int, int, int, int, int]:
    """Return the offsets of the mailbox, scratch memory, bells, the link's memory, and slots."""
    mailbox_at = _paged((_FIXED + 7 * size) * 8)
    scratch_at = mailbox_at + MAILBOX
    bells_at = scratch_at + 2 * n_here * SCRATCH
    extra_at = bells_at + (size + 1) * _BELL
    return mailbox_at, scratch_at, bells_at, extra_at, _paged(extra_at + extra)


def _paged(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Control:
    """Memory that the ranks of a session share from the fork on, and the wait for a change of it.

    Parameters
    ----------
    size : int
        Number of ranks.
    spin : float
        Seconds for which to spin on a counter before sleeping.
    file : int, optional
        File descriptor of shared memory to use, for processes that do not inherit this one's.
    made : bool
        Whether another process has initialised that memory.
    here : range, optional
        Ranks of this machine; the agents of `synkhronos.hosts` write the counters of the others.  Default: all.
    extra : int
        Number of bytes for the link.

    Attributes
    ----------
    words : memoryview of uint64
        Single words, indexed by the constants of this class: the last command posted, the last that failed, the length
        of the message in the mailbox, and others.  `CLOSED` and the next word belong to `agreement`.
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
    """

    POSTED, FAILED, LENGTH, ANNOUNCED, PLAN, ENDING, NEWS, SENT, CLOSED = range(9)

    def __init__(
        self,
        size: int,
        spin: float,
        file: int = -1,
        made: bool = False,
        here: range | None = None,
        extra: int = 0,
    ):
        self.size = size
        self.here = range(size) if here is None else here
        self.spin = spin
        n_words = _FIXED + 7 * size
        places = _places(size, len(self.here), extra)
        mailbox_at, self._scratch_at, bells_at, extra_at, self._slots_at = places
        nbytes = self._slots_at + 3 * size * SLOT
        self._memory = mmap.mmap(-1, nbytes) if file < 0 else map_file(file, nbytes)
        self.words = memoryview(self._memory)[: n_words * 8].cast("Q")
        self.done, self.arrived, self.sleeping, self.report_length, self.core, self.committed, self.progress = (
            self.words[_FIXED + i * size : _FIXED + (i + 1) * size] for i in range(7)
        )
        self.mailbox = memoryview(self._memory)[mailbox_at : mailbox_at + MAILBOX]
        self.extra = memoryview(self._memory)[extra_at : extra_at + extra]
        self._bells = [Bell(self._memory, bells_at + rank * _BELL, made) for rank in range(size)]
        #: Its owner may close a failed command: see `agreement`.
        self.closing = Mutex(self._memory, bells_at + size * _BELL, made)
        if not made:
            self.closing.ring()
        self._fence_lock = threading.Lock()
        # The slots of this machine's ranks come first.
        starts = [self._slots_at + 3 * ((rank - self.here.start) % size) * SLOT for rank in range(size)]
        whole = memoryview(self._memory)
        self._slots = [[whole[at + i * SLOT : at + (i + 1) * SLOT] for i in range(3)] for at in starts]

    @staticmethod
    def create(size: int, n_here: int, extra: int = 0) -> io.FileIO:
        """Create the memory as an open file, for ``n_here`` ranks of this machine and their peers on others.

        One page of each slot of the others is allocated: values that ranks publish are rarely longer.
        """
        slots_at = _places(size, n_here, extra)[-1]
        others = range(slots_at + 3 * n_here * SLOT, slots_at + 3 * size * SLOT, SLOT)
        return create_unlinked(others.stop, [range(others.start), *(range(at, at + mmap.PAGESIZE) for at in others)])

    def slot(self, rank: int, which: int) -> memoryview:
        """Return a slot of a rank, of which steps use 0 and 1 in turn."""
        return self._slots[rank][which]

    def write_report(self, rank: int, report: bytes) -> None:
        """Store a rank's failure report."""
        self._slots[rank][_REPORT][: len(report)] = report
        self.report_length[rank] = len(report)

    def read_report(self, rank: int) -> bytes:
        """Return a rank's failure report; empty if it has none."""
        return bytes(self._slots[rank][_REPORT][: self.report_length[rank]])

    def scratch(self, rank: int, half: int) -> memoryview:
        """Return one half of the scratch memory of a rank of this machine."""
        at = self._scratch_at + (2 * (rank - self.here.start) + half) * SCRATCH
        return memoryview(self._memory)[at : at + SCRATCH]

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
            self._bells[rank].ring()

    def ring_here(self, reason: int) -> None:
        """Wake the ranks of this machine that sleep for this reason; call it after the write that they wait for."""
        self.fence()
        for rank in self.here:
            self.ring(rank, reason)

    def ring_all(self) -> None:
        """Wake every sleeping rank."""
        self.fence()
        for rank in range(self.size):
            if self.sleeping[rank] != AWAKE:
                self._bells[rank].ring()

    def wait(self, me: int, ready: Callable[[], bool], reason: int, watch: Callable[[], None], poll: float) -> None:
        """Wait until a condition on the counters holds.

        Parameters
        ----------
        me : int
            Rank that waits.
        ready : callable
            Returns whether the condition holds: cheap, and monotonic.
        reason : int
            Reason that is published while the rank sleeps.
        watch : callable
            Called every ``poll`` seconds; raises, or ends the process, when a peer has died.
        poll : float
        """
        if ready():
            return
        if self.spin:
            self.core[me] = current_core()
            deadline = perf_counter() + self.spin
            while perf_counter() < deadline:
                if ready():
                    return
                os.sched_yield()  # the scheduler may have put the peer on this very core
        bell = self._bells[me]
        look = perf_counter() + poll
        try:
            while True:
                self.sleeping[me] = reason
                self.fence()
                if ready():
                    return
                rang = bell.wait(poll)
                if not rang or perf_counter() > look:  # signals, too, end the wait
                    watch()
                    look = perf_counter() + poll
                if rang and self.spin:
                    self._leave_shared_core(me)
        finally:
            self.sleeping[me] = AWAKE

    def _leave_shared_core(self, me: int) -> None:
        """Move to a core without another rank, if there is one.

        Schedulers tend to wake a process on the core of the process that woke it.  There the two would take turns, each
        spinning while the other waits for the core.  The process is moved, and not bound afterwards: other programs may
        need the cores too.
        """
        core = self.core[me] = current_core()
        taken = {self.core[r] for r in range(self.size) if r != me and self.sleeping[r] == AWAKE}
        if core not in taken:
            return
        allowed = os.sched_getaffinity(0)
        free = {number for number in allowed if number + 1 not in taken}
        if free:
            with defer_signals():  # an interrupt in between would leave it bound
                os.sched_setaffinity(0, free)
                os.sched_setaffinity(0, allowed)
            self.core[me] = current_core()


_libc = ctypes.CDLL(None, use_errno=True)
_CLOCK, _sem_wait = time.CLOCK_MONOTONIC, cast(Any, getattr(_libc, "sem_clockwait", None))
if _sem_wait is None:  # glibc before 2.30 has the wall clock alone: setting it back lengthens a wait
    _CLOCK, _sem_wait = time.CLOCK_REALTIME, lambda semaphore, clock, until: _libc.sem_timedwait(semaphore, until)
_getcpu = getattr(_libc, "sched_getcpu", None)  # Linux only


def current_core() -> int:
    """Return the number of the current core, counted from 1; 0 where the system does not tell."""
    return _getcpu() + 1 if _getcpu is not None else 0


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("ns", ctypes.c_long)]


class Bell:
    """An unnamed semaphore in shared memory, on which one process sleeps.

    A named semaphore would leave its name behind if the process were killed before it is unlinked.

    Parameters
    ----------
    memory : buffer
    at : int
        Offset in bytes.
    made : bool
        Whether another process has initialised it.
    """

    def __init__(self, memory: Any, at: int, made: bool):
        self._memory = (ctypes.c_char * _BELL).from_buffer(memory, at)  # a reference keeps the memory mapped
        self._semaphore = ctypes.c_void_p(ctypes.addressof(self._memory))
        self._deadline = _Timespec()
        self._until = ctypes.byref(self._deadline)
        if not made and _libc.sem_init(self._semaphore, 1, 0):
            raise OSError(ctypes.get_errno(), "a semaphore could not be initialised")

    def ring(self) -> None:
        """Wake the process that waits, or the next one that does."""
        _libc.sem_post(self._semaphore)

    def wait(self, seconds: float) -> bool:
        """Wait for a ring, or for a signal handler to run; return False after ``seconds`` without either."""
        return not (self._wait(seconds) and ctypes.get_errno() == errno.ETIMEDOUT)

    def _wait(self, seconds: float) -> int:
        """Return 0 once the semaphore has been decremented."""
        deadline, until = self._deadline, time.clock_gettime(_CLOCK) + seconds
        deadline.seconds = whole = int(until)
        deadline.ns = int((until - whole) * 1e9)
        return int(_sem_wait(self._semaphore, _CLOCK, self._until))


class Mutex(Bell):
    """A lock between processes, released by `ring`; it starts locked."""

    def take(self, seconds: float) -> bool:
        """Acquire the lock; return False if it is not free within ``seconds``."""
        return self._wait(seconds) == 0
