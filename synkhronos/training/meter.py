"""Measurement of a rank's training between two reports: time by activity, rows, steps and losses.

Reading a loss waits for the step that computes it.  So a step's loss stays on the device until its value is needed:
on GPUs Python launches the next steps in the meantime::

    add_loss(loss, weight) --> unread losses --> read_losses() --> sums since the report --> get_outcome(): a Report
                                                             |
                                                             +---> sums since the line ----> write_lines()

Losses are added one by one, in the order of the steps.  So sums do not depend on when losses are read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

#: Reads losses and weights from the device: returns the sum of each loss's items, and its weight.
ReadLosses = Callable[[Sequence[Any], Sequence[Any]], Iterable[tuple[float, float]]]


class Outcome(NamedTuple):
    """Totals of one rank's training since the last report.

    Attributes
    ----------
    loss : float
        Sum of the steps' losses, each times its weight.
    weight : float
        Sum of these weights: of the model's weight, or of the rows.
    rows, steps : int
    seconds : dict of str to float
        Time by activity: compute, exchange, wait, load.
    learning_rate : float
        Learning rate of the last step; NaN if it is unknown.
    first : (int, float)
        Rows and seconds of launches that were the first of their kind, which may have compiled functions.
    """

    loss: float
    weight: float
    rows: int
    steps: int
    seconds: dict[str, float]
    learning_rate: float
    first: tuple[int, float]


def split_outcomes(outcomes: Sequence[Outcome], size: int) -> list[Outcome]:
    """Convert outcomes to another number of ranks; sums over ranks, and means of seconds, are unchanged.

    The first of the new outcomes has the sums.  If the number of ranks does not change, neither do the outcomes.

    Parameters
    ----------
    outcomes : sequence of Outcome
        One per rank; may be empty.
    size : int
        New number of ranks.

    Examples
    --------
    >>> one = Outcome(1.0, 10.0, 10, 2, {"wait": 1.0}, 0.1, (0, 0.0))
    >>> other = Outcome(2.0, 5.0, 5, 1, {"wait": 2.0}, 0.1, (0, 0.0))
    >>> split_outcomes([one, other], 1)
    [Outcome(loss=3.0, weight=15.0, rows=15, steps=3, seconds={'wait': 1.5}, learning_rate=0.1, first=(0, 0.0))]
    """
    if not outcomes or len(outcomes) == size:
        return list(outcomes)
    seconds = {name: float(np.mean([outcome.seconds[name] for outcome in outcomes])) for name in outcomes[0].seconds}
    first = outcomes[0]._replace(
        loss=sum(outcome.loss for outcome in outcomes),
        weight=sum(outcome.weight for outcome in outcomes),
        rows=sum(outcome.rows for outcome in outcomes),
        steps=sum(outcome.steps for outcome in outcomes),
        seconds=seconds,
        first=(sum(outcome.first[0] for outcome in outcomes), sum(outcome.first[1] for outcome in outcomes)),
    )
    others = first._replace(loss=0.0, weight=0.0, rows=0, steps=0, first=(0, 0.0))
    return [first, *([others] * (size - 1))]


class ActivityTimer:
    """Add the duration of a block to the time of an activity; waiting for other ranks is added to ``wait``.

    A block that raises an exception adds nothing.

    Parameters
    ----------
    seconds : dict of str to float
        Time by activity, with an entry ``wait``.
    name : str
        Activity of the block.
    waited : callable
        Returns the seconds for which this rank has waited for others so far.

    Attributes
    ----------
    spent : float
        Seconds of the block without waiting; 0 before its end.
    """

    def __init__(self, seconds: dict[str, float], name: str, waited: Callable[[], float]):
        self._seconds, self._name, self._waited = seconds, name, waited
        self.spent = 0.0

    def __enter__(self) -> ActivityTimer:
        self._began, self._waited_before = time.perf_counter(), self._waited()
        return self

    def __exit__(self, error: Any, *_: object) -> None:
        if error is None:
            wait = self._waited() - self._waited_before
            self.spent = time.perf_counter() - self._began - wait
            self._seconds["wait"] += wait
            self._seconds[self._name] += self.spent


class LineRecorder(Protocol):
    """Recorder of a rank's lines: a `Recorder`, or the launcher's.

    Attributes
    ----------
    every : int
        Number of steps between two lines.
    """

    every: int

    def write_rank(self, rank: int, record: dict[str, Any]) -> None:
        """Write a line of a rank."""


class _Line:
    """Counters at a recorder's last line, and sums since then."""

    def __init__(self, recorder: LineRecorder):
        self.recorder = recorder

    def begin(self, meter: Meter) -> None:
        """Begin a line at the present counters."""
        self.steps, self.rows, self.first, self.seconds = meter.steps, meter.rows, meter.first, dict(meter.seconds)
        self.loss = self.weight = 0.0
        self.began = time.perf_counter()


