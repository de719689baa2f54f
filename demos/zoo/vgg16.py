"""VGG with sixteen layers, for ImageNet.

References
----------
.. [1] Simonyan, K. and Zisserman, A. (2014): Very deep convolutional networks for large-scale image recognition.
   arXiv:1409.1556.
"""

from __future__ import annotations

from typing import Any

from lasagne.init import HeNormal, Normal
from lasagne.layers import DenseLayer, DropoutLayer, MaxPool2DLayer
from lasagne.nonlinearities import softmax

from classifier import Classifier
from lasagne_tools.layers import ConvLayer


class VGG16(Classifier):
    """Thirteen convolutions in five blocks, and three dense layers: 138,357,544 parameters."""

    batch_size, n_epochs, rate, decay = 32, 74, 0.01, 5e-4
    falls = {30: 0.1, 50: 0.1, 65: 0.1}
    units = 4096
    settings = (*Classifier.settings, "units")

    def layers(self, net: Any) -> Any:
        """Return the last layer."""
        for filters, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            for _ in range(convolutions):
                net = ConvLayer(net, filters, 3, pad=1, W=HeNormal(gain="relu"))
            net = MaxPool2DLayer(net, 2)
        for _ in range(2):
            net = DropoutLayer(DenseLayer(net, self.units, W=Normal(0.01)), 0.5)
        return DenseLayer(net, self.classes, W=Normal(0.01), nonlinearity=softmax)
