"""The module ``theano.tensor.signal.conv``, on PyTensor: convolution of stacks of images with stacks of filters."""

from typing import Any

import pytensor.tensor as pt

from synkhronos.compat.ops.convolution import Conv


def conv2d(
    input: Any,
    filters: Any,
    image_shape: Any = None,
    filter_shape: Any = None,
    border_mode: str = "valid",
    subsample: Any = (1, 1),
    **kargs: Any,
) -> Any:
    """Convolve each image with each filter; the result has an axis for each stack."""
    x, w = pt.as_tensor_variable(input), pt.as_tensor_variable(filters)
    if x.ndim not in (2, 3) or w.ndim not in (2, 3):
        raise ValueError(f"conv2d: expected input and filters of 2 or 3 dimensions, got {x.ndim} and {w.ndim}")
    x4 = x[:, None] if x.ndim == 3 else x[None, None]
    w4 = w[:, None] if w.ndim == 3 else w[None, None]
    output = Conv(2, border_mode, subsample)(x4, w4)
    if w.ndim == 2:
        output = output[:, 0]
    return output if x.ndim == 3 else output[0]
