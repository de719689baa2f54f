"""The module ``theano.tensor.extra_ops``, on PyTensor."""

from pytensor.tensor.extra_ops import *
from pytensor.tensor.extra_ops import CumOp, Repeat, Unique, to_one_hot
