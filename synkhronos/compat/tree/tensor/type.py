"""The module ``theano.tensor.type``, on PyTensor."""

from pytensor.tensor.type import (
    TensorType,
)

__all__ = [
    "TensorType",
]
