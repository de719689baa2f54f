"""What a training function trains.

`Model`
    A loss, its inputs, and the rule that lowers it.
`by_own_gradient`
    A step of one rank by itself.
`identify_rule`
    Name and options of an update rule.
`is_averaged`
    How slices' values for a variable are combined.
`Rows`, `Rule`, `Updates`, `Batch`
    Types of arguments.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import synkhronos as synk
from synkhronos.checks import listed
from synkhronos.graphs import library_of
from synkhronos.training.updates import RuleUpdates

#: An array or Data object for one variable, a list of them for a list of variables.
Rows = npt.ArrayLike | synk.Data | Sequence[npt.ArrayLike | synk.Data]

#: What takes a loss, parameters and hyperparameters, `weight` among them.
Rule = Callable[..., RuleUpdates]

#: Pairs of a shared variable and what becomes of it.
Updates = Mapping[Any, Any] | Sequence[tuple[Any, Any]]

#: Which rows of the data a step uses.
Batch = int | slice | Sequence[int] | npt.NDArray[Any] | None


@dataclass(frozen=True)
class Model:
    """What to train, and by which rule."""

    loss: Any
    x: list[Any]
    y: list[Any]
    #: Whether the user passed lists.
    x_is_list: bool
    y_is_list: bool
    #: The shared variables that the data are in, if they are in some.
    sliceable: list[Any]
    rule: RuleUpdates
    #: The shared variables that the rule keeps for itself.
    optimizer_state: list[Any]
    #: Pairs of a shared variable and an expression.
    extra_updates: list[tuple[Any, Any]]

    @classmethod
    def build(
        cls,
        loss: Any,
        params: Sequence[Any],
        x: Any,
        y: Any,
        update_rule: Rule,
        sliceable_shareds: Sequence[Any] | None,
        extra_updates: Updates | None,
        rule_kwargs: dict[str, Any],
    ) -> Model:
        """Check the arguments, and apply the rule."""
        if isinstance(loss, list | tuple):
            raise TypeError("loss: expected a symbolic scalar, got a list")
        if not callable(update_rule):
            raise TypeError(
                "update_rule: expected a rule of synkhronos.extensions.updates, "
                f"got {update_rule!r} of type {type(update_rule).__name__}"
            )
        if "weight" in rule_kwargs:
            raise TypeError("weight: a training function sets it to the number of rows; got another")
        xs, ys = _variables("x", x), _variables("y", y)
        if not xs:
            raise ValueError("x: expected at least one variable, got none")
        sliceable = _sliceable(sliceable_shareds, [*xs, *ys])
        rule = update_rule(loss, params, weight=xs[0].shape[0], **rule_kwargs)
        if not isinstance(rule, tuple) or len(rule) != 3:
            raise TypeError(
                "update_rule: expected it to return (grad_updates, param_updates, grad_shared), "
                f"got {rule!r} of type {type(rule).__name__}"
            )
        rule = RuleUpdates(*rule)
        lists = isinstance(x, list | tuple), isinstance(y, list | tuple)
        state = [shared for shared in rule.param_updates if not any(shared is p for p in params)]
        extra = _extra(extra_updates, rule)
        return cls(loss, xs, ys, *lists, sliceable, rule, state, extra)

    def arrays(
        self,
        x_data: Rows | None,
        y_data: Rows | None,
        batch: Any,
        batch_s: Any,
        names: tuple[str, str] = ("batch", "batch_s"),
    ) -> list[Any]:
        """One array or Data object for each variable; none where the data are in shared variables.

        ``names`` are those by which the user knows ``batch`` and ``batch_s``.
        """
        if self.sliceable:
            if x_data is not None or y_data is not None or batch is not None:
                raise TypeError(f"the data are in sliceable_shareds: expected {names[1]} alone to say which rows")
            return []
        if batch_s is not None:
            raise TypeError(
                f"{names[1]}: this function was made without sliceable_shareds; rows are chosen by {names[0]}"
            )
        if x_data is None or y_data is None:
            raise TypeError(f"{'x_data' if x_data is None else 'y_data'}: expected rows, got None")
        return [
            *_listed("x_data", x_data, self.x, self.x_is_list),
            *_listed("y_data", y_data, self.y, self.y_is_list),
        ]

    def several(
        self, x_data: Rows | None, y_data: Rows | None, batches: Any, batches_s: Any
    ) -> tuple[list[Any], list[tuple[Any, Any]]]:
        """Return `arrays` for several steps, and ``batch`` and ``batch_s`` of each: one of these two is None."""
        arrays = self.arrays(x_data, y_data, batches, batches_s, ("batches", "batches_s"))
        name, given = ("batches_s", batches_s) if self.sliceable else ("batches", batches)
        is_sequence = isinstance(given, np.ndarray) and given.ndim or isinstance(given, Sequence)
        if not is_sequence or isinstance(given, str | bytes):
            raise TypeError(f"{name}: expected a sequence with the rows of each step, got {given!r}")
        return arrays, [(None, one) if self.sliceable else (one, None) for one in given]


def _variables(argument: str, value: Any) -> list[Any]:
    variables = list(value) if isinstance(value, list | tuple) else [value]
    for i, variable in enumerate(variables):
        expected = f"{argument}: expected a variable or a list of variables"
        try:
            library_of(variable)
        except TypeError as error:
            raise TypeError(f"{expected}; {error}") from None
        if not getattr(variable, "ndim", 0):
            raise ValueError(f"{expected} with rows to scatter, got {variable!r} of {variable.type} at index {i}")
    return variables


def _sliceable(shareds: Sequence[Any] | None, variables: list[Any]) -> list[Any]:
    """Check that there is one shared variable for each input."""
    if shareds is None:
        return []
    if not isinstance(shareds, list | tuple):
        raise TypeError(f"sliceable_shareds: expected a list of shared variables, got {shareds!r}")
    found = list(shareds)
    if len(found) != len(variables):
        raise ValueError(
            f"sliceable_shareds: expected {len(variables)} shared variables, one for each of x and y, got {len(found)}"
        )
    for shared, variable in zip(found, variables, strict=True):
        if not hasattr(shared, "get_value"):
            raise TypeError(f"sliceable_shareds: expected shared variables, got {shared!r}")
        kinds = [(getattr(v.type, "dtype", None), getattr(v.type, "ndim", None)) for v in (shared, variable)]
        if kinds[0] != kinds[1]:
            raise TypeError(
                f"sliceable_shareds: {shared.name!r} of {shared.type} can't stand for {variable!r} of {variable.type}"
            )
    return found


def by_own_gradient(rule: RuleUpdates) -> dict[Any, Any]:
    """Return what becomes of each shared variable in a step by the gradient that a rank computes itself."""
    expression = rule.grad_updates[rule.grad_shared]
    library = library_of(expression)
    news = library.clone(list(rule.param_updates.values()), {rule.grad_shared: expression})
    return {shared: library.convert(shared, new) for shared, new in zip(rule.param_updates, news, strict=True)}


def identify_rule(update_rule: Rule, rule_kwargs: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return an update rule's name, and its options: those given and the defaults of the others.

    Examples
    --------
    >>> from synkhronos.training.updates import momentum
    >>> identify_rule(momentum, {"learning_rate": 0.1})
    ('momentum', {'momentum': 0.9, 'learning_rate': 0.1})
    """
    parameters = inspect.signature(update_rule).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty and p.name != "weight"}
    function: Any = update_rule
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__), {**defaults, **rule_kwargs}


