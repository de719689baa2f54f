"""Best value of a metric so far, for early stopping and for the best checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Factor that makes lower values of a metric better, by its mode.
_SIGNS = {"min": 1.0, "max": -1.0}


def as_metric(value: Any, name: str) -> tuple[str, str]:
    """Return a metric's name and whether its lowest ("min") or highest ("max") value is the best.

    Parameters
    ----------
    value : str or (str, {"min", "max"})
    name : str
        The argument's name, for the error.

    Raises
    ------
    TypeError
        If it is anything else.

    Examples
    --------
    >>> as_metric("mse", "keep_best"), as_metric(["accuracy", "max"], "keep_best")
    (('mse', 'min'), ('accuracy', 'max'))
    """
    pair = (value, "min") if isinstance(value, str) else value
    if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], str) or pair[1] not in _SIGNS:
        raise TypeError(f"{name}: expected a metric's name, or a pair such as ('accuracy', 'max'), got {value!r}")
    return pair[0], pair[1]


def to_cost(metrics: Mapping[str, float], metric: tuple[str, str]) -> float:
    """Return a metric's value as a cost: lower is better; infinity if the metric is missing or NaN."""
    value = _SIGNS[metric[1]] * float(metrics.get(metric[0], math.nan))
    return math.inf if math.isnan(value) else value


@dataclass
class EarlyStop:
    """The best value so far of a metric; lower is better.

    Attributes
    ----------
    measure : str
        Description of the metric; "" before the first value.
    best : float
    since : int
        Number of reports since the best value; 0 if the last one was the best.
    """

    measure: str = ""
    best: float = math.inf
    since: int = 0

    def begin(self, measure: str) -> bool:
        """Set the metric that `observe` compares; return True if this discards the best value of another metric."""
        is_other = self.measure not in ("", measure)
        if is_other:
            self.best, self.since = math.inf, 0
        self.measure = measure
        return is_other

    def observe(self, value: float) -> bool:
        """Count a report's value; return whether it is the best so far."""
        is_best = value < self.best
        self.since = 0 if is_best else self.since + 1
        self.best = min(self.best, value)
        return is_best

    def to_json(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {**vars(self), "best": None if math.isinf(self.best) else self.best}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> EarlyStop:
        """Restore the state from `to_json`."""
        return cls(state["measure"], math.inf if state["best"] is None else state["best"], state["since"])
