"""Report of a trainer: statistics of the steps since the last report, over all ranks.

A report is made from the `RankTotals` of the ranks.  Losses and rows are summed over ranks, times are averaged.  The
speed excludes launches that may have compiled functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from synkhronos.ranks.errors import describe_rank
from synkhronos.training.monitoring.meter import RankTotals, sum_totals


@dataclass
class Report:
    """Report of a trainer; ``str()`` gives one line.

    Attributes
    ----------
    epoch : float
        Number of epochs trained so far.
    rows_seen : int
        Number of rows trained on so far.
    steps : int
        Number of steps since the last report, summed over ranks.  Under BSP on gradients all ranks take a step
        together, which counts once.
    loss : float
        Mean loss of the rows since the last report, weighted by the trainer's weight, if it has one.  The loss of a row
        is that before the step that used it.  NaN if the weights are all 0.
    validation : dict of str to float
        Metrics over all rows of the validation data.
    metrics : dict of str to float
        Loss and validation by name; without the loss if it is NaN.
    learning_rate : float
        Last learning rate; NaN if it is unknown.
    rows_per_second : float
        Rows of all ranks per second since the last report, without launches that may have compiled functions.
    seconds : dict of str to float
        Mean time of a rank by activity: compute, exchange, wait, load.
    batch_description : str
        Description of a step's rows: ranks times rows per rank, such as ``"4 x 100 = 400"``.
    deaths : list of dict
        Deaths of workers since the last report after which the training continued: ``rank``, ``host``, ``cause``,
        ``step`` from which it continued, and ``seconds`` lost.
    """

    epoch: float
    rows_seen: int
    steps: int
    loss: float
    validation: dict[str, float]
    learning_rate: float
    rows_per_second: float
    seconds: dict[str, float]
    batch_description: str
    deaths: list[dict[str, Any]] = field(default_factory=list)

    @property
    def metrics(self) -> dict[str, float]:
        """Loss and validation by name."""
        return self.validation if math.isnan(self.loss) else {"loss": self.loss, **self.validation}

    def to_record(self) -> dict[str, Any]:
        """Return the attributes under the names that record files use, without ``deaths`` if there were none."""
        # Records keep the names of earlier versions, so that `show` can read and compare all files.
        names = {"rows_seen": "seen", "batch_description": "batch"}
        return {names.get(name, name): value for name, value in vars(self).items() if value or name != "deaths"}

    def __str__(self) -> str:
        valid = "".join(f", {name} {value:.4g}" for name, value in self.validation.items())
        total = sum(self.seconds.values()) or 1.0
        shares = " ".join(f"{name} {value / total:.0%}" for name, value in self.seconds.items() if value)
        return (
            f"epoch {self.epoch:g}: loss {self.loss:.4g}{valid}; batch {self.batch_description}, "
            f"learning rate {self.learning_rate:.3g}, {self.rows_per_second:,.0f} rows/s ({shares})"
            + "".join(f"; {describe_rank(death['rank'], death['host'])} {death['cause']}" for death in self.deaths)
        )


def make_report(
    totals: Sequence[RankTotals],
    epoch: float,
    n_rows_seen: int,
    batch_description: str,
    elapsed_seconds: float | None = None,
) -> Report:
    """Make the report of an interval from the ranks' totals.  For joint steps ``totals`` has the master's totals only.

    ``elapsed_seconds`` is the duration of the interval in seconds, by default the sum of the ranks' mean time by
    activity.
    """
    total = sum_totals(totals)
    mean_total = replace(total, first_launch_seconds=total.first_launch_seconds / len(totals))
    return Report(
        epoch=epoch,
        rows_seen=n_rows_seen,
        steps=total.steps,
        loss=total.compute_loss(),
        validation={},
        learning_rate=total.learning_rate,
        rows_per_second=mean_total.compute_rows_per_second(
            sum(total.seconds.values()) if elapsed_seconds is None else elapsed_seconds
        ),
        seconds=total.seconds,
        batch_description=batch_description,
    )
