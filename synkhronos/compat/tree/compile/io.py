"""The module ``theano.compile.io``, on PyTensor: inputs and outputs of functions."""

from pytensor.compile.io import In, Out, SymbolicInput, SymbolicOutput

__all__ = ["In", "Out", "SymbolicInput", "SymbolicOutput"]
