"""The model of the benchmarks for PyMC: a logistic regression whose intercepts come from groups.

`make_data`
    Its data.
`log_likelihood`
    The terms of its rows, in PyTensor.
"""

from __future__ import annotations

from typing import Any

import numpy as np

GROUPS = 100


def make_data(rows: int, columns: int, dtype: str = "float64") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return columns, groups and outcomes, made from a fixed seed."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, columns), dtype=np.dtype(dtype).type)
    group = rng.integers(0, GROUPS, rows).astype("int32")
    score = x @ np.linspace(-0.5, 0.5, columns).astype(dtype) + 0.1 * (group % 7)
    return x, group, (rng.random(rows) < 1 / (1 + np.exp(-score))).astype(dtype)


def log_likelihood(x: Any, group: Any, y: Any, effects: Any, slopes: Any) -> Any:
    """Return the log-density of each row."""
    import pytensor.tensor as pt

    score = effects[group] + x @ slopes
    return y * score - pt.softplus(score)
