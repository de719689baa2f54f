"""A trainer's checkpoints: what is written, and how it goes on from there.

`Place`
    How far a trainer has come.
`OnRanks`
    What the ranks keep for a trainer: written to checkpoints, and taken from there.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from synkhronos import ranks
from synkhronos.data import Data
from synkhronos.rules import Rule, shared_memory
from synkhronos.rules.state import Vector
from synkhronos.tasks import run
from synkhronos.training import schedules, storing
from synkhronos.training.checkpoint import Checkpoint, CheckpointError, load_meta
from synkhronos.training.course import Course
from synkhronos.training.schedules import Schedule


@dataclass
class Place:
    """How far a trainer has come."""

    #: The next row is at this place of this epoch's order.
    epoch: int = 0
    row: int = 0
    #: What is to get lower: the loss, or what of validation; "" before the first report.
    measure: str = ""
    #: The best value of validation so far.
    best: float = math.inf
    #: The reports since then.
    since: int = 0
    #: The steps that all ranks have taken together; of rules by which each takes its own these are with the ranks.
    steps: int = 0


class OnRanks:
    """What the ranks keep for a trainer, under its name.

    ``params`` are all of the model's: a checkpoint is of this model if it has as many, of the same shapes.  Where ranks
    are ``alike`` all have the same parameters after each step, and need no memory for exchanges.
    """

    def __init__(self, name: str, rule: Rule, params: list[Any], groups: storing.Groups, alike: bool):
        self.name, self.rule, self.params, self.groups, self.alike = name, rule, params, groups, alike
        #: What the rule has all ranks see.
        self.memory: dict[str, Data] = {}

    def begin(self, session: ranks.Session, trainer: Any) -> None:
        """Begin with new ranks, which forget all of it when the trainer is dropped."""
        self._renew_memory()
        if not self.alike:
            session.memory.release_with(trainer, "object", ("kept", self.name))

    def _renew_memory(self) -> None:
        self.memory = {}
        if not self.alike:
            vector = Vector(self.groups.params)
            self.memory = shared_memory(self.rule, ranks.session().size, vector.size, vector.dtype)

    def save(self, checkpoint: Checkpoint, course: Course, place: Place, schedule: Schedule, seen: int) -> None:
        """Write a checkpoint of all ranks."""
        by_rank = run(storing.collect, self.name, self.groups, self.alike)
        arrays, streams = storing.packed(by_rank)
        arrays |= {f"shared.{name}": np.array(data.data) for name, data in self.memory.items()}
        meta = {
            "format": 1,
            "seen": seen,
            "epoch": place.epoch,
            "row": place.row,
            "measure": place.measure,
            "best": None if math.isinf(place.best) else place.best,
            "since": place.since,
            "seed": course.seed,
            "count": course.length,
            "parts": course.parts(),
            "batch_size": course.batch,
            "ranks": ranks.session().size,
            "rule": type(self.rule).__name__,
            "asynchronous": self.rule.asynchronous,
            "rule_options": {name: value for name, value in self.rule.options().items() if _is_plain(value)},
            "schedule": schedules.state_of(schedule),
            "steps_taken": place.steps,
            "model": self._model_shapes(),
            "streams": streams,
        }
        checkpoint.save(seen, arrays, meta)

    def restore(self, path: str | os.PathLike[str], course: Course, schedule: Schedule) -> tuple[Place, int]:
        """Take what a checkpoint has, on as many ranks as there are now; return where it goes on, and the rows seen.

        The arrays are read by the rank that is the master.
        """
        meta = load_meta(path)
        if meta.get("model") != self._model_shapes():
            raise CheckpointError(
                f"{path} is of another model: it has {meta.get('model')}, expected {self._model_shapes()}"
            )
        storing.check_rule(path, meta, type(self.rule).__name__, self.rule)
        if meta["count"] != course.length or meta["seed"] != course.seed:
            raise CheckpointError(
                f"{path} is of {meta['count']} rows and seed {meta['seed']}, got {course.length} and "
                f"{course.seed}: the order of rows would be another"
            )
        if meta["row"] and meta.get("parts") != course.parts():
            raise CheckpointError(
                f"{path} was written within an epoch over data_parts, of {_said(meta.get('parts'))}, got "
                f"{_said(course.parts())}: the order of rows would be another; a checkpoint of an epoch's end will do"
            )
        if self.memory:
            self._renew_memory()  # so that on no host there is anything else in it
        root = ranks.session().rank.number
        run(storing.restore, self.name, self.groups, self.rule, str(path), self.memory, self.alike, root)
        if not self.alike:
            run(storing.stand_for_all, self.name, self.rule)
        schedules.set_state(schedule, meta["schedule"])
        best = math.inf if meta["best"] is None else meta["best"]
        place = Place(meta["epoch"], meta["row"], meta["measure"], best, meta["since"], meta["steps_taken"])
        return place, meta["seen"]

    def _model_shapes(self) -> dict[str, Any]:
        """Return what tells a model from another: each parameter's shape and dtype, in order."""
        vectors = Vector(self.params)
        return {
            f"{i} {shared.name or ''}".strip(): [list(shape), str(shared.type.dtype)]
            for i, (shared, shape) in enumerate(zip(self.params, vectors.shapes, strict=True))
        }


def _said(parts: list[int] | None) -> str:
    return "other data" if parts is None else f"{parts[1:]} ranks on the hosts and {parts[0]} rows in a step of each"


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | None)
