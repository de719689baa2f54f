"""Collect the state of every rank for a checkpoint, and restore it.

Trainers and the launcher save and resume::

    all ranks: read_state --> one rank: pack_states      --> CheckpointFolder
    all ranks: restore_state <-- one rank: check_can_resume <-- CheckpointFolder

While a report is made, all ranks have the exchange rule's consensus parameters (`set_params_to_consensus`).  Each rank
stores its own parameters under ``"own_params"`` until the next step.  A checkpoint has each rank's own parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from synkhronos.exchange_rules import ExchangeRule, ExchangeState
from synkhronos.graph_libraries import get_library
from synkhronos.programs import RankContext
from synkhronos.training.checkpoints.checkpoint_folder import Checkpoint, read_checkpoint
from synkhronos.training.checkpoints.variables_by_role import VariablesByRole
from synkhronos.variable_types import SharedVariable


@dataclass
class RankStateSpec:
    """Variables and exchange rule of a training run, which determine the state of a rank.

    A rank stores the state under ``name``.  ``shared_arrays`` are the exchange rule's arrays in shared memory.  If each
    step is one command of all ranks (``is_joint``), their parameters are equal, and only rank 0's are saved.
    """

    name: str
    variables: VariablesByRole
    exchange_rule: ExchangeRule
    shared_arrays: dict[str, Any]
    is_joint: bool

    def make_state(self) -> ExchangeState:
        """Make the state on which the exchange rule operates, at the first step."""
        variables = self.variables
        return ExchangeState(
            variables.exchanged_variables, variables.optimizer_state, self.shared_arrays, variables.n_averages
        )


def read_state(context: RankContext, spec: RankStateSpec) -> dict[str, Any]:
    """Return the state of this rank.  For joint steps, ranks other than 0 return only entries that may differ.

    ``others``, ``params``, ``optimizer`` and ``excluded`` are values of the variables in `VariablesByRole`, ``streams``
    those of its generators.  ``own``, ``step`` and ``steps_since_exchange`` are attributes of `ExchangeState`; ``own``
    is None before the first step, when there is no such state.
    """
    variables, storage = spec.variables, context.get_persistent_dict(spec.name)
    state: ExchangeState | None = storage.get("state")
    streams = [get_generator_state(shared) for shared in variables.generators]
    if spec.is_joint and context.number:
        return {"streams": streams, "others": variables.read_other_values()}
    return {
        "streams": streams,
        **variables.read_values(storage.get("own_params")),
        "own": None if state is None else {key: np.array(value) for key, value in state.own.items()},
        "step": 0 if state is None else state.step,
        "steps_since_exchange": 0 if state is None else state.steps_since_exchange,
    }


def pack_states(
    states_by_rank: Sequence[dict[str, Any]], shared_arrays: Mapping[str, np.ndarray], is_joint: bool
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays of a checkpoint by their names in it, such as ``"0.params"``, and entries of its ``meta``."""
    arrays = {f"shared.{name}": np.array(array) for name, array in shared_arrays.items()}
    for r, state in enumerate(states_by_rank):
        for key, value in state.items():
            if key == "own" and value is not None:
                arrays |= {f"{r}.own.{name}": array for name, array in value.items()}
            elif key == "others":
                arrays |= {f"{r}.others.{i}": array for i, array in enumerate(value)}
            elif key not in ("own", "streams"):
                arrays[f"{r}.{key}"] = np.asarray(value)
    streams = [state["streams"] for state in states_by_rank]
    has_started = any(state.get("own") is not None for state in states_by_rank)
    return arrays, {"ranks": len(states_by_rank), "alike": is_joint, "streams": streams, "started": has_started}


