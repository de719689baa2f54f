"""The flat gradient that every update rule uses: the gradients of all parameters in one shared vector.

Ranks all-reduce this vector, once for all parameters.  A rule reads each parameter's gradient back from it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from synkhronos.checks import is_number
from synkhronos.graphs import GraphLibrary, library_of
from synkhronos.graphs.dependence import Dependence
from synkhronos.training.updates.argument_checks import check_gradients, check_params, check_scalars


class RuleUpdates(NamedTuple):
    """Result of an update rule; unpacks as ``grad_updates, param_updates, grad_shared``.

    Attributes
    ----------
    grad_updates : OrderedDict
        ``{grad_shared: expression}``: a function with these updates writes the rank's own gradient.
    param_updates : OrderedDict
        New values of the parameters and of the rule's own shared variables, from `grad_shared`.
    grad_shared : shared variable
        The gradients of all parameters, one after another in a vector; all-reduce it between the two.
    """

    grad_updates: OrderedDict[Any, Any]
    param_updates: OrderedDict[Any, Any]
    grad_shared: Any


class FlatGradient:
    """The gradients of all parameters in one shared vector.

    One long collective is faster than many short ones.

    Parameters
    ----------
    loss_or_grads : scalar variable, or list of variables
        A loss, or its gradients, one for each parameter.
    params : iterable of shared variables
        What to move.
    weight : number or symbolic scalar, optional
        How much this rank's gradient counts.  None: each rank's counts the same.  A gradient of weight 0 counts as
        zeros, even where it is NaN.
    **scalars : numbers or symbolic scalars
        The rule's hyperparameters, to be checked.

    Attributes
    ----------
    params : list of shared variables
    tensor : module
        ``tensor`` of the graph library.
    shared, expression : variables
        The vector, and what a rank writes into it: with `weight`, that times the gradient, then the weight.
    """

    def __init__(self, loss_or_grads: Any, params: Iterable[Any], weight: Any = None, **scalars: Any):
        self.params = check_params(params)
        check_scalars(self.params, **scalars)
        grads = check_gradients(loss_or_grads, self.params)
        self._weighted = weight is not None
        self._may_be_zero = False
        library = library_of(*self.params)
        self.tensor = library.tensor
        # At least float32: half precision neither counts past 2048 rows nor sums many ranks' gradients well.
        dtype = str(np.result_type(*(p.dtype for p in self.params), np.float32))
        size = sum(int(np.prod(shape_of(p))) for p in self.params) + self._weighted
        self.shared = library.shared(np.zeros(size, dtype), name="grad_shared")
        parts = [self.tensor.cast(g, dtype).flatten() for g in grads]
        if self._weighted:
            check_scalars(self.params, weight=weight)
            scale = as_scalar(weight, self.shared)
            self._may_be_zero = not is_number(weight) and not _is_length(library, weight)
            zero = np.asarray(0, dtype)
            is_none = self.tensor.eq(scale, zero)
            parts = [scale * part for part in parts]
            if self._may_be_zero:
                parts = [self.tensor.switch(is_none, zero, part) for part in parts]
            parts.append(scale.reshape((1,)))
        self.expression = self.tensor.concatenate(parts)
        if size == 1:
            # One element would be broadcastable, which makes it no update of a vector that is not.
            self.expression = self.expression + self.tensor.zeros_like(self.shared)

    def pieces(self) -> Iterator[Any]:
        """Yield the reduced gradient of each parameter, read from the vector."""
        for p, g in zip(self.params, split_vector(self.shared, self.params, self._may_be_zero), strict=True):
            yield self.tensor.cast(g, p.dtype)


def split_vector(vector: Any, params: Sequence[Any], may_be_zero: bool = True) -> Iterator[Any]:
    """Yield the reduced gradient of each parameter, a part of the vector, in the vector's dtype.

    Parameters
    ----------
    vector : shared variable
        Gradients; or their products with weights, then the sum of the weights.
    params : list of shared variables
    may_be_zero : bool
        Whether the sum of the weights may be 0; the gradients are 0 then.
    """
    sizes = [int(np.prod(shape_of(p))) for p in params]
    is_weighted = shape_of(vector)[0] > sum(sizes)
    total = vector[-1]
    if is_weighted and may_be_zero:
        tensor = library_of(vector).tensor
        total = tensor.switch(tensor.eq(total, 0), np.asarray(1, vector.dtype), total)
    start = 0
    for p, size in zip(params, sizes, strict=True):
        # Lengths as numbers, not symbols, so that the piece can be broadcast where p can.
        g = vector[start : start + size].reshape(shape_of(p))
        # By piece, so that the division fuses with the rule's own arithmetic.
        yield g / total if is_weighted else g
        start += size


def _is_length(library: GraphLibrary, weight: Any) -> bool:
    """Return True for a weight that depends on shapes alone, such as a number of rows."""
    nodes = library.sort_nodes([weight])
    leaves = [weight, *(operand for node in nodes for operand in node.inputs)]
    sources = [operand for operand in leaves if operand.owner is None and not library.is_constant(operand)]
    return not Dependence(library, [weight], sources).depends_on_values(weight)


def as_scalar(value: Any, like: Any) -> Any:
    """Return a number or symbolic scalar as a symbolic scalar in the dtype of the variable `like`."""
    tensor = library_of(like).tensor
    if is_number(value):
        # The libraries by themselves take a Python float for a floatX, which may be wider than the parameter.
        return tensor.constant(np.asarray(value, like.dtype))
    return tensor.cast(value, like.dtype)


def zeros_like(param: Any, name: str) -> Any:
    """Return a new shared variable of zeros: dtype, shape, broadcast pattern and place of `param`."""
    zeros = np.zeros(shape_of(param), param.dtype)
    # By class and type, because each library's `shared` has a word of its own for the broadcast pattern.
    return type(param)(type=param.type, value=zeros, strict=False, name=f"{param.name or 'param'}_{name}")


def shape_of(param: Any) -> tuple[int, ...]:
    """Return the shape of a shared variable's value."""
    # The internal type, lest a whole array be copied from a GPU for its shape.
    return tuple(int(length) for length in param.get_value(borrow=True, return_internal_type=True).shape)
