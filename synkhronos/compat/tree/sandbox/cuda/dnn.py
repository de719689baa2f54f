"""The module ``theano.sandbox.cuda.dnn``, on PyTensor: it says that Theano's own code for cuDNN is not available."""

from theano.gpuarray.dnn import dnn_available
