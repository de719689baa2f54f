"""Convolution over one to three axes, and its two gradients.

Each of the three Ops is bilinear, and its gradients are the other two.  Images are (batch, channel, *spatial), filters
(output channel, input channel, *spatial).
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

from synkhronos.compat.ops.windows import fold, pad_zeros, unfold
from synkhronos.lowering.numpy_op import NumpyOp, register_lowering

__all__ = ["Conv", "ConvGradInputs", "ConvGradWeights", "Padding"]

#: "valid", "full", "half", or the padding before and after each axis.
Padding = str | tuple[tuple[int, int], ...]

#: Maximal bytes of columns in memory at a time.
_MAX_COLUMN_NBYTES = 2**25
#: Maximal number of input channels for which `_convolve_with_space_to_depth` combines positions to channels.
_MAX_SPACE_TO_DEPTH_CHANNELS = 4


class _ConvolutionOp(NumpyOp):
    """Base class of the convolution and its two gradients.

    Parameters
    ----------
    n_spatial : int
        Number of spatial axes.
    padding : Padding
    stride, dilation : tuple of int
        Distances between windows, and between a filter's elements.
    flip : bool
        Whether filters are flipped: a convolution, else a cross-correlation.
    groups : int
        Number of groups of channels; an output channel depends on the input channels of one group.
    """

    __props__ = ("n_spatial", "padding", "stride", "dilation", "flip", "groups")
    #: The Op sums products of its first two inputs; read by `synkhronos.lowering.precision`.
    is_product = True

    def __init__(
        self,
        n_spatial: int,
        padding: Padding = "valid",
        stride: Sequence[int] | None = None,
        dilation: Sequence[int] | None = None,
        flip: bool = True,
        groups: int = 1,
    ):
        self.n_spatial = n_spatial
        self.padding = padding
        self.stride = tuple(int(s) for s in stride or (1,) * n_spatial)
        self.dilation = tuple(int(d) for d in dilation or (1,) * n_spatial)
        self.flip = bool(flip)
        self.groups = int(groups)
        if isinstance(padding, str) and padding not in ("valid", "full", "half"):
            raise ValueError(
                f"border_mode: expected 'valid', 'full', 'half', an integer or a tuple of {n_spatial}, got {padding!r}"
            )
        if len(self.stride) != n_spatial or len(self.dilation) != n_spatial:
            raise ValueError(
                f"stride, dilation: expected {n_spatial} numbers each, got {self.stride} and {self.dilation}"
            )

    def _convert_to(self, op_class: type[_ConvolutionOp]) -> Any:
        return op_class(self.n_spatial, self.padding, self.stride, self.dilation, self.flip, self.groups)

    def _as_inputs(self, *variables: Any) -> list[Any]:
        """Return the inputs as variables of one dtype and of the right number of dimensions."""
        tensors = [pt.as_tensor_variable(v) for v in variables]
        for tensor in tensors:
            if tensor.ndim != self.n_spatial + 2:
                raise TypeError(f"{type(self).__name__}: expected {self.n_spatial + 2} dimensions, got {tensor.type}")
        dtype = np.result_type(*(t.dtype for t in tensors[:2]))
        if not np.issubdtype(dtype, np.floating):
            dtype = np.dtype("float64")
        return [t.astype(dtype.name) for t in tensors[:2]] + tensors[2:]

    def _make_output_variable(self, tensor: Any, *shape: Any) -> Any:
        return TensorType(tensor.dtype, shape=tuple(s if isinstance(s, int) else None for s in shape))()

    def get_padding(self, kernel_lengths: Sequence[int]) -> list[tuple[Any, Any]]:
        """Return the padding before and after each axis."""
        if not isinstance(self.padding, str):
            return list(self.padding)
        reach = [(k - 1) * d for k, d in zip(kernel_lengths, self.dilation, strict=True)]
        pads = {"valid": [0] * len(reach), "full": reach, "half": [(r + 1) // 2 for r in reach]}[self.padding]
        return [(p, p) for p in pads]

    def compute_output_lengths(self, image_lengths: Sequence[Any], kernel_lengths: Sequence[Any]) -> list[Any]:
        """Return the output's spatial lengths, of numbers or variables; None if a length is None."""
        padding = self.get_padding([1 if k is None else k for k in kernel_lengths])
        sizes = zip(image_lengths, kernel_lengths, padding, self.stride, self.dilation, strict=True)
        return [
            None if length is None or k is None else (length + sum(pads) - (k - 1) * gap - 1) // stride + 1
            for length, k, pads, stride, gap in sizes
        ]

    def _to_columns(
        self, padded: np.ndarray, kernel_lengths: Sequence[int], output_lengths: Sequence[int]
    ) -> np.ndarray:
        """Return columns: (batch, groups, channels of a group * positions of the kernel, positions of the output)."""
        columns = unfold(padded, kernel_lengths, output_lengths, self.stride, self.dilation)
        batch, channels = columns.shape[:2]
        return columns.reshape(
            batch, self.groups, channels // self.groups * int(np.prod(kernel_lengths)), int(np.prod(output_lengths))
        )

    def flip_filters(self, weights: Any, array_module: Any = np) -> Any:
        """Return the filters, flipped if the Op flips them: from Theano's order to a correlation's order, or back."""
        return array_module.flip(weights, tuple(range(2, self.n_spatial + 2))) if self.flip else weights

    def _to_matrix(self, weights: np.ndarray) -> np.ndarray:
        """Return the filters as (groups, outputs of a group, channels of a group * positions of the kernel)."""
        weights = self.flip_filters(weights)
        return weights.reshape(self.groups, weights.shape[0] // self.groups, -1)

    def _split_batch(
        self, images: np.ndarray, kernel_lengths: Sequence[int], output_lengths: Sequence[int]
    ) -> list[slice]:
        """Return slices of the batch whose columns take at most `_MAX_COLUMN_NBYTES`."""
        row = images.shape[1] * int(np.prod(kernel_lengths)) * int(np.prod(output_lengths)) * images.itemsize
        step = max(1, _MAX_COLUMN_NBYTES // max(1, row))
        return [slice(i, i + step) for i in range(0, images.shape[0], step)]

    def _pad_images(self, images: np.ndarray, kernel_lengths: Sequence[int]) -> np.ndarray:
        padding = self.get_padding(kernel_lengths)
        return np.pad(images, [(0, 0), (0, 0), *padding]) if any(map(any, padding)) else images

    def _check_channels(self, image_shape: Sequence[int], filter_shape: Sequence[int]) -> None:
        if image_shape[1] != filter_shape[1] * self.groups or filter_shape[0] % self.groups:
            raise ValueError(
                f"filters of shape {tuple(filter_shape)} in {self.groups} groups do not fit images of shape "
                f"{tuple(image_shape)}"
            )


class Conv(_ConvolutionOp):
    """Convolution of images with filters.

    Examples
    --------
    >>> x, w = pt.tensor4("x"), pt.tensor4("w")
    >>> Conv(2, padding="half")(x, w).ndim
    4
    """

    def make_node(self, images: Any, weights: Any) -> Apply:
        """Return the node of images and filters."""
        x, w = self._as_inputs(images, weights)
        spatial = self.compute_output_lengths(x.type.shape[2:], w.type.shape[2:])
        return Apply(self, [x, w], [self._make_output_variable(x, x.type.shape[0], w.type.shape[0], *spatial)])

    def compute_output_shape(self, image_shape: Any, filter_shape: Any) -> tuple[Any, ...]:
        """Return the output's shape."""
        lengths = self.compute_output_lengths(image_shape[2:], filter_shape[2:])
        return (image_shape[0], filter_shape[0], *lengths)

    def compute(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        """Multiply the filters by the columns of all windows."""
        self._check_channels(x.shape, w.shape)
        kernel_lengths = w.shape[2:]
        output_lengths = self.compute_output_lengths(x.shape[2:], kernel_lengths)
        if min(output_lengths) < 1:
            raise ValueError(f"filters of shape {w.shape} are larger than images of shape {x.shape}")
        result = np.empty((x.shape[0], w.shape[0], *output_lengths), x.dtype)
        matrix = self._to_matrix(w)
        for part in self._split_batch(x, kernel_lengths, output_lengths):
            columns = self._to_columns(self._pad_images(x[part], kernel_lengths), kernel_lengths, output_lengths)
            result[part] = np.matmul(matrix, columns).reshape(result[part].shape)
        return result

    def pullback(self, inputs: Any, outputs: Any, output_grads: Any) -> list[Any]:
        """Return the gradients with respect to images and filters."""
        x, w = inputs
        (g,) = output_grads
        return [self._convert_to(ConvGradInputs)(w, g, x), self._convert_to(ConvGradWeights)(x, g, w)]


class _ConvGrad(_ConvolutionOp):
    """Base class of the two gradients; their output has the shape of the third input, whose values are not used."""

    def make_node(self, operand: Any, output_grad: Any, like: Any) -> Apply:
        """Return the node of images or filters, the output's gradient, and an array of the result's shape."""
        operand, g, like = self._as_inputs(operand, output_grad, like)
        return Apply(self, [operand, g, like], [self._make_output_variable(operand, *like.type.shape)])

    def connection_pattern(self, node: Any) -> list[list[bool]]:
        """Mark the third input as disconnected."""
        return [[True], [True], [False]]

    def compute_output_shape(self, operand: Any, g: Any, like: Any) -> tuple[Any, ...]:
        """Return the third input's shape."""
        return tuple(like)


class ConvGradWeights(_ConvGrad):
    """Gradient with respect to the filters; inputs: images, the output's gradient, an array of the filters' shape."""

    def compute(self, x: np.ndarray, g: np.ndarray, like: np.ndarray) -> np.ndarray:
        """Multiply the gradient by the columns, and sum over the batch."""
        self._check_channels(x.shape, like.shape)
        kernel_lengths, output_lengths = like.shape[2:], g.shape[2:]
        matrix = np.zeros((self.groups, like.shape[0] // self.groups, like[0].size), x.dtype)
        for part in self._split_batch(x, kernel_lengths, output_lengths):
            columns = self._to_columns(self._pad_images(x[part], kernel_lengths), kernel_lengths, output_lengths)
            gradients = g[part].reshape(-1, self.groups, g.shape[1] // self.groups, int(np.prod(output_lengths)))
            # Each group is one product over batch and positions, instead of a sum of many small products.
            by_filter = gradients.transpose(1, 2, 0, 3).reshape(*matrix.shape[:2], -1)
            by_weight = columns.transpose(1, 2, 0, 3).reshape(self.groups, matrix.shape[2], -1)
            matrix += np.matmul(by_filter, by_weight.swapaxes(-1, -2))
        return self.flip_filters(matrix.reshape(like.shape))

    def pullback(self, inputs: Any, outputs: Any, output_grads: Any) -> list[Any]:
        """Return the gradients with respect to images and the output's gradient."""
        x, g, _ = inputs
        (d,) = output_grads
        return [self._convert_to(ConvGradInputs)(d, g, x), self._convert_to(Conv)(x, d), disconnected_type()]


class ConvGradInputs(_ConvGrad):
    """Transposed convolution: gradient with respect to images; inputs: filters, the output's gradient, any images."""

    def compute(self, w: np.ndarray, g: np.ndarray, like: np.ndarray) -> np.ndarray:
        """Multiply the filters, transposed, by the gradient, and add up the windows."""
        self._check_channels(like.shape, w.shape)
        kernel_lengths, output_lengths = w.shape[2:], g.shape[2:]
        if tuple(output_lengths) != tuple(self.compute_output_lengths(like.shape[2:], kernel_lengths)):
            raise ValueError(f"images of shape {like.shape} have no output of shape {g.shape}")
        padding = self.get_padding(kernel_lengths)
        padded = [s + a + b for s, (a, b) in zip(like.shape[2:], padding, strict=True)]
        inside = tuple(slice(a, a + s) for s, (a, _) in zip(like.shape[2:], padding, strict=True))
        matrix = self._to_matrix(w).swapaxes(-1, -2)
        result = np.empty(like.shape, w.dtype)
        for part in self._split_batch(like, kernel_lengths, output_lengths):
            gradients = g[part].reshape(-1, self.groups, g.shape[1] // self.groups, int(np.prod(output_lengths)))
            columns = np.matmul(matrix, gradients).reshape(-1, like.shape[1], *kernel_lengths, *output_lengths)
            result[part] = fold(columns, padded, self.stride, self.dilation)[(slice(None), slice(None), *inside)]
        return result

    def pullback(self, inputs: Any, outputs: Any, output_grads: Any) -> list[Any]:
        """Return the gradients with respect to filters and the output's gradient."""
        w, g, _ = inputs
        (d,) = output_grads
        return [self._convert_to(ConvGradWeights)(d, g, w), self._convert_to(Conv)(d, w), disconnected_type()]


# -- XLA -----------------------------------------------------------------------------------------------------------


def _convolve_with_xla(op: _ConvolutionOp, x: Any, w: Any) -> Any:
    """Return XLA's convolution of images with filters in XLA's order, with the padding and strides of an Op."""
    from jax import lax

    letters = "DHW"[-op.n_spatial :]
    return lax.conv_general_dilated(
        x,
        w,
        window_strides=op.stride,
        padding=op.get_padding(w.shape[2:]),
        rhs_dilation=op.dilation,
        dimension_numbers=(f"NC{letters}", f"OI{letters}", f"NC{letters}"),
        feature_group_count=op.groups,
    )


def _convolve_with_space_to_depth(op: _ConvolutionOp, x: Any, w: Any) -> Any:
    """Return the convolution; on GPUs, replace strides over few channels by more channels (space to depth).

    A block of an image as large as the stride becomes one position with a channel for each of its numbers, and filters
    likewise.  GPUs multiply channels in eights, so that a network's first layer with three channels would waste five.
    """
    import jax

    kernel_lengths = w.shape[2:]
    by_strides = min(op.stride) > 1 and all(k >= s for k, s in zip(kernel_lengths, op.stride, strict=True))
    cannot_use_blocks = (
        not by_strides or w.shape[1] > _MAX_SPACE_TO_DEPTH_CHANNELS or op.groups > 1 or max(op.dilation) > 1
    )
    if cannot_use_blocks or jax.default_backend() != "gpu":
        return _convolve_with_xla(op, x, w)
    kernel_blocks = [-(-k // s) for k, s in zip(kernel_lengths, op.stride, strict=True)]
    output_lengths = op.compute_output_lengths(x.shape[2:], kernel_lengths)
    before = [a for a, _ in op.get_padding(kernel_lengths)]
    images = _space_to_depth(
        x, before, [n + p - 1 for n, p in zip(output_lengths, kernel_blocks, strict=True)], op.stride
    )
    return _convolve_with_xla(
        Conv(op.n_spatial), images, _space_to_depth(w, [0] * op.n_spatial, kernel_blocks, op.stride)
    )


def _space_to_depth(array: Any, before: Sequence[int], counts: Sequence[int], block: Sequence[int]) -> Any:
    """Move each block of positions into channels: ``counts`` blocks on each axis, and a multiple of 8 channels."""
    array = pad_zeros(array, before, [n * b for n, b in zip(counts, block, strict=True)])
    array = array.reshape(*array.shape[:2], *itertools.chain(*zip(counts, block, strict=True)))
    counted, within = range(2, array.ndim, 2), range(3, array.ndim, 2)
    array = array.transpose(0, 1, *within, *counted).reshape(array.shape[0], -1, *counts)
    channels = array.shape[1]
    return pad_zeros(array, [0] * array.ndim, [array.shape[0], channels + -channels % 8, *counts])


@register_lowering(Conv)
def _lower_conv(op: Conv, x: Any, w: Any) -> Any:
    import jax.numpy as jnp

    return _convolve_with_space_to_depth(op, x, op.flip_filters(w, jnp))


@register_lowering(ConvGradWeights)
def _lower_conv_grad_weights(op: ConvGradWeights, x: Any, g: Any, like: Any) -> Any:
    import jax

    shape = jax.ShapeDtypeStruct(like.shape, x.dtype)
    (result,) = jax.linear_transpose(lambda w: _convolve_with_space_to_depth(op, x, w), shape)(g)
    return op.flip_filters(result, jax.numpy)


@register_lowering(ConvGradInputs)
def _lower_conv_grad_inputs(op: ConvGradInputs, w: Any, g: Any, like: Any) -> Any:
    import jax

    w = op.flip_filters(w, jax.numpy)
    if op.flip and max(op.stride) > 1:
        # XLA recognizes this gradient by its flipped filters.  Two flips would cancel, and XLA would insert zeros
        # between the gradient's elements and multiply with them.
        w = jax.lax.optimization_barrier(w)
    shape = jax.ShapeDtypeStruct(like.shape, w.dtype)
    (result,) = jax.linear_transpose(lambda x: _convolve_with_xla(op, x, w), shape)(g)
    return result
