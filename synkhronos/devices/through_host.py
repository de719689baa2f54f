"""A new device begins here: it says what its arrays are, and all else has a way through host memory.

`ThroughHost`
    The base class.

A device is a module in this folder with one, as ``DEVICE``.  It is found by its name: with ``SYNKHRONOS_DEVICE=toy`` in
the environment the ranks compute with the arrays of ``toy.py``.  Three methods have to be written; each of the others
that is written saves a way through the host.  `synkhronos.devices.Device` says what they are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos.devices.host import Device, Selection
from synkhronos.devices.reductions import Reduction
from synkhronos.ranks import Rank, SharedArray


class ThroughHost(Device):
    """Arrays that NumPy's become and that become NumPy's.  They have a shape and a dtype of NumPy's.

    What is not said here is as for NumPy's arrays themselves.
    """

    takes_shareds = True

    # -- what has to be written ------------------------------------------------------------------------------

    def holds(self, value: Any) -> bool:
        """Whether a value is an array of this kind."""
        raise NotImplementedError

    def to_host(self, value: Any) -> np.ndarray:
        """Return the value as a NumPy array, without a copy where there can be one."""
        raise NotImplementedError

    def from_host(self, array: np.ndarray) -> Any:
        """Return a NumPy array as one of this kind, which nobody else holds."""
        raise NotImplementedError

    # -- ranks -----------------------------------------------------------------------------------------------

    def communicates(self, dtype: np.dtype) -> bool:
        """Whether ranks combine these arrays without the host: a communicator has to be written for that."""
        return False

    # -- arrays ----------------------------------------------------------------------------------------------

    def array(self, value: Any) -> Any:
        """Return the value as an array of this kind."""
        return value if self.holds(value) else self.from_host(np.asarray(value))

    def contiguous(self, value: Any) -> Any:
        """Return the value: it is contiguous."""
        return value

    def writable(self, value: Any, is_referenced: bool) -> Any:
        """Return a copy."""
        return self.from_host(self.to_host(value))

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return a new array."""
        return self.from_host(np.empty(shape, dtype))

    def fetch(self, values: Sequence[Any]) -> list[Any]:
        """Return values on the host."""
        return [self.to_host(value) if self.holds(value) else value for value in values]

    def combine(self, op: Reduction, one: Any, other: Any) -> Any:
        """Return what a reduction makes of two arrays."""
        assert op.combine is not None
        return self.from_host(op.combine(self.to_host(one), self.to_host(other)))

    def join(self, parts: Sequence[Any]) -> Any:
        """Return arrays joined along axis 0."""
        return self.from_host(np.concatenate([self.to_host(part) for part in parts]))

    # -- inputs ----------------------------------------------------------------------------------------------

    def input(
        self, rank: Rank, kept: dict[Any, Any], key: Any, location: SharedArray, rows: Selection | None, copy: bool
    ) -> Any:
        """Return rows of an array in shared memory as an input."""
        return self.load(rank, location, rows)

    def indexes(self, rank: Rank, kept: dict[Any, Any], key: Any, values: np.ndarray) -> Any:
        """Return a rank's own vector of indexes as an input."""
        return self.from_host(values)
