"""The loop over batches, which every training of the package runs.

Each pass trains on the next batches::

    iterate_batches() --> step() --> exchange() --> record() --> is_stopped()
          ^                                                           |
          +-----------------------------------------------------------+

``iterate_batches`` ends where a report is due: the loop's owner then validates, reports and saves.

`TrainingLoop` has the loop and its interface.  What a batch is, and who steps, differs:

- `RowLoop`, and `synkhronos.launch.model_loop` where a user's class chooses the rows: every rank runs one, takes steps
  of its own, and has an `Exchanger`, which exchanges by a rule.
- `CommandLoop`: the master runs one.  Each step is a command of all ranks, which exchange gradients within it: BSP on
  gradients.  There is nothing to exchange afterwards, and on GPUs one command takes many steps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

import synkhronos as synk
from synkhronos import ranks
from synkhronos.loading.loader import Feed
from synkhronos.rules import Rule, State
from synkhronos.tasks import LocalFunction, LocalRows, Worker
from synkhronos.tracing.spans import TRACED, TracedMethod
from synkhronos.training.epoch_data import IntervalPlan, Source
from synkhronos.training.meter import ActivityTimer, Meter, Outcome, ReadLosses
from synkhronos.training.rank_state import restore_own_params, set_reported_params
from synkhronos.training.stop import StopAgreement, get_requested_stop
from synkhronos.training.survival import DeathHandler
from synkhronos.training.train_function import TrainFunction
from synkhronos.training.training_graph import TrainingGraph

#: Maximal number of bytes of the rows of one launch.
_MAX_LAUNCH_NBYTES = 1 << 30


class Batches(NamedTuple):
    """Successive batches for one launch, a step each.

    Attributes
    ----------
    first : int
        Position in the epoch at which the learning rate is taken.
    starts : list of int
        Position of each batch's first row.
    end : int
        Position up to which rows have been distributed afterwards.
    """

    first: int
    starts: list[int]
    end: int


class TrainingLoop(ABC):
    """Loop over batches until the next report; subclasses define the batches, the step and the exchange."""

    def run(self) -> None:
        """Train on all batches, or until a signal stops the training."""
        for batches in self.iterate_batches():
            self.exchange(self.step(batches))
            self.record(batches)
            if self.is_stopped():
                break

    @abstractmethod
    def iterate_batches(self) -> Iterator[Any]:
        """Yield the next batches, as many as `step` takes at once."""

    @abstractmethod
    def step(self, batches: Any) -> int:
        """Train on batches; return the number of steps."""

    @abstractmethod
    def exchange(self, steps: int) -> None:
        """Count steps, and exchange between ranks if an exchange is due."""

    @abstractmethod
    def record(self, batches: Any) -> None:
        """Write the records that are due."""

    @abstractmethod
    def is_stopped(self) -> bool:
        """Return True if a signal ends the training after these batches."""


TRACED.extend(TracedMethod(TrainingLoop, name, name, name) for name in ("step", "exchange", "record"))


class Exchanger:
    """Exchanges of one rank with others by a rule, after the steps that the rule asks for.

    Parameters
    ----------
    worker : Worker
    rule : Rule
    state : State
    seconds : dict of str to float
        Time by activity, to which exchanges are added.
    """

    def __init__(self, worker: Worker, rule: Rule, state: State, seconds: dict[str, float]):
        self._worker, self.rule, self.state, self._seconds = worker, rule, state, seconds
        self._steps_left = 1

    def count_steps_left(self) -> int:
        """Return the number of steps until the next exchange, and remember it for `count_steps`."""
        self._steps_left = self.rule.count_steps_left(self.state)
        return self._steps_left

    def count_steps(self, steps: int) -> bool:
        """Count steps; return whether these were the last ones before an exchange."""
        self.state.step += steps
        self.state.since += steps
        return steps >= self._steps_left

    def exchange(self) -> None:
        """Exchange, and count steps from here on."""
        with ActivityTimer(self._seconds, "exchange", lambda: self._worker.wait_seconds):
            self.rule.exchange(self._worker, self.state)
            self.state.since = 0


class _SourceLoop(TrainingLoop):
    """Loop over rows of a `Source`.

    Parameters
    ----------
    plan : IntervalPlan
    source : Source
    meter : Meter
    rows : int
        Rows of a step.
    is_master : bool
        Whether this process shows the progress bar, if there is one.
    rate : float
        Present value of the learning rate's variable; by default unknown.
    """

    watch: Any = None  # called from time to time while a loader reads rows

    def __init__(
        self, plan: IntervalPlan, source: Source, meter: Meter, rows: int, is_master: bool, rate: float = math.nan
    ):
        self.plan, self.source, self.meter, self.rows, self.rate = plan, source, meter, rows, rate
        #: Position up to which rows have been trained on.
        self.end = plan.first
        #: Ranges of positions of rows that unfinished steps may still read.
        self.reading: list[tuple[int, int]] = []
        self._bar: Any = None
        if plan.shows_progress and is_master:
            from tqdm import tqdm

            self._bar = tqdm(
                total=plan.count, initial=plan.first, unit=" rows", desc=f"epoch {plan.epoch}", leave=False
            )

    def run(self) -> None:
        """Train on all batches, or until a signal stops the training; then close the progress bar."""
        try:
            super().run()
        finally:
            if self._bar is not None:
                self._bar.close()

    def record(self, batches: Batches) -> None:
        """Write the records that are due, and move the progress bar."""
        self.end = batches.end
        self.write_lines()
        if self._bar is not None:
            self._bar.update(self.end - self._bar.n)

    def write_lines(self, last: bool = False) -> None:
        """Write the recorders' lines that are due; with ``last``, a line for all remaining steps."""
        plan = self.plan
        self.meter.write_lines(plan.epoch, plan.rows_before + self.end, self.rate, last)

    @abstractmethod
    def set_rate(self, rate: float) -> None:
        """Set the learning rate's variable."""

    @abstractmethod
    def launch(self, rows: list[Any]) -> list[tuple[Any, Any]]:
        """Start one step on each batch.

        Returns
        -------
        list of (value, weight)
            As in `TrainFunction.weighted_steps`; these may be read later.
        """

    @abstractmethod
    def free_after_launch(self, spans: list[tuple[int, int]], steps: int) -> None:
        """Release memory of rows to the loaders, after a launch of ``steps`` steps."""

    def step(self, batches: Batches) -> int:
        """Launch the steps, and pass their losses to the meter."""
        last = self.plan.last
        spans = [(start, min(start + self.rows, last)) for start in batches.starts if start < last]
        rate = self.plan.get_rate(batches.first)
        if rate != self.rate:
            self.set_rate(rate)
            self.rate = rate
        rows = [indexes for indexes in self.wait_for_rows(spans) if len(indexes)]
        if not rows:  # the last round had no batch for this rank, or none of the rows could be read
            self.free(spans)
            return len(batches.starts)
        with self.meter.time("compute") as launch:
            losses = self.launch(rows)
            for (loss, weight), indexes in zip(losses, rows, strict=True):
                self.meter.add_loss(loss, len(indexes) if weight is None else weight)
                self.meter.count_step(len(indexes))
            self.free_after_launch(spans, len(losses))
        self.meter.record_launch(len(rows), len(rows[0]), launch.spent)
        return len(batches.starts)

    def wait_for_rows(self, spans: list[tuple[int, int]]) -> list[Any]:
        """Wait until a loader has read the rows in some ranges of positions, and return their row numbers."""
        source = self.source
        if isinstance(source, Feed) and not all(source.is_ready(*span) for span in spans):
            # The loaders may need the memory of rows that this rank holds, to read rows for other ranks.
            self.finish_steps()
        with self.meter.time("load"):
            return [source.wait_rows(*span, self.watch) for span in spans]

    def finish_steps(self) -> None:
        """Wait for the launched steps, and release the memory of their rows to the loaders."""
        with self.meter.time("compute"):
            self.meter.read_losses()
            self.free(self.reading)
            self.reading = []

    def free(self, spans: list[tuple[int, int]]) -> None:
        """Release the memory of rows to the loaders."""
        for span in spans:
            self.source.free(*span)


