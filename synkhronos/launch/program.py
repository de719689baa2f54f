"""What each rank does in a run.

`enter`
    Gives the rank a console of its own.
`as_the_class_computes`
    Sets JAX for functions that a class has compiled.
`build`
    Makes the rank's own instance of the class.
`train`
    Goes through its epochs, and exchanges parameters.
"""

from __future__ import annotations

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

from synkhronos.devices import device_of
from synkhronos.graphs import library_of, loaded_libraries
from synkhronos.launch import binding, contract, elsewhere, modelfile
from synkhronos.launch.recorder import ClassRecorder
from synkhronos.launch.settings import Settings
from synkhronos.rules import Rule, State
from synkhronos.rules.state import Vector
from synkhronos.tasks import LocalRows, Worker
from synkhronos.training import storing
from synkhronos.training.checkpoint import Checkpoint, CheckpointError, load_meta
from synkhronos.training.meter import timed
from synkhronos.training.recorder import Recorder, cut

#: Under which a rank keeps its model from one program to the next.
_KEPT = "launch"


def enter(worker: Worker, consoles: list[int], masks: list[list[int]], devices: list[str], by_host: list[range]) -> int:
    """Write to a pipe of this rank's own from now on, and say where the rank is; return its process.

    Those of the first host have a console each, and cores, if any have; others say of themselves where they are.
    """
    import synkhronos.compat  # noqa: F401 - classes import theano, and those elsewhere are no copies of the master

    sys.stdout.flush()
    sys.stderr.flush()
    if worker.number < len(consoles):
        for file in (1, 2):
            os.dup2(consoles[worker.number], file)
        for console in consoles:
            os.close(console)
        where = f"on {devices[worker.number]}, {binding.said(masks[worker.number] if masks else None)}"
    else:
        elsewhere.enter(worker.number)
        of_host = next(of_host for of_host in by_host if worker.number in of_host)
        device = "cpu" if devices[0] == "cpu" else f"cuda{of_host.index(worker.number)}"
        where = f"on {device} of host {platform.node()}, {binding.said(None)}"
    for stream in (sys.stdout, sys.stderr):  # the supervisor reads UTF-8, whatever the locale
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    sys.stdout.write(f"process {os.getpid()} {where}\n")
    return os.getpid()


@contextmanager
def as_the_class_computes() -> Iterator[None]:
    """Let JAX take a class' functions as PyTensor does: it has float64 where ``floatX`` is that, and else has none.

    The library's own functions are made for a JAX that has it.
    """
    jax, pytensor = sys.modules.get("jax"), sys.modules.get("pytensor")
    if jax is None or pytensor is None:  # which sets it, when the first function is compiled
        yield
        return
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", pytensor.config.floatX == "float64")
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def build(worker: Worker, settings: Settings) -> tuple[int, str]:
    """Make this rank's own instance; return the number of its parameters' elements, and their dtype."""
    kind = modelfile.load(settings.root, settings.modelfile, settings.modelclass)
    loaded_libraries()  # before the class compiles anything: all ranks do so at once
    contract.check(kind, settings.modelclass)
    said = {"rank": worker.number, "size": worker.size, "verbose": worker.number == 0, "seed": settings.seed}
    model = contract.make(kind, {**said, **settings.config})
    for name, value in said.items():
        if not hasattr(model, name) and not hasattr(kind, "__slots__"):
            setattr(model, name, value)
    worker.progress()
    contract.compile_functions(model)
    contract.check(model, settings.modelclass)
    if settings.scale_lr:
        if not callable(getattr(model, "scale_lr", None)):
            raise contract.ContractError(f"{settings.modelclass} lacks:\n  method scale_lr(size), for scale_lr = true")
        model.scale_lr(worker.size)
    if callable(getattr(model, "print_info", None)) and worker.number == 0:
        contract.called(model.print_info, worker.number == 0)
    vector = Vector(list(model.params))
    shapes = [list(shape) for shape in vector.shapes]
    all_shapes = worker.exchange(shapes)
    for r, other in enumerate(all_shapes):
        if other != all_shapes[0]:
            raise contract.ContractError(f"params: of shapes {all_shapes[0]} on rank 0, and of {other} on rank {r}")
    vector.set(worker.decide(np.asarray(vector.get()) if worker.number == 0 else None))
    groups = contract.groups(model)
    for shared in groups.generators:  # a class that gives all ranks one seed
        library = library_of(shared)
        stream = library.stream(shared)
        library.set_stream(shared, library.moved(stream, worker.number) if worker.number else stream)
    worker.kept(_KEPT).update(model=model, groups=groups)
    return vector.size, vector.dtype.name


