"""What do shared variables hold on each rank?

`broadcast`, `scatter`, `gather`, `all_gather`, `reduce`, `all_reduce`
    Collectives over shared variables.
`set_value`, `get_value`
    One rank's copy.
`get_lengths`, `get_shapes`
    What shapes there are.

They stand in `calls`, which checks arguments with `arguments` and runs `commands` on all ranks.
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
    "scatter",
    "set_value",
]
