"""Batch normalization by the statistics of the batch, and its gradient in closed form (arXiv:1502.03167, section 3).

With the mean and the variance of the n elements of x on the normalized axes, and dy, the gradient with respect to y::

    invstd = 1 / sqrt(variance + epsilon)         dshift = sum(dy)
    normalized = (x - mean) * invstd              dscale = sum(dy * normalized)
    y = normalized * scale + shift                dx = scale * invstd * (dy - (dshift + normalized * dscale) / n)

Arrays x, y, dx and dy have one shape.  Scale, shift, statistics and their gradients have length 1 on the normalized
axes.  All are floats.

Memory traffic dominates the time.  XLA computes each of the Ops in two passes: one sums, one writes.  Plain expressions
and their gradients would be compiled to slower kernels, and some sums would be computed several times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.mode import optdb
from pytensor.gradient import DisconnectedType, disconnected_type, grad
from pytensor.graph.basic import Apply
from pytensor.graph.rewriting.basic import in2out, node_rewriter
from pytensor.scalar import upcast
from pytensor.tensor.type import TensorType

from synkhronos.compat.ops.rectifier import is_rectifier, match_masked_gradient
from synkhronos.lowering.numpy_op import NumpyOp, register_lowering


class _BatchNorm(NumpyOp):
    """Base class of batch normalization and its gradients.

    Parameters
    ----------
    axes : sequence of int
        Normalized axes, over which mean and variance are computed.
    """

    __props__: tuple[str, ...] = ("axes",)
    #: One kernel writes the first output; read by `synkhronos.lowering.precision`.
    is_single_kernel = True
    #: Positions of inputs that may be rounded; read by the same module.
    bfloat16_inputs: tuple[int, ...]

    def __init__(self, axes: Sequence[int]):
        self.axes = tuple(sorted(int(a) for a in axes))

    def get_statistics_shape(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        """Return the shape of statistics: 1 on the axes that are reduced."""
        return tuple(1 if axis in self.axes else length for axis, length in enumerate(shape))

    def count_elements(self, shape: Sequence[int]) -> int:
        """Return the number of elements of a sum."""
        return math.prod(shape[axis] for axis in self.axes)

    def select_reference(self, x: Any, array_module: Any = np) -> Any:
        """Return one element of each sum, to be subtracted from the others, or zeros for empty sums.

        Sums of numbers far from zero have large rounding errors, and so has the difference of the mean square and the
        squared mean.
        """
        if 0 in x.shape:
            return array_module.zeros(self.get_statistics_shape(x.shape), x.dtype)
        return x[tuple(slice(0, 1) if axis in self.axes else slice(None) for axis in range(x.ndim))]

    def infer_shape(self, *args: Any) -> Any:
        """Return the outputs' shapes: one like the first input's, and two of statistics."""
        shape = args[-1][0]
        return [tuple(shape), self.get_statistics_shape(shape), self.get_statistics_shape(shape)]


class BatchNormTrain(_BatchNorm):
    """Batch normalization.  Inputs: x, scale and shift; outputs: y, mean and invstd.

    Parameters
    ----------
    axes : sequence of int
    epsilon : float
        Added to the variance: ``invstd`` is ``1 / sqrt(variance + epsilon)``.
    """

    __props__ = ("axes", "epsilon")
    bfloat16_inputs = (0,)

    def __init__(self, axes: Sequence[int], epsilon: float):
        super().__init__(axes)
        self.epsilon = float(epsilon)

    def make_node(self, x: Any, scale: Any, shift: Any) -> Apply:
        """Return the node of an array, scale and shift, which have length 1 on the axes."""
        x, scale, shift = (pt.as_tensor_variable(v) for v in (x, scale, shift))
        if x.dtype not in ("float16", "float32", "float64"):
            x = x.astype("float64")
        dtype = upcast(x.dtype, scale.dtype, shift.dtype)
        scale, shift = (self._broadcast_parameter(x, v).astype(dtype) for v in (scale, shift))
        statistics = [TensorType(x.dtype, shape=self.get_statistics_shape(x.type.shape))() for _ in range(2)]
        return Apply(self, [x, scale, shift], [TensorType(dtype, shape=x.type.shape)(), *statistics])

    def _broadcast_parameter(self, x: Any, parameter: Any) -> Any:
        """Return scale or shift in the statistics' shape."""
        is_one = parameter.type.broadcastable
        if parameter.ndim != x.ndim or not all(is_one[a] for a in self.axes):
            raise TypeError(
                f"scale, shift: expected {x.ndim} dimensions, length 1 on {self.axes}, got {parameter.type}"
            )
        lengths = self.get_statistics_shape(x.type.shape)
        if any(one and n != 1 for one, n in zip(is_one, lengths, strict=True)):
            return pt.alloc(parameter, *self.get_statistics_shape(tuple(x.shape)))
        return parameter

    def connection_pattern(self, node: Any) -> list[list[bool]]:
        """Return the outputs that depend on each input: the statistics depend on x only."""
        return [[True, True, True], [True, False, False], [True, False, False]]

    def check_parameter_shapes(self, x: Any, *parameters: Any) -> None:
        """Raise ValueError for a scale or shift of another shape, which would be broadcast, with a wrong gradient."""
        expected = self.get_statistics_shape(x.shape)
        for parameter in parameters:
            if parameter.shape != expected:
                raise ValueError(f"scale, shift: expected shape {expected} for {x.shape}, got {parameter.shape}")

    def compute(self, x: np.ndarray, scale: np.ndarray, shift: np.ndarray) -> tuple[np.ndarray, ...]:
        """Compute the variance from centered values."""
        self.check_parameter_shapes(x, scale, shift)
        wide = x.astype(np.result_type(x, np.float32), copy=False)
        reference = self.select_reference(wide)
        shifted = wide - reference
        offset = shifted.mean(axis=self.axes, keepdims=True)
        centered = shifted - offset
        var = np.square(centered).mean(axis=self.axes, keepdims=True)
        invstd = 1 / np.sqrt(var + self.epsilon)
        return centered * (scale * invstd) + shift, reference + offset, invstd

    def pullback(self, inputs: Any, outputs: Any, output_grads: Any) -> list[Any]:
        """Return the gradients."""
        (x, scale, _), (_, mean, invstd) = inputs, outputs
        dy, *statistic_grads = (None if isinstance(g.type, DisconnectedType) else g for g in output_grads)
        dscale, dshift = disconnected_type(), disconnected_type()
        terms = []
        if dy is not None:
            dy = self.broadcast_gradient(dy, outputs[0])
            dx, dscale, dshift = BatchNormTrainGrad(self.axes)(x, dy, scale, mean, invstd)
            terms.append(dx)
        if statistic_grads[0] is not None:
            terms.append(pt.zeros_like(x) + statistic_grads[0] / _build_element_count(x, self.axes))
        if statistic_grads[1] is not None:
            terms.append((x - mean) * (-statistic_grads[1] * invstd**3 / _build_element_count(x, self.axes)))
        return [sum(terms[1:], terms[0]), dscale, dshift]


