"""Hosts with `fault_target.py` on the first: its events, injected faults, and checks for leaks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from system import LIMIT_SECONDS, list_marked_processes

from hosts import HERE, are_simulated, make_command, simulated

#: Starts a program again and again, until its parent has exited.
RESTART = """
import os, subprocess, sys
parent = os.getppid()
while os.getppid() == parent:
    subprocess.call(sys.argv[1:])
"""


class SimulatedHosts:
    """Some hosts, and `fault_target.py` on the first.

    If hosts cannot be simulated, they are fake: processes of this machine.

    Parameters
    ----------
    hosts : list of str
        Their names.
    **variables : str
        For the program's environment.
    """

    def __init__(self, hosts: list[str], **variables: str):
        self.hosts = hosts
        self._folder = tempfile.TemporaryDirectory(prefix="fault-")
        self.folder = Path(self._folder.name)
        os.mkfifo(self.folder / "events")
        os.mkfifo(self.folder / "release")
        self._events = os.open(self.folder / "events", os.O_RDWR)
        self._text = b""
        self.output = tempfile.TemporaryFile("w+")
        # After a program has exited, the next one is started.
        restart_arguments = ["-c", RESTART, sys.executable]
        command, environment = make_command(hosts, *restart_arguments, HERE / "fault_target.py", self.folder)
        # This path marks all processes by their environment; ssh passes it on, too.
        environment["PYTHONPATH"] += os.pathsep + str(self.folder)
        environment |= {"PYTENSOR_FLAGS": "mode=Mode,linker=py,optimizer=None", **variables}
        self.program = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=self.output,
            stderr=self.output,
            start_new_session=True,
        )
        self.wait_until_started()
        self._first = self._find_first()

    def wait_until_started(self) -> None:
        """Wait until the program, the first or the next, has started."""
        namespace = self.expect_event("started")["namespace"]
        processes = self.list_processes()
        self.pid = next(p for p, (space, line) in processes.items() if space == namespace and _is_program(line))
        if not hasattr(self, "before"):
            self.before = set(processes) - {self.pid}

    def close(self) -> None:
        """Remove the hosts and all their processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.program.pid, signal.SIGKILL)
        self.program.wait(LIMIT_SECONDS)
        for pid in self.list_processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.close(self._events)
        self.output.close()
        self._folder.cleanup()

    # -- orders and events -------------------------------------------------------------------------------------

    def send_order(self, name: str, **arguments: Any) -> None:
        """Send an order to the program."""
        assert self.program.stdin is not None
        self.program.stdin.write(json.dumps([name, arguments]).encode() + b"\n")
        self.program.stdin.flush()

    def run_order(self, name: str, **arguments: Any) -> dict[str, Any]:
        """Send an order to the program; return its outcome."""
        self.send_order(name, **arguments)
        return self.expect_event("outcome")

    def expect_event(self, event: str, limit: float = LIMIT_SECONDS) -> dict[str, Any]:
        """Return the next event, and check its name."""
        deadline = time.monotonic() + limit
        while b"\n" not in self._text:
            if not select.select([self._events], [], [], 0.05)[0]:
                assert time.monotonic() < deadline, f"silent for {limit} s\n{self.read_output()}"
                assert self.program.poll() is None, f"the hosts are gone\n{self.read_output()}"
                continue
            self._text += os.read(self._events, 1 << 16)
        line, self._text = self._text.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        assert message["event"] == event, f"{message}\n{self.read_output()}"
        return message

    def fork(self, hosts: list[str], environment: dict[str, str] | None = None, **settings: Any) -> dict[str, Any]:
        """Order a fork; return its outcome."""
        self._drain()
        return self.run_order("fork", hosts=hosts, environment=environment or {}, settings=settings)

    def list_ranks(self) -> dict[str, Any]:
        """Return each rank's process, and mpirun's."""
        pids = self.run_order("list_ranks")["value"]
        spaces = self.list_processes()
        ranks = [_find_outer_pid(spaces, space, pid) for space, pid in pids["ranks"]]
        return {
            "ranks": ranks,
            "mpirun": _find_outer_pid(spaces, spaces[self.pid][0], pids["mpirun"]),
            "agents": self._find_agents(spaces, ranks[-1]),
        }

    def _find_agents(self, processes: dict[int, tuple[str, str]], last: int) -> list[int]:
        """Return the agents' process IDs; the second agent is the parent of the last rank."""
        other = int(re.search(r"PPid:\s+(\d+)", Path(f"/proc/{last}/status").read_text())[1])
        agents = [p for p, (_, line) in processes.items() if "hosts.agent" in line and "python" in line.split()[0]]
        return [next(p for p in agents if p != other and "-c" in processes[p][1].split()[1]), other]

    def release(self) -> None:
        """Release the ranks that block."""
        with contextlib.suppress(OSError):
            os.close(os.open(self.folder / "release", os.O_WRONLY | os.O_NONBLOCK))

    def read_output(self) -> str:
        """Return the program's output."""
        self.output.seek(0)
        return self.output.read()

    def _drain(self) -> None:
        """Discard events of ranks that no test has read."""
        while select.select([self._events], [], [], 0)[0]:
            os.read(self._events, 1 << 16)
        self._text = b""

    # -- faults ----------------------------------------------------------------------------------------------------

    def inject_fault(self, fault: str, host: str) -> float:
        """Inject a fault, such as "unplug", into a whole host; return the time."""
        simulated.SOCKET = f"/proc/{self.pid}/root{simulated.STATE}/control"
        moment = time.monotonic()
        assert simulated.send_request({"operation": fault, "host": host}) == 0
        return moment

    def limit_shared_memory(self, host: str, nbytes: int | None) -> None:
        """Limit the size of a shared memory object on a host, and of processes that `simulated.py` starts; None: undo."""
        namespace = os.readlink(f"/proc/{self._first[host]}/ns/pid")
        for pid, (space, line) in self.list_processes().items():
            if space == namespace or "simulated.py" in line:
                _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if nbytes is None else nbytes, hard))

    def replace(self, host: str, path: Path, replacement: Path) -> None:
        """Replace a file or folder by another on one host."""
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        inside = ["nsenter", *user, "--mount", "--pid", "--target", str(self._first[host])]
        subprocess.run([*inside, "mount", "--bind", replacement, path], check=True)

    def restore(self, host: str, path: Path) -> None:
        """Restore what `replace` has replaced."""
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        subprocess.run(
            ["nsenter", *user, "--mount", "--pid", "--target", str(self._first[host]), "umount", path], check=True
        )

    # -- the end ---------------------------------------------------------------------------------------------------

    def list_processes(self) -> dict[int, tuple[str, str]]:
        """Return the namespace and the command line of the program's processes on all hosts, by process ID."""
        return list_marked_processes(str(self.folder).encode())

    def check_no_leaks(self, allowed_prefix: str = "-") -> None:
        """Check that only the master runs, and MPI has left no names in /dev/shm and in the first host's temporary folder.

        Names that begin with ``allowed_prefix`` are allowed, and removed.
        """
        deadline = time.monotonic() + LIMIT_SECONDS
        while left := [*self._find_leaks(allowed_prefix)]:
            assert time.monotonic() < deadline, f"{left} are left\n{self.read_output()}"
            time.sleep(0.01)
        shared_memory = self._shared_memory(self.hosts[0]) if are_simulated() else Path("/dev/shm")
        for path in shared_memory.glob(f"{allowed_prefix}*"):
            path.unlink(missing_ok=True)

    def _find_leaks(self, allowed_prefix: str) -> Iterator[object]:
        for pid, (_, line) in self.list_processes().items():
            if pid not in (self.pid, *self.before):
                yield pid, line
        folders = [Path("/dev/shm")]
        if are_simulated():
            root = Path(f"/proc/{self._first[self.hosts[0]]}/root")
            folders = [root / "dev/shm", root / f"{simulated.STATE[1:]}/{self.hosts[0]}.tmp"]
        names = (path.name for folder in folders for path in folder.iterdir())
        yield from (name for name in names if re.match("mpich|ucx|ompi", name) and not name.startswith(allowed_prefix))

    def _shared_memory(self, host: str) -> Path:
        return Path(f"/proc/{self._first[host]}/root/dev/shm")

    def _find_first(self) -> dict[str, int]:
        """Return the first process of each simulated host."""
        processes = {}
        for pid, (_, line) in self.list_processes().items():
            for host in self.hosts:
                if line.startswith("unshare") and f"hostname {host} " in line:
                    processes[host] = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
        return processes


def _is_program(line: str) -> bool:
    return bool(re.match(r"\S*python[0-9.]* \S*fault_target\.py ", line))


def _find_outer_pid(processes: dict[int, tuple[str, str]], space: str, pid: int) -> int:
    """Return the process ID in this namespace of a process in another one."""
    for outer_pid, (namespace, _) in processes.items():
        if namespace == space:
            status = Path(f"/proc/{outer_pid}/status").read_text()
            numbers = re.search(r"NSpid:\s+(.*)", status)
            if numbers is not None and int(numbers[1].split()[-1]) == pid:
                return outer_pid
    raise ProcessLookupError(f"{pid} in {space}")
