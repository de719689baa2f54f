"""The module ``theano.tensor.subtensor``, on PyTensor."""

import pytensor.tensor.subtensor as _pytensor
from pytensor.tensor.subtensor import (
    AdvancedIncSubtensor,
    AdvancedSubtensor,
    IncSubtensor,
    Subtensor,
    inc_subtensor,
    set_subtensor,
)

__all__ = [
    "AdvancedIncSubtensor",
    "AdvancedIncSubtensor1",
    "AdvancedSubtensor",
    "AdvancedSubtensor1",
    "IncSubtensor",
    "Subtensor",
    "inc_subtensor",
    "set_subtensor",
]

# Newer PyTensor has one Op for any index array.
AdvancedSubtensor1 = getattr(_pytensor, "AdvancedSubtensor1", AdvancedSubtensor)
AdvancedIncSubtensor1 = getattr(_pytensor, "AdvancedIncSubtensor1", AdvancedIncSubtensor)
