"""Collectives over shared variables, of which every rank has its own copy.

The functions in `calls` check their arguments in the master (`arguments`) before any rank starts.  Then they run one
command on all ranks (`commands`).
"""

from synkhronos.collectives.calls import (
    all_gather,
    all_reduce,
    broadcast,
    gather,
    get_lengths,
    get_shapes,
    get_value,
    reduce,
    reduce_scatter,
    scatter,
    set_value,
)

__all__ = [
    "all_gather",
    "all_reduce",
    "broadcast",
    "gather",
    "get_lengths",
    "get_shapes",
    "get_value",
    "reduce",
    "reduce_scatter",
    "scatter",
    "set_value",
]
