"""Shared variables of a training run by role.  The role decides how ranks exchange and checkpoints store a variable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from synkhronos.devices import get_array_device
from synkhronos.exchange_rules import ExchangeRule
from synkhronos.exchange_rules.state import FlatVariables
from synkhronos.graph_libraries import get_library
from synkhronos.training.train_function.training_graph import TrainingGraph
from synkhronos.variable_types import Array, SharedVariable


@dataclass
class VariablesByRole:
    """Shared variables of a training run, by their role."""

    #: Variables that ranks exchange: parameters, followed by running averages.  Their values are named ``params`` in
    #: `read_values` and in checkpoints.
    exchanged_variables: list[SharedVariable]
    #: Variables of the update rule, such as velocities; empty in a `RankStateSpec` if they are sharded.
    optimizer_state: list[SharedVariable]
    #: Parameters that are not exchanged.
    excluded_params: list[SharedVariable]
    #: Other updated variables, such as counts.
    other_variables: list[SharedVariable]
    #: Random generators; each rank has its own state of each.
    generators: list[SharedVariable]
    #: Number of running averages at the end of `exchanged_variables`.
    n_averages: int = 0

    @classmethod
    def from_graph(cls, graph: TrainingGraph, exchange_rule: ExchangeRule) -> VariablesByRole:
        """Group the variables of a training graph by their role under an exchange rule."""
        params = graph.params
        excluded_flags = [exchange_rule.exclude is not None and bool(exchange_rule.exclude(p)) for p in params]
        exchanged_params = [p for p, is_excluded in zip(params, excluded_flags, strict=True) if not is_excluded]
        if not exchanged_params:
            raise ValueError("exclude: expected it to leave some parameter to be exchanged, but it excludes all")
        excluded = [p for p, is_excluded in zip(params, excluded_flags, strict=True) if is_excluded]
        library, learning_rate = get_library(graph.loss), graph.update_rule_kwargs.get("learning_rate")
        optimizer = [s for s in graph.optimizer_state if np.dtype(s.type.dtype).kind == "f" and s is not learning_rate]
        if excluded:  # their own variables, such as velocities, are not exchanged either
            read_by_exchanged, read_by_excluded = (
                set(library.find_shareds([graph.rule_updates.param_updates[p] for p in group]))
                for group in (exchanged_params, excluded)
            )
            optimizer = [s for s in optimizer if s in read_by_exchanged or s not in read_by_excluded]
        averages = [u.shared for u in graph.extra_updates if u.op == "mean"]
        grouped = {id(s) for s in [*exchanged_params, *excluded, *optimizer, *averages]}
        other_variables = [
            s for s in [*graph.optimizer_state, *(u.shared for u in graph.extra_updates)] if id(s) not in grouped
        ]
        other_variables = [s for s in other_variables if hasattr(s.type, "dtype")]
        variables = [*graph.x, *graph.y, graph.loss, *(u.expression for u in graph.extra_updates)]
        generators = [s for s in library.find_shareds(variables) if library.is_generator(s)]
        return cls([*exchanged_params, *averages], optimizer, excluded, other_variables, generators, len(averages))

    def read_other_values(self) -> list[np.ndarray]:
        """Return copies of this process's values of the other variables."""
        return [np.array(get_array_device(value).to_numpy(value)) for value in map(_borrow_value, self.other_variables)]

    def read_values(self, exchanged_vector: np.ndarray | None = None) -> dict[str, Any]:
        """Return copies of this process's values by role.  ``exchanged_vector`` replaces the exchanged values."""
        return {
            "params": np.array(
                FlatVariables(self.exchanged_variables).get() if exchanged_vector is None else exchanged_vector
            ),
            "excluded": np.array(FlatVariables(self.excluded_params).get()),
            "optimizer": np.array(FlatVariables(self.optimizer_state).get()),
            "others": self.read_other_values(),
        }

    def write_values(self, values: Mapping[str, Any]) -> None:
        """Set this process's variables to copies of the values from `read_values`."""
        FlatVariables(self.exchanged_variables).set(values["params"])
        FlatVariables(self.excluded_params).set(values["excluded"])
        FlatVariables(self.optimizer_state).set(values["optimizer"])
        for shared, value in zip(self.other_variables, values["others"], strict=True):
            device = get_array_device(_borrow_value(shared))
            get_library(shared).store_value(shared, device.from_numpy(np.array(value)))


def _borrow_value(shared: SharedVariable) -> Array:
    """Return the value of a shared variable, an array of any device, without a copy."""
    return get_library(shared).borrow_value(shared)
