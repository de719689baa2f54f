"""How do ranks on other machines take part?

On each machine, a *host*, its ranks share memory as they do on one.  One more process a host, the *agent*, is no rank: it
alone speaks MPI, and writes into its host's control memory what the ranks of the other hosts have written into theirs.
So ranks wait for words in their own memory wherever the others are, and the rooms above know of no hosts::

    host a:  master, workers  <->  control memory  <->  agent  <=== MPI ===>  agent  <->  control memory  <->  workers  :host b

`Hosts`
    Starts the agents by ``mpirun``, and is what the master's session knows of the other hosts (`start`).
`Host`, `hosts_of`
    The hosts that a user names (`names`).
`agent`
    What an agent does, from its start to its end.
`contents`
    Which parts of shared memory the other hosts lack.
`pipes`
    Memory through which collectives stream arrays from a host to the next.
"""

from synkhronos.hosts.names import Host, hosts_of
from synkhronos.hosts.start import Hosts

__all__ = ["Host", "Hosts", "hosts_of"]
