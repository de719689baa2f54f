"""The module ``theano.tensor.var``, on PyTensor."""

from pytensor.tensor.variable import (
    TensorConstant,
    TensorVariable,
)

__all__ = [
    "TensorConstant",
    "TensorVariable",
]
