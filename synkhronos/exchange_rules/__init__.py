"""Exchange rules: ways in which ranks that train on different rows combine their parameters.

A rule is a subclass of `ExchangeRule`.  Each rank takes its own steps, and calls `ExchangeRule.exchange` after every
``period`` steps.  The argument is the rank's `ExchangeState`.  It has the parameters as one vector, and the rule's
arrays.

With a synchronous rule, all ranks exchange at the same step: `BSP`, `LocalSGD`, `PostLocal`, `SlowMo`, `DiLoCo` and
`Swap`.  With an asynchronous rule, each rank exchanges at its own pace, through shared memory under locks: `EASGD`,
`EAMSGD`, `Downpour`, `ASGD` and `GoSGD`; `EASGD`, `EAMSGD` and `Downpour` can also be synchronous.  ``GOSGD`` is
Theano-MPI's name of `GoSGD`.
"""

from synkhronos.exchange_rules.averaging import BSP, LocalSGD, PostLocal
from synkhronos.exchange_rules.downpour import ASGD, Downpour
from synkhronos.exchange_rules.elastic import EAMSGD, EASGD
from synkhronos.exchange_rules.gossip import GoSGD
from synkhronos.exchange_rules.outer_optimizer import DiLoCo, SlowMo
from synkhronos.exchange_rules.rule import ExchangeRule, allocate_shared_arrays
from synkhronos.exchange_rules.state import ExchangeState
from synkhronos.exchange_rules.swap import Swap

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
    "ExchangeRule",
    "SlowMo",
    "ExchangeState",
    "Swap",
    "allocate_shared_arrays",
]
