"""Numbers that a function computes launch after launch, in memory that stays where it is.

`Log`
    The numbers of many launches, one array for each output.
`Entry`
    One of them.

XLA records a launch (as a CUDA graph) and repeats what it has recorded as long as no address changes, at half the time.
A loss that somebody keeps would have a new address each time.  So launches write their numbers into one array, one
behind the other, and that array is donated from launch to launch.  Reading a hundred of them is one copy to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos.ranks.interrupts import defer_signals

#: Launches whose numbers go into one log; then another begins.  A launch that repeats itself counts as many.
LAUNCHES = 256


class Log:
    """The numbers of some launches.

    Parameters
    ----------
    dtypes : list of dtype
        One for each output that is a number.

    Attributes
    ----------
    cells : list of lists of one array
        How many launches have written, and for each output their numbers: given to a launch, which puts what it returns
        into their place.
    """

    def __init__(self, dtypes: Sequence[np.dtype]):
        import jax.numpy as jnp

        with defer_signals():  # what is raised in the middle of JAX's Python leaves JAX unusable
            arrays = [jnp.zeros((), np.int32), *(jnp.zeros((LAUNCHES,), dtype) for dtype in dtypes)]
        self.cells: list[list[Any]] = [[array] for array in arrays]
        self._written = 0
        self._read: tuple[int, list[np.ndarray]] = 0, []

    def has_room(self, times: int) -> bool:
        """Whether a launch can write so many numbers of each output into it."""
        return self._written + times <= LAUNCHES

    @staticmethod
    def write(arrays: Sequence[Any], numbers: Sequence[Any]) -> list[Any]:
        """Return the arrays with one launch's numbers in them; traced by XLA."""
        from jax import lax

        count, *logs = arrays
        return [
            count + 1,
            *(
                lax.dynamic_update_index_in_dim(log, number, count, 0)
                for log, number in zip(logs, numbers, strict=True)
            ),
        ]

    def entries(self, times: int) -> list[list[Entry]]:
        """Return what the last launch has written of each output, to be called once after each."""
        first = self._written
        self._written += times
        return [[Entry(self, output, first + i) for i in range(times)] for output in range(len(self.cells) - 1)]

    def unread(self) -> list[Any]:
        """Return the arrays to read before `Entry.read`: none if they were read since the last launch."""
        if self._read[0] == self._written:
            return []
        if any(array.is_deleted() for (array,) in self.cells):
            raise RuntimeError("this output was lost when a later launch of its function failed")
        return [array for (array,) in self.cells[1:]]

    def keep(self, numbers: Sequence[np.ndarray]) -> None:
        """Keep what was read of these arrays."""
        # Copies: an array that NumPy looks at can't be donated.
        self._read = self._written, [np.array(each) for each in numbers]

    def number(self, output: int, launch: int) -> np.ndarray:
        """Return what a launch has computed, as an array without dimensions."""
        return self._read[1][output][launch, ...].copy()


class Entry:
    """A number that a launch has computed, or is about to.

    Attributes
    ----------
    log : Log
        Where it is.
    """

    __slots__ = ("_launch", "_output", "log")

    nbytes = 8

    def __init__(self, log: Log, output: int, launch: int):
        self.log, self._output, self._launch = log, output, launch

    def read(self) -> np.ndarray:
        """Return it as an array without dimensions, once the log has been read."""
        return self.log.number(self._output, self._launch)
