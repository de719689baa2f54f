"""An LSTM that tells the mood of a text, for IMDB's reviews: that of Theano's tutorial.

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

from zoo_data import arrays
from zoo_model import ZooModel


class MeanOverWords(MergeLayer):
    """Mean of a layer's output over the words of a text; a mask marks the words."""

    def get_output_shape_for(self, input_shapes: list[Any]) -> tuple[Any, ...]:
        """Return the output's shape."""
        return (input_shapes[0][0], input_shapes[0][2])

    def get_output_for(self, inputs: list[Any], **kwargs: Any) -> Any:
        """Take the mean."""
        said, there = inputs
        return (said * there.dimshuffle(0, 1, "x")).sum(axis=1) / there.sum(axis=1).dimshuffle(0, "x")


class LSTM(ZooModel):
    """Word vectors, an LSTM layer, the mean over all words: 1,411,842 parameters.

    Attributes
    ----------
    words, length, width : int
        Number of words, of which 0 is none and 1 an unknown one; maximal number of words in a text; size of word
        vectors and of the layer.
    """

    batch_size, n_epochs, rate = 16, 100, 1.0
    words, length, width = 10_000, 100, 128
    settings = (*ZooModel.settings, "words", "length", "width")
    updates = staticmethod(lasagne.updates.adadelta)

    def build(self) -> None:
        """Make the network, its loss and its error."""
        x, y = T.imatrix("words"), T.ivector("mood")
        shape = (None, self.length)
        there = InputLayer(shape, T.cast(T.neq(x, 0), theano.config.floatX))
        net = EmbeddingLayer(InputLayer(shape, x), self.words, self.width)
        net = LSTMLayer(net, self.width, peepholes=False, mask_input=there)
        net = DropoutLayer(MeanOverWords([net, there]), 0.5)
        net = DenseLayer(net, 2, nonlinearity=softmax)
        self.inputs, self.params = [x, y], lasagne.layers.get_all_params(net, trainable=True)
        self.loss, self.error = self.judged(get_output(net), y)
        self.tested = self.judged(get_output(net, deterministic=True), y)

    def judged(self, answer: Any, y: Any) -> tuple[Any, Any]:
        """Return the cost and the error of answers."""
        cost = lasagne.objectives.categorical_crossentropy(answer, y).mean()
        return cost, T.neq(answer.argmax(axis=1), y).mean(dtype=theano.config.floatX)

    def load(self) -> tuple[list[Any], list[Any]]:
        """Return texts, rows of words' numbers with 0 behind the last, and their moods, to train and to validate."""
        if self.source is None:
            return self.made_up_texts(self.made_up, 0), self.made_up_texts(max(self.batch_size, self.made_up // 10), 1)
        parts = arrays(self.source)
        for texts, _ in parts:
            if texts.ndim != 2 or texts.shape[1] < self.length:
                raise ValueError(
                    f"data: expected texts of shape (n, {self.length} or more) in {self.source}, got {texts.shape}"
                )
        return parts

    def prepare(self, batch: list[Any], training: bool) -> list[Any]:
        """Cut long texts, and replace words that the network does not know."""
        texts = np.asarray(batch[0])[:, : self.length]
        return [np.where(texts < self.words, texts, 1), batch[1]]

    def made_up_texts(self, count: int, seed: int) -> list[np.ndarray]:
        """Return texts of different lengths, in which one word in six depends on the class."""
        rng = np.random.default_rng(seed)
        y = rng.integers(2, size=count, dtype=np.int32)
        x = rng.integers(202, max(203, self.words), size=(count, self.length), dtype=np.int32)
        tells = 2 + 100 * y[:, None] + rng.integers(100, size=x.shape, dtype=np.int32)
        x = np.where(rng.random(x.shape) < 1 / 6, tells, x)
        lengths = rng.integers(self.length // 2, self.length + 1, size=(count, 1))
        return [np.where(np.arange(self.length) < lengths, x, 0), y]
