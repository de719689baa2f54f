"""Pooling over the last axes by maximum, sum or mean, and its gradients.

The gradient of a maximum goes to all elements that equal it, as in Theano.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import disconnected_type
from pytensor.graph.basic import Apply
from pytensor.tensor.type import TensorType

from synkhronos.compat.ops.windows import iterate_window_slices, pad_zeros
from synkhronos.lowering.numpy_op import NumpyOp, register_lowering

__all__ = ["MODES", "MaxPoolGrad", "MaxPoolGradGrad", "Pool", "SumPoolGrad"]

MODES = ("max", "sum", "average_inc_pad", "average_exc_pad")


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

    def compute_output_lengths(self, spatial: Sequence[Any]) -> tuple[Any, ...]:
        """Return the number of windows on each axis."""
        return tuple(self.compute_output_length(axis, length) for axis, length in enumerate(spatial))

    def compute_padding(self, spatial: Sequence[int]) -> list[tuple[int, int]]:
        """Return the padding before and after each axis with which all windows are complete."""
        pairs = []
        for axis, out in enumerate(self.compute_output_lengths(spatial)):
            padding_after = (out - 1) * self.stride[axis] + self.window[axis] - self.pad[axis] - spatial[axis]
            pairs.append((self.pad[axis], max(padding_after, self.pad[axis] if self.ignore_border else 0)))
        return pairs

    def count_window_elements(self, spatial: Sequence[int], dtype: Any) -> np.ndarray:
        """Return the number of elements by which each window's sum is divided for its mean."""
        per_axis = []
        for axis, (length, out) in enumerate(zip(spatial, self.compute_output_lengths(spatial), strict=True)):
            pad = self.pad[axis]
            low, high = (-pad, length + pad) if self.mode == "average_inc_pad" else (0, length)
            starts = np.arange(out) * self.stride[axis] - pad
            per_axis.append(np.minimum(starts + self.window[axis], high) - np.maximum(starts, low))
        return functools.reduce(np.multiply.outer, per_axis).astype(dtype)

    def iterate_windows(self, spatial: Sequence[int]) -> Any:
        """Yield the slices that select each position of all windows in the padded array."""
        for _, window in iterate_window_slices(
            self.window, self.compute_output_lengths(spatial), self.stride, (1,) * self.n_spatial
        ):
            yield (Ellipsis, *window)

    def add_padding(self, x: np.ndarray, value: Any) -> np.ndarray:
        """Return the array padded with a value."""
        padding = self.compute_padding(x.shape[-self.n_spatial :])
        if not any(map(any, padding)):
            return x
        return np.pad(x, [(0, 0)] * (x.ndim - self.n_spatial) + padding, constant_values=value)

    def get_crop(self, spatial: Sequence[int]) -> tuple[Any, ...]:
        """Return the slices that remove the padding."""
        return (Ellipsis, *(slice(a, a + s) for s, (a, _) in zip(spatial, self.compute_padding(spatial), strict=True)))


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
        lead, spatial = x.type.shape[: -self.n_spatial], x.type.shape[-self.n_spatial :]
        out = [None if s is None else int(self.compute_output_length(axis, s)) for axis, s in enumerate(spatial)]
        return Apply(self, [x], [TensorType(x.dtype, shape=(*lead, *out))()])

    def compute_output_shape(self, x: Any) -> tuple[Any, ...]:
        """Return the output's shape."""
        return (*x[: -self.n_spatial], *self.compute_output_lengths(x[-self.n_spatial :]))

    def compute(self, x: np.ndarray) -> np.ndarray:
        """Reduce over the positions in a window."""
        spatial = x.shape[-self.n_spatial :]
        combine = np.maximum if self.mode == "max" else np.add
        padded = self.add_padding(x, _get_lowest_value(x.dtype) if self.mode == "max" else 0)
        result: Any = None
        for window in self.iterate_windows(spatial):
            result = padded[window].copy() if result is None else combine(result, padded[window], out=result)
        return result / self.count_window_elements(spatial, x.dtype) if self.mode.startswith("average") else result

    def pullback(self, inputs: Any, outputs: Any, output_grads: Any) -> list[Any]:
        """Return the gradient by the array."""
        (x,), (g,) = inputs, output_grads
        return [
            self._convert_to(MaxPoolGrad)(x, outputs[0], g)
            if self.mode == "max"
            else self._convert_to(SumPoolGrad)(g, x)
        ]


