"""The loop of one rank over the batches of a model class."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

from synkhronos.functions.rank_mean_context import RankMeanContext
from synkhronos.launcher.model_class.model_interface import get_steps_per_batch, use_model_precision
from synkhronos.launcher.model_class.sanity_check import SanityCheck
from synkhronos.launcher.rank_process.memory_checkpoint_writer import MemoryCheckpointWriter
from synkhronos.launcher.rank_process.model_state import ModelState
from synkhronos.programs import LocalRows
from synkhronos.training.loops.batch_loop import BatchLoop, PeriodicExchange
from synkhronos.training.loops.stop_signals import StopAgreement, StopPoll, get_stop_signal


class BatchStep(NamedTuple):
    """One step of a batch.  A model class may take several steps per batch."""

    batch_number: int
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
        self.context, self.exchange_rule = state.context, state.exchange_rule
        self.model, self.recorder = state.model, state.recorder
        seconds = self.recorder.meter.seconds
        self._periodic_exchange = PeriodicExchange(self.context, self.exchange_rule, state.exchange_state, seconds)
        self.is_last_step, self.is_stopped_by_signal = True, False
        self._stop_agreement, self._stop_poll = StopAgreement(self.context), StopPoll(self.context, stop_flag)
        #: Minimum over ranks of the number of batches in the epoch; memory checkpoints are written before this batch.
        #: The value is 0 while the minimum is unknown.
        self._min_n_batches = 0
        self._is_memory_checkpoint_new = False

    def run(self) -> None:
        """Train on the remaining batches of the epoch, or until a signal.

        With memory checkpoints all ranks must call this, also under asynchronous rules.
        """
        if self.memory_checkpoints:  # ranks may resume at different batches, but have to write at the same ones
            self.memory_checkpoints.schedule_after(max(self.context.all_gather(self.state.position["batch"])))
        self._min_n_batches, self._is_memory_checkpoint_new = 0, False
        super().run()

    def iterate_steps(self) -> Iterator[BatchStep]:
        batch, n_steps = self.state.position["batch"], get_steps_per_batch(self.model)
        # The number of batches is read after the first step, in which a class may divide its data.
        n_batches = self._agree_on_n_batches() if batch else None
        while n_batches is None or batch < n_batches:
            for step in range(n_steps):
                yield BatchStep(batch, step == n_steps - 1)
                if n_batches is None:
                    n_batches = self._agree_on_n_batches()
            batch += 1

    def step(self, batch_step: BatchStep) -> int:
        """Call ``train_iter`` once.  Return the number of steps: asynchronous rules count only the last of a batch."""
        self.is_last_step = batch_step.is_last
        recorder = self.recorder
        self.context.report_progress()
        start, seconds_before = time.perf_counter(), dict(recorder.meter.seconds)
        # If all ranks take each step together, the class's functions may have means over ranks.
        is_together = self.exchange_rule.is_bulk_synchronous
        rank_means = RankMeanContext(self.context.all_gather).activate() if is_together else nullcontext()
        with use_model_precision(), rank_means:
            self.model.train_iter(batch_step.batch_number, recorder)
        recorder.count_iteration(time.perf_counter() - start)
        self._record_compute_time(start, seconds_before)
        return int(self.is_last_step or not self.exchange_rule.asynchronous)

    def finish_step(self, steps: int) -> None:
        """Check the steps, exchange with other ranks if an exchange is due, and apply gradients of the exchange."""
        if not steps:
            return
        self._check_step()
        self._periodic_exchange.restart_countdown()
        if self._periodic_exchange.advance(steps):
            # If costs have weights, the exchange weights this rank's parameters by the weight of the last one.
            model = self.model
            has_weights = getattr(model, "weight", None) is not None or getattr(model, "weights_by_rows", False)
            self._periodic_exchange.state.count_items = self.recorder.get_last_weight if has_weights else None
            self._periodic_exchange.run()
        while self.state.applies_gradients and self._apply_gradients() is True:
            self._periodic_exchange.run()

    def _check_step(self) -> None:
        """Check that steps change parameters, and that synchronous ranks take different ones."""
        if self.sanity_check.record_step(self.recorder.get_last_cost) and not self.exchange_rule.asynchronous:
            self.sanity_check.compare_ranks(self.context)
        self.sanity_check.check_params_change(self.recorder.learning_rate, has_epoch_ended=False)

    def _apply_gradients(self) -> Any:
        with use_model_precision():
            return self.model.apply_gradients()

    def record(self, batch_step: BatchStep) -> None:
        """After a batch, write the line that is due, and the memory checkpoint, which all ranks write together."""
        self._is_memory_checkpoint_new = False
        if batch_step.is_last:
            n_batches = self.state.position["batch"] = batch_step.batch_number + 1
            self.recorder.print_train_info(n_batches * self.context.size)
            if self.memory_checkpoints and self.memory_checkpoints.due_batch <= n_batches < self._min_n_batches:
                self.memory_checkpoints.write(None)
                self._is_memory_checkpoint_new = True

    def decide_stop(self) -> bool:
        """Set `is_stopped_by_signal` and return it: True if a signal ends the run after this batch.

        Under synchronous rules, and after a memory checkpoint, all ranks must call this.
        """
        self.is_stopped_by_signal = self.state.settings.saves_on_signal and self._agree_on_stop()
        return self.is_stopped_by_signal

    def _agree_on_stop(self) -> bool:
        """Return True if this rank stops after this batch.

        Synchronous ranks stop together.  Asynchronous ranks stop together at a memory checkpoint.  After the last
        memory checkpoint of the epoch, each asynchronous rank stops by itself.
        """
        if not self.exchange_rule.asynchronous:
            return self.is_last_step and self._stop_agreement.agree_on_stop()
        if self.memory_checkpoints:
            if self._is_memory_checkpoint_new and any(self.context.all_gather(bool(get_stop_signal()))):
                return True
            if not self._min_n_batches or self.memory_checkpoints.due_batch < self._min_n_batches:
                return False
        return self.is_last_step and self._stop_poll.poll()

    def is_stop_requested(self) -> bool:
        """Return True if this rank reads that a signal has requested a stop.  Other ranks may read it later."""
        return self.state.settings.saves_on_signal and self._stop_poll.poll()

    def _agree_on_n_batches(self) -> int:
        """Return the number of this rank's batches in the epoch: under synchronous rules, the minimum over ranks.

        Under synchronous rules, and with memory checkpoints, all ranks must call this.  Rank 0 prints the numbers in
        the first epoch if they differ.
        """
        n_batches = int(self.model.data.n_batch_train)
        if self.exchange_rule.asynchronous and not self.memory_checkpoints:
            return n_batches
        by_rank = self.context.all_gather(n_batches)
        self._min_n_batches = min(by_rank)
        if self.exchange_rule.asynchronous:
            return n_batches
        if min(by_rank) != max(by_rank) and self.context.number == 0 and self.recorder.epoch == 0:
            sys.stdout.write(
                f"ranks have {by_rank} batches: each trains on {min(by_rank)}, since all exchange together\n"
            )
        return min(by_rank)

    def _record_compute_time(self, start: float, seconds_before: dict[str, float]) -> None:
        """Add the time since ``start`` to ``compute``, without the time that the class recorded otherwise."""
        seconds = self.recorder.meter.seconds
        recorded = sum(value - seconds_before.get(name, 0.0) for name, value in seconds.items() if name != "compute")
        seconds["compute"] = seconds_before["compute"] + max(0.0, time.perf_counter() - start - recorded)
