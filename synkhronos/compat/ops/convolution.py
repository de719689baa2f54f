"""Convolution over one to three axes, and its two gradients.

The cross-correlation of padded images ``x`` with filters ``w`` is, on one axis::

    y[batch, output, i] = sum over channels and positions p:  x[batch, channel, i * stride + p * dilation]
                                                              * w[output, channel, p]

A convolution flips the filters first.  The three Ops are bilinear: the gradients of each are the other two.  Arrays are
floats of one dtype and of these shapes::

    images               x    (batch, channels, *image lengths)
    filters              w    (outputs, channels of a group, *filter lengths)
    output, its gradient y, g (batch, outputs, *output lengths)

Names ending in ``lengths`` are the lengths of the spatial axes.
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

#: "valid", "full", "half", or the padding before and after each axis.
Padding = str | tuple[tuple[int, int], ...]

#: Maximal number of bytes of the columns that are in memory at a time.
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
    strides, dilations : tuple of int
        Distances between windows, and between a filter's elements.
    flips_filters : bool
        Whether filters are flipped: a convolution, else a cross-correlation.
    n_groups : int
        Number of groups of channels.  An output depends on the channels of one group.
    """

    __props__ = ("n_spatial", "padding", "strides", "dilations", "flips_filters", "n_groups")
    #: The Op sums products of its first two inputs; read by `synkhronos.lowering.precision`.
    is_product = True

    def __init__(
        self,
        n_spatial: int,
        padding: Padding = "valid",
        strides: Sequence[int] | None = None,
        dilations: Sequence[int] | None = None,
        flips_filters: bool = True,
        n_groups: int = 1,
    ):
        self.n_spatial = n_spatial
        self.padding = padding
        self.strides = tuple(int(s) for s in strides or (1,) * n_spatial)
        self.dilations = tuple(int(d) for d in dilations or (1,) * n_spatial)
        self.flips_filters = bool(flips_filters)
        self.n_groups = int(n_groups)
        if isinstance(padding, str) and padding not in ("valid", "full", "half"):
            raise ValueError(
                f"border_mode: expected 'valid', 'full', 'half', an integer or a tuple of {n_spatial}, got {padding!r}"
            )
        if len(self.strides) != n_spatial or len(self.dilations) != n_spatial:
            raise ValueError(
                f"stride, dilation: expected {n_spatial} numbers each, got {self.strides} and {self.dilations}"
            )

    def _convert_to(self, op_class: type[_ConvolutionOp]) -> Any:
        """Return an Op of another class with the same settings."""
        return op_class(*(getattr(self, name) for name in self.__props__))

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

    def resolve_padding(self, filter_lengths: Sequence[int]) -> list[tuple[Any, Any]]:
        """Return the padding before and after each axis."""
        if not isinstance(self.padding, str):
            return list(self.padding)
        full = [(k - 1) * d for k, d in zip(filter_lengths, self.dilations, strict=True)]
        pads = {"valid": [0] * len(full), "full": full, "half": [(n + 1) // 2 for n in full]}[self.padding]
        return [(n, n) for n in pads]

    def compute_output_lengths(self, image_lengths: Sequence[Any], filter_lengths: Sequence[Any]) -> list[Any]:
        """Return the output's spatial lengths, as numbers or variables, or None where a given length is None."""
        padding = self.resolve_padding([1 if k is None else k for k in filter_lengths])
        sizes = zip(image_lengths, filter_lengths, padding, self.strides, self.dilations, strict=True)
        return [
            None if length is None or k is None else (length + sum(pads) - (k - 1) * dilation - 1) // stride + 1
            for length, k, pads, stride, dilation in sizes
        ]

    def _to_columns(
        self, images: np.ndarray, filter_lengths: Sequence[int], output_lengths: Sequence[int]
    ) -> np.ndarray:
        """Return windows as columns: (batch, groups, channels of a group * filter elements, output elements)."""
        padding = self.resolve_padding(filter_lengths)
        padded = np.pad(images, [(0, 0), (0, 0), *padding]) if any(map(any, padding)) else images
        columns = unfold(padded, filter_lengths, output_lengths, self.strides, self.dilations)
        batch, channels = columns.shape[:2]
        return columns.reshape(
            batch, self.n_groups, channels // self.n_groups * int(np.prod(filter_lengths)), int(np.prod(output_lengths))
        )

    def apply_flip(self, filters: Any, array_module: Any = np) -> Any:
        """Return filters, flipped if the Op is a convolution: filters of a cross-correlation, or back."""
        if not self.flips_filters:
            return filters
        return array_module.flip(filters, tuple(range(2, self.n_spatial + 2)))

    def _to_matrix(self, filters: np.ndarray) -> np.ndarray:
        """Return the filters as (groups, outputs of a group, channels of a group * filter elements)."""
        filters = self.apply_flip(filters)
        return filters.reshape(self.n_groups, filters.shape[0] // self.n_groups, -1)

    def _split_groups(self, g: np.ndarray) -> np.ndarray:
        """Return an output's gradient as (batch, groups, outputs of a group, output elements)."""
        return g.reshape(g.shape[0], self.n_groups, g.shape[1] // self.n_groups, int(np.prod(g.shape[2:])))

    def _split_batch(
        self, images: np.ndarray, filter_lengths: Sequence[int], output_lengths: Sequence[int]
    ) -> list[slice]:
        """Return slices of the batch whose columns take at most `_MAX_COLUMN_NBYTES`."""
        image_nbytes = images.shape[1] * int(np.prod(filter_lengths)) * int(np.prod(output_lengths)) * images.itemsize
        n_images = max(1, _MAX_COLUMN_NBYTES // max(1, image_nbytes))
        return [slice(i, i + n_images) for i in range(0, images.shape[0], n_images)]

    def _check_channels(self, image_shape: Sequence[int], filter_shape: Sequence[int]) -> None:
        if image_shape[1] != filter_shape[1] * self.n_groups or filter_shape[0] % self.n_groups:
            raise ValueError(
                f"filters of shape {tuple(filter_shape)} in {self.n_groups} groups do not fit images of shape "
                f"{tuple(image_shape)}"
            )


class Conv(_ConvolutionOp):
    """Convolution of images with filters."""

    def make_node(self, images: Any, filters: Any) -> Apply:
        """Return the node of images and filters."""
        x, w = self._as_inputs(images, filters)
        output_lengths = self.compute_output_lengths(x.type.shape[2:], w.type.shape[2:])
        return Apply(self, [x, w], [self._make_output_variable(x, x.type.shape[0], w.type.shape[0], *output_lengths)])

    def compute_output_shape(self, image_shape: Any, filter_shape: Any) -> tuple[Any, ...]:
        """Return the output's shape."""
        lengths = self.compute_output_lengths(image_shape[2:], filter_shape[2:])
        return (image_shape[0], filter_shape[0], *lengths)

    def compute(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        """Multiply the filters by the columns of all windows."""
        self._check_channels(x.shape, w.shape)
        filter_lengths = w.shape[2:]
        output_lengths = self.compute_output_lengths(x.shape[2:], filter_lengths)
        if min(output_lengths) < 1:
            raise ValueError(f"filters of shape {w.shape} are larger than images of shape {x.shape}")
        result = np.empty((x.shape[0], w.shape[0], *output_lengths), x.dtype)
        matrix = self._to_matrix(w)
        for batch_slice in self._split_batch(x, filter_lengths, output_lengths):
            columns = self._to_columns(x[batch_slice], filter_lengths, output_lengths)
            result[batch_slice] = np.matmul(matrix, columns).reshape(result[batch_slice].shape)
        return result

    def pullback(self, inputs: Any, outputs: Any, output_grads: Any) -> list[Any]:
        """Return the gradients with respect to images and filters."""
        x, w = inputs
        g = self.broadcast_gradient(output_grads[0], outputs[0])
        return [self._convert_to(ConvGradInputs)(w, g, x), self._convert_to(ConvGradWeights)(x, g, w)]


class _ConvGrad(_ConvolutionOp):
    """Base class of the two gradients.  Their output has the shape of the third input, whose values are not used."""

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
    """Gradient with respect to the filters.  Inputs: images, the output's gradient, an array of the filters' shape."""

    def compute(self, x: np.ndarray, g: np.ndarray, like: np.ndarray) -> np.ndarray:
        """Multiply the gradient by the columns, and sum over the batch."""
        self._check_channels(x.shape, like.shape)
        filter_lengths, output_lengths = like.shape[2:], g.shape[2:]
        matrix = np.zeros((self.n_groups, like.shape[0] // self.n_groups, like[0].size), x.dtype)
        for batch_slice in self._split_batch(x, filter_lengths, output_lengths):
            columns = self._to_columns(x[batch_slice], filter_lengths, output_lengths)
            gradients = self._split_groups(g[batch_slice])
            # Each group is one product over batch and positions, instead of a sum of many small products.
            by_filter = gradients.transpose(1, 2, 0, 3).reshape(*matrix.shape[:2], -1)
            by_weight = columns.transpose(1, 2, 0, 3).reshape(self.n_groups, matrix.shape[2], -1)
            matrix += np.matmul(by_filter, by_weight.swapaxes(-1, -2))
        return self.apply_flip(matrix.reshape(like.shape))

    def pullback(self, inputs: Any, outputs: Any, output_grads: Any) -> list[Any]:
        """Return the gradients with respect to images and the output's gradient."""
        x, g, _ = inputs
        (cotangent,) = output_grads
        grad_inputs, conv = self._convert_to(ConvGradInputs), self._convert_to(Conv)
        return [grad_inputs(cotangent, g, x), conv(x, cotangent), disconnected_type()]


class ConvGradInputs(_ConvGrad):
    """Transposed convolution: gradient with respect to the images.

    Inputs: filters, the output's gradient, an array of the images' shape.
    """

    def compute(self, w: np.ndarray, g: np.ndarray, like: np.ndarray) -> np.ndarray:
        """Multiply the filters, transposed, by the gradient, and add up the windows."""
        self._check_channels(like.shape, w.shape)
        filter_lengths, output_lengths = w.shape[2:], g.shape[2:]
        if tuple(output_lengths) != tuple(self.compute_output_lengths(like.shape[2:], filter_lengths)):
            raise ValueError(f"images of shape {like.shape} have no output of shape {g.shape}")
        padding = self.resolve_padding(filter_lengths)
        padded_lengths = [n + a + b for n, (a, b) in zip(like.shape[2:], padding, strict=True)]
        image_slices = tuple(slice(a, a + n) for n, (a, _) in zip(like.shape[2:], padding, strict=True))
        matrix = self._to_matrix(w).swapaxes(-1, -2)
        result = np.empty(like.shape, w.dtype)
        for batch_slice in self._split_batch(like, filter_lengths, output_lengths):
            gradients = self._split_groups(g[batch_slice])
            columns = np.matmul(matrix, gradients).reshape(-1, like.shape[1], *filter_lengths, *output_lengths)
            padded = fold(columns, padded_lengths, self.strides, self.dilations)
            result[batch_slice] = padded[(slice(None), slice(None), *image_slices)]
        return result

    def pullback(self, inputs: Any, outputs: Any, output_grads: Any) -> list[Any]:
        """Return the gradients with respect to filters and the output's gradient."""
        w, g, _ = inputs
        (cotangent,) = output_grads
        grad_weights, conv = self._convert_to(ConvGradWeights), self._convert_to(Conv)
        return [grad_weights(cotangent, g, w), conv(cotangent, w), disconnected_type()]


# -- XLA -----------------------------------------------------------------------------------------------------------


def _convolve_with_xla(op: _ConvolutionOp, x: Any, w: Any) -> Any:
    """Return XLA's cross-correlation of images with filters, with the padding and strides of an Op."""
    from jax import lax

    letters = "DHW"[-op.n_spatial :]
    return lax.conv_general_dilated(
        x,
        w,
        window_strides=op.strides,
        padding=op.resolve_padding(w.shape[2:]),
        rhs_dilation=op.dilations,
        dimension_numbers=(f"NC{letters}", f"OI{letters}", f"NC{letters}"),
        feature_group_count=op.n_groups,
    )


def _convolve_with_space_to_depth(op: _ConvolutionOp, x: Any, w: Any) -> Any:
    """Return the cross-correlation.  On GPUs, replace strides over few channels by more channels (space to depth).

    A block of an image as large as the strides becomes one position with a channel for each number in the block.
    Filters are converted likewise.  GPUs multiply channels in eights, and a network's first layer with three channels
    would waste five of them.
    """
    import jax

    filter_lengths = w.shape[2:]
    can_use_blocks = (
        min(op.strides) > 1
        and all(k >= s for k, s in zip(filter_lengths, op.strides, strict=True))
        and w.shape[1] <= _MAX_SPACE_TO_DEPTH_CHANNELS
        and op.n_groups == 1
        and max(op.dilations) == 1
    )
    if not can_use_blocks or jax.default_backend() != "gpu":
        return _convolve_with_xla(op, x, w)
    n_filter_blocks = [-(-k // s) for k, s in zip(filter_lengths, op.strides, strict=True)]
    output_lengths = op.compute_output_lengths(x.shape[2:], filter_lengths)
    n_image_blocks = [n + p - 1 for n, p in zip(output_lengths, n_filter_blocks, strict=True)]
    images = _space_to_depth(x, [a for a, _ in op.resolve_padding(filter_lengths)], n_image_blocks, op.strides)
    return _convolve_with_xla(
        Conv(op.n_spatial), images, _space_to_depth(w, [0] * op.n_spatial, n_filter_blocks, op.strides)
    )


def _space_to_depth(
    array: Any, padding_before: Sequence[int], n_blocks: Sequence[int], block_shape: Sequence[int]
) -> Any:
    """Move the positions of each block into channels.

    The array (batch, channels, *lengths) is padded by zeros to ``n_blocks`` blocks of ``block_shape``.  The result is
    (batch, channels * positions of a block, *n_blocks), with the channels padded to a multiple of 8.
    """
    array = pad_zeros(array, padding_before, [n * length for n, length in zip(n_blocks, block_shape, strict=True)])
    array = array.reshape(*array.shape[:2], *itertools.chain(*zip(n_blocks, block_shape, strict=True)))
    block_axes, position_axes = range(2, array.ndim, 2), range(3, array.ndim, 2)
    array = array.transpose(0, 1, *position_axes, *block_axes).reshape(array.shape[0], -1, *n_blocks)
    n_channels = array.shape[1]
    return pad_zeros(array, [0] * array.ndim, [array.shape[0], n_channels + -n_channels % 8, *n_blocks])


@register_lowering(Conv)
def _lower_conv(op: Conv, x: Any, w: Any) -> Any:
    import jax.numpy as jnp

    return _convolve_with_space_to_depth(op, x, op.apply_flip(w, jnp))


@register_lowering(ConvGradWeights)
def _lower_conv_grad_weights(op: ConvGradWeights, x: Any, g: Any, like: Any) -> Any:
    import jax

    shape = jax.ShapeDtypeStruct(like.shape, x.dtype)
    (result,) = jax.linear_transpose(lambda w: _convolve_with_space_to_depth(op, x, w), shape)(g)
    return op.apply_flip(result, jax.numpy)


@register_lowering(ConvGradInputs)
def _lower_conv_grad_inputs(op: ConvGradInputs, w: Any, g: Any, like: Any) -> Any:
    import jax

    w = op.apply_flip(w, jax.numpy)
    if op.flips_filters and max(op.strides) > 1:
        # XLA recognizes this gradient by its flipped filters.  Two flips would cancel, and XLA would insert zeros
        # between the gradient's elements and multiply with them.
        w = jax.lax.optimization_barrier(w)
    shape = jax.ShapeDtypeStruct(like.shape, w.dtype)
    (result,) = jax.linear_transpose(lambda x: _convolve_with_xla(op, x, w), shape)(g)
    return result
