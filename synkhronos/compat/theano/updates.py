"""The module ``theano.updates``: a dict of updates in the order in which they were added."""

from collections import OrderedDict
from typing import Any


class OrderedUpdates(OrderedDict):
    """Updates of shared variables, as returned by `theano.scan`.  ``+`` joins two of them.

    Joining raises KeyError if both have another update of one variable.
    """

    def update(self, other: Any = ()) -> None:  # type: ignore[override] # Theano's signature
        """Add other updates, in their order."""
        for shared, value in OrderedDict(other or ()).items():
            if shared in self and self[shared] is not value:
                raise KeyError("Collision", shared)
            self[shared] = value

    def __add__(self, other: Any) -> Any:
        joined = OrderedUpdates(self)
        joined.update(other)
        return joined

    def __radd__(self, other: Any) -> Any:
        return OrderedUpdates(other or ()) + self
