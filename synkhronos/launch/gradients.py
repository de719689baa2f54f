"""The exchange of gradients, for classes whose step is compiled in two parts, as Theano-MPI's ``cdd``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos.rules import Rule, State
from synkhronos.rules.rule import average
from synkhronos.rules.state import Vector
from synkhronos.tasks import Worker

#: Key of a checkpoint's sum of gradients that the next step will apply.
_PENDING = "pending"


class SummedGradients(Rule):
    """Write the sum of all ranks' ``vels`` into ``vels2``, as one vector.

    A class of Theano-MPI's compiles two functions. One writes its gradient (or its momentum) into the variables `vels`;
    the other updates the parameters from `vels2`, and divides by the number of ranks. A step calls the second one
    first, so that a sum is applied one step late.

    Parameters
    ----------
    vels, vels2 : list of shared variables
        Lists of one length, with the same shapes and dtypes.
    precision : {None, "float32", "float16", "bfloat16"}
        The dtype in which ranks exchange.
    """

    def __init__(self, vels: Sequence[Any], vels2: Sequence[Any], precision: str | None = None):
        super().__init__(1, precision=precision)
        self.vels, self.vels2 = Vector(vels), Vector(vels2)

    def setup(self, worker: Worker, state: State) -> None:
        """Keep the values that the class has put into ``vels2``."""

    def exchange(self, worker: Worker, state: State) -> None:
        """All-reduce ``vels`` into ``vels2``."""
        vector = self.vels.get()
        if self.precision is None or np.dtype(vector.dtype).name == self.precision:
            total = worker.all_reduce(vector, "sum", overwrite=True)
        else:
            total = average(worker, vector, self.precision) * vector.dtype.type(worker.size)
        self.vels2.set(total)

    def report(self, worker: Worker, state: State) -> Any:
        """Return this rank's parameters: equal on all ranks, except for those that the class excludes."""
        return state.vector

    def store(self, state: State) -> None:
        """Save the pending sum in the state, for a checkpoint."""
        state.own[_PENDING] = np.asarray(self.vels2.get())

    def restore(self, state: State) -> None:
        """Set ``vels2`` to the pending sum of a checkpoint, if it has one of this size."""
        pending = state.own.pop(_PENDING, None)
        if pending is not None and np.size(pending) == self.vels2.size:
            self.vels2.set(np.asarray(pending))

    def resized(self, ranks: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
        """Scale the pending sum to the new number of ranks, by which the class divides it."""
        states = super().resized(ranks, size)
        if _PENDING not in ranks[0]["own"]:
            return states
        pending = ranks[0]["own"][_PENDING] * (size / len(ranks))
        return [{**state, "own": {**state["own"], _PENDING: pending.astype(state["params"].dtype)}} for state in states]
