"""The module ``theano.compile.sharedvalue``, on PyTensor: shared variables."""

from pytensor.compile.sharedvalue import SharedVariable, shared_constructor

__all__ = ["SharedVariable", "shared_constructor"]