class BatchNormTrainGrad(_BatchNorm):
    """Gradient of `BatchNormTrain`: from x, dy, scale, mean and invstd to dx, dscale and dshift."""

    bfloat16_inputs = (0, 1)

    def make_node(self, x: Any, dy: Any, scale: Any, mean: Any, invstd: Any) -> Apply:
        """Return the node of the array, the output's gradient, the scale and the statistics."""
        inputs = [pt.as_tensor_variable(v) for v in (x, dy, scale, mean, invstd)]
        x, _, scale = inputs[:3]
        sums = [TensorType(scale.dtype, shape=self.get_statistics_shape(x.type.shape))() for _ in range(2)]
        return Apply(self, inputs, [x.type(), *sums])

    def compute_gradients(
        self, count: Any, x: Any, dy: Any, scale: Any, mean: Any, invstd: Any
    ) -> tuple[Any, Any, Any]:
        """Return dx, dscale and dshift, computed from NumPy arrays or from variables."""
        normalized = (x - mean) * invstd
        dshift = dy.sum(axis=self.axes, keepdims=True)
        dscale = (dy * normalized).sum(axis=self.axes, keepdims=True)
        return (scale * invstd) * (dy - (dshift + normalized * dscale) / count), dscale, dshift

    def compute(self, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        """Compute in float32 at least."""
        wide = np.result_type(*inputs, np.float32)
        x, *arguments = (v.astype(wide, copy=False) for v in inputs)
        return self.compute_gradients(self.count_elements(x.shape), x, *arguments)

    def pullback(self, inputs: Any, outputs: Any, output_grads: Any) -> list[Any]:
        """Return the gradients of the expression of `compute_gradients`."""
        # The inputs are copied, since one may depend on another.
        copies = x, *arguments = [v.copy() for v in inputs]
        gradients = self.compute_gradients(_build_element_count(x, self.axes), x, *arguments)
        pairs = zip(gradients, output_grads, strict=True)
        # They are copied again, since the gradient stops at variables in known_grads, but x's passes through both sums.
        known_grads = {v.copy(): g for v, g in pairs if not isinstance(g.type, DisconnectedType)}
        return list(grad(None, copies, known_grads=known_grads, disconnected_inputs="ignore"))


class RectifiedBatchNormTrainGrad(_BatchNorm):
    """The gradient of ``max(y, 0)``, where y is `BatchNormTrain`'s first output.  Its last input is the shift.

    Both passes read x anyway, and compute the sign of y from it.  They neither read the rectifier's output, nor write a
    gradient with zeros where y is negative.  Only JAX mode has this Op, so that NumPy need not compute it.
    """

    bfloat16_inputs = (0, 1)

    def make_node(self, x: Any, dy: Any, scale: Any, mean: Any, invstd: Any, shift: Any) -> Apply:
        """Return the node of `BatchNormTrainGrad`'s inputs and the shift."""
        node = BatchNormTrainGrad(self.axes).make_node(x, dy, scale, mean, invstd)
        return Apply(self, [*node.inputs, shift], [output.type() for output in node.outputs])


@node_rewriter([BatchNormTrainGrad])
def _rewrite_rectified_gradient(fgraph: Any, node: Any) -> list[Any] | None:
    """Replace the gradient of a normalization that a rectifier follows, unless others read the rectifier's gradient."""
    x, dy, scale, mean, invstd = node.inputs
    match = match_masked_gradient(dy.owner)
    if match is None or len(fgraph.clients[dy]) > 1:
        return None
    rectifier_node, g = match[0].owner, match[1]
    y = rectifier_node.inputs[0] if is_rectifier(rectifier_node) else None
    if y is None or y.owner is None or not isinstance(y.owner.op, BatchNormTrain):
        return None
    norm = y.owner
    if [*norm.inputs[:2], *norm.outputs] != [x, scale, y, mean, invstd] or norm.op.axes != node.op.axes:
        return None
    return RectifiedBatchNormTrainGrad(node.op.axes)(x, g, scale, mean, invstd, norm.inputs[2], return_list=True)


# This rewrite runs after the canonical form, which may replace the operands of the switch.
optdb.register(
    "rectified_gradient", in2out(_rewrite_rectified_gradient, name="rectified_gradient"), "jax", position=48.2
)


def _build_element_count(x: Any, axes: Sequence[int]) -> Any:
    """Return the number of elements of a sum over axes, as an expression in the dtype of x."""
    return pt.cast(pt.prod([x.shape[axis] for axis in axes]), x.dtype)


# -- XLA -----------------------------------------------------------------------------------------------------------


def _choose_sum_dtype(*arrays: Any) -> Any:
    """Return the dtype of sums: float64 if an array has it, else float32."""
    import jax.numpy as jnp

    return jnp.float64 if any(a.dtype == jnp.float64 for a in arrays) else jnp.float32


def _get_graph_dtype(array: Any) -> Any:
    """Return an array's dtype in the graph: `synkhronos.lowering.precision` passes float32 as bfloat16."""
    import jax.numpy as jnp

    return jnp.float32 if array.dtype == jnp.bfloat16 else array.dtype


@register_lowering(BatchNormTrain)
def _lower_batch_norm_train(op: BatchNormTrain, x: Any, scale: Any, shift: Any) -> Any:
    import jax.numpy as jnp

    op.check_parameter_shapes(x, scale, shift)
    x_wide = x.astype(_choose_sum_dtype(x))
    reference = op.select_reference(x_wide, jnp)
    shifted = x_wide - reference
    offset, mean_square = (s / op.count_elements(x.shape) for s in _sum_together(op, shifted, jnp.square(shifted)))
    var = jnp.maximum(mean_square - jnp.square(offset), 0)
    mean, invstd = offset + reference, 1 / jnp.sqrt(var + op.epsilon)
    y = (x_wide - mean) * (scale * invstd) + shift
    return y.astype(scale.dtype), mean.astype(_get_graph_dtype(x)), invstd.astype(_get_graph_dtype(x))


@register_lowering(BatchNormTrainGrad)
def _lower_batch_norm_train_grad(op: BatchNormTrainGrad, *inputs: Any) -> Any:
    wide = _choose_sum_dtype(*inputs)
    x, dy, *per_channel = (v.astype(wide) for v in inputs)
    sums = _compute_parameter_gradients(op, x, dy, per_channel)
    return _compute_gradients_from_sums(op, inputs, per_channel, sums, x, dy)


@register_lowering(RectifiedBatchNormTrainGrad)
def _lower_rectified_batch_norm_train_grad(op: RectifiedBatchNormTrainGrad, *inputs: Any) -> Any:
    import jax.numpy as jnp
    from jax import lax

    def mask_gradient(scale: Any, mean: Any, invstd: Any, shift: Any) -> Any:
        return jnp.where((x - mean) * (scale * invstd) + shift <= 0, np.zeros((), wide), dy)

    wide = _choose_sum_dtype(*inputs)
    x, dy, *per_channel = (v.astype(wide) for v in inputs)
    sums = _compute_parameter_gradients(op, x, mask_gradient(*per_channel), per_channel)
    # The barrier keeps XLA from computing the masked gradient only once, since it would write it to memory.
    per_channel, sums = lax.optimization_barrier((per_channel, sums))
    return _compute_gradients_from_sums(op, inputs, per_channel, sums, x, mask_gradient(*per_channel))


def _compute_parameter_gradients(op: _BatchNorm, x: Any, dy: Any, per_channel: Sequence[Any]) -> Sequence[Any]:
    """Return dscale and dshift.  ``per_channel`` starts with scale, mean and invstd."""
    _, mean, invstd, *_ = per_channel
    dscale, dshift = _sum_together(op, dy * (x - mean), dy)
    return dscale * invstd, dshift


def _sum_together(op: _BatchNorm, a: Any, b: Any) -> Sequence[Any]:
    """Return the sums of two arrays over the axes, which keep length 1."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    if jax.default_backend() != "gpu":
        return [v.sum(axis=op.axes, keepdims=True) for v in (a, b)]
    # One reduction computes both sums, since each reduction has a short last kernel.  On CPUs it would be slower, and
    # less accurate.
    zero = np.zeros((), a.dtype)
    sums = lax.reduce((a, b), (zero, zero), lambda x, y: (x[0] + y[0], x[1] + y[1]), op.axes)
    return [jnp.expand_dims(s, op.axes) for s in sums]


def _compute_gradients_from_sums(
    op: _BatchNorm, inputs: Sequence[Any], per_channel: Sequence[Any], sums: Sequence[Any], x: Any, dy: Any
) -> tuple[Any, Any, Any]:
    """Return dx, dscale and dshift in the dtypes of the graph.  ``sums`` are dscale and dshift."""
    (scale, mean, invstd, *_), (dscale, dshift) = per_channel, sums
    # The factors of a channel are multiplied first, so that two products remain for each element.
    dy_factor = scale * invstd
    centered_factor = -dy_factor * invstd * dscale / op.count_elements(x.shape)
    constant = -dy_factor * dshift / op.count_elements(x.shape)
    dx = dy_factor * dy + centered_factor * (x - mean) + constant
    return dx.astype(_get_graph_dtype(inputs[0])), dscale.astype(inputs[2].dtype), dshift.astype(inputs[2].dtype)