class _PoolingGrad(_PoolingOp):
    """Base class of Ops whose output has one input's shape and another's dtype."""

    #: Positions of these inputs.
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
        spatial = like.shape[-self.n_spatial :]
        share = g / self.count_window_elements(spatial, g.dtype) if self.mode.startswith("average") else g
        lengths = [a + s + b for s, (a, b) in zip(spatial, self.compute_padding(spatial), strict=True)]
        result = np.zeros((*like.shape[: -self.n_spatial], *lengths), g.dtype)
        for window in self.iterate_windows(spatial):
            result[window] += share
        return result[self.get_crop(spatial)]

    def pullback(self, inputs: Any, outputs: Any, output_grads: Any) -> list[Any]:
        """Return the gradient by the output's gradient: pooling."""
        return [self._convert_to(Pool)(output_grads[0]), disconnected_type()]


class MaxPoolGrad(_PoolingGrad):
    """The gradient of the maximum, which goes to all elements of a window that equal it.

    Inputs: the array, the maxima, and their gradient.
    """

    shape_input, dtype_input = 0, 2

    #: One kernel writes the output; read by `synkhronos.lowering.precision`.
    is_elementwise = True
    #: Positions of inputs that may be rounded; read by the same module.
    bfloat16_inputs = (0, 2)

    def compute(self, x: np.ndarray, y: np.ndarray, g: np.ndarray) -> np.ndarray:
        """Compare each position of the windows with the maxima."""
        padded = self.add_padding(x, _get_lowest_value(x.dtype))
        result = np.zeros(padded.shape, g.dtype)
        for window in self.iterate_windows(x.shape[-self.n_spatial :]):
            result[window] += np.where(padded[window] == y, g, 0)
        return result[self.get_crop(x.shape[-self.n_spatial :])]

    def pullback(self, inputs: Any, outputs: Any, output_grads: Any) -> list[Any]:
        """Return the gradient by the maxima's gradient; array and maxima have none."""
        x, y, _ = inputs
        return [pt.zeros_like(x), pt.zeros_like(y), self._convert_to(MaxPoolGradGrad)(x, y, output_grads[0])]


