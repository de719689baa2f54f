"""The module ``theano.tensor.elemwise``, on PyTensor."""

from pytensor.tensor.elemwise import *
