"""Symbolic description of a training: a loss with its inputs, an update rule, and extra updates.

`TrainingGraph.build` checks the user's arguments once, for training functions and trainers alike.

Ranks compute on different rows, so each value of a step needs a reduction over ranks:

- The loss, its gradient and other means are averaged by rows.  A mean over other items needs a ``weight``.  Otherwise
  its denominator may differ between ranks, and the result would depend on their number: `warn_of_denominators`.
- Extra updates are averaged ("mean"), or each rank keeps its own value (None).  Without an op, an analysis of the
  graph decides whether ranks may compute different values.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from synkhronos.checks import check_list
from synkhronos.data import Data
from synkhronos.function.rank_mean import RankMeanOp
from synkhronos.graphs import library_of
from synkhronos.graphs.dependence import Dependence
from synkhronos.training.step_options import StepOptions
from synkhronos.training.updates import RuleUpdates, chain, clip_by_global_norm
from synkhronos.training.updates.loss_scale import scale_gradients, skip_overflows
from synkhronos.training.updates.moving_average import add_average
from synkhronos.training.updates.transformations import UpdateRule

#: Argument for data: an array or Data object for one variable, a list of them for a list of variables.
Rows = npt.ArrayLike | Data | Sequence[npt.ArrayLike | Data]

#: Argument for extra updates: shared variables and their new values, each with or without an op.
Updates = Mapping[Any, Any] | Sequence[tuple[Any, Any] | tuple[Any, Any, str | None]]

#: Argument that selects the rows of a step.
Batch = int | slice | Sequence[int] | npt.NDArray[Any] | None


class ExtraUpdate(NamedTuple):
    """Update in a training step that is not one of the rule's.

    Attributes
    ----------
    shared : shared variable
    expression : variable
        New value of ``shared``.
    op : {"mean", None}
        With "mean", ranks average the new values by rows.  With None, each rank has its own value.
    differs : bool
        Whether ranks may compute different new values in one step, even if their variables are equal before it.
    """

    shared: Any
    expression: Any
    op: str | None
    differs: bool


@dataclass(frozen=True)
class TrainingGraph:
    """Loss, inputs and updates of a training, checked.

    Attributes
    ----------
    loss : scalar variable
    x, y : list of variable
        Inputs and targets.
    x_is_list, y_is_list : bool
        Whether the user passed a list, and so has to pass lists of data.
    sliceable : list of shared variable
        Variables that hold the data, one for each of `x` and `y`; empty if the data are arguments of the calls.
    rule : RuleUpdates
    optimizer_state : list of shared variable
        Variables that the rule updates besides the parameters.
    extra_updates : list of ExtraUpdate
    weight : scalar variable, optional
        Number of items that the loss is a mean over; None for the rows.
    ema : list of shared variable, optional
        Moving averages of the parameters, in their order; None without the option `ema`.
    params : list of shared variable
    update_rule : callable
        The update rule that made `rule`, with clipping if the options have it.
    rule_kwargs : dict
        Its options.
    options : StepOptions
    """

    loss: Any
    x: list[Any]
    y: list[Any]
    x_is_list: bool
    y_is_list: bool
    sliceable: list[Any]
    rule: RuleUpdates
    optimizer_state: list[Any]
    extra_updates: list[ExtraUpdate]
    weight: Any
    ema: list[Any] | None
    params: list[Any]
    update_rule: UpdateRule
    rule_kwargs: Mapping[str, Any]
    options: StepOptions

    @classmethod
    def build(
        cls,
        loss: Any,
        params: Sequence[Any],
        x: Any,
        y: Any,
        update_rule: UpdateRule,
        sliceable_shareds: Sequence[Any] | None,
        extra_updates: Updates | None,
        rule_kwargs: dict[str, Any],
        weight: Any,
        options: StepOptions,
        is_serial: bool = False,
    ) -> TrainingGraph:
        """Check the arguments of `make_train_function`, and apply the rule.

        Parameters
        ----------
        loss, params, x, y, update_rule, sliceable_shareds, extra_updates, weight
            As in `make_train_function`.
        rule_kwargs : dict
            Options of the rule.
        options : StepOptions
        is_serial : bool
            Whether one process computes all rows: then no mean depends on the number of ranks, and none is warned of.

        Raises
        ------
        TypeError, ValueError
            If an argument is wrong; the message names it.
        """
        if isinstance(loss, list | tuple):
            raise TypeError("loss: expected a symbolic scalar, got a list")
        if not callable(update_rule):
            raise TypeError(
                "update_rule: expected a rule of synkhronos.training.updates, "
                f"got {update_rule!r} of type {type(update_rule).__name__}"
            )
        if options.clip_norm is not None:
            update_rule = chain(clip_by_global_norm(options.clip_norm), update_rule)
        xs, ys = _check_variables("x", x), _check_variables("y", y)
        if not xs:
            raise ValueError("x: expected at least one variable, got none")
        sliceable = _check_sliceable(sliceable_shareds, [*xs, *ys])
        if weight is not None:
            _check_weight(weight, loss, params)
            if any(isinstance(node.op, RankMeanOp) for node in library_of(loss).sort_nodes([loss])):
                raise ValueError("weight: expected None for a loss with means over ranks (rank_mean, sync=True)")
        loss_or_grads, scale = loss, None
        if options.loss_scale is not None:
            scale, loss_or_grads = scale_gradients(loss, params)
        rule = update_rule(loss_or_grads, params, weight=xs[0].shape[0] if weight is None else weight, **rule_kwargs)
        if not isinstance(rule, tuple) or len(rule) != 3:
            raise TypeError(
                "update_rule: expected it to return (grad_updates, param_updates, grad_shared), "
                f"got {rule!r} of type {type(rule).__name__}"
            )
        rule, averages = RuleUpdates(*rule), None
        if options.ema is not None:
            rule, averages = add_average(rule, list(params), options.ema)
        if scale is not None:
            rule = skip_overflows(rule, scale)
        lists = isinstance(x, list | tuple), isinstance(y, list | tuple)
        state = [shared for shared in rule.param_updates if not any(shared is p for p in params)]
        extra = _check_extra_updates(extra_updates, rule, [*xs, *ys, *sliceable])
        if not is_serial:
            means = {f"extra_updates: {u.shared.name}": u.expression for u in extra if u.op == "mean" and u.differs}
            warn_of_denominators(means if weight is not None else {"loss": loss, **means}, [*xs, *ys, *sliceable])
        return cls(
            *(loss, xs, ys, *lists, sliceable, rule, state, extra, weight, averages, list(params)),
            *(update_rule, rule_kwargs, options),
        )

    @property
    def outputs(self) -> list[tuple[Any, str]]:
        """Outputs of the gradient's function, with their ops.

        They are the loss, a mean over rows; or with a `weight` the weighted loss and the weight, both to be summed.
        """
        return [(self.loss, "mean")] if self.weight is None else weighted_outputs(self.loss, self.weight)

    def check_data(
        self,
        x_data: Rows | None,
        y_data: Rows | None,
        batch: Any,
        batch_s: Any,
        names: tuple[str, str] = ("batch", "batch_s"),
    ) -> list[Any]:
        """Check the data of a call, and return one array or Data object for each variable.

        Parameters
        ----------
        x_data, y_data, batch, batch_s
            Arguments of the call.
        names : (str, str)
            Names of ``batch`` and ``batch_s`` in errors.

        Returns
        -------
        list
            Empty if the data are in shared variables.

        Raises
        ------
        TypeError
            If data are missing, or given although they are in shared variables; likewise for the selection of rows.
        ValueError
            If a list has the wrong length.
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
            *_to_list("x_data", x_data, self.x, self.x_is_list),
            *_to_list("y_data", y_data, self.y, self.y_is_list),
        ]

    def check_steps(
        self, x_data: Rows | None, y_data: Rows | None, batches: Any, batches_s: Any
    ) -> tuple[list[Any], list[tuple[Any, Any]]]:
        """Check the data of several steps.

        Returns
        -------
        arrays : list
            As from `check_data`.
        steps : list of (batch, batch_s)
            Selection of rows of each step: the first is None if the data are in shared variables, else the second.
        """
        arrays = self.check_data(x_data, y_data, batches, batches_s, ("batches", "batches_s"))
        name, selections = ("batches_s", batches_s) if self.sliceable else ("batches", batches)
        is_sequence = isinstance(selections, np.ndarray) and selections.ndim or isinstance(selections, Sequence)
        if not is_sequence or isinstance(selections, str | bytes):
            raise TypeError(f"{name}: expected a sequence with the rows of each step, got {selections!r}")
        return arrays, [(None, selection) if self.sliceable else (selection, None) for selection in selections]


