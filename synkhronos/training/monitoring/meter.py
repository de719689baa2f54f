"""Measurement of a rank's training between two reports: time by activity, rows, steps and losses.

Reading a loss waits for the step that computes it.  So losses stay on the device until their values are needed, and on
GPUs Python launches the next steps in the meantime::

    add_loss(loss, weight) --> unread losses --> read_losses() --> sums since the report --> get_totals() --> Report
                                                             |
                                                             +---> sums since the line ----> write_lines()

Losses are added in the order of the steps, so the sums do not depend on when losses are read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from synkhronos.variable_types import Array

#: Takes losses and weights on the device; returns pairs of numbers, each a loss times its weight, and the weight.
LossReader = Callable[[Sequence[Any], Sequence[Any]], Iterable[tuple[float, float]]]


class RankRecorder(Protocol):
    """Recorder that takes a line of a rank every ``every`` steps."""

    every: int

    def write_rank_record(self, rank: int, record: dict[str, Any]) -> None:
        """Write a line of a rank."""


class FirstLaunches(NamedTuple):
    """Rows and seconds of the first launch of each shape, which may have compiled functions."""

    rows: int = 0
    seconds: float = 0.0


class RankTotals(NamedTuple):
    """Totals of one rank's training since the last report."""

    #: Sum of the steps' losses, each times its weight.
    weighted_loss_sum: float
    #: Sum of the steps' weights: the values of the model's weight, or numbers of rows.
    weight_sum: float
    rows: int
    steps: int
    #: Time by activity: compute, exchange, wait, load.
    seconds: dict[str, float]
    #: Learning rate of the last step; NaN if it is unknown.
    learning_rate: float
    first_launches: FirstLaunches


def resize_totals(totals: Sequence[RankTotals], n_ranks: int) -> list[RankTotals]:
    """Convert totals to another number of ranks: the first has the sums over ranks, and all have the mean seconds."""
    if not totals or len(totals) == n_ranks:
        return list(totals)
    seconds = {name: float(np.mean([total.seconds[name] for total in totals])) for name in totals[0].seconds}
    first = totals[0]._replace(
        weighted_loss_sum=sum(total.weighted_loss_sum for total in totals),
        weight_sum=sum(total.weight_sum for total in totals),
        rows=sum(total.rows for total in totals),
        steps=sum(total.steps for total in totals),
        seconds=seconds,
        first_launches=FirstLaunches(
            sum(total.first_launches.rows for total in totals),
            sum(total.first_launches.seconds for total in totals),
        ),
    )
    empty = first._replace(weighted_loss_sum=0.0, weight_sum=0.0, rows=0, steps=0, first_launches=FirstLaunches())
    return [first, *([empty] * (n_ranks - 1))]


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


class _LineTotals:
    """Counters at a recorder's last line, and sums of losses since then."""

    def __init__(self, recorder: RankRecorder):
        self.recorder = recorder

    def begin(self, meter: Meter) -> None:
        """Start a new line from the present counters."""
        self.steps, self.rows, self.first_launches = meter.interval_steps, meter.interval_rows, meter.first_launches
        self.seconds = dict(meter.seconds)
        self.weighted_loss_sum = self.weight_sum = 0.0
        self.began = time.perf_counter()


