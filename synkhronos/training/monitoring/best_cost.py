"""Best value of a metric so far, for early stopping and for the best checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Sign that turns a metric into a cost, by its mode.
_SIGNS = {"min": 1.0, "max": -1.0}


def parse_monitored_metric(value: object, argument: str) -> tuple[str, str]:
    """Check the value of an argument that names a metric.  Return the metric: its name, and "min" or "max".

    Examples
    --------
    >>> parse_monitored_metric("mse", "keep_best"), parse_monitored_metric(["accuracy", "max"], "keep_best")
    (('mse', 'min'), ('accuracy', 'max'))
    """
    pair = (value, "min") if isinstance(value, str) else value
    if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], str) or pair[1] not in _SIGNS:
        raise TypeError(f"{argument}: expected a metric's name, or a pair such as ('accuracy', 'max'), got {value!r}")
    return pair[0], pair[1]


def to_cost(metrics: Mapping[str, float], metric: tuple[str, str]) -> float:
    """Return a metric as a cost: lower is better, and infinity stands for a missing value or NaN."""
    name, mode = metric
    cost = _SIGNS[mode] * float(metrics.get(name, math.nan))
    return math.inf if math.isnan(cost) else cost


@dataclass
class BestCost:
    """Best value of a metric so far, as a cost: lower is better.

    ``label`` describes the metric, such as "validation loss", and is compared only for equality.  It is empty before
    the first cost.
    """

    label: str = ""
    cost: float = math.inf
    n_reports_since_best: int = 0

    def set_label(self, label: str) -> bool:
        """Set the label of the metric.  Return True if this discards the best cost of another metric."""
        is_other = self.label not in ("", label)
        if is_other:
            self.cost, self.n_reports_since_best = math.inf, 0
        self.label = label
        return is_other

    def observe(self, cost: float) -> bool:
        """Compare the cost of a report with the best one.  Return True if it is lower."""
        is_best = cost < self.cost
        self.n_reports_since_best = 0 if is_best else self.n_reports_since_best + 1
        self.cost = min(self.cost, cost)
        return is_best

    def to_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, which JSON can represent."""
        cost = None if math.isinf(self.cost) else self.cost
        return {"label": self.label, "cost": cost, "n_reports_since_best": self.n_reports_since_best}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> BestCost:
        """Restore the state from `to_dict`."""
        cost = math.inf if state["cost"] is None else state["cost"]
        return cls(state["label"], cost, state["n_reports_since_best"])
