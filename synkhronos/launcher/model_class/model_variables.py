"""Shared variables of a model's compiled functions, by role."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from synkhronos.graph_libraries import get_library
from synkhronos.launcher.model_class.model_interface import LEARNING_RATE_NAMES, ModelInterfaceError
from synkhronos.training.checkpoints.variables_by_role import VariablesByRole


def group_variables(model: Any, exclude_normalization: bool = False) -> VariablesByRole:
    """Group the shared variables of a model's compiled functions by role, for checkpoints.

    The functions are attributes of the model, or elements of lists that are attributes.  They are visited in the
    alphabetical order of the attributes, so the order is equal on all ranks and in all runs.

    - `exchanged_variables` and `excluded_params`: the model's ``params``.
    - `optimizer_state`: floats that a function updates, such as velocities and running averages.
    - `generators`: random generators of a function.
    - `other_variables`: integers that a function updates, scalars that it reads, and the learning rate.

    Variables in `Model.step_outputs` and in ``vels2`` are in no group: the former are results, the latter memory of the
    exchange.  ``vels`` of a sharded optimizer is in no group either.

    With ``exclude_normalization``, parameters of batch normalization, named ``gamma`` or ``beta``, are not
    exchanged, except in a `Model` that normalizes over the rows of all ranks.  Raise ModelInterfaceError if no
    parameter remains.
    """
    exclude_normalization = exclude_normalization and not getattr(model, "has_rank_means", False)
    excluded = [p for p in model.params if exclude_normalization and p.name in ("gamma", "beta")]
    excluded_ids = {id(p) for p in excluded}
    exchanged = [p for p in model.params if id(p) not in excluded_ids]
    groups = VariablesByRole(exchanged, optimizer_state=[], excluded_params=excluded, other_variables=[], generators=[])
    averages = getattr(model, "averages", None)
    if isinstance(averages, Mapping):  # a `Model`, whose params end with the averages
        groups.n_averages = sum(any(p is average for average in averages) for p in groups.exchanged_variables)
    if not groups.exchanged_variables:
        raise ModelInterfaceError(
            "params: expected some that are not named gamma or beta, which each rank keeps for itself"
        )
    sharded_variables = getattr(model, "sharded_variables", {})
    results = *(getattr(model, "vels2", None) or ()), *getattr(model, "step_outputs", ())
    grouped_ids = {id(shared) for shared in (*model.params, *results, *(model.vels if sharded_variables else ()))}
    rate_ids = {id(getattr(model, name, None)) for name in LEARNING_RATE_NAMES}
    for function in _iterate_functions(model):
        _group_function_variables(function, groups, grouped_ids, rate_ids)
    wholes = {id(variable.shard): whole for whole, variable in sharded_variables.items()}
    # A sharded and an unsharded optimizer resume from each other's checkpoints, and their functions' inputs differ.
    order = {id(shared): i for i, shared in enumerate(getattr(model, "updated_variables", ()))}
    # Functions update the shards of a sharded optimizer, which are replaced here by whole variables.
    optimizer_state = [wholes.get(id(shared), shared) for shared in groups.optimizer_state]
    groups.optimizer_state = sorted(optimizer_state, key=lambda shared: order.get(id(shared), len(order)))
    return groups


def track_generators(model: Any) -> None:
    """Record the generators in a model's compiled functions, for the library's `copy_generator` and `set_generator`."""
    for function in _iterate_functions(model):
        for function_input in _iterate_shared_inputs(function):
            library = get_library(function_input.variable)
            if library.is_generator(function_input.variable):
                library.track_generators(function)


def _iterate_functions(model: Any) -> Iterator[Any]:
    """Yield the compiled functions of a model, sorted by the names of its attributes."""
    state: Any = object.__getstate__(model)  # with __slots__, a pair of dicts or None
    attributes: dict[str, Any] = {}
    for part in state if isinstance(state, tuple) else (state,):
        attributes.update(part or {})
    for _, value in sorted(attributes.items()):
        for candidate in value if isinstance(value, list | tuple) else [value]:
            if hasattr(getattr(candidate, "maker", None), "inputs"):
                yield candidate


def _iterate_shared_inputs(function: Any) -> Iterator[Any]:
    """Yield the inputs of a compiled function that are shared variables."""
    yield from (i for i in function.maker.inputs if getattr(i, "implicit", False))


def _group_function_variables(
    function: Any, groups: VariablesByRole, grouped_ids: set[int], rate_ids: set[int]
) -> None:
    """Add a function's shared variables to ``groups``, except those in ``grouped_ids``.  Add their ids there.

    ``rate_ids`` are the ids of learning rates, which a function may update, too.
    """
    for function_input in _iterate_shared_inputs(function):
        shared = function_input.variable
        if id(shared) in grouped_ids:
            continue
        grouped_ids.add(id(shared))
        library = get_library(shared)
        if library.is_generator(shared):
            groups.generators.append(shared)
        elif not library.is_array(shared):
            continue
        elif (
            function_input.update is not None and np.dtype(shared.type.dtype).kind == "f" and id(shared) not in rate_ids
        ):
            groups.optimizer_state.append(shared)
        elif function_input.update is not None or shared.type.ndim == 0:
            groups.other_variables.append(shared)
