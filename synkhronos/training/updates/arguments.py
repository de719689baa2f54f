"""Checks and conversions of the arguments of update rules: losses or gradients, parameters and hyperparameters.

Each error names the argument, the value, and the expected kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from synkhronos.checks import is_number
from synkhronos.graph_libraries import GraphLibrary, get_library, is_variable
from synkhronos.variable_types import Scalar, SharedVariable, Variable, Variables


def as_scalar(value: Scalar, like: Variable) -> Variable:
    """Convert a number or symbolic scalar to a symbolic scalar in the dtype of the variable `like`."""
    tensor = get_library(like).tensor
    if is_number(value):
        # The graph libraries convert a Python float to floatX, which may be wider than the parameter.
        return tensor.constant(np.asarray(value, like.dtype))
    return tensor.cast(value, like.dtype)


def find_library(expected: str, *variables: Variable) -> GraphLibrary:
    """Return the graph library of the variables.  Raise TypeError, with a message that begins with `expected`."""
    try:
        return get_library(*variables)
    except TypeError as error:
        raise TypeError(f"{expected}; {error}") from None


def parse_params(params: Iterable[SharedVariable]) -> list[SharedVariable]:
    """Return parameters as a list.  Raise TypeError or ValueError if they are not distinct shared float variables."""
    expected = "params: expected a list of shared variables of floats"
    # A variable is refused, since iterating over it would give its rows.
    if not isinstance(params, Iterable) or isinstance(params, str) or is_variable(params):
        raise TypeError(f"{expected}, got {_describe_value(params)}")
    listed = list(params)
    if not listed:
        raise ValueError(f"{expected}, got none")
    for i, p in enumerate(listed):
        library = find_library(expected, p)
        if not library.is_shared(p) or not str(getattr(p, "dtype", None)).startswith("float"):
            raise TypeError(f"{expected}, got {_describe_value(p)} at index {i}")
        if any(p is q for q in listed[:i]):
            raise ValueError(f"{expected}, each once, got {p!r} again at index {i}")
    find_library(expected, *listed)
    return listed


def check_scalars(params: Sequence[SharedVariable], **scalars: Any) -> None:
    """Check that each hyperparameter is a number, or a symbolic scalar of the parameters' graph library."""
    for argument, value in scalars.items():
        if is_number(value):
            if value != value:
                raise ValueError(f"{argument}: expected a number, got {value}")
            continue
        expected = f"{argument}: expected a number or a symbolic scalar"
        find_library(expected, value, *params)
        if getattr(value, "ndim", None) != 0:
            raise ValueError(f"{expected}, got {_describe_value(value)}")


def as_gradients(loss_or_grads: Variables, params: Sequence[SharedVariable]) -> list[Variable]:
    """Convert a loss to its gradients.  Return a list of gradients, one for each parameter, unchanged."""
    if not isinstance(loss_or_grads, list | tuple):
        expected = "loss_or_grads: expected a symbolic scalar or a list of gradients"
        library = find_library(expected, loss_or_grads, *params)
        if getattr(loss_or_grads, "ndim", None) != 0:
            raise ValueError(f"{expected}, got {_describe_value(loss_or_grads)}")
        used_ids = {id(shared) for shared in library.find_shareds([loss_or_grads])}
        if unused := [p for p in params if id(p) not in used_ids]:
            raise ValueError(f"params: the loss does not depend on {', '.join(map(_describe_value, unused))}")
        return list(library.grad(loss_or_grads, list(params)))
    expected = f"loss_or_grads: expected one gradient for each of {len(params)} params"
    if len(loss_or_grads) != len(params):
        raise ValueError(f"{expected}, got {len(loss_or_grads)}")
    for i, (g, p) in enumerate(zip(loss_or_grads, params, strict=True)):
        find_library(expected, g, p)
        if getattr(g, "ndim", None) != p.ndim:
            raise ValueError(
                f"{expected}, that of {p!r} with {p.ndim} dimensions, got {_describe_value(g)} at index {i}"
            )
    return list(loss_or_grads)


def _describe_value(value: object) -> str:
    """Return a text with the value and its type, which is the symbolic type of a variable."""
    return f"{value!r} of type {getattr(value, 'type', type(value).__name__)}"
