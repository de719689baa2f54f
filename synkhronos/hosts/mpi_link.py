"""The link of a session with several hosts: start of the agents with ``mpirun``, and their reports to the master."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import pickle
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import IO, Any

import numpy as np

from synkhronos.hosts import mpirun
from synkhronos.hosts.host_list import Host, compute_ranks_by_host, describe_host, find_host
from synkhronos.ranks import ArrayLocation, Command, RowAccess
from synkhronos.ranks.child_process import JOB_SIGNALS
from synkhronos.ranks.control_memory import MAILBOX_NBYTES, ControlMemory
from synkhronos.ranks.errors import Death, DeathKind, ReconnectError, SessionFailure, describe_exit
from synkhronos.ranks.interrupts import defer_signals
from synkhronos.ranks.link import Link
from synkhronos.ranks.memory_table import Release
from synkhronos.ranks.pipes import LinkMemory
from synkhronos.ranks.segments import SegmentTable, get_peer_ids, is_peer_closed

#: Seconds that the agents may take to start.
_START_SECONDS = 60.0
#: Seconds that agents get to exit by themselves.
_EXIT_SECONDS = 0.7
#: Seconds for which the remaining output of killed agents is read.
_OUTPUT_SECONDS = 0.05
#: Errors at the start of agents whose cause may be on another host.
_CONNECTION_ERRORS = RuntimeError, TimeoutError, ConnectionError
#: Environment variables that are copied to the other hosts.
_COPIED_VARIABLES = re.compile(
    "(PYTENSOR|THEANO|SYNKHRONOS|OMP|OPENBLAS|MKL|JAX|XLA)_|NCCL_(?!HOSTID$)|PYTHON(HASHSEED|WARNINGS)$"
)


#: Packages that the fork servers of other hosts import for their workers.
_FORKABLE_PACKAGES = {"numpy", "scipy", "numba", "llvmlite", "pytensor", "theano", "synkhronos"}


@contextlib.contextmanager
def _block_job_signals() -> Iterator[None]:
    """Start the block's child processes with `JOB_SIGNALS` blocked."""
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


class MissingGpuError(ValueError):
    """A host has only ``n_gpus`` GPUs, fewer than ranks."""

    def __init__(self, message: str, host: str, n_gpus: int):
        super().__init__(message)
        self.host, self.n_gpus = host, n_gpus


