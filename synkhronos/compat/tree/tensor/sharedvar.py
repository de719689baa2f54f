"""The module ``theano.tensor.sharedvar``, on PyTensor."""

from pytensor.tensor.sharedvar import *
