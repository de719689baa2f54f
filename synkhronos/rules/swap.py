"""A rule by which ranks change parameters.

`Swap`
    Pairs of ranks, by chance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from synkhronos.checks import at_least, flag
from synkhronos.rules.base import Rule
from synkhronos.rules.state import State
from synkhronos.tasks import Worker


class Swap(Rule):
    """Pairs of ranks, by chance, change parameters: for ensembles, such as several generators and discriminators.

    Each rank trains a model of its own on its own rows; a swap shows the model other rows (or, with ``exclude``, one
    half of it another half): Theano-MPI's "swap" for GANs, after Im et al., "Generative adversarial parallelization",
    arXiv:1612.04021.  Of an odd number one rank keeps its own.

    Parameters
    ----------
    period : int or callable
        Steps between two swaps.
    replace : bool
        Whether one of each pair, by chance, gives its parameters to both, in the place of a swap.
    seed : int
        Of the choices.
    exclude
        As for `Rule`.
    """

    def __init__(
        self,
        period: int | Callable[[int], int] = 100,
        replace: bool = False,
        seed: int = 0,
        exclude: Callable[[Any], bool] | None = None,
    ):
        super().__init__(period, exclude)
        self.replace, self.seed = flag(replace, "replace"), at_least(seed, "seed", 0)

    def memory(self, n_ranks: int, size: int, dtype: np.dtype) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Return room for all ranks' parameters."""
        return {"all": ((n_ranks, size), dtype)}

    def exchange(self, worker: Worker, state: State) -> int:
        """Swap; return whose parameters this rank has got."""
        source = self.sources(worker.size, state.step)[worker.number]
        everybody = state.shared["all"]
        everybody[worker.number] = np.asarray(state.vector)
        worker.barrier("all have shown theirs")
        if source != worker.number:
            with worker.lock(1 + source) as lock:
                lock.read(state.rows["all"][source : source + 1])
                state.vector = everybody[source].copy()
        worker.barrier("all have taken theirs")
        return source

    def sources(self, n_ranks: int, step: int) -> list[int]:
        """Return whose parameters each rank gets at a step."""
        order = np.random.default_rng((self.seed, step)).permutation(n_ranks).tolist()
        sources = list(range(n_ranks))
        for one, other in zip(order[::2], order[1::2], strict=False):
            sources[other] = one
            if not self.replace:
                sources[one] = other
        return sources

    def report(self, worker: Worker, state: State) -> Any:
        """Return rank 0's parameters: the mean of different models is none."""
        return worker.decide(np.asarray(state.vector))

    def resized(self, ranks: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
        """Keep the models of ranks that stay; a new rank begins with one of these."""
        return [ranks[r % len(ranks)] for r in range(size)]
