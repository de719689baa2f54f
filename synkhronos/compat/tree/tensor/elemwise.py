"""The module ``theano.tensor.elemwise``, on PyTensor."""

from pytensor.tensor.elemwise import (
    CAReduce,
    DimShuffle,
    Elemwise,
)

__all__ = [
    "CAReduce",
    "DimShuffle",
    "Elemwise",
]
