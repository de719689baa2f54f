"""Arrays in shared memory: all ranks read them, and the user changes them in place unless they are read-only.

An array grows by moving to a larger segment.  With the next command, the session sends the ranks the new segments, and
the keys of released ones.
"""

from __future__ import annotations

import gc
import math
import numbers
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from synkhronos import ranks
from synkhronos.casts import NUMBER_KINDS, as_numbers, cast, check_cast
from synkhronos.checks import check_at_least, check_flag, check_name, check_number
from synkhronos.graph_libraries import get_library
from synkhronos.ranks import ArrayLocation


class Data:
    """An array in shared memory that all ranks read.

    It is created by `data`.  Its dtype and number of dimensions are fixed.  Its shape may change, and its memory grows
    as needed.

    Examples
    --------
    >>> import numpy as np, synkhronos as synk
    >>> n = synk.fork(2, use_gpu=False)
    >>> x = synk.data(np.arange(6.0).reshape(3, 2))
    >>> x[1:]
    array([[2., 3.],
           [4., 5.]])
    >>> x[0] = 7
    >>> float(np.asarray(x).sum())
    28.0
    >>> synk.close()
    """

    #: Whether commands send rows to the other hosts that read them.  If not, programs transfer rows under a lock.
    _is_published = True

    def __init__(self, dtype: npt.DTypeLike, ndim: int, minibatch: bool = False, name: str | None = None):
        self._dtype = np.dtype(dtype)
        self._ndim = ndim
        self._name = name
        self.minibatch = minibatch
        self._session = ranks.get_session()
        self._segment: ranks.Segment | None = None
        try:
            self._array = np.zeros((0,) * min(ndim, 99), self._dtype)  # more than NumPy supports: ValueError
        except ValueError as error:
            raise ValueError(
                f"ndim: expected a number of dimensions that NumPy supports, got {ndim}: {error}"
            ) from None
        self._session.close_callbacks[self] = type(self)._release

    # -- attributes ------------------------------------------------------------------------------------------

    @property
    def data(self) -> np.ndarray:
        """NumPy array of the current shape: a view of the shared memory."""
        self._check_open()
        return self._array

    @property
    def dtype(self) -> np.dtype:
        """Dtype, which does not change."""
        return self._dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions, which does not change."""
        return self._ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """Current shape."""
        return self._array.shape

    @property
    def size(self) -> int:
        """Current number of items."""
        return self._array.size

    @property
    def alloc_size(self) -> int:
        """Number of items, not bytes, for which memory is allocated."""
        return 0 if self._segment is None else self._segment.nbytes // max(1, self._dtype.itemsize)

    @property
    def name(self) -> str | None:
        """Name in errors, or None."""
        return self._name

    @property
    def minibatch(self) -> bool:
        """Whether the array has only the rows of a call's ``batch`` instead of all rows.

        If ``batch`` is an int or a slice, row 0 is the row with the lowest selected index.  If it is a list or array
        of indexes, or a mask, row k is the row with the k-th index.
        """
        return self._minibatch

    @minibatch.setter
    def minibatch(self, value: bool) -> None:
        self._minibatch = check_flag(value, "minibatch")

    def __len__(self) -> int:
        if not self._ndim:
            raise TypeError("a Data object of 0 dimensions has no length")
        return len(self._array)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __getitem__(self, key: Any) -> Any:
        return self.data[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.data[key] = cast(value, self._dtype, "value")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, numbers.Number | np.generic | np.ndarray):
            # False would pass for "no item is equal": as an index it selects no rows, and its mean is 0.
            raise TypeError("Data objects are not compared item by item: compare the array, d.data == value")
        return self is other

    __hash__ = object.__hash__

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return as_numpy(self.data, dtype, copy)

    def __copy__(self) -> Data:
        copied = Data(self._dtype, self._ndim, self._minibatch, self._name)
        copied.set_value(self.data)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Data:
        return self.__copy__()

    def __reduce__(self) -> Any:
        raise TypeError("Data can't be pickled: pickle np.asarray(data), and make Data of it where it is loaded")

    def __repr__(self) -> str:
        return f"<synkhronos.Data{self._format_repr_name()}: {self._dtype}, shape {self.shape}>"

    def _format_repr_name(self) -> str:
        return "" if self._name is None else f" {self._name!r}"

    # -- changes ---------------------------------------------------------------------------------------------

    def set_value(self, x: npt.ArrayLike, force_cast: bool = False, oversize: float = 1) -> None:
        """Replace shape and content.

        Parameters
        ----------
        x : array_like
            Array with this object's number of dimensions.
        force_cast : bool
            Cast even if values may change.
        oversize : float
            Newly allocated memory, as a multiple of the memory needed now: from 1 to 2.

        Raises
        ------
        TypeError
            If the value can't be cast safely and ``force_cast`` is False.
        ValueError
            For another number of dimensions, or if ``oversize`` is out of range.
        MemoryError
            If there is not enough shared memory.  The old content is kept.
        """
        self._set_value(x, force_cast, oversize, "x")

    def set_length(self, n: int, oversize: float = 1) -> None:
        """Change the number of rows.  Remaining rows keep their values, and new rows are zero.

        Parameters
        ----------
        n : int
            New length along axis 0.
        oversize : float
            As in `set_value`.
        """
        if not self._ndim:
            raise ValueError("a Data object of 0 dimensions has no length to set")
        self.set_shape((check_at_least(n, "n", 0), *self.shape[1:]), oversize)

    def set_shape(self, shape: int | Sequence[int], oversize: float = 1) -> None:
        """Change the shape.

        Remaining rows keep their values, and new rows are zero.  If a length along another axis changes, all rows are
        zero.

        Parameters
        ----------
        shape : sequence of int
            One length for each dimension.
        oversize : float
            As in `set_value`.
        """
        lengths = _to_shape(shape)
        if len(lengths) != self._ndim:
            raise ValueError(f"shape: expected {self._ndim} lengths, got {lengths}")
        self._reshape_under_lock(lengths, oversize, keep_rows=True)

    def condition_data(self, x: npt.ArrayLike, force_cast: bool = False) -> np.ndarray:
        """Convert a value to an array that `set_value` accepts without a cast; this object does not change.

        Parameters
        ----------
        x : array_like
        force_cast : bool
            Cast even if values may change.

        Returns
        -------
        ndarray
            Array with this object's dtype and number of dimensions: the argument itself if it has them.
        """
        return self._check_value(x, force_cast, "x").astype(self._dtype, copy=False)

    def free_memory(self) -> None:
        """Release the shared memory on all ranks; the array becomes empty.

        The memory stays allocated as long as arrays that `data` has returned exist.
        """
        if self._session.close_reason is not None:  # by a death, perhaps: a trainer may go on with new workers
            self._release()
            return
        memory = None if self._segment is None else weakref.ref(self._segment.buffer)
        with self._session.call_lock:
            self._session.wait_until_idle()
            self._release()
            self._session.send_releases()
        if memory is not None and memory() is not None:
            gc.collect()  # compilers leave reference cycles that refer to inputs

    # -- internal: the call lock is held; other packages use `data_access` ---------------------------------------

    def _get_array_location(self) -> ArrayLocation:
        """Return the location by which ranks find the array.  Allocate a segment for an array without items."""
        self._check_open()
        if self._segment is None:  # even an array without items needs a segment that ranks can map
            private = self._array
            self._reshape(private.shape)[...] = private
        assert self._segment is not None
        return ArrayLocation(self._segment.key, self._dtype.str, self._array.shape)

    def _check_open(self) -> None:
        """Raise RuntimeError if the session has ended."""
        if self._session.close_reason is not None:
            raise RuntimeError(
                "this Data object's memory was freed when the ranks were closed: make a new one after synkhronos.fork()"
            )

    def _set_value(self, x: npt.ArrayLike, force_cast: bool, oversize: float, argument: str) -> None:
        """Replace shape and content, as `set_value`.  ``argument`` is the name of ``x`` in errors."""
        value = self._check_value(x, force_cast, argument)
        self._reshape_under_lock(value.shape, oversize, keep_rows=False)
        # The call lock is not held, so that a thread can write the next batch while the ranks compute.
        self._array[...] = value

    def _check_value(self, x: npt.ArrayLike, force_cast: bool, argument: str) -> np.ndarray:
        """Check a value's dtype and number of dimensions, and return it as an array.  It is not cast."""
        check_flag(force_cast, "force_cast")
        value = as_numbers(x, argument)
        if value.ndim != self._ndim:
            raise ValueError(
                f"{argument}: expected {self._ndim} dimensions{self._format_name()}, got {value.ndim} "
                f"(shape {value.shape})"
            )
        if value.dtype != self._dtype and not force_cast:
            if not np.can_cast(value.dtype, self._dtype, "safe"):
                raise TypeError(
                    f"{argument}: {value.dtype} can't be cast safely to {self._dtype}{self._format_name()}: "
                    "convert it, or pass force_cast=True"
                )
            check_cast(value, self._dtype, argument)  # int64 to float64 rounds large numbers
        return value

    def _format_name(self) -> str:
        """Return the part of an error message that names this object."""
        return "" if self._name is None else f" for {self._name!r}"

    def _reshape_under_lock(self, shape: tuple[int, ...], oversize: float, keep_rows: bool) -> None:
        """Change the shape under the call lock, once no rank reads the memory."""
        self._check_open()
        if not 1 <= check_number(oversize, "oversize", "a number from 1 to 2") <= 2:
            raise ValueError(f"oversize: expected a number from 1 to 2, got {oversize!r}")
        with self._session.call_lock:
            self._session.wait_until_idle()
            self._reshape(shape, oversize, keep_rows)

    def _reshape(self, shape: tuple[int, ...], oversize: float = 1, keep_rows: bool = False) -> np.ndarray:
        """Change the shape and return the array.  Its content is arbitrary without ``keep_rows``."""
        self._check_open()
        old, segment = self._array, self._segment
        if segment is not None and shape == old.shape:
            return old
        size = math.prod(shape)
        if size > self.alloc_size or segment is None:
            segment = self._session.memory.create_segment(math.ceil(size * oversize) * self._dtype.itemsize)
        try:
            array = segment.view_array(shape, self._dtype)
            if keep_rows and self._ndim:
                n_kept = min(len(old), len(array)) if old.shape[1:] == shape[1:] else 0
                if n_kept and old.ctypes.data != array.ctypes.data:
                    array[:n_kept] = old[:n_kept]
                array[n_kept:] = 0
            self._set_memory(segment, array)
        except BaseException:  # an interrupt, most likely while rows are copied
            if segment is not self._segment:
                self._session.memory.release("segment", segment.key)
            raise
        return array

    def _set_memory(self, segment: ranks.Segment, array: np.ndarray) -> None:
        """Set the segment and the array in it, and release the old segment."""
        old, memory = self._segment, self._session.memory
        if segment is not old:
            memory.release_when_deleted(self, "segment", segment.key)
        self._segment, self._array = segment, array  # no interrupt can be raised in between
        if old is not None and old is not segment:
            memory.release("segment", old.key)

    def _release(self, keep_array: bool = False) -> None:
        """Release the memory; the array becomes empty unless ``keep_array``."""
        segment, self._segment = self._segment, None
        if not keep_array:
            self._array = np.zeros((0,) * self._ndim, self._dtype)
        if segment is not None:
            self._session.memory.release("segment", segment.key)


