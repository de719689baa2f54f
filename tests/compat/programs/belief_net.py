"""A deep belief net: Boltzmann machines trained one by one, whose weights are then those of a perceptron."""

import numpy as np
import theano
import theano.tensor as T

from programs import make_shared_images
from programs.boltzmann import BATCH, RBM, draw_noise
from programs.logistic_regression import LogisticRegression
from programs.perceptron import HiddenLayer

ROWS, SIDE, CLASSES = 60, 5, 4
SIZES = (10, 8)


class DBN:
    def __init__(self, numpy_rng, n_ins, sizes, n_outs):
        self.x, self.y = T.matrix("x"), T.ivector("y")
        self.sigmoid_layers, self.rbm_layers, self.params = [], [], []
        for i, size in enumerate(sizes):
            input_size = n_ins if i == 0 else sizes[i - 1]
            layer_input = self.x if i == 0 else self.sigmoid_layers[-1].output
            layer = HiddenLayer(numpy_rng, layer_input, input_size, size, activation=T.nnet.sigmoid)
            self.sigmoid_layers.append(layer)
            self.params.extend(layer.params)
            rbm = RBM(layer_input, input_size, size, W=layer.W, hbias=layer.b, numpy_rng=numpy_rng)
            self.rbm_layers.append(rbm)
        self.top = LogisticRegression(self.sigmoid_layers[-1].output, sizes[-1], n_outs)
        self.params.extend(self.top.params)
        self.finetune_cost = self.top.negative_log_likelihood(self.y)

    def pretraining_functions(self, pixels, k):
        index, learning_rate = T.lscalar("index"), T.scalar("lr")
        functions = []
        for rbm in self.rbm_layers:
            noise = [T.matrix("first"), T.tensor3("visible"), T.tensor3("hidden")]
            cost, updates = rbm.get_cost_updates(noise, learning_rate, persistent=None, k=k)
            functions.append(
                theano.function(
                    inputs=[index, *noise, learning_rate],
                    outputs=cost,
                    updates=updates,
                    givens={self.x: pixels[index * BATCH : (index + 1) * BATCH]},
                    on_unused_input="ignore",  # in a chain of one step the last hidden units are not drawn
                )
            )
        return functions


def run(steps):
    pixels, labels = make_shared_images(ROWS, SIDE, classes=CLASSES)
    network = DBN(np.random.RandomState(123), SIDE * SIDE, SIZES, CLASSES)
    losses = []
    for rbm, pretrain in zip(network.rbm_layers, network.pretraining_functions(pixels, k=1), strict=True):
        for step, noise in enumerate(draw_noise(steps, rbm.n_visible, rbm.n_hidden, 1)):
            losses.append(pretrain(step % (ROWS // BATCH), *noise, 0.1))

    index = T.lscalar("index")
    gparams = T.grad(network.finetune_cost, network.params)
    train = theano.function(
        inputs=[index],
        outputs=[network.finetune_cost, network.top.errors(network.y)],
        updates=[(p, p - g * 0.1) for p, g in zip(network.params, gparams, strict=True)],
        givens={
            network.x: pixels[index * BATCH : (index + 1) * BATCH],
            network.y: labels[index * BATCH : (index + 1) * BATCH],
        },
    )
    for step in range(steps):
        losses.extend(train(step % (ROWS // BATCH)))
    return losses
