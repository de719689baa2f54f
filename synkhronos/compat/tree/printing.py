"""The module ``theano.printing``, on PyTensor."""

from pytensor.printing import *
