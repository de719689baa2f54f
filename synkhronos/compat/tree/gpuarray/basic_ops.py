"""The module ``theano.gpuarray.basic_ops``, on PyTensor: arrays need not be moved."""

from typing import Any

import pytensor.tensor as pt


def as_gpuarray_variable(x: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the array itself, as a variable."""
    return pt.as_tensor_variable(x)


gpu_contiguous = host_from_gpu = as_gpuarray_variable
