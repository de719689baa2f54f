"""A residual network of bottleneck blocks (He et al., 2015), made of Lasagne's layers.

References
----------
.. [1] He, K., Zhang, X., Ren, S. and Sun, J. (2015): Deep residual learning for image recognition. arXiv:1512.03385.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lasagne_tools.batch_norm import BatchNormLayer, get_running_averages
from lasagne_tools.layers import ConvLayer, MeanLayer
from lasagne_tools.library import T, lasagne, theano

__all__ = ["BLOCKS", "Network", "add_residual_layers", "build_network", "build_training_loss"]

BLOCKS = {14: (1, 1, 1, 1), 26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
# Ratio of a block's output channels to the channels of its inner convolutions.
EXPANSION = 4
# Approximate mean and standard deviation of pixels, to standardize the network's input.
PIXEL_MEAN, PIXEL_SPREAD = 127.5, 64.0
# Enough for Theano and 152 layers.
RECURSION_LIMIT = 50_000

_layers = lasagne.layers
# The gradient of Lasagne's rectifier needs its input; that of T.nnet.relu on PyTensor needs only its output, which the
# next layer keeps anyway.
_rectify = T.nnet.relu


class Network(NamedTuple):
    """A network's last layer, its expressions, its trainable parameters and its running averages."""

    output: Any
    #: Images, uint8 of shape (n, 3, size, size), and labels.
    x: Any
    y: Any
    params: list[Any]
    averages: list[Any]
    #: Mean cross-entropy, by the batch's own statistics, and the penalty of large weights.
    loss: Any
    #: The running averages' new values, after a batch.
    average_updates: OrderedDict[Any, Any]
    #: Mean cross-entropy, and the share of wrong answers, by the running averages.
    test_loss: Any
    test_error: Any


def build_network(
    blocks: Sequence[int],
    width: int,
    size: int,
    n_classes: int,
    weight_decay: float = 1e-4,
    seed: int = 1,
    smoothing: float = 0.0,
) -> Network:
    """Return a residual network.

    The first convolution, and the inner ones of the first stage, have `width` filters; each stage doubles it.  Label
    smoothing spreads the share `smoothing` of each label over all classes.
    """
    # The graph libraries walk through a graph by recursion, and this one is deeper than Python allows by default.
    sys.setrecursionlimit(max(sys.getrecursionlimit(), RECURSION_LIMIT))
    lasagne.random.set_rng(np.random.RandomState(seed))
    x, y = T.tensor4("images", dtype="uint8"), T.ivector("labels")
    output = add_residual_layers(_layers.InputLayer((None, 3, size, size), _standardize(x)), blocks, width, n_classes)
    loss, average_updates = build_training_loss(output, x, y, smoothing)
    penalty = lasagne.regularization.regularize_network_params(output, lasagne.regularization.l2)
    test_output = _layers.get_output(output, deterministic=True)
    return Network(
        output,
        x,
        y,
        _layers.get_all_params(output, trainable=True),
        get_running_averages(output),
        loss + weight_decay * penalty if weight_decay else loss,
        average_updates,
        lasagne.objectives.categorical_crossentropy(test_output, y).mean(),
        T.neq(T.argmax(test_output, axis=1), y).mean(dtype=theano.config.floatX),
    )


def add_residual_layers(layer: Any, blocks: Sequence[int], width: int, n_classes: int) -> Any:
    """Append a residual network to a layer, and return its last layer; see `build_network` for the arguments."""
    layer = _add_normalized_conv(layer, width, 7, stride=2, nonlinearity=_rectify)
    layer = _layers.MaxPool2DLayer(layer, pool_size=3, stride=2, pad=1)
    for stage, n_blocks in enumerate(blocks):
        for block in range(n_blocks):
            # Each stage but the first begins by halving height and width.
            layer = _add_bottleneck(layer, width * 2**stage, stride=2 if stage > 0 and block == 0 else 1)
    return _layers.DenseLayer(MeanLayer(layer), n_classes, nonlinearity=lasagne.nonlinearities.softmax)


def build_training_loss(output: Any, x: Any, y: Any, smoothing: float = 0.0) -> tuple[Any, OrderedDict[Any, Any]]:
    """Return the loss, normalized by the statistics of these rows alone, and the running averages' new values."""
    average_updates: OrderedDict[Any, Any] = OrderedDict()
    probabilities = _layers.get_output(output, _standardize(x), average_updates=average_updates)
    loss = lasagne.objectives.categorical_crossentropy(probabilities, y).mean()
    if smoothing:
        loss = (1 - smoothing) * loss - smoothing * T.log(probabilities).mean()
    return loss, average_updates


def _standardize(pixels: Any) -> Any:
    """Standardize pixels on the device; bytes take a quarter of the bandwidth of floats."""
    return (T.cast(pixels, theano.config.floatX) - PIXEL_MEAN) / PIXEL_SPREAD


def _add_normalized_conv(
    layer: Any, n_filters: int, filter_size: int, stride: int = 1, nonlinearity: Any = None
) -> Any:
    layer = ConvLayer(
        layer,
        n_filters,
        filter_size,
        stride=stride,
        pad=filter_size // 2,
        W=lasagne.init.HeNormal(gain="relu"),
        b=None,
        nonlinearity=None,
    )
    return BatchNormLayer(layer, nonlinearity=nonlinearity)


def _add_bottleneck(layer: Any, width: int, stride: int) -> Any:
    """Return a bottleneck block: three convolutions with a shortcut.

    The second has the stride, as in PyTorch's networks; in the paper the first has.
    """
    inner = _add_normalized_conv(layer, width, 1, nonlinearity=_rectify)
    inner = _add_normalized_conv(inner, width, 3, stride, nonlinearity=_rectify)
    inner = _add_normalized_conv(inner, EXPANSION * width, 1)
    if stride != 1 or layer.output_shape[1] != EXPANSION * width:
        # A projection to the shape of the inner output.
        layer = _add_normalized_conv(layer, EXPANSION * width, 1, stride)
    return _layers.ElemwiseMergeLayer([inner, layer], merge_function=lambda a, b: _rectify(a + b))
