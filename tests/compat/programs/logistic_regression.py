"""Logistic regression by stochastic gradient descent on rows of shared variables."""

import numpy as np
import theano
import theano.tensor as T

from programs import make_shared_images

ROWS, BATCH, SIDE, CLASSES = 80, 20, 6, 4


class LogisticRegression:
    def __init__(self, input, n_in, n_out):
        self.W = theano.shared(np.zeros((n_in, n_out), dtype=theano.config.floatX), name="W", borrow=True)
        self.b = theano.shared(np.zeros((n_out,), dtype=theano.config.floatX), name="b", borrow=True)
        self.p_y_given_x = T.nnet.softmax(T.dot(input, self.W) + self.b)
        self.y_pred = T.argmax(self.p_y_given_x, axis=1)
        self.params = [self.W, self.b]

    def negative_log_likelihood(self, y):
        return -T.mean(T.log(self.p_y_given_x)[T.arange(y.shape[0]), y])

    def errors(self, y):
        if y.ndim != self.y_pred.ndim:
            raise TypeError("y should have the shape of self.y_pred", ("y", y.type, "y_pred", self.y_pred.type))
        return T.mean(T.neq(self.y_pred, y))


def run(steps):
    pixels, labels = make_shared_images(ROWS, SIDE, classes=CLASSES)
    index, x, y = T.lscalar("index"), T.matrix("x"), T.ivector("y")
    classifier = LogisticRegression(x, SIDE * SIDE, CLASSES)
    cost = classifier.negative_log_likelihood(y)
    rows = slice(index * BATCH, (index + 1) * BATCH)

    test = theano.function([index], classifier.errors(y), givens={x: pixels[rows], y: labels[rows]})
    g_W, g_b = T.grad(cost, classifier.params)
    train = theano.function(
        inputs=[index],
        outputs=cost,
        updates=[(classifier.W, classifier.W - 0.5 * g_W), (classifier.b, classifier.b - 0.5 * g_b)],
        givens={x: pixels[rows], y: labels[rows]},
    )
    n_batches = pixels.get_value(borrow=True).shape[0] // BATCH
    losses = []
    for step in range(steps):
        losses += [train(step % n_batches), np.mean([test(i) for i in range(n_batches)])]
    return losses
