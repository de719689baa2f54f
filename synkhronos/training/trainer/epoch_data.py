"""Data of a trainer: the order of rows in each epoch, and the plan of a loop over a range of them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from synkhronos import ranks
from synkhronos.data_objects import Data
from synkhronos.data_objects import data as make_data
from synkhronos.data_objects.parts import PartsData, iterate_shuffled_batches, redistribute_rows
from synkhronos.loading import Loader
from synkhronos.loading.loader import LoaderRows, open_rows
from synkhronos.training.monitoring.recorder import Recorder
from synkhronos.training.schedules import Schedule, compute_rate

#: Maximal number of steps in one launch; each number is compiled separately.
_MAX_STEPS_PER_LAUNCH = 64


@dataclass
class BatchLoopPlan:
    """Plan of one batch loop: a range of positions in the epoch's order of rows, and settings.

    An interval between two reports has one such range, or several.
    """

    #: Range of positions: ``start`` inclusive, ``stop`` exclusive.
    start: int
    stop: int
    #: Number of rows of a rank in a step.
    batch_size: int
    epoch: int
    n_epoch_rows: int
    n_rows_of_earlier_epochs: int
    schedule: Schedule
    recorders: list[Recorder]
    #: Whether the master shows a progress bar.
    shows_progress_bar: bool
    #: Groups of ranks that share rows: one group of all ranks, or one per host if the hosts have different rows.
    rank_groups: list[range]
    #: Whether a signal may end training before `stop`.
    can_stop: bool = False
    #: Totals between the last report and `start`: one per rank, or a single one for joint steps; empty at a report.
    totals_since_report: Sequence[Any] = ()
    #: Whether the loss is a weighted mean instead of a mean over rows.
    has_loss_weight: bool = False

    def get_learning_rate(self, position: int) -> float:
        """Return the learning rate at a position in the epoch."""
        return compute_rate(self.schedule, self.epoch + position / self.n_epoch_rows)


class InMemoryRows:
    """Source of the rows of data in memory, in the order of the indexes ``order``; see also `LoaderRows`."""

    max_steps_per_launch = _MAX_STEPS_PER_LAUNCH
    #: Whether loader processes have ended, as those of `LoaderRows` may; here are none.
    has_ended = False

    def __init__(self, data: list[Any], order: Any):
        self.data, self._order = data, order

    def wait_for_row_indexes(self, start: int, stop: int, on_poll: Callable[[], object] | None = None) -> np.ndarray:
        """Return the row indexes at positions ``start`` to ``stop``, without a wait, since the rows are in memory."""
        return np.asarray(self._order)[start:stop]

    def free(self, start: int, stop: int) -> None:
        """Do nothing: the rows are not in a loader's ring."""


#: Provider of row indexes for ranges of positions, and of the arrays that they index.
RowSource = InMemoryRows | LoaderRows


class OrderKey(NamedTuple):
    """Values that determine the order of rows in an epoch."""

    n_epoch_rows: int
    seed: int
    #: That of `TrainerData`.
    partition_key: list[int] | None


