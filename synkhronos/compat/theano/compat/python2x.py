"""The module ``theano.compat.python2x``, which backported parts of the standard library to Python 2.6."""

from collections import OrderedDict

__all__ = ["OrderedDict"]
