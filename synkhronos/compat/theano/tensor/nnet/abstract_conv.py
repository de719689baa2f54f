"""The module ``theano.tensor.nnet.abstract_conv``, on PyTensor: convolutions.

Shapes of inputs and filters are optimization hints in Theano, and ignored here; shapes of results are used.
"""

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt

from synkhronos.compat.ops.convolution import Conv, ConvGradInputs, ConvGradWeights, Padding
from synkhronos.compat.ops.windows import to_window_parameter


def to_padding(border_mode: Any, n: int) -> Padding:
    """Convert Theano's border mode to the padding of `Conv`."""
    if isinstance(border_mode, str):
        return border_mode
    modes = list(border_mode) if isinstance(border_mode, tuple | list) else [border_mode] * n
    if len(modes) != n:
        raise ValueError(f"border_mode: expected a tuple of {n}, got {border_mode}")
    pairs = [mode if isinstance(mode, tuple | list) else (mode, mode) for mode in modes]
    padding = tuple((to_window_parameter(before), to_window_parameter(after)) for before, after in pairs)
    if min(map(min, padding)) < 0:
        raise ValueError(f"border_mode: expected no negative padding, got {border_mode}")
    return padding


def _make_op(
    op_class: Any,
    n: int,
    border_mode: Any = "valid",
    subsample: Any = None,
    filter_flip: bool = True,
    filter_dilation: Any = None,
    num_groups: int = 1,
    unshared: bool = False,
) -> Any:
    """Return an Op over ``n`` axes with Theano's settings, in Theano's order."""
    if unshared:
        raise NotImplementedError("unshared: separate filters for each position are not supported")
    stride, dilation = (
        (1,) * n if s is None else [to_window_parameter(k) for k in s] for s in (subsample, filter_dilation)
    )
    return op_class(n, to_padding(border_mode, n), stride, dilation, filter_flip, to_window_parameter(num_groups))


def _make_placeholder(shape: Sequence[Any], default_lengths: Sequence[Any], dtype: str) -> Any:
    """Return an array whose shape alone is used.  Lengths that are None are taken from ``default_lengths``."""
    lengths = [k if s is None else s for s, k in zip(shape, default_lengths, strict=True)]
    return pt.alloc(np.zeros((), dtype), *lengths)


# -- any number of dimensions ----------------------------------------------------------------------------------------


def _conv(
    n: int,
    input: Any,
    filters: Any,
    input_shape: Any = None,
    filter_shape: Any = None,
    border_mode: Any = "valid",
    subsample: Any = None,
    filter_flip: bool = True,
    filter_dilation: Any = None,
    num_groups: int = 1,
    unshared: bool = False,
    image_shape: Any = None,
    **kwargs: Any,
) -> Any:
    """Convolve images (batch, channels, *spatial) with filters (outputs, channels of a group, *spatial).

    ``border_mode`` is 'valid', 'full', 'half', or padding by axis, or by axis and side.  Other arguments are ignored,
    with a warning.

    Examples
    --------
    >>> T.nnet.conv2d(np.ones((1, 1, 3, 3)), np.ones((1, 1, 2, 2))).eval()[0, 0]
    array([[4., 4.],
           [4., 4.]])
    """
    if kwargs:
        warnings.warn(f"conv{n}d: ignored arguments: {', '.join(kwargs)}", stacklevel=2)
    return _make_op(Conv, n, border_mode, subsample, filter_flip, filter_dilation, num_groups, unshared)(input, filters)


def _conv_grad_wrt_inputs(
    n: int, output_grad: Any, filters: Any, input_shape: Any, filter_shape: Any = None, *settings: Any, **kwargs: Any
) -> Any:
    """Return the gradient with respect to the input, whose spatial shape is required; settings as in `conv2d`."""
    return _compute_input_grad(_make_op(ConvGradInputs, n, *settings, **kwargs), output_grad, filters, input_shape)


def _compute_input_grad(op: Any, output_grad: Any, filters: Any, input_shape: Any) -> Any:
    g, w = pt.as_tensor_variable(output_grad), pt.as_tensor_variable(filters)
    default_lengths = [g.shape[0], w.shape[1] * op.n_groups, *[None] * op.n_spatial]
    return op(w, g, _make_placeholder(input_shape, default_lengths, w.dtype))


