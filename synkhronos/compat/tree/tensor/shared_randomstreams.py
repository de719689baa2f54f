"""The module ``theano.tensor.shared_randomstreams``, on PyTensor."""

from synkhronos.compat.streams import RandomStreams
