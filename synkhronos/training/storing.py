"""What a checkpoint has of each rank, and how ranks take it back.

`Groups`
    The variables of a trainer, by what becomes of them on another number of ranks.
`collect`, `restore`, `stand_for_all`
    Programs of all ranks.
`packed`
    The ranks' arrays under one set of names.
`check_rule`
    Refuses a checkpoint of another rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from synkhronos.devices import device_of
from synkhronos.graphs import library_of
from synkhronos.rules import Rule, State
from synkhronos.rules.state import Vector
from synkhronos.tasks import LocalRows, Worker
from synkhronos.training.checkpoint import CheckpointError, Stored, load
from synkhronos.training.model import Model


@dataclass
class Groups:
    """The shared variables of a trainer."""

    #: Those that are exchanged, and what the update rule remembers of them.
    params: list[Any]
    optimizer: list[Any]
    #: Parameters that are not exchanged.
    excluded: list[Any]
    #: What else is updated: counts, running averages.
    others: list[Any]
    #: Random streams.
    generators: list[Any]

    @classmethod
    def of(cls, model: Model, params: Sequence[Any], rule: Rule) -> Groups:
        """Sort the variables of what is trained by a rule."""
        excluded = [rule.exclude is not None and bool(rule.exclude(p)) for p in params]
        exchanged = [p for p, out in zip(params, excluded, strict=True) if not out]
        if not exchanged:
            raise ValueError("exclude: expected it to leave some parameter to be exchanged, but it excludes all")
        own = [p for p, out in zip(params, excluded, strict=True) if out]
        optimizer = model.optimizer_state
        if len(optimizer) == len(params):  # one for each, as velocities are: those of the parameters exchanged
            optimizer = [s for s, out in zip(optimizer, excluded, strict=True) if not out]
        optimizer = [s for s in optimizer if np.dtype(s.type.dtype).kind == "f"]
        known = {id(s) for s in [*exchanged, *own, *optimizer]}
        others = [s for s in [*model.optimizer_state, *(s for s, _ in model.extra_updates)] if id(s) not in known]
        others = [s for s in others if hasattr(s.type, "dtype")]
        variables = [*model.x, *model.y, model.loss, *(expression for _, expression in model.extra_updates)]
        library = library_of(model.loss)
        generators = [s for s in library.shareds(variables) if library.is_generator(s)]
        return cls(exchanged, optimizer, own, others, generators)


def collect(worker: Worker, name: str, groups: Groups, alike: bool) -> dict[str, Any] | None:
    """Return what this rank has; None where ranks are alike, and rank 0's is enough, but for random streams."""
    kept = worker.kept(name)
    state: State | None = kept.get("state")
    found: dict[str, Any] = {"streams": [stream(shared) for shared in groups.generators]}
    found["others"] = [np.array(_get(shared)) for shared in groups.others]
    if alike and worker.number:
        return found
    found["params"] = np.array(kept["own"] if state is not None else Vector(groups.params).get())
    found["optimizer"] = np.array(Vector(groups.optimizer).get())
    found["excluded"] = np.array(Vector(groups.excluded).get())
    found["own"] = {} if state is None else {key: np.array(value) for key, value in state.own.items()}
    found["step"] = 0 if state is None else state.step
    found["since"] = 0 if state is None else state.since
    return found


def packed(by_rank: Sequence[dict[str, Any]]) -> tuple[dict[str, np.ndarray], list[Any]]:
    """Return the ranks' arrays by name, and their random streams, as JSON can say them."""
    arrays: dict[str, np.ndarray] = {}
    for r, found in enumerate(by_rank):
        for key, value in found.items():
            if key == "own":
                arrays |= {f"{r}.own.{name}": array for name, array in value.items()}
            elif key == "others":
                arrays |= {f"{r}.others.{i}": array for i, array in enumerate(value)}
            elif key != "streams":
                arrays[f"{r}.{key}"] = np.asarray(value)
    return arrays, [found["streams"] for found in by_rank]


