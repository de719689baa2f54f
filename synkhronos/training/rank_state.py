"""State of every rank in a checkpoint: how it is collected, described, compared and restored.

Trainers and the launcher's runs save through `write_states` and resume through `check_meta` and `restore_state`::

    every rank: collect_state --> one rank: write_states --> Checkpoint
    every rank: restore_state <-- one rank: check_meta   <-- Checkpoint

After a report the parameters are those that stand for all ranks, `set_reported_params`; a rank's own are remembered
under ``"own"`` until it trains on.  A checkpoint has each rank's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from synkhronos.checks import is_number
from synkhronos.devices import get_array_device
from synkhronos.graphs import library_of
from synkhronos.rules import Rule, State
from synkhronos.rules.state import Vector
from synkhronos.tasks import Worker
from synkhronos.training.checkpoint import Checkpoint, CheckpointError, Stored, check_types, load
from synkhronos.training.training_graph import TrainingGraph
from synkhronos.training.updates.flat_gradient import shape_of


@dataclass
class Groups:
    """Shared variables of a training, by their role.

    Attributes
    ----------
    params : list of shared variables
        Variables that ranks exchange: parameters, then running averages.
    optimizer : list of shared variables, or None
        Variables of the update rule, such as velocities.  None on the ranks if they are sharded.
    excluded : list of shared variables
        Parameters that are not exchanged.
    others : list of shared variables
        Other updated variables, such as counts.
    generators : list of shared variables
        Random streams.
    n_averages : int
        Number of running averages at the end of `params`.
    """

    params: list[Any]
    optimizer: Any
    excluded: list[Any]
    others: list[Any]
    generators: list[Any]
    n_averages: int = 0

    @classmethod
    def from_graph(cls, graph: TrainingGraph, params: Sequence[Any], rule: Rule) -> Groups:
        """Group the variables of a training by their role under an exchange rule."""
        excluded = [rule.exclude is not None and bool(rule.exclude(p)) for p in params]
        exchanged = [p for p, out in zip(params, excluded, strict=True) if not out]
        if not exchanged:
            raise ValueError("exclude: expected it to leave some parameter to be exchanged, but it excludes all")
        own = [p for p, out in zip(params, excluded, strict=True) if out]
        optimizer = graph.optimizer_state
        if len(optimizer) == len(params):  # one for each, as velocities are: those of the parameters exchanged
            optimizer = [s for s, out in zip(optimizer, excluded, strict=True) if not out]
        optimizer = [s for s in optimizer if np.dtype(s.type.dtype).kind == "f"]
        averages = [u.shared for u in graph.extra_updates if u.op == "mean"]
        known = {id(s) for s in [*exchanged, *own, *optimizer, *averages]}
        others = [s for s in [*graph.optimizer_state, *(u.shared for u in graph.extra_updates)] if id(s) not in known]
        others = [s for s in others if hasattr(s.type, "dtype")]
        variables = [*graph.x, *graph.y, graph.loss, *(u.expression for u in graph.extra_updates)]
        library = library_of(graph.loss)
        generators = [s for s in library.find_shareds(variables) if library.is_generator(s)]
        return cls([*exchanged, *averages], optimizer, own, others, generators, len(averages))

    def group_by_role(self) -> dict[str, list[Any]]:
        """Return the variables of each role; random streams have no role."""
        n_params = len(self.params) - self.n_averages
        return {
            "params": self.params[:n_params],
            "averages": self.params[n_params:],
            "optimizer": self.optimizer,
            "excluded": self.excluded,
            "others": self.others,
        }


@dataclass
class RankTraining:
    """Training whose state every rank saves and restores.

    Attributes
    ----------
    name : str
        Key under which a rank stores the state.
    groups : Groups
    rule : Rule
    memory : dict of str to Data, or on a rank of LocalRows
        Shared memory of the rule.
    is_joint : bool
        Whether all ranks take each step together: their parameters are equal then, and those of rank 0 are saved.
    """

    name: str
    groups: Groups
    rule: Rule
    memory: dict[str, Any]
    is_joint: bool


def collect_state(worker: Worker, training: RankTraining) -> dict[str, Any]:
    """Return the state of this rank; if steps are joint, only entries that may differ on ranks other than 0.

    Returns
    -------
    dict
        ``streams``, ``others``, ``params``, ``optimizer`` and ``excluded`` as in `Groups`; ``own``, ``step`` and
        ``since`` as in `State`.
    """
    groups, stored = training.groups, worker.get_storage(training.name)
    state: State | None = stored.get("state")
    entries: dict[str, Any] = {
        "streams": [get_stream_state(shared) for shared in groups.generators],
        "others": [np.array(get_value(shared)) for shared in groups.others],
    }
    if training.is_joint and worker.number:
        return entries
    entries["params"] = np.array(stored["own"] if state is not None else Vector(groups.params).get())
    if groups.optimizer is not None:
        entries["optimizer"] = np.array(Vector(groups.optimizer).get())
    entries["excluded"] = np.array(Vector(groups.excluded).get())
    entries["own"] = {} if state is None else {key: np.array(value) for key, value in state.own.items()}
    entries["step"] = 0 if state is None else state.step
    entries["since"] = 0 if state is None else state.since
    return entries


def _pack_states(by_rank: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Return the arrays of all ranks by name."""
    arrays: dict[str, np.ndarray] = {}
    for r, state in enumerate(by_rank):
        for key, value in state.items():
            if key == "own":
                arrays |= {f"{r}.own.{name}": array for name, array in value.items()}
            elif key == "others":
                arrays |= {f"{r}.others.{i}": array for i, array in enumerate(value)}
            elif key != "streams":
                arrays[f"{r}.{key}"] = np.asarray(value)
    return arrays


