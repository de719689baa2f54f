"""Denoising autoencoders on top of each other, trained one by one; then a classifier on top of them, as a whole."""

import numpy as np
import theano
import theano.tensor as T

from programs import make_shared_images
from programs.autoencoder import DenoisingAutoencoder, make_shared_noise
from programs.logistic_regression import LogisticRegression
from programs.perceptron import HiddenLayer

ROWS, BATCH, SIDE, CLASSES = 60, 20, 6, 4
SIZES = (12, 8)


class StackedAutoencoders:
    def __init__(self, rng, n_ins, sizes, n_outs):
        self.x, self.y, self.noises = T.matrix("x"), T.ivector("y"), []
        self.sigmoid_layers, self.autoencoders, self.params = [], [], []
        layer_input, input_size = self.x, n_ins
        for size in sizes:
            layer = HiddenLayer(rng, layer_input, input_size, size, activation=T.nnet.sigmoid)
            noise = T.matrix("noise")
            # Both have the same weights.
            model = DenoisingAutoencoder(rng, layer_input, noise, input_size, size, W=layer.W, bhid=layer.b)
            self.sigmoid_layers.append(layer)
            self.autoencoders.append(model)
            self.noises.append(noise)
            self.params.extend(layer.params)
            layer_input, input_size = layer.output, size
        self.top = LogisticRegression(layer_input, input_size, n_outs)
        self.params.extend(self.top.params)
        self.finetune_cost = self.top.negative_log_likelihood(self.y)

    def pretraining_functions(self, pixels):
        index = T.lscalar("index")
        corruption_level, learning_rate = T.scalar("corruption"), T.scalar("lr")
        begin = index * BATCH
        functions = []
        for model, noise in zip(self.autoencoders, self.noises, strict=True):
            cost, updates = model.get_cost_updates(corruption_level, learning_rate)
            columns = model.W.get_value(borrow=True).shape[0]
            functions.append(
                theano.function(
                    inputs=[
                        index,
                        theano.In(corruption_level, value=0.2),
                        theano.In(learning_rate, value=0.1),
                    ],
                    outputs=cost,
                    updates=updates,
                    givens={
                        self.x: pixels[begin : begin + BATCH],
                        noise: make_shared_noise(ROWS, columns)[begin : begin + BATCH],
                    },
                )
            )
        return functions

    def finetune_function(self, pixels, labels, learning_rate):
        index = T.lscalar("index")
        updates = [
            (p, p - learning_rate * g)
            for p, g in zip(self.params, T.grad(self.finetune_cost, self.params), strict=True)
        ]
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return theano.function(
            inputs=[index],
            outputs=self.finetune_cost,
            updates=updates,
            givens={self.x: pixels[rows], self.y: labels[rows]},
            name="train",
        )


def run(steps):
    pixels, labels = make_shared_images(ROWS, SIDE, classes=CLASSES)
    network = StackedAutoencoders(np.random.RandomState(89677), SIDE * SIDE, SIZES, CLASSES)
    losses = []
    for i, pretrain in enumerate(network.pretraining_functions(pixels)):
        for step in range(steps):
            if i == 0:
                losses.append(pretrain(step % 3))
            else:
                losses.append(pretrain(index=step % 3, corruption=0.3, lr=0.2))
    train = network.finetune_function(pixels, labels, 0.1)
    return losses + [train(step % 3) for step in range(steps)]
