"""The module ``theano.ifelse``, on PyTensor."""

from pytensor import ifelse

__all__ = ["ifelse"]
