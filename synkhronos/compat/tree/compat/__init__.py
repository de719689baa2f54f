"""The module ``theano.compat``, on PyTensor."""
