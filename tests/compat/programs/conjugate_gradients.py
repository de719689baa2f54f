"""Logistic regression by scipy's conjugate gradients: all parameters are one vector, taken apart in the graph."""

import numpy as np
import scipy.optimize
import theano
import theano.tensor as T

from programs import make_shared_images

ROWS, BATCH, SIDE, CLASSES = 80, 20, 6, 4


def run(steps):
    pixels, labels = make_shared_images(ROWS, SIDE, classes=CLASSES)
    n_in, n_out = SIDE * SIDE, CLASSES
    theta = theano.shared(np.zeros((n_in + 1) * n_out, dtype=theano.config.floatX), name="theta", borrow=True)
    offset, x, y = T.lscalar("offset"), T.matrix("x"), T.ivector("y")
    W = theta[0 : n_in * n_out].reshape((n_in, n_out))
    b = theta[n_in * n_out : (n_in + 1) * n_out]
    p_y_given_x = T.nnet.softmax(T.dot(x, W) + b)
    cost = -T.mean(T.log(p_y_given_x)[T.arange(y.shape[0]), y])
    givens = {x: pixels[offset : offset + BATCH], y: labels[offset : offset + BATCH]}
    batch_cost = theano.function([offset], cost, givens=givens, name="batch_cost")
    batch_gradient = theano.function([offset], T.grad(cost, theta), givens=givens, name="batch_gradient")
    offsets = range(0, ROWS, BATCH)

    def mean_cost(value):
        theta.set_value(value.astype(theano.config.floatX), borrow=True)
        return np.mean([batch_cost(i) for i in offsets])

    def mean_gradient(value):
        theta.set_value(value.astype(theano.config.floatX), borrow=True)
        return np.mean([batch_gradient(i) for i in offsets], axis=0)

    losses = []
    scipy.optimize.fmin_cg(
        f=mean_cost,
        x0=np.zeros((n_in + 1) * n_out),
        fprime=mean_gradient,
        callback=lambda value: losses.append(mean_cost(value)),
        disp=0,
        maxiter=steps,
    )
    return losses
