"""Copies between host memory and the arrays of a device."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from synkhronos.devices.selection import Buffers, Selection, take_rows
from synkhronos.ranks import ArrayLocation, Rank
from synkhronos.variable_types import Array


class ArrayConverter(Protocol):
    """The methods of `Device` that copies need; its module imports this one."""

    def to_numpy(self, value: Array) -> np.ndarray:
        """Convert an array of the device to NumPy."""

    def from_numpy(self, array: np.ndarray) -> Array:
        """Copy a NumPy array into a new array of the device."""

    def as_array(self, value: Array) -> Array:
        """Convert a value to an array of the device, unless it is one."""


class ByteSource(Protocol):
    """Bytes of an array that are not in host memory."""

    size: int

    def copy_to(self, target: np.ndarray, start: int) -> None:
        """Fill ``target``, a vector of uint8, with the bytes from offset ``start`` on."""


class HostTransfers:
    """Copies of functions' inputs and results between host memory and the arrays of ``device``.

    Inputs are in shared memory.  Results may also be in the master's own memory.  The copies of this class pass through
    a NumPy array.  Subclasses avoid that.
    """

    def __init__(self, device: ArrayConverter):
        self._device = device

    def stage_input(
        self, rank: Rank, location: ArrayLocation, rows: Selection | None, buffers: Buffers, must_copy: bool
    ) -> Any:
        """Return rows of an array in shared memory (None: all) as an input of the next launch.

        The result may be one of the input's ``buffers``, which the next call overwrites.  With ``must_copy``, it must
        not share memory with the segment, because the function may overwrite it.
        """
        return self.read_rows(rank, location, rows)

    def wait_for_copies(self) -> None:
        """Wait until all inputs are copied from shared memory, so that it may be overwritten.

        By default inputs are copied at once, or the functions that read them return when they have computed.
        """

    def stage_indexes(self, values: np.ndarray, buffers: Buffers) -> Array:
        """Return a vector of indexes as an input of the next launch, perhaps in one of the input's ``buffers``."""
        return self._device.as_array(values)

    def read_rows(self, rank: Rank, location: ArrayLocation, rows: Selection | None) -> Array:
        """Copy rows of an array in shared memory (None: all) into a new array of the device."""
        view = location.view(rank.segments)
        return self._device.from_numpy(view if rows is None else take_rows(view, rows))

    def write_segment(self, rank: Rank, segment_key: int, offset: int, value: Array) -> None:
        """Copy an array into a segment of shared memory, from byte ``offset`` on."""
        target = rank.segments[segment_key].view_array(tuple(value.shape), value.dtype, offset)
        target[...] = self._device.to_numpy(value)

    def empty_in_host_memory(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return a new NumPy array of undefined content, for a large result that is copied into it."""
        return np.empty(shape, dtype)

    def as_bytes(self, value: Array) -> np.ndarray | ByteSource:
        """Return an array's bytes, as a vector of uint8 if they are in host memory."""
        return np.ascontiguousarray(self._device.to_numpy(value)).reshape(-1).view(np.uint8)
