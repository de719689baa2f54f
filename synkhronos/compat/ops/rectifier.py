"""The rectifier, max(x, 0), with a gradient that is computed from its output alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytensor.scalar as ps
import pytensor.tensor as pt
from pytensor.scalar.basic import Maximum, upcast_out
from pytensor.tensor.elemwise import Elemwise

__all__ = ["rectifier"]


def rectifier(x: Any) -> Any:
    """Return what is positive, and 0 for the rest.

    Examples
    --------
    >>> rectifier(np.array([-1.0, 2.0])).eval()
    array([0., 2.])
    """
    x = pt.as_tensor_variable(x)
    return _rectifier(x, np.zeros((), x.dtype))


class _Maximum(Maximum):
    """The larger of two, of which the second is zero.

    The gradient passes where the output is positive.  What the output was computed from need not be kept for that: XLA
    keeps one byte for each element, and in a residual network this saves a fourth of what is read and written.
    """

    associative = False

    def pullback(self, inputs: Any, outputs: Any, gout: Any) -> list[Any]:
        """Return the gradients with respect to both."""
        (_, zero), (y,), (g,) = inputs, outputs, gout
        if y.type in ps.discrete_types:
            return list(super().pullback(inputs, outputs, gout))
        nothing = ps.constant(0, dtype=g.dtype)
        # Not where it is larger: what is no number lets the gradient through.
        return [ps.switch(ps.le(y, ps.constant(0, dtype=y.dtype)), nothing, g), zero.zeros_like()]


_rectifier = Elemwise(_Maximum(upcast_out, name="rectifier"))
