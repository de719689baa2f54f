"""The module ``theano.sandbox.cuda``, on PyTensor: checks for a GPU, without the Ops."""

from theano.compile import shared as shared_constructor
from theano.gpuarray import use
from theano.sandbox.cuda import basic_ops, dnn

float32_shared_constructor = shared_constructor
#: Whether Theano's own GPU back end is available, and active.
cuda_available = cuda_enabled = False