def _conv_grad_wrt_weights(
    n: int, input: Any, output_grad: Any, filter_shape: Any, input_shape: Any = None, *settings: Any, **kwargs: Any
) -> Any:
    """Return the gradient with respect to the filters, whose spatial shape is required; settings as in `conv2d`."""
    return _compute_filter_grad(_make_op(ConvGradWeights, n, *settings, **kwargs), input, output_grad, filter_shape)


def _compute_filter_grad(op: Any, input: Any, output_grad: Any, filter_shape: Any) -> Any:
    x, g = pt.as_tensor_variable(input), pt.as_tensor_variable(output_grad)
    default_lengths = [g.shape[1], x.shape[1] // op.n_groups, *[None] * op.n_spatial]
    return op(x, g, _make_placeholder(filter_shape, default_lengths, x.dtype))


def _separable_conv(
    n: int,
    input: Any,
    depthwise_filters: Any,
    pointwise_filters: Any,
    num_channels: int,
    input_shape: Any = None,
    depthwise_filter_shape: Any = None,
    pointwise_filter_shape: Any = None,
    border_mode: Any = "valid",
    subsample: Any = None,
    filter_flip: bool = True,
    filter_dilation: Any = None,
) -> Any:
    """Convolve each channel separately, then combine the channels by filters of one element."""
    op = _make_op(Conv, n, border_mode, subsample, filter_flip, filter_dilation, num_channels)
    return _conv(n, op(input, depthwise_filters), pointwise_filters)


conv2d, conv3d = (functools.partial(_conv, n) for n in (2, 3))
conv2d_grad_wrt_inputs, conv3d_grad_wrt_inputs = (functools.partial(_conv_grad_wrt_inputs, n) for n in (2, 3))
conv2d_grad_wrt_weights, conv3d_grad_wrt_weights = (functools.partial(_conv_grad_wrt_weights, n) for n in (2, 3))
separable_conv2d, separable_conv3d = (functools.partial(_separable_conv, n) for n in (2, 3))


def conv2d_transpose(
    input: Any,
    filters: Any,
    output_shape: Any,
    filter_shape: Any = None,
    border_mode: Any = "valid",
    input_dilation: Any = None,
    *settings: Any,
    **kwargs: Any,
) -> Any:
    """Return the transposed convolution: the gradient of a `conv2d` with strides ``input_dilation``."""
    op = _make_op(ConvGradInputs, 2, border_mode, input_dilation, *settings, **kwargs)
    return _compute_input_grad(op, input, filters, output_shape)


def causal_conv1d(
    input: Any,
    filters: Any,
    filter_shape: Any,
    input_shape: Any = None,
    subsample: int = 1,
    filter_flip: bool = True,
    filter_dilation: int = 1,
    num_groups: int = 1,
    unshared: bool = False,
) -> Any:
    """Convolve (batch, channels, length) with the present and past elements of each window (arXiv:1609.03499)."""
    before = filter_dilation * (to_window_parameter(filter_shape[2]) - 1)
    op = _make_op(Conv, 1, ((before, 0),), (subsample,), filter_flip, (filter_dilation,), num_groups, unshared)
    return op(input, filters)


# -- Ops -------------------------------------------------------------------------------------------------------------


def _make_abstract_conv(
    op_class: Any, convdim: int, imshp: Any = None, kshp: Any = None, *settings: Any, **kwargs: Any
) -> Any:
    """Return a function of a convolution's images and filters, or of a gradient's two inputs and its spatial shape.

    The function takes the settings of `conv2d` from ``border_mode`` on; shapes are ignored.
    """
    op = _make_op(op_class, convdim, *settings, **kwargs)
    if op_class is Conv:
        return op

    def compute_gradient(operand: Any, topgrad: Any, shape: Any, add_assert_shape: bool = True) -> Any:
        full_shape = (None, None, *(shape[i] for i in range(convdim)))
        if op_class is ConvGradInputs:
            return _compute_input_grad(op, topgrad, operand, full_shape)
        return _compute_filter_grad(op, operand, topgrad, full_shape)

    return compute_gradient


AbstractConv, AbstractConv_gradInputs, AbstractConv_gradWeights = (
    functools.partial(_make_abstract_conv, op_class) for op_class in (Conv, ConvGradInputs, ConvGradWeights)
)
AbstractConv2d, AbstractConv3d = (functools.partial(AbstractConv, n) for n in (2, 3))
AbstractConv2d_gradInputs, AbstractConv3d_gradInputs = (functools.partial(AbstractConv_gradInputs, n) for n in (2, 3))
AbstractConv2d_gradWeights, AbstractConv3d_gradWeights = (
    functools.partial(AbstractConv_gradWeights, n) for n in (2, 3)
)


# -- shapes ----------------------------------------------------------------------------------------------------------


def get_conv_output_shape(
    image_shape: Sequence[Any],
    kernel_shape: Sequence[Any],
    border_mode: Any,
    subsample: Sequence[int],
    filter_dilation: Sequence[int] | None = None,
) -> tuple[Any, ...]:
    """Return the shape of a convolution's output; lengths computed from None are None.

    Examples
    --------
    >>> T.nnet.abstract_conv.get_conv_output_shape((8, 3, 7, None), (4, 3, 3, 3), "half", (2, 1))
    (8, 4, 4, None)
    """
    n = len(image_shape) - 2
    op = Conv(n, to_padding(border_mode, n), subsample, filter_dilation)
    return (image_shape[0], kernel_shape[0], *op.compute_output_lengths(image_shape[2:], kernel_shape[-n:]))


# -- upsampling ------------------------------------------------------------------------------------------------------


def bilinear_kernel_1D(ratio: int, normalize: bool = True) -> Any:  # noqa: N802 - Theano's name
    """Return the filter of a linear interpolation that upsamples one axis by an integer."""
    half = np.arange(1, to_window_parameter(ratio) + 1, dtype=pytensor.config.floatX)
    kernel = np.concatenate([half, half[-2::-1]])
    return pt.as_tensor_variable(kernel / np.asarray(ratio, kernel.dtype) if normalize else kernel)


def bilinear_kernel_2D(ratio: Any, normalize: bool = True) -> Any:  # noqa: N802 - Theano's name
    """Return the filter of a bilinear interpolation that upsamples rows and columns by integers."""
    vertical, horizontal = ratio if isinstance(ratio, tuple) else (ratio, ratio)
    return bilinear_kernel_1D(vertical, normalize)[:, None] * bilinear_kernel_1D(horizontal, normalize)[None, :]


def bilinear_upsampling(
    input: Any,
    ratio: Any = None,
    frac_ratio: Any = None,
    batch_size: Any = None,
    num_input_channels: Any = None,
    use_1D_kernel: bool = True,  # noqa: N803 - Theano's name
) -> Any:
    """Upsample images by an integer ``ratio``, by bilinear interpolation.

    ``frac_ratio`` has to be None; ``batch_size``, ``num_input_channels`` and ``use_1D_kernel`` are ignored.
    """
    if frac_ratio is not None:
        raise NotImplementedError("frac_ratio: bilinear_upsampling by fractions is not supported")
    if ratio is None:
        raise ValueError("ratio: expected an integer, got None")
    ratio = to_window_parameter(ratio)
    x = pt.as_tensor_variable(input)
    batch, channels, rows, columns = (x.shape[i] for i in range(4))
    # Edges are repeated, and channels are upsampled as separate images.
    x = pt.concatenate([x[:, :, :1], x, x[:, :, -1:]], axis=2)
    x = pt.concatenate([x[..., :1], x, x[..., -1:]], axis=3)
    pad = 2 * ratio - (ratio - 1) // 2 - 1
    kernel = bilinear_kernel_2D(ratio).astype(x.dtype)[None, None]
    single = x.reshape((batch * channels, 1, rows + 2, columns + 2))
    large = conv2d_grad_wrt_inputs(
        single,
        kernel,
        (batch * channels, 1, rows * ratio, columns * ratio),
        border_mode=(pad, pad),
        subsample=(ratio, ratio),
    )
    return large.reshape((batch, channels, rows * ratio, columns * ratio))
