"""The flat gradient: the gradients of all parameters in one shared vector, which every update rule uses.

Ranks all-reduce this vector once for all parameters.  Then a rule reads the gradient of each parameter from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from synkhronos.checks import is_number
from synkhronos.graph_libraries import GraphLibrary, get_library
from synkhronos.graph_libraries.dependence_analysis import DependenceAnalysis
from synkhronos.training.updates.arguments import as_gradients, as_scalar, check_scalars, parse_params
from synkhronos.training.updates.shared_variables import get_shape
from synkhronos.variable_types import Scalar, SharedVariable, Variable, Variables


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
    """Consecutive pieces of a vector, each with the shape of a parameter.  ``whole`` has all of them as one vector.

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
