"""The part of a run on each rank: train an instance of the user's class under an exchange rule.

The master calls three functions on all ranks.  Each rank keeps its instance from `build_instance` to `train_instance`::

    start_rank()      redirect output, print device and cores
    build_instance()  make and check the instance, compile its functions, make parameters equal on all ranks
    train_instance()  epochs of a ClassLoop

A signal may end an epoch after any batch.  The checkpoint then has the number of batches, and the state of random
generators at the start of the epoch: only the class knows which rows it has taken, so it has to skip these batches,
or to repeat them, when the run is resumed.
"""

from __future__ import annotations

import math
import os
import platform
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from synkhronos.devices import array_device
from synkhronos.graphs import library_of, list_loaded_libraries
from synkhronos.launch import binding, contract, output
from synkhronos.launch.change_check import ChangeCheck
from synkhronos.launch.copies import CopySchedule, DeathLog
from synkhronos.launch.gradients import SummedGradients
from synkhronos.launch.model import Model
from synkhronos.launch.recorder import ClassRecorder
from synkhronos.launch.settings import Settings
from synkhronos.rules import BSP, Rule, State, Swap
from synkhronos.rules.state import Vector
from synkhronos.tasks import LocalRows, Worker
from synkhronos.training import rank_state
from synkhronos.training.checkpoint import Checkpoint, load_meta
from synkhronos.training.early_stop import EarlyStop
from synkhronos.training.epoch_loop import EpochLoop
from synkhronos.training.loop import RankLoop
from synkhronos.training.meter import Outcome
from synkhronos.training.nonfinite import describe_nonfinite
from synkhronos.training.recorder import Recorder, cut
from synkhronos.training.report import Report, make_report
from synkhronos.training.stop import StopAgreement, StopPoll, requested_stop

#: Key under which a rank keeps its instance between tasks.
_KEPT = "launch"
#: Messages on the exchange under BSP, by the values that ranks exchange.
_EXCHANGES = {
    "gradient": "after each step vels2 is set to the sum of vels over all ranks (cdd)",
    "params": "after each step parameters are averaged over all ranks (avg)",
}
#: Number of epochs over which BSP multiplies a class' learning rate by the number of ranks, as Theano-MPI does; number
#: of epochs between two calls of a class' save(path).
_WARMUP, _SNAPSHOTS = 5, 5
#: Types of the entries of a run's checkpoint, besides those of `rank_state.describe_training`.
_TYPES: dict[str, Any] = {"epochs": int, "stop": dict, "host_generators": list, "totals": list, "within": list | None}


def start_rank(
    worker: Worker, consoles: list[int], masks: list[list[int]], devices: list[str], by_host: list[range]
) -> int:
    """Redirect this rank's output to its own pipe, print its device and cores, and return its process ID.

    Parameters
    ----------
    worker : Worker
    consoles, masks, devices : list
        File descriptors of the pipes, cores and devices of ranks on the first host.  No masks: ranks are not bound.
    by_host : list of range
        Ranks of each host.
    """
    import synkhronos.compat  # noqa: F401 - classes import theano; ranks of other hosts are no copies of the master

    sys.stdout.flush()
    sys.stderr.flush()
    if worker.number < len(consoles):
        for file in (1, 2):
            os.dup2(consoles[worker.number], file)
        for console in consoles:
            os.close(console)
        where = f"on {devices[worker.number]}, {binding.describe_binding(masks[worker.number] if masks else None)}"
    else:
        output.redirect_output(worker.number)
        host_ranks = next(ranks for ranks in by_host if worker.number in ranks)
        device = "cpu" if devices[0] == "cpu" else f"cuda{host_ranks.index(worker.number)}"
        where = f"on {device} of host {platform.node()}, {binding.describe_binding(None)}"
    for stream in (sys.stdout, sys.stderr):  # the supervisor reads UTF-8, whatever the locale
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    sys.stdout.write(f"process {os.getpid()} {where}\n")
    return os.getpid()


