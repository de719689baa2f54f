"""A shorter expression of the log-density of logistic regressions.

PyMC computes the logarithms of both probabilities of a row, and then chooses one of them::

    switch(y, log(sigmoid(x)), log1p(-sigmoid(x)))  =  -softplus((1 - 2 * y) * x)

The second form has equal values, to the last bit, as PyTensor makes each logarithm a softplus when it compiles.  The
second form takes fewer exponential functions.  Its gradient differs by rounding, and is finite where a probability
rounds to 1.
"""

from __future__ import annotations

from typing import Any

import pytensor.tensor as pt
from pytensor.graph.basic import Constant
from pytensor.scalar import basic, math
from pytensor.tensor.elemwise import DimShuffle

from synkhronos.extensions.rows_sum_graph import replace_variables
from synkhronos.graph_libraries import get_library
from synkhronos.lowering.sum_rewrites import is_elementwise
from synkhronos.variable_types import Variable

__all__ = ["simplify_logistic"]


def simplify_logistic(terms: Variable) -> Variable:
    """Return terms with equal values, in which the logarithm of a row's probability is computed once."""
    nodes = get_library(terms).sort_nodes([terms])
    replacements: dict[Any, Any] = {}
    for node in nodes:
        if is_elementwise(node, basic.Switch):
            condition, success, failure = node.inputs
            score = _get_operand(_get_operand(success, basic.Log), math.Sigmoid)
            complement = _get_operand(_get_operand(failure, basic.Log1p), basic.Neg)
            if score is not None and score is _get_operand(complement, math.Sigmoid):
                # PyTensor would put the softplus into a switch again.
                sign = 1.0 - 2.0 * pt.neq(condition, 0)
                replacements[node.outputs[0]] = -pt.softplus(sign * score)
        elif is_elementwise(node, basic.GE | basic.LE):
            # A probability is in its bounds unless it is nan.
            probability, bound = node.inputs
            score = _get_operand(probability, math.Sigmoid)
            limit = 0 if isinstance(node.op.scalar_op, basic.GE) else 1
            if score is not None and _is_constant(bound, limit):
                replacements[node.outputs[0]] = ~pt.isnan(score)  # PyTensor would rewrite eq(score, score) to True
    return replace_variables(terms, nodes, replacements)


def _get_operand(variable: Any, scalar_op_class: Any) -> Any:
    """Return the operand of an elementwise function, or None if `variable` is None, or another function's value."""
    return (
        variable.owner.inputs[0] if variable is not None and is_elementwise(variable.owner, scalar_op_class) else None
    )


def _is_constant(variable: Any, value: int) -> bool:
    while variable.owner is not None and isinstance(variable.owner.op, DimShuffle):
        (variable,) = variable.owner.inputs
    return isinstance(variable, Constant) and bool((variable.data == value).all())
