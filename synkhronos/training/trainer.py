"""Epochs over data, by an exchange rule, on all ranks.

`make_trainer`
    Makes a trainer.
`Trainer`
    Goes through epochs.
`Report`
    What it says after each.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import synkhronos as synk
from synkhronos import ranks
from synkhronos.checks import at_least
from synkhronos.data import Data
from synkhronos.data.parts import PartsData, batches, in_order
from synkhronos.graphs import library_of
from synkhronos.loading import Loader, LoadError
from synkhronos.loading.loader import Feed
from synkhronos.ranks import WorkerError
from synkhronos.rules import BSP, EAMSGD, Rule, shared_memory
from synkhronos.rules.state import Vector
from synkhronos.tasks import run
from synkhronos.training import interval, schedules, storing
from synkhronos.training.checkpoint import Checkpoint, CheckpointError, Stored, load
from synkhronos.training.model import Model, Rows, Updates, by_own_gradient, is_averaged
from synkhronos.training.model import Rule as UpdateRule
from synkhronos.training.recorder import Recorder
from synkhronos.training.schedules import Schedule, as_schedule
from synkhronos.training.train_function import TrainFunction
from synkhronos.training.updates import nesterov_momentum

_names = itertools.count()


@dataclass
class Report:
    """What a trainer says from time to time; printed, it is a line.

    Attributes
    ----------
    epoch : float
        The epochs trained so far.
    seen : int
        The rows.
    steps : int
        The steps of all ranks together since the last report; of BSP on gradients, in which all take a step together,
        those.
    loss : float
        The mean over the rows since the last report, each before the step that it was in.
    validation : dict of str to float
        The means over all rows of the validation data.
    learning_rate : float
        The last.
    rows_per_second : float
        Of all ranks together, since the last report, without the time in which functions were compiled.
    seconds : dict of str to float
        What the ranks did, on average: compute, exchange, wait, load.
    batch : str
        Rows in a step: ranks times the rows of each.
    """

    epoch: float
    seen: int
    steps: int
    loss: float
    validation: dict[str, float]
    learning_rate: float
    rows_per_second: float
    seconds: dict[str, float]
    batch: str

    def record(self) -> dict[str, Any]:
        """Return it as a dict."""
        return dict(vars(self))

    def __str__(self) -> str:
        valid = "".join(f", {name} {value:.4g}" for name, value in self.validation.items())
        whole = sum(self.seconds.values()) or 1.0
        shares = " ".join(f"{name} {value / whole:.0%}" for name, value in self.seconds.items() if value)
        return (
            f"epoch {self.epoch:g}: loss {self.loss:.4g}{valid}; batch {self.batch}, "
            f"learning rate {self.learning_rate:.3g}, {self.rows_per_second:,.0f} rows/s ({shares})"
        )


@dataclass
class _Place:
    """How far a trainer has come.

    Attributes
    ----------
    epoch, row : int
        The next row is at this place of this epoch's order.
    best : float
        The best value of validation so far.
    since : int
        The reports since then.
    """

    epoch: int = 0
    row: int = 0
    best: float = math.inf
    since: int = 0


class Trainer:
    """Trains on all ranks by an exchange rule; made by `make_trainer`.

    Attributes
    ----------
    params : list of shared variables
        After each report their values in the master are those that stand for all ranks': the centre, or the mean.
    optimizer : list of shared variables
        What the update rule remembers of them.
    learning_rate : shared variable
    rule : Rule
    """

    def __init__(
        self,
        model: Model,
        params: list[Any],
        rule: Rule,
        learning_rate: Any,
        schedule: Schedule,
        validate: dict[str, Any],
    ):
        self.params, self.rule, self.learning_rate, self.schedule = params, rule, learning_rate, schedule
        self.optimizer = [shared for shared in model.rule.param_updates if all(shared is not p for p in params)]
        self._model = model
        self._name = f"trainer {next(_names)}"
        excluded = [rule.exclude is not None and bool(rule.exclude(p)) for p in params]
        self._exchanged = [p for p, out in zip(params, excluded, strict=True) if not out]
        if not self._exchanged:
            raise ValueError("exclude: expected it to leave some parameter to be exchanged, but it excludes all")
        self._excluded = [p for p, out in zip(params, excluded, strict=True) if out]
        optimizer = self.optimizer
        if len(optimizer) == len(params):  # one for each, as velocities are: those of the parameters exchanged
            optimizer = [s for s, out in zip(optimizer, excluded, strict=True) if not out]
        self._exchanged_optimizer = [s for s in optimizer if np.dtype(s.type.dtype).kind == "f"]
        known = {id(s) for s in [*self._exchanged, *self._excluded, *self._exchanged_optimizer]}
        self._others = [s for s in [*self.optimizer, *(s for s, _ in model.extra_updates)] if id(s) not in known]
        self._others = [s for s in self._others if is_averaged(s) or hasattr(s.type, "dtype")]
        self._validate = validate
        inputs = [*model.x, *model.y]
        self._validation = None
        if validate:
            self._validation = synk.function(inputs, [(v, "mean") for v in validate.values()], name="validation")
        self._together: TrainFunction | None = None
        self._step: synk.Function | None = None
        if isinstance(rule, BSP) and rule.average == "gradient":
            self._together = TrainFunction(model, rule.precision)
        else:
            self._step = _local_step(model)
        variables = [*inputs, model.loss, *(expression for _, expression in model.extra_updates)]
        library = library_of(model.loss)
        self._generators = [s for s in library.shareds(variables) if library.is_generator(s)]
        self._session: Any = None
        self._memory: dict[str, Data] = {}
        self._place = _Place()
        self._steps_taken, self._rate = 0, -1.0
        self._kinds: set[Any] = set()

    # -- going through epochs --------------------------------------------------------------------------------

    def epochs(
        self,
        x_data: Rows | Loader,
        y_data: Rows | None,
        batch_size: int,
        epochs: int,
        *,
        seed: int = 0,
        valid: tuple[Rows, Rows] | Loader | None = None,
        every: int | None = None,
        patience: int | None = None,
        recorder: Any = None,
        checkpoint: Checkpoint | None = None,
        resume: Any = None,
        progress: bool = False,
    ) -> Iterator[Report]:
        """Train, and report after each epoch.

        Parameters
        ----------
        x_data, y_data : Data or array_like, or list of these
            One for each variable of `x` and of `y`.  Of `synkhronos.data_parts` each rank takes rows of its own host,
            in the order of `PartsData.batches`; an epoch leaves out those that make no whole step of all ranks.
            Or a `synkhronos.loading.Loader` whose rows have an array for each of all these variables; ``y_data`` is
            None then.
        batch_size : int
            The rows of a rank's step: all ranks together take as many times more.
        epochs : int
            How often to go through the data, all in all.
        seed : int
            Of the order of rows, which differs from epoch to epoch, and does not depend on the number of ranks; of
            `synkhronos.data_parts` it depends on how many ranks each host has.
        valid : pair, or Loader, optional
            Inputs and targets on which to compute `validate` at each report.
        every : int, optional
            The steps of each rank between two reports; by default an epoch's.
        patience : int, optional
            Stop when the first value of `validate` has not got lower for so many reports.
        recorder : Recorder, or anything with ``write(dict)``, or a list of these, optional
            What gets the reports.
        checkpoint : Checkpoint, optional
            Where to save.
        resume : "latest" or path, optional
            Go on from a checkpoint: the newest of `checkpoint`'s if there is one, or that of a path.
        progress : bool
            Show a progress bar; needs tqdm.

        Yields
        ------
        Report

        Raises
        ------
        TypeError, ValueError
            For wrong arguments, before anything is trained.
        FloatingPointError
            If the loss is no number any more; no checkpoint is written then.
        CheckpointError
            If what to go on from is damaged, or of another model.
        LoadError, WorkerError
            If a loader can't read a row, or has died.
        """
        loader = self._loader(x_data, y_data)
        data, count = ([], len(loader)) if loader else self._data(x_data, y_data, "x_data, y_data")
        for name, value in (("batch_size", batch_size), ("epochs", epochs), ("every", every), ("patience", patience)):
            if value is not None or name not in ("every", "patience"):
                at_least(value, name, 1)
        session = ranks.session()
        if batch_size * session.size > count:
            raise ValueError(
                f"batch_size: {session.size} ranks times {batch_size} rows are more than the {count} rows of the data"
            )
        if valid is not None and not self._validate:
            raise ValueError("valid: make_trainer(validate=...) has to say what to compute on it")
        if patience is not None and valid is None:
            raise ValueError("patience: expected validation data, valid=..., by which to stop")
        if isinstance(valid, Loader):
            valid.cast_to([*self._model.x, *self._model.y])
        valid_data = valid if valid is None or isinstance(valid, Loader) else self._data(valid[0], valid[1], "valid")
        recorders = list(recorder) if isinstance(recorder, list | tuple) else [] if recorder is None else [recorder]
        for one in recorders:
            if not hasattr(one, "write"):
                raise TypeError(f"recorder: expected something with a method write(dict), got {one!r}")
        if resume is not None and checkpoint is None and resume == "latest":
            raise ValueError("resume: expected a path, or checkpoint=... whose latest is meant")
        return self._epochs(
            _Course(data, count, int(batch_size), int(epochs), int(seed), every, progress, loader, _pools(data)),
            valid_data,
            patience,
            recorders,
            checkpoint,
            resume,
        )

    def _epochs(
        self,
        course: _Course,
        valid: tuple[list[Data], int] | Loader | None,
        patience: int | None,
        recorders: list[Any],
        checkpoint: Checkpoint | None,
        resume: Any,
    ) -> Iterator[Report]:
        self._begin(course, resume, checkpoint, recorders)
        place, reports = self._place, 0
        while place.epoch < course.epochs:
            first, last = place.row, course.end(place.row, ranks.session().size)
            report = self._interval(course, place.epoch, first, last, recorders)
            place.row = last
            if last == course.count:
                place.epoch, place.row = place.epoch + 1, 0
            reports += 1
            if valid is not None:
                report.validation = self._validated(valid, course.batch)
            numbers = [report.loss, *report.validation.values()]
            if not all(map(math.isfinite, numbers)):
                raise FloatingPointError(
                    f"the loss is {report.loss} after {report.seen:,} rows, validation {report.validation}: the "
                    f"learning rate of {report.learning_rate:g} may be too high; nothing was saved since"
                )
            stop = self._observe(report, patience)
            for one in recorders:
                one.write(report.record())
            if checkpoint is not None and (reports % checkpoint.every == 0 or stop or place.epoch == course.epochs):
                self._save(checkpoint, course, report.seen)
            yield report
            if stop:
                return

    def _observe(self, report: Report, patience: int | None) -> bool:
        """Take a report's validation, or its loss; return whether to stop."""
        value = next(iter(report.validation.values()), report.loss)
        observe: Callable[[float], None] | None = getattr(self.schedule, "observe", None)
        if observe is not None:
            observe(value)
        place = self._place
        place.since = 0 if value < place.best else place.since + 1
        place.best = min(place.best, value)
        return patience is not None and place.since >= patience

    # -- one interval ----------------------------------------------------------------------------------------

    def _interval(self, course: _Course, epoch: int, first: int, last: int, recorders: list[Any]) -> Report:
        """Train between two places of an epoch, and say what came of it."""
        try:
            return self._trained(course, epoch, first, last, recorders)
        except (LoadError, WorkerError):
            if course.loader is not None:
                course.loader.close()  # one may have died
            raise

    def _trained(self, course: _Course, epoch: int, first: int, last: int, recorders: list[Any]) -> Report:
        source = course.source(epoch, first, self._together is not None)
        of_ranks = [one for one in recorders if isinstance(one, Recorder)]
        plan = interval.Plan(
            self._name,
            first,
            last,
            course.batch,
            epoch,
            course.count,
            self.schedule,
            of_ranks,
            course.progress,
            course.pools or [range(ranks.session().size)],
        )
        session = ranks.session()
        if self._together is not None:
            outcomes = [self._train_together(course, plan, source)]
        else:
            course.taken[...] = 0
            outcomes = run(
                interval.train,
                plan,
                self.rule,
                self._step,
                self.learning_rate,
                (self._exchanged, self._exchanged_optimizer),
                source,
                course.taken,
                self._memory,
            )
        if course.loader is not None and isinstance(source, Feed):
            course.loader.passed(source, last)
        rows = sum(outcome.rows for outcome in outcomes)
        if not rows:
            raise LoadError(f"none of the rows from {first:,} to {last:,} of epoch {epoch} could be read", epoch, last)
        seconds = {
            name: float(np.mean([outcome.seconds[name] for outcome in outcomes])) for name in outcomes[0].seconds
        }
        compiled = sum(outcome.first[0] for outcome in outcomes)
        compiling = float(np.mean([outcome.first[1] for outcome in outcomes]))
        if compiled == rows:  # there were none but first steps
            compiled, compiling = 0, 0.0
        return Report(
            epoch=epoch + last / course.count,
            seen=epoch * course.count + last,
            steps=sum(outcome.steps for outcome in outcomes),
            loss=sum(outcome.loss for outcome in outcomes) / rows,
            validation={},
            learning_rate=outcomes[0].learning_rate,
            rows_per_second=(rows - compiled) / (sum(seconds.values()) - compiling),
            seconds=seconds,
            batch=f"{session.size} x {course.batch} = {session.size * course.batch}",
        )

    def _train_together(self, course: _Course, plan: interval.Plan, source: interval.Source) -> interval.Outcome:
        """Take steps of BSP: as many at once as have the same learning rate."""
        assert self._together is not None
        meter = interval.Meter(0, plan, lambda losses: [float(loss) for loss in losses], self._steps_taken, self._kinds)
        data, whole, place, rate = source.data, course.batch * ranks.session().size, plan.first, 0.0
        x = data[: len(self._model.x)] if self._model.x_is_list else data[0]
        y = data[len(self._model.x) :] if self._model.y_is_list else data[-1]
        while place < plan.last:
            starts = [place]
            rate = plan.rate(place)
            while len(starts) < source.most and starts[-1] + 2 * whole <= plan.last:
                if plan.rate(starts[-1] + whole) != rate:
                    break
                starts.append(starts[-1] + whole)
            self._set_rate(rate)
            began = time.perf_counter()
            places = [(start, min(start + whole, plan.last)) for start in starts]
            of_steps = [rows for rows in (source.rows(*each) for each in places) if len(rows)]
            meter.spent("load", time.perf_counter() - began)
            began = time.perf_counter()
            if of_steps:  # else all of their rows were left out
                for loss, rows in zip(self._together.steps(x, y, batches=of_steps), of_steps, strict=True):
                    meter.add([loss], len(rows))
                meter.read_losses()
                meter.spent("compute", time.perf_counter() - began, (len(of_steps), len(of_steps[0])))
            for each in places:
                source.free(*each)
            place = places[-1][1]
            meter.write(place, rate)
        meter.write(plan.last, rate, last=True)
        self._steps_taken = meter.step
        return meter.outcome(rate)

    def _set_rate(self, rate: float) -> None:
        if rate != self._rate:
            synk.broadcast(self.learning_rate, np.asarray(rate, self.learning_rate.type.dtype))
            self._rate = rate

    def _validated(self, valid: tuple[list[Data], int] | Loader, batch: int) -> dict[str, float]:
        """Return the means over all rows, each row counted once."""
        assert self._validation is not None
        totals, count, step = np.zeros(len(self._validate)), 0, batch * ranks.session().size
        chosen: Iterable[Any]
        if isinstance(valid, Loader):
            chosen = valid.epoch(0, step)
        elif _pools(valid[0]):
            chosen = in_order(valid[1], step, ranks.session().size)
        else:
            chosen = (slice(start, min(valid[1], start + step)) for start in range(0, valid[1], step))
        for rows in chosen:
            data = valid.data if isinstance(valid, Loader) else valid[0]
            values = self._validation(*data, batch=rows)
            length = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
            totals += np.array([float(value) for value in values]) * length
            count += length
        if not count:
            raise LoadError("none of the rows of the validation data could be read")
        return dict(zip(self._validate, (totals / count).tolist(), strict=True))

    # -- beginning, and going on -----------------------------------------------------------------------------

    def _begin(self, course: _Course, resume: Any, checkpoint: Checkpoint | None, recorders: list[Any]) -> None:
        """Make what the ranks need, once, and go on from a checkpoint if there is one."""
        session = ranks.session()
        if self._session is not session:
            self._session, self._steps_taken, self._rate = session, 0, -1.0
            vector = Vector(self._exchanged)
            self._memory = {}
            if self._together is None:
                self._memory = shared_memory(self.rule, session.size, vector.size, vector.dtype)
                session.memory.release_with(self, "stored", ("kept", self._name))
            self._place = _Place()
        course.make()
        if resume == "latest":
            assert checkpoint is not None
            resume = next(reversed(checkpoint.paths()), None)
        if resume is not None:
            stored = load(resume)
            self._restore(stored, course)
            for one in recorders:
                if isinstance(one, Recorder):
                    one.cut(stored.meta["seen"])
        elif checkpoint is not None:
            checkpoint.refuse_others(self._place.epoch * course.count + self._place.row)

    @property
    def _groups(self) -> storing.Groups:
        return storing.Groups(
            self._exchanged, self._exchanged_optimizer, self._excluded, self._others, self._generators
        )

    def _save(self, checkpoint: Checkpoint, course: _Course, seen: int) -> None:
        """Write a checkpoint of all ranks."""
        session = ranks.session()
        by_rank = run(storing.collect, self._name, self._groups, self._together is not None)
        arrays, streams = storing.packed(by_rank)
        arrays |= {f"shared.{name}": np.array(data.data) for name, data in self._memory.items()}
        meta = {
            "format": 1,
            "seen": seen,
            "epoch": self._place.epoch,
            "row": self._place.row,
            "best": None if math.isinf(self._place.best) else self._place.best,
            "since": self._place.since,
            "seed": course.seed,
            "count": course.length,
            "parts": course.parts(),
            "batch_size": course.batch,
            "ranks": session.size,
            "rule": type(self.rule).__name__,
            "rule_options": {name: value for name, value in self.rule.options().items() if _is_plain(value)},
            "schedule": schedules.state_of(self.schedule),
            "steps_taken": self._steps_taken,
            "model": self._model_shapes(),
            "streams": streams,
        }
        checkpoint.save(seen, arrays, meta)

    def _restore(self, stored: Stored, course: _Course) -> None:
        """Go on from a checkpoint, on as many ranks as there are now."""
        meta = stored.meta
        if meta.get("model") != self._model_shapes():
            raise CheckpointError(
                f"{stored.path} is of another model: it has {meta.get('model')}, expected {self._model_shapes()}"
            )
        if meta["rule"] != type(self.rule).__name__:
            raise CheckpointError(f"{stored.path} is of the rule {meta['rule']}, got {type(self.rule).__name__}")
        if meta["count"] != course.length or meta["seed"] != course.seed:
            raise CheckpointError(
                f"{stored.path} is of {meta['count']} rows and seed {meta['seed']}, got {course.length} and "
                f"{course.seed}: the order of rows would be another"
            )
        if meta["row"] and meta.get("parts") != course.parts():
            raise CheckpointError(
                f"{stored.path} was written within an epoch over data_parts, of {_said(meta.get('parts'))}, got "
                f"{_said(course.parts())}: the order of rows would be another; a checkpoint of an epoch's end will do"
            )
        self._place = _Place(
            meta["epoch"], meta["row"], math.inf if meta["best"] is None else meta["best"], meta["since"]
        )
        self._steps_taken = meta["steps_taken"]
        schedules.set_state(self.schedule, meta["schedule"])
        if self._memory:  # new, so that on no host there is anything else in it
            vector = Vector(self._exchanged)
            self._memory = shared_memory(self.rule, ranks.session().size, vector.size, vector.dtype)
        for name, data in self._memory.items():
            array = stored.arrays[f"shared.{name}"]
            if array.shape == data.shape:
                data[...] = array
            else:  # one for each rank, which is empty at a report
                data[...] = 0
        alike = self._together is not None
        root = ranks.session().rank.number
        run(storing.restore_file, self._name, self._groups, self.rule, str(stored.path), self._memory, alike, root)

    def _model_shapes(self) -> dict[str, Any]:
        """Return what tells a model from another: each parameter's shape and dtype, in order."""
        vectors = Vector(self.params)
        return {
            f"{i} {shared.name or ''}".strip(): [list(shape), str(shared.type.dtype)]
            for i, (shared, shape) in enumerate(zip(self.params, vectors.shapes, strict=True))
        }

    # -- data ------------------------------------------------------------------------------------------------

    def _loader(self, x_data: Any, y_data: Any) -> Loader | None:
        """Return the loader, if rows come from one."""
        if not isinstance(x_data, Loader):
            if isinstance(y_data, Loader):
                raise TypeError("y_data: expected arrays, or None and one loader of all inputs as x_data, got a loader")
            return None
        if y_data is not None:
            raise TypeError(f"y_data: expected None, as the loader has all inputs, got {type(y_data).__name__}")
        x_data.cast_to([*self._model.x, *self._model.y])
        return x_data

    def _data(self, x_data: Any, y_data: Any, name: str) -> tuple[list[Data], int]:
        """Return Data for each input, and how many rows they have."""
        arrays = self._model.arrays(x_data, y_data, None, None)
        variables = [*self._model.x, *self._model.y]
        data = [
            array if isinstance(array, Data) else synk.data(array, var=variable, force_cast=True)
            for array, variable in zip(arrays, variables, strict=True)
        ]
        lengths = {len(each) for each in data}
        if len(lengths) != 1 or not min(lengths):
            raise ValueError(f"{name}: expected equally many rows of each, at least one, got {[len(d) for d in data]}")
        return data, lengths.pop()


