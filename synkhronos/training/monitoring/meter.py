"""Measurement of a rank's training between two reports: time by activity, rows, steps and losses.

Reading a loss waits for the step that computes it.  Losses therefore stay on the device until their values are needed,
and on GPUs Python launches the next steps in the meantime::

    add_loss(loss, weight) --> unread losses --> read_losses() --> sums since the report --> get_totals() --> Report
                                                             |
                                                             +---> sums since the line ----> write_lines()

Losses are added in the order of the steps, so the sums do not depend on when losses are read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from synkhronos.variable_types import Array

#: Function of losses and weights on the device.  It returns pairs of numbers: a loss times its weight, and the weight.
LossReader = Callable[[Sequence[Any], Sequence[Any]], Iterable[tuple[float, float]]]


class RankRecorder(Protocol):
    """Recorder that takes a line of a rank every ``every`` steps."""

    every: int

    def write_rank_record(self, rank: int, record: dict[str, Any]) -> None:
        """Write a line of a rank."""


@dataclass
class RankTotals:
    """Totals of one rank's training since the last report, or since the last line of a recorder."""

    #: Sum of the steps' losses, each times its weight.
    weighted_loss_sum: float = 0.0
    #: Sum of the steps' weights: the values of the model's weight, or numbers of rows.
    weight_sum: float = 0.0
    rows: int = 0
    steps: int = 0
    #: Time by activity: compute, exchange, wait, load.
    seconds: dict[str, float] = field(default_factory=dict)
    #: Learning rate of the last step; NaN if it is unknown.
    learning_rate: float = math.nan
    #: Rows and seconds of the first launch of each shape, which may have compiled functions.
    first_launch_rows: int = 0
    first_launch_seconds: float = 0.0

    def compute_loss(self) -> float:
        """Return the mean loss, or NaN if the weights are all 0."""
        return self.weighted_loss_sum / self.weight_sum if self.weight_sum else math.nan

    def compute_rows_per_second(self, seconds: float) -> float:
        """Return the rows per second without first launches, or with them if there were no others."""
        rows, first_seconds = self.rows - self.first_launch_rows, self.first_launch_seconds
        if not rows and first_seconds:
            rows, first_seconds = self.rows, 0.0
        return rows / (seconds - first_seconds)

    def to_json(self) -> list[Any]:
        """Return the totals for a checkpoint."""
        *values, first_rows, first_seconds = astuple(self)
        return [*values, [first_rows, first_seconds]]

    @classmethod
    def from_json(cls, entry: Sequence[Any]) -> RankTotals:
        """Restore totals from `to_json`."""
        return cls(*entry[:-1], *entry[-1])


def sum_totals(totals: Sequence[RankTotals]) -> RankTotals:
    """Return the sums over ranks, with the mean seconds by activity, and the learning rate of a rank with rows."""
    return RankTotals(
        weighted_loss_sum=sum(total.weighted_loss_sum for total in totals),
        weight_sum=sum(total.weight_sum for total in totals),
        rows=sum(total.rows for total in totals),
        steps=sum(total.steps for total in totals),
        seconds={name: float(np.mean([t.seconds.get(name, 0.0) for t in totals])) for name in totals[0].seconds},
        learning_rate=next((total.learning_rate for total in totals if total.rows), math.nan),
        first_launch_rows=sum(total.first_launch_rows for total in totals),
        first_launch_seconds=sum(total.first_launch_seconds for total in totals),
    )


def resize_totals(totals: Sequence[RankTotals], n_ranks: int) -> list[RankTotals]:
    """Convert totals to another number of ranks: the first rank gets the sums, and all ranks get the mean seconds."""
    if not totals or len(totals) == n_ranks:
        return list(totals)
    first = sum_totals(totals)
    return [first, *[RankTotals(seconds=first.seconds, learning_rate=first.learning_rate)] * (n_ranks - 1)]


class ActivityTimer:
    """Context manager that adds the duration of a block to the time of an activity.

    The time for which the block waits for other ranks is added to ``wait`` instead.  A block that raises an exception
    adds nothing.  After the block, ``seconds_without_wait`` is its duration without waiting.
    """

    def __init__(self, seconds: dict[str, float], activity: str, get_wait_seconds: Callable[[], float] | None):
        self._seconds, self._activity, self._get_wait_seconds = seconds, activity, get_wait_seconds
        self.seconds_without_wait = 0.0

    def __enter__(self) -> ActivityTimer:
        self._began, self._waited_before = time.perf_counter(), self._read_wait_seconds()
        return self

    def _read_wait_seconds(self) -> float:
        return 0.0 if self._get_wait_seconds is None else self._get_wait_seconds()

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:
            wait = self._read_wait_seconds() - self._waited_before
            self.seconds_without_wait = time.perf_counter() - self._began - wait
            self._seconds["wait"] += wait
            self._seconds[self._activity] += self.seconds_without_wait


