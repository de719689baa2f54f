"""The module ``theano.compile.nanguardmode``, on PyTensor."""

from pytensor.compile.debug.nanguardmode import *