@contextmanager
def use_class_precision() -> Iterator[None]:
    """Switch JAX to the precision for which PyTensor compiled the class' functions, within a ``with`` block.

    PyTensor enables float64 in JAX only if ``floatX`` is float64.  This library's own functions need it enabled.
    """
    jax, pytensor = sys.modules.get("jax"), sys.modules.get("pytensor")
    if jax is None or pytensor is None:  # PyTensor sets the flag itself when it compiles its first function
        yield
        return
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", pytensor.config.floatX == "float64")
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def build_instance(worker: Worker, settings: Settings, rule: Rule) -> tuple[int, str]:
    """Make, check and compile this rank's instance; return the number of elements that ranks exchange, and their dtype.

    All ranks get the parameters of rank 0.  The instance, its groups of variables and the kind of its exchange are kept
    for `train_instance`.

    Raises
    ------
    ContractError
        If the class or the instance lacks something, or the shapes of parameters differ between ranks.
    """
    kind = contract.load_class(settings.root, settings.modelfile, settings.modelclass)
    list_loaded_libraries()  # before the class compiles: all ranks compile at once
    contract.check_complete(kind, settings.modelclass)
    config = contract.make_config(settings, worker.number, worker.size)
    model = contract.make_instance(kind, config)
    for name in ("rank", "size", "verbose", "seed"):
        if not hasattr(model, name) and not hasattr(kind, "__slots__"):
            setattr(model, name, config[name])
    worker.progress()
    average = None
    needs_gradients = contract.set_options(model, settings.model_options, rule, settings.modelclass)
    if needs_gradients or (isinstance(rule, BSP) and worker.size > 1):
        average = settings.rule_options.get("average")
        average = contract.compile_for(model, average, settings.modelclass)
        if worker.number == 0:
            sys.stdout.write(f"{_EXCHANGES[average]}\n")
    else:
        contract.compile_functions(model, "avg")
    contract.check_complete(model, settings.modelclass)
    if settings.scale_lr:
        if not callable(getattr(model, "scale_lr", None)):
            raise contract.ContractError(f"{settings.modelclass} lacks:\n  method scale_lr(size), for scale_lr = true")
        model.scale_lr(worker.size)
    vector = Vector(list(model.params))
    shapes = [list(shape) for shape in vector.shapes]
    all_shapes = worker.all_gather(shapes)
    for r, other in enumerate(all_shapes):
        if other != all_shapes[0]:
            raise contract.ContractError(f"params: of shapes {all_shapes[0]} on rank 0, and of {other} on rank {r}")
    vector.set(worker.broadcast(np.asarray(vector.get()) if worker.number == 0 else None))
    groups = contract.group_variables(model, leave_out_normalization=average == "params")
    for shared in groups.generators:  # the class may give all ranks one seed, but their streams have to differ
        library = library_of(shared)
        stream = library.copy_generator(shared)
        library.set_generator(shared, library.jump(stream, worker.number) if worker.number else stream)
    worker.get_storage(_KEPT).update(model=model, groups=groups, average=average)
    exchanged = Vector(groups.params)
    return exchanged.size, exchanged.dtype.name


def train_instance(
    worker: Worker,
    settings: Settings,
    rule: Rule,
    shared: dict[str, LocalRows],
    path: str | None,
    copies: str | None,
    flag: LocalRows,
) -> bool:
    """Train the instance that `build_instance` has made, and call its ``cleanup``.

    ``path`` is the checkpoint or copy to resume from, or None; the other arguments are those of `ClassLoop`.  Return
    whether a signal has ended the training, after a checkpoint was written.
    """
    kept = worker.get_storage(_KEPT)
    model = kept["model"]
    if kept["average"] == "gradient":
        rule = SummedGradients(model.vels, model.vels2, rule.precision)
    run = ClassLoop(worker, settings, rule, model, kept["groups"], shared, copies, flag)
    try:
        return run.train_all_epochs(path)
    finally:
        run.model.cleanup()


