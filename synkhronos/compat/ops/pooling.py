"""Pooling over the last axes by maximum, sum or mean, and its gradients.

The gradient of a maximum goes to all elements that equal it, as in Theano.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.mode import optdb
from pytensor.gradient import disconnected_type
from pytensor.graph.basic import Apply
from pytensor.graph.rewriting.basic import in2out, node_rewriter
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.type import TensorType

from synkhronos.compat.ops.rectifier import match_masked_gradient
from synkhronos.compat.ops.windows import iterate_positions, pad_zeros
from synkhronos.lowering.numpy_op import NumpyOp, register_lowering

__all__ = ["MODES", "MaxPoolGrad", "MaxPoolGradGrad", "Pool", "SumPoolGrad"]

MODES = ("max", "sum", "average_inc_pad", "average_exc_pad")
#: Largest number of elements of a window whose maxima are marked in an integer.
MAX_BITS = 64


class _PoolingOp(NumpyOp):
    """Base class of pooling and its gradients.

    Parameters
    ----------
    window, stride, pad : tuple of int
        Lengths of a window, distances between windows, and padding on both sides, by axis.
    mode : {'max', 'sum', 'average_inc_pad', 'average_exc_pad'}
    ignore_border : bool
        Whether windows that extend over the edge are omitted.
    """

    __props__ = ("window", "stride", "pad", "mode", "ignore_border")

    def __init__(
        self, window: Sequence[int], stride: Sequence[int], pad: Sequence[int], mode: str, ignore_border: bool
    ):
        self.window = tuple(int(n) for n in window)
        self.stride = tuple(int(n) for n in stride)
        self.pad = tuple(int(n) for n in pad)
        self.mode = mode
        self.ignore_border = bool(ignore_border)
        self.n_spatial = len(self.window)
        if mode not in MODES:
            raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
        if min(self.window + self.stride) < 1 or len(self.stride) != self.n_spatial or len(self.pad) != self.n_spatial:
            raise ValueError(f"expected {self.n_spatial} windows, strides and pads, got {window}, {stride} and {pad}")
        if any(self.pad) and not ignore_border:
            raise NotImplementedError("pad: expected no padding without ignore_border=True")
        if any(p >= w for p, w in zip(self.pad, self.window, strict=True)):
            raise NotImplementedError("pad: expected less than the window")

    def _convert_to(self, op_class: type[_PoolingOp]) -> Any:
        return op_class(self.window, self.stride, self.pad, self.mode, self.ignore_border)

    def _as_inputs(self, *variables: Any) -> list[Any]:
        tensors = [pt.as_tensor_variable(v) for v in variables]
        if tensors[0].ndim < self.n_spatial:
            raise TypeError(f"pooling: expected at least {self.n_spatial} dimensions, got {tensors[0].type}")
        return tensors

    def compute_output_length(self, axis: int, length: Any) -> Any:
        """Return the number of windows on an axis, for a number or a variable."""
        window, stride = self.window[axis], self.stride[axis]
        length = length + 2 * self.pad[axis]
        largest = max if isinstance(length, int | np.integer) else pt.maximum
        if self.ignore_border:
            return largest((length - window) // stride + 1, 0)
        if stride >= window:
            return (length - 1) // stride + 1
        return largest((length - 1 - window) // stride + 1, 0) + 1

    def compute_output_lengths(self, spatial_shape: Sequence[Any]) -> tuple[Any, ...]:
        """Return the number of windows on each axis."""
        return tuple(self.compute_output_length(axis, length) for axis, length in enumerate(spatial_shape))

    def compute_padding(self, spatial_shape: Sequence[int]) -> list[tuple[int, int]]:
        """Return the padding before and after each axis with which all windows are complete."""
        pairs = []
        for axis, out in enumerate(self.compute_output_lengths(spatial_shape)):
            padding_after = (out - 1) * self.stride[axis] + self.window[axis] - self.pad[axis] - spatial_shape[axis]
            pairs.append((self.pad[axis], max(padding_after, self.pad[axis] if self.ignore_border else 0)))
        return pairs

    def count_window_elements(self, spatial_shape: Sequence[int], dtype: Any) -> np.ndarray:
        """Return the number of elements by which each window's sum is divided for its mean."""
        per_axis = []
        for axis, (length, out) in enumerate(
            zip(spatial_shape, self.compute_output_lengths(spatial_shape), strict=True)
        ):
            pad = self.pad[axis]
            low, high = (-pad, length + pad) if self.mode == "average_inc_pad" else (0, length)
            starts = np.arange(out) * self.stride[axis] - pad
            per_axis.append(np.minimum(starts + self.window[axis], high) - np.maximum(starts, low))
        return functools.reduce(np.multiply.outer, per_axis).astype(dtype)

    def iterate_position_slices(self, spatial_shape: Sequence[int]) -> Any:
        """Yield, for each position in a window, the index of its elements in all windows of the padded array."""
        for _, slices in iterate_positions(
            self.window, self.compute_output_lengths(spatial_shape), self.stride, (1,) * self.n_spatial
        ):
            yield (Ellipsis, *slices)

    def add_padding(self, x: Any, value: Any, array_module: Any = np) -> Any:
        """Return the array padded with a value."""
        padding = self.compute_padding(x.shape[-self.n_spatial :])
        if not any(map(any, padding)):
            return x
        return array_module.pad(x, [(0, 0)] * (x.ndim - self.n_spatial) + padding, constant_values=value)

    def get_crop(self, spatial_shape: Sequence[int]) -> tuple[Any, ...]:
        """Return the slices that remove the padding."""
        return (
            Ellipsis,
            *(slice(a, a + s) for s, (a, _) in zip(spatial_shape, self.compute_padding(spatial_shape), strict=True)),
        )


