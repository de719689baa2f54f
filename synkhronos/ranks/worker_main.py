"""The main loop of a worker process: it runs the commands that the master posts."""

from __future__ import annotations

import cProfile
import gc
import io
import json
import os
import pickle
import signal
import socket
import stat
import sys
import traceback
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from synkhronos.containers import BoundedCache
from synkhronos.ranks.child_process import JOB_SIGNALS, exit_with_parent, spawn
from synkhronos.ranks.command import MAX_CACHED_COMMANDS, MAX_CACHED_NBYTES, Command
from synkhronos.ranks.control_memory import AWAITS_COMMAND, AWAITS_COMPLETION, SLOT_NBYTES, ControlMemory
from synkhronos.ranks.errors import Cancelled, ExceptionReport
from synkhronos.ranks.interrupts import NonRaisingHandler
from synkhronos.ranks.rank import Rank
from synkhronos.ranks.segments import SegmentReceiver
from synkhronos.ranks.thread_limit import ThreadLimit

#: Seconds between an idle worker's checks whether the master lives, for systems whose kernel does not report its death.
IDLE_POLL_SECONDS = 0.5
#: Maximal number of characters of the message and of the traceback in an exception report.  A character has up to four
#: bytes in UTF-8, so the two take up to 4/5 of the slot.  The rest is for the names in the report.
_MAX_REPORT_CHARS = SLOT_NBYTES // 10


class Exit(Command):
    """Command after which a worker exits."""

    def run(self, rank: Rank) -> None:
        pass


class WorkerArguments(NamedTuple):
    """Arguments of a worker, which JSON can represent.

    ``parent_pid`` is the process that starts the worker: the master, or the agent of another host.  It does so in its
    main thread if ``from_main_thread`` is True.  With ``profile`` the worker writes a profile at its end.
    """

    rank: int
    master_rank: int
    profile: bool
    parent_pid: int
    from_main_thread: bool


def main(
    control: ControlMemory,
    segment_channel: socket.socket,
    arguments: WorkerArguments,
    master: Rank | None = None,
    newest_key: int = 0,
) -> NoReturn:
    """Run the master's commands until `Exit`, and exit.

    The forked process calls this function on top of the master's stack.  It must therefore not return, nor run the exit
    handlers that the master has registered.  Segments arrive over ``segment_channel``.  A fork inherits the segments,
    the newest of key ``newest_key``, and the replicated objects of the rank ``master``.
    """
    code, parent_pid = 1, arguments.parent_pid
    try:
        exit_with_parent(parent_pid, arguments.from_main_thread)  # it also exits if the master has already exited
        _detach_from_master(segment_channel, parent_pid)

        def exit_without_master() -> None:
            if os.getppid() != parent_pid:
                os._exit(1)

        thread_limit = ThreadLimit(len(control.local_ranks), sets_environment=True)
        rank = Rank(arguments.rank, arguments.master_rank, control, exit_without_master, thread_limit)
        if master is not None:
            rank.inherit_from(master)
        if arguments.profile:
            profiler = cProfile.Profile()
            profiler.runcall(run_commands, rank, segment_channel, newest_key)
            profiler.dump_stats(f"synkhronos_rank{arguments.rank}_{os.getpid()}.prof")
        else:
            run_commands(rank, segment_channel, newest_key)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def describe_control_memory(control: ControlMemory) -> dict[str, Any]:
    """Return arguments of `ControlMemory` for another process, as values that JSON can represent."""
    return {
        "size": control.size,
        "spin_seconds": control.spin_seconds,
        "local_ranks": (control.local_ranks.start, control.local_ranks.stop),
        "link_nbytes": len(control.link_memory),
    }


def spawn_worker(
    control: ControlMemory, control_file: io.FileIO, channel: socket.socket, arguments: WorkerArguments
) -> int:
    """Start a worker as a new process, which calls `main` with ``arguments``.  Return its process id.

    The process inherits the environment, `sys.path`, the file of the control memory and the channel.
    """
    files = control_file.fileno(), channel.fileno()
    content = [files, describe_control_memory(control), arguments]
    return spawn(
        "synkhronos.ranks.worker_main", "run_spawned_worker", content, files, arguments.from_main_thread, os.environ
    )


def run_spawned_worker() -> NoReturn:
    """Run the worker that `spawn_worker` started."""
    run_with_inherited_files(*json.loads(sys.argv[2]))


def run_with_inherited_files(fds: Sequence[int], memory: Mapping[str, Any], arguments: Sequence[Any]) -> NoReturn:
    """Call `main` with the control memory and the channel whose open files this process has inherited.

    ``memory`` is the result of `describe_control_memory`.  ``arguments`` are the fields of `WorkerArguments`.
    """
    control_fd, channel_fd = fds
    local_ranks = range(*memory["local_ranks"])
    control = ControlMemory(**{**memory, "local_ranks": local_ranks}, fd=control_fd, is_initialized=True)
    os.close(control_fd)
    main(control, socket.socket(fileno=channel_fd), WorkerArguments(*arguments))


