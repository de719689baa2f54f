"""How results of slices and ranks become one.

`Op`
    A reduction, as the user named it.
`Accumulator`
    Takes values one by one and gives their reduction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from synkhronos.devices import HOST, Device, device_of
from synkhronos.devices.reductions import REDUCTIONS, Reduction


@dataclass(frozen=True, slots=True)
class Op:
    """A reduction."""

    #: One of `REDUCTIONS`, or None: the last value; of ranks, the master's own.
    name: str | None
    #: Whether to reduce in host memory in any case: the user's ``c_``.
    on_host: bool = False

    @classmethod
    def parse(cls, op: Any, argument: str) -> Op:
        """Read the user's word for a reduction."""
        if op is None:
            return cls(None)
        if not isinstance(op, str):
            raise TypeError(f"{argument}: expected an op ({_choices()}), got {op!r}")
        name = op.removeprefix("c_")
        if name not in REDUCTIONS:
            raise ValueError(f"{argument}: expected an op ({_choices()}), got {op!r}")
        return cls(name, name != op)

    @property
    def spelled(self) -> str | None:
        """The user's word."""
        return f"c_{self.name}" if self.on_host else self.name

    @property
    def row(self) -> Reduction:
        """The row of the table, where there is a name."""
        return REDUCTIONS[str(self.name)]

    @property
    def elementwise(self) -> bool:
        """Whether all values need the same shape."""
        return self.name is not None and self.row.combine is not None


def _choices() -> str:
    return ", ".join(map(repr, REDUCTIONS)) + ", each with 'c_' in front for host memory, or None"


class Accumulator:
    """Takes values one by one and gives their reduction.

    Examples
    --------
    >>> total = Accumulator(Op("mean"))
    >>> total.add(np.float64(1.0), 3)
    >>> total.add(np.float64(2.0), 1)
    >>> total.result()
    array(1.25)
    """

    def __init__(self, op: Op):
        self.op = op
        self._row = None if op.name is None else op.row
        #: What holds the values.
        self._device: Device = HOST
        self.rows = 0
        self.count = 0
        self._value: Any = None
        self._parts: list[Any] = []
        self._dtype: np.dtype | None = None

    def add(self, value: Any, rows: int) -> None:
        """Take a value that came from so many rows."""
        self.rows += rows
        self.count += 1
        row = self._row
        if row is None:
            self._value = value
            return
        if self.count == 1:
            self._device = device_of(value)
        value = self._device.array(value)
        if row.combine is None:
            self._parts.append(value if value.ndim else value.reshape((1,)))
            return
        weighted = self._weigh(row, value, rows) if row.divides else value
        if self._value is None:
            # What came may be the caller's own, and this will be written in.
            self._value = np.array(weighted) if weighted is value and self._device is HOST else weighted
        elif self._value.shape != value.shape:
            raise ValueError(
                f"op {self.op.spelled!r} needs the same shape from all, got {self._value.shape} and {value.shape}"
            )
        else:
            self._value = self._device.combine(row, self._value, weighted)

    def _weigh(self, row: Reduction, value: Any, rows: int) -> Any:
        self._dtype = value.dtype
        if value.dtype == np.float16:  # a sum over rows soon exceeds its range
            value = value.astype(np.float32)
        return self._device.array(value * np.asarray(rows, value.dtype)) if row.by_rows else value

    def result(self) -> Any:
        """Return the reduction of what was taken; at least one value."""
        if self._parts:
            return self._parts[0] if len(self._parts) == 1 else self._device.join(self._parts)
        row = self._row
        if row is None or not row.divides:
            return self._value
        total = self.rows if row.by_rows else self.count
        # Nothing was computed from any row: the serial library's own word (0 / 0) stays.
        value = self._value if total == 0 and self.count else self._value / np.asarray(total, self._value.dtype)
        return self._device.array(value).astype(self._dtype, copy=False)
