"""The master's view of the ranks: a session runs commands on all ranks, one at a time, and ends the ranks.

There is at most one session in a process::

              fork()                 close(), or the death of a worker or host
    no session ────> idle ──────────────────────────────────────────> closed
                    │    ^
         run():     │    │  all ranks have finished the command
         post it    v    │
                   running ──── close(), death ─────────────────────> closed

A command is posted by one word in shared memory, `Control.POSTED`, and finished by one word for each rank, `done`::

    master (`Session.run`)                                      worker r (`worker_process._serve`)
    ──────────────────────                                      ──────────────────────────────────
    wait until all ranks are idle, `send_releases`              sleep until POSTED is a new number
    write segments and the pickled command; POSTED = number ──> map the segments, unpickle the command
    command.run(rank)         <──── barriers, slots ────>       command.run(rank)
      │ exception: FAILED = number, wake all ranks                │ exception: report, FAILED = number, wake all ranks
      │ FAILED by another rank: Cancelled at the next wait        │ FAILED by another rank: Cancelled at the next wait
    done[root] = number                                         done[r] = number; the last one wakes the master
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

import atexit
import contextlib
import logging
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from synkhronos.ranks import worker_process
from synkhronos.ranks.bounded_cache import BoundedCache
from synkhronos.ranks.command import Command
from synkhronos.ranks.control import (
    AWAITS_COMMAND,
    AWAITS_COMPLETION,
    MAILBOX_NBYTES,
    POLL_SECONDS,
    SPIN_SECONDS,
    Control,
)
from synkhronos.ranks.errors import (
    FAILED_START_PREFIX,
    Cancelled,
    Death,
    FailureReport,
    StartError,
    WorkerError,
    describe_effect,
    describe_exit,
)
from synkhronos.ranks.interrupts import defer_signals
from synkhronos.ranks.link import Link, LocalLink
from synkhronos.ranks.memory import MemoryTable
from synkhronos.ranks.peer_watch import PeerDied, PeerWatch
from synkhronos.ranks.rank import Rank, Registry
from synkhronos.ranks.segments import SharedArray
from synkhronos.ranks.threads import ThreadLimit, count_available_cores
from synkhronos.ranks.weak_key_dict import WeakKeyDict
from synkhronos.ranks.workers import Workers

_log = logging.getLogger("synkhronos")
T = TypeVar("T")

#: Seconds that workers get to exit by themselves before they are killed.
GRACE_SECONDS = 2.0
#: Seconds for which an interrupted master waits for the workers.
_INTERRUPTED_GRACE_SECONDS = GRACE_SECONDS / 4
#: Key of the agent's channel among the workers' channels.
_AGENT_CHANNEL = -1
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
    root : int
        Rank of the master.
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
    workers : Workers
        Processes of the other ranks of this machine.
    memory : MemoryTable
        Segments and object copies that all ranks have until the master releases them.
    registry : Registry
        State of layers above that only the master has.
    close_reason : str or None
        Reason why the session has ended, as a message for the user; None while it runs.
    is_inherited : bool
        Whether this process is a fork of the master, and the session belongs to its parent.
    death : Death or None
        The worker's exit that closed the session, if one did.
    has_kept_memory : bool
        Whether a death has closed the session within `keep_memory`, so that `replace_workers` is possible.
    """

    def __init__(
        self, size: int, root: int, timeout: float | None = None, spawn: bool = False, link: Link | None = None
    ):
        self.size = size
        self.timeout = timeout
        self.link = link = LocalLink(size) if link is None else link
        self.is_inherited = False
        self.close_reason: str | None = None
        self.death: Death | None = None
        self._dead_rank: int | None = None
        self._profile = False
        self._first_command: Command | None = None
        #: Number of `keep_memory` contexts, and whether a death has left the memory in one of them.
        self._n_keepers, self.has_kept_memory = 0, False
        self._call_lock = threading.RLock()
        self._command_number, self._command_began = 0, 0.0
        self._is_running = False
        #: Whether all ranks are known to have finished the last command.
        self._is_idle = True
        self._pickled: BoundedCache[Any, bytes] = BoundedCache(worker_process.MAX_CACHED_COMMANDS)
        self.registry = Registry()
        self._close_callbacks: WeakKeyDict[Any, Callable[[Any], None]] = WeakKeyDict()
        self._replacement_callbacks: WeakKeyDict[Any, Callable[[Any], None]] = WeakKeyDict()
        n_local = len(link.local_ranks)
        # Forks of this process inherit its memory; spawned workers and an agent get the memory as an open file.
        self._create_control(
            SPIN_SECONDS if n_local <= count_available_cores() else 0.0, spawn or link.needs_control_file
        )
        self.rank = Rank(root, root, self._control, self._check_peers, ThreadLimit(n_local, sets_environment=False))
        self.rank.has_peer_died = self._has_peer_died
        self.workers = Workers(root, self._control, self._file if spawn else None)
        self.memory = MemoryTable(self.rank, self.workers.channels, self._run_when_idle)
        self._peers = PeerWatch(self._has_peer_died, self._has_pending_between_commands, self._raise_if_peer_died)

    def _create_control(self, spin: float, as_file: bool) -> None:
        size, local_ranks, link_nbytes = self.size, self.link.local_ranks, self.link.control_nbytes
        self._file = Control.create(size, len(local_ranks), link_nbytes) if as_file and size > 1 else None
        fd = -1 if self._file is None else self._file.fileno()
        self._control = Control(size, spin, fd, local_ranks=local_ranks, link_nbytes=link_nbytes)

    def start(self, profile: bool, first_command: Command | None = None) -> None:
        """Start the workers and run a first command; if either fails, end the session and raise the error."""
        self._profile, self._first_command = profile, first_command
        try:
            self._start_workers()
            self._run_first_command()
        except BaseException:
            self.close(kill=True)
            raise

    def _run_first_command(self) -> None:
        """Run the first command."""
        with self.call_lock:
            self.wait_until_idle()
            if self._first_command is not None:
                self.run(self._first_command)

    def _start_workers(self) -> None:
        profile = self._profile
        with defer_signals():
            self.workers.start(profile, (self.rank, self.memory.last_key))
            agent = self.link.start_workers(self._control, self._file, self.rank.root, profile)
            if agent is not None:
                self.workers.channels[_AGENT_CHANNEL] = agent
            if self._file is not None:
                self._file.close()
            self._file = None
            self._peers.start(self.workers.channels)

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
        owned: bool = self._call_lock._is_owned()  # type: ignore[attr-defined] # as threading.Condition does
        return owned

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
            self.memory.release_orphans()
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
        control, rank, peers = self._control, self.rank, self._peers
        result, master_error = None, None
        try:
            self._is_running, self._is_idle = True, False
            self._command_number = number = self._command_number + 1
            if self.timeout is not None:
                self._command_began = time.monotonic()
            try:
                rank.begin_command(number)
                if self.size > 1:
                    self._post(number, command)
                peers.busy_thread = threading.get_ident()
                try:
                    result = command.run(rank)
                finally:
                    rank.finish_command()
                peers.busy_thread = 0
            except BaseException as error:
                peers.busy_thread = 0
                if rank.command_number == number:  # else it was not posted
                    rank.fail()
                master_error = error
            control.done[rank.number] = number
            if peers.has_raised:
                self._raise_if_peer_died()
            # After an interrupt of the master, a worker in compiled code may take long to finish: `wait_until_idle`
            # waits for it, or `close` ends it.
            self._wait_until_done(
                None if master_error is None or isinstance(master_error, Exception) else _INTERRUPTED_GRACE_SECONDS
            )
            has_failed = control.words[Control.FAILED] == number
            reports = self._read_reports(number) if has_failed else []
            if has_failed and self.link.find_remote_failure() is not None:
                self._raise_if_peer_died()  # reports may only follow from the loss of a machine, which is the cause
            rank.cancel_failed()
        except PeerDied:  # raised just after the master's part had failed
            self._raise_if_peer_died()
            raise
        finally:
            self._is_running = False
        if master_error is None and not reports and self.close_reason is None:
            return result
        try:
            raise self._make_error(command, number, master_error, reports)
        finally:
            del master_error  # the error refers to this frame: a cycle, which would delay the release of memory

    def _post(self, number: int, command: Command) -> None:
        """Send a command to the workers: in the mailbox, or in a segment of its own if it is too long for that."""
        message = self._pickle(command)
        if len(message) <= MAILBOX_NBYTES - self.link.plan_nbytes:
            self._write_mailbox(number, command, message, None)
            return
        segment = self.memory.create(len(message), in_command=True)
        try:
            memoryview(segment.buffer).cast("B")[: len(message)] = message
            location = SharedArray(segment.key, "u1", (len(message),))
            self._write_mailbox(
                number, command, pickle.dumps(worker_process.LongCommand(location), pickle.HIGHEST_PROTOCOL), location
            )
        finally:
            self.memory.release("segment", segment.key)

    def _pickle(self, command: Command) -> bytes:
        """Return the pickled command, from a cache if it was sent before: a training loop repeats a few commands."""
        # Commands of different classes may compare equal as tuples.
        key = type(command), command
        try:
            message = self._pickled.get(key)
        except TypeError:  # not hashable, such as a slice
            return pickle.dumps(command, pickle.HIGHEST_PROTOCOL)
        if message is None:
            message = pickle.dumps(command, pickle.HIGHEST_PROTOCOL)
            if len(message) <= worker_process.MAX_CACHED_NBYTES:
                self._pickled[key] = message
        return message

    def _write_mailbox(self, number: int, command: Command, message: bytes, location: SharedArray | None) -> None:
        """Write a message into the mailbox and wake the workers; ``location`` is the segment of a long command."""
        control, words = self._control, self._control.words
        self.memory.send_segments()
        control.mailbox[: len(message)] = message
        words[Control.MESSAGE_NBYTES] = len(message)
        if self.link.plan_nbytes:
            plan = self.link.plan_transfers(command, location, self.rank.segments)
            control.mailbox[len(message) : len(message) + len(plan)] = plan
            words[Control.PLAN_NBYTES] = len(plan)
        words[Control.NEWEST_KEY] = self.memory.last_sent_key
        words[Control.POSTED] = number
        control.fence()
        for r in self.workers.pids:
            control.wake(r, AWAITS_COMMAND)

    def _wait_until_done(self, limit: float | None = None) -> None:
        """Wait until all ranks have finished the last command, at most ``limit`` seconds."""
        control, me = self._control, self.rank.number
        done, number = control.done, control.words[Control.POSTED]
        if done[me] < number:  # an interrupt ended the master's part before it was marked as done
            self.rank.fail()
            done[me] = number
        self._is_idle = min(done) >= number
        if self._is_idle:
            return
        deadline = None if limit is None else time.monotonic() + limit

        def finished() -> bool:
            return min(done) >= number or (deadline is not None and time.monotonic() > deadline)

        control.wait(me, finished, AWAITS_COMPLETION, self._check_peers, POLL_SECONDS)
        self._is_idle = min(done) >= number

    # -- the error of a failed command -------------------------------------------------------------------------

    def _read_reports(self, number: int) -> list[FailureReport]:
        """Return the reports of the workers whose part of a command raised an exception."""
        control = self._control
        return [
            replace(pickle.loads(control.read_report(r)), host=self.link.get_host_name(r))
            for r in range(self.size)
            if r != self.rank.root
            and control.done[r] == number == control.words[Control.POSTED]
            and control.report_nbytes[r]
        ]

    def _make_error(
        self, command: Command, number: int, master_error: BaseException | None, reports: Sequence[FailureReport]
    ) -> BaseException:
        """Return the exception that a failed call raises; ``master_error`` was raised by the master's part."""
        error: Exception
        if self.close_reason is not None:  # the ranks have ended and report nothing more
            if isinstance(master_error, WorkerError) or not isinstance(master_error, Exception | None):
                return master_error
            if self._dead_rank is not None:  # noticed first in another thread, such as a device's watchdog
                error = WorkerError(self.close_reason, self._dead_rank)
            else:
                error = RuntimeError(f"while this call ran, {self.close_reason}")
            error.__cause__ = None if isinstance(master_error, Cancelled) else master_error
            return error
        applied = [r for r in range(self.size) if self._control.committed[r] == number]
        busy = self._list_busy_ranks(number)
        effect = describe_effect(command.effect, command.partial_effect, applied, busy, self.size)
        if reports and (master_error is None or isinstance(master_error, Cancelled)):
            error = WorkerError._from_reports(reports, effect)
            error.__cause__ = None
            return error
        assert master_error is not None
        waits = f"The next call waits for ranks {busy}, which are still busy with this one; close() ends them."
        for note in [*(report.summary() for report in reports), effect, waits if busy else ""]:
            if note:
                master_error.add_note(note)
        return master_error

    def _list_busy_ranks(self, number: int) -> list[int]:
        """Return the ranks that have not finished a posted command: an interrupted master does not wait for them."""
        if self._control.words[Control.POSTED] != number:
            return []
        return [r for r in range(self.size) if self._control.done[r] < number]

    # -- deaths and time limits --------------------------------------------------------------------------------

    def _check_peers(self) -> None:
        """End the session and raise WorkerError if a peer has died, or exceeds the time limit."""
        if self.timeout is not None and time.monotonic() - self._command_began > self.timeout:
            self._raise_if_late(self.timeout)
        self._raise_if_peer_died()

    def _raise_if_late(self, timeout: float) -> None:
        """Raise if a rank has shown no progress for ``timeout`` seconds, or since the command began."""
        control = self._control
        began, now = int(self._command_began * 1e9), time.monotonic_ns()
        silent = [r for r in range(self.size) if now - max(began, control.last_progress[r]) > timeout * 1e9]
        busy = [r for r in silent if r != self.rank.root and control.done[r] < control.words[Control.POSTED]]
        late = [r for r in busy if not control.sleep_reason[r]]
        if not late and len(silent) < self.size:
            return  # a rank that waits for one that makes progress is not late
        who, number = (f"rank {late[0]}", late[0]) if late else ("the ranks", self.rank.number)
        limit = f"the {timeout:g} seconds that fork(timeout=...) allows"
        self._end_with_error(f"{who} did not finish within {limit}; the workers were ended.", number)

    def _has_peer_died(self) -> bool:
        """Whether a worker has exited, as far as this machine knows."""
        return self.workers.has_any_exited() or self.link.find_remote_failure() is not None

    def _has_pending_between_commands(self) -> bool:
        """Whether an operation with the workers is pending although no command runs."""
        # While the ranks are being ended, their exits are expected.
        return self.close_reason is None and not self._is_running and self.rank.has_pending()

    def _raise_if_peer_died(self) -> None:
        """End the session and raise WorkerError if a worker or another machine has died."""
        peers = self._peers
        busy_thread, peers.busy_thread = peers.busy_thread, 0  # no PeerDied while this handles it
        dead = self.workers.collect_exited()
        if dead is not None:
            number, pid, code = dead
            death = Death(number, self.link.get_host_name(number), pid, describe_exit(code))
            self._end_with_error(f"{death.describe()}; the other workers were ended.", number, death)
        failure = self.link.find_remote_failure()
        if failure is not None:
            self._end_with_error(f"{failure.text}; the workers were ended.", failure.rank, failure.death)
        peers.busy_thread = busy_thread

    def _end_with_error(self, message: str, number: int, death: Death | None = None) -> None:
        """Kill all workers, close the session and raise a WorkerError with this message about a rank."""
        if self.close_reason is not None:
            return  # the session is being closed: in another thread, or by a handler in this one
        if self.rank.has_pending():
            message += (
                " A collective on the GPUs was pending and has been aborted: the variables that it writes, and all "
                "values computed from them, are invalid in this process too. Restore them from saved values."
            )
        message += " Call synkhronos.fork() to start again."
        self.has_kept_memory = self._n_keepers > 0 and death is not None
        self.close(kill=True)
        self.close_reason, self._dead_rank, self.death = message, number, death
        raise WorkerError(message, number)

    # -- the end -----------------------------------------------------------------------------------------------

    def add_close_callback(self, owner: T, callback: Callable[[T], None]) -> None:
        """Add a call ``callback(owner)`` when the session ends, if the owner still exists then."""
        self._close_callbacks[owner] = callback

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
            self._peers.busy_thread = 0
            if not kill:
                for operation in self.rank.pending:
                    operation.finish()
                # Workers may still be busy with a command that an interrupt left.
                self._wait_until_done(GRACE_SECONDS)
                kill = min(self._control.done) < self._control.words[Control.POSTED]
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
                    self._post(self._command_number, worker_process.Exit())
                except OSError as error:  # while segments are sent with the command
                    kill = True
                    _log.debug("a worker did not receive the command to exit: %s", error)
            self.close_reason = "the ranks were closed: call synkhronos.fork() first"
            self.rank.end_pending()

            # The first worker's exit raises SIGURG, which is no reason to hurry the others.
            def should_kill() -> bool:
                return signals.has_deferred(excluded=signal.SIGURG)

            self.workers.end(0.0 if kill else GRACE_SECONDS, should_kill)
            self.link.end(kill, GRACE_SECONDS, should_kill)
            self._free()

    def _free(self) -> None:
        self._peers.stop()
        # A call of another thread, or one that a signal handler has interrupted, may be waiting for the workers.
        for r in range(self.size):
            self._control.done[r] = self._control.words[Control.POSTED]
        self._control.decision_lock.release()  # its owner has exited, as have the agents
        self.rank.spans_hosts = False
        self.rank.fail()
        if not self.has_kept_memory:
            _call_all(self._close_callbacks)
        self.workers.close()
        # Break reference cycles, which would delay the release of memory until the next collection.
        self.rank.check_peers = lambda: None
        self.rank.has_peer_died = lambda: False
        if not self.has_kept_memory:
            self._free_memory()

    def _free_memory(self) -> None:
        self.memory.free()
        self.rank.registry.clear()
        self.registry.clear()
        self.rank.thread_limit.restore()

    # -- new workers after a death -----------------------------------------------------------------------------

    @property
    def can_replace_workers(self) -> bool:
        """Whether `replace_workers` is possible: not if ``mpirun`` has started this script on all hosts."""
        return self.link.can_renew

    @contextlib.contextmanager
    def keep_memory(self) -> Iterator[None]:
        """Context in which a worker's death leaves Data and replicated objects, so that workers can be replaced.

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
                    _call_all(self._close_callbacks)
                    self._free_memory()

    def replace_workers(self, spawn: bool = False, without: Collection[int] = ()) -> bool:
        """Start new workers after a death within `keep_memory`.

        They are copies of this process as it is now: they inherit its segments, and its replicated objects with their
        present values and compiled functions.

        Parameters
        ----------
        spawn : bool
            Start them as new processes instead, as on several hosts.  They get the segments, and replicated objects
            when these are used next.
        without : collection of int
            Ranks to leave out, with their devices; ranks above them move down.

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
            try:
                link = self.link.renew(without)
            except Exception as error:
                cause = f"{FAILED_START_PREFIX}: {type(error).__name__}: {error}"
                self.death = error.death if isinstance(error, StartError) else Death(self.rank.root, "", 0, cause)
                self._dead_rank = self.death.rank
                raise
            spawn = spawn or link.needs_control_file
            with defer_signals():  # an interrupt in between would leave the session half open
                self.link = link
                for number in sorted(without, reverse=True):
                    self._remove_rank(number)
                # For an error below: the old death names ranks that have just been removed.
                self.death = Death(self.rank.root, "", 0, f"{FAILED_START_PREFIX}: no control memory could be created")
                self._dead_rank = self.rank.root
                # The counters and semaphores of the old workers are in an undefined state.
                self._create_control(self._control.spin, spawn)
                self.rank.restart(self.rank.root, self._control, self._check_peers)
                self.rank.has_peer_died = self._has_peer_died
                self.memory.forget_workers(is_inherited=not spawn)
                self.workers.set_control_file(self._file)
                self._pickled.clear()
                self._peers = PeerWatch(
                    self._has_peer_died, self._has_pending_between_commands, self._raise_if_peer_died
                )
                self._is_running, self._is_idle = False, True
                self._dead_rank = self.death = self.close_reason = None
                self.has_kept_memory = False
                self._start_workers()
            self._run_first_command()
            with self.call_lock:
                self.wait_until_idle()
                if spawn:
                    self.memory.resend_segments()
                    self.registry.clear()
                _call_all(self._replacement_callbacks)
        except BaseException as error:
            if isinstance(error, Exception) and self.close_reason is None:
                self._close_after_failed_start(error)
            self.close(kill=True)
            if link is not None:  # an interrupt may have come before the session was open
                link.end(True, 0.0, lambda: True)
            raise
        return spawn

    def _remove_rank(self, number: int) -> None:
        """Reduce the session by a worker's rank, before new workers are started."""
        assert number != self.rank.root
        self.size -= 1
        self.rank.root -= number < self.rank.root
        self.workers.root = self.rank.root
        if self._first_command is not None:
            self._first_command = self._first_command.without_rank(number)

    def _close_after_failed_start(self, error: Exception) -> None:
        """Close the session because a new worker can't start; keep the memory for another try."""
        number = error.rank if isinstance(error, WorkerError) else self.workers.find_unstarted()
        if number is None:  # all workers have been started
            number = self.rank.number
        text = str(error) if isinstance(error, WorkerError) else f"{type(error).__name__}: {error}"
        cause = f"{FAILED_START_PREFIX}: " + text.partition("\n")[0]
        self.has_kept_memory = self._n_keepers > 0
        self.close(kill=True)
        self.close_reason = f"rank {number} {cause}.  Call synkhronos.fork() to start again."
        self._dead_rank, self.death = number, Death(number, "", 0, cause)

    def add_replacement_callback(self, owner: T, callback: Callable[[T], None]) -> None:
        """Add a call ``callback(owner)`` after workers were replaced, with the call lock held, if the owner exists."""
        self._replacement_callbacks[owner] = callback


