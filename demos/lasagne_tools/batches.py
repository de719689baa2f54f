"""Which rows a step takes, and a validation piece by piece.

`shuffled_batches`
    An epoch's batches: all rows.
`full_batches`
    The same without the last batch, where that is smaller than the others.
`evaluate_in_slices`
    What ``num_slices`` does for the ranks, for one process.
`take_steps`
    What ``TrainFunction.steps`` does for the ranks, for one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["evaluate_in_slices", "full_batches", "shuffled_batches", "take_steps"]


def shuffled_batches(rng: np.random.Generator, n_rows: int, batch_size: int) -> list[np.ndarray]:
    """Shuffle, and cut into batches.

    Parameters
    ----------
    rng : Generator
        What shuffles.
    n_rows, batch_size : int
        How many rows there are, and how many of them a step takes.

    Returns
    -------
    list of ndarray of int
        Indexes of rows.  The last batch has what is left.
    """
    order = rng.permutation(n_rows)
    return [order[first : first + batch_size] for first in range(0, n_rows, batch_size)]


def full_batches(rng: np.random.Generator, n_rows: int, batch_size: int) -> list[np.ndarray]:
    """Shuffle, and cut into batches of one size; the rows that are left over wait for another epoch.

    Parameters
    ----------
    rng, n_rows, batch_size
        As for `shuffled_batches`.

    Returns
    -------
    list of ndarray of int
        Indexes of rows; an empty list where there are fewer rows than a batch has.
    """
    return shuffled_batches(rng, n_rows, batch_size)[: n_rows // batch_size]


def evaluate_in_slices(function: Callable[..., Any], images: Any, labels: Any, n_slices: int) -> tuple[float, float]:
    """Compute the mean loss and error of many images piece by piece, to save memory.

    Parameters
    ----------
    function : callable
        Returns the mean loss and error of the images and labels that it is given.
    images, labels : arrays
        All of them.
    n_slices : int
        How many pieces to make; fewer, where there are fewer images.

    Returns
    -------
    loss, error : float
        Means in which each piece weighs as many rows as it has.
    """
    pieces = np.array_split(np.arange(len(labels)), min(n_slices, len(labels)))
    values = [function(images[rows], labels[rows]) for rows in pieces]
    loss, error = np.average(np.array(values, dtype=float), axis=0, weights=[len(rows) for rows in pieces])
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
        Takes images and labels, keeps their gradient, and returns their loss.
    update : callable
        Moves the parameters by that gradient.
    images, labels : arrays
        All of them.
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
