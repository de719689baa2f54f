"""The module ``theano.sandbox.cuda``, on PyTensor: what programs ask before they use its Ops, which are not there."""

from theano.compile import shared as shared_constructor
from theano.gpuarray import use
from theano.sandbox.cuda import basic_ops, dnn

float32_shared_constructor = shared_constructor
#: Whether Theano could compute on a GPU, and whether it does.
cuda_available = cuda_enabled = False
