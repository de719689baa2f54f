"""Selection of each rank's rows, compared with NumPy's indexing."""

import numpy as np
import pytest
from batches import draw_batch, make_slices
from hypothesis import assume, given
from hypothesis import strategies as st
from messages import raises

from synkhronos.data_objects.rows import find_max_row, find_min_row, get_share_slice, select_rows, split_selection
from synkhronos.devices import take_rows

lengths = st.integers(0, 12)
#: A length, and `draw_batch` for it.
cases = lengths.flatmap(lambda length: st.tuples(st.just(length), draw_batch(length)))


def make_rows(length, width=2):
    return np.arange(length * width).reshape(length, width)


# -- select --------------------------------------------------------------------------------------------------


@given(cases)
def test_select_equals_numpy_indexing(case):
    length, (batch, index) = case
    data = make_rows(length)
    np.testing.assert_array_equal(take_rows(data, select_rows(batch, length)), data[index])


@given(cases)
def test_select_returns_a_range_or_nonnegative_int64(case):
    length, (batch, _) = case
    rows = select_rows(batch, length)
    assert isinstance(rows, range) or rows.dtype == np.int64 and rows.ndim == 1
    assert all(0 <= row < length for row in rows)


@given(st.integers(0, 12), st.data())
def test_select_refuses_out_of_range_indexes(length, data):
    wrong = data.draw(st.integers(-99, -length - 1) | st.integers(length, 99))
    right = data.draw(st.lists(st.integers(-length, length - 1), max_size=5)) if length else []
    batch = data.draw(st.permutations([*right, wrong]))
    with pytest.raises(IndexError, match=rf"^batch: index {wrong} is out of range for {length} rows$"):
        select_rows(batch, length)


@given(st.integers(0, 12), st.integers(-99, 99))
def test_select_refuses_too_many_rows(length, count):
    if 0 <= count <= length:
        assert select_rows(count, length) == range(count)
    else:
        with pytest.raises(IndexError, match=rf"^batch={count}: .* from 0 to {length}\b"):
            select_rows(count, length)


@given(st.integers(0, 12), st.lists(st.booleans(), min_size=1, max_size=15))
def test_select_refuses_a_mask_of_another_length(length, mask):
    assume(len(mask) != length)
    with pytest.raises(ValueError, match=rf"^batch: a mask needs .* {length} rows, got {len(mask)}"):
        select_rows(np.array(mask), length)


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (True, TypeError, "batch"),
        (np.True_, TypeError, "batch"),
        (1.0, TypeError, "batch"),
        ("3", TypeError, "batch"),
        (b"3", TypeError, "batch"),
        ({0: 1}, TypeError, "batch"),
        ({0, 1}, TypeError, "batch"),
        (iter([0]), TypeError, "batch"),
        ([0.5], TypeError, "batch"),
        (["a"], TypeError, "batch"),
        ([[0, 1]], ValueError, "batch"),
        (np.array(3), ValueError, "batch"),
        (np.ones((5, 1), bool), ValueError, "batch"),
        (slice("a"), TypeError, "batch"),
        (slice(0, 2.0), TypeError, "batch"),
        (slice(0, 2, 0), ValueError, "batch"),
        (range(-6, 2), IndexError, "batch"),
        # The check must not allocate an array of this length.
        (range(1 << 60), IndexError, "batch"),
        (np.array([1 << 63], np.uint64), IndexError, "batch"),
        (np.array([1 << 63], ">u8"), IndexError, "batch"),
    ],
)
def test_select_refuses_other_batches(batch, error, message):
    with raises(error, message):
        select_rows(batch, 5)


def test_select_error_names_the_argument():
    with raises(IndexError, "rows"):
        select_rows(9, 5, "rows")


def test_select_accepts_ranges_with_negative_steps():
    assert select_rows(range(-2, 2), 5).tolist() == [3, 4, 0, 1]


def test_select_accepts_numpy_index_types():
    class Indexes:
        def __len__(self):
            return 2

        def __array__(self, dtype=None, copy=None):
            return np.array([3, -1])

    assert select_rows(Indexes(), 5).tolist() == [3, 4]


# -- share and pieces ----------------------------------------------------------------------------------------


@given(st.integers(0, 100), st.integers(1, 9))
def test_share_equals_numpy_array_split(count, parts):
    expected = np.array_split(np.arange(count), parts)
    for part in range(parts):
        assert np.arange(count)[get_share_slice(count, parts, part)].tolist() == expected[part].tolist()


@given(cases, st.integers(1, 5))
def test_split_parts_make_up_the_selection(case, count):
    length, (batch, _) = case
    rows = select_rows(batch, length)
    cut = list(split_selection(rows, count))
    assert len(cut) == count
    assert all(isinstance(piece, type(rows)) for piece in cut)
    assert [row for piece in cut for row in piece] == list(rows)


# -- lowest and highest --------------------------------------------------------------------------------------


@given(cases)
def test_min_row_and_max_row_equal_numpy(case):
    length, (batch, index) = case
    rows, picked = select_rows(batch, length), np.arange(length)[index]
    assert find_min_row(rows) == (picked.min() if picked.size else 0)
    assert find_max_row(rows) == (picked.max() if picked.size else -1)
    assert type(find_min_row(rows)) is type(find_max_row(rows)) is int


# -- take_rows ----------------------------------------------------------------------------------------------------


@given(cases, st.sampled_from([(), (3,), (2, 2), (0,)]), st.booleans())
def test_take_equals_numpy_for_any_shape_and_layout(case, behind, strided):
    length, (batch, index) = case
    data = np.random.default_rng(0).normal(size=(length, *behind))
    if strided:
        data = np.repeat(data, 2, axis=0)[::2]
    rows = select_rows(batch, length)
    np.testing.assert_array_equal(take_rows(data, rows), data[index])
    out = np.full((len(rows), *behind), np.nan)
    assert take_rows(data, rows, out) is out
    np.testing.assert_array_equal(out, data[index])


@given(st.integers(0, 12), make_slices(12))
def test_take_of_a_range_is_a_view(length, batch):
    data = make_rows(length)
    rows = take_rows(data, select_rows(batch, length))
    rows[...] = -1
    assert (data[batch] == -1).all()
    assert (data == -1).sum() == rows.size


@given(st.integers(1, 12), st.data())
def test_take_of_indexes_is_a_copy(length, draw):
    data = make_rows(length)
    rows = take_rows(data, select_rows(draw.draw(st.lists(st.integers(0, length - 1), min_size=1)), length))
    rows[...] = -1
    assert (data >= 0).all()
