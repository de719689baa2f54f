"""Counts what a rank does between two reports.

`Meter`
    Time, rows and losses; writes the recorders' lines.
`Outcome`
    What they come to.
`timed`
    Notes how long something takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from synkhronos.training.plan import Plan


class Outcome(NamedTuple):
    """What a rank has done."""

    #: The sum of its steps' losses, each times its weight.
    loss: float
    #: The sum of these weights: of the model's, or the rows.
    weight: float
    rows: int
    steps: int
    #: By what it did: compute, exchange, wait, load.
    seconds: dict[str, float]
    #: The last.
    learning_rate: float
    #: The rows, and seconds, of steps that were the first of their kind: something may have been compiled there.
    first: tuple[int, float]


def split_outcomes(outcomes: Sequence[Outcome], size: int) -> list[Outcome]:
    """Return outcomes of another number of ranks with the same sums, and the same means of seconds.

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
    """Add the time of a block to ``seconds`` of a name; waiting for other ranks counts as ``wait``.

    ``waited`` returns how long this rank has waited for others so far.  Behind the block ``spent`` has its seconds
    without waiting.
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
    """Counts a rank's time, rows and losses, and writes lines.

    ``read`` returns losses on the host, ``step`` is the number of the rank's steps so far, ``kinds`` are those of its
    launches (how many steps, of how many rows), and ``waited`` returns the seconds for which it has waited for others.
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
        #: Of each loss that is not read yet: the weight, None for the rows, and the rows.
        self._weights: list[tuple[Any, int]] = []
        self._written = {
            recorder.folder: (self.steps, self.rows, self.loss, self.weight, time.perf_counter(), dict(self.seconds))
            for recorder in plan.recorders
        }

    def timed(self, name: str) -> timed:
        """Note how long a block takes: see `timed`."""
        return timed(self.seconds, name, self._waited)

    def launched(self, steps: int, rows: int, seconds: float) -> None:
        """Note how long a launch of some steps has taken, of so many rows each, if it was the first such one."""
        if (steps, rows) not in self._kinds:
            self._kinds.add((steps, rows))
            self.first = self.first[0] + steps * rows, self.first[1] + seconds

    def add(self, loss: Any, weight: Any, rows: int) -> None:
        """Note a step on so many rows: its mean loss, where the weight is None, or its loss times a weight."""
        self._losses.append(loss)
        self._weights.append((weight, rows))
        self.rows += rows
        self.steps += 1
        self.step += 1

    def outcome(self, rate: float) -> Outcome:
        """Return what was done."""
        return Outcome(self.loss, self.weight, self.rows, self.steps, self.seconds, rate, self.first)

    def read_losses(self, besides: int = 0) -> None:
        """Read the losses, besides the last few."""
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
        """Write a line into each recorder whose turn it is."""
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
