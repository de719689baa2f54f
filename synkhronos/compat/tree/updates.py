"""The module ``theano.updates``: a dict of updates in the order in which they were added."""

from collections import OrderedDict

__all__ = ["OrderedUpdates"]


class OrderedUpdates(OrderedDict):
    """Updates of shared variables, as `theano.scan` returns them."""