class MaxPoolGradGrad(_PoolingGrad):
    """The gradient of `MaxPoolGrad` by its third input: each window's sum of values where another array is maximal.

    Inputs: the array, its maxima, and the array that is summed.
    """

    shape_input, dtype_input = 1, 2

    def compute(self, x: np.ndarray, y: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Compare each position of the windows with the maxima."""
        padded, picked = self.add_padding(x, _get_lowest_value(x.dtype)), self.add_padding(values, 0)
        result = np.zeros(y.shape, values.dtype)
        for window in self.iterate_windows(x.shape[-self.n_spatial :]):
            result += np.where(padded[window] == y, picked[window], 0)
        return result

    def pullback(self, inputs: Any, outputs: Any, output_grads: Any) -> list[Any]:
        """Return the gradient by the array that is summed."""
        x, y, _ = inputs
        return [pt.zeros_like(x), pt.zeros_like(y), self._convert_to(MaxPoolGrad)(x, y, output_grads[0])]


def _get_lowest_value(dtype: Any) -> Any:
    return np.iinfo(dtype).min if np.dtype(dtype).kind in "iub" else -np.inf  # of JAX's bfloat16 the kind is V


# -- XLA -----------------------------------------------------------------------------------------------------------


def _reduce_windows(op: _PoolingOp, x: Any, init_value: Any, computation: Any) -> Any:
    from jax import lax

    lead = x.ndim - op.n_spatial
    padding = [(0, 0)] * lead + op.compute_padding(x.shape[lead:])
    ones = (1,) * lead
    return lax.reduce_window(x, init_value, computation, (*ones, *op.window), (*ones, *op.stride), padding)


def _max_pool_with_xla(op: _PoolingOp, x: Any) -> Any:
    from jax import lax

    return _reduce_windows(op, x, np.asarray(_get_lowest_value(x.dtype), x.dtype), lax.max)


@register_lowering(Pool)
def _lower_pool(op: Pool, x: Any) -> Any:
    from jax import lax

    if op.mode == "max":
        # With this barrier the maxima are those of `_recompute_maxima`, and computed once.
        return _max_pool_with_xla(op, lax.optimization_barrier(x))
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
def _lower_max_pool_grad(op: MaxPoolGrad, x: Any, y: Any, g: Any) -> Any:
    import jax
    import jax.numpy as jnp

    spatial = x.shape[-op.n_spatial :]
    lead = x.ndim - op.n_spatial
    x, top = _recompute_maxima(op, x)
    g = g.astype(jnp.promote_types(g.dtype, jnp.float32))  # an element's sum is rounded once
    # The array is divided into blocks as long as a stride.  All elements at one position of their blocks are in equally
    # many windows, which begin in the same block or in an earlier one.
    blocks = [(pad + n - 1) // s + 1 for n, s, pad in zip(spatial, op.stride, op.pad, strict=True)]
    before = [(w - 1) // s for w, s in zip(op.window, op.stride, strict=True)]
    top, g = (pad_zeros(v, before, [n + b for n, b in zip(blocks, before, strict=True)]) for v in (top, g))
    crop = (Ellipsis, *(slice(p, p + n) for p, n in zip(op.pad, spatial, strict=True)))

    def get_windows(offset: Sequence[int]) -> tuple[Any, ...]:
        """Return the slices that select, for each block, the window that begins ``offset`` blocks earlier."""
        return (Ellipsis, *(slice(b - k, b - k + n) for b, k, n in zip(before, offset, blocks, strict=True)))

    def read_windows(v: Any, offset: Sequence[int]) -> Any:
        """Return the value of a window for each element."""
        v = v[get_windows(offset)]
        for axis, stride in enumerate(op.stride, start=lead):
            v = jnp.repeat(v, stride, axis)
        return v[crop]

    if jax.default_backend() == "gpu":
        # One kernel, which is faster than one for each position in a block.
        total = jnp.zeros(x.shape, g.dtype)
        for offset in itertools.product(*(range(b + 1) for b in before)):
            is_maximal = x == read_windows(top, offset)
            for axis, (k, w, s, n) in enumerate(zip(offset, op.window, op.stride, spatial, strict=True)):
                is_in_window = (np.arange(n) + op.pad[axis]) % s < w - k * s
                if not is_in_window.all():
                    is_maximal &= is_in_window.reshape(-1, *[1] * (op.n_spatial - axis - 1))
            total += jnp.where(is_maximal, read_windows(g, offset), 0)
        return total

    # XLA ignores the barrier on the CPU, where it would compute the array again in that kernel.
    x = pad_zeros(x, op.pad, [n * s for n, s in zip(blocks, op.stride, strict=True)])

    def gather_position(position: tuple[int, ...]) -> Any:
        """Return the gradient at one position of all blocks, and at all positions on further axes."""
        axis = len(position)
        if axis < op.n_spatial:
            parts = jnp.stack([gather_position((*position, i)) for i in range(op.stride[axis])], lead + axis + 1)
            return parts.reshape(*parts.shape[: lead + axis], -1, *parts.shape[lead + axis + 2 :])
        values = x[(Ellipsis, *(slice(i, None, s) for i, s in zip(position, op.stride, strict=True)))]
        total = jnp.zeros(values.shape, g.dtype)
        offsets = [range(-(-(w - i) // s)) for i, w, s in zip(position, op.window, op.stride, strict=True)]
        for windows in map(get_windows, itertools.product(*offsets)):
            total = total + jnp.where(values == top[windows], g[windows], 0)
        return total

    return gather_position(())[crop]


@register_lowering(MaxPoolGradGrad)
def _lower_max_pool_grad_grad(op: MaxPoolGradGrad, x: Any, y: Any, values: Any) -> Any:
    import jax.numpy as jnp

    x, top = _recompute_maxima(op, x)
    padding = [(0, 0)] * (x.ndim - op.n_spatial) + op.compute_padding(x.shape[-op.n_spatial :])
    padded, picked = jnp.pad(x, padding, constant_values=_get_lowest_value(x.dtype)), jnp.pad(values, padding)
    return sum(
        jnp.where(padded[window] == top, picked[window], 0) for window in op.iterate_windows(x.shape[-op.n_spatial :])
    )
