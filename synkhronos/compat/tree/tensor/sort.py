"""The module ``theano.tensor.sort``, on PyTensor."""

from theano.tensor.basic import (
    argtopk,
    sort,
    topk,
    topk_and_argtopk,
)

__all__ = [
    "argtopk",
    "sort",
    "topk",
    "topk_and_argtopk",
]
