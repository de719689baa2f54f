"""A model that reads its rows by loaders."""

import numpy as np
import theano
import theano.tensor as T
from loading_sources import PartlyUnreadableRows

from synkhronos.launcher import Model
from synkhronos.loading import Loader


class Loaded(Model):
    """Linear regression, with loaders on each rank."""

    batch_size, n_epochs, rate = 10, 4, 0.05

    def build(self):
        x, y = T.matrix("x", dtype="float64"), T.vector("y", dtype="float64")
        w = theano.shared(np.zeros(3), "w")
        self.inputs, self.params = [x, y], [w]
        self.loss = ((T.dot(x, w) - y) ** 2).mean()

    def load(self):
        x = np.random.default_rng(0).normal(size=(165, 3))
        y = x @ [1.0, 2.0, 3.0]
        return Loader([x[:120], y[:120]], processes=2), Loader([x[120:], y[120:]], shuffle=False)


class PartlyUnreadable(Loaded):
    """Linear regression on rows of which the loader skips some, in one step."""

    batch_size, n_epochs, rate = 4, 1, 0.01

    def load(self):
        return Loader(PartlyUnreadableRows(), shuffle=False, on_error="skip"), []

    def updates(self, loss_or_grads, params, learning_rate):
        return [(w, w - learning_rate * g) for w, g in zip(params, theano.grad(loss_or_grads, params), strict=True)]
