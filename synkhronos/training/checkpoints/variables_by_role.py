"""Shared variables of a training by their role, which decides how ranks exchange and checkpoints store them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from synkhronos.devices import get_array_device
from synkhronos.graphs import library_of
from synkhronos.rules import Rule
from synkhronos.rules.state import FlatVariables
from synkhronos.training.train_function.training_graph import TrainingGraph


@dataclass
class VariablesByRole:
    """Shared variables of a training, by their role.

    Attributes
    ----------
    params : list of shared variables
        Variables that ranks exchange: parameters, followed by running averages.
    optimizer : list of shared variables, or None
        Variables of the update rule, such as velocities.  None if they are sharded.
    excluded : list of shared variables
        Parameters that are not exchanged.
    others : list of shared variables
        Other updated variables, such as counts.
    generators : list of shared variables
        Random generators.
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
    def from_graph(cls, graph: TrainingGraph, params: Sequence[Any], rule: Rule) -> VariablesByRole:
        """Group the variables of a training by their role under an exchange rule."""
        is_excluded = [rule.exclude is not None and bool(rule.exclude(p)) for p in params]
        exchanged = [p for p, out in zip(params, is_excluded, strict=True) if not out]
        if not exchanged:
            raise ValueError("exclude: expected it to leave some parameter to be exchanged, but it excludes all")
        excluded = [p for p, out in zip(params, is_excluded, strict=True) if out]
        optimizer = graph.optimizer_state
        if len(optimizer) == len(params):  # a variable per parameter, such as a velocity
            optimizer = [s for s, out in zip(optimizer, is_excluded, strict=True) if not out]
        optimizer = [s for s in optimizer if np.dtype(s.type.dtype).kind == "f"]
        averages = [u.shared for u in graph.extra_updates if u.op == "mean"]
        grouped = {id(s) for s in [*exchanged, *excluded, *optimizer, *averages]}
        others = [s for s in [*graph.optimizer_state, *(u.shared for u in graph.extra_updates)] if id(s) not in grouped]
        others = [s for s in others if hasattr(s.type, "dtype")]
        variables = [*graph.x, *graph.y, graph.loss, *(u.expression for u in graph.extra_updates)]
        library = library_of(graph.loss)
        generators = [s for s in library.find_shareds(variables) if library.is_generator(s)]
        return cls([*exchanged, *averages], optimizer, excluded, others, generators, len(averages))

    def as_dict(self) -> dict[str, list[Any]]:
        """Return the variables of each role; generators have no role."""
        n_params = len(self.params) - self.n_averages
        return {
            "params": self.params[:n_params],
            "averages": self.params[n_params:],
            "optimizer": self.optimizer,
            "excluded": self.excluded,
            "others": self.others,
        }

    def read_others(self) -> list[np.ndarray]:
        """Return copies of this process's values of the other variables."""
        return [np.array(get_array_device(value).to_host(value)) for value in map(_borrow_value, self.others)]

    def read_values(self, params: Any = None) -> dict[str, Any]:
        """Return copies of this process's values by role, without generators; ``params`` takes the place of theirs."""
        values = {
            "params": np.array(FlatVariables(self.params).get() if params is None else params),
            "excluded": np.array(FlatVariables(self.excluded).get()),
            "others": self.read_others(),
        }
        if self.optimizer is not None:
            values["optimizer"] = np.array(FlatVariables(self.optimizer).get())
        return values

    def write_values(self, values: Mapping[str, Any]) -> None:
        """Set this process's variables to copies of the values from `read_values`."""
        FlatVariables(self.params).set(values["params"])
        FlatVariables(self.excluded).set(values["excluded"])
        if self.optimizer is not None:
            FlatVariables(self.optimizer).set(values["optimizer"])
        for shared, value in zip(self.others, values["others"], strict=True):
            device = get_array_device(_borrow_value(shared))
            library_of(shared).store_value(shared, device.from_host(np.array(value)))


def _borrow_value(shared: Any) -> Any:
    """Return the value of a shared variable, an array of any device, without a copy."""
    return library_of(shared).borrow_value(shared)