def run_commands(rank: Rank, channel: socket.socket, newest_key: int) -> None:
    """Run commands.  ``newest_key`` is the key of the newest segment that this rank has."""
    control, words = rank.control, rank.control.words
    posted_index, command_number = ControlMemory.POSTED, 0
    cache: BoundedCache[bytes, Command] = BoundedCache(MAX_CACHED_COMMANDS)
    receiver = SegmentReceiver(channel)
    # An exception that the master was handling when it forked becomes the context of all exceptions of this worker.
    inherited_error = sys.exception()

    def has_next_command() -> bool:
        return words[posted_index] > command_number

    while True:
        command: Command | None = None
        control.wait(rank.number, has_next_command, AWAITS_COMMAND, rank.barriers.check_peers, IDLE_POLL_SECONDS)
        command_number = words[posted_index]
        rank.begin_command(command_number)
        try:
            while newest_key < words[ControlMemory.NEWEST_KEY]:
                segment = receiver.receive()
                if segment.key > newest_key:  # else it was sent twice, after an interrupt
                    rank.segments.add(segment)
                    newest_key = segment.key
                del segment  # a reference would prevent the release of the memory
            pickled = bytes(control.mailbox[: words[ControlMemory.MESSAGE_NBYTES]])
            command = cache.get(pickled)
            if command is None:
                command = pickle.loads(pickled)
                if len(pickled) <= MAX_CACHED_NBYTES:
                    cache[pickled] = command
            try:
                command.run(rank)
            finally:
                rank.run_finish_callbacks()
            control.report_nbytes[rank.number] = 0
        except Cancelled:
            control.report_nbytes[rank.number] = 0
        except BaseException as error:  # SystemExit, too: exit() within a graph is an error
            _remove_from_context(error, inherited_error)
            # The report is written first: a rank that notices the failure may read it.
            report = pickle.dumps(ExceptionReport.from_exception(rank.number, error, _MAX_REPORT_CHARS))
            control.write_report(rank.number, report)
            rank.barriers.fail_command()
            del error
        try:
            sys.stdout.flush()
        except (AttributeError, OSError, ValueError):  # no stdout, a broken pipe, or a closed file
            pass
        control.done[rank.number] = command_number
        control.fence()
        done = control.done.tolist()
        done[rank.master_rank] = command_number
        if min(done) >= command_number:
            control.wake(rank.master_rank, AWAITS_COMPLETION)
        if isinstance(command, Exit):
            return


def _remove_from_context(error: BaseException, inherited_error: BaseException | None) -> None:
    """Remove ``inherited_error`` from the chain of exceptions in whose handlers ``error`` was raised."""
    while error.__context__ is not None:
        if error.__context__ is inherited_error:
            error.__context__ = None
            return
        error = error.__context__


def _detach_from_master(channel: socket.socket, parent_pid: int) -> None:
    """Reset inherited state that belongs to the master: signal handlers, sockets, streams and garbage."""
    signal.set_wakeup_fd(-1)
    # Ctrl-C is sent to every process of the terminal; the master decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in JOB_SIGNALS:
        signal.signal(number, NonRaisingHandler(_handle_job_signal, parent_pid))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, *JOB_SIGNALS})
    for name in ("CHLD", "ALRM", "URG"):
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_DFL)

    # Objects from before the fork belong to the master: the collector must not run their finalizers here.
    gc.freeze()
    # An inherited socket (a notebook's, a database's) would stay open beyond the master's exit.  The descriptor is
    # redirected to /dev/null rather than closed: an inherited object may still use its number.
    null = os.open(os.devnull, os.O_RDWR)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in (null, channel.fileno()):
            try:
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    os.dup2(null, fd, inheritable=False)
            except OSError:
                continue  # the descriptor of the listing itself
    for fd, stream in enumerate((None, sys.__stdout__, sys.__stderr__)):
        if stream is None:  # closed by the master, which may have opened another file under its number
            os.dup2(null, fd)
    if null > 2:
        os.close(null)
    # The inherited sys.stdout may write to such a socket, as a notebook's does.
    for fd, name in ((1, "stdout"), (2, "stderr")):
        setattr(sys, name, open(fd, "w", buffering=1, errors="backslashreplace", closefd=False))


def _handle_job_signal(parent_pid: int, number: int, frame: FrameType | None) -> None:
    """Exit by a signal, unless the master handles or ignores it, and so continues and needs its workers."""
    try:
        with open(f"/proc/{parent_pid}/status") as status:
            masks = [int(line.split()[1], 16) for line in status if line.startswith(("SigIgn", "SigCgt"))]
    except OSError:  # the master has exited, or there is no /proc
        masks = []
    if not any(mask >> number - 1 & 1 for mask in masks):
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
