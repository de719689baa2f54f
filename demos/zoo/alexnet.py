"""AlexNet, for ImageNet, as its paper has it: two groups of filters, from two GPUs' time.

References
----------
.. [1] Krizhevsky, A., Sutskever, I. and Hinton, G. (2012): ImageNet classification with deep convolutional neural
   networks. NIPS.
"""

from __future__ import annotations

from typing import Any

from lasagne.init import Constant, Normal
from lasagne.layers import DenseLayer, DropoutLayer, LocalResponseNormalization2DLayer, MaxPool2DLayer
from lasagne.nonlinearities import softmax

from classifier import Classifier
from lasagne_tools.layers import ConvLayer


class AlexNet(Classifier):
    """Eight layers, 60,965,224 parameters."""

    batch_size, n_epochs, rate, decay, side = 128, 70, 0.01, 5e-4, 227
    falls = {20: 0.1, 40: 0.1, 60: 0.1}
    units = 4096
    settings = (*Classifier.settings, "units")

    def layers(self, net: Any) -> Any:
        """Return the last layer."""
        zero, tenth, spread = Constant(0), Constant(0.1), Normal(0.01)
        net = ConvLayer(net, 96, 11, stride=4, W=spread, b=zero)
        net = MaxPool2DLayer(LocalResponseNormalization2DLayer(net), 3, stride=2)
        net = ConvLayer(net, 256, 5, pad=2, groups=2, W=spread, b=tenth)
        net = MaxPool2DLayer(LocalResponseNormalization2DLayer(net), 3, stride=2)
        net = ConvLayer(net, 384, 3, pad=1, W=spread, b=zero)
        net = ConvLayer(net, 384, 3, pad=1, groups=2, W=spread, b=tenth)
        net = ConvLayer(net, 256, 3, pad=1, groups=2, W=spread, b=tenth)
        net = MaxPool2DLayer(net, 3, stride=2)
        for _ in range(2):
            net = DropoutLayer(DenseLayer(net, self.units, W=Normal(0.005), b=tenth), 0.5)
        return DenseLayer(net, self.classes, W=spread, b=zero, nonlinearity=softmax)
