"""What a worker process does between the fork and its end.

`main`
    Never returns: takes commands until the master goes.
`start_anew`, `started_anew`
    The same in a process that is no copy of the master.
`spawn`, `end_with`
    Starts a process that is no copy of this one; has the process that calls it end with another.
"""

from __future__ import annotations

import contextlib
import cProfile
import ctypes
import gc
import io
import json
import os
import pickle
import select
import signal
import socket
import stat
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from synkhronos.ranks.control import FOR_COMMAND, FOR_JOIN, SLOT, Control
from synkhronos.ranks.errors import Cancelled, Report
from synkhronos.ranks.rank import Command, Rank
from synkhronos.ranks.segments import Receiver, SharedArray
from synkhronos.ranks.threads import ThreadShare

#: Seconds between two looks of an idle worker at its master, where the system doesn't report the master's death.
IDLE_POLL = 0.5
#: Commands that a worker keeps unpickled: a training loop sends the same few for ever.
KEPT = 32
#: Bytes up to which one is kept.
LONGEST_KEPT = 1 << 14
#: Signals that a closed terminal and a scheduler send to every process of a program: "end", "save now".
SENT_TO_ALL = {signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
_PR_SET_PDEATHSIG = 1


class Exit(Command):
    """The command after which a worker ends."""

    def run(self, rank: Rank) -> None:
        """Nothing is left to do."""


@dataclass(frozen=True, slots=True)
class Parcel(Command):
    """A command too long for the mailbox, pickled in a shared segment."""

    location: SharedArray

    def run(self, rank: Rank) -> object:
        """Run it."""
        command: Command = pickle.loads(self.location.view(rank.segments).data)
        return command.run(rank)


def main(
    number: int,
    root: int,
    control: Control,
    channel: socket.socket,
    profile: bool,
    master: int,
    in_main_thread: bool,
) -> NoReturn:
    """Be a worker: run what the master posts, and end with it.

    Called in the forked process, on top of the master's stack: it must not return, and must not run anything that
    the master has registered to run at exit.  ``master`` is the master's process, which may have gone already, so that
    this one has another parent by now.  ``in_main_thread`` says where in the master the fork was called.
    """
    code = 1
    try:
        end_with(master, in_main_thread)
        _leave_the_masters_things(channel, master)

        def watch() -> None:
            if os.getppid() != master:
                os._exit(1)

        rank = Rank(number, root, control, watch, ThreadShare(len(control.here), environment=True))
        if profile:
            profiler = cProfile.Profile()
            profiler.runcall(_serve, rank, channel)
            profiler.dump_stats(f"synkhronos_rank{number}_{os.getpid()}.prof")
        else:
            _serve(rank, channel)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def start_anew(
    number: int,
    root: int,
    control: Control,
    memory: io.FileIO,
    channel: socket.socket,
    profile: bool,
    in_main_thread: bool,
) -> int:
    """Start a worker that is no copy of this process, and return its process id.

    It inherits the environment, the arguments' files and `sys.path`, and imports what it needs.
    """
    layout = (
        control.size,
        control.spin,
        memory.fileno(),
        True,
        [control.here.start, control.here.stop],
        len(control.extra),
    )
    settings = (number, root, layout, channel.fileno(), profile, os.getpid(), in_main_thread)
    files = (memory.fileno(), channel.fileno())
    return spawn("synkhronos.ranks.worker", "started_anew", settings, files, in_main_thread, os.environ)


def spawn(
    module: str,
    function: str,
    settings: Sequence[Any],
    files: Sequence[int],
    in_main_thread: bool,
    environment: Mapping[str, str],
) -> int:
    """Start a process that is no copy of this one and calls a function, and return its process id.

    It finds ``settings`` in ``sys.argv[2]``, as JSON, and inherits some open files.  It begins with the signals held
    back that a terminal or a scheduler sends to all processes: the function says what they mean.
    """
    path = json.dumps([os.path.abspath(folder) for folder in sys.path])
    code = "import json, os, sys; sys.path[:] = json.loads(sys.argv[1]); "
    if in_main_thread:  # the master may go before the imports are done, which take long
        code += f"import ctypes; ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {signal.SIGKILL:d}, 0, 0, 0); "
    code += f"os.getppid() == {os.getpid()} or os._exit(1); "
    code += f"from {module} import {function}; {function}()"
    arguments = [sys.executable, "-c", code, path, json.dumps(settings)]
    for file in files:
        os.set_inheritable(file, True)
    try:
        return os.posix_spawn(sys.executable, arguments, environment, setsigmask={signal.SIGINT, *SENT_TO_ALL})
    finally:
        for file in files:
            os.set_inheritable(file, False)


def started_anew() -> NoReturn:
    """Be the worker that `start_anew` started."""
    number, root, (size, spin, memory, made, here, extra), channel, profile, master, in_main_thread = json.loads(
        sys.argv[2]
    )
    control = Control(size, spin, memory, made, range(*here), extra)
    os.close(memory)
    main(number, root, control, socket.socket(fileno=channel), profile, master, in_main_thread)


def _serve(rank: Rank, channel: socket.socket) -> None:
    control, words = rank.control, rank.control.words
    posted, last, mapped = Control.POSTED, 0, 0
    kept: dict[bytes, Command] = {}
    receiver = Receiver(channel)
    while True:
        command: Command | None = None
        control.wait(rank.number, lambda: words[posted] > last, FOR_COMMAND, rank.watch, IDLE_POLL)  # noqa: B023
        last = words[posted]
        rank.begin(last)
        try:
            while mapped < words[Control.ANNOUNCED]:
                segment = receiver.receive()
                if segment.key > mapped:  # else it was announced twice, because of an interrupt
                    rank.segments.add(segment)
                    mapped = segment.key
                del segment  # or this name would keep the memory after its release
            message = bytes(control.mailbox[: words[Control.LENGTH]])
            command = kept.get(message)
            if command is None:
                command = pickle.loads(message)
                if len(message) <= LONGEST_KEPT:
                    if len(kept) >= KEPT:
                        kept.clear()
                    kept[message] = command
            try:
                command.run(rank)
            finally:
                rank.finish()
            control.report_length[rank.number] = 0
        except Cancelled:
            control.report_length[rank.number] = 0
        except BaseException as error:  # SystemExit too: whoever calls exit() in a graph means an error
            # The report first: whoever sees that the command failed may look for it.
            report = pickle.dumps(Report.of(rank.number, error, SLOT // 10))
            control.slot(rank.number, 2)[: len(report)] = report
            control.report_length[rank.number] = len(report)
            rank.fail()
            del error
        try:
            sys.stdout.flush()
        except (AttributeError, OSError, ValueError):  # none, nobody reads it any more, or closed
            pass
        control.done[rank.number] = last
        control.fence()
        done = control.done.tolist()
        done[rank.root] = last
        if min(done) >= last:
            control.ring(rank.root, FOR_JOIN)
        if isinstance(command, Exit):
            return


def _leave_the_masters_things(channel: socket.socket, master: int) -> None:
    """Part from what this process inherited and must not touch: signals, sockets, files, objects to collect."""
    signal.set_wakeup_fd(-1)
    # Ctrl-C goes to every process of the terminal, and it is the master who decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in SENT_TO_ALL:
        signal.signal(number, partial(_do_as_the_master, master))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, *SENT_TO_ALL})
    for name in ("CHLD", "ALRM", "URG"):
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_DFL)

    # Objects made before the fork are the master's: no finalizer of theirs may run here because a cycle was found.
    gc.freeze()
    # An inherited socket (a notebook's, a database's) would stay open beyond the master's end.  The descriptor is
    # put to /dev/null rather than closed, since an object of the master's may still believe that it owns the number.
    null = os.open(os.devnull, os.O_RDWR)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in (null, channel.fileno()):
            try:
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    os.dup2(null, fd, inheritable=False)
            except OSError:
                continue  # the descriptor that listed the folder
    for fd, stream in enumerate((None, sys.__stdout__, sys.__stderr__)):
        if stream is None:  # the master has closed it, and may have opened something else under its number
            os.dup2(null, fd)
    if null > 2:
        os.close(null)
    # A notebook's sys.stdout sends to the notebook through one of those sockets.
    for fd, name in ((1, "stdout"), (2, "stderr")):
        setattr(sys, name, open(fd, "w", buffering=1, errors="backslashreplace", closefd=False))


