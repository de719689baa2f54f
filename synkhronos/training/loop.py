"""The loop over an epoch's rows, between two reports.

`Loop`
    Goes from turn to turn; who takes the steps says what is different about that.
`TogetherLoop`
    In the master: each step is a command of all ranks (BSP on gradients).
`RankLoop`
    On each rank: its own steps, with exchanges between them (all other rules).
`Turn`
    The batches of one turn.
`train`
    The program that each rank runs for `RankLoop`.

A turn is::

    turns() ──> rows, from the source ──> launch() ──> exchange() ──> lines and bar
    which batches    waits for a loader       a step on each    if one is due
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

import synkhronos as synk
from synkhronos.loading.loader import Feed
from synkhronos.rules import Rule, State
from synkhronos.tasks import LocalFunction, LocalRows, Worker
from synkhronos.training.interval import Plan, Source
from synkhronos.training.meter import Meter, Outcome
from synkhronos.training.model import Model
from synkhronos.training.stop import StopAgreement, requested_stop
from synkhronos.training.train_function import TrainFunction

#: Bytes of the rows of one launch, at most, which are there at once.
_BYTES = 1 << 30


class Turn(NamedTuple):
    """The batches of one turn, a step each."""

    #: Whose learning rate is taken.
    place: int
    #: The place at which each batch begins.
    starts: list[int]
    #: The place up to which rows have been given out then.
    end: int


class Loop(ABC):
    """Goes through rows, turn by turn.

    A step has so many ``rows``.  The master shows a progress bar, if there is to be one, and ``rate`` is the learning
    rate that is set already: by default none is, as no rate is equal to NaN.
    """

    watch: Any = None  # what is called from time to time while rows are waited for

    def __init__(self, plan: Plan, source: Source, meter: Meter, rows: int, is_master: bool, rate: float = math.nan):
        self.plan, self.source, self.meter, self.rows, self.rate = plan, source, meter, rows, rate
        #: The place up to which rows have been trained on.
        self.end = plan.first
        #: Places of rows that may still be read, by steps that have begun.
        self.reading: list[tuple[int, int]] = []
        self._bar: Any = None
        if plan.bar and is_master:
            from tqdm import tqdm

            self._bar = tqdm(total=plan.count, initial=plan.first, unit="row", desc=f"epoch {plan.epoch}", leave=False)

    def run(self) -> None:
        """Take all steps."""
        try:
            for turn in self.turns():
                self.step(turn)
                self.exchange(len(turn.starts))
                self.meter.write(turn.end, self.rate)
                if self._bar is not None:
                    self._bar.update(turn.end - self._bar.n)
                self.end = turn.end
                if self.plan.can_stop and self.is_stop():
                    break
        finally:
            if self._bar is not None:
                self._bar.close()

    # -- what is different -------------------------------------------------------------------------------------

    @abstractmethod
    def turns(self) -> Iterator[Turn]:
        """Yield the batches of each turn, as many as one launch can take."""

    @abstractmethod
    def put_rate(self, rate: float) -> None:
        """Set the learning rate's variable."""

    @abstractmethod
    def launch(self, rows: list[Any]) -> list[tuple[Any, Any]]:
        """Take a step on each of some batches.

        Returns
        -------
        list of (value, weight)
            As of `TrainFunction.weighted_steps`; these may be read later.
        """

    @abstractmethod
    def launched(self, places: list[tuple[int, int]], steps: int) -> None:
        """Let the loaders have the memory of rows that have been read, after a launch of so many steps."""

    @abstractmethod
    def exchange(self, steps: int) -> None:
        """Count steps, and exchange parameters if it is time."""

    @abstractmethod
    def is_stop(self) -> bool:
        """Return whether a signal ends the training after this turn."""

    # -- what is the same --------------------------------------------------------------------------------------

    def step(self, turn: Turn) -> None:
        """Take the steps of a turn."""
        last = self.plan.last
        places = [(start, min(start + self.rows, last)) for start in turn.starts if start < last]
        rate = self.plan.rate(turn.place)
        if rate != self.rate:
            self.put_rate(rate)
            self.rate = rate
        rows = [each for each in self.wait_for(places) if len(each)]
        if not rows:  # the last round had no batch for this rank, or none of the rows could be read
            self.let_go(places)
            return
        with self.meter.timed("compute") as launch:
            losses = self.launch(rows)
            for (loss, weight), some in zip(losses, rows, strict=True):
                self.meter.add(loss, weight, len(some))
            self.launched(places, len(losses))
        self.meter.launched(len(rows), len(rows[0]), launch.spent)

    def wait_for(self, places: list[tuple[int, int]]) -> list[Any]:
        """Return which rows are between some places; those of a loader once they are there."""
        source = self.source
        if isinstance(source, Feed) and not all(source.is_ready(*each) for each in places):
            # The loaders may need the memory of rows that this rank has, and others may wait for what comes there.
            self.release()
        with self.meter.timed("load"):
            return [source.rows(*each, self.watch) for each in places]

    def release(self) -> None:
        """Wait for the steps that have begun, and let the loaders have the memory of their rows."""
        with self.meter.timed("compute"):
            self.meter.read_losses()
            self.let_go(self.reading)
            self.reading = []

    def let_go(self, places: list[tuple[int, int]]) -> None:
        """Let the loaders have the memory of the rows between some places."""
        for each in places:
            self.source.free(*each)


