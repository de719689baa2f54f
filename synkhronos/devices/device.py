"""The base class of devices, whose methods copy through host memory unless a device overrides them.

A device is a module of this package with an object ``DEVICE``.  It is selected by name: with ``SYNKHRONOS_DEVICE=toy``
in the environment, ranks compute with the arrays of ``toy.py``.  Three methods are required: `owns`, `to_host` and
`from_host`.  A device overrides those of the others that it can do faster.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from synkhronos.devices.communicator import Communicator
from synkhronos.devices.host_communicator import HostCommunicator
from synkhronos.devices.multi_host_communicator import MultiHostCommunicator
from synkhronos.devices.reductions import Reduction
from synkhronos.devices.selection import Selection, take_rows
from synkhronos.ranks import Rank, SharedArray


class DeviceMemory(ABC):
    """Copies of arrays of one kind to and from host memory.

    The arrays have the attributes ``shape`` and ``dtype``, as NumPy's do.
    """

    @abstractmethod
    def owns(self, value: Any) -> bool:
        """Whether a value is an array of this kind."""

    @abstractmethod
    def to_host(self, value: Any) -> np.ndarray:
        """Convert an array to NumPy, without a copy if possible."""

    @abstractmethod
    def from_host(self, array: np.ndarray) -> Any:
        """Copy a NumPy array into a new array of this kind."""

    def as_array(self, value: Any) -> Any:
        """Convert a value to an array of this kind."""
        return value if self.owns(value) else self.from_host(np.asarray(value))

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return a new array of undefined content."""
        return self.from_host(np.empty(shape, dtype))

    def fetch(self, values: Sequence[Any]) -> list[Any]:
        """Convert several arrays to NumPy at once; values of other types are returned as they are."""
        return [self.to_host(value) if self.owns(value) else value for value in values]

    def snapshot(self, value: Any) -> Any:
        """Return a shared variable's value as an array that later updates of the variable leave unchanged."""
        return self.to_host(value).copy()

    def wait(self, values: Sequence[Any]) -> None:  # noqa: B027 - most arrays are computed once they exist
        """Wait until arrays have been computed."""

    # -- shared memory ---------------------------------------------------------------------------------------

    def load(self, rank: Rank, location: SharedArray, rows: Selection | None) -> Any:
        """Copy rows of an array in shared memory (None: all) into a new array."""
        view = location.view(rank.segments)
        return self.from_host(view if rows is None else take_rows(view, rows))

    def store(self, rank: Rank, key: int, offset: int, value: Any) -> None:
        """Copy an array into shared memory: the segment ``key``, from byte ``offset`` on."""
        rank.segments[key].view_array(tuple(value.shape), value.dtype, offset)[...] = self.to_host(value)

    def stage_input(
        self, rank: Rank, buffers: dict[Any, Any], key: Any, location: SharedArray, rows: Selection | None, copy: bool
    ) -> Any:
        """Return rows of an array in shared memory (None: all) as an input of the next launch.

        Parameters
        ----------
        rank : Rank
        buffers : dict
            Memory that is reused from call to call; this method stores its own under ``key``.
        key : hashable
        location : SharedArray
        rows : range, ndarray or None
        copy : bool
            Whether the function may overwrite the input: the result must not share memory with the segment then.
        """
        return self.load(rank, location, rows)

    def stage_indexes(self, rank: Rank, buffers: dict[Any, Any], key: Any, values: np.ndarray) -> Any:
        """Return a vector of indexes as an input of the next launch."""
        return self.from_host(values)


class DeviceArithmetic(DeviceMemory):
    """Arithmetic with the arrays of a device, for reductions over slices and for exchange rules.

    Attributes
    ----------
    has_arithmetic : bool
        Whether the arrays have NumPy's operators, slices, ``astype`` and ``all``, so that exchange rules can compute
        with them.  If not, rules compute in host memory.
    """

    has_arithmetic = False

    def reduce_pair(self, op: Reduction, left: Any, right: Any) -> Any:
        """Return ``op`` applied to two arrays of one shape; it may be written into the first."""
        assert op.ufunc is not None
        return self.from_host(op.ufunc(self.to_host(left), self.to_host(right)))

    def concatenate(self, arrays: Sequence[Any]) -> Any:
        """Return arrays joined along axis 0."""
        return self.from_host(np.concatenate([self.to_host(array) for array in arrays]))

    def flatten(self, values: Sequence[Any], dtype: np.dtype) -> Any:
        """Return one new vector of all values' items in a dtype."""
        return self.concatenate([value.reshape(-1).astype(dtype) for value in values])

    def split(self, vector: Any, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype]) -> Sequence[Any]:
        """Split a vector made by `flatten` into the original arrays."""
        ends = list(accumulate(map(math.prod, shapes)))
        starts = [0, *ends[:-1]]
        return [
            vector[start:end].reshape(shape).astype(dtype)
            for start, end, shape, dtype in zip(starts, ends, shapes, dtypes, strict=True)
        ]