def _unpack_states(stored: Stored) -> list[dict[str, Any]]:
    """Return the state of each rank, checked against the description in the checkpoint.

    Raises
    ------
    CheckpointError
        If an array is missing, or has another size.
    """
    meta, arrays = stored.meta, stored.arrays
    shared = {name.removeprefix("shared."): array for name, array in arrays.items() if name.startswith("shared.")}
    by_rank: list[dict[str, Any]] = []
    for r in range(meta["ranks"]):
        others = [arrays[f"{r}.others.{i}"] for i in range(len(meta["variables"]["others"]))]
        state: dict[str, Any] = {"own": {}, "others": others, "shared": shared}
        by_rank.append(state)
        if meta["alike"] and r:
            continue
        for role in ("params", "optimizer", "excluded"):
            state[role] = array = arrays[f"{r}.{role}"]
            described = meta["variables"][role] + (meta["variables"]["averages"] if role == "params" else [])
            size = sum(math.prod(shape) for _, shape, _ in described)
            if array.shape != (size,):
                raise CheckpointError(f"{stored.path}: expected {size} elements of {r}.{role}, got {array.shape}")
        state |= {name: int(arrays[f"{r}.{name}"]) for name in ("step", "since")}
        prefix = f"{r}.own."
        state["own"] = {n.removeprefix(prefix): array for n, array in arrays.items() if n.startswith(prefix)}
    return by_rank


#: Options that may change when a training is resumed: learning rates, and periods of exchanges.
CHANGEABLE = frozenset({"learning_rate", "lr", "period", "push", "fetch", "start", "probability"})
#: Stands for options that are no numbers, flags or texts, such as shared variables; these are not compared.
_SYMBOLIC = "symbolic"
#: Types of the entries from `describe_training` and `write_states`.
_TYPES: dict[str, Any] = {
    "kind": str,
    "rule": str,
    "asynchronous": bool,
    "rule_options": dict,
    "update_rule": str | None,
    "update_rule_options": dict,
    "variables": dict,
    "generators": list,
    "ranks": int,
    "alike": bool,
    "streams": list,
}
#: Names of the roles of variables in error messages.
_ROLES = {
    "params": "exchanged parameters",
    "averages": "averaged extra updates",
    "optimizer": "variables of the update rule",
    "excluded": "parameters that are not exchanged",
    "others": "other updated variables",
}


