"""States of random generators in shared variables, in types that JSON can represent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos.graphs import get_library
from synkhronos.tasks import Worker


def collect_states(worker: Worker, generators: Sequence[Any]) -> list[Any]:
    """Return the states of this rank's generators."""
    return [get_generator_state(shared) for shared in generators]


def restore_states(worker: Worker, generators: Sequence[Any], states_by_rank: Sequence[list[Any]]) -> None:
    """Set this rank's generators to their states in ``states_by_rank``, the results of `collect_states`."""
    for shared, state in zip(generators, states_by_rank[worker.number], strict=True):
        set_generator_state(shared, state)


def get_generator_state(shared: Any) -> Any:
    """Return the state of a generator in types that JSON can represent."""
    value = get_library(shared).copy_generator(shared)
    if isinstance(value, np.random.Generator):
        return to_json_types(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return to_json_types(value.get_state(legacy=False))
    return to_json_types(np.asarray(value))


def set_generator_state(shared: Any, state: Any) -> None:
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


def to_json_types(value: Any) -> Any:
    """Convert NumPy arrays and scalars in a generator's state to types that JSON can represent."""
    if isinstance(value, dict):
        return {key: to_json_types(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "values": value.tolist()}
    return value.item() if isinstance(value, np.generic) else value


def from_json_types(value: Any) -> Any:
    """Convert a result of `to_json_types` back."""
    if isinstance(value, dict) and set(value) == {"dtype", "values"}:
        return np.array(value["values"], value["dtype"])
    if isinstance(value, dict):
        return {key: from_json_types(item) for key, item in value.items()}
    return value
