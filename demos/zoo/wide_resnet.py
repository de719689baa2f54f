"""Wide residual networks, for CIFAR-10.

References
----------
.. [1] Zagoruyko, S. and Komodakis, N. (2016): Wide residual networks. arXiv:1605.07146.
"""

from __future__ import annotations

from typing import Any

import theano.tensor as T
from lasagne.init import HeNormal
from lasagne.layers import DenseLayer, ElemwiseSumLayer
from lasagne.nonlinearities import softmax

from classifier import Classifier
from lasagne_tools.batch_norm import BatchNormLayer
from lasagne_tools.layers import ConvLayer, MeanLayer
from synkhronos.launcher import SettingsError


class WideResNet(Classifier):
    """WRN-28-10: twenty-eight layers, ten times as wide as He et al.'s; 36,479,194 parameters."""

    batch_size, n_epochs, rate, decay = 128, 200, 0.1, 5e-4
    falls = {60: 0.2, 120: 0.2, 160: 0.2}
    classes, side, stored, pad = 10, 32, 32, 4
    depth, widen = 28, 10
    settings = (*Classifier.settings, "depth", "widen")

    def layers(self, net: Any) -> Any:
        """Return the last layer."""
        if self.depth % 6 != 4:
            raise SettingsError(f"depth: expected 6 n + 4, such as 16 or 28, got {self.depth}")
        net = _add_conv(net, 16, 3)
        for stage in range(3):
            for block in range((self.depth - 4) // 6):
                net = _add_block(net, 16 * 2**stage * self.widen, stride=2 if stage > 0 and block == 0 else 1)
        return DenseLayer(MeanLayer(_add_normalization(net)), self.classes, nonlinearity=softmax)


def _add_block(net: Any, width: int, stride: int) -> Any:
    """Two convolutions, added to what came in; or to its projection, where shapes differ."""
    before = _add_normalization(net)
    inner = _add_conv(_add_normalization(_add_conv(before, width, 3, stride)), width, 3)
    has_same_shape = net.output_shape[1] == width and stride == 1
    return ElemwiseSumLayer([inner, net if has_same_shape else _add_conv(before, width, 1, stride)])


def _add_conv(net: Any, width: int, size: int, stride: int = 1) -> Any:
    he = HeNormal(gain="relu")
    return ConvLayer(net, width, size, stride=stride, pad=size // 2, W=he, b=None, nonlinearity=None)


def _add_normalization(net: Any) -> Any:
    return BatchNormLayer(net, nonlinearity=T.nnet.relu)
