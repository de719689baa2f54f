"""The module ``theano.sandbox.cuda.dnn``, on PyTensor: convolution and pooling in the place of cuDNN."""

from theano.gpuarray.dnn import dnn_available, dnn_conv, dnn_pool
