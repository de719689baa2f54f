"""The module ``theano.scalar``, on PyTensor."""

from pytensor.scalar import *
from pytensor.scalar.basic import *
