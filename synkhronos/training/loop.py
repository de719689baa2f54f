"""The loop over batches of all trainings.

Each iteration trains on the next batches::

    iterate_batches --> step --> exchange --> record --> is_stopped
         ^                                                   |
         +---------------------------------------------------+

`iterate_batches` ends at the next report; the owner of the loop then validates, reports and saves.

`TrainingLoop` has the loop and its interface.  Its subclasses differ in who takes a step:

- `JointLoop` runs in the master.  Each step is a command of all ranks, which exchanges gradients: BSP on gradients.
  Nothing is exchanged after a step, and on GPUs one command takes many steps.
- `RankLoop` runs on every rank.  Each rank takes its own steps, and an `Exchanger` exchanges parameters by a rule.
- `synkhronos.launch.rank.model_batch_loop.ModelBatchLoop` does the same with a model class, which chooses the rows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from synkhronos import ranks
from synkhronos.collectives.calls import broadcast
from synkhronos.loading.loader import Feed
from synkhronos.rules import Rule, State
from synkhronos.tasks import LocalFunction, LocalRows, Worker
from synkhronos.tracing.spans import TRACED, TracedMethod
from synkhronos.training.death_recovery import DeathHandler
from synkhronos.training.epoch_data import IntervalPlan, Source
from synkhronos.training.meter import ActivityTimer, LossReader, Meter, RankTotals
from synkhronos.training.rank_state import restore_own_params, set_reported_params
from synkhronos.training.stop import StopAgreement, get_requested_stop
from synkhronos.training.train_function import TrainFunction
from synkhronos.training.training_graph import TrainingGraph

#: Maximal number of bytes of a launch's rows.
_MAX_LAUNCH_NBYTES = 1 << 30


class Batches(NamedTuple):
    """Successive batches of one launch, with one step per batch.

    Attributes
    ----------
    rate_position : int
        Position in the epoch for which the schedule computes the learning rate.
    starts : list of int
        Position of each batch's first row.
    end : int
        Position after the rows of these batches, on all ranks.
    """

    rate_position: int
    starts: list[int]
    end: int


class TrainingLoop(ABC):
    """Base class of loops over the batches until the next report."""

    def run(self) -> None:
        """Train on all batches, or until a signal."""
        for batches in self.iterate_batches():
            self.exchange(self.step(batches))
            self.record(batches)
            if self.is_stopped():
                break

    @abstractmethod
    def iterate_batches(self) -> Iterator[Any]:
        """Yield the batches of each call of `step`."""

    @abstractmethod
    def step(self, batches: Any) -> int:
        """Train on the batches; return the number of steps."""

    @abstractmethod
    def exchange(self, steps: int) -> None:
        """Count ``steps`` steps, and exchange with other ranks if an exchange is due."""

    @abstractmethod
    def record(self, batches: Any) -> None:
        """Write the records that are due."""

    @abstractmethod
    def is_stopped(self) -> bool:
        """Return True if the training stops after these batches."""


TRACED.extend(TracedMethod(TrainingLoop, name, name, name) for name in ("step", "exchange", "record"))


class Exchanger:
    """Counter of a rank's steps, which calls the exchange rule when an exchange is due.

    Parameters
    ----------
    worker : Worker
    rule : Rule
    state : State
    seconds : dict of str to float
        Time by activity; the time of exchanges is added to ``exchange``.
    """

    def __init__(self, worker: Worker, rule: Rule, state: State, seconds: dict[str, float]):
        self._worker, self.rule, self.state, self._seconds = worker, rule, state, seconds
        self._steps_left = 1

    def count_steps_left(self) -> int:
        """Ask the rule for the number of steps until the next exchange; return it, and store it for `count_steps`."""
        self._steps_left = self.rule.count_steps_left(self.state)
        return self._steps_left

    def count_steps(self, steps: int) -> bool:
        """Count ``steps`` steps; return True if an exchange is due after them."""
        self.state.step += steps
        self.state.since += steps
        return steps >= self._steps_left

    def exchange(self) -> None:
        """Exchange, and restart the count of steps."""
        with ActivityTimer(self._seconds, "exchange", lambda: self._worker.wait_seconds):
            self.rule.exchange(self._worker, self.state)
            self.state.since = 0


class _SourceLoop(TrainingLoop):
    """Base class of loops over the rows of a `Source`.

    Parameters
    ----------
    plan : IntervalPlan
    source : Source
    meter : Meter
    rows : int
        Number of rows per step.
    is_master : bool
        Whether this process may show the progress bar.
    rate : float
        Present value of the learning rate's variable; NaN if it is unknown.
    """

    on_poll: Any = None  # called repeatedly while this rank waits for a loader

    def __init__(
        self, plan: IntervalPlan, source: Source, meter: Meter, rows: int, is_master: bool, rate: float = math.nan
    ):
        self.plan, self.source, self.meter, self.rows_per_step, self.rate = plan, source, meter, rows, rate
        #: Position up to which rows have been trained on.
        self.end = plan.start
        #: Ranges of positions whose rows unfinished steps may still read.
        self.spans_in_use: list[tuple[int, int]] = []
        self._bar: Any = None
        if plan.shows_progress and is_master:
            from tqdm import tqdm

            self._bar = tqdm(
                total=plan.n_rows, initial=plan.start, unit=" rows", desc=f"epoch {plan.epoch}", leave=False
            )

    def run(self) -> None:
        """Train on all batches, or until a signal; then close the progress bar."""
        try:
            super().run()
        finally:
            if self._bar is not None:
                self._bar.close()

    def record(self, batches: Batches) -> None:
        """Write the lines that are due, and move the progress bar."""
        self.end = batches.end
        self.write_lines()
        if self._bar is not None:
            self._bar.update(self.end - self._bar.n)

    def write_lines(self, last: bool = False) -> None:
        """Write the recorders' lines that are due; with ``last``, also lines of fewer steps than ``every``."""
        plan = self.plan
        self.meter.write_lines(plan.epoch, plan.rows_before + self.end, self.rate, last)

    @abstractmethod
    def set_rate(self, rate: float) -> None:
        """Set the learning rate's variable."""

    @abstractmethod
    def launch(self, rows: list[Any]) -> list[tuple[Any, Any]]:
        """Launch one step per batch.

        Parameters
        ----------
        rows : list of ndarray of int
            Row indexes of each batch.

        Returns
        -------
        list of (value, weight)
            Loss and weight of each step, as from `TrainFunction.weighted_steps`; reading them waits for the step.
        """

    @abstractmethod
    def free_after_launch(self, spans: list[tuple[int, int]], steps: int) -> None:
        """Free rows that finished steps have read, after a launch of ``steps`` steps on the rows of ``spans``."""

    def step(self, batches: Batches) -> int:
        """Launch a step per batch, and pass the losses to the meter."""
        last = self.plan.stop
        spans = [(start, min(start + self.rows_per_step, last)) for start in batches.starts if start < last]
        rate = self.plan.get_rate(batches.rate_position)
        if rate != self.rate:
            self.set_rate(rate)
            self.rate = rate
        rows = [indexes for indexes in self.wait_for_rows(spans) if len(indexes)]
        if not rows:  # no batch is left for this rank, or no row could be read
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
        """Wait until the rows at some ranges of positions are loaded, and return their row indexes."""
        source = self.source
        if isinstance(source, Feed) and not all(source.is_ready(*span) for span in spans):
            # The loader processes may need the slots of this rank's rows to read rows for other ranks.
            self.finish_steps()
        with self.meter.time("load"):
            return [source.wait_rows(*span, self.on_poll) for span in spans]

    def finish_steps(self) -> None:
        """Wait for the launched steps, and free their rows."""
        with self.meter.time("compute"):
            self.meter.read_losses()
            self.free(self.spans_in_use)
            self.spans_in_use = []

    def free(self, spans: list[tuple[int, int]]) -> None:
        """Allow the loader processes to overwrite the rows at some ranges of positions."""
        for span in spans:
            self.source.free(*span)


