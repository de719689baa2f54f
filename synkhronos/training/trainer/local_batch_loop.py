"""A rank's loop over its own batches under an exchange rule, by local steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from synkhronos.exchange_rules import ExchangeState
from synkhronos.exchange_rules.state import BATCHES_KEY
from synkhronos.loading.loader import LoaderRows
from synkhronos.programs import LocalFunction, LocalRows, RankContext
from synkhronos.programs.rank_context import get_batch_counts_lock
from synkhronos.training.checkpoints.rank_state import RankStateSpec, prepare_steps, set_params_to_consensus
from synkhronos.training.loops.batch_loop import PeriodicExchange
from synkhronos.training.loops.stop_signals import StopAgreement, get_stop_signal
from synkhronos.training.monitoring.meter import Meter, RankTotals
from synkhronos.training.train_function.launch_groups import MAX_LAUNCH_NBYTES
from synkhronos.training.trainer.epoch_data import BatchLoopPlan, RowSource
from synkhronos.training.trainer.trainer_batch_loop import BatchGroup, TrainerBatchLoop, make_loss_reader
from synkhronos.variable_types import SharedVariable


class LocalBatchLoop(TrainerBatchLoop):
    """Loop of one rank over its own batches, whose steps are calls of a compiled function.

    ``step`` returns the loss, followed by the weight if there is one.  Asynchronous rules use ``batch_counts``, an
    array with an element for each rank, and one more.  The element of a group's first rank is the number of batches
    that the group has taken.  The last element is the number of rounds after which a signal stops training, or 0.  A
    round is one batch of each rank.
    """

    def __init__(
        self,
        context: RankContext,
        plan: BatchLoopPlan,
        step: LocalFunction,
        learning_rate: SharedVariable,
        spec: RankStateSpec,
        source: RowSource,
        batch_counts: LocalRows,
    ):
        storage = context.get_persistent_dict(spec.name)
        state: ExchangeState = storage["state"]
        launch_shapes = storage.setdefault("launch_shapes", set())
        reader = make_loss_reader(step.wait_for_outputs, plan.has_loss_weight)
        meter = Meter(context.number, plan.recorders, reader, launch_shapes, state.step, lambda: context.wait_seconds)
        super().__init__(plan, source, meter, plan.batch_size, context.is_master)
        self.context, self.exchange_rule, self.state = context, spec.exchange_rule, state
        self.on_poll = context.report_progress
        self._step, self._learning_rate, self._batch_counts = step, learning_rate, batch_counts
        self.periodic_exchange = PeriodicExchange(context, spec.exchange_rule, state, meter.seconds)
        #: Weights of the steps since the last exchange; without a loss's weight, numbers of rows.
        self._unexchanged_weights: list[Any] = []
        #: Whether ranks may have different numbers of items in any round, not only in the last one of an epoch.
        self._has_uneven_rounds = plan.has_loss_weight or isinstance(source, LoaderRows) and source.skips_unreadable
        state.count_items = self._sum_weights if self._has_uneven_rounds else None
        self._stop_agreement = StopAgreement(context)
        row_nbytes = sum(math.prod(array.shape[1:]) * array.dtype.itemsize for array in source.data)
        max_steps_in_memory = MAX_LAUNCH_NBYTES // max(1, row_nbytes * plan.batch_size)
        self.max_steps_per_launch = max(1, min(source.max_steps_per_launch, step.max_repeats, max_steps_in_memory))
        if isinstance(source, LoaderRows):
            source.open(context.number)

    def iterate_steps(self) -> Iterator[BatchGroup]:
        """Yield the batches of each launch of this rank; an exchange is due only after the last batch of a launch."""
        return self._iterate_taken_batches() if self.exchange_rule.asynchronous else self._iterate_rounds()

    def _iterate_rounds(self) -> Iterator[BatchGroup]:
        """Yield batches in rounds of one batch per rank.  In the last round ranks may get fewer rows, or none."""
        plan, n_ranks, number = self.plan, self.context.size, self.context.number
        position = plan.start
        while position < plan.stop:
            n_full_rounds = (plan.stop - position) // (plan.batch_size * n_ranks)
            n_rounds = max(1, min(self.periodic_exchange.restart_countdown(), self.max_steps_per_launch, n_full_rounds))
            end = min(plan.stop, position + n_rounds * n_ranks * plan.batch_size)
            starts = [position + (i * n_ranks + number) * plan.batch_size for i in range(n_rounds)]
            if not self._has_uneven_rounds:
                self.state.count_items = self._sum_weights if n_rounds > n_full_rounds else None
            yield BatchGroup(position, starts, end)
            position = end

    def _iterate_taken_batches(self) -> Iterator[BatchGroup]:
        """Yield batches that this rank takes from a counter that all ranks share."""
        plan, n_ranks, counts = self.plan, self.context.size, self._batch_counts.array
        group = next(group for group in plan.rank_groups if self.context.number in group)
        while True:
            n_batches = min(self.periodic_exchange.restart_countdown(), self.max_steps_per_launch)
            with self.meter.time_activity("load"), get_batch_counts_lock(self.context) as lock:
                lock.pull(self._batch_counts)
                n_taken = int(counts[group.start])
                if plan.can_stop and get_stop_signal() and not counts[-1]:
                    # The latest round from which some group has taken a batch.
                    counts[-1] = max(1, *(-(-counts[other.start] // len(other)) for other in plan.rank_groups))
                last_round = int(counts[-1])
                if last_round:  # all groups stop after the same round, so that the rows trained on are one range
                    n_batches = min(n_batches, last_round * len(group) - n_taken)
                numbers = number_group_batches(range(n_taken, n_taken + n_batches), group, n_ranks)
                starts = [plan.start + number * plan.batch_size for number in numbers]
                starts = [start for start in starts if start + plan.batch_size <= plan.stop] or starts[:1]
                counts[group.start] += len(starts)
                lock.push(self._batch_counts)
            if not starts or starts[0] >= plan.stop:
                stop = plan.start + last_round * n_ranks * plan.batch_size if last_round else plan.stop
                self.end = min(plan.stop, stop)
                return
            yield BatchGroup(starts[0], starts, min(plan.stop, starts[-1] + plan.batch_size))

    def decide_stop(self) -> bool:
        """Return True if all ranks agree to stop.  Asynchronous ranks stop in `_iterate_taken_batches` instead."""
        return self.plan.can_stop and not self.exchange_rule.asynchronous and self._stop_agreement.agree_on_stop()

    def set_learning_rate(self, rate: float) -> None:
        self._learning_rate.set_value(np.asarray(rate, self._learning_rate.type.dtype))

    def _sum_weights(self) -> float:
        """Return the sum of the weights, or of the rows, of this rank's steps since the last exchange."""
        weights = self._unexchanged_weights
        if weights and self.plan.has_loss_weight:
            weights = self._step.wait_for_outputs(weights)
        return float(np.sum(weights, dtype=np.float64))

    def take_steps(self, rows: list[Any]) -> list[tuple[Any, Any]]:
        steps = self._launch_steps(rows)
        weights = [len(indexes) if weight is None else weight for (_, weight), indexes in zip(steps, rows, strict=True)]
        self._unexchanged_weights += weights
        return steps

    def _launch_steps(self, rows: list[Any]) -> list[tuple[Any, Any]]:
        data, state = self.source.data, self.state
        if state.n_average_items:
            state.own[BATCHES_KEY] = state.own.get(BATCHES_KEY, 0.0) + sum(map(len, rows)) / self.plan.batch_size
        if len(rows) > 1 and len({len(array) for array in rows}) == 1:
            all_rows = np.concatenate(rows)
            outputs = self._step.launch_many(len(rows), *(array[all_rows] for array in data))
            if outputs is not None:
                weights = outputs[len(rows) :] or [None] * len(rows)
                return list(zip(outputs[: len(rows)], weights, strict=True))
        steps = [self._step.launch(*(array[indexes] for array in data)) for indexes in rows]
        return [(loss, weight[0] if weight else None) for loss, *weight in steps]

    def free_after_steps(self, position_ranges: list[tuple[int, int]], steps: int) -> None:
        """Wait for the previous steps, and free their rows."""
        if isinstance(self.source, LoaderRows):
            self.meter.read_losses(n_pending=steps)
            self.free(self.position_ranges_in_use)
            self.position_ranges_in_use = position_ranges

    def finish_step(self, steps: int) -> None:
        if not self.periodic_exchange.advance(steps):
            return
        # The exchange may wait for launched steps, so their rows are freed first: other ranks may need the memory.
        if (
            isinstance(self.source, LoaderRows)
            or self.exchange_rule.asynchronous
            and self.state.steps_since_exchange > 1
        ):
            self.wait_for_launched_steps()
        self.state.learning_rate = self.rate
        self.periodic_exchange.run()
        self._unexchanged_weights = []
        if self.state.n_average_items:
            self.state.own[BATCHES_KEY] = 0.0


