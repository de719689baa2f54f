"""GoogLeNet, for ImageNet, with the two outputs in its middle that help to train.

References
----------
.. [1] Szegedy, C. et al. (2014): Going deeper with convolutions. arXiv:1409.4842.
"""

from __future__ import annotations

from typing import Any

from lasagne.layers import (
    ConcatLayer,
    DenseLayer,
    DropoutLayer,
    LocalResponseNormalization2DLayer,
    MaxPool2DLayer,
    Pool2DLayer,
)
from lasagne.nonlinearities import softmax

from classifier import Classifier
from lasagne_tools.layers import ConvLayer, MeanLayer

#: Filters of each module: 1x1; 3x3, and before it; 5x5, and before it; behind the pool.  None for a pool between two.
MODULES = (
    (64, 96, 128, 16, 32, 32),
    (128, 128, 192, 32, 96, 64),
    None,
    (192, 96, 208, 16, 48, 64),
    (160, 112, 224, 24, 64, 64),
    (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
    None,
    (256, 160, 320, 32, 128, 128),
    (384, 192, 384, 48, 128, 128),
)
#: Behind which of them an output is.
HELPERS = (3, 6)


class GoogLeNet(Classifier):
    """Nine modules of four branches: 6,998,552 parameters, and 6,379,728 of the auxiliary classifiers."""

    batch_size, n_epochs, rate, decay = 32, 70, 0.01, 2e-4
    falls = {20: 0.1, 40: 0.1, 60: 0.1}
    shares = (1.0, 0.3, 0.3)

    def layers(self, net: Any) -> list[Any]:
        """Return the last layer, and the two in the middle."""
        helpers = []
        net = _add_pool(ConvLayer(net, 64, 7, stride=2, pad=3))
        net = ConvLayer(_add_normalization(net), 64, 1)
        net = _add_pool(_add_normalization(ConvLayer(net, 192, 3, pad=1)))
        for number, filters in enumerate(MODULES):
            net = _add_pool(net) if filters is None else _add_inception_module(net, *filters)
            if number in HELPERS:
                side = ConvLayer(Pool2DLayer(net, 5, stride=3, mode="average_inc_pad"), 128, 1)
                side = DropoutLayer(DenseLayer(side, 1024), 0.7)
                helpers.append(DenseLayer(side, self.classes, nonlinearity=softmax))
        net = DropoutLayer(MeanLayer(net), 0.4)
        return [DenseLayer(net, self.classes, nonlinearity=softmax), *helpers]


def _add_inception_module(
    net: Any, one: int, before_three: int, three: int, before_five: int, five: int, behind_pool: int
) -> Any:
    return ConcatLayer(
        [
            ConvLayer(net, one, 1),
            ConvLayer(ConvLayer(net, before_three, 1), three, 3, pad=1),
            ConvLayer(ConvLayer(net, before_five, 1), five, 5, pad=2),
            ConvLayer(MaxPool2DLayer(net, 3, stride=1, pad=1), behind_pool, 1),
        ]
    )


def _add_pool(net: Any) -> Any:
    return MaxPool2DLayer(net, 3, stride=2, ignore_border=False)


def _add_normalization(net: Any) -> Any:
    return LocalResponseNormalization2DLayer(net, alpha=2e-5, k=1)
