"""The zoo's networks as the tests train them: of few rows, without dropout, which draws by streams, and most small.

``tests/support/tables/make_theano_tables.py zoo`` writes the losses, in Theano's environment.
"""

import importlib
import sys
from pathlib import Path
from unittest import mock

import numpy as np

import synkhronos.compat  # noqa: F401 - before anything imports theano

DEMOS = Path(__file__).resolve().parents[2] / "demos"
sys.path[1:1] = [str(DEMOS / folder) for folder in ("", "zoo")]

import lasagne  # noqa: E402

#: Module; parameters, as published or counted from its layers; and options that make the network small.  Two are large, and
#: XLA compiles them: Python's linker of PyTensor can't run the first.  VGG16 gets small images, of 2 by 2 pixels behind its
#: last pool.
NETWORKS = {
    "AlexNet": ("alexnet", 60_965_224, {"side": 67, "stored": 70, "classes": 5, "units": 16, "rate": 1e-3}),
    "GoogLeNet": ("googlenet", 13_378_280, {"batch_size": 1, "rate": 1e-4}),
    "VGG16": ("vgg16", 138_357_544, {"side": 64, "stored": 64, "batch_size": 1, "rate": 1e-4}),
    "ResNet50": (
        "resnet50",
        25_557_032,
        {"side": 64, "stored": 70, "classes": 5, "depth": 14, "width": 8, "rate": 1e-3},
    ),
    "WideResNet": ("wide_resnet", 36_479_194, {"side": 16, "stored": 16, "depth": 10, "widen": 1, "rate": 1e-2}),
    "Cifar10": ("cifar10", 351_946, {}),
    "WGAN": ("wgan", 13_377_218, {"width": 4, "noise": 10, "critic_steps": 2, "rate": 0.01, "clip": 0.2, "images": 16}),
    "LSGAN": ("lsgan", 13_377_218, {"width": 4, "noise": 10, "images": 16}),
    "LSTM": ("imdb", 1_411_842, {"words": 500, "length": 7, "width": 8}),
}
LARGE = ["GoogLeNet", "VGG16"]
#: Numbers of GoogLeNet's inception modules and pools in the table: XLA compiles each of its nine modules for two seconds.
GOOGLENET_MODULES = (0, 2, 3, 4, 8, 10)


class Recorder:
    """Records the calls of a class."""

    def __init__(self):
        self.losses = []

    def start(self):
        pass

    def end(self, mode):
        pass

    def train_error(self, count, *values):
        self.losses += [float(value) for value in values if value is not None]

    def val_error(self, count, *values, rows=1):
        self.losses += [float(value) for value in values]


class ZeroRandomState(np.random.RandomState):
    """Random generator that returns zeros, to save time."""

    def normal(self, loc=0, scale=1, size=None):
        return np.zeros(size, np.float32)

    def uniform(self, low=0, high=1, size=None):
        return np.zeros(size, np.float32)


def make_network(name, random=None, **config):
    """Return an instance."""
    module = importlib.import_module(NETWORKS[name][0])
    np.random.seed(3)
    lasagne.random.set_rng(random or np.random.RandomState(4))
    config = {"rank": 0, "size": 1, "seed": 0, "batch_size": 2, **config}
    return getattr(module, name)(config)


def disable_dropout():
    """Disable dropout in Lasagne's layers."""
    lasagne.layers.DropoutLayer.get_output_for = lambda self, input, **kwargs: input


def make_network_for_table(name):
    """Return an instance, of the size that the table is of."""
    config = NETWORKS[name][2]
    if name != "GoogLeNet":
        return make_network(name, **config)
    googlenet = importlib.import_module("googlenet")
    modules = [googlenet.MODULES[number] for number in GOOGLENET_MODULES]
    with mock.patch.multiple(googlenet, MODULES=modules, HELPERS=(2, 3)):
        return make_network(name, **config)


def train_and_validate(model, recorder):
    """Take a few steps, and validate."""
    model.compile_iter_fns()
    model.reset_iter("val")
    n_steps = 2 if type(model).__name__ in LARGE else 3
    for i in range(n_steps):
        model.train_iter(i, recorder)
    model.val_iter(n_steps, recorder)