def _do_as_the_master(master: int, number: int, frame: FrameType | None) -> None:
    """End by a signal, unless the master handles or ignores it: then it goes on, and needs its workers."""
    try:
        with open(f"/proc/{master}/status") as status:
            masks = [int(line.split()[1], 16) for line in status if line.startswith(("SigIgn", "SigCgt"))]
    except OSError:  # the master has ended, or the system doesn't say
        masks = []
    if not any(mask >> number - 1 & 1 for mask in masks):
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def end_with(master: int, in_main_thread: bool) -> None:
    """Have the kernel kill this process when the master (its parent) dies, even in the middle of compiled code.

    The kernel does so when the thread ends that called fork, which is too early if that is not the master's main
    thread.  Then a thread of this process watches, which can't do anything while compiled code holds Python's lock.
    """
    if in_main_thread:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    elif hasattr(os, "pidfd_open"):  # not where Python was built on an old system
        with contextlib.suppress(ProcessLookupError):
            threading.Thread(target=_kill_at_the_end_of, args=(os.pidfd_open(master),), daemon=True).start()
    if os.getppid() != master:  # it died before that
        os._exit(1)


def _kill_at_the_end_of(process: int) -> None:
    select.select([process], [], [])
    os.kill(os.getpid(), signal.SIGKILL)
