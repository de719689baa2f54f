"""A model of the base class: PyTensor's, or Theano's, in a few lines."""

import numpy as np
import theano
import theano.tensor as T

from synkhronos.extensions.updates import sgd
from synkhronos.launch import Model
from synkhronos.training.model import by_own_gradient


class Line(Model):
    batch_size, n_epochs, rate = 10, 8, 0.05

    def build(self):
        x, y = T.matrix("x", dtype="float64"), T.vector("y", dtype="float64")
        w = theano.shared(np.random.normal(size=3), "w")
        self.inputs, self.params = [x, y], [w]
        self.loss = ((T.dot(x, w) - y) ** 2).mean()
        self.error = abs(T.dot(x, w) - y).max()

    def load(self):
        x = np.random.default_rng(0).normal(size=(165, 3))
        y = x @ [1.0, 2.0, 3.0]
        return [x[:120], y[:120]], [x[120:], y[120:]]


class Frozen(Line):
    """Learns nothing after its first epoch."""

    def updates(self, loss, params, learning_rate):
        return by_own_gradient(sgd(loss, params, learning_rate=learning_rate))

    def adjust_hyperp(self, epoch):
        self.shared_lr.set_value(0.0)
