"""Pooling over the last axes by maximum, sum or mean, and its gradients.

On one axis, and with ``x`` padded, ``y[i]`` is the maximum, sum or mean of the window
``x[i * stride : i * stride + window length]``.  The gradient of a maximum goes to all elements that equal it, as in
Theano.  An array has the shape (*leading axes, *input lengths), its pooled form (*leading axes, *output lengths).
`windows` explains windows, positions and elements.
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

MODES = ("max", "sum", "average_inc_pad", "average_exc_pad")
#: Maximal number of elements of a window for which the bits of an integer mark the maximal ones.
MAX_MARKED_ELEMENTS = 64


class _PoolingOp(NumpyOp):
    """Base class of pooling and its gradients.

    Parameters
    ----------
    window_lengths, strides, padding : tuple of int
        Lengths of a window, distances between windows, and padding on both sides, by axis.
    mode : {'max', 'sum', 'average_inc_pad', 'average_exc_pad'}
    ignore_border : bool
        Whether windows that extend over the edge are omitted.  Otherwise they have fewer elements.
    """

    __props__ = ("window_lengths", "strides", "padding", "mode", "ignore_border")

    def __init__(
        self,
        window_lengths: Sequence[int],
        strides: Sequence[int],
        padding: Sequence[int],
        mode: str,
        ignore_border: bool,
    ):
        self.window_lengths = tuple(int(n) for n in window_lengths)
        self.strides = tuple(int(n) for n in strides)
        self.padding = tuple(int(n) for n in padding)
        self.mode = mode
        self.ignore_border = bool(ignore_border)
        self.n_spatial = len(self.window_lengths)
        if mode not in MODES:
            raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
        n = self.n_spatial
        if min(self.window_lengths + self.strides) < 1 or len(self.strides) != n or len(self.padding) != n:
            raise ValueError(f"expected {n} windows, strides and pads, got {window_lengths}, {strides} and {padding}")
        if any(self.padding) and not ignore_border:
            raise NotImplementedError("pad: expected no padding without ignore_border=True")
        if any(p >= w for p, w in zip(self.padding, self.window_lengths, strict=True)):
            raise NotImplementedError("pad: expected less than the window")

    def _convert_to(self, op_class: type[_PoolingOp]) -> Any:
        """Return an Op of another class with the same settings."""
        return op_class(*(getattr(self, name) for name in self.__props__))

    def _as_inputs(self, *variables: Any) -> list[Any]:
        tensors = [pt.as_tensor_variable(v) for v in variables]
        if tensors[0].ndim < self.n_spatial:
            raise TypeError(f"pooling: expected at least {self.n_spatial} dimensions, got {tensors[0].type}")
        return tensors

    def compute_output_lengths(self, input_lengths: Sequence[Any]) -> tuple[Any, ...]:
        """Return the number of windows on each axis, as numbers or variables, or None where a length is None."""
        return tuple(None if n is None else self._count_windows(axis, n) for axis, n in enumerate(input_lengths))

    def _count_windows(self, axis: int, length: Any) -> Any:
        window_length, stride = self.window_lengths[axis], self.strides[axis]
        length = length + 2 * self.padding[axis]
        maximum = max if isinstance(length, int | np.integer) else pt.maximum
        if self.ignore_border:
            return maximum((length - window_length) // stride + 1, 0)
        if stride >= window_length:
            return (length - 1) // stride + 1
        return maximum((length - 1 - window_length) // stride + 1, 0) + 1

    def compute_padding(self, input_lengths: Sequence[int]) -> list[tuple[int, int]]:
        """Return the padding before and after each axis with which all windows are complete."""
        pairs = []
        for axis, n_windows in enumerate(self.compute_output_lengths(input_lengths)):
            padding = self.padding[axis]
            window_end = (n_windows - 1) * self.strides[axis] + self.window_lengths[axis]
            padding_after = window_end - padding - input_lengths[axis]
            pairs.append((padding, max(padding_after, padding if self.ignore_border else 0)))
        return pairs

    def compute_mean_divisors(self, input_lengths: Sequence[int], dtype: Any) -> np.ndarray:
        """Return the divisor of each window's sum in its mean: an array of the output lengths."""
        counts = []
        for axis, n_windows in enumerate(self.compute_output_lengths(input_lengths)):
            padding, length = self.padding[axis], input_lengths[axis]
            low, high = (-padding, length + padding) if self.mode == "average_inc_pad" else (0, length)
            starts = np.arange(n_windows) * self.strides[axis] - padding
            counts.append(np.minimum(starts + self.window_lengths[axis], high) - np.maximum(starts, low))
        return functools.reduce(np.multiply.outer, counts).astype(dtype)

    def iterate_position_slices(self, input_lengths: Sequence[int]) -> Any:
        """Yield, for each position in a window, the index of its elements in all windows of the padded array."""
        for _, slices in iterate_positions(
            self.window_lengths, self.compute_output_lengths(input_lengths), self.strides, (1,) * self.n_spatial
        ):
            yield (Ellipsis, *slices)

    def pad_array(self, x: Any, value: Any, array_module: Any = np) -> Any:
        """Return the array padded with a value."""
        padding = self.compute_padding(x.shape[-self.n_spatial :])
        if not any(map(any, padding)):
            return x
        return array_module.pad(x, [(0, 0)] * (x.ndim - self.n_spatial) + padding, constant_values=value)

    def get_unpadding_slices(self, input_lengths: Sequence[int]) -> tuple[Any, ...]:
        """Return the slices that remove the padding."""
        return (
            Ellipsis,
            *(slice(a, a + s) for s, (a, _) in zip(input_lengths, self.compute_padding(input_lengths), strict=True)),
        )


