"""Start, liveness and end of the worker processes of a host, in the process that starts them."""

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

from synkhronos.ranks import worker_main
from synkhronos.ranks.control_memory import ControlMemory
from synkhronos.ranks.errors import UNKNOWN_EXIT_CODE
from synkhronos.ranks.fork_server import ForkServer
from synkhronos.ranks.rank import Rank


class WorkerProcesses:
    """Worker processes of this host, and this process's ends of the socket pairs over which they receive segments.

    ``control_file`` is the file of the control memory, for workers that are new processes; None for forks, which
    inherit it.  With a ``fork_server`` they are its forks.  ``pids`` and ``channels`` are by rank.
    """

    def __init__(
        self,
        master_rank: int,
        control: ControlMemory,
        control_file: io.FileIO | None,
        fork_server: ForkServer | None = None,
    ):
        self._master_rank, self._control, self._control_file = master_rank, control, control_file
        self._fork_server = fork_server
        self.pids: dict[int, int] = {}
        self.channels: dict[int, socket.socket] = {}

    def start(self, profile: bool, master: Rank | None = None, newest_key: int = 0) -> None:
        """Start all workers.

        Signals must be deferred: an exception could leave a child unrecorded, or let it continue as a second master.
        For the parameters see `worker_main`.
        """
        for rank in self._control.local_ranks:
            if rank != self._master_rank:
                self._start_worker(rank, profile, master, newest_key)

    def _start_worker(self, rank: int, profile: bool, master: Rank | None, newest_key: int) -> None:
        """Fork a worker, or start it as a new process, and record its process id and channel."""
        own_end, worker_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Descriptors of standard streams that the user has closed are free, but a worker uses them for its streams.
        own_end, worker_end = _move_above_standard_streams(own_end), _move_above_standard_streams(worker_end)
        self.channels[rank] = own_end
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()  # otherwise the child would also write the buffered output
        from_main_thread = threading.current_thread() is threading.main_thread()
        arguments = worker_main.WorkerArguments(rank, self._master_rank, profile, os.getpid(), from_main_thread)
        with worker_end, warnings.catch_warnings():
            # Python and JAX warn of forking beside threads: a lock that one of them holds stays locked in the child.
            # The worker acquires no lock of the master: it opens its own streams, never runs the master's exit
            # handlers, and refuses to use a JAX that was initialized before.
            # A fork goes on ignoring warnings, as each rank would print the same ones.
            warnings.simplefilter("ignore")
            if self._control_file is not None and self._fork_server is not None:
                pid = self._fork_server.start_worker(self._control, self._control_file, worker_end, arguments)
            elif self._control_file is not None:
                pid = worker_main.spawn_worker(self._control, self._control_file, worker_end, arguments)
            elif not (pid := os.fork()):
                worker_main.main(self._control, worker_end, arguments, master, newest_key)
        self.pids[rank] = pid

    def find_unstarted_rank(self) -> int | None:
        """Return the first rank of this host whose worker was not started, or None if all were."""
        return next((r for r in self._control.local_ranks if r not in (*self.pids, self._master_rank)), None)

    def has_any_exited(self) -> bool:
        """Whether a worker has exited; its exit status is not collected."""
        return any(_has_exited(pid) for pid in list(self.pids.values()))

    def reap(self) -> tuple[int, int, int] | None:
        """Return rank, process id and exit code of one worker that has exited, or None if all live.

        A second call returns `UNKNOWN_EXIT_CODE` for the same worker.
        """
        for rank, pid in list(self.pids.items()):  # another thread may be ending them
            code = _collect_exit_code(pid)
            if code is not None:
                return rank, pid, code
        return None

    def shut_down(self, grace_seconds: float, should_kill: Callable[[], bool]) -> None:
        """Wait until all workers have exited.  Kill them after ``grace_seconds``, or once ``should_kill()`` is True."""
        deadline = time.monotonic() + grace_seconds
        while self.pids:
            rank, pid = next(iter(self.pids.items()))
            while _collect_exit_code(pid) is None:
                if should_kill() or time.monotonic() > deadline:
                    with contextlib.suppress(ProcessLookupError, ChildProcessError):  # another wait() has collected it
                        os.kill(pid, signal.SIGKILL)
                        os.waitpid(pid, 0)
                    break
                time.sleep(0.001)
            self.pids.pop(rank, None)

    def close_channels(self) -> None:
        """Close the channels."""
        for channel in self.channels.values():
            channel.close()
        self.channels.clear()


def _has_exited(pid: int) -> bool:
    """Whether a child process has exited; its exit status stays available to `os.waitpid`."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _collect_exit_code(pid: int) -> int | None:
    """Return a child's exit code, or None if it lives; negative: a signal; `UNKNOWN_EXIT_CODE`: collected elsewhere."""
    try:
        exited_pid, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return UNKNOWN_EXIT_CODE  # another wait() has collected it, or SIGCHLD is ignored
    return os.waitstatus_to_exitcode(status) if exited_pid else None


def _move_above_standard_streams(end: socket.socket) -> socket.socket:
    if end.fileno() > 2:
        return end
    with end:
        return socket.socket(fileno=fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))