class Meter:
    """Counters of a rank's time, rows and losses since the last report; writes the lines that are due.

    Parameters
    ----------
    rank : int
    recorders : sequence of LineRecorder
    read : callable
        Reads losses and weights; see `ReadLosses`.
    kinds : set of (int, int), optional
        Kinds of launches so far: their number of steps, and of rows per step.  The meter adds new ones.
    step : int
        Number of steps that the rank has taken so far.
    waited : callable
        Returns the seconds for which this rank has waited for others so far.

    Attributes
    ----------
    seconds : dict of str to float
        Time by activity since the meter was made: compute, exchange, wait, load.
    rows, steps : int
    loss, weight, first
        As in `Outcome`; without the losses that are not read yet.
    step : int
        Number of steps that the rank has taken since the training began.
    """

    def __init__(
        self,
        rank: int,
        recorders: Sequence[LineRecorder],
        read: ReadLosses,
        kinds: set[Any] | None = None,
        step: int = 0,
        waited: Callable[[], float] = float,
    ):
        self._rank, self._read, self._waited, self.step = rank, read, waited, step
        self._kinds = set() if kinds is None else kinds
        self.seconds = dict.fromkeys(("compute", "exchange", "wait", "load"), 0.0)
        self._lines = [_Line(recorder) for recorder in recorders]
        self.begin()

    def begin(self, before: Outcome | None = None) -> None:
        """Begin an interval between two reports; ``before`` is the outcome of its first part, from a checkpoint."""
        self.loss = self.weight = 0.0
        self.rows = self.steps = 0
        self.first = 0, 0.0
        if before is not None:
            self.loss, self.weight, self.rows, self.steps, seconds, _, self.first = before
            self.seconds.update(seconds)
        self.discard_losses()
        for line in self._lines:
            line.begin(self)

    def time(self, name: str) -> ActivityTimer:
        """Add the duration of a block to an activity's time; see `ActivityTimer`."""
        return ActivityTimer(self.seconds, name, self._waited)

    def count_step(self, rows: int) -> None:
        """Count a step of ``rows`` rows."""
        self.rows += rows
        self.steps += 1
        self.step += 1

    def record_launch(self, steps: int, rows: int, seconds: float) -> None:
        """Record the duration of a launch if it is the first of its kind.

        Parameters
        ----------
        steps : int
            Number of steps in the launch.
        rows : int
            Number of rows per step.
        seconds : float
            Duration without waiting.
        """
        if (steps, rows) not in self._kinds:
            self._kinds.add((steps, rows))
            self.first = self.first[0] + steps * rows, self.first[1] + seconds

    def add_loss(self, loss: Any, weight: Any) -> None:
        """Add a loss and its weight, which may be on the device, to those that are not read yet."""
        self._losses.append(loss)
        self._weights.append(weight)

    def discard_losses(self) -> None:
        """Discard the losses that are not read yet."""
        self._losses: list[Any] = []
        self._weights: list[Any] = []

    def read_losses(self, besides: int = 0) -> None:
        """Wait for the unread losses, all but the last ``besides``, and add them to the sums."""
        n_ready = len(self._losses) - besides
        if n_ready > 0:
            for loss, weight in self._read(self._losses[:n_ready], self._weights[:n_ready]):
                self.loss += loss
                self.weight += weight
                for line in self._lines:
                    line.loss += loss
                    line.weight += weight
            del self._losses[:n_ready], self._weights[:n_ready]

    def get_outcome(self, rate: float) -> Outcome:
        """Return the totals without unread losses; ``rate`` is the learning rate of the last step."""
        return Outcome(self.loss, self.weight, self.rows, self.steps, self.seconds, rate, self.first)

    def write_lines(self, epoch: int, seen: int, rate: float, last: bool = False) -> None:
        """Write a line to each recorder that is due: ``every`` steps after its last line, or at the last step.

        Parameters
        ----------
        epoch : int
            Number of complete epochs.
        seen : int
            Number of rows trained on so far.
        rate : float
            Learning rate of the last step; NaN if it is unknown.
        last : bool
            Write a line to every recorder if there were steps since its last one.
        """
        for line in self._lines:
            if self.steps - line.steps < (1 if last else line.recorder.every):
                continue
            self.read_losses()
            rows, first = self.rows - line.rows, (self.first[0] - line.first[0], self.first[1] - line.first[1])
            record = {
                "epoch": epoch,
                "step": self.step,
                "seen": seen,
                "rows": rows,
                "loss": line.loss / line.weight if line.weight else None,
                "learning_rate": rate,
                "rows_per_second": compute_rows_per_second(rows, time.perf_counter() - line.began, first),
                **{name: value - line.seconds.get(name, 0.0) for name, value in self.seconds.items()},
            }
            line.begin(self)
            line.recorder.write_rank(self._rank, record)


def compute_rows_per_second(rows: int, seconds: float, first: tuple[int, float]) -> float:
    """Return the rows per second; launches that may have compiled functions are excluded if there were others.

    Parameters
    ----------
    rows : int
    seconds : float
        Duration of the training on these rows.
    first : (int, float)
        As in `Outcome`.

    Examples
    --------
    >>> compute_rows_per_second(60, 4.0, (20, 2.0)), compute_rows_per_second(20, 2.0, (20, 2.0))
    (20.0, 10.0)
    """
    first_rows, first_seconds = first
    if first_rows == rows and first_seconds:
        first_rows, first_seconds = 0, 0.0
    return (rows - first_rows) / (seconds - first_seconds)
