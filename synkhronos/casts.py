"""Casts that never change a number silently.

All arrays of users are cast by this module.  A cast is safe if it does not change the value of any number.  The only
exception is rounding from float64 to float32, also of real and imaginary parts, if no finite number becomes infinite.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

#: Kinds of the dtypes of numbers.
NUMBER_KINDS = "biufc"
#: Types of values that are neither sparse nor masked: a call checks each of its inputs.
_DENSE_TYPES = frozenset({np.ndarray, bool, int, float, complex, *np.sctypeDict.values()})
_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
_MAX_FLOAT32 = float(np.finfo(np.float32).max)
#: Number of items that are checked at once, a limit for the size of temporary arrays.
_BLOCK_SIZE = 1 << 16


def check_dense(value: object, argument: str) -> None:
    """Raise TypeError for a sparse matrix or an array with masked items, also within lists.

    Shared memory has no masks, so a masked item would become a number.

    Examples
    --------
    >>> check_dense([np.ma.masked_array([2.0], [True])], "x")
    Traceback (most recent call last):
        ...
    TypeError: x: expected an array, got a masked one, whose mask would be lost: pass .filled(value), or .data and ...
    """
    if type(value) in _DENSE_TYPES:
        return
    if isinstance(value, list | tuple):
        for item_type in set(map(type, value)):  # by type, since a list may have a million numbers
            if issubclass(item_type, list | tuple | np.ma.MaskedArray):
                for item in value:
                    if isinstance(item, item_type):
                        check_dense(item, argument)
    elif isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise TypeError(
            f"{argument}: expected an array, got a masked one, whose mask would be lost: pass .filled(value), or .data "
            "and .mask as two arrays"
        )
    elif type(value).__module__.startswith("scipy.sparse"):
        raise TypeError(f"{argument}: expected an array, got a sparse matrix: pass .toarray()")


def as_numbers(value: object, argument: str) -> np.ndarray:
    """Return an argument, called ``argument`` in errors, as a NumPy array of numbers; an array is not copied.

    Raise TypeError for strings, objects, dates, masked arrays, sparse matrices and ragged lists.
    """
    check_dense(value, argument)
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise TypeError(f"{argument}: expected an array, got {type(value).__name__}: {error}") from error
    if array.dtype.kind not in NUMBER_KINDS:
        if hasattr(value, "owner"):
            raise TypeError(f"{argument}: expected numbers, got the variable {value}; data(var=...) takes variables")
        raise TypeError(f"{argument}: expected numbers, got an array of {array.dtype}")
    return array


def cast(value: object, dtype: npt.DTypeLike, argument: str) -> np.ndarray:
    """Return an argument as a NumPy array of a dtype; raise TypeError unless the cast is safe.

    The argument, called ``argument`` in errors, is returned itself if it is an array of this dtype.  The cast is unsafe
    if a number would change, or if an imaginary part would be lost.  The errors of `as_numbers` are raised, too.

    Examples
    --------
    >>> cast([1, 0], "int8", "y"), cast(0.1, "float32", "rate")
    (array([1, 0], dtype=int8), array(0.1, dtype=float32))
    >>> cast([[1, 200]], "int8", "y")
    Traceback (most recent call last):
    TypeError: y: can't cast int64 to int8 without changing 200 at index (0, 1): convert it, or use another dtype
    """
    array = as_numbers(value, argument)
    check_cast(array, dtype, argument)
    return array.astype(dtype, copy=False)


def check_cast(array: np.ndarray, dtype: npt.DTypeLike, argument: str) -> None:
    """Raise TypeError unless the cast of an array of numbers to a dtype is safe.

    The values are only checked if the result depends on them.
    """
    source, dtype = array.dtype, np.dtype(dtype)
    if source == dtype:
        return
    # For a single number, such as a learning rate, this is ten times as fast as the loop below.
    if source is _FLOAT64 and dtype is _FLOAT32 and array.size == 1 and abs(array.item()) <= _MAX_FLOAT32:
        return
    if _is_exact(source, dtype):
        return
    if source.kind == "c" and dtype.kind != "c":
        raise TypeError(
            f"{argument}: expected {dtype}, got {source.name}, whose imaginary parts would be lost: pass .real"
        )
    if array.size == 1 and source.kind + dtype.kind in ("ii", "iu", "ui", "uu"):
        # As fast for a single integer, such as a label.
        if array.item() == array.astype(dtype).item():
            return
    start = 0
    flags = ["external_loop", "buffered", "zerosize_ok"]
    for block in np.nditer(array, flags, order="C", buffersize=_BLOCK_SIZE):  # type: ignore[call-overload]
        with np.errstate(all="ignore"):
            is_changed = _mask_changed_numbers(block, dtype)
        if is_changed.any():
            index = tuple(map(int, np.unravel_index(start + int(is_changed.argmax()), array.shape)))
            first = f"{array[index].item()!r} at index {index}" if index else repr(array.item())
            raise TypeError(
                f"{argument}: can't cast {source.name} to {dtype} without changing {first}: convert it, or use another "
                "dtype"
            )
        start += block.size


def _is_exact(source: np.dtype, dtype: np.dtype) -> bool:
    """Whether a cast from ``source`` to ``dtype`` is exact for all numbers."""
    # NumPy considers a cast of 64-bit integers to float64 safe, but it rounds numbers above 2**53.
    is_safe = np.can_cast(source, dtype, "safe")
    return is_safe and not (source.kind in "iu" and source.itemsize == 8 and dtype.kind in "fc")


def _mask_changed_numbers(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return a mask of the values that a cast to a dtype would change."""
    if dtype.kind == "c":
        real_dtype = np.zeros((), dtype).real.dtype
        real_mask = _mask_changed_numbers(values.real, real_dtype)
        return real_mask | _mask_changed_numbers(values.imag, real_dtype)
    if dtype.kind == "b":
        return (values != 0) & (values != 1)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if values.dtype.kind in "iu":
            source_limits = np.iinfo(values.dtype)
            return (values < max(limits.min, source_limits.min)) | (values > min(limits.max, source_limits.max))
        # The bounds are powers of two, which floats represent exactly; in float16 they may be infinite.
        is_in_range = np.isfinite(values) & (values >= float(limits.min)) & (values < float(limits.max + 1))
        return ~(is_in_range & (np.trunc(values) == values))
    converted = values.astype(dtype)
    if values.dtype.kind == "f":
        is_rounding = (values.dtype.itemsize, dtype.itemsize) == (8, 4)
        return np.isinf(converted) & np.isfinite(values) if is_rounding else (converted != values) & ~np.isnan(values)
    return _mask_changed_numbers(converted, values.dtype) | (converted.astype(values.dtype) != values)
