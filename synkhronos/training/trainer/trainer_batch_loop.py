"""Base class of a trainer's loops over batches; each iteration takes the steps of one or several batches."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from synkhronos.loading.loader import LoaderRows
from synkhronos.training.loops.batch_loop import BatchLoop
from synkhronos.training.monitoring.meter import LossReader, Meter
from synkhronos.training.trainer.epoch_data import BatchLoopPlan, RowSource


class BatchGroup(NamedTuple):
    """Successive batches whose steps are taken together, with one step per batch.

    The schedule computes the learning rate for ``rate_position`` in the epoch.  ``starts`` are the positions of the
    batches' first rows.  ``end`` is the position after the rows of these batches, on all ranks.
    """

    rate_position: int
    starts: list[int]
    end: int


class TrainerBatchLoop(BatchLoop):
    """Base class of loops over the batches of a `RowSource`.  ``rate`` is the present learning rate, NaN if unknown."""

    on_poll: Callable[[], None] | None = None  # called repeatedly while this rank waits for a loader

    def __init__(
        self,
        plan: BatchLoopPlan,
        source: RowSource,
        meter: Meter,
        rows_per_step: int,
        is_master: bool,
        rate: float = math.nan,
    ):
        self.plan, self.source, self.meter, self.rows_per_step, self.rate = plan, source, meter, rows_per_step, rate
        if plan.totals_since_report:
            meter.begin_interval(plan.totals_since_report[meter.rank])
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
        try:
            super().run()
        finally:
            if self._bar is not None:
                self._bar.close()

    def record(self, batches: BatchGroup) -> None:
        self.end = batches.end
        self.write_lines()
        if self._bar is not None:
            self._bar.update(self.end - self._bar.n)

    def write_lines(self, flush: bool = False) -> None:
        """Write the recorders' lines that are due.  With ``flush``, also write lines of fewer steps than ``every``."""
        plan = self.plan
        self.meter.write_lines(plan.epoch, plan.n_rows_of_earlier_epochs + self.end, self.rate, flush)

    @abstractmethod
    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate's variable."""

    @abstractmethod
    def take_steps(self, rows: list[Any]) -> list[tuple[Any, Any]]:
        """Take a step per batch.  Return losses and weights, as `TrainFunction.take_steps_with_weights` does."""

    @abstractmethod
    def free_after_steps(self, position_ranges: list[tuple[int, int]], steps: int) -> None:
        """Free rows that finished steps have read, after ``steps`` further steps on ``position_ranges``."""

    def step(self, batches: BatchGroup) -> int:
        """Take a step per batch, and pass the losses to the meter."""
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
        with self.meter.time_activity("compute") as timer:
            losses = self.take_steps(rows)
            for (loss, weight), indexes in zip(losses, rows, strict=True):
                self.meter.add_loss(loss, len(indexes) if weight is None else weight)
                self.meter.count_step(len(indexes))
            self.free_after_steps(position_ranges, len(losses))
        self.meter.record_first_launch(len(rows), len(rows[0]), timer.seconds_without_wait)
        return len(batches.starts)

    def wait_for_row_indexes(self, position_ranges: list[tuple[int, int]]) -> list[Any]:
        """Wait until the rows at some ranges of positions are loaded, and return their row indexes."""
        source = self.source
        if isinstance(source, LoaderRows) and not all(source.is_loaded(stop) for _, stop in position_ranges):
            # The loader processes may need the slots of this rank's rows to read rows for other ranks.
            self.wait_for_launched_steps()
        with self.meter.time_activity("load"):
            return [source.wait_for_row_indexes(*position_range, self.on_poll) for position_range in position_ranges]

    def wait_for_launched_steps(self) -> None:
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
    """Return the reader of a `Meter` for the losses of `TrainFunction.take_steps_with_weights`.

    ``fetch`` copies arrays to host memory.  Without ``has_loss_weight`` the weights are numbers of rows, by which the
    reader multiplies the losses.
    """
    if has_loss_weight:
        return lambda losses, weights: zip(map(float, fetch(losses)), map(float, fetch(weights)), strict=True)
    return lambda losses, rows: [(float(loss) * n, n) for loss, n in zip(fetch(losses), rows, strict=True)]
