"""Inputs of a call: checks in the master, and arrays in shared memory that all ranks can read.

A `Data` object is in shared memory already.  Any other array is copied into a buffer, which the next call overwrites.
Only the selected rows of a scattered input are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos.casts import check_dense
from synkhronos.data_objects import Data
from synkhronos.data_objects.data_access import SharedBuffers, check_session, get_array_location
from synkhronos.data_objects.rows import (
    BatchArgument,
    as_indexes_or_mask,
    check_slice_bounds,
    find_max_row,
    find_min_row,
    select_rows,
    select_rows_unbounded,
)
from synkhronos.devices import Selection
from synkhronos.functions.arguments import CALL_OPTIONS
from synkhronos.functions.call import ScatteredInput
from synkhronos.functions.computation import Computation
from synkhronos.ranks import ArrayLocation, Session

_MISSING = object()


class CallInputWriter:
    """Checks the inputs of a function's calls, and writes them into shared memory."""

    def __init__(self, computation: Computation):
        self.computation = computation
        self._buffers = SharedBuffers()
        self._labels = [
            f"input {i} ({spec.name or spec.variable}) of {computation.name}"
            for i, spec in enumerate(computation.inputs)
        ]
        self._positions = {spec.name: i for i, spec in enumerate(computation.inputs) if spec.name is not None}
        self._dtypes = [np.dtype(spec.variable.type.dtype) for spec in computation.inputs]
        shapes = [computation.library.get_static_shape(spec.variable) for spec in computation.inputs]
        self._static_shapes = [None if all(length is None for length in shape) else shape for shape in shapes]

    def match_arguments(self, args: Sequence[Any], named_inputs: dict[str, Any] | None) -> list[Any]:
        """Return one value for each input, from positional and named arguments and defaults."""
        specs = self.computation.inputs
        if len(args) == len(specs) and not named_inputs:
            return list(args)
        if len(args) > len(specs):
            raise TypeError(f"{self.computation.name} takes {len(specs)} inputs, got {len(args)}")
        values: list[Any] = [*args, *[_MISSING] * (len(specs) - len(args))]
        for name, value in (named_inputs or {}).items():
            position = self._positions.get(name)
            if position is None:
                raise TypeError(
                    f"{self.computation.name} has no input {name!r}; its inputs are {list(self._positions)}"
                )
            if [spec.name for spec in specs].count(name) > 1:
                raise TypeError(
                    f"{self.computation.name}: several inputs have the name {name!r}; pass them by position"
                )
            if values[position] is not _MISSING:
                raise TypeError(f"{self.computation.name}: input {name!r} was given twice")
            values[position] = value
        for i, spec in enumerate(specs):
            if values[i] is _MISSING:
                if not spec.default_tuple:
                    advice = f"; {spec.name}=... is an option of calls: pass the input by position"
                    raise TypeError(
                        f"{self.computation.name}: missing input {i} ({spec.name or spec.variable})"
                        f"{advice if spec.name in CALL_OPTIONS else ''}"
                    )
                values[i] = spec.default_tuple[0]
        return values

    def write_inputs(
        self, session: Session, args: Sequence[Any], named_inputs: dict[str, Any] | None, batch: BatchArgument
    ) -> tuple[tuple[ScatteredInput | ArrayLocation, ...], int | None]:
        """Check the inputs of a call, select their rows, and write arrays into shared memory.

        Return the inputs of the command, and the number of selected rows, None if no input is scattered.
        """
        computation, n = self.computation, self.computation.n_scattered
        if not computation.inputs and not args and not named_inputs and batch is None:
            return (), None
        values = self.match_arguments(args, named_inputs)
        checked = [self._to_checked_input(i, value, session) for i, value in enumerate(values)]
        if n == 0:
            if batch is not None:
                raise ValueError(f"batch: {self.computation.name} has no scattered inputs")
            return tuple(self._write_broadcast_input(i, value) for i, value in enumerate(checked)), None

        rows, first_row = self._select_batch(checked[:n], batch)
        call_inputs: list[ScatteredInput | ArrayLocation] = []
        index_location: ArrayLocation | None = None
        for i, value in enumerate(checked):
            if i >= n:
                call_inputs.append(self._write_broadcast_input(i, value))
            elif not isinstance(value, Data):
                array = self._buffers.write(i, value, rows)
                call_inputs.append(ScatteredInput(array, range(len(rows))))
            elif value.minibatch and _is_index_list_or_mask(batch):
                # A minibatch has its rows in the order of the list.
                call_inputs.append(ScatteredInput(get_array_location(value), range(len(rows))))
            else:
                selected: range | ArrayLocation
                if isinstance(rows, range):
                    selected = rows
                else:
                    if index_location is None:
                        index_location = self._buffers.write("batch", rows)
                    selected = index_location
                array = get_array_location(value)
                call_inputs.append(ScatteredInput(array, selected, first_row if first_row and value.minibatch else 0))
        return tuple(call_inputs), len(rows)

    def _to_checked_input(self, position: int, value: Any, session: Session) -> Data | np.ndarray:
        """Check an input's value, and convert it to an array of the input's dtype if it is not a Data object."""
        spec, name = self.computation.inputs[position], self._labels[position]
        variable_type = spec.variable.type
        if isinstance(value, Data):
            check_session(value, session, name)
            if value.dtype != self._dtypes[position] or value.ndim != variable_type.ndim:
                raise TypeError(
                    f"{name}: expected {variable_type.dtype} of {variable_type.ndim} dimensions, "
                    f"got Data of {value.dtype} and {value.ndim} dimensions"
                )
            checked: Data | np.ndarray = value
        else:
            if type(value) is not np.ndarray:
                check_dense(value, name)
            try:
                checked = self.computation.library.filter(variable_type, value, spec.strict, spec.allow_downcast)
            except (TypeError, ValueError, AttributeError) as error:
                error_class = ValueError if isinstance(error, ValueError) else TypeError
                raise error_class(f"{name}: expected {variable_type}, got {_describe_value(value)}: {error}") from None
        static = self._static_shapes[position]
        if static is not None and any(n not in (None, length) for n, length in zip(static, checked.shape, strict=True)):
            raise ValueError(f"{name}: expected shape {static} (None is any length), got {checked.shape}")
        return checked

    def _select_batch(self, values: Sequence[Data | np.ndarray], batch: BatchArgument) -> tuple[Selection, int]:
        """Return the rows that ``batch`` selects for all ranks together, and the number of a minibatch's first row."""
        minibatches = {i: v for i, v in enumerate(values) if isinstance(v, Data) and v.minibatch}
        lengths = [len(v) for i, v in enumerate(values) if i not in minibatches]
        if not lengths and batch is None:
            lengths = [len(v) for v in values]  # minibatches only: the batch is all their rows
        if not lengths:
            rows = select_rows_unbounded(batch)
        else:
            other_lengths = set(lengths)
            other_lengths.remove(shortest := min(lengths))
            rows = select_rows(batch, shortest)
            # Negative indexes select different rows of inputs with different lengths.
            if other_lengths and any(not np.array_equal(select_rows(batch, length), rows) for length in other_lengths):
                raise ValueError(
                    f"{self.computation.name}: scattered inputs need equally many rows, got {lengths}"
                    + (
                        "; put an input that every rank needs whole into bcast_inputs"
                        if batch is None
                        else f", and batch={_describe_value(batch)} selects different rows of them"
                    )
                )
        if not minibatches:
            return rows, 0
        first_row = find_min_row(rows)
        if _is_index_list_or_mask(batch):
            verb, needed = "selects", len(rows)
        else:
            verb, needed = "spans", find_max_row(rows) - first_row + 1
        for i, value in minibatches.items():
            if needed > len(value):
                raise IndexError(f"batch: input {i} is a minibatch of {len(value)} rows, but batch {verb} {needed}")
        return rows, first_row

    def _write_broadcast_input(self, position: int, value: Data | np.ndarray) -> ArrayLocation:
        return get_array_location(value) if isinstance(value, Data) else self._buffers.write(position, value)

    def write_batch_s(self, session: Session, batch_s: Any) -> tuple[Any, ...]:
        """Write ``batch_s``.  Return one slice, or location of indexes in shared memory, for each rank.

        Ranks check the indexes' range.
        """
        by_rank = split_selections_by_rank(batch_s, session.size)
        selections: list[Any] = []
        for r, selection in enumerate([batch_s] if by_rank is None else by_rank):
            if isinstance(selection, slice):
                check_slice_bounds(selection, "batch_s")
                selections.append(selection)
            else:
                selections.append(self._buffers.write(("batch_s", r), to_integer_indexes(selection, "batch_s")))
        return tuple(selections * session.size if by_rank is None else selections)


