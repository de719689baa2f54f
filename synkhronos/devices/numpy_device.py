"""The device for host memory: NumPy arrays, and all values that NumPy can read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from synkhronos.devices.device import Device, HostTransfers
from synkhronos.devices.reduce_op import ReduceOp
from synkhronos.devices.selection import Buffers, Selection, take_rows
from synkhronos.ranks import ArrayLocation, Rank
from synkhronos.variable_types import Array


class NumpyDevice(Device):
    """NumPy arrays in host memory."""

    name = "numpy"
    must_move_shared_values = False
    has_arithmetic = True

    def owns(self, value: object) -> bool:
        """Whether NumPy can read a value by ``__array__``, which its own arrays and scalars have, too."""
        return hasattr(value, "__array__")

    def to_numpy(self, value: Array) -> np.ndarray:
        return np.asarray(value)

    def from_numpy(self, array: np.ndarray) -> Array:
        return np.array(array, order="C")

    def as_array(self, value: Array) -> Array:
        return np.asarray(value)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        return np.empty(shape, dtype)

    def to_numpy_many(self, values: Sequence[Any], leaves_large: bool = False) -> list[Any]:
        """Return the values unchanged, since arrays in host memory are fetched already."""
        return list(values)

    def reduce_pair(self, op: ReduceOp, left: Array, right: Array) -> Array:
        """Write ``op`` applied to two arrays into the first, and return it."""
        assert op.ufunc is not None
        return op.ufunc(left, right, out=left)

    def concatenate(self, arrays: Sequence[Array]) -> Array:
        return np.concatenate(arrays)

    def can_transfer_directly(self, dtype: np.dtype, op: str | None = None) -> bool:
        """Return True: the communicators of NumPy arrays handle all dtypes and reductions."""
        return True

    def as_contiguous(self, value: Array) -> Array:
        return np.ascontiguousarray(value)

    def as_writable(self, value: Array, has_other_references: bool) -> Array:
        """Return an array if it is contiguous and writable, else a copy; writes are visible to other references."""
        if isinstance(value, np.ndarray) and value.flags.c_contiguous and value.flags.writeable:
            return value
        return np.array(value, order="C")

    @cached_property
    def transfers(self) -> HostTransfers:
        return NumpyTransfers(self)


class NumpyTransfers(HostTransfers):
    """Selections of rows, most of them without a copy."""

    def stage_input(
        self, rank: Rank, location: ArrayLocation, rows: Selection | None, buffers: Buffers, must_copy: bool
    ) -> Any:
        """Return rows of an array in shared memory (None: all) as an input of the next launch.

        All rows, and evenly spaced ones, are a view of the shared memory, or a new array if ``must_copy``.  Rows by
        index are a buffer, which the next call overwrites.
        """
        array = location.view(rank.segments)
        if rows is None:
            return array.copy() if must_copy else array
        if isinstance(rows, range):
            view = take_rows(array, rows)
            return view.copy() if must_copy else view
        # The buffer is reused, as the first write to new memory costs more than the copy.  This is safe: outputs of
        # compiled functions do not alias their inputs, except those that the user allows to by ``borrow=True``.
        shape = (len(rows), *array.shape[1:])
        n_items = math.prod(shape)
        buffer = buffers.get("rows")
        if buffer is None or buffer.size < n_items or buffer.dtype != array.dtype:
            buffer = buffers["rows"] = np.empty(n_items, array.dtype)
        return take_rows(array, rows, buffer[:n_items].reshape(shape))


DEVICE = NumpyDevice()
