"""The base class for a new device.

A device is a module of this package with an object ``DEVICE``.  It is selected by name: with ``SYNKHRONOS_DEVICE=toy``
in the environment, ranks compute with the arrays of ``toy.py``.  Three methods are required: `owns`, `to_host` and
`from_host`.  All others have a default that copies through host memory; a device overrides those that it can do
faster.  `synkhronos.devices.Device` documents them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos.devices.host import Device, Selection
from synkhronos.devices.reductions import Reduction
from synkhronos.ranks import Rank, SharedArray


class ThroughHost(Device):
    """Device whose operations copy through host memory unless they are overridden.

    Its arrays have the attributes ``shape`` and ``dtype``, as NumPy's do.
    """

    moves_shareds = True
    has_arithmetic = False

    # -- required --------------------------------------------------------------------------------------------

    def owns(self, value: Any) -> bool:
        """Whether a value is an array of this kind."""
        raise NotImplementedError

    def to_host(self, value: Any) -> np.ndarray:
        """Convert an array to NumPy, without a copy if possible."""
        raise NotImplementedError

    def from_host(self, array: np.ndarray) -> Any:
        """Copy a NumPy array into a new array of this kind."""
        raise NotImplementedError

    # -- collectives -----------------------------------------------------------------------------------------

    def can_communicate(self, dtype: np.dtype) -> bool:
        """Whether ranks exchange these arrays without the host; needs `get_communicator`."""
        return False

    # -- arrays ----------------------------------------------------------------------------------------------

    def as_array(self, value: Any) -> Any:
        """Convert a value to an array of this kind."""
        return value if self.owns(value) else self.from_host(np.asarray(value))

    def as_contiguous(self, value: Any) -> Any:
        """Return the value: arrays of this kind are contiguous."""
        return value

    def as_writable(self, value: Any, is_referenced: bool) -> Any:
        """Return a copy."""
        return self.from_host(self.to_host(value))

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return a new array of undefined content."""
        return self.from_host(np.empty(shape, dtype))

    def fetch(self, values: Sequence[Any]) -> list[Any]:
        """Convert several arrays to NumPy at once; values of other types are returned as they are."""
        return [self.to_host(value) if self.owns(value) else value for value in values]

    def reduce_pair(self, op: Reduction, first: Any, second: Any) -> Any:
        """Return ``op`` applied to two arrays of one shape."""
        assert op.ufunc is not None
        return self.from_host(op.ufunc(self.to_host(first), self.to_host(second)))

    def concatenate(self, arrays: Sequence[Any]) -> Any:
        """Return arrays joined along axis 0."""
        return self.from_host(np.concatenate([self.to_host(array) for array in arrays]))

    # -- inputs ----------------------------------------------------------------------------------------------

    def stage_input(
        self, rank: Rank, buffers: dict[Any, Any], key: Any, location: SharedArray, rows: Selection | None, copy: bool
    ) -> Any:
        """Return rows of an array in shared memory (None: all) as an input of the next launch."""
        return self.load(rank, location, rows)

    def stage_indexes(self, rank: Rank, buffers: dict[Any, Any], key: Any, values: np.ndarray) -> Any:
        """Return a vector of indexes as an input of the next launch."""
        return self.from_host(values)