class DeviceCollectives(DeviceMemory):
    """The communicator of the arrays of a device, and the arrays that it reads and writes in place."""

    def get_communicator(self, rank: Rank) -> Communicator:
        """Return this rank's communicator for arrays of this kind; one object per rank."""
        if len(rank.control.local_ranks) == rank.size:
            return rank.registry.get(HostCommunicator, lambda: HostCommunicator(rank))
        return rank.registry.get(MultiHostCommunicator, lambda: MultiHostCommunicator(rank))

    def can_communicate(self, dtype: np.dtype) -> bool:
        """Whether `get_communicator` handles arrays of this dtype; others travel as NumPy arrays."""
        return False

    def get_group(self, rank: Rank, members: Iterable[int]) -> Any:
        """Return the communicator of some ranks (see `NcclGroup`); None if their arrays must go through host memory."""
        return None

    def as_contiguous(self, value: Any) -> Any:
        """Return an array if it is contiguous, else a contiguous copy."""
        return value

    def as_writable(self, value: Any, is_referenced: bool) -> Any:
        """Return a container's value if it is contiguous and may be written in place, else a copy.

        Parameters
        ----------
        value : array
        is_referenced : bool
            Whether anything but the container holds a reference to the value.
        """
        return self.from_host(self.to_host(value))

    def refresh(self, value: Any, is_complete: bool = False) -> Any:
        """Return a valid array object for memory that a communicator writes in place.

        Parameters
        ----------
        value : array
            The object from before; not to be used afterwards.
        is_complete : bool
            Whether the memory has been written already, as `HostCommunicator.all_reduce` returns.
        """
        return value

    def slice_items(self, array: Any, start: int, shape: tuple[int, ...]) -> Any:
        """Return consecutive items of an array, from flat index ``start``, for `Communicator.gather`."""
        return array.reshape(-1)[start : start + math.prod(shape)].reshape(shape)


class Device(DeviceArithmetic, DeviceCollectives):
    """Adapter for one kind of array, and for the hardware that holds it.

    Attributes
    ----------
    name : str
        Name of the device, the value of ``SYNKHRONOS_DEVICE`` that selects it.
    needs_gpu : bool
        Whether each rank that `choose_device` gives this device needs a GPU of its own.
    moves_shareds : bool
        Whether the values of shared variables must be moved to the device before a function is called.  False where the
        engine or the graph library does so.
    default_mode : str or None
        Mode in which functions of these arrays are compiled by default; None is the graph library's setting.
    """

    name: str
    needs_gpu = False
    moves_shareds = True
    default_mode: str | None = None

    # -- ranks -----------------------------------------------------------------------------------------------

    def assign_gpus(self, size: int, root: int) -> list[str]:
        """Return the GPU of each rank, as ``CUDA_VISIBLE_DEVICES`` names it; called in the master.

        A device that needs no GPU returns empty strings.
        """
        return [""] * size

    def bind(self, rank: Rank, gpu: str) -> None:  # noqa: B027 - most need no binding
        """Bind this process to its GPU; called once on every rank, after the fork."""

    def is_started(self) -> bool:
        """Whether this process has started a runtime that a fork of it could not use."""
        return False

    # -- functions -------------------------------------------------------------------------------------------

    def accepts_input(self, dtype: np.dtype, ndim: int) -> bool:
        """Whether functions on this device take such inputs as arrays of this kind; else they take NumPy arrays."""
        return True

    def make_input(self, variable: Any) -> Any | None:
        """Return a symbolic variable of these arrays, to be an input in place of another variable.

        None, the default, leaves the input: functions take arrays of this kind for the graph library's own types.
        """
        return None

    def to_stored(self, value: Any) -> Any:
        """Convert an array to the class that the graph library expects in a shared variable."""
        return value
