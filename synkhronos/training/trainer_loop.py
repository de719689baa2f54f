"""The loop over the epochs of a model, in the master.

Epochs are divided into intervals between reports.  In each, either the master takes the steps of all ranks together, or
every rank runs a loop of its own::

    TrainerLoop.train() --> BSP on gradients: CommandLoop in the master
                        --> other rules:      RowLoop on every rank
"""

from __future__ import annotations

import itertools
import math
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import synkhronos as synk
from synkhronos import ranks
from synkhronos.checks import describe
from synkhronos.data import Data
from synkhronos.data.parts import iterate_ordered_batches
from synkhronos.loading import Loader, LoadError
from synkhronos.loading.loader import Feed, record_position
from synkhronos.ranks import WorkerError
from synkhronos.tasks import run
from synkhronos.training import rank_state, schedules
from synkhronos.training.checkpoint import Checkpoint
from synkhronos.training.compiled_model import CompiledModel
from synkhronos.training.early_stop import EarlyStop
from synkhronos.training.epoch_data import EpochData, IntervalPlan, Source, check_rows, get_rank_pools
from synkhronos.training.epoch_loop import EpochLoop
from synkhronos.training.loop import CommandLoop, make_loss_reader, train_interval
from synkhronos.training.meter import Meter, Outcome, split_outcomes
from synkhronos.training.metrics import MetricTotals
from synkhronos.training.nonfinite import describe_nonfinite
from synkhronos.training.progress import Progress
from synkhronos.training.recorder import Recorder
from synkhronos.training.report import Report, make_report
from synkhronos.training.stop import get_requested_stop
from synkhronos.training.survival import DeathHandler


