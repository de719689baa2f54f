"""Base class of a trainer's loops over batches: each iteration launches one step per batch."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from synkhronos.loading.loader import Feed
from synkhronos.training.loops.batch_loop import BatchLoop
from synkhronos.training.monitoring.meter import LossReader, Meter
from synkhronos.training.trainer.epoch_data import IntervalPlan, RowSource


class LaunchBatches(NamedTuple):
    """Successive batches of one launch, with one step per batch.

    The schedule computes the learning rate for ``rate_position`` in the epoch.  ``starts`` are the positions of the
    batches' first rows, ``end`` that after the rows of these batches, on all ranks.
    """

    rate_position: int
    starts: list[int]
    end: int


class LaunchLoop(BatchLoop):
    """Base class of loops over the rows of a `RowSource`.

    ``is_master`` says whether this process may show the progress bar.  ``rate`` is the present value of the learning
    rate's variable; NaN if it is unknown.
    """

    on_poll: Any = None  # called repeatedly while this rank waits for a loader

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
                total=plan.n_rows, initial=plan.start, unit=" rows", desc=f"epoch {plan.epoch}", leave=False
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
        self.meter.write_lines(plan.epoch, plan.rows_before + self.end, self.rate, flush)

    @abstractmethod
    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate's variable."""

    @abstractmethod
    def launch(self, rows: list[Any]) -> list[tuple[Any, Any]]:
        """Launch one step per batch, with row indexes ``rows``; return losses as `TrainFunction.weighted_steps` does.

        Reading a loss waits for its step.
        """

    @abstractmethod
    def free_after_launch(self, position_ranges: list[tuple[int, int]], steps: int) -> None:
        """Free rows that finished steps have read, after a launch of ``steps`` steps on ``position_ranges``."""

    def step(self, batches: LaunchBatches) -> int:
        """Launch a step per batch, and pass the losses to the meter."""
        last = self.plan.stop
        position_ranges = [(start, min(start + self.rows_per_step, last)) for start in batches.starts if start < last]
        # Rows first: a death in `set_learning_rate` may end the loader processes, so that no further rows would come.
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
        self.meter.record_launch(len(rows), len(rows[0]), launch.seconds_without_wait)
        return len(batches.starts)

    def wait_for_row_indexes(self, position_ranges: list[tuple[int, int]]) -> list[Any]:
        """Wait until the rows at some ranges of positions are loaded, and return their row indexes."""
        source = self.source
        if isinstance(source, Feed) and not all(source.is_ready(*position_range) for position_range in position_ranges):
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


def make_loss_reader(fetch: Callable[[Sequence[Any]], Sequence[Any]], has_weight: bool) -> LossReader:
    """Return the reader of a `Meter` for the losses of `TrainFunction.weighted_steps`.

    ``fetch`` copies arrays to host memory.  Without ``has_weight`` the weights are numbers of rows, by which losses are
    not multiplied yet.
    """
    if has_weight:
        return lambda losses, weights: zip(map(float, fetch(losses)), map(float, fetch(weights)), strict=True)
    return lambda losses, rows: [(float(loss) * n, n) for loss, n in zip(fetch(losses), rows, strict=True)]
