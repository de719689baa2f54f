"""Strategies of arguments that select rows, as users write them."""

import numpy as np
from hypothesis import strategies as st

INTEGER_DTYPES = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


def make_slices(length):
    """Return a strategy of slices, some of which have bounds beyond the rows."""
    bounds = st.none() | st.integers(-length - 3, length + 3)
    return st.builds(slice, bounds, bounds, st.none() | st.integers(-4, 4).filter(bool))


@st.composite
def draw_indexes(draw, length):
    """Draw indexes as users write them: lists, tuples, arrays of any integer dtype, strided arrays, ranges."""
    if not length:
        return draw(st.sampled_from([[], (), np.empty(0, np.int32), range(0), range(3, 3)]))
    index = draw(st.lists(st.integers(-length, length - 1), max_size=15))
    form = draw(st.sampled_from(["list", "tuple", "array", "strided", "range"]))
    if form == "range":
        first, last = draw(st.integers(0, length - 1)), draw(st.integers(0, length - 1))
        step = draw(st.integers(1, 3)) * (1 if last >= first else -1)
        return range(first, last + (1 if step > 0 else -1), step)
    if form in ("list", "tuple"):
        return index if form == "list" else tuple(index)
    dtype = draw(st.sampled_from([dtype for dtype in INTEGER_DTYPES if np.iinfo(dtype).max >= length]))
    array = np.array(index, np.int64) if dtype.startswith("i") else np.abs(np.array(index, np.int64)) % length
    array = array.astype(dtype)
    return np.repeat(array, 2)[::2] if form == "strided" else array


@st.composite
def draw_batch(draw, length):
    """Draw a `batch` for data of `length` rows, and the equivalent NumPy index."""
    kind = draw(st.sampled_from(["all", "count", "slice", "indexes", "mask"]))
    if kind == "all":
        return None, slice(None)
    if kind == "count":
        count = draw(st.integers(0, length))
        return draw(st.sampled_from([count, np.int16(count), np.uint16(count)])), slice(count)
    if kind == "slice":
        batch = draw(make_slices(length))
        return batch, batch
    if kind == "mask":
        mask = draw(st.lists(st.booleans(), min_size=length, max_size=length))
        # An empty list is not a mask; an empty array of bool is one.
        return mask if mask and draw(st.booleans()) else np.array(mask, bool), np.array(mask, bool)
    batch = draw(draw_indexes(length))
    return batch, np.array(batch, np.int64)
