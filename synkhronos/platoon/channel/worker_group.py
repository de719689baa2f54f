"""The worker processes of an experiment, from the side of their controller.

A worker reports its own failure, with the reason.  If the worker was killed, worker 0, the ranks' master, reports it.
A report about a peer's end may arrive before that peer's own report.  The group therefore waits until all processes
have ended, and reads the rest of their messages, before it determines which failure to report.
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

from synkhronos.platoon.channel import sockets
from synkhronos.platoon.channel.controller_process import ExperimentHosts
from synkhronos.platoon.channel.sockets import POLL_SECONDS
from synkhronos.platoon.util import PlatoonError
from synkhronos.ranks.errors import describe_exit
from synkhronos.ranks.segments import create_unlinked_file

#: Seconds that workers have to end by themselves after one has failed.
GRACE_SECONDS = 10.0
#: Exit status of an experiment if a worker failed and reported no status.
UNREPORTED_FAILURE_STATUS = 2


@dataclasses.dataclass(frozen=True)
class WorkerSettings:
    """Settings of the workers' processes, sent as JSON."""

    #: Process ID of the controller.  The workers exit when the controller exits.
    controller_pid: int
    address: str
    script: str
    arguments: list[str]
    devices: list[str]
    #: Paths of the workers' output, without ``.out`` and ``.err``.
    log_paths: list[str]
    #: The hosts of the experiment; None on one machine.
    hosts: ExperimentHosts | None

    @classmethod
    def from_json(cls, text: str) -> WorkerSettings:
        """Return the settings that a JSON object of their fields describes."""
        fields = json.loads(text)
        return cls(**{**fields, "hosts": fields["hosts"] and ExperimentHosts(**fields["hosts"])})


@dataclasses.dataclass(frozen=True)
class WorkerFailure:
    """A worker's failure, which ends the experiment."""

    #: Exit status of the experiment.
    status: int
    #: Description of the failure, which names the worker.
    message: str
    #: Whether the worker itself has reported it.
    is_self_reported: bool


