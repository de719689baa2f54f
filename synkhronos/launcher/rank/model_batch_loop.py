"""The loop of one rank over the batches of a model class."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

from synkhronos.function.rank_mean import RankMeanContext
from synkhronos.launcher.model_class.model_interface import get_steps_per_batch, use_model_precision
from synkhronos.launcher.model_class.sanity_check import SanityCheck
from synkhronos.launcher.rank.memory_checkpoint_writer import MemoryCheckpointWriter
from synkhronos.launcher.rank.model_state import ModelState
from synkhronos.programs import LocalRows
from synkhronos.training.loops.batch_loop import BatchLoop, PeriodicExchange
from synkhronos.training.loops.stop_signals import StopAgreement, StopPoll, get_requested_stop


class BatchStep(NamedTuple):
    """Step of a batch; a class may take several."""

    batch: int
    is_last: bool


class ModelBatchLoop(BatchLoop):
    """Loop of one rank over the batches of a model class, which chooses the rows and takes the steps."""

    def __init__(
        self,
        state: ModelState,
        sanity_check: SanityCheck,
        memory_checkpoints: MemoryCheckpointWriter | None,
        stop_flag: LocalRows,
    ):
        self.state, self.sanity_check, self.memory_checkpoints = state, sanity_check, memory_checkpoints
        self.context, self.rule = state.context, state.rule
        self.model, self.recorder = state.model, state.recorder
        seconds = self.recorder.meter.seconds
        self._periodic_exchange = PeriodicExchange(self.context, self.rule, state.rule_state, seconds)
        self.is_last_step, self.is_stopped_by_signal = True, False
        self._agreement, self._poll = StopAgreement(self.context), StopPoll(self.context, stop_flag)
        #: Minimum over ranks of the number of batches in the epoch; memory checkpoints are written before this batch.
        #: 0 if it is unknown.
        self._min_n_batches = 0
        self._stops_at_memory_checkpoint = False

    def run(self) -> None:
        """Train on the remaining batches of the epoch, or until a signal."""
        if self.memory_checkpoints:  # asynchronous ranks may resume at different batches, but write at the same ones
            self.memory_checkpoints.schedule_after(max(self.context.all_gather(self.state.position["batch"])))
        self._min_n_batches, self._stops_at_memory_checkpoint = 0, False
        super().run()

    def iterate_batches(self) -> Iterator[BatchStep]:
        """Yield the steps of all batches.  A collective at the first step of an epoch, under synchronous rules."""
        batch, n_steps = self.state.position["batch"], get_steps_per_batch(self.model)
        # The number of batches is read after the first step, in which a class may divide its data.
        n_batches = self.agree_on_n_batches(int(self.model.data.n_batch_train)) if batch else None
        while n_batches is None or batch < n_batches:
            for step in range(n_steps):
                yield BatchStep(batch, step == n_steps - 1)
                if n_batches is None:
                    n_batches = self.agree_on_n_batches(int(self.model.data.n_batch_train))
            batch += 1

    def step(self, batch_step: BatchStep) -> int:
        """Call ``train_iter`` once; return the number of steps to count for the exchange.

        Asynchronous rules count only the last step of a batch.
        """
        self.is_last_step = batch_step.is_last
        recorder = self.recorder
        self.context.progress()
        began, before = time.perf_counter(), dict(recorder.meter.seconds)
        # Under BSP all ranks take equal steps, so the class's functions may have means over ranks.
        is_bsp = self.state.settings.rule == "BSP"
        rank_means = RankMeanContext(self.context.all_gather).activate() if is_bsp else nullcontext()
        with use_model_precision(), rank_means:
            self.model.train_iter(batch_step.batch, recorder)
        recorder.count_iteration(time.perf_counter() - began)
        self.record_compute_time(began, before)
        return int(self.is_last_step or not self.rule.asynchronous)

    def exchange_if_due(self, steps: int) -> None:
        """Exchange with other ranks if an exchange is due; before that, check that steps change parameters.

        Synchronous ranks also compare their first steps; asynchronous ranks do so after the epoch.
        """
        if not steps:
            return
        self.sanity_check.record_step()
        if self.sanity_check.is_comparison_due and not self.rule.asynchronous:
            self.sanity_check.compare_ranks(self.context)
        self.sanity_check.check_params_change(self.recorder.learning_rate, epoch_ended=False)
        self._periodic_exchange.update_steps_left()
        self._periodic_exchange.count_steps(steps)
        if self._periodic_exchange.is_due:
            # If the model has a ``weight``, the exchange weights this rank's parameters by the weight of the last cost.
            has_weight = getattr(self.model, "weight", None) is not None
            self._periodic_exchange.state.count_items = self.recorder.get_last_weight if has_weight else None
            self._periodic_exchange.run()
        while self.state.applies_gradients and self._apply_gradients() is True:
            self._periodic_exchange.run()

    def _apply_gradients(self) -> Any:
        with use_model_precision():
            return self.model.apply_gradients()

    def record(self, batch_step: BatchStep) -> None:
        """After the last step of a batch, count it, and write the line and the memory checkpoint that are due."""
        if batch_step.is_last:
            n_batches = self.state.position["batch"] = batch_step.batch + 1
            self.recorder.print_train_info(n_batches * self.context.size)
            if self.memory_checkpoints and self.memory_checkpoints.due_batch <= n_batches < self._min_n_batches:
                self.memory_checkpoints.write(None)
                if self.rule.asynchronous and self.state.settings.saves_on_signal:
                    self._stops_at_memory_checkpoint = any(self.context.all_gather(bool(get_requested_stop())))

    def decide_stop(self) -> bool:
        """Set `is_stopped_by_signal` and return it: True if a signal ends the training after this batch.

        A collective under synchronous rules.
        """
        if self.rule.asynchronous and self.memory_checkpoints:
            n_batches = self._min_n_batches
            is_checkpoint_ahead = not n_batches or self.memory_checkpoints.due_batch < n_batches
            if self._stops_at_memory_checkpoint or is_checkpoint_ahead:
                # Ranks have to end together at a memory checkpoint, which is a collective.
                self.is_stopped_by_signal = self._stops_at_memory_checkpoint
                return self.is_stopped_by_signal
        is_requested = self.is_last_step and self.is_stop_requested(is_collective=not self.rule.asynchronous)
        self.is_stopped_by_signal = is_requested
        return self.is_stopped_by_signal

    def is_stop_requested(self, is_collective: bool) -> bool:
        """Return True if a signal has requested a stop.

        With ``is_collective``, all ranks have to call this after equally many steps, and get the same result.  Without,
        this rank reads the flag, and other ranks may read it later.
        """
        if not self.state.settings.saves_on_signal:
            return False
        return self._agreement.is_stop_due() if is_collective else self._poll.is_stop_due()

    def agree_on_n_batches(self, n_batches: int) -> int:
        """Return this rank's number of batches in the epoch; under synchronous rules, the minimum over ranks."""
        if self.rule.asynchronous and not self.memory_checkpoints:
            return n_batches
        by_rank = self.context.all_gather(n_batches)
        self._min_n_batches = min(by_rank)
        if self.rule.asynchronous:
            return n_batches
        if min(by_rank) != max(by_rank) and self.context.number == 0 and self.recorder.epoch == 0:
            sys.stdout.write(
                f"ranks have {by_rank} batches: each trains on {min(by_rank)}, since all exchange together\n"
            )
        return min(by_rank)

    def record_compute_time(self, began: float, before: dict[str, float]) -> None:
        """Add the time since ``began`` to ``compute``, less that which the class has recorded for other activities.

        ``before`` is the time by activity at the start of the iteration.
        """
        seconds = self.recorder.meter.seconds
        recorded = sum(value - before.get(name, 0.0) for name, value in seconds.items() if name != "compute")
        seconds["compute"] = before["compute"] + max(0.0, time.perf_counter() - began - recorded)
