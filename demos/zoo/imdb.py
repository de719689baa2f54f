"""An LSTM that classifies texts, for IMDB's reviews: the network of Theano's tutorial.

References
----------
.. [1] Hochreiter, S. and Schmidhuber, J. (1997): Long short-term memory. Neural Computation 9(8).
"""

from __future__ import annotations

from typing import Any

import lasagne
import numpy as np
import theano
import theano.tensor as T
from lasagne.layers import DenseLayer, DropoutLayer, EmbeddingLayer, InputLayer, LSTMLayer, MergeLayer, get_output
from lasagne.nonlinearities import softmax

from synkhronos.launcher import SettingsError
from zoo_data import load_arrays
from zoo_model import ZooModel


class MeanOverWords(MergeLayer):
    """Mean of a layer's output over the words of a text; a mask marks the words."""

    def get_output_shape_for(self, input_shapes: list[Any]) -> tuple[Any, ...]:
        """Return the output's shape."""
        return (input_shapes[0][0], input_shapes[0][2])

    def get_output_for(self, inputs: list[Any], **kwargs: Any) -> Any:
        """Take the mean."""
        values, mask = inputs
        return (values * mask.dimshuffle(0, 1, "x")).sum(axis=1) / mask.sum(axis=1).dimshuffle(0, "x")


class LSTM(ZooModel):
    """Word vectors, an LSTM layer, the mean over all words: 1,411,842 parameters.

    Attributes
    ----------
    words, length, width : int
        Size of the vocabulary, in which 0 is padding and 1 an unknown word; maximal number of words in a text; size of
        word vectors and of the layer.
    """

    batch_size, n_epochs, rate = 16, 100, 1.0
    words, length, width = 10_000, 100, 128
    settings = (*ZooModel.settings, "words", "length", "width")
    updates = staticmethod(lasagne.updates.adadelta)

    def build(self) -> None:
        """Make the network, its loss and its error."""
        x, y = T.imatrix("words"), T.ivector("mood")
        shape = (None, self.length)
        mask = InputLayer(shape, T.cast(T.neq(x, 0), theano.config.floatX))
        net = EmbeddingLayer(InputLayer(shape, x), self.words, self.width)
        net = LSTMLayer(net, self.width, peepholes=False, mask_input=mask)
        net = DropoutLayer(MeanOverWords([net, mask]), 0.5)
        net = DenseLayer(net, 2, nonlinearity=softmax)
        self.inputs, self.params = [x, y], lasagne.layers.get_all_params(net, trainable=True)
        self.loss, self.error = self.make_metrics(get_output(net), y)
        self.val_outputs = self.make_metrics(get_output(net, deterministic=True), y)

    def make_metrics(self, probabilities: Any, y: Any) -> tuple[Any, Any]:
        """Return the cost and the error of predicted probabilities."""
        cost = lasagne.objectives.categorical_crossentropy(probabilities, y).mean()
        return cost, T.neq(probabilities.argmax(axis=1), y).mean(dtype=theano.config.floatX)

    def load(self) -> tuple[list[Any], list[Any]]:
        """Return texts, rows of word indexes padded by 0, and their classes, for training and for validation."""
        if self.data_path is None:
            n_valid = max(self.batch_size, self.n_synthetic // 10)
            return self.make_texts(self.n_synthetic, 0), self.make_texts(n_valid, 1)
        parts = load_arrays(self.data_path)
        for texts, _ in parts:
            if texts.ndim != 2 or texts.shape[1] < self.length:
                raise SettingsError(
                    f"data: expected texts of shape (n, {self.length} or more) in {self.data_path}, got {texts.shape}"
                )
        return parts

    def prepare(self, batch: list[Any], training: bool) -> list[Any]:
        """Cut long texts, and replace words that the network does not know."""
        texts = np.asarray(batch[0])[:, : self.length]
        return [np.where(texts < self.words, texts, 1), batch[1]]

    def make_texts(self, count: int, seed: int) -> list[np.ndarray]:
        """Return texts of different lengths, in which one word in six depends on the class."""
        rng = np.random.default_rng(seed)
        y = rng.integers(2, size=count, dtype=np.int32)
        x = rng.integers(202, max(203, self.words), size=(count, self.length), dtype=np.int32)
        class_words = 2 + 100 * y[:, None] + rng.integers(100, size=x.shape, dtype=np.int32)
        x = np.where(rng.random(x.shape) < 1 / 6, class_words, x)
        lengths = rng.integers(self.length // 2, self.length + 1, size=(count, 1))
        return [np.where(np.arange(self.length) < lengths, x, 0), y]
