"""The master's loop over batches under BSP on gradients: each step is a command of all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from synkhronos import ranks
from synkhronos.collectives.api import broadcast
from synkhronos.training.loops.stop_signals import get_stop_signal
from synkhronos.training.monitoring.meter import Meter, RankTotals
from synkhronos.training.trainer.compiled_model import CompiledModel
from synkhronos.training.trainer.death_recovery import DeathPolicy
from synkhronos.training.trainer.epoch_data import BatchLoopPlan, RowSource
from synkhronos.training.trainer.trainer_batch_loop import BatchGroup, TrainerBatchLoop, make_loss_reader


class RowsMovedError(Exception):
    """The rows of a step are on other hosts than its ranks, since a rank was left out."""


class JointBatchLoop(TrainerBatchLoop):
    """Loop of the master over batches of all ranks, whose steps are commands."""

    def __init__(self, plan: BatchLoopPlan, source: RowSource, model: CompiledModel, death_policy: DeathPolicy):
        state, graph = model.state, model.graph
        read = make_loss_reader(list, plan.has_loss_weight)
        meter = Meter(0, plan.recorders, read, model.launch_shapes, state.position.steps)
        super().__init__(plan, source, meter, plan.batch_size * ranks.get_session().size, True, state.rate)
        assert model.joint_step is not None
        self._step, self._learning_rate = model.joint_step, model.learning_rate
        self._death_policy = death_policy
        #: Whether a step has begun that is not recorded yet.
        self.is_step_unrecorded = False
        self._max_steps_per_launch = min(source.max_steps_per_launch, death_policy.max_steps_per_launch)
        data = source.data
        self._x = data[: len(graph.x)] if graph.x_is_list else data[0]
        self._y = data[len(graph.x) :] if graph.y_is_list else data[-1]

    def iterate_steps(self) -> Iterator[BatchGroup]:
        position, plan = self.plan.start, self.plan
        while position < plan.stop:
            rate, starts = plan.get_learning_rate(position), [position]
            while len(starts) < self._max_steps_per_launch and starts[-1] + 2 * self.rows_per_step <= plan.stop:
                if plan.get_learning_rate(starts[-1] + self.rows_per_step) != rate:
                    break
                starts.append(starts[-1] + self.rows_per_step)
            end = min(starts[-1] + self.rows_per_step, plan.stop)
            yield BatchGroup(position, starts, end)
            position = end

    @property
    def _is_resized(self) -> bool:
        return self.rows_per_step != self.plan.batch_size * ranks.get_session().size

    def set_learning_rate(self, rate: float) -> None:
        value = np.asarray(rate, self._learning_rate.type.dtype)
        self._death_policy.run_idempotent(lambda: broadcast(self._learning_rate, value))

    def take_steps(self, rows: list[Any]) -> list[tuple[Any, Any]]:
        """Take one step per batch, in one launch if possible, and read the losses."""

        def take_on_all_ranks() -> list[tuple[Any, Any]]:
            if self._is_resized and min(len(self.plan.rank_groups), len(ranks.get_session().ranks_by_host)) > 1:
                raise RowsMovedError
            losses = self._step.take_steps_with_weights(self._x, self._y, rows)
            # The losses are read now, since the death of a rank would lose its unread losses.
            return [(float(loss), weight if weight is None else float(weight)) for loss, weight in losses]

        self.is_step_unrecorded = True
        return self._death_policy.run_update(take_on_all_ranks, len(rows))

    def record(self, batches: BatchGroup) -> None:
        super().record(batches)
        self.is_step_unrecorded = False

    def free_after_steps(self, position_ranges: list[tuple[int, int]], steps: int) -> None:
        """Free the rows: `take_steps` has waited for the steps."""
        self.meter.read_losses()
        self.free(position_ranges)

    def finish_step(self, steps: int) -> None:
        """Do nothing: steps exchange gradients."""

    def decide_stop(self) -> bool:
        """Return True after a signal, or a death that has ended the source or changed the number of rows per step."""
        return self._is_resized or self.source.has_ended or self.plan.can_stop and bool(get_stop_signal())


def take_joint_steps(
    plan: BatchLoopPlan, source: RowSource, model: CompiledModel, death_policy: DeathPolicy
) -> tuple[int, RankTotals]:
    """Train all ranks on the rows of a plan.  Return the position reached, and the totals."""
    loop, state = JointBatchLoop(plan, source, model, death_policy), model.state
    try:
        with contextlib.suppress(RowsMovedError):  # the next loop repeats the step
            loop.run()
    finally:
        # After an error or an interrupt, the next call of `epochs` continues after the last recorded step.
        state.rate, position, totals = loop.rate, state.position, loop.meter.get_totals(loop.rate)
        position.epoch_position, position.steps, position.totals = loop.end, loop.meter.total_steps, [totals]
        position.may_have_trained_more = loop.is_step_unrecorded
        loop.write_lines(flush=True)
    return loop.end, totals
