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
from typing import Any, NamedTuple

import numpy as np

#: Takes losses and weights on the device; returns pairs of numbers, each a loss times its weight, and the weight.
LossReader = Callable[[Sequence[Any], Sequence[Any]], Iterable[tuple[float, float]]]


class RankTotals(NamedTuple):
    """Totals of one rank's training since the last report."""

    #: Sum of the steps' losses, each times its weight, and sum of the weights: of the model, or numbers of rows.
    loss: float
    weight: float
    rows: int
    steps: int
    #: Time by activity: compute, exchange, wait, load.
    seconds: dict[str, float]
    #: Learning rate of the last step; NaN if it is unknown.
    learning_rate: float
    #: Rows and seconds of the first launch of each shape, which may have compiled functions.
    first_launches: tuple[int, float]


def resize_totals(totals: Sequence[RankTotals], n_ranks: int) -> list[RankTotals]:
    """Convert totals to another number of ranks: the first has the sums over ranks, and all have the mean seconds."""
    if not totals or len(totals) == n_ranks:
        return list(totals)
    seconds = {name: float(np.mean([total.seconds[name] for total in totals])) for name in totals[0].seconds}
    first = totals[0]._replace(
        loss=sum(total.loss for total in totals),
        weight=sum(total.weight for total in totals),
        rows=sum(total.rows for total in totals),
        steps=sum(total.steps for total in totals),
        seconds=seconds,
        first_launches=(
            sum(total.first_launches[0] for total in totals),
            sum(total.first_launches[1] for total in totals),
        ),
    )
    others = first._replace(loss=0.0, weight=0.0, rows=0, steps=0, first_launches=(0, 0.0))
    return [first, *([others] * (n_ranks - 1))]


class ActivityTimer:
    """Context manager that adds the duration of a block to the time of an activity.

    The time for which the block waits for other ranks is added to ``wait`` instead.  A block that raises an exception
    adds nothing.  After the block, ``seconds_without_wait`` is its duration without waiting.
    """

    def __init__(self, seconds: dict[str, float], activity: str, get_wait_seconds: Callable[[], float]):
        self._seconds, self._activity, self._get_wait_seconds = seconds, activity, get_wait_seconds
        self.seconds_without_wait = 0.0

    def __enter__(self) -> ActivityTimer:
        self._began, self._waited_before = time.perf_counter(), self._get_wait_seconds()
        return self

    def __exit__(self, error: Any, *_: object) -> None:
        if error is None:
            wait = self._get_wait_seconds() - self._waited_before
            self.seconds_without_wait = time.perf_counter() - self._began - wait
            self._seconds["wait"] += wait
            self._seconds[self._activity] += self.seconds_without_wait


class _LineTotals:
    """Counters at a recorder's last line, and sums of losses since then."""

    def __init__(self, recorder: Any):
        self.recorder = recorder

    def begin(self, meter: Meter) -> None:
        """Start a new line from the present counters."""
        self.steps, self.rows, self.first_launches = meter.steps, meter.rows, meter.first_launches
        self.seconds = dict(meter.seconds)
        self.loss = self.weight = 0.0
        self.began = time.perf_counter()


