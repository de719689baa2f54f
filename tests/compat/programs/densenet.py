"""A DenseNet: each layer sees the maps of all before it in its block; batch normalization before each convolution."""

import lasagne
import numpy as np
import theano
import theano.tensor as T
from lasagne.layers import (
    ConcatLayer,
    Conv2DLayer,
    DenseLayer,
    GlobalPoolLayer,
    InputLayer,
    NonlinearityLayer,
    Pool2DLayer,
    get_all_params,
    get_output,
)

from programs import make_images

BATCH, SIDE, CLASSES = 4, 8, 3
GROWTH, LAYERS, BLOCKS = 3, 2, 2


class BatchNormLayer(lasagne.layers.Layer):
    """Batch normalization; Lasagne 0.1 has none. Running averages change by ``default_update``."""

    def __init__(self, incoming, **kwargs):
        super().__init__(incoming, **kwargs)
        shape = (self.input_shape[1],)
        self.gamma = self.add_param(lasagne.init.Constant(1), shape, "gamma", regularizable=False)
        self.beta = self.add_param(lasagne.init.Constant(0), shape, "beta", regularizable=False)
        self.mean = self.add_param(lasagne.init.Constant(0), shape, "mean", trainable=False, regularizable=False)
        self.var = self.add_param(lasagne.init.Constant(1), shape, "var", trainable=False, regularizable=False)

    def get_output_for(self, input, deterministic=False, **kwargs):
        def spread(vector):
            return vector.dimshuffle("x", 0, "x", "x")

        mean, var = self.mean, self.var
        if not deterministic:
            mean, var = input.mean(axis=(0, 2, 3)), input.var(axis=(0, 2, 3))
            # Copies that the graph holds with no weight, so that functions find the updates.
            for running, batch_value in ((self.mean, mean), (self.var, var)):
                copy = theano.clone(running, share_inputs=False)
                copy.default_update = 0.9 * copy + 0.1 * batch_value
                mean, var = (mean + 0 * copy, var) if running is self.mean else (mean, var + 0 * copy)
        scale = self.gamma * T.inv(T.sqrt(var + 1e-4))
        return (input - spread(mean)) * spread(scale) + spread(self.beta)


def norm_relu(incoming):
    return NonlinearityLayer(BatchNormLayer(incoming), lasagne.nonlinearities.rectify)


def build(input_var, layers):
    def conv(incoming, filters, size):
        return Conv2DLayer(
            norm_relu(incoming), filters, size, pad="same", W=lasagne.init.HeNormal("relu"), b=None, nonlinearity=None
        )

    net = InputLayer((None, 1, SIDE, SIDE), input_var)
    net = Conv2DLayer(net, 2 * GROWTH, 3, pad="same", W=lasagne.init.HeNormal("relu"), b=None, nonlinearity=None)
    for block in range(BLOCKS):
        for _ in range(layers):
            net = ConcatLayer([net, conv(net, GROWTH, 3)], axis=1)
        if block < BLOCKS - 1:
            net = Pool2DLayer(conv(net, net.output_shape[1], 1), 2, mode="average_inc_pad")
    net = GlobalPoolLayer(norm_relu(net))
    return DenseLayer(net, CLASSES, nonlinearity=lasagne.nonlinearities.softmax)


def run(steps, layers=LAYERS):
    lasagne.random.set_rng(np.random.RandomState(2))
    x, y = T.tensor4("x"), T.ivector("y")
    net = build(x, layers)
    loss = lasagne.objectives.categorical_crossentropy(get_output(net), y).mean()
    loss += 1e-4 * lasagne.regularization.regularize_network_params(net, lasagne.regularization.l2)
    params = get_all_params(net, trainable=True)
    updates = lasagne.updates.momentum(loss, params, learning_rate=0.1, momentum=0.9)
    train = theano.function([x, y], loss, updates=updates)
    test = theano.function([x], get_output(net, deterministic=True).argmax(axis=1))
    pixels, labels = make_images(BATCH, SIDE, classes=CLASSES)
    losses = [train(pixels, labels) for _ in range(steps)]
    assert test(pixels).shape == (BATCH,)
    running = get_all_params(net, trainable=False)
    return losses + [float(abs(p.get_value()).sum()) for p in running]
