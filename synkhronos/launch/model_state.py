"""State of a run of a user's class on one rank, and its checkpoints.

A signal may end an epoch after any batch.  The checkpoint then has the number of batches, and the state of random
generators at the start of the epoch: only the class knows which rows it has taken, so it has to skip these batches,
or to repeat them, when the run is resumed.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from synkhronos.launch import contract
from synkhronos.launch.gradients import SummedGradients
from synkhronos.launch.model_recorder import ModelRecorder
from synkhronos.launch.settings import Settings
from synkhronos.rules import Rule, State
from synkhronos.tasks import LocalRows, Worker
from synkhronos.training import generator_state, rank_state
from synkhronos.training.checkpoint import Checkpoint, load_meta
from synkhronos.training.early_stop import EarlyStop
from synkhronos.training.recorder import cut
from synkhronos.training.training_description import check_same_training, describe_training
from synkhronos.training.variable_groups import VariableGroups

#: Key under which a rank stores its instance, and the rule's state, between tasks.
STORAGE = "launch"
#: Types of the entries of a run's checkpoint, besides those of `describe_training`.
_TYPES: dict[str, Any] = {"epochs": int, "stop": dict, "host_generators": list, "totals": list, "within": list | None}


class ModelState:
    """Instance of the user's class on one rank, its position in the training, and its checkpoints.

    Parameters
    ----------
    worker, settings, rule
    model : instance of the user's class
    groups : VariableGroups
        Shared variables of the instance.
    shared : dict of str to LocalRows
        Shared memory of the rule.
    recorder : ModelRecorder
        Recorder that the class's methods get.

    Attributes
    ----------
    folder : Path
        The run's folder.
    applies_gradients : bool
        Whether the class updates its parameters after the exchange of gradients, by ``apply_gradients()``.
    epochs : int
        Number of complete epochs.
    position : dict
        Position in the epoch: the number of batches trained on, the state of the generators at the epoch's start, and
        after a resumption within the epoch its ``record`` of steps, costs and weights.
    early_stop : EarlyStop
        Best report so far.
    """

    def __init__(
        self,
        worker: Worker,
        settings: Settings,
        rule: Rule,
        model: Any,
        groups: VariableGroups,
        shared: dict[str, LocalRows],
        recorder: ModelRecorder,
    ):
        self.worker, self.settings, self.rule, self.model, self.groups = worker, settings, rule, model, groups
        self.recorder = recorder
        self._training = rank_state.RankTraining(STORAGE, groups, rule, shared, is_joint=False)
        self.folder = Path(settings.folder)
        self.applies_gradients = isinstance(rule, SummedGradients) and callable(getattr(model, "apply_gradients", None))
        self.epochs = 0
        self.position: dict[str, Any] = {"batch": 0}
        self.early_stop = EarlyStop()
        self._checkpoint: Checkpoint | None = None
        worker.get_storage(STORAGE)["state"] = State(groups.params, groups.optimizer, shared, groups.n_averages)

    @property
    def rule_state(self) -> State:
        """State of the exchange rule, which `restore` replaces."""
        state: State = self.worker.get_storage(STORAGE)["state"]
        return state

    def describe(self) -> dict[str, Any]:
        """Return the description of this run, which has to match that of a checkpoint to resume from."""
        return describe_training("run", self.rule, self.groups, None)

    def open_checkpoints(self) -> Checkpoint:
        """Return the run's folder of checkpoints.  Only rank 0 may call this."""
        if self._checkpoint is None:
            folder, settings = self.folder / "checkpoints", self.settings
            self._checkpoint = Checkpoint(folder, settings.keep, keep_best=settings.keep_best)
        return self._checkpoint

    def save(self, metrics: Mapping[str, float] | None, checkpoint: Checkpoint | None = None) -> None:
        """Write a checkpoint of all ranks; a collective.

        Parameters
        ----------
        metrics : dict or None
            Those of an epoch that has just ended; None within an epoch.
        checkpoint : Checkpoint, optional
            Folder that rank 0 writes to; default: the run's.
        """
        is_within = metrics is None
        if isinstance(self.rule, SummedGradients) and not self.applies_gradients:
            self.rule.store(self.rule_state)
        own = rank_state.collect_state(self.worker, self._training)
        meter = self.recorder.meter
        position = {**self.position, "record": [meter.steps, meter.loss, meter.weight]} if is_within else None
        entry = own, get_generators(), meter.step, position
        if self.worker.number:
            self.worker.send(entry, 0)
        else:
            entries = [entry, *map(self.worker.receive, range(1, self.worker.size))]
            meta = {
                "epochs": self.epochs,
                "model": f"{self.settings.modelfile}:{self.settings.modelclass}",
                "stop": self.early_stop.to_json(),
                "host_generators": [generators for _, generators, *_ in entries],
                "totals": [steps for _, _, steps, _ in entries],
                "within": [position for *_, position in entries] if is_within else None,
            }
            rank_state.write_states(
                checkpoint or self.open_checkpoints(),
                meter.step,
                self.describe(),
                [state for state, *_ in entries],
                self.rule_state.shared,
                False,
                meta,
                metrics or {},
            )
        self.worker.barrier("the checkpoint is written")

    def restore(self, path: str) -> None:
        """Restore the variables, the rule's state and random streams of a checkpoint, which rank 0 reads for all."""
        rank_state.restore_state(self.worker, self._training, path, 0)

    def set_reported_params(self) -> None:
        """Set the parameters to those that stand for all ranks."""
        rank_state.set_reported_params(self.worker, STORAGE, self.rule)

    def restore_own_params(self) -> None:
        """Set the parameters back to those before `set_reported_params`."""
        rank_state.restore_own_params(self.worker, STORAGE)

    def resume(self, path: str) -> None:
        """Restore a checkpoint, which rank 0 reads for all ranks, and remove later records."""
        worker = self.worker
        meta = worker.broadcast(load_meta(path) if worker.number == 0 else None)
        check_same_training(path, meta, self.describe(), _TYPES)
        self.early_stop = EarlyStop.from_json(meta["stop"])
        if self.settings.keep_best:
            self.early_stop.set_metric(" ".join(self.settings.keep_best))
        for epoch in range(meta["epochs"]):  # a checkpoint has learning rates in shared variables only
            contract.call_accepted(self.model.adjust_hyperp, epoch)
        if meta["within"]:
            self.skip_trained_batches(meta["epochs"], meta["within"])
        self.restore(path)
        if isinstance(self.rule, SummedGradients):
            self.rule.restore(self.rule_state)
        self.recorder.meter.step = meta["totals"][worker.number % len(meta["totals"])]
        if worker.number < len(meta["host_generators"]):
            set_generators(meta["host_generators"][worker.number])
        if worker.number == 0:
            self._cut_records(meta)
        worker.barrier("all go on from the checkpoint")
        self.epochs = int(meta["epochs"])

    def _cut_records(self, meta: Mapping[str, Any]) -> None:
        """Remove the lines of steps and reports after a checkpoint."""
        for file in self.folder.glob("*.jsonl"):
            past = meta["epochs"] + (file.stem == "reports")  # reports count completed epochs, from 1
            rank = file.stem.removeprefix("rank-")
            n_steps = -1  # number of steps up to a checkpoint within an epoch
            if meta["within"] and rank.isdecimal() and int(rank) < len(meta["totals"]):
                n_steps = meta["totals"][int(rank)]

            def stays(line: dict[str, Any], past: int = past, n_steps: int = n_steps) -> bool:
                return line.get("epoch", past) < past or line.get("step", math.inf) <= n_steps

            cut(file, stays)

    def skip_trained_batches(self, epoch: int, positions: list[dict[str, Any]]) -> None:
        """Move the class past the batches of an epoch that were trained on before the checkpoint.

        A class without ``skip_iter`` takes these steps again, to set its attributes.  The checkpoint then overwrites
        the parameters.

        Parameters
        ----------
        epoch : int
            Number of the epoch, from 0.
        positions : list of dict
            `position` of each rank at the checkpoint, with its ``record`` of steps, costs and weights.  With another
            number of ranks each has a proportional number of batches.
        """
        number, size = self.worker.number, self.worker.size
        position = positions[number % len(positions)]
        sub_batches = contract.get_sub_batches(self.model)
        batches = round(position["batch"] * len(positions) / size)
        steps, loss, weight = position["record"]
        if size != len(positions):
            steps = batches * sub_batches
        self.position = {**position, "batch": batches, "record": [steps, loss, weight]}
        self.model.epoch = epoch
        set_generators(position["generators"])
        if callable(getattr(self.model, "skip_iter", None)):
            self.model.skip_iter(batches)
            return
        recorder = ModelRecorder(number, every=sys.maxsize, rows=self.recorder.rows)
        for batch in range(batches):
            for _ in range(sub_batches):
                self.worker.progress()
                with contract.use_class_precision():
                    self.model.train_iter(batch, recorder)


def get_generators() -> dict[str, Any]:
    """Return the states of NumPy's and Python's global generators, in types that JSON can represent."""
    version, numbers, gauss = random.getstate()
    return {
        "numpy": generator_state.to_json(np.random.get_state(legacy=False)),
        "python": [version, list(numbers), gauss],
    }


def set_generators(states: dict[str, Any]) -> None:
    """Set the states of NumPy's and Python's global generators, as returned by `get_generators`."""
    np.random.set_state(generator_state.from_json(states["numpy"]))
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
