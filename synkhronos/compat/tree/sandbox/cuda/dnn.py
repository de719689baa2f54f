"""The module ``theano.sandbox.cuda.dnn``, on PyTensor: it says that it is not available."""

from synkhronos.compat.gpu import dnn_available

__all__ = ["dnn_available"]
