"""Data of a `synkhronos.launcher.Model` on one rank: batches of the rows that `Model.load` returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from synkhronos.data_objects.rows import get_share_slice
from synkhronos.launcher.model_class.model_interface import ModelInterfaceError, is_count, shorten_repr
from synkhronos.loading import Loader

Batch = tuple[np.ndarray, ...]


class ModelData:
    """One rank's batches of the data that `Model.load` returns.  ``model_name`` is the name of the model in errors.

    Attributes
    ----------
    training, validation : Loader, or list of arrays
    n_batch_train, n_batch_val : int
        Numbers of this rank's batches in an epoch, and in a validation.
    has_validation : bool
        Whether there are rows to validate, on this rank or another.
    """

    def __init__(self, loaded: Any, model_name: str, batch_size: Any, rank: int, size: int, seed: int):
        self.training, self.validation = _parse_loaded(loaded, f"{model_name}.load()")
        self._batch_size, self._rank, self._size, self._seed = batch_size, rank, size, seed
        n_train, n_val = _count_rows(self.training), _count_rows(self.validation)
        rows = n_train // size
        if not is_count(batch_size, 1) or batch_size > rows:
            raise ModelInterfaceError(
                f"{model_name}.batch_size: expected an integer from 1 to {rows}, as {size} ranks share {n_train} rows, "
                f"got {batch_size!r}"
            )
        self.n_batch_train, self.has_validation = rows // batch_size, n_val > 0
        if isinstance(self.validation, Loader):
            self.n_batch_val = len(range(rank * batch_size, n_val, size * batch_size))
        else:
            val_rows = get_share_slice(n_val, size, rank)
            self._validation_share = [array[val_rows] for array in self.validation]
            self.n_batch_val = -(-len(range(n_val)[val_rows]) // batch_size)
        self._epoch = -1
        self._validation_batches: Iterator[Batch] | None = None

    @property
    def may_skip_rows(self) -> bool:
        """Whether training batches may have fewer rows, as the loader skips rows that can't be read."""
        return isinstance(self.training, Loader) and self.training.skips_unreadable

    def take_training_batch(self, epoch: int) -> Batch:
        """Return the next training batch of an epoch.  Each epoch has another order."""
        if self._epoch != epoch:
            self._training_batches, self._epoch = self._iterate_epoch(epoch), epoch
        batch = next(self._training_batches, None)
        if batch is None:  # the loader has skipped batches of which it could read no row
            self._training_batches = self._iterate_epoch(epoch)
            batch = next(self._training_batches)
        return batch

    def start_epoch(self, epoch: int, first_batch: int) -> None:
        """Start an epoch at its batch ``first_batch``, counted from 0."""
        self._epoch = -1
        for _ in range(first_batch):
            self.take_training_batch(epoch)

    def restart_validation(self) -> None:
        """Continue with the first validation batch."""
        self._validation_batches = None

    def take_validation_batch(self) -> Batch | None:
        """Return the next validation batch, or None after the last one, as the loader may have skipped batches."""
        if self._validation_batches is None:
            self._validation_batches = self._iterate_validation()
        return next(self._validation_batches, None)

    def close(self) -> None:
        """Close the loaders, if the data has any."""
        for data in (self.training, self.validation):
            if isinstance(data, Loader):
                data.close()

    def _iterate_epoch(self, epoch: int) -> Iterator[Batch]:
        if isinstance(self.training, Loader):
            yield from _copy_batches(
                self.training.arrays(
                    epoch, self._batch_size, self._seed, drop_last=True, rank=self._rank, size=self._size
                )
            )
            return
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self.training[0]))
        rows = order[self._rank :: self._size]
        for start in range(0, len(rows), self._batch_size):
            yield tuple(array[rows[start : start + self._batch_size]] for array in self.training)

    def _iterate_validation(self) -> Iterator[Batch]:
        if isinstance(self.validation, Loader):
            batches = self.validation.arrays(0, self._batch_size, rank=self._rank, size=self._size)
            yield from _copy_batches(batches)
            return
        for start in range(0, len(self._validation_share[0]), self._batch_size):
            yield tuple(array[start : start + self._batch_size] for array in self._validation_share)


def _parse_loaded(loaded: Any, source: str) -> list[Any]:
    """Return the training and the validation data.  ``source`` is the name of their source in errors."""
    if not isinstance(loaded, list | tuple) or len(loaded) != 2:
        raise ModelInterfaceError(f"{source}: expected training and validation arrays, got {shorten_repr(loaded)}")
    parts: list[Any] = []
    for name, data in zip(("training", "validation"), loaded, strict=True):
        if isinstance(data, Loader):
            parts.append(data)
            continue
        if not isinstance(data, list | tuple) or not all(hasattr(array, "shape") for array in data):
            raise ModelInterfaceError(
                f"{source}: {name} data: expected a list of arrays, or a Loader, got {shorten_repr(data)}"
            )
        if len({len(array) for array in data}) > 1:
            raise ModelInterfaceError(f"{source}: {name} arrays have {[len(array) for array in data]} rows")
        parts.append(list(data))
    return parts


def _count_rows(data: Any) -> int:
    return len(data) if isinstance(data, Loader) else len(data[0]) if data else 0


def _copy_batches(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Copy a loader's batches: on the CPU XLA may read an input when the loader already overwrites it."""
    return (tuple(np.array(array) for array in batch) for batch in batches)