class Pool(_PoolingOp):
    """The maximum, the sum or the mean of each window of the last axes.

    Examples
    --------
    >>> Pool((2, 2), (2, 2), (0, 0), "max", True)(pt.tensor4("x")).ndim
    4
    """

    @property
    def bfloat16_inputs(self) -> tuple[int, ...]:
        """Positions of inputs that may be rounded; read by `synkhronos.lowering.precision`."""
        return (0,) if self.mode == "max" else ()

    def make_node(self, x: Any) -> Apply:
        """Return the node of an array."""
        (x,) = self._as_inputs(x)
        leading, spatial_shape = x.type.shape[: -self.n_spatial], x.type.shape[-self.n_spatial :]
        out = [None if s is None else int(self.compute_output_length(axis, s)) for axis, s in enumerate(spatial_shape)]
        return Apply(self, [x], [TensorType(x.dtype, shape=(*leading, *out))()])

    def compute_output_shape(self, x: Any) -> tuple[Any, ...]:
        """Return the output's shape."""
        return (*x[: -self.n_spatial], *self.compute_output_lengths(x[-self.n_spatial :]))

    def compute(self, x: np.ndarray) -> np.ndarray:
        """Reduce over the positions in a window."""
        spatial_shape = x.shape[-self.n_spatial :]
        combine = np.maximum if self.mode == "max" else np.add
        padded = self.add_padding(x, _get_lowest_value(x.dtype) if self.mode == "max" else 0)
        result: Any = None
        for elements in self.iterate_position_slices(spatial_shape):
            result = padded[elements].copy() if result is None else combine(result, padded[elements], out=result)
        return (
            result / self.count_window_elements(spatial_shape, x.dtype) if self.mode.startswith("average") else result
        )

    def pullback(self, inputs: Any, outputs: Any, output_grads: Any) -> list[Any]:
        """Return the gradient with respect to the array."""
        (x,), (g,) = inputs, output_grads
        return [
            self._convert_to(MaxPoolGrad)(x, outputs[0], g)
            if self.mode == "max"
            else self._convert_to(SumPoolGrad)(g, x)
        ]


class _PoolingGrad(_PoolingOp):
    """Base class of Ops whose output has one input's shape and another's dtype."""

    #: Positions of the inputs that have the output's shape and dtype.
    shape_input: int
    dtype_input: int

    def make_node(self, *inputs: Any) -> Apply:
        """Return the node of the inputs."""
        tensors = self._as_inputs(*inputs)
        output = TensorType(tensors[self.dtype_input].dtype, shape=tensors[self.shape_input].type.shape)()
        return Apply(self, tensors, [output])

    def compute_output_shape(self, *shapes: Any) -> tuple[Any, ...]:
        """Return the shape of an input."""
        return tuple(shapes[self.shape_input])


