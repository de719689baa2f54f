"""Means over the rows, or other items, of all ranks.

A mean over rows is averaged by the ranks' numbers of rows.  A mean over other items needs a weight, such as the sum of
a mask.  Without a weight, its denominator may differ between ranks, and the result would depend on the number of ranks:
`warn_of_varying_denominators`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from synkhronos.graph_libraries import get_library
from synkhronos.graph_libraries.dependence_analysis import DependenceAnalysis
from synkhronos.training.updates.arguments import find_library
from synkhronos.variable_types import Array, SharedVariable, Variable


def make_weighted_outputs(expression: Variable, weight: Variable) -> list[tuple[Variable, str]]:
    """Return two outputs whose sums over ranks give a weighted mean: the mean times its weight, and the weight.

    A mean of weight 0 counts as 0, even if it is NaN.  Both outputs have the dtype of the mean, at least float32.
    """
    tensor = get_library(expression).tensor
    dtype = str(np.result_type(expression.dtype, np.float32))
    weight = tensor.cast(weight, dtype)
    product = tensor.switch(tensor.eq(weight, 0), np.asarray(0, dtype), weight * expression)
    return [(product, "sum"), (weight, "sum")]


def divide_by_weight(total: Array, weight: Array, dtype: npt.DTypeLike) -> np.ndarray:
    """Return a sum divided by a weight in a dtype, or NaN where the weight is 0."""
    total, weight = np.float64(total), np.float64(weight)
    return np.asarray(total / weight if weight else np.nan, dtype)


def warn_of_varying_denominators(means: Mapping[str, Any], inputs: Sequence[Variable], stacklevel: int = 3) -> None:
    """Warn of means whose denominators depend on the values of inputs, or on random numbers.

    Ranks average them by rows, although their denominators are not proportional to rows.  ``means`` has the expressions
    by their names in warnings; ``inputs`` are those whose rows differ between ranks.
    """
    if not means:
        return
    library, expressions = get_library(*means.values()), list(means.values())
    random = [shared for shared in library.find_shareds(expressions) if library.is_generator(shared)]
    dependence = DependenceAnalysis(library, expressions, [*inputs, *random])
    for name, expression in means.items():
        for denominator in dependence.find_denominators(expression)[:1]:
            names = ", ".join(dependence.list_source_names(denominator))
            warnings.warn(
                f"{name}: the denominator of a mean depends on the values of {names}, but ranks average by rows, so "
                "that the result depends on the number of ranks. Give the denominator as the mean's weight: weight=... "
                "for a loss, (expression, 'mean', weight) for validate. A running average needs one of the numerator "
                "and one of the denominator",
                stacklevel=stacklevel + 1,
            )


def check_weight(weight: Variable, loss: Variable, params: Sequence[SharedVariable]) -> None:
    """Check that a weight is a real scalar variable that does not depend on parameters.

    The gradient of a weighted mean is the weighted mean of gradients only if the weights do not depend on parameters.
    """
    expected = "weight: expected a symbolic scalar, the number of items that the loss is a mean over"
    library = find_library(expected, weight, loss)
    if getattr(weight, "ndim", None) != 0 or np.dtype(weight.dtype).kind not in "biuf":
        raise TypeError(f"{expected}, got {weight!r} of {weight.type}")
    for shared in library.find_shareds([weight]):
        if any(shared is param for param in params):
            raise ValueError(f"{expected}; it depends on the parameter {shared.name!r}")
