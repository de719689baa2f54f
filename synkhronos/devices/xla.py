"""What forking means for XLA, the compiler behind PyTensor's JAX mode.

XLA starts threads when it is first used.  They don't exist in a process forked afterwards, where XLA waits for them for
ever or ends the process.  So a worker may use XLA only if the master had not used it when it forked.

`note_at_fork`
    Remember on each rank whether the master had.
`check_usable`
    Refuse where it had.
"""

from __future__ import annotations

import sys

from synkhronos.ranks import Rank

_KEY = "XLA was started before the fork"


def note_at_fork(rank: Rank) -> None:
    """Remember whether this process, now that it has just been forked, has inherited a started XLA."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    rank.store[_KEY] = not rank.is_master and bridge is not None and bool(bridge.backends_are_initialized())


def check_usable(rank: Rank) -> None:
    """Raise where using XLA would hang."""
    if rank.store[_KEY]:
        raise RuntimeError(
            "JAX was in use in the master when this worker was forked, and can't be used in both: "
            "call synkhronos.fork() before anything is computed with JAX; to fork again after close(), start the "
            "program (or the notebook's kernel) anew"
        )
