"""A U-Net: down by convolution and pooling, up by transposed convolution, and across by concatenation.

Lasagne 0.1 has no transposed convolution, so that programs of its time made a layer of Theano's Op.
"""

import lasagne
import numpy as np
import theano
import theano.tensor as T
from lasagne.layers import ConcatLayer, Conv2DLayer, InputLayer, MaxPool2DLayer, get_all_params, get_output

from programs import make_images

BATCH, SIDE, FILTERS, CLASSES = 2, 16, 3, 2


class TransposedConv2DLayer(lasagne.layers.Layer):
    """Twice the side, by the gradient of a convolution with stride 2 with respect to its input."""

    def __init__(self, incoming, num_filters, filter_size=2, stride=2, W=lasagne.init.GlorotUniform(), **kwargs):  # noqa: B008
        super().__init__(incoming, **kwargs)
        self.num_filters, self.filter_size, self.stride = num_filters, filter_size, stride
        self.W = self.add_param(W, (self.input_shape[1], num_filters, filter_size, filter_size), name="W")

    def get_output_shape_for(self, input_shape):
        sides = [None if side is None else side * self.stride for side in input_shape[2:]]
        return (input_shape[0], self.num_filters, *sides)

    def get_output_for(self, input, **kwargs):
        op = T.nnet.abstract_conv.AbstractConv2d_gradInputs(
            imshp=self.output_shape,
            kshp=(self.input_shape[1], self.num_filters, self.filter_size, self.filter_size),
            subsample=(self.stride, self.stride),
            border_mode="valid",
            filter_flip=False,
        )
        return op(self.W, input, self.output_shape[2:])


def build(input_var, depths):
    def pair(incoming, filters, name):
        first = Conv2DLayer(incoming, filters, 3, pad="same", name=f"{name}_1")
        return Conv2DLayer(first, filters, 3, pad="same", name=f"{name}_2")

    net = InputLayer((None, 1, SIDE, SIDE), input_var)
    across = []
    for depth in range(depths):
        net = pair(net, FILTERS * 2**depth, f"down_{depth}")
        across.append(net)
        net = MaxPool2DLayer(net, 2)
    net = pair(net, FILTERS * 2**depths, "bottom")
    for depth in reversed(range(depths)):
        net = TransposedConv2DLayer(net, FILTERS * 2**depth)
        net = ConcatLayer([net, across[depth]])
        net = pair(net, FILTERS * 2**depth, f"up_{depth}")
    # A convolution of one pixel decides for each pixel.
    return Conv2DLayer(net, CLASSES, 1, nonlinearity=lasagne.nonlinearities.linear)


def run(steps, depths=2):
    lasagne.random.set_rng(np.random.RandomState(1))
    x, y = T.tensor4("x"), T.itensor3("y")
    net = build(x, depths)
    scores = get_output(net).dimshuffle(0, 2, 3, 1).reshape((-1, CLASSES))
    probabilities = T.nnet.softmax(scores)
    weights = lasagne.regularization.regularize_network_params(net, lasagne.regularization.l2)
    loss = lasagne.objectives.categorical_crossentropy(probabilities, y.flatten()).mean() + 1e-4 * weights
    params = get_all_params(net, trainable=True)
    updates = lasagne.updates.nesterov_momentum(loss, params, learning_rate=0.1, momentum=0.9)
    train = theano.function([x, y], loss, updates=updates)
    pixels, _ = make_images(BATCH, SIDE)
    masks = (pixels[:, 0] > 0.5).astype("int32")
    return [train(pixels, masks) for _ in range(steps)]
