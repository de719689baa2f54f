"""The module ``theano.sandbox``, on PyTensor."""
