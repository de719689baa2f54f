"""How do ranks on other machines take part?

On each machine, a *host*, ranks share memory.  One more process a host, the *agent*, is no rank: it alone speaks MPI,
and writes into its host's control memory what the ranks of the other hosts have written into theirs.  So a rank waits
for words in its own host's memory wherever the others are, and the rooms above know of no hosts::

    host a                                                          host b
    master, workers <-> control memory <-> agent  <== MPI ==>  agent <-> control memory <-> workers

`MpiLink`, `serve`
    Starts the agents by ``mpirun``, and is what the master's session knows of the other hosts (`start`).
`Host`, `MOST`, `hosts_of`, `is_this_machine`, `launched`
    The hosts that a user names, or that ``mpirun`` has started the script on (`names`).
`mpirun`
    What ``mpirun`` wants and says.
`agent`, `mail`
    What an agent does, from its start to its end; how agents tell each other.
`contents`
    Which parts of shared memory the other hosts lack.
`pipes`, `frames`
    Memory through which collectives stream arrays from a host to the next, and the agent's part in that.
`task`
    What ranks of different hosts send each other, and share under a lock.
"""

from synkhronos.hosts.names import MOST, Host, hosts_of, is_this_machine, launched
from synkhronos.hosts.start import MpiLink, serve

__all__ = ["MOST", "Host", "MpiLink", "hosts_of", "is_this_machine", "launched", "serve"]
