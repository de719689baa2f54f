"""The module ``theano.misc``, on PyTensor."""
