"""The module ``theano.tensor.nnet``, on PyTensor: what neural networks are made of."""

from theano.tensor.nnet.abstract_conv import (
    conv2d as abstract_conv2d,
)
from theano.tensor.nnet.abstract_conv import (
    conv2d_grad_wrt_inputs,
    conv2d_transpose,
    conv3d,
    separable_conv2d,
)
from theano.tensor.nnet.bn import batch_normalization
from theano.tensor.nnet.nnet import (
    binary_crossentropy,
    categorical_crossentropy,
    confusion_matrix,
    crossentropy_categorical_1hot,
    crossentropy_softmax_1hot,
    crossentropy_softmax_1hot_with_bias,
    elu,
    h_softmax,
    logsoftmax,
    prepend_0_to_each_row,
    prepend_1_to_each_row,
    relu,
    selu,
    sigmoid_binary_crossentropy,
    softmax,
    softmax_graph,
    softmax_with_bias,
    softsign,
)
from theano.tensor.nnet.sigm import hard_sigmoid, sigmoid, softplus, ultra_fast_sigmoid

from theano.tensor.nnet import abstract_conv, bn, conv, neighbours, nnet, sigm  # isort: skip

__all__ = [
    "abstract_conv",
    "abstract_conv2d",
    "batch_normalization",
    "binary_crossentropy",
    "bn",
    "categorical_crossentropy",
    "confusion_matrix",
    "conv",
    "conv2d",
    "conv2d_grad_wrt_inputs",
    "conv2d_transpose",
    "conv3d",
    "crossentropy_categorical_1hot",
    "crossentropy_softmax_1hot",
    "crossentropy_softmax_1hot_with_bias",
    "elu",
    "h_softmax",
    "hard_sigmoid",
    "logsoftmax",
    "neighbours",
    "nnet",
    "prepend_0_to_each_row",
    "prepend_1_to_each_row",
    "relu",
    "selu",
    "separable_conv2d",
    "sigm",
    "sigmoid",
    "sigmoid_binary_crossentropy",
    "softmax",
    "softmax_graph",
    "softmax_with_bias",
    "softplus",
    "softsign",
    "ultra_fast_sigmoid",
]

conv2d = abstract_conv2d
