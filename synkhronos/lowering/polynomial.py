"""Integer expressions as polynomials, which prove that the length of a slice does not depend on data.

The bounds of ``x[i:i + 28]`` are traced values, but their difference is 28 for every ``i``.  Written as polynomials in
the unknown variables, ``i + 28`` and ``i`` have a constant difference.
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

__all__ = ["Polynomial", "expand", "find_constant_length"]

#: A polynomial in unknown integers: maps each product of unknowns to its coefficient, and () to the constant term.
Polynomial = Counter[tuple[Any, ...]]


def find_constant_length(index: slice, polynomials: Mapping[Any, Polynomial]) -> int | None:
    """Return the length of a slice whose stop minus start is a constant; None if it is not.

    Parameters
    ----------
    index : slice
        Bounds are variables, or None.
    polynomials : mapping of variable to Polynomial
        Polynomials of variables that the bounds may contain.
    """
    step = index.step
    if index.start is not None and index.stop is not None and (step is None or expand(step, polynomials) == {(): 1}):
        difference = expand(index.stop, polynomials)
        difference.subtract(expand(index.start, polynomials))
        if not any(coefficient for unknowns, coefficient in difference.items() if unknowns):
            return max(difference[()], 0)
    return None


def expand(variable: Any, polynomials: Mapping[Any, Polynomial]) -> Polynomial:
    """Return an integer expression as a polynomial.

    The polynomial of an array holds for each of its elements.  A subexpression that is no sum, difference or product
    counts as one unknown.
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
    if isinstance(op, Add | Sub | Mul | Neg | Identity | TensorFromScalar | ScalarFromTensor | DimShuffle) or (
        isinstance(op, Cast) and all("int" in v.type.dtype for v in node.inputs)
    ):
        return _apply(op, [expand(source, polynomials) for source in node.inputs])
    if isinstance(op, Composite):
        operands = [expand(source, polynomials) for source in node.inputs]
        inner_polynomials = dict(zip(op.fgraph.inputs, operands, strict=True))
        return expand(op.fgraph.outputs[node.outputs.index(variable)], inner_polynomials)
    if isinstance(op, Subtensor):
        # An element of a sum is the sum of elements: each unknown array becomes its element at this index.
        index = str(op.idx_list), *(int(v.data) if isinstance(v, Constant) else v for v in node.inputs[1:])
        array = expand(node.inputs[0], polynomials)
        return Counter({tuple((index, unknown) for unknown in unknowns): n for unknowns, n in array.items()})
    return Counter({(variable,): 1})


def _apply(op: Any, operands: list[Polynomial]) -> Polynomial:
    """Return the sum, difference, product or negative of polynomials; the first operand for any other Op."""
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