class Pool(_PoolingOp):
    """The maximum, the sum or the mean of each window of the last axes."""

    @property
    def bfloat16_inputs(self) -> tuple[int, ...]:
        """Positions of inputs that may be rounded; read by `synkhronos.lowering.precision`."""
        return (0,) if self.mode == "max" else ()

    def make_node(self, x: Any) -> Apply:
        """Return the node of an array."""
        (x,) = self._as_inputs(x)
        leading, input_lengths = x.type.shape[: -self.n_spatial], x.type.shape[-self.n_spatial :]
        return Apply(self, [x], [TensorType(x.dtype, shape=(*leading, *self.compute_output_lengths(input_lengths)))()])

    def compute_output_shape(self, x: Any) -> tuple[Any, ...]:
        """Return the output's shape."""
        return (*x[: -self.n_spatial], *self.compute_output_lengths(x[-self.n_spatial :]))

    def compute(self, x: np.ndarray) -> np.ndarray:
        """Reduce over the positions in a window."""
        input_lengths = x.shape[-self.n_spatial :]
        reduce_pair = np.maximum if self.mode == "max" else np.add
        padded = self.pad_array(x, _get_lowest_value(x.dtype) if self.mode == "max" else 0)
        result: Any = None
        for elements in self.iterate_position_slices(input_lengths):
            result = padded[elements].copy() if result is None else reduce_pair(result, padded[elements], out=result)
        if self.mode.startswith("average"):
            return result / self.compute_mean_divisors(input_lengths, x.dtype)
        return result

    def pullback(self, inputs: Any, outputs: Any, output_grads: Any) -> list[Any]:
        """Return the gradient with respect to the array."""
        (x,), g = inputs, self.broadcast_gradient(output_grads[0], outputs[0])
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
    """The gradient of sums and means.  Inputs: the output's gradient, and an array of the result's shape."""

    shape_input, dtype_input = 1, 0

    def connection_pattern(self, node: Any) -> list[list[bool]]:
        """Mark the second input as disconnected."""
        return [[True], [False]]

    def compute(self, g: np.ndarray, like: np.ndarray) -> np.ndarray:
        """Add each window's share to all of its elements."""
        input_lengths = like.shape[-self.n_spatial :]
        share = g / self.compute_mean_divisors(input_lengths, g.dtype) if self.mode.startswith("average") else g
        lengths = [a + s + b for s, (a, b) in zip(input_lengths, self.compute_padding(input_lengths), strict=True)]
        result = np.zeros((*like.shape[: -self.n_spatial], *lengths), g.dtype)
        for elements in self.iterate_position_slices(input_lengths):
            result[elements] += share
        return result[self.get_unpadding_slices(input_lengths)]

    def pullback(self, inputs: Any, outputs: Any, output_grads: Any) -> list[Any]:
        """Return the gradient with respect to the output's gradient: pooling."""
        return [self._convert_to(Pool)(output_grads[0]), disconnected_type()]


