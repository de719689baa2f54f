"""The loop of a trainer from report to report, in the master.

Epochs are divided into intervals between reports.  In an interval, either the master takes joint steps, or every rank
runs a loop of its own::

    TrainerReportLoop.train() --> BSP on gradients: JointBatchLoop in the master
                              --> other rules:      LocalBatchLoop on every rank
"""

from __future__ import annotations

import itertools
import math
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from synkhronos import ranks
from synkhronos.checks import describe
from synkhronos.data_objects import Data
from synkhronos.data_objects import data as make_data
from synkhronos.data_objects.parts import iterate_batches_of_own_rows
from synkhronos.loading import Loader, LoadError
from synkhronos.loading.loader import LoaderRows
from synkhronos.programs import run
from synkhronos.ranks import WorkerError
from synkhronos.replication.replicator import Replicator
from synkhronos.training import schedules
from synkhronos.training.checkpoints import rank_state
from synkhronos.training.checkpoints.checkpoint_folder import CheckpointError, CheckpointFolder, is_in_folder
from synkhronos.training.loops.report_loop import ReportLoop
from synkhronos.training.loops.stop_signals import get_stop_signal
from synkhronos.training.monitoring.best_cost import BestCost, to_cost
from synkhronos.training.monitoring.meter import RankTotals, resize_totals
from synkhronos.training.monitoring.nonfinite import describe_nonfinite
from synkhronos.training.monitoring.recorder import Recorder, TensorBoard
from synkhronos.training.monitoring.report import Report, make_report
from synkhronos.training.monitoring.validation_metrics import MetricTotals
from synkhronos.training.trainer.compiled_model import CompiledModel
from synkhronos.training.trainer.death_recovery import DeathPolicy
from synkhronos.training.trainer.epoch_data import (
    BatchLoopPlan,
    RowSource,
    TrainerData,
    check_enough_rows,
    get_ranks_by_host_if_partitioned,
)
from synkhronos.training.trainer.joint_batch_loop import take_joint_steps
from synkhronos.training.trainer.local_batch_loop import take_local_steps
from synkhronos.training.trainer.trainer_state import TrainerPosition


