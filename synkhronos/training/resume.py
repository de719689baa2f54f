"""A trainer's checkpoints: what is written, and how it goes on from there.

`Place`
    How far a trainer has come.
`OnRanks`
    What the ranks keep for a trainer: written to checkpoints, and taken from there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from synkhronos import ranks
from synkhronos.data import Data
from synkhronos.rules import Rule, shared_memory
from synkhronos.rules.state import Vector
from synkhronos.tasks import run
from synkhronos.training import schedules, storing
from synkhronos.training.checkpoint import Checkpoint, CheckpointError, check_types, load_meta
from synkhronos.training.course import Course
from synkhronos.training.early_stop import EarlyStop
from synkhronos.training.meter import Outcome, shared_out
from synkhronos.training.schedules import Schedule

#: Entries of a trainer's checkpoint, besides those of `storing.describe`.
_TYPES: dict[str, Any] = {
    **dict.fromkeys(("seen", "epoch", "row", "start", "seed", "count", "steps_taken"), int),
    "outcomes": list,
    **dict.fromkeys(("stop", "schedule", "metrics"), dict),
    "parts": list | None,
}


@dataclass
class Place:
    """How far a trainer has come."""

    #: The next row is at this place of this epoch's order.
    epoch: int = 0
    row: int = 0
    #: The row of the last report; what the ranks have done from there to `row`, where a signal came between reports.
    start: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    #: Loss and validation of the last report.
    metrics: dict[str, float] = field(default_factory=dict)
    #: Best report so far.
    stop: EarlyStop = field(default_factory=EarlyStop)
    #: The steps that all ranks have taken together; of rules by which each takes its own these are with the ranks.
    steps: int = 0


class OnRanks:
    """What the ranks keep for a trainer, under its name.

    Where ranks are ``alike`` all have the same parameters after each step, and need no memory for exchanges.
    ``update_rule`` has the name and the options of the update rule.
    """

    def __init__(
        self, name: str, rule: Rule, groups: storing.Groups, alike: bool, update_rule: tuple[str, dict[str, Any]]
    ):
        self.name, self.rule, self.groups, self.alike = name, rule, groups, alike
        self.update_rule = update_rule
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

    def _describe(self) -> dict[str, Any]:
        return storing.describe("trainer", self.rule, self.groups, self.update_rule)

    def save(self, checkpoint: Checkpoint, course: Course, place: Place, schedule: Schedule, seen: int) -> None:
        """Write a checkpoint of all ranks; behind a report it has this report's metrics."""
        by_rank = run(storing.collect, self.name, self.groups, self.alike)
        arrays, streams = storing.packed(by_rank)
        arrays |= {f"shared.{name}": np.array(data.data) for name, data in self.memory.items()}
        meta = {
            **self._describe(),
            "seen": seen,
            "epoch": place.epoch,
            "row": place.row,
            "start": place.start,
            "outcomes": [list(outcome) for outcome in place.outcomes],
            "metrics": place.metrics,
            "stop": place.stop.to_json(),
            "seed": course.seed,
            "count": course.length,
            "parts": course.parts(),
            "batch_size": course.batch,
            "ranks": ranks.session().size,
            "alike": self.alike,
            "schedule": schedules.get_state(schedule),
            "steps_taken": place.steps,
            "streams": streams,
        }
        checkpoint.save(seen, arrays, meta, {} if place.outcomes else place.metrics)

    def restore(self, path: str | os.PathLike[str], course: Course, schedule: Schedule) -> tuple[Place, int]:
        """Take what a checkpoint has, on as many ranks as there are now; return where it goes on, and the rows seen.

        The arrays are read by the rank that is the master.
        """
        meta = load_meta(path)
        check_types(path, meta, storing.TYPES | _TYPES)
        storing.check(path, meta, self._describe())
        if meta["count"] != course.length or meta["seed"] != course.seed:
            raise CheckpointError(
                f"{path} is of {meta['count']} rows and seed {meta['seed']}, got {course.length} and "
                f"{course.seed}: the order of rows would be another"
            )
        if meta["row"] and meta["parts"] != course.parts():
            raise CheckpointError(
                f"{path} was written within an epoch over data_parts, of {_said(meta['parts'])}, got "
                f"{_said(course.parts())}: the order of rows would be another; a checkpoint of an epoch's end will do"
            )
        n_outcomes = 1 if self.alike else ranks.session().size
        place = Place(
            epoch=meta["epoch"],
            row=meta["row"],
            start=meta["start"],
            outcomes=shared_out([Outcome(*each) for each in meta["outcomes"]], n_outcomes),
            metrics=meta["metrics"],
            stop=EarlyStop.from_json(meta["stop"]),
            steps=meta["steps_taken"],
        )
        if self.memory:
            self._renew_memory()  # so that on no host there is anything else in it
        root = ranks.session().rank.number
        run(storing.restore, self.name, self.groups, self.rule, str(path), self.memory, self.alike, root)
        if not self.alike:
            run(storing.stand_for_all, self.name, self.rule)
        schedules.set_state(schedule, meta["schedule"])
        return place, meta["seen"]


def _said(parts: list[int] | None) -> str:
    return "other data" if parts is None else f"{parts[1:]} ranks on the hosts and {parts[0]} rows in a step of each"
