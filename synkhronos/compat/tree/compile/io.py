"""The module ``theano.compile.io``, on PyTensor: inputs and outputs of functions."""

from pytensor.compile.io import *

from synkhronos.compat.functions import In
