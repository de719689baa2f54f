"""Runs commands on all ranks, one at a time, and raises their errors.

A command is posted by one word in shared memory, `ControlMemory.POSTED`, and finished by one word for each rank,
`done`::

    master (`CommandRunner.run`)                                worker r (`worker_main.run_commands`)
    ────────────────────────────                                ─────────────────────────────────────
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
(`PeerWatch`).  A death closes the session, and the call raises a WorkerError.

If an interrupt ends the master's part, `_wait_until_done` waits for a moment only, and the workers may still be busy
with the command.  The next call waits for them (`wait_until_idle`) before it writes memory that they may read.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from typing import Any

from synkhronos.ranks.command import Command
from synkhronos.ranks.command_errors import make_command_error, read_reports
from synkhronos.ranks.control_memory import ControlMemory
from synkhronos.ranks.errors import Cancelled, PeerFailure, WorkerError
from synkhronos.ranks.mailbox import Mailbox
from synkhronos.ranks.memory import MemoryTable
from synkhronos.ranks.peer_watch import PeerDied, PeerWatch
from synkhronos.ranks.process_group import GRACE_SECONDS, ProcessGroup
from synkhronos.ranks.rank import Rank, Registry
from synkhronos.ranks.threads import ThreadLimit

#: Seconds for which an interrupted master waits for the workers.
_INTERRUPTED_GRACE_SECONDS = GRACE_SECONDS / 4
_NESTED_CALL = (
    "this call was made from inside another call (a signal handler, a finalizer, or an operation's own code): make it "
    "after that call has returned.  A handler can set a flag, which the program checks between calls"
)


class CommandRunner(ABC):
    """The part of a session that runs commands.

    A call that uses the ranks holds the session's lock, so that calls of threads and signal handlers can't mix::

        with session.call_lock:
            session.wait_until_idle()
            ...
            session.run(command)

    Functions that users call do so; functions that these call rely on it.

    Parameters
    ----------
    group : ProcessGroup
    timeout : float or None
        Seconds that the master waits for the other ranks in one command; in a task, since a rank's last sign of
        progress.  None: no limit.

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
    """

    def __init__(self, group: ProcessGroup, timeout: float | None):
        self.timeout = timeout
        self.close_reason: str | None = None
        self.failure: PeerFailure | None = None
        self._call_lock = threading.RLock()
        self._command_number, self._command_began = 0, 0.0
        self._is_running = False
        #: Whether all ranks are known to have finished the last command.
        self._is_idle = True
        self.registry = Registry()
        self.rank = Rank(
            group.master_rank,
            group.master_rank,
            group.control,
            self._check_peers,
            ThreadLimit(len(group.control.local_ranks), sets_environment=False),
            group.has_any_died,
        )
        self.memory = MemoryTable(self.rank, group.channels, self._run_when_idle)
        self._set_group(group)

    def _set_group(self, group: ProcessGroup) -> None:
        self._group, self._control = group, group.control
        self._mailbox = Mailbox(group.control, group.link, self.memory)
        self._watch = PeerWatch(group.has_any_died, self._has_pending_between_commands, self._raise_if_peer_died)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.rank.size

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
            late = self._group.find_timeout(self._command_began, self.timeout)
            if late is not None:
                self._close_after_failure(late)
        self._raise_if_peer_died()

    def _raise_if_peer_died(self) -> None:
        """End the session and raise WorkerError if a worker or another machine has died."""
        watch = self._watch
        command_thread, watch.command_thread = watch.command_thread, 0  # no PeerDied while this handles it
        failure = self._group.find_failure()
        if failure is not None:
            self._close_after_failure(failure)
        watch.command_thread = command_thread

    def _has_pending_between_commands(self) -> bool:
        """Whether an operation with the workers is pending although no command runs."""
        # While the ranks are being ended, their exits are expected.
        return self.close_reason is None and not self._is_running and self.rank.has_pending_operation()

    @abstractmethod
    def _close_after_failure(self, failure: PeerFailure) -> None:
        """Kill all workers, close the session and raise a WorkerError."""

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
