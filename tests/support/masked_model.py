"""A model whose loss is a mean over the items that a mask selects."""

import numpy as np
from library import shared, tensor

from synkhronos.training.updates import sgd

T = tensor
N, STEPS = 12, 5
RNG = np.random.default_rng(5)
X, TARGETS = RNG.normal(size=(N, STEPS)), RNG.normal(size=(N, STEPS))
#: Rows with many steps, with one, with none.
MASK = (np.arange(STEPS) < np.array([5, 0, 1, 4, 0, 0, 2, 5, 5, 1, 3, 0])[:, None]).astype(float)


class MaskedModel:
    """A mean of squared errors over the steps that a mask selects."""

    def __init__(self, make_train=None, rule=sgd, dtype="float64", with_weight=True, **kwargs):
        self.x, self.y, self.mask = (T.matrix(name, dtype=dtype) for name in ("x", "y", "mask"))
        self.w = shared(np.ones(STEPS, dtype), "w")
        errors = (self.x * self.w - self.y) ** 2
        self.weight = self.mask.sum()
        self.loss = (self.mask * errors).sum() / self.weight
        if make_train is not None:
            weight = {"weight": self.weight} if with_weight else {}
            inputs = self.loss, [self.w], self.x, [self.y, self.mask], rule
            self.train = make_train(*inputs, learning_rate=0.1, **weight, **kwargs)


def take_rows(rows, dtype="float64"):
    """Return some rows of inputs, targets and mask."""
    return [a[rows].astype(dtype) for a in (X, TARGETS, MASK)]
