"""The module ``theano.tensor.nnet.conv``, on PyTensor: convolution by its older name."""

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
    """Convolve; arguments that chose among Theano's implementations are dropped."""
    for name in ("imshp_logical", "kshp_logical"):
        if kargs.get(name) is not None:
            raise NotImplementedError(f"conv2d without {name} only; conv2d_grad_wrt_inputs upsamples")
    return _conv2d(input, filters, image_shape, filter_shape, border_mode, subsample)
