"""The module ``theano.tensor.type``, on PyTensor."""

from pytensor.tensor.type import *