def _pools(data: list[Data]) -> list[range] | None:
    """Return the ranks of each host, if some of the data are rows that hosts have loaded for themselves."""
    return ranks.session().ranks_by_host if any(isinstance(each, PartsData) for each in data) else None


def _said(parts: list[int] | None) -> str:
    return "other data" if parts is None else f"{parts[1:]} ranks on the hosts and {parts[0]} rows in a step of each"


@dataclass
class _Course:
    """The data, and the ways through it.

    Attributes
    ----------
    length, count : int
        The rows of the data, and those of an epoch.
    pools : list of range, optional
        The ranks of each host, where each rank takes rows of its own host.
    """

    data: list[Data]
    length: int
    batch: int
    epochs: int
    seed: int
    every: int | None
    progress: bool
    loader: Loader | None
    pools: list[range] | None
    count: int = field(init=False)
    order: Data = field(init=False)
    taken: Data = field(init=False)
    _shuffled: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        self.count = self.length if self.pools is None else sum(map(len, self._of_parts(0)))

    def make(self) -> None:
        """Make what all ranks have to see."""
        self.taken = synk.data(shape=(ranks.session().size,), dtype="int64")
        if self.loader is None:
            self.order = synk.data(shape=(self.count,), dtype="int64")
        self._shuffled = -1

    def source(self, epoch: int, first: int, all_together: bool) -> interval.Source:
        """Return what rows are taken from: by all ranks at once, or by each for itself."""
        if self.loader is not None:
            size = ranks.session().size
            unit, takers = (self.batch * size, 1) if all_together else (self.batch, size)
            return self.loader.feed(epoch, first, unit, self.seed, takers)
        if epoch != self._shuffled:
            if self.pools is None:
                self.order[...] = np.random.default_rng((self.seed, epoch)).permutation(self.count)
            else:
                self.order[...] = np.concatenate(list(self._of_parts(epoch)))
            self._shuffled = epoch
        return interval.InOrder(self.data, self.order)

    def _of_parts(self, epoch: int) -> Iterator[np.ndarray]:
        """Yield the rows of an epoch's steps of all ranks, where each takes rows of its own host."""
        assert self.pools is not None
        return batches(self.length, self.batch * self.pools[-1].stop, self.pools, (self.seed, epoch))

    def parts(self) -> list[int] | None:
        """Return what the order of rows depends on, besides the seed, where each rank takes rows of its own host."""
        return None if self.pools is None else [self.batch, *map(len, self.pools)]

    def end(self, row: int, n_ranks: int) -> int:
        """Return where the next report is due, from a place on."""
        return self.count if self.every is None else min(self.count, row + self.every * self.batch * n_ranks)


