"""Training on all ranks, with data in host memory; `lasagne_tools.serial` has the same in one process."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import synkhronos as synk
from synkhronos.training import make_train_function

__all__ = ["ParallelTrainer"]


class ParallelTrainer:
    """A network that all ranks train, with images and labels of each part in Data objects.

    `make_batches` is a function of `lasagne_tools.batches`; `batch_size` is the number of rows of all ranks.
    """

    def __init__(
        self,
        network: Any,
        parts: Sequence[tuple[synk.Data, synk.Data]],
        options: argparse.Namespace,
        n_ranks: int,
        make_batches: Callable[..., list[np.ndarray]],
        batch_size: int,
        extra_updates: dict[Any, Any] | None = None,
    ) -> None:
        self.n_ranks, self._parts, self._options = n_ranks, parts, options
        self._make_batches, self._batch_size = make_batches, batch_size
        # One callable: the gradients and extra updates of all ranks' rows, one all-reduce, and an update.
        self._step = make_train_function(
            network.loss,
            network.params,
            network.x,
            network.y,
            options.update_rule,
            extra_updates=extra_updates,
            learning_rate=options.learning_rate,
        )
        # "mean" weighs each rank and slice by its rows: exact for any number of images.
        self._evaluate = synk.function(
            [network.x, network.y],
            [(network.test_loss, "mean"), (network.test_error, "mean")],
            name="test_loss_and_error",
        )
        synk.distribute()

    def make_batches(self, rng: np.random.Generator) -> list[np.ndarray]:
        """Return the epoch's batches: lists of shuffled indexes."""
        return self._make_batches(rng, len(self._parts[0][1]), self._batch_size)

    def count_rows(self, batch: np.ndarray) -> list[int]:
        """Return the number of rows of a batch that each rank computes."""
        return [len(rows) for rows in np.array_split(batch, self.n_ranks)]

    def train(self, batches: Sequence[np.ndarray]) -> list[Any]:
        """Take a step for each batch, on GPUs in one launch; return the losses."""
        return self._step.steps(*self._parts[0], batches=batches)

    def validate(self) -> tuple[float, float]:
        """Return loss and error of the validation data, by one call on all of it."""
        return self._compute_loss_and_error(*self._parts[1])

    def test(self) -> tuple[float, float]:
        """Return loss and error of the test data."""
        return self._compute_loss_and_error(*self._parts[2])

    def _compute_loss_and_error(self, images: synk.Data, labels: synk.Data) -> tuple[float, float]:
        # Each rank takes its rows in slices, so that a large set needs no more memory than a small one.
        loss, error = self._evaluate(images, labels, num_slices=self._options.slices)
        return float(loss), float(error)