class CommandLoop(_SourceLoop):
    """Loop of the master: each launch of steps is a command of all ranks, with one learning rate.

    Parameters
    ----------
    rows : int
        Rows of a step of all ranks together.
    step : TrainFunction
    learning_rate : shared variable
    rate : float
        Its present value on all ranks.
    survival : DeathHandler
    """

    def __init__(
        self,
        plan: IntervalPlan,
        source: Source,
        meter: Meter,
        rows: int,
        graph: TrainingGraph,
        step: TrainFunction,
        learning_rate: Any,
        rate: float,
        survival: DeathHandler,
    ):
        super().__init__(plan, source, meter, rows, True, rate)
        self._step, self._learning_rate, self._survival = step, learning_rate, survival
        self._max_repeats = min(source.max_repeats, survival.max_repeats)
        data = source.data
        self._x = data[: len(graph.x)] if graph.x_is_list else data[0]
        self._y = data[len(graph.x) :] if graph.y_is_list else data[-1]

    def iterate_batches(self) -> Iterator[Batches]:
        """Yield the next batches with equal learning rates."""
        position, plan = self.plan.first, self.plan
        while position < plan.last:
            rate, starts = plan.get_rate(position), [position]
            while len(starts) < self._max_repeats and starts[-1] + 2 * self.rows <= plan.last:
                if plan.get_rate(starts[-1] + self.rows) != rate:
                    break
                starts.append(starts[-1] + self.rows)
            end = min(starts[-1] + self.rows, plan.last)
            yield Batches(position, starts, end)
            position = end

    def set_rate(self, rate: float) -> None:
        """Set the variable on all ranks."""
        value = np.asarray(rate, self._learning_rate.type.dtype)
        self._survival.run(lambda: synk.broadcast(self._learning_rate, value))

    def launch(self, rows: list[Any]) -> list[tuple[Any, Any]]:
        """Take the steps."""
        return self._survival.change(lambda: self._step.weighted_steps(self._x, self._y, rows), len(rows))

    def free_after_launch(self, spans: list[tuple[int, int]], steps: int) -> None:
        """Wait for the steps, then release the memory of their rows."""
        self.meter.read_losses()
        self.free(spans)

    def exchange(self, steps: int) -> None:
        """Do nothing: each step has exchanged gradients."""

    def is_stopped(self) -> bool:
        """Return True if a signal has arrived, or a rank has been left out: the other ranks' steps have fewer rows."""
        is_resized = self.rows != self.plan.batch * ranks.get_session().size
        return is_resized or self.plan.can_stop and bool(get_requested_stop())


