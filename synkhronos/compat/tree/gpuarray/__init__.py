"""The module ``theano.gpuarray``, on PyTensor: what programs ask before they use its Ops, which are not there."""

from theano.compile import shared as gpuarray_shared_constructor
from theano.gpuarray import basic_ops, dnn

from synkhronos.compat.gpu import use

__all__ = ["basic_ops", "dnn", "gpuarray_shared_constructor", "pygpu_activated", "use"]

#: Whether Theano computes on a GPU.
pygpu_activated = False
