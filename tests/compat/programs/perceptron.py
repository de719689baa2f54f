"""A perceptron with a hidden layer, penalties on its weights, and an update for each parameter."""

import numpy as np
import theano
import theano.tensor as T

from programs import make_shared_images
from programs.logistic_regression import LogisticRegression

ROWS, BATCH, SIDE, HIDDEN, CLASSES = 80, 20, 6, 15, 4


class HiddenLayer:
    def __init__(self, rng, input, n_in, n_out, W=None, b=None, activation=T.tanh):
        self.input = input
        if W is None:
            bound = np.sqrt(6.0 / (n_in + n_out))
            values = np.asarray(rng.uniform(low=-bound, high=bound, size=(n_in, n_out)), dtype=theano.config.floatX)
            if activation == theano.tensor.nnet.sigmoid:
                values *= 4
            W = theano.shared(value=values, name="W", borrow=True)
        if b is None:
            b = theano.shared(value=np.zeros((n_out,), dtype=theano.config.floatX), name="b", borrow=True)
        self.W, self.b = W, b
        linear = T.dot(input, self.W) + self.b
        self.output = linear if activation is None else activation(linear)
        self.params = [self.W, self.b]


class MLP:
    def __init__(self, rng, input, n_in, n_hidden, n_out):
        self.hidden = HiddenLayer(rng=rng, input=input, n_in=n_in, n_out=n_hidden, activation=T.tanh)
        self.top = LogisticRegression(self.hidden.output, n_hidden, n_out)
        self.L1 = abs(self.hidden.W).sum() + abs(self.top.W).sum()
        self.L2_sqr = (self.hidden.W**2).sum() + (self.top.W**2).sum()
        self.params = self.hidden.params + self.top.params


def run(steps):
    pixels, labels = make_shared_images(ROWS, SIDE, classes=CLASSES)
    index, x, y = T.lscalar("index"), T.matrix("x"), T.ivector("y")
    network = MLP(np.random.RandomState(1234), x, SIDE * SIDE, HIDDEN, CLASSES)
    cost = network.top.negative_log_likelihood(y) + 0.001 * network.L1 + 0.0001 * network.L2_sqr
    gparams = [T.grad(cost, param) for param in network.params]
    train = theano.function(
        inputs=[index],
        outputs=cost,
        updates=[(param, param - 0.1 * gparam) for param, gparam in zip(network.params, gparams, strict=True)],
        givens={
            x: pixels[index * BATCH : (index + 1) * BATCH],
            y: labels[index * BATCH : (index + 1) * BATCH],
        },
    )
    return [train(step % (ROWS // BATCH)) for step in range(steps)]