class Meter:
    """Counters of a rank's time, rows, steps and losses since the last report; also writes lines to recorders.

    Attributes are those of `RankTotals`, without unread losses; ``seconds`` and ``step`` count from the beginning.
    ``recorders`` have a number of steps ``every`` and a method ``write_rank_record(rank, record)``.  ``launch_shapes``
    are the numbers of steps, and of rows per step, of the launches so far, to which the meter adds new ones.
    ``get_wait_seconds`` returns the seconds for which this rank has waited for others so far.
    """

    def __init__(
        self,
        rank: int,
        recorders: Sequence[Any],
        loss_reader: LossReader,
        launch_shapes: set[Any] | None = None,
        step: int = 0,
        get_wait_seconds: Callable[[], float] = float,
    ):
        self.rank, self._loss_reader, self._get_wait_seconds, self.step = rank, loss_reader, get_wait_seconds, step
        self._launch_shapes = set() if launch_shapes is None else launch_shapes
        self.seconds = dict.fromkeys(("compute", "exchange", "wait", "load"), 0.0)
        self._lines = [_LineTotals(recorder) for recorder in recorders]
        self.begin_interval()

    def begin_interval(self, earlier_totals: RankTotals | None = None) -> None:
        """Start an interval between two reports; ``earlier_totals`` has totals of its first part, from a checkpoint."""
        self.loss = self.weight = 0.0
        self.rows = self.steps = 0
        self.first_launches = 0, 0.0
        if earlier_totals is not None:
            self.loss, self.weight, self.rows, self.steps, seconds, _, self.first_launches = earlier_totals
            self.seconds.update(seconds)
        self.discard_losses()
        for line in self._lines:
            line.begin(self)

    def time_activity(self, activity: str) -> ActivityTimer:
        """Return a context manager that adds a block's duration to an activity's time."""
        return ActivityTimer(self.seconds, activity, self._get_wait_seconds)

    def count_step(self, rows: int) -> None:
        """Count one step of ``rows`` rows."""
        self.rows += rows
        self.steps += 1
        self.step += 1

    def record_launch(self, steps: int, rows: int, seconds: float) -> None:
        """Add a launch of ``steps`` steps of ``rows`` rows to ``first_launches`` if it is the first of its shape.

        ``seconds`` is its duration without waiting.
        """
        if (steps, rows) not in self._launch_shapes:
            self._launch_shapes.add((steps, rows))
            self.first_launches = self.first_launches[0] + steps * rows, self.first_launches[1] + seconds

    def add_loss(self, loss: Any, weight: Any) -> None:
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
            for loss, weight in self._loss_reader(self._losses[:n_ready], self._weights[:n_ready]):
                self.loss += loss
                self.weight += weight
                for line in self._lines:
                    line.loss += loss
                    line.weight += weight
            del self._losses[:n_ready], self._weights[:n_ready]

    def get_totals(self, learning_rate: float) -> RankTotals:
        """Return the totals, without unread losses; ``learning_rate`` is that of the last step."""
        return RankTotals(
            self.loss, self.weight, self.rows, self.steps, self.seconds, learning_rate, self.first_launches
        )

    def write_lines(self, epoch: int, seen: int, learning_rate: float, flush: bool = False) -> None:
        """Write a line to each recorder whose last line is ``every`` steps ago; with ``flush``, also after fewer steps.

        ``epoch`` is the number of complete epochs, ``seen`` that of rows trained on so far.
        """
        for line in self._lines:
            if self.steps - line.steps < (1 if flush else line.recorder.every):
                continue
            self.read_losses()
            rows, first_rows = self.rows - line.rows, self.first_launches[0] - line.first_launches[0]
            first_launches = first_rows, self.first_launches[1] - line.first_launches[1]
            record = {
                "epoch": epoch,
                "step": self.step,
                "seen": seen,
                "rows": rows,
                "loss": line.loss / line.weight if line.weight else None,
                "learning_rate": learning_rate,
                "rows_per_second": compute_rows_per_second(rows, time.perf_counter() - line.began, first_launches),
                **{name: value - line.seconds.get(name, 0.0) for name, value in self.seconds.items()},
            }
            line.begin(self)
            line.recorder.write_rank_record(self.rank, record)


def compute_rows_per_second(rows: int, seconds: float, first_launches: tuple[int, float]) -> float:
    """Compute the rows per second, without first launches, which may have compiled functions, if there were others."""
    first_rows, first_seconds = first_launches
    if first_rows == rows and first_seconds:
        first_rows, first_seconds = 0, 0.0
    return (rows - first_rows) / (seconds - first_seconds)
