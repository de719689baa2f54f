"""VGG with eight convolutions, in blocks; it starts from given weights and trains them."""

from collections import OrderedDict

import lasagne
import numpy as np
import theano
import theano.tensor as T
from lasagne.layers import Conv2DLayer, DenseLayer, DropoutLayer, InputLayer, NonlinearityLayer, Pool2DLayer
from lasagne.nonlinearities import softmax

from programs import make_images

BATCH, SIDE, CLASSES = 2, 32, 4
#: Convolutions and filters of each block.
BLOCKS = ((1, 2), (1, 3), (2, 4), (2, 4), (2, 4))


def build_model(input_var, blocks):
    net = OrderedDict()
    net["input"] = InputLayer((None, 3, SIDE, SIDE), input_var)
    last = net["input"]
    for block, (convolutions, filters) in enumerate(blocks, 1):
        for i in range(1, convolutions + 1):
            last = net[f"conv{block}_{i}"] = Conv2DLayer(last, filters, 3, pad=1)
        last = net[f"pool{block}"] = Pool2DLayer(last, 2)
    net["fc6"] = DenseLayer(last, num_units=8)
    net["fc6_dropout"] = DropoutLayer(net["fc6"], p=0.5)
    net["fc7"] = DenseLayer(net["fc6_dropout"], num_units=8)
    net["fc7_dropout"] = DropoutLayer(net["fc7"], p=0.5)
    net["fc8"] = DenseLayer(net["fc7_dropout"], num_units=CLASSES, nonlinearity=None)
    net["prob"] = NonlinearityLayer(net["fc8"], softmax)
    return net


def run(steps, blocks=BLOCKS):
    lasagne.random.set_rng(np.random.RandomState(4))
    x, y = T.tensor4("x"), T.ivector("y")
    net = build_model(x, blocks)
    rng = np.random.RandomState(16)
    values = [
        (rng.normal(size=v.shape) * np.sqrt(2 / max(np.prod(v.shape[1:]), 1)) if v.ndim > 1 else v).astype(v.dtype)
        for v in lasagne.layers.get_all_param_values(net["prob"])
    ]
    lasagne.layers.set_all_param_values(net["prob"], values)

    # Dropout draws by streams, whose numbers differ by library; the compared loss has no dropout.
    noisy = lasagne.layers.get_output(net["prob"])
    predict = theano.function([x], noisy)
    pixels, labels = make_images(BATCH, SIDE, channels=3, classes=CLASSES)
    np.testing.assert_allclose(predict(pixels).sum(axis=1), 1, rtol=1e-5)
    assert not np.array_equal(predict(pixels), predict(pixels))

    fc7, prob = lasagne.layers.get_output([net["fc7"], net["prob"]], deterministic=True)
    loss = lasagne.objectives.categorical_crossentropy(prob, y).mean()
    params = lasagne.layers.get_all_params(net["prob"], trainable=True)
    updates = lasagne.updates.adam(loss, params, learning_rate=0.001)
    train = theano.function([x, y], [loss, fc7.sum()], updates=updates)
    losses = []
    for _ in range(steps):
        losses.extend(train(pixels, labels))
    return losses
