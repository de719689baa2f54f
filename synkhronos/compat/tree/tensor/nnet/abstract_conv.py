"""The module ``theano.tensor.nnet.abstract_conv``, on PyTensor: convolutions.

The shapes that may be given beside inputs and filters were hints to Theano; only those that say the result's shape
have a meaning here.
"""

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt

from synkhronos.compat.ops.convolution import Conv, ConvGradInputs, ConvGradWeights, Padding
from synkhronos.compat.ops.windows import integer


def padding_of(border_mode: Any, n: int) -> Padding:
    """Return a border mode as `Conv` takes it.

    Examples
    --------
    >>> padding_of((1, (2, 0)), 2)
    ((1, 1), (2, 0))
    """
    if border_mode in ("valid", "full", "half"):
        return border_mode
    if isinstance(border_mode, str):
        raise ValueError(
            f'invalid border_mode {border_mode!r}, which must be either "valid", "full", "half", an integer or a '
            f"tuple of length {n}"
        )
    modes = list(border_mode) if isinstance(border_mode, tuple | list) else [border_mode] * n
    if len(modes) != n:
        raise ValueError(f"invalid border_mode {border_mode} which must be a tuple of length {n}")
    pairs = [mode if isinstance(mode, tuple | list) else (mode, mode) for mode in modes]
    padding = tuple((integer(before), integer(behind)) for before, behind in pairs)
    if min(map(min, padding)) < 0:
        raise ValueError(f"invalid border_mode {border_mode}: a padding must be at least 0")
    return padding


def _op(
    op: Any,
    n: int,
    border_mode: Any,
    subsample: Any,
    filter_flip: Any,
    filter_dilation: Any,
    groups: Any,
    unshared: Any,
) -> Any:
    """Return one of the Ops over n axes, with Theano's settings."""
    if unshared:
        raise NotImplementedError("convolutions with filters of their own for each place (unshared) are not available")
    stride, dilation = ((1,) * n if s is None else [integer(k) for k in s] for s in (subsample, filter_dilation))
    return op(n, padding_of(border_mode, n), stride, dilation, filter_flip, integer(groups))


def _of_shape(shape: Sequence[Any], known: Sequence[Any], dtype: str) -> Any:
    """Return an array of a shape, which nobody reads; lengths that are not given come from elsewhere."""
    lengths = [k if s is None else s for s, k in zip(shape, known, strict=True)]
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
    """Convolve images with filters.

    Parameters
    ----------
    n : int
        Over how many axes: 2 for images, 3 for volumes.
    input : variable
        (batch, input channels, *spatial).
    filters : variable
        (output channels, input channels / ``num_groups``, *spatial).
    input_shape, filter_shape, image_shape : optional
        Not needed.
    border_mode : 'valid', 'full', 'half', int or tuple
        What is put around the images: nothing; all that a filter can reach; half of that; or this many zeros, by
        axis, or by axis and side.
    subsample : sequence of int, optional
        From one window to the next, by axis; 1 by default.
    filter_flip : bool
        Whether filters are turned around.
    filter_dilation : sequence of int, optional
        From one of a filter's elements to the next, by axis; 1 by default.
    num_groups : int
        Into how many parts the channels are split.
    unshared : bool
        Has to be False.
    **kwargs
        Dropped, with a warning.

    Returns
    -------
    variable

    Examples
    --------
    >>> T.nnet.conv2d(np.ones((1, 1, 3, 3)), np.ones((1, 1, 2, 2))).eval()[0, 0]
    array([[4., 4.],
           [4., 4.]])
    """
    if kwargs:
        warnings.warn(f"conv{n}d has no use for {', '.join(kwargs)}", stacklevel=2)
    return _op(Conv, n, border_mode, subsample, filter_flip, filter_dilation, num_groups, unshared)(input, filters)


def _conv_grad_wrt_inputs(
    n: int,
    output_grad: Any,
    filters: Any,
    input_shape: Any,
    filter_shape: Any = None,
    border_mode: Any = "valid",
    subsample: Any = None,
    filter_flip: bool = True,
    filter_dilation: Any = None,
    num_groups: int = 1,
    unshared: bool = False,
) -> Any:
    """Return the gradient of a convolution with respect to its input, whose spatial shape has to be given.

    Examples
    --------
    >>> T.nnet.conv2d_grad_wrt_inputs(np.ones((1, 1, 1, 1)), np.ones((1, 1, 2, 2)), (1, 1, 2, 2)).eval()[0, 0]
    array([[1., 1.],
           [1., 1.]])
    """
    op = _op(ConvGradInputs, n, border_mode, subsample, filter_flip, filter_dilation, num_groups, unshared)
    return _grad_inputs(op, output_grad, filters, input_shape)