@dataclass(eq=False)
class TrainerLoop(EpochLoop):
    """Loop over the epochs of one call of `Trainer.epochs`, in the master."""

    model: CompiledModel
    data: EpochData
    n_epochs: int
    #: Number of each rank's steps in an interval; None for those of an epoch.
    every: int | None
    #: Validation data and their number of rows.
    valid: tuple[list[Data], int] | Loader | None
    patience: int | None
    #: Objects with ``write``.
    recorders: list[Any]
    checkpoint: Checkpoint | None
    #: Whether to show a progress bar.
    shows_progress: bool
    #: Handler of the deaths of workers.
    survival: DeathHandler

    def __post_init__(self) -> None:
        self.first_metric = "loss" if self.valid is None else next(iter(self.model.metrics))
        keep_best = None if self.checkpoint is None else self.checkpoint.keep_best
        self.metric = keep_best or (self.first_metric, "min")
        self.saves_best = keep_best is not None
        self.checkpoint_every = 0 if self.checkpoint is None else self.checkpoint.every

    @property
    def progress(self) -> Progress:
        """Progress of the trainer, which `Trainer.restore_best` may change between two reports."""
        return self.model.state.progress

    @property
    def early_stop(self) -> EarlyStop:
        """Best report so far."""
        return self.progress.early_stop

    def begin(self, resume: Any) -> None:
        """Allocate shared memory, and restore a checkpoint if ``resume`` names one."""
        model, checkpoint, state = self.model, self.checkpoint, self.model.state
        self.session = ranks.get_session()
        state.begin(self.session, model)
        self.batches_taken = synk.data(shape=(self.session.size + 1,), dtype="int64")
        self.data.allocate_order()
        if resume == "latest":
            assert checkpoint is not None
            resume = next(reversed(checkpoint.paths()), None)
        if resume is not None:
            seen = state.restore(resume, self.data, model.schedule)
            self._cut_records(seen)
        elif self.progress.row and self.progress.order != (self.data.count, self.data.seed):
            count, seed = self.progress.order
            raise ValueError(
                f"x_data, seed: expected {count:,} rows and seed {seed}, since the last call ended within an epoch of "
                f"these, got {self.data.count:,} and {self.data.seed}"
            )
        elif checkpoint is not None:
            checkpoint.check_no_later(self.progress.seen)
        measure = "loss" if self.valid is None else f"validation {self.first_metric}"
        if self.metric != (self.first_metric, "min"):
            measure += f", {' '.join(self.metric)}"
        if self.early_stop.begin(measure):
            schedules.reset_best(model.schedule)

    def _cut_records(self, seen: int) -> None:
        """Remove the records of steps after ``seen`` rows, which are taken again."""
        for recorder in self.recorders:
            if isinstance(recorder, Recorder):
                recorder.cut(seen)

    def is_complete(self) -> bool:
        """Whether all epochs are trained."""
        return self.progress.epoch >= self.n_epochs

    def is_signalled(self) -> bool:
        """Whether a signal stops the training."""
        return self.checkpoint is not None and bool(get_requested_stop())

    # -- an interval -----------------------------------------------------------------------------------------

    def train(self) -> bool:
        """Train to the next report; return whether a signal has stopped it before."""
        self.survival.copy()
        progress = self.progress
        if not progress.row:
            self._begin_epoch()
        self.last = self._end_interval(progress.start)
        if self.last < progress.row:  # of a checkpoint of more ranks
            self.last = self._end_interval(progress.row)
        if self.model.joint_step is not None:
            while progress.row < self.last and not self.is_signalled():  # again if a rank has been left out
                progress.row, progress.outcomes = self._train_interval(self.last)
            return self.is_signalled()
        while progress.row < self.last and not self.is_signalled():
            began = time.perf_counter()
            progress.row, progress.outcomes = self.survival.change(self._make_attempt())
            self.survival.adapt(time.perf_counter() - began)
        return self.is_signalled()

    def _begin_epoch(self) -> None:
        """Take all rows that the data have now into the epoch."""
        data = self.data
        length = data.find_length()
        if length != data.length or get_rank_pools(data.data) != data.pools:  # some rank has been left out
            check_rows(length, data.batch)
            self.data = EpochData(data.data, length, data.batch, data.seed, data.loader)
            self.data.allocate_order()
        self.progress.order = self.data.count, data.seed

    def _make_attempt(self) -> Callable[[], tuple[int, list[Outcome]]]:
        """Return a function that trains until the next copy of the ranks' state; a repeated call is another attempt."""
        progress, attempts = self.progress, itertools.count()
        last = min(self.last, progress.row + self._count_rows_ahead())

        def attempt() -> tuple[int, list[Outcome]]:
            if next(attempts):
                self._cut_records(progress.seen)
            return self._train_interval(last)

        return attempt

    def _count_rows_ahead(self) -> int:
        """Return the number of rows until the next copy of the ranks' state."""
        steps = self.survival.steps_ahead
        if steps is None or self.model.graph.weight is not None:  # weights are counted within an interval
            return self.data.count
        return steps * self.data.batch * ranks.get_session().size

    def _end_interval(self, row: int) -> int:
        """Return the position of the next report after a position."""
        if self.every is None:
            return self.data.count
        return min(self.data.count, row + self.every * self.data.batch * ranks.get_session().size)

    def _make_plan(self, last: int) -> IntervalPlan:
        """Return the plan of an interval, from the present position to another."""
        model, data, progress = self.model, self.data, self.progress
        return IntervalPlan(
            name=model.state.training.name,
            first=progress.row,
            last=last,
            batch=data.batch,
            epoch=progress.epoch,
            count=data.count,
            rows_before=progress.rows_before,
            schedule=model.schedule,
            recorders=[recorder for recorder in self.recorders if isinstance(recorder, Recorder)],
            shows_progress=self.shows_progress,
            pools=get_rank_pools(data.data) or [range(ranks.get_session().size)],
            can_stop=self.checkpoint is not None,
            earlier_outcomes=split_outcomes(
                progress.outcomes, 1 if model.joint_step is not None else ranks.get_session().size
            ),
            has_weight=model.graph.weight is not None,
        )

    def _train_interval(self, last: int) -> tuple[int, list[Outcome]]:
        """Train up to a position, or until a signal; return the position, and the ranks' outcomes."""
        plan, loader = self._make_plan(last), self.data.loader
        together = self.model.joint_step is not None
        try:
            source = self.data.make_source(plan.epoch, plan.first, together)
            ended = [self._take_joint_steps(plan, source)] if together else self._run_rank_loops(plan, source)
            end, outcomes = min(end for end, _ in ended), [outcome for _, outcome in ended]
            if loader is not None and isinstance(source, Feed):
                record_position(loader, source, end)
            if end == plan.last and not any(outcome.rows for outcome in outcomes):
                raise LoadError(
                    f"none of the rows from {plan.first:,} to {end:,} of epoch {plan.epoch} could be read",
                    plan.epoch,
                    end,
                )
        except (LoadError, WorkerError):
            if loader is not None:
                loader.close()  # one may have died
            raise
        return end, outcomes

    def _run_rank_loops(self, plan: IntervalPlan, source: Source) -> list[tuple[int, Outcome]]:
        """Run a `RowLoop` on every rank, which takes its own steps; return their ends and outcomes."""
        model, state = self.model, self.model.state
        if len(self.batches_taken) != ranks.get_session().size + 1:  # some rank has been left out
            self.batches_taken = synk.data(shape=(ranks.get_session().size + 1,), dtype="int64")
        self.batches_taken[...] = 0
        exchanged = state.groups.params, state.groups.optimizer, state.groups.n_averages
        ended: list[tuple[int, Outcome]] = run(
            train_interval,
            plan,
            model.rule,
            model.rank_step,
            model.learning_rate,
            exchanged,
            source,
            self.batches_taken,
            state.training.memory,
        )
        return ended

    def _take_joint_steps(self, plan: IntervalPlan, source: Source) -> tuple[int, Outcome]:
        """Run a `CommandLoop`, each of whose steps is one command of all ranks; return its end and outcome."""
        model, progress = self.model, self.progress
        assert model.joint_step is not None
        meter = Meter(0, plan.recorders, make_loss_reader(list, plan.has_weight), model.kinds, progress.steps)
        if plan.earlier_outcomes:
            meter.begin(plan.earlier_outcomes[0])
        rows = plan.batch * ranks.get_session().size
        loop = CommandLoop(
            plan, source, meter, rows, model.graph, model.joint_step, model.learning_rate, model.state.rate,
            self.survival,
        )  # fmt: skip
        try:
            loop.run()
        finally:
            model.state.rate = loop.rate
        loop.write_lines(last=True)
        progress.steps = meter.step
        return loop.end, meter.get_outcome(loop.rate)

    def make_report(self) -> Report:
        """Return the report of the interval, without validation."""
        progress, data, n_ranks = self.progress, self.data, ranks.get_session().size
        return make_report(
            progress.outcomes,
            progress.epoch + self.last / data.count,
            progress.rows_before + self.last,
            f"{n_ranks} x {data.batch} = {n_ranks * data.batch}",
        )

    def validate(self, report: Report) -> bool:
        """Compute the metrics over all rows, each row counted once; return whether a signal has stopped it."""
        survival = self.survival
        streams = self.model.state.training.groups.generators if self.checkpoint is not None else []
        states = survival.run(lambda: run(rank_state.collect_streams, streams)) if streams else []
        is_stopped = survival.change(lambda: self._validate(report))  # random streams of the metrics advance
        if is_stopped and streams:  # a resumed training repeats the validation
            survival.change(lambda: run(rank_state.restore_streams, streams, states))
        return is_stopped

    def _validate(self, report: Report) -> bool:
        model, valid = self.model, self.valid
        if valid is None:
            return False
        assert model.validation is not None
        if model.graph.options.validate_ema:
            _ = model.ema  # gathers the averages
        totals, step = MetricTotals(model.metrics), self.data.batch * ranks.get_session().size
        batches: Iterable[Any]
        if isinstance(valid, Loader):
            batches = valid.epoch(0, step)
        elif get_rank_pools(valid[0]):
            batches = iterate_ordered_batches(valid[1], step, ranks.get_session().size)
        else:
            batches = (slice(start, min(valid[1], start + step)) for start in range(0, valid[1], step))
        for rows in batches:
            if totals.rows and self.is_signalled():
                break
            data = valid.data if isinstance(valid, Loader) else valid[0]  # a loader has data from its first batch on
            values = model.validation(*data, batch=rows)
            totals.add(values, rows.stop - rows.start if isinstance(rows, slice) else len(rows))
        if not totals.rows:
            raise LoadError("none of the rows of the validation data could be read")
        report.validation = totals.results()
        return self.is_signalled()

    def complete(self, report: Report) -> None:
        """Move the progress to the next interval, and pass the report to the recorders.

        Raises
        ------
        FloatingPointError
            If the loss or a metric is infinite or NaN.
        """
        if not all(map(math.isfinite, [report.loss, *report.validation.values()])):
            raise FloatingPointError(
                f"the loss is {report.loss} after {report.seen:,} rows, validation {report.validation}: "
                f"{self._explain_nonfinite(report)}; nothing was saved since"
            )
        progress, is_epoch_over = self.progress, self.last == self.data.count
        progress.outcomes, progress.metrics = [], report.metrics
        progress.row = progress.start = 0 if is_epoch_over else self.last
        progress.epoch += is_epoch_over
        progress.rows_before += self.data.count if is_epoch_over else 0
        report.deaths = self.survival.take_deaths()
        for recorder in self.recorders:
            recorder.write(report.record())

    def _explain_nonfinite(self, report: Report) -> str:
        """Return a likely cause of a NaN or infinite loss: a row of the data, or else the learning rate."""
        graph, data, valid = self.model.graph, self.data, self.valid
        x, y = ([describe(v) for v in variables] for variables in (graph.x, graph.y))
        message = ""
        if data.loader is None:
            names = [*(f"x_data, {name}," for name in x), *(f"y_data, {name}," for name in y)]
            rows = data.order.data[self.progress.start : self.last]
            message = describe_nonfinite(dict(zip(names, data.data, strict=True)), rows)
        if not message and isinstance(valid, tuple):
            names = [f"valid, {name}," for name in (*x, *y)]
            message = describe_nonfinite(dict(zip(names, valid[0], strict=True)))
        return message or f"the learning rate of {report.learning_rate:g} may be too high"

    def adapt(self, report: Report) -> None:
        """Let the schedule observe the first metric of the validation, or the loss."""
        observe: Callable[[float], None] | None = getattr(self.model.schedule, "observe", None)
        if observe is not None:
            observe(next(iter(report.validation.values()), report.loss))

    def save(self, report: Report) -> None:
        """Write a checkpoint after a report."""
        self._save(report.seen)

    def _save(self, seen: int) -> None:
        checkpoint, model = self.checkpoint, self.model
        assert checkpoint is not None

        self.survival.run(lambda: model.state.save(checkpoint, self.data, model.schedule, seen))

    def stop(self) -> NoReturn:
        """Save the progress between two reports, and exit with the status of the signal."""
        number = get_requested_stop()
        message, progress, checkpoint = f"{signal.Signals(number).name}: training ends", self.progress, self.checkpoint
        assert checkpoint is not None
        if all(math.isfinite(outcome.loss) for outcome in progress.outcomes):
            self._save(progress.seen)
            message += f"; go on with resume={str(checkpoint.path(progress.seen))!r}"
        sys.stderr.write(f"{message}\n")
        raise SystemExit(128 + number)
