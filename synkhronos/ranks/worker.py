"""What a worker process does between the fork and its end.

`main`
    Never returns: takes commands until the master goes.
"""

from __future__ import annotations

import cProfile
import ctypes
import gc
import os
import pickle
import signal
import socket
import stat
import sys
import traceback
from dataclasses import dataclass
from typing import NoReturn

from synkhronos.ranks.control import FOR_COMMAND, FOR_JOIN, SLOT, Control
from synkhronos.ranks.errors import Cancelled, Report
from synkhronos.ranks.rank import Command, Rank
from synkhronos.ranks.segments import SharedArray, receive
from synkhronos.ranks.threads import share_threads

#: Seconds between two looks of an idle worker at its master, where the system doesn't report the master's death.
IDLE_POLL = 0.5
#: Commands that a worker keeps unpickled: a training loop sends the same few for ever.
_KEPT = 32
_PR_SET_PDEATHSIG = 1


class Exit:
    """The command after which a worker ends."""

    def run(self, rank: Rank) -> None:
        """Nothing is left to do."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """A command too long for the mailbox, pickled in a shared segment."""

    where: SharedArray

    def open(self, rank: Rank) -> Command:
        """Return the command."""
        return pickle.loads(self.where.view(rank.segments).data)

    def run(self, rank: Rank) -> object:
        """Run the command within."""
        return self.open(rank).run(rank)


def main(number: int, size: int, root: int, control: Control, channel: socket.socket, profile: bool) -> NoReturn:
    """Be a worker: run what the master posts, and end with it.

    Called in the forked process, on top of the master's stack: it must not return, and must not run anything that
    the master has registered to run at exit.
    """
    code = 1
    try:
        master = os.getppid()
        _leave_the_masters_things(master, channel)
        _threads = share_threads(size, environment=True)

        def watch() -> None:
            if os.getppid() != master:
                os._exit(1)

        rank = Rank(number, size, root, control, watch)
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


def _serve(rank: Rank, channel: socket.socket) -> None:
    control, words = rank.control, rank.control.words
    posted, last, mapped = Control.POSTED, 0, 0
    kept: dict[bytes, Command] = {}
    while True:
        control.wait(rank.number, lambda: words[posted] > last, FOR_COMMAND, rank.watch, IDLE_POLL)  # noqa: B023
        last = words[posted]
        rank.begin(last)
        try:
            while mapped < words[Control.ANNOUNCED]:
                segment = receive(channel)
                rank.segments.add(segment)
                mapped = max(mapped, segment.key)
                del segment  # or this name would keep the memory after its release
            message = bytes(control.mailbox[: words[Control.LENGTH]])
            command = kept.get(message)
            if command is None:
                command = pickle.loads(message)
                if len(kept) >= _KEPT:
                    kept.clear()
                kept[message] = command
            command.run(rank)
            control.report_length[rank.number] = 0
        except Cancelled:
            control.report_length[rank.number] = 0
        except BaseException as error:  # SystemExit too: whoever calls exit() in a graph means an error
            # The report first: whoever sees that the command failed may look for it.
            report = pickle.dumps(Report.of(rank.number, error, SLOT // 10))
            control.slot(rank.number, 2)[: len(report)] = report
            control.report_length[rank.number] = len(report)
            words[Control.FAILED] = last
            control.ring_all()
            del error
        if sys.stdout is not None:
            sys.stdout.flush()
        control.done[rank.number] = last
        control.fence()
        if all(control.done[r] >= last for r in range(rank.size) if r != rank.root):
            control.ring(rank.root, FOR_JOIN)
        if isinstance(command, Exit):
            return


def _leave_the_masters_things(master: int, channel: socket.socket) -> None:
    """Part from what this process inherited and must not touch: signals, sockets, files, objects to collect."""
    # Ctrl-C goes to every process of the terminal, and it is the master who decides what it means.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    _end_with_the_master(master)

    # Objects made before the fork are the master's: no finalizer of theirs may run here because a cycle was found.
    gc.freeze()
    # An inherited socket (a notebook's, a database's) would stay open beyond the master's end.  The descriptor is
    # put to /dev/null rather than closed, since an object of the master's may still believe that it owns the number.
    null = os.open(os.devnull, os.O_RDWR)
    for fd in _open_files():
        if fd > 2 and fd not in (null, channel.fileno()):
            try:
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    os.dup2(null, fd, inheritable=False)
            except OSError:
                continue  # the descriptor that listed the folder
    os.dup2(null, 0)
    os.close(null)
    # A notebook's sys.stdout sends to the notebook through one of those sockets.
    for fd, name in ((1, "stdout"), (2, "stderr")):
        setattr(sys, name, open(fd, "w", buffering=1, errors="backslashreplace", closefd=False))


def _end_with_the_master(master: int) -> None:
    """Have the kernel kill this process when the master dies, even in the middle of compiled code."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != master:  # it died before that
        os._exit(1)


def _open_files() -> list[int]:
    for folder in ("/proc/self/fd", "/dev/fd"):
        if os.path.isdir(folder):
            return [int(name) for name in os.listdir(folder)]
    return list(range(3, 256))