def _unpacked(arrays: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return what each rank had."""
    by_rank: dict[int, dict[str, Any]] = {}
    shared = {name.removeprefix("shared."): array for name, array in arrays.items() if name.startswith("shared.")}
    for name, array in arrays.items():
        if name.startswith("shared."):
            continue
        rank, key, *rest = name.split(".", 2)
        found = by_rank.setdefault(int(rank), {"own": {}, "others": {}, "shared": shared})
        if rest:
            found[key][rest[0]] = array
        else:
            found[key] = int(array) if key in ("step", "since") else array
    return [by_rank[r] for r in sorted(by_rank)]


def check_rule(path: Any, meta: dict[str, Any], name: str, rule: Rule) -> None:
    """Refuse a checkpoint of another rule, or of one whose ranks exchanged in the other way."""
    if meta["rule"] != name:
        raise CheckpointError(f"{path} is of the rule {meta['rule']}, got {name}")
    if meta["asynchronous"] != rule.asynchronous:
        raise CheckpointError(
            f"{path} is of {name} with asynchronous={meta['asynchronous']}, got asynchronous={rule.asynchronous}: "
            "ranks that exchange one by one keep other things than those that do together"
        )


def stand_for_all(worker: Worker, name: str, rule: Rule) -> None:
    """Set the parameters to those that stand for all ranks', as after the report at which a checkpoint was written."""
    state: State = worker.kept(name)["state"]
    state.vector = rule.report(worker, state)


def restore(
    worker: Worker,
    name: str,
    groups: Groups,
    rule: Rule,
    path: str,
    shared: dict[str, LocalRows],
    alike: bool,
    root: int,
) -> None:
    """Take from a checkpoint what is this rank's, or what the rule gives it where there were fewer ranks, or more.

    Rank ``root`` reads it, and sends each rank what is its own: a rank of another host may not see the file.
    """
    if worker.number == root:
        stored = load(path)
        shares = _shares(stored, rule, worker.size, alike)
        for r, share in enumerate(shares):
            if r != root:
                worker.send(share, r)
        for key, rows in shared.items():
            array = stored.arrays[f"shared.{key}"]
            rows.array[...] = array if array.shape == rows.shape else 0  # one for each rank is empty at a report
        mine, there, streams = shares[root]
    else:
        mine, there, streams = worker.receive(root)
    Vector(groups.params).set(mine["params"])
    Vector(groups.optimizer).set(mine["optimizer"])
    Vector(groups.excluded).set(mine["excluded"])
    for i, one in enumerate(groups.others):
        _put(one, there[str(i)])
    if streams is not None:  # a new rank's are those that it was given when it was new
        for one, state in zip(groups.generators, streams, strict=True):
            set_stream(one, state)
    if alike:
        return
    kept = worker.kept(name)
    state = kept["state"] = State(groups.params, groups.optimizer, shared)
    state.step, state.since = mine["step"], mine["since"]
    state.own = {key: value if np.ndim(value) else np.asarray(value).item() for key, value in mine["own"].items()}
    kept["own"] = mine["params"]


def _shares(stored: Stored, rule: Rule, size: int, alike: bool) -> list[tuple[dict[str, Any], dict[str, Any], Any]]:
    """Return for each of so many ranks what it was, others' variables, and random streams, if it had any."""
    before, streams = _unpacked(stored.arrays), stored.meta["streams"]
    others = [each.pop("others") for each in before]
    if alike:
        mine = before[:1] * size
    else:
        mine = before if len(before) == size else rule.resized(before, size)
    # What ranks share is memory, and not sent with each.
    mine = [{key: value for key, value in each.items() if key != "shared"} for each in mine]
    return [(mine[r], others[r % len(others)], streams[r] if r < len(streams) else None) for r in range(size)]


def _get(shared: Any) -> np.ndarray:
    value = library_of(shared).get(shared)
    return device_of(value).to_host(value)


def _put(shared: Any, array: np.ndarray) -> None:
    library = library_of(shared)
    library.put(shared, device_of(library.get(shared)).from_host(array))


def stream(shared: Any) -> Any:
    """Return where a random stream is, as JSON can say it."""
    value = library_of(shared).stream(shared)
    if isinstance(value, np.random.Generator):
        return _plain(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return _plain(value.get_state(legacy=False))
    return _plain(np.asarray(value))


def set_stream(shared: Any, state: Any) -> None:
    """Have a random stream go on from there."""
    library, state = library_of(shared), _arrays(state)
    value = library.stream(shared)
    if isinstance(value, np.random.Generator):
        value.bit_generator.state = state
    elif isinstance(value, np.random.RandomState):
        value.set_state(state)
    else:
        value = state
    library.set_stream(shared, value)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "values": value.tolist()}
    return value.item() if isinstance(value, np.generic) else value


def _arrays(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"dtype", "values"}:
        return np.array(value["values"], value["dtype"])
    if isinstance(value, dict):
        return {key: _arrays(one) for key, one in value.items()}
    return value
