"""What each rank does between two reports.

`Plan`
    Which rows, how many at a time, and what to write down.
`train`
    The program of a rule by which ranks train at their own pace.
`InOrder`
    The rows of data that are all there.
`Outcome`
    What comes of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from synkhronos.loading.loader import Feed
from synkhronos.rules import Rule, State
from synkhronos.tasks import LocalFunction, LocalRows, Worker
from synkhronos.training.recorder import Recorder
from synkhronos.training.schedules import Schedule

#: Steps in one launch, at most: each number is compiled by itself; and bytes of their rows, which are there at once.
_MOST, _BYTES = 64, 1 << 30


@dataclass
class Plan:
    """What to do until the next report.

    Attributes
    ----------
    name : str
        Of the trainer, under which each rank keeps what it has.
    first, last : int
        The places in the epoch's order of rows between which to train.
    batch : int
        A rank's rows in a step.
    epoch : int
    count : int
        The rows of an epoch.
    schedule : callable
    recorders : list of Recorder
    bar : bool
        Whether the master shows how far it is.
    pools : list of range
        The ranks among which rows are divided: all, or those of each host where hosts have rows of their own.
    """

    name: str
    first: int
    last: int
    batch: int
    epoch: int
    count: int
    schedule: Schedule
    recorders: list[Recorder]
    bar: bool
    pools: list[range]

    def rate(self, place: int) -> float:
        """Return the learning rate at a place in the epoch."""
        return float(self.schedule(self.epoch + place / self.count))


class InOrder:
    """Rows by their places in an epoch's order, of data that are all there: what a loader's `Feed` is of others.

    Parameters
    ----------
    data : list of Data
        On a rank, of LocalRows.
    order : Data
        The rows' numbers.
    """

    most = _MOST

    def __init__(self, data: list[Any], order: Any):
        self.data, self._order = data, order

    def rows(self, first: int, last: int, watch: Any = None) -> np.ndarray:
        """Return the numbers of the rows between two places."""
        return np.asarray(self._order)[first:last]

    def free(self, first: int, last: int) -> None:
        """Nothing waits for the memory."""


#: What a rank takes rows from.
Source = InOrder | Feed


class Outcome(NamedTuple):
    """What a rank has done.

    Attributes
    ----------
    loss : float
        The sum of its steps' losses, each times its rows.
    rows, steps : int
    seconds : dict of str to float
        By what it did: compute, exchange, wait, load.
    learning_rate : float
        The last.
    first : tuple of int and float
        The rows, and seconds, of steps that were the first of their kind: something may have been compiled there.
    """

    loss: float
    rows: int
    steps: int
    seconds: dict[str, float]
    learning_rate: float
    first: tuple[int, float]


class Meter:
    """Counts a rank's time, rows and losses, and writes lines.

    Parameters
    ----------
    rank : int
    plan : Plan
    read : callable
        Returns losses on the host.
    step : int
        The rank's steps so far.
    kinds : set
        Of the launches so far: how many steps, of how many rows.
    """

    def __init__(self, rank: int, plan: Plan, read: Any, step: int, kinds: set[Any]):
        self._rank, self._plan, self._read = rank, plan, read
        self.seconds = dict.fromkeys(("compute", "exchange", "wait", "load"), 0.0)
        self.rows = self.steps = 0
        self.loss = 0.0
        self.step = step
        self.first = 0, 0.0
        self._kinds = kinds
        self._losses: list[Any] = []
        self._weights: list[int] = []
        self._written = {
            recorder.folder: (0, 0, 0.0, time.perf_counter(), dict(self.seconds)) for recorder in plan.recorders
        }

    def add(self, losses: Sequence[Any], rows: int) -> None:
        """Note steps of so many rows each."""
        self._losses += losses
        self._weights += [rows] * len(losses)
        self.rows += rows * len(losses)
        self.steps += len(losses)
        self.step += len(losses)

    def spent(self, name: str, seconds: float, kind: tuple[int, int] | None = None) -> None:
        """Note time; ``kind`` says of a launch how many steps it was, of how many rows."""
        self.seconds[name] += seconds
        if kind is not None and kind not in self._kinds:
            self._kinds.add(kind)
            self.first = self.first[0] + kind[0] * kind[1], self.first[1] + seconds

    def outcome(self, rate: float) -> Outcome:
        """Return what was done."""
        return Outcome(self.loss, self.rows, self.steps, self.seconds, rate, self.first)

    def read_losses(self, besides: int = 0) -> None:
        """Read the losses, besides the last few."""
        ready = len(self._losses) - besides
        if ready > 0:
            values = np.array(self._read(self._losses[:ready]), np.float64).reshape(-1)
            self.loss += float(values @ np.array(self._weights[:ready]))
            del self._losses[:ready], self._weights[:ready]

    def write(self, place: int, rate: float, last: bool = False) -> None:
        """Write a line into each recorder whose turn it is."""
        for recorder in self._plan.recorders:
            steps, rows, loss, since, seconds = self._written[recorder.folder]
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
                    "loss": (self.loss - loss) / (self.rows - rows),
                    "learning_rate": rate,
                    "rows_per_second": (self.rows - rows) / (now - since),
                    **{name: value - seconds[name] for name, value in self.seconds.items()},
                },
            )
            self._written[recorder.folder] = self.steps, self.rows, self.loss, now, dict(self.seconds)


def train(
    worker: Worker,
    plan: Plan,
    rule: Rule,
    step: LocalFunction,
    rate: Any,
    variables: tuple[list[Any], list[Any]],
    source: Source,
    taken: LocalRows,
    shared: dict[str, LocalRows],
) -> Outcome:
    """Train on rows between two places of an epoch's order; afterwards the parameters are those to be validated.

    Parameters
    ----------
    worker : Worker
    plan : Plan
    rule : Rule
    step : LocalFunction
        Takes a step on some rows, and returns the loss.
    rate : shared variable
        The learning rate.
    variables : pair of lists of shared variables
        The parameters that are exchanged, and the optimizer's.
    source : InOrder or Feed
        What rows are taken from.
    taken : LocalRows
        How many batches each pool's ranks have taken, where each takes them as it comes for them.
    shared : dict of str to LocalRows
        The rule's memory.
    """
    kept = worker.kept(plan.name)
    state: State | None = kept.get("state")
    if state is None:
        state = kept["state"] = State(*variables, shared)
        rule.setup(worker, state)
    elif kept.get("own") is not None:
        state.vector = kept["own"]  # in whose place there was what the last report was about
    loop = _Loop(worker, plan, rule, state, step, rate, source)
    with _Bar(worker, plan) as bar:
        (loop.at_own_pace(taken, bar) if rule.asynchronous else loop.together(bar))
    began, waited = time.perf_counter(), worker.waited
    loop.release()
    loop.spent("compute", began, waited)
    began, waited = time.perf_counter(), worker.waited
    kept["own"] = state.vector
    state.vector = rule.report(worker, state)
    loop.spent("exchange", began, waited)
    loop.meter.write(plan.last, loop.rate_now, last=True)
    return loop.meter.outcome(loop.rate_now)


class _Loop:
    """Steps, and exchanges between them."""

    def __init__(
        self,
        worker: Worker,
        plan: Plan,
        rule: Rule,
        state: State,
        step: LocalFunction,
        rate: Any,
        source: Source,
    ):
        self.worker, self.plan, self.rule, self.state = worker, plan, rule, state
        self.step, self.rate, self.source = step, rate, source
        #: Rows that may still be read, by steps that have begun.
        self.reading: list[tuple[int, int]] = []
        self.rate_now = 0.0
        kinds = worker.kept(plan.name).setdefault("kinds", set())
        self.meter = Meter(worker.number, plan, step.read, state.step, kinds)
        row = sum(math.prod(each.shape[1:]) * each.dtype.itemsize for each in source.data)
        self.most = max(1, min(source.most, step.most_at_once, _BYTES // max(1, row * plan.batch)))
        if isinstance(source, Feed):
            source.open(worker.number)

    def together(self, bar: _Bar) -> None:
        """Go through the rows with all ranks, a batch each in turn; the last round may have less for some."""
        plan, n, me = self.plan, self.worker.size, self.worker.number
        place = plan.first
        while place < plan.last:
            whole = (plan.last - place) // (plan.batch * n)
            left = self.rule.left(self.state)
            rounds = max(1, min(left, self.most, whole))
            starts = [place + (k * n + me) * plan.batch for k in range(rounds)]
            self.take(starts, place)
            place = min(plan.last, place + rounds * n * plan.batch)
            self.stepped(rounds, left)
            self.meter.write(place, self.rate_now)
            bar.to(place)

    def at_own_pace(self, taken: LocalRows, bar: _Bar) -> None:
        """Go through the rows with all ranks, each taking the next batches when it is ready."""
        plan, n = self.plan, self.worker.size
        pool = next(pool for pool in plan.pools if self.worker.number in pool)
        while True:
            left = self.rule.left(self.state)
            began, waited = time.perf_counter(), self.worker.waited
            with self.worker.lock(n + 1) as lock:
                lock.read(taken)
                first = int(taken.array[pool.start])
                batches = range(first, first + min(left, self.most))
                # Of each n batches in a row the pool has those in its ranks' places: all, where there is one pool.
                starts = [plan.first + (k // len(pool) * n + pool[k % len(pool)]) * plan.batch for k in batches]
                starts = [start for start in starts if start + plan.batch <= plan.last] or starts[:1]
                taken.array[pool.start] += len(starts)
                lock.write(taken)
            self.spent("load", began, waited)
            if starts[0] >= plan.last:
                break
            self.take(starts, starts[0])
            self.stepped(len(starts), left)
            self.meter.write(min(plan.last, starts[-1] + plan.batch), self.rate_now)
            bar.to(min(plan.last, plan.first + int(taken.array.sum()) * plan.batch))

    def take(self, starts: list[int], place: int) -> None:
        """Take a step on the batch that starts at each of some places, in one launch where that can be."""
        places = [(start, min(start + self.plan.batch, self.plan.last)) for start in starts if start < self.plan.last]
        self.set_rate(self.plan.rate(place))
        rows = [each for each in self.wait_for(places) if len(each)]
        if not rows:
            return  # the last round had no batch for this rank
        began, waited = time.perf_counter(), self.worker.waited
        data = self.source.data
        losses: list[Any] | None = None
        if len(rows) > 1 and len({len(each) for each in rows}) == 1:
            together = np.concatenate(rows)
            losses = self.step.launch_many(len(rows), *(each[together] for each in data))
        if losses is None:
            losses = [loss for some in rows for loss in self.step.launch(*(each[some] for each in data))]
        for loss, some in zip(losses, rows, strict=True):
            self.meter.add([loss], len(some))
        if isinstance(self.source, Feed):
            self.meter.read_losses(besides=len(losses))  # the launch before has read its rows, then
            self.let_go(self.reading)
            self.reading = places
        self.spent("compute", began, waited, (len(rows), len(rows[0])))

    def wait_for(self, places: list[tuple[int, int]]) -> list[Any]:
        """Return which rows are between some places; those of a loader once they are there."""
        source = self.source
        if isinstance(source, Feed) and not all(source.is_ready(*each) for each in places):
            # The loaders may need the memory of rows that this rank has, and others may wait for what comes there.
            began, waited = time.perf_counter(), self.worker.waited
            self.release()
            self.spent("compute", began, waited)
        began, waited = time.perf_counter(), self.worker.waited
        rows = [source.rows(*each, self.worker.progress) for each in places]
        self.spent("load", began, waited)
        return rows

    def release(self) -> None:
        """Wait for the steps that have begun, and let the loaders have the memory of their rows."""
        self.meter.read_losses()
        self.let_go(self.reading)
        self.reading = []

    def let_go(self, places: list[tuple[int, int]]) -> None:
        """Let the loaders have the memory of the rows between some places."""
        for each in places:
            self.source.free(*each)

    def stepped(self, steps: int, left: int) -> None:
        """Count steps, and exchange if no more were left until then."""
        self.state.step += steps
        self.state.since += steps
        if steps < left:
            return
        began, waited = time.perf_counter(), self.worker.waited
        if isinstance(self.source, Feed) or self.rule.asynchronous and self.state.since > 1:
            # The exchange would wait for the steps, in whose place it would be counted; and others may wait for rows.
            self.release()
            self.spent("compute", began, waited)
            began, waited = time.perf_counter(), self.worker.waited
        self.state.learning_rate = self.rate_now
        self.rule.exchange(self.worker, self.state)
        self.state.since = 0
        self.spent("exchange", began, waited)

    def set_rate(self, rate: float) -> None:
        """Set the learning rate, if it is another than before."""
        if rate != self.rate_now:
            self.rate.set_value(np.asarray(rate, self.rate.type.dtype))
            self.rate_now = rate

    def spent(self, name: str, began: float, waited: float, kind: tuple[int, int] | None = None) -> None:
        """Note the time since then, that of waiting by itself."""
        wait = self.worker.waited - waited
        self.meter.spent("wait", wait)
        self.meter.spent(name, time.perf_counter() - began - wait, kind)


class _Bar:
    """A progress bar in the master, if there is to be one."""

    def __init__(self, worker: Worker, plan: Plan):
        self._bar: Any = None
        if plan.bar and worker.is_master:
            from tqdm import tqdm

            self._bar = tqdm(total=plan.count, initial=plan.first, unit="row", desc=f"epoch {plan.epoch}", leave=False)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def to(self, place: int) -> None:
        """Show a place."""
        if self._bar is not None:
            self._bar.update(place - self._bar.n)