class RowLoop(_SourceLoop):
    """Loop of one rank over rows of data; a compiled function takes the steps.

    Parameters
    ----------
    worker : Worker
    plan : IntervalPlan
    rule : Rule
    state : State
    step : LocalFunction
        Takes a step on rows, and returns the loss.
    rate : shared variable
        Learning rate of this rank.
    source : Source
    batches_taken : LocalRows
        Number of batches that each pool's ranks have taken, where ranks take them at their own pace.  The last element
        is the number of rounds, of a batch a rank, after which a signal ends the training; 0 without a signal.
    """

    def __init__(
        self,
        worker: Worker,
        plan: IntervalPlan,
        rule: Rule,
        state: State,
        step: LocalFunction,
        rate: Any,
        source: Source,
        batches_taken: LocalRows,
    ):
        kinds = worker.get_storage(plan.name).setdefault("kinds", set())
        read = make_loss_reader(step.read, plan.has_weight)
        meter = Meter(worker.number, plan.recorders, read, kinds, state.step, lambda: worker.wait_seconds)
        if plan.earlier_outcomes:
            meter.begin(plan.earlier_outcomes[worker.number])
        super().__init__(plan, source, meter, plan.batch, worker.is_master)
        self.worker, self.rule, self.state, self.watch = worker, rule, state, worker.progress
        self._step, self._rate, self._batches_taken = step, rate, batches_taken
        self.exchanger = Exchanger(worker, rule, state, meter.seconds)
        #: Weights of the steps since the last exchange.
        self._unexchanged_weights: list[Any] = []
        state.count_items = self._sum_weights if plan.has_weight else None
        self._agreement = StopAgreement(worker)
        row = sum(math.prod(array.shape[1:]) * array.dtype.itemsize for array in source.data)
        self.max_repeats = max(
            1, min(source.max_repeats, step.max_repeats, _MAX_LAUNCH_NBYTES // max(1, row * plan.batch))
        )
        if isinstance(source, Feed):
            source.open(worker.number)

    def iterate_batches(self) -> Iterator[Batches]:
        """Yield the batches of this rank, at most up to the next exchange."""
        return self._take_batches() if self.rule.asynchronous else self._assign_batches()

    def _assign_batches(self) -> Iterator[Batches]:
        """Assign rows to ranks in rounds of one batch each; in the last round some ranks may get fewer rows."""
        plan, n, me = self.plan, self.worker.size, self.worker.number
        position = plan.first
        while position < plan.last:
            n_full = (plan.last - position) // (plan.batch * n)
            rounds = max(1, min(self.exchanger.count_steps_left(), self.max_repeats, n_full))
            end = min(plan.last, position + rounds * n * plan.batch)
            yield Batches(position, [position + (k * n + me) * plan.batch for k in range(rounds)], end)
            position = end

    def _take_batches(self) -> Iterator[Batches]:
        """Take the next batches that no other rank has taken."""
        plan, n, shared_counts = self.plan, self.worker.size, self._batches_taken
        pool = next(pool for pool in plan.pools if self.worker.number in pool)
        while True:
            n_batches = min(self.exchanger.count_steps_left(), self.max_repeats)
            with self.meter.time("load"), self.worker.lock(n + 1) as lock:
                lock.read(shared_counts)
                first = int(shared_counts.array[pool.start])
                if plan.can_stop and get_requested_stop() and not shared_counts.array[-1]:
                    begun = (-(-int(shared_counts.array[peers.start]) // len(peers)) for peers in plan.pools)
                    shared_counts.array[-1] = max(1, *begun)
                rounds = int(shared_counts.array[-1])
                if rounds:  # all pools complete the same rounds, so that the rows trained on are one range
                    n_batches = min(n_batches, rounds * len(pool) - first)
                # Of each n batches in a row the pool has those of its ranks' numbers: all, where there is one pool.
                starts = [
                    plan.first + (k // len(pool) * n + pool[k % len(pool)]) * plan.batch
                    for k in range(first, first + n_batches)
                ]
                starts = [start for start in starts if start + plan.batch <= plan.last] or starts[:1]
                shared_counts.array[pool.start] += len(starts)
                lock.write(shared_counts)
            if not starts or starts[0] >= plan.last:
                self.end = min(plan.last, plan.first + rounds * n * plan.batch) if rounds else plan.last
                return
            yield Batches(starts[0], starts, min(plan.last, starts[-1] + plan.batch))

    def is_stopped(self) -> bool:
        """Return True if all ranks stop; ranks at their own pace stop in `_take_batches`."""
        return self.plan.can_stop and not self.rule.asynchronous and self._agreement.is_stop()

    def set_rate(self, rate: float) -> None:
        """Set the variable of this rank."""
        self._rate.set_value(np.asarray(rate, self._rate.type.dtype))

    def _sum_weights(self) -> float:
        """Return the sum of the weights of this rank's steps since the last exchange."""
        return (
            float(np.sum(self._step.read(self._unexchanged_weights), dtype=np.float64))
            if self._unexchanged_weights
            else 0.0
        )

    def launch(self, rows: list[Any]) -> list[tuple[Any, Any]]:
        """Start the steps, in one launch if possible."""
        steps = self._launch_steps(rows)
        self._unexchanged_weights += [weight for _, weight in steps if weight is not None]
        return steps

    def _launch_steps(self, rows: list[Any]) -> list[tuple[Any, Any]]:
        data, state = self.source.data, self.state
        if state.average_size:
            state.own["batches"] = state.own.get("batches", 0.0) + sum(map(len, rows)) / self.plan.batch
        if len(rows) > 1 and len({len(array) for array in rows}) == 1:
            together = np.concatenate(rows)
            outputs = self._step.launch_many(len(rows), *(array[together] for array in data))
            if outputs is not None:
                weights = outputs[len(rows) :] or [None] * len(rows)
                return list(zip(outputs[: len(rows)], weights, strict=True))
        steps = [self._step.launch(*(array[indexes] for array in data)) for indexes in rows]
        return [(loss, weight[0] if weight else None) for loss, *weight in steps]

    def free_after_launch(self, spans: list[tuple[int, int]], steps: int) -> None:
        """Wait for the previous launch, then release the memory of its rows."""
        if isinstance(self.source, Feed):
            self.meter.read_losses(besides=steps)
            self.free(self.reading)
            self.reading = spans

    def exchange(self, steps: int) -> None:
        """Count steps, and exchange if an exchange is due."""
        if not self.exchanger.count_steps(steps):
            return
        # Launched steps are finished if the exchange waits for them: other ranks may need the memory of their rows.
        if isinstance(self.source, Feed) or self.rule.asynchronous and self.state.since > 1:
            self.finish_steps()
        self.state.learning_rate = self.rate
        self.exchanger.exchange()
        self._unexchanged_weights = []
        if self.state.average_size:
            self.state.own["batches"] = 0.0


def make_loss_reader(fetch: Callable[[Sequence[Any]], Sequence[Any]], has_weight: bool) -> ReadLosses:
    """Return the reader of a `Meter` for the losses of `TrainFunction.weighted_steps`.

    Parameters
    ----------
    fetch : callable
        Copies a list of arrays to host memory.
    has_weight : bool
        Whether losses are multiplied by weights.  Else they are means, and their weights are numbers of rows.
    """
    if has_weight:
        return lambda losses, weights: zip(map(float, fetch(losses)), map(float, fetch(weights)), strict=True)
    return lambda losses, rows: [(float(loss) * n, n) for loss, n in zip(fetch(losses), rows, strict=True)]


def train_interval(
    worker: Worker,
    plan: IntervalPlan,
    rule: Rule,
    step: LocalFunction,
    rate: Any,
    variables: tuple[list[Any], list[Any], int],
    source: Source,
    batches_taken: LocalRows,
    shared: dict[str, LocalRows],
) -> tuple[int, Outcome]:
    """Train one rank on its rows of an interval, then set the parameters to the rule's reported ones.

    Parameters
    ----------
    worker, plan, rule, step, rate, source, batches_taken
        As for `RowLoop`.
    variables : (list of shared variable, list of shared variable, int)
        Parameters that are exchanged; variables of the optimizer; number of running averages among the former.
    shared : dict of str to LocalRows
        Shared memory of the rule.

    Returns
    -------
    end : int
        Position up to which the ranks have trained: before ``plan.last`` if a signal has stopped them.
    outcome : Outcome
    """
    stored = worker.get_storage(plan.name)
    state: State | None = stored.get("state")
    restore_own_params(worker, plan.name)  # does nothing after an interrupt: each rank keeps its present parameters
    by_rank = worker.all_gather(None if state is None else (state.step, state.since))
    begun = [counts for counts in by_rank if counts is not None]
    if state is None or len(begun) < len(by_rank) or not rule.asynchronous and len(set(by_rank)) > 1:
        # At the first interval, or after an interrupt that stopped ranks at different steps: all ranks start anew.
        params, optimizer, n_averages = variables
        state = State(params, optimizer, shared, n_averages)
        state.step = max([step for step, _ in begun], default=0)
        if begun:
            state.vector = worker.all_reduce(state.vector)
        rule.setup(worker, state)
        stored["state"] = state
    loop = RowLoop(worker, plan, rule, state, step, rate, source, batches_taken)
    loop.run()
    loop.finish_steps()
    with loop.meter.time("exchange"):
        set_reported_params(worker, plan.name, rule)
    loop.write_lines(last=True)
    return loop.end, loop.meter.get_outcome(loop.rate)