@dataclass
class TrainerData:
    """Data of a trainer, and the order of their rows in each epoch."""

    arrays: list[Data]
    #: Number of rows of each array; an epoch may have fewer.
    n_data_rows: int
    #: Number of rows of a rank in a step.
    batch_size: int
    seed: int
    loader: Loader | None
    #: Ranks of each host at the start of the epoch if ranks use only rows of their own host; else None.
    ranks_by_host: list[range] | None = field(init=False)
    #: Ranks of each host among which the remaining rows are divided; differs from `ranks_by_host` after the loss of a
    #: rank.
    current_ranks_by_host: list[range] | None = field(init=False)
    #: Number of rows of an epoch.
    n_epoch_rows: int = field(init=False)
    #: Row indexes in the epoch's order; None with a loader, and before `allocate_row_order`.
    row_order: Data | None = field(default=None, init=False)
    #: Division of rows among hosts: a rank's rows per step, then the numbers of ranks; None without a division.  If
    #: rows of the epoch were redistributed, a checksum of their order instead, which no other training has.
    partition_key: list[int] | None = field(init=False)
    _ordered_epoch: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        self.ranks_by_host = self.current_ranks_by_host = get_ranks_by_host_if_partitioned(self.arrays)
        self.n_epoch_rows = (
            self.n_data_rows if self.ranks_by_host is None else sum(map(len, self._iterate_step_rows(0)))
        )
        self.partition_key = None if self.ranks_by_host is None else [self.batch_size, *map(len, self.ranks_by_host)]

    def count_rows(self) -> int:
        """Count the rows that the data have now; the number may change between epochs.

        Raise ValueError if the arrays' numbers of rows differ.
        """
        lengths = {self.n_data_rows} if self.loader is not None else {len(array) for array in self.arrays}
        if len(lengths) > 1:
            raise ValueError(
                f"x_data, y_data: expected equally many rows of each, got {[len(array) for array in self.arrays]}"
            )
        return lengths.pop()

    def allocate_row_order(self) -> None:
        """Allocate the shared array with the order of rows."""
        if self.loader is None:
            self.row_order = make_data(shape=(self.n_epoch_rows,), dtype="int64")
        self._ordered_epoch = -1

    def prepare_row_source(self, epoch: int, start: int, is_joint: bool) -> RowSource:
        """Shuffle an epoch's rows or redistribute them, if needed.  Return their source from position ``start`` on."""
        if self.loader is not None:
            size = ranks.get_session().size
            rows_per_step, n_consumers = (self.batch_size * size, 1) if is_joint else (self.batch_size, size)
            return open_rows(self.loader, epoch, start, rows_per_step, self.seed, n_consumers)
        order = self.row_order
        assert order is not None  # allocated before the first epoch
        if epoch != self._ordered_epoch:
            if self.ranks_by_host is None:
                order[...] = np.random.default_rng((self.seed, epoch)).permutation(self.n_epoch_rows)
            else:
                order[...] = np.concatenate(list(self._iterate_step_rows(epoch)))
            self._ordered_epoch = epoch
        hosts = get_ranks_by_host_if_partitioned(self.arrays)
        if hosts is not None and len(hosts) > 1 and hosts != self.current_ranks_by_host:
            self._redistribute_rows(start, hosts)
        return InMemoryRows(self.arrays, order)

    def _redistribute_rows(self, start: int, ranks_by_host: list[range]) -> None:
        """Divide the epoch's rows from position ``start`` on among the remaining hosts, which load their new parts."""
        assert self.row_order is not None
        rows = self.row_order.data[start : self.n_epoch_rows]
        order, parts = redistribute_rows(rows, self.batch_size, self.n_data_rows, ranks_by_host)
        for array in self.arrays:
            if isinstance(array, PartsData):
                array.reload_parts(parts)
        self.n_epoch_rows = start + len(order)
        self.row_order[start : self.n_epoch_rows] = order
        self.current_ranks_by_host = ranks_by_host
        self.partition_key = [zlib.crc32(self.row_order.data[: self.n_epoch_rows].tobytes())]

    def round_stop_up_to_step(self, start: int, stop: int) -> int:
        """Return ``stop``, rounded up to the end of a step if rows were redistributed.  Steps begin at ``start``."""
        hosts = get_ranks_by_host_if_partitioned(self.arrays)
        if hosts is None or len(hosts) == 1 or hosts == self.ranks_by_host:
            return stop
        n_ranks = hosts[-1].stop
        rows_per_step = self.batch_size * n_ranks
        return min(self.n_epoch_rows, start + -(-(stop - start) // rows_per_step) * rows_per_step)

    def _iterate_step_rows(self, epoch: int) -> Iterator[np.ndarray]:
        """Yield the row indexes of each step of an epoch, where ranks use only rows of their own host."""
        assert self.ranks_by_host is not None
        n_ranks = self.ranks_by_host[-1].stop
        return iterate_shuffled_batches(
            self.n_data_rows, self.batch_size * n_ranks, self.ranks_by_host, (self.seed, epoch)
        )

    @property
    def order_key(self) -> OrderKey:
        """Values that determine the order of rows in the epoch."""
        return OrderKey(self.n_epoch_rows, self.seed, self.partition_key)


def check_enough_rows(count: int, batch_size: int) -> None:
    """Raise ValueError if the data have too few rows for one step of all ranks."""
    size = ranks.get_session().size
    if batch_size * size > count:
        raise ValueError(f"batch_size: {size} ranks times {batch_size} rows are more than the {count} rows of the data")


def get_ranks_by_host_if_partitioned(data: list[Data]) -> list[range] | None:
    """Return the ranks of each host if some array is made by `synkhronos.data_parts`, else None."""
    return ranks.get_session().ranks_by_host if any(isinstance(array, PartsData) for array in data) else None
