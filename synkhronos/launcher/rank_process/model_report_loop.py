"""The loop of one rank over the epochs of a model class."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence

import numpy as np

from synkhronos.devices import get_array_device
from synkhronos.exchange_rules import Swap
from synkhronos.graph_libraries import get_library
from synkhronos.launcher.configuration.settings import Settings
from synkhronos.launcher.model_class.model import Model
from synkhronos.launcher.model_class.model_data import ModelData
from synkhronos.launcher.model_class.model_interface import (
    ModelInterfaceError,
    call_by_signature,
    call_optional,
    get_learning_rate,
    get_n_epochs,
    get_steps_per_batch,
    parse_val_iter_result,
    use_model_precision,
)
from synkhronos.launcher.model_class.sanity_check import SanityCheck
from synkhronos.launcher.rank_process.gradient_sum_rule import GradientSumRule
from synkhronos.launcher.rank_process.memory_checkpoint_writer import MemoryCheckpointWriter
from synkhronos.launcher.rank_process.model_batch_loop import ModelBatchLoop
from synkhronos.launcher.rank_process.model_state import ModelState, get_global_generator_states
from synkhronos.launcher.supervision.master_arguments import MasterArguments
from synkhronos.launcher.supervision.run_folder import DeathLog
from synkhronos.programs import LocalRows
from synkhronos.training.loops.report_loop import ReportLoop
from synkhronos.training.monitoring.best_cost import BestCost
from synkhronos.training.monitoring.meter import RankTotals
from synkhronos.training.monitoring.nonfinite import describe_nonfinite
from synkhronos.training.monitoring.recorder import Recorder
from synkhronos.training.monitoring.report import Report, make_report
from synkhronos.training.updates.loss_scaling import LOSS_SCALE_NAME

#: Number of epochs over which the learning rate rises to its value times the number of ranks, as in Theano-MPI.
_WARMUP_EPOCHS = 5
#: Number of epochs between two calls of a model's ``save(path)``.
_SAVE_EPOCHS = 5


class ModelReportLoop(ReportLoop):
    """Loop of one rank over the epochs of an instance of a model class.  `n_reports` epochs are complete."""

    def __init__(self, state: ModelState, arguments: MasterArguments, stop_flag: LocalRows):
        settings = state.settings
        self.state, self.recorder = state, state.recorder
        self.context, self.settings, self.model = state.context, settings, state.model
        self.n_epochs = get_n_epochs(state.model, settings)
        self.patience, self.saves_best = settings.patience, settings.keep_best is not None
        self.checkpoint_every = settings.checkpoint
        step_variables = (
            self.model.vels if isinstance(state.exchange_rule, GradientSumRule) else state.variables.exchanged_variables
        )
        scales = [shared for shared in state.variables.optimizer_state if shared.name == LOSS_SCALE_NAME]
        self.sanity_check = SanityCheck([*self.model.params, *scales], step_variables)
        if isinstance(self.model.data, ModelData) and not self.model.data.has_validation:
            _choose_metric(settings, ["loss"])
        if arguments.checkpoint_path is None:
            state.exchange_rule.setup(state.context, state.exchange_state)
        else:
            state.resume(arguments.checkpoint_path)
        self.n_reports = state.n_complete_epochs
        self.memory_checkpoints = None
        if arguments.memory_checkpoint_folder is not None:
            self.memory_checkpoints = MemoryCheckpointWriter(arguments.memory_checkpoint_folder, state)
        self.batch_loop = ModelBatchLoop(state, self.sanity_check, self.memory_checkpoints, stop_flag)
        self.totals: list[RankTotals] = []
        self.is_stopped_by_model = False
        #: Recorder of reports, on rank 0.
        self._report_recorder = Recorder(state.folder) if state.context.number == 0 else None
        #: The argument ``count`` of ``val_iter``: number of this rank's batches in the epoch times the number of ranks.
        self._n_trained_batches = 0
        #: Time at which training of the epoch ended, by `time.perf_counter`.
        self._training_ended_at = 0.0

    @property
    def best_cost(self) -> BestCost:
        return self.state.best_cost

    def train_all_epochs(self) -> bool:
        """Train all epochs and write the parameters.  Return False if a signal stops training."""
        is_master, n_before = self.context.number == 0, self.n_reports
        if is_master and self.memory_checkpoints:
            for death in DeathLog(self.state.folder).record_recovery(self.recorder.meter.total_steps):
                sys.stdout.write(
                    f"rank {death['rank']} {death['cause']}; the training continues from step {death['step']}, "
                    f"{death['seconds']:.1f} s later\n"
                )
        for report in self.train_and_report():
            if self.memory_checkpoints:
                self.memory_checkpoints.write(report.metrics)
            if self.is_stopped_by_model and is_master:
                sys.stdout.write(f"val_iter() has returned 'stop': the run ends after epoch {self.n_reports}\n")
            if self.is_patience_exhausted() and is_master:
                best = self.best_cost
                worse = f"{best.label}: no better for {best.n_reports_since_best} epochs"
                sys.stdout.write(f"{worse}; the run ends after epoch {self.n_reports}\n")
        if self.batch_loop.is_stopped_by_signal:
            return False
        if self.n_reports == n_before:  # the run had ended between its last checkpoint and the following lines
            self.state.set_params_to_consensus()
        self._save_params("params.npz")
        if self.settings.keep_best:
            self._save_best()
        return True

    def has_trained_all_epochs(self) -> bool:
        """Whether all epochs are trained, or ``val_iter`` has ended the run."""
        return self.n_reports >= self.n_epochs or self.is_stopped_by_model

    def _warm_up_learning_rate(self, epoch: int) -> None:
        """Multiply ``shared_lr`` by the fifth root of the number of ranks, in each of epochs 1 to 5 (the first is 0).

        By default this applies under BSP and Swap, unless the model's ``warmup`` is false or ``scale_lr`` is called.
        """
        shared_lr = getattr(self.model, "shared_lr", None)
        warms_up = self.settings.warmup
        if warms_up is None:
            rule = self.state.exchange_rule
            is_default = (rule.is_bulk_synchronous or isinstance(rule, Swap)) and getattr(self.model, "warmup", True)
            warms_up = is_default and not self.settings.scale_lr  # scale_lr multiplies the rate at the start of the run
        if not warms_up or shared_lr is None or self.context.size == 1 or not 1 <= epoch <= _WARMUP_EPOCHS:
            return
        rate = np.asarray(shared_lr.get_value())
        shared_lr.set_value(np.asarray(rate * self.context.size ** (1 / _WARMUP_EPOCHS), rate.dtype))
        if self.context.number == 0:
            sys.stdout.write(f"warm-up: shared_lr is {float(shared_lr.get_value()):.4g} from epoch {epoch + 1} on\n")

    def observe(self, report: Report) -> bool:
        """Compare a report with the best one, if ``keep_best`` or ``patience`` is set.  Return True if it is better."""
        metric = _choose_metric(self.settings, list(report.metrics))
        if metric is None:
            return False
        self.metric = metric
        self.best_cost.set_label(" ".join(metric))
        return super().observe(report)

    def train(self) -> bool:
        epoch, is_resumed = self.n_reports, self.state.position["batch"] > 0
        self.state.restore_own_params()
        self.model.epoch = epoch
        if not is_resumed:
            self._warm_up_learning_rate(epoch)
        self.recorder.learning_rate = get_learning_rate(self.model)
        if not math.isnan(self.recorder.learning_rate):
            self.state.exchange_state.learning_rate = self.recorder.learning_rate
        if is_resumed:
            self.recorder.begin_epoch(epoch, *self.state.position["record"])
        else:
            self.recorder.begin_epoch(epoch)
            self.state.position = {"batch": 0, "generators": get_global_generator_states()}
        self.batch_loop.run()
        self._n_trained_batches = self.state.position["batch"] * self.context.size
        self.recorder.write_line()
        own_totals = self.recorder.meter.get_totals(self.recorder.learning_rate)
        by_rank = self.context.all_gather((own_totals, self.batch_loop.is_stopped_by_signal))
        self.totals = [totals for totals, _ in by_rank]
        self._training_ended_at = time.perf_counter()
        self.batch_loop.is_stopped_by_signal = any(is_stopped for _, is_stopped in by_rank)
        if not self.batch_loop.is_stopped_by_signal:
            self.recorder.clear_train_info()
            call_optional(self.model, "reset_iter", "train")
            self.sanity_check.check_params_change(self.recorder.learning_rate, has_epoch_ended=True)
            if self.state.exchange_rule.asynchronous:
                self.sanity_check.compare_ranks(self.context)
        self.state.set_params_to_consensus()
        return not self.batch_loop.is_stopped_by_signal

    def make_report(self) -> Report:
        """Make the report of the epoch.  Its loss is NaN if the class recorded no cost."""
        n_ranks, epoch = self.context.size, self.n_reports + 1
        elapsed = self._training_ended_at - self.recorder.epoch_start_time
        report = make_report(
            self.totals, epoch, self.state.n_rows_seen, f"{n_ranks} x {self.recorder.rows_per_step}", elapsed
        )
        if any(total.weight_sum for total in self.totals) and not math.isfinite(report.loss):
            data = self.model.data.training if isinstance(self.model.data, ModelData) else ()
            arrays = data if isinstance(data, list) else ()
            row_description = describe_nonfinite(
                {f"load()'s training array {i}": array for i, array in enumerate(arrays)}
            )
            hint = f"{row_description}; nothing of it was saved" if row_description else "nothing of it was saved"
            raise FloatingPointError(f"the cost is {report.loss} in epoch {epoch}: {hint}")
        return report

    def validate(self, report: Report) -> bool:
        """Validate the exchange rule's consensus parameters.  A validation that a signal stops has no results."""
        recorder = self.recorder
        generator_states = self.state.get_generator_states()
        batch, ends_run, is_stopped = 0, False, False
        per_batch = get_steps_per_batch(self.model)
        while batch < int(self.model.data.n_batch_val) and not ends_run and not is_stopped:
            next_batch = batch + 1
            for _ in range(per_batch):
                self.context.report_progress()
                with use_model_precision():
                    returned = self.model.val_iter(self._n_trained_batches, recorder)
                next_batch, ends_run = parse_val_iter_result(returned, batch, next_batch)
                if ends_run:
                    break
            batch = next_batch
            is_stopped = self.batch_loop.is_stop_requested()
        call_optional(self.model, "reset_iter", "val")
        by_rank = self.context.all_gather((*recorder.take_validation_sums(), ends_run, is_stopped))
        self.batch_loop.is_stopped_by_signal = any(is_stopped for *_, is_stopped in by_rank)
        if self.batch_loop.is_stopped_by_signal:
            self.state.set_generator_states(*generator_states)  # a resumed run repeats the validation
            return False
        sums: dict[str, float] = {}
        total_weight = sum(weight for weight, *_ in by_rank)
        for _, rank_sums, *_ in by_rank:
            for name, value in rank_sums.items():
                sums[name] = sums.get(name, 0.0) + value
        # If the total weight is 0, there are no sums to divide.
        report.validation = means = {name: value / total_weight for name, value in sums.items()}
        recorder.set_validation_means(self._n_trained_batches, means)
        if means:
            self.model.current_info = recorder.get_latest_val_info()
        self.is_stopped_by_model = any(ends_run for _, _, ends_run, _ in by_rank)
        return True

    def save_at_signal(self) -> None:
        """Write a checkpoint within the epoch.  Raise FloatingPointError if the loss is not finite."""
        self.make_report()
        self.state.save(metrics=None)  # within an epoch

    def call_report_hooks(self, report: Report) -> None:
        """Call the class's ``save``, ``adjust_hyperp`` and ``print_info`` after an epoch."""
        self._save_snapshot(self.n_reports - 1, self.is_over())
        call_by_signature(self.model.adjust_hyperp, self.n_reports - 1)
        call_optional(self.model, "print_info", self.recorder, verbose=self.context.number == 0)

    def finish_interval(self, report: Report) -> None:
        """Move to the next epoch.  On rank 0, print and write the report."""
        self.state.position = {"batch": 0}
        self.state.n_complete_epochs = self.n_reports + 1
        if self._report_recorder is None:
            return
        if self.memory_checkpoints:
            first = self.recorder.meter.total_steps - self.recorder.meter.totals.steps
            report.deaths = [death for death in DeathLog(self.state.folder).read() if death["step"] >= first]
        self._report_recorder.write(report.to_record())
        values = {} if math.isnan(report.loss) else {"cost": report.loss}
        values |= {f"validation {name}": value for name, value in report.validation.items()}
        line = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        sys.stdout.write(
            f"epoch {report.epoch} done: {line}; batch {report.batch_description}, {report.rows_per_second:,.0f} "
            f"{self.recorder.unit}/s\n"
        )

    def save(self, report: Report) -> None:
        self.state.save(report.metrics)

    def _save_snapshot(self, epoch: int, is_last: bool) -> None:
        """Call ``save(path)`` of the model, if it has this method, on rank 0 every five epochs and at the end."""
        save = getattr(self.model, "save", None)
        if self.context.number == 0 and callable(save) and (epoch % _SAVE_EPOCHS == 0 or is_last):
            (self.state.folder / "snapshots").mkdir(exist_ok=True)
            save(f"{self.state.folder / 'snapshots'}{os.sep}")  # Theano-MPI's models append a file's name

    def _save_params(self, name: str) -> None:
        """Write the parameters into an ``.npz`` file, on rank 0: ``arr_0`` and so on, as Lasagne's examples do."""
        if self.context.number == 0:
            params = self.model.params
            if isinstance(self.model, Model) and self.model.ema_params is not None and self.model.validate_ema:
                params = [*self.model.ema_params, *self.model.averages]
            values = [get_array_device(v).to_numpy(v) for v in (get_library(p).borrow_value(p) for p in params)]
            np.savez(self.state.folder / name, *values)

    def _save_best(self) -> None:
        """Write the parameters of the best checkpoint, if there is one.  All ranks must call this."""
        best = self.context.broadcast(self.state.checkpoints.find_best() if self.context.number == 0 else None)
        if best is not None:
            self.state.restore(str(best))
            self.state.set_params_to_consensus()
            self._save_params("best.npz")


def _choose_metric(settings: Settings, names: Sequence[str]) -> tuple[str, str] | None:
    """Return the metric of ``keep_best`` or ``patience``, and "min" or "max"; None if neither is set.

    Raise ModelInterfaceError if the metric is not among ``names``.
    """
    if settings.patience is None and settings.keep_best is None:
        return None
    name, mode = settings.keep_best or (next((n for n in names if n != "loss"), "cost"), "min")
    if name not in names:
        raise ModelInterfaceError(
            f"keep_best, patience: {settings.modelclass} lacks:\n  metric {name!r}, got {', '.join(names) or 'nothing'}"
        )
    return name, mode
