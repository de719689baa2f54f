"""The module ``theano.tensor.sharedvar``, on PyTensor."""

from pytensor.tensor.sharedvar import (
    TensorSharedVariable,
    scalar_constructor,
    tensor_constructor,
)

__all__ = [
    "TensorSharedVariable",
    "scalar_constructor",
    "tensor_constructor",
]
