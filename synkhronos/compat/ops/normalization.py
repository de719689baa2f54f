"""Batch normalisation by the statistics of the batch, and its gradient in closed form.

Memory traffic dominates the time.  XLA computes each of the two Ops in two passes, one that only sums and one that only
writes.  From plain expressions and their gradients it makes kernels that do both in one pass, which is slower, and
computes the same sums several times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import DisconnectedType, disconnected_type, grad
from pytensor.graph.basic import Apply
from pytensor.scalar import upcast
from pytensor.tensor.type import TensorType

from synkhronos.compat.ops.base import NumpyOp, register_lowering

__all__ = ["BatchNormTrain", "BatchNormTrainGrad"]


class _BatchNorm(NumpyOp):
    """Base class of batch normalisation and its gradient."""

    #: The first output is written by an elementwise kernel; read by `synkhronos.lowering.precision`.
    elementwise = True
    #: Positions of inputs that may be rounded; read by the same module.
    rounded: tuple[int, ...]
    axes: tuple[int, ...]

    def statistics_shape(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        """Return the shape of statistics: one on the axes that are summed over."""
        return tuple(1 if axis in self.axes else length for axis, length in enumerate(shape))

    def count(self, shape: Sequence[int]) -> int:
        """Return how many elements a sum has."""
        return math.prod(shape[axis] for axis in self.axes)

    def first(self, x: Any, module: Any = np) -> Any:
        """Return one element of each sum, to take distances from; zeros where the sums have none.

        Sums of numbers far from zero round badly, and so does the mean of squares less the square of the mean; with
        distances from any one of the numbers it is neither.
        """
        if 0 in x.shape:
            return module.zeros(self.statistics_shape(x.shape), x.dtype)
        return x[tuple(slice(0, 1) if axis in self.axes else slice(None) for axis in range(x.ndim))]

    def infer_shape(self, *args: Any) -> Any:
        """Return the outputs' shapes: one like the first input's, and two of statistics."""
        shape = args[-1][0]
        return [tuple(shape), self.statistics_shape(shape), self.statistics_shape(shape)]


class BatchNormTrain(_BatchNorm):
    """Batch normalisation: ``y = (x - mean) * invstd * scale + shift``.

    Parameters
    ----------
    axes : sequence of int
        What mean and variance are taken over.
    epsilon : float
        Added to the variance: ``invstd`` is ``1 / sqrt(variance + epsilon)``.

    Examples
    --------
    >>> x, scale, shift = pt.tensor4("x"), np.ones((1, 3, 1, 1)), np.zeros((1, 3, 1, 1))
    >>> y, mean, invstd = BatchNormTrain((0, 2, 3), 1e-4)(x, scale, shift)
    >>> mean.type.shape
    (1, None, 1, 1)
    """

    __props__ = ("axes", "epsilon")
    rounded = (0,)

    def __init__(self, axes: Sequence[int], epsilon: float):
        self.axes = tuple(sorted(int(a) for a in axes))
        self.epsilon = float(epsilon)

    def make_node(self, x: Any, scale: Any, shift: Any) -> Apply:
        """Take an array; scale and shift have as many dimensions, and length one on the axes."""
        x, scale, shift = (pt.as_tensor_variable(v) for v in (x, scale, shift))
        if x.dtype not in ("float16", "float32", "float64"):
            x = x.astype("float64")
        # As the class's expression has it.
        dtype = upcast(x.dtype, scale.dtype, shift.dtype)
        scale, shift = (self._factor(x, v).astype(dtype) for v in (scale, shift))
        statistics = [TensorType(x.dtype, shape=self.statistics_shape(x.type.shape))() for _ in range(2)]
        return Apply(self, [x, scale, shift], [TensorType(dtype, shape=x.type.shape)(), *statistics])

    def _factor(self, x: Any, factor: Any) -> Any:
        """Return scale or shift in the statistics' shape."""
        if factor.ndim != x.ndim or not all(factor.type.broadcastable[a] for a in self.axes):
            raise TypeError(f"scale and shift need {x.ndim} dimensions, of length 1 on {self.axes}, not {factor.type}")
        if any(f and not k for f, k in zip(factor.type.broadcastable, self._broadcastable(x), strict=True)):
            return pt.alloc(factor, *self.statistics_shape(tuple(x.shape)))
        return factor

    def _broadcastable(self, x: Any) -> tuple[bool, ...]:
        return tuple(length == 1 for length in self.statistics_shape(x.type.shape))

    def connection_pattern(self, node: Any) -> list[list[bool]]:
        """Statistics depend on the array alone."""
        return [[True, True, True], [True, False, False], [True, False, False]]

    def check(self, x: Any, *factors: Any) -> None:
        """Refuse factors of other lengths: they would be broadcast, and the gradient be wrong."""
        for factor in factors:
            if factor.shape != self.statistics_shape(x.shape):
                raise ValueError(
                    f"scale and shift of {x.shape} must be {self.statistics_shape(x.shape)}, not {factor.shape}"
                )

    def perform(self, node: Any, inputs: Any, output_storage: Any, params: Any = None) -> None:
        """Compute with NumPy: the variance of what is centred already."""
        x, scale, shift = inputs
        self.check(*inputs)
        wide = x.astype(np.result_type(x, np.float32), copy=False)
        first = self.first(wide)
        distance = wide - first
        offset = distance.mean(axis=self.axes, keepdims=True)
        centred = distance - offset
        var = np.square(centred).mean(axis=self.axes, keepdims=True)
        invstd = 1 / np.sqrt(var + self.epsilon)
        _store(node, output_storage, centred * (scale * invstd) + shift, first + offset, invstd)

    def pullback(self, inputs: Any, outputs: Any, output_grads: Any) -> list[Any]:
        """Return the gradients."""
        (x, scale, _), (_, mean, invstd) = inputs, outputs
        dy, *rest = (None if isinstance(g.type, DisconnectedType) else g for g in output_grads)
        dscale, dshift = disconnected_type(), disconnected_type()
        terms = []
        if dy is not None:
            dx, dscale, dshift = BatchNormTrainGrad(self.axes)(x, dy, scale, mean, invstd)
            terms.append(dx)
        if rest[0] is not None:
            terms.append(pt.zeros_like(x) + rest[0] / _count(x, self.axes))
        if rest[1] is not None:
            terms.append((x - mean) * (-rest[1] * invstd**3 / _count(x, self.axes)))
        return [sum(terms[1:], terms[0]), dscale, dshift]


