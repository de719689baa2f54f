"""The processes of a session's ranks on all hosts, from their start to their exit."""

from __future__ import annotations

import time
from collections.abc import Callable

from synkhronos.ranks.control_memory import AWAITS_COMPLETION, POLL_SECONDS, SPIN_SECONDS, ControlMemory
from synkhronos.ranks.errors import Death, SessionFailure
from synkhronos.ranks.link import Link
from synkhronos.ranks.rank import Rank
from synkhronos.ranks.thread_limit import count_available_cores
from synkhronos.ranks.worker_processes import WorkerProcesses

#: Seconds that workers get to exit by themselves before they are killed.
GRACE_SECONDS = 2.0
#: Key of the agent's channel among the workers' channels.
_AGENT_CHANNEL = -1


class ProcessGroup:
    """The master's workers on this host and, through the link, on others, with their control memory.

    Workers are replaced by the end of a group and the start of another.  With ``spawn``, this host's workers are new
    processes and not forks of this one.  ``channels`` also has the channel of this host's agent.
    """

    def __init__(self, size: int, master_rank: int, link: Link, spawn: bool):
        self.link, self.master_rank = link, master_rank
        local_ranks, link_nbytes = link.local_ranks, link.link_nbytes
        # Forks of this process inherit its memory; spawned workers and an agent get the memory as an open file.
        as_file = size > 1 and (spawn or link.needs_control_file)
        self._control_file = ControlMemory.create_file(size, len(local_ranks), link_nbytes) if as_file else None
        fd = -1 if self._control_file is None else self._control_file.fileno()
        spin_seconds = SPIN_SECONDS if len(local_ranks) <= count_available_cores() else 0.0
        self.control = ControlMemory(size, spin_seconds, fd, local_ranks=local_ranks, link_nbytes=link_nbytes)
        self._workers = WorkerProcesses(master_rank, self.control, self._control_file if spawn else None)
        self.channels, self.pids = self._workers.channels, self._workers.pids

    def start(self, profile: bool, master: Rank, newest_key: int) -> None:
        """Start all workers.  Signals must be deferred.  For the parameters see `WorkerProcesses.start`."""
        self._workers.start(profile, master, newest_key)
        agent = self.link.start_remote_workers(self.control, self._control_file, self.master_rank, profile)
        if agent is not None:
            self.channels[_AGENT_CHANNEL] = agent
        self._close_control_file()

    def find_unstarted_rank(self) -> int | None:
        """Return the first rank of this host whose worker was not started, or None if all were."""
        return self._workers.find_unstarted_rank()

    # -- commands ----------------------------------------------------------------------------------------------

    def wait_until_done(self, check_peers: Callable[[], None], limit: float | None) -> bool:
        """Wait until all ranks have finished the posted command, at most ``limit`` seconds.  Return whether they have.

        ``check_peers`` is called repeatedly and may raise.
        """
        done, command_number = self.control.done, self.control.words[ControlMemory.POSTED]
        if min(done) >= command_number:
            return True
        deadline = None if limit is None else time.monotonic() + limit

        def is_over() -> bool:
            return min(done) >= command_number or (deadline is not None and time.monotonic() > deadline)

        self.control.wait(self.master_rank, is_over, AWAITS_COMPLETION, check_peers, POLL_SECONDS)
        return min(done) >= command_number

    # -- failures ----------------------------------------------------------------------------------------------

    def has_peer_died(self) -> bool:
        """Whether a worker has exited, or another host has failed, as far as this host knows."""
        return self._workers.has_any_exited() or self.link.find_failure() is not None

    def find_failure(self) -> SessionFailure | None:
        """Return the exit of a worker, or the failure of another host, or None if there is none."""
        exited = self._workers.reap()
        if exited is not None:
            rank, pid, code = exited
            death = Death.from_exit(rank, self.link.get_host_name(rank), pid, code)
            return SessionFailure(death.describe(), rank, death)
        return self.link.find_failure()

    def find_timeout_failure(self, start_time: float, timeout: float) -> SessionFailure | None:
        """Return the failure of a rank that has shown no progress for ``timeout`` seconds, or None if there is none.

        ``start_time`` is the start of the command, by the monotonic clock.
        """
        control, master, start_ns, now = self.control, self.master_rank, int(start_time * 1e9), time.monotonic_ns()
        silent = [r for r in range(control.size) if now - max(start_ns, control.last_progress[r]) > timeout * 1e9]
        busy = [r for r in silent if r != master and control.done[r] < control.words[ControlMemory.POSTED]]
        late = [r for r in busy if not control.sleep_reason[r]]
        if not late and len(silent) < control.size:
            return None  # a rank that waits for one that makes progress is not late
        name, rank = (f"rank {late[0]}", late[0]) if late else ("the ranks", master)
        limit = f"the {timeout:g} seconds that fork(timeout=...) allows"
        return SessionFailure(f"{name} did not finish within {limit}", rank)

    # -- the end -----------------------------------------------------------------------------------------------

    def shut_down(self, kill: bool, should_kill: Callable[[], bool], keeps_agents: bool = False) -> None:
        """Wait for the exit of all workers, and close the link.

        Workers are killed if ``kill`` is True, after `GRACE_SECONDS`, or as soon as ``should_kill()`` returns True.
        With ``keeps_agents`` the link may keep the connection to the other hosts, for `Link.reconnect`.
        """
        self._workers.shut_down(0.0 if kill else GRACE_SECONDS, should_kill)
        self.link.shut_down(kill, GRACE_SECONDS, should_kill, keeps_agents)

    def close(self) -> None:
        """Close the channels and the file."""
        self._close_control_file()
        self._workers.close_channels()

    def _close_control_file(self) -> None:
        if self._control_file is not None:
            self._control_file.close()
        self._control_file = None