class ReadOnlyData(Data):
    """A `Data` object whose content and shape can't be changed."""

    #: Source of the rows in errors, such as a path.
    _source: str

    def _map_segment(self, segment: ranks.Segment, shape: tuple[int, ...], offset: int = 0) -> None:
        """Set the content to the array that begins at byte ``offset`` of a segment.  The call lock is held."""
        array = segment.view_array(shape, self.dtype, offset)
        array.flags.writeable = False
        self._set_memory(segment, array)

    def _get_segment_key(self) -> int:
        """Return the segment's key.  Raise ValueError if the memory was freed."""
        self._check_open()
        if self._segment is None:
            raise ValueError(f"{self._source}: this Data object's memory was freed: make a new one")
        return self._segment.key

    def __setitem__(self, key: object, value: Any) -> None:
        self._raise_read_only()

    def _reshape_under_lock(self, *arguments: Any, **options: Any) -> NoReturn:
        self._raise_read_only()

    def _raise_read_only(self) -> NoReturn:
        raise ValueError(f"{self._source}: this Data can't be changed: synkhronos.data(array) is a copy that can")


def data(
    value: npt.ArrayLike | None = None,
    var: Any = None,
    dtype: npt.DTypeLike | None = None,
    ndim: int | None = None,
    shape: int | Sequence[int] | None = None,
    minibatch: bool = False,
    force_cast: bool = False,
    oversize: float = 1,
    name: str | None = None,
) -> Data:
    """Create an array in shared memory that all ranks can read.

    Parameters
    ----------
    value : array_like, optional
        Initial content.
    var : variable, optional
        PyTensor or Theano variable that determines dtype, number of dimensions and default name.
    dtype : dtype_like, optional
        Dtype, if there is no ``var``.  Default: the dtype of ``value``.
    ndim : int, optional
        Number of dimensions, if there is no ``var``.  Default: the number of ``value`` or ``shape``.
    shape : sequence of int, optional
        Initial shape of an array of zeros, if there is no ``value``.
    minibatch : bool
        Whether the array has only the rows of a call's ``batch``: see `Data.minibatch`.
    force_cast : bool
        Cast ``value`` even if values may change.
    oversize : float
        Allocated memory, as a multiple of the memory needed now: from 1 to 2.
    name : str, optional
        Name in errors.

    Returns
    -------
    Data

    Raises
    ------
    TypeError, ValueError
        If the arguments don't determine dtype and number of dimensions, or contradict each other.
    RuntimeError
        Before `fork`, and after `close`.

    Examples
    --------
    >>> import synkhronos as synk
    >>> n = synk.fork(2, use_gpu=False)
    >>> synk.data(shape=(4, 3), dtype="float32")
    <synkhronos.Data: float32, shape (4, 3)>
    >>> synk.close()
    """
    ranks.get_session()
    check_name(name)
    if value is not None and shape is not None:
        raise ValueError("value and shape: expected one of them, got both")
    if var is not None:
        try:
            library = get_library(var)
        except TypeError as error:
            raise TypeError(f"var: {error}") from None
        if not library.is_array(var):
            raise TypeError(f"var: expected a variable whose values are arrays, got {var!r} of type {var.type}")
        if name is None:
            name = var.name
        if dtype is not None and _to_dtype(dtype) != np.dtype(var.type.dtype):
            raise ValueError(f"dtype: {var!r} has {var.type.dtype}, got {_to_dtype(dtype)}")
        if ndim is not None and ndim != var.type.ndim:
            raise ValueError(f"ndim: {var!r} has {var.type.ndim}, got {ndim}")
        dtype, ndim = var.type.dtype, var.type.ndim
    elif value is not None:
        array = as_numbers(value, "value")
        dtype = array.dtype if dtype is None else dtype
        if ndim is not None and ndim != array.ndim:
            raise ValueError(f"ndim: value has {array.ndim}, got {ndim}")
        ndim, value = array.ndim, array
    if ndim is None and shape is not None:
        ndim = len(_to_shape(shape))
    if dtype is None or ndim is None:
        raise TypeError("data() needs var, or value, or dtype with ndim or shape, to know dtype and dimensions")
    created = Data(_to_dtype(dtype), check_at_least(ndim, "ndim", 0), minibatch, name)
    if value is not None:
        created._set_value(value, force_cast, oversize, "value")
    else:
        created.set_shape((0,) * ndim if shape is None else shape, oversize)
    return created


def as_numpy(array: np.ndarray, dtype: npt.DTypeLike | None, copy: bool | None) -> np.ndarray:
    """Return the result of ``__array__``: the array, or a copy if ``dtype`` or ``copy`` requires one."""
    if dtype is not None and np.dtype(dtype) != array.dtype:
        if copy is False:
            raise ValueError(f"a cast from {array.dtype} to {np.dtype(dtype)} needs a copy")
        return array.astype(dtype)
    return array.copy() if copy else array


def _to_dtype(dtype: npt.DTypeLike) -> np.dtype:
    try:
        checked = np.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"dtype: expected a dtype of numbers, got {dtype!r}: {error}") from None
    if checked.kind not in NUMBER_KINDS:
        raise TypeError(f"dtype: expected a dtype of numbers, got {checked}")
    return checked.newbyteorder("=")


def _to_shape(shape: Any) -> tuple[int, ...]:
    if isinstance(shape, int | np.integer) and not isinstance(shape, bool):
        shape = (shape,)
    if not isinstance(shape, list | tuple | np.ndarray):
        raise TypeError(f"shape: expected a sequence of lengths, got {shape!r}")
    return tuple(check_at_least(length, "shape", 0) for length in shape)