class BatchNormTrainGrad(_BatchNorm):
    """The gradient of `BatchNormTrain` by its first output.

    Parameters
    ----------
    axes : sequence of int
    """

    __props__ = ("axes",)
    rounded = (0, 1)

    def __init__(self, axes: Sequence[int]):
        self.axes = tuple(sorted(int(a) for a in axes))

    def make_node(self, x: Any, dy: Any, scale: Any, mean: Any, invstd: Any) -> Apply:
        """Take the array, the output's gradient, the scale and the statistics."""
        inputs = [pt.as_tensor_variable(v) for v in (x, dy, scale, mean, invstd)]
        x, _, scale = inputs[:3]
        sums = [TensorType(scale.dtype, shape=self.statistics_shape(x.type.shape))() for _ in range(2)]
        return Apply(self, inputs, [x.type(), *sums])

    def gradients(self, count: Any, x: Any, dy: Any, scale: Any, mean: Any, invstd: Any) -> tuple[Any, Any, Any]:
        """Return the gradients by array, scale and shift: of NumPy's arrays, or of variables as an expression."""
        xhat = (x - mean) * invstd
        dshift = dy.sum(axis=self.axes, keepdims=True)
        dscale = (dy * xhat).sum(axis=self.axes, keepdims=True)
        return (scale * invstd) * (dy - (dshift + xhat * dscale) / count), dscale, dshift

    def perform(self, node: Any, inputs: Any, output_storage: Any, params: Any = None) -> None:
        """Compute with NumPy."""
        wide = np.result_type(*inputs, np.float32)
        x, *others = (v.astype(wide, copy=False) for v in inputs)
        _store(node, output_storage, *self.gradients(self.count(x.shape), x, *others))

    def pullback(self, inputs: Any, outputs: Any, output_grads: Any) -> list[Any]:
        """Return the gradients, from the same formulas as an expression."""
        # Of copies: one input may be computed from another, which is not this gradient's business.
        copies = x, *others = [v.copy() for v in inputs]
        pairs = zip(self.gradients(_count(x, self.axes), x, *others), output_grads, strict=True)
        # Copies again: the array's gradient goes through both sums, and what is known of a variable ends the way there.
        known = {v.copy(): g for v, g in pairs if not isinstance(g.type, DisconnectedType)}
        return list(grad(None, copies, known_grads=known, disconnected_inputs="ignore"))


def _count(x: Any, axes: Sequence[int]) -> Any:
    return pt.cast(pt.prod([x.shape[axis] for axis in axes]), x.dtype)


def _store(node: Any, output_storage: Any, *values: np.ndarray) -> None:
    for storage, output, value in zip(output_storage, node.outputs, values, strict=True):
        storage[0] = np.ascontiguousarray(value, dtype=output.type.dtype)


# -- XLA -----------------------------------------------------------------------------------------------------------


def _wide(*arrays: Any) -> Any:
    """Return the dtype of sums: float64 where an array has it, else float32."""
    import jax.numpy as jnp

    return jnp.float64 if any(a.dtype == jnp.float64 for a in arrays) else jnp.float32


def _dtype(array: Any) -> Any:
    """Return an array's dtype in the graph; `synkhronos.lowering.precision` hands float32 over in bfloat16."""
    import jax.numpy as jnp

    return jnp.float32 if array.dtype == jnp.bfloat16 else array.dtype


@register_lowering(BatchNormTrain)
def _batch_norm_xla(op: BatchNormTrain, x: Any, scale: Any, shift: Any) -> Any:
    import jax.numpy as jnp

    op.check(x, scale, shift)
    wide = x.astype(_wide(x))
    # Both sums come of one reading.
    first = op.first(wide, jnp)
    distance = wide - first
    offset = distance.mean(axis=op.axes, keepdims=True)
    var = jnp.maximum(jnp.square(distance).mean(axis=op.axes, keepdims=True) - jnp.square(offset), 0)
    mean, invstd = offset + first, 1 / jnp.sqrt(var + op.epsilon)
    y = (wide - mean) * (scale * invstd) + shift
    return y.astype(scale.dtype), mean.astype(_dtype(x)), invstd.astype(_dtype(x))


@register_lowering(BatchNormTrainGrad)
def _batch_norm_grad_xla(op: BatchNormTrainGrad, *inputs: Any) -> Any:
    wide = _wide(*inputs)
    x, dy, scale, mean, invstd = (v.astype(wide) for v in inputs)
    centred = x - mean
    dshift = dy.sum(axis=op.axes, keepdims=True)
    dscale = (dy * centred).sum(axis=op.axes, keepdims=True) * invstd
    # What has one number for each channel is put together first: two products for each element are left.
    of_dy = scale * invstd
    of_centred = -of_dy * invstd * dscale / op.count(x.shape)
    constant = -of_dy * dshift / op.count(x.shape)
    dx = of_dy * dy + of_centred * centred + constant
    return dx.astype(_dtype(inputs[0])), dscale.astype(inputs[2].dtype), dshift.astype(inputs[2].dtype)
