"""Ranks on other machines.

On each machine, a *host*, ranks share memory.  One more process a host, the *agent*, is no rank: it alone speaks MPI,
and copies into its host's control memory what the ranks of other hosts have written into theirs.  So a rank waits for
words in its own host's memory wherever its peers are, and the layers above know of no hosts::

    host a                                                          host b
    master, workers <-> control memory <-> agent  <== MPI ==>  agent <-> control memory <-> workers

`MpiLink` connects the master's session to the agents.
"""

from synkhronos.hosts.mpi_link import MpiLink, run_agent
from synkhronos.hosts.names import MAX_RANKS_PER_HOST, Host, find_launch, is_this_machine, parse_hosts

__all__ = ["MAX_RANKS_PER_HOST", "Host", "MpiLink", "parse_hosts", "is_this_machine", "find_launch", "run_agent"]