def _check_variables(argument: str, value: Any) -> list[Any]:
    """Check a variable or a list of variables with rows, and return a list."""
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


def _check_sliceable(shareds: Sequence[Any] | None, variables: list[Any]) -> list[Any]:
    """Check that each input has one shared variable, of its dtype and number of dimensions; return them as a list."""
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


def apply_own_gradient(rule: RuleUpdates) -> dict[Any, Any]:
    """Return the updates of a step by the rank's own gradient, without an all-reduce: new values by shared variable."""
    expression = rule.grad_updates[rule.grad_shared]
    library = library_of(expression)
    new_values = library.clone(list(rule.param_updates.values()), {rule.grad_shared: expression})
    return {
        shared: library.convert_to_type_of(shared, new)
        for shared, new in zip(rule.param_updates, new_values, strict=True)
    }


def replace_params(expressions: Sequence[Any], params: Sequence[Any], averages: Any) -> list[Any]:
    """Return expressions that read moving averages instead of parameters."""
    library = library_of(*params)
    replacements = {
        p: library.convert_to_type_of(p, library.tensor.cast(average, p.dtype))
        for p, average in zip(params, averages, strict=True)
    }
    return list(library.clone(list(expressions), replacements))


def identify_rule(update_rule: UpdateRule, rule_kwargs: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name of an update rule and all of its options, including defaults.

    Checkpoints have both, so that a training is not resumed with another rule.

    Examples
    --------
    >>> from synkhronos.training.updates import momentum
    >>> identify_rule(momentum, {"learning_rate": 0.1})
    ('momentum', {'momentum': 0.9, 'learning_rate': 0.1})
    """
    parameters = inspect.signature(update_rule).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty and p.name != "weight"}
    return name_rule(update_rule), {**defaults, **rule_kwargs}


def name_rule(update_rule: UpdateRule) -> str:
    """Return the name of an update rule, that of the function in a `functools.partial`."""
    function: Any = update_rule
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def is_averaged(shared: Any) -> bool:
    """Whether new values of a variable are averaged over slices: all except integers, booleans and generators."""
    return hasattr(shared.type, "dtype") and np.dtype(shared.type.dtype).kind not in "biu"


def weighted_outputs(expression: Any, weight: Any) -> list[tuple[Any, str]]:
    """Return two outputs whose sums over ranks give a weighted mean: the mean times its weight, and the weight.

    A mean of weight 0 counts as 0, even if it is NaN.  Both outputs have the dtype of the mean, at least float32.
    """
    tensor = library_of(expression).tensor
    dtype = str(np.result_type(expression.dtype, np.float32))
    weight = tensor.cast(weight, dtype)
    product = tensor.switch(tensor.eq(weight, 0), np.asarray(0, dtype), weight * expression)
    return [(product, "sum"), (weight, "sum")]


def warn_of_denominators(means: Mapping[str, Any], sources: Sequence[Any], stacklevel: int = 3) -> None:
    """Warn of means whose denominators depend on the values of inputs, or on random numbers.

    Ranks average them by rows, although their denominators are not proportional to rows.

    Parameters
    ----------
    means : dict of str to variable
        Expressions that ranks average by rows, by their name in the warning.
    sources : list of variable
        Inputs whose rows differ between ranks.
    stacklevel : int
        As for `warnings.warn`; 1 is the function that calls this one.

    Warns
    -----
    UserWarning
        Once for each such mean.
    """
    if not means:
        return
    library, expressions = library_of(*means.values()), list(means.values())
    random = [shared for shared in library.find_shareds(expressions) if library.is_generator(shared)]
    dependence = Dependence(library, expressions, [*sources, *random])
    for name, expression in means.items():
        for denominator in dependence.find_denominators(expression)[:1]:
            names = ", ".join(dependence.list_sources(denominator))
            warnings.warn(
                f"{name}: the denominator of a mean depends on the values of {names}, but ranks average by rows, so "
                "that the result depends on the number of ranks. Give the denominator as the mean's weight: weight=... "
                "for a loss, (expression, 'mean', weight) for validate. A running average needs one of the numerator "
                "and one of the denominator",
                stacklevel=stacklevel + 1,
            )


def _check_weight(weight: Any, loss: Any, params: Sequence[Any]) -> None:
    """Check that a weight is a real scalar variable that does not depend on parameters.

    The gradient of a weighted mean is the weighted mean of gradients only if the weights do not depend on parameters.

    Raises
    ------
    TypeError, ValueError
        If it is not.
    """
    expected = "weight: expected a symbolic scalar, the number of items that the loss is a mean over"
    try:
        library = library_of(weight, loss)
    except TypeError as error:
        raise TypeError(f"{expected}; {error}") from None
    if getattr(weight, "ndim", None) != 0 or np.dtype(weight.dtype).kind not in "biuf":
        raise TypeError(f"{expected}, got {weight!r} of {weight.type}")
    for shared in library.find_shareds([weight]):
        if any(shared is param for param in params):
            raise ValueError(f"{expected}; it depends on the parameter {shared.name!r}")


def _check_extra_updates(updates: Updates | None, rule: RuleUpdates, sources: list[Any]) -> list[ExtraUpdate]:
    """Check extra updates, and choose the ops that are not given.

    Parameters
    ----------
    updates : dict or list of tuples, optional
        The argument `extra_updates`.
    rule : RuleUpdates
        Its variables may have no extra update.
    sources : list of variable
        Inputs, whose rows differ between ranks.
    """
    if updates is None:
        return []
    if not isinstance(updates, Mapping | list | tuple):
        raise TypeError(f"extra_updates: expected a dict or a list of pairs, got {updates!r}")
    entries = list(updates.items() if isinstance(updates, Mapping) else updates)
    rule_ids = {id(shared) for shared in (*dict(rule.grad_updates), *dict(rule.param_updates))}
    seen: set[int] = set()
    for entry in entries:
        if not isinstance(entry, list | tuple) or len(entry) not in (2, 3):
            raise TypeError(
                f"extra_updates: expected pairs of a shared variable and an expression, or with an op, got {entry!r}"
            )
        shared = entry[0]
        if not hasattr(shared, "get_value"):
            raise TypeError(f"extra_updates: expected shared variables, got {shared!r}")
        if id(shared) in rule_ids:
            raise ValueError(f"extra_updates: the update rule has an update of {shared.name!r} already")
        if id(shared) in seen:
            raise ValueError(f"extra_updates: there are two for {shared.name!r}")
        seen.add(id(shared))
        if len(entry) == 3 and entry[2] not in ("mean", None):
            raise ValueError(f"extra_updates: {shared.name!r}: expected the op 'mean' or None, got {entry[2]!r}")
        if entry[2:] == ("mean",) and not _is_float(shared):
            raise TypeError(f"extra_updates: {shared.name!r}: op 'mean' needs a variable of floats, got {shared.type}")
    return _choose_ops(entries, sources)


def _choose_ops(entries: list[Any], sources: list[Any]) -> list[ExtraUpdate]:
    """Return extra updates with ops.

    The default op is "mean" for floats, and None for random streams and all other variables.

    Raises
    ------
    TypeError
        If an update needs an op: ranks may compute different values, which are neither floats nor random streams.

    Notes
    -----
    The values of a variable with the op None may diverge between ranks.  Then expressions that read it may also differ.
    So the analysis is repeated with these variables as sources, until it finds no more of them.
    """
    expressions = [entry[1] for entry in entries if hasattr(entry[1], "owner")]
    if not expressions:
        return [ExtraUpdate(entry[0], entry[1], entry[2] if len(entry) == 3 else None, False) for entry in entries]
    library = library_of(*expressions)
    random = [shared for shared in library.find_shareds(expressions) if library.is_generator(shared)]
    differing = [*sources, *random]
    while True:
        dependence = Dependence(library, expressions, differing)
        extra_updates = []
        for shared, expression, *op in entries:
            differs = bool(hasattr(expression, "owner") and dependence.list_sources(expression))
            if not op:
                if differs and not _is_float(shared) and not library.is_generator(shared):
                    raise TypeError(
                        f"extra_updates: {shared.name!r} of {shared.type} has no mean, and ranks compute different "
                        "values: give (variable, expression, None) to let each rank keep its own"
                    )
                op = ["mean" if _is_float(shared) else None]
            extra_updates.append(ExtraUpdate(shared, expression, op[0], differs))
        # Expressions that read these variables may differ between ranks as well.
        own = [
            u.shared for u in extra_updates if u.differs and u.op is None and not any(u.shared is d for d in differing)
        ]
        if not own:
            return extra_updates
        differing += own


def _is_float(shared: Any) -> bool:
    """Whether a variable is an array of real floats."""
    return hasattr(shared.type, "dtype") and np.dtype(shared.type.dtype).kind == "f"


def _to_list(argument: str, value: Any, variables: list[Any], is_list: bool) -> list[Any]:
    """Return data as a list with one entry per variable."""
    return check_list(value, argument, len(variables), "arrays") if is_list else [value]