def describe_training(
    kind: str, rule: Rule, groups: Groups, update_rule: tuple[str, dict[str, Any]] | None
) -> dict[str, Any]:
    """Describe what is trained and how, for a checkpoint's ``meta``.

    Parameters
    ----------
    kind : str
        The program that trains, such as ``"trainer"``.
    rule : Rule
        The exchange rule.
    groups : Groups
    update_rule : (str, dict), optional
        Name and options of the update rule, where they are known.

    Returns
    -------
    dict
        Equal for two trainings if one can resume from the other's checkpoint, except for `CHANGEABLE` options.
    """
    name, options = update_rule or (None, {})
    return {
        "kind": kind,
        "rule": type(rule).__name__,
        "asynchronous": rule.asynchronous,
        "rule_options": _to_json_options(rule.options()),
        "update_rule": name,
        "update_rule_options": _to_json_options(options),
        "variables": {
            role: [_describe_variable(s, role) for s in shareds] for role, shareds in groups.group_by_role().items()
        },
        "generators": [_describe_generator(shared) for shared in groups.generators],
    }


def write_states(
    checkpoint: Checkpoint,
    seen: int,
    description: Mapping[str, Any],
    by_rank: Sequence[dict[str, Any]],
    memory: Mapping[str, np.ndarray],
    is_joint: bool,
    meta: Mapping[str, Any],
    metrics: Mapping[str, float],
) -> None:
    """Write a checkpoint of all ranks.

    Parameters
    ----------
    checkpoint : Checkpoint
    seen : int
        Rows trained on so far; a run counts steps of a rank.
    description : dict
        From `describe_training`.
    by_rank : list of dict
        From `collect_state`, of each rank.
    memory : dict of str to array
        Shared memory of the rule.
    is_joint : bool
        As in `RankTraining`.
    meta, metrics : dict
        Further entries, and metrics, of the checkpoint.
    """
    arrays = _pack_states(by_rank) | {f"shared.{name}": np.array(array) for name, array in memory.items()}
    own = {"ranks": len(by_rank), "alike": is_joint, "streams": [state["streams"] for state in by_rank]}
    checkpoint.save(seen, arrays, {**description, **own, **meta}, metrics)


