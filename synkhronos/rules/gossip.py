"""A rule by which ranks send their parameters to each other.

`GoSGD`
    Now and then, to a rank by chance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from synkhronos.checks import at_least
from synkhronos.devices import JAX
from synkhronos.rules.base import Rule, check_share
from synkhronos.rules.state import BLOCK, State
from synkhronos.tasks import Worker


class GoSGD(Rule):
    """Gossip SGD: after a step a rank may send its parameters to another one, which takes a weighted mean.

    Ranks have weights, 1/p at first.  With some probability a rank s halves its weight and sends (x_s, w_s) to a random
    other rank r; this takes x_r ← (w_r x_r + w_s x_s)/(w_r + w_s), w_r ← w_r + w_s: Blot et al., "Gossip training for
    deep learning", arXiv:1611.09726.  No rank waits for another but for the moment in which it writes into the other's
    mailbox, where what lies there already is merged in the same way, so that it never fills.  The weights of ranks and
    mailboxes add up to 1, and no exchange changes the weighted mean.

    Parameters
    ----------
    probability : float
        The probability that a rank sends after a step, in (0, 1].
    seed : int
        Of the choices.
    exclude
        As for `Rule`.
    """

    asynchronous = True

    def __init__(self, probability: float = 0.01, seed: int = 0, exclude: Callable[[Any], bool] | None = None):
        super().__init__(1, exclude)
        self.probability = check_share(probability, "probability")
        self.seed = at_least(seed, "seed", 0)

    def memory(self, n_ranks: int, size: int, dtype: np.dtype) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Return a mailbox for each rank, and the weight of what is in it."""
        return {"mail": ((n_ranks, size), dtype), "weights": ((n_ranks,), np.float64)}

    def setup(self, worker: Worker, state: State) -> None:
        """Begin, with equal weights."""
        state.own["weight"] = 1 / worker.size

    def exchange(self, worker: Worker, state: State) -> int | None:
        """Take what has come; perhaps send; return to whom."""
        self.drain(worker, state)
        chance = np.random.default_rng((self.seed, worker.number, state.step))
        if worker.size == 1 or chance.random() >= self.probability:
            return None
        to = int(chance.integers(worker.size - 1))
        to += to >= worker.number
        self.send(worker, state, to)
        return to

    def send(self, worker: Worker, state: State, to: int) -> None:
        """Put half of this rank's weight, with its parameters, into another's mailbox."""
        runs, vector = state.opened()
        mail, weights = state.shared["mail"][to], state.shared["weights"]
        weight = state.own["weight"] / 2
        its_mail, its_weight = state.rows["mail"][to : to + 1], state.rows["weights"][to : to + 1]
        with worker.lock(1 + to) as lock:
            lock.read(its_weight)
            if weights[to]:
                lock.read(its_mail)
            share = weight / (float(weights[to]) + weight)
            if runs is None:
                its_mail.write(vector if share == 1 else _drawn(its_mail.to_device(JAX)[0], vector, share))
            else:
                for x, place in state.params.blocks(runs):
                    _draw(mail[place], x, share, state.scratch("distance", BLOCK))
            state.own["weight"] = weight
            weights[to] += weight
            lock.write(its_mail, its_weight)

    def drain(self, worker: Worker, state: State) -> None:
        """Take what is in this rank's mailbox."""
        weights, me = state.shared["weights"], worker.number
        if not weights[me]:
            return
        runs, vector = state.opened()
        with worker.lock(1 + me):
            came, mail = float(weights[me]), state.shared["mail"][me]
            state.own["weight"] += came
            share = came / state.own["weight"]
            if runs is None:
                vector = _drawn(vector, state.rows["mail"][me : me + 1].to_device(JAX)[0], share)
            else:
                for x, place in state.params.blocks(runs):
                    _draw(x, mail[place], share, state.scratch("distance", BLOCK))
            weights[me] = 0
        if vector is not None:
            state.vector = vector

    def report(self, worker: Worker, state: State) -> Any:
        """Return the weighted mean, with nothing left in a mailbox."""
        worker.barrier("all have sent")
        self.drain(worker, state)
        # By the sum of the weights, which is not 1 any more after an interrupt in the middle of a message.
        share = state.own["weight"] / sum(worker.exchange(state.own["weight"]))
        return worker.all_reduce(share * state.vector, "sum")

    def resized(self, ranks: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
        """Merge those that leave into those that stay; new ones take half of another's weight.  The mean is kept."""
        now = [
            {**each, "own": {"weight": float(each["own"]["weight"])}, "params": each["params"].copy()} for each in ranks
        ]
        for r in range(size, len(now)):
            into, gone = now[r % size], now[r]
            into["own"]["weight"] += gone["own"]["weight"]
            into["params"] += gone["own"]["weight"] / into["own"]["weight"] * (gone["params"] - into["params"])
        for r in range(len(now), size):
            giver = now[r % len(ranks)]
            giver["own"]["weight"] /= 2
            now.append({**giver, "own": dict(giver["own"]), "params": giver["params"].copy()})
        return now[:size]


def _draw(into: np.ndarray, other: np.ndarray, share: float, scratch: np.ndarray) -> None:
    """Move one vector towards another, by a share of the way; all the way it is the other to the last bit."""
    if share == 1:
        into[...] = other
        return
    d = scratch[: into.size]
    np.subtract(other, into, out=d)
    np.multiply(d, share, out=d)
    np.add(into, d, out=into)


def _drawn(vector: Any, other: Any, share: float) -> Any:
    """Return a vector moved towards another, by a share of the way: as `_draw`, without writing into either."""
    return other if share == 1 else vector + share * (other - vector)
