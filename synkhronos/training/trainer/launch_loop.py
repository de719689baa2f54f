"""A trainer's loops over batches, each iteration of which takes one or several steps: base class, and joint steps."""

from __future__ import annotations

import contextlib
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from synkhronos import ranks
from synkhronos.collectives.calls import broadcast
from synkhronos.loading.loader import LoaderRows
from synkhronos.training.loops.batch_loop import BatchLoop
from synkhronos.training.loops.stop_signals import get_requested_stop
from synkhronos.training.monitoring.meter import LossReader, Meter, RankTotals
from synkhronos.training.trainer.compiled_model import CompiledModel
from synkhronos.training.trainer.death_recovery import DeathPolicy
from synkhronos.training.trainer.epoch_data import IntervalPlan, RowSource


class LaunchBatches(NamedTuple):
    """Successive batches whose steps are taken together, with one step per batch.

    The schedule computes the learning rate for ``rate_position`` in the epoch.  ``starts`` are the positions of the
    batches' first rows.  ``end`` is the position after the rows of these batches, on all ranks.
    """

    rate_position: int
    starts: list[int]
    end: int


class LaunchLoop(BatchLoop):
    """Base class of loops over the rows of a `RowSource`; ``rate`` is the present learning rate, NaN if unknown."""

    on_poll: Callable[[], None] | None = None  # called repeatedly while this rank waits for a loader

    def __init__(
        self,
        plan: IntervalPlan,
        source: RowSource,
        meter: Meter,
        rows_per_step: int,
        is_master: bool,
        rate: float = math.nan,
    ):
        self.plan, self.source, self.meter, self.rows_per_step, self.rate = plan, source, meter, rows_per_step, rate
        if plan.earlier_totals:
            meter.begin_interval(plan.earlier_totals[meter.rank])
        #: Position up to which rows have been trained on.
        self.end = plan.start
        #: Ranges of positions whose rows unfinished steps may still read.
        self.position_ranges_in_use: list[tuple[int, int]] = []
        self._bar: Any = None
        if plan.shows_progress_bar and is_master:
            from tqdm import tqdm

            self._bar = tqdm(
                total=plan.n_epoch_rows, initial=plan.start, unit=" rows", desc=f"epoch {plan.epoch + 1}", leave=False
            )

    def run(self) -> None:
        """Train on all batches, or until a signal; then close the progress bar."""
        try:
            super().run()
        finally:
            if self._bar is not None:
                self._bar.close()

    def record(self, batches: LaunchBatches) -> None:
        """Write the lines that are due, and move the progress bar."""
        self.end = batches.end
        self.write_lines()
        if self._bar is not None:
            self._bar.update(self.end - self._bar.n)

    def write_lines(self, flush: bool = False) -> None:
        """Write the recorders' lines that are due; with ``flush``, also lines of fewer steps than ``every``."""
        plan = self.plan
        self.meter.write_lines(plan.epoch, plan.n_rows_of_earlier_epochs + self.end, self.rate, flush)

    @abstractmethod
    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate's variable."""

    @abstractmethod
    def launch(self, rows: list[Any]) -> list[tuple[Any, Any]]:
        """Launch a step per batch; return losses and weights, as `TrainFunction.take_weighted_steps` does."""

    @abstractmethod
    def free_after_launch(self, position_ranges: list[tuple[int, int]], steps: int) -> None:
        """Free rows that finished steps have read, after a launch of ``steps`` steps on ``position_ranges``."""

    def step(self, batches: LaunchBatches) -> int:
        """Launch a step per batch, and pass the losses to the meter."""
        stop = self.plan.stop
        position_ranges = [(start, min(start + self.rows_per_step, stop)) for start in batches.starts if start < stop]
        # Rows are awaited first: a death in `set_learning_rate` may end the loader processes, and then none arrive.
        rows = [indexes for indexes in self.wait_for_row_indexes(position_ranges) if len(indexes)]
        rate = self.plan.get_learning_rate(batches.rate_position)
        if rate != self.rate:
            self.set_learning_rate(rate)
            self.rate = rate
        if not rows:  # no batch is left for this rank, or no row could be read
            self.free(position_ranges)
            return len(batches.starts)
        with self.meter.time_activity("compute") as launch:
            losses = self.launch(rows)
            for (loss, weight), indexes in zip(losses, rows, strict=True):
                self.meter.add_loss(loss, len(indexes) if weight is None else weight)
                self.meter.count_step(len(indexes))
            self.free_after_launch(position_ranges, len(losses))
        self.meter.record_first_launch(len(rows), len(rows[0]), launch.seconds_without_wait)
        return len(batches.starts)

    def wait_for_row_indexes(self, position_ranges: list[tuple[int, int]]) -> list[Any]:
        """Wait until the rows at some ranges of positions are loaded, and return their row indexes."""
        source = self.source
        if isinstance(source, LoaderRows) and not all(source.is_loaded(stop) for _, stop in position_ranges):
            # The loader processes may need the slots of this rank's rows to read rows for other ranks.
            self.finish_steps()
        with self.meter.time_activity("load"):
            return [source.wait_for_row_indexes(*position_range, self.on_poll) for position_range in position_ranges]

    def finish_steps(self) -> None:
        """Wait for the launched steps, and free their rows."""
        with self.meter.time_activity("compute"):
            self.meter.read_losses()
            self.free(self.position_ranges_in_use)
            self.position_ranges_in_use = []

    def free(self, position_ranges: list[tuple[int, int]]) -> None:
        """Allow the loader processes to overwrite the rows at some ranges of positions."""
        for position_range in position_ranges:
            self.source.free(*position_range)


