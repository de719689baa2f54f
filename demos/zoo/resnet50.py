"""ResNet-50, for ImageNet: the network of demos/resnet.

References
----------
.. [1] He, K., Zhang, X., Ren, S. and Sun, J. (2015): Deep residual learning for image recognition. arXiv:1512.03385.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from classifier import Classifier

sys.path.append(str(Path(__file__).resolve().parents[1] / "resnet"))

from network import BLOCKS, add_residual_layers


class ResNet50(Classifier):
    """Sixteen blocks of three convolutions, and two layers more: 25,557,032 parameters."""

    # The paper's rate is 0.1 for 256 rows.
    batch_size, n_epochs, rate, decay = 64, 90, 0.025, 1e-4
    falls = {30: 0.1, 60: 0.1, 80: 0.1}
    depth, width = 50, 64
    settings = (*Classifier.settings, "depth", "width")

    def layers(self, net: Any) -> Any:
        """Return the last layer."""
        return add_residual_layers(net, BLOCKS[self.depth], self.width, self.classes)
