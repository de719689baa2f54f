"""Runs commands on all ranks, one at a time, and raises their errors.

A command is posted by one word in shared memory, `ControlMemory.POSTED`, and finished by one word for each rank,
`done`::

    master (`CommandRunner.run`)                                worker r (`worker_main.run_commands`)
    ────────────────────────────                                ─────────────────────────────────────
    finish the last command, and releases                       sleep until POSTED is a new number
    write segments and the pickled command; POSTED = number ──> map the segments, unpickle the command
    command.run(rank)         <──── barriers, slots ────>       command.run(rank)
      │ exception: FAILED = number, wake all ranks                │ exception: report, FAILED = number, wake all ranks
      │ FAILED by another rank: Cancelled at the next wait        │ FAILED by another rank: Cancelled at the next wait
    done[master] = number                                       done[r] = number; the last one wakes the master
    wait until every rank is done (`_wait_for_completion`) <────┘
    no rank failed: return the master's result
    a rank failed:  abort or complete pending operations, raise the master's error, or a WorkerError made of the reports

A waiting master checks regularly whether its workers live (`_close_if_failed_or_late`); a computing one is
interrupted by a signal (`PeerWatch`).  A death closes the session, and the call raises a WorkerError.

If an interrupt ends the master's part, `_wait_for_completion` waits for a moment only, and the workers may still be
busy with the command.  The next call waits for them (`wait_until_idle`) before it writes memory that they may read.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from synkhronos.ranks.agreement import MAX_COMMANDS
from synkhronos.ranks.command import Command
from synkhronos.ranks.control_memory import ControlMemory
from synkhronos.ranks.errors import (
    Cancelled,
    ExceptionReport,
    SessionFailure,
    WorkerError,
    describe_effect,
    make_worker_error,
)
from synkhronos.ranks.interrupts import find_handler_exception
from synkhronos.ranks.mailbox import Mailbox
from synkhronos.ranks.memory_table import MemoryTable
from synkhronos.ranks.peer_watch import PeerDied, PeerWatch
from synkhronos.ranks.process_group import GRACE_SECONDS, ProcessGroup
from synkhronos.ranks.rank import Rank, SingletonRegistry
from synkhronos.ranks.thread_limit import ThreadLimit

#: Seconds for which an interrupted master waits for the workers.
_INTERRUPTED_GRACE_SECONDS = GRACE_SECONDS / 4
_NESTED_CALL = (
    "this call was made from inside another call (a signal handler, a finalizer, a program of synkhronos.run(), or an "
    "operation's own code): make it after that call has returned.  A handler can set a flag, which the program checks "
    "between calls; a program of synkhronos.run() uses the methods of its first argument"
)
INHERITED_SESSION = (
    "the ranks belong to the process that called synkhronos.fork(), of which this one is a copy: "
    "call synkhronos.fork() here for ranks of its own"
)


class CommandRunner(ABC):
    """Posts commands, runs them on all ranks, one at a time, and raises their errors: a part of `Session`.

    `Session` derives from this class, and starts, watches and ends the ranks.  The runner is not a component of
    the session, as each calls the other: a death in a command closes the session.

    A call that uses the ranks holds the session's lock, so that calls of threads and signal handlers can't mix::

        with session.call_lock:
            session.wait_until_idle()
            ...
            session.run(command)

    Public functions acquire the lock; internal functions rely on their callers to hold it.

    Attributes
    ----------
    timeout : float or None
        Seconds that the master waits for the other ranks in one command; in a program, since a rank's last sign of
        progress.
    memory : MemoryTable
        Segments and object copies that all ranks have until the master releases them.
    registry : SingletonRegistry
        State of packages of higher layers that only the master has; empty once new processes have replaced workers.
    is_inherited : bool
        Whether this process is a fork of the master, and the session belongs to its parent.
    close_reason : str or None
        Reason why the session has ended, as a message for the user; None while it runs.
    failure : SessionFailure or None
        The failure that closed the session, if one did.
    """

    def __init__(self, group: ProcessGroup, timeout: float | None):
        self.timeout = timeout
        self.is_inherited = False
        self.close_reason: str | None = None
        self.failure: SessionFailure | None = None
        self._call_lock = threading.RLock()
        self._command_number, self._command_start_time = 0, 0.0
        self._is_in_command = False
        #: Whether all ranks are known to have finished the last command.
        self._all_ranks_done = True
        self.registry = SingletonRegistry()
        self.rank = Rank(
            group.master_rank,
            group.master_rank,
            group.control,
            self._close_if_failed_or_late,
            ThreadLimit(len(group.control.local_ranks), sets_environment=False),
            group.has_peer_died,
        )
        self.memory = MemoryTable(self.rank, group.channels, self._finish_last_and_run)
        self._set_group(group)

    def _set_group(self, group: ProcessGroup) -> None:
        self._group, self._control = group, group.control
        self._mailbox = Mailbox(group.control, group.link, self.memory)
        self._watch = PeerWatch(
            group.has_peer_died, self._has_pending_operation_between_commands, self._close_if_failed
        )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.rank.size

    # -- one call at a time ----------------------------------------------------------------------------------

    @property
    def call_lock(self) -> contextlib.AbstractContextManager[Any]:
        """Lock that lets one call run at a time.

        Raise RuntimeError if this thread holds it, as it is in the middle of another call, and in a fork of the
        master, which would post commands that the master does not know.

        The lock is implemented in C, so no signal handler can raise between its acquisition and the ``with`` block.  In
        a context manager written in Python, which could also call `wait_until_idle`, a handler could do so, and leave
        the lock acquired.
        """
        if self._call_lock._is_owned():  # type: ignore[attr-defined] # as threading.Condition does
            raise RuntimeError(_NESTED_CALL)
        if self.is_inherited:
            raise RuntimeError(INHERITED_SESSION)
        return self._call_lock

    @property
    def nested_call_lock(self) -> contextlib.AbstractContextManager[Any]:
        """`call_lock`, but a thread that already holds it may take it again while no command runs."""
        if self._is_in_command and self._call_lock._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError(_NESTED_CALL)
        if self.is_inherited:
            raise RuntimeError(INHERITED_SESSION)
        return self._call_lock

    @property
    def is_in_command(self) -> bool:
        """Whether the master runs its part of a command."""
        return self._is_in_command

    def wait_until_idle(self) -> None:
        """Wait until all ranks have finished the last command.  A call does this first, under the lock.

        An interrupt may have left the command running on some ranks, which may still read memory that the call will
        write.
        """
        self._is_in_command = False  # the caller holds the lock: an interrupt has left the mark
        self._finish_last_command()

    def _finish_last_command(self) -> None:
        """Wait until all ranks have finished the last command, and release the memory of deleted objects."""
        if self._is_in_command:
            raise RuntimeError(_NESTED_CALL)
        if self.rank.finish_callbacks:  # an interrupt has ended them
            self.rank.run_finish_callbacks()
        if self.close_reason is None:
            if self.memory.deleted_owners:
                self.memory.release_unused()
            if not self._all_ranks_done:
                self._wait_for_completion()
        if self.close_reason is not None:  # a worker's death may have closed it just now
            raise RuntimeError(self.close_reason)

    # -- commands --------------------------------------------------------------------------------------------

    def run(self, command: Command) -> Any:
        """Run a command on every rank, under the lock.  Return the master's result.

        Raise WorkerError if a worker raised an exception or died, or raise the exception of the master's own part.
        """
        self.send_releases()
        return self.run_without_releases(command)

    def send_releases(self) -> None:
        """Send the keys of the objects that the master has released to the workers.  The lock has to be held."""
        self._finish_last_command()
        if self.memory.unsent_releases:
            self.memory.send_changes()

    def _finish_last_and_run(self, command: Command) -> Any:
        self._finish_last_command()
        return self.run_without_releases(command)

    def run_without_releases(self, command: Command) -> Any:
        """Run a command on all ranks as `run` does, without sending releases first.  Return the master's result.

        The order is the same whether the master's part succeeds, fails or is interrupted:

        1. Run the master's part; if it fails, mark the command as failed, which ends the waits of the others.
        2. Set `done` of the master.  Since this follows its last barrier of the command, no rank waits for it any more.
        3. Wait until all ranks are done.  The workers' reports are then complete, and no rank starts another operation.
        4. Abort or complete the pending operations of a failed command, and raise.

        If an interrupt ends the master's part, step 3 waits only briefly.  `_all_ranks_done` then stays False, and the
        next call completes the wait (`_finish_last_command`), also if an exception leaves this method before step 2.
        """
        control, command_number = self._control, self._command_number + 1
        try:
            self._is_in_command, self._all_ranks_done, self._command_number = True, False, command_number
            result, master_error = self._post_and_run_own_part(command, command_number)
            control.done[self.rank.number] = command_number
            if self._watch.has_raised:
                self._close_if_failed()
            is_interrupt = master_error is not None and not isinstance(master_error, Exception)
            # A worker in compiled code may take long to finish; the next call waits for it, or `close` ends it.
            self._wait_for_completion(_INTERRUPTED_GRACE_SECONDS if is_interrupt else None)
            has_failed = control.words[ControlMemory.FAILED] == command_number
            reports = self._read_reports(command_number) if has_failed else []
            if has_failed and self._group.link.find_failure() is not None:
                self._close_if_failed()  # the reports may only be consequences of the host's failure
            self.rank.resolve_operations_of_failed_command()
        except PeerDied:  # raised just after the master's part had failed
            self._close_if_failed()
            raise
        finally:
            self._is_in_command = False
        if master_error is None and not reports and self.close_reason is None:
            return result
        try:
            if self.close_reason is not None:  # the ranks have ended and report nothing more
                raise self._make_close_error(master_error)
            raise self._make_command_error(command, command_number, master_error, reports)
        finally:
            del master_error  # the error refers to this frame: a cycle, which would delay the release of memory

    def _post_and_run_own_part(self, command: Command, command_number: int) -> tuple[Any, BaseException | None]:
        """Post a command and run the master's part.  Return its result, and its exception or None."""
        rank, watch = self.rank, self._watch
        if self.timeout is not None:
            self._command_start_time = time.monotonic()
        try:
            if command_number > MAX_COMMANDS:
                raise RuntimeError(f"the ranks have run {MAX_COMMANDS:,} commands, the most: close() and fork() again")
            rank.begin_command(command_number)
            if rank.size > 1:
                self._mailbox.post(command_number, command)
            watch.command_thread = threading.get_ident()
            try:
                result = command.run(rank)
            finally:
                if rank.finish_callbacks:
                    rank.run_finish_callbacks()
            watch.command_thread = 0
        except BaseException as error:
            watch.command_thread = 0
            if rank.command_number == command_number:  # else it was not posted
                rank.barriers.fail_command()
            return None, find_handler_exception(error)
        return result, None

    def _read_reports(self, command_number: int) -> list[ExceptionReport]:
        """Return the workers' reports of a failed command."""
        control, link = self._control, self._group.link
        return [
            replace(pickle.loads(control.read_report(r)), host=link.get_host_name(r))
            for r in range(control.size)
            if r != self.rank.number
            and control.done[r] == command_number == control.words[ControlMemory.POSTED]
            and control.report_nbytes[r]
        ]

    def _make_command_error(
        self,
        command: Command,
        command_number: int,
        master_error: BaseException | None,
        reports: Sequence[ExceptionReport],
    ) -> BaseException:
        """Return the exception of a failed command: one made of the workers' reports, or that of the master's part."""
        control, size = self._control, self._control.size
        applied_ranks = [r for r in range(size) if control.applied[r] == command_number]
        is_posted = control.words[ControlMemory.POSTED] == command_number
        # An interrupted master does not wait for ranks that have not finished.
        busy_ranks = [r for r in range(size) if control.done[r] < command_number] if is_posted else []
        effect = describe_effect(
            command.effect_sentence, command.partial_effect_sentence, applied_ranks, busy_ranks, size
        )
        if reports and (master_error is None or isinstance(master_error, Cancelled)):
            error = make_worker_error(reports, effect)
            error.__cause__ = None
            return error
        assert master_error is not None
        waits = f"The next call waits for ranks {busy_ranks}, which are still busy with this one; close() ends them."
        for note in [*(report.summarize() for report in reports), effect, waits if busy_ranks else ""]:
            if note:
                master_error.add_note(note)
        return master_error

    def _wait_for_completion(self, limit: float | None = None) -> None:
        """Wait until all ranks have finished the last command, at most ``limit`` seconds."""
        done, me, command_number = self._control.done, self.rank.number, self._control.words[ControlMemory.POSTED]
        if done[me] < command_number:  # an interrupt ended the master's part before it was marked as done
            self.rank.barriers.fail_command()
            done[me] = command_number
        self._all_ranks_done = self._group.wait_until_done(self._close_if_failed_or_late, limit)

    def _make_close_error(self, master_error: BaseException | None) -> BaseException:
        """Return the exception of a call during which the session was closed, in another thread or a handler."""
        if isinstance(master_error, WorkerError) or not isinstance(master_error, Exception | None):
            return master_error
        error: Exception
        if self.failure is not None:  # noticed first in another thread, such as a device's watchdog
            error = WorkerError(self.close_reason or "", self.failure.rank, description=self.failure.description)
        else:
            error = RuntimeError(f"while this call ran, {self.close_reason}")
        error.__cause__ = None if isinstance(master_error, Cancelled) else master_error
        return error

    # -- failures, which the session detects ---------------------------------------------------------------------

    def _has_pending_operation_between_commands(self) -> bool:
        """Whether an operation with the workers is pending although no command runs."""
        # While the ranks are being ended, their exits are expected.
        return (
            self.close_reason is None and not self._is_in_command and self.rank.pending_operations.has_writes_at_risk()
        )

    @abstractmethod
    def _close_if_failed_or_late(self) -> None:
        """End the session and raise WorkerError if a worker has died, a host has failed, or a rank is late."""

    @abstractmethod
    def _close_if_failed(self) -> None:
        """End the session and raise WorkerError if a worker has died or another host has failed."""