def _grad_inputs(op: Any, output_grad: Any, filters: Any, input_shape: Any) -> Any:
    g, w = pt.as_tensor_variable(output_grad), pt.as_tensor_variable(filters)
    known = [g.shape[0], w.shape[1] * op.groups, *[None] * op.n]
    return op(w, g, _of_shape(input_shape, known, w.dtype))


def _conv_grad_wrt_weights(
    n: int,
    input: Any,
    output_grad: Any,
    filter_shape: Any,
    input_shape: Any = None,
    border_mode: Any = "valid",
    subsample: Any = None,
    filter_flip: bool = True,
    filter_dilation: Any = None,
    num_groups: int = 1,
    unshared: bool = False,
) -> Any:
    """Return the gradient of a convolution with respect to its filters, whose spatial shape has to be given."""
    op = _op(ConvGradWeights, n, border_mode, subsample, filter_flip, filter_dilation, num_groups, unshared)
    return _grad_weights(op, input, output_grad, filter_shape)


def _grad_weights(op: Any, input: Any, output_grad: Any, filter_shape: Any) -> Any:
    x, g = pt.as_tensor_variable(input), pt.as_tensor_variable(output_grad)
    known = [g.shape[1], x.shape[1] // op.groups, *[None] * op.n]
    return op(x, g, _of_shape(filter_shape, known, x.dtype))


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
    """Convolve each channel by itself, and then mix the channels."""
    op = _op(Conv, n, border_mode, subsample, filter_flip, filter_dilation, num_channels, False)
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
    filter_flip: bool = True,
    filter_dilation: Any = None,
    num_groups: int = 1,
    unshared: bool = False,
) -> Any:
    """Return the transposed convolution: the gradient of a `conv2d` with strides ``input_dilation``."""
    op = _op(ConvGradInputs, 2, border_mode, input_dilation, filter_flip, filter_dilation, num_groups, unshared)
    return _grad_inputs(op, input, filters, output_shape)


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
    """Convolve (batch, channels, length) so that each output depends on what comes before (arXiv:1609.03499)."""
    before = filter_dilation * (integer(filter_shape[2]) - 1)
    op = _op(Conv, 1, ((before, 0),), (subsample,), filter_flip, (filter_dilation,), num_groups, unshared)
    return op(input, filters)


# -- as Ops ----------------------------------------------------------------------------------------------------------


class AbstractConv:
    """A convolution with its settings, to be called with images and filters.

    Parameters
    ----------
    convdim : int
        2 or 3.
    imshp, kshp : optional
        Not needed.
    border_mode, subsample, filter_flip, filter_dilation, num_groups, unshared
        As for `conv2d`.

    Examples
    --------
    >>> op = T.nnet.abstract_conv.AbstractConv2d(subsample=(2, 2))
    >>> op(np.ones((1, 1, 4, 4)), np.ones((1, 1, 2, 2))).eval()[0, 0]
    array([[4., 4.],
           [4., 4.]])
    """

    _op: Any = Conv

    def __init__(
        self,
        convdim: int,
        imshp: Any = None,
        kshp: Any = None,
        border_mode: Any = "valid",
        subsample: Any = None,
        filter_flip: bool = True,
        filter_dilation: Any = None,
        num_groups: int = 1,
        unshared: bool = False,
    ):
        self.convdim, self.imshp, self.kshp = convdim, imshp, kshp
        self.op = _op(self._op, convdim, border_mode, subsample, filter_flip, filter_dilation, num_groups, unshared)

    def __call__(self, img: Any, kern: Any) -> Any:
        """Convolve images with filters."""
        return self.op(img, kern)


class AbstractConv_gradInputs(AbstractConv):  # noqa: N801 - Theano's name
    """The gradient of a convolution with respect to its input: a transposed convolution.

    Examples
    --------
    >>> op = T.nnet.abstract_conv.AbstractConv2d_gradInputs(subsample=(2, 2))
    >>> op(np.ones((1, 1, 2, 2)), np.ones((1, 1, 2, 2)), (4, 4)).eval().shape
    (1, 1, 4, 4)
    """

    _op = ConvGradInputs

    def __call__(self, kern: Any, topgrad: Any, shape: Any, add_assert_shape: bool = True) -> Any:  # type: ignore[override]
        """Return the gradient, of a spatial shape."""
        return _grad_inputs(self.op, topgrad, kern, (None, None, *(shape[i] for i in range(self.convdim))))


