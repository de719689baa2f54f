"""The module ``theano.tensor.nnet``, on PyTensor: neural networks."""

from theano.tensor.nnet import abstract_conv, bn, conv, neighbours, nnet, sigm
from theano.tensor.nnet.abstract_conv import conv2d, conv2d_grad_wrt_inputs, conv2d_transpose, conv3d, separable_conv2d
from theano.tensor.nnet.bn import batch_normalization
from theano.tensor.nnet.nnet import *
from theano.tensor.nnet.sigm import hard_sigmoid, ultra_fast_sigmoid

abstract_conv2d = conv2d
