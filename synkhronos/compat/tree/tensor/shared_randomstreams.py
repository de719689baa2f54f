"""The module ``theano.tensor.shared_randomstreams``, on PyTensor."""

from synkhronos.compat.random_streams import RandomStreams
