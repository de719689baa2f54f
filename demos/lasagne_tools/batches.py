"""Batches of shuffled rows, and the serial equivalents of ``TrainFunction.steps`` and ``num_slices``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["evaluate_in_slices", "make_full_batches", "make_shuffled_batches", "take_steps"]


def make_shuffled_batches(rng: np.random.Generator, n_rows: int, batch_size: int) -> list[np.ndarray]:
    """Return an epoch's batches of shuffled rows.

    Parameters
    ----------
    rng : Generator
        Source of the permutation.
    n_rows, batch_size : int
        Number of rows, of the data and of a step.

    Returns
    -------
    list of ndarray of int
        Indexes of rows.  The last batch may be shorter.
    """
    order = rng.permutation(n_rows)
    return [order[start : start + batch_size] for start in range(0, n_rows, batch_size)]


def make_full_batches(rng: np.random.Generator, n_rows: int, batch_size: int) -> list[np.ndarray]:
    """Return an epoch's batches of equal size; the remaining rows are omitted.

    Parameters
    ----------
    rng, n_rows, batch_size
        As for `make_shuffled_batches`.

    Returns
    -------
    list of ndarray of int
        Indexes of rows; an empty list if there are fewer rows than `batch_size`.
    """
    return make_shuffled_batches(rng, n_rows, batch_size)[: n_rows // batch_size]


def evaluate_in_slices(function: Callable[..., Any], images: Any, labels: Any, n_slices: int) -> tuple[float, float]:
    """Compute the mean loss and error of many images in slices, to save memory.

    Parameters
    ----------
    function : callable
        Returns the mean loss and error of images and labels.
    images, labels : arrays
    n_slices : int
        Number of slices; at most the number of images.

    Returns
    -------
    loss, error : float
        Means over all rows.
    """
    slices = np.array_split(np.arange(len(labels)), min(n_slices, len(labels)))
    values = [function(images[rows], labels[rows]) for rows in slices]
    loss, error = np.average(np.array(values, dtype=float), axis=0, weights=[len(rows) for rows in slices])
    return float(loss), float(error)


def take_steps(
    gradient: Callable[..., Any],
    update: Callable[[], Any],
    images: np.ndarray,
    labels: np.ndarray,
    batches: Sequence[np.ndarray],
) -> list[Any]:
    """Take a step for each batch.

    Parameters
    ----------
    gradient : callable
        Stores the gradient of some images and labels, and returns their loss.
    update : callable
        Updates the parameters with this gradient.
    images, labels : arrays
    batches : sequence of ndarray of int
        Indexes of rows.

    Returns
    -------
    list
        The loss before each step.
    """
    losses = []
    for batch in batches:
        losses.append(gradient(images[batch], labels[batch]))
        update()
    return losses
