"""Base class of the zoo's networks for images: loss, errors and data; a network adds its layers."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import lasagne
import numpy as np
import theano
import theano.tensor as T

from synkhronos.launcher import SettingsError
from zoo_data import load_arrays, make_image_loaders, make_images
from zoo_model import ZooModel

__all__ = ["Classifier"]


class Classifier(ZooModel):
    """A network that classifies images.

    Attributes
    ----------
    classes, side : int
        Number of classes; height and width of the image that the network takes.
    stored : int
        Height and width of the images in the data, at least `side`. Training images are cropped and mirrored at random,
        validation images are cropped in the centre.
    pad : int
        Number of reflected pixels at each border, added before the crop.
    decay : float
        Factor of half the sum of squared weights in the loss.
    """

    classes, side, stored, pad = 1000, 224, 256, 0
    decay = 0.0
    settings = (*ZooModel.settings, "classes", "side", "stored", "decay")
    #: Weight in the loss of each output of `layers`: the classifier, then auxiliary classifiers.
    shares: tuple[float, ...] = (1.0,)

    def layers(self, net: Any) -> Any:
        """Return the network's last layer, or a list of it and of layers with auxiliary outputs."""
        raise NotImplementedError(f"{type(self).__name__}.layers()")

    def build(self) -> None:
        """Make the network, its loss, and its errors."""
        x, y = T.tensor4("images", dtype="uint8"), T.ivector("labels")
        # Numbers around 0; pixels are sent as bytes, a quarter of the size of float32.
        pixels = (T.cast(x, theano.config.floatX) - 127.5) / 64.0
        outputs = self.layers(lasagne.layers.InputLayer((None, 3, self.side, self.side), pixels))
        self.outputs = outputs if isinstance(outputs, list) else [outputs]
        averages: OrderedDict[Any, Any] = OrderedDict()
        probabilities = lasagne.layers.get_output(self.outputs, average_updates=averages)
        costs = [lasagne.objectives.categorical_crossentropy(output, y).mean() for output in probabilities]
        weights = lasagne.regularization.regularize_network_params(self.outputs, lasagne.regularization.l2)
        self.inputs, self.averages = [x, y], averages
        self.params = lasagne.layers.get_all_params(self.outputs, trainable=True)
        self.loss = sum(weight * cost for weight, cost in zip(self.shares, costs, strict=True))
        self.loss = self.loss + 0.5 * self.decay * weights
        self.error = _average_errors(T.neq(probabilities[0].argmax(axis=1), y))
        test_probabilities = lasagne.layers.get_output(self.outputs[0], deterministic=True)
        n_better = (test_probabilities > test_probabilities[T.arange(y.shape[0]), y].dimshuffle(0, "x")).sum(axis=1)
        cost = lasagne.objectives.categorical_crossentropy(test_probabilities, y).mean()
        self.val_outputs = [cost, _average_errors(T.ge(n_better, 1)), _average_errors(T.ge(n_better, 5))]

    def load(self) -> tuple[Any, Any]:
        """Return images and classes for training, and for validation."""
        if self.data_path is None:
            shape = (3, self.stored, self.stored)
            valid = max(self.batch_size, self.n_synthetic // 10)
            return make_images(self.n_synthetic, shape, self.classes), make_images(valid, shape, self.classes, 1)
        if (self.data_path / "train").is_dir():
            loaders = make_image_loaders(self.data_path, self.stored)
            for loader in loaders:
                self._check_data((len(loader), 3, self.stored, self.stored), loader.source.labels)
            return loaders
        parts = load_arrays(self.data_path)
        for images, labels in parts:
            self._check_data(images.shape, labels)
        return parts

    def _check_data(self, shape: tuple[int, ...], labels: np.ndarray) -> None:
        """Refuse images that are too small, and classes that the network does not have."""
        if len(shape) != 4 or shape[1] != 3 or min(shape[2:]) + 2 * self.pad < self.side:
            raise SettingsError(
                f"data: expected images of shape (n, 3, {self.side} or more, {self.side} or more) in "
                f"{self.data_path}, got {shape}"
            )
        if np.max(labels) >= self.classes:
            raise SettingsError(f"data: expected classes from 0 to {self.classes - 1}, got {np.max(labels)}")

    def prepare(self, batch: list[Any], training: bool) -> list[Any]:
        """Crop the images, and mirror them."""
        images, labels = np.asarray(batch[0]), batch[1]
        if self.pad and training:
            images = np.pad(images, ((0, 0), (0, 0), (self.pad, self.pad), (self.pad, self.pad)), "reflect")
        margin = np.array(images.shape[2:]) - self.side
        cropped = np.empty((*images.shape[:2], self.side, self.side), images.dtype)
        for i, image in enumerate(images):
            top, left = np.random.randint(margin + 1) if training else margin // 2
            part = image[:, top : top + self.side, left : left + self.side]
            cropped[i] = part[:, :, ::-1] if training and np.random.randint(2) else part
        return [cropped, labels]


def _average_errors(wrong: Any) -> Any:
    return wrong.mean(dtype=theano.config.floatX)
