"""A convolutional network after LeNet: two layers of convolution and pooling, and a perceptron on top."""

import numpy as np
import theano
import theano.tensor as T
from theano.tensor.nnet import conv2d
from theano.tensor.signal import pool

from programs import make_shared_images
from programs.logistic_regression import LogisticRegression
from programs.perceptron import HiddenLayer

ROWS, BATCH, SIDE, CLASSES = 32, 8, 16, 4
KERNELS = (3, 4)


class ConvPoolLayer:
    def __init__(self, rng, input, filter_shape, image_shape, poolsize=(2, 2)):
        assert image_shape[1] == filter_shape[1]
        fan_in = np.prod(filter_shape[1:])
        fan_out = filter_shape[0] * np.prod(filter_shape[2:]) // np.prod(poolsize)
        bound = np.sqrt(6.0 / (fan_in + fan_out))
        values = np.asarray(rng.uniform(low=-bound, high=bound, size=filter_shape), dtype=theano.config.floatX)
        self.W = theano.shared(values, borrow=True)
        self.b = theano.shared(np.zeros((filter_shape[0],), dtype=theano.config.floatX), borrow=True)
        maps = conv2d(input=input, filters=self.W, filter_shape=filter_shape, input_shape=image_shape)
        pooled = pool.pool_2d(input=maps, ws=poolsize, ignore_border=True)
        # One bias for each map, the same for all images and places.
        self.output = T.tanh(pooled + self.b.dimshuffle("x", 0, "x", "x"))
        self.params = [self.W, self.b]


def run(steps):
    rng = np.random.RandomState(23455)
    pixels, labels = make_shared_images(ROWS, SIDE, classes=CLASSES)
    index, x, y = T.lscalar(), T.matrix("x"), T.ivector("y")
    first = ConvPoolLayer(
        rng, x.reshape((BATCH, 1, SIDE, SIDE)), (KERNELS[0], 1, 5, 5), (BATCH, 1, SIDE, SIDE)
    )  # 16 - 5 + 1 = 12, 12 / 2 = 6
    second = ConvPoolLayer(rng, first.output, (KERNELS[1], KERNELS[0], 3, 3), (BATCH, KERNELS[0], 6, 6))
    hidden = HiddenLayer(rng, second.output.flatten(2), KERNELS[1] * 2 * 2, 10, activation=T.tanh)
    top = LogisticRegression(hidden.output, 10, CLASSES)
    cost = top.negative_log_likelihood(y)
    params = top.params + hidden.params + second.params + first.params
    grads = T.grad(cost, params)
    train = theano.function(
        [index],
        cost,
        updates=[(param, param - 0.1 * grad) for param, grad in zip(params, grads, strict=True)],
        givens={
            x: pixels[index * BATCH : (index + 1) * BATCH],
            y: labels[index * BATCH : (index + 1) * BATCH],
        },
    )
    return [train(step % (ROWS // BATCH)) for step in range(steps)]
