"""The module ``theano.compile.sharedvalue``, on PyTensor: shared variables."""

from pytensor.compile.sharedvalue import *