class JointLoop(_SourceLoop):
    """Loop of the master whose steps are commands of all ranks.

    Parameters
    ----------
    rows : int
        Number of rows per step, of all ranks together.
    step : TrainFunction
    learning_rate : shared variable
    rate : float
        Present value of ``learning_rate`` on all ranks.
    death_handler : DeathHandler
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
        death_handler: DeathHandler,
    ):
        super().__init__(plan, source, meter, rows, True, rate)
        self._step, self._learning_rate, self._death_handler = step, learning_rate, death_handler
        self._max_repeats = min(source.max_repeats, death_handler.max_repeats)
        data = source.data
        self._x = data[: len(graph.x)] if graph.x_is_list else data[0]
        self._y = data[len(graph.x) :] if graph.y_is_list else data[-1]

    def iterate_batches(self) -> Iterator[Batches]:
        """Yield the batches of each launch; their learning rates are equal."""
        position, plan = self.plan.start, self.plan
        while position < plan.stop:
            rate, starts = plan.get_rate(position), [position]
            while len(starts) < self._max_repeats and starts[-1] + 2 * self.rows_per_step <= plan.stop:
                if plan.get_rate(starts[-1] + self.rows_per_step) != rate:
                    break
                starts.append(starts[-1] + self.rows_per_step)
            end = min(starts[-1] + self.rows_per_step, plan.stop)
            yield Batches(position, starts, end)
            position = end

    def set_rate(self, rate: float) -> None:
        """Set the learning rate's variable on all ranks."""
        value = np.asarray(rate, self._learning_rate.type.dtype)
        self._death_handler.run(lambda: broadcast(self._learning_rate, value))

    def launch(self, rows: list[Any]) -> list[tuple[Any, Any]]:
        """Take one step per batch, in one launch if possible."""
        return self._death_handler.run_update(lambda: self._step.weighted_steps(self._x, self._y, rows), len(rows))

    def free_after_launch(self, spans: list[tuple[int, int]], steps: int) -> None:
        """Wait for the steps, and free their rows."""
        self.meter.read_losses()
        self.free(spans)

    def exchange(self, steps: int) -> None:
        """Do nothing: steps exchange gradients."""

    def is_stopped(self) -> bool:
        """Return True after a signal, or if a rank was left out, which changes the number of rows per step."""
        is_resized = self.rows_per_step != self.plan.batch_size * ranks.get_session().size
        return is_resized or self.plan.can_stop and bool(get_requested_stop())