class MpiLink(Link):
    """Link of a session with ranks on several hosts; the first is the master's.

    Its methods are called in this order: `start_agents`, `assign_ranks`, `start_remote_workers`, and then `shut_down`,
    or `kill` after a failure.  If `shut_down` keeps the agents, they serve the link that `reconnect` returns.  A host
    is lost after ``timeout`` seconds without a message.  The output of the other hosts is written to ``output``, by
    default this process's standard streams.
    """

    needs_control_file = True
    max_plan_nbytes = MAILBOX_NBYTES // 2

    def __init__(self, hosts: Sequence[Host], timeout: float, output: IO[str] | None = None):
        self._hosts = hosts
        self.host_names = [host.name for host in hosts]
        self._timeout, self._output = timeout, output
        self._last_output_lines: deque[str] = deque(maxlen=50)
        self._output_threads: list[threading.Thread] = []
        self._channel: socket.socket | None = None
        self._mpirun: Any = None
        #: Start times of the descendants of ``mpirun``, by process ID.
        self._mpirun_descendants: dict[int, str] = {}
        self._control: ControlMemory | None = None
        self._link_memory: LinkMemory | None = None
        self._uses_gpus = False
        self._earlier_bytes_sent = 0
        #: Infos of the hosts whose agents `shut_down` has kept; None if there are none.
        self._idle_host_infos: list[dict[str, Any]] | None = None

    def start_agents(self) -> None:
        """Start an agent on each host, by ``mpirun``.

        Raise RuntimeError if agents do not start, or hosts have different versions of Python or of a library.
        """
        address = f"synkhronos-{secrets.token_hex(16)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("\0" + address)
            listener.listen(1)
            # A scheduler sends its signals to all processes of a job.  Only the master handles them: mpirun would end
            # the agents.
            with defer_signals(), _block_job_signals():
                self._mpirun = subprocess.Popen(
                    mpirun.make_mpirun_argv(self.host_names, address),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="backslashreplace",
                    env=mpirun.make_mpirun_environment(),
                    start_new_session=True,  # only the master handles Ctrl-C at the terminal
                )
            host_infos = self._accept_agent(listener)
        if len(host_infos) < len(self._hosts):
            raise RuntimeError(
                f"{mpirun.find_mpirun()} started {len(self._hosts)} processes, and MPI connects {len(host_infos)} of "
                "them: it belongs to another MPI than mpi4py, whose MPI python -c 'from mpi4py import MPI; "
                "print(MPI.Get_library_version())' prints; pip install synkhronos[hosts] installs one MPI for both"
            )
        check_versions(self.host_names, [host["versions"] for host in host_infos])
        self._set_host_infos(host_infos)

    def _set_host_infos(self, host_infos: Sequence[dict[str, Any]]) -> None:
        self._aliases = [(name, host["name"]) for name, host in zip(self.host_names, host_infos, strict=True)]
        self._n_cores_by_host, self._n_gpus_by_host = (
            [host[key] for host in host_infos] for key in ("n_cores", "n_gpus")
        )

    def choose_gpu_default(self) -> bool | None:
        """Return the default of ``use_gpu``: False if no host has GPUs; None (this host decides) if all have some.

        Raise ValueError if some hosts have GPUs and others none.
        """
        if all(self._n_gpus_by_host):
            return None
        if any(self._n_gpus_by_host):
            counts = ", ".join(f"{name} has {n}" for name, n in zip(self.host_names, self._n_gpus_by_host, strict=True))
            raise ValueError(f"use_gpu: expected True or False, since not all hosts have GPUs: {counts}")
        return False

    def assign_ranks(self, n_ranks: int | None, needs_gpus: bool) -> None:
        """Assign ranks to the hosts: set `ranks_by_host`, `size` and `link_nbytes`.

        A host that is listed without a number gets ``n_ranks`` ranks.  If ``n_ranks`` is None, it gets a rank for each
        GPU if ranks need GPUs, or else for each core.  Raise MissingGpuError if a host has fewer GPUs than ranks that
        need them.
        """
        defaults = self._n_gpus_by_host if needs_gpus else self._n_cores_by_host
        self._uses_gpus = needs_gpus
        counts = [host.n_ranks or n_ranks or n for host, n in zip(self._hosts, defaults, strict=True)]
        for name, n, n_gpus in zip(self.host_names, counts, self._n_gpus_by_host, strict=True):
            if needs_gpus and not 1 <= n <= n_gpus:
                needed = f", and {n} ranks there need one each" if n else ""
                raise MissingGpuError(
                    f"hosts: {name} has {n_gpus} GPUs{needed}: pass use_gpu=False, or in a session file "
                    "devices = 'cpu', to compute on CPU cores",
                    name,
                    n_gpus,
                )
        self.ranks_by_host = compute_ranks_by_host(counts)
        self.size = sum(counts)
        self.link_nbytes = LinkMemory.compute_nbytes(counts[0])

    def _accept_agent(self, listener: socket.socket) -> list[dict[str, Any]]:
        """Wait until the first agent connects, and return the hosts' infos that it sends."""
        listener.settimeout(0.05)
        deadline = time.monotonic() + _START_SECONDS
        while self._channel is None:
            try:
                channel, _ = listener.accept()
            except TimeoutError:
                self._mpirun_descendants |= mpirun.list_descendants(self._mpirun.pid)
                if self._mpirun.poll() is not None:
                    raise RuntimeError(
                        f"the hosts {', '.join(self.host_names)} could not be reached: {self._read_mpirun_error()}"
                    ) from None
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"the hosts {', '.join(self.host_names)} could not be reached within {_START_SECONDS:g} "
                        f"seconds; the first has to be this machine, {socket.gethostname()}"
                    ) from None
                continue
            if get_peer_ids(channel)[1] == os.getuid():
                self._channel = channel
            else:
                channel.close()
        self._channel.settimeout(_START_SECONDS)
        message = self._channel.recv(1 << 20)
        if not message:
            raise RuntimeError(f"the agent of this host ended at once: {self._read_mpirun_error()}")
        host_infos: list[dict[str, Any]] = json.loads(message)
        self._channel.settimeout(None)
        self._mpirun_descendants |= mpirun.list_descendants(self._mpirun.pid)
        return host_infos

    def _read_mpirun_error(self) -> str:
        """Return the error message of ``mpirun``, which has ended."""
        try:
            outputs = self._mpirun.communicate(timeout=_EXIT_SECONDS)
        except subprocess.TimeoutExpired as error:  # a shared ssh connection keeps the pipes open
            outputs = [(text or b"").decode(errors="backslashreplace") for text in (error.output, error.stderr)]
        lines = [line.strip(" =-") for text in reversed(outputs) for line in text.splitlines()]
        for line in lines:  # the message of an agent, if mpirun's output has one
            if line.startswith("RuntimeError: "):
                return line.removeprefix("RuntimeError: ")
        return "; ".join(line for line in lines if line) or f"mpirun ended with code {self._mpirun.returncode}"

    # -- Link ------------------------------------------------------------------------------

    def start_remote_workers(
        self, control: ControlMemory, control_file: io.FileIO | None, master_rank: int, profile: bool
    ) -> socket.socket:
        assert self._channel is not None and control_file is not None
        self._control, self._link_memory = control, LinkMemory(control)
        config = {
            "host_names": self.host_names,
            "rank_counts": list(map(len, self.ranks_by_host)),
            "size": self.size,
            "master_rank": master_rank,
            "mpirun": self._mpirun.pid,
            "profile": profile,
            "timeout": self._timeout,
            "environment": {name: value for name, value in os.environ.items() if _COPIED_VARIABLES.match(name)},
            "path": [os.path.abspath(folder) for folder in sys.path],
            "folder": os.getcwd(),
            # GPUs can't be used in forks of a process that has initialized them, as an import may.
            "modules": [] if self._uses_gpus else _list_forkable_modules(),
        }
        self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        # Each session has its own channel, so that segments the agent has not received end with the session.
        segment_channel, agent_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with agent_end:
            fds = [control_file.fileno(), agent_end.fileno()]
            socket.send_fds(self._channel, [json.dumps(config).encode()], fds)
        if self._output_threads:  # the agents have served an earlier link
            return segment_channel
        for stream, name in ((self._mpirun.stdout, "stdout"), (self._mpirun.stderr, "stderr")):
            self._output_threads.append(threading.Thread(target=self._forward_output, args=(stream, name), daemon=True))
            self._output_threads[-1].start()
        return segment_channel

    def plan_transfers(self, command: Command, command_location: ArrayLocation | None, segments: SegmentTable) -> bytes:
        """Return the pickled plan: the rows that each other host reads, the segments to drop, a program's memory."""
        released = command.released if isinstance(command, Release) else []
        dropped = [key for kind, key in released if kind == "segment"]
        accesses_by_host: list[list[RowAccess]] = []
        for name, ranks in zip(self.host_names, self.ranks_by_host, strict=True):
            accesses_by_host.append([])
            accesses = list(command.find_row_accesses(self.size, ranks))
            if command_location is not None:
                accesses.append(RowAccess(command_location))
            for access in accesses:
                local_rows = access.array.find_local_rows(self.size, ranks)
                if local_rows is None:
                    accesses_by_host[-1].append(access)
                    continue
                _check_rows_are_local(access, local_rows, segments, describe_host(name, ranks))
                if isinstance(access.rows, ArrayLocation):
                    accesses_by_host[-1].append(RowAccess(access.rows))
        program_layout = command.program_layout
        plan = pickle.dumps((accesses_by_host[1:], dropped, program_layout), pickle.HIGHEST_PROTOCOL)
        if len(plan) > self.max_plan_nbytes:
            raise ValueError(
                f"a call on several hosts names too many arrays: they take {len(plan):,} bytes, and there is room "
                f"for {self.max_plan_nbytes:,}"
            )
        return plan

    @property
    def bytes_sent(self) -> int:
        sent = 0 if self._control is None else self._control.words[ControlMemory.BYTES_SENT]
        return self._earlier_bytes_sent + sent

    def get_host_name(self, rank: int) -> str:
        return self.host_names[find_host(self.ranks_by_host, rank)]

    def find_failure(self) -> SessionFailure | None:
        """Return the failure of a host, an agent, or a worker on another host, or None if there is none.

        If ``mpirun`` has closed the connection, wait up to about a second for its message, which names the host.
        """
        if self._control is None or self._link_memory is None:
            return None
        length = self._control.words[ControlMemory.FAILURE_NBYTES]
        if length:
            description, rank, death = json.loads(bytes(self._link_memory.failure_json[:length]))
            if death is not None:
                death = Death(*death)
                if death.kind == DeathKind.LOST_HOST:
                    death = death._replace(lost_ranks=self.ranks_by_host[find_host(self.ranks_by_host, rank)])
            return SessionFailure(description, rank, death)
        assert self._channel is not None
        if self._mpirun.poll() is None and not is_peer_closed(self._channel):
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._mpirun.wait(1.0)
        for reader in self._output_threads:
            reader.join(0.2)
        return self._describe_lost_connection(self._mpirun.poll())

    def _describe_lost_connection(self, exit_status: int | None) -> SessionFailure:
        """Return the failure that ended the connection, from the exit status and the last lines of ``mpirun``."""
        if exit_status is not None and exit_status < 0:
            description = f"mpirun, which connects the hosts, (process {self._mpirun.pid}) {describe_exit(exit_status)}"
            return SessionFailure(description, 0, Death.from_ended_session(0, description))
        lost_hosts = mpirun.find_lost_hosts(" ".join(list(self._last_output_lines)), self._aliases)
        names = [describe_host(self.host_names[i], self.ranks_by_host[i]) for i in lost_hosts]
        hosts_text = names[0] if len(names) == 1 else f"one of {', '.join(names)}"
        exit_description = "was lost: the host, or the agent there, has ended"
        description, ranks = f"{hosts_text} {exit_description}", self.ranks_by_host[lost_hosts[0]]
        death = Death.from_lost_host(ranks, self.host_names[lost_hosts[0]], exit_description)
        if len(names) > 1 or lost_hosts == [0]:  # the host is unknown, or is this host, which is alive
            death = Death.from_ended_session(ranks.start, description)
        return SessionFailure(description, ranks.start, death)

    def shut_down(
        self, kill: bool, grace_seconds: float, should_kill: Callable[[], bool], keeps_agents: bool = False
    ) -> None:
        """End the other hosts' workers and, unless ``keeps_agents`` is True and all hosts answer, all agents."""
        deadline = time.monotonic() + grace_seconds
        if self._control is not None:
            if keeps_agents:
                failure = self.find_failure()
                keeps_agents = failure is None or failure.death is None or failure.death.kind == DeathKind.EXIT
            request = ControlMemory.KILL_WORKERS if kill else ControlMemory.END_WORKERS
            self._control.words[ControlMemory.END_REQUEST] = request
            while (keeps_agents or not kill) and self._mpirun.poll() is None and not self._receive_idle_host_infos():
                if should_kill() or time.monotonic() > deadline:
                    break
                time.sleep(0.002)
        if keeps_agents and self._idle_host_infos is not None:
            self._forget_control()
        else:
            self.kill(max(_EXIT_SECONDS, 0.0 if kill else deadline - time.monotonic()))

    def _receive_idle_host_infos(self) -> bool:
        """Receive the hosts' infos, which idle agents send again.  Return True if they have arrived."""
        assert self._channel is not None
        with contextlib.suppress(OSError):
            if message := self._channel.recv(1 << 20, socket.MSG_DONTWAIT):
                self._idle_host_infos = json.loads(message)
        return self._idle_host_infos is not None

    def _forget_control(self) -> None:
        self._earlier_bytes_sent = self.bytes_sent
        self._control = self._link_memory = None

    def kill(self, exit_seconds: float = _EXIT_SECONDS) -> None:
        """End ``mpirun`` and the agents, which end their workers.  After ``exit_seconds``, kill ``mpirun``."""
        if self._mpirun is None:
            return
        self._idle_host_infos = None
        if self._channel is not None:
            self._channel.close()  # so that the agents exit
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._mpirun.wait(exit_seconds)
        output_seconds = _EXIT_SECONDS
        if self._mpirun.poll() is None:
            self._mpirun_descendants |= mpirun.list_descendants(self._mpirun.pid)
            # Open MPI's ssh inherits the pipes that are read here, and may pass them on (ControlMaster).  The pipes
            # stay open while any process waits for an unreachable host, but already contain all output.
            output_seconds = _OUTPUT_SECONDS
        # An ssh would wait for an unreachable host, also if MPICH's mpirun has exited without it.  Without its ssh,
        # Open MPI's mpirun removes its temporary folder and exits.
        mpirun.kill_processes(self._mpirun_descendants)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._mpirun.wait(_EXIT_SECONDS)
        self._mpirun.kill()
        self._mpirun.wait()
        for reader in self._output_threads:
            reader.join(output_seconds)
        self._forget_control()

    def reconnect(self, excluded_ranks: Collection[int]) -> Link:
        """Start the agents of the hosts that have ranks left, unless they run, and return a link to these hosts."""
        ranks_left = {
            name: [rank for rank in ranks if rank not in excluded_ranks]
            for name, ranks in zip(self.host_names, self.ranks_by_host, strict=True)
        }
        hosts = [Host(name, len(ranks)) for name, ranks in ranks_left.items() if ranks]
        if self._idle_host_infos is not None and (len(hosts) < len(self._hosts) or self._mpirun.poll() is not None):
            self.kill()
        if len(hosts) == 1:
            return Link(len(ranks_left[hosts[0].name]), self.bytes_sent)
        try:
            link = self._start_link(hosts) if self._idle_host_infos is None else self._reuse_agents(hosts)
        except _CONNECTION_ERRORS as error:
            lost_hosts = self._find_unreachable_hosts(hosts)
            if not lost_hosts:  # each host can be reached alone
                raise
            lost_ranks = [r for name in lost_hosts for r in ranks_left[name]]
            raise self._make_reconnect_error(lost_ranks, str(error)) from error
        try:
            if self._uses_gpus:
                n_gpus = dict(zip(link.host_names, link._n_gpus_by_host, strict=True))
                lost_ranks = [r for name in n_gpus for r in ranks_left[name][n_gpus[name] :]]
                if lost_ranks:
                    raise self._make_reconnect_error(lost_ranks, "its GPU is missing")
            link.assign_ranks(None, self._uses_gpus)
        except BaseException:
            link.kill()
            raise
        link._earlier_bytes_sent = self.bytes_sent
        return link

    def _start_link(self, hosts: Sequence[Host]) -> MpiLink:
        """Start agents on some hosts, and return the new link to them."""
        link = MpiLink(hosts, self._timeout, self._output)
        try:
            link.start_agents()
        except BaseException:
            link.kill()
            raise
        return link

    def _reuse_agents(self, hosts: Sequence[Host]) -> MpiLink:
        """Return a link to the agents that `shut_down` has kept."""
        assert self._idle_host_infos is not None
        link = copy.copy(self)
        link._hosts = hosts
        link._set_host_infos(self._idle_host_infos)
        # If an interrupt comes before the session has the new link, `kill` of this link also ends the agents.
        link._idle_host_infos = self._idle_host_infos = None
        return link

    def _find_unreachable_hosts(self, hosts: Sequence[Host]) -> list[str]:
        """Return the names of the hosts that this host, the first one, can't connect to.

        Raise RuntimeError if this host can't start its own agent, since then all other hosts would seem unreachable.
        """
        own, others = hosts[0], hosts[1:]
        try:
            self._start_link([own]).kill()
        except _CONNECTION_ERRORS as error:
            raise RuntimeError(f"this host, {own.name}, can't start an agent: {error}") from error
        if len(others) == 1:
            return [others[0].name]
        unreachable = []
        for host in others:
            try:
                self._start_link([own, host]).kill()
            except _CONNECTION_ERRORS:
                unreachable.append(host.name)
        return unreachable

    def _make_reconnect_error(self, lost_ranks: Sequence[int], reason: str) -> ReconnectError:
        """Return the error for ranks that can't start.  A start without these ranks may succeed."""
        host = self.get_host_name(lost_ranks[0])
        return ReconnectError(reason, Death.from_failed_start(lost_ranks[0], host, reason, lost_ranks))

    def _forward_output(self, stream: IO[str], name: str) -> None:
        """Forward the hosts' output to a standard stream of this process, and store its last lines for messages."""
        for line in stream:
            self._last_output_lines.append(line)
            target = getattr(sys, name) if self._output is None else self._output
            if target is not None:
                with contextlib.suppress(OSError, ValueError):
                    target.write(line)


