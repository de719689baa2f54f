"""Convolution over one to three axes, and its two gradients.

Each of the three Ops is linear in both of its arguments, and the gradients of each are the other two.  Arrays have
Theano's layout: (batch, channel, *spatial) and (output channel, input channel, *spatial).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import disconnected_type
from pytensor.graph.basic import Apply
from pytensor.tensor.type import TensorType

from synkhronos.compat.ops.base import NumpyOp, register_lowering
from synkhronos.compat.ops.windows import fold, unfold, zeros_around

__all__ = ["Conv", "ConvGradInputs", "ConvGradWeights", "Padding", "output_length", "pads"]

#: "valid", "full", "half", or what is put before and behind each axis.
Padding = str | tuple[tuple[int, int], ...]

#: Columns of at most this many bytes are made at a time.
_COLUMN_BYTES = 2**25
#: Number of channels up to which a GPU is used badly.
_FEW = 4


def pads(padding: Padding, kernel: Sequence[int], dilation: Sequence[int]) -> list[tuple[Any, Any]]:
    """Return what is put before and behind each axis.

    Examples
    --------
    >>> pads("half", (3, 5), (1, 1))
    [(1, 1), (2, 2)]
    """
    reach = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
    if padding == "valid":
        return [(0, 0) for _ in reach]
    if padding == "full":
        return [(r, r) for r in reach]
    if padding == "half":
        return [((r + 1) // 2, (r + 1) // 2) for r in reach]
    if isinstance(padding, str):
        raise ValueError(f"padding {padding!r} is none of 'valid', 'full' and 'half'")
    return list(padding)


def output_length(length: Any, kernel: Any, pad: tuple[Any, Any], stride: int, dilation: int) -> Any:
    """Return the number of windows on an axis.

    Examples
    --------
    >>> output_length(7, 3, (1, 1), 2, 1)
    4
    """
    return (length + pad[0] + pad[1] - (kernel - 1) * dilation - 1) // stride + 1


class _ConvolutionOp(NumpyOp):
    """Base class of the convolution and its two gradients.

    Parameters
    ----------
    n : int
        Number of spatial axes.
    padding : Padding
    stride, dilation : tuple of int
        Of the windows, and within one.
    flip : bool
        Whether the filters are turned around, as in mathematics, or not, as in most programs of today.
    groups : int
        Into how many the channels are split; each output channel sees one of them.
    """

    __props__ = ("n", "padding", "stride", "dilation", "flip", "groups")
    #: The first two inputs are factors of products that are summed; `synkhronos.lowering.precision` asks.
    multiplies = True

    def __init__(
        self,
        n: int,
        padding: Padding = "valid",
        stride: Sequence[int] | None = None,
        dilation: Sequence[int] | None = None,
        flip: bool = True,
        groups: int = 1,
    ):
        self.n = n
        self.padding = padding
        self.stride = tuple(int(s) for s in stride or (1,) * n)
        self.dilation = tuple(int(d) for d in dilation or (1,) * n)
        self.flip = bool(flip)
        self.groups = int(groups)
        if len(self.stride) != n or len(self.dilation) != n:
            raise ValueError(f"{n} strides and dilations are needed, not {self.stride} and {self.dilation}")

    def _like(self, op: type[_ConvolutionOp]) -> Any:
        return op(self.n, self.padding, self.stride, self.dilation, self.flip, self.groups)

    def _arguments(self, *variables: Any) -> list[Any]:
        """Return the inputs as variables of one dtype and of the right number of dimensions."""
        tensors = [pt.as_tensor_variable(v) for v in variables]
        for tensor in tensors:
            if tensor.ndim != self.n + 2:
                raise TypeError(f"{type(self).__name__} needs arrays of {self.n + 2} dimensions, not {tensor.type}")
        dtype = np.result_type(*(t.dtype for t in tensors[:2]))
        if not np.issubdtype(dtype, np.floating):
            dtype = np.dtype("float64")
        return [t.astype(dtype.name) for t in tensors[:2]] + tensors[2:]

    def _output(self, first: Any, *shape: Any) -> Any:
        return TensorType(first.dtype, shape=tuple(s if isinstance(s, int) else None for s in shape))()

    def pads(self, kernel: Sequence[int]) -> list[tuple[Any, Any]]:
        """Return what is put around each axis."""
        return pads(self.padding, kernel, self.dilation)

    def out_spatial(self, image: Sequence[Any], kernel: Sequence[Any]) -> list[Any]:
        """Return the output's spatial lengths for numbers or variables; None where one of the two is None."""
        around = self.pads([1 if k is None else k for k in kernel])
        sizes = zip(image, kernel, around, self.stride, self.dilation, strict=True)
        return [None if s is None or k is None else output_length(s, k, a, n, d) for s, k, a, n, d in sizes]

    def _columns(self, padded: np.ndarray, kernel: Sequence[int], out: Sequence[int]) -> np.ndarray:
        """Return (batch, groups, channels of a group * kernel, *out)."""
        columns = unfold(padded, kernel, out, self.stride, self.dilation)
        batch, channels = columns.shape[:2]
        return columns.reshape(batch, self.groups, channels // self.groups * int(np.prod(kernel)), int(np.prod(out)))

    def _turned(self, weights: np.ndarray) -> np.ndarray:
        """Return filters as they are multiplied, or what is computed so as filters."""
        return np.flip(weights, tuple(range(2, self.n + 2))) if self.flip else weights

    def _matrix(self, weights: np.ndarray) -> np.ndarray:
        """Return the filters as (groups, outputs of a group, channels of a group * kernel)."""
        weights = self._turned(weights)
        return weights.reshape(self.groups, weights.shape[0] // self.groups, -1)

    def _batches(self, images: np.ndarray, kernel: Sequence[int], out: Sequence[int]) -> list[slice]:
        """Return parts of the batch, so that one part's columns stay small."""
        row = images.shape[1] * int(np.prod(kernel)) * int(np.prod(out)) * images.itemsize
        step = max(1, _COLUMN_BYTES // max(1, row))
        return [slice(i, i + step) for i in range(0, images.shape[0], step)]

    def _padded(self, images: np.ndarray, kernel: Sequence[int]) -> np.ndarray:
        around = self.pads(kernel)
        return np.pad(images, [(0, 0), (0, 0), *around]) if any(map(any, around)) else images

    def _check_channels(self, images: Sequence[int], weights: Sequence[int]) -> None:
        if images[1] != weights[1] * self.groups or weights[0] % self.groups:
            raise ValueError(
                f"filters of shape {tuple(weights)} in {self.groups} groups don't fit images of shape {tuple(images)}"
            )


class Conv(_ConvolutionOp):
    """Convolve images with filters.

    Examples
    --------
    >>> x, w = pt.tensor4("x"), pt.tensor4("w")
    >>> Conv(2, padding="half")(x, w).ndim
    4
    """

    def make_node(self, images: Any, weights: Any) -> Apply:
        """Take images and filters."""
        x, w = self._arguments(images, weights)
        spatial = self.out_spatial(x.type.shape[2:], w.type.shape[2:])
        return Apply(self, [x, w], [self._output(x, x.type.shape[0], w.type.shape[0], *spatial)])

    def output_shape(self, x: Any, w: Any) -> tuple[Any, ...]:
        """Return the output's shape."""
        return (x[0], w[0], *self.out_spatial(x[2:], w[2:]))

    def compute(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        """Multiply the filters by the columns of all windows."""
        self._check_channels(x.shape, w.shape)
        kernel = w.shape[2:]
        out = self.out_spatial(x.shape[2:], kernel)
        if min(out) < 1:
            raise ValueError(f"filters of shape {w.shape} don't fit into images of shape {x.shape}")
        result = np.empty((x.shape[0], w.shape[0], *out), x.dtype)
        matrix = self._matrix(w)
        for part in self._batches(x, kernel, out):
            columns = self._columns(self._padded(x[part], kernel), kernel, out)
            result[part] = np.matmul(matrix, columns).reshape(result[part].shape)
        return result

    def pullback(self, inputs: Any, outputs: Any, output_grads: Any) -> list[Any]:
        """Return the gradients with respect to images and filters."""
        x, w = inputs
        (g,) = output_grads
        return [self._like(ConvGradInputs)(w, g, x), self._like(ConvGradWeights)(x, g, w)]


class _ConvGrad(_ConvolutionOp):
    """Base class of the two gradients.  Only the shape of the third input is used."""

    def make_node(self, factor: Any, output_grad: Any, like: Any) -> Apply:
        """Take images or filters, the output's gradient, and what the result is the gradient of."""
        factor, g, like = self._arguments(factor, output_grad, like)
        return Apply(self, [factor, g, like], [self._output(factor, *like.type.shape)])

    def connection_pattern(self, node: Any) -> list[list[bool]]:
        """Only the shape of the third input matters."""
        return [[True], [True], [False]]

    def output_shape(self, factor: Any, g: Any, like: Any) -> tuple[Any, ...]:
        """Return the third input's shape."""
        return tuple(like)


class ConvGradWeights(_ConvGrad):
    """The gradient with respect to the filters, of images; the third input tells the filters' shape."""

    def compute(self, x: np.ndarray, g: np.ndarray, like: np.ndarray) -> np.ndarray:
        """Multiply the gradient by the columns, and sum over the batch."""
        self._check_channels(x.shape, like.shape)
        kernel, out = like.shape[2:], g.shape[2:]
        matrix = np.zeros((self.groups, like.shape[0] // self.groups, like[0].size), x.dtype)
        for part in self._batches(x, kernel, out):
            columns = self._columns(self._padded(x[part], kernel), kernel, out)
            rows = g[part].reshape(-1, self.groups, g.shape[1] // self.groups, int(np.prod(out)))
            # The batch beside the places: one product for each group, and no sum over many small ones.
            by_filter = rows.transpose(1, 2, 0, 3).reshape(*matrix.shape[:2], -1)
            by_weight = columns.transpose(1, 2, 0, 3).reshape(self.groups, matrix.shape[2], -1)
            matrix += np.matmul(by_filter, by_weight.swapaxes(-1, -2))
        return self._turned(matrix.reshape(like.shape))

    def pullback(self, inputs: Any, outputs: Any, output_grads: Any) -> list[Any]:
        """Return the gradients with respect to images and the output's gradient."""
        x, g, _ = inputs
        (d,) = output_grads
        return [self._like(ConvGradInputs)(d, g, x), self._like(Conv)(x, d), disconnected_type()]


class ConvGradInputs(_ConvGrad):
    """The gradient with respect to the images, or transposed convolution; the third input tells the images' shape."""

    def compute(self, w: np.ndarray, g: np.ndarray, like: np.ndarray) -> np.ndarray:
        """Multiply the filters, transposed, by the gradient, and add up the windows."""
        self._check_channels(like.shape, w.shape)
        kernel, out = w.shape[2:], g.shape[2:]
        if tuple(out) != tuple(self.out_spatial(like.shape[2:], kernel)):
            raise ValueError(f"images of shape {like.shape} give no output of shape {g.shape}")
        around = self.pads(kernel)
        padded = [s + a + b for s, (a, b) in zip(like.shape[2:], around, strict=True)]
        inside = tuple(slice(a, a + s) for s, (a, _) in zip(like.shape[2:], around, strict=True))
        matrix = self._matrix(w).swapaxes(-1, -2)
        result = np.empty(like.shape, w.dtype)
        for part in self._batches(like, kernel, out):
            rows = g[part].reshape(-1, self.groups, g.shape[1] // self.groups, int(np.prod(out)))
            columns = np.matmul(matrix, rows).reshape(-1, like.shape[1], *kernel, *out)
            result[part] = fold(columns, padded, self.stride, self.dilation)[(slice(None), slice(None), *inside)]
        return result

    def pullback(self, inputs: Any, outputs: Any, output_grads: Any) -> list[Any]:
        """Return the gradients with respect to filters and the output's gradient."""
        w, g, _ = inputs
        (d,) = output_grads
        return [self._like(ConvGradWeights)(d, g, w), self._like(Conv)(d, w), disconnected_type()]


# -- XLA -----------------------------------------------------------------------------------------------------------


def _xla_conv(op: _ConvolutionOp, x: Any, w: Any) -> Any:
    """One convolution of XLA's; shapes are numbers when a function is traced, so that paddings are too."""
    from jax import lax

    letters = "DHW"[-op.n :]
    return lax.conv_general_dilated(
        x,
        w,
        window_strides=op.stride,
        padding=op.pads(w.shape[2:]),
        rhs_dilation=op.dilation,
        dimension_numbers=(f"NC{letters}", f"OI{letters}", f"NC{letters}"),
        feature_group_count=op.groups,
    )


def _conv_of_few(op: _ConvolutionOp, x: Any, w: Any) -> Any:
    """Return the convolution; on GPUs one of few channels by strides as one of more channels without strides.

    Each block of an image that a stride passes over becomes one place with a channel for each of its numbers, and so do
    the filters.  GPUs multiply channels in eights: of three, five would be zeros.  Networks begin with such a layer.
    """
    import jax

    kernel = w.shape[2:]
    by_strides = min(op.stride) > 1 and all(k >= s for k, s in zip(kernel, op.stride, strict=True))
    is_other = not by_strides or w.shape[1] > _FEW or op.groups > 1 or max(op.dilation) > 1
    if is_other or jax.default_backend() != "gpu":
        return _xla_conv(op, x, w)
    places = [-(-k // s) for k, s in zip(kernel, op.stride, strict=True)]
    out = op.out_spatial(x.shape[2:], kernel)
    before = [a for a, _ in op.pads(kernel)]
    images = _blocks(x, before, [n + p - 1 for n, p in zip(out, places, strict=True)], op.stride)
    return _xla_conv(Conv(op.n), images, _blocks(w, [0] * op.n, places, op.stride))


def _blocks(array: Any, before: Sequence[int], counts: Sequence[int], block: Sequence[int]) -> Any:
    """Return images or filters as blocks, ``counts`` on each axis: with zeros around, and channels a multiple of 8."""
    array = zeros_around(array, before, [n * b for n, b in zip(counts, block, strict=True)])
    array = array.reshape(*array.shape[:2], *itertools.chain(*zip(counts, block, strict=True)))
    counted, within = range(2, array.ndim, 2), range(3, array.ndim, 2)
    array = array.transpose(0, 1, *within, *counted).reshape(array.shape[0], -1, *counts)
    channels = array.shape[1]
    return zeros_around(array, [0] * array.ndim, [array.shape[0], channels + -channels % 8, *counts])


def _turned(op: _ConvolutionOp, w: Any) -> Any:
    """Return filters as XLA takes them, or what XLA returns as filters."""
    from jax import lax

    return lax.rev(w, tuple(range(2, op.n + 2))) if op.flip else w


@register_lowering(Conv)
def _conv_xla(op: Conv, x: Any, w: Any) -> Any:
    return _conv_of_few(op, x, _turned(op, w))


@register_lowering(ConvGradWeights)
def _grad_weights_xla(op: ConvGradWeights, x: Any, g: Any, like: Any) -> Any:
    import jax

    shape = jax.ShapeDtypeStruct(like.shape, x.dtype)
    (result,) = jax.linear_transpose(lambda w: _conv_of_few(op, x, w), shape)(g)
    return _turned(op, result)


@register_lowering(ConvGradInputs)
def _grad_inputs_xla(op: ConvGradInputs, w: Any, g: Any, like: Any) -> Any:
    import jax

    w = _turned(op, w)
    if op.flip and max(op.stride) > 1:
        # XLA knows this gradient by filters that are turned around.  Turned twice they would be so no more, and XLA
        # would put the zeros between the gradient's elements and multiply with them.
        w = jax.lax.optimization_barrier(w)
    shape = jax.ShapeDtypeStruct(like.shape, w.dtype)
    (result,) = jax.linear_transpose(lambda x: _xla_conv(op, x, w), shape)(g)
    return result
