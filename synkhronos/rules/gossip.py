"""Asynchronous rule in which ranks send their parameters to each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from synkhronos.checks import check_at_least
from synkhronos.devices import get_array_device
from synkhronos.graph_libraries import Array, SharedVariable
from synkhronos.programs import Worker
from synkhronos.rules.rule import Rule, SharedArrays, check_fraction, get_rank_lock
from synkhronos.rules.state import State


class GoSGD(Rule):
    """Gossip SGD: at random, a rank sends its parameters to another rank, which computes a weighted mean.

    Each rank has a weight, initially 1/p.  With a probability, after each step, rank s halves its weight and sends
    (x_s, w_s) to a random other rank r, which computes x_r ← (w_r x_r + w_s x_s)/(w_r + w_s), w_r ← w_r + w_s: Blot et
    al., "Gossip training for deep learning", arXiv:1611.09726.

    Each rank has one mailbox in shared memory.  A sender merges its message into it by the same formula, under a lock,
    so a mailbox never overflows.  Invariants: the weights of ranks and mailboxes add up to 1, and no exchange changes
    the weighted mean of their vectors.

    Parameters
    ----------
    probability : float
        Probability that a rank sends after a step, in (0, 1].
    seed : int
        Seed of the random choices.
    exclude
        See `Rule`.

    Examples
    --------
    >>> GoSGD(probability=0.1)
    GoSGD(probability=0.1, seed=0)
    """

    asynchronous = True

    def __init__(
        self, probability: float = 0.01, seed: int = 0, exclude: Callable[[SharedVariable], bool] | None = None
    ):
        super().__init__(1, exclude)
        self.probability = check_fraction(probability, "probability")
        self.seed = check_at_least(seed, "seed", 0)

    def describe_shared_arrays(self, n_ranks: int, size: int, dtype: np.dtype) -> SharedArrays:
        """Return the shape and dtype of the mailboxes, and of the weights of their contents."""
        return {"mail": ((n_ranks, size), dtype), "weights": ((n_ranks,), np.float64)}

    def setup(self, worker: Worker, state: State) -> None:
        """Give all ranks equal weights."""
        state.own["weight"] = 1 / worker.size

    def exchange(self, worker: Worker, state: State) -> int | None:
        """Receive, then send at random; return the number of the rank that receives the message, or None."""
        self._receive(worker, state)
        random = np.random.default_rng((self.seed, worker.number, state.step))
        if worker.size == 1 or random.random() >= self.probability:
            return None
        dest = int(random.integers(worker.size - 1))
        dest += dest >= worker.number
        self._send(worker, state, dest)
        return dest

    def _send(self, worker: Worker, state: State, dest: int) -> None:
        """Merge this rank's parameters, with half of its weight, into the mailbox of rank ``dest``."""
        views, vector = state.get_writable_params()
        mail, weights = state.shared["mail"][dest], state.shared["weights"]
        weight = state.own["weight"] / 2
        target_mail, target_weight = (state.shared_rows[name][dest : dest + 1] for name in ("mail", "weights"))
        with get_rank_lock(worker, dest) as lock:
            lock.read(target_weight)
            if weights[dest]:
                lock.read(target_mail)
            share = weight / (float(weights[dest]) + weight)
            if views is None:
                if share < 1:
                    vector = _interpolate(target_mail.to_device(get_array_device(vector))[0], vector, share)
                target_mail.write(vector)
            else:
                for x, bounds in state.params.iterate_blocks(views):
                    _interpolate_in_place(mail[bounds], x, share, state.scratch)
            state.own["weight"] = weight
            weights[dest] += weight
            lock.write(target_mail, target_weight)

    def _receive(self, worker: Worker, state: State) -> None:
        """Merge the contents of this rank's mailbox into its parameters, and empty the mailbox."""
        weights, me = state.shared["weights"], worker.number
        if not weights[me]:
            return
        views, vector = state.get_writable_params()
        with get_rank_lock(worker, me):
            weight, mail = float(weights[me]), state.shared["mail"][me]
            state.own["weight"] += weight
            share = weight / state.own["weight"]
            if views is None:
                device = get_array_device(vector)
                vector = _interpolate(vector, state.shared_rows["mail"][me : me + 1].to_device(device)[0], share)
            else:
                for x, bounds in state.params.iterate_blocks(views):
                    _interpolate_in_place(x, mail[bounds], share, state.scratch)
            weights[me] = 0
        if vector is not None:
            state.vector = vector

    def compute_consensus(self, worker: Worker, state: State) -> Array:
        """Empty the mailboxes, and return the weighted mean of all ranks' parameters."""
        worker.barrier("all messages are sent")
        self._receive(worker, state)
        # The sum of the weights is not 1 after an interrupt in the middle of a message.
        share = state.own["weight"] / sum(worker.all_gather(state.own["weight"]))
        return worker.all_reduce(share * state.vector, "sum")

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
            share = surplus["own"]["weight"] / target["own"]["weight"]
            target["params"] += share * (surplus["params"] - target["params"])
        for r in range(n_saved, n_ranks):
            giver = states[r % n_saved]
            giver["own"]["weight"] /= 2
            states.append({**giver, "own": dict(giver["own"]), "params": giver["params"].copy()})
        return states[:n_ranks]


def _interpolate_in_place(into: np.ndarray, other: np.ndarray, share: float, scratch: np.ndarray) -> None:
    """Set ``into`` to ``into + share * (other - into)``; exactly to ``other`` if ``share`` is 1."""
    if share == 1:
        into[...] = other
        return
    d = scratch[: into.size]
    np.subtract(other, into, out=d)
    np.multiply(d, share, out=d)
    np.add(into, d, out=into)


def _interpolate(vector: Array, other: Array, share: float) -> Array:
    """Return ``vector + share * (other - vector)``; exactly ``other`` if ``share`` is 1."""
    return other if share == 1 else vector + share * (other - vector)
