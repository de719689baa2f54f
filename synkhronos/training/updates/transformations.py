"""Transformations of the reduced gradient, and compositions of update rules.

Clipping is only exact after the all-reduce, since the norm of the mean gradient does not follow from the norms of the
ranks' own gradients.  A transformation is therefore applied to the gradient that the rule reads from `grad_shared`::

    gradient of each rank ──> all-reduce ──> transformation ──> ... ──> update rule ──> transformation ──> parameters
                             (grad_shared)      (of gradients)                           (of steps)

A transformation is a function ``transform(values, params)`` of two lists of variables.  It returns a list of the same
types as ``values``, and runs identically on all ranks, which hold the same reduced gradient.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from synkhronos.checks import check_positive, describe, is_number
from synkhronos.graph_libraries import get_library
from synkhronos.training.updates.arguments import as_gradients, as_scalar, check_scalars, find_library, parse_params
from synkhronos.training.updates.flat_gradient import FlatGradient, VectorPieces, split_gradient
from synkhronos.training.updates.shared_variables import get_shape
from synkhronos.training.updates.update_rule import RuleUpdates, UpdateRule, to_rule_updates
from synkhronos.variable_types import Scalar, SharedVariable, Variable, Variables

#: Function of gradients, or steps, and parameters, which returns new gradients or steps.
Transformation = Callable[[list[Variable], list[SharedVariable]], list[Variable]]


def chain(*parts: Any) -> UpdateRule:
    """Return an update rule composed of a rule, and of transformations of its gradient and of its step.

    Parameters
    ----------
    *parts : transformations, and one update rule
        In the order in which they are applied.  Transformations before the rule change the reduced gradient.  Those
        after the rule change the step, which is subtracted from the parameters: it has the gradient's sign.  The rule
        is the part with an argument ``weight``, which every rule has and no transformation.  No transformation can
        follow a rule that keeps copies of the parameters: `master_weights` takes a chain instead.

    Examples
    --------
    >>> import pytensor
    >>> from synkhronos.training.updates import adamw, chain, clip_by_global_norm, scale
    >>> w = pytensor.shared(3.0)
    >>> rule = chain(clip_by_global_norm(1.0), adamw, scale(lambda p: 0.1 if p.name == "embedding" else 1.0))
    >>> grad_updates, param_updates, grad_shared = rule(w**2, [w], learning_rate=0.25, weight_decay=0.1)
    >>> _ = pytensor.function([], updates=grad_updates)()
    >>> _ = pytensor.function([], updates=param_updates)()
    >>> print(w.get_value().round(4))
    2.675
    """
    for part in parts:
        if not callable(part):
            raise TypeError(f"chain: expected transformations and an update rule, got {part!r}")
    indexes = _find_update_rules(parts)
    if len(indexes) != 1:
        raise ValueError(
            f"chain: expected one update rule, with an argument weight, got {len(indexes)} in {len(parts)} parts"
        )
    (index,) = indexes
    update_rule, gradient_transforms, step_transforms = parts[index], parts[:index], parts[index + 1 :]

    def chained(
        loss_or_grads: Variables,
        params: Iterable[SharedVariable],
        *args: Any,
        weight: Scalar | None = None,
        **kwargs: Any,
    ) -> RuleUpdates:
        params = parse_params(params)
        updates = to_rule_updates(update_rule, update_rule(loss_or_grads, params, *args, weight=weight, **kwargs))
        if gradient_transforms:
            updates = _replace_gradient(
                updates,
                params,
                _apply_transformations(gradient_transforms, split_gradient(updates.grad_shared, params), params),
            )
        return _transform_step(updates, params, step_transforms) if step_transforms else updates

    chained.__name__ = f"chain({', '.join(map(_get_name, parts))})"
    chained.__signature__ = inspect.signature(update_rule)  # type: ignore[attr-defined]
    return chained


def partition(*groups: tuple[Callable[[SharedVariable], bool], UpdateRule] | UpdateRule) -> UpdateRule:
    """Return an update rule composed of several, each for the parameters that a predicate selects.

    Gradients travel in one vector nevertheless.

    Parameters
    ----------
    *groups : (predicate, update rule), the last may be an update rule alone
        A parameter belongs to the first group whose predicate is true of it.  Give options of a group's rule by
        ``functools.partial``; options of the composed rule are passed to all groups.

    Examples
    --------
    Momentum for matrices, plain gradient descent for other parameters:

    >>> import numpy as np, pytensor
    >>> from synkhronos.training.updates import momentum, partition, sgd
    >>> w, b = pytensor.shared(np.ones((2, 2)), "w"), pytensor.shared(np.ones(2), "b")
    >>> rule = partition((lambda p: p.ndim == 2, momentum), sgd)
    >>> updates = rule((w**2).sum() + b.sum(), [w, b], learning_rate=0.25)
    >>> [variable.name for variable in updates.param_updates]
    ['w', 'w_velocity', 'b']
    """
    pairs: list[tuple[Callable[[SharedVariable], bool], UpdateRule]] = []
    for i, group in enumerate(groups):
        pair = group if isinstance(group, tuple) else (lambda param: True, group)
        is_last = i == len(groups) - 1
        if len(pair) != 2 or not all(map(callable, pair)) or not (isinstance(group, tuple) or is_last):
            raise TypeError(f"partition: expected pairs of a predicate and an update rule, got {group!r}")
        pairs.append(pair)

    def partitioned(
        loss_or_grads: Variables,
        params: Iterable[SharedVariable],
        *args: Any,
        weight: Scalar | None = None,
        **kwargs: Any,
    ) -> RuleUpdates:
        params = parse_params(params)
        grads = as_gradients(loss_or_grads, params)
        flat = FlatGradient(grads, params, weight)
        pieces = dict(zip(params, flat.iterate_gradients(), strict=True))
        members: list[list[Any]] = [[] for _ in pairs]
        for p in params:
            index = next((i for i, (predicate, _) in enumerate(pairs) if predicate(p)), None)
            if index is None:
                raise ValueError(f"params: {p!r} is in no group of partition(); end with a rule for the rest")
            members[index].append(p)
        merged: OrderedDict[Any, Any] = OrderedDict()
        for (_, update_rule), group_params in zip(pairs, members, strict=True):
            if group_params:
                group_grads = [g for g, p in zip(grads, params, strict=True) if any(p is q for q in group_params)]
                updates = to_rule_updates(update_rule, update_rule(group_grads, group_params, *args, **kwargs))
                merged.update(_replace_gradient(updates, group_params, [pieces[p] for p in group_params]).param_updates)
        return RuleUpdates(OrderedDict([(flat.shared, flat.expression)]), merged, flat.shared)

    partitioned.__name__ = f"partition({', '.join(_get_name(update_rule) for _, update_rule in pairs)})"
    return partitioned


# -- transformations -------------------------------------------------------------------------------------------


def _set_name(name: str, transform: Transformation) -> Transformation:
    """Name a transformation, and return it.  Checkpoints identify it by the name."""
    transform.__name__ = name
    return transform


def clip_by_global_norm(max_norm: Scalar) -> Transformation:
    r"""Return a transformation that scales all gradients such that their common norm is at most `max_norm`.

    Parameters
    ----------
    max_norm : float or symbolic scalar
        A number must be positive.

    Notes
    -----
    With the norm :math:`n = \sqrt{\sum_p \sum_i g_{p,i}^2}` over all elements of all parameters, each gradient is
    multiplied by :math:`\min(1, c / n)`.

    Pascanu, R., Mikolov, T. and Bengio, Y. (2013): On the difficulty of training recurrent neural networks.
    ICML, arXiv:1211.5063.

    Examples
    --------
    >>> import numpy as np, pytensor
    >>> from synkhronos.training.updates import chain, clip_by_global_norm, sgd
    >>> w = pytensor.shared(np.zeros(2))
    >>> updates = chain(clip_by_global_norm(1.0), sgd)((w * [3.0, 4.0]).sum(), [w], learning_rate=1.0)
    >>> _ = pytensor.function([], updates=updates.grad_updates)()
    >>> _ = pytensor.function([], updates=updates.param_updates)()
    >>> print(w.get_value())
    [-0.6 -0.8]
    """
    _check_positive_scalar("max_norm", max_norm)

    def transform(grads: list[Variable], params: list[SharedVariable]) -> list[Variable]:
        norm = global_norm(grads)
        limit = _to_scalar("max_norm", max_norm, norm)
        factor = get_library(norm).tensor.switch(norm < limit, as_scalar(1, norm), limit / norm)
        return [g * as_scalar(factor, g) for g in grads]

    return _set_name(f"clip_by_global_norm({_format_option(max_norm)})", transform)


def clip(max_delta: Scalar) -> Transformation:
    r"""Return a transformation that limits each element of the gradients to :math:`[-\delta, \delta]`.

    Parameters
    ----------
    max_delta : float or symbolic scalar
        A number must be positive.
    """
    _check_positive_scalar("max_delta", max_delta)

    def transform(grads: list[Variable], params: list[SharedVariable]) -> list[Variable]:
        limits = [_to_scalar("max_delta", max_delta, g) for g in grads]
        return [get_library(g).tensor.clip(g, -limit, limit) for g, limit in zip(grads, limits, strict=True)]

    return _set_name(f"clip({_format_option(max_delta)})", transform)


def add_decayed_weights(weight_decay: Scalar, mask: Callable[[SharedVariable], bool] | None = None) -> Transformation:
    r"""Return a transformation that adds :math:`\lambda p` to the gradient of each parameter, or to its step.

    Before a rule this is an L2 penalty.  After a rule the decay is decoupled.  It is then not multiplied by the
    learning rate, unlike the decay of `adamw`.

    Parameters
    ----------
    weight_decay : float or symbolic scalar
        A number must be finite and not negative.
    mask : callable, optional
        Predicate of a parameter: whether it decays, as in ``lambda p: p.ndim > 1``, which leaves out biases and norms.
    """
    expected = f"weight_decay: expected a number of at least 0 or a symbolic scalar, got {weight_decay!r}"
    if not is_number(weight_decay):
        find_library(expected, weight_decay)
    elif not 0 <= weight_decay < math.inf:
        raise ValueError(expected)
    if mask is not None and not callable(mask):
        raise TypeError(f"mask: expected a predicate of a parameter, got {mask!r}")

    def transform(grads: list[Variable], params: list[SharedVariable]) -> list[Variable]:
        return [
            g + _to_scalar("weight_decay", weight_decay, g) * get_library(g).tensor.cast(p, g.dtype)
            if mask is None or mask(p)
            else g
            for g, p in zip(grads, params, strict=True)
        ]

    return _set_name(f"add_decayed_weights({_format_option(weight_decay)})", transform)


def scale(factor: Scalar | Callable[[SharedVariable], Scalar]) -> Transformation:
    """Return a transformation that multiplies gradients, or the steps of a preceding rule, by a factor.

    Parameters
    ----------
    factor : float, symbolic scalar, or callable
        A function of a parameter gives each its own: after a rule, learning rates by group.
    """
    expected = f"factor: expected a finite number, a symbolic scalar or a function of a parameter, got {factor!r}"
    if not callable(factor):
        if not is_number(factor):
            find_library(expected, factor)
        elif not math.isfinite(factor):
            raise ValueError(expected)

    def transform(grads: list[Variable], params: list[SharedVariable]) -> list[Variable]:
        factors = [factor(p) if callable(factor) else factor for p in params]
        return [g * _to_scalar("factor", f, g) for g, f in zip(grads, factors, strict=True)]

    return _set_name(f"scale({_format_option(factor)})", transform)


# -- Lasagne's constraints -------------------------------------------------------------------------------------


def total_norm_constraint(
    tensor_vars: Sequence[Variable], max_norm: Scalar, epsilon: Scalar = 1e-7, return_norm: bool = False
) -> Variables:
    r"""Scale variables such that their common norm is at most `max_norm`.

    Applied to the ranks' own gradients this depends on the number of ranks: use `clip_by_global_norm`, or
    ``chain(lambda grads, params: total_norm_constraint(grads, 5), adam)``.

    Parameters
    ----------
    tensor_vars : list of variables
    max_norm : float or symbolic scalar
        A number must be positive.
    epsilon : float, optional
        Added to the divisor.
    return_norm : bool, optional
        Whether to also return the norm.

    Returns
    -------
    list of variables, or (list of variables, scalar variable)

    Notes
    -----
    With the norm n of all elements, each variable is multiplied by
    :math:`\min(n, c) / (n + \epsilon)`.
    """
    _check_positive_scalar("max_norm", max_norm)
    norm = global_norm(tensor_vars)
    tensor = get_library(norm).tensor
    limit = _to_scalar("max_norm", max_norm, norm)
    factor = tensor.minimum(norm, limit) / (norm + as_scalar(epsilon, norm))
    scaled = [g * as_scalar(factor, g) for g in tensor_vars]
    return (scaled, norm) if return_norm else scaled


def norm_constraint(
    tensor_var: Variable, max_norm: Scalar, norm_axes: Sequence[int] | None = None, epsilon: Scalar = 1e-7
) -> Variable:
    r"""Scale the incoming weights of each unit such that their norm is at most `max_norm`.

    Parameters
    ----------
    tensor_var : variable
        Such as the new value of a parameter: ``updates.param_updates[w]``.
    max_norm : float or symbolic scalar
        A number must be positive.
    norm_axes : sequence of int, optional
        Axes over which norms are taken.  Default: the first axis of a matrix; all but the first axis of an array with
        3 to 5 dimensions, such as the weights of a convolution.
    epsilon : float, optional
        Added to the divisor.

    Returns
    -------
    variable

    Notes
    -----
    Each part is multiplied by :math:`\min(n, c) / (n + \epsilon)`, where n is its norm.
    """
    _check_positive_scalar("max_norm", max_norm)
    tensor, n_axes = get_library(tensor_var).tensor, tensor_var.ndim
    if norm_axes is not None:
        axes = tuple(norm_axes)
    elif n_axes == 2:
        axes = (0,)
    elif n_axes in (3, 4, 5):
        axes = tuple(range(1, n_axes))
    else:
        raise ValueError(f"norm_axes: needed for a variable of {n_axes} dimensions")
    norms = tensor.sqrt((tensor_var**2).sum(axis=axes, keepdims=True))
    target = tensor.minimum(norms, _to_scalar("max_norm", max_norm, norms))
    return tensor_var * (target / (norms + as_scalar(epsilon, norms)))


def global_norm(variables: Sequence[Variable]) -> Variable:
    """Return the Euclidean norm of all elements of all variables, in the widest of their dtypes."""
    if isinstance(variables, VectorPieces):
        variables = [variables.whole]
    tensor = get_library(*variables).tensor
    dtype = str(np.result_type(*(v.dtype for v in variables), np.float32))
    return tensor.sqrt(functools.reduce(lambda a, b: a + b, [(tensor.cast(v, dtype) ** 2).sum() for v in variables]))


# -- graphs ----------------------------------------------------------------------------------------------------


def _replace_gradient(updates: RuleUpdates, params: list[SharedVariable], grads: list[Variable]) -> RuleUpdates:
    """Return updates that read these gradients instead of those in `grad_shared`."""
    vector = updates.grad_shared
    library = get_library(vector)
    tensor = library.tensor
    parts = [tensor.cast(g, vector.dtype).flatten() for g in grads]
    if get_shape(vector)[0] > sum(int(np.prod(get_shape(p))) for p in params):  # it ends with a weight
        parts.append(tensor.constant(np.ones(1, vector.dtype)))
    # Adding zeros gives the vector's type, since a new vector of one element would be broadcastable.
    new = tensor.concatenate(parts) if len(parts) > 1 else parts[0]
    new = new + tensor.zeros_like(vector) if get_shape(vector) == (1,) else new
    new_values = library.clone(list(updates.param_updates.values()), {vector: library.convert_to_type_of(vector, new)})
    return updates._replace(param_updates=OrderedDict(zip(updates.param_updates, new_values, strict=True)))


def _transform_step(
    updates: RuleUpdates, params: list[SharedVariable], transforms: Sequence[Transformation]
) -> RuleUpdates:
    """Return updates whose steps are transformed."""
    for p in params:
        new = updates.param_updates[p]
        if any(value is new for shared, value in updates.param_updates.items() if shared is not p):
            raise ValueError(
                f"chain: the rule keeps a copy of {describe(p)}, which {_get_name(transforms[0])} after it would not "
                "change: expected master_weights(chain(rule, transformation))"
            )
    steps = _apply_transformations(transforms, [p - updates.param_updates[p] for p in params], params)
    library = get_library(*params)
    new_values = OrderedDict(updates.param_updates)
    for p, step in zip(params, steps, strict=True):
        new_values[p] = library.convert_to_type_of(p, p - library.tensor.cast(step, p.dtype))
    return updates._replace(param_updates=new_values)


def _apply_transformations(
    transforms: Sequence[Transformation], values: list[Any], params: list[SharedVariable]
) -> list[Variable]:
    """Apply transformations one after another."""
    for transform in transforms:
        values = list(transform(values, params))
        if len(values) != len(params):
            raise ValueError(
                f"chain: {_get_name(transform)} returned {len(values)} variables, "
                f"expected one for each of {len(params)} params"
            )
    return values


# -- arguments -------------------------------------------------------------------------------------------------


def _find_update_rules(parts: Sequence[Callable[..., Any]]) -> list[int]:
    """Return the indexes of the update rules: the parts with an argument ``weight``, or else with ``**kwargs``."""
    signatures = [inspect.signature(part).parameters for part in parts]
    return [i for i, parameters in enumerate(signatures) if "weight" in parameters] or [
        i for i, parameters in enumerate(signatures) if any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    ]


def _check_positive_scalar(name: str, value: object) -> None:
    """Raise TypeError or ValueError unless a value is a positive number or a symbolic variable."""
    if is_number(value):
        check_positive(value, name)
    else:
        find_library(f"{name}: expected a positive number or a symbolic scalar, got {value!r}", value)


def _to_scalar(name: str, value: Scalar, like: Variable) -> Variable:
    """Return an option as a scalar in the dtype of `like`.  Raise ValueError for an array."""
    check_scalars([like], **{name: value})
    return as_scalar(value, like)


def _get_name(part: object) -> str:
    """Return the name of a part, with the options of a `functools.partial`."""
    if isinstance(part, functools.partial):
        options = ", ".join(f"{name}={_format_option(value)}" for name, value in part.keywords.items())
        return f"{_get_name(part.func)}({options})"
    return str(getattr(part, "__name__", type(part).__name__))


def _format_option(value: Any) -> str:
    """Return a number as text, and a placeholder for variables and functions, which have no persistent identity."""
    return repr(float(value)) if is_number(value) else "..."
