"""Arrays in files of NumPy's format, which every rank maps into its memory.

The ranks of a host share the system's page cache, so each page that they read is in memory once.
"""

from __future__ import annotations

import math
import os
from typing import IO

import numpy as np

from synkhronos import ranks
from synkhronos.casts import NUMBER_KINDS
from synkhronos.checks import check_name
from synkhronos.data_objects.array import ReadOnlyData
from synkhronos.ranks import ArrayLocation


class FileData(ReadOnlyData):
    """A read-only `Data` object whose array is in a ``.npy`` file; created by `data_file`.

    Attributes
    ----------
    path : str
        Absolute path of the file.
    """

    def __init__(self, path: str, minibatch: bool, name: str):
        self.path = self._source = os.path.abspath(path)
        shape, dtype, self._offset = _locate_array(self.path)
        super().__init__(dtype, len(shape), minibatch, name)
        with self._session.call_lock:
            self._session.wait_until_idle()
            self._map_segment(self._session.memory.map_user_file(self.path), shape, self._offset)

    def __repr__(self) -> str:
        return f"<synkhronos.FileData {self.path!r}: {self.dtype}, shape {self.shape}>"

    def _get_array_location(self) -> ArrayLocation:
        return ArrayLocation(self._get_segment_key(), self.dtype.str, self.shape, self._offset)


def data_file(path: str | os.PathLike[str], minibatch: bool = False, name: str | None = None) -> FileData:
    """Map a ``.npy`` file, as ``numpy.save`` writes it, into the memory of all ranks.

    Nothing is copied: the ranks share the system's cache of the file.  Rows are read from the disk when a rank needs
    them.  On several hosts each host maps its own file at this path, and no rows are sent.

    Parameters
    ----------
    path : str or path
        Path of a ``.npy`` file.  On several hosts each needs the same file there, as on a shared file system.
    minibatch : bool
        As in `data`.
    name : str, optional
        Name in errors.  Default: the file's name.

    Returns
    -------
    FileData
        A read-only `Data` object.

    Raises
    ------
    OSError
        If the file can't be opened or read.
    ValueError
        If the file does not contain an array of numbers in C order.
    WorkerError
        In the first call with this object, if a host has no such file, or a file of another size.

    Examples
    --------
    >>> import numpy as np, os, tempfile, synkhronos as synk
    >>> path = os.path.join(tempfile.mkdtemp(), "x.npy")
    >>> np.save(path, np.arange(6.0).reshape(3, 2))
    >>> n = synk.fork(2, use_gpu=False)
    >>> synk.data_file(path)[1:]
    array([[2., 3.],
           [4., 5.]])
    >>> synk.close()
    """
    ranks.get_session()
    check_name(name)
    return FileData(os.fspath(path), minibatch, os.path.basename(path) if name is None else name)


def read_npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Read the header of an ``.npy`` file.  Return the array's shape, whether it is in Fortran order, and its dtype.

    Version 3.0 differs from 2.0 only in names of fields, which arrays of numbers do not have.
    """
    formats = np.lib.format
    is_first_version = formats.read_magic(file) == (1, 0)
    return (formats.read_array_header_1_0 if is_first_version else formats.read_array_header_2_0)(file)


def _locate_array(path: str) -> tuple[tuple[int, ...], np.dtype, int]:
    """Return an array's shape, its dtype, and its offset in the file in bytes."""
    with open(path, "rb") as file:
        try:
            shape, is_fortran_order, dtype = read_npy_header(file)
        except ValueError as error:
            raise ValueError(f"{path}: expected an array as numpy.save writes it: {error}") from None
        offset, file_nbytes = file.tell(), os.fstat(file.fileno()).st_size
    if dtype.kind not in NUMBER_KINDS or not dtype.isnative:
        raise ValueError(f"{path}: expected numbers in native byte order, got {dtype}")
    if is_fortran_order and len(shape) > 1:
        raise ValueError(f"{path}: expected an array in C order: save numpy.ascontiguousarray(x)")
    if file_nbytes < offset + math.prod(shape) * dtype.itemsize:
        raise ValueError(
            f"{path}: expected {math.prod(shape) * dtype.itemsize:,} bytes of {shape}, got {file_nbytes - offset:,}"
        )
    return shape, dtype, offset
