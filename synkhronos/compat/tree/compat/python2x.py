"""The module ``theano.compat.python2x``, which gave Python 2.6 what later versions have by themselves."""

from collections import OrderedDict

__all__ = ["OrderedDict"]
