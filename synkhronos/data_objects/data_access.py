"""The interface of Data objects to other packages, and shared memory for temporary arrays.

The caller holds the session's `call_lock`, except for functions that create Data of a given shape.
"""

from __future__ import annotations

import io
import math
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from synkhronos import ranks
from synkhronos.data_objects.array import Data, data
from synkhronos.devices import Selection, take_rows
from synkhronos.ranks import ArrayLocation, Session


def get_array_location(array: Data) -> ArrayLocation:
    """Return the location of an array, which a command contains in place of the array."""
    return array._get_array_location()


def check_session(array: Data, session: Session, name: str) -> None:
    """Raise ValueError if a Data object, the argument ``name``, was created in an earlier session."""
    if array._session is not session:
        raise ValueError(
            f"{name}: this Data object belongs to an earlier session, and its memory is freed: make a new one"
        )


def is_published(array: Data) -> bool:
    """Whether commands send the array's rows to the other hosts that read them.  If not, programs use locks."""
    return array._is_published


def create_unpublished(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Data:
    """Return a new array of zeros whose rows programs transfer between hosts by a lock, not commands."""
    array = data(shape=shape, dtype=dtype)
    array._is_published = False
    return array


def copy_to_shared(array: np.ndarray) -> Data:
    """Return a copy of an array in shared memory."""
    copied = Data(array.dtype, array.ndim)
    copied._reshape(array.shape)[...] = array
    return copied


def create_data_with_file(shape: tuple[int, ...], dtype: np.dtype) -> tuple[Data, io.FileIO]:
    """Return a new array of zeros and its memory as an open file, which processes other than ranks can map."""
    array = Data(dtype, len(shape), name="batches")
    session, nbytes = array._session, max(1, math.prod(shape) * dtype.itemsize)
    with session.call_lock:
        session.wait_until_idle()
        file = session.memory.create_file(nbytes)
        duplicate = io.FileIO(os.dup(file.fileno()), "r+")  # the other is closed once all ranks have mapped it
        segment = session.memory.add_file(file, nbytes)
        array._set_memory(segment, segment.view_array(shape, dtype))
    return array, duplicate


class SharedBuffers:
    """Shared memory, by key, for arrays that each call overwrites."""

    def __init__(self) -> None:
        self._buffers: dict[Any, Data] = {}

    def write(self, key: Any, array: np.ndarray, rows: Selection | None = None) -> ArrayLocation:
        """Copy the rows of an array (None: all) into the buffer of a key, and return the buffer's location.

        All arrays with the same key have the same number of dimensions.
        """
        return self.write_to_data(key, array, rows)._get_array_location()

    def write_to_data(self, key: Any, array: np.ndarray, rows: Selection | None = None) -> Data:
        """Copy rows as `write` does, and return the buffer."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer._dtype != array.dtype or buffer._session is not ranks.get_session():
            buffer = self._buffers[key] = Data(array.dtype, array.ndim)
        if rows is None:
            buffer._reshape(array.shape)[...] = array
        else:
            take_rows(array, rows, buffer._reshape((len(rows), *array.shape[1:])))
        return buffer