class _NextLine:
    """Next line of a recorder: ``totals`` since the last line, except that ``seconds`` are those at the last line."""

    def __init__(self, recorder: RankRecorder):
        self.recorder = recorder

    def begin(self, seconds: dict[str, float]) -> None:
        """Start a new line.  ``seconds`` is the present time by activity."""
        self.totals = RankTotals(seconds=dict(seconds))
        self.began = time.perf_counter()


class Meter:
    """Counters of a rank's time, rows, steps and losses since the last report.  They are also written to recorders.

    ``launch_shapes`` are the numbers of steps, and of rows per step, of the launches so far.  The meter adds new ones
    to them.  ``total_steps`` is the number of earlier steps.  ``get_wait_seconds`` returns the seconds for which this
    rank has waited for others so far.  Without it, waits are not separated from other activities.
    """

    def __init__(
        self,
        rank: int,
        recorders: Sequence[RankRecorder],
        loss_reader: LossReader,
        launch_shapes: set[Any] | None = None,
        total_steps: int = 0,
        get_wait_seconds: Callable[[], float] | None = None,
    ):
        self.rank, self._loss_reader, self._get_wait_seconds = rank, loss_reader, get_wait_seconds
        #: Number of steps since the beginning of the run.
        self.total_steps = total_steps
        self._launch_shapes = set() if launch_shapes is None else launch_shapes
        #: Time by activity since the last report.  Timers add to this dict, so it is never replaced.
        self.seconds: dict[str, float] = {}
        self._lines = [_NextLine(recorder) for recorder in recorders]
        self.begin_interval()

    def begin_interval(self, earlier_totals: RankTotals | None = None) -> None:
        """Start an interval between two reports; ``earlier_totals`` has totals of its first part, from a checkpoint."""
        #: Totals since the last report; their seconds are in `seconds`.
        self.totals = RankTotals() if earlier_totals is None else replace(earlier_totals)
        self.seconds.clear()
        self.seconds.update({**dict.fromkeys(("compute", "exchange", "wait", "load"), 0.0), **self.totals.seconds})
        self.discard_losses()
        for line in self._lines:
            line.begin(self.seconds)

    def time_activity(self, activity: str) -> ActivityTimer:
        """Return a context manager that adds a block's duration to an activity's time."""
        return ActivityTimer(self.seconds, activity, self._get_wait_seconds)

    def count_step(self, rows: int) -> None:
        """Count one step of ``rows`` rows."""
        self.total_steps += 1
        for totals in self._list_totals():
            totals.rows += rows
            totals.steps += 1

    def _list_totals(self) -> list[RankTotals]:
        """Return the totals to which steps, rows and losses are added: of the interval, and of each recorder's line."""
        return [self.totals, *(line.totals for line in self._lines)]

    def record_first_launch(self, steps: int, rows: int, seconds: float) -> None:
        """Count a launch of ``steps`` steps of ``rows`` rows, in ``seconds`` without waiting, if its shape is new."""
        if (steps, rows) not in self._launch_shapes:
            self._launch_shapes.add((steps, rows))
            for totals in self._list_totals():
                totals.first_launch_rows += steps * rows
                totals.first_launch_seconds += seconds

    def add_loss(self, loss: Array, weight: Array | None) -> None:
        """Append a loss and its weight, which may be on the device, to the unread losses."""
        self._losses.append(loss)
        self._weights.append(weight)

    def discard_losses(self) -> None:
        """Discard the unread losses."""
        self._losses: list[Any] = []
        self._weights: list[Any] = []

    def read_losses(self, n_pending: int = 0) -> None:
        """Wait for the unread losses, except for the last ``n_pending``, and add them to the sums."""
        n_ready = len(self._losses) - n_pending
        if n_ready > 0:
            for weighted_loss, weight in self._loss_reader(self._losses[:n_ready], self._weights[:n_ready]):
                for totals in self._list_totals():
                    totals.weighted_loss_sum += weighted_loss
                    totals.weight_sum += weight
            del self._losses[:n_ready], self._weights[:n_ready]

    def get_totals(self, learning_rate: float) -> RankTotals:
        """Return the totals, without unread losses.  ``learning_rate`` is the rate of the last step."""
        return replace(self.totals, seconds=dict(self.seconds), learning_rate=learning_rate)

    def write_lines(self, epoch: int, n_rows_seen: int, learning_rate: float, flush: bool = False) -> None:
        """Write a line to each recorder without one for ``every`` steps, or with ``flush`` for at least one step."""
        for line in self._lines:
            if line.totals.steps < (1 if flush else line.recorder.every):
                continue
            self.read_losses()
            totals = line.totals
            record = {
                "epoch": epoch,
                "step": self.total_steps,
                "seen": n_rows_seen,
                "rows": totals.rows,
                "loss": totals.compute_loss() if totals.weight_sum else None,
                "learning_rate": learning_rate,
                "rows_per_second": totals.compute_rows_per_second(time.perf_counter() - line.began),
                **{name: value - totals.seconds.get(name, 0.0) for name, value in self.seconds.items()},
            }
            line.begin(self.seconds)
            line.recorder.write_rank_record(self.rank, record)
