"""Base class of the zoo's networks for images.

`Classifier`
    Loss, errors, and data; a network adds its layers.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import lasagne
import numpy as np
import theano
import theano.tensor as T

from zoo_data import arrays, made_up_images, pictures
from zoo_model import ZooModel

__all__ = ["Classifier"]


class Classifier(ZooModel):
    """A network that classifies images.

    Attributes
    ----------
    classes, side : int
        Number of classes; height and width of the image that the network takes.
    stored : int
        Height and width of the images in the data, at least `side`: that is cropped out of it, at a place and mirrored
        by chance; for validation, in the middle.
    pad : int
        Number of pixels that are reflected at each border before that.
    decay : float
        Factor of half the sum of squared weights in the loss.
    """

    classes, side, stored, pad = 1000, 224, 256, 0
    decay = 0.0
    settings = (*ZooModel.settings, "classes", "side", "stored", "decay")
    #: Weight in the loss of each output of `layers`: the classifier, then auxiliary classifiers.
    shares: tuple[float, ...] = (1.0,)

    def layers(self, net: Any) -> Any:
        """Put the network on its input, and return its last layer; or a list: others behind it help to train."""
        raise NotImplementedError(f"{type(self).__name__}.layers()")

    def build(self) -> None:
        """Make the network, its loss, and its errors."""
        x, y = T.tensor4("images", dtype="uint8"), T.ivector("labels")
        # Numbers around 0; pixels travel as bytes, a fourth of what they take as numbers.
        pixels = (T.cast(x, theano.config.floatX) - 127.5) / 64.0
        found = self.layers(lasagne.layers.InputLayer((None, 3, self.side, self.side), pixels))
        self.outputs = found if isinstance(found, list) else [found]
        averages: OrderedDict[Any, Any] = OrderedDict()
        answers = lasagne.layers.get_output(self.outputs, average_updates=averages)
        costs = [lasagne.objectives.categorical_crossentropy(answer, y).mean() for answer in answers]
        weights = lasagne.regularization.regularize_network_params(self.outputs, lasagne.regularization.l2)
        self.inputs, self.averages = [x, y], averages
        self.params = lasagne.layers.get_all_params(self.outputs, trainable=True)
        self.loss = sum(share * cost for share, cost in zip(self.shares, costs, strict=True))
        self.loss = self.loss + 0.5 * self.decay * weights
        self.error = _share_of(T.neq(answers[0].argmax(axis=1), y))
        answer = lasagne.layers.get_output(self.outputs[0], deterministic=True)
        better = (answer > answer[T.arange(y.shape[0]), y].dimshuffle(0, "x")).sum(axis=1)
        cost = lasagne.objectives.categorical_crossentropy(answer, y).mean()
        self.tested = [cost, _share_of(T.ge(better, 1)), _share_of(T.ge(better, 5))]

    def load(self) -> tuple[Any, Any]:
        """Return images and classes to train, and to validate."""
        if self.source is None:
            shape = (3, self.stored, self.stored)
            valid = max(self.batch_size, self.made_up // 10)
            return made_up_images(self.made_up, shape, self.classes), made_up_images(valid, shape, self.classes, 1)
        if (self.source / "train").is_dir():
            loaders = pictures(self.source, self.stored)
            for loader in loaders:
                self._check((len(loader), 3, self.stored, self.stored), loader.source.labels)
            return loaders
        parts = arrays(self.source)
        for images, labels in parts:
            self._check(images.shape, labels)
        return parts

    def _check(self, shape: tuple[int, ...], labels: np.ndarray) -> None:
        """Refuse images that are too small, and classes that the network does not have."""
        if len(shape) != 4 or shape[1] != 3 or min(shape[2:]) + 2 * self.pad < self.side:
            raise ValueError(
                f"data: expected images of shape (n, 3, {self.side} or more, {self.side} or more) in "
                f"{self.source}, got {shape}"
            )
        if np.max(labels) >= self.classes:
            raise ValueError(f"data: expected classes from 0 to {self.classes - 1}, got {np.max(labels)}")

    def prepare(self, batch: list[Any], training: bool) -> list[Any]:
        """Crop the images, and mirror them."""
        images, labels = np.asarray(batch[0]), batch[1]
        if self.pad and training:
            images = np.pad(images, ((0, 0), (0, 0), (self.pad, self.pad), (self.pad, self.pad)), "reflect")
        room = np.array(images.shape[2:]) - self.side
        cropped = np.empty((*images.shape[:2], self.side, self.side), images.dtype)
        for i, image in enumerate(images):
            top, left = np.random.randint(room + 1) if training else room // 2
            part = image[:, top : top + self.side, left : left + self.side]
            cropped[i] = part[:, :, ::-1] if training and np.random.randint(2) else part
        return [cropped, labels]


def _share_of(wrong: Any) -> Any:
    return wrong.mean(dtype=theano.config.floatX)
