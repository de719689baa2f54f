"""Description of a training run in its checkpoints.  A run resumes only from checkpoints with its own description."""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from typing import Any

import numpy as np

from synkhronos.checks import is_number
from synkhronos.exchange_rules import ExchangeRule
from synkhronos.graph_libraries import get_library
from synkhronos.training.checkpoints.checkpoint_folder import CheckpointError
from synkhronos.training.checkpoints.variables_by_role import VariablesByRole
from synkhronos.training.updates.shared_variables import get_shape
from synkhronos.variable_types import SharedVariable

#: Options of update rules that may change when a run is resumed; `ExchangeRule.changeable_options` has those of others.
_LEARNING_RATES = frozenset({"learning_rate", "lr"})
#: Placeholder of options that are not numbers, booleans or strings, such as shared variables; it equals any value.
_ANY_VALUE = "symbolic"
#: Names of the roles of variables in error messages.
_ROLE_DESCRIPTIONS = {
    "params": "exchanged parameters",
    "averages": "averaged extra updates",
    "optimizer": "variables of the update rule",
    "excluded": "parameters that are not exchanged",
    "others": "other updated variables",
}


def describe_training(
    kind: str, exchange_rule: ExchangeRule, variables: VariablesByRole, update_rule: tuple[str, dict[str, Any]] | None
) -> dict[str, Any]:
    """Describe the model, both rules and their options, for a checkpoint's ``meta``.

    ``kind`` is the program that trains: "trainer" or "run".  A training run can resume from a checkpoint if both
    descriptions are equal, except for changeable options.
    """
    name, options = update_rule or (None, {})
    n_params = len(variables.exchanged_variables) - variables.n_averages
    variables_by_role = {
        "params": variables.exchanged_variables[:n_params],
        "averages": variables.exchanged_variables[n_params:],
        "optimizer": variables.optimizer_state,
        "excluded": variables.excluded_params,
        "others": variables.other_variables,
    }
    return {
        "kind": kind,
        "rule": type(exchange_rule).__name__,
        "asynchronous": exchange_rule.asynchronous,
        "rule_options": _to_json_options(exchange_rule.get_options()),
        "update_rule": name,
        "update_rule_options": _to_json_options(options),
        "variables": {
            role: [_describe_variable(s, role) for s in shareds] for role, shareds in variables_by_role.items()
        },
        "generators": [_describe_generator(shared) for shared in variables.generators],
    }


def check_can_resume(
    path: str | os.PathLike[str],
    meta: Mapping[str, Any],
    expected_meta: Mapping[str, Any],
    changeable_options: Set[str],
) -> None:
    """Raise CheckpointError if a checkpoint's description differs from ``expected_meta``, which describes this run.

    ``changeable_options`` are those of this run's exchange rule.
    """
    if (kind := meta.get("kind", "user")) != expected_meta["kind"]:  # users call `CheckpointFolder.save`
        raise CheckpointError(f"{path} is a checkpoint of a {kind}, not of a {expected_meta['kind']}")
    _check_variables(path, "params", meta, expected_meta)  # first, since with another model everything else may differ
    if meta["rule"] != expected_meta["rule"]:
        raise CheckpointError(
            f"{path} has the state of the rule {meta['rule']}, but this run has {expected_meta['rule']}"
        )
    if meta["asynchronous"] != expected_meta["asynchronous"]:
        raise CheckpointError(
            f"{path} is of {expected_meta['rule']} with asynchronous={meta['asynchronous']}, but this run has "
            f"asynchronous={expected_meta['asynchronous']}: asynchronous and synchronous ranks store different state"
        )
    _check_options(path, "rule", meta, expected_meta, changeable_options)
    if meta["update_rule"] != expected_meta["update_rule"]:
        raise CheckpointError(
            f"{path} is of the update rule {meta['update_rule']}, but this run has {expected_meta['update_rule']}"
        )
    _check_options(path, "update_rule", meta, expected_meta, _LEARNING_RATES)
    for role in _ROLE_DESCRIPTIONS:
        _check_variables(path, role, meta, expected_meta)
    if meta["generators"] != expected_meta["generators"]:
        raise CheckpointError(
            f"{path} has the random streams {meta['generators']}, but this run has {expected_meta['generators']}"
        )


def _check_variables(
    path: str | os.PathLike[str], role: str, meta: Mapping[str, Any], expected_meta: Mapping[str, Any]
) -> None:
    saved, expected = meta["variables"][role], expected_meta["variables"][role]
    if saved != expected:
        raise CheckpointError(
            f"{path} is of another model: its {_ROLE_DESCRIPTIONS[role]} are {_format_variables(saved)}, and those of "
            f"this run are {_format_variables(expected)}"
        )


def _check_options(
    path: str | os.PathLike[str],
    rule: str,
    meta: Mapping[str, Any],
    expected_meta: Mapping[str, Any],
    changeable_options: Set[str],
) -> None:
    """Raise CheckpointError if options of ``rule``, "rule" or "update_rule", differ and are not changeable."""
    saved, expected = meta[f"{rule}_options"], expected_meta[f"{rule}_options"]
    for option in sorted({*saved, *expected} - changeable_options):
        saved_value, value = saved.get(option), expected.get(option)
        if saved_value != value and _ANY_VALUE not in (saved_value, value):
            raise CheckpointError(
                f"{path} is of {meta[rule]} with {option}={saved_value!r}, but this run has {option}={value!r}"
            )


def _to_json_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options in types that JSON can represent.  Other values become `_ANY_VALUE`."""
    plain = {name: np.asarray(value).item() if is_number(value) else value for name, value in options.items()}
    return {name: v if isinstance(v, str | int | float | bool | None) else _ANY_VALUE for name, v in plain.items()}


def _describe_variable(shared: SharedVariable, role: str) -> list[Any]:
    """Return a variable's name, shape and dtype.  For ``others``, shapes may change: return the number of axes."""
    shape = list(get_shape(shared))
    return [shared.name or "", f"{len(shape)}-d" if role == "others" else shape, str(shared.type.dtype)]


def _describe_generator(shared: SharedVariable) -> list[Any]:
    """Return the type of a generator, and the shape of its state if that is an array."""
    value = get_library(shared).copy_generator(shared)
    state = value.bit_generator if isinstance(value, np.random.Generator) else value
    return [type(state).__name__, list(np.shape(value))]


def _format_variables(variables: list[list[Any]]) -> str:
    return ", ".join(f"{name or 'unnamed'} {shape} {dtype}" for name, shape, dtype in variables) or "none"
