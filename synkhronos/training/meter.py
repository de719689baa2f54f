"""Measurement of a rank's training between two reports: time by activity, rows, steps and losses.

To read a loss is to wait for the step that computes it.  So a step's loss stays on the device until its value is
needed, and on GPUs the host goes on to launch the next steps::

    add(loss, weight, rows) --> unread losses --> read_losses() --> sums --> outcome(): a Report
                                                                     |
                                                                     +----> write(): a line of each Recorder

A line of a recorder has the differences of the sums since the recorder's last line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from synkhronos.training.plan import Plan


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
        Learning rate of the last step.
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
    seconds = {name: float(np.mean([each.seconds[name] for each in outcomes])) for name in outcomes[0].seconds}
    first = outcomes[0]._replace(
        loss=sum(each.loss for each in outcomes),
        weight=sum(each.weight for each in outcomes),
        rows=sum(each.rows for each in outcomes),
        steps=sum(each.steps for each in outcomes),
        seconds=seconds,
        first=(sum(each.first[0] for each in outcomes), sum(each.first[1] for each in outcomes)),
    )
    others = first._replace(loss=0.0, weight=0.0, rows=0, steps=0, first=(0, 0.0))
    return [first, *([others] * (size - 1))]


class timed:  # noqa: N801 - used as a function
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

    def __enter__(self) -> timed:
        self._began, self._waited_before = time.perf_counter(), self._waited()
        return self

    def __exit__(self, error: Any, *_: object) -> None:
        if error is None:
            wait = self._waited() - self._waited_before
            self.spent = time.perf_counter() - self._began - wait
            self._seconds["wait"] += wait
            self._seconds[self._name] += self.spent


class Meter:
    """Counters of a rank's time, rows and losses since the last report; writes the records that are due.

    The counters start from ``plan.before``, if the plan continues an interval.

    Parameters
    ----------
    rank : int
    plan : Plan
    read : callable
        Copies a list of losses or weights to the host.
    step : int
        Number of steps that the rank has taken so far.
    kinds : set of (int, int)
        Kinds of launches so far: their number of steps, and of rows per step.  The meter adds new ones.
    waited : callable
        Returns the seconds for which this rank has waited for others so far.

    Attributes
    ----------
    seconds : dict of str to float
        Time by activity: compute, exchange, wait, load.
    rows, steps : int
    loss, weight, first
        As in `Outcome`; without the losses that are not read yet.
    step : int
        Number of steps that the rank has taken since the training began.
    """

    def __init__(
        self, rank: int, plan: Plan, read: Any, step: int, kinds: set[Any], waited: Callable[[], float] = float
    ):
        self._rank, self._plan, self._read, self._waited = rank, plan, read, waited
        self.seconds = dict.fromkeys(("compute", "exchange", "wait", "load"), 0.0)
        self.rows = self.steps = 0
        self.loss = self.weight = 0.0
        self.step = step
        self.first = 0, 0.0
        if plan.before:
            before: Outcome = plan.before[rank]
            self.loss, self.weight, self.first = before.loss, before.weight, before.first
            self.rows, self.steps = before.rows, before.steps
            self.seconds |= before.seconds
        self._kinds = kinds
        self._losses: list[Any] = []
        #: Weight and rows of each unread loss; the weight is None if it is the number of rows.
        self._weights: list[tuple[Any, int]] = []
        #: Counters at each recorder's last line.
        self._written = {
            recorder.folder: (self.steps, self.rows, self.loss, self.weight, time.perf_counter(), dict(self.seconds))
            for recorder in plan.recorders
        }

    def timed(self, name: str) -> timed:
        """Add the duration of a block to an activity's time; see `timed`."""
        return timed(self.seconds, name, self._waited)

    def launched(self, steps: int, rows: int, seconds: float) -> None:
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

    def add(self, loss: Any, weight: Any, rows: int) -> None:
        """Count a step.

        Parameters
        ----------
        loss : array
            Mean loss if ``weight`` is None, else the loss times the weight.  It may be on the device.
        weight : array or None
            Weight of the loss in a mean; None for the number of rows.
        rows : int
            Number of rows of the step.
        """
        self._losses.append(loss)
        self._weights.append((weight, rows))
        self.rows += rows
        self.steps += 1
        self.step += 1

    def outcome(self, rate: float) -> Outcome:
        """Return the totals; ``rate`` is the last learning rate.  Losses that are not read are missing from it."""
        return Outcome(self.loss, self.weight, self.rows, self.steps, self.seconds, rate, self.first)

    def read_losses(self, besides: int = 0) -> None:
        """Wait for the unread losses, all but the last ``besides``, and add them to the sum."""
        ready = len(self._losses) - besides
        if ready > 0:
            values = np.array(self._read(self._losses[:ready]), np.float64).reshape(-1)
            weights, rows = zip(*self._weights[:ready], strict=True)
            if weights[0] is None:
                self.loss += float(values @ np.array(rows))
                self.weight += sum(rows)
            else:
                self.loss += float(values.sum())
                self.weight += float(np.sum(self._read(list(weights)), dtype=np.float64))
            del self._losses[:ready], self._weights[:ready]

    def write(self, place: int, rate: float, last: bool = False) -> None:
        """Write a line to each recorder that is due: ``every`` steps after its last line, or at the last step.

        Parameters
        ----------
        place : int
            Position in the epoch up to which rows have been distributed.
        rate : float
            Learning rate of the last step.
        last : bool
            Write a line to every recorder if there were steps since its last one.
        """
        for recorder in self._plan.recorders:
            steps, rows, loss, weight, since, seconds = self._written[recorder.folder]
            if self.steps == steps or self.steps - steps < recorder.every and not last:
                continue
            self.read_losses()
            now = time.perf_counter()
            recorder.write_rank(
                self._rank,
                {
                    "epoch": self._plan.epoch,
                    "step": self.step,
                    "seen": self._plan.epoch * self._plan.count + place,
                    "rows": self.rows - rows,
                    "loss": (self.loss - loss) / (self.weight - weight) if self.weight != weight else None,
                    "learning_rate": rate,
                    "rows_per_second": (self.rows - rows) / (now - since),
                    **{name: value - seconds[name] for name, value in self.seconds.items()},
                },
            )
            self._written[recorder.folder] = self.steps, self.rows, self.loss, self.weight, now, dict(self.seconds)
