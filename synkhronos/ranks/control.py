"""The memory and the semaphores through which ranks keep in step.

`Control`
    Counters, mailbox, slots and scratch memory that all ranks inherit at the fork, and the one way to wait.
`Bell`
    A semaphore on which a rank sleeps.
`Mutex`
    A semaphore that one process at a time may have.

Everything here is made by the master before it forks, and nothing has a name: the memory is anonymous, and the
semaphores lie in it.

Counters only grow, and each has one writer, so that reading them needs no lock.  A rank that waits for a counter
spins for some microseconds and then sleeps on its own semaphore, its *bell*; whoever writes the counter rings it
if it sleeps.  A bell is a hint and nothing more: the sleeper looks at the counter again, so that a spurious ring
does no harm, and it wakes by itself every `POLL` seconds to see whether its peers are alive.
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

#: Bytes of the mailbox; a longer command travels in a shared segment of its own.
MAILBOX = 1 << 18
#: Bytes of one slot: what a rank shows to the others at one step.
SLOT = 1 << 16
#: Bytes of one half of a rank's scratch memory, through which host collectives stream.
SCRATCH = 1 << 20
#: Seconds after which a sleeping rank looks whether its peers are alive.
POLL = 0.05
#: Seconds for which a rank looks at a counter before it sleeps, if every rank has a core of its own.  Longer than it
#: takes to wake a process whose core has gone to sleep (about 0.1 ms on a virtual machine): or two ranks that take
#: turns would each sleep every time.
SPIN = 250e-6

#: Why a rank sleeps; whoever changes something rings those who sleep for it.
AWAKE, FOR_COMMAND, FOR_STEP, FOR_JOIN, FOR_TASK = range(5)

_FIXED = 10  # words before the counters of the ranks
_BELL = 64  # bytes for a semaphore: more than any system's takes, and a cache line


def _places(size: int, n_here: int, extra: int) -> tuple[int, int, int, int, int]:
    """Return where in the memory there are the mailbox, scratch memory, bells, other rooms' memory, and slots."""
    mailbox_at = _paged((_FIXED + 7 * size) * 8)
    scratch_at = mailbox_at + MAILBOX
    bells_at = scratch_at + 2 * n_here * SCRATCH
    extra_at = bells_at + (size + 1) * _BELL
    return mailbox_at, scratch_at, bells_at, extra_at, _paged(extra_at + extra)


