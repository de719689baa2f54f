"""The master's view of the ranks: a session runs commands on all ranks, one at a time, and ends the ranks.

There is at most one session in a process (`synkhronos.ranks.current_session`)::

              fork()                 close(), or the death of a worker or host
    no session ────> idle ──────────────────────────────────────────> closed
                    │    ^
         run():     │    │  all ranks have finished the command
         post it    v    │
                   running ──── close(), death ─────────────────────> closed

A command is posted by one word in shared memory, `ControlMemory.POSTED`, and finished by one word for each rank,
`done`::

    master (`Session.run`)                                      worker r (`worker_main.run_commands`)
    ──────────────────────                                      ──────────────────────────────────
    wait until all ranks are idle, `send_releases`              sleep until POSTED is a new number
    write segments and the pickled command; POSTED = number ──> map the segments, unpickle the command
    command.run(rank)         <──── barriers, slots ────>       command.run(rank)
      │ exception: FAILED = number, wake all ranks                │ exception: report, FAILED = number, wake all ranks
      │ FAILED by another rank: Cancelled at the next wait        │ FAILED by another rank: Cancelled at the next wait
    done[master] = number                                       done[r] = number; the last one wakes the master
    wait until every rank has finished (`_wait_until_done`) <───┘
    no rank failed: return the master's result
    a rank failed:  cancel pending operations, raise the master's error, or a WorkerError made of the reports

A waiting master checks regularly whether its workers live (`_check_peers`); a computing one is interrupted by a signal
(`PeerWatch`).  A death ends the session: the other workers are killed, and the call raises a WorkerError.  Within
`keep_memory` the memory stays, and `replace_workers` opens the session again with new workers.

If an interrupt ends the master's part, `_wait_until_done` waits for a moment only, and the workers may still be busy
with the command.  The next call waits for them (`wait_until_idle`) before it writes memory that they may read.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

from synkhronos.ranks.command import Command
from synkhronos.ranks.command_errors import make_command_error, read_reports
from synkhronos.ranks.control_memory import ControlMemory
from synkhronos.ranks.errors import FAILED_START_PREFIX, Cancelled, Death, PeerFailure, StartError, WorkerError
from synkhronos.ranks.interrupts import defer_signals
from synkhronos.ranks.link import Link, LocalLink
from synkhronos.ranks.mailbox import Mailbox
from synkhronos.ranks.memory import MemoryTable
from synkhronos.ranks.peer_watch import PeerDied, PeerWatch
from synkhronos.ranks.process_group import GRACE_SECONDS, ProcessGroup
from synkhronos.ranks.rank import Rank, Registry
from synkhronos.ranks.threads import ThreadLimit
from synkhronos.ranks.weak_key_dict import WeakKeyDict
from synkhronos.ranks.worker_main import Exit

_log = logging.getLogger("synkhronos")
T = TypeVar("T")

#: Seconds for which an interrupted master waits for the workers.
_INTERRUPTED_GRACE_SECONDS = GRACE_SECONDS / 4
_NESTED_CALL = (
    "this call was made from inside another call (a signal handler, a finalizer, or an operation's own code): make it "
    "after that call has returned.  A handler can set a flag, which the program checks between calls"
)


class Session:
    """The master and the workers that it started.

    A call that uses the ranks holds the session's lock, so that calls of threads and signal handlers can't mix::

        with session.call_lock:
            session.wait_until_idle()
            ...
            session.run(command)

    Functions that users call do so; functions that these call rely on it.

    Parameters
    ----------
    size : int
        Number of ranks.
    master_rank : int
    timeout : float, optional
        Seconds that the master waits for the other ranks in one command; in a task, since a rank's last sign of
        progress.  None: no limit.
    spawn : bool
        Start workers as new processes, not as forks of this one.
    link : Link, optional
        Connection to other machines.

    Attributes
    ----------
    rank : Rank
        The master's rank.
    memory : MemoryTable
        Segments and object copies that all ranks have until the master releases them.
    registry : Registry
        State of layers above that only the master has.
    close_reason : str or None
        Reason why the session has ended, as a message for the user; None while it runs.
    failure : PeerFailure or None
        The failure that closed the session, if one did.
    is_inherited : bool
        Whether this process is a fork of the master, and the session belongs to its parent.
    has_forked_workers : bool
        Whether workers are forks of this process, which inherit its memory.
    has_kept_memory : bool
        Whether a death has closed the session within `keep_memory`, so that `replace_workers` is possible.
    """

    def __init__(
        self, size: int, master_rank: int, timeout: float | None = None, spawn: bool = False, link: Link | None = None
    ):
        self.timeout = timeout
        self.is_inherited = False
        self.has_forked_workers = not spawn
        self.close_reason: str | None = None
        self.failure: PeerFailure | None = None
        #: Number of `keep_memory` contexts, and whether a death has left the memory in one of them.
        self._n_keepers, self.has_kept_memory = 0, False
        self._call_lock = threading.RLock()
        self._command_number, self._command_began = 0, 0.0
        self._is_running = False
        #: Whether all ranks are known to have finished the last command.
        self._is_idle = True
        self.registry = Registry()
        self._close_callbacks: WeakKeyDict[Any, Callable[[Any], None]] = WeakKeyDict()
        self._replacement_callbacks: WeakKeyDict[Any, Callable[[Any], None]] = WeakKeyDict()
        group = ProcessGroup(size, master_rank, LocalLink(size) if link is None else link, spawn)
        thread_limit = ThreadLimit(len(group.control.local_ranks), sets_environment=False)
        self.rank = Rank(master_rank, master_rank, group.control, self._check_peers, thread_limit, group.has_any_died)
        self.memory = MemoryTable(self.rank, group.channels, self._run_when_idle)
        self._set_group(group)

    def _set_group(self, group: ProcessGroup) -> None:
        self._group, self._control = group, group.control
        self._mailbox = Mailbox(group.control, group.link, self.memory)
        self._watch = PeerWatch(group.has_any_died, self._has_pending_between_commands, self._raise_if_peer_died)

    def start(self, profile: bool, first_command: Command | None = None) -> None:
        """Start the workers and run a first command; if either fails, end the session and raise the error."""
        self._profile, self._first_command = profile, first_command
        try:
            with defer_signals():
                self._start_workers()
            self._run_first_command()
        except BaseException:
            self.close(kill=True)
            raise

    def _start_workers(self) -> None:
        self._group.start(self._profile, (self.rank, self.memory.last_key))
        self._watch.start(self._group.channels)

    def _run_first_command(self) -> None:
        with self.call_lock:
            self.wait_until_idle()
            if self._first_command is not None:
                self.run(self._first_command)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.rank.size

    @property
    def ranks_by_host(self) -> list[range]:
        """Ranks of each machine; this machine is the first."""
        return self._group.link.ranks_by_host

    @property
    def bytes_sent(self) -> int:
        """Number of bytes of shared memory that were sent to other machines."""
        return self._group.link.bytes_sent

    @property
    def worker_pids(self) -> dict[int, int]:
        """Process ids of this machine's workers, by rank; empty after their end."""
        return self._group.pids

    # -- one call at a time ----------------------------------------------------------------------------------

    @property
    def call_lock(self) -> contextlib.AbstractContextManager[Any]:
        """Lock of one call, held from the check of its arguments to its results.

        It is implemented in C: a ``with`` statement acquires and releases it with no moment between at which a signal
        handler could raise.

        Raises
        ------
        RuntimeError
            If this thread holds it: it is in the middle of another call.
        """
        if self._holds_call_lock():
            raise RuntimeError(_NESTED_CALL)
        return self._call_lock

    @property
    def nested_call_lock(self) -> contextlib.AbstractContextManager[Any]:
        """`call_lock`, also for the thread that is preparing a call and runs a command for it.

        Raises
        ------
        RuntimeError
            If this thread is in the middle of another command.
        """
        if self._is_running and self._holds_call_lock():
            raise RuntimeError(_NESTED_CALL)
        return self._call_lock

    def _holds_call_lock(self) -> bool:
        """Whether this thread holds the lock."""
        is_held: bool = self._call_lock._is_owned()  # type: ignore[attr-defined] # as threading.Condition does
        return is_held

    def wait_until_idle(self) -> None:
        """Wait until no rank is busy: an interrupt may have left the workers with a command to finish.

        Memory that ranks may still read must not be written before.
        """
        self._is_running = False  # an interrupt may have left it True; only the holder of the lock runs commands
        self._wait_for_workers()

    def _wait_for_workers(self) -> None:
        if self._is_running:
            raise RuntimeError(_NESTED_CALL)
        if self.close_reason is None:
            self.memory.release_unused()
            if not self._is_idle:
                self._wait_until_done()
        if self.close_reason is not None:  # a worker's death may have closed it just now
            raise RuntimeError(self.close_reason)

    # -- commands --------------------------------------------------------------------------------------------

    def run(self, command: Command) -> Any:
        """Run a command on every rank and return the result of the master's part.  The lock has to be held.

        Raises
        ------
        WorkerError
            If a worker raised an exception, or died.
        BaseException
            The exception of the master's own part.
        """
        self.send_releases()
        return self._run(command)

    def send_releases(self) -> None:
        """Release segments and objects on the workers that the master has released.  The lock has to be held."""
        self._wait_for_workers()
        self.memory.send_releases()

    def _run_when_idle(self, command: Command) -> Any:
        self._wait_for_workers()
        return self._run(command)

    def _run(self, command: Command) -> Any:
        control, rank, watch = self._control, self.rank, self._watch
        result, master_error = None, None
        try:
            self._is_running, self._is_idle = True, False
            self._command_number = number = self._command_number + 1
            if self.timeout is not None:
                self._command_began = time.monotonic()
            try:
                rank.begin_command(number)
                if rank.size > 1:
                    self._mailbox.post(number, command)
                watch.command_thread = threading.get_ident()
                try:
                    result = command.run(rank)
                finally:
                    rank.finish_command()
                watch.command_thread = 0
            except BaseException as error:
                watch.command_thread = 0
                if rank.command_number == number:  # else it was not posted
                    rank.fail_command()
                master_error = error
            control.done[rank.number] = number
            if watch.has_raised:
                self._raise_if_peer_died()
            # After an interrupt of the master, a worker in compiled code may take long to finish: `wait_until_idle`
            # waits for it, or `close` ends it.
            self._wait_until_done(
                None if master_error is None or isinstance(master_error, Exception) else _INTERRUPTED_GRACE_SECONDS
            )
            has_failed = control.words[ControlMemory.FAILED] == number
            reports = read_reports(control, number, rank.number, self._group.link) if has_failed else []
            if has_failed and self._group.link.find_failure() is not None:
                self._raise_if_peer_died()  # reports may only follow from the failure of a machine, which is the cause
            rank.cancel_failed_operations()
        except PeerDied:  # raised just after the master's part had failed
            self._raise_if_peer_died()
            raise
        finally:
            self._is_running = False
        if master_error is None and not reports and self.close_reason is None:
            return result
        try:
            if self.close_reason is not None:  # the ranks have ended and report nothing more
                raise self._make_close_error(master_error)
            raise make_command_error(command, number, control, master_error, reports)
        finally:
            del master_error  # the error refers to this frame: a cycle, which would delay the release of memory

    def _wait_until_done(self, limit: float | None = None) -> None:
        """Wait until all ranks have finished the last command, at most ``limit`` seconds."""
        done, me, number = self._control.done, self.rank.number, self._control.words[ControlMemory.POSTED]
        if done[me] < number:  # an interrupt ended the master's part before it was marked as done
            self.rank.fail_command()
            done[me] = number
        self._is_idle = self._group.wait_until_done(self._check_peers, limit)

    # -- deaths and time limits --------------------------------------------------------------------------------

    def _check_peers(self) -> None:
        """End the session and raise WorkerError if a peer has died, or exceeds the time limit."""
        if self.timeout is not None and time.monotonic() - self._command_began > self.timeout:
            late = self._group.find_late_rank(self._command_began, self.timeout)
            if late is not None:
                self._end_with_failure(late)
        self._raise_if_peer_died()

    def _raise_if_peer_died(self) -> None:
        """End the session and raise WorkerError if a worker or another machine has died."""
        watch = self._watch
        command_thread, watch.command_thread = watch.command_thread, 0  # no PeerDied while this handles it
        failure = self._group.find_failure()
        if failure is not None:
            self._end_with_failure(failure)
        watch.command_thread = command_thread

    def _has_pending_between_commands(self) -> bool:
        """Whether an operation with the workers is pending although no command runs."""
        # While the ranks are being ended, their exits are expected.
        return self.close_reason is None and not self._is_running and self.rank.has_pending_operation()

    def _end_with_failure(self, failure: PeerFailure) -> None:
        """Kill all workers, close the session and raise a WorkerError."""
        if self.close_reason is not None:
            return  # the session is being closed: in another thread, or by a handler in this one
        message = failure.message
        if self.rank.has_pending_operation():
            message += (
                " A collective on the GPUs was pending and has been aborted: the variables that it writes, and all "
                "values computed from them, are invalid in this process too. Restore them from saved values."
            )
        message += " Call synkhronos.fork() to start again."
        self.has_kept_memory = self._n_keepers > 0 and failure.death is not None
        self.close(kill=True)
        self.close_reason, self.failure = message, failure
        raise WorkerError(message, failure.rank)

    def _make_close_error(self, master_error: BaseException | None) -> BaseException:
        """Return the exception of a call during which the session was closed, in another thread or a handler."""
        if isinstance(master_error, WorkerError) or not isinstance(master_error, Exception | None):
            return master_error
        error: Exception
        if self.failure is not None:  # noticed first in another thread, such as a device's watchdog
            error = WorkerError(self.close_reason or "", self.failure.rank)
        else:
            error = RuntimeError(f"while this call ran, {self.close_reason}")
        error.__cause__ = None if isinstance(master_error, Cancelled) else master_error
        return error

    @property
    def death(self) -> Death | None:
        """The worker's exit that closed the session, if one did."""
        return None if self.failure is None else self.failure.death

    # -- the end -----------------------------------------------------------------------------------------------

    def add_close_callback(self, user: T, callback: Callable[[T], None]) -> None:
        """Add a call ``callback(user)`` when the session ends, if the object ``user`` still exists then."""
        self._close_callbacks[user] = callback

    def close(self, kill: bool = False) -> None:
        """End the workers and free all shared memory.  The second call does nothing.

        A call that another thread is in the middle of gets `GRACE_SECONDS` seconds to finish; then it raises an error.

        Parameters
        ----------
        kill : bool
            Do not wait for pending operations and for the workers' orderly exit.
        """
        if self.close_reason is not None:
            return
        if self.is_inherited:  # the workers are children of another process
            self.close_reason = (
                "the ranks belong to the process that called synkhronos.fork(): call it here for ranks of its own"
            )
            return
        has_lock = False
        try:
            # Reentrant: a signal handler may close in the middle of a call of this thread.
            has_lock = self._call_lock.acquire(timeout=GRACE_SECONDS)
            kill = kill or not has_lock
            self._watch.command_thread = 0
            if not kill:
                for operation in self.rank.pending:
                    operation.finish()
                # Workers may still be busy with a command that an interrupt left.
                self._wait_until_done(GRACE_SECONDS)
                kill = not self._is_idle
        except (WorkerError, Cancelled) as error:
            kill = True
            _log.debug("a worker cannot exit by itself: %s", error)
        except BaseException:  # raised by a signal handler
            kill = True
            raise
        finally:
            try:
                self._end(kill)
            finally:
                if has_lock:
                    self._call_lock.release()

    def _end(self, kill: bool) -> None:
        """End the workers and free everything; a signal that arrives meanwhile shortens the workers' grace period."""
        with defer_signals() as signals:
            if self.close_reason is not None:
                return
            if not kill:
                # Not joined like other commands: a stopped worker would never arrive.
                self._command_number += 1
                try:
                    self._mailbox.post(self._command_number, Exit())
                except OSError as error:  # while segments are sent with the command
                    kill = True
                    _log.debug("a worker did not receive the command to exit: %s", error)
            self.close_reason = "the ranks were closed: call synkhronos.fork() first"
            self.rank.close_pending_operations()

            # The first worker's exit raises SIGURG, which is no reason to hurry the others.
            def should_kill() -> bool:
                return signals.has_deferred(excluded=signal.SIGURG)

            self._group.shut_down(kill, should_kill)
            self._watch.stop()
            # A call of another thread, or one that a signal handler has interrupted, may be waiting for the workers.
            self.rank.disconnect()
            self._group.close()
            if not self.has_kept_memory:
                self._free_memory()

    def _free_memory(self) -> None:
        _call_all(self._close_callbacks)
        self.memory.free()
        self.rank.registry.clear()
        self.registry.clear()
        self.rank.thread_limit.restore()

    # -- new workers after a death -----------------------------------------------------------------------------

    @property
    def can_replace_workers(self) -> bool:
        """Whether `replace_workers` is possible: not if ``mpirun`` has started this script on all hosts."""
        return self._group.link.can_reconnect

    @contextlib.contextmanager
    def keep_memory(self) -> Iterator[None]:
        """Context in which a worker's death leaves Data and mirrored objects, so that workers can be replaced.

        If the session is closed by a death at the end of the context, the memory is freed.
        """
        self._n_keepers += self.can_replace_workers
        try:
            yield
        finally:
            self._n_keepers -= self.can_replace_workers
            if self.has_kept_memory and not self._n_keepers:
                with defer_signals():
                    self.has_kept_memory = False
                    self._free_memory()

    def replace_workers(self, spawn: bool = False, excluded_ranks: Collection[int] = ()) -> bool:
        """Start new workers after a death within `keep_memory`.

        They are copies of this process as it is now: they inherit its segments, and its mirrored objects with their
        present values and compiled functions.

        Parameters
        ----------
        spawn : bool
            Start them as new processes instead, as on several hosts.  They get the segments, and mirrored objects when
            these are used next.
        excluded_ranks : collection of int
            Workers that are not started again, with their devices; ranks above them move down.

        Returns
        -------
        bool
            Whether they are new processes.

        Raises
        ------
        RuntimeError
            If no worker's death has closed the session within `keep_memory`.
        WorkerError
            If a new worker dies.
        Exception
            If a new worker or a host can't start: `death` then names its rank, and another call is possible.
        """
        if not self.has_kept_memory:
            raise RuntimeError("replace_workers: no worker has died within keep_memory()")
        link: Link | None = None
        try:
            link = self._group.link.reconnect(excluded_ranks)
            spawn = spawn or link.needs_control_file
            with defer_signals():  # an interrupt in between would leave the session half open
                self._open(link, spawn, excluded_ranks)
            self._run_first_command()
            with self.call_lock:
                self.wait_until_idle()
                if spawn:
                    self.memory.resend_segments()
                    self.registry.clear()
                _call_all(self._replacement_callbacks)
        except BaseException as error:
            if isinstance(error, Exception):
                self._record_failed_start(error, has_opened=self._group.link is link)
            self.close(kill=True)
            if link is not None:  # an interrupt may have come before the session was open
                link.shut_down(True, 0.0, lambda: True)
            raise
        return spawn

    def _open(self, link: Link, spawn: bool, excluded_ranks: Collection[int]) -> None:
        """Open the session again, with new workers."""
        old_rank, size = self.rank.number, self.size - len(excluded_ranks)
        assert old_rank not in excluded_ranks
        # The counters and semaphores of the old group are in an undefined state.
        group = ProcessGroup(size, old_rank - sum(r < old_rank for r in excluded_ranks), link, spawn)
        for r in sorted(excluded_ranks, reverse=True):
            self._first_command = self._first_command and self._first_command.without_rank(r)
        self.rank.reconnect(group.master_rank, group.control, self._check_peers, group.has_any_died)
        self.memory.replace_workers(group.channels, is_inherited=not spawn)
        self._set_group(group)
        self.has_forked_workers = not spawn
        self._is_running, self._is_idle = False, True
        self.close_reason = self.failure = None
        self.has_kept_memory = False
        self._start_workers()

    def _record_failed_start(self, error: Exception, has_opened: bool) -> None:
        """Set `failure` to the failed start of a new worker or a host, and keep the memory for another try."""
        if not has_opened:
            cause = f"{FAILED_START_PREFIX}: {type(error).__name__}: {error}"
            death = error.death if isinstance(error, StartError) else Death(self.rank.number, "", 0, cause)
            self.failure = PeerFailure(self.close_reason or "", death.rank, death)
        elif self.close_reason is None:  # else a new worker has died
            rank = error.rank if isinstance(error, WorkerError) else self._group.find_unstarted()
            rank = self.rank.number if rank is None else rank
            text = str(error) if isinstance(error, WorkerError) else f"{type(error).__name__}: {error}"
            cause = f"{FAILED_START_PREFIX}: " + text.partition("\n")[0]
            self.has_kept_memory = self._n_keepers > 0
            self.close(kill=True)
            self.close_reason = f"rank {rank} {cause}.  Call synkhronos.fork() to start again."
            self.failure = PeerFailure(self.close_reason, rank, Death(rank, "", 0, cause))

    def add_replacement_callback(self, user: T, callback: Callable[[T], None]) -> None:
        """Add a call ``callback(user)`` after workers were replaced, with the call lock held, if ``user`` exists."""
        self._replacement_callbacks[user] = callback


def _call_all(callbacks: WeakKeyDict[Any, Callable[[Any], None]]) -> None:
    for user in list(callbacks):
        if (call := callbacks.get(user)) is not None:
            call(user)
