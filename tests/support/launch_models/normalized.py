"""A network with batch normalization over the rows of all ranks, by the demos' layer."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "demos"))

import numpy as np
import theano
import theano.tensor as T
from regression_models import RankIndependentRegression

from lasagne_tools.batch_norm import BatchNormLayer
from lasagne_tools.library import lasagne

theano.config.floatX = "float64"  # of the layers' parameters


class Normalized(RankIndependentRegression):
    """Two dense layers with batch normalization between them."""

    rate = 0.01

    def build(self):
        x, y, layers, chosen = T.dmatrix("x"), T.dvector("y"), lasagne.layers, np.random.RandomState(0)
        weights = [chosen.normal(size=size) for size in ((3, 4), (4, 1))]
        first = layers.DenseLayer(layers.InputLayer((None, 3), x), 4, W=weights[0], b=None, nonlinearity=None)
        normalized = BatchNormLayer(first, sync=True, nonlinearity=lasagne.nonlinearities.tanh)
        net = layers.DenseLayer(normalized, 1, W=weights[1], nonlinearity=None)
        self.inputs, self.params, self.averages = [x, y], layers.get_all_params(net, trainable=True), {}
        self.loss = T.sqr(layers.get_output(net, average_updates=self.averages)[:, 0] - y).mean()
        self.val_outputs = [T.sqr(layers.get_output(net, deterministic=True)[:, 0] - y).mean()]