def _paged(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Control:
    """What the ranks of one session share from the fork on.

    Parameters
    ----------
    size : int
        The number of ranks.
    spin : float
        Seconds for which to look at a counter before sleeping.
    file : int, optional
        A file descriptor of shared memory in which to lie, for processes that don't inherit this one's.
    made : bool
        Whether another process has made it there already.
    here : range, optional
        The ranks of this machine, if there are others: what these do is written here by `synkhronos.hosts`.
    extra : int
        Bytes of memory for that room.

    Attributes
    ----------
    words : memoryview
        Unsigned 64-bit words, among them (by the constants of this class) the number of the last command posted,
        of the last that failed, and the length of the message in the mailbox.  `agreement` has the last two of them.
    done, arrived, sleeping, report_length, core, committed, progress : memoryview
        One word a rank: the last command it finished, the last step it reached, why it sleeps, how long its report of
        a failure is, on which core it was last seen (counted from 1), the last command whose effects it has applied,
        when it last said that it goes on (nanoseconds of the monotonic clock).
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
        #: Who has it may write down how far all ranks had come in a command that failed: see `agreement`.
        self.closing = Mutex(self._memory, bells_at + size * _BELL, made)
        if not made:
            self.closing.ring()
        self._fence_lock = threading.Lock()
        # This machine's come first.
        starts = [self._slots_at + 3 * ((rank - self.here.start) % size) * SLOT for rank in range(size)]
        whole = memoryview(self._memory)
        self._slots = [[whole[at + i * SLOT : at + (i + 1) * SLOT] for i in range(3)] for at in starts]

    @staticmethod
    def create(size: int, n_here: int, extra: int = 0) -> io.FileIO:
        """Make the memory for some ranks of this machine and their peers on others, as an open file.

        Of the slots of those elsewhere, a page each is allocated: ranks hardly ever show each other more.
        """
        slots_at = _places(size, n_here, extra)[-1]
        others = range(slots_at + 3 * n_here * SLOT, slots_at + 3 * size * SLOT, SLOT)
        return create_unlinked(others.stop, [range(others.start), *(range(at, at + mmap.PAGESIZE) for at in others)])

    def slot(self, rank: int, which: int) -> memoryview:
        """Return a slot of a rank: 0 and 1 for steps, in turn, 2 for its report."""
        return self._slots[rank][which]

    def scratch(self, rank: int, half: int) -> memoryview:
        """Return one half of the scratch memory of a rank of this machine."""
        at = self._scratch_at + (2 * (rank - self.here.start) + half) * SCRATCH
        return memoryview(self._memory)[at : at + SCRATCH]

    def fence(self) -> None:
        """Make what this rank wrote visible before it reads on.

        Needed between "write my word, then see who sleeps" here and "say that I sleep, then read the words" there:
        without it each could miss the other's write.  Taking a lock is an atomic operation, which orders memory.
        """
        with self._fence_lock:
            pass

    def ring(self, rank: int, reason: int) -> None:
        """Wake a rank, if it sleeps for this reason.  Call `fence` between the write and this."""
        if self.sleeping[rank] == reason:
            self._bells[rank].ring()

    def ring_here(self, reason: int) -> None:
        """Wake the ranks of this machine that sleep for this reason, after a write of what they wait for."""
        self.fence()
        for rank in self.here:
            self.ring(rank, reason)

    def ring_all(self) -> None:
        """Wake every rank that sleeps, for whatever reason."""
        self.fence()
        for rank in range(self.size):
            if self.sleeping[rank] != AWAKE:
                self._bells[rank].ring()

    def wait(self, me: int, ready: Callable[[], bool], reason: int, watch: Callable[[], None], poll: float) -> None:
        """Return when ``ready()`` is true: it looks at counters, is cheap, and stays true once it is.

        While rank ``me`` sleeps, ``reason`` is written down.  ``watch()`` is called every ``poll`` seconds; it raises,
        or ends the process, when there is nobody to wait for.
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
        """Move to a core where no other rank is, if there is one.

        A scheduler likes to wake a process on the core of the one that woke it.  There the two would take turns, each
        spinning while the other waits for the core.  The process is moved and let go again, not bound: other programs
        may need the machine too.
        """
        core = self.core[me] = current_core()
        taken = {self.core[r] for r in range(self.size) if r != me and self.sleeping[r] == AWAKE}
        if core not in taken:
            return
        allowed = os.sched_getaffinity(0)
        free = {number for number in allowed if number + 1 not in taken}
        if free:
            with defer_signals():  # or it would stay bound
                os.sched_setaffinity(0, free)
                os.sched_setaffinity(0, allowed)
            self.core[me] = current_core()


_libc = ctypes.CDLL(None, use_errno=True)
_CLOCK, _sem_wait = time.CLOCK_MONOTONIC, cast(Any, getattr(_libc, "sem_clockwait", None))
if _sem_wait is None:  # glibc before 2.30 knows the wall clock alone: where that is set back, a wait is so much longer
    _CLOCK, _sem_wait = time.CLOCK_REALTIME, lambda semaphore, clock, until: _libc.sem_timedwait(semaphore, until)
_getcpu = getattr(_libc, "sched_getcpu", None)  # only Linux says


def current_core() -> int:
    """Return the number of the core that this runs on, counted from 1; 0 where the system doesn't say."""
    return _getcpu() + 1 if _getcpu is not None else 0


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("ns", ctypes.c_long)]


class Bell:
    """A semaphore in memory that processes share, at some byte of it; perhaps another process has ``made`` it.

    One with a name, unlinked at once, would leave the name if the process were killed in between, and take a file
    descriptor or a place in /dev/shm.
    """

    def __init__(self, memory: Any, at: int, made: bool):
        self._memory = (ctypes.c_char * _BELL).from_buffer(memory, at)  # keeps it
        self._semaphore = ctypes.c_void_p(ctypes.addressof(self._memory))
        self._deadline = _Timespec()
        self._until = ctypes.byref(self._deadline)
        if not made and _libc.sem_init(self._semaphore, 1, 0):
            raise OSError(ctypes.get_errno(), "a semaphore can't be made")

    def ring(self) -> None:
        """Wake who waits, or the next who does."""
        _libc.sem_post(self._semaphore)

    def wait(self, seconds: float) -> bool:
        """Return when the bell rings, or a signal's handler has run; False if neither does in time."""
        return not (self._wait(seconds) and ctypes.get_errno() == errno.ETIMEDOUT)

    def _wait(self, seconds: float) -> int:
        """Return 0 when the semaphore could be lowered."""
        deadline, until = self._deadline, time.clock_gettime(_CLOCK) + seconds
        deadline.seconds = whole = int(until)
        deadline.ns = int((until - whole) * 1e9)
        return int(_sem_wait(self._semaphore, _CLOCK, self._until))


class Mutex(Bell):
    """A semaphore that one process at a time may have, once it has been rung for the first time."""

    def take(self, seconds: float) -> bool:
        """Whether this process has got it within some seconds; `ring` gives it back."""
        return self._wait(seconds) == 0