def _is_index_list_or_mask(batch: BatchArgument) -> bool:
    """Whether ``batch`` is a list or range of indexes, or a mask, rather than a number of rows or a slice."""
    return batch is not None and not isinstance(batch, int | np.integer | slice)


def _describe_value(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} and shape {value.shape}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def has_only_contiguous_slices(batch_s: Any) -> bool:
    """Whether ``batch_s`` is a slice with step 1, or consists of such slices."""
    selections = batch_s if isinstance(batch_s, list | tuple) else [batch_s]
    return len(selections) > 0 and all(isinstance(item, slice) and item.step in (None, 1) for item in selections)


def split_selections_by_rank(batch_s: Any, size: int, name: str = "batch_s") -> list[Any] | None:
    """Return one selection for each of ``size`` ranks, or None if ``batch_s`` is one selection for all ranks."""
    if isinstance(batch_s, slice):
        return None
    if isinstance(batch_s, list | tuple) and any(
        isinstance(item, slice | list | tuple | range) or isinstance(item, np.ndarray) and item.ndim for item in batch_s
    ):
        if len(batch_s) != size:
            raise ValueError(f"{name}: expected one selection of rows for each of {size} ranks, got {len(batch_s)}")
        return list(batch_s)
    if isinstance(batch_s, np.ndarray) and batch_s.ndim == 2:
        return split_selections_by_rank(list(batch_s), size, name)
    return None


def to_integer_indexes(selection: Any, name: str) -> np.ndarray:
    """Convert indexes to an array of int64, whose range each rank checks.  Raise TypeError for a mask."""
    index = as_indexes_or_mask(selection, name, "a slice, a list of indexes, or a list of these, one for each rank")
    if index.dtype == bool:
        raise TypeError(f"{name}: expected integer indexes, got dtype {index.dtype}")
    return index