def _unpack_states(content: Checkpoint, spec: RankStateSpec) -> list[dict[str, Any]]:
    """Return the state of each rank from a checkpoint."""
    meta, arrays = content.meta, content.arrays
    shared = {name.removeprefix("shared."): array for name, array in arrays.items() if name.startswith("shared.")}
    states_by_rank: list[dict[str, Any]] = []
    for r in range(meta["ranks"]):
        others = [arrays[f"{r}.others.{i}"] for i in range(len(meta["variables"]["others"]))]
        state = {"own": None, "others": others, "shared": shared, "streams": meta["streams"][r]}
        states_by_rank.append(state)
        if meta["alike"] and r:
            continue
        state |= {role: arrays[f"{r}.{role}"] for role in ("params", "optimizer", "excluded")}
        if not spec.variables.optimizer_state:  # sharded: the trainer restores it
            state["optimizer"] = np.zeros(0, np.float32)
        state |= {name: int(arrays[f"{r}.{name}"]) for name in ("step", "steps_since_exchange")}
        prefix = f"{r}.own."
        if meta.get("started", True):
            state["own"] = {n.removeprefix(prefix): array for n, array in arrays.items() if n.startswith(prefix)}
    return states_by_rank


def set_params_to_consensus(context: RankContext, name: str, exchange_rule: ExchangeRule) -> None:
    """Set the parameters to the exchange rule's consensus, and store this rank's own parameters.

    Do nothing before the first step: all ranks have equal parameters then.
    """
    storage = context.get_persistent_dict(name)
    state: ExchangeState | None = storage.get("state")
    if state is None:
        return
    consensus = exchange_rule.compute_consensus(context, state)
    storage["own_params"] = state.vector  # after the consensus, which may receive messages that change it
    state.vector = consensus
    storage["consensus"] = state.vector  # as rounded to the dtypes of the variables


def restore_own_params(context: RankContext, name: str) -> None:
    """Set the parameters back to this rank's own, if `set_params_to_consensus` has replaced them."""
    storage = context.get_persistent_dict(name)
    if "own_params" in storage:
        storage["state"].vector = storage["own_params"]
        del storage["own_params"]  # after that, since an interrupt before it must not lose the parameters
    storage.pop("consensus", None)


def has_new_params(storage: Mapping[str, Any]) -> bool:
    """Whether the user has set this rank's parameters since `set_params_to_consensus`.  False after an interrupt."""
    if "consensus" not in storage:
        return False
    vector, consensus = storage["state"].vector, storage["consensus"]
    are_equal = (vector == consensus) | (vector != vector) & (consensus != consensus)  # NaN is unchanged, too
    return not bool(are_equal.all())


def prepare_steps(context: RankContext, spec: RankStateSpec) -> None:
    """Set the parameters back to this rank's own, and make the state for the first step.  A collective.

    The state is made anew if the user has set parameters since the last report: the rule then starts from these.  The
    same applies if an interrupt has stopped the ranks at different steps: they start from the mean of their parameters.
    """
    storage, exchange_rule = context.get_persistent_dict(spec.name), spec.exchange_rule
    state: ExchangeState | None = storage.get("state")
    step_counts = None if state is None else (state.step, state.steps_since_exchange)
    entries = context.all_gather((step_counts, has_new_params(storage)))
    if any_set_by_user := any(is_set for _, is_set in entries):
        storage.pop("own_params", None)
    restore_own_params(context, spec.name)
    present_counts = [counts for counts, _ in entries if counts is not None]
    are_in_step = len(present_counts) == len(entries) and (exchange_rule.asynchronous or len(set(present_counts)) == 1)
    if are_in_step and not any_set_by_user:
        return
    state = spec.make_state()
    state.step = max([step for step, _ in present_counts], default=0)
    if present_counts and not any_set_by_user:
        state.vector = context.all_reduce(state.vector)
    exchange_rule.setup(context, state)
    storage["state"] = state


def restore_state(context: RankContext, spec: RankStateSpec, path: str, root: int) -> None:
    """Restore this rank from a checkpoint, which rank ``root`` reads for all: other hosts may not see the file."""
    if context.number == root:
        content = read_checkpoint(path)
        states_by_rank = resize_states(_unpack_states(content, spec), spec, context.size)
        for r, state in enumerate(states_by_rank):
            if r != root:
                context.send(state, r)
        for key, rows in spec.shared_arrays.items():
            array = content.arrays[f"shared.{key}"]
            rows.array[...] = array if array.shape == rows.shape else 0  # arrays with a row per rank are 0 at a report
        state = states_by_rank[root]
    else:
        state = context.receive(root)
    write_state(context, spec, state)


