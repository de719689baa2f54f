"""The base class of devices.

A device is an object ``DEVICE`` of a module of this package.  Its attribute ``name`` selects it: with
``SYNKHRONOS_DEVICE=toy`` in the environment, ranks compute with the arrays of the device named "toy".  A device on GPUs
is selected by `devices.choose_device` instead.  Three methods are required: `owns`, `to_numpy` and `from_numpy`.
Defaults that need an array's content copy it through host memory.  Override other methods for one of these reasons:

- speed: any default that copies through a NumPy array, such as `empty` and `concatenate`; `transfers` for the inputs
  and results of functions
- exchange rules that compute with the device's arrays: `has_arithmetic`; also `pack` and `unpack`, unless the arrays
  have ``reshape``, slices and ``astype``
- collectives that transfer the device's arrays directly: `can_transfer_directly` and `get_communicator`; `as_writable`
  to write in place; `rewrap` if that makes an array object invalid; `as_contiguous` if arrays may have gaps; and
  `slice_items` unless they have ``reshape`` and slices
- a runtime or GPU of its own for each rank: `initialize`, `has_unforkable_runtime`, `needs_gpu` and `choose_gpus`
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from synkhronos.devices.communicator import ByteSource, Communicator
from synkhronos.devices.multi_host_communicator import get_numpy_communicator
from synkhronos.devices.reduce_op import ReduceOp
from synkhronos.devices.selection import Buffers, Selection, take_rows
from synkhronos.ranks import ArrayLocation, Rank
from synkhronos.variable_types import Array


class Device(ABC):
    """Adapter for one kind of array and for its hardware.

    The arrays have the attributes ``shape`` and ``dtype``, as NumPy's do.  The methods are five groups: arrays,
    arithmetic, start of the ranks, host memory, and collectives.

    Attributes
    ----------
    name : str
        Name of the device, also as the value of ``SYNKHRONOS_DEVICE``.
    needs_gpu : bool
        Whether each rank needs a GPU of its own.
    must_move_shared_values : bool
        Whether values of shared variables must be moved to the device before a function is called.  False if the engine
        or the graph library does so.
    default_mode : str or None
        Mode in which functions of these arrays are compiled by default; None for the graph library's default.
    has_arithmetic : bool
        Whether the arrays have NumPy's operators, slices, ``astype`` and ``all``, with which exchange rules compute.
        If not, rules compute in host memory.
    """

    name: str
    needs_gpu = False
    must_move_shared_values = True
    default_mode: str | None = None
    has_arithmetic = False

    # -- arrays, for every package -------------------------------------------------------------------------

    @abstractmethod
    def owns(self, value: object) -> bool:
        """Whether a value is an array of this kind.  ``NumpyDevice`` also owns values that NumPy can read."""

    @abstractmethod
    def to_numpy(self, value: Array) -> np.ndarray:
        """Convert an array of this kind to NumPy, without a copy if possible."""

    @abstractmethod
    def from_numpy(self, array: np.ndarray) -> Array:
        """Copy a NumPy array into a new array of this kind."""

    def as_array(self, value: Array) -> Array:
        """Convert a value to an array of this kind, unless it is one."""
        return value if self.owns(value) else self.from_numpy(np.asarray(value))

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """Return a new array, whose content may be undefined."""
        return self.from_numpy(np.empty(shape, dtype))

    def to_numpy_many(self, values: Sequence[Any], leaves_large: bool = False) -> list[Any]:
        """Convert several arrays to NumPy at once.  Values of other types are returned unchanged.

        With ``leaves_large``, large arrays may be returned unchanged, too, as `HostTransfers.as_byte_source` reads them
        without a copy of the whole.  By default they are converted.
        """
        return [self.to_numpy(value) if self.owns(value) else value for value in values]

    def snapshot(self, value: Array) -> Array:
        """Return a shared variable's value as an array that later updates of the variable do not change.

        By default this is a copy in host memory.
        """
        return self.to_numpy(value).copy()

    def wait(self, values: Sequence[Any]) -> None:  # noqa: B027 - most arrays are computed once they exist
        """Wait until arrays have been computed.  By default they have been."""

    def as_contiguous(self, value: Array) -> Array:
        """Return an array if it is contiguous, else a contiguous copy.  By default all arrays are contiguous."""
        return value

    # -- arithmetic, for slices of a call and for exchange rules -------------------------------------------

    def reduce_pair(self, op: ReduceOp, left: Array, right: Array) -> Array:
        """Return ``op`` applied to two arrays of one shape; the result may be written into the first."""
        assert op.ufunc is not None
        return self.from_numpy(op.ufunc(self.to_numpy(left), self.to_numpy(right)))

    def concatenate(self, arrays: Sequence[Array]) -> Array:
        """Return arrays concatenated along axis 0."""
        return self.from_numpy(np.concatenate([self.to_numpy(array) for array in arrays]))

    def pack(self, values: Sequence[Any], dtype: np.dtype) -> Array:
        """Return a new vector of the items of all arrays, in a dtype."""
        return self.concatenate([value.reshape(-1).astype(dtype) for value in values])

    def unpack(self, vector: Array, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype]) -> Sequence[Any]:
        """Split a vector made by `pack` into arrays of the original shapes and dtypes."""
        ends = list(accumulate(map(math.prod, shapes)))
        starts = [0, *ends[:-1]]
        return [
            vector[start:end].reshape(shape).astype(dtype)
            for start, end, shape, dtype in zip(starts, ends, shapes, dtypes, strict=True)
        ]

    # -- start of the ranks --------------------------------------------------------------------------------

    def choose_gpus(self, n_local_ranks: int, local_master_index: int) -> list[str]:
        """Return the GPU of each rank of this host, as ``CUDA_VISIBLE_DEVICES`` names it, or "" without GPUs.

        Called before `initialize`: in the master for its host, and on every rank of the other hosts.
        ``local_master_index`` is the index of the master among the ranks of this host, and 0 on other hosts.
        """
        return [""] * n_local_ranks

    def initialize(self, gpu: str) -> None:  # noqa: B027 - most need no initialization
        """Start the device's library, on ``gpu`` unless it is "".  Every rank calls this once, after the fork."""

    def has_unforkable_runtime(self) -> bool:
        """Whether this process has started a runtime that its forks can't use."""
        return False

    # -- host memory, for inputs and results of functions --------------------------------------------------

    def accepts_input(self, dtype: np.dtype, ndim: int) -> bool:
        """Whether functions take inputs of this dtype and ndim as arrays of this kind, rather than as NumPy arrays."""
        return True

    @cached_property
    def transfers(self) -> HostTransfers:
        """Copies between host memory and arrays of this kind."""
        return HostTransfers(self)

    # -- collectives ---------------------------------------------------------------------------------------

    def get_communicator(self, rank: Rank) -> Communicator:
        """Return a rank's communicator, always the same object.

        By default this is that of NumPy arrays.  Callers copy arrays of this kind to host memory for it, unless
        `can_transfer_directly`.
        """
        return get_numpy_communicator(rank)

    def can_transfer_directly(self, dtype: np.dtype, op: str | None = None) -> bool:
        """Whether the communicator takes this device's own arrays of a dtype, and reduces them by ``op``."""
        return False

    def get_group_communicator(self, rank: Rank, members: Iterable[int]) -> Any:
        """Return a group's communicator, as `NcclGroupCommunicator`, or None, as by default, for host memory."""
        return None

    def as_writable(self, value: Array, has_other_references: bool) -> Array:
        """Return a shared variable's value if it is contiguous and may be written in place, else a copy.

        Immutable arrays, as JAX's, may be written only if nothing but the variable's container references them.  By
        default the result is always a copy.
        """
        return self.from_numpy(self.to_numpy(value))

    def rewrap(self, value: Array, is_complete: bool = False) -> Array:
        """Return the array object to use in place of one whose memory a communicator writes.

        By default this is the same object.  If it is another one, the old one is invalid.  ``is_complete`` is the
        result of `Communicator.wait_briefly`: True if the memory has been written already.
        """
        return value

    def slice_items(self, array: Array, start: int, shape: tuple[int, ...]) -> Array:
        """Return consecutive items of an array, from flat index ``start``, for `Communicator.gather`."""
        return array.reshape(-1)[start : start + math.prod(shape)].reshape(shape)


class HostTransfers:
    """Copies of functions' inputs and results between host memory and the arrays of ``device``.

    Inputs are in shared memory.  Results may also be in the master's own memory.  The copies of this class pass through
    a NumPy array.  Subclasses avoid that.
    """

    def __init__(self, device: Device):
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

        By default there is nothing to wait for.  Either inputs are copied at once, or the functions that read them have
        computed when they return.
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

    def as_byte_source(self, value: Array) -> np.ndarray | ByteSource:
        """Return an array's bytes, as a vector of uint8 if they are in host memory."""
        return np.ascontiguousarray(self._device.to_numpy(value)).reshape(-1).view(np.uint8)
