"""The module ``theano.configparser``, on PyTensor."""

from theano import change_flags, config
