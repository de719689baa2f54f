"""The agent of a host: the process that ``mpirun`` starts there, and the only one that uses MPI.

An agent polls its host's control memory and the messages that have arrived, in turns, and waits for neither::

    control memory of this host                                to and from the other agents (`Mail`)
    a command was posted (master's host)          ->           COMMAND, preceded by ANNOUNCE, PAGES, DROP
    all ranks of the host have reached a step     ->           STEP, with the values that they publish
    a rank, here or elsewhere, has failed         ->           FAILED, once from each host
    all ranks of the host have finished           ->           DONE, with their reports, to the master's host
    a worker has exited                           ->           REMOTE_FAILURE, to the master's host
    a frame of a pipe is full, or free            <->          frames, to and from the neighbours
    a rank has sent to a rank of another host     ->           CHANNEL_UPDATE, to that host
    a rank asks all ranks to stop                 ->           STOP
    a rank uses a lock of another host            <->          LOCK_REQUEST, LOCK_REPLY, LOCK_ROWS (`TaskAgent`)
    the master ends the ranks                     ->           END; answered by ENDED

The master's agent and each other agent send each other BEAT a few times a second.  A host that is silent for
`host_timeout` seconds is lost.  The master's agent reports that to the master; another agent that has lost the master's
ends its workers and itself.  A rank that computes for minutes is not lost, since agents send the beats.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import platform
import re
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NoReturn

import numpy as np

from synkhronos.checks import list_versions
from synkhronos.gpus import get_n_gpu
from synkhronos.hosts.mail import (
    ANNOUNCE,
    BEAT,
    CHUNK_NBYTES,
    COMMAND,
    DONE,
    DROP,
    END,
    ENDED,
    FAILED,
    MAX_PENDING,
    PAGES,
    REMOTE_FAILURE,
    STEP,
    Mail,
)
from synkhronos.hosts.names import describe_host, number_ranks
from synkhronos.hosts.page_table import PAGE, PageTable, find_pages, read_pages, write_pages
from synkhronos.hosts.pipes import FAILURE_NBYTES, FRAME, FrameTransport, PipeLayout
from synkhronos.hosts.task_agent import TaskAgent
from synkhronos.ranks.agreement import StepTally, record_common_step
from synkhronos.ranks.child_process import ignore_job_signals
from synkhronos.ranks.control import AWAITS_COMMAND, AWAITS_COMPLETION, AWAITS_STEP, SLOT_NBYTES, SPIN_SECONDS, Control
from synkhronos.ranks.errors import Death, describe_exit
from synkhronos.ranks.rank import SLOT_HEADER
from synkhronos.ranks.segments import (
    Segment,
    SegmentReceiver,
    UnmappedSegment,
    create_unlinked_file,
    is_closed,
    send_segment,
)
from synkhronos.ranks.task_memory import TaskMemory
from synkhronos.ranks.threads import count_available_cores
from synkhronos.ranks.workers import Workers

#: Prefixes of the environment variables by which launchers identify MPI processes.
_LAUNCHERS = ("PMI", "OMPI_", "PRTE_", "MPI_LOCAL", "HYDI_", "HYDRA_")
#: Maximal number of messages that an agent accepts while it cannot process them: beats of some minutes.
_MAX_UNPROCESSED = 10_000
#: Seconds between two beats, and between two checks of the workers' lives.
_BEAT_INTERVAL, _CHECK_INTERVAL = 0.2, 0.02
#: Seconds without an event up to which an agent polls without sleeping, and up to which its sleeps are short.
_POLL_SECONDS, _SHORT_SLEEP_SECONDS = 1e-3, 0.05
#: Seconds of a short sleep, and of the longest; in between, a sleep is a hundredth of the time without an event.
_MIN_SLEEP, _MAX_SLEEP = 50e-6, 10e-3
#: Seconds that workers get to exit by themselves.
_EXIT_SECONDS = 2.0
#: Seconds that the other hosts get to exit after the master has.
_EXIT_SECONDS_WITHOUT_MASTER = 0.5
#: Seconds after which an agent exits that has not connected to the others.
_START_SECONDS = 90


class Agent:
    """Agent of one host.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    config : dict
        Configuration from the master: see `synkhronos.hosts.mpi_link.MpiLink.start_workers`.
    control : Control
        Control memory of this host.
    channel : socket or None
        Channel to the master, on its host.
    workers : Workers
        Workers that this agent has started; none on the master's host.
    frames : mpi4py.MPI.Comm
        Second communicator of all agents, for frames.
    """

    def __init__(
        self,
        mpi: Any,
        config: dict[str, Any],
        control: Control,
        channel: socket.socket | None,
        workers: Workers,
        frames: Any,
    ):
        world = mpi.COMM_WORLD
        self._config, self._control, self._channel, self._workers = config, control, channel, workers
        self._host, self._names = world.rank, config["names"]
        self._ranks = number_ranks(config["counts"])
        self._local_ranks = control.local_ranks
        self._layout = PipeLayout(control)
        self._layout.n_next_hosts[0] = world.size - 1 - world.rank
        self._mail = Mail(mpi, world)
        self._frames = FrameTransport(mpi, frames, control, self._layout)
        self._pages = PageTable(world.size - 1, self._heartbeat)
        self._receiver = None if channel is None else SegmentReceiver(channel)
        self._segments: dict[int, Segment] = {}
        self._task = TaskAgent(self._mail, control, self._ranks, self._segments)
        self._last_segment_key = self._last_command = self._last_step = 0
        self._tally = StepTally(world.size, world.rank)
        self._sent_done: tuple[int, ...] = ()
        # The other agents start their workers before they send anything.
        self._next_beat = self._next_check = 0.0
        self._deadline = 0.0
        self._is_ending = False
        #: Hosts with which this one exchanges beats, and hosts that have ended their workers.
        self._beat_hosts = self._mail.other_hosts if self._is_master_host else [0]
        self._ended_hosts: set[int] = set()
        self._handlers: dict[int, Callable[..., None]] = {
            COMMAND: self._on_command, ANNOUNCE: self._on_announce, PAGES: self._on_pages, DROP: self._on_drop,
            STEP: self._on_step, FAILED: self._on_failed, DONE: self._on_done, REMOTE_FAILURE: self._on_remote_failure,
            BEAT: self._on_beat, END: self._on_end, ENDED: self._on_ended, **self._task.handlers,
        }  # fmt: skip

    @property
    def _is_master_host(self) -> bool:
        return self._channel is not None

    def run(self) -> None:
        """Poll until the ranks end."""
        last_event, has_cores = time.monotonic(), len(self._local_ranks) < count_available_cores()
        while not self._is_over():
            has_events = self._poll_memory()
            for source, kind, arguments in self._mail.receive():
                self._handlers[kind](source, *arguments)
                has_events |= kind != BEAT
            if self._frames.progress():
                self._control.wake_local_ranks(AWAITS_STEP)
                has_events = True
            has_events |= self._task.progress()
            now = time.monotonic()
            self._beat(now)
            if has_events:
                last_event = now
                continue
            idle = now - last_event
            # While frames are in transit a short sleep costs nothing: others follow, and ranks may need the core.
            if idle < _POLL_SECONDS and has_cores and not self._frames.has_transfers:
                os.sched_yield()
            else:
                time.sleep(
                    _MIN_SLEEP
                    if idle < _SHORT_SLEEP_SECONDS or self._task.has_waiting_ranks
                    else min(idle / 100, _MAX_SLEEP)
                )

    def _is_over(self) -> bool:
        return self._is_ending and (not self._is_master_host or self._ended_hosts.issuperset(self._beat_hosts))

    # -- events of this host -----------------------------------------------------------------------------------

    def _poll_memory(self) -> bool:
        """Send the changes of this host's control memory to the other hosts; return True if there were any."""
        words, has_events = self._control.words, False
        # Read before FAILED, which a failing rank writes first: otherwise DONE could be sent without the failure.
        done = tuple(self._control.done[self._local_ranks.start : self._local_ranks.stop])
        if self._is_master_host and words[Control.POSTED] > self._last_command:
            self._send_command()
            has_events = True
        failed = words[Control.FAILED]  # read before the ranks' steps: see `ranks.agreement`
        step = min(self._control.arrived[self._local_ranks.start : self._local_ranks.stop])
        sends_step, sends_failed = self._tally.update(failed, step)
        if sends_step:
            self._send_step(step)
        if sends_failed:
            self._mail.send_all(self._mail.other_hosts, FAILED, failed)
            self._decide_commands()
        has_events |= sends_step or sends_failed
        if not self._is_master_host:
            has_events |= self._send_done(done)
        elif words[Control.END_REQUEST] and not self._is_ending:
            self._is_ending = has_events = True
            self._mail.send_all(self._mail.other_hosts, END, words[Control.END_REQUEST] > 1)
        return has_events

    def _send_command(self) -> None:
        """Send a command to the other hosts, preceded by the segments and pages that it needs."""
        words, mail = self._control.words, self._mail
        assert self._receiver is not None
        self._last_command = words[Control.POSTED]
        while self._last_segment_key < words[Control.NEWEST_KEY]:
            segment = self._receiver.receive()
            if isinstance(segment, UnmappedSegment):
                segment = segment.map()
            if segment.key > self._last_segment_key:
                self._last_segment_key = segment.key
                self._segments[segment.key] = segment
                if not segment.is_file:
                    self._pages.add(segment.key, np.frombuffer(segment.buffer, np.uint8, segment.nbytes))
                path = self._receiver.path if segment.is_file else None
                mail.send_all(mail.other_hosts, ANNOUNCE, segment.key, segment.nbytes, path)
        length = words[Control.MESSAGE_NBYTES]
        message = bytes(self._control.mailbox[:length])
        accesses, dropped, task = pickle.loads(self._control.mailbox[length : length + words[Control.PLAN_NBYTES]])
        memory = self._pages.memory
        missing = self._pages.take_missing([find_pages(pages_by_segment, memory) for pages_by_segment in accesses])
        for host, pages_by_segment in zip(mail.other_hosts, missing, strict=True):
            for key, pages in pages_by_segment.items():
                for start in range(0, len(pages), CHUNK_NBYTES // PAGE):
                    chunk = pages[start : start + CHUNK_NBYTES // PAGE]
                    content = read_pages(memory[key], chunk)
                    words[Control.BYTES_SENT] += content.size
                    mail.send(host, PAGES, key, chunk, content)
                    self._heartbeat(MAX_PENDING)
            mail.send(host, COMMAND, self._last_command, message, task)
            if dropped:
                mail.send(host, DROP, dropped)
        self._pages.drop(dropped)
        for key in dropped:
            self._segments.pop(key, None)
        self._task.start_command(self._last_command, task)

    def _heartbeat(self, limit: int = 1 << 30) -> None:
        """Send beats during long work, and wait until at most ``limit`` messages are unsent."""
        while True:
            self._mail.accept(_MAX_UNPROCESSED)
            self._beat(time.monotonic())
            if not self._mail.has_pending(limit):
                return
            time.sleep(_MIN_SLEEP)

    def _send_step(self, step: int) -> None:
        """Send the step that this host's ranks have reached, and their values for it and for the previous step.

        Ranks of this host may have passed the previous step without waiting for other hosts.
        """
        published = []
        for r in self._local_ranks:
            for published_step in {max(step - 1, self._last_step + 1), step}:
                slot = self._control.get_slot(r, published_step & 1)
                length, slot_step = SLOT_HEADER.unpack_from(slot)
                if slot_step == published_step:
                    published.append(
                        (r, published_step & 1, bytes(slot[: min(SLOT_HEADER.size + length, SLOT_NBYTES)]))
                    )
        self._last_step = step
        self._mail.send_all(self._mail.other_hosts, STEP, step, published)

    def _send_done(self, done: tuple[int, ...]) -> bool:
        """Send the ranks that have finished to the master's host: all at once, or one by one if the command failed."""
        control, local_ranks, posted = self._control, self._local_ranks, self._last_command
        if done == self._sent_done or not (min(done) >= posted or control.words[Control.FAILED] == posted):
            return False
        self._sent_done = done
        reports = {
            r: control.read_report(r)
            for r in local_ranks
            if done[r - local_ranks.start] == posted and control.report_nbytes[r]
        }
        self._mail.send(0, DONE, done, tuple(control.committed[local_ranks.start : local_ranks.stop]), reports)
        return True

    def _beat(self, now: float) -> None:
        """Send a beat if it is time, and check the other hosts and the workers."""
        if now >= self._next_beat and not self._is_ending:
            self._next_beat = now + _BEAT_INTERVAL
            local_ranks, clock = self._local_ranks, time.monotonic_ns()
            elapsed = [(p and clock - p) for p in self._control.last_progress[local_ranks.start : local_ranks.stop]]
            sleeping = list(self._control.sleep_reason[local_ranks.start : local_ranks.stop])
            self._mail.send_all(self._beat_hosts, BEAT, elapsed, sleeping)
        if now >= self._next_check:
            self._next_check = now + _CHECK_INTERVAL
            self._check_peers(now)

    def _check_peers(self, now: float) -> None:
        """Check whether the master, the other hosts and this host's workers are alive."""
        if self._channel is not None and is_closed(self._channel):
            self._end_without_master(now)
        if self._is_ending:
            return
        timeout = self._config["timeout"]
        for host in self._beat_hosts:
            if now - self._mail.last_received[host] > timeout:
                if not self._is_master_host:
                    if not self._config["launched"] and os.getppid() > 1:
                        with contextlib.suppress(OSError):
                            os.kill(os.getppid(), signal.SIGKILL)  # mpirun's daemon, which would wait forever
                    self._exit_alone(9)
                name, first = describe_host(self._names[host], self._ranks[host]), self._ranks[host].start
                self._report_remote_failure(f"{name} has not been heard of for {timeout:g} seconds", first)
        dead = self._workers.collect_exited()
        if dead is not None:
            number, pid, code = dead
            death = Death(number, self._names[self._host], pid, describe_exit(code))
            self._mail.send(0, REMOTE_FAILURE, death.describe(), number, death)
            del self._workers.pids[number]

    def _end_without_master(self, now: float) -> None:
        """End all hosts after the master's death; leave those that do not answer to the launcher."""
        self._control.words[Control.END_REQUEST] = 2
        self._deadline = self._deadline or now + _EXIT_SECONDS_WITHOUT_MASTER
        if now > self._deadline:
            self._exit_alone(1)

    # -- messages of other hosts ----------------------------------------------------------------------

    def _on_command(self, source: int, number: int, message: bytes, task: TaskMemory | None) -> None:
        control, words = self._control, self._control.words
        self._task.start_command(number, task)
        control.mailbox[: len(message)] = message
        words[Control.MESSAGE_NBYTES] = len(message)
        words[Control.NEWEST_KEY] = self._last_segment_key
        words[Control.POSTED] = self._last_command = number
        self._control.wake_local_ranks(AWAITS_COMMAND)

    def _on_announce(self, source: int, key: int, nbytes: int, path: str | None) -> None:
        try:
            with create_unlinked_file(nbytes) if path is None else _open(path, nbytes) as file:
                segment = Segment(key, file.fileno(), nbytes, path is not None)
                for channel in self._workers.channels.values():
                    send_segment(channel, segment, file.fileno())
        except (MemoryError, OSError) as error:
            name = describe_host(self._names[self._host], self._local_ranks)
            self._mail.send(0, REMOTE_FAILURE, f"{name}: {error}", self._local_ranks.start)
            return
        self._segments[key] = segment
        self._last_segment_key = key

    def _on_pages(self, source: int, key: int, pages: np.ndarray, content: np.ndarray) -> None:
        if key in self._segments:  # else it could not be mapped
            segment = self._segments[key]
            write_pages(np.frombuffer(segment.buffer, np.uint8, segment.nbytes), pages, content)

    def _on_drop(self, source: int, keys: list[int]) -> None:
        for key in keys:
            self._segments.pop(key, None)

    def _on_step(self, source: int, step: int, published: list[tuple[int, int, bytes]]) -> None:
        self._tally.receive_step(source, step)
        control = self._control
        for r, parity, content in published:
            control.get_slot(r, parity)[: len(content)] = content
        for r in self._ranks[source]:
            control.arrived[r] = step
        self._control.wake_local_ranks(AWAITS_STEP)

    def _on_failed(self, source: int, number: int) -> None:
        self._tally.receive_failed(source, number)
        words = self._control.words
        if number > words[Control.FAILED]:
            words[Control.FAILED] = number
            self._control.wake_all_ranks()
        self._decide_commands()

    def _decide_commands(self) -> None:
        """Record the last common step of failed commands that all hosts have reported."""
        for number, step in self._tally.pop_decided():
            record_common_step(self._control.words, number, step)
            self._control.wake_local_ranks(AWAITS_STEP)

    def _on_done(
        self, source: int, done: tuple[int, ...], committed: tuple[int, ...], reports: dict[int, bytes]
    ) -> None:
        control = self._control
        for i, r in enumerate(self._ranks[source]):
            control.write_report(r, reports.get(r, b""))
            control.committed[r] = committed[i]
            control.done[r] = done[i]
        self._control.wake_local_ranks(AWAITS_COMPLETION)

    def _on_remote_failure(self, source: int, *failure: Any) -> None:
        self._report_remote_failure(*failure)

    def _on_beat(self, source: int, elapsed: list[int], sleeping: list[int]) -> None:
        control, clock = self._control, time.monotonic_ns()
        for i, r in enumerate(self._ranks[source]):
            control.last_progress[r] = elapsed[i] and clock - elapsed[i]
            control.sleep_reason[r] = sleeping[i]

    def _on_end(self, source: int, kill: bool) -> None:
        self._workers.end(0.0 if kill else _EXIT_SECONDS, lambda: False)
        self._is_ending = True
        self._mail.send(0, ENDED)

    def _on_ended(self, source: int) -> None:
        self._ended_hosts.add(source)

    # -- loss and exit -----------------------------------------------------------------------------------------------

    def _report_remote_failure(self, text: str, rank: int, death: Death | None = None) -> None:
        """Write the fields of a `RemoteFailure` for the master, unless an earlier one may be the cause of this one."""
        if self._control.words[Control.FAILURE_NBYTES]:
            return
        content = json.dumps([text[: FAILURE_NBYTES // 8], rank, death]).encode()
        self._layout.failure_message[: len(content)] = content
        self._control.words[Control.FAILURE_NBYTES] = len(content)
        self._control.wake_all_ranks()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._config["master"], signal.SIGURG)  # it may be running its own part of the command

    def _exit_alone(self, code: int) -> NoReturn:
        """Exit without the other hosts."""
        self._workers.end(0.0, lambda: True)
        if not self._config["launched"]:  # else mpirun would end the master, too
            os.kill(os.getpid(), signal.SIGKILL)  # mpirun may ignore an exit code, but no signal
        os._exit(code)


def _open(path: str, nbytes: int) -> io.FileIO:
    """Open a file that another host has opened, and check its size."""
    file = io.FileIO(path)
    size = os.fstat(file.fileno()).st_size
    if size != nbytes:
        file.close()
        raise OSError(f"{path} has {size:,} bytes here, and {nbytes:,} on the master's host")
    return file


def main(address: str) -> None:
    """Run an agent until the ranks end; the first host's agent connects to the master at ``address``."""
    ignore_job_signals()
    os.environ.pop("MPI4PY_RC_INITIALIZE", None)  # set for scripts that must not initialise MPI
    import mpi4py

    mpi4py.rc.finalize = False
    mpi4py.rc.thread_level = "single"
    # MPICH's UCX would split a frame, and copy each part once more.
    os.environ.setdefault("UCX_RNDV_THRESH", str(FRAME // 4))
    # UCX would create shared memory for processes of the same host, of which there are none, and leave it behind if
    # this process is killed during its start.
    os.environ.setdefault("UCX_TLS", "^sm")
    if address:  # else the master may call fork() at any time
        signal.alarm(_START_SECONDS)  # MPI waits without limit until all are connected
    from mpi4py import MPI

    _unlink_shared_memory()
    world = MPI.COMM_WORLD
    if not address and world.rank == 0:  # MPI has not connected this process: the first one is the master's
        raise SystemExit(f"MPI does not connect the process on {platform.node()} with the others that were started")
    facts = world.gather(_collect_facts())
    channel, file, config = None, None, None
    if world.rank == 0:
        channel, config, file = _connect(address, facts)
    config = world.bcast(config)
    if config is None:  # the master has cancelled the start
        MPI.Finalize()
        return
    frames = world.Dup()
    signal.alarm(0)
    local_ranks = number_ranks(config["counts"])[world.rank]
    is_master_host, extra = file is not None, PipeLayout.compute_nbytes(len(local_ranks))
    if file is None:
        file = _create_control_memory(MPI, config, local_ranks, extra)
        _set_environment(config)
    spin = SPIN_SECONDS if len(local_ranks) < count_available_cores() else 0.0
    control = Control(config["size"], spin, file.fileno(), is_master_host, local_ranks, extra)
    workers = Workers(config["root"], control, None if is_master_host else file)
    if not is_master_host:
        workers.start(config["profile"])
        file.close()
    Agent(MPI, config, control, channel, workers, frames).run()
    with contextlib.suppress(MPI.Exception):  # messages that were never received
        MPI.Finalize()


def _set_environment(config: dict[str, Any]) -> None:
    """Give this process, and so its workers, the environment variables, ``sys.path`` and folder of the master."""
    os.environ.update(config["environment"])
    # A worker that imports mpi4py, as Theano does, must neither identify as this agent nor initialise MPI.
    os.environ["MPI4PY_RC_INITIALIZE"] = "0"
    for name in [name for name in os.environ if name.startswith(_LAUNCHERS)]:
        del os.environ[name]
    sys.path[:] = config["path"]
    with contextlib.suppress(OSError):
        os.chdir(config["folder"])


def _create_control_memory(mpi: Any, config: dict[str, Any], local_ranks: range, extra: int) -> io.FileIO:
    """Create this host's control memory; if there is no memory for it, report the loss and wait for END."""
    try:
        return Control.create(config["size"], len(local_ranks), extra)
    except MemoryError as error:
        mail = Mail(mpi, mpi.COMM_WORLD)
        mail.send(
            0, REMOTE_FAILURE, f"{describe_host(config['names'][mail.host], local_ranks)}: {error}", local_ranks.start
        )
        deadline = time.monotonic() + _EXIT_SECONDS
        while time.monotonic() < deadline and all(kind != END for _, kind, _ in mail.receive()):
            time.sleep(_MAX_SLEEP)
        raise


def _unlink_shared_memory() -> None:
    """Unlink files in /dev/shm that MPI would leave behind if this process were killed.

    They are for processes of the same host, on which there is one agent only.  Open MPI creates some under srun.
    """
    pattern = re.compile(r"/dev/shm/(mpich|sm_segment)\S*$")
    with open("/proc/self/maps") as maps:
        names = {match[0] for line in maps if (match := pattern.search(line))}
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _collect_facts() -> dict[str, Any]:
    """Return this host's name, cores, GPUs and versions, for the master."""
    return {
        "name": platform.node(),
        "cores": count_available_cores(),
        "gpus": get_n_gpu(),
        "machine": os.cpu_count() or 1,
        "versions": {"Python": platform.python_version(), **_find_versions()},
    }


def _find_versions() -> dict[str, str]:
    versions = list_versions(("synkhronos", "numpy", "pytensor", "Theano", "jax", "nccl4py", "cuda-core"))
    if find_spec("pygpu") is not None:  # linked into environments without metadata
        versions["pygpu"] = "installed"
    return versions


def _connect(address: str, facts: Any) -> tuple[socket.socket, dict[str, Any] | None, Any]:
    """Send the hosts' descriptions to the master; return the channel, its configuration and the control memory."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        channel.connect("\0" + address)
    except ConnectionRefusedError:
        name = platform.node()
        raise RuntimeError(f"the first host has to be the machine that calls fork(), and {name} is not") from None
    pid, user, _ = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.getuid():
        raise RuntimeError("another user's process answers in the master's place")
    channel.send(json.dumps(facts).encode())
    content, files, _, _ = socket.recv_fds(channel, 1 << 20, 1)
    if not content:
        return channel, None, None
    config = json.loads(content)
    config["master"] = pid
    return channel, config, open(files[0], "r+b", buffering=0)