def check_meta(path: Any, meta: Mapping[str, Any], now: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    """Raise if a checkpoint is of another training than ``now``, a description by `describe_training`.

    ``types`` has the types of the caller's own entries.

    Raises
    ------
    CheckpointError
        The message names the difference.
    """
    check_types(path, meta, {**_TYPES, **types})
    check_description(path, meta, now)


def check_description(path: Any, meta: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a checkpoint's description differs from ``now``."""
    if meta["kind"] != now["kind"]:
        raise CheckpointError(f"{path} is a checkpoint of a {meta['kind']}, got a {now['kind']}")
    _check_variables(path, "params", meta, now)  # first: of another model everything else may differ, too
    if meta["rule"] != now["rule"]:
        raise CheckpointError(f"{path} is of the rule {meta['rule']}, got {now['rule']}")
    if meta["asynchronous"] != now["asynchronous"]:
        raise CheckpointError(
            f"{path} is of {now['rule']} with asynchronous={meta['asynchronous']}, got asynchronous="
            f"{now['asynchronous']}: ranks that exchange one by one keep other things than those that do together"
        )
    _check_options(path, now["rule"], meta["rule_options"], now["rule_options"])
    if meta["update_rule"] != now["update_rule"]:
        raise CheckpointError(f"{path} is of the update rule {meta['update_rule']}, got {now['update_rule']}")
    _check_options(path, now["update_rule"], meta["update_rule_options"], now["update_rule_options"])
    for role in _ROLES:
        _check_variables(path, role, meta, now)
    if meta["generators"] != now["generators"]:
        raise CheckpointError(f"{path} has the random streams {meta['generators']}, expected {now['generators']}")


def _check_variables(path: Any, role: str, meta: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    before, expected = meta["variables"][role], now["variables"][role]
    if before != expected:
        raise CheckpointError(
            f"{path} is of another model: its {_ROLES[role]} are {_format_variables(before)}, expected "
            f"{_format_variables(expected)}"
        )


def _check_options(path: Any, name: str | None, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for option in sorted({*before, *now} - CHANGEABLE):
        old, new = before.get(option), now.get(option)
        if old != new and _SYMBOLIC not in (old, new):
            raise CheckpointError(f"{path} is of {name} with {option}={old!r}, got {option}={new!r}")


def _to_json_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options in types that JSON can represent: a placeholder for each value but numbers, flags and texts."""
    plain = {name: np.asarray(value).item() if is_number(value) else value for name, value in options.items()}
    return {name: v if isinstance(v, str | int | float | bool | None) else _SYMBOLIC for name, v in plain.items()}


def _describe_variable(shared: Any, role: str) -> list[Any]:
    """Describe a shared variable: its name, its shape, its dtype.

    An extra update may change its variable's shape from step to step: its number of dimensions stands for it.
    """
    shape = list(shape_of(shared))
    return [shared.name or "", f"{len(shape)}-d" if role == "others" else shape, str(shared.type.dtype)]


def _describe_generator(shared: Any) -> list[Any]:
    """Describe a random stream: its generator, and the shape of its state if that is an array."""
    value = library_of(shared).copy_generator(shared)
    state = value.bit_generator if isinstance(value, np.random.Generator) else value
    return [type(state).__name__, list(np.shape(value))]


def _format_variables(variables: list[list[Any]]) -> str:
    return ", ".join(f"{name or 'unnamed'} {shape} {dtype}" for name, shape, dtype in variables) or "none"


def set_reported_params(worker: Worker, name: str, rule: Rule) -> None:
    """Set the parameters to the rule's reported ones; save this rank's own parameters under ``"own"``."""
    stored = worker.get_storage(name)
    state: State = stored["state"]
    reported = rule.report(worker, state)
    stored["own"] = state.vector  # after the report, which may receive messages that change it
    state.vector = reported


def restore_own_params(worker: Worker, name: str) -> None:
    """Undo `set_reported_params`: set the parameters to this rank's own."""
    stored = worker.get_storage(name)
    if "own" in stored:
        stored["state"].vector = stored["own"]
        del stored["own"]  # not before: an interrupt between the two must not lose it


def restore_state(worker: Worker, training: RankTraining, path: str, root: int) -> None:
    """Restore this rank from a checkpoint, which the rule converts if it has another number of ranks.

    Rank ``root`` reads it and sends each rank its state: a rank of another host may not see the file.
    """
    if worker.number == root:
        stored = load(path)
        by_rank = _assign_states(stored, training, worker.size)
        for r, state in enumerate(by_rank):
            if r != root:
                worker.send(state, r)
        for key, rows in training.memory.items():
            array = stored.arrays[f"shared.{key}"]
            rows.array[...] = array if array.shape == rows.shape else 0  # one for each rank is empty at a report
        state = by_rank[root]
    else:
        state = worker.receive(root)
    set_state(worker, training, state)


def set_state(worker: Worker, training: RankTraining, saved: dict[str, Any]) -> None:
    """Set this rank's state to one that `collect_state` returned; ``streams`` of None leave the present ones."""
    groups = training.groups
    Vector(groups.params).set(saved["params"])
    if groups.optimizer is not None:
        Vector(groups.optimizer).set(saved["optimizer"])
    Vector(groups.excluded).set(saved["excluded"])
    for shared, value in zip(groups.others, saved["others"], strict=True):
        put_value(shared, value)
    if saved["streams"] is not None:
        for shared, value in zip(groups.generators, saved["streams"], strict=True):
            set_stream_state(shared, value)
    if training.is_joint:
        return
    stored = worker.get_storage(training.name)
    state = stored["state"] = State(groups.params, groups.optimizer, training.memory, groups.n_averages)
    state.step, state.since = saved["step"], saved["since"]
    state.own = {key: value if np.ndim(value) else np.asarray(value).item() for key, value in saved["own"].items()}
    stored["own"] = saved["params"]


def _assign_states(stored: Stored, training: RankTraining, size: int) -> list[dict[str, Any]]:
    """Return the state of each of ``size`` ranks from a checkpoint."""
    saved, streams = _unpack_states(stored), stored.meta["streams"]
    by_rank = resize_states([{**state, "streams": streams[r]} for r, state in enumerate(saved)], training, size)
    if training.groups.optimizer is None:
        by_rank = [{**state, "optimizer": None} for state in by_rank]
    return by_rank


def resize_states(saved: list[dict[str, Any]], training: RankTraining, size: int) -> list[dict[str, Any]]:
    """Return the state of each of ``size`` ranks, from those of as many or another number of ranks.

    Parameters
    ----------
    saved : list of dict
        States, as `collect_state` returns them, and the rule's ``shared`` memory.
    training : RankTraining
    size : int

    Returns
    -------
    list of dict
        Without ``shared``; the streams of ranks above those of ``saved`` are None.
    """
    if training.is_joint:
        by_rank = saved[:1] * size
    else:
        by_rank = saved if len(saved) == size else training.rule.resized(saved, size)
    by_rank = [
        {**state, "others": saved[r % len(saved)]["others"], "streams": saved[r]["streams"] if r < len(saved) else None}
        for r, state in enumerate(by_rank)
    ]
    for state in by_rank:
        del state["shared"]  # memory, which is not sent
    return by_rank


def get_value(shared: Any) -> np.ndarray:
    """Return the value of a shared variable as an array in host memory."""
    value = library_of(shared).get(shared)
    return get_array_device(value).to_host(value)


def put_value(shared: Any, array: np.ndarray) -> None:
    """Copy an array in host memory into a shared variable, on the variable's device."""
    library = library_of(shared)
    library.put(shared, get_array_device(library.get(shared)).from_host(array))


def collect_streams(worker: Worker, streams: Sequence[Any]) -> list[Any]:
    """Return the states of random streams of this rank."""
    return [get_stream_state(shared) for shared in streams]


def restore_streams(worker: Worker, streams: Sequence[Any], by_rank: Sequence[list[Any]]) -> None:
    """Set random streams of this rank to their states from `collect_streams` on all ranks."""
    for shared, state in zip(streams, by_rank[worker.number], strict=True):
        set_stream_state(shared, state)


def get_stream_state(shared: Any) -> Any:
    """Return the state of a random stream in the form for JSON."""
    value = library_of(shared).copy_generator(shared)
    if isinstance(value, np.random.Generator):
        return to_json(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return to_json(value.get_state(legacy=False))
    return to_json(np.asarray(value))


def set_stream_state(shared: Any, state: Any) -> None:
    """Set the state of a random stream."""
    library, state = library_of(shared), from_json(state)
    value = library.copy_generator(shared)
    if isinstance(value, np.random.Generator):
        value.bit_generator.state = state
    elif isinstance(value, np.random.RandomState):
        value.set_state(state)
    else:
        value = state
    library.set_generator(shared, value)


def to_json(value: Any) -> Any:
    """Return a generator's state in types that JSON can represent."""
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "values": value.tolist()}
    return value.item() if isinstance(value, np.generic) else value


def from_json(value: Any) -> Any:
    """Return a generator's state from `to_json`."""
    if isinstance(value, dict) and set(value) == {"dtype", "values"}:
        return np.array(value["values"], value["dtype"])
    if isinstance(value, dict):
        return {key: from_json(item) for key, item in value.items()}
    return value