class MaxPoolGrad(_PoolingGrad):
    """The gradient of the maximum.  It goes to all elements of a window that equal the maximum.

    Inputs: the array, its windows' maxima, and the gradient of these.
    """

    shape_input, dtype_input = 0, 2

    #: One kernel writes the output; read by `synkhronos.lowering.precision`.
    is_single_kernel = True
    #: Positions of inputs that may be rounded; read by the same module.
    bfloat16_inputs = (0, 2)

    def compute(self, x: np.ndarray, maxima: np.ndarray, g: np.ndarray) -> np.ndarray:
        """Compare each position of the windows with the maxima."""
        padded = self.pad_array(x, _get_lowest_value(x.dtype))
        result = np.zeros(padded.shape, g.dtype)
        for elements in self.iterate_position_slices(x.shape[-self.n_spatial :]):
            result[elements] += np.where(padded[elements] == maxima, g, 0)
        return result[self.get_unpadding_slices(x.shape[-self.n_spatial :])]

    def pullback(self, inputs: Any, outputs: Any, output_grads: Any) -> list[Any]:
        """Return the gradient with respect to the maxima's gradient; array and maxima have none."""
        x, maxima, _ = inputs
        gradient = self._convert_to(MaxPoolGradGrad)(x, maxima, output_grads[0])
        return [pt.zeros_like(x), pt.zeros_like(maxima), gradient]


class MaxPoolGradGrad(_PoolingGrad):
    """The gradient of `MaxPoolGrad` with respect to its third input: sums of values where an array is maximal.

    Inputs: the array, its windows' maxima, and the values: an array of the shape of the first.
    """

    shape_input, dtype_input = 1, 2

    def compute(self, x: Any, maxima: Any, values: Any, array_module: Any = np) -> Any:
        """Compare each position of the windows with the maxima."""
        padded = self.pad_array(x, _get_lowest_value(x.dtype), array_module)
        padded_values = self.pad_array(values, 0, array_module)
        positions = self.iterate_position_slices(x.shape[-self.n_spatial :])
        return sum(array_module.where(padded[elements] == maxima, padded_values[elements], 0) for elements in positions)

    def pullback(self, inputs: Any, outputs: Any, output_grads: Any) -> list[Any]:
        """Return the gradient with respect to the array that is summed."""
        x, maxima, _ = inputs
        gradient = self._convert_to(MaxPoolGrad)(x, maxima, output_grads[0])
        return [pt.zeros_like(x), pt.zeros_like(maxima), gradient]


@node_rewriter([Elemwise])
def _rewrite_masked_pool_gradient(fgraph: Any, node: Any) -> list[Any] | None:
    """Mask the gradient of the maxima instead of the larger gradient of the array, if the array was rectified.

    An element that gets a gradient equals its window's maximum, so both or neither are positive.
    """
    if (match := match_masked_gradient(node)) is None:
        return None
    rectified, array_gradient = match
    pool_gradient = array_gradient.owner
    if pool_gradient is None or not isinstance(pool_gradient.op, MaxPoolGrad):
        return None
    x, maxima, g = pool_gradient.inputs
    if x is not rectified or len(fgraph.clients[array_gradient]) > 1:
        return None
    masked = pt.switch(pt.le(maxima, np.zeros((), maxima.dtype)), np.zeros((), g.dtype), g)
    return pool_gradient.op(x, maxima, masked, return_list=True)


