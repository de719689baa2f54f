"""The module ``theano.ifelse``, on PyTensor."""

from pytensor.ifelse import IfElse, ifelse
