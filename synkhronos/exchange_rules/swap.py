"""Synchronous rule that exchanges parameters between pairs of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from synkhronos.checks import check_at_least, check_flag, suggest_keywords
from synkhronos.exchange_rules.rule import ArraySpecs, ExchangeRule, Exclude, Period
from synkhronos.exchange_rules.state import ExchangeState
from synkhronos.programs import RankContext
from synkhronos.programs.rank_context import get_rank_lock
from synkhronos.variable_types import Array


class Swap(ExchangeRule):
    """Swap: random pairs of ranks exchange their parameters, for ensembles such as several GANs.

    Each rank trains its own model on its own rows.  After a swap a model is trained on the rows of another rank; with
    ``exclude`` one half of a model, such as the generator, meets another half.  The rule is Theano-MPI's "swap" for
    GANs, after Im et al., "Generative adversarial parallelization", arXiv:1612.04021.  If the number of ranks is odd,
    one of them takes no part.

    Parameters
    ----------
    replace : bool
        Whether one rank of each pair, chosen at random, copies its parameters to the other, instead of a swap.
    seed : int
        Seed of the random choices.
    period, exclude
        See `ExchangeRule`.

    Examples
    --------
    >>> Swap(period=50, seed=3)
    Swap(period=50, replace=False, seed=3)
    """

    @suggest_keywords
    def __init__(self, period: Period = 100, replace: bool = False, seed: int = 0, exclude: Exclude = None):
        super().__init__(period, exclude)
        self.replace, self.seed = check_flag(replace, "replace"), check_at_least(seed, "seed", 0)

    def get_shared_array_specs(self, n_ranks: int, size: int, dtype: np.dtype) -> ArraySpecs:
        return {"all": ((n_ranks, size), dtype)}

    def exchange(self, context: RankContext, state: ExchangeState) -> int:
        """Swap parameters.  Return the number of the rank whose parameters this rank gets."""
        source = self._choose_sources(context.size, state.step)[context.number]
        vectors = state.shared["all"]
        vectors[context.number] = state.params.to_numpy()
        context.barrier("all vectors are written")
        if source != context.number:
            with get_rank_lock(context, source) as lock:
                lock.pull(state.shared_rows["all"][source : source + 1])
                state.vector = vectors[source].copy()
        context.barrier("all vectors are read")
        return source

    def _choose_sources(self, n_ranks: int, step: int) -> list[int]:
        """Choose, for each rank, the rank whose parameters it gets at a step."""
        order = np.random.default_rng((self.seed, step)).permutation(n_ranks).tolist()
        sources = list(range(n_ranks))
        for first, second in zip(order[::2], order[1::2], strict=False):
            sources[second] = first
            if not self.replace:
                sources[first] = second
        return sources

    def compute_consensus(self, context: RankContext, state: ExchangeState) -> Array:
        """Return the parameters of rank 0, since a mean of different models would be meaningless."""
        return context.broadcast(state.params.to_numpy())

    def resize_states(self, states: list[dict[str, Any]], n_ranks: int) -> list[dict[str, Any]]:
        """Keep the models of the first ranks.  Additional ranks get copies of them."""
        return [states[r % len(states)] for r in range(n_ranks)]
