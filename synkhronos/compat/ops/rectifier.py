"""The rectifier ``y = max(x, 0)``, elementwise.

Its gradient needs only y: the gradient with respect to x is that with respect to y where ``y > 0``, and 0 elsewhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytensor.scalar as ps
import pytensor.tensor as pt
from pytensor.graph.basic import Constant
from pytensor.scalar import LE, Switch
from pytensor.scalar.basic import Maximum, upcast_out
from pytensor.tensor.elemwise import Elemwise


def rectifier(x: Any) -> Any:
    """Return ``max(x, 0)``."""
    x = pt.as_tensor_variable(x)
    return _rectifier(x, np.zeros((), x.dtype))


class _MaximumWithZero(Maximum):
    """Maximum of a number and zero.

    The gradient passes where the output is positive, so XLA need not keep the input for it.
    """

    associative = False

    def pullback(self, inputs: Any, outputs: Any, gout: Any) -> list[Any]:
        """Return the gradients with respect to both inputs."""
        (_, zero), (y,), (g,) = inputs, outputs, gout
        if y.type in ps.discrete_types:
            return list(super().pullback(inputs, outputs, gout))
        zero_gradient = ps.constant(0, dtype=g.dtype)
        # `le`, since NaN is not less or equal: the gradient passes where the output is NaN.
        return [ps.switch(ps.le(y, ps.constant(0, dtype=y.dtype)), zero_gradient, g), zero.zeros_like()]


_rectifier = Elemwise(_MaximumWithZero(upcast_out, name="rectifier"))


def is_rectifier(node: Any) -> bool:
    """Whether a node computes `rectifier`; False for None."""
    return node is not None and node.op == _rectifier


def match_masked_gradient(node: Any) -> tuple[Any, Any] | None:
    """Return (y, g) if a node computes ``switch(y <= 0, 0, g)``, a rectifier's gradient; None for others and None."""
    if not _applies_scalar_op(node, Switch):
        return None
    is_masked, zeros, g = node.inputs
    if not _applies_scalar_op(is_masked.owner, LE) or not (_is_zero(zeros) and _is_zero(is_masked.owner.inputs[1])):
        return None
    if g.dtype != node.outputs[0].dtype or g.type.broadcastable != node.outputs[0].type.broadcastable:
        return None
    return is_masked.owner.inputs[0], g


def _applies_scalar_op(node: Any, scalar_op_class: type) -> bool:
    return node is not None and isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, scalar_op_class)


def _is_zero(variable: Any) -> bool:
    return isinstance(variable, Constant) and not np.any(variable.data)