def make_loss_reader(fetch: Callable[[Sequence[Any]], Sequence[Any]], has_loss_weight: bool) -> LossReader:
    """Return the reader of a `Meter` for the losses of `TrainFunction.take_weighted_steps`.

    ``fetch`` copies arrays to host memory.  Without ``has_loss_weight`` the weights are numbers of rows, by which the
    reader multiplies the losses.
    """
    if has_loss_weight:
        return lambda losses, weights: zip(map(float, fetch(losses)), map(float, fetch(weights)), strict=True)
    return lambda losses, rows: [(float(loss) * n, n) for loss, n in zip(fetch(losses), rows, strict=True)]


class RowsMovedError(Exception):
    """The rows of a step are on other hosts than its ranks, since a rank was left out."""


class JointStepLoop(LaunchLoop):
    """Loop of the master whose steps are commands of all ranks."""

    def __init__(self, plan: IntervalPlan, source: RowSource, model: CompiledModel, death_policy: DeathPolicy):
        state, graph = model.state, model.graph
        read = make_loss_reader(list, plan.has_loss_weight)
        meter = Meter(0, plan.recorders, read, model.launch_shapes, state.position.steps)
        super().__init__(plan, source, meter, plan.batch_size * ranks.get_session().size, True, state.rate)
        assert model.joint_step is not None
        self._step, self._learning_rate = model.joint_step, model.learning_rate
        self._death_policy = death_policy
        self._max_steps_per_launch = min(source.max_steps_per_launch, death_policy.max_steps_per_launch)
        data = source.data
        self._x = data[: len(graph.x)] if graph.x_is_list else data[0]
        self._y = data[len(graph.x) :] if graph.y_is_list else data[-1]

    def iterate_batches(self) -> Iterator[LaunchBatches]:
        """Yield the batches of each launch; their learning rates are equal."""
        position, plan = self.plan.start, self.plan
        while position < plan.stop:
            rate, starts = plan.get_learning_rate(position), [position]
            while len(starts) < self._max_steps_per_launch and starts[-1] + 2 * self.rows_per_step <= plan.stop:
                if plan.get_learning_rate(starts[-1] + self.rows_per_step) != rate:
                    break
                starts.append(starts[-1] + self.rows_per_step)
            end = min(starts[-1] + self.rows_per_step, plan.stop)
            yield LaunchBatches(position, starts, end)
            position = end

    @property
    def _is_resized(self) -> bool:
        return self.rows_per_step != self.plan.batch_size * ranks.get_session().size

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate's variable on all ranks."""
        value = np.asarray(rate, self._learning_rate.type.dtype)
        self._death_policy.run_idempotent(lambda: broadcast(self._learning_rate, value))

    def launch(self, rows: list[Any]) -> list[tuple[Any, Any]]:
        """Take one step per batch, in one launch if possible, and read the losses."""

        def take_steps() -> list[tuple[Any, Any]]:
            if self._is_resized and min(len(self.plan.rank_groups), len(ranks.get_session().ranks_by_host)) > 1:
                raise RowsMovedError
            losses = self._step.take_weighted_steps(self._x, self._y, rows)
            # The losses are read now, since the death of a rank would lose its unread losses.
            return [(float(loss), weight if weight is None else float(weight)) for loss, weight in losses]

        return self._death_policy.run_update(take_steps, len(rows))

    def free_after_launch(self, position_ranges: list[tuple[int, int]], steps: int) -> None:
        """Free the rows: `launch` has waited for the steps."""
        self.meter.read_losses()
        self.free(position_ranges)

    def exchange_if_due(self, steps: int) -> None:
        """Do nothing: steps exchange gradients."""

    def decide_stop(self) -> bool:
        """Return True after a signal, or a death that has ended the source or changed the number of rows per step."""
        return self._is_resized or self.source.has_ended or self.plan.can_stop and bool(get_requested_stop())


def take_joint_steps(
    plan: IntervalPlan, source: RowSource, model: CompiledModel, death_policy: DeathPolicy
) -> tuple[int, RankTotals]:
    """Train all ranks on the rows of an interval; return the position reached, and the totals."""
    loop, state = JointStepLoop(plan, source, model, death_policy), model.state
    try:
        with contextlib.suppress(RowsMovedError):  # the next interval repeats the step
            loop.run()
    finally:
        state.rate = loop.rate
    loop.write_lines(flush=True)
    state.position.steps = loop.meter.total_steps
    return loop.end, loop.meter.get_totals(loop.rate)
