"""The module ``theano.updates``: a dict of updates in the order in which they were added."""

from collections import OrderedDict
from typing import Any


class OrderedUpdates(OrderedDict):
    """Updates of shared variables, as returned by `theano.scan`.  ``+`` joins two of them."""

    def __add__(self, other: Any) -> Any:
        return OrderedUpdates([*self.items(), *dict(other).items()])

    def __radd__(self, other: Any) -> Any:
        return OrderedUpdates([*dict(other).items(), *self.items()])