# This rewrite runs after the canonical form, and before the rewrite of normalization.py, which would mask the array's
# gradient.
optdb.register(
    "masked_pool_gradient", in2out(_rewrite_masked_pool_gradient, name="masked_pool_gradient"), "jax", position=48.1
)


def _get_lowest_value(dtype: Any) -> Any:
    kind = np.dtype(dtype).kind  # that of JAX's bfloat16 is V
    return False if kind == "b" else np.iinfo(dtype).min if kind in "iu" else -np.inf


# -- XLA -----------------------------------------------------------------------------------------------------------


def _reduce_windows(op: _PoolingOp, x: Any, init_value: Any, reduce_pair: Any) -> Any:
    """Return the reduction of each window of an array by a function of ``lax``, with padding of ``init_value``."""
    from jax import lax

    n_leading = x.ndim - op.n_spatial
    padding = [(0, 0)] * n_leading + op.compute_padding(x.shape[n_leading:])
    ones = (1,) * n_leading
    return lax.reduce_window(x, init_value, reduce_pair, (*ones, *op.window_lengths), (*ones, *op.strides), padding)


def _max_pool_with_xla(op: _PoolingOp, x: Any) -> Any:
    from jax import lax

    return _reduce_windows(op, x, np.asarray(_get_lowest_value(x.dtype), x.dtype), lax.max)


def _marks_maxima(op: _PoolingOp) -> bool:
    """Whether `_compute_and_mark_maxima` is used.  XLA's CPU kernels for it would take longer than a comparison."""
    import jax

    return jax.default_backend() == "gpu" and math.prod(op.window_lengths) <= MAX_MARKED_ELEMENTS


def _compute_and_mark_maxima(op: _PoolingOp, x: Any) -> tuple[Any, Any]:
    """Return each window's maximum, and an integer whose bits mark the window's elements that equal the maximum.

    Bit i is that of position i of a window.  One kernel computes both results, and may compute the array itself.  The
    gradient reads the marks instead of the array.
    """
    import jax.numpy as jnp
    from jax import lax

    padded = op.pad_array(x, _get_lowest_value(x.dtype), jnp)
    maxima = marks = None
    for i, elements in enumerate(op.iterate_position_slices(x.shape[-op.n_spatial :])):
        values, mark = padded[elements], np.array(1 << i, np.min_scalar_type((1 << math.prod(op.window_lengths)) - 1))
        if maxima is None:
            maxima, marks = values, jnp.full(values.shape, mark)
        else:
            marks = jnp.where(values > maxima, mark, jnp.where(values == maxima, marks | mark, marks))
            maxima = jnp.maximum(maxima, values)
    marks = jnp.where(maxima == maxima, marks, 0)  # a maximum that is NaN equals no element
    # Without the barrier, XLA would fuse parts of this computation into the kernels that read its results.
    maxima, marks = lax.optimization_barrier((maxima, marks))
    return maxima, marks


@register_lowering(Pool)
def _lower_pool(op: Pool, x: Any) -> Any:
    from jax import lax

    if op.mode == "max" and _marks_maxima(op):
        return _compute_and_mark_maxima(op, x)[0]
    if op.mode == "max":
        # With this barrier the maxima equal the maxima of `_recompute_maxima`, and XLA computes them once.
        return _max_pool_with_xla(op, lax.optimization_barrier(x))
    sums = _reduce_windows(op, x, np.zeros((), x.dtype), lax.add)
    if op.mode == "sum":
        return sums
    return sums / op.compute_mean_divisors(x.shape[-op.n_spatial :], x.dtype)


