"""Connection between the master's session and the hosts on which the ranks run.

A session posts commands, waits for the ranks and ends them.  A link hides from it whether the ranks are on one host
(`Link`) or on several, whose agents communicate by MPI (its subclass `synkhronos.hosts.MpiLink`).

Other hosts can't read this host's memory.  Before a command runs there, they receive the rows that their ranks access.
"""

from __future__ import annotations

import io
import socket
from collections.abc import Callable, Collection

from synkhronos.ranks.command import Command
from synkhronos.ranks.control_memory import ControlMemory
from synkhronos.ranks.errors import SessionFailure
from synkhronos.ranks.segments import ArrayLocation, SegmentTable


class Link:
    """Link of a session whose ranks are all on one host, where shared memory suffices: most methods do nothing.

    `synkhronos.hosts.MpiLink` overrides them for several hosts.

    Attributes
    ----------
    ranks_by_host : list of range
        Ranks of each host; this host is the first.
    needs_control_file : bool
        Whether the control memory has to be a file, because a process that is not a fork of this one maps it.
    link_nbytes, max_plan_nbytes : int
        Number of bytes reserved for the link in the control memory, and for the plan of a command's transfers in the
        mailbox.
    """

    needs_control_file = False
    link_nbytes = max_plan_nbytes = 0

    def __init__(self, size: int, bytes_sent: int = 0):
        self.ranks_by_host, self._earlier_bytes_sent = [range(size)], bytes_sent

    @property
    def local_ranks(self) -> range:
        """Ranks of this host."""
        return self.ranks_by_host[0]

    @property
    def bytes_sent(self) -> int:
        """Number of bytes of shared memory that were sent to other hosts."""
        return self._earlier_bytes_sent

    def start_remote_workers(
        self, control: ControlMemory, control_file: io.FileIO | None, master_rank: int, profile: bool
    ) -> socket.socket | None:
        """Start the other hosts' workers.  Return the channel over which this host's agent gets segments.

        With one host, do nothing and return None.
        """
        return None

    def plan_transfers(self, command: Command, command_location: ArrayLocation | None, segments: SegmentTable) -> bytes:
        """Return the pickled plan of a command's transfers: the memory that the other hosts need for it.

        ``command_location`` is the location of the pickled command if it is too long for the mailbox, else None.  With
        one host the plan is empty.  IndexError is raised if a host needs rows that another one has loaded for itself,
        ValueError if the plan is longer than `max_plan_nbytes`.
        """
        return b""

    def get_host_name(self, rank: int) -> str:
        """Return the name of a rank's host, or "" if there is only one."""
        return ""

    def find_failure(self) -> SessionFailure | None:
        """Return the failure of another host, or of a worker there, or None if there is none."""
        return None

    def shut_down(
        self, kill: bool, grace_seconds: float, should_kill: Callable[[], bool], keeps_agents: bool = False
    ) -> None:
        """End the workers of the other hosts, wait for their exit, and close the connection; with one host do nothing.

        The workers are killed if ``kill`` is True, after ``grace_seconds``, or once ``should_kill()`` returns True.
        With ``keeps_agents``, an intact connection stays open until `reconnect` or `kill`.
        """

    def kill(self) -> None:
        """Close the connection at once.  With one host, do nothing."""

    def reconnect(self, excluded_ranks: Collection[int]) -> Link:
        """Return a link to the same hosts for new workers, after the end of this one, without the excluded ranks.

        ReconnectError is raised if a host can't be reached, or has fewer GPUs than ranks now; OSError or RuntimeError
        if this host can't start or connect the others.
        """
        return Link(len(self.local_ranks) - len(excluded_ranks), self.bytes_sent)
