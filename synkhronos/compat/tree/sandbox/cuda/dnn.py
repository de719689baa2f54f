"""The module ``theano.sandbox.cuda.dnn``, on PyTensor."""

from theano.gpuarray.dnn import dnn_available, dnn_conv, dnn_pool
