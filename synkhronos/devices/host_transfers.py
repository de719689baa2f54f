"""Copies between host memory and the arrays of a device."""

from __future__ import annotations

from typing import Any

import numpy as np

from synkhronos.devices.selection import Buffers, Selection, take_rows
from synkhronos.ranks import ArrayLocation, Rank
from synkhronos.variable_types import Array


class HostTransfers:
    """Copies between host memory, most of it shared, and the arrays of ``device``, a `Device`.

    The copies of this class pass through a NumPy array.  Subclasses avoid that.
    """

    def __init__(self, device: Any):
        self._device = device

    def stage_input(
        self, rank: Rank, location: ArrayLocation, rows: Selection | None, buffers: Buffers, must_copy: bool
    ) -> Any:
        """Return rows of an array in shared memory (None: all) as an input of the next launch.

        The result may be one of the input's ``buffers``, which the next call overwrites.  With ``must_copy``, it must
        not share memory with the segment, because the function may overwrite it.
        """
        return self.read_segment(rank, location, rows)

    def stage_indexes(self, values: np.ndarray, buffers: Buffers) -> Array:
        """Return a vector of indexes as an input of the next launch, perhaps in one of the input's ``buffers``."""
        return self._device.as_array(values)

    def read_segment(self, rank: Rank, location: ArrayLocation, rows: Selection | None) -> Array:
        """Copy rows of an array in shared memory (None: all) into a new array of this kind."""
        view = location.view(rank.segments)
        return self._device.from_numpy(view if rows is None else take_rows(view, rows))

    def write_segment(self, rank: Rank, segment_key: int, offset: int, value: Array) -> None:
        """Copy an array into a segment of shared memory, from byte ``offset`` on."""
        target = rank.segments[segment_key].view_array(tuple(value.shape), value.dtype, offset)
        target[...] = self._device.to_numpy(value)

    def empty_in_host_memory(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return a new NumPy array of undefined content, for a large result that is copied into it."""
        return np.empty(shape, dtype)

    def as_bytes(self, value: Array) -> Any:
        """Return an array's bytes: a vector of uint8, or an object with its ``size`` and a method ``copy_to``."""
        return np.ascontiguousarray(self._device.to_numpy(value)).reshape(-1).view(np.uint8)