def _call_all(callbacks: WeakKeyDict[Any, Callable[[Any], None]]) -> None:
    for owner in list(callbacks):
        if (call := callbacks.get(owner)) is not None:
            call(owner)


_current: Session | None = None


def fork(
    size: int,
    root: int,
    profile: bool,
    timeout: float | None = None,
    first_command: Command | None = None,
    spawn: bool = False,
    link: Link | None = None,
) -> Session:
    """Start a session and run its first command; if either fails, end the session and raise the error.

    Parameters
    ----------
    size, root, timeout, spawn, link
        As in `Session`.
    profile : bool
        Write a profile of each worker when it exits.
    first_command : Command, optional
        Command to run first.
    """
    global _current
    check_no_session()
    atexit.unregister(close)
    atexit.register(close)
    session: Session | None = None
    try:
        # An interrupt must not come between the change of this process's state and the assignment.
        with defer_signals():
            session = _current = Session(size, root, timeout, spawn, link)
        session.start(profile, first_command)
    except BaseException:
        if session is not None:
            session.close(kill=True)
        raise
    return session


def close() -> None:
    """End the session, if there is one."""
    if _current is not None:
        _current.close()


def get_session() -> Session:
    """Return the running session.

    Raises
    ------
    RuntimeError
        If there is none: before `fork`, after `close`, or after the death of a worker.
    """
    if _current is None:
        raise RuntimeError("no ranks are running: call synkhronos.fork() first")
    if _current.close_reason is not None:
        raise RuntimeError(_current.close_reason)
    if _current.is_inherited:
        raise RuntimeError(
            "the ranks belong to the process that called synkhronos.fork(), of which this one is a copy: "
            "call synkhronos.fork() here for ranks of its own"
        )
    return _current


def last_death() -> Death | None:
    """Return the worker's exit that ended this process's last session; None if it runs, or ended otherwise."""
    return None if _current is None else _current.death


def get_inherited_session() -> Session | None:
    """Return the running session of the master that this process is a fork of; None in any other process."""
    return _current if _current is not None and _current.is_inherited and _current.close_reason is None else None


def check_no_session() -> None:
    """Raise RuntimeError if a session of this process is running."""
    if _current is not None and _current.close_reason is None and not _current.is_inherited:
        raise RuntimeError(
            f"{_current.size} ranks are running already: call synkhronos.close() before synkhronos.fork()"
        )


def _mark_inherited() -> None:
    """Record, in a process forked from the master, that the session belongs to its parent."""
    if _current is not None:
        _current.is_inherited = True


os.register_at_fork(after_in_child=_mark_inherited)  # cheaper than os.getpid() in each call
