"""Ranks on other machines.

The ranks of a machine, a *host*, share memory.  Each host has one more process, its *agent*, which is not a rank.  Only
agents use MPI.  Ranks write words into the control memory of their own host, and the agents of the other hosts mirror
these words into theirs.  A rank thus always waits for words in its own host's memory, and the layers above need no code
for hosts::

    host a                                                          host b
    master, workers <-> control memory <-> agent  <== MPI ==>  agent <-> control memory <-> workers

`MpiLink` connects the master's session to the agents.
"""

from synkhronos.hosts.host_list import MAX_RANKS_PER_HOST, Host, check_single_process, is_this_machine, parse_hosts
from synkhronos.hosts.mpi_link import MissingGpuError, MpiLink

__all__ = [
    "MAX_RANKS_PER_HOST",
    "Host",
    "MissingGpuError",
    "MpiLink",
    "check_single_process",
    "is_this_machine",
    "parse_hosts",
]
