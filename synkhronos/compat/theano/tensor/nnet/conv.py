"""The module ``theano.tensor.nnet.conv``, on PyTensor: the interface of convolution before ``abstract_conv``."""

from typing import Any

from theano.tensor.nnet.abstract_conv import conv2d as _conv2d


def conv2d(
    input: Any,
    filters: Any,
    image_shape: Any = None,
    filter_shape: Any = None,
    border_mode: Any = "valid",
    subsample: Any = (1, 1),
    **kargs: Any,
) -> Any:
    """Convolve images with filters.  Arguments that select one of Theano's implementations are ignored."""
    for name in ("imshp_logical", "kshp_logical"):
        if kargs.get(name) is not None:
            raise NotImplementedError(f"conv2d: {name} is not supported; use conv2d_grad_wrt_inputs to upsample")
    return _conv2d(input, filters, image_shape, filter_shape, border_mode, subsample)
