"""Host memory: NumPy arrays, and the base class of all devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from synkhronos.devices.chain_communicator import ChainCommunicator
from synkhronos.devices.communicator import Communicator
from synkhronos.devices.host_communicator import HostCommunicator
from synkhronos.devices.reductions import Reduction
from synkhronos.ranks import Rank, SharedArray

#: Row numbers, in order: an evenly spaced range, or an int64 array of any non-negative numbers.
Selection = range | np.ndarray


class Device:
    """Adapter for one kind of array.

    This class is the device of host memory: it owns every array that NumPy can read.  Other devices derive from it,
    most of them from `ThroughHost`.

    Attributes
    ----------
    name : str
        Name of the device, the value of ``SYNKHRONOS_DEVICE`` that selects it.
    needs_gpu : bool
        Whether each rank that `choose_device` gives this device needs a GPU of its own.
    moves_shareds : bool
        Whether the values of shared variables must be moved to the device before a function is called.  False where the
        engine or the graph library does so.
    has_arithmetic : bool
        Whether the arrays have NumPy's operators, slices, ``astype`` and ``all``, so that exchange rules can compute
        with them.  If not, rules compute in host memory.
    default_mode : str or None
        Mode in which functions of these arrays are compiled by default; None is the graph library's setting.
    gpu_library : str or None
        Graph library whose functions use this device on GPUs; None if there is none.
    install_hint : str
        Command that installs the packages of `missing_requirements`.
    """

    name = "host"
    needs_gpu = False
    moves_shareds = False
    has_arithmetic = True
    default_mode: str | None = None
    gpu_library: str | None = None
    install_hint = ""

    # -- ranks -----------------------------------------------------------------------------------------------

    def assign_gpus(self, size: int, root: int) -> list[str]:
        """Return the GPU of each rank, as ``CUDA_VISIBLE_DEVICES`` names it; called in the master.

        A device that needs no GPU returns empty strings.
        """
        return [""] * size

    def bind(self, rank: Rank, gpu: str) -> None:
        """Bind this process to its GPU; called once on every rank, after the fork."""

    def is_started(self) -> bool:
        """Whether this process has started a runtime that a fork of it could not use."""
        return False

    def missing_requirements(self) -> list[str]:
        """Return the packages that the device needs and that are not installed."""
        return []

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

    def snapshot(self, value: Any) -> Any:
        """Return a shared variable's value as an array that later updates of the variable leave unchanged."""
        return self.to_host(value).copy()

    # -- collectives -----------------------------------------------------------------------------------------

    def get_communicator(self, rank: Rank) -> Communicator:
        """Return this rank's communicator for arrays of this kind; one object per rank."""
        if len(rank.control.here) == rank.size:
            return rank.registry.get(HostCommunicator, lambda: HostCommunicator(rank))
        return rank.registry.get(ChainCommunicator, lambda: ChainCommunicator(rank))

    def can_communicate(self, dtype: np.dtype) -> bool:
        """Whether the communicator handles arrays of this dtype; others are exchanged as NumPy arrays."""
        return True

    def get_group(self, rank: Rank, members: Iterable[int]) -> Any:
        """Return the communicator of some ranks (see `NcclGroup`); None if their arrays must go through host memory."""
        return None

    # -- arrays ----------------------------------------------------------------------------------------------

    def owns(self, value: Any) -> bool:
        """Whether a value is an array of this kind."""
        return isinstance(value, np.ndarray | np.generic) or hasattr(value, "__array__")

    def as_array(self, value: Any) -> Any:
        """Convert a value to an array of this kind."""
        return np.asarray(value)

    def as_contiguous(self, value: Any) -> Any:
        """Return an array if it is contiguous, else a contiguous copy."""
        return np.ascontiguousarray(value)

    def as_writable(self, value: Any, is_referenced: bool) -> Any:
        """Return a container's value if it is contiguous and may be written in place, else a copy.

        Parameters
        ----------
        value : array
        is_referenced : bool
            Whether anything but the container holds a reference to the value.
        """
        if isinstance(value, np.ndarray) and value.flags.c_contiguous and value.flags.writeable:
            return value
        return np.array(value, order="C")

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

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return a new array of undefined content."""
        return np.empty(shape, dtype)

    def slice_items(self, array: Any, start: int, shape: tuple[int, ...]) -> Any:
        """Return consecutive items of an array, from flat index ``start``, for the communicator's `gather`."""
        return array.reshape(-1)[start : start + math.prod(shape)].reshape(shape)

    def reduce_pair(self, op: Reduction, first: Any, second: Any) -> Any:
        """Return ``op`` applied to two arrays of one shape; it may be written into the first."""
        assert op.ufunc is not None
        return op.ufunc(first, second, out=first)

    def concatenate(self, arrays: Sequence[Any]) -> Any:
        """Return arrays joined along axis 0."""
        return np.concatenate(arrays)

    def flatten(self, values: Sequence[Any], dtype: np.dtype) -> Any:
        """Return one new vector of all values' items in a dtype."""
        return self.concatenate([value.reshape(-1).astype(dtype) for value in values])

    def split(self, vector: Any, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype]) -> Sequence[Any]:
        """Return the arrays of which `flatten` has made a vector."""
        ends = list(accumulate(map(math.prod, shapes)))
        starts = [0, *ends[:-1]]
        return [
            vector[start:end].reshape(shape).astype(dtype)
            for start, end, shape, dtype in zip(starts, ends, shapes, dtypes, strict=True)
        ]

    def wait(self, values: Sequence[Any]) -> None:
        """Wait until arrays have been computed."""

    # -- host memory -----------------------------------------------------------------------------------------

    def to_host(self, value: Any) -> np.ndarray:
        """Convert an array to NumPy, without a copy if possible."""
        return np.asarray(value)

    def fetch(self, values: Sequence[Any]) -> list[Any]:
        """Convert several arrays to NumPy at once; values of other types are returned as they are."""
        return list(values)

    def from_host(self, array: np.ndarray) -> Any:
        """Copy a NumPy array into a new array of this kind."""
        return np.array(array, order="C")

    def load(self, rank: Rank, location: SharedArray, rows: Selection | None) -> Any:
        """Copy rows of an array in shared memory (None: all) into a new array."""
        view = location.view(rank.segments)
        return self.from_host(view if rows is None else take_rows(view, rows))

    def store(self, rank: Rank, key: int, offset: int, value: Any) -> None:
        """Copy an array into shared memory: the segment ``key``, from byte ``offset`` on."""
        rank.segments[key].array(tuple(value.shape), value.dtype, offset)[...] = self.to_host(value)

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
            Whether the function may overwrite the input.
        """
        array = location.view(rank.segments)
        if rows is None:
            return array.copy() if copy else array
        if isinstance(rows, range):
            view = take_rows(array, rows)
            return view.copy() if copy else view
        # The first write to new memory costs more than the copy, so the buffer is reused.  This is safe, as compiled
        # functions return nothing that aliases their inputs.
        shape = (len(rows), *array.shape[1:])
        size = math.prod(shape)
        buffer = buffers.get(key)
        if buffer is None or buffer.size < size or buffer.dtype != array.dtype:
            buffer = buffers[key] = np.empty(size, array.dtype)
        return take_rows(array, rows, buffer[:size].reshape(shape))

    def stage_indexes(self, rank: Rank, buffers: dict[Any, Any], key: Any, values: np.ndarray) -> Any:
        """Return a vector of indexes as an input of the next launch."""
        return values


DEVICE = Device()


def take_rows(array: np.ndarray, rows: Selection, out: np.ndarray | None = None) -> np.ndarray:
    """Return the selected rows of an array.

    Parameters
    ----------
    array : ndarray
    rows : range or ndarray
        Row numbers, non-negative and within the array.
    out : ndarray, optional
        Array for the result.  Without it, a range returns a view of ``array``.

    Returns
    -------
    ndarray

    Examples
    --------
    >>> take_rows(np.array([10, 20, 30, 40]), range(1, 4, 2))
    array([20, 40])
    """
    if isinstance(rows, range):
        if not rows:
            view = array[:0]
        else:
            stop: int | None = rows[-1] + (1 if rows.step > 0 else -1)
            view = array[rows[0] : None if stop is not None and stop < 0 else stop : rows.step]
        if out is None:
            return view
        out[...] = view
        return out
    # Row numbers were checked before; with mode="raise" NumPy would copy through a buffer of its own.
    return np.take(array, rows, axis=0, out=out, mode="clip")