class SumPoolGrad(_PoolingGrad):
    """The gradient of sums and means; inputs: the output's gradient, and an array of the result's shape."""

    shape_input, dtype_input = 1, 0

    def connection_pattern(self, node: Any) -> list[list[bool]]:
        """Mark the second input as disconnected."""
        return [[True], [False]]

    def compute(self, g: np.ndarray, like: np.ndarray) -> np.ndarray:
        """Add each window's share to all of its elements."""
        spatial_shape = like.shape[-self.n_spatial :]
        share = g / self.count_window_elements(spatial_shape, g.dtype) if self.mode.startswith("average") else g
        lengths = [a + s + b for s, (a, b) in zip(spatial_shape, self.compute_padding(spatial_shape), strict=True)]
        result = np.zeros((*like.shape[: -self.n_spatial], *lengths), g.dtype)
        for elements in self.iterate_position_slices(spatial_shape):
            result[elements] += share
        return result[self.get_crop(spatial_shape)]

    def pullback(self, inputs: Any, outputs: Any, output_grads: Any) -> list[Any]:
        """Return the gradient with respect to the output's gradient: pooling."""
        return [self._convert_to(Pool)(output_grads[0]), disconnected_type()]


class MaxPoolGrad(_PoolingGrad):
    """The gradient of the maximum, which goes to all elements of a window that equal it.

    Inputs: the array, the maxima, and their gradient.
    """

    shape_input, dtype_input = 0, 2

    #: One kernel writes the output; read by `synkhronos.lowering.precision`.
    is_single_kernel = True
    #: Positions of inputs that may be rounded; read by the same module.
    bfloat16_inputs = (0, 2)

    def compute(self, x: np.ndarray, y: np.ndarray, g: np.ndarray) -> np.ndarray:
        """Compare each position of the windows with the maxima."""
        padded = self.add_padding(x, _get_lowest_value(x.dtype))
        result = np.zeros(padded.shape, g.dtype)
        for elements in self.iterate_position_slices(x.shape[-self.n_spatial :]):
            result[elements] += np.where(padded[elements] == y, g, 0)
        return result[self.get_crop(x.shape[-self.n_spatial :])]

    def pullback(self, inputs: Any, outputs: Any, output_grads: Any) -> list[Any]:
        """Return the gradient with respect to the maxima's gradient; array and maxima have none."""
        x, y, _ = inputs
        return [pt.zeros_like(x), pt.zeros_like(y), self._convert_to(MaxPoolGradGrad)(x, y, output_grads[0])]


class MaxPoolGradGrad(_PoolingGrad):
    """The gradient of `MaxPoolGrad` with respect to its third input: sums of values where an array is maximal.

    Inputs: the array, its maxima, and the array that is summed.
    """

    shape_input, dtype_input = 1, 2

    def compute(self, x: Any, y: Any, values: Any, array_module: Any = np) -> Any:
        """Compare each position of the windows with the maxima."""
        padded = self.add_padding(x, _get_lowest_value(x.dtype), array_module)
        addends = self.add_padding(values, 0, array_module)
        positions = self.iterate_position_slices(x.shape[-self.n_spatial :])
        return sum(array_module.where(padded[elements] == y, addends[elements], 0) for elements in positions)

    def pullback(self, inputs: Any, outputs: Any, output_grads: Any) -> list[Any]:
        """Return the gradient with respect to the array that is summed."""
        x, y, _ = inputs
        return [pt.zeros_like(x), pt.zeros_like(y), self._convert_to(MaxPoolGrad)(x, y, output_grads[0])]


@node_rewriter([Elemwise])
def _mask_before_pooling(fgraph: Any, node: Any) -> list[Any] | None:
    """Mask the gradient of the maxima instead of the larger gradient of the array, if the array was rectified.

    An element that gets a gradient equals its window's maximum, so both or neither are positive.
    """
    if (parts := match_masked_gradient(node)) is None:
        return None
    y, array_gradient = parts
    pool = array_gradient.owner
    if pool is None or not isinstance(pool.op, MaxPoolGrad) or len(fgraph.clients[array_gradient]) > 1:
        return None
    x, maxima, g = pool.inputs
    if x is not y:
        return None
    masked = pt.switch(pt.le(maxima, np.zeros((), maxima.dtype)), np.zeros((), g.dtype), g)
    return pool.op(x, maxima, masked, return_list=True)


# This rewrite runs after the canonical form, and before the rewrite of normalization.py, which would mask the array's
# gradient.
optdb.register("mask_before_pooling", in2out(_mask_before_pooling, name="mask_before_pooling"), "jax", position=48.1)


