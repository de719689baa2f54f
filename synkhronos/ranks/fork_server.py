"""A process that imports packages once, and forks workers which have them.

A worker that is a new process spends most of its start on importing NumPy and the graph library.  The process that
starts workers can't always be forked instead: an agent, for example, has initialized MPI.  As in `multiprocessing`, a
separate process is forked, the fork server::

    agent ──spawn──> fork server: imports the packages, waits
      │  request, control memory, channel  │
      │ ─────────────────────────────────> │ ──fork──> child ──fork──> worker
      │ <──────────────── its process id ──────────────────────────────── │
      └── parent of the worker: the child has exited, and the agent is the nearest subreaper
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import json
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from synkhronos.ranks import worker_main
from synkhronos.ranks.child_process import exit_with_parent, spawn
from synkhronos.ranks.control_memory import ControlMemory
from synkhronos.ranks.segments import is_peer_closed
from synkhronos.ranks.thread_limit import ThreadLimit

_PR_SET_CHILD_SUBREAPER = 36
#: Seconds between two calls that keep the caller's connections alive during imports.
_POLL_SECONDS = 0.05


class ForkServer:
    """A server process of this one, whose workers become children of this process.

    ``n_local_ranks`` is the number of ranks among which this host's cores are divided.  The server has this process's
    present environment, working directory and `sys.path`.
    """

    def __init__(self, n_local_ranks: int):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._channel, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with server_end:
            fd = server_end.fileno()
            self._pid = spawn(__name__, "run_server", [fd, os.getpid(), n_local_ranks], [fd], True, os.environ)

    @property
    def has_exited(self) -> bool:
        """Whether the server has exited, as after a kill."""
        return is_peer_closed(self._channel)

    def import_modules(self, modules: Sequence[str], keep_alive: Callable[[], None]) -> None:
        """Make the server import modules, and call ``keep_alive`` repeatedly until it has imported them."""
        self._channel.sendall(json.dumps(modules).encode())
        while not select.select([self._channel], [], [], _POLL_SECONDS)[0]:
            keep_alive()
        self._receive()

    def start_worker(
        self,
        control: ControlMemory,
        control_file: io.FileIO,
        channel: socket.socket,
        arguments: worker_main.WorkerArguments,
    ) -> int:
        """Start a worker like `worker_main.spawn_worker`, and return its process id."""
        request = json.dumps([worker_main.describe_control_memory(control), arguments]).encode()
        socket.send_fds(self._channel, [request], [control_file.fileno(), channel.fileno()])
        return self._receive()

    def _receive(self) -> int:
        """Return the number that the server or a worker sends.  Raise RuntimeError if the server has exited."""
        number = self._channel.recv(32)
        if not number:
            raise RuntimeError(f"the fork server of this host (process {self._pid}) has exited")
        return int(number)

    def close(self) -> None:
        """End the server process; its workers continue."""
        self._channel.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def run_server() -> None:
    """Run the server that `ForkServer` has started, until the channel is closed."""
    channel_fd, parent_pid, n_local_ranks = json.loads(sys.argv[2])
    exit_with_parent(parent_pid, True)
    ThreadLimit(n_local_ranks, sets_environment=True)  # libraries read its variables when they are imported
    channel = socket.socket(fileno=channel_fd)
    while True:
        request, fds, _, _ = socket.recv_fds(channel, 1 << 20, 2)
        if not request:
            return
        if not fds:
            for module in json.loads(request):
                with contextlib.suppress(Exception):  # then workers that need it raise its error
                    importlib.import_module(module)
            channel.send(b"0")
            continue
        if not (child := os.fork()):
            child = os.getpid()
            if os.fork():
                os._exit(0)
            _run_worker(channel, parent_pid, child, fds, request)
        if os.waitpid(child, 0)[1]:  # it could not fork: the caller would wait forever
            return
        for fd in fds:
            os.close(fd)


def _run_worker(
    channel: socket.socket, parent_pid: int, child_pid: int, fds: Sequence[int], request: bytes
) -> NoReturn:
    """Send this process's id, and run a worker, once the child of the server has exited, which forked this process."""
    while (parent := os.getppid()) == child_pid:
        time.sleep(0.0005)
    if parent != parent_pid:
        os._exit(1)
    channel.send(str(os.getpid()).encode())
    channel.close()
    worker_main.run_with_inherited_files(fds, *json.loads(request))