class AbstractConv_gradWeights(AbstractConv):  # noqa: N801 - Theano's name
    """The gradient of a convolution with respect to its filters."""

    _op = ConvGradWeights

    def __call__(self, img: Any, topgrad: Any, shape: Any, add_assert_shape: bool = True) -> Any:  # type: ignore[override]
        """Return the gradient, of a spatial shape."""
        return _grad_weights(self.op, img, topgrad, (None, None, *(shape[i] for i in range(self.convdim))))


class _ImageConvolution(AbstractConv):
    """A convolution of images."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(2, *args, **kwargs)


class _VolumeConvolution(AbstractConv):
    """A convolution in three dimensions."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(3, *args, **kwargs)


class AbstractConv2d(_ImageConvolution):
    """A convolution of images."""


class AbstractConv2d_gradInputs(_ImageConvolution, AbstractConv_gradInputs):  # noqa: N801 - Theano's name
    """The gradient of a convolution of images with respect to these."""


class AbstractConv2d_gradWeights(_ImageConvolution, AbstractConv_gradWeights):  # noqa: N801 - Theano's name
    """The gradient of a convolution of images with respect to the filters."""


class AbstractConv3d(_VolumeConvolution):
    """A convolution in three dimensions."""


class AbstractConv3d_gradInputs(_VolumeConvolution, AbstractConv_gradInputs):  # noqa: N801 - Theano's name
    """The gradient of a convolution in three dimensions with respect to its input."""


class AbstractConv3d_gradWeights(_VolumeConvolution, AbstractConv_gradWeights):  # noqa: N801 - Theano's name
    """The gradient of a convolution in three dimensions with respect to the filters."""


# -- shapes ----------------------------------------------------------------------------------------------------------


def get_conv_output_shape(
    image_shape: Sequence[Any],
    kernel_shape: Sequence[Any],
    border_mode: Any,
    subsample: Sequence[int],
    filter_dilation: Sequence[int] | None = None,
) -> tuple[Any, ...]:
    """Return the shape of a convolution's output, None where a length is None.

    Examples
    --------
    >>> T.nnet.abstract_conv.get_conv_output_shape((8, 3, 7, None), (4, 3, 3, 3), "half", (2, 1))
    (8, 4, 4, None)
    """
    n = len(image_shape) - 2
    op = Conv(n, padding_of(border_mode, n), subsample, filter_dilation)
    return (image_shape[0], kernel_shape[0], *op.out_spatial(image_shape[2:], kernel_shape[-n:]))


# -- upsampling ------------------------------------------------------------------------------------------------------


def bilinear_kernel_1D(ratio: int, normalize: bool = True) -> Any:  # noqa: N802 - Theano's name
    """Return the filter that upsamples one axis by an integer, by linear interpolation.

    Examples
    --------
    >>> T.nnet.abstract_conv.bilinear_kernel_1D(2).eval()
    array([0.5, 1. , 0.5])
    """
    half = np.arange(1, integer(ratio) + 1, dtype=pytensor.config.floatX)
    kernel = np.concatenate([half, half[-2::-1]])
    return pt.as_tensor_variable(kernel / np.asarray(ratio, kernel.dtype) if normalize else kernel)


def bilinear_kernel_2D(ratio: Any, normalize: bool = True) -> Any:  # noqa: N802 - Theano's name
    """Return the filter that upsamples rows and columns by integers."""
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
    """Enlarge images by an integer, by linear interpolation.

    Parameters
    ----------
    input : tensor4
    ratio : int
    frac_ratio : optional
        Has to be None: fractions are not available.
    batch_size, num_input_channels, use_1D_kernel : optional
        Not needed.

    Returns
    -------
    tensor4

    Examples
    --------
    >>> T.nnet.abstract_conv.bilinear_upsampling(np.ones((1, 1, 2, 3)), 2).eval().shape
    (1, 1, 4, 6)
    """
    if frac_ratio is not None:
        raise NotImplementedError("bilinear_upsampling by fractions is not available")
    if ratio is None:
        raise ValueError("No ratio (or frac_ratio) provided")
    ratio = integer(ratio)
    x = pt.as_tensor_variable(input)
    batch, channels, rows, columns = (x.shape[i] for i in range(4))
    # Each image's edge counts twice, and each channel is an image of its own.
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
