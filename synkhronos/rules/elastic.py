"""Rules by which ranks are tied to a centre.

`EASGD`
    Elastic averaging.
`EAMSGD`
    The same, with momentum.
`elastic`
    The exchange itself, in host memory.
`centre_of`
    The centre, for a report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from synkhronos.checks import flag
from synkhronos.devices import JAX
from synkhronos.rules.base import Rule, check_momentum, check_share
from synkhronos.rules.state import BLOCK, State
from synkhronos.tasks import Worker

#: The lock under which the centre is read and written.
CENTRE = 0


class EASGD(Rule):
    """Elastic averaging SGD: each rank is drawn to a centre, and draws the centre.

    Every ``period`` steps of its own a rank does d = α (x^i − x̃), x^i ← x^i − d, x̃ ← x̃ + d: Zhang, Choromanska and
    LeCun, "Deep learning with elastic averaging SGD", arXiv:1412.6651, algorithm 1.  Together (``asynchronous=False``),
    all ranks take the same x̃: eqs. 5 and 6, x̃ ← (1 − β) x̃ + β (1/p) Σ_i x^i with β = pα.

    Here a rank exchanges after its steps; in the paper's listing the gradient is taken before the exchange, and applied
    after it: a different order by half a step.

    Parameters
    ----------
    beta : float
        How far the centre moves to the ranks' mean when all have exchanged, in (0, 1]; α is this divided by the number
        of ranks, so that it stays stable with more of them.
    period : int or callable
        τ, a rank's steps between two exchanges.
    alpha : float, optional
        α itself, in (0, 1]; `beta` is then ignored.
    asynchronous : bool
        Whether each rank exchanges when it is ready, under a lock.
    exclude
        As for `Rule`.
    """

    def __init__(
        self,
        beta: float = 0.9,
        period: int | Callable[[int], int] = 10,
        alpha: float | None = None,
        asynchronous: bool = True,
        exclude: Callable[[Any], bool] | None = None,
    ):
        super().__init__(period, exclude)
        self.beta = check_share(beta, "beta")
        self.alpha = None if alpha is None else check_share(alpha, "alpha")
        self.asynchronous = flag(asynchronous, "asynchronous")

    def strength(self, n_ranks: int) -> float:
        """Return α for a number of ranks."""
        return self.beta / n_ranks if self.alpha is None else self.alpha

    def memory(self, n_ranks: int, size: int, dtype: np.dtype) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Return the centre, and how often it was exchanged with."""
        return {"centre": ((size,), dtype), "sequence": ((1,), np.int64)} if self.asynchronous else {}

    def setup(self, worker: Worker, state: State) -> None:
        """Begin, with the centre where all are."""
        if not self.asynchronous:
            state.own["centre"] = state.vector
            return
        if worker.number == 0:
            state.rows["centre"].write(state.vector)
        worker.barrier("the centre is set")

    def exchange(self, worker: Worker, state: State) -> int | None:
        """Exchange with the centre; return the exchange's number, if ranks come one by one."""
        alpha = self.strength(worker.size)
        if not self.asynchronous:
            distance = alpha * (self.position(state) - state.own["centre"])
            self.move(state, distance)
            state.own["centre"] = state.own["centre"] + worker.all_reduce(distance, "sum")
            return None
        rows = state.rows
        with worker.lock(CENTRE) as lock:
            lock.read(rows["sequence"], rows["centre"])
            sequence = int(state.shared["sequence"][0])
            self.elastic(state, alpha)
            state.shared["sequence"][0] = sequence + 1
            lock.write(rows["sequence"], rows["centre"])
        return sequence

    def elastic(self, state: State, alpha: float) -> None:
        """Exchange with the centre, under the lock."""
        runs, vector = state.opened()
        if runs is None:
            there = state.rows["centre"].to_device(JAX)
            distance = alpha * (vector - there)
            vector = vector - distance
            state.rows["centre"].write(there + distance)
        else:
            elastic(state.params.blocks(runs), state.shared["centre"], alpha, state.scratch("distance", BLOCK))
        if vector is not None:
            state.vector = vector

    def position(self, state: State) -> Any:
        """Return where the rank is."""
        return state.vector

    def move(self, state: State, distance: Any) -> None:
        """Move the rank back by a distance."""
        state.vector = state.vector - distance

    def report(self, worker: Worker, state: State) -> Any:
        """Return the centre."""
        if not self.asynchronous:
            return state.own["centre"]
        worker.barrier("all have exchanged")
        return centre_of(worker, state)

    def resized(self, ranks: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
        """Keep the centre and the ranks that stay; new ones start at the centre, at rest."""
        first = ranks[0]
        centre = first["own"]["centre"] if "centre" in first["own"] else first["shared"]["centre"]
        fresh = {**first, "params": centre.copy(), "optimizer": np.zeros_like(first["optimizer"]), "since": 0}
        return [ranks[r] if r < len(ranks) else fresh for r in range(size)]


class EAMSGD(EASGD):
    """Elastic averaging with momentum.

    Each rank steps by Nesterov's momentum, v ← δ v − η g(x + δv), x ← x + v, and is tied to the centre as in `EASGD`:
    arXiv:1412.6651, algorithm 2 and eq. 7.  The update rule has to be ``nesterov_momentum``, whose parameters are
    x + δv; the exchange is with x.

    Parameters
    ----------
    beta, period, alpha, asynchronous, exclude
        As for `EASGD`.
    momentum : float
        δ, that of ``nesterov_momentum``, from 0 up to 1.
    """

    def __init__(
        self,
        beta: float = 0.9,
        period: int | Callable[[int], int] = 10,
        momentum: float = 0.99,
        alpha: float | None = None,
        asynchronous: bool = True,
        exclude: Callable[[Any], bool] | None = None,
    ):
        super().__init__(beta, period, alpha, asynchronous, exclude)
        self.momentum = check_momentum(momentum)

    def elastic(self, state: State, alpha: float) -> None:
        """Exchange where the rank is, not where it looks ahead to."""
        if not self.momentum:
            super().elastic(state, alpha)
            return
        rows, position = state.rows["centre"], self.position(state)
        centre = rows.to_device(JAX) if JAX.holds(position) else rows.array
        distance = alpha * (position - centre)
        rows.write(centre + distance)
        self.move(state, distance)

    def position(self, state: State) -> Any:
        """Return where the rank is: its parameters are those to which the next step would take it."""
        return state.vector - self.momentum * state.velocity


def centre_of(worker: Worker, state: State) -> Any:
    """Return a copy of the centre, where the rank's parameters are."""
    with worker.lock(CENTRE) as lock:
        lock.read(state.rows["centre"])
        return state.rows["centre"].to_device(JAX) if state.params.is_jax else state.shared["centre"].copy()


def elastic(blocks: Iterable[tuple[np.ndarray, slice]], centre: np.ndarray, alpha: float, scratch: np.ndarray) -> None:
    """Move blocks of a rank's vector to the centre, and the centre to them."""
    for x, place in blocks:
        c, d = centre[place], scratch[: x.size]
        np.subtract(x, c, out=d)
        np.multiply(d, alpha, out=d)
        np.subtract(x, d, out=x)
        np.add(c, d, out=c)