def _local_step(model: Model) -> synk.Function:
    """Return a function that takes a step on a rank by itself: gradient and update in one."""
    updates = [*by_own_gradient(model.rule).items(), *model.extra_updates]
    return synk.function(
        [*model.x, *model.y],
        [(model.loss, "mean")],
        updates=[(shared, new, None) for shared, new in updates],
        name="train_step",
    )


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | None)


def make_trainer(
    loss: Any,
    params: Sequence[Any],
    x: Any,
    y: Any,
    update_rule: UpdateRule,
    rule: Rule | None = None,
    learning_rate: Schedule | float = 0.01,
    validate: Mapping[str, Any] | Sequence[Any] | Any = None,
    extra_updates: Updates | None = None,
    **rule_kwargs: Any,
) -> Trainer:
    """Make a trainer: epochs over data, on all ranks, by an exchange rule.

    Call `synkhronos.fork` first.

    Parameters
    ----------
    loss : scalar variable
        What to lower: a mean over the rows of `x`.
    params : list of shared variables
        The parameters.
    x, y : variable or list of variables
        Inputs and targets.  A list of targets may be empty.
    update_rule : callable
        How a rank steps: one of `synkhronos.extensions.updates`, or what takes and returns the same.
    rule : Rule, optional
        How ranks keep together: one of `synkhronos.rules`.  By default `BSP`.
    learning_rate : float or callable
        A number, or a schedule: see `synkhronos.training.schedules`.
    validate : dict of str to scalar variable, or list, or variable, optional
        What to compute on validation data: means over rows.  The first is what `patience` and `plateau` go by.
    extra_updates : dict or list of (shared variable, expression), optional
        As for `synkhronos.extensions.train.make_train_function`; each rank keeps its own.
    **rule_kwargs
        For the update rule, such as ``momentum=0.9``.

    Returns
    -------
    Trainer

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong; the message names it.

    Examples
    --------
    >>> import numpy as np
    >>> import pytensor, pytensor.tensor as pt
    >>> import synkhronos as synk
    >>> from synkhronos import rules
    >>> from synkhronos.extensions.updates import sgd
    >>> x, y = pt.matrix("x"), pt.vector("y")
    >>> w = pytensor.shared(np.zeros(3), name="w")
    >>> loss = ((x @ w - y) ** 2).mean()
    >>> n = synk.fork(2, use_gpu=False)
    >>> trainer = make_trainer(loss, [w], x, y, sgd, rules.LocalSGD(5), learning_rate=0.1)
    >>> rows = np.random.default_rng(0).normal(size=(200, 3))
    >>> for report in trainer.epochs(rows, rows @ [1.0, 2.0, 3.0], batch_size=5, epochs=10):
    ...     pass
    >>> print(w.get_value().round(2), report.batch)
    [1. 2. 3.] 2 x 5 = 10
    >>> synk.close()
    """
    rule = BSP() if rule is None else rule
    if not isinstance(rule, Rule):
        raise TypeError(f"rule: expected one of synkhronos.rules, such as rules.EASGD(), got {rule!r}")
    if isinstance(rule, EAMSGD):
        if update_rule is not nesterov_momentum:
            raise ValueError(f"update_rule: EAMSGD needs nesterov_momentum, got {update_rule!r}")
        if rule_kwargs.setdefault("momentum", rule.momentum) != rule.momentum:
            raise ValueError(f"momentum: EAMSGD has {rule.momentum}, got {rule_kwargs['momentum']!r}")
    schedule = as_schedule(learning_rate)
    try:
        named = _named(validate)
        library = library_of(loss)
    except TypeError as error:
        raise TypeError(f"loss, validate: {error}") from None
    first = params[0] if isinstance(params, list | tuple) and params else None
    dtype = getattr(getattr(first, "type", None), "dtype", library.floatX)
    rate = library.shared(np.asarray(schedule(0.0), dtype), name="learning_rate")
    rule_kwargs = {"learning_rate": rate, **rule_kwargs}
    model = Model.build(loss, params, x, y, update_rule, None, extra_updates, rule_kwargs)
    return Trainer(model, list(params), rule, rate, schedule, named)


def _named(validate: Any) -> dict[str, Any]:
    if validate is None:
        return {}
    if isinstance(validate, Mapping):
        return dict(validate)
    listed = list(validate) if isinstance(validate, list | tuple) else [validate]
    return {f"valid_{i}": one for i, one in enumerate(listed)}
