"""What there is to do between two reports.

`Plan`
    Which rows, how many at a time, and what to write down.
`InOrder`
    The rows of data that are all there.
`Source`
    What rows are taken from: these, or a loader's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from synkhronos.loading.loader import Feed
from synkhronos.training.recorder import Recorder
from synkhronos.training.schedules import Schedule

#: Steps in one launch, at most: each number is compiled by itself.
_MOST = 64


@dataclass
class Plan:
    """What to do until the next report."""

    #: Of the trainer, under which each rank keeps what it has.
    name: str
    #: The places in the epoch's order of rows between which to train.
    first: int
    last: int
    #: A rank's rows in a step.
    batch: int
    epoch: int
    #: The rows of an epoch.
    count: int
    schedule: Schedule
    recorders: list[Recorder]
    #: Whether the master shows how far it is.
    bar: bool
    #: The ranks among which rows are divided: all, or those of each host where hosts have rows of their own.
    pools: list[range]
    #: Whether a signal may end the training before `last`.
    can_stop: bool = False
    #: The outcomes of the ranks (of all together: one) since the last report and before `first`; none at a report.
    before: Sequence[Any] = ()
    #: Whether the loss is a mean by a weight, and not over rows.
    has_weight: bool = False

    def rate(self, place: int) -> float:
        """Return the learning rate at a place in the epoch."""
        return float(self.schedule(self.epoch + place / self.count))


class InOrder:
    """Rows of data that are all in memory, by their places in an epoch's order; a loader's rows come by a `Feed`.

    ``order`` has the rows' numbers.  On a rank the data are LocalRows.
    """

    most = _MOST

    def __init__(self, data: list[Any], order: Any):
        self.data, self._order = data, order

    def rows(self, first: int, last: int, watch: Any = None) -> np.ndarray:
        """Return the numbers of the rows between two places."""
        return np.asarray(self._order)[first:last]

    def free(self, first: int, last: int) -> None:
        """Nothing waits for the memory."""


#: What a rank takes rows from.
Source = InOrder | Feed
