"""The worker processes of an experiment, as their controller sees them.

Two kinds of messages tell of failures: a worker's own report, which says why its program failed, and the message of
worker 0, the master of the ranks, about a worker that was killed.  The other workers' sockets merely close.  A worker
that sees its peer's end may say so before the peer's own report has arrived; so the group waits until all processes
have ended, reads what is left in the sockets, and only then decides what failed first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from synkhronos.compat.platoon.channel import sockets
from synkhronos.compat.platoon.channel.sockets import POLL
from synkhronos.compat.platoon.program import Hosts
from synkhronos.ranks.errors import cause_of_death
from synkhronos.ranks.segments import create_unlinked

#: Seconds that workers get to end by themselves after one has failed.
GRACE = 10.0


@dataclasses.dataclass(frozen=True)
class WorkersPlan:
    """Settings of the workers' processes, which get them as JSON."""

    controller: int
    address: str
    script: str
    arguments: list[str]
    devices: list[str]
    #: Paths of the workers' output, without ``.out`` and ``.err``.
    logs: list[str]
    #: Fields of `Hosts`; None on one machine.
    hosts: dict[str, Any] | None


@dataclasses.dataclass(frozen=True)
class Failure:
    """The end of an experiment.

    Attributes
    ----------
    worker : int
        Rank of the worker that failed.
    status : int
        Exit status of the experiment.
    message : str
        What happened to which worker.
    is_own : bool
        Whether the worker itself has sent the report.
    """

    worker: int
    status: int
    message: str
    is_own: bool


class WorkerGroup:
    """The workers of one host.

    On the first host, or the only one, the group starts worker 0, the master of all ranks.  On another the first worker
    has started this process, and the group ends with its last worker.

    Parameters
    ----------
    address : str
        Where the workers connect.
    experiment_name : str
    arguments : list of str
        Each is split as a shell does.
    devices : list of str
        Of this host.
    log_directory : str
    hosts : Hosts or None
    """

    def __init__(
        self,
        address: str,
        experiment_name: str,
        arguments: Sequence[str],
        devices: Sequence[str],
        log_directory: str,
        hosts: Hosts | None,
    ):
        folder = Path(log_directory or ".")
        folder.mkdir(parents=True, exist_ok=True)
        n_local = len(devices)
        self._is_first = hosts is None or not hosts.index
        if hosts is not None:
            devices = [device for of_host in hosts.devices.values() for device in of_host]
        is_unique = len(set(devices)) == len(devices)
        logs = [
            str(folder / (f"worker_{device}" if is_unique else f"worker_{device}-{rank}"))
            for rank, device in enumerate(devices)
        ]
        words = [word for text in arguments for word in shlex.split(text)]
        named = None if hosts is None else dataclasses.asdict(hosts)
        self._plan = WorkersPlan(
            os.getpid(), address, f"{experiment_name}_worker.py", words, list(devices), logs, named
        )
        self._processes = [0] * n_local
        self._listener = sockets.listen(address)
        self._connections: dict[Connection, int] = {}
        self._failures: list[Failure] = []
        self._memory: dict[str, Any] = {}
        self._master: subprocess.Popen[bytes] | None = None
        #: File descriptor that becomes ready when worker 0 ends, where this group has started it.
        self._ends: list[int] = []
        self._deadline = float("inf")

    def start(self) -> list[int]:
        """Start the workers; return their processes, in rank order.

        This process exits with status 3 if they can't be started.
        """
        if self._is_first:
            self._start_master()
        while not all(self._processes):
            ready = wait([self._listener, *self._ends])
            if self._listener not in ready:
                log = Path(f"{self._plan.logs[0]}.err").read_text()
                sys.stderr.write(f"ERROR! the workers did not start:\n{log}")
                sys.exit(3)
            connection = sockets.accept(self._listener)
            if connection is not None:
                local_rank, process = json.loads(connection.recv_bytes())
                self._connections[connection] = self._processes[local_rank] = process
        return self._processes

    def _start_master(self) -> None:
        plan = self._plan
        code = "from synkhronos.compat.platoon import ranks; ranks.main()"
        command = [sys.executable, "-u", "-c", code, json.dumps(dataclasses.asdict(plan))]
        with open(f"{plan.logs[0]}.out", "wb") as out, open(f"{plan.logs[0]}.err", "wb") as err:
            # A session of its own: a terminal's Ctrl-C reaches the launcher alone.
            self._master = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
        self._ends.append(os.pidfd_open(self._master.pid))

    def serve(self, answer: Callable[[Any, int, Any], Any]) -> Failure | None:
        """Answer requests until all workers have ended; return the first failure.

        Parameters
        ----------
        answer : callable
            Called with a request, the worker's process, and further information.
        """
        while self._is_first or self._connections:
            ready = wait([*self._connections, *self._ends], max(POLL, self._seconds_left()))
            if set(self._ends) & set(ready):
                break
            if self._seconds_left() == 0:
                self.end()
            for connection in self._connections.keys() & set(ready):
                query = self._receive(connection)
                if query is not None and not self._failures:
                    self._reply(connection, query, answer)
        return self._first_failure()

    def _seconds_left(self) -> float:
        return max(0.0, min(1.0, self._deadline - time.monotonic()))

    def _receive(self, connection: Connection) -> Any:
        """Return a worker's next request; None if it was a report, or the worker has ended."""
        try:
            query = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            del self._connections[connection]
            return None
        if "end" in query:
            del self._connections[connection]
            return None
        if "failure" not in query:
            return query
        self._failures.append(Failure(**query["failure"]))
        self._deadline = min(self._deadline, time.monotonic() + GRACE)
        return None

    def _reply(self, connection: Connection, query: Any, answer: Callable[[Any, int, Any], Any]) -> None:
        if "memory" in query:
            self._send_memory(connection, **query["memory"])
            return
        response = json.dumps(answer(query["req"], query["worker_id"], query["req_info"]))
        with contextlib.suppress(OSError):  # the worker has ended
            connection.send_bytes(response.encode())

    def _send_memory(self, connection: Connection, name: str, nbytes: int) -> None:
        """Send a worker the shared memory of this name as an open file, which the first worker has created."""
        is_new = name not in self._memory
        if is_new:
            try:
                self._memory[name] = create_unlinked(max(1, nbytes)), nbytes
            except MemoryError as error:
                connection.send_bytes(json.dumps({"error": str(error)}).encode())
                return
        file, size = self._memory[name]
        if size != nbytes:
            text = f"{name} of this worker are {nbytes:,} bytes, those of the worker that came first {size:,}"
            connection.send_bytes(json.dumps({"error": text}).encode())
            return
        connection.send_bytes(json.dumps({"is_new": is_new}).encode())
        reduction.send_handle(connection, file.fileno(), self._connections[connection])

    def _first_failure(self) -> Failure | None:
        """Return the first failure of workers that have all ended, by their own reports where there are any."""
        for connection in list(self._connections):
            # Not until the end of the stream: a process that a worker has forked may hold its socket open.
            while connection in self._connections and connection.poll():
                self._receive(connection)
        status = 0 if self._master is None else self._master.wait()
        own = [failure for failure in self._failures if failure.is_own]
        if own:
            return own[0]
        if self._failures:
            return self._failures[-1]
        if self._master is None or status == 0:
            return None
        log = self._plan.logs[0]
        return Failure(0, 2, f"worker 0 (process {self._master.pid}) {cause_of_death(status)}; see {log}.err", False)

    def end(self) -> None:
        """Kill the workers that have not ended, and their children."""
        if self._master is None or self._master.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._master.pid, signal.SIGKILL)
        self._master.wait()