def train(worker: Worker, settings: Settings, rule: Rule, shared: dict[str, LocalRows], path: str | None) -> int:
    """Train; return the number of epochs that the model has been trained for."""
    kept = worker.kept(_KEPT)
    run = _Run(worker, settings, rule, kept["model"], kept["groups"], shared)
    try:
        return run.all_epochs(path)
    finally:
        run.model.cleanup()


class _Run:
    """One rank's epochs.

    `synkhronos.training.loop` is no help here: a class chooses its rows itself, and takes one step in each call of
    ``train_iter``, so that there are no places, batches or launches.
    """

    def __init__(
        self,
        worker: Worker,
        settings: Settings,
        rule: Rule,
        model: Any,
        groups: storing.Groups,
        shared: dict[str, LocalRows],
    ):
        self.worker, self.settings, self.rule, self.model = worker, settings, rule, model
        self.groups = groups
        self.shared = shared
        self.folder = Path(settings.folder)
        self.rows = contract.rows(model)
        is_here = worker.number < len(settings.devices)
        lines = Recorder(self.folder) if is_here else elsewhere.Records()
        self.recorder = ClassRecorder(worker.number, lines, settings.every, self.rows)
        self.state = State(self.groups.params, self.groups.optimizer, shared)
        self.reports = Recorder(self.folder) if worker.number == 0 else None
        self.is_new = True
        self.trained = 0.0

    def all_epochs(self, path: str | None) -> int:
        """Go through all epochs."""
        epochs = self.settings.epochs if self.settings.epochs is not None else getattr(self.model, "n_epochs", None)
        if isinstance(epochs, bool) or not isinstance(epochs, int | np.integer) or epochs < 1:
            raise contract.ContractError(
                f"{self.settings.modelclass} lacks:\n  attribute n_epochs: expected a number of epochs, got "
                f"{epochs!r}; or give --set epochs=N"
            )
        first = 0
        if path is None:
            self.rule.setup(self.worker, self.state)
        else:
            first = self.resume(path)
        for epoch in range(first, int(epochs)):
            self.model.epoch = epoch
            self.recorder.learning_rate = contract.learning_rate(self.model)
            if self.recorder.learning_rate is not None:
                self.state.learning_rate = self.recorder.learning_rate
            self.recorder.begin_epoch(epoch)
            self.iterate()
            loss = self.check_loss()
            own = self.stand_for_all()
            self.report(epoch, loss, self.validate())
            contract.called(self.model.adjust_hyperp, epoch)
            last = epoch + 1 == epochs
            if self.settings.checkpoint and ((epoch + 1) % self.settings.checkpoint == 0 or last):
                self.save(epoch + 1, own)
            if not last:
                self.state.vector = own
        if first >= epochs:  # a run may end between its last checkpoint and what comes now
            self.stand_for_all()
        self.save_params()
        return max(first, int(epochs))

    def stand_for_all(self) -> Any:
        """Set the parameters to those that stand for all ranks'; return this rank's own."""
        stands_for_all = self.rule.report(self.worker, self.state)
        own = self.state.vector  # behind the report, which may take what has come by mail
        self.state.vector = stands_for_all
        return own

    # -- an epoch --------------------------------------------------------------------------------------------

    def iterate(self) -> None:
        """Take an epoch's steps, with exchanges between them."""
        worker, model, recorder, state = self.worker, self.model, self.recorder, self.state
        self.reset("train")
        per_batch = max(1, int(getattr(model, "n_subb", 1)))
        steps: int | None = None
        while steps is None or recorder.steps < steps:
            worker.progress()
            began, before = time.perf_counter(), dict(recorder.seconds)
            with as_the_class_computes():
                model.train_iter(recorder.total + 1, recorder)
            recorder.stepped(time.perf_counter() - began if self.is_new else None)
            self.is_new = False
            self.note_compute(began, before)
            if steps is None:  # now the data have been shared out among ranks, where a class does that
                steps = self.agree(int(model.data.n_batch_train) * per_batch)
            due = self.rule.left(state) == 1
            state.step += 1
            state.since += 1
            if due:
                with timed(recorder.seconds, "exchange", lambda: worker.waited):
                    self.rule.exchange(worker, state)
                    state.since = 0
            recorder.print_train_info(recorder.total)
        recorder.write()
        self.trained = time.perf_counter()

    def agree(self, steps: int) -> int:
        """Return how many steps this rank takes: under rules in which all exchange at once, the fewest of any rank."""
        if self.rule.asynchronous:
            return steps
        every = self.worker.exchange(steps)
        if min(every) != max(every) and self.worker.number == 0 and self.recorder.epoch == 0:
            sys.stdout.write(f"ranks have {every} batches: each takes {min(every)}, since all exchange at once\n")
        return min(every)

    def note_compute(self, began: float, before: dict[str, float]) -> None:
        """Note an iteration's time, but for what the class itself has noted as something else."""
        seconds = self.recorder.seconds
        noted = sum(value - before.get(name, 0.0) for name, value in seconds.items() if name != "compute")
        seconds["compute"] = before["compute"] + max(0.0, time.perf_counter() - began - noted)

    def check_loss(self) -> float | None:
        """Return the mean cost of all ranks; refuse one that is no number any more."""
        costs = [cost for cost in self.worker.exchange(self.recorder.mean_loss()) if cost is not None]
        loss = float(np.mean(costs)) if costs else None
        if loss is not None and not np.isfinite(loss):
            raise FloatingPointError(f"the cost is {loss} in epoch {self.recorder.epoch + 1}: nothing of it was saved")
        return loss

    def validate(self) -> dict[str, float]:
        """Validate what stands for all ranks; return the means over all of them."""
        self.reset("val")
        count, done = None, 0
        while count is None or done < count:
            if count is None and not self.model.data.n_batch_val:
                break
            self.worker.progress()
            with as_the_class_computes():
                self.model.val_iter(self.recorder.total, self.recorder)
            done += 1
            count = int(self.model.data.n_batch_val) * max(1, int(getattr(self.model, "n_subb", 1)))
        sums: dict[str, float] = {}
        total = 0
        for rows, found in self.worker.exchange(self.recorder.validation_sums()):
            total += rows
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + value
        return {name: value / total for name, value in sums.items()}

    def report(self, epoch: int, loss: float | None, validation: dict[str, float]) -> None:
        """Print and write what an epoch has come to."""
        recorder, size = self.recorder, self.worker.size
        seconds = self.worker.exchange((recorder.seconds, recorder.steps))
        timed = sum(steps - recorder.untimed for _, steps in seconds)
        rate = timed * self.rows / (self.trained - recorder.epoch_began)
        if self.reports is None:
            return
        record = {
            "epoch": epoch + 1,
            "seen": recorder.total * self.rows * size,
            "steps": sum(steps for _, steps in seconds),
            "loss": loss,
            "validation": validation,
            "learning_rate": recorder.learning_rate,
            "rows_per_second": rate,
            "seconds": {name: float(np.mean([each.get(name, 0.0) for each, _ in seconds])) for name in seconds[0][0]},
            "batch": f"{size} x {self.rows}",
        }
        self.reports.write(record)
        shown = {"cost": loss, **{f"validation {name}": value for name, value in validation.items()}}
        said = ", ".join(f"{name} {value:.4g}" for name, value in shown.items() if value is not None)
        sys.stdout.write(f"epoch {epoch + 1} done: {said}; batch {record['batch']}, {rate:,.0f} {recorder.unit}/s\n")

    def reset(self, mode: str) -> None:
        """Have the class go through its batches, of training or validation, anew, if it has a method for that."""
        method = getattr(self.model, "reset_iter", None)
        if callable(method):
            contract.called(method, mode)

    # -- what stays ------------------------------------------------------------------------------------------

    def save_params(self) -> None:
        """Write the parameters as Lasagne's users do: ``arr_0``, ``arr_1`` and so on."""
        if self.worker.number == 0:
            values = [device_of(v).to_host(v) for v in (library_of(p).get(p) for p in self.groups.params)]
            np.savez(self.folder / "params.npz", *values)

    def save(self, epochs: int, own: Any) -> None:
        """Write a checkpoint of all ranks."""
        kept = self.worker.kept(_KEPT)
        kept["state"], kept["own"] = self.state, own
        found = storing.collect(self.worker, _KEPT, self.groups, False)
        mine = found, _generators(), self.recorder.total
        if self.worker.number:
            self.worker.send(mine, 0)
        else:
            gathered = [mine, *map(self.worker.receive, range(1, self.worker.size))]
            arrays, streams = storing.packed([each for each, _, _ in gathered])
            arrays |= {f"shared.{name}": np.array(array) for name, array in self.state.shared.items()}
            meta = {
                "format": 1,
                "epochs": epochs,
                "model": f"{self.settings.modelfile}:{self.settings.modelclass}",
                "shapes": [list(shape) for shape in self.state.params.shapes],
                "ranks": self.worker.size,
                "rule": self.settings.rule,
                "asynchronous": self.rule.asynchronous,
                "streams": streams,
                "generators": [each for _, each, _ in gathered],
                "totals": [each for _, _, each in gathered],
            }
            Checkpoint(self.folder / "checkpoints", self.settings.keep).save(epochs, arrays, meta)
        self.worker.barrier("the checkpoint is written")

    def resume(self, path: str) -> int:
        """Go on from a checkpoint, which rank 0 reads for all; return how many epochs it has."""
        worker = self.worker
        meta = worker.decide(load_meta(path) if worker.number == 0 else None)
        shapes = [list(shape) for shape in self.state.params.shapes]
        if meta.get("shapes") != shapes:
            raise CheckpointError(f"{path} has parameters of shapes {meta.get('shapes')}, expected {shapes}")
        storing.check_rule(path, meta, self.settings.rule, self.rule)
        for epoch in range(meta["epochs"]):  # learning rates that are no shared variables
            contract.called(self.model.adjust_hyperp, epoch)
        storing.restore(worker, _KEPT, self.groups, self.rule, path, self.shared, False, 0)
        self.state = worker.kept(_KEPT)["state"]
        self.recorder.total = meta["totals"][worker.number % len(meta["totals"])]
        if worker.number < len(meta["generators"]):
            _set_generators(meta["generators"][worker.number])
        if worker.number == 0:
            for file in self.folder.glob("*.jsonl"):
                past = meta["epochs"] + (file.stem == "reports")  # which counts the epochs that are done
                cut(file, lambda line: line.get("epoch", past) < past)  # noqa: B023 - used at once
        worker.barrier("all go on from the checkpoint")
        return int(meta["epochs"])


def _generators() -> dict[str, Any]:
    """Return where NumPy's and Python's global generators are, as JSON can say it."""
    state: Any = np.random.get_state(legacy=False)
    words = {**state, "state": {"key": state["state"]["key"].tolist(), "pos": int(state["state"]["pos"])}}
    version, numbers, gauss = random.getstate()
    return {"numpy": words, "python": [version, list(numbers), gauss]}


def _set_generators(found: dict[str, Any]) -> None:
    words = found["numpy"]
    key = np.array(words["state"]["key"], np.uint32)
    np.random.set_state({**words, "state": {"key": key, "pos": words["state"]["pos"]}})
    version, numbers, gauss = found["python"]
    random.setstate((version, tuple(numbers), gauss))
