"""The module ``theano.tensor.signal``, on PyTensor."""
