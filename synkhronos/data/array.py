"""Arrays in shared memory.

`Data`
    An array that all ranks see.
`data`
    Makes one.
"""

from __future__ import annotations

import gc
import io
import math
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from synkhronos import ranks
from synkhronos.casts import NUMBERS, as_numbers, cast, check_cast
from synkhronos.checks import at_least, flag, number
from synkhronos.graphs import library_of
from synkhronos.ranks import SharedArray


class Data:
    """An array in POSIX shared memory that all ranks see.

    Made by `data`.  Its dtype and number of dimensions stay fixed; its shape may change, and its memory grows when it
    must.

    Parameters
    ----------
    dtype : dtype_like
    ndim : int
    minibatch : bool
    name : str, optional

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

    #: Whether other hosts are sent what they read of it; what is False here ranks bring over themselves, under a lock.
    is_sent = True

    def __init__(self, dtype: npt.DTypeLike, ndim: int, minibatch: bool = False, name: str | None = None):
        self._dtype = np.dtype(dtype)
        self._ndim = ndim
        self._name = name
        self.minibatch = minibatch
        self._session = ranks.session()
        self._segment: ranks.Segment | None = None
        try:
            self._array = np.zeros((0,) * min(ndim, 99), self._dtype)  # more than NumPy knows
        except ValueError as error:
            raise ValueError(f"ndim: expected as many dimensions as NumPy knows, got {ndim}: {error}") from None
        self._session.notify_at_close(self)

    # -- what it is ------------------------------------------------------------------------------------------

    @property
    def data(self) -> np.ndarray:
        """The array itself: a view of the shared memory, of the present shape."""
        self._check()
        return self._array

    @property
    def dtype(self) -> np.dtype:
        """The dtype, which never changes."""
        return self._dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions, which never changes."""
        return self._ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """The present shape."""
        return self._array.shape

    @property
    def size(self) -> int:
        """The present number of items."""
        return self._array.size

    @property
    def alloc_size(self) -> int:
        """The number of items for which there is memory."""
        return 0 if self._segment is None else self._segment.nbytes // max(1, self._dtype.itemsize)

    @property
    def name(self) -> str | None:
        """Its name in errors."""
        return self._name

    @property
    def minibatch(self) -> bool:
        """Whether it holds only the rows of a call's ``batch``, and not all rows.

        If ``batch`` is an int or a slice, row 0 goes with the lowest index that it picks.  If it is a list or array of
        indexes, or a mask, row k goes with the k-th index.
        """
        return self._minibatch

    @minibatch.setter
    def minibatch(self, value: bool) -> None:
        self._minibatch = flag(value, "minibatch")

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

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return as_numpy(self.data, dtype, copy)

    def __copy__(self) -> Data:
        made = Data(self._dtype, self._ndim, self._minibatch, self._name)
        made.set_value(self.data)
        return made

    @classmethod
    def holding(cls, array: np.ndarray) -> Data:
        """Return an array's copy in shared memory, for a command; in the turn of the call that sends it."""
        made = cls(array.dtype, array.ndim)
        made.resized(array.shape)[...] = array
        return made

    @classmethod
    def with_file(cls, shape: tuple[int, ...], dtype: npt.DTypeLike, name: str) -> tuple[Data, io.FileIO]:
        """Return a new array of zeros, and the open file in which it lies, for a process that is no rank."""
        made = cls(dtype, len(shape), name=name)
        session, nbytes = made._session, max(1, math.prod(shape) * made._dtype.itemsize)
        with session.turn:
            session.settle()
            file = session.memory.file(nbytes)
            kept = io.FileIO(os.dup(file.fileno()), "r+")  # the ranks' is closed when all of them have it
            made._lie_in(session.memory.enter(file, nbytes))
            made._reshape(shape)
        return made, kept

    def __deepcopy__(self, memo: dict[int, Any]) -> Data:
        return self.__copy__()

    def __reduce__(self) -> Any:
        raise TypeError("Data can't be pickled: pickle np.asarray(data), and make Data of it where it is loaded")

    def __repr__(self) -> str:
        name = "" if self._name is None else f" {self._name!r}"
        return f"<synkhronos.Data{name}: {self._dtype}, shape {self.shape}>"

    # -- changing it -----------------------------------------------------------------------------------------

    def set_value(self, x: npt.ArrayLike, force_cast: bool = False, oversize: float = 1) -> None:
        """Replace shape and content.

        Parameters
        ----------
        x : array_like
            Of this object's number of dimensions.
        force_cast : bool
            Cast even where values may change.
        oversize : float
            From 1 to 2: if memory has to be allocated, by which factor more than is needed now.

        Raises
        ------
        TypeError
            If the value can't be cast safely and ``force_cast`` is False.
        ValueError
            For another number of dimensions, or ``oversize`` out of range.
        MemoryError
            If there is no room in shared memory; the old content stays.
        """
        self._set_value(x, force_cast, oversize, "x")

    def set_length(self, n: int, oversize: float = 1) -> None:
        """Change the number of rows; those that remain are kept, new ones are zero.

        Parameters
        ----------
        n : int
            The new length along axis 0.
        oversize : float
            As in `set_value`.
        """
        if not self._ndim:
            raise ValueError("a Data object of 0 dimensions has no length to set")
        self.set_shape((at_least(n, "n", 0), *self.shape[1:]), oversize)

    def set_shape(self, shape: int | Sequence[int], oversize: float = 1) -> None:
        """Change the shape.

        Rows that remain are kept, and new ones are zero.  If a length along another axis changes, no row is kept: all
        is zero.

        Parameters
        ----------
        shape : sequence of int
            As many lengths as dimensions.
        oversize : float
            As in `set_value`.
        """
        lengths = _lengths(shape)
        if len(lengths) != self._ndim:
            raise ValueError(f"shape: expected {self._ndim} lengths, got {lengths}")
        self._reshape_in_turn(lengths, oversize, keep=True)

    def condition_data(self, x: npt.ArrayLike, force_cast: bool = False) -> np.ndarray:
        """Return a value as an array that this object can take, without changing the object.

        Parameters
        ----------
        x : array_like
        force_cast : bool
            Cast even where values may change.

        Returns
        -------
        ndarray
            Of this object's dtype and number of dimensions; the argument itself where it fits.
        """
        return self._conditioned(x, force_cast, "x").astype(self._dtype, copy=False)

    def free_memory(self) -> None:
        """Give the shared memory back, on all ranks, and become empty.

        Arrays that were taken from `data` before keep their memory as long as they exist.
        """
        if self._session.closed is not None:
            return
        memory = None if self._segment is None else weakref.ref(self._segment.buffer)
        with self._session.turn:
            self._session.settle()
            self._drop()
            self._session.flush()
        if memory is not None and memory() is not None:
            gc.collect()  # what compilers leave holds the inputs for which they compiled

    # -- for the library -------------------------------------------------------------------------------------

    def location(self) -> SharedArray:
        """Return where the array lies, for a command; in the turn of the call that sends it."""
        self._check()
        if self._segment is None:  # so that ranks have something to map, even for an array without items
            private = self._array
            self._reshape(private.shape)
            self._array[...] = private
        assert self._segment is not None
        return SharedArray(self._segment.key, self._dtype.str, self._array.shape)

    def check_session(self, session: ranks.Session, name: str) -> None:
        """Refuse to be used with ranks other than those it was made for."""
        if not self.belongs_to(session):
            raise ValueError(
                f"{name}: this Data object was made before the present fork(), and its memory is freed: make a new one"
            )

    def belongs_to(self, session: ranks.Session) -> bool:
        """Whether it was made for these ranks, and they still run."""
        return self._session is session and session.closed is None

    def resized(self, shape: tuple[int, ...]) -> np.ndarray:
        """Take a new shape, with whatever content, and return the array to be filled; in the turn of a call."""
        if self._segment is not None and shape == self._array.shape and self._session.closed is None:
            return self._array
        self._reshape(shape)
        return self._array

    def session_closed(self) -> None:
        """Let the memory go with the ranks."""
        self._drop()

    def _check(self) -> None:
        if self._session.closed is not None:
            raise RuntimeError(
                "this Data object's memory was freed when the ranks were closed: make a new one after synkhronos.fork()"
            )

    def _set_value(self, x: npt.ArrayLike, force_cast: bool, oversize: float, argument: str) -> None:
        value = self._conditioned(x, force_cast, argument)
        self._reshape_in_turn(value.shape, oversize, keep=False)
        # Out of turn: a thread that reads the next batch copies it while the ranks compute on the last.
        self._array[...] = value

    def _conditioned(self, x: npt.ArrayLike, force_cast: bool, argument: str) -> np.ndarray:
        """Check a value's dtype and dimensions; the cast itself is left to the copy."""
        flag(force_cast, "force_cast")
        value = as_numbers(x, argument)
        if value.ndim != self._ndim:
            raise ValueError(
                f"{argument}: expected {self._ndim} dimensions{self._called()}, got {value.ndim} (shape {value.shape})"
            )
        if value.dtype != self._dtype and not force_cast:
            if not np.can_cast(value.dtype, self._dtype, "safe"):
                raise TypeError(
                    f"{argument}: {value.dtype} can't be cast safely to {self._dtype}{self._called()}: "
                    "convert it, or pass force_cast=True"
                )
            check_cast(value, self._dtype, argument)  # int64 to float64 rounds large numbers
        return value

    def _called(self) -> str:
        return "" if self._name is None else f" for {self._name!r}"

    def _reshape_in_turn(self, shape: tuple[int, ...], oversize: float, keep: bool) -> None:
        self._check()
        if not 1 <= number(oversize, "oversize", "a number from 1 to 2") <= 2:
            raise ValueError(f"oversize: expected a number from 1 to 2, got {oversize!r}")
        with self._session.turn:
            self._session.settle()  # no rank may be reading
            self._reshape(shape, oversize, keep)

    def _reshape(self, shape: tuple[int, ...], oversize: float = 1, keep: bool = False) -> None:
        self._check()
        old = self._array
        size = math.prod(shape)
        if size > self.alloc_size or self._segment is None:
            self._lie_in(self._session.memory.create(math.ceil(size * oversize) * self._dtype.itemsize))
        assert self._segment is not None
        self._array = self._segment.array(shape, self._dtype)
        if not keep or not self._ndim:
            return
        kept = min(len(old), len(self._array)) if old.shape[1:] == shape[1:] else 0
        if kept and old.ctypes.data != self._array.ctypes.data:
            self._array[:kept] = old[:kept]
        self._array[kept:] = 0

    def _lie_in(self, segment: ranks.Segment) -> None:
        self._drop(keep_array=True)
        self._segment = segment
        self._session.memory.release_with(self, "segment", segment.key)

    def _drop(self, keep_array: bool = False) -> None:
        if self._segment is not None:
            self._session.memory.release("segment", self._segment.key)
        self._segment = None
        if not keep_array:
            self._array = np.zeros((0,) * self._ndim, self._dtype)


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
    """Make an array in shared memory that all ranks see.

    Parameters
    ----------
    value : array_like, optional
        The first content.
    var : variable, optional
        A PyTensor or Theano variable that gives dtype and number of dimensions (and the name, if none is given).
    dtype : dtype_like, optional
        Used if there is no ``var``.  Without it ``value`` gives the dtype.
    ndim : int, optional
        Used if there is no ``var``.  Without it ``value`` or ``shape`` gives the number.
    shape : sequence of int, optional
        The first shape, filled with zeros, if there is no ``value``.
    minibatch : bool
        Whether it holds only the rows of a call's ``batch``: see `Data.minibatch`.
    force_cast : bool
        Cast ``value`` even where values may change.
    oversize : float
        From 1 to 2: by which factor more memory is allocated than is needed now.
    name : str, optional

    Returns
    -------
    Data

    Raises
    ------
    TypeError, ValueError
        If the arguments don't say dtype and number of dimensions, or contradict each other.
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
    ranks.session()
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name: expected a string, got {name!r}")
    if value is not None and shape is not None:
        raise ValueError("value and shape: expected one of them, got both")
    if var is not None:
        try:
            library = library_of(var)
        except TypeError as error:
            raise TypeError(f"var: {error}") from None
        if not library.is_array(var):
            raise TypeError(f"var: expected a variable whose values are arrays, got {var!r} of type {var.type}")
        if name is None:
            name = var.name
        if dtype is not None and _dtype(dtype) != np.dtype(var.type.dtype):
            raise ValueError(f"dtype: {var!r} has {var.type.dtype}, got {_dtype(dtype)}")
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
        ndim = len(_lengths(shape))
    if dtype is None or ndim is None:
        raise TypeError("data() needs var, or value, or dtype with ndim or shape, to know dtype and dimensions")
    made = Data(_dtype(dtype), at_least(ndim, "ndim", 0), minibatch, name)
    if value is not None:
        made._set_value(value, force_cast, oversize, "value")
    else:
        made.set_shape((0,) * ndim if shape is None else shape, oversize)
    return made


def as_numpy(array: np.ndarray, dtype: npt.DTypeLike | None, copy: bool | None) -> np.ndarray:
    """Return an array as a class's ``__array__`` has to: itself, unless a copy is asked for, or another dtype."""
    if dtype is not None and np.dtype(dtype) != array.dtype:
        if copy is False:
            raise ValueError(f"a cast from {array.dtype} to {np.dtype(dtype)} needs a copy")
        return array.astype(dtype)
    return array.copy() if copy else array


def _dtype(dtype: npt.DTypeLike) -> np.dtype:
    try:
        checked = np.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"dtype: expected a dtype of numbers, got {dtype!r}: {error}") from None
    if checked.kind not in NUMBERS:
        raise TypeError(f"dtype: expected a dtype of numbers, got {checked}")
    return checked


def _lengths(shape: Any) -> tuple[int, ...]:
    if isinstance(shape, int | np.integer) and not isinstance(shape, bool):
        shape = (shape,)
    if not isinstance(shape, list | tuple | np.ndarray):
        raise TypeError(f"shape: expected a sequence of lengths, got {shape!r}")
    return tuple(at_least(length, "shape", 0) for length in shape)
