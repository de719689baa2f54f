"""Synchronous rules with an outer optimizer, whose gradient is the change of the ranks' mean parameters."""

from __future__ import annotations

from synkhronos.checks import check_flag, check_positive, suggest_keywords
from synkhronos.exchange_rules.rule import ExchangeRule, Exclude, Period, check_momentum
from synkhronos.exchange_rules.state import ExchangeState
from synkhronos.programs import RankContext
from synkhronos.variable_types import Array


class _OuterOptimizerRule(ExchangeRule):
    """Base class: all ranks start from an anchor.  The anchor minus the mean over ranks is the outer gradient."""

    changeable_options = frozenset({"period", "lr"})

    def setup(self, context: RankContext, state: ExchangeState) -> None:
        """Set the anchor to the parameters, and the outer velocity to zero."""
        state.own["anchor"] = state.vector
        state.own["velocity"] = 0 * state.vector

    def exchange(self, context: RankContext, state: ExchangeState) -> None:
        """Compute the mean of the parameters over ranks, and take an outer step from the anchor."""
        anchor, mean = state.own["anchor"], self.compute_mean(context, state)
        velocity, new_anchor = self._take_outer_step(anchor, anchor - mean, state.own["velocity"], state.learning_rate)
        # Running averages are not extrapolated, since momentum could make running variances negative.
        new_anchor = state.replace_averages(new_anchor, mean)
        state.own["velocity"], state.own["anchor"] = velocity, new_anchor
        state.vector = new_anchor

    def _take_outer_step(
        self, anchor: Array, gradient: Array, velocity: Array, learning_rate: float
    ) -> tuple[Array, Array]:
        """Take a step along the outer gradient.  Return the new velocity and the new anchor."""
        raise NotImplementedError

    def compute_consensus(self, context: RankContext, state: ExchangeState) -> Array:
        """Return the anchor right after an exchange, else the mean of the parameters."""
        return super().compute_consensus(context, state) if state.steps_since_exchange else state.own["anchor"]


class SlowMo(_OuterOptimizerRule):
    """Slow momentum: local SGD with an outer momentum, whose gradient is the change of the mean over ranks.

    After ``period`` steps from x_{t,0}, with their mean x̄, and at the learning rate γ_t:
    u_{t+1} = β u_t + (x_{t,0} − x̄)/γ_t (eq. 2), x_{t+1,0} = x_{t,0} − α γ_t u_{t+1} (eq. 3): Wang et al., "SlowMo",
    arXiv:1910.00643, algorithm 1.  α = 1 and β = 0 is local SGD; with one rank it is Lookahead.

    Parameters
    ----------
    lr, momentum : float
        α, the slow learning rate, above 0; β, in [0, 1).
    period, exclude, precision
        See `ExchangeRule`.

    Examples
    --------
    >>> SlowMo(period=12, momentum=0.7)
    SlowMo(period=12, lr=1.0, momentum=0.7)
    """

    @suggest_keywords
    def __init__(
        self,
        period: Period = 12,
        lr: float = 1.0,
        momentum: float = 0.5,
        exclude: Exclude = None,
        precision: str | None = None,
    ):
        super().__init__(period, exclude, precision)
        self.lr = check_positive(lr, "lr")
        self.momentum = check_momentum(momentum)

    def _take_outer_step(
        self, anchor: Array, gradient: Array, velocity: Array, learning_rate: float
    ) -> tuple[Array, Array]:
        """Compute eqs. 2 and 3."""
        decayed = self.momentum * velocity
        step = learning_rate * decayed + gradient
        return step / learning_rate if learning_rate else decayed, anchor - self.lr * step


class DiLoCo(_OuterOptimizerRule):
    """Distributed low-communication training: an outer optimizer with momentum over means of many local steps.

    Δ_t = (1/p) Σ_i (θ_{t−1} − θ^i), θ_t = OuterOpt(θ_{t−1}, Δ_t): Douillard et al., "DiLoCo", arXiv:2311.08105,
    algorithm 1.  The outer optimizer is momentum, v ← µ v + Δ: θ ← θ − lr (Δ + µ v) with Nesterov's, else θ − lr v.
    The variables of the inner optimizer are not exchanged.  In the paper the inner optimizer is AdamW, and
    the period is 500.

    Parameters
    ----------
    lr, momentum : float
        Outer learning rate, above 0; outer momentum µ, in [0, 1).
    nesterov : bool
        Whether to use Nesterov momentum.
    period, exclude, precision
        See `ExchangeRule`.

    Examples
    --------
    >>> DiLoCo(period=100)
    DiLoCo(period=100, lr=0.7, momentum=0.9, nesterov=True)
    """

    @suggest_keywords
    def __init__(
        self,
        period: Period = 500,
        lr: float = 0.7,
        momentum: float = 0.9,
        nesterov: bool = True,
        exclude: Exclude = None,
        precision: str | None = None,
    ):
        super().__init__(period, exclude, precision)
        self.lr = check_positive(lr, "lr")
        self.momentum = check_momentum(momentum)
        self.nesterov = check_flag(nesterov, "nesterov")

    def _take_outer_step(
        self, anchor: Array, gradient: Array, velocity: Array, learning_rate: float
    ) -> tuple[Array, Array]:
        """Take a step of plain momentum or of Nesterov momentum."""
        velocity = self.momentum * velocity + gradient
        return velocity, anchor - self.lr * (gradient + self.momentum * velocity if self.nesterov else velocity)
