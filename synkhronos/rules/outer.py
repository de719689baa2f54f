"""Rules by which the average's way has a momentum of its own.

`SlowMo`
    Slow momentum.
`DiLoCo`
    An outer optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from synkhronos.checks import flag, positive
from synkhronos.rules.base import Rule, check_momentum
from synkhronos.rules.state import State
from synkhronos.tasks import Worker


class _Outer(Rule):
    """Each rank takes steps from a common point; the average's distance from there is taken for a gradient."""

    def setup(self, worker: Worker, state: State) -> None:
        """Begin, at the common point."""
        state.own["anchor"] = state.vector
        state.own["velocity"] = 0 * state.vector

    def exchange(self, worker: Worker, state: State) -> None:
        """Average, and take an outer step from where all have started."""
        start, mean = state.own["anchor"], self.mean(worker, state)
        velocity, new = self.outer(start, start - mean, state.own["velocity"], state.learning_rate)
        # A momentum would carry running averages beyond what was averaged: variances below zero.
        new = state.with_averages(new, mean)
        state.own["velocity"], state.own["anchor"] = velocity, new
        state.vector = new

    def outer(self, start: Any, distance: Any, velocity: Any, learning_rate: float) -> tuple[Any, Any]:
        """Return the new velocity, and the new common point."""
        raise NotImplementedError

    def report(self, worker: Worker, state: State) -> Any:
        """Return the common point, as the last outer step has left it, or the mean where ranks have gone on from it."""
        return super().report(worker, state) if state.since else state.own["anchor"]


class SlowMo(_Outer):
    """Slow momentum: the averages of local SGD are followed with a momentum.

    After ``period`` steps from x_{t,0}, with their average x̄, and at the learning rate γ_t:
    u_{t+1} = β u_t + (x_{t,0} − x̄)/γ_t (eq. 2), x_{t+1,0} = x_{t,0} − α γ_t u_{t+1} (eq. 3): Wang et al., "SlowMo",
    arXiv:1910.00643, algorithm 1.  α = 1 and β = 0 is local SGD; with one rank it is Lookahead.

    Parameters
    ----------
    period : int or callable
        Steps between two averages.
    lr : float
        α, the slow learning rate.
    momentum : float
        β, from 0 up to 1.
    exclude, precision
        As for `Rule`.
    """

    def __init__(
        self,
        period: int | Callable[[int], int] = 12,
        lr: float = 1.0,
        momentum: float = 0.5,
        exclude: Callable[[Any], bool] | None = None,
        precision: str | None = None,
    ):
        super().__init__(period, exclude, precision)
        self.lr = positive(lr, "lr")
        self.momentum = check_momentum(momentum)

    def outer(self, start: Any, distance: Any, velocity: Any, learning_rate: float) -> tuple[Any, Any]:
        """Return the new velocity, and the new common point."""
        kept = self.momentum * velocity
        step = learning_rate * kept + distance
        return step / learning_rate if learning_rate else kept, start - self.lr * step


class DiLoCo(_Outer):
    """Distributed low-communication training: an outer optimizer follows the averages of many local steps.

    Δ_t = (1/p) Σ_i (θ_{t−1} − θ^i), θ_t = OuterOpt(θ_{t−1}, Δ_t): Douillard et al., "DiLoCo", arXiv:2311.08105,
    algorithm 1.  The outer optimizer is momentum, v ← µ v + Δ: θ ← θ − lr (Δ + µ v) with Nesterov's, else θ − lr v.
    Each rank keeps its own optimizer's variables.  The paper's inner optimizer is AdamW, and its period 500.

    Parameters
    ----------
    period : int or callable
        Steps between two averages.
    lr : float
        The outer learning rate.
    momentum : float
        The outer momentum, from 0 up to 1.
    nesterov : bool
    exclude, precision
        As for `Rule`.
    """

    def __init__(
        self,
        period: int | Callable[[int], int] = 500,
        lr: float = 0.7,
        momentum: float = 0.9,
        nesterov: bool = True,
        exclude: Callable[[Any], bool] | None = None,
        precision: str | None = None,
    ):
        super().__init__(period, exclude, precision)
        self.lr = positive(lr, "lr")
        self.momentum = check_momentum(momentum)
        self.nesterov = flag(nesterov, "nesterov")

    def outer(self, start: Any, distance: Any, velocity: Any, learning_rate: float) -> tuple[Any, Any]:
        """Return the new velocity, and the new common point."""
        velocity = self.momentum * velocity + distance
        return velocity, start - self.lr * (distance + self.momentum * velocity if self.nesterov else velocity)
