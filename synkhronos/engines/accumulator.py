"""Accumulation of an output's or update's values, over ranks or over the slices of one rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from synkhronos.devices import NUMPY, Device, get_array_device
from synkhronos.devices.reduce_op import REDUCE_OPS, ReduceOp
from synkhronos.variable_types import Array


class Accumulator:
    """Running reduction of values by a key of `REDUCE_OPS`; without an op, the last value.

    Examples
    --------
    >>> total = Accumulator("mean")
    >>> total.add(np.float64(1.0), 3)
    >>> total.add(np.float64(2.0), 1)
    >>> total.get_result()
    array(1.25)
    """

    _n_rows = _n_values = 0
    _value: Any = None
    _dtype: np.dtype | None = None
    #: Device of the values.
    _device: Device = NUMPY

    def __init__(self, op: str | None):
        self._op = op
        self._reduce_op = None if op is None else REDUCE_OPS[op]
        self._arrays: list[Any] = []

    def add(self, value: Array, n_rows: int) -> None:
        """Add a value that was computed from ``n_rows`` rows, its weight in a mean."""
        self._n_rows += n_rows
        self._n_values += 1
        reduce_op = self._reduce_op
        if reduce_op is None:
            self._value = value
            return
        if self._n_values == 1:
            self._device = get_array_device(value)
        value = self._device.as_array(value)
        if reduce_op.ufunc is None:
            self._arrays.append(value if value.ndim else value.reshape((1,)))
            return
        weighted = self._to_summand(reduce_op, value, n_rows) if reduce_op.is_mean else value
        if self._value is None:
            # A copy, since later values are added in place.
            self._value = np.array(weighted) if weighted is value and self._device is NUMPY else weighted
        elif self._value.shape != value.shape:
            raise ValueError(f"op {self._op!r} needs equal shapes, got {self._value.shape} and {value.shape}")
        else:
            self._value = self._device.reduce_pair(reduce_op, self._value, weighted)

    def _to_summand(self, reduce_op: ReduceOp, value: Array, n_rows: int) -> Any:
        """Convert a value to its term in the sum of a mean: multiplied by its rows, if these are the weights."""
        self._dtype = value.dtype
        if value.dtype == np.float16:  # its range is too small for a sum over rows
            value = value.astype(np.float32)
        return self._device.as_array(value * np.asarray(n_rows, value.dtype)) if reduce_op.needs_row_counts else value

    def get_result(self) -> Any:
        """Return the reduction of the values added so far.  At least one is needed."""
        if self._arrays:
            return self._arrays[0] if len(self._arrays) == 1 else self._device.concatenate(self._arrays)
        reduce_op = self._reduce_op
        if reduce_op is None or not reduce_op.is_mean:
            return self._value
        total = self._n_rows if reduce_op.needs_row_counts else self._n_values
        # The serial library's mean over zero rows, 0 / 0, is returned unchanged.
        value = self._value if total == 0 else self._value / np.asarray(total, self._value.dtype)
        return self._device.as_array(value).astype(self._dtype, copy=False)