class WorkerGroup:
    """The workers of one host.

    On the first host the group starts worker 0, the master of all ranks.  On another host the first worker has started
    this process, and the group ends with its last worker.  The workers connect to ``address``; each of their
    ``arguments`` is split as by a shell, and ``devices`` are the devices of this host.
    """

    def __init__(
        self,
        address: str,
        experiment_name: str,
        arguments: Sequence[str],
        devices: Sequence[str],
        log_directory: str,
        hosts: ExperimentHosts | None,
    ):
        folder = Path(log_directory or ".")
        folder.mkdir(parents=True, exist_ok=True)
        self._is_first_host = hosts is None or not hosts.index
        all_devices = list(devices)
        if hosts is not None:
            all_devices = [device for host_devices in hosts.devices_by_host.values() for device in host_devices]
        is_unique = len(set(all_devices)) == len(all_devices)
        log_paths = [
            str(folder / (f"worker_{device}" if is_unique else f"worker_{device}-{rank}"))
            for rank, device in enumerate(all_devices)
        ]
        script, arguments = f"{experiment_name}_worker.py", [word for text in arguments for word in shlex.split(text)]
        self._settings = WorkerSettings(os.getpid(), address, script, arguments, all_devices, log_paths, hosts)
        self._process_ids = [0] * len(devices)
        self._listener = sockets.listen(address)
        #: Process ID of the worker at the other end of each connection.
        self._connections: dict[Connection, int] = {}
        self._failures: list[WorkerFailure] = []
        #: File and number of bytes of each shared memory, by its name.
        self._memory_files: dict[str, Any] = {}
        self._master_process: subprocess.Popen[bytes] | None = None
        #: Process file descriptor of worker 0; empty if another group has started it.
        self._master_pidfds: list[int] = []
        #: Time at which workers that have not ended are killed.
        self._kill_deadline = float("inf")

    def start(self) -> list[int]:
        """Start the workers, and return their process IDs in rank order; raise PlatoonError if that fails."""
        if self._is_first_host:
            self._start_master()
        while not all(self._process_ids):
            readable = wait([self._listener, *self._master_pidfds])
            if self._listener not in readable:
                log = Path(f"{self._settings.log_paths[0]}.err").read_text()
                raise PlatoonError(f"the workers did not start:\n{log}")
            connection = sockets.accept(self._listener)
            if connection is not None:
                local_rank, process_id = json.loads(connection.recv_bytes())
                self._connections[connection] = self._process_ids[local_rank] = process_id
        return self._process_ids

    def _start_master(self) -> None:
        settings = self._settings
        code = "from synkhronos.platoon import worker_process; worker_process.main()"
        command = [sys.executable, "-u", "-c", code, json.dumps(dataclasses.asdict(settings))]
        with open(f"{settings.log_paths[0]}.out", "wb") as out, open(f"{settings.log_paths[0]}.err", "wb") as err:
            # The worker has its own session, so that a terminal's Ctrl-C reaches the launcher alone.
            self._master_process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
        self._master_pidfds.append(os.pidfd_open(self._master_process.pid))

    def serve(self, handle_request: Callable[[Any, int, Any], Any]) -> WorkerFailure | None:
        """Answer requests until all workers end, and return the failure to report, if any.

        ``handle_request`` takes a request, the worker's process ID and the request's info, and returns the answer.
        """
        while self._is_first_host or self._connections:
            timeout = max(POLL_SECONDS, min(1.0, self._kill_deadline - time.monotonic()))
            readable = wait([*self._connections, *self._master_pidfds], timeout)
            if set(self._master_pidfds) & set(readable):
                break
            if time.monotonic() >= self._kill_deadline:
                self.kill_workers()
            for connection in self._connections.keys() & set(readable):
                request = self._receive_message(connection)
                if request is not None and not self._failures:
                    self._send_answer(connection, request, handle_request)
        return self._wait_for_failure()

    def _receive_message(self, connection: Connection) -> Any:
        """Receive a worker's message.  Return a request; record a failure or the worker's end, and return None."""
        try:
            message = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            del self._connections[connection]
            return None
        if "end" in message:
            del self._connections[connection]
            return None
        if "failure" not in message:
            return message
        self._failures.append(WorkerFailure(**message["failure"]))
        self._kill_deadline = min(self._kill_deadline, time.monotonic() + GRACE_SECONDS)
        return None

    def _send_answer(
        self, connection: Connection, request: Any, handle_request: Callable[[Any, int, Any], Any]
    ) -> None:
        if "memory" in request:
            self._send_memory(connection, **request["memory"])
            return
        answer = json.dumps(handle_request(request["req"], request["worker_id"], request["req_info"]))
        with contextlib.suppress(OSError):  # the worker has ended
            connection.send_bytes(answer.encode())

    def _send_memory(self, connection: Connection, name: str, nbytes: int) -> None:
        """Send a worker the file descriptor of the shared memory of this name, created at the first request."""
        is_new = name not in self._memory_files
        if is_new:
            try:
                self._memory_files[name] = create_unlinked_file(max(1, nbytes)), nbytes
            except MemoryError as error:
                connection.send_bytes(json.dumps({"error": str(error)}).encode())
                return
        file, first_nbytes = self._memory_files[name]
        if first_nbytes != nbytes:
            text = f"{name} of this worker are {nbytes:,} bytes, those of the first worker {first_nbytes:,}"
            connection.send_bytes(json.dumps({"error": text}).encode())
            return
        connection.send_bytes(json.dumps({"is_new": is_new}).encode())
        reduction.send_handle(connection, file.fileno(), self._connections[connection])

    def _wait_for_failure(self) -> WorkerFailure | None:
        """Wait for the end of all workers, and return the failure to report.

        It is the first that a worker reported about itself, or else the last report about another worker.
        """
        for connection in list(self._connections):
            # This does not read to the end of the stream: a process forked by a worker may hold its socket open.
            while connection in self._connections and connection.poll():
                self._receive_message(connection)
        status = 0 if self._master_process is None else self._master_process.wait()
        own_failures = [failure for failure in self._failures if failure.is_self_reported]
        if own_failures:
            return own_failures[0]
        if self._failures:
            # Worker 0 reports once a peer has failed, and again with the reason once all workers have ended.
            return self._failures[-1]
        if self._master_process is None or status == 0:
            return None
        log = self._settings.log_paths[0]
        message = f"worker 0 (process {self._master_process.pid}) {describe_exit(status)}; see {log}.err"
        return WorkerFailure(UNREPORTED_FAILURE_STATUS, message, is_self_reported=False)

    def kill_workers(self) -> None:
        """Kill the workers of the first host that have not ended, and their children.

        Workers of other hosts exit when worker 0 has ended.
        """
        if self._master_process is None or self._master_process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._master_process.pid, signal.SIGKILL)
        self._master_process.wait()
