"""Counterpart of a Data object on one rank, in a program that `synkhronos.run` runs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from synkhronos.casts import cast
from synkhronos.data_objects.array import as_numpy
from synkhronos.data_objects.rows import find_max_row, find_min_row, select_rows
from synkhronos.devices import NUMPY, Device, Selection, find_device, take_rows
from synkhronos.devices.selection import Buffers
from synkhronos.ranks import ArrayLocation, Rank
from synkhronos.ranks.program_peers import ByteRange, find_byte_range


class LocalRows:
    """Rows of an array in shared memory: the counterpart of a `synkhronos.Data` object in a program.

    ``rows[selection]`` selects rows, in the given order; ``selection`` has the form of a call's ``batch``, except for
    an integer.  Rows are copied when a function is called with them, or when NumPy reads them.

    Attributes
    ----------
    local_rows : range
        Rows of the complete array that are on this rank's host: all rows, except for `synkhronos.data_parts` on several
        hosts.
    """

    def __init__(self, rank: Rank, location: ArrayLocation):
        self._rank = rank
        self._location = location
        self._selection: Selection | None = None
        self._array = location.view(rank.segments)
        rows = location.find_local_rows(rank.size, rank.local_ranks)
        self.local_rows = range(*self._array.shape[:1] or (0,)) if rows is None else rows
        self._is_partial = self.ndim > 0 and len(self.local_rows) < len(self._array)

    @property
    def array(self) -> np.ndarray:
        """NumPy array of all rows, a view of the shared memory, which all ranks may read and write."""
        self._check_rows_are_local(None)
        return self._array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the selected rows."""
        return self._array.shape if self._selection is None else (len(self._selection), *self._array.shape[1:])

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the array."""
        return self._array.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self._array.ndim

    def __len__(self) -> int:
        return len(self._array if self._selection is None else self._selection)

    def __getitem__(self, selection: Any) -> LocalRows:
        if isinstance(selection, int | np.integer) and not isinstance(selection, bool):  # Data[5] is row 5
            raise TypeError(
                f"rows[{selection}]: expected rows[:{selection}], the first {selection} rows, or rows[[{selection}]]"
            )
        rows, selected = select_rows(selection, len(self), "rows"), self._selection
        if isinstance(selected, range) and isinstance(rows, range):
            start, stop = (selected.start + selected.step * index for index in (rows.start, rows.stop))
            rows = range(start, stop, selected.step * rows.step)
        elif selected is not None:
            rows = np.asarray(selected)[np.asarray(rows)]
        self._check_rows_are_local(rows)
        # Without __init__, which would map the memory again: a training step selects rows of each array.
        result = LocalRows.__new__(LocalRows)
        result.__dict__.update(self.__dict__)
        result._selection = rows
        return result

    def _check_rows_are_local(self, rows: Selection | None) -> None:
        """Raise IndexError if any of the rows is not on this rank's host.  None stands for all rows."""
        if self._is_partial:
            local = self.local_rows
            rows = range(len(self._array)) if rows is None else rows
            if len(rows) and not (find_min_row(rows) >= local.start and find_max_row(rows) < local.stop):
                raise IndexError(
                    f"rows {find_min_row(rows):,} to {find_max_row(rows):,} are not all on this host: of the "
                    f"{len(self._array):,} that data_parts has loaded, rank {self._rank.number}'s host has "
                    f"{local.start:,} to {local.stop - 1:,} (rows.local_rows)"
                )

    def to_device(self, device: Device) -> Any:
        """Return a copy of the rows as an array on a device."""
        return device.transfers.read_rows(self._rank, self._location, self._get_selection())

    def stage_input(self, device: Device, buffers: Buffers, must_copy: bool) -> Any:
        """Return the rows as an input of the next launch, as ``HostTransfers.stage_input`` does."""
        return device.transfers.stage_input(self._rank, self._location, self._get_selection(), buffers, must_copy)

    def _get_selection(self) -> Selection | None:
        """Return the selected rows, None for all; raise IndexError if any of them is not on this rank's host."""
        if self._selection is None:
            self._check_rows_are_local(None)
        return self._selection

    def write(self, value: Any) -> None:
        """Set the rows, which have to be contiguous, to the values of an array of their shape.

        An array on a GPU is copied directly into the shared memory.
        """
        key, offset, _ = find_byte_range(self)
        rows, device = self._selection, find_device(value)
        target = self._array[rows.start : rows.stop] if isinstance(rows, range) else self.array
        if device is NUMPY:
            target[...] = cast(value, self.dtype, "value")
        elif value.dtype == self.dtype and math.prod(value.shape) == target.size:
            np.broadcast_shapes(value.shape, target.shape)  # raises ValueError
            device.transfers.write_segment(self._rank, key, offset, value)
        else:
            target[...] = cast(device.to_numpy(value), self.dtype, "value")

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return as_numpy(self.array if self._selection is None else take_rows(self._array, self._selection), dtype, copy)

    def __repr__(self) -> str:
        return f"<synkhronos.LocalRows: {self.dtype}, shape {self.shape}>"


@find_byte_range.register
def _(rows: LocalRows) -> ByteRange:
    selected, location = rows._selection, rows._location
    if rows._rank.segments[location.segment_key].is_user_file:
        raise ValueError("rows: expected rows in memory that ranks write, got rows of a file")
    if selected is None:
        return location.segment_key, location.offset, rows._array.nbytes
    if not isinstance(selected, range) or selected.step != 1:
        raise ValueError("rows: expected contiguous rows, such as rows[3:5]")
    row_nbytes = rows._array[0].nbytes if len(rows._array) else 0
    return location.segment_key, location.offset + selected.start * row_nbytes, len(selected) * row_nbytes