def number_group_batches(batches: range, group: range, n_ranks: int) -> list[int]:
    """Convert numbers of batches that a group of ranks takes to their numbers among the batches of all ranks.

    A round is ``n_ranks`` successive batches, one for each rank.  A group takes those of its ranks.

    Examples
    --------
    >>> number_group_batches(range(5), group=range(2, 4), n_ranks=4)
    [2, 3, 6, 7, 10]
    """
    return [i // len(group) * n_ranks + group[i % len(group)] for i in batches]


def take_local_steps(
    context: RankContext,
    plan: BatchLoopPlan,
    step: LocalFunction,
    learning_rate: SharedVariable,
    spec: RankStateSpec,
    source: RowSource,
    batch_counts: LocalRows,
) -> tuple[int, RankTotals]:
    """Train this rank on its rows of a plan, then set the parameters to the exchange rule's consensus.

    Return the position reached, which is before ``plan.stop`` if a signal has stopped the ranks, and the rank's totals.
    """
    prepare_steps(context, spec)
    loop = LocalBatchLoop(context, plan, step, learning_rate, spec, source, batch_counts)
    loop.run()
    loop.wait_for_launched_steps()
    with loop.meter.time_activity("exchange"):
        set_params_to_consensus(context, spec.name, spec.exchange_rule)
    loop.write_lines(flush=True)
    return loop.end, loop.meter.get_totals(loop.rate)
