"""The module ``theano.gpuarray.dnn``, on PyTensor: it says that it is not available."""

from synkhronos.compat.gpu import dnn_available
from synkhronos.compat.gpu import dnn_available as dnn_present

__all__ = ["dnn_available", "dnn_present"]
