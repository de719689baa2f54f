"""Network of seven layers for CIFAR-10, from the paper on elastic averaging.

References
----------
.. [1] Zhang, S., Choromanska, A. and LeCun, Y. (2015): Deep learning with elastic averaging SGD. arXiv:1412.6651.
"""

from __future__ import annotations

from typing import Any

from lasagne.layers import DenseLayer, DropoutLayer, MaxPool2DLayer
from lasagne.nonlinearities import softmax

from classifier import Classifier
from lasagne_tools.layers import ConvLayer


class Cifar10(Classifier):
    """Three convolutions, two pools, two dense layers: 351,946 parameters. Its inputs are crops of 28x28 pixels."""

    batch_size, n_epochs, rate, decay = 128, 60, 0.01, 1e-4
    falls = {40: 0.1}
    classes, side, stored = 10, 28, 32

    def layers(self, net: Any) -> Any:
        """Return the last layer."""
        net = MaxPool2DLayer(ConvLayer(net, 64, 5), 2)
        net = MaxPool2DLayer(ConvLayer(net, 128, 5), 2)
        net = ConvLayer(net, 64, 3)
        net = DenseLayer(DropoutLayer(net, 0.5), 256)
        return DenseLayer(DropoutLayer(net, 0.5), self.classes, nonlinearity=softmax)
