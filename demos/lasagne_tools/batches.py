"""Batches of shuffled rows."""

from __future__ import annotations

import numpy as np

__all__ = ["make_full_batches", "make_shuffled_batches"]


def make_shuffled_batches(rng: np.random.Generator, n_rows: int, batch_size: int) -> list[np.ndarray]:
    """Return an epoch's batches of shuffled rows; the last one may be shorter."""
    order = rng.permutation(n_rows)
    return [order[start : start + batch_size] for start in range(0, n_rows, batch_size)]


def make_full_batches(rng: np.random.Generator, n_rows: int, batch_size: int) -> list[np.ndarray]:
    """Return an epoch's batches of equal size; the remaining rows are omitted."""
    return make_shuffled_batches(rng, n_rows, batch_size)[: n_rows // batch_size]
