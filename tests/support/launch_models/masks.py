"""Rows of numbers with masks."""

import numpy as np


def make_masked_rows(count=60):
    """Return x, y and mask, which selects nothing in more than half of the rows."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(1, 0.1, size=(2, count, 3))
    return x, y, np.tri(3)[rng.integers(3, size=count)] * (rng.random((count, 1)) < 0.4)
