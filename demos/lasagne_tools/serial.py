"""Training in one process with plain functions of the graph library, for comparison with ranks.

The functions are Theano's own (PyTensor's, where Theano is not installed).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lasagne_tools.library import theano

__all__ = ["SerialTrainer"]


class SerialTrainer:
    """A network that one process trains, with NumPy arrays of images and labels.

    `make_batches` is a function of `lasagne_tools.batches`; each step applies `extra_updates`, too.
    """

    n_ranks = 1

    def __init__(
        self,
        network: Any,
        parts: Sequence[Any],
        options: argparse.Namespace,
        make_batches: Callable[..., list[np.ndarray]],
        extra_updates: dict[Any, Any] | None = None,
    ) -> None:
        self._parts, self._options, self._make_batches = parts, options, make_batches
        # The update rules of Synkhronos need no ranks. Lasagne's own have the same formulas.
        grad_updates, param_updates, _ = options.update_rule(
            network.loss, network.params, learning_rate=options.learning_rate
        )
        inputs = [network.x, network.y]
        updates = [*grad_updates.items(), *(extra_updates or {}).items()]
        self._gradient = theano.function(inputs, network.loss, updates=updates)
        self._update = theano.function([], updates=param_updates)
        self._evaluate = theano.function(inputs, [network.test_loss, network.test_error])

    def make_batches(self, rng: np.random.Generator) -> list[np.ndarray]:
        """Return the epoch's batches: lists of shuffled indexes."""
        return self._make_batches(rng, len(self._parts[0].labels), self._options.batch_size)

    def count_rows(self, batch: np.ndarray) -> list[int]:
        """Return the number of rows of a batch that the process computes: all."""
        return [len(batch)]

    def train(self, batches: Sequence[np.ndarray]) -> list[Any]:
        """Take a step for each batch; return the losses."""
        images, labels = self._parts[0]
        losses = []
        for batch in batches:
            losses.append(self._gradient(images[batch], labels[batch]))
            self._update()
        return losses

    def validate(self) -> tuple[float, float]:
        """Return loss and error of the validation data."""
        return self._compute_loss_and_error(*self._parts[1])

    def test(self) -> tuple[float, float]:
        """Return loss and error of the test data."""
        return self._compute_loss_and_error(*self._parts[2])

    def _compute_loss_and_error(self, images: Any, labels: Any) -> tuple[float, float]:
        # The serial counterpart of num_slices.
        slices = np.array_split(np.arange(len(labels)), min(self._options.slices, len(labels)))
        values = [self._evaluate(images[rows], labels[rows]) for rows in slices]
        loss, error = np.average(np.array(values, dtype=float), axis=0, weights=[len(rows) for rows in slices])
        return float(loss), float(error)