@dataclass(eq=False)
class TrainerReportLoop(ReportLoop):
    """Loop over the reports of one call of `Trainer.epochs`, in the master."""

    model: CompiledModel
    data: TrainerData
    n_epochs: int
    #: Number of steps per rank in an interval; None: an interval is an epoch.
    steps_per_report: int | None
    #: Validation data and their number of rows.
    valid: tuple[list[Data], int] | Loader | None
    patience: int | None
    #: Objects with a method ``write(record)``.
    recorders: list[Any]
    checkpoints: CheckpointFolder | None
    #: Whether to show a progress bar.
    shows_progress_bar: bool
    #: Policy for deaths of workers, by ``on_death``.
    death_policy: DeathPolicy

    def __post_init__(self) -> None:
        self.first_metric = "loss" if self.valid is None else next(iter(self.model.metrics))
        keep_best = None if self.checkpoints is None else self.checkpoints.keep_best
        self.metric = keep_best or (self.first_metric, "min")
        self.saves_best = keep_best is not None
        #: Metrics of the last validation whose weights are all 0, which are NaN.
        self.metrics_of_weight_0: set[str] = set()
        self.checkpoint_every = 0 if self.checkpoints is None else self.checkpoints.every
        #: Number of rows trained on at the last report of this call.
        self._n_reported_rows = 0

    @property
    def position(self) -> TrainerPosition:
        """Position of the trainer.  `Trainer.restore_best` may replace it between two reports."""
        return self.model.state.position

    @property
    def best_cost(self) -> BestCost:
        return self.position.best_cost

    def begin(self, resume: Any) -> None:
        """Allocate shared memory, and restore the checkpoint that ``resume`` names, if any."""
        model, checkpoints, state = self.model, self.checkpoints, self.model.state
        self.session = ranks.get_session()
        state.reset_if_session_is_new(self.session, model)
        if not state.spec.is_joint:  # else each step warns
            with self.session.call_lock:
                self.session.wait_until_idle()
                Replicator.get_or_create(self.session).warn_of_master_values(
                    "Trainer.epochs()",
                    {*state.variables.exchanged_variables, *state.variables.optimizer_state},
                    (),
                    stacklevel=4,
                )
        self.batch_counts = make_data(shape=(self.session.size + 1,), dtype="int64")
        self.data.allocate_row_order()
        if resume == "latest":
            assert checkpoints is not None
            resume = next(reversed(checkpoints.list_paths()), None)
        if resume is not None:
            if checkpoints is not None and checkpoints.list_paths() and not is_in_folder(resume, checkpoints.folder):
                raise CheckpointError(
                    f"checkpoints: {checkpoints.folder} has checkpoints of another training run than {resume}: resume "
                    "from one of these, or name another folder"
                )
            n_rows_seen = state.restore(resume, self.data, model.schedule)
            self._remove_later_records(n_rows_seen)
        elif self.position.epoch_position and self.position.order_key != self.data.order_key:
            expected = self.position.order_key
            raise ValueError(
                f"x_data, seed: expected {expected.n_epoch_rows:,} rows and seed {expected.seed}, since the last call "
                f"ended within an epoch of these, got {self.data.n_epoch_rows:,} and {self.data.seed}, or "
                "data_parts in another order"
            )
        elif checkpoints is not None:
            checkpoints.check_no_newer(self.position.n_rows_seen)
        if self.position.may_have_trained_more:
            warnings.warn(
                f"Trainer.epochs() continues after {self.position.n_rows_seen:,} rows: an error or an interrupt ended "
                "the last call, whose steps on later rows may remain in the parameters; to undo them, resume from a "
                "checkpoint: resume=...",
                RuntimeWarning,
                stacklevel=3,
            )
            self.position.may_have_trained_more = False
        label = "loss" if self.valid is None else f"validation {self.first_metric}"
        if self.metric != (self.first_metric, "min"):
            label += f", {' '.join(self.metric)}"
        if self.best_cost.set_label(label):
            schedules.reset_best(model.schedule)

    def _remove_later_records(self, n_rows_seen: int) -> None:
        """Remove the records after ``n_rows_seen`` rows, since those steps are repeated."""
        for recorder in self.recorders:
            if isinstance(recorder, Recorder | TensorBoard):
                recorder.truncate(n_rows_seen)

    def has_trained_all_epochs(self) -> bool:
        return self.position.epoch >= self.n_epochs

    def is_stop_requested(self) -> bool:
        """Whether a signal has requested a stop."""
        return self.checkpoints is not None and bool(get_stop_signal())

    # -- an interval -----------------------------------------------------------------------------------------

    def train(self) -> bool:
        self._warn_of_set_learning_rate()
        self.death_policy.refresh_copy()
        position = self.position
        if position.n_rows_seen < self._n_reported_rows:  # after `Trainer.restore_best`
            self._remove_later_records(position.n_rows_seen)
        if not position.epoch_position:
            self._begin_epoch()
        self.interval_stop = self._find_interval_stop(position.interval_start)
        if self.interval_stop < position.epoch_position:  # resumed from a checkpoint of more ranks
            self.interval_stop = self._find_interval_stop(position.epoch_position)
        # An interval has several batch loops if the state is copied within it, or a rank is left out.
        while position.epoch_position < self.interval_stop and not self.is_stop_requested():
            if self.model.joint_step is not None:
                result = self._run_batch_loop()
            else:
                result = self._train_until_copy()
            position.epoch_position, position.totals = result
        return not self.is_stop_requested()

    def _warn_of_set_learning_rate(self) -> None:
        """Warn if the user has set the learning rate's variable, which the schedule sets again."""
        model, state = self.model, self.model.state
        if math.isnan(state.rate) or model.learning_rate in model.graph.rule_updates.param_updates:
            return
        value = np.asarray(model.learning_rate.get_value())
        if value != np.asarray(state.rate, value.dtype):
            state.rate = math.nan
            epoch = self.position.epoch + self.position.epoch_position / self.data.n_epoch_rows
            rate = schedules.compute_rate(model.schedule, epoch)
            if value != np.asarray(rate, value.dtype):
                warnings.warn(
                    f"Trainer.learning_rate has been set to {value:g}, but the schedule sets it to {rate:g}: set "
                    "Trainer.schedule to change the rate",
                    RuntimeWarning,
                    stacklevel=5,
                )

    def _begin_epoch(self) -> None:
        """Start an epoch of all rows that the data have now."""
        data = self.data
        n_data_rows = data.count_rows()
        was_rank_left_out = get_ranks_by_host_if_partitioned(data.arrays) != data.ranks_by_host
        if n_data_rows != data.n_data_rows or was_rank_left_out:
            check_enough_rows(n_data_rows, data.batch_size)
            self.data = TrainerData(data.arrays, n_data_rows, data.batch_size, data.seed, data.loader)
            self.data.allocate_row_order()
        self.position.order_key = self.data.order_key

    def _train_until_copy(self) -> tuple[int, list[RankTotals]]:
        """Let ranks take their own steps until the next copy of their state, and copy it; repeat both after a death."""
        attempts = itertools.count()

        def attempt() -> tuple[int, list[RankTotals]]:
            if next(attempts):
                self._remove_later_records(self.position.n_rows_seen)
            return self._run_batch_loop()

        return self.death_policy.run_update(attempt)

    def _count_rows_until_copy(self) -> int:
        """Count the rows until the next copy of the ranks' state, where ranks take their own steps."""
        steps, model = self.death_policy.steps_per_copy, self.model
        if steps is None or model.joint_step is not None or model.graph.weight is not None:  # rules sum weights
            return self.data.n_epoch_rows
        return steps * self.data.batch_size * ranks.get_session().size

    def _find_interval_stop(self, start: int) -> int:
        """Return the position of the next report after position ``start``."""
        if self.steps_per_report is None:
            return self.data.n_epoch_rows
        return min(
            self.data.n_epoch_rows, start + self.steps_per_report * self.data.batch_size * ranks.get_session().size
        )

    def _make_plan(self, stop: int) -> BatchLoopPlan:
        """Make the plan of a batch loop from the present position to ``stop``."""
        model, data, position = self.model, self.data, self.position
        return BatchLoopPlan(
            start=position.epoch_position,
            stop=stop,
            batch_size=data.batch_size,
            epoch=position.epoch,
            n_epoch_rows=data.n_epoch_rows,
            n_rows_of_earlier_epochs=position.n_rows_of_earlier_epochs,
            schedule=model.schedule,
            recorders=[recorder for recorder in self.recorders if isinstance(recorder, Recorder)],
            shows_progress_bar=self.shows_progress_bar,
            rank_groups=get_ranks_by_host_if_partitioned(data.arrays) or [range(ranks.get_session().size)],
            can_stop=self.checkpoints is not None,
            totals_since_report=resize_totals(
                position.totals, 1 if model.joint_step is not None else ranks.get_session().size
            ),
            has_loss_weight=model.graph.weight is not None,
        )

    def _run_batch_loop(self) -> tuple[int, list[RankTotals]]:
        """Train until the next copy or report, or a signal.  Return the position reached, and the ranks' totals."""
        position, data, loader = self.position, self.data, self.data.loader
        is_joint = self.model.joint_step is not None

        def prepare_row_source() -> RowSource:
            return data.prepare_row_source(position.epoch, position.epoch_position, is_joint)

        try:
            # A loader frees memory on the ranks, and data_parts may be loaded again.
            source = self.death_policy.run_idempotent(prepare_row_source) if is_joint else prepare_row_source()
            self.interval_stop = data.round_stop_up_to_step(position.epoch_position, self.interval_stop)
            position.order_key = data.order_key
            plan = self._make_plan(min(self.interval_stop, position.epoch_position + self._count_rows_until_copy()))
            if is_joint:
                results = [take_joint_steps(plan, source, self.model, self.death_policy)]
            else:
                results = self._run_local_loops(plan, source)
            end, totals = min(end for end, _ in results), [totals for _, totals in results]
            if isinstance(source, LoaderRows):
                source.record_position(end)
            if end == plan.stop and not any(total.rows for total in totals):
                position.epoch_position = plan.start
                raise LoadError(
                    f"none of the rows from {plan.start:,} to {end:,} of epoch {plan.epoch} could be read",
                    plan.epoch,
                    end,
                )
        except (LoadError, WorkerError) as error:
            if loader is not None:
                loader.close()  # a loader process may have died
                error.add_note("To continue a trainer, call epochs() again, or resume from a checkpoint.")
            raise
        return end, totals

    def _run_local_loops(self, plan: BatchLoopPlan, source: RowSource) -> list[tuple[int, RankTotals]]:
        """Take local steps on every rank.  Return each rank's result."""
        model, length = self.model, ranks.get_session().size + 1
        if len(self.batch_counts) != length:  # a rank was left out
            self.batch_counts = make_data(shape=(length,), dtype="int64")
        self.batch_counts[...] = 0
        try:
            pickle.dumps(model.schedule)
        except Exception as error:
            raise TypeError(
                f"learning_rate: under {model.exchange_rule!r} ranks call the schedule, so expected one that can be "
                f"pickled, such as a function of a module, got {model.schedule!r}"
            ) from error
        self.position.may_have_trained_more = True
        results: list[tuple[int, RankTotals]] = run(
            take_local_steps, plan, model.local_step, model.learning_rate, model.state.spec, source, self.batch_counts
        )
        self.position.may_have_trained_more = False
        model.state.rate = results[self.session.rank.number][1].learning_rate
        return results

    def make_report(self) -> Report:
        position, data, n_ranks = self.position, self.data, ranks.get_session().size
        return make_report(
            position.totals,
            position.epoch + self.interval_stop / data.n_epoch_rows,
            position.n_rows_of_earlier_epochs + self.interval_stop,
            f"{n_ranks} x {data.batch_size} = {n_ranks * data.batch_size}",
        )

    def validate(self, report: Report) -> bool:
        """Compute the metrics over all validation rows, unless a signal stops the validation."""
        generators = self.model.state.spec.variables.generators if self.checkpoints is not None else []

        def validate_or_undo() -> bool:
            # After a death the whole validation is repeated, since there may be fewer ranks.
            states = run(rank_state.read_generator_states, generators) if generators else []
            is_complete = self._validate(report)  # the metrics may draw random numbers
            if not is_complete and generators:  # a resumed run repeats the validation
                run(rank_state.restore_generator_states, generators, states)
            return is_complete

        return self.death_policy.run_update(validate_or_undo)

    def _validate(self, report: Report) -> bool:
        model, valid = self.model, self.valid
        if valid is None:
            return True
        assert model.validation is not None
        if model.graph.options.validate_ema:
            assert model.joint_step is not None
            model.joint_step.get_ema()
        totals, step = MetricTotals(model.metrics), self.data.batch_size * ranks.get_session().size
        batches: Iterable[Any]
        if isinstance(valid, Loader):
            batches = valid.epoch(0, step)
        elif get_ranks_by_host_if_partitioned(valid[0]):
            batches = iterate_batches_of_own_rows(valid[1], step, ranks.get_session().size)
        else:
            batches = (slice(start, min(valid[1], start + step)) for start in range(0, valid[1], step))
        for rows in batches:
            if totals.rows and self.is_stop_requested():
                break
            data = valid.data if isinstance(valid, Loader) else valid[0]  # a loader has data only after its first batch
            values = model.validation(*data, batch=rows)
            totals.update(values, rows.stop - rows.start if isinstance(rows, slice) else len(rows))
        if not totals.rows:
            raise LoadError("none of the rows of the validation data could be read")
        report.validation = totals.compute()
        self.metrics_of_weight_0 = totals.metrics_of_weight_0
        return not self.is_stop_requested()

    def finish_interval(self, report: Report) -> None:
        """Move to the next interval, and pass the report to the recorders.  Raise FloatingPointError for NaN."""
        values = [value for name, value in report.validation.items() if name not in self.metrics_of_weight_0]
        values += [report.loss] if sum(total.weight_sum for total in self.position.totals) else []
        if not all(map(math.isfinite, values)):
            raise FloatingPointError(
                f"the loss is {report.loss} after {report.rows_seen:,} rows, validation {report.validation}: "
                f"{self._explain_nonfinite(report)}; nothing was saved since"
            )
        position, is_epoch_over = self.position, self.interval_stop == self.data.n_epoch_rows
        position.totals, position.metrics = [], report.metrics
        position.epoch_position = position.interval_start = 0 if is_epoch_over else self.interval_stop
        position.epoch += is_epoch_over
        position.n_rows_of_earlier_epochs += self.data.n_epoch_rows if is_epoch_over else 0
        self._n_reported_rows = position.n_rows_seen
        report.deaths, self.death_policy.deaths = self.death_policy.deaths, []
        for recorder in self.recorders:
            recorder.write(report.to_record())

    def _explain_nonfinite(self, report: Report) -> str:
        """Name a likely cause of a NaN or infinite loss: a row of the data, or else the learning rate."""
        graph, data, valid = self.model.graph, self.data, self.valid
        x, y = ([describe(v) for v in variables] for variables in (graph.x, graph.y))
        message = ""
        if data.row_order is not None:
            names = [*(f"x_data, {name}," for name in x), *(f"y_data, {name}," for name in y)]
            rows = data.row_order.data[self.position.interval_start : self.interval_stop]
            message = describe_nonfinite(dict(zip(names, data.arrays, strict=True)), rows)
        if not message and isinstance(valid, tuple):
            names = [f"valid, {name}," for name in (*x, *y)]
            message = describe_nonfinite(dict(zip(names, valid[0], strict=True)))
        return message or f"the learning rate of {report.learning_rate:g} may be too high"

    def call_report_hooks(self, report: Report) -> None:
        """Pass the cost by the first metric of the validation, or the loss, to the schedule's ``observe``, if any."""
        observe: Callable[[float], None] | None = getattr(self.model.schedule, "observe", None)
        if observe is not None:
            mode = "max" if self.metric == (self.first_metric, "max") else "min"
            observe(to_cost(report.metrics, (self.first_metric, mode)))

    def save(self, report: Report) -> None:
        self._save()

    def _save(self) -> Path:
        checkpoints, model = self.checkpoints, self.model
        assert checkpoints is not None
        return self.death_policy.run_idempotent(lambda: model.state.save(checkpoints, self.data, model.schedule))

    def save_at_signal(self) -> None:
        """Write a checkpoint between two reports, unless the loss is not finite, and print its path."""
        message = f"{signal.Signals(get_stop_signal()).name}: training ends"
        if all(math.isfinite(total.weighted_loss_sum) for total in self.position.totals):
            message += f"; go on with resume={str(self._save())!r}"
        sys.stderr.write(f"{message}\n")
