"""The worker processes, seen from the master.

`Workers`
    Forks them, sees whether they live, ends them.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable

from synkhronos.ranks import worker
from synkhronos.ranks.control import Control
from synkhronos.ranks.errors import UNKNOWN
from synkhronos.ranks.peer_watch import has_exited


class Workers:
    """The processes of all ranks but the master's, which is ``root``.

    ``file`` is where the control memory lies, for workers that start anew; None for copies of this process, which
    inherit it.
    """

    def __init__(self, root: int, control: Control, file: io.FileIO | None):
        self._root, self._control, self._file = root, control, file
        #: The processes that have not been seen to end, by rank.
        self.pids: dict[int, int] = {}
        #: This process' ends of the socket pairs through which they get open files, by rank.
        self.channels: dict[int, socket.socket] = {}

    def start(self, profile: bool) -> None:
        """Fork them all, with signals held back: a child must not be forgotten, nor begin as a second master."""
        for number in self._control.here:
            if number != self._root:
                self._start_one(number, profile)

    def _start_one(self, number: int, profile: bool) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Where the user closed standard streams, their numbers are free, but a worker uses them as what they are.
        ours, theirs = _above_standard_streams(ours), _above_standard_streams(theirs)
        self.channels[number] = ours
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()  # or what is buffered would be written twice
        master, in_main_thread = os.getpid(), threading.current_thread() is threading.main_thread()
        with theirs, warnings.catch_warnings():
            # Python and JAX warn of forking beside threads: a lock that one of them holds stays locked in the child.
            # The worker waits on no lock of the master's: it makes its own streams, never runs the master's exit, and
            # refuses to use a JAX that was started before.
            warnings.simplefilter("ignore")
            if self._file is not None:
                self.pids[number] = worker.start_anew(
                    number, self._root, self._control, self._file, theirs, profile, in_main_thread
                )
                return
            pid = os.fork()
            if pid == 0:
                worker.main(number, self._root, self._control, theirs, profile, master, in_main_thread)
        self.pids[number] = pid

    def has_any_exited(self) -> bool:
        """Whether one of them has ended."""
        return any(has_exited(pid) for pid in list(self.pids.values()))

    def first_dead(self) -> tuple[int, int, int] | None:
        """Return rank, process id and exit code of one that has ended, None if all live."""
        for number, pid in list(self.pids.items()):  # another thread may be ending them
            code = _exit_code(pid)
            if code is not None:
                return number, pid, code
        return None

    def end(self, seconds: float, is_hurried: Callable[[], bool]) -> None:
        """Return when all have ended; kill those that have not after some seconds, or as soon as there is a hurry."""
        deadline = time.monotonic() + seconds
        while self.pids:
            number, pid = next(iter(self.pids.items()))
            while _exit_code(pid) is None:
                if is_hurried() or time.monotonic() > deadline:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    _wait_for(pid)
                    break
                time.sleep(0.001)
            self.pids.pop(number, None)

    def close(self) -> None:
        """Let go of what led to them."""
        if self._file is not None:
            self._file.close()
        for channel in self.channels.values():
            channel.close()
        self.channels.clear()


def _exit_code(pid: int) -> int | None:
    """Return the exit code of a child that has ended (minus a signal's number; `UNKNOWN`), None for one that lives."""
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return UNKNOWN  # somebody else has waited for it, or the system was told not to keep it
    return os.waitstatus_to_exitcode(status) if found else None


def _wait_for(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _above_standard_streams(end: socket.socket) -> socket.socket:
    if end.fileno() > 2:
        return end
    with end:
        return socket.socket(fileno=fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))
