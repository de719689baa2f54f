"""A model that reads its rows by loaders."""

import numpy as np
import theano
import theano.tensor as T

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