class ClassLoop(EpochLoop, RankLoop):
    """Loop of one rank with an instance of the user's class, which chooses its rows and takes the steps.

    Parameters
    ----------
    worker, settings, rule
    model : instance of the user's class
    groups : rank_state.Groups
        Shared variables of the instance.
    shared : dict of str to LocalRows
        Shared memory of the rule.
    copies : str or None
        Folder of copies in memory, for ``on_death = "continue"``.
    flag : LocalRows
        Flag of `synkhronos.training.stop.StopPoll`.

    Attributes
    ----------
    rows : int
        Number of rows of a batch; 1 if it is unknown.
    recorder : ClassRecorder
        Recorder that the class' methods get.
    reports : Recorder or None
        Recorder of the epochs' reports, on rank 0.
    applies_gradients : bool
        Whether the class updates its parameters after the exchange of gradients, by ``apply_gradients()``.
    is_last_step : bool
        Whether the present step is the last of its batch.
    outcomes : list of Outcome
        Totals of all ranks' training in the epoch.
    trained : float
        End of the epoch's training, by `time.perf_counter`.
    count : int
        Number of this rank's batches in the epoch times the number of ranks; an argument of ``val_iter``.
    has_ended : bool
        Whether a signal has ended the training: on this rank, then on some rank.
    n_epochs : int
        Number of epochs to train in total; `n_reports` of them are complete.
    class_stops : bool
        Whether ``val_iter`` has returned ``"stop"`` on some rank.
    within : dict
        Position in the epoch, for a checkpoint: the number of batches trained on, and the state of the generators at
        the epoch's start.
    """

    def __init__(
        self,
        worker: Worker,
        settings: Settings,
        rule: Rule,
        model: Any,
        groups: rank_state.Groups,
        shared: dict[str, LocalRows],
        copies: str | None,
        flag: LocalRows,
    ):
        self.worker, self.settings, self.rule, self.model = worker, settings, rule, model
        self.groups = groups
        self.shared = shared
        self.folder = Path(settings.folder)
        self.rows = contract.get_batch_size(model)
        is_here = worker.number < len(settings.devices)
        lines = Recorder(self.folder) if is_here else output.RemoteRecords()
        folder = self.folder if is_here else None
        self.recorder = ClassRecorder(worker.number, lines, settings.every, self.rows, folder)
        self.seconds = self.recorder.meter.seconds
        self.state = State(self.groups.params, self.groups.optimizer, shared, self.groups.n_averages)
        worker.get_storage(_KEPT)["state"] = self.state
        self.reports = Recorder(self.folder) if worker.number == 0 else None
        own = model.vels if isinstance(rule, SummedGradients) else self.groups.params
        self.change_check = ChangeCheck(list(model.params), own)
        self.applies_gradients = isinstance(rule, SummedGradients) and callable(getattr(model, "apply_gradients", None))
        self.is_last_step = True
        self.outcomes: list[Outcome] = []
        self.trained = 0.0
        self.count = 0
        self.has_ended = False
        self.early_stop = EarlyStop()
        self.patience, self.saves_best = settings.patience, settings.keep_best is not None
        self.checkpoint_every = settings.checkpoint
        self.n_epochs, self.class_stops = 0, False
        self.agreement, self.poll = StopAgreement(worker), StopPoll(worker, flag)
        # A resumption within an epoch replaces it: see `replay`.
        self.within: dict[str, Any] = {"batch": 0}
        self.checkpoint: Checkpoint | None = None
        self._copies, self._copy_checkpoint = copies, None  # type: str | None, Checkpoint | None
        self._copy_schedule = CopySchedule(worker.broadcast)
        #: Least number of batches of the epoch of any rank; 0 while it is unknown.  No rank copies after more.
        self._common_batches = 0
        self._ends_at_copy = False

    def train_all_epochs(self, path: str | None) -> bool:
        """Train all epochs, and write the parameters; if a signal ends the training, save a checkpoint and return True.

        ``path`` is the checkpoint to resume from, or None.
        """
        epochs = self.settings.epochs if self.settings.epochs is not None else getattr(self.model, "n_epochs", None)
        if isinstance(epochs, bool) or not isinstance(epochs, int | np.integer) or epochs < 1:
            raise contract.ContractError(
                f"{self.settings.modelclass} lacks:\n  attribute n_epochs: expected a number of epochs, got "
                f"{epochs!r}; or give --set epochs=N"
            )
        self.n_epochs = int(epochs)
        if path is None:
            self.rule.setup(self.worker, self.state)
        else:
            self.n_reports = self.resume(path)
        is_master, n_before = self.worker.number == 0, self.n_reports
        if is_master and self._copies:
            for death in DeathLog(self.folder).note_recovery(self.recorder.meter.step):
                sys.stdout.write(
                    f"rank {death['rank']} {death['cause']}; the training goes on from step {death['step']}, "
                    f"{death['seconds']:.1f} s later\n"
                )
        for report in self.iterate_reports():
            if self._copies:
                self.copy(report)
            if self.class_stops and is_master:
                sys.stdout.write(f"val_iter() has returned 'stop': the run ends after epoch {self.n_reports}\n")
            if self.is_exhausted() and is_master:
                stop = self.early_stop
                sys.stdout.write(
                    f"{stop.measure}: no better for {stop.since} epochs; the run ends after {self.n_reports}\n"
                )
        if self.has_ended:
            return True
        if self.n_reports == n_before:  # the run had ended between its last checkpoint and the following lines
            rank_state.set_reported_params(self.worker, _KEPT, self.rule)
        self.save_params("params.npz")
        if self.settings.keep_best:
            self.save_best()
        return False

    def is_complete(self) -> bool:
        """Whether all epochs are trained, or the class ends the training."""
        return self.n_reports >= self.n_epochs or self.class_stops

    def warm_up(self, epoch: int) -> None:
        """Multiply ``shared_lr`` by the fifth root of the number of ranks, in each of epochs 1 to 5 (the first is 0).

        By default this is done under BSP and Swap, unless the class' ``warmup`` is false or its ``scale_lr`` is called.
        """
        shared = getattr(self.model, "shared_lr", None)
        asked = self.settings.warmup
        if asked is None:
            as_there = isinstance(self.rule, BSP | SummedGradients | Swap) and getattr(self.model, "warmup", True)
            asked = as_there and not self.settings.scale_lr  # scale_lr multiplies the rate at the start of the run
        if not asked or shared is None or self.worker.size == 1 or not 1 <= epoch <= _WARMUP:
            return
        rate = np.asarray(shared.get_value())
        shared.set_value(np.asarray(rate * self.worker.size ** (1 / _WARMUP), rate.dtype))
        if self.worker.number == 0:
            sys.stdout.write(f"warm-up: shared_lr is {float(shared.get_value()):.4g} from epoch {epoch + 1} on\n")

    def observe(self, report: Report) -> bool:
        """Compare an epoch with the best one so far; return whether it is better.

        The metric is that of ``keep_best``, by default the first one of the validation.  Nothing is compared if neither
        ``patience`` nor ``keep_best`` is set.

        Raises
        ------
        ContractError
            If the class does not report this metric.
        """
        if self.settings.patience is None and self.settings.keep_best is None:
            return False
        metrics = report.metrics
        name, mode = self.settings.keep_best or (next((n for n in metrics if n != "loss"), "cost"), "min")
        if name not in metrics:
            found = ", ".join(metrics) or "nothing"
            raise contract.ContractError(
                f"keep_best, patience: {self.settings.modelclass} lacks:\n  metric {name!r}, got {found}"
            )
        self.metric = name, mode
        self.early_stop.begin(f"{name} {mode}")
        return super().observe(report)

    # -- an epoch --------------------------------------------------------------------------------------------

    def train(self) -> bool:
        """Train to the end of an epoch; return whether a signal has ended the training on some rank."""
        epoch, is_resumed = self.n_reports, self.within["batch"] > 0
        rank_state.restore_own_params(self.worker, _KEPT)
        self.model.epoch = epoch
        if not is_resumed:
            self.warm_up(epoch)
        self.recorder.learning_rate = contract.get_learning_rate(self.model)
        if not math.isnan(self.recorder.learning_rate):
            self.state.learning_rate = self.recorder.learning_rate
        if is_resumed:
            self.recorder.begin_epoch(epoch, *self.within["record"])
        else:
            self.recorder.begin_epoch(epoch)
            self.within = {"batch": 0, "generators": _get_generators()}
        if self._copies:  # ranks at their own pace may resume at different batches, and copy at the same ones
            self._copy_schedule.set_due(max(self.worker.all_gather(self.within["batch"])))
        self._common_batches, self._ends_at_copy = 0, False
        self.run()
        self.count = self.within["batch"] * self.worker.size
        self.recorder.write()
        outcome = self.recorder.meter.get_outcome(self.recorder.learning_rate)
        ended = self.worker.all_gather((outcome, self.has_ended))
        self.outcomes = [outcome for outcome, _ in ended]
        self.trained = time.perf_counter()
        self.has_ended = any(has_ended for _, has_ended in ended)
        if not self.has_ended:
            self.recorder.clear_train_info()
            self.reset_iterator("train")
            self.change_check.check_change(self.recorder.learning_rate, epoch_ended=True)
            if self.rule.asynchronous:
                self.change_check.compare(self.worker)
        rank_state.set_reported_params(self.worker, _KEPT, self.rule)
        return self.has_ended

    def iterate_batches(self) -> Iterator[tuple[int, bool]]:
        """Yield for each step the number of its batch, and whether it is the batch's last step."""
        batch, n_steps = self.within["batch"], contract.get_sub_batches(self.model)
        # A class may distribute its data in the first step, so the number of batches is read after it.
        batches = self.agree_on_batches(int(self.model.data.n_batch_train)) if batch else None
        while batches is None or batch < batches:
            for step in range(n_steps):
                yield batch, step == n_steps - 1
                if batches is None:
                    batches = self.agree_on_batches(int(self.model.data.n_batch_train))
            batch += 1

    def step(self, batches: tuple[int, bool]) -> int:
        """Call ``train_iter`` once; return the number of steps that count for the exchange.

        Under asynchronous rules only the last step of a batch counts.
        """
        batch, self.is_last_step = batches
        recorder = self.recorder
        self.worker.progress()
        began, before = time.perf_counter(), dict(recorder.meter.seconds)
        with use_class_precision():
            self.model.train_iter(batch, recorder)
        recorder.count_iteration(time.perf_counter() - began)
        self.record_compute_time(began, before)
        return int(self.is_last_step or not self.rule.asynchronous)

    def exchange(self, steps: int) -> None:
        """Exchange with other ranks if an exchange is due; before it, check that steps change parameters.

        Synchronous ranks also compare their first steps here; asynchronous ranks do so after the epoch.
        """
        if not steps:
            return
        self.change_check.step()
        if self.change_check.is_due and not self.rule.asynchronous:
            self.change_check.compare(self.worker)
        self.change_check.check_change(self.recorder.learning_rate, epoch_ended=False)
        self.count_steps_left()
        super().exchange(steps)
        if self.applies_gradients:
            with use_class_precision():
                self.model.apply_gradients()

    def begin_exchange(self) -> None:
        """Weight this rank's parameters in the exchange by the last cost's weight, if the class has a ``weight``."""
        self.state.count_items = None if getattr(self.model, "weight", None) is None else self.recorder.get_last_weight

    def record(self, batches: tuple[int, bool]) -> None:
        """Count a batch after its last step, and write and print a line if one is due."""
        batch, is_last_step = batches
        if is_last_step:
            self.within["batch"] = batch + 1
            self.recorder.print_train_info((batch + 1) * self.worker.size)
            if self._copies and self._copy_schedule.due <= batch + 1 < self._common_batches:
                self.copy(None)
                if self.rule.asynchronous and self.settings.saves_on_signal:
                    self._ends_at_copy = any(self.worker.all_gather(bool(requested_stop())))

    def is_stopped(self) -> bool:
        """Return True if a signal ends the training after this batch."""
        if self.rule.asynchronous and self._copies:
            if self._ends_at_copy or not self._common_batches or self._copy_schedule.due < self._common_batches:
                self.has_ended = self._ends_at_copy  # a rank that ended alone would miss the next copy
                return self.has_ended
        self.has_ended = self.is_last_step and self.is_stop_requested(together=not self.rule.asynchronous)
        return self.has_ended

    def is_stop_requested(self, together: bool) -> bool:
        """Return True if a signal ends the training here.

        All ranks agree if they call this ``together``, after equally many steps.  Otherwise this rank polls the flag,
        and other ranks may read the signal later.
        """
        if not self.settings.saves_on_signal:
            return False
        return self.agreement.is_stop() if together else self.poll.is_stop()

    def agree_on_batches(self, batches: int) -> int:
        """Return the number of batches of this epoch.

        Under synchronous rules it is the minimum over ranks: all ranks take part in each exchange.
        """
        if self.rule.asynchronous and not self._copies:
            return batches
        every = self.worker.all_gather(batches)
        self._common_batches = min(every)
        if self.rule.asynchronous:
            return batches
        if min(every) != max(every) and self.worker.number == 0 and self.recorder.epoch == 0:
            sys.stdout.write(f"ranks have {every} batches: each takes {min(every)}, since all exchange at once\n")
        return min(every)

    def record_compute_time(self, began: float, before: dict[str, float]) -> None:
        """Add an iteration's time to ``compute``, less the time that the class has recorded for other activities.

        ``began`` is its start by `time.perf_counter`; ``before`` has the seconds by activity at that time.
        """
        seconds = self.seconds
        noted = sum(value - before.get(name, 0.0) for name, value in seconds.items() if name != "compute")
        seconds["compute"] = before["compute"] + max(0.0, time.perf_counter() - began - noted)

    def make_report(self) -> Report:
        """Return the report of an epoch's training; its loss is NaN if the class recorded no cost.

        Raises
        ------
        FloatingPointError
            If the loss is infinite or NaN.
        """
        n_ranks, epoch = self.worker.size, self.n_reports + 1
        seen = self.recorder.meter.step * self.rows * n_ranks
        elapsed = self.trained - self.recorder.epoch_began
        report = make_report(self.outcomes, epoch, seen, f"{n_ranks} x {self.rows}", elapsed)
        if any(outcome.weight for outcome in self.outcomes) and not math.isfinite(report.loss):
            data = getattr(self.model, "train_data", None)  # an attribute of `Model`
            arrays = [a for a in data if hasattr(a, "dtype")] if isinstance(data, list) else []
            row = describe_nonfinite({f"load()'s training array {i}": array for i, array in enumerate(arrays)})
            why = f"{row}; nothing of it was saved" if row else "nothing of it was saved"
            raise FloatingPointError(f"the cost is {report.loss} in epoch {epoch}: {why}")
        return report

    def validate(self, report: Report) -> bool:
        """Validate the reported parameters, those that stand for all ranks.

        Returns
        -------
        bool
            Whether a signal has ended the training meanwhile; then the validation is incomplete, and has no means.
        """
        recorder = self.recorder
        batch, has_stopped, is_ended = 0, False, False
        per_batch = contract.get_sub_batches(self.model)
        while batch < int(self.model.data.n_batch_val) and not has_stopped and not is_ended:
            following = batch + 1
            for _ in range(per_batch):
                self.worker.progress()
                with use_class_precision():
                    answer = self.model.val_iter(self.count, recorder)
                following, has_stopped = contract.parse_next_batch(answer, batch, following)
                if has_stopped:
                    break
            batch = following
            is_ended = self.is_stop_requested(together=False)
        self.reset_iterator("val")
        shown = self.worker.all_gather((*recorder.take_validation_sums(), has_stopped, is_ended))
        self.has_ended = any(ended for *_, ended in shown)
        if self.has_ended:
            return True
        sums: dict[str, float] = {}
        total = sum(rows for rows, *_ in shown)
        for _, found, *_ in shown:
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + value
        report.validation = means = {name: value / total for name, value in sums.items()}  # no sums without weight
        recorder.note_validation(self.count, means)
        if means:
            self.model.current_info = recorder.get_latest_val_info()
        self.class_stops = any(stopped for _, _, stopped, _ in shown)
        return False

    def stop(self) -> None:
        """Write a checkpoint within the epoch, after a signal; raise FloatingPointError if the loss is not finite."""
        self.make_report()
        self.save(None)

    def adapt(self, report: Report) -> None:
        """Call the class' ``save``, ``adjust_hyperp`` and ``print_info`` after an epoch."""
        self.save_snapshot(self.n_reports - 1, self.is_over())
        contract.call_accepted(self.model.adjust_hyperp, self.n_reports - 1)
        if callable(getattr(self.model, "print_info", None)):
            contract.call_accepted(self.model.print_info, self.recorder, verbose=self.worker.number == 0)

    def complete(self, report: Report) -> None:
        """Move the place to the next epoch; print and write the report, on rank 0."""
        self.within = {"batch": 0}
        if self.reports is None:
            return
        if self._copies:
            first = self.recorder.meter.step - self.recorder.meter.steps
            report.deaths = [death for death in DeathLog(self.folder).read() if death["step"] >= first]
        self.reports.write(report.record())
        shown = {} if math.isnan(report.loss) else {"cost": report.loss}
        shown |= {f"validation {name}": value for name, value in report.validation.items()}
        said = ", ".join(f"{name} {value:.4g}" for name, value in shown.items())
        sys.stdout.write(
            f"epoch {report.epoch} done: {said}; batch {report.batch}, {report.rows_per_second:,.0f} "
            f"{self.recorder.unit}/s\n"
        )

    def reset_iterator(self, mode: str) -> None:
        """Call the class' ``reset_iter`` with "train" or "val", if it has one: its next batch is the first."""
        method = getattr(self.model, "reset_iter", None)
        if callable(method):
            contract.call_accepted(method, mode)

    # -- files and checkpoints -------------------------------------------------------------------------------

    def save_snapshot(self, epoch: int, last: bool) -> None:
        """Call the class' ``save(path)`` on rank 0, if it has one, every five epochs and at the end."""
        save = getattr(self.model, "save", None)
        if self.worker.number == 0 and callable(save) and (epoch % _SNAPSHOTS == 0 or last):
            (self.folder / "snapshots").mkdir(exist_ok=True)
            save(f"{self.folder / 'snapshots'}{os.sep}")  # classes append a file's name to it

    def save_params(self, name: str) -> None:
        """Write the parameters into an ``.npz`` file, on rank 0.

        As in Lasagne's examples, the arrays are ``arr_0``, ``arr_1`` and so on.
        """
        if self.worker.number == 0:
            params = self.model.params
            if isinstance(self.model, Model) and self.model.ema_params is not None and self.model.validate_ema:
                params = [*self.model.ema_params, *self.model.averages]
            values = [array_device(v).to_host(v) for v in (library_of(p).get(p) for p in params)]
            np.savez(self.folder / name, *values)

    def save_best(self) -> None:
        """Restore the checkpoint of the best epoch, if there is one, and write its parameters; a collective."""
        best = self.worker.broadcast(self.open_checkpoints().best() if self.worker.number == 0 else None)
        if best is not None:
            rank_state.restore_state(self.worker, _KEPT, self.groups, self.rule, str(best), self.shared, False, 0)
            self.state = self.worker.get_storage(_KEPT)["state"]
            rank_state.set_reported_params(self.worker, _KEPT, self.rule)
            self.save_params("best.npz")

    def describe(self) -> dict[str, Any]:
        """Return the description of this run, which has to match that of a checkpoint to resume from."""
        return rank_state.describe_training("run", self.rule, self.groups, None)

    def open_checkpoints(self) -> Checkpoint:
        """Return the run's folder of checkpoints.  Only rank 0 may call this."""
        if self.checkpoint is None:
            folder, settings = self.folder / "checkpoints", self.settings
            self.checkpoint = Checkpoint(folder, settings.keep, keep_best=settings.keep_best)
        return self.checkpoint

    def copy(self, report: Report | None) -> None:
        """Copy the state of all ranks into memory after an epoch, or without its report within an epoch; a collective.

        The copy has parameters as at a report, without messages between ranks.
        """
        began = time.monotonic()
        self.worker.barrier("the ranks are copied")
        if self.worker.number == 0 and self._copy_checkpoint is None:
            assert self._copies is not None
            self._copy_checkpoint = Checkpoint(self._copies, keep=1)
        if report is None:
            self.recorder.write()  # the steps since the last line would be missing from the next one after a death
            rank_state.set_reported_params(self.worker, _KEPT, self.rule)
        try:
            self.save(report, self._copy_checkpoint)
        except OSError as error:
            error.add_note("on_death = 'continue' copies the state of all ranks into /dev/shm: give it more memory")
            raise
        if report is None:
            rank_state.restore_own_params(self.worker, _KEPT)
        self._copy_schedule.adapt(began, self.within["batch"])

    def save(self, report: Report | None, checkpoint: Checkpoint | None = None) -> None:
        """Write a checkpoint of all ranks after an epoch, or without its report within an epoch; a collective.

        Rank 0 writes it to ``checkpoint``, by default the run's.
        """
        is_within = report is None
        if isinstance(self.rule, SummedGradients) and not self.applies_gradients:
            self.rule.store(self.state)
        found = rank_state.collect_state(self.worker, _KEPT, self.groups, False)
        meter = self.recorder.meter
        within = {**self.within, "record": [meter.steps, meter.loss, meter.weight]} if is_within else None
        mine = found, _get_generators(), meter.step, within
        if self.worker.number:
            self.worker.send(mine, 0)
        else:
            gathered = [mine, *map(self.worker.receive, range(1, self.worker.size))]
            meta = {
                "epochs": self.n_reports,
                "model": f"{self.settings.modelfile}:{self.settings.modelclass}",
                "stop": self.early_stop.to_json(),
                "host_generators": [each for _, each, *_ in gathered],
                "totals": [each for _, _, each, _ in gathered],
                "within": [each for *_, each in gathered] if is_within else None,
            }
            states = [found for found, *_ in gathered]
            rank_state.write_states(
                checkpoint or self.open_checkpoints(),
                meter.step,
                self.describe(),
                states,
                self.state.shared,
                False,
                meta,
                {} if report is None else report.metrics,
            )
        self.worker.barrier("the checkpoint is written")

    def resume(self, path: str) -> int:
        """Restore a checkpoint, which rank 0 reads for all ranks; cut the records; return the number of epochs."""
        worker = self.worker
        meta = worker.broadcast(load_meta(path) if worker.number == 0 else None)
        rank_state.check_meta(path, meta, self.describe(), _TYPES)
        self.early_stop = EarlyStop.from_json(meta["stop"])
        if self.settings.keep_best:
            self.early_stop.begin(" ".join(self.settings.keep_best))
        for epoch in range(meta["epochs"]):  # a checkpoint has learning rates in shared variables only
            contract.call_accepted(self.model.adjust_hyperp, epoch)
        if meta["within"]:
            self.skip_trained_batches(meta["epochs"], meta["within"])
        rank_state.restore_state(worker, _KEPT, self.groups, self.rule, path, self.shared, False, 0)
        self.state = worker.get_storage(_KEPT)["state"]
        if isinstance(self.rule, SummedGradients):
            self.rule.restore(self.state)
        self.recorder.meter.step = meta["totals"][worker.number % len(meta["totals"])]
        if worker.number < len(meta["host_generators"]):
            _set_generators(meta["host_generators"][worker.number])
        if worker.number == 0:
            for file in self.folder.glob("*.jsonl"):
                past = meta["epochs"] + (file.stem == "reports")  # reports count completed epochs, from 1
                rank = file.stem.removeprefix("rank-")
                done = -1  # number of steps up to a checkpoint within an epoch
                if meta["within"] and rank.isdecimal() and int(rank) < len(meta["totals"]):
                    done = meta["totals"][int(rank)]

                def stays(line: dict[str, Any], past: int = past, done: int = done) -> bool:
                    return line.get("epoch", past) < past or line.get("step", math.inf) <= done

                cut(file, stays)
        worker.barrier("all go on from the checkpoint")
        return int(meta["epochs"])

    def skip_trained_batches(self, epoch: int, within: list[dict[str, Any]]) -> None:
        """Move the class past the batches of an epoch that were trained on before the checkpoint.

        A class without ``skip_iter`` takes these steps again, to set its attributes.  The checkpoint then overwrites
        the parameters.

        Parameters
        ----------
        epoch : int
            Number of the epoch, from 0.
        within : list of dict
            `within` of each rank of the checkpoint, with its ``record`` of steps, costs and weights.  Another number of
            ranks now gives each of them a proportional number of batches.
        """
        number, size = self.worker.number, self.worker.size
        found = within[number % len(within)]
        sub_batches = contract.get_sub_batches(self.model)
        batches = round(found["batch"] * len(within) / size)
        steps, loss, noted = found["record"]
        if size != len(within):
            steps = batches * sub_batches
        self.within = {**found, "batch": batches, "record": [steps, loss, noted]}
        self.model.epoch = epoch
        _set_generators(found["generators"])
        if callable(getattr(self.model, "skip_iter", None)):
            self.model.skip_iter(batches)
            return
        recorder = ClassRecorder(number, every=sys.maxsize, rows=self.rows)
        for batch in range(batches):
            for _ in range(sub_batches):
                self.worker.progress()
                with use_class_precision():
                    self.model.train_iter(batch, recorder)


def _get_generators() -> dict[str, Any]:
    """Return the states of NumPy's and Python's global generators, in types that JSON can represent."""
    version, numbers, gauss = random.getstate()
    return {
        "numpy": rank_state.to_json(np.random.get_state(legacy=False)),
        "python": [version, list(numbers), gauss],
    }


def _set_generators(found: dict[str, Any]) -> None:
    """Set the states of NumPy's and Python's global generators, as returned by `_get_generators`."""
    np.random.set_state(rank_state.from_json(found["numpy"]))
    version, numbers, gauss = found["python"]
    random.setstate((version, tuple(numbers), gauss))
