"""Plan of the steps between two reports, which the trainer sends to the ranks, and the order of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from synkhronos.loading.loader import Feed
from synkhronos.training.recorder import Recorder
from synkhronos.training.schedules import Schedule

#: Maximal number of steps in one launch; each number is compiled separately.
_MAX_REPEATS = 64


@dataclass
class Plan:
    """Steps until the next report."""

    #: Name of the trainer, the key of each rank's state.
    name: str
    #: Range of positions in the epoch's order of rows.
    first: int
    last: int
    #: Number of a rank's rows in a step.
    batch: int
    epoch: int
    #: Number of rows of an epoch.
    count: int
    schedule: Schedule
    recorders: list[Recorder]
    #: Whether the master shows a progress bar.
    bar: bool
    #: Groups of ranks that share rows: one group of all ranks, or one per host if the hosts have different rows.
    pools: list[range]
    #: Whether a signal may end the training before `last`.
    can_stop: bool = False
    #: Outcomes between the last report and `first`, one per rank (one for synchronous ranks); empty at a report.
    before: Sequence[Any] = ()
    #: Whether the loss is a weighted mean instead of a mean over rows.
    has_weight: bool = False

    def rate(self, place: int) -> float:
        """Return the learning rate at a position in the epoch."""
        return float(self.schedule(self.epoch + place / self.count))


class InOrder:
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

    def rows(self, first: int, last: int, watch: Any = None) -> np.ndarray:
        """Return the indexes of the rows in a range of positions."""
        return np.asarray(self._order)[first:last]

    def free(self, first: int, last: int) -> None:
        """Do nothing: only a `Feed` has memory to release."""


#: Source of a rank's rows.
Source = InOrder | Feed
