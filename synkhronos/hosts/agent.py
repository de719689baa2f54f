"""The agent of a host: the process that ``mpirun`` starts there, and that alone speaks MPI.

An agent polls its host's control memory and the messages that have arrived, in turns, and waits for neither::

    control memory of this host                                to and from the other agents (`Mail`)
    a command was posted (master's host)          ->           POST, preceded by ANNOUNCE, PAGES, DROP
    all ranks of the host have reached a step     ->           STEP, with the values that they publish
    a rank, here or elsewhere, has failed         ->           FAILED, once from each host
    all ranks of the host have finished           ->           DONE, with their reports, to the master's host
    a worker has exited                           ->           LOST, to the master's host
    a frame of a pipe is full, or free            <->          frames, to and from the neighbours
    a rank has sent to a rank of another host     ->           PART, to that host; STOP, to all
    a rank uses a lock of another host            <->          ASK, ANSWER, CONTENT: see `synkhronos.hosts.task`
    the master ends the ranks                     ->           END;  answered by GONE

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
    DONE,
    DROP,
    END,
    FAILED,
    GONE,
    LOST,
    MAX_PENDING,
    PAGES,
    POST,
    STEP,
    Mail,
)
from synkhronos.hosts.names import describe_host, number_ranks
from synkhronos.hosts.page_table import PAGE, PageTable, find_pages, read_pages, write_pages
from synkhronos.hosts.pipes import FRAME, NEWS, FrameTransport, PipeLayout
from synkhronos.hosts.task import TaskAgent
from synkhronos.ranks.agreement import StepTally, record_common_step
from synkhronos.ranks.child_process import ignore_job_signals
from synkhronos.ranks.control import FOR_COMMAND, FOR_JOIN, FOR_STEP, SLOT, SPIN, Control
from synkhronos.ranks.errors import describe_exit
from synkhronos.ranks.rank import HEAD
from synkhronos.ranks.segments import Segment, SegmentReceiver, UnmappedSegment, announce, create_unlinked, is_closed
from synkhronos.ranks.task_memory import TaskMemory
from synkhronos.ranks.threads import available_cores
from synkhronos.ranks.workers import Workers

#: Prefixes of the environment variables by which launchers identify MPI processes.
_LAUNCHERS = ("PMI", "OMPI_", "PRTE_", "MPI_LOCAL", "HYDI_", "HYDRA_")
#: Maximal number of messages that an agent accepts while it cannot process them: beats of some minutes.
_MAX_UNPROCESSED = 10_000
#: Seconds between two beats, and between two checks of the workers' lives.
_BEAT, _LOOK = 0.2, 0.02
#: Seconds without news up to which an agent polls without sleeping, and up to which its sleeps are short.
_AWAKE, _DOZING = 1e-3, 0.05
#: Seconds of a short sleep, and of the longest; in between a sleep is a hundredth of the time without news.
_SHORT, _LONG = 50e-6, 10e-3
#: Seconds that workers get to exit by themselves.
_GRACE = 2.0
#: Seconds that the other hosts get to exit after the master has.
_GRACE_WITHOUT_MASTER = 0.5
#: Seconds after which an agent exits that has not connected to the others.
_START = 90


class Agent:
    """Agent of one host.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    config : dict
        Configuration from the master: see `synkhronos.hosts.mpi_link.MpiLink.start`.
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
        self._me, self._names = world.rank, config["names"]
        self._ranks = number_ranks(config["counts"])
        self._here = control.local_ranks
        self._layout = PipeLayout(control)
        self._layout.n_next_hosts[0] = world.size - 1 - world.rank
        self._mail = Mail(mpi, world)
        self._frames = FrameTransport(mpi, frames, control, self._layout)
        self._pages = PageTable(world.size - 1, self._heartbeat)
        self._receiver = None if channel is None else SegmentReceiver(channel)
        self._segments: dict[int, Segment] = {}
        self._task = TaskAgent(self._mail, control, self._ranks, self._segments)
        self._mapped = self._posted = self._step = 0
        self._tally = StepTally(world.size, world.rank)
        self._done: tuple[int, ...] = ()
        # The others start their workers before they send anything.
        self._next_beat = self._next_look = 0.0
        self._deadline = 0.0
        self._is_ending = False
        #: Hosts with which this one exchanges beats, and those of them that have exited.
        self._peers = self._mail.others if self._is_first else [0]
        self._gone: set[int] = set()
        self._handlers: dict[int, Callable[..., None]] = {
            POST: self._on_post, ANNOUNCE: self._on_announce, PAGES: self._on_pages, DROP: self._on_drop,
            STEP: self._on_step, FAILED: self._on_failed, DONE: self._on_done, LOST: self._on_lost,
            BEAT: self._on_beat, END: self._on_end, GONE: self._on_gone, **self._task.handlers,
        }  # fmt: skip

    @property
    def _is_first(self) -> bool:
        return self._channel is not None

    def run(self) -> None:
        """Poll until the ranks end."""
        last_news, has_cores = time.monotonic(), len(self._here) < available_cores()
        while not self._is_over():
            news = self._poll_memory()
            for source, kind, what in self._mail.receive():
                self._handlers[kind](source, *what)
                news |= kind != BEAT
            if self._frames.progress():
                self._control.ring_here(FOR_STEP)
                news = True
            news |= self._task.progress()
            now = time.monotonic()
            self._beat(now)
            if news:
                last_news = now
                continue
            quiet = now - last_news
            # While frames are in transit a short sleep costs nothing: others follow, and ranks may need the core.
            if quiet < _AWAKE and has_cores and not self._frames.has_transfers:
                os.sched_yield()
            else:
                time.sleep(_SHORT if quiet < _DOZING or self._task.has_waiting_ranks else min(quiet / 100, _LONG))

    def _is_over(self) -> bool:
        return self._is_ending and (not self._is_first or self._gone.issuperset(self._peers))

    # -- events of this host -----------------------------------------------------------------------------------

    def _poll_memory(self) -> bool:
        """Send the other hosts what has changed on this one; return True if something has."""
        words, news = self._control.words, False
        # Read before FAILED, which a failing rank writes first: otherwise DONE could be sent without the failure.
        done = tuple(self._control.done[self._here.start : self._here.stop])
        if self._is_first and words[Control.POSTED] > self._posted:
            self._post()
            news = True
        failed = words[Control.FAILED]  # read before the ranks' steps: see `ranks.agreement`
        step = min(self._control.arrived[self._here.start : self._here.stop])
        sends_step, sends_failed = self._tally.update(failed, step)
        if sends_step:
            self._send_step(step)
        if sends_failed:
            self._mail.send_all(self._mail.others, FAILED, failed)
            self._decide_commands()
        news |= sends_step or sends_failed
        if not self._is_first:
            news |= self._send_done(done)
        elif words[Control.ENDING] and not self._is_ending:
            self._is_ending = news = True
            self._mail.send_all(self._mail.others, END, words[Control.ENDING] > 1)
        return news

    def _post(self) -> None:
        """Send a command to the other hosts, preceded by the segments and pages that it needs."""
        words, mail = self._control.words, self._mail
        assert self._receiver is not None
        self._posted = words[Control.POSTED]
        while self._mapped < words[Control.ANNOUNCED]:
            segment = self._receiver.receive()
            if isinstance(segment, UnmappedSegment):
                segment = segment.map()
            if segment.key > self._mapped:
                self._mapped = segment.key
                self._segments[segment.key] = segment
                if not segment.is_file:
                    self._pages.add(segment.key, np.frombuffer(segment.buffer, np.uint8, segment.nbytes))
                path = self._receiver.path if segment.is_file else None
                mail.send_all(mail.others, ANNOUNCE, segment.key, segment.nbytes, path)
        length = words[Control.LENGTH]
        message = bytes(self._control.mailbox[:length])
        reads, dropped, task = pickle.loads(self._control.mailbox[length : length + words[Control.PLAN]])
        memory = self._pages.memory
        missing = self._pages.take_missing([find_pages(of_host, memory) for of_host in reads])
        for host, of_host in zip(mail.others, missing, strict=True):
            for key, pages in of_host.items():
                for at in range(0, len(pages), CHUNK_NBYTES // PAGE):
                    part = pages[at : at + CHUNK_NBYTES // PAGE]
                    content = read_pages(memory[key], part)
                    words[Control.SENT] += content.size
                    mail.send(host, PAGES, key, part, content)
                    self._heartbeat(MAX_PENDING)
            mail.send(host, POST, self._posted, message, task)
            if dropped:
                mail.send(host, DROP, dropped)
        self._pages.drop(dropped)
        for key in dropped:
            self._segments.pop(key, None)
        self._task.begin(self._posted, task)

    def _heartbeat(self, limit: int = 1 << 30) -> None:
        """Send beats during long work, and wait until at most ``limit`` messages are unsent."""
        while True:
            self._mail.accept(_MAX_UNPROCESSED)
            self._beat(time.monotonic())
            if not self._mail.has_pending(limit):
                return
            time.sleep(_SHORT)

    def _send_step(self, step: int) -> None:
        """Send the step that this host's ranks have reached, with the values published there and one step before.

        They may have passed the step before without waiting for the others.
        """
        shown = []
        for r in self._here:
            for each in {max(step - 1, self._step + 1), step}:
                slot = self._control.slot(r, each & 1)
                length, stamp = HEAD.unpack_from(slot)
                if stamp == each:
                    shown.append((r, each & 1, bytes(slot[: min(HEAD.size + length, SLOT)])))
        self._step = step
        self._mail.send_all(self._mail.others, STEP, step, shown)

    def _send_done(self, done: tuple[int, ...]) -> bool:
        """Send the ranks that have finished to the master's host: all at once, or one by one if the command failed."""
        control, here, posted = self._control, self._here, self._posted
        if done == self._done or not (min(done) >= posted or control.words[Control.FAILED] == posted):
            return False
        self._done = done
        reports = {
            r: control.read_report(r) for r in here if done[r - here.start] == posted and control.report_length[r]
        }
        self._mail.send(0, DONE, done, tuple(control.committed[here.start : here.stop]), reports)
        return True

    def _beat(self, now: float) -> None:
        """Send a beat if it is time, and check the other hosts and the workers."""
        if now >= self._next_beat and not self._is_ending:
            self._next_beat = now + _BEAT
            here, clock = self._here, time.monotonic_ns()
            going_on = [(p and clock - p) for p in self._control.progress[here.start : here.stop]]
            sleeping = list(self._control.sleeping[here.start : here.stop])
            self._mail.send_all(self._peers, BEAT, going_on, sleeping)
        if now >= self._next_look:
            self._next_look = now + _LOOK
            self._check_peers(now)

    def _check_peers(self, now: float) -> None:
        """Check whether the master, the other hosts and this host's workers are alive."""
        if self._channel is not None and is_closed(self._channel):
            self._end_without_master(now)
        if self._is_ending:
            return
        timeout = self._config["timeout"]
        for host in self._peers:
            if now - self._mail.last_received[host] > timeout:
                if not self._is_first:
                    if not self._config["launched"] and os.getppid() > 1:
                        with contextlib.suppress(OSError):
                            os.kill(os.getppid(), signal.SIGKILL)  # mpirun's daemon, which would wait forever
                    self._exit_alone(9)
                name, first = describe_host(self._names[host], self._ranks[host]), self._ranks[host].start
                self._report_loss(f"{name} has not been heard of for {timeout:g} seconds", first)
        dead = self._workers.find_dead()
        if dead is not None:
            number, pid, code = dead
            text = f"rank {number} on host {self._names[self._me]} (process {pid}) {describe_exit(code)}"
            self._mail.send(0, LOST, text, number)
            del self._workers.pids[number]

    def _end_without_master(self, now: float) -> None:
        """End all hosts after the master's death; leave those that do not answer to the launcher."""
        self._control.words[Control.ENDING] = 2
        self._deadline = self._deadline or now + _GRACE_WITHOUT_MASTER
        if now > self._deadline:
            self._exit_alone(1)

    # -- messages of other hosts ----------------------------------------------------------------------

    def _on_post(self, source: int, number: int, message: bytes, task: TaskMemory | None) -> None:
        control, words = self._control, self._control.words
        self._task.begin(number, task)
        control.mailbox[: len(message)] = message
        words[Control.LENGTH] = len(message)
        words[Control.ANNOUNCED] = self._mapped
        words[Control.POSTED] = self._posted = number
        self._control.ring_here(FOR_COMMAND)

    def _on_announce(self, source: int, key: int, nbytes: int, path: str | None) -> None:
        try:
            with create_unlinked(nbytes) if path is None else _open(path, nbytes) as file:
                segment = Segment(key, file.fileno(), nbytes, path is not None)
                for channel in self._workers.channels.values():
                    announce(channel, segment, file.fileno())
        except (MemoryError, OSError) as error:
            name = describe_host(self._names[self._me], self._here)
            self._mail.send(0, LOST, f"{name}: {error}", self._here.start)
            return
        self._segments[key] = segment
        self._mapped = key

    def _on_pages(self, source: int, key: int, pages: np.ndarray, content: np.ndarray) -> None:
        if key in self._segments:  # else it could not be mapped
            segment = self._segments[key]
            write_pages(np.frombuffer(segment.buffer, np.uint8, segment.nbytes), pages, content)

    def _on_drop(self, source: int, keys: list[int]) -> None:
        for key in keys:
            self._segments.pop(key, None)

    def _on_step(self, source: int, step: int, shown: list[tuple[int, int, bytes]]) -> None:
        self._tally.receive_step(source, step)
        control = self._control
        for r, which, content in shown:
            control.slot(r, which)[: len(content)] = content
        for r in self._ranks[source]:
            control.arrived[r] = step
        self._control.ring_here(FOR_STEP)

    def _on_failed(self, source: int, number: int) -> None:
        self._tally.receive_failed(source, number)
        words = self._control.words
        if number > words[Control.FAILED]:
            words[Control.FAILED] = number
            self._control.ring_all()
        self._decide_commands()

    def _decide_commands(self) -> None:
        """Record the last common step of failed commands that all hosts have reported."""
        for number, step in self._tally.take_decided():
            record_common_step(self._control.words, number, step)
            self._control.ring_here(FOR_STEP)

    def _on_done(
        self, source: int, done: tuple[int, ...], committed: tuple[int, ...], reports: dict[int, bytes]
    ) -> None:
        control = self._control
        for i, r in enumerate(self._ranks[source]):
            control.write_report(r, reports.get(r, b""))
            control.committed[r] = committed[i]
            control.done[r] = done[i]
        self._control.ring_here(FOR_JOIN)

    def _on_lost(self, source: int, text: str, rank: int) -> None:
        self._report_loss(text, rank)

    def _on_beat(self, source: int, going_on: list[int], sleeping: list[int]) -> None:
        control, clock = self._control, time.monotonic_ns()
        for i, r in enumerate(self._ranks[source]):
            control.progress[r] = going_on[i] and clock - going_on[i]
            control.sleeping[r] = sleeping[i]

    def _on_end(self, source: int, kill: bool) -> None:
        self._workers.end(0.0 if kill else _GRACE, lambda: False)
        self._is_ending = True
        self._mail.send(0, GONE)

    def _on_gone(self, source: int) -> None:
        self._gone.add(source)

    # -- loss and exit -----------------------------------------------------------------------------------------------

    def _report_loss(self, text: str, rank: int) -> None:
        """Report a loss to the master: the first only, since others may follow from it."""
        if self._control.words[Control.NEWS]:
            return
        content = json.dumps([text[: NEWS // 8], rank]).encode()
        self._layout.news[: len(content)] = content
        self._control.words[Control.NEWS] = len(content)
        self._control.ring_all()
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
        signal.alarm(_START)  # MPI waits without limit until all are connected
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
    here = number_ranks(config["counts"])[world.rank]
    made, extra = file is not None, PipeLayout.nbytes(len(here))
    if file is None:
        file = _create_control_memory(MPI, config, here, extra)
        _set_environment(config)
    spin = SPIN if len(here) < available_cores() else 0.0
    control = Control(config["size"], spin, file.fileno(), made, here, extra)
    workers = Workers(config["root"], control, None if made else file)
    if not made:
        workers.start(config["profile"])
        file.close()
    Agent(MPI, config, control, channel, workers, frames).run()
    with contextlib.suppress(MPI.Exception):  # messages that were never received
        MPI.Finalize()


def _set_environment(config: dict[str, Any]) -> None:
    """Set up this process, and so its workers, as the master's process is: variables, ``sys.path``, folder."""
    os.environ.update(config["environment"])
    # A worker that imports mpi4py, as Theano does, must neither identify as this agent nor initialise MPI.
    os.environ["MPI4PY_RC_INITIALIZE"] = "0"
    for name in [name for name in os.environ if name.startswith(_LAUNCHERS)]:
        del os.environ[name]
    sys.path[:] = config["path"]
    with contextlib.suppress(OSError):
        os.chdir(config["folder"])


def _create_control_memory(mpi: Any, config: dict[str, Any], here: range, extra: int) -> io.FileIO:
    """Create this host's control memory; without room for it, report the loss and wait for the end."""
    try:
        return Control.create(config["size"], len(here), extra)
    except MemoryError as error:
        mail = Mail(mpi, mpi.COMM_WORLD)
        mail.send(0, LOST, f"{describe_host(config['names'][mail.me], here)}: {error}", here.start)
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline and all(kind != END for _, kind, _ in mail.receive()):
            time.sleep(_LONG)
        raise


def _unlink_shared_memory() -> None:
    """Unlink files in /dev/shm that MPI would leave behind if this process were killed.

    They are for processes of the same host, on which there is one agent only.  Open MPI creates some under srun.
    """
    ours = re.compile(r"/dev/shm/(mpich|sm_segment)\S*$")
    with open("/proc/self/maps") as maps:
        names = {found[0] for line in maps if (found := ours.search(line))}
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _collect_facts() -> dict[str, Any]:
    """Return this host's name, cores, GPUs and versions, for the master."""
    return {
        "name": platform.node(),
        "cores": available_cores(),
        "gpus": get_n_gpu(),
        "machine": os.cpu_count() or 1,
        "versions": {"Python": platform.python_version(), **_find_versions()},
    }


def _find_versions() -> dict[str, str]:
    found = list_versions(("synkhronos", "numpy", "pytensor", "Theano", "jax", "nccl4py", "cuda-core"))
    if find_spec("pygpu") is not None:  # linked into environments without metadata
        found["pygpu"] = "installed"
    return found


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
