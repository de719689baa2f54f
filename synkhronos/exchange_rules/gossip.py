"""Asynchronous rule in which ranks send their parameters to each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from synkhronos.checks import check_at_least, suggest_keywords
from synkhronos.exchange_rules.rule import ArraySpecs, ExchangeRule, Exclude, check_fraction
from synkhronos.exchange_rules.state import ExchangeState
from synkhronos.programs import RankContext
from synkhronos.programs.rank_context import get_rank_lock
from synkhronos.variable_types import Array

#: Weight below which a rank waits for a message before it sends again.  Halved at each send, its weight would otherwise
#: be rounded to 0, and the mean of two vectors of weight 0 is undefined.
_MIN_WEIGHT = 2.0**-500


class GoSGD(ExchangeRule):
    """Gossip SGD: at random, a rank sends its parameters to another rank, which computes a weighted mean.

    Each rank has a weight, initially 1/p.  After each step, with the given probability, rank s halves its weight and
    sends (x_s, w_s) to another rank r, chosen at random.  Rank r computes x_r ← (w_r x_r + w_s x_s)/(w_r + w_s), w_r ←
    w_r + w_s: Blot et al., "Gossip training for deep learning", arXiv:1611.09726.

    Each rank has one mailbox in shared memory.  A sender merges its message into it by the same formula, under a lock,
    so a mailbox never overflows.  Invariants: the weights of ranks and mailboxes add up to 1, and no exchange changes
    the weighted mean of their vectors.  A rank that has sent hundreds of messages, and received none, sends again after
    it has received one.

    Parameters
    ----------
    probability : float
        Probability that a rank sends after a step, in (0, 1].
    seed : int
        Seed of the random choices.
    exclude
        See `ExchangeRule`.

    Examples
    --------
    >>> GoSGD(probability=0.1)
    GoSGD(probability=0.1, seed=0)
    """

    asynchronous = True
    changeable_options = frozenset({"probability"})

    @suggest_keywords
    def __init__(self, probability: float = 0.01, seed: int = 0, exclude: Exclude = None):
        super().__init__(1, exclude)
        self.probability = check_fraction(probability, "probability")
        self.seed = check_at_least(seed, "seed", 0)

    def get_shared_array_specs(self, n_ranks: int, size: int, dtype: np.dtype) -> ArraySpecs:
        return {"mail": ((n_ranks, size), dtype), "weights": ((n_ranks,), np.float64)}

    def setup(self, context: RankContext, state: ExchangeState) -> None:
        """Give all ranks equal weights."""
        state.own["weight"] = 1 / context.size

    def exchange(self, context: RankContext, state: ExchangeState) -> int | None:
        """Receive, then send at random.  Return the number of the rank that receives the message, or None."""
        self._receive(context, state)
        random = np.random.default_rng((self.seed, context.number, state.step))
        if context.size == 1 or random.random() >= self.probability or state.own["weight"] < _MIN_WEIGHT:
            return None
        dest = int(random.integers(context.size - 1))
        dest += dest >= context.number
        self._send(context, state, dest)
        return dest

    def _send(self, context: RankContext, state: ExchangeState, dest: int) -> None:
        """Merge this rank's parameters, with half of its weight, into the mailbox of rank ``dest``."""
        weights, weight = state.shared["weights"], state.own["weight"] / 2
        target_mail, target_weight = (state.shared_rows[name][dest : dest + 1] for name in ("mail", "weights"))
        with get_rank_lock(context, dest) as lock:
            lock.pull(target_weight)
            if weights[dest]:
                lock.pull(target_mail)
            fraction = weight / (float(weights[dest]) + weight)

            def merge(x: Array, read_mail: Callable[[], Array]) -> tuple[None, Array]:
                return None, x if fraction == 1 else _interpolate(read_mail(), x, fraction)

            state.update_with_shared("mail", merge, dest)
            state.own["weight"] = weight
            weights[dest] += weight
            lock.push(target_mail, target_weight)

    def _receive(self, context: RankContext, state: ExchangeState) -> None:
        """Merge the contents of this rank's mailbox into its parameters, and empty the mailbox."""
        weights, number = state.shared["weights"], context.number
        if not weights[number]:
            return
        with get_rank_lock(context, number):
            weight = float(weights[number])
            state.own["weight"] += weight
            fraction = weight / state.own["weight"]
            state.update_with_shared("mail", lambda x, read: (_interpolate(x, read(), fraction), None), number)
            weights[number] = 0

    def compute_consensus(self, context: RankContext, state: ExchangeState) -> Array:
        """Empty the mailboxes, and return the weighted mean of all ranks' parameters."""
        context.barrier("all messages are sent")
        self._receive(context, state)
        # The sum of the weights is not 1 after an interrupt in the middle of a message.
        fraction = state.own["weight"] / sum(context.all_gather(state.own["weight"]))
        return context.all_reduce(fraction * state.vector, "sum")

    def resize_states(self, states: list[dict[str, Any]], n_ranks: int) -> list[dict[str, Any]]:
        """Merge surplus ranks into others, or split the weights of ranks with new ones.  The mean is unchanged."""
        n_saved = len(states)
        states = [
            {**state, "own": {"weight": float(state["own"]["weight"])}, "params": state["params"].copy()}
            for state in states
        ]
        for r in range(n_ranks, n_saved):
            target, surplus = states[r % n_ranks], states[r]
            target["own"]["weight"] += surplus["own"]["weight"]
            fraction = surplus["own"]["weight"] / target["own"]["weight"]
            target["params"] += fraction * (surplus["params"] - target["params"])
        for r in range(n_saved, n_ranks):
            donor = states[r % n_saved]
            donor["own"]["weight"] /= 2
            states.append({**donor, "own": dict(donor["own"]), "params": donor["params"].copy()})
        return states[:n_ranks]


def _interpolate(vector: Array, other: Array, fraction: float) -> Array:
    """Return ``vector + fraction * (other - vector)``, in place if possible; exactly ``other`` if ``fraction`` is 1."""
    if fraction == 1:
        return other
    change = other - vector
    change *= fraction
    vector += change
    return vector