def _list_forkable_modules() -> list[str]:
    """Return the imported modules that workers will need, and that may be imported before a fork."""
    return [
        name
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in _FORKABLE_PACKAGES
        and "jax" not in name  # a fork would lack JAX's threads
        and getattr(module, "__name__", None) == name  # excludes PyTensor under Theano's names, and None
    ]


def _check_rows_are_local(access: RowAccess, local_rows: range, segments: SegmentTable, host_description: str) -> None:
    """Raise IndexError if a host needs rows that only another host has loaded."""
    rows = range(access.array.shape[0]) if access.rows is None else access.rows
    index = np.array([*rows[:1], *rows[-1:]]) if isinstance(rows, range) else rows.view(segments)
    if not index.size:
        return
    low, high = int(index.min()) - access.first_row, int(index.max()) - access.first_row
    if low < local_rows.start or high >= local_rows.stop:
        raise IndexError(
            f"{host_description} needs rows from {low:,} to {high:,} of data that data_parts has loaded, and has "
            f"those from {local_rows.start:,} to {local_rows.stop - 1:,}: rows that a host has loaded are not sent to "
            "others; PartsData.batches() yields batches of rows that each rank's host has"
        )


def check_versions(names: Sequence[str], versions: Sequence[dict[str, str]]) -> None:
    """Raise RuntimeError if a host has another version of Python or of a package than the first host."""
    for name, first_version in versions[0].items():
        for host, versions_of_host in zip(names, versions, strict=True):
            if versions_of_host.get(name) != first_version:
                raise RuntimeError(
                    f"hosts need the same versions: {name} is {first_version} on {names[0]} and "
                    f"{versions_of_host.get(name, 'missing')} on {host}"
                )
