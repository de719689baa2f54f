"""The module ``theano.compile.io``, on PyTensor: inputs and outputs of functions."""

from pytensor.compile.io import Out, SymbolicInput, SymbolicOutput

from synkhronos.compat.functions import In

__all__ = ["In", "Out", "SymbolicInput", "SymbolicOutput"]