def _get_lowest_value(dtype: Any) -> Any:
    return np.iinfo(dtype).min if np.dtype(dtype).kind in "iub" else -np.inf  # the kind of JAX's bfloat16 is V


# -- XLA -----------------------------------------------------------------------------------------------------------


def _reduce_windows(op: _PoolingOp, x: Any, init_value: Any, computation: Any) -> Any:
    from jax import lax

    n_leading = x.ndim - op.n_spatial
    padding = [(0, 0)] * n_leading + op.compute_padding(x.shape[n_leading:])
    ones = (1,) * n_leading
    return lax.reduce_window(x, init_value, computation, (*ones, *op.window), (*ones, *op.stride), padding)


def _max_pool_with_xla(op: _PoolingOp, x: Any) -> Any:
    from jax import lax

    return _reduce_windows(op, x, np.asarray(_get_lowest_value(x.dtype), x.dtype), lax.max)


def _uses_bits(op: _PoolingOp) -> bool:
    """Whether maxima are found by `_find_maxima`, on GPUs: XLA's CPU kernels would take longer."""
    import jax

    return jax.default_backend() == "gpu" and math.prod(op.window) <= MAX_BITS


def _find_maxima(op: _PoolingOp, x: Any) -> tuple[Any, Any]:
    """Return each window's maximum, and integers whose bits mark the elements of the window that equal it.

    One kernel computes both, and may compute the array itself.  The gradient reads the bits instead of the array.
    """
    import jax.numpy as jnp
    from jax import lax

    padded = op.add_padding(x, _get_lowest_value(x.dtype), jnp)
    maxima = bits = None
    for i, elements in enumerate(op.iterate_position_slices(x.shape[-op.n_spatial :])):
        values, bit = padded[elements], np.array(1 << i, np.min_scalar_type((1 << math.prod(op.window)) - 1))
        if maxima is None:
            maxima, bits = values, jnp.full(values.shape, bit)
        else:
            bits = jnp.where(values > maxima, bit, jnp.where(values == maxima, bits | bit, bits))
            maxima = jnp.maximum(maxima, values)
    bits = jnp.where(maxima == maxima, bits, 0)  # a maximum that is NaN equals no element
    # Without the barrier XLA would fuse parts of this into the kernels that read it, and the rest into another one.
    maxima, bits = lax.optimization_barrier((maxima, bits))
    return maxima, bits


@register_lowering(Pool)
def _lower_pool(op: Pool, x: Any) -> Any:
    from jax import lax

    if op.mode == "max":
        # With this barrier the maxima equal the maxima of `_recompute_maxima`, and XLA computes them once.
        return _find_maxima(op, x)[0] if _uses_bits(op) else _max_pool_with_xla(op, lax.optimization_barrier(x))
    sums = _reduce_windows(op, x, np.zeros((), x.dtype), lax.add)
    return sums / op.count_window_elements(x.shape[-op.n_spatial :], x.dtype) if op.mode.startswith("average") else sums


@register_lowering(SumPoolGrad)
def _lower_sum_pool_grad(op: SumPoolGrad, g: Any, like: Any) -> Any:
    import jax
    from jax import lax

    if op.mode.startswith("average"):
        g = g / op.count_window_elements(like.shape[-op.n_spatial :], g.dtype)
    shape = jax.ShapeDtypeStruct(like.shape, g.dtype)
    # JAX can transpose reduce_window for lax.add only.
    (result,) = jax.linear_transpose(lambda x: _reduce_windows(op, x, 0.0, lax.add), shape)(g)
    return result


def _recompute_maxima(op: _PoolingOp, x: Any) -> tuple[Any, Any]:
    """Return the array, and its windows' maxima computed from it again.

    The barrier keeps XLA from computing the array twice: the two could be rounded differently, so that no element would
    equal the maximum.
    """
    from jax import lax

    x = lax.optimization_barrier(x)
    return x, _max_pool_with_xla(op, x)


