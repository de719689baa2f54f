"""Symbolic description of training: a loss with its inputs, an update rule, and extra updates.

`TrainingGraph` checks the user's arguments once, for training functions and trainers alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from synkhronos.checks import check_list, format_similar
from synkhronos.data_objects import Data
from synkhronos.data_objects.rows import BatchArgument
from synkhronos.functions.rank_mean_context import RankMeanOp
from synkhronos.graph_libraries import get_library
from synkhronos.training.train_function.extra_updates import UpdatesArgument, parse_extra_updates
from synkhronos.training.train_function.step_options import StepOptions
from synkhronos.training.train_function.weighted_mean import (
    check_weight,
    make_weighted_outputs,
    warn_of_varying_denominators,
)
from synkhronos.training.updates import RuleUpdates, chain, clip_by_global_norm
from synkhronos.training.updates.arguments import find_library
from synkhronos.training.updates.loss_scaling import compute_gradients_with_loss_scale, skip_overflows
from synkhronos.training.updates.moving_averages import add_moving_averages
from synkhronos.training.updates.update_rule import UpdateRule, get_update_rule_name, to_rule_updates
from synkhronos.variable_types import SharedVariable, Variable, Variables

#: Argument for data: an array or Data object for one variable, or a list of them for several variables.
DataArgument = npt.ArrayLike | Data | Sequence[npt.ArrayLike | Data]


class TrainingGraph:
    """Loss, inputs and updates for training, checked.  The arguments are those of `make_train_function`.

    Attributes
    ----------
    x_is_list, y_is_list : bool
        Whether the user passed a list, and so has to pass lists of data.
    sliceable : list of shared variable
        Variables that hold the data, one for each of `x` and `y`; empty if the data are arguments of the calls.
    update_rule : callable
        The update rule that made `rule_updates`, with clipping if the options have it.
    optimizer_state, ema : list of shared variable
        Variables that the update rule updates besides the parameters; moving averages of the parameters, None without
        `ema`.
    """

    def __init__(
        self,
        loss: Variable,
        params: Sequence[SharedVariable],
        x: Variables,
        y: Variables,
        update_rule: UpdateRule,
        update_rule_kwargs: dict[str, Any],
        options: StepOptions,
        sliceable_shareds: Sequence[SharedVariable] | None = None,
        extra_updates: UpdatesArgument | None = None,
        weight: Variable | None = None,
    ):
        if isinstance(loss, list | tuple):
            raise TypeError("loss: expected a symbolic scalar, got a list")
        if hasattr(loss, "owner") and not str(getattr(loss, "dtype", "")).startswith("float"):
            raise TypeError(f"loss: expected a symbolic scalar of floats, got {loss!r} of {loss.type}")
        if not callable(update_rule):
            raise TypeError(
                "update_rule: expected a rule of synkhronos.training.updates, "
                f"got {update_rule!r} of type {type(update_rule).__name__}"
            )
        if options.clip_norm is not None:
            update_rule = chain(clip_by_global_norm(options.clip_norm), update_rule)
        self.loss, self.weight, self.options = loss, weight, options
        self.update_rule, self.update_rule_kwargs = update_rule, update_rule_kwargs
        self.x, self.y = _parse_variables("x", x), _parse_variables("y", y)
        self.x_is_list, self.y_is_list = isinstance(x, list | tuple), isinstance(y, list | tuple)
        if not self.x:
            raise ValueError("x: expected at least one variable, got none")
        self.sliceable = _parse_sliceable(sliceable_shareds, [*self.x, *self.y])
        if weight is not None:
            check_weight(weight, loss, params)
            if any(isinstance(node.op, RankMeanOp) for node in get_library(loss).sort_nodes([loss])):
                raise ValueError("weight: expected None for a loss with means over ranks (rank_mean, sync=True)")
        _check_update_rule_kwargs(update_rule, update_rule_kwargs)
        self.rule_updates, self.ema = self._build_updates(params)
        self.params = list(params)
        self.optimizer_state = [s for s in self.rule_updates.param_updates if not any(s is p for p in self.params)]
        self._inputs = [*self.x, *self.y, *self.sliceable]
        self.extra_updates = parse_extra_updates(extra_updates, self.rule_updates, self._inputs)

    def _build_updates(self, params: Sequence[SharedVariable]) -> tuple[RuleUpdates, list[SharedVariable] | None]:
        """Return the rule's updates, with those for the options, and the moving averages, or None without them."""
        loss_or_grads, scale, averages = self.loss, None, None
        if self.options.loss_scale is not None:
            scale, loss_or_grads = compute_gradients_with_loss_scale(self.loss, params)
        weight = self.x[0].shape[0] if self.weight is None else self.weight
        result = self.update_rule(loss_or_grads, params, weight=weight, **self.update_rule_kwargs)
        updates = to_rule_updates(self.update_rule, result)
        if self.options.ema is not None:
            updates, averages = add_moving_averages(updates, list(params), self.options.ema)
        return updates if scale is None else skip_overflows(updates, scale), averages

    def warn_of_varying_denominators(self) -> None:
        """Warn of means whose value depends on the number of ranks."""
        means = {} if self.weight is not None else {"loss": self.loss}
        for u in self.extra_updates:
            if u.op == "mean" and u.may_differ:
                means[f"extra_updates: {u.shared.name}"] = u.expression
        warn_of_varying_denominators(means, self._inputs)

    @property
    def outputs(self) -> list[tuple[Variable, str]]:
        """Outputs and ops of the gradient's function: the mean loss, or sums of the weighted loss and the `weight`."""
        return [(self.loss, "mean")] if self.weight is None else make_weighted_outputs(self.loss, self.weight)

    def parse_data(
        self,
        x_data: DataArgument | None,
        y_data: DataArgument | None,
        batch: BatchArgument,
        batch_s: Any,
        names: tuple[str, str] = ("batch", "batch_s"),
    ) -> list[Any]:
        """Return an array or Data object per variable, none for data in shared variables.  ``names`` are for errors."""
        if self.sliceable:
            if x_data is not None or y_data is not None or batch is not None:
                raise TypeError(f"the data are in sliceable_shareds: expected {names[1]} alone to say which rows")
            return []
        if batch_s is not None:
            raise TypeError(
                f"{names[1]}: this function was made without sliceable_shareds; rows are chosen by {names[0]}"
            )
        if y_data is None and not self.y:
            y_data = []
        if x_data is None or y_data is None:
            raise TypeError(f"{'x_data' if x_data is None else 'y_data'}: expected rows, got None")
        return [
            *_to_list("x_data", x_data, self.x, self.x_is_list),
            *_to_list("y_data", y_data, self.y, self.y_is_list),
        ]

    def parse_steps(
        self, x_data: DataArgument | None, y_data: DataArgument | None, batches: Any, batches_s: Any
    ) -> tuple[list[Any], list[tuple[Any, Any]]]:
        """Return the result of `parse_data` for the data of several steps, and ``(batch, batch_s)`` of each step."""
        arrays = self.parse_data(x_data, y_data, batches, batches_s, ("batches", "batches_s"))
        name, selections = ("batches_s", batches_s) if self.sliceable else ("batches", batches)
        is_sequence = isinstance(selections, np.ndarray) and selections.ndim or isinstance(selections, Sequence)
        if not is_sequence or isinstance(selections, str | bytes):
            raise TypeError(f"{name}: expected a sequence with the rows of each step, got {selections!r}")
        return arrays, [(None, selection) if self.sliceable else (selection, None) for selection in selections]


