"""How do ranks that train at their own pace keep together?

A rule says what ranks do with their parameters after so many steps of their own.  Each is a small class; `Rule` is what
they have in common, and what a rule of your own begins with.

Together, all ranks at once:

`BSP`
    After each step: gradients, or parameters, are averaged.
`LocalSGD`, `PostLocal`
    After some steps: parameters are averaged.
`SlowMo`, `DiLoCo`
    The same, and the average's way has a momentum of its own.
`Swap`
    Pairs of ranks change parameters.

Each rank by itself, whenever it is ready (the first two also together):

`EASGD`, `EAMSGD`
    Ranks are tied to a centre by springs.
`Downpour`, `ASGD`
    Ranks send their steps to a centre, and fetch it.
`GoSGD`
    Ranks send their parameters to each other, now and then; ``GOSGD`` is the same, by Theano-MPI's name.

What a rule works on:

`State`
    One rank's parameters as a vector, and what the rule remembers.
`shared_memory`
    What a rule asks for that all ranks see.
"""

from synkhronos.rules.base import Rule, shared_memory
from synkhronos.rules.downpour import ASGD, Downpour
from synkhronos.rules.elastic import EAMSGD, EASGD
from synkhronos.rules.gossip import GoSGD
from synkhronos.rules.local import BSP, LocalSGD, PostLocal
from synkhronos.rules.outer import DiLoCo, SlowMo
from synkhronos.rules.state import State
from synkhronos.rules.swap import Swap

GOSGD = GoSGD

__all__ = [
    "ASGD",
    "BSP",
    "EAMSGD",
    "EASGD",
    "GOSGD",
    "DiLoCo",
    "Downpour",
    "GoSGD",
    "LocalSGD",
    "PostLocal",
    "Rule",
    "SlowMo",
    "State",
    "Swap",
    "shared_memory",
]