def write_state(context: RankContext, spec: RankStateSpec, saved_state: dict[str, Any]) -> None:
    """Set this rank's state to a result of `read_state`.  Generators are unchanged if ``streams`` is None."""
    spec.variables.write_values(saved_state)
    if saved_state["streams"] is not None:
        for shared, value in zip(spec.variables.generators, saved_state["streams"], strict=True):
            set_generator_state(shared, value)
    if spec.is_joint:
        return
    storage = context.get_persistent_dict(spec.name)
    if saved_state["own"] is None:  # the first step makes the state
        storage.clear()
        return
    state = storage["state"] = spec.make_state()
    state.step, state.steps_since_exchange = saved_state["step"], saved_state["steps_since_exchange"]
    state.own = {
        key: value if np.ndim(value) else np.asarray(value).item() for key, value in saved_state["own"].items()
    }
    storage["own_params"] = saved_state["params"]


def resize_states(saved_states: list[dict[str, Any]], spec: RankStateSpec, n_ranks: int) -> list[dict[str, Any]]:
    """Convert the states of ranks to ``n_ranks`` ranks.

    ``saved_states`` has results of `read_state`, each with the exchange rule's memory under ``shared``.  The new
    states have no ``shared``, and their ``streams`` are None for ranks that ``saved_states`` does not have.
    """
    if spec.is_joint:
        states_by_rank = saved_states[:1] * n_ranks
    elif len(saved_states) == n_ranks:
        states_by_rank = saved_states
    elif any(state["own"] is None for state in saved_states):
        states_by_rank = [saved_states[r % len(saved_states)] for r in range(n_ranks)]
    else:
        states_by_rank = spec.exchange_rule.resize_states(saved_states, n_ranks)
    return [
        {
            **{key: value for key, value in state.items() if key != "shared"},  # ranks map the exchange rule's memory
            "others": saved_states[r % len(saved_states)]["others"],
            "streams": saved_states[r]["streams"] if r < len(saved_states) else None,
        }
        for r, state in enumerate(states_by_rank)
    ]


# -- states of random generators in shared variables, in types that JSON can represent -------------------------


def read_generator_states(context: RankContext, generators: Sequence[SharedVariable]) -> list[Any]:
    """Return the states of this rank's generators."""
    return [get_generator_state(shared) for shared in generators]


def restore_generator_states(
    context: RankContext, generators: Sequence[SharedVariable], states_by_rank: Sequence[list[Any]]
) -> None:
    """Set this rank's generators to their states in ``states_by_rank``, the results of `read_generator_states`."""
    for shared, state in zip(generators, states_by_rank[context.number], strict=True):
        set_generator_state(shared, state)


def get_generator_state(shared: SharedVariable) -> Any:
    """Return the state of a generator in types that JSON can represent."""
    value = get_library(shared).copy_generator(shared)
    if isinstance(value, np.random.Generator):
        return to_json_types(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return to_json_types(value.get_state(legacy=False))
    return to_json_types(np.asarray(value))


def set_generator_state(shared: SharedVariable, state: Any) -> None:
    """Set the state of a generator to a result of `get_generator_state`."""
    library, state = get_library(shared), from_json_types(state)
    value = library.copy_generator(shared)
    if isinstance(value, np.random.Generator):
        value.bit_generator.state = state
    elif isinstance(value, np.random.RandomState):
        value.set_state(state)
    else:
        value = state
    library.set_generator(shared, value)


def to_json_types(value: object) -> Any:
    """Convert NumPy arrays and scalars in a generator's state to types that JSON can represent."""
    if isinstance(value, dict):
        return {key: to_json_types(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "values": value.tolist()}
    return value.item() if isinstance(value, np.generic) else value


def from_json_types(value: object) -> Any:
    """Convert a result of `to_json_types` back."""
    if isinstance(value, dict) and set(value) == {"dtype", "values"}:
        return np.array(value["values"], value["dtype"])
    if isinstance(value, dict):
        return {key: from_json_types(item) for key, item in value.items()}
    return value
