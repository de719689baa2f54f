"""The networks of Lasagne's example for handwritten digits.

Names are ``mlp``, ``cnn``, and ``custom_mlp:DEPTH,WIDTH,DROP_IN,DROP_HID``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lasagne_tools.library import T, lasagne, theano

__all__ = ["MODELS", "Network", "build_network", "parse_model"]

MODELS = "mlp, custom_mlp:DEPTH,WIDTH,DROP_IN,DROP_HID or cnn"
IMAGE = (1, 28, 28)
N_CLASSES = 10
# Defaults of the numbers in the name of a custom_mlp.
DEFAULTS = ["2", "800", "0.2", "0.5"]

_layers = lasagne.layers
_rectify = lasagne.nonlinearities.rectify


class ParsedModelName(NamedTuple):
    """Parsed name of a model: an ``"mlp"`` or a ``"cnn"``, its hidden layers and its shares of dropout."""

    kind: str
    depth: int
    width: int
    drop_input: float
    drop_hidden: float


class Network(NamedTuple):
    """A network's last layer, its expressions and its trainable parameters."""

    output: Any
    #: Images of shape (n, 1, 28, 28), and labels.
    x: Any
    y: Any
    params: list[Any]
    #: Mean cross-entropy, with dropout.
    loss: Any
    #: Mean cross-entropy, and the share of wrong answers, without dropout.
    test_loss: Any
    test_error: Any


def parse_model(name: str) -> ParsedModelName:
    """Parse the name of a model; raise ValueError if there is none of this name.

    Missing numbers of a ``custom_mlp`` have the values of `DEFAULTS`.
    """
    if name == "mlp":
        return ParsedModelName("mlp", depth=2, width=800, drop_input=0.2, drop_hidden=0.5)
    if name == "cnn":
        return ParsedModelName("cnn", depth=1, width=256, drop_input=0.0, drop_hidden=0.5)
    kind, _, numbers = name.partition(":")
    if kind != "custom_mlp":
        raise ValueError(f"there is no model {name!r}; choose {MODELS}")
    words = numbers.split(",") if numbers else []
    words += DEFAULTS[len(words) :]
    try:
        depth, width, drop_input, drop_hidden = (f(w) for f, w in zip((int, int, float, float), words, strict=True))
    except ValueError:
        raise ValueError(
            f"{name!r} does not give one to four numbers as custom_mlp:DEPTH,WIDTH,DROP_IN,DROP_HID does, "
            "such as custom_mlp:3,1000,0.1,0.5"
        ) from None
    if depth < 0 or width < 1:
        raise ValueError(f"{name!r}: DEPTH has to be at least 0 and WIDTH at least 1")
    if not (0 <= drop_input < 1 and 0 <= drop_hidden < 1):
        raise ValueError(f"{name!r}: DROP_IN and DROP_HID have to be from 0 up to 1")
    return ParsedModelName("mlp", depth, width, drop_input, drop_hidden)


def build_network(name: str, seed: int = 1, dropout: bool = True) -> Network:
    """Return a network with Lasagne's initial weights; without `dropout` it has none, whatever its name says."""
    model = parse_model(name)
    if not dropout:
        model = model._replace(drop_input=0.0, drop_hidden=0.0)
    lasagne.random.set_rng(np.random.RandomState(seed))
    x, y = T.tensor4("images", dtype=theano.config.floatX), T.ivector("labels")
    images = _layers.InputLayer((None, *IMAGE), x)
    output = _build_mlp(images, model) if model.kind == "mlp" else _build_cnn(images, model)

    def compute_cross_entropy(probabilities: Any) -> Any:
        return lasagne.objectives.categorical_crossentropy(probabilities, y).mean()

    test_output = _layers.get_output(output, deterministic=True)
    return Network(
        output,
        x,
        y,
        _layers.get_all_params(output, trainable=True),
        compute_cross_entropy(_layers.get_output(output)),
        compute_cross_entropy(test_output),
        T.neq(T.argmax(test_output, axis=1), y).mean(dtype=theano.config.floatX),
    )


def _build_mlp(images: Any, model: ParsedModelName) -> Any:
    """Fully connected layers with rectifiers, each behind dropout."""
    layer = _add_dropout(images, model.drop_input)
    for _ in range(model.depth):
        layer = _layers.DenseLayer(layer, model.width, nonlinearity=_rectify)
        layer = _add_dropout(layer, model.drop_hidden)
    return _layers.DenseLayer(layer, N_CLASSES, nonlinearity=lasagne.nonlinearities.softmax)


def _build_cnn(images: Any, model: ParsedModelName) -> Any:
    """Two convolutions of 5 by 5 with 32 filters, each pooled by 2, then fully connected layers."""
    layer = images
    for _ in range(2):
        layer = _layers.Conv2DLayer(layer, num_filters=32, filter_size=5, nonlinearity=_rectify)
        layer = _layers.MaxPool2DLayer(layer, pool_size=2)
    for _ in range(model.depth):
        layer = _layers.DenseLayer(_add_dropout(layer, model.drop_hidden), model.width, nonlinearity=_rectify)
    layer = _add_dropout(layer, model.drop_hidden)
    return _layers.DenseLayer(layer, N_CLASSES, nonlinearity=lasagne.nonlinearities.softmax)


def _add_dropout(layer: Any, share: float) -> Any:
    """Leave out a share of the units in training."""
    return _layers.DropoutLayer(layer, p=share) if share else layer