class RankLoop(_SourceLoop):
    """Loop of one rank that takes its own steps by a compiled function.

    Parameters
    ----------
    worker : Worker
    plan : IntervalPlan
    rule : Rule
    state : State
    step : LocalFunction
        Takes a step, and returns the loss, followed by the weight if there is one.
    rate : shared variable
        Learning rate's variable of this rank.
    source : Source
    batches_taken : LocalRows
        Number of batches that each pool's ranks have taken, under asynchronous rules.  The last element is the number
        of rounds of one batch per rank after which a signal stops the training; 0 without a signal.
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
        launch_kinds = worker.get_storage(plan.name).setdefault("launch_kinds", set())
        read = make_loss_reader(step.read, plan.has_weight)
        meter = Meter(worker.number, plan.recorders, read, launch_kinds, state.step, lambda: worker.wait_seconds)
        if plan.earlier_totals:
            meter.begin_interval(plan.earlier_totals[worker.number])
        super().__init__(plan, source, meter, plan.batch_size, worker.is_master)
        self.worker, self.rule, self.state, self.on_poll = worker, rule, state, worker.progress
        self._step, self._rate, self._batches_taken = step, rate, batches_taken
        self.exchanger = Exchanger(worker, rule, state, meter.seconds)
        #: Weights of the steps since the last exchange.
        self._unexchanged_weights: list[Any] = []
        state.count_items = self._sum_weights if plan.has_weight else None
        self._agreement = StopAgreement(worker)
        row = sum(math.prod(array.shape[1:]) * array.dtype.itemsize for array in source.data)
        self.max_repeats = max(
            1, min(source.max_repeats, step.max_repeats, _MAX_LAUNCH_NBYTES // max(1, row * plan.batch_size))
        )
        if isinstance(source, Feed):
            source.open(worker.number)

    def iterate_batches(self) -> Iterator[Batches]:
        """Yield the batches of each launch of this rank; an exchange is due only after the last batch of a launch."""
        return self._take_batches() if self.rule.asynchronous else self._assign_batches()

    def _assign_batches(self) -> Iterator[Batches]:
        """Assign batches in rounds of one batch per rank; in the last round ranks may get fewer rows, or none."""
        plan, n, me = self.plan, self.worker.size, self.worker.number
        position = plan.start
        while position < plan.stop:
            n_full = (plan.stop - position) // (plan.batch_size * n)
            rounds = max(1, min(self.exchanger.count_steps_left(), self.max_repeats, n_full))
            end = min(plan.stop, position + rounds * n * plan.batch_size)
            yield Batches(position, [position + (k * n + me) * plan.batch_size for k in range(rounds)], end)
            position = end

    def _take_batches(self) -> Iterator[Batches]:
        """Take the next batches from a counter that the ranks share."""
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
                if rounds:  # all pools stop after the same round, so that the rows trained on are one range
                    n_batches = min(n_batches, rounds * len(pool) - first)
                # Of every n successive batches a pool takes those numbered as its ranks; a single pool takes all.
                starts = [
                    plan.start + (k // len(pool) * n + pool[k % len(pool)]) * plan.batch_size
                    for k in range(first, first + n_batches)
                ]
                starts = [start for start in starts if start + plan.batch_size <= plan.stop] or starts[:1]
                shared_counts.array[pool.start] += len(starts)
                lock.write(shared_counts)
            if not starts or starts[0] >= plan.stop:
                self.end = min(plan.stop, plan.start + rounds * n * plan.batch_size) if rounds else plan.stop
                return
            yield Batches(starts[0], starts, min(plan.stop, starts[-1] + plan.batch_size))

    def is_stopped(self) -> bool:
        """Return True if all ranks agree to stop; asynchronous ranks stop in `_take_batches` instead."""
        return self.plan.can_stop and not self.rule.asynchronous and self._agreement.is_stop_due()

    def set_rate(self, rate: float) -> None:
        """Set the learning rate's variable on this rank."""
        self._rate.set_value(np.asarray(rate, self._rate.type.dtype))

    def _sum_weights(self) -> float:
        """Return the sum of the weights of this rank's steps since the last exchange."""
        return (
            float(np.sum(self._step.read(self._unexchanged_weights), dtype=np.float64))
            if self._unexchanged_weights
            else 0.0
        )

    def launch(self, rows: list[Any]) -> list[tuple[Any, Any]]:
        """Launch one step per batch, in one launch if possible."""
        steps = self._launch_steps(rows)
        self._unexchanged_weights += [weight for _, weight in steps if weight is not None]
        return steps

    def _launch_steps(self, rows: list[Any]) -> list[tuple[Any, Any]]:
        data, state = self.source.data, self.state
        if state.average_size:
            state.own["batches"] = state.own.get("batches", 0.0) + sum(map(len, rows)) / self.plan.batch_size
        if len(rows) > 1 and len({len(array) for array in rows}) == 1:
            all_rows = np.concatenate(rows)
            outputs = self._step.launch_many(len(rows), *(array[all_rows] for array in data))
            if outputs is not None:
                weights = outputs[len(rows) :] or [None] * len(rows)
                return list(zip(outputs[: len(rows)], weights, strict=True))
        steps = [self._step.launch(*(array[indexes] for array in data)) for indexes in rows]
        return [(loss, weight[0] if weight else None) for loss, *weight in steps]

    def free_after_launch(self, spans: list[tuple[int, int]], steps: int) -> None:
        """Wait for the previous launch, and free its rows."""
        if isinstance(self.source, Feed):
            self.meter.read_losses(n_pending=steps)
            self.free(self.spans_in_use)
            self.spans_in_use = spans

    def exchange(self, steps: int) -> None:
        """Count ``steps`` steps, and exchange if an exchange is due."""
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


