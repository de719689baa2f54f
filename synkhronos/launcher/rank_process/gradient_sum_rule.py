"""The exchange of gradients for model classes that compile a step in two parts: Theano-MPI's ``cdd``."""

from __future__ import annotations

from typing import Any

import numpy as np

from synkhronos.exchange_rules import ExchangeRule, ExchangeState
from synkhronos.exchange_rules.rule import all_reduce_mean
from synkhronos.exchange_rules.state import FlatVariables
from synkhronos.programs import RankContext
from synkhronos.programs.rank_context import get_rank
from synkhronos.training.train_function.step_command import all_gather_shards, reduce_scatter_shards

#: Key, in a checkpoint, of the sum of gradients that the next step will apply.
_PENDING = "pending"


class GradientSumRule(ExchangeRule):
    """Exchange rule that writes the sum of all ranks' ``vels`` into ``vels2``, as one vector.

    Theano-MPI's models compile two functions.  One writes the gradient, or the momentum, into `vels`.  The other
    divides `vels2` by the number of ranks, and updates the parameters from it.  A step calls the second function first,
    so a sum is applied one step later.

    If a `synkhronos.launcher.Model` has a sharded optimizer, ``vels`` is a matrix with a row for each rank.  The first
    exchange of a step sets ``vels2`` to this rank's row of the sum.  ``apply_gradients()`` replaces the row by new
    parameters.  The second exchange gathers the rows of all ranks in ``vels``.
    """

    is_bulk_synchronous = True

    def __init__(self, model: Any, precision: str | None = None):
        super().__init__(period=1, precision=precision)
        self.vels, self.vels2 = FlatVariables(model.vels), FlatVariables(model.vels2)
        self._sharded_model = model if getattr(model, "sharded_variables", None) else None

    def setup(self, context: RankContext, state: ExchangeState) -> None:
        """Leave ``vels2`` at the values that the class has set."""

    def exchange(self, context: RankContext, state: ExchangeState) -> None:
        """All-reduce ``vels`` into ``vels2``.  The class describes the exchanges of a sharded optimizer."""
        if self._sharded_model is not None:
            self._exchange_shards(context, self._sharded_model)
            return
        vector = self.vels.get()
        if self.precision is None or np.dtype(vector.dtype).name == self.precision:
            total = context.all_reduce(vector, "sum", overwrite=True)
        else:
            total = all_reduce_mean(context, vector, self.precision) * vector.dtype.type(context.size)
        self.vels2.set(total)

    def _exchange_shards(self, context: RankContext, model: Any) -> None:
        rank, (matrix,), (row,) = get_rank(context), self.vels.shareds, self.vels2.shareds
        context.barrier("exchange of a sharded optimizer")
        if not model.has_new_shards:
            reduce_scatter_shards(rank, matrix, row, "sum")
        if model.has_new_shards or model.gathers_gradient:
            all_gather_shards(rank, matrix, row)

    def compute_consensus(self, context: RankContext, state: ExchangeState) -> Any:
        """Return this rank's parameters, which are equal on all ranks unless they are excluded."""
        return state.vector

    def save_pending(self, state: ExchangeState) -> None:
        """Save the pending sum in the state, for a checkpoint."""
        state.own[_PENDING] = np.asarray(self.vels2.get())

    def restore_pending(self, state: ExchangeState) -> None:
        """Set ``vels2`` to the pending sum of a checkpoint, if the checkpoint has a sum of this size."""
        pending = state.own.pop(_PENDING, None)
        if pending is not None and np.size(pending) == self.vels2.size:
            self.vels2.set(np.asarray(pending))

    def resize_states(self, states: list[dict[str, Any]], n_ranks: int) -> list[dict[str, Any]]:
        """Scale the pending sum to the new number of ranks, by which the class divides it."""
        resized = super().resize_states(states, n_ranks)
        if _PENDING not in states[0]["own"]:
            return resized
        pending = states[0]["own"][_PENDING] * (n_ranks / len(states))
        pending = pending.astype(states[0]["params"].dtype)
        return [{**state, "own": {**state["own"], _PENDING: pending}} for state in resized]
