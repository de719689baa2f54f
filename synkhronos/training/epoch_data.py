"""Data of a trainer, and the order of rows in each epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

import synkhronos as synk
from synkhronos import ranks
from synkhronos.data import Data
from synkhronos.data.parts import PartsData, iterate_shuffled
from synkhronos.loading import Loader
from synkhronos.loading.loader import open_feed
from synkhronos.training.plan import InOrder, Source


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
        self.count = self.length if self.pools is None else sum(map(len, self._of_parts(0)))

    def make(self) -> None:
        """Allocate the array of the order, which all ranks read."""
        if self.loader is None:
            self.order = synk.data(shape=(self.count,), dtype="int64")
        self._shuffled = -1

    def source(self, epoch: int, first: int, all_together: bool) -> Source:
        """Return the source of an epoch's rows, for all ranks together or for each rank by itself."""
        if self.loader is not None:
            size = ranks.session().size
            unit, takers = (self.batch * size, 1) if all_together else (self.batch, size)
            return open_feed(self.loader, epoch, first, unit, self.seed, takers)
        if epoch != self._shuffled:
            if self.pools is None:
                self.order[...] = np.random.default_rng((self.seed, epoch)).permutation(self.count)
            else:
                self.order[...] = np.concatenate(list(self._of_parts(epoch)))
            self._shuffled = epoch
        return InOrder(self.data, self.order)

    def _of_parts(self, epoch: int) -> Iterator[np.ndarray]:
        """Yield the rows of each step of an epoch, if ranks take only rows of their own host."""
        assert self.pools is not None
        return iterate_shuffled(self.length, self.batch * self.pools[-1].stop, self.pools, (self.seed, epoch))

    def parts(self) -> list[int] | None:
        """Return the batch and the numbers of ranks by host if hosts have different rows, else None."""
        return None if self.pools is None else [self.batch, *map(len, self.pools)]


def get_rank_pools(data: list[Data]) -> list[range] | None:
    """Return the ranks of each host if some data are of `synkhronos.data_parts`, else None."""
    return ranks.session().link.ranks_by_host if any(isinstance(each, PartsData) for each in data) else None
