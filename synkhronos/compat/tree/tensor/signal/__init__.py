"""The module ``theano.tensor.signal``, on PyTensor."""

from theano.tensor.signal import pool