def make_loss_reader(fetch: Callable[[Sequence[Any]], Sequence[Any]], has_weight: bool) -> LossReader:
    """Return the reader of a `Meter` for the losses of `TrainFunction.weighted_steps`.

    Parameters
    ----------
    fetch : callable
        Copies arrays to host memory.
    has_weight : bool
        Whether losses are already multiplied by their weights.  Else the weights are numbers of rows.
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
) -> tuple[int, RankTotals]:
    """Train this rank on its rows of an interval, then set the parameters to those that the rule reports.

    Parameters
    ----------
    worker, plan, rule, step, rate, source, batches_taken
        As in `RankLoop`.
    variables : (list of shared variable, list of shared variable, int)
        Parameters that are exchanged; variables of the optimizer; number of running averages among the former.
    shared : dict of str to LocalRows
        Shared memory of the rule.

    Returns
    -------
    end : int
        Position up to which the ranks have trained: before ``plan.stop`` if a signal has stopped them.
    totals : RankTotals
    """
    stored = worker.get_storage(plan.name)
    state: State | None = stored.get("state")
    restore_own_params(
        worker, plan.name
    )  # after an interrupt there are none: the present parameters are this rank's own
    by_rank = worker.all_gather(None if state is None else (state.step, state.since))
    counts = [pair for pair in by_rank if pair is not None]
    if state is None or len(counts) < len(by_rank) or not rule.asynchronous and len(set(by_rank)) > 1:
        # At the first interval, or after an interrupt that stopped ranks at different steps: all ranks start anew.
        params, optimizer, n_averages = variables
        state = State(params, optimizer, shared, n_averages)
        state.step = max([step for step, _ in counts], default=0)
        if counts:
            state.vector = worker.all_reduce(state.vector)
        rule.setup(worker, state)
        stored["state"] = state
    loop = RankLoop(worker, plan, rule, state, step, rate, source, batches_taken)
    loop.run()
    loop.finish_steps()
    with loop.meter.time("exchange"):
        set_reported_params(worker, plan.name, rule)
    loop.write_lines(last=True)
    return loop.end, loop.meter.get_totals(loop.rate)
