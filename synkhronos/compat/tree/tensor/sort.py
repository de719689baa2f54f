"""The module ``theano.tensor.sort``, on PyTensor."""

from pytensor.tensor.sort import argsort, sort
from theano.tensor.basic import argtopk, topk, topk_and_argtopk