class TogetherLoop(Loop):
    """Steps of all ranks at once, in the master: as many in one launch as have the same learning rate.

    ``rows`` are those of all ranks together; ``rate`` is the value of ``learning_rate`` on all ranks.
    """

    def __init__(
        self,
        plan: Plan,
        source: Source,
        meter: Meter,
        rows: int,
        model: Model,
        step: TrainFunction,
        learning_rate: Any,
        rate: float,
    ):
        super().__init__(plan, source, meter, rows, True, rate)
        self._step, self._learning_rate = step, learning_rate
        data = source.data
        self._x = data[: len(model.x)] if model.x_is_list else data[0]
        self._y = data[len(model.x) :] if model.y_is_list else data[-1]

    def turns(self) -> Iterator[Turn]:
        """Yield the batches of all ranks that come next and have the same learning rate."""
        place, plan = self.plan.first, self.plan
        while place < plan.last:
            rate, starts = plan.rate(place), [place]
            while len(starts) < self.source.most and starts[-1] + 2 * self.rows <= plan.last:
                if plan.rate(starts[-1] + self.rows) != rate:
                    break
                starts.append(starts[-1] + self.rows)
            end = min(starts[-1] + self.rows, plan.last)
            yield Turn(place, starts, end)
            place = end

    def put_rate(self, rate: float) -> None:
        """Set the variable on all ranks."""
        synk.broadcast(self._learning_rate, np.asarray(rate, self._learning_rate.type.dtype))

    def launch(self, rows: list[Any]) -> list[tuple[Any, Any]]:
        """Take the steps."""
        return self._step.weighted_steps(self._x, self._y, rows)

    def launched(self, places: list[tuple[int, int]], steps: int) -> None:
        """Wait for the steps: the ranks have read their rows, then."""
        self.meter.read_losses()
        self.let_go(places)

    def exchange(self, steps: int) -> None:
        """Each step has exchanged gradients."""

    def is_stop(self) -> bool:
        """Return whether the master was asked to stop."""
        return bool(requested_stop())


