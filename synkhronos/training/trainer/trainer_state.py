"""The position of a trainer in its epochs, and its checkpoints."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from synkhronos import ranks
from synkhronos.exchange_rules import allocate_shared_arrays
from synkhronos.exchange_rules.state import FlatVariables
from synkhronos.programs import run
from synkhronos.training import schedules
from synkhronos.training.checkpoints import rank_state
from synkhronos.training.checkpoints.checkpoint_folder import (
    CheckpointError,
    CheckpointFolder,
    read_checkpoint,
    read_meta,
)
from synkhronos.training.checkpoints.compatibility import check_can_resume, describe_training
from synkhronos.training.monitoring.best_cost import BestCost
from synkhronos.training.monitoring.meter import RankTotals
from synkhronos.training.schedules import Schedule
from synkhronos.training.train_function.train_function import TrainFunction
from synkhronos.training.trainer.epoch_data import OrderKey, TrainerData


@dataclass
class TrainerPosition:
    """Position of a trainer in its epochs."""

    #: Number of complete epochs.
    epoch: int = 0
    #: Position in the order of rows of this epoch at which training continues.
    epoch_position: int = 0
    #: Position of the last report; 0 at the start of an epoch.
    interval_start: int = 0
    #: Totals of the ranks since the last report; empty unless training stopped between two reports.
    totals: list[RankTotals] = field(default_factory=list)
    #: Metrics of the last report.
    metrics: dict[str, float] = field(default_factory=dict)
    best_cost: BestCost = field(default_factory=BestCost)
    #: Number of joint steps; ranks that take their own steps count them in their `ExchangeState`.
    steps: int = 0
    n_rows_of_earlier_epochs: int = 0
    #: Whether an error or an interrupt may have left steps on rows after `epoch_position` in the parameters.
    may_have_trained_more: bool = False
    order_key: OrderKey = OrderKey(0, 0, None)

    @property
    def n_rows_seen(self) -> int:
        """Number of rows trained on."""
        return self.n_rows_of_earlier_epochs + self.epoch_position

    def to_meta(self) -> dict[str, Any]:
        """Return the entries of a checkpoint's ``meta``."""
        return {
            "seen": self.n_rows_seen,
            "epoch": self.epoch,
            "row": self.epoch_position,
            "start": self.interval_start,
            "outcomes": [total.to_json() for total in self.totals],
            "metrics": self.metrics,
            "stop": self.best_cost.to_dict(),
            "steps_taken": self.steps,
        }

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any], order_key: OrderKey) -> TrainerPosition:
        """Restore a position from the entries of `to_meta`."""
        return cls(
            epoch=meta["epoch"],
            epoch_position=meta["row"],
            interval_start=meta["start"],
            totals=[RankTotals.from_json(entry) for entry in meta["outcomes"]],
            metrics=meta["metrics"],
            best_cost=BestCost.from_dict(meta["stop"]),
            steps=meta["steps_taken"],
            n_rows_of_earlier_epochs=meta["seen"] - meta["row"],
            order_key=order_key,
        )


