"""What devices on GPUs have in common.

`CudaDevice`
    A kind of array on the one GPU that its process sees.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from synkhronos.devices import cuda
from synkhronos.devices.cuda.group import NcclGroup
from synkhronos.devices.cuda.nccl import NcclCommunicator, number_of
from synkhronos.devices.cuda.staging import Arrays, Items, Staging
from synkhronos.devices.host import Selection
from synkhronos.devices.through_host import ThroughHost
from synkhronos.ranks import Rank, SharedArray


class _Groups(dict[frozenset[int], NcclGroup]):
    """The groups of a rank, by their members."""


class CudaDevice(ThroughHost, Arrays):
    """A kind of array on a GPU; what brings arrays there is for processes that are bound to one.

    Attributes
    ----------
    needed : dict
        What has to be installed to compute on GPUs, as `cuda.lacking` takes it.
    install : str
        How to.
    """

    needed: dict[tuple[str, ...], str]
    install: str

    def __init__(self) -> None:
        self._place: str | None = None

    # -- processes -------------------------------------------------------------------------------------------

    @property
    def on_gpu(self) -> bool:
        """Whether this process was bound to a GPU."""
        return self._place is not None

    def missing(self) -> list[str]:
        """Return what would have to be installed to compute on GPUs."""
        return cuda.lacking({**self.needed, **cuda.DRIVERS})

    def places(self, size: int, root: int) -> list[str]:
        """Return for each rank which GPU it gets, as ``CUDA_VISIBLE_DEVICES`` names them."""
        return cuda.places(size, root, self._place)

    def bind(self, rank: Rank, place: str) -> None:
        """Compute on one GPU, and see no other."""
        if self._place is None:  # else from an earlier fork: CUDA has been started, and keeps what it saw then
            with cuda.only(place):
                self.start(place)
            self._place = place

    def start(self, place: str) -> None:
        """Start to compute on the only GPU that is visible; ``place`` is for messages."""
        raise NotImplementedError

    # -- collectives -----------------------------------------------------------------------------------------

    def communicator(self, rank: Rank) -> NcclCommunicator:
        """Return the rank's communicator between GPUs, the same one each time."""
        return rank.registry.get(NcclCommunicator, lambda: NcclCommunicator(rank, self.staging))

    def group(self, rank: Rank, members: Iterable[int]) -> NcclGroup:
        """Return what some ranks do alone, for the same ranks the same each time."""
        groups = rank.registry.get(_Groups)
        members = frozenset(members)
        if members not in groups:
            groups[members] = NcclGroup(self.communicator(rank))
        return groups[members]

    def communicates(self, dtype: np.dtype) -> bool:
        """Whether the GPUs can combine arrays of a dtype among themselves; what they can't goes through host memory."""
        return self.on_gpu and number_of(dtype) is not None

    def part(self, array: Any, start: int, shape: tuple[int, ...]) -> Items:
        """Return a run of an array's items, as the communicator takes it."""
        itemsize = array.dtype.itemsize
        return Items(array, self.pointer(array) + start * itemsize, math.prod(shape) * itemsize)

    # -- from the host ---------------------------------------------------------------------------------------

    @cached_property
    def staging(self) -> Staging:
        """What brings rows of shared memory to the GPU."""
        return Staging(self)

    def load(self, rank: Rank, location: SharedArray, rows: Selection | None) -> Any:
        """Return rows of an array in shared memory (None: all of it) as a new array."""
        return self.staging.load(rank, location, rows) if self.on_gpu else super().load(rank, location, rows)

    def input(
        self, rank: Rank, kept: dict[Any, Any], key: Any, location: SharedArray, rows: Selection | None, copy: bool
    ) -> Any:
        """Return rows of an array in shared memory as an input for the next launch, in memory that is used again."""
        if not self.on_gpu:
            return super().input(rank, kept, key, location, rows, copy)
        return self.staging.input(rank, kept, key, location, rows)

    def indexes(self, rank: Rank, kept: dict[Any, Any], key: Any, values: np.ndarray) -> Any:
        """Return a rank's own vector of indexes as an input for the next launch."""
        return self.staging.vector(rank, kept, key, values) if self.on_gpu else values

    def launching(self) -> None:
        """Have the function that is launched next wait for its inputs."""
        if self.on_gpu:
            self.staging.arrive()

    def launched(self, results: Any) -> None:
        """Note that the function launched last, which gives these results, reads its inputs until it has computed."""
        if not self.on_gpu:
            return
        if self.stream is None:
            self.wait(results)
        self.staging.launched()

    def wait(self, values: Sequence[Any]) -> None:
        """Wait until values have been computed."""
        for value in values:
            if self.holds(value):
                self.wait_for(value)
