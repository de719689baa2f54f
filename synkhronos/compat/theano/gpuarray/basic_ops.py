"""The module ``theano.gpuarray.basic_ops``, on PyTensor: transfers that return their argument."""

from typing import Any

import pytensor.tensor as pt


def as_gpuarray_variable(x: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the argument as a variable."""
    return pt.as_tensor_variable(x)


gpu_contiguous = host_from_gpu = as_gpuarray_variable
