"""Rows of numbers with masks."""

import numpy as np


def make_masked_rows():
    """Return x, y and mask, which selects nothing in more than half of the rows."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(1, 0.1, size=(2, 60, 3))
    return x, y, np.tri(3)[rng.integers(3, size=60)] * (rng.random((60, 1)) < 0.4)
