"""The base class of adapters for one kind of array."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from synkhronos.devices.reduce_op import ReduceOp
from synkhronos.variable_types import Array


class ArrayAdapter(ABC):
    """Conversions of one kind of array, and arithmetic for reductions over slices and for exchange rules.

    The arrays have the attributes ``shape`` and ``dtype``, as NumPy's do.

    Attributes
    ----------
    has_arithmetic : bool
        Whether the arrays have NumPy's operators, slices, ``astype`` and ``all``, with which exchange rules compute.
        If not, rules compute in host memory.
    """

    has_arithmetic = False

    @abstractmethod
    def owns(self, value: object) -> bool:
        """Whether a value is an array of this kind; ``NumpyDevice`` also owns values that NumPy can read."""

    @abstractmethod
    def to_numpy(self, value: Array) -> np.ndarray:
        """Convert an array of this kind to NumPy, without a copy if possible."""

    @abstractmethod
    def from_numpy(self, array: np.ndarray) -> Array:
        """Copy a NumPy array into a new array of this kind."""

    def as_array(self, value: Array) -> Array:
        """Convert a value to an array of this kind."""
        return value if self.owns(value) else self.from_numpy(np.asarray(value))

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """Return a new array of undefined content."""
        return self.from_numpy(np.empty(shape, dtype))

    def to_numpy_many(self, values: Sequence[Any]) -> list[Any]:
        """Convert several arrays to NumPy at once; values of other types are returned unchanged."""
        return [self.to_numpy(value) if self.owns(value) else value for value in values]

    def snapshot(self, value: Array) -> Array:
        """Return a shared variable's value as an array that later updates of the variable do not change."""
        return self.to_numpy(value).copy()

    def wait(self, values: Sequence[Any]) -> None:  # noqa: B027 - most arrays are computed once they exist
        """Wait until arrays have been computed."""

    def reduce_pair(self, op: ReduceOp, left: Array, right: Array) -> Array:
        """Return ``op`` applied to two arrays of one shape; the result may be written into the first."""
        assert op.ufunc is not None
        return self.from_numpy(op.ufunc(self.to_numpy(left), self.to_numpy(right)))

    def concatenate(self, arrays: Sequence[Array]) -> Array:
        """Return arrays concatenated along axis 0."""
        return self.from_numpy(np.concatenate([self.to_numpy(array) for array in arrays]))

    def flatten(self, values: Sequence[Any], dtype: np.dtype) -> Array:
        """Return a new vector of the items of all arrays, in a dtype."""
        return self.concatenate([value.reshape(-1).astype(dtype) for value in values])

    def split(self, vector: Array, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype]) -> Sequence[Any]:
        """Split a vector made by `flatten` into the original arrays."""
        ends = list(accumulate(map(math.prod, shapes)))
        starts = [0, *ends[:-1]]
        return [
            vector[start:end].reshape(shape).astype(dtype)
            for start, end, shape, dtype in zip(starts, ends, shapes, dtypes, strict=True)
        ]
