"""PyTorch's side of `benchmarks.gpu_zoo`: the zoo's networks, layer by layer.

torchvision's AlexNet is a later one, without groups and normalization, and its GoogLeNet has batch normalization.
Therefore these two are written out, and so is VGG16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

#: Weight of each output in the loss, for networks with several.
LOSS_WEIGHTS = (1.0, 0.3, 0.3)
#: Filters of each inception module: 1x1, reduction before 3x3, 3x3, reduction before 5x5, 5x5, projection of the pool;
#: None for a pooling layer between modules.
INCEPTION_FILTERS = (
    *((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64), None),
    *((192, 96, 208, 16, 48, 64), (160, 112, 224, 24, 64, 64), (128, 128, 256, 24, 64, 64)),
    *((112, 144, 288, 32, 64, 64), (256, 160, 320, 32, 128, 128), None),
    *((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
)
#: Indexes of the modules that have an auxiliary output.
AUXILIARY_OUTPUTS = (3, 6)


def make_alexnet(classes: int) -> Any:
    """Return Krizhevsky's AlexNet of 2012."""
    return nn.Sequential(
        *(nn.Conv2d(3, 96, 11, 4), nn.ReLU(True), nn.LocalResponseNorm(5, 5e-4, 0.75, 2), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(96, 256, 5, padding=2, groups=2), nn.ReLU(True)),
        *(nn.LocalResponseNorm(5, 5e-4, 0.75, 2), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(256, 384, 3, padding=1), nn.ReLU(True)),
        *(nn.Conv2d(384, 384, 3, padding=1, groups=2), nn.ReLU(True)),
        *(nn.Conv2d(384, 256, 3, padding=1, groups=2), nn.ReLU(True), nn.MaxPool2d(3, 2)),
        *(nn.Flatten(), nn.LazyLinear(4096), nn.ReLU(True), nn.Dropout()),
        *(nn.Linear(4096, 4096), nn.ReLU(True), nn.Dropout(), nn.Linear(4096, classes)),
    )


def make_vgg16(classes: int, units: int = 4096) -> Any:
    """Return VGG's network of sixteen layers, the last three of them dense."""
    layers: list[Any] = []
    channels = 3
    for filters, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(convolutions):
            layers += [nn.Conv2d(channels, filters, 3, padding=1), nn.ReLU(True)]
            channels = filters
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.LazyLinear(units), nn.ReLU(True), nn.Dropout()]
    return nn.Sequential(*layers, nn.Linear(units, units), nn.ReLU(True), nn.Dropout(), nn.Linear(units, classes))


def _make_conv(channels: int, filters: int, size: int, **kwargs: Any) -> Any:
    return nn.Sequential(nn.Conv2d(channels, filters, size, **kwargs), nn.ReLU(True))


class _Inception(nn.Module):
    """Inception module: four branches, joined by channels."""

    def __init__(self, channels: int, one: int, before_three: int, three: int, before_five: int, five: int, pool: int):
        super().__init__()
        self.branches = nn.ModuleList(
            [
                _make_conv(channels, one, 1),
                nn.Sequential(_make_conv(channels, before_three, 1), _make_conv(before_three, three, 3, padding=1)),
                nn.Sequential(_make_conv(channels, before_five, 1), _make_conv(before_five, five, 5, padding=2)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), _make_conv(channels, pool, 1)),
            ]
        )

    def forward(self, x: Any) -> Any:
        return torch.cat([branch(x) for branch in self.branches], 1)


class _GoogLeNet(nn.Module):
    """GoogLeNet of 2014, with its two auxiliary outputs."""

    def __init__(self, classes: int):
        super().__init__()
        pool = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.stem = nn.Sequential(
            *(
                _make_conv(3, 64, 7, stride=2, padding=3),
                pool,
                nn.LocalResponseNorm(5, 1e-4, 0.75, 1),
                _make_conv(64, 64, 1),
            ),
            *(_make_conv(64, 192, 3, padding=1), nn.LocalResponseNorm(5, 1e-4, 0.75, 1), pool),
        )
        channels, layers, outputs = 192, [], []
        for number, filters in enumerate(INCEPTION_FILTERS):
            layers.append(pool if filters is None else _Inception(channels, *filters))
            if filters is not None:
                channels = filters[0] + filters[2] + filters[4] + filters[5]
            if number in AUXILIARY_OUTPUTS:
                outputs.append(
                    nn.Sequential(
                        *(
                            nn.AvgPool2d(5, 3),
                            _make_conv(channels, 128, 1),
                            nn.Flatten(),
                            nn.LazyLinear(1024),
                            nn.ReLU(True),
                        ),
                        *(nn.Dropout(0.7), nn.Linear(1024, classes)),
                    )
                )
        self.layers, self.auxiliary_outputs = nn.ModuleList(layers), nn.ModuleList(outputs)
        self.output = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.4), nn.Linear(channels, classes)
        )

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        outputs: list[Any] = []
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number in AUXILIARY_OUTPUTS:
                outputs.append(self.auxiliary_outputs[len(outputs)](x))
        return [self.output(x), *outputs]


def make_network(settings: dict[str, Any]) -> Any:
    """Return the network named in the settings, for images of the size in the settings."""
    if settings["network"] == "AlexNet":
        model = make_alexnet(settings["classes"])
    elif settings["network"] == "VGG16":
        model = make_vgg16(settings["classes"])
    else:
        model = _GoogLeNet(settings["classes"])
    model(torch.zeros(1, 3, settings["size"], settings["size"]))  # sets the shapes of lazy layers
    return model


def compute_loss(outputs: Any, labels: Any) -> Any:
    """Return the cross-entropy; with several outputs, the weighted sum of theirs."""
    entropy = nn.functional.cross_entropy
    if not isinstance(outputs, list):
        return entropy(outputs, labels)
    return sum(weight * entropy(output, labels) for weight, output in zip(LOSS_WEIGHTS, outputs, strict=True))