class RankLoop(Loop):
    """A rank's own steps, and exchanges between them.

    ``step`` takes a step on some rows, and returns the loss; ``rate`` is the learning rate's variable.  ``taken`` has
    the number of batches that each pool's ranks have taken, where each takes them as it comes for them.  Its last
    element is the number of rounds, a batch for each rank, after which a signal ends the training; 0 without a signal.
    """

    def __init__(
        self,
        worker: Worker,
        plan: Plan,
        rule: Rule,
        state: State,
        step: LocalFunction,
        rate: Any,
        source: Source,
        taken: LocalRows,
    ):
        kinds = worker.kept(plan.name).setdefault("kinds", set())
        meter = Meter(worker.number, plan, step.read, state.step, kinds, lambda: worker.waited)
        super().__init__(plan, source, meter, plan.batch, worker.is_master)
        self.worker, self.rule, self.state, self.watch = worker, rule, state, worker.progress
        self._step, self._rate, self._taken = step, rate, taken
        #: Weights of the steps since the last exchange.
        self._items: list[Any] = []
        state.count_items = self._count_items if plan.has_weight else None
        self._agreement = StopAgreement(worker)
        row = sum(math.prod(each.shape[1:]) * each.dtype.itemsize for each in source.data)
        self.most = max(1, min(source.most, step.max_times, _BYTES // max(1, row * plan.batch)))
        if isinstance(source, Feed):
            source.open(worker.number)

    def turns(self) -> Iterator[Turn]:
        """Yield the batches of this rank, as many as there are until the next exchange."""
        return self.as_they_come() if self.rule.asynchronous else self.in_turn()

    def in_turn(self) -> Iterator[Turn]:
        """Go through the rows with all ranks, a batch each in turn; the last round may have less for some."""
        plan, n, me = self.plan, self.worker.size, self.worker.number
        place = plan.first
        while place < plan.last:
            whole = (plan.last - place) // (plan.batch * n)
            rounds = max(1, min(self.left(), self.most, whole))
            end = min(plan.last, place + rounds * n * plan.batch)
            yield Turn(place, [place + (k * n + me) * plan.batch for k in range(rounds)], end)
            place = end

    def as_they_come(self) -> Iterator[Turn]:
        """Go through the rows with all ranks, each taking the next batches when it is ready."""
        plan, n, taken = self.plan, self.worker.size, self._taken
        pool = next(pool for pool in plan.pools if self.worker.number in pool)
        while True:
            most = min(self.left(), self.most)
            with self.meter.timed("load"), self.worker.lock(n + 1) as lock:
                lock.read(taken)
                first = int(taken.array[pool.start])
                if plan.can_stop and requested_stop() and not taken.array[-1]:
                    begun = (-(-int(taken.array[each.start]) // len(each)) for each in plan.pools)
                    taken.array[-1] = max(1, *begun)
                rounds = int(taken.array[-1])
                if rounds:  # all pools complete the same rounds, so that the rows trained on are one range
                    most = min(most, rounds * len(pool) - first)
                # Of each n batches in a row the pool has those in its ranks' places: all, where there is one pool.
                starts = [
                    plan.first + (k // len(pool) * n + pool[k % len(pool)]) * plan.batch
                    for k in range(first, first + most)
                ]
                starts = [start for start in starts if start + plan.batch <= plan.last] or starts[:1]
                taken.array[pool.start] += len(starts)
                lock.write(taken)
            if not starts or starts[0] >= plan.last:
                self.end = min(plan.last, plan.first + rounds * n * plan.batch) if rounds else plan.last
                return
            yield Turn(starts[0], starts, min(plan.last, starts[-1] + plan.batch))

    def is_stop(self) -> bool:
        """Return whether all ranks stop; where each takes batches as they come, `as_they_come` ends."""
        return not self.rule.asynchronous and self._agreement.is_stop()

    def left(self) -> int:
        """Return how many steps there are until the next exchange."""
        self._left = self.rule.count_steps_left(self.state)
        return self._left

    def put_rate(self, rate: float) -> None:
        """Set the variable of this rank."""
        self._rate.set_value(np.asarray(rate, self._rate.type.dtype))

    def _count_items(self) -> float:
        """Return the sum of the weights of this rank's steps since the last exchange."""
        return float(np.sum(self._step.read(self._items), dtype=np.float64)) if self._items else 0.0

    def launch(self, rows: list[Any]) -> list[tuple[Any, Any]]:
        """Start the steps, in one launch where that can be."""
        steps = self._launched(rows)
        self._items += [weight for _, weight in steps if weight is not None]
        return steps

    def _launched(self, rows: list[Any]) -> list[tuple[Any, Any]]:
        data, state = self.source.data, self.state
        if state.average_size:
            state.own["batches"] = state.own.get("batches", 0.0) + sum(map(len, rows)) / self.plan.batch
        if len(rows) > 1 and len({len(each) for each in rows}) == 1:
            together = np.concatenate(rows)
            outputs = self._step.launch_many(len(rows), *(each[together] for each in data))
            if outputs is not None:
                weights = outputs[len(rows) :] or [None] * len(rows)
                return list(zip(outputs[: len(rows)], weights, strict=True))
        steps = [self._step.launch(*(each[some] for each in data)) for some in rows]
        return [(loss, weight[0] if weight else None) for loss, *weight in steps]

    def launched(self, places: list[tuple[int, int]], steps: int) -> None:
        """Wait for the launch before, whose rows have been read then."""
        if isinstance(self.source, Feed):
            self.meter.read_losses(besides=steps)
            self.let_go(self.reading)
            self.reading = places

    def exchange(self, steps: int) -> None:
        """Count steps, and exchange if no more were left until then."""
        self.state.step += steps
        self.state.since += steps
        if steps < self._left:
            return
        if isinstance(self.source, Feed) or self.rule.asynchronous and self.state.since > 1:
            # The exchange would wait for the steps, in whose place it would be counted; and others may wait for rows.
            self.release()
        with self.meter.timed("exchange"):
            self.state.learning_rate = self.rate
            self.rule.exchange(self.worker, self.state)
            self.state.since = 0
            self._items = []
            if self.state.average_size:
                self.state.own["batches"] = 0.0


def train(
    worker: Worker,
    plan: Plan,
    rule: Rule,
    step: LocalFunction,
    rate: Any,
    variables: tuple[list[Any], list[Any], int],
    source: Source,
    taken: LocalRows,
    shared: dict[str, LocalRows],
) -> tuple[int, Outcome]:
    """Train on rows between two places of an epoch's order; afterwards the parameters are those to be validated.

    ``variables`` are the parameters that are exchanged, the optimizer's variables, and how many of the first are
    running averages; ``shared`` is the rule's memory.  All else is as for `RankLoop`.

    Returns
    -------
    end : int
        The place up to which ranks have trained: before the plan's last one if a signal came.
    outcome : Outcome
    """
    kept = worker.kept(plan.name)
    state: State | None = kept.get("state")
    if "own" in kept:  # not after an interrupt: then each goes on with what it has
        assert state is not None
        state.vector = kept["own"]  # in whose place there was what the last report was about
        del kept["own"]  # not before: an interrupt between the two must not lose it
    places = worker.exchange(None if state is None else (state.step, state.since))
    begun = [place for place in places if place is not None]
    if state is None or len(begun) < len(places) or not rule.asynchronous and len(set(places)) > 1:
        # The first time; or after an interrupt at which ranks had come to different places: then all begin anew.
        params, optimizer, n_averages = variables
        state = State(params, optimizer, shared, n_averages)
        state.step = max([step for step, _ in begun], default=0)
        if begun:
            state.vector = worker.all_reduce(state.vector)
        rule.setup(worker, state)
        kept["state"] = state
    loop = RankLoop(worker, plan, rule, state, step, rate, source, taken)
    loop.run()
    loop.release()
    with loop.meter.timed("exchange"):
        stands_for_all = rule.report(worker, state)
        kept["own"] = state.vector  # behind the report, which may take what has come by mail
        state.vector = stands_for_all
    loop.meter.write(loop.end, loop.rate, last=True)
    return loop.end, loop.meter.outcome(loop.rate)
