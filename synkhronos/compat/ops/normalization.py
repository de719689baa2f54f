"""Mean and variance in one pass, for batch normalisation.

`Moments`
    The Op.
`moments`
    Calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import DisconnectedType
from pytensor.graph.basic import Apply
from pytensor.tensor.type import TensorType

from synkhronos.compat.ops.base import NumpyOp, lowers

__all__ = ["Moments", "moments"]


def moments(x: Any, axes: Sequence[int]) -> list[Any]:
    """Return mean and variance over axes, which stay with length one.

    Examples
    --------
    >>> mean, var = moments(pt.tensor4("x"), (0, 2, 3))
    >>> mean.type.shape
    (1, None, 1, 1)
    """
    return Moments(axes)(x)


class Moments(NumpyOp):
    """Mean and variance over some axes.

    Both come out of one reading of the array.  XLA would read it twice for the variance as NumPy computes it, and
    with 50 batch normalisations in a network that is what a training step waits for.

    Parameters
    ----------
    axes : sequence of int
    """

    __props__ = ("axes",)

    def __init__(self, axes: Sequence[int]):
        self.axes = tuple(sorted(int(a) for a in axes))

    def make_node(self, x: Any) -> Apply:
        """Take an array of floats."""
        x = pt.as_tensor_variable(x)
        if x.dtype not in ("float16", "float32", "float64"):
            x = x.astype("float64")
        shape = tuple(1 if axis in self.axes else s for axis, s in enumerate(x.type.shape))
        return Apply(self, [x], [TensorType(x.dtype, shape=shape)() for _ in range(2)])

    def infer_shape(self, *args: Any) -> Any:
        """Return the outputs' shapes."""
        (shape,) = args[-1]
        kept = tuple(1 if axis in self.axes else s for axis, s in enumerate(shape))
        return [kept, kept]

    def perform(self, node: Any, inputs: Any, output_storage: Any, params: Any = None) -> None:
        """Compute with NumPy, in two passes."""
        (x,) = inputs
        dtype = node.outputs[0].type.dtype
        wide = np.float64 if x.dtype == np.float64 else np.float32
        mean = x.mean(axis=self.axes, keepdims=True, dtype=wide)
        var = np.square(x - mean).mean(axis=self.axes, keepdims=True, dtype=wide)
        output_storage[0][0] = np.ascontiguousarray(mean, dtype=dtype)
        output_storage[1][0] = np.ascontiguousarray(var, dtype=dtype)

    def pullback(self, inputs: Any, outputs: Any, output_grads: Any) -> list[Any]:
        """Return the gradient with respect to the array."""
        (x,), (mean, _), (g_mean, g_var) = inputs, outputs, output_grads
        count = pt.cast(pt.prod([x.shape[a] for a in self.axes]), x.dtype)
        terms = []
        if not isinstance(g_mean.type, DisconnectedType):
            terms.append(g_mean / count)
        if not isinstance(g_var.type, DisconnectedType):
            terms.append((x - mean) * (g_var * np.asarray(2, x.dtype) / count))
        return [pt.zeros_like(x) + sum(terms)] if len(terms) < 2 else [terms[0] + terms[1]]


@lowers(Moments)
def _moments_xla(op: Moments, x: Any) -> Any:
    import jax.numpy as jnp

    # The mean of squares less the square of the mean, which rounds badly where the mean is far from zero: so both
    # are taken of the distance from one element.
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    first = x[tuple(slice(0, 1) if axis in op.axes else slice(None) for axis in range(x.ndim))].astype(wide)
    distance = x.astype(wide) - first
    mean = distance.mean(axis=op.axes, keepdims=True)
    var = jnp.maximum(jnp.square(distance).mean(axis=op.axes, keepdims=True) - jnp.square(mean), 0)
    return (mean + first).astype(x.dtype), var.astype(x.dtype)