@register_lowering(MaxPoolGrad)
def _lower_max_pool_grad(op: MaxPoolGrad, x: Any, _: Any, g: Any) -> Any:
    """Compute the gradient of each element as a sum over the windows that contain it.

    The array is divided into blocks as long as a stride.  On one axis, with windows of 3 elements and a stride of 2::

        block       |   0   |   1   |   2   |
        position    | 0   1 | 0   1 | 0   1 |
        window 0    [-----------]
        window 1            [-----------]
        window 2                    [-----------]

    An element at position 0 of block k is in the windows k - 1 and k.  An element at position 1 is only in window k.
    So all elements at one position of their blocks have the same offsets from their block's number to the numbers of
    their windows: here -1 and 0, or 0.  For each position and each offset, these elements are compared with one slice
    of the windows' maxima, whose length is the number of blocks.  Padding adds windows of gradient 0 at both ends.
    """
    import jax.numpy as jnp

    n_leading = x.ndim - op.n_spatial
    spatial_shape = x.shape[n_leading:]
    uses_bits = _uses_bits(op)
    if uses_bits:
        _, maxima_or_bits = _find_maxima(op, x)
    else:
        x, maxima_or_bits = _recompute_maxima(op, x)
    g = g.astype(jnp.promote_types(g.dtype, jnp.float32))  # an element's sum is rounded once
    geometry = list(zip(op.window, op.stride, op.pad, strict=True))
    n_blocks = [-(-length // stride) for length, stride in zip(spatial_shape, op.stride, strict=True)]
    n_before = [(window - 1 - pad) // stride for window, stride, pad in geometry]
    n_after = [(stride - 1 + pad) // stride for _, stride, pad in geometry]
    n_windows = [sum(counts) for counts in zip(n_before, n_blocks, n_after, strict=True)]
    # In a GPU's memory channels are the last axis.  If they were not the last one here, XLA would need several kernels.
    n_channel_axes = 1 if uses_bits and n_leading else 0
    if n_channel_axes:
        maxima_or_bits, g = (jnp.moveaxis(v, n_leading - 1, -1) for v in (maxima_or_bits, g))
        n_before, n_blocks, n_windows = [*n_before, 0], [*n_blocks, g.shape[-1]], [*n_windows, g.shape[-1]]
    maxima_or_bits, g = (pad_zeros(v, n_before, n_windows) for v in (maxima_or_bits, g))
    if not uses_bits:
        x = pad_zeros(x, [0] * op.n_spatial, [n * s for n, s in zip(n_blocks, op.stride, strict=True)])

    def compute_gradient(position: tuple[int, ...]) -> Any:
        """Return the gradient at one position of all blocks, and at all positions on further axes."""
        if len(position) < op.n_spatial:
            parts = [compute_gradient((*position, i)) for i in range(op.stride[len(position)])]
            axis = n_leading - n_channel_axes + len(position)
            return jnp.stack(parts, axis + 1).reshape(*parts[0].shape[:axis], -1, *parts[0].shape[axis + 1 :])
        total = jnp.zeros((*x.shape[: n_leading - n_channel_axes], *n_blocks), g.dtype)
        offsets = [
            range((i + pad) // stride, (i + pad - window) // stride, -1)
            for i, (window, stride, pad) in zip(position, geometry, strict=True)
        ]
        for offset in itertools.product(*offsets, *[(0,)] * n_channel_axes):
            starts = [before + k for before, k in zip(n_before, offset, strict=True)]
            windows = (Ellipsis, *(slice(start, start + n) for start, n in zip(starts, n_blocks, strict=True)))
            if uses_bits:
                places = zip(position, offset, geometry, strict=False)  # the offset on the channels' axis is left out
                in_window = [i + pad - k * stride for i, k, (_, stride, pad) in places]
                bit = maxima_or_bits.dtype.type(1 << int(np.ravel_multi_index(in_window, op.window)))
                is_maximal = maxima_or_bits[windows] & bit != 0
            else:
                elements = x[(Ellipsis, *(slice(i, None, s) for i, s in zip(position, op.stride, strict=True)))]
                is_maximal = elements == maxima_or_bits[windows]
            total = total + jnp.where(is_maximal, g[windows], 0)
        return total

    total = compute_gradient(())
    return (jnp.moveaxis(total, -1, n_leading - 1) if n_channel_axes else total)[(Ellipsis, *map(slice, spatial_shape))]


@register_lowering(MaxPoolGradGrad)
def _lower_max_pool_grad_grad(op: MaxPoolGradGrad, x: Any, _: Any, values: Any) -> Any:
    import jax.numpy as jnp

    return op.compute(*_recompute_maxima(op, x), values, jnp)
