"""The progress of a trainer, and its checkpoints."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from synkhronos import ranks
from synkhronos.rules import shared_memory
from synkhronos.rules.state import Vector
from synkhronos.tasks import run
from synkhronos.training import rank_state, schedules
from synkhronos.training.checkpoint import Checkpoint, CheckpointError, load, load_meta
from synkhronos.training.early_stop import EarlyStop
from synkhronos.training.epoch_data import EpochData
from synkhronos.training.meter import Outcome, split_outcomes
from synkhronos.training.optimizer_state import OptimizerState
from synkhronos.training.schedules import Schedule

#: Entries of a trainer's checkpoint, besides those of `rank_state.describe_training`.
_TYPES: dict[str, Any] = {
    **dict.fromkeys(("seen", "epoch", "row", "start", "seed", "count", "steps_taken"), int),
    "outcomes": list,
    **dict.fromkeys(("stop", "schedule", "metrics"), dict),
    "parts": list | None,
}


@dataclass
class Progress:
    """Position of a trainer in its epochs.

    Attributes
    ----------
    epoch, row : int
        Epoch of the next row, and its position in the epoch's order of rows.
    start : int
        Position of the last report in the epoch.
    outcomes : list of Outcome
        Outcomes of the ranks between ``start`` and ``row``, if a signal stopped the training between two reports.
    metrics : dict of str to float
        Loss and validation of the last report.
    early_stop : EarlyStop
        Best report so far.
    steps : int
        Steps that all ranks have taken together; where ranks step by themselves, they count them.
    rows_before : int
        Number of rows of the epochs before ``epoch``.
    order : (int, int)
        Number of rows of ``epoch``, and seed of their order.
    """

    epoch: int = 0
    row: int = 0
    start: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    early_stop: EarlyStop = field(default_factory=EarlyStop)
    steps: int = 0
    rows_before: int = 0
    order: tuple[int, int] = (0, 0)

    @property
    def seen(self) -> int:
        """Number of rows trained on."""
        return self.rows_before + self.row


class TrainerState:
    """State of a trainer on the ranks, and its checkpoints.

    Parameters
    ----------
    training : RankTraining
        With all variables; those of a sharded optimizer are left to `sharded`.
    update_rule : (str, dict)
        Name and options of the update rule.
    sharded : OptimizerState, optional
        The optimizer's state, if it is sharded.

    Attributes
    ----------
    training : RankTraining
        What each rank saves and restores.
    groups : Groups
        All variables.
    progress : Progress
    rate : float
        Value of the learning rate's variable on all ranks; NaN if it is unknown.
    """

    def __init__(
        self,
        training: rank_state.RankTraining,
        update_rule: tuple[str, dict[str, Any]],
        sharded: OptimizerState | None = None,
    ):
        self.training, self.groups, self._sharded = training, training.groups, sharded
        if sharded is not None:
            self.training = replace(training, groups=replace(training.groups, optimizer=None))
        self._update_rule = update_rule
        self._session: Any = None
        self.progress, self.rate = Progress(), math.nan

    def begin(self, session: ranks.Session, trainer: Any) -> None:
        """Reset the state if the ranks are new; they release theirs when the trainer is released."""
        if self._session is session:
            return
        self.progress, self.rate = Progress(), math.nan
        self.renew_memory()
        if not self.training.is_joint:
            session.memory.release_with(trainer, "object", ("storage", self.training.name))
        self._session = session

    def renew_memory(self) -> None:
        """Allocate the shared memory of the rule, for the present number of ranks, unless they take steps together."""
        training = self.training
        training.memory = {}
        if not training.is_joint:
            vector = Vector(training.groups.params)
            training.memory = shared_memory(training.rule, ranks.get_session().size, vector.size, vector.dtype)

    def _describe(self) -> dict[str, Any]:
        return rank_state.describe_training("trainer", self.training.rule, self.groups, self._update_rule)

    def get_sharded_optimizer(self) -> np.ndarray | None:
        """Return the optimizer's variables in one vector, gathered from all ranks; None if they are not sharded."""
        return None if self._sharded is None else self._sharded.get_vector(self.groups.optimizer)

    def set_sharded_optimizer(self, vector: np.ndarray | None) -> None:
        """Divide the optimizer's variables among the ranks; nothing is done with None."""
        if self._sharded is not None and vector is not None:
            self._sharded.set_vector(self.groups.optimizer, vector)

    def save(self, checkpoint: Checkpoint, data: EpochData, schedule: Schedule, seen: int) -> None:
        """Write a checkpoint of all ranks; right after a report it has the metrics of this report."""
        progress = self.progress
        by_rank = run(rank_state.collect_state, self.training)
        if self._sharded is not None:
            by_rank[0]["optimizer"] = self.get_sharded_optimizer()
        meta = {
            "seen": seen,
            "epoch": progress.epoch,
            "row": progress.row,
            "start": progress.start,
            "outcomes": [list(outcome) for outcome in progress.outcomes],
            "metrics": progress.metrics,
            "stop": progress.early_stop.to_json(),
            "seed": data.seed,
            "count": data.length,
            "parts": data.describe_parts(),
            "batch_size": data.batch,
            "schedule": schedules.get_state(schedule),
            "steps_taken": progress.steps,
        }
        memory = {name: array.data for name, array in self.training.memory.items()}
        metrics = {} if progress.outcomes else progress.metrics
        is_joint = self.training.is_joint
        rank_state.write_states(checkpoint, seen, self._describe(), by_rank, memory, is_joint, meta, metrics)

    def restore(self, path: str | os.PathLike[str], data: EpochData, schedule: Schedule) -> int:
        """Restore all ranks and the progress from a checkpoint; return the number of rows seen."""
        meta = load_meta(path)
        rank_state.check_meta(path, meta, self._describe(), _TYPES)
        is_grown = not meta["row"] and meta["count"] < data.length  # since the end of an epoch
        if meta["count"] != data.length and not is_grown or meta["seed"] != data.seed:
            raise CheckpointError(
                f"{path} is of {meta['count']} rows and seed {meta['seed']}, got {data.length} and "
                f"{data.seed}: the order of rows would be another"
            )
        if meta["row"] and meta["parts"] != data.describe_parts():
            raise CheckpointError(
                f"{path} was written within an epoch over data_parts, of {_format_parts(meta['parts'])}, got "
                f"{_format_parts(data.describe_parts())}: the order of rows would be another; a checkpoint of "
                "an epoch's end will do"
            )
        n_outcomes = 1 if self.training.is_joint else ranks.get_session().size
        progress = Progress(
            epoch=meta["epoch"],
            row=meta["row"],
            start=meta["start"],
            outcomes=split_outcomes([Outcome(*entry) for entry in meta["outcomes"]], n_outcomes),
            metrics=meta["metrics"],
            early_stop=EarlyStop.from_json(meta["stop"]),
            steps=meta["steps_taken"],
            rows_before=meta["seen"] - meta["row"],
            order=(data.count, data.seed),
        )
        if self.training.memory:
            self.renew_memory()  # so that on no host there is anything else in it
        run(rank_state.restore_state, self.training, str(path), ranks.get_session().rank.number)
        if self._sharded is not None:
            self.set_sharded_optimizer(load(path).arrays["0.optimizer"])
        if not self.training.is_joint:
            run(rank_state.set_reported_params, self.training.name, self.training.rule)
        schedules.set_state(schedule, meta["schedule"])
        self.progress = progress
        return int(meta["seen"])


def _format_parts(parts: list[int] | None) -> str:
    return "other data" if parts is None else f"{parts[1:]} ranks on the hosts and {parts[0]} rows in a step of each"
