"""Data of a trainer: the order of their rows in each epoch, and the plan of an interval, which ranks follow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import synkhronos as synk
from synkhronos import ranks
from synkhronos.data import Data
from synkhronos.data.parts import PartsData, iterate_shuffled_batches
from synkhronos.loading import Loader
from synkhronos.loading.loader import Feed, open_feed
from synkhronos.training.recorder import Recorder
from synkhronos.training.schedules import Schedule, compute_rate

#: Maximal number of steps in one launch; each number is compiled separately.
_MAX_REPEATS = 64


@dataclass
class IntervalPlan:
    """Steps until the next report."""

    #: Name of the trainer, the key of each rank's state.
    name: str
    #: Range of positions in the epoch's order of rows.
    first: int
    last: int
    #: Number of a rank's rows in a step.
    batch: int
    epoch: int
    #: Number of rows of an epoch, and of all epochs before.
    count: int
    rows_before: int
    schedule: Schedule
    recorders: list[Recorder]
    #: Whether the master shows a progress bar.
    shows_progress: bool
    #: Groups of ranks that share rows: one group of all ranks, or one per host if the hosts have different rows.
    pools: list[range]
    #: Whether a signal may end the training before `last`.
    can_stop: bool = False
    #: Outcomes between the last report and `first`, one per rank (one for synchronous ranks); empty at a report.
    earlier_outcomes: Sequence[Any] = ()
    #: Whether the loss is a weighted mean instead of a mean over rows.
    has_weight: bool = False

    def get_rate(self, position: int) -> float:
        """Return the learning rate at a position in the epoch."""
        return compute_rate(self.schedule, self.epoch + position / self.count)


class OrderedRows:
    """Source of rows from data in memory; the source of a loader's rows is a `Feed`.

    Parameters
    ----------
    data : list of Data, or on a rank of LocalRows
    order : sequence of int
        Indexes of the rows, in the epoch's order.
    """

    max_repeats = _MAX_REPEATS

    def __init__(self, data: list[Any], order: Any):
        self.data, self._order = data, order

    def wait_rows(self, start: int, stop: int, watch: Any = None) -> np.ndarray:
        """Return the indexes of the rows in a range of positions."""
        return np.asarray(self._order)[start:stop]

    def free(self, start: int, stop: int) -> None:
        """Do nothing: only a `Feed` has memory to release."""


#: Source of a rank's rows.
Source = OrderedRows | Feed


@dataclass
class EpochData:
    """Data of a trainer, and the order of its rows by epoch."""

    data: list[Data]
    #: Number of rows of the data.
    length: int
    batch: int
    seed: int
    loader: Loader | None
    #: Ranks of each host, if ranks take only rows of their own host; else None.
    pools: list[range] | None = field(init=False)
    #: Number of rows of an epoch.
    count: int = field(init=False)
    order: Data = field(init=False)
    _shuffled: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        self.pools = get_rank_pools(self.data)
        self.count = self.length if self.pools is None else sum(map(len, self._iterate_part_rows(0)))

    def find_length(self) -> int:
        """Return the present number of rows of the data, which may have changed between two epochs.

        Raises
        ------
        ValueError
            If the data do not have equally many.
        """
        lengths = {self.length} if self.loader is not None else {len(array) for array in self.data}
        if len(lengths) > 1:
            raise ValueError(f"x_data, y_data: expected equally many rows of each, got {[len(d) for d in self.data]}")
        return lengths.pop()

    def allocate_order(self) -> None:
        """Allocate the array of the order, which all ranks read."""
        if self.loader is None:
            self.order = synk.data(shape=(self.count,), dtype="int64")
        self._shuffled = -1

    def make_source(self, epoch: int, first: int, all_together: bool) -> Source:
        """Return the source of an epoch's rows, for all ranks together or for each rank by itself."""
        if self.loader is not None:
            size = ranks.get_session().size
            unit, takers = (self.batch * size, 1) if all_together else (self.batch, size)
            return open_feed(self.loader, epoch, first, unit, self.seed, takers)
        if epoch != self._shuffled:
            if self.pools is None:
                self.order[...] = np.random.default_rng((self.seed, epoch)).permutation(self.count)
            else:
                self.order[...] = np.concatenate(list(self._iterate_part_rows(epoch)))
            self._shuffled = epoch
        return OrderedRows(self.data, self.order)

    def _iterate_part_rows(self, epoch: int) -> Iterator[np.ndarray]:
        """Yield the rows of each step of an epoch, if ranks take only rows of their own host."""
        assert self.pools is not None
        return iterate_shuffled_batches(self.length, self.batch * self.pools[-1].stop, self.pools, (self.seed, epoch))

    def describe_parts(self) -> list[int] | None:
        """Return the batch and the numbers of ranks by host if hosts have different rows, else None."""
        return None if self.pools is None else [self.batch, *map(len, self.pools)]


def check_rows(count: int, batch_size: int) -> None:
    """Raise ValueError if the data have too few rows for a step of all ranks."""
    size = ranks.get_session().size
    if batch_size * size > count:
        raise ValueError(f"batch_size: {size} ranks times {batch_size} rows are more than the {count} rows of the data")


def get_rank_pools(data: list[Data]) -> list[range] | None:
    """Return the ranks of each host if some data are of `synkhronos.data_parts`, else None."""
    return ranks.get_session().link.ranks_by_host if any(isinstance(array, PartsData) for array in data) else None
