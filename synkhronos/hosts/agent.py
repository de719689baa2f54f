"""What an agent does, from its start to its end.

`main`
    The process that ``mpirun`` starts on each host.

An agent looks at its host's control memory and at what has come by MPI, in turns, and never waits for either::

    control memory of this host                                to and from the other agents (`Mail`)
    a command was posted (master's host)          ->           POST, before it ANNOUNCE, PAGES, DROP
    all ranks of the host have come to a step     ->           STEP, with what they show
    a rank, here or elsewhere, has failed         ->           FAILED, from each host once
    all ranks of the host are done                ->           DONE, with their reports, to the master's host
    a worker has ended                            ->           LOST, to the master's host
    a frame of a pipe is filled, or free          <->          frames, to and from the neighbours
    a rank has sent to one of another host        ->           PART, to that host; STOP, to all
    a rank uses a lock of another host            <->          ASK, ANSWER, CONTENT: see `synkhronos.hosts.task`
    the master ends the ranks                     ->           END;  answered by GONE

The master's agent and each other one send each other BEAT a few times a second.  A host from which nothing comes for
`host_timeout` seconds is lost.  The master's agent tells the master so; another one, which has lost that agent, ends
its workers and itself.  A rank that computes for minutes is no loss, since beats come from agents.
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

from synkhronos.checks import versions
from synkhronos.gpus import get_n_gpu
from synkhronos.hosts.contents import PAGE, Contents, pages_of, put_pages, take_pages
from synkhronos.hosts.frames import Frames
from synkhronos.hosts.mail import (
    ANNOUNCE,
    BEAT,
    DONE,
    DROP,
    END,
    FAILED,
    GONE,
    LOST,
    PAGES,
    PIECE,
    POST,
    STEP,
    UNDER_WAY,
    Mail,
)
from synkhronos.hosts.names import host_and_ranks, ranks_of
from synkhronos.hosts.pipes import FRAME, NEWS, Layout
from synkhronos.hosts.task import TaskAgent
from synkhronos.ranks.agreement import StepTally, close_command
from synkhronos.ranks.control import FOR_COMMAND, FOR_JOIN, FOR_STEP, SLOT, SPIN, Control
from synkhronos.ranks.errors import cause_of_death
from synkhronos.ranks.rank import HEAD
from synkhronos.ranks.segments import Receiver, Segment, Unmapped, announce, create_unlinked, is_closed
from synkhronos.ranks.task import TaskMemory
from synkhronos.ranks.threads import available_cores
from synkhronos.ranks.worker import ignore_signals_to_all
from synkhronos.ranks.workers import Workers

#: What begins the names of the variables by which launchers tell a process of MPI who it is.
_LAUNCHERS = ("PMI", "OMPI_", "PRTE_", "MPI_LOCAL", "HYDI_", "HYDRA_")
#: Messages that an agent takes in while it can't look at them: beats, for minutes.
_WHILE_BUSY = 10_000
#: Seconds between two beats, and between two looks at the workers' lives.
_BEAT, _LOOK = 0.2, 0.02
#: Seconds of quiet up to which an agent looks without a pause, and up to which its pauses are short.
_AWAKE, _DOZING = 1e-3, 0.05
#: The short pauses, and the longest; between them a pause is a hundredth of the quiet before it.
_SHORT, _LONG = 50e-6, 10e-3
#: Seconds that workers get to end by themselves.
_GRACE = 2.0
#: Seconds that the other hosts get to end once the master has ended.
_ENOUGH = 0.5
#: Seconds after which an agent ends that has not met the others.
_START = 90


class Agent:
    """One host's agent.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    config : dict
        What the master has said: see `synkhronos.hosts.start.MpiLink.start`.
    control : Control
        This host's.
    channel : socket or None
        To the master, on its host.
    workers : Workers
        Those that this agent has started: none on the master's host.
    frames : mpi4py.MPI.Comm
        Another communicator of all agents, for frames.
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
        self._ranks = ranks_of(config["counts"])
        self._here = control.here
        self._layout = Layout(control)
        self._layout.beyond[0] = world.size - 1 - world.rank
        self._mail = Mail(mpi, world)
        self._frames = Frames(mpi, frames, control, self._layout)
        self._contents = Contents(world.size - 1, self._go_on)
        self._receiver = None if channel is None else Receiver(channel)
        self._segments: dict[int, Segment] = {}
        self._task = TaskAgent(self._mail, control, self._ranks, self._segments)
        self._mapped = self._posted = self._step = 0
        self._tally = StepTally(world.size, world.rank)
        self._done: tuple[int, ...] = ()
        # The others start their workers before they say anything.
        self._next_beat = self._next_look = 0.0
        self._deadline = 0.0
        self._is_ending = False
        #: The hosts with which this one exchanges beats, and those of the others that have ended.
        self._peers = self._mail.others if self._is_first else [0]
        self._gone: set[int] = set()
        self._takes: dict[int, Callable[..., None]] = {
            POST: self._take_post, ANNOUNCE: self._take_announce, PAGES: self._take_pages, DROP: self._take_drop,
            STEP: self._take_step, FAILED: self._take_failed, DONE: self._take_done, LOST: self._take_lost,
            BEAT: self._take_beat, END: self._take_end, GONE: self._take_gone, **self._task.takes,
        }  # fmt: skip

    @property
    def _is_first(self) -> bool:
        return self._channel is not None

    def run(self) -> None:
        """Look here and there until the ranks end."""
        last_news, has_cores = time.monotonic(), len(self._here) < available_cores()
        while not self._is_over():
            news = self._look_here()
            for source, kind, what in self._mail.come():
                self._takes[kind](source, *what)
                news |= kind != BEAT
            if self._frames.move():
                self._control.ring_here(FOR_STEP)
                news = True
            news |= self._task.move()
            now = time.monotonic()
            self._beat(now)
            if news:
                last_news = now
                continue
            quiet = now - last_news
            # Frames that move wait for a pause without loss: others are under way, and ranks may need the core.
            if quiet < _AWAKE and has_cores and not self._frames.are_moving:
                os.sched_yield()
            else:
                time.sleep(_SHORT if quiet < _DOZING or self._task.is_waited_for else min(quiet / 100, _LONG))

    def _is_over(self) -> bool:
        return self._is_ending and (not self._is_first or self._gone.issuperset(self._peers))

    # -- what happens here -----------------------------------------------------------------------------------

    def _look_here(self) -> bool:
        """Tell the other hosts what is new on this one."""
        words, news = self._control.words, False
        # Before the word of a failure, which a rank writes first, or the master might hear that all are done, not why.
        done = tuple(self._control.done[self._here.start : self._here.stop])
        if self._is_first and words[Control.POSTED] > self._posted:
            self._post()
            news = True
        failed = words[Control.FAILED]  # before the ranks' steps: see `ranks.agreement`
        step = min(self._control.arrived[self._here.start : self._here.stop])
        sends_step, sends_failed = self._tally.update(failed, step)
        if sends_step:
            self._show(step)
        if sends_failed:
            self._mail.send_all(self._mail.others, FAILED, failed)
            self._close()
        news |= sends_step or sends_failed
        if not self._is_first:
            news |= self._say_done(done)
        elif words[Control.ENDING] and not self._is_ending:
            self._is_ending = news = True
            self._mail.send_all(self._mail.others, END, words[Control.ENDING] > 1)
        return news

    def _post(self) -> None:
        """Send a command to the other hosts, after what it needs."""
        words, mail = self._control.words, self._mail
        assert self._receiver is not None
        self._posted = words[Control.POSTED]
        while self._mapped < words[Control.ANNOUNCED]:
            segment = self._receiver.receive()
            if isinstance(segment, Unmapped):
                segment = segment.map()
            if segment.key > self._mapped:
                self._mapped = segment.key
                self._segments[segment.key] = segment
                if not segment.is_file:
                    self._contents.add(segment.key, np.frombuffer(segment.buffer, np.uint8, segment.nbytes))
                path = self._receiver.path if segment.is_file else None
                mail.send_all(mail.others, ANNOUNCE, segment.key, segment.nbytes, path)
        length = words[Control.LENGTH]
        message = bytes(self._control.mailbox[:length])
        reads, dropped, task = pickle.loads(self._control.mailbox[length : length + words[Control.PLAN]])
        memory = self._contents.memory
        lacking = self._contents.lacking([pages_of(of_host, memory) for of_host in reads])
        for host, of_host in zip(mail.others, lacking, strict=True):
            for key, pages in of_host.items():
                for at in range(0, len(pages), PIECE // PAGE):
                    part = pages[at : at + PIECE // PAGE]
                    content = take_pages(memory[key], part)
                    words[Control.SENT] += content.size
                    mail.send(host, PAGES, key, part, content)
                    self._go_on(UNDER_WAY)
            mail.send(host, POST, self._posted, message, task)
            if dropped:
                mail.send(host, DROP, dropped)
        self._contents.drop(dropped)
        for key in dropped:
            self._segments.pop(key, None)
        self._task.begin(self._posted, task)

    def _go_on(self, most: int = 1 << 30) -> None:
        """Beat in the middle of long work, and wait until at most so many messages are on their way."""
        while True:
            self._mail.hear(_WHILE_BUSY)
            self._beat(time.monotonic())
            if not self._mail.is_sending(most):
                return
            time.sleep(_SHORT)

    def _show(self, step: int) -> None:
        """Say that this host's ranks have come to a step, and what they show there and at the one before.

        They may have gone through the one before without waiting for the others.
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

    def _say_done(self, done: tuple[int, ...]) -> bool:
        """Tell the master's host which ranks are done with the command: all at once, or, if it failed, as they come."""
        control, here, posted = self._control, self._here, self._posted
        if done == self._done or not (min(done) >= posted or control.words[Control.FAILED] == posted):
            return False
        self._done = done
        reports = {
            r: bytes(control.slot(r, 2)[: control.report_length[r]])
            for r in here
            if done[r - here.start] == posted and control.report_length[r]
        }
        self._mail.send(0, DONE, done, tuple(control.committed[here.start : here.stop]), reports)
        return True

    def _beat(self, now: float) -> None:
        """Say that this host is there, and see whether the others are."""
        if now >= self._next_beat and not self._is_ending:
            self._next_beat = now + _BEAT
            here, clock = self._here, time.monotonic_ns()
            going_on = [(p and clock - p) for p in self._control.progress[here.start : here.stop]]
            sleeping = list(self._control.sleeping[here.start : here.stop])
            self._mail.send_all(self._peers, BEAT, going_on, sleeping)
        if now >= self._next_look:
            self._next_look = now + _LOOK
            self._look_for_losses(now)

    def _look_for_losses(self, now: float) -> None:
        """See whether the master, the other hosts and this one's workers are there."""
        if self._channel is not None and is_closed(self._channel):
            self._end_without_the_master(now)
        if self._is_ending:
            return
        timeout = self._config["timeout"]
        for host in self._peers:
            if now - self._mail.heard[host] > timeout:
                if not self._is_first:
                    if not self._config["launched"] and os.getppid() > 1:
                        with contextlib.suppress(OSError):
                            os.kill(os.getppid(), signal.SIGKILL)  # mpirun's daemon, which would wait for ever
                    self._leave(9)
                name, first = host_and_ranks(self._names[host], self._ranks[host]), self._ranks[host].start
                self._tell(f"{name} has not been heard of for {timeout:g} seconds", first)
        dead = self._workers.first_dead()
        if dead is not None:
            number, pid, code = dead
            text = f"rank {number} on host {self._names[self._me]} (process {pid}) {cause_of_death(code)}"
            self._mail.send(0, LOST, text, number)
            del self._workers.pids[number]

    def _end_without_the_master(self, now: float) -> None:
        """End all, and those that don't answer by the launcher."""
        self._control.words[Control.ENDING] = 2
        self._deadline = self._deadline or now + _ENOUGH
        if now > self._deadline:
            self._leave(1)

    # -- what has come from other hosts ----------------------------------------------------------------------

    def _take_post(self, source: int, number: int, message: bytes, task: TaskMemory | None) -> None:
        control, words = self._control, self._control.words
        self._task.begin(number, task)
        control.mailbox[: len(message)] = message
        words[Control.LENGTH] = len(message)
        words[Control.ANNOUNCED] = self._mapped
        words[Control.POSTED] = self._posted = number
        self._control.ring_here(FOR_COMMAND)

    def _take_announce(self, source: int, key: int, nbytes: int, path: str | None) -> None:
        try:
            with create_unlinked(nbytes) if path is None else _open(path, nbytes) as file:
                segment = Segment(key, file.fileno(), nbytes, path is not None)
                for channel in self._workers.channels.values():
                    announce(channel, segment, file.fileno())
        except (MemoryError, OSError) as error:
            name = host_and_ranks(self._names[self._me], self._here)
            self._mail.send(0, LOST, f"{name}: {error}", self._here.start)
            return
        self._segments[key] = segment
        self._mapped = key

    def _take_pages(self, source: int, key: int, pages: np.ndarray, content: np.ndarray) -> None:
        if key in self._segments:  # else there was no room for it
            segment = self._segments[key]
            put_pages(np.frombuffer(segment.buffer, np.uint8, segment.nbytes), pages, content)

    def _take_drop(self, source: int, keys: list[int]) -> None:
        for key in keys:
            self._segments.pop(key, None)

    def _take_step(self, source: int, step: int, shown: list[tuple[int, int, bytes]]) -> None:
        self._tally.receive_step(source, step)
        control = self._control
        for r, which, content in shown:
            control.slot(r, which)[: len(content)] = content
        for r in self._ranks[source]:
            control.arrived[r] = step
        self._control.ring_here(FOR_STEP)

    def _take_failed(self, source: int, number: int) -> None:
        self._tally.receive_failed(source, number)
        words = self._control.words
        if number > words[Control.FAILED]:
            words[Control.FAILED] = number
            self._control.ring_all()
        self._close()

    def _close(self) -> None:
        """Say how far all ranks had come in a command that failed, when all hosts have told."""
        for number, step in self._tally.take_closed():
            close_command(self._control.words, number, step)
            self._control.ring_here(FOR_STEP)

    def _take_done(
        self, source: int, done: tuple[int, ...], committed: tuple[int, ...], reports: dict[int, bytes]
    ) -> None:
        control = self._control
        for i, r in enumerate(self._ranks[source]):
            report = reports.get(r, b"")
            control.slot(r, 2)[: len(report)] = report
            control.report_length[r] = len(report)
            control.committed[r] = committed[i]
            control.done[r] = done[i]
        self._control.ring_here(FOR_JOIN)

    def _take_lost(self, source: int, text: str, rank: int) -> None:
        self._tell(text, rank)

    def _take_beat(self, source: int, going_on: list[int], sleeping: list[int]) -> None:
        control, clock = self._control, time.monotonic_ns()
        for i, r in enumerate(self._ranks[source]):
            control.progress[r] = going_on[i] and clock - going_on[i]
            control.sleeping[r] = sleeping[i]

    def _take_end(self, source: int, kill: bool) -> None:
        self._workers.end(0.0 if kill else _GRACE, lambda: False)
        self._is_ending = True
        self._mail.send(0, GONE)

    def _take_gone(self, source: int) -> None:
        self._gone.add(source)

    # -- parts -----------------------------------------------------------------------------------------------

    def _tell(self, text: str, rank: int) -> None:
        """Tell the master of a loss: the first; what follows from it is no news."""
        if self._control.words[Control.NEWS]:
            return
        content = json.dumps([text[: NEWS // 8], rank]).encode()
        self._layout.news[: len(content)] = content
        self._control.words[Control.NEWS] = len(content)
        self._control.ring_all()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._config["master"], signal.SIGURG)  # it may be busy with its own part of the command

    def _leave(self, code: int) -> NoReturn:
        """End without the other hosts."""
        self._workers.end(0.0, lambda: True)
        if not self._config["launched"]:  # else the master would be ended with all that mpirun has started
            os.kill(os.getpid(), signal.SIGKILL)  # what mpirun does not overlook
        os._exit(code)


def _open(path: str, nbytes: int) -> io.FileIO:
    """Open a file that another host has too."""
    file = io.FileIO(path)
    size = os.fstat(file.fileno()).st_size
    if size != nbytes:
        file.close()
        raise OSError(f"{path} has {size:,} bytes here, and {nbytes:,} on the master's host")
    return file


def main(address: str) -> None:
    """Be an agent, from ``mpirun``'s start to the ranks' end; the first one finds the master at an address."""
    ignore_signals_to_all()
    os.environ.pop("MPI4PY_RC_INITIALIZE", None)  # which scripts are given that shall leave MPI alone
    import mpi4py

    mpi4py.rc.finalize = False
    mpi4py.rc.thread_level = "single"
    # MPICH's UCX would take a frame in parts, and copy each once more.
    os.environ.setdefault("UCX_RNDV_THRESH", str(FRAME // 4))
    # It would make shared memory for processes of the same host, of which there are none, and leave it where this one
    # is killed within its start.
    os.environ.setdefault("UCX_TLS", "^sm")
    if address:  # else the master calls fork() when it likes
        signal.alarm(_START)  # until all have met, MPI waits without end: for a host that went dark, say
    from mpi4py import MPI

    _unlink_shared_memory()
    world = MPI.COMM_WORLD
    if not address and world.rank == 0:  # the first process says what to do
        raise SystemExit(f"MPI does not connect the process on {platform.node()} with the others that were started")
    hellos = world.gather(_hello())
    channel, file, config = None, None, None
    if world.rank == 0:
        channel, config, file = _connect(address, hellos)
    config = world.bcast(config)
    if config is None:  # the master has thought better of it
        MPI.Finalize()
        return
    frames = world.Dup()
    signal.alarm(0)
    here = ranks_of(config["counts"])[world.rank]
    made, extra = file is not None, Layout.nbytes(len(here))
    if file is None:
        file = _control_memory(MPI, config, here, extra)
        os.environ.update(config["environment"])
        # A worker that imports mpi4py, as Theano does, must neither take itself for this agent nor start MPI anew.
        os.environ["MPI4PY_RC_INITIALIZE"] = "0"
        for name in [name for name in os.environ if name.startswith(_LAUNCHERS)]:
            del os.environ[name]
        sys.path[:] = config["path"]
        with contextlib.suppress(OSError):
            os.chdir(config["folder"])
    spin = SPIN if len(here) < available_cores() else 0.0
    control = Control(config["size"], spin, file.fileno(), made, here, extra)
    workers = Workers(config["root"], control, None if made else file)
    if not made:
        workers.start(config["profile"])
        file.close()
    Agent(MPI, config, control, channel, workers, frames).run()
    with contextlib.suppress(MPI.Exception):  # of messages that nobody has waited for any more
        MPI.Finalize()


def _control_memory(mpi: Any, config: dict[str, Any], here: range, extra: int) -> io.FileIO:
    """Make this host's control memory; where there is no room for it, the master ends all."""
    try:
        return Control.create(config["size"], len(here), extra)
    except MemoryError as error:
        mail = Mail(mpi, mpi.COMM_WORLD)
        mail.send(0, LOST, f"{host_and_ranks(config['names'][mail.me], here)}: {error}", here.start)
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline and all(kind != END for _, kind, _ in mail.come()):
            time.sleep(_LONG)
        raise


def _unlink_shared_memory() -> None:
    """Take the names from the files in /dev/shm that MPI would leave there if this process were killed.

    They are for processes of the same host, and on each there is one agent.  Open MPI has some where srun starts it.
    """
    ours = re.compile(r"/dev/shm/(mpich|sm_segment)\S*$")
    with open("/proc/self/maps") as maps:
        names = {found[0] for line in maps if (found := ours.search(line))}
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _hello() -> dict[str, Any]:
    """Say what this host is."""
    return {
        "name": platform.node(),
        "cores": available_cores(),
        "gpus": get_n_gpu(),
        "machine": os.cpu_count() or 1,
        "versions": {"Python": platform.python_version(), **_versions()},
    }


def _versions() -> dict[str, str]:
    found = versions(("synkhronos", "numpy", "pytensor", "Theano", "jax", "nccl4py", "cuda-core"))
    if find_spec("pygpu") is not None:  # which is linked into environments, with no word of its version
        found["pygpu"] = "installed"
    return found


def _connect(address: str, hellos: Any) -> tuple[socket.socket, dict[str, Any] | None, Any]:
    """Tell the master who is there, and return the channel, what it says, and its control memory as a file."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        channel.connect("\0" + address)
    except ConnectionRefusedError:
        name = platform.node()
        raise RuntimeError(f"the first host has to be the machine that calls fork(), and {name} is not") from None
    pid, user, _ = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.getuid():
        raise RuntimeError("another user's process answers in the master's place")
    channel.send(json.dumps(hellos).encode())
    content, files, _, _ = socket.recv_fds(channel, 1 << 20, 1)
    if not content:
        return channel, None, None
    config = json.loads(content)
    config["master"] = pid
    return channel, config, open(files[0], "r+b", buffering=0)
