"""The module ``theano.tensor.extra_ops``, on PyTensor."""

from pytensor.tensor.extra_ops import (
    CumOp,
    Repeat,
    Unique,
    bincount,
    compress,
    cumprod,
    cumsum,
    diff,
    fill_diagonal,
    fill_diagonal_offset,
    ravel_multi_index,
    repeat,
    searchsorted,
    squeeze,
    to_one_hot,
    unravel_index,
)

__all__ = [
    "CumOp",
    "Repeat",
    "Unique",
    "bincount",
    "compress",
    "cumprod",
    "cumsum",
    "diff",
    "fill_diagonal",
    "fill_diagonal_offset",
    "ravel_multi_index",
    "repeat",
    "searchsorted",
    "squeeze",
    "to_one_hot",
    "unravel_index",
]
