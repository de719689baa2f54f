"""Lets the master hear of a worker's death while it is busy with its own part of a command.

`DeathWatch`
    Raises `Bereft` in the master's own code when a worker has died.
`Bereft`
    What is raised; never leaves the library.
`has_ended`
    Whether a child has.

A master that waits looks at its workers' lives every few milliseconds.  One that computes or compiles does not look,
and would hear of a death only when it has done its own part.  So the kernel tells it, by a signal when the other end of
a worker's socket pair closes.  The signal is SIGURG, which does nothing to a process that has no handler for it: a late
one can't hurt.  Where something is in the way (another handler, a fork in a thread) nothing else changes: the death is
noticed when the master waits next.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from synkhronos.ranks.interrupts import handler_of, put_back, set_handler

#: Seconds that a process may take from closing its files to its end.
_LAST_MOMENTS = 1.0
# What Python's fcntl has no names for: Linux' numbers are the same on all its processors.
_F_SETSIG, _F_SETOWN_EX, _F_OWNER_TID = 10, 15, 0


class Bereft(BaseException):
    """A worker has died while the master did its own part."""


class DeathWatch:
    """Raises `Bereft` in the main thread when a worker dies while the main thread is ``at_work``.

    Parameters
    ----------
    unfinished : callable
        Says whether, though no command runs, something is under way in which workers have a part: what the user reads
        of it would be wrong.
    fail : callable
        Raises what the user gets to see then.
    lost : callable
        Says what has happened to another host, or to a rank there; None if nothing has.
    """

    def __init__(self, unfinished: Callable[[], bool], fail: Callable[[], None], lost: Callable[[], object]) -> None:
        self._unfinished = unfinished
        self._fail = fail
        self._lost = lost
        #: The thread that does the master's part of a command, 0 when none does.
        self.at_work = 0
        #: Whether it has raised, for whoever finds that something has swallowed the exception.
        self.heard = False
        self._owner = os.getpid()
        self._watched: dict[int, socket.socket] = {}
        self._before: Any = None

    def start(self, workers: Mapping[int, socket.socket], agent: socket.socket | None = None) -> None:
        """Watch processes, each with this end of its socket pair, and this host's agent, if there is one."""
        if not (workers or agent) or threading.current_thread() is not threading.main_thread():
            return
        before = handler_of(signal.SIGURG)
        if isinstance(getattr(before, "__self__", None), DeathWatch):
            before = signal.SIG_DFL  # of ranks that were closed in a thread
        if before not in (signal.SIG_DFL, signal.SIG_IGN):
            return  # somebody else's
        set_handler(signal.SIGURG, self._hear)
        self._before = before
        self._watched.update(workers)
        for channel in [*workers.values(), *([agent] if agent else [])]:
            with contextlib.suppress(OSError):
                # To this thread and no other: it may be in a system call, which only its own signals cut short.
                fcntl.fcntl(channel, _F_SETOWN_EX, struct.pack("ii", _F_OWNER_TID, self._owner))
                fcntl.fcntl(channel, _F_SETSIG, signal.SIGURG)
                fcntl.fcntl(channel, fcntl.F_SETFL, fcntl.fcntl(channel, fcntl.F_GETFL) | os.O_ASYNC)

    def stop(self) -> None:
        """Leave the signal as it was before."""
        self._watched.clear()
        self._unfinished = bool  # and no reference to the session, which refers to this
        self._fail = lambda: None
        self._lost = lambda: None
        if self._before is not None and threading.current_thread() is threading.main_thread():
            put_back(signal.SIGURG, self._hear, self._before)
            self._before = None

    def _hear(self, number: int, frame: FrameType | None) -> None:
        # Handlers run in the main thread, whichever thread is at work.
        if os.getpid() != self._owner:
            return
        if self.at_work == threading.get_ident():
            if self._is_bereft():
                self.at_work, self.heard = 0, True
                raise Bereft
        elif self._unfinished() and self._is_bereft():
            self._fail()

    def _is_bereft(self) -> bool:
        """Whether a worker has ended: not one that has merely closed its files."""
        if self._lost() is not None:
            return True
        poll = select.poll()
        pids = {}
        for pid, channel in self._watched.items():
            poll.register(channel, 0)
            pids[channel.fileno()] = pid
        gone = [pids[fd] for fd, event in poll.poll(0) if event & select.POLLHUP]
        deadline = time.monotonic() + _LAST_MOMENTS
        while gone and time.monotonic() < deadline:
            if any(has_ended(pid) for pid in gone):
                return True
            time.sleep(0.001)
        return False


def has_ended(pid: int) -> bool:
    """Whether a child has ended; how is left for others to ask."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True
