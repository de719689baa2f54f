"""Integer expressions as polynomials, which prove that the extent of a slice does not depend on data.

The bounds of ``x[i:i + 28]`` are traced values, but the difference of the polynomials ``i + 28`` and ``i`` is 28.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from pytensor.graph.basic import Constant
from pytensor.scalar.basic import Add, Cast, Composite, Identity, Mul, Neg, Sub
from pytensor.tensor.basic import ScalarFromTensor, TensorFromScalar
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.subtensor import Subtensor

from synkhronos.variable_types import Op, Variable

#: A polynomial in unknown integers: maps each product of unknowns to its coefficient, and () to the constant term.
Polynomial = Counter[tuple[Any, ...]]


def find_constant_extent(index: slice, polynomials: Mapping[Any, Polynomial]) -> int | None:
    """Return stop minus start of a slice, at least 0, if it is a constant, or None otherwise.

    The difference is the length of the slice, or an upper bound where the array ends before ``stop``.  The bounds are
    variables, whose polynomials may be known, or None.
    """
    step = index.step
    if (
        index.start is not None
        and index.stop is not None
        and (step is None or to_polynomial(step, polynomials) == {(): 1})
    ):
        difference = to_polynomial(index.stop, polynomials)
        difference.subtract(to_polynomial(index.start, polynomials))
        if not any(coefficient for unknowns, coefficient in difference.items() if unknowns):
            return max(difference[()], 0)
    return None


def to_polynomial(variable: Variable, polynomials: Mapping[Any, Polynomial]) -> Polynomial:
    """Return an integer expression as a polynomial.

    The polynomial of an array is that of each element, so an array with its axes in another order is another unknown.
    A subexpression other than a sum, difference or product is an unknown.
    """
    if variable in polynomials:
        return Counter(polynomials[variable])
    if isinstance(variable, Constant):
        data = np.asarray(variable.data, np.int64)
        constant = int(data.flat[0]) if data.size else 0
        polynomial: Polynomial = Counter({(): constant})
        if (offsets := data - constant).any():
            polynomial[(("constant", offsets.shape, offsets.tobytes()),)] = 1
        return polynomial
    node = variable.owner
    op = getattr(node, "op", None)
    op = getattr(op, "scalar_op", op)
    if (
        isinstance(op, Add | Sub | Mul | Neg | Identity | TensorFromScalar | ScalarFromTensor)
        or (isinstance(op, DimShuffle) and all(node.inputs[0].type.broadcastable))
        or (isinstance(op, Cast) and all("int" in v.type.dtype for v in node.inputs))
    ):
        return _apply_op(op, [to_polynomial(source, polynomials) for source in node.inputs])
    if isinstance(op, Composite):
        operands = [to_polynomial(source, polynomials) for source in node.inputs]
        inner_polynomials = dict(zip(op.fgraph.inputs, operands, strict=True))
        return to_polynomial(op.fgraph.outputs[node.outputs.index(variable)], inner_polynomials)
    if isinstance(op, Subtensor):
        # An element of a sum is the sum of elements, so each unknown array is replaced by its element at this index.
        index = str(op.idx_list), *(int(v.data) if isinstance(v, Constant) else v for v in node.inputs[1:])
        array = to_polynomial(node.inputs[0], polynomials)
        return Counter({tuple((index, unknown) for unknown in unknowns): n for unknowns, n in array.items()})
    return Counter({(variable,): 1})


def _apply_op(op: Op, operands: list[Polynomial]) -> Polynomial:
    """Return the sum, difference, product or negative of polynomials, or for any other Op the first operand."""
    result = Counter(operands[0])
    for operand in operands[1:]:
        if isinstance(op, Mul):
            product: Polynomial = Counter()
            for (a, m), (b, n) in itertools.product(result.items(), operand.items()):
                product[tuple(sorted(a + b, key=hash))] += m * n
            result = product
        elif isinstance(op, Sub):
            result.subtract(operand)
        else:
            result.update(operand)
    return Counter({unknowns: -n for unknowns, n in result.items()}) if isinstance(op, Neg) else result
