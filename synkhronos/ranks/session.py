"""The master and its workers, from `fork` to `close`.

There is at most one session in a process (`synkhronos.ranks.current_session`)::

              fork()                 close(), or the death of a worker or host
    no session ────> idle ──────────────────────────────────────────> closed
                    │    ^
         run():     │    │  all ranks have finished the command
         post it    v    │
                   running ──── close(), death ─────────────────────> closed

A death ends the session: the other workers are killed.  Within `keep_memory` the memory stays, and `replace_workers`
opens the session again with new workers.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from synkhronos.containers import WeakKeyDict
from synkhronos.ranks.command import Command
from synkhronos.ranks.command_runner import CommandRunner
from synkhronos.ranks.errors import Cancelled, Death, ReconnectError, SessionFailure, WorkerError
from synkhronos.ranks.interrupts import defer_signals
from synkhronos.ranks.link import Link
from synkhronos.ranks.process_group import GRACE_SECONDS, ProcessGroup
from synkhronos.ranks.worker_main import Exit

_log = logging.getLogger("synkhronos")


class Session(CommandRunner):
    """Starts, watches, ends and replaces the workers.  As a `CommandRunner`, the session runs commands on the ranks.

    With ``spawn``, workers are new processes in place of forks of this one.

    Attributes
    ----------
    has_kept_memory : bool
        Whether a death has closed the session within `keep_memory`, so that `replace_workers` is possible.
    close_callbacks, replacement_callbacks : WeakKeyDict of function by object
        Functions that are called with the object, under the call lock: when the session ends, and after each
        replacement of workers.  An object that is garbage-collected before is removed.
    """

    def __init__(self, size: int, master_rank: int, timeout: float | None, spawn: bool, link: Link | None):
        super().__init__(ProcessGroup(size, master_rank, link or Link(size), spawn), timeout)
        self.has_forked_workers = not spawn
        #: Number of `keep_memory` contexts, and whether a death has left the memory in one of them.
        self._n_keep_memory_contexts, self.has_kept_memory = 0, False
        self.close_callbacks: WeakKeyDict[Any, Callable[[Any], None]] = WeakKeyDict()
        self.replacement_callbacks: WeakKeyDict[Any, Callable[[Any], None]] = WeakKeyDict()

    def start(self, profile: bool, first_command: Command | None = None) -> None:
        """Start the workers, and run a first command.  Workers that replace them will run the command, too."""
        self._profile, self._first_command = profile, first_command
        with defer_signals():
            self._start_workers()
        self._run_first_command()

    def _start_workers(self) -> None:
        self._group.start(self._profile, self.rank, self.memory.last_key)
        self._watch.start(self._group.channels)

    def _run_first_command(self) -> None:
        with self.call_lock:
            self.wait_until_idle()
            if self._first_command is not None:
                self.run(self._first_command)

    @property
    def ranks_by_host(self) -> list[range]:
        """Ranks of each host; this host is the first."""
        return self._group.link.ranks_by_host

    def get_host_name(self, rank: int) -> str:
        """Return the name of a rank's host, or "" if there is only one."""
        return self._group.link.get_host_name(rank)

    @property
    def bytes_sent(self) -> int:
        """Number of bytes of shared memory that were sent to other hosts."""
        return self._group.link.bytes_sent

    @property
    def worker_pids(self) -> dict[int, int]:
        """Process ids of this host's workers, by rank; empty after their end."""
        return self._group.pids

    @property
    def death(self) -> Death | None:
        """The exit or failed start of a worker, or the loss of a host, that closed the session, if one did."""
        return None if self.failure is None else self.failure.death

    # -- failures ----------------------------------------------------------------------------------------------

    def _close_if_failed_or_late(self) -> None:
        if self.timeout is not None and time.monotonic() - self._command_start_time > self.timeout:
            timeout_failure = self._group.find_timeout_failure(self._command_start_time, self.timeout)
            if timeout_failure is not None:
                self._close_after_failure(timeout_failure)
        self._close_if_failed()

    def _close_if_failed(self) -> None:
        watch = self._watch
        command_thread, watch.command_thread = watch.command_thread, 0  # no PeerDied while this handles it
        failure = self._group.find_failure()
        if failure is not None:
            self._close_after_failure(failure)
        watch.command_thread = command_thread

    # -- the end -----------------------------------------------------------------------------------------------

    def close(self, kill: bool = False) -> None:
        """End the workers and free all shared memory.  The second call does nothing.

        A running call of another thread has `GRACE_SECONDS` seconds to finish; after that it raises an error.  With
        ``kill``, pending operations and the workers' orderly exit are not waited for.
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
                for operation in self.rank.pending_operations:
                    operation.finish()
                # Workers may still be busy with a command that an interrupt left.
                self._wait_for_completion(GRACE_SECONDS)
                kill = not self._all_ranks_done
        except (WorkerError, Cancelled) as error:
            kill = True
            _log.debug("a worker cannot exit by itself: %s", error)
        except BaseException:  # raised by a signal handler
            kill = True
            raise
        finally:
            try:
                self._shut_down(kill)
            finally:
                if has_lock:
                    self._call_lock.release()

    def _close_after_failure(self, failure: SessionFailure) -> None:
        """Kill all workers, close the session and raise a WorkerError."""
        if self.close_reason is not None:
            return  # the session is being closed: in another thread, or by a handler in this one
        message = failure.message
        if self.rank.pending_operations.has_writes_at_risk():
            message += (
                " A collective on the GPUs was pending and has been aborted: the variables that it writes, and all "
                "values computed from them, are invalid in this process too. Restore them from saved values."
            )
        message += " Call synkhronos.fork() to start again."
        self.has_kept_memory = self._n_keep_memory_contexts > 0 and failure.death is not None
        self.close(kill=True)
        self.close_reason, self.failure = message, failure
        raise WorkerError(message, failure.rank, description=failure.description)

    def _shut_down(self, kill: bool) -> None:
        """End the workers and free everything; a signal that arrives meanwhile shortens the workers' grace period."""
        with defer_signals() as signals:
            if self.close_reason is not None:
                return
            if not kill:
                # The session does not wait for this command as for others: a stopped worker would never finish it.
                self._command_number += 1
                try:
                    self._mailbox.post(self._command_number, Exit())
                except OSError as error:  # while segments are sent with the command
                    kill = True
                    _log.debug("a worker did not receive the command to exit: %s", error)
            self.close_reason = "the ranks were closed: call synkhronos.fork() first"
            self.rank.pending_operations.close()

            # The first worker's exit raises SIGURG, which is not a reason to hurry the others.
            def should_kill() -> bool:
                return signals.has_deferred(excluded=signal.SIGURG)

            self._group.shut_down(kill, should_kill, keeps_agents=self.has_kept_memory)
            self._watch.stop()
            # A call of another thread, or one that a signal handler has interrupted, may be waiting for the workers.
            self.rank.leave_group()
            self._group.close()
            if not self.has_kept_memory:
                self._free_memory()

    def _free_memory(self) -> None:
        _call_all(self.close_callbacks)
        self._group.link.kill()  # has been kept with the memory
        self.memory.free()
        self.rank.registry.clear()
        self.registry.clear()
        self.rank.thread_limit.restore()

    # -- new workers after a death -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def keep_memory(self) -> Iterator[None]:
        """Keep Data and replicated objects after a worker's death in the ``with`` block, for `replace_workers`.

        If the session is closed by a death at the end of the context, the memory is freed.
        """
        self._n_keep_memory_contexts += 1
        try:
            yield
        finally:
            self._n_keep_memory_contexts -= 1
            if self.has_kept_memory and not self._n_keep_memory_contexts:
                with defer_signals():
                    self.has_kept_memory = False
                    self._free_memory()

    def replace_workers(self, spawn: bool = False, excluded_ranks: Collection[int] = ()) -> bool:
        """Start new workers after a death within `keep_memory`.  Return False if all are forks, True otherwise.

        New workers are forks of this process: they inherit its segments, and its replicated objects with their present
        values and compiled functions.

        With ``spawn``, and on other hosts, new workers are new processes instead.  They get the segments, and a
        replicated object when it is next used.  Neither the workers ``excluded_ranks`` nor their devices are used
        again, and higher ranks move down.

        RuntimeError is raised if no worker's death has closed the session within `keep_memory`, WorkerError if a new
        worker dies.  If a new worker or a host can't start, `death` names its rank, and another call is possible.
        """
        if not self.has_kept_memory:
            raise RuntimeError("replace_workers: no worker has died within keep_memory()")
        link: Link | None = None
        try:
            link = self._group.link.reconnect(excluded_ranks)
            has_new_processes = spawn or link.needs_control_file  # on other hosts, at least
            files = None
            if has_new_processes and not spawn:  # reopened before the fork: reopening may map other memory
                files = self.memory.reopen_segments()
                spawn = files is None
            with defer_signals():  # an interrupt in between would leave the session half open
                self._reopen(link, spawn, excluded_ranks)
            self._run_first_command()
            with self.call_lock:
                self.wait_until_idle()
                if has_new_processes:
                    forks = [] if spawn else self._group.pids
                    self.memory.resend_segments(self._group.channels.keys() - forks, files)
                    self.registry.clear()
                _call_all(self.replacement_callbacks)
        except BaseException as error:
            if isinstance(error, Exception):
                self._record_failed_start(error, has_opened=self._group.link is link)
            self.close(kill=True)
            if link is not None and self._group.link is not link:  # the session has not been opened with it
                link.shut_down(True, 0.0, lambda: True)
            raise
        return has_new_processes

    def _reopen(self, link: Link, spawn: bool, excluded_ranks: Collection[int]) -> None:
        """Open the session again, with new workers."""
        assert self.rank.number not in excluded_ranks
        master_rank = self.rank.number - sum(r < self.rank.number for r in excluded_ranks)
        # The counters and semaphores of the old group are in an undefined state.
        group = ProcessGroup(self.size - len(excluded_ranks), master_rank, link, spawn)
        for r in sorted(excluded_ranks, reverse=True):
            self._first_command = self._first_command and self._first_command.without_rank(r)
        self.rank.join_group(
            master_rank, master_rank, group.control, self._close_if_failed_or_late, group.has_peer_died
        )
        are_all_forks = not (spawn or link.needs_control_file)
        self.memory.connect_workers(group.channels, is_inherited=are_all_forks)
        self._set_group(group)
        self.has_forked_workers = are_all_forks
        self._is_in_command, self._all_ranks_done = False, True
        self.close_reason = self.failure = None
        self.has_kept_memory = False
        self._start_workers()

    def _record_failed_start(self, error: Exception, has_opened: bool) -> None:
        """Set `failure` to the failed start of a new worker or a host, and keep the memory for another try."""
        if not has_opened:
            reason = f"{type(error).__name__}: {error}"
            death = Death.from_failed_start(self.rank.number, "", reason)
            if isinstance(error, ReconnectError):
                death = error.death
            self.failure = SessionFailure(death.describe(), death.rank, death)
        elif self.close_reason is None:  # else a new worker has died
            rank = error.rank if isinstance(error, WorkerError) else self._group.find_unstarted_rank()
            rank = self.rank.number if rank is None else rank
            text = str(error) if isinstance(error, WorkerError) else f"{type(error).__name__}: {error}"
            death = Death.from_failed_start(rank, "", text.partition("\n")[0])
            self.has_kept_memory = self._n_keep_memory_contexts > 0
            self.close(kill=True)
            description = f"rank {rank} {death.exit_description}"
            self.close_reason = f"{description}.  Call synkhronos.fork() to start again."
            self.failure = SessionFailure(description, rank, death)


def _call_all(callbacks: WeakKeyDict[Any, Callable[[Any], None]]) -> None:
    for owner in list(callbacks):
        if (call := callbacks.get(owner)) is not None:
            call(owner)
