"""Model of the benchmarks for PyMC: a logistic regression with an intercept for each group of rows."""

from __future__ import annotations

from typing import Any

import numpy as np

N_GROUPS = 100


def make_data(rows: int, columns: int, dtype: str = "float64") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return columns, groups and outcomes, drawn with a fixed seed."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, columns), dtype=np.dtype(dtype).type)
    group = rng.integers(0, N_GROUPS, rows).astype("int32")
    score = x @ np.linspace(-0.5, 0.5, columns).astype(dtype) + 0.1 * (group % 7)
    return x, group, (rng.random(rows) < 1 / (1 + np.exp(-score))).astype(dtype)


def compute_log_likelihood(x: Any, group: Any, y: Any, effects: Any, slopes: Any) -> Any:
    """Return the log-density of each row, as a PyTensor expression."""
    import pytensor.tensor as pt

    score = effects[group] + x @ slopes
    return y * score - pt.softplus(score)