class TrainerState:
    """State of a trainer on the ranks, and its checkpoints.  ``update_rule`` is the result of `summarize_update_rule`.

    ``spec`` has the variables that each rank saves and restores: all ``variables`` without those of a sharded
    optimizer, which ``sharded_step`` has.  ``rate`` is the value of the learning rate's variable on all ranks; NaN
    if it is unknown.
    """

    def __init__(
        self,
        spec: rank_state.RankStateSpec,
        update_rule: tuple[str, dict[str, Any]],
        sharded_step: TrainFunction | None,
    ):
        self.spec, self.variables, self._sharded_step = spec, spec.variables, sharded_step
        if sharded_step is not None:
            self.spec = replace(spec, variables=replace(spec.variables, optimizer_state=[]))
        self._update_rule = update_rule
        self._session: Any = None
        self.position, self.rate = TrainerPosition(), math.nan

    def reset_if_session_is_new(self, session: ranks.Session, trainer: Any) -> None:
        """Reset the state if the session is new; the ranks release theirs when ``trainer`` is garbage-collected."""
        if self._session is session:
            return
        self.position, self.rate = TrainerPosition(), math.nan
        self.allocate_shared_arrays()
        if not self.spec.is_joint:
            session.memory.release_when_deleted(trainer, "object", ("persistent dict", self.spec.name))
        self._session = session

    def allocate_shared_arrays(self) -> None:
        """Allocate the exchange rule's arrays for the present number of ranks.  Joint steps need none."""
        spec = self.spec
        spec.shared_arrays = {}
        if not spec.is_joint:
            vector = FlatVariables(spec.variables.exchanged_variables)
            spec.shared_arrays = allocate_shared_arrays(
                spec.exchange_rule, ranks.get_session().size, vector.size, vector.dtype
            )

    def _describe(self) -> dict[str, Any]:
        return describe_training("trainer", self.spec.exchange_rule, self.variables, self._update_rule)

    def gather_sharded_optimizer_state(self) -> np.ndarray | None:
        """Return the variables of a sharded optimizer, gathered into one vector, or None if it is not sharded."""
        step = self._sharded_step
        return None if step is None else step.gather_state_vector(self.variables.optimizer_state)

    def set_sharded_optimizer_state(self, vector: np.ndarray | None) -> None:
        """Divide the vector from `gather_sharded_optimizer_state` among the present ranks, unless it is None."""
        if self._sharded_step is not None and vector is not None:
            self._sharded_step.set_state_vector(self.variables.optimizer_state, vector)

    def save(self, checkpoints: CheckpointFolder, data: TrainerData, schedule: Schedule) -> Path:
        """Write a checkpoint of all ranks, with the metrics of a report directly before it.  Return its path."""
        position = self.position
        by_rank = run(rank_state.read_state, self.spec)
        if self._sharded_step is not None:
            by_rank[0]["optimizer"] = self.gather_sharded_optimizer_state()
        shared_arrays = {name: array.data for name, array in self.spec.shared_arrays.items()}
        arrays, layout = rank_state.pack_states(by_rank, shared_arrays, self.spec.is_joint)
        meta = {
            **self._describe(),
            **layout,
            **position.to_meta(),
            "seed": data.seed,
            "count": data.n_data_rows,
            "parts": data.partition_key,
            "batch_size": data.batch_size,
            "schedule": schedules.get_state(schedule),
        }
        return checkpoints.save(position.n_rows_seen, arrays, meta, {} if position.totals else position.metrics)

    def restore(self, path: str | os.PathLike[str], data: TrainerData, schedule: Schedule) -> int:
        """Restore all ranks and the position from a checkpoint.  Return the number of rows trained on so far."""
        meta = read_meta(path)
        check_can_resume(path, meta, self._describe(), self.spec.exchange_rule.changeable_options)
        position = TrainerPosition.from_meta(meta, data.order_key)
        is_grown = not position.epoch_position and meta["count"] < data.n_data_rows  # rows were appended after an epoch
        if meta["count"] != data.n_data_rows and not is_grown or meta["seed"] != data.seed:
            raise CheckpointError(
                f"{path} is of {meta['count']} rows and seed {meta['seed']}, got {data.n_data_rows} and "
                f"{data.seed}: the order of rows would be another"
            )
        if position.epoch_position and meta["parts"] != data.partition_key:
            raise CheckpointError(
                f"{path} was written within an epoch over data_parts, of {_describe_partition(meta['parts'])}, got "
                f"{_describe_partition(data.partition_key)}: the order of rows would be another; use a "
                "checkpoint from the end of an epoch"
            )
        if self.spec.shared_arrays:
            self.allocate_shared_arrays()  # sets the arrays to zeros on every host
        run(rank_state.restore_state, self.spec, str(path), ranks.get_session().rank.number)
        if self._sharded_step is not None:
            self.set_sharded_optimizer_state(read_checkpoint(path).arrays["0.optimizer"])
        if not self.spec.is_joint:
            run(rank_state.set_params_to_consensus, self.spec.name, self.spec.exchange_rule)
        schedules.set_state(schedule, meta["schedule"])
        self.position = position
        return position.n_rows_seen


def _describe_partition(partition_key: list[int] | None) -> str:
    if partition_key is not None and len(partition_key) < 2:  # older checkpoints have no checksum
        return f"rows that were redistributed after the loss of a rank, with checksum {partition_key}"
    return (
        "other data"
        if partition_key is None
        else f"{partition_key[1:]} ranks on the hosts and {partition_key[0]} rows in a step of each"
    )
