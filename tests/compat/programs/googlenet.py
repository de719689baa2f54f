"""GoogLeNet: nine inception modules, each of four branches that are concatenated."""

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
    LocalResponseNormalization2DLayer,
    MaxPool2DLayer,
    get_all_params,
    get_output,
)

from programs import make_images

BATCH, SIDE, CLASSES = 2, 32, 3


def inception(incoming, filters):
    """The branches' filters: behind the pool; 1x1; 3x3 and before it; 5x5 and before it."""
    pool, one, before_three, three, before_five, five = filters
    relu = {"nonlinearity": lasagne.nonlinearities.rectify}
    branches = [
        Conv2DLayer(incoming, one, 1, **relu),
        Conv2DLayer(Conv2DLayer(incoming, before_three, 1, **relu), three, 3, pad=1, **relu),
        Conv2DLayer(Conv2DLayer(incoming, before_five, 1, **relu), five, 5, pad=2, **relu),
        Conv2DLayer(MaxPool2DLayer(incoming, pool_size=3, stride=1, pad=1), pool, 1, **relu),
    ]
    return ConcatLayer(branches)


def build(input_var, modules):
    net = InputLayer((None, 3, None, None), input_var)
    net = Conv2DLayer(net, 4, 7, stride=2, pad=3)
    net = MaxPool2DLayer(net, pool_size=3, stride=2, ignore_border=False)
    net = LocalResponseNormalization2DLayer(net, alpha=0.00002, k=1)
    net = Conv2DLayer(net, 4, 1)
    net = Conv2DLayer(net, 6, 3, pad=1)
    net = LocalResponseNormalization2DLayer(net, alpha=0.00002, k=1)
    net = MaxPool2DLayer(net, pool_size=3, stride=2, ignore_border=False)
    for module in modules:
        if module in (2, 7):
            net = MaxPool2DLayer(net, pool_size=3, stride=2, ignore_border=False)
        net = inception(net, (2, 2, 2, 3, 1, 2))
    net = GlobalPoolLayer(net)
    return DenseLayer(net, CLASSES, nonlinearity=lasagne.nonlinearities.softmax)


def run(steps, modules=range(9)):
    lasagne.random.set_rng(np.random.RandomState(3))
    x, y = T.tensor4("x"), T.ivector("y")
    net = build(x, modules)
    loss = lasagne.objectives.categorical_crossentropy(get_output(net), y).mean()
    updates = lasagne.updates.nesterov_momentum(loss, get_all_params(net), learning_rate=0.01, momentum=0.9)
    train = theano.function([x, y], loss, updates=updates)
    pixels, labels = make_images(BATCH, SIDE, channels=3, classes=CLASSES)
    return [train(pixels - 0.5, labels) for _ in range(steps)]
