"""The module ``theano.sandbox.rng_mrg``, on PyTensor: the same streams as in ``theano.tensor.shared_randomstreams``."""

from synkhronos.compat.streams import RandomStreams as MRG_RandomStreams
