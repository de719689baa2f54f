"""PyTorch's side of `benchmarks.gpu_zoo`: the zoo's networks, layer by layer.

torchvision's AlexNet is a later one, without groups and normalisation, and its GoogLeNet has batch normalisation; so
these two are written out, and VGG16.

`make`
    A network.
`loss`
    Its loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

#: Weight of each output in the loss, for networks with several.
SHARES = (1.0, 0.3, 0.3)
#: GoogLeNet's modules: filters of 1x1; of 3x3, and before it; of 5x5, and before it; behind the pool.  None for a pool.
MODULES = (
    *((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64), None),
    *((192, 96, 208, 16, 48, 64), (160, 112, 224, 24, 64, 64), (128, 128, 256, 24, 64, 64)),
    *((112, 144, 288, 32, 64, 64), (256, 160, 320, 32, 128, 128), None),
    *((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
)
#: Behind which of them an output is.
HELPERS = (3, 6)


def alexnet(classes: int) -> Any:
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


def vgg16(classes: int, units: int = 4096) -> Any:
    """Return VGG's network of sixteen layers, the last three of them dense."""
    layers: list[Any] = []
    before = 3
    for filters, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(convolutions):
            layers += [nn.Conv2d(before, filters, 3, padding=1), nn.ReLU(True)]
            before = filters
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.LazyLinear(units), nn.ReLU(True), nn.Dropout()]
    return nn.Sequential(*layers, nn.Linear(units, units), nn.ReLU(True), nn.Dropout(), nn.Linear(units, classes))


def _conv(before: int, filters: int, size: int, **kwargs: Any) -> Any:
    return nn.Sequential(nn.Conv2d(before, filters, size, **kwargs), nn.ReLU(True))


class _Module(nn.Module):
    """One of GoogLeNet's modules of four branches."""

    def __init__(self, before: int, one: int, before_three: int, three: int, before_five: int, five: int, pool: int):
        super().__init__()
        self.branches = nn.ModuleList(
            [
                _conv(before, one, 1),
                nn.Sequential(_conv(before, before_three, 1), _conv(before_three, three, 3, padding=1)),
                nn.Sequential(_conv(before, before_five, 1), _conv(before_five, five, 5, padding=2)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), _conv(before, pool, 1)),
            ]
        )

    def forward(self, x: Any) -> Any:
        return torch.cat([branch(x) for branch in self.branches], 1)


class _GoogLeNet(nn.Module):
    """GoogLeNet of 2014, with its two outputs in the middle."""

    def __init__(self, classes: int):
        super().__init__()
        pool = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.stem = nn.Sequential(
            *(_conv(3, 64, 7, stride=2, padding=3), pool, nn.LocalResponseNorm(5, 1e-4, 0.75, 1), _conv(64, 64, 1)),
            *(_conv(64, 192, 3, padding=1), nn.LocalResponseNorm(5, 1e-4, 0.75, 1), pool),
        )
        before, parts, sides = 192, [], []
        for number, filters in enumerate(MODULES):
            parts.append(pool if filters is None else _Module(before, *filters))
            if filters is not None:
                before = filters[0] + filters[2] + filters[4] + filters[5]
            if number in HELPERS:
                sides.append(
                    nn.Sequential(
                        *(nn.AvgPool2d(5, 3), _conv(before, 128, 1), nn.Flatten(), nn.LazyLinear(1024), nn.ReLU(True)),
                        *(nn.Dropout(0.7), nn.Linear(1024, classes)),
                    )
                )
        self.parts, self.sides = nn.ModuleList(parts), nn.ModuleList(sides)
        self.end = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.4), nn.Linear(before, classes))

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        outputs: list[Any] = []
        for number, part in enumerate(self.parts):
            x = part(x)
            if number in HELPERS:
                outputs.append(self.sides[len(outputs)](x))
        return [self.end(x), *outputs]


def make(settings: dict[str, Any]) -> Any:
    """Return the network that the settings name, for images of their size."""
    if settings["network"] == "AlexNet":
        model = alexnet(settings["classes"])
    elif settings["network"] == "VGG16":
        model = vgg16(settings["classes"])
    else:
        model = _GoogLeNet(settings["classes"])
    model(torch.zeros(1, 3, settings["size"], settings["size"]))  # lazy layers learn how many numbers come in
    return model


def loss(outputs: Any, labels: Any) -> Any:
    """Return the cross-entropy, of all outputs by their shares where there are several."""
    entropy = nn.functional.cross_entropy
    if not isinstance(outputs, list):
        return entropy(outputs, labels)
    return sum(share * entropy(output, labels) for share, output in zip(SHARES, outputs, strict=True))