def is_averaged(shared: Any) -> bool:
    """Whether slices' values for a variable are averaged: an average of integers is none, nor one of generators."""
    return hasattr(shared.type, "dtype") and np.dtype(shared.type.dtype).kind not in "biu"


def _extra(updates: Updates | None, rule: RuleUpdates) -> list[tuple[Any, Any]]:
    """Check the updates that come beside the rule's."""
    if updates is None:
        return []
    if not isinstance(updates, Mapping | list | tuple):
        raise TypeError(f"extra_updates: expected a dict or a list of pairs, got {updates!r}")
    pairs = list(updates.items() if isinstance(updates, Mapping) else updates)
    taken = {id(shared) for shared in (*dict(rule.grad_updates), *dict(rule.param_updates))}
    come: set[int] = set()
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise TypeError(f"extra_updates: expected pairs of a shared variable and an expression, got {pair!r}")
        if not hasattr(pair[0], "get_value"):
            raise TypeError(f"extra_updates: expected shared variables, got {pair[0]!r}")
        if id(pair[0]) in taken:
            raise ValueError(f"extra_updates: the update rule has an update of {pair[0].name!r} already")
        if id(pair[0]) in come:
            raise ValueError(f"extra_updates: there are two for {pair[0].name!r}")
        come.add(id(pair[0]))
    return [(shared, expression) for shared, expression in pairs]


def _listed(argument: str, value: Any, variables: list[Any], is_list: bool) -> list[Any]:
    return listed(value, argument, len(variables), "arrays") if is_list else [value]
