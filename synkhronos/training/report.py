"""What a trainer says from time to time.

`Report`
    The figures of the steps since the last one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from synkhronos.training.meter import Outcome
from synkhronos.training.plan import Plan


@dataclass
class Report:
    """A trainer's report; printed, it is one line.

    Attributes
    ----------
    epoch : float
        The epochs trained so far.
    seen : int
        The rows trained on so far.
    steps : int
        The steps of all ranks together since the last report.  Under BSP on gradients a step of all ranks together
        counts once.
    loss : float
        The mean loss of the rows since the last report, each before the step that used it; by the trainer's weight, if
        it has one.
    validation : dict of str to float
        The values over all rows of the validation data.
    learning_rate : float
        The last learning rate.
    rows_per_second : float
        Of all ranks together, since the last report, without the time in which functions were compiled.
    seconds : dict of str to float
        The time that a rank spent on average on each of: compute, exchange, wait, load.
    batch : str
        Rows in a step: ranks times the rows of each.
    """

    epoch: float
    seen: int
    steps: int
    loss: float
    validation: dict[str, float]
    learning_rate: float
    rows_per_second: float
    seconds: dict[str, float]
    batch: str

    @classmethod
    def _from_outcomes(cls, outcomes: Sequence[Outcome], plan: Plan, n_ranks: int) -> Report:
        """Return the report of an interval, from the outcomes of all ranks."""
        rows = sum(outcome.rows for outcome in outcomes)
        weight = sum(outcome.weight for outcome in outcomes)
        seconds = {
            name: float(np.mean([outcome.seconds[name] for outcome in outcomes])) for name in outcomes[0].seconds
        }
        compiled = sum(outcome.first[0] for outcome in outcomes)
        compiling = float(np.mean([outcome.first[1] for outcome in outcomes]))
        if compiled == rows:  # there were none but first steps
            compiled, compiling = 0, 0.0
        return cls(
            epoch=plan.epoch + plan.last / plan.count,
            seen=plan.epoch * plan.count + plan.last,
            steps=sum(outcome.steps for outcome in outcomes),
            loss=sum(outcome.loss for outcome in outcomes) / weight if weight else math.nan,
            validation={},
            learning_rate=next(outcome.learning_rate for outcome in outcomes if outcome.rows),
            rows_per_second=(rows - compiled) / (sum(seconds.values()) - compiling),
            seconds=seconds,
            batch=f"{n_ranks} x {plan.batch} = {n_ranks * plan.batch}",
        )

    def record(self) -> dict[str, Any]:
        """Return it as a dict."""
        return dict(vars(self))

    def __str__(self) -> str:
        valid = "".join(f", {name} {value:.4g}" for name, value in self.validation.items())
        whole = sum(self.seconds.values()) or 1.0
        shares = " ".join(f"{name} {value / whole:.0%}" for name, value in self.seconds.items() if value)
        return (
            f"epoch {self.epoch:g}: loss {self.loss:.4g}{valid}; batch {self.batch}, "
            f"learning rate {self.learning_rate:.3g}, {self.rows_per_second:,.0f} rows/s ({shares})"
        )
