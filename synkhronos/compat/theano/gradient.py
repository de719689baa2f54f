"""The module ``theano.gradient``, on PyTensor."""

from pytensor.gradient import *
from pytensor.gradient import zero_grad as consider_constant
