"""Rules of elastic averaging: each rank and a common centre move towards each other."""

from __future__ import annotations

from typing import Any

import numpy as np

from synkhronos.checks import check_flag, suggest_keywords
from synkhronos.devices import NUMPY, get_array_device
from synkhronos.exchange_rules.rule import ArraySpecs, ExchangeRule, Exclude, Period, check_fraction, check_momentum
from synkhronos.exchange_rules.state import ExchangeState
from synkhronos.programs import RankContext
from synkhronos.variable_types import Array

#: Number of the lock of the centre.
CENTRE_LOCK = 0


class CentreRule(ExchangeRule):
    """Base class of rules with a centre: in shared memory, with a counter of exchanges, if they are asynchronous."""

    def get_shared_array_specs(self, n_ranks: int, size: int, dtype: np.dtype) -> ArraySpecs:
        """Return the shape and dtype of the centre, and of "sequence", the number of exchanges so far."""
        return {"centre": ((size,), dtype), "sequence": ((1,), np.int64)} if self.asynchronous else {}

    def setup(self, context: RankContext, state: ExchangeState) -> None:
        """Set the centre in shared memory to the parameters."""
        if self.asynchronous:
            if context.number == 0:
                state.shared_rows["centre"].write(state.vector)
            context.barrier("the centre is set")


class EASGD(CentreRule):
    """Elastic averaging SGD: each rank moves towards a centre, and the centre towards the rank.

    Every ``period`` steps a rank computes d = α (x^i − x̃), x^i ← x^i − d, x̃ ← x̃ + d: Zhang, Choromanska and LeCun,
    "Deep learning with elastic averaging SGD", arXiv:1412.6651, algorithm 1.  With ``asynchronous=False`` all ranks use
    the same x̃: eqs. 5 and 6, x̃ ← (1 − β) x̃ + β (1/p) Σ_i x^i with β = pα.

    A rank exchanges after its steps.  In the paper's listing the gradient is computed before the exchange and applied
    after it, which differs by half a step.

    Parameters
    ----------
    beta : float
        Fraction, in (0, 1], by which the centre moves towards the mean of the ranks when each has exchanged once.  α is
        ``beta`` divided by the number of ranks, which keeps it stable for any number.
    period : int or callable
        τ, the number of a rank's steps between two exchanges.
    alpha : float, optional
        α itself, in (0, 1]; ``beta`` is then ignored.
    asynchronous : bool
        Whether each rank exchanges at its own pace, under a lock.
    exclude
        See `ExchangeRule`.

    Examples
    --------
    >>> EASGD(alpha=0.5, period=4)
    EASGD(beta=0.9, period=4, alpha=0.5, asynchronous=True)
    """

    @suggest_keywords
    def __init__(
        self,
        beta: float = 0.9,
        period: Period = 10,
        alpha: float | None = None,
        asynchronous: bool = True,
        exclude: Exclude = None,
    ):
        super().__init__(period, exclude)
        self.beta = check_fraction(beta, "beta")
        self.alpha = None if alpha is None else check_fraction(alpha, "alpha")
        self.asynchronous = check_flag(asynchronous, "asynchronous")

    def setup(self, context: RankContext, state: ExchangeState) -> None:
        """Set the centre to the parameters."""
        if not self.asynchronous:
            state.own["centre"] = state.vector
        super().setup(context, state)

    def exchange(self, context: RankContext, state: ExchangeState) -> int | None:
        """Exchange with the centre.  Return the number of earlier exchanges, or None if synchronous."""
        alpha = self.beta / context.size if self.alpha is None else self.alpha
        if not self.asynchronous:
            distance = alpha * (self._get_exchanged_vector(state) - state.own["centre"])
            state.vector = state.vector - distance
            state.own["centre"] = state.own["centre"] + context.all_reduce(distance, "sum")
            return None
        rows = state.shared_rows
        with context.lock(CENTRE_LOCK) as lock:
            lock.pull(rows["sequence"], rows["centre"])
            sequence = int(state.shared["sequence"][0])
            self._exchange_with_centre(state, alpha)
            state.shared["sequence"][0] = sequence + 1
            lock.push(rows["sequence"], rows["centre"])
        return sequence

    def _exchange_with_centre(self, state: ExchangeState, alpha: float) -> None:
        """Move the rank and the centre towards each other.  The caller has acquired the lock."""
        state.update_with_shared("centre", lambda x, get_block: move_together(x, get_block(), alpha))

    def _get_exchanged_vector(self, state: ExchangeState) -> Array:
        """Return x^i, the vector that is exchanged."""
        return state.vector

    def compute_consensus(self, context: RankContext, state: ExchangeState) -> Array:
        """Return the centre."""
        if not self.asynchronous:
            return state.own["centre"]
        context.barrier("all have exchanged")
        return read_centre(context, state)

    def resize_states(self, states: list[dict[str, Any]], n_ranks: int) -> list[dict[str, Any]]:
        """Keep the centre and the first ranks.  Additional ranks start at the centre, with zero optimizer variables."""
        first = states[0]
        centre = first["own"]["centre"] if "centre" in first["own"] else first["shared"]["centre"]
        optimizer = np.zeros_like(first["optimizer"])
        fresh = {**first, "params": centre.copy(), "optimizer": optimizer}
        if self.asynchronous:
            fresh["steps_since_exchange"] = 0  # synchronous ranks exchange after the same step
        return [states[r] if r < len(states) else fresh for r in range(n_ranks)]


class EAMSGD(EASGD):
    """Elastic averaging with Nesterov momentum.

    Each rank takes steps v ← δ v − η g(x + δv), x ← x + v, and exchanges x with the centre as in `EASGD`:
    arXiv:1412.6651, algorithm 2 and eq. 7.  The update rule has to be ``nesterov_momentum``, whose parameters are
    x + δv.

    Parameters
    ----------
    beta, period, alpha, asynchronous, exclude
        See `EASGD`.
    momentum : float
        δ, the momentum of ``nesterov_momentum``, in [0, 1).
    """

    @suggest_keywords
    def __init__(
        self,
        beta: float = 0.9,
        period: Period = 10,
        momentum: float = 0.99,
        alpha: float | None = None,
        asynchronous: bool = True,
        exclude: Exclude = None,
    ):
        super().__init__(beta, period, alpha, asynchronous, exclude)
        self.momentum = check_momentum(momentum)

    def _exchange_with_centre(self, state: ExchangeState, alpha: float) -> None:
        """Exchange x, while the parameters are x + δv."""
        if not self.momentum:
            super()._exchange_with_centre(state, alpha)
            return
        rows, position = state.shared_rows["centre"], self._get_exchanged_vector(state)
        device = get_array_device(position)
        centre = rows.array if device is NUMPY else rows.to_device(device)
        distance = alpha * (position - centre)
        rows.write(centre + distance)
        state.vector = state.vector - distance

    def _get_exchanged_vector(self, state: ExchangeState) -> Array:
        """Return x, from parameters x + δv and the velocity v."""
        return state.vector - self.momentum * state.velocity


def read_centre(context: RankContext, state: ExchangeState) -> Array:
    """Return a copy of the centre, on the device of the parameters."""
    with context.lock(CENTRE_LOCK) as lock:
        lock.pull(state.shared_rows["centre"])
        return state.shared_rows["centre"].to_device(state.params.device)


def move_together(x: Array, centre: Array, alpha: float) -> tuple[Array, Array]:
    """Move a vector and the centre towards each other, in place if possible.  Return both."""
    distance = x - centre
    distance *= alpha
    x -= distance
    centre += distance
    return x, centre