@register_lowering(SumPoolGrad)
def _lower_sum_pool_grad(op: SumPoolGrad, g: Any, like: Any) -> Any:
    import jax
    from jax import lax

    if op.mode.startswith("average"):
        g = g / op.compute_mean_divisors(like.shape[-op.n_spatial :], g.dtype)
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
    The offsets from a block's number to the numbers of the windows are thus the same for all elements at one position
    of their blocks: here -1 and 0, or 0.  For each position and each offset, these elements are compared with one slice
    of the windows' maxima, whose length is the number of blocks.  Padding adds windows of gradient 0 at both ends.
    """
    import jax.numpy as jnp

    n_leading = x.ndim - op.n_spatial
    input_lengths = x.shape[n_leading:]
    has_marks = _marks_maxima(op)
    if has_marks:
        _, maxima_or_marks = _compute_and_mark_maxima(op, x)
    else:
        x, maxima_or_marks = _recompute_maxima(op, x)
    g = g.astype(jnp.promote_types(g.dtype, jnp.float32))  # an element's sum is rounded once
    axes = list(zip(op.window_lengths, op.strides, op.padding, strict=True))
    n_blocks = [-(-length // stride) for length, stride in zip(input_lengths, op.strides, strict=True)]
    n_before = [(window_length - 1 - padding) // stride for window_length, stride, padding in axes]
    n_after = [(stride - 1 + padding) // stride for _, stride, padding in axes]
    n_windows = [sum(counts) for counts in zip(n_before, n_blocks, n_after, strict=True)]
    # In a GPU's memory channels are the last axis.  If they were not the last one here, XLA would need several kernels.
    n_channel_axes = 1 if has_marks and n_leading else 0
    if n_channel_axes:
        maxima_or_marks, g = (jnp.moveaxis(v, n_leading - 1, -1) for v in (maxima_or_marks, g))
        n_before, n_blocks, n_windows = [*n_before, 0], [*n_blocks, g.shape[-1]], [*n_windows, g.shape[-1]]
    maxima_or_marks, g = (pad_zeros(v, n_before, n_windows) for v in (maxima_or_marks, g))
    if not has_marks:
        x = pad_zeros(x, [0] * op.n_spatial, [n * s for n, s in zip(n_blocks, op.strides, strict=True)])

    def compute_gradient(position: tuple[int, ...]) -> Any:
        """Return the gradient at one position of all blocks on the first axes, and at all positions on other axes."""
        if len(position) < op.n_spatial:
            parts = [compute_gradient((*position, i)) for i in range(op.strides[len(position)])]
            axis = n_leading - n_channel_axes + len(position)
            return jnp.stack(parts, axis + 1).reshape(*parts[0].shape[:axis], -1, *parts[0].shape[axis + 1 :])
        total = jnp.zeros((*x.shape[: n_leading - n_channel_axes], *n_blocks), g.dtype)
        offsets = [
            range((i + padding) // stride, (i + padding - window_length) // stride, -1)
            for i, (window_length, stride, padding) in zip(position, axes, strict=True)
        ]
        for offset in itertools.product(*offsets, *[(0,)] * n_channel_axes):
            starts = [before + k for before, k in zip(n_before, offset, strict=True)]
            windows = (Ellipsis, *(slice(start, start + n) for start, n in zip(starts, n_blocks, strict=True)))
            if has_marks:
                by_axis = zip(position, offset, axes, strict=False)  # the offset on the channels' axis is left out
                window_position = [i + padding - k * stride for i, k, (_, stride, padding) in by_axis]
                mark = maxima_or_marks.dtype.type(1 << int(np.ravel_multi_index(window_position, op.window_lengths)))
                is_maximal = maxima_or_marks[windows] & mark != 0
            else:
                elements = x[(Ellipsis, *(slice(i, None, s) for i, s in zip(position, op.strides, strict=True)))]
                is_maximal = elements == maxima_or_marks[windows]
            total = total + jnp.where(is_maximal, g[windows], 0)
        return total

    total = compute_gradient(())
    return (jnp.moveaxis(total, -1, n_leading - 1) if n_channel_axes else total)[(Ellipsis, *map(slice, input_lengths))]


@register_lowering(MaxPoolGradGrad)
def _lower_max_pool_grad_grad(op: MaxPoolGradGrad, x: Any, _: Any, values: Any) -> Any:
    import jax.numpy as jnp

    return op.compute(*_recompute_maxima(op, x), values, jnp)
