"""A model of the base class: PyTensor's, or Theano's, in a few lines."""

import numpy as np
import theano
import theano.tensor as T
from masks import rows

from synkhronos.launch import Model
from synkhronos.training.training_graph import apply_own_gradient
from synkhronos.training.updates import sgd


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
        return apply_own_gradient(sgd(loss, params, learning_rate=learning_rate))

    def adjust_hyperp(self, epoch):
        self.shared_lr.set_value(0.0)


class Masked(Line):
    """A mean over the numbers that a mask selects, none in some batches; learns nothing to speak of."""

    batch_size, n_epochs, rate = 2, 2, 1e-12

    def build(self):
        x, y, mask = T.dmatrix("x"), T.dmatrix("y"), T.dmatrix("mask")
        w, average = theano.shared(np.zeros(3), "w"), theano.shared(np.zeros(3), "average")
        self.inputs, self.params, self.weight = [x, y, mask], [w], mask.sum()
        self.loss = (mask * (x * w - y) ** 2).sum() / self.weight
        self.error = (mask * abs(x * w - y)).sum() / self.weight
        self.averages = {average: 0.9 * average + 0.1 * x.mean(axis=0)}

    def load(self):
        x, y, mask = rows()
        return [x[:40], y[:40], mask[:40]], [x[40:], y[40:], mask[40:]]


class Stepping(Masked):
    """The same with plain gradient descent."""

    rate = 0.1

    def updates(self, loss, params, learning_rate):
        return apply_own_gradient(sgd(loss, params, learning_rate=learning_rate, weight=self.weight))


class Unweighted(Masked):
    """The same without the weight."""

    def build(self):
        super().build()
        self.weight = None

    def load(self):
        (x, y, _), valid = super().load()
        return [x, y, np.ones_like(x)], valid[:2] + [np.ones_like(valid[0])]
