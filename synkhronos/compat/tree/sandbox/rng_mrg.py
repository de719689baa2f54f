"""The module ``theano.sandbox.rng_mrg``, on PyTensor."""

from synkhronos.compat.random_streams import RandomStreams as MRG_RandomStreams
