"""The module ``theano.configparser``, on PyTensor."""

from theano import config

__all__ = ["change_flags"]

change_flags = config.change_flags