def _check_update_rule_kwargs(update_rule: UpdateRule, update_rule_kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError for a keyword that the update rule does not have: the user may have meant another option."""
    parameters = inspect.signature(update_rule).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    if "weight" not in parameters:
        raise TypeError(
            "update_rule: expected a rule of synkhronos.training.updates, or a function that has their arguments "
            f"loss_or_grads, params and weight, got {get_update_rule_name(update_rule)} of {[*parameters]}"
        )
    for name in update_rule_kwargs:
        if name not in parameters:
            known = {*parameters, *(option.name for option in fields(StepOptions))} - {name}
            update_rule_name = get_update_rule_name(update_rule)
            similar = format_similar(name, known)
            raise TypeError(f"{name}: neither an option of this function nor of the rule {update_rule_name}{similar}")


def _parse_variables(argument: str, value: Any) -> list[Variable]:
    """Return a list of variables with rows, from one variable or a list.  Raise TypeError or ValueError for others."""
    variables = list(value) if isinstance(value, list | tuple) else [value]
    for i, variable in enumerate(variables):
        expected = f"{argument}: expected a variable or a list of variables"
        find_library(expected, variable)
        if not getattr(variable, "ndim", 0):
            raise ValueError(f"{expected} with rows to scatter, got {variable!r} of {variable.type} at index {i}")
    return variables


def _parse_sliceable(shareds: Sequence[SharedVariable] | None, variables: list[Variable]) -> list[SharedVariable]:
    """Return the shared variables with the rows of each input.  Raise TypeError or ValueError if they do not fit."""
    if shareds is None:
        return []
    if not isinstance(shareds, list | tuple):
        raise TypeError(f"sliceable_shareds: expected a list of shared variables, got {shareds!r}")
    data = list(shareds)
    if len(data) != len(variables):
        raise ValueError(
            f"sliceable_shareds: expected {len(variables)} shared variables, one for each of x and y, got {len(data)}"
        )
    for shared, variable in zip(data, variables, strict=True):
        if not hasattr(shared, "get_value"):
            raise TypeError(f"sliceable_shareds: expected shared variables, got {shared!r}")
        kinds = [(getattr(v.type, "dtype", None), getattr(v.type, "ndim", None)) for v in (shared, variable)]
        if kinds[0] != kinds[1]:
            raise TypeError(
                f"sliceable_shareds: {shared.name!r} of {shared.type} can't stand for {variable!r} of {variable.type}"
            )
    return data


def build_local_updates(rule_updates: RuleUpdates) -> dict[SharedVariable, Variable]:
    """Return the updates of a local step, by shared variable; the gradient is the rank's own, without an all-reduce."""
    expression = rule_updates.grad_updates[rule_updates.grad_shared]
    library = get_library(expression)
    new_values = library.clone(list(rule_updates.param_updates.values()), {rule_updates.grad_shared: expression})
    return {
        shared: library.convert_to_type_of(shared, new)
        for shared, new in zip(rule_updates.param_updates, new_values, strict=True)
    }


def replace_params(expressions: Sequence[Variable], params: Sequence[SharedVariable], averages: Any) -> list[Variable]:
    """Return expressions that read moving averages instead of parameters."""
    library = get_library(*params)
    replacements = {
        p: library.convert_to_type_of(p, library.tensor.cast(average, p.dtype))
        for p, average in zip(params, averages, strict=True)
    }
    return list(library.clone(list(expressions), replacements))


def summarize_update_rule(update_rule: UpdateRule, update_rule_kwargs: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name of an update rule and all of its options with their defaults, which checkpoints compare."""
    parameters = inspect.signature(update_rule).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty and p.name != "weight"}
    return get_update_rule_name(update_rule), {**defaults, **update_rule_kwargs}


def _to_list(argument: str, value: object, variables: list[Variable], is_list: bool) -> list[Variable]:
    """Return data as a list with one entry per variable."""
    return check_list(value, argument, len(variables), "arrays") if is_list else [value]