class Meter:
    """Counters of a rank's time, rows, steps and losses since the last report; also writes lines to recorders.

    ``launch_shapes`` are the numbers of steps, and of rows per step, of the launches so far, to which the meter adds
    new ones.  ``total_steps`` is the number of earlier steps.  ``get_wait_seconds`` returns the seconds for which this
    rank has waited for others so far; without it, waits are not separated from other activities.
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
        #: Number of steps since the beginning of the training.
        self.total_steps = total_steps
        self._launch_shapes = set() if launch_shapes is None else launch_shapes
        #: Time by activity since the last report.  Timers add to this dict, so it is never replaced.
        self.seconds: dict[str, float] = {}
        self._lines = [_LineTotals(recorder) for recorder in recorders]
        self.begin_interval()

    def begin_interval(self, earlier_totals: RankTotals | None = None) -> None:
        """Start an interval between two reports; ``earlier_totals`` has totals of its first part, from a checkpoint."""
        self.weighted_loss_sum = self.weight_sum = 0.0
        self.interval_rows = self.interval_steps = 0
        self.first_launches = FirstLaunches()
        self.seconds.clear()
        self.seconds.update(dict.fromkeys(("compute", "exchange", "wait", "load"), 0.0))
        if earlier_totals is not None:
            self.weighted_loss_sum, self.weight_sum = earlier_totals.weighted_loss_sum, earlier_totals.weight_sum
            self.interval_rows, self.interval_steps = earlier_totals.rows, earlier_totals.steps
            self.first_launches = earlier_totals.first_launches
            self.seconds.update(earlier_totals.seconds)
        self.discard_losses()
        for line in self._lines:
            line.begin(self)

    def time_activity(self, activity: str) -> ActivityTimer:
        """Return a context manager that adds a block's duration to an activity's time."""
        return ActivityTimer(self.seconds, activity, self._get_wait_seconds)

    def count_step(self, rows: int) -> None:
        """Count one step of ``rows`` rows."""
        self.interval_rows += rows
        self.interval_steps += 1
        self.total_steps += 1

    def record_first_launch(self, steps: int, rows: int, seconds: float) -> None:
        """Add a launch of ``steps`` steps of ``rows`` rows to ``first_launches`` if it is the first of its shape.

        ``seconds`` is its duration without waiting.
        """
        if (steps, rows) not in self._launch_shapes:
            self._launch_shapes.add((steps, rows))
            first_rows, first_seconds = self.first_launches
            self.first_launches = FirstLaunches(first_rows + steps * rows, first_seconds + seconds)

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
                self.weighted_loss_sum += weighted_loss
                self.weight_sum += weight
                for line in self._lines:
                    line.weighted_loss_sum += weighted_loss
                    line.weight_sum += weight
            del self._losses[:n_ready], self._weights[:n_ready]

    def get_totals(self, learning_rate: float) -> RankTotals:
        """Return the totals, without unread losses; ``learning_rate`` is the rate of the last step."""
        return RankTotals(
            self.weighted_loss_sum,
            self.weight_sum,
            self.interval_rows,
            self.interval_steps,
            dict(self.seconds),
            learning_rate,
            self.first_launches,
        )

    def write_lines(self, epoch: int, n_rows_seen: int, learning_rate: float, flush: bool = False) -> None:
        """Write a line to each recorder whose last line is ``every`` steps ago; with ``flush``, also after fewer steps.

        ``epoch`` is the number of complete epochs, ``n_rows_seen`` the number of rows trained on so far.
        """
        for line in self._lines:
            if self.interval_steps - line.steps < (1 if flush else line.recorder.every):
                continue
            self.read_losses()
            rows = self.interval_rows - line.rows
            first_launches = FirstLaunches(
                self.first_launches.rows - line.first_launches.rows,
                self.first_launches.seconds - line.first_launches.seconds,
            )
            record = {
                "epoch": epoch,
                "step": self.total_steps,
                "seen": n_rows_seen,
                "rows": rows,
                "loss": line.weighted_loss_sum / line.weight_sum if line.weight_sum else None,
                "learning_rate": learning_rate,
                "rows_per_second": compute_rows_per_second(rows, time.perf_counter() - line.began, first_launches),
                **{name: value - line.seconds.get(name, 0.0) for name, value in self.seconds.items()},
            }
            line.begin(self)
            line.recorder.write_rank_record(self.rank, record)


def compute_rows_per_second(rows: int, seconds: float, first_launches: FirstLaunches) -> float:
    """Compute the rows per second, without first launches, which may have compiled functions, if there were others."""
    first_rows, first_seconds = first_launches
    if first_rows == rows and first_seconds:
        first_rows, first_seconds = 0, 0.0
    return (rows - first_rows) / (seconds - first_seconds)
