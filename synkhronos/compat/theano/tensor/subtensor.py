"""The module ``theano.tensor.subtensor``, on PyTensor."""

import pytensor.tensor.subtensor as _pytensor
from pytensor.tensor.subtensor import *
from pytensor.tensor.subtensor import AdvancedIncSubtensor, AdvancedSubtensor, IncSubtensor, Subtensor

# Newer PyTensor has one Op for any index array.
AdvancedSubtensor1 = getattr(_pytensor, "AdvancedSubtensor1", AdvancedSubtensor)
AdvancedIncSubtensor1 = getattr(_pytensor, "AdvancedIncSubtensor1", AdvancedIncSubtensor)
