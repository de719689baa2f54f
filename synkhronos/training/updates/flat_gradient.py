"""The flat gradient: the gradients of all parameters in one shared vector, which every update rule uses.

Ranks all-reduce this vector once for all parameters.  Then a rule reads the gradient of each parameter from it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from synkhronos.checks import is_number
from synkhronos.graph_libraries import GraphLibrary, get_library, is_variable
from synkhronos.graph_libraries.dependence_analysis import DependenceAnalysis
from synkhronos.variable_types import Array, Scalar, SharedVariable, Variable, Variables


class RuleUpdates(NamedTuple):
    """Result of an update rule; unpacks as ``grad_updates, param_updates, grad_shared``.

    Attributes
    ----------
    grad_updates : OrderedDict
        ``{grad_shared: expression}``: a function with these updates writes the rank's own gradient.
    param_updates : OrderedDict
        New values of the parameters and of the rule's own shared variables, from `grad_shared`.
    grad_shared : shared variable
        The concatenated gradients of all parameters, a vector; all-reduce it between the two functions.
    """

    grad_updates: OrderedDict[SharedVariable, Variable]
    param_updates: OrderedDict[SharedVariable, Variable]
    grad_shared: SharedVariable


class FlatGradient:
    """The gradients of all parameters in one shared vector: one long collective is faster than many short ones.

    The arguments are those of update rules; ``scalars`` are hyperparameters, which are checked.  ``shared`` is the
    vector; with a `weight`, the weight is its last element.  ``expression`` is the value that a rank writes into it:
    the gradients, or their products with the weight.  A gradient of weight 0 counts as zeros, even if it is NaN.
    """

    def __init__(
        self,
        loss_or_grads: Variables,
        params: Iterable[SharedVariable],
        weight: Scalar | None = None,
        **scalars: Scalar,
    ):
        self.params = parse_params(params)
        check_scalars(self.params, **scalars)
        grads = as_gradients(loss_or_grads, self.params)
        self._is_weighted = weight is not None
        self._may_be_zero = False
        library = get_library(*self.params)
        self.tensor = library.tensor
        # The dtype is at least float32: float16 can't count above 2048 rows, and would round sums over many ranks.
        dtype = str(np.result_type(*(p.dtype for p in self.params), np.float32))
        size = sum(int(np.prod(get_shape(p))) for p in self.params) + self._is_weighted
        self.shared = library.shared(np.zeros(size, dtype), name="grad_shared")
        pieces = [self.tensor.cast(g, dtype).flatten() for g in grads]
        if self._is_weighted:
            check_scalars(self.params, weight=weight)
            scale = as_scalar(weight, self.shared)
            self._may_be_zero = not is_number(weight) and not _depends_on_shapes_only(library, weight)
            zero = np.asarray(0, dtype)
            is_zero = self.tensor.eq(scale, zero)
            pieces = [scale * piece for piece in pieces]
            if self._may_be_zero:
                pieces = [self.tensor.switch(is_zero, zero, piece) for piece in pieces]
            pieces.append(scale.reshape((1,)))
        self.expression = self.tensor.concatenate(pieces)
        if size == 1:
            # A vector of one element is broadcastable, so it could not update the shared variable, which is not.
            self.expression = self.expression + self.tensor.zeros_like(self.shared)

    def iterate_gradients(self) -> Iterator[Variable]:
        """Yield the reduced gradient of each parameter, read from the vector."""
        for p, g in zip(self.params, split_gradient(self.shared, self.params, self._may_be_zero), strict=True):
            yield self.tensor.cast(g, p.dtype)


class VectorPieces(list[Variable]):
    """Consecutive pieces of a vector, each with the shape of a parameter; ``whole`` has all of them as one vector.

    A sum over ``whole`` is one kernel on a GPU, instead of one or two for each piece.
    """

    def __init__(self, pieces: Iterable[Variable], whole: Variable):
        super().__init__(pieces)
        self.whole = whole


def split_gradient(vector: Variable, params: Sequence[SharedVariable], may_be_zero: bool = True) -> VectorPieces:
    """Return the reduced gradient of each parameter, in the vector's dtype.

    The vector has gradients, or products of gradients and weights followed by the sum of the weights.  If the sum
    ``may_be_zero``, this function returns zeros for a sum of 0.
    """
    sizes = [int(np.prod(get_shape(p))) for p in params]
    is_weighted = get_shape(vector)[0] > sum(sizes)
    total = vector[-1]
    if is_weighted and may_be_zero:
        tensor = get_library(vector).tensor
        total = tensor.switch(tensor.eq(total, 0), np.asarray(1, vector.dtype), total)

    def divide(g: Variable) -> Variable:
        # The division follows the slice, so that it fuses with the arithmetic of the rule.
        return g / total if is_weighted else g

    starts = np.cumsum([0, *sizes]).tolist()
    # Lengths are numbers instead of symbols, so a gradient is broadcastable along the same axes as its parameter.
    pieces = [
        divide(vector[start : start + size].reshape(get_shape(p)))
        for p, start, size in zip(params, starts, sizes, strict=False)
    ]
    return VectorPieces(pieces, divide(vector[: starts[-1]]))


def _depends_on_shapes_only(library: GraphLibrary, weight: Variable) -> bool:
    """Return True if a weight depends on shapes alone, such as a number of rows."""
    nodes = library.sort_nodes([weight])
    leaves = [weight, *(operand for node in nodes for operand in node.inputs)]
    sources = [operand for operand in leaves if operand.owner is None and not library.is_constant(operand)]
    return not DependenceAnalysis(library, [weight], sources).depends_on_values(weight)


def as_scalar(value: Scalar, like: Variable) -> Variable:
    """Convert a number or symbolic scalar to a symbolic scalar in the dtype of the variable `like`."""
    tensor = get_library(like).tensor
    if is_number(value):
        # The graph libraries convert a Python float to floatX, which may be wider than the parameter.
        return tensor.constant(np.asarray(value, like.dtype))
    return tensor.cast(value, like.dtype)


def make_zero_state(param: SharedVariable, name: str) -> SharedVariable:
    """Make a shared variable of zeros, with the dtype, shape, broadcast pattern and device of `param`."""
    zeros, dtype = np.zeros(get_shape(param), param.dtype), str(param.dtype)
    return make_shared_like(param, zeros, dtype, f"{param.name or 'param'}_{name}")


def make_shared_like(param: SharedVariable, value: Array, dtype: str, name: str | None) -> Any:
    """Make a shared variable with the broadcast pattern and device of `param`."""
    # The constructor and the type are used, since `shared` has another name for the pattern in each library.
    return type(param)(type=param.type.clone(dtype=dtype), value=np.asarray(value, dtype), strict=False, name=name)


def get_shape(param: SharedVariable) -> tuple[int, ...]:
    """Return the shape of a shared variable's value."""
    # The value is read as its internal type.  Otherwise a whole array would be copied from a GPU.
    return tuple(int(length) for length in param.get_value(borrow=True, return_internal_type=True).shape)


# -- checks of arguments: each error names the argument, the value, and the expected kind --------------------------


def find_library(expected: str, *variables: Variable) -> GraphLibrary:
    """Return the graph library of the variables; raise TypeError, with a message that begins with `expected`."""
    try:
        return get_library(*variables)
    except TypeError as error:
        raise TypeError(f"{expected}; {error}") from None


def parse_params(params: Iterable[SharedVariable]) -> list[Any]:
    """Return parameters as a list; raise TypeError or ValueError if they are not distinct shared float variables."""
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
            continue
        expected = f"{argument}: expected a number or a symbolic scalar"
        find_library(expected, value, *params)
        if getattr(value, "ndim", None) != 0:
            raise ValueError(f"{expected}, got {_describe_value(value)}")


def as_gradients(loss_or_grads: Variables, params: Sequence[SharedVariable]) -> list[Any]:
    """Convert a loss to its gradients; return a list of gradients, one for each parameter, unchanged."""
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
