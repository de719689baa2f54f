"""Trainers: epochs over data on all ranks, by an exchange rule.

`make_trainer` checks the model and compiles the functions of a step; `Trainer.epochs` checks the data, and trains by a
`TrainerReportLoop`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from synkhronos import ranks
from synkhronos.casts import as_numbers, check_cast
from synkhronos.checks import check_at_least, check_choice, check_flag, check_number, describe, suggest_keywords
from synkhronos.data_objects import Data
from synkhronos.data_objects import data as make_data
from synkhronos.exchange_rules import BSP, EAMSGD, ExchangeRule
from synkhronos.loading import Loader
from synkhronos.loading.loader import set_row_dtypes
from synkhronos.training.checkpoints.checkpoint_folder import CheckpointError, CheckpointFolder
from synkhronos.training.loops.stop_signals import StopSignalHandler, get_stop_signal
from synkhronos.training.monitoring.report import Report
from synkhronos.training.monitoring.validation_metrics import parse_metrics
from synkhronos.training.schedules import Schedule, as_schedule, compute_rate
from synkhronos.training.train_function.extra_updates import UpdatesArgument
from synkhronos.training.train_function.step_options import StepOptions
from synkhronos.training.train_function.training_graph import DataArgument, TrainingGraph
from synkhronos.training.trainer.compiled_model import CompiledModel
from synkhronos.training.trainer.death_recovery import DeathPolicy
from synkhronos.training.trainer.epoch_data import TrainerData, check_enough_rows
from synkhronos.training.trainer.trainer_report_loop import TrainerReportLoop
from synkhronos.training.updates import nesterov_momentum
from synkhronos.training.updates.arguments import find_library
from synkhronos.training.updates.update_rule import UpdateRule
from synkhronos.variable_types import SharedVariable, Variable, Variables


class Trainer:
    """Trains on all ranks by an exchange rule; made by `make_trainer`.

    Attributes
    ----------
    params : list of shared variables
        The trained parameters.  After each report the master has the consensus of all ranks: the centre, or the mean.
        The same applies to `extra_updates` with the op "mean".
    learning_rate : shared variable
        Present learning rate.  Set `schedule` to change it.
    rule : ExchangeRule
    schedule : callable
        Schedule of the learning rate; another one may be set between two reports.
    """

    def __init__(self, model: CompiledModel):
        self._model = model
        self.params, self.rule, self.learning_rate = model.graph.params, model.exchange_rule, model.learning_rate
        #: Loop of the last call of `epochs`.
        self._loop: TrainerReportLoop | None = None

    @property
    def optimizer_state(self) -> list[SharedVariable]:
        """Variables of the update rule, such as velocities."""
        return self._model.optimizer_state

    @property
    def schedule(self) -> Schedule:
        """Schedule of the learning rate."""
        return self._model.schedule

    @schedule.setter
    def schedule(self, schedule: Schedule | float) -> None:
        """Set the schedule, or a constant rate."""
        self._model.schedule = as_schedule(schedule)

    def get_ema(self) -> list[SharedVariable] | None:
        """Return the moving averages of the parameters: see `TrainFunction.get_ema`."""
        return None if self._model.joint_step is None else self._model.joint_step.get_ema()

    # -- epochs --------------------------------------------------------------------------------

    @suggest_keywords
    def epochs(
        self,
        x_data: DataArgument | Loader,
        y_data: DataArgument | None,
        batch_size: int,
        epochs: int,
        *,
        seed: int = 0,
        valid: tuple[DataArgument, DataArgument] | Loader | None = None,
        every: int | None = None,
        patience: int | None = None,
        recorder: Any = None,
        checkpoints: CheckpointFolder | None = None,
        resume: Any = None,
        progress: bool = False,
        grace: float = 30.0,
        on_death: str = "stop",
        max_deaths: int = 100,
    ) -> Iterator[Report]:
        """Train, and report after each epoch.

        Parameters
        ----------
        x_data, y_data : Data or array_like, or list of these
            Data for each variable of `x` and of `y`.  Values are cast to the variables' dtypes if no number changes;
            only float64 is rounded, to float32.  Data objects may grow or shrink between two epochs.
            Alternatively, ``x_data`` is a `synkhronos.loading.Loader` whose rows have an array for each of these
            variables, and ``y_data`` is None.
            On `synkhronos.data_parts` each rank trains on rows of its own host, in the order of `PartsData.batches`;
            an epoch leaves out remaining rows that do not fill a step of all ranks.
        batch_size : int
            Number of rows of one rank in a step.  A step of n ranks has n times as many rows.
        epochs : int
            Total number of epochs, including those of earlier calls, and those before `resume`.
        seed : int
            Seed of the shuffle.  The order of rows differs between epochs, and does not depend on the number of ranks.
            That of `synkhronos.data_parts` depends on the number of ranks of each host.
        valid : pair, or Loader, optional
            Inputs and targets for which `validate` is computed at each report.
        every : int, optional
            Number of steps of each rank between two reports.  Default: an epoch.
        patience : int, optional
            Number of reports without an improvement of a metric after which training stops.  The metric is that of
            ``checkpoints.keep_best``, or else the first value of `validate`; lower is better.  After `resume`, another
            metric starts a new comparison.
        recorder : Recorder, or object with ``write(dict)``, or a list of these, optional
            Objects that get each report as a dict.
        checkpoints : CheckpointFolder, optional
            Folder in which checkpoints are saved.  It is locked until the last report.
        resume : "latest" or path, optional
            Checkpoint from which the training continues: the newest of `checkpoints`, if there is one, or the one at a
            path.
        progress : bool
            Whether to show a progress bar, which needs tqdm.
        grace : float
            Maximal number of seconds for writing a checkpoint after SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2.  It needs
            `checkpoints`, and a signal for which you have not installed a handler.
        on_death : {"stop", "continue"}
            Effect of the death of a worker, such as by SIGKILL when memory runs out: "stop" raises WorkerError;
            "continue" replaces the workers and repeats the last step, see the notes.
        max_deaths : int
            Maximal number of deaths for "continue".  A fourth death since the last copy of the state also ends the
            training: under BSP on gradients, a fourth in the same step.

        Yields
        ------
        Report

        Raises
        ------
        TypeError, ValueError
            For wrong arguments, before the first step.
        FloatingPointError
            If the loss is NaN or infinite; no checkpoint is written then.
        CheckpointError
            If the checkpoint is damaged or of another model, update rule or exchange rule, or if another run writes
            into the folder.
        LoadError, WorkerError
            If a loader can't read a row, or a loader or worker has died.
        SystemExit
            After one of the signals of `grace`, when a checkpoint of the last step has been written.  The status is 128
            plus the signal's number.

        Notes
        -----
        With ``on_death="continue"`` the master keeps a copy of the state of all ranks in memory.  Under BSP on
        gradients it copies after each step.  Under other rules it copies about every second, or at each report if
        the loss has a weight.  After a death new workers start, and all ranks return to the copy, so each row is used
        exactly once.  ``report.deaths`` describes the deaths.  :ref:`deaths` has the details: ranks that can't start
        again, JAX and CUDA, several hosts.
        """
        loader = self._get_loader(x_data, y_data)
        if loader is not None:
            set_row_dtypes(loader, [*self._model.graph.x, *self._model.graph.y])
        data, count = ([], len(loader)) if loader else self._make_data(x_data, y_data, "x_data, y_data")
        batch_size, epochs = check_at_least(batch_size, "batch_size", 1), check_at_least(epochs, "epochs", 1)
        seed = check_at_least(seed, "seed", 0)
        if not 0 < check_number(grace, "grace", "a number of seconds") <= threading.TIMEOUT_MAX:
            raise ValueError(f"grace: expected a positive number of seconds, got {grace!r}")
        for name, value in (("every", every), ("patience", patience)):
            if value is not None:
                check_at_least(value, name, 1)
        check_enough_rows(count, batch_size)
        valid_data = self._make_validation_data(valid)
        self._check_metric(valid is not None, patience, checkpoints)
        recorders = list(recorder) if isinstance(recorder, list | tuple) else [] if recorder is None else [recorder]
        for candidate in recorders:
            if not hasattr(candidate, "write"):
                raise TypeError(
                    f"recorder: expected something with a method write(dict), such as a Recorder, got {candidate!r}"
                )
        if checkpoints is not None and not isinstance(checkpoints, CheckpointFolder):
            raise TypeError(f"checkpoints: expected a CheckpointFolder, got {checkpoints!r}")
        if resume is not None and not isinstance(resume, str | os.PathLike):
            raise TypeError(f"resume: expected 'latest' or a path, got {resume!r}")
        if resume == "latest" and checkpoints is None:
            raise ValueError("resume: expected a path, or checkpoints=..., in which to look for the latest")
        check_choice(on_death, "on_death", ("stop", "continue"))
        max_deaths, death_policy = check_at_least(max_deaths, "max_deaths", 1), DeathPolicy()
        if on_death == "continue":
            death_policy = self._model.make_recovery_policy(max_deaths)
        loop = TrainerReportLoop(
            model=self._model,
            data=TrainerData(data, count, batch_size, seed, loader),
            n_epochs=epochs,
            steps_per_report=every,
            valid=valid_data,
            patience=patience,
            recorders=recorders,
            checkpoints=checkpoints,
            shows_progress_bar=check_flag(progress, "progress"),
            death_policy=death_policy,
        )
        return self._train_and_report(loop, resume, grace)

    def _make_validation_data(self, valid: Any) -> tuple[list[Data], int] | Loader | None:
        """Return the validation data and their number of rows, or their loader."""
        if valid is None:
            return None
        if not isinstance(valid, Loader) and not (isinstance(valid, list | tuple) and len(valid) == 2):
            raise TypeError(f"valid: expected inputs and targets in a pair, or a Loader, got {type(valid).__name__}")
        if not self._model.metrics:
            raise ValueError("valid: make_trainer needs validate=..., the expressions to compute on validation data")
        if isinstance(valid, Loader):
            set_row_dtypes(valid, [*self._model.graph.x, *self._model.graph.y])
            return valid
        return self._make_data(valid[0], valid[1], "valid")

    def _check_metric(self, has_validation: bool, patience: int | None, checkpoints: CheckpointFolder | None) -> None:
        """Check that reports will have the metric of ``keep_best`` and of ``patience``."""
        keep_best = checkpoints.keep_best if isinstance(checkpoints, CheckpointFolder) else None
        if patience is not None and not has_validation and keep_best is None:
            raise ValueError("patience: expected validation data, valid=..., to compare")
        names = ["loss", *(self._model.metrics if has_validation else ())]
        if keep_best is not None and keep_best[0] not in names:
            raise ValueError(f"checkpoints: keep_best expects one of {', '.join(names)}, got {keep_best[0]!r}")

    def _train_and_report(self, loop: TrainerReportLoop, resume: object, grace: float) -> Iterator[Report]:
        checkpoints = loop.checkpoints
        with contextlib.ExitStack() as stack:
            if checkpoints is not None:
                checkpoints.lock()
                stack.callback(checkpoints.unlock)
                stack.enter_context(StopSignalHandler(grace))
            self._loop = loop
            loop.begin(resume)
            if resume is None and loop.is_over():
                reason = f"the total, epochs={loop.n_epochs}, includes the {loop.position.epoch} of earlier calls"
                if loop.is_patience_exhausted():
                    reason = "an earlier call has stopped by patience"
                warnings.warn(f"Trainer.epochs() has nothing left to train: {reason}", RuntimeWarning, stacklevel=2)
            stack.enter_context(loop.death_policy.enable_recovery())
            yield from loop.train_and_report()
            if checkpoints is not None and get_stop_signal():
                raise SystemExit(128 + get_stop_signal())

    def restore_best(self) -> Path:
        """Restore all ranks from the best checkpoint of the last call of `epochs`, and return its path.

        Parameters, the update rule's variables, random streams and the position in the data are then those of the best
        report.  To train on from there, call `epochs` with the path as ``resume``.

        Raises
        ------
        RuntimeError
            If `epochs` was not called on these ranks with `checkpoints` that have a `keep_best`.
        CheckpointError
            If there is none, or it is damaged.
        """
        loop = self._loop
        checkpoints = None if loop is None or loop.session is not ranks.get_session() else loop.checkpoints
        if loop is None or checkpoints is None or checkpoints.keep_best is None:
            raise RuntimeError(
                "restore_best(): expected a call of epochs(..., checkpoints=CheckpointFolder(folder, keep_best=...)) "
                "before it"
            )
        path = checkpoints.find_best()
        if path is None:
            raise CheckpointError(
                f"{checkpoints.folder}: expected a checkpoint with {checkpoints.keep_best[0]}, found none"
            )
        self._model.state.restore(path, loop.data, self.schedule)
        return path

    # -- data ------------------------------------------------------------------------------------------------

    def _get_loader(self, x_data: object, y_data: object) -> Loader | None:
        """Return the data's loader, or None for arrays.  Raise TypeError or ValueError if it can't be used."""
        if not isinstance(x_data, Loader):
            if isinstance(y_data, Loader):
                raise TypeError("y_data: expected arrays, or None and one loader of all inputs as x_data, got a loader")
            return None
        if self._model.joint_step is None and ranks.get_session().rank.spans_hosts:
            raise ValueError(
                "x_data: on several hosts a Loader needs the exchange rule BSP() on gradients, since its rows are in "
                "the memory of this host: expected arrays, data_file or data_parts"
            )
        if y_data is not None:
            raise TypeError(f"y_data: expected None, as the loader has all inputs, got {type(y_data).__name__}")
        return x_data

    def _make_data(self, x_data: Any, y_data: Any, name: str) -> tuple[list[Data], int]:
        """Return a Data object for each input, and their number of rows."""
        arrays = self._model.graph.parse_data(x_data, y_data, None, None)
        variables = [*self._model.graph.x, *self._model.graph.y]
        data = []
        for array, variable in zip(arrays, variables, strict=True):
            if not isinstance(array, Data):
                array = as_numbers(array, f"{name}: {describe(variable)}")
                check_cast(array, variable.type.dtype, f"{name}: {describe(variable)}")
                array = make_data(array, var=variable, force_cast=True)
            data.append(array)
        lengths = {len(array) for array in data}
        if len(lengths) != 1 or not min(lengths):
            raise ValueError(f"{name}: expected equally many rows of each, at least one, got {[*map(len, data)]}")
        return data, lengths.pop()


def make_trainer(
    loss: Variable,
    params: Sequence[SharedVariable],
    x: Variables,
    y: Variables,
    update_rule: UpdateRule,
    rule: ExchangeRule | None = None,
    learning_rate: Schedule | float = 0.01,
    validate: Mapping[str, Any] | Sequence[Any] | Any = None,
    extra_updates: UpdatesArgument | None = None,
    weight: Variable | None = None,
    clip_norm: float | None = None,
    num_slices: int = 1,
    ema: float | None = None,
    validate_ema: bool = False,
    loss_scale: str | None = None,
    shard_optimizer: bool = False,
    **update_rule_kwargs: Any,
) -> Trainer:
    """Make a trainer: epochs over data, on all ranks, by an exchange rule.

    Call `synkhronos.fork` first.

    Parameters
    ----------
    loss, params, x, y, update_rule
        As for `synkhronos.training.make_train_function`.
    rule : ExchangeRule, optional
        Exchange rule of `synkhronos.exchange_rules`, not to be confused with `update_rule`.  Default: `BSP`.
    learning_rate : float or callable
        A number, or a schedule: see `synkhronos.training.schedules`.
    validate : dict of str to metric, or list of metrics, or metric, optional
        Values to compute on validation data.  `patience` and `schedules.plateau` use the first.  A metric is a scalar
        variable that is a mean over rows; or ``(variable, op)``, reduced over batches and ranks by an op of :ref:`ops`,
        such as "max"; or ``(variable, "mean", weight)`` with a scalar variable, such as the sum of a mask.
    extra_updates, weight
        As for `synkhronos.training.make_train_function`.  Updates with the op "mean" are exchanged with the parameters;
        at a report the master has the values of all ranks.  Losses in reports and records are means with the weight.
    clip_norm, num_slices, ema, loss_scale, shard_optimizer
        As for `synkhronos.training.make_train_function`.  They need a `rule` that averages gradients, which is the
        default.  `Trainer.get_ema` returns the averages.  Checkpoints hold them and the whole optimizer's state, so
        that trainers resume on any number of ranks.
    validate_ema : bool, optional
        Whether `validate` is computed with the averages of `ema` instead of the parameters.
    **update_rule_kwargs
        Options of the update rule, such as ``momentum=0.9``.

    Warns
    -----
    UserWarning
        If a mean of `loss`, `validate` or `extra_updates` has a denominator that depends on the values of inputs, and
        no weight was given.

    Examples
    --------
    >>> import numpy as np
    >>> import pytensor, pytensor.tensor as pt
    >>> import synkhronos as synk
    >>> from synkhronos import exchange_rules
    >>> from synkhronos.training.updates import sgd
    >>> x, y = pt.matrix("x"), pt.vector("y")
    >>> w = pytensor.shared(np.zeros(3), name="w")
    >>> loss = ((x @ w - y) ** 2).mean()
    >>> n = synk.fork(2, use_gpu=False)
    >>> trainer = make_trainer(loss, [w], x, y, sgd, exchange_rules.LocalSGD(5), learning_rate=0.1)
    >>> rows = np.random.default_rng(0).normal(size=(200, 3))
    >>> for report in trainer.epochs(rows, rows @ [1.0, 2.0, 3.0], batch_size=5, epochs=10):
    ...     pass
    >>> print(w.get_value().round(2), report.batch_description)
    [1. 2. 3.] 2 x 5 = 10
    >>> synk.close()
    """
    rule = BSP() if rule is None else rule
    if not isinstance(rule, ExchangeRule):
        raise TypeError(f"rule: expected one of synkhronos.exchange_rules, such as EASGD(), got {rule!r}")
    if isinstance(rule, EAMSGD):
        if update_rule is not nesterov_momentum:
            raise ValueError(f"update_rule: EAMSGD needs nesterov_momentum, got {update_rule!r}")
        if update_rule_kwargs.setdefault("momentum", rule.momentum) != rule.momentum:
            raise ValueError(f"momentum: EAMSGD has {rule.momentum}, got {update_rule_kwargs['momentum']!r}")
    options = StepOptions(clip_norm, num_slices, ema, validate_ema, loss_scale, shard_optimizer)
    if not rule.averages_gradients:
        for name in options.non_defaults:
            raise ValueError(f"{name}: needs the exchange rule BSP() on gradients, got {rule!r}")
    schedule = as_schedule(learning_rate)
    library = find_library("loss: expected a symbolic scalar", loss)
    first = params[0] if isinstance(params, list | tuple) and params else None
    dtype = getattr(getattr(first, "type", None), "dtype", library.floatX)
    # The rate has at least float32, since 1e-5 has few digits in float16.  Update rules cast it to their own dtype.
    dtype = np.result_type(dtype, np.float32)
    rate = library.shared(np.asarray(compute_rate(schedule, 0.0), dtype), name="learning_rate")
    update_rule_kwargs = {"learning_rate": rate, **update_rule_kwargs}
    graph = TrainingGraph(loss, params, x, y, update_rule, update_rule_kwargs, options, None, extra_updates, weight)
    graph.warn_of_varying_denominators()
    metrics = parse_metrics(validate, [*graph.x, *graph.y])
    return Trainer(CompiledModel(graph, rule, rate, schedule, metrics))
