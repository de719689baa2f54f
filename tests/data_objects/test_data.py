"""Data objects: arrays in shared memory, compared with NumPy's."""

import copy
import gc
import operator
import os
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from library import XLA, fork_ranks
from library import tensor as T
from messages import raises
from system import list_children, time_limit

import synkhronos as synk
from synkhronos import ranks
from synkhronos.ranks.memory_table import MemoryTable
from synkhronos.ranks.segments import SegmentTable

INTEGERS = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
DTYPES = [*INTEGERS, "float16", "float32", "float64", "complex64", "complex128"]
dtypes = st.sampled_from(DTYPES)
shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)

pytestmark = pytest.mark.usefixtures("two_ranks")


@pytest.fixture
def forked():
    """Let a test close the ranks; fork two ranks afterwards for the next test."""
    yield
    synk.close()
    fork_ranks(2)


def draw_arrays(dtype=dtypes, shape=shapes):
    """Draw arrays of any dtype, shape and memory layout."""
    contiguous = hnp.arrays(dtype, shape)

    def laid_out(array, layout):
        if layout == "transposed":
            return array.T
        if layout == "strided" and array.ndim:
            return np.repeat(array, 2, axis=-1)[..., ::2]
        return array[::-1] if layout == "reversed" and array.ndim else array

    return st.builds(laid_out, contiguous, st.sampled_from(["contiguous", "transposed", "strided", "reversed"]))


def make_value(dtype, shape=(3, 2)):
    """Return an array whose elements differ as far as the dtype allows."""
    return np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)


_functions = {}


def read_by_ranks(data):
    """Return the rows that the ranks read from shared memory, each its share, joined."""
    key = data.dtype, data.ndim
    if key not in _functions:
        x = T.TensorType(str(data.dtype), (False,) * data.ndim)("x")
        _functions[key] = synk.function([x], (x, "gather"))
    return _functions[key](data)


def count_files_and_mappings():
    """Return the number of open files and of mapped shared memory segments of each rank."""
    counts = []
    for pid in [os.getpid(), *list_children(os.getpid())]:
        with open(f"/proc/{pid}/maps") as file:
            mapped = sum("synkhronos" in line for line in file)
        counts.append((len(os.listdir(f"/proc/{pid}/fd")), mapped))
    return counts


# -- making it -----------------------------------------------------------------------------------------------


@given(draw_arrays())
def test_data_copies_a_value(value):
    d = synk.data(value)
    assert (d.dtype, d.ndim, d.shape, d.size) == (value.dtype, value.ndim, value.shape, value.size)
    assert d.alloc_size >= d.size
    np.testing.assert_array_equal(d.data, value)
    assert not np.shares_memory(d.data, value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_data_of_any_dtype_is_shared_with_ranks(dtype):
    np.testing.assert_array_equal(read_by_ranks(synk.data(make_value(dtype, (5, 2)))), make_value(dtype, (5, 2)))


@pytest.mark.parametrize("shape", [(0,), (1,), (5,), (3, 0), (0, 3), (4, 2, 3), (3, 2, 1, 2)])
def test_data_of_any_shape_is_shared_with_ranks(shape):
    value = make_value("float64", shape)
    values = read_by_ranks(synk.data(value))
    assert values.shape == shape
    np.testing.assert_array_equal(values, value)


@pytest.mark.parametrize("shape", [(), (0,), 5, [2, 3], (np.int64(2), 0, 4), np.array([2, 2, 2, 2])])
def test_data_of_a_shape_is_zero(shape):
    d = synk.data(dtype="int32", shape=shape)
    np.testing.assert_array_equal(d.data, np.zeros(shape, "int32"))
    assert d.dtype == "int32"


@pytest.mark.parametrize("ndim", range(5))
def test_data_of_ndim_alone_has_no_rows(ndim):
    d = synk.data(dtype="float32", ndim=ndim)
    assert d.shape == (0,) * ndim
    assert d.dtype == "float32"


def test_data_of_a_variable_takes_its_dtype_dimensions_and_name():
    d = synk.data(var=T.fmatrix("images"))
    assert (d.dtype, d.ndim, d.name) == ("float32", 2, "images")
    assert synk.data(var=T.ivector("y"), name="labels").name == "labels"
    assert synk.data(var=T.TensorType("int32", (False,))()).name is None


def test_data_of_a_variable_and_a_value_casts_the_value_up():
    d = synk.data([[1, 2], [3, 4]], T.dmatrix("x"))
    assert d.dtype == "float64"
    assert d.data.tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_data_of_a_variable_accepts_a_shape():
    d = synk.data(var=T.fmatrix("x"), shape=(2, 3))
    np.testing.assert_array_equal(d.data, np.zeros((2, 3), "float32"))


def test_data_accepts_redundant_arguments():
    d = synk.data(np.ones((2, 2)), T.dmatrix("x"), dtype=float, ndim=2)
    assert (d.dtype, d.ndim) == ("float64", 2)


def test_data_accepts_lists_numbers_and_data():
    assert synk.data([1.5, 2.5]).data.tolist() == [1.5, 2.5]
    assert synk.data(7).shape == ()
    first = synk.data([1.0, 2.0])
    second = synk.data(first)
    second[0] = 9.0
    assert first.data.tolist() == [1.0, 2.0]


def test_data_of_foreign_byte_order_has_the_machines():
    value = make_value(">f8")
    for d in (synk.data(value), synk.data(shape=value.shape, dtype=value.dtype)):
        assert d.dtype.isnative
        d[...] = value
        np.testing.assert_array_equal(read_by_ranks(d), value)


def test_name_of_data_is_a_string(tmp_path):
    np.save(tmp_path / "x.npy", np.ones(3))
    calls = (synk.data, np.ones(3)), (synk.data_file, tmp_path / "x.npy"), (synk.data_parts, lambda *_: np.ones(3), 6)
    for make, *arguments in calls:
        with pytest.raises(TypeError, match=r"^name: expected a string, got \['x'\]$"):
            make(*arguments, name=["x"])


def test_data_repr_shows_the_name():
    assert repr(synk.data(np.ones((2, 3)), name="x")) == "<synkhronos.Data 'x': float64, shape (2, 3)>"
    assert repr(synk.data(np.ones(2, "int8"))) == "<synkhronos.Data: int8, shape (2,)>"


def test_data_minibatch_flag_can_be_changed():
    d = synk.data(np.ones(3), minibatch=True)
    assert d.minibatch is True
    d.minibatch = np.False_
    assert d.minibatch is False
    with raises(TypeError, "minibatch"):
        d.minibatch = 1


@pytest.mark.parametrize("member", ["data", "dtype", "ndim", "shape", "size", "alloc_size", "name"])
def test_data_attributes_are_read_only(member):
    with pytest.raises(AttributeError):
        setattr(synk.data(np.ones(3)), member, None)


# -- as an array ---------------------------------------------------------------------------------------------


@given(st.data())
def test_data_getitem_follows_numpy(draw):
    value = draw.draw(hnp.arrays("int64", hnp.array_shapes(max_dims=3, max_side=4)))
    index = draw.draw(
        hnp.basic_indices(value.shape, allow_newaxis=True, allow_ellipsis=True)
        | hnp.integer_array_indices(value.shape)
        | hnp.arrays(bool, value.shape)
    )
    read = synk.data(value)[index]
    np.testing.assert_array_equal(read, value[index])
    assert type(read) is type(value[index])


@given(st.data())
def test_data_setitem_follows_numpy(draw):
    value = draw.draw(hnp.arrays("int64", hnp.array_shapes(max_dims=3, max_side=4)))
    index = draw.draw(
        hnp.basic_indices(value.shape, allow_newaxis=True, allow_ellipsis=True) | hnp.arrays(bool, value.shape)
    )
    new = draw.draw(hnp.arrays("int64", np.shape(value[index])) | st.integers(-9, 9))
    d = synk.data(value)
    d[index] = new
    value[index] = new
    np.testing.assert_array_equal(d.data, value)


def test_data_setitem_is_visible_on_ranks():
    d = synk.data(np.zeros((5, 2)))
    d[1:4] = [[1.0, 2.0]]
    d.data[4] = 7.0
    np.asarray(d)[0, 1] = 3.0
    assert read_by_ranks(d).tolist() == [[0, 3], [1, 2], [1, 2], [1, 2], [7, 7]]


def test_data_setitem_accepts_its_own_rows():
    d, e = synk.data(np.arange(4.0)), synk.data(np.zeros(4))
    e[1:] = d[:3]
    e[0] = synk.data(9.0)
    assert e.data.tolist() == [9.0, 0.0, 1.0, 2.0]


def test_data_slices_are_views():
    d = synk.data(np.zeros(4))
    d[1:3][:] = 5.0
    assert d.data.tolist() == [0.0, 5.0, 5.0, 0.0]


@pytest.mark.parametrize("value", [0, 0.5, True, np.float32(0), np.bool_(0), np.array([0, 1, 0])], ids=repr)
def test_data_is_not_compared_with_numbers(value):
    """As a comparison of objects, ``labels == 0`` would be False: ``x[labels == 0]`` would select no rows."""
    x, labels = synk.data(np.ones((3, 2))), synk.data([0, 1, 0])
    for compare in (lambda: labels == value, lambda: labels != value):
        with pytest.raises(TypeError, match="d.data == value"):
            compare()
    assert labels == labels and labels != x and labels != "labels" and labels in {labels: 1} and labels is not None
    x[labels.data == 0] = 5
    assert x[labels.data == 0].tolist() == [[5, 5], [5, 5]] and x[1].tolist() == [1, 1]
    assert np.mean(np.asarray(labels) == 0) == 2 / 3


@pytest.mark.parametrize("index", [5, -6, (0, 0), [5], "a"])
def test_data_index_errors_are_numpys(index):
    with pytest.raises(IndexError):
        synk.data(np.zeros(5))[index]


def test_data_asarray_is_a_view_and_array_a_copy():
    d = synk.data(np.arange(3.0))
    assert np.shares_memory(np.asarray(d), d.data)
    assert not np.shares_memory(np.array(d), d.data)
    assert not np.shares_memory(d.__array__(copy=True), d.data)


def test_data_asarray_casts():
    d = synk.data(np.arange(3))
    cast = np.asarray(d, "float32")
    assert cast.dtype == "float32"
    assert cast.tolist() == [0.0, 1.0, 2.0]
    with raises(ValueError):
        d.__array__("float32", copy=False)


def test_data_work_in_numpy_functions_and_operators():
    d = synk.data(np.arange(3.0))
    assert (np.ones(3) + d).tolist() == [1.0, 2.0, 3.0]
    assert np.add(d, d).tolist() == [0.0, 2.0, 4.0]
    assert np.concatenate([d, d]).shape == (6,)
    assert np.sum(d) == 3.0
    assert (np.arange(3.0) == d).all()


def test_data_have_len_and_iter():
    d = synk.data(np.arange(6).reshape(3, 2))
    assert len(d) == 3
    assert [row.tolist() for row in d] == [[0, 1], [2, 3], [4, 5]]
    assert len(synk.data(np.empty((0, 4)))) == 0


def test_data_of_a_scalar_has_no_len():
    d = synk.data(3.0)
    with raises(TypeError):
        len(d)
    assert (d.shape, d.size, d[()]) == ((), 1, 3.0)


# -- casts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new_dtype", DTYPES)
@pytest.mark.parametrize("method", ["set_value", "condition_data", "data"])
@pytest.mark.filterwarnings(
    "ignore::numpy.ComplexWarning" if hasattr(np, "ComplexWarning") else "ignore:Casting complex"
)
def test_data_force_cast_is_needed_for_unsafe_casts(new_dtype, method):
    for dtype in DTYPES:
        value, d = make_value(dtype), synk.data(dtype=new_dtype, ndim=2)

        def take(value=value, d=d, **kwargs):
            if method == "data":
                return synk.data(value, dtype=new_dtype, **kwargs).data
            result = getattr(d, method)(value, **kwargs)
            return d.data if method == "set_value" else result

        if not np.can_cast(dtype, new_dtype, "safe"):
            with pytest.raises(
                TypeError, match=rf"(x|value): {dtype} can't be cast safely to {new_dtype}.*force_cast=True"
            ):
                take()
            assert d.shape == (0, 0)
        data = take(force_cast=not np.can_cast(dtype, new_dtype, "safe"))
        assert data.dtype == new_dtype
        np.testing.assert_array_equal(data, value.astype(new_dtype))


def test_condition_data_leaves_data_unchanged():
    d = synk.data(np.zeros((2, 2)), name="x")
    value = np.ones((5, 2))
    assert d.condition_data(value) is value
    assert d.condition_data([[1, 2]]).dtype == "float64"
    assert d.data.tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("value", [["a", "b"], [None, None], np.zeros(2, "datetime64[s]"), [b"1", b"2"]])
def test_data_refuses_non_numbers_even_with_force_cast(value):
    d = synk.data(np.arange(3.0))
    with raises(TypeError, "x"):
        d.set_value(value, force_cast=True)
    assert d.data.tolist() == [0.0, 1.0, 2.0]


# -- set_value -----------------------------------------------------------------------------------------------


@given(st.lists(draw_arrays("int16", hnp.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=6)), max_size=5))
def test_set_value_replaces_shape_and_content(values):
    d = synk.data(dtype="int32", ndim=2)
    for value in values:
        d.set_value(value)
        np.testing.assert_array_equal(d.data, value)
        assert (d.shape, d.dtype, d.ndim) == (value.shape, "int32", 2)
        np.testing.assert_array_equal(read_by_ranks(d), value)


def test_set_value_keeps_memory_when_shrinking():
    d = synk.data(np.arange(100.0))
    d.set_value(np.arange(3.0))
    assert (d.size, d.alloc_size) == (3, 100)
    before = d.data
    d.set_value(np.arange(100.0) * 2)
    assert np.shares_memory(before, d.data)


def test_set_value_accepts_its_own_content():
    d = synk.data(np.arange(6.0))
    d.set_value(d[::-1])
    assert d.data.tolist() == [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    d.set_value(d[1:4])
    assert d.data.tolist() == [4.0, 3.0, 2.0]
    d.set_value(np.repeat(d, 100))  # new memory
    assert d.data[::100].tolist() == [4.0, 3.0, 2.0]
    d.set_value(d)
    assert len(d) == 300


def test_set_value_growth_keeps_earlier_views():
    d = synk.data(np.arange(3.0))
    old = d.data
    d.set_value(np.zeros(10_000))
    gc.collect()
    read_by_ranks(d)
    assert old.tolist() == [0.0, 1.0, 2.0]


# -- set_length and set_shape --------------------------------------------------------------------------------


@given(st.data())
def test_data_resizing_matches_a_numpy_model(draw):
    ndim = draw.draw(st.integers(1, 3))
    dtype = draw.draw(st.sampled_from(["uint8", "float64"]))
    some_shapes = hnp.array_shapes(min_dims=ndim, max_dims=ndim, min_side=0, max_side=5)
    d, model = synk.data(dtype=dtype, ndim=ndim), np.zeros((0,) * ndim, dtype)
    for _ in range(draw.draw(st.integers(1, 8))):
        action = draw.draw(
            st.sampled_from(["set_length", "set_length", "set_shape", "write", "set_value", "free_memory"])
        )
        oversize = draw.draw(st.sampled_from([1, 1.0, 1.5, 2, np.float32(1.25)]))
        if action == "write":
            d[...] = model[...] = draw.draw(st.integers(1, 255))
        elif action == "set_value":
            model = draw.draw(hnp.arrays(dtype, some_shapes))
            d.set_value(model, oversize=oversize)
        elif action == "free_memory":
            d.free_memory()
            model = np.zeros((0,) * ndim, dtype)
        else:
            if action == "set_length":
                new = np.zeros((draw.draw(st.integers(0, 8)), *model.shape[1:]), dtype)
                d.set_length(len(new), oversize)
            else:
                new = np.zeros(draw.draw(some_shapes), dtype)
                d.set_shape(new.shape, oversize)
            if new.shape[1:] == model.shape[1:]:
                n_kept = min(len(new), len(model))
                new[:n_kept] = model[:n_kept]
            model = new
        assert (d.shape, d.dtype, d.size) == (model.shape, model.dtype, model.size)
        assert d.alloc_size >= d.size
        np.testing.assert_array_equal(d.data, model)
    np.testing.assert_array_equal(read_by_ranks(d), model)


def test_set_length_keeps_rows_on_all_ranks():
    d = synk.data(np.arange(10.0).reshape(5, 2))
    for length in (6, 1000, 100_000):
        d.set_length(length)
        values = read_by_ranks(d)
        assert values.shape == (length, 2)
        np.testing.assert_array_equal(values[:5], np.arange(10.0).reshape(5, 2))
        assert not values[5:].any()


def test_set_length_oversize_allocates_ahead():
    d = synk.data(np.arange(10.0), oversize=1.5)
    assert (d.size, d.alloc_size) == (10, 15)
    before = d.data
    d.set_length(15)
    assert np.shares_memory(before, d.data)
    d.set_length(16, oversize=2)
    assert (d.size, d.alloc_size) == (16, 32)
    d.set_value(np.ones(33), oversize=1.01)
    assert d.alloc_size == 34  # rounded up
    assert d.data.tolist() == [1.0] * 33


def test_set_shape_accepts_scalars():
    d = synk.data(3.0)
    d.set_shape(())
    assert d[()] == 3.0
    with raises(ValueError, "shape"):
        d.set_shape((1,))


# -- its memory ----------------------------------------------------------------------------------------------


def test_free_memory_leaves_an_array_that_can_grow():
    d = synk.data(np.arange(6.0).reshape(3, 2), name="x")
    old = d.data
    d.free_memory()
    assert (d.shape, d.size, d.alloc_size) == ((0, 0), 0, 0)
    assert old.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert read_by_ranks(d).shape == (0, 0)
    d.free_memory()  # a repeated call does nothing
    d.set_value(np.ones((4, 2)))
    assert read_by_ranks(d).tolist() == [[1.0, 1.0]] * 4


def test_free_memory_sets_a_scalar_to_zero():
    x = T.dscalar("x")
    f = synk.function([], (x, "sum"), bcast_inputs=[x])
    d = synk.data(3.0)
    d.free_memory()
    assert d[()] == 0.0
    assert f(d) == 0.0
    d[()] = 2.0
    assert f(d) == 4.0
    d.free_memory()
    d[()] = 5.0
    assert f(d) == 10.0


@pytest.mark.parametrize("size", [1 << 50, 1 << 62, 1 << 70])
def test_data_raises_memory_error_and_keeps_its_value(size):
    d = synk.data(np.arange(3.0))
    for attempt in (
        lambda: synk.data(shape=(size,), dtype="float64"),
        lambda: d.set_length(size),
        lambda: d.set_shape((size,), oversize=1.5),
    ):
        with pytest.raises(MemoryError, match="bytes of shared memory, .* bytes are free"):
            attempt()
        assert d.data.tolist() == [0.0, 1.0, 2.0]
    assert read_by_ranks(d).tolist() == [0.0, 1.0, 2.0]
    assert read_by_ranks(synk.data(np.ones(5))).tolist() == [1.0] * 5


@pytest.mark.parametrize("ndim", [100, 10**9, 1 << 63])
def test_data_refuses_more_dimensions_than_numpy(ndim):
    with pytest.raises(ValueError, match=f"^ndim: expected a number of dimensions that NumPy supports, got {ndim}"):
        synk.data(dtype="float64", ndim=ndim)


def test_hundreds_of_data_are_announced_to_ranks():
    many = [synk.data(np.full(3, float(i))) for i in range(300)]
    for i in (0, 1, 63, 64, 65, 66, 150, 298, 299):
        assert read_by_ranks(many[i]).tolist() == [float(i)] * 3


def test_dropped_data_leave_no_files_or_mappings():
    d = synk.data(np.arange(5.0))
    read_by_ranks(d)
    gc.collect()
    read_by_ranks(d)
    before = count_files_and_mappings()
    assert len(before) == 2
    assert before[0][1] >= 1, "the mappings of shared memory are not recognized"
    for i in range(300):
        passing = synk.data(np.full(50, float(i)))
        if i % 10 == 0:
            read_by_ranks(passing)
    del passing
    gc.collect()
    read_by_ranks(d)  # also sends the list of dropped objects
    assert count_files_and_mappings() == before


def test_growing_data_leave_no_files_or_mappings():
    d = synk.data(np.arange(5.0))
    read_by_ranks(d)
    before = count_files_and_mappings()
    for i in range(100):
        d.set_length(6 + i)
        if i % 7 == 0:
            read_by_ranks(d)
    read_by_ranks(d)
    read_by_ranks(d)
    assert count_files_and_mappings() == before


def test_free_memory_unmaps_on_workers():
    d = synk.data(np.arange(5.0))
    read_by_ranks(d)
    before = count_files_and_mappings()
    d.free_memory()
    after = count_files_and_mappings()
    assert [mapped for _, mapped in after] == [mapped - 1 for _, mapped in before]


# -- close and fork ------------------------------------------------------------------------------------------

USES = {
    "data": operator.attrgetter("data"),
    "[]": lambda d: d[0],
    "[] =": lambda d: operator.setitem(d, 0, 1.0),
    "asarray": np.asarray,
    "iter": list,
    "set_value": lambda d: d.set_value(np.ones(2)),
    "set_length": lambda d: d.set_length(2),
    "set_shape": lambda d: d.set_shape((2,)),
    "call": read_by_ranks,
}


@pytest.mark.parametrize("again", [False, True])
def test_data_raises_after_close_and_new_fork(forked, again):
    d = synk.data(np.arange(3.0))
    read_by_ranks(d)
    synk.close()
    if again:
        fork_ranks(2)
    for use, call in USES.items():
        error, message = RuntimeError, "freed when the ranks were closed"
        if use == "call":
            error, message = (ValueError, "earlier session") if again else (RuntimeError, "fork")
        with pytest.raises(error, match=message):
            call(d)


def test_data_repr_works_after_close(forked):
    d = synk.data(np.arange(3.0), name="x")
    old = d.data
    synk.close()
    assert (d.shape, len(d), d.size, d.alloc_size, d.ndim, d.dtype, d.name) == ((0,), 0, 0, 0, 1, "float64", "x")
    assert repr(d) == "<synkhronos.Data 'x': float64, shape (0,)>"
    d.free_memory()
    assert old.tolist() == [0.0, 1.0, 2.0]  # a reference to the array keeps its memory


def test_condition_data_needs_no_ranks(forked):
    d = synk.data(np.arange(3.0))
    synk.close()
    assert d.condition_data([1, 2]).tolist() == [1.0, 2.0]


def test_data_of_closed_ranks_can_be_dropped(forked):
    old = [synk.data(np.arange(3.0)) for _ in range(5)]
    synk.close()
    fork_ranks(2)
    new = [synk.data(np.full(3, float(i))) for i in range(5)]
    del old
    gc.collect()
    for i, d in enumerate(new):
        assert read_by_ranks(d).tolist() == [float(i)] * 3


def test_collectives_refuse_data_of_closed_ranks(forked):
    from library import shared

    d = synk.data(np.arange(2.0))
    synk.close()
    fork_ranks(2)
    s = shared(np.zeros(2), "s")
    synk.function([], [], updates=[(s, s + 1)])
    with raises(ValueError, "values"):
        synk.broadcast(s, d)
    assert synk.gather(s).tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.skipif(XLA, reason="the same on any device, and twenty workers take long to start anew")
def test_hundreds_of_data_reach_many_ranks(forked):
    # Each file descriptor in transit counts against a limit of the kernel, once for every rank.
    synk.close()
    synk.fork(20, use_gpu=False)
    many = [synk.data(np.full(20, float(i))) for i in range(200)]
    assert read_by_ranks(many[130]).tolist() == [130.0] * 20


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_data_copy_has_its_own_memory(two_ranks, copied):
    original = synk.data([1.0, 2.0], name="x", minibatch=True)
    duplicate = copied(original)
    duplicate[0] = 5
    original.free_memory()
    assert duplicate.data.tolist() == [5.0, 2.0]
    assert (duplicate.name, duplicate.minibatch) == ("x", True)


def test_data_refuses_pickling(two_ranks):
    with raises(TypeError):
        pickle.dumps(synk.data([1.0]))


@pytest.mark.parametrize(("cls", "name"), [(MemoryTable, "release_when_deleted"), (SegmentTable, "drop")])
def test_interrupted_growth_leaves_the_array_that_ranks_read(monkeypatch, cls, name):
    x = T.dvector("x")
    f = synk.function([x], (x.sum(), "sum"))
    d, method = synk.data(np.arange(3.0)), getattr(cls, name)

    def call_and_interrupt(*arguments):
        method(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(cls, name, call_and_interrupt)
    n_segments = len(ranks.get_session().rank.segments)
    with pytest.raises(KeyboardInterrupt):
        d.set_length(5000)
    monkeypatch.undo()
    assert len(ranks.get_session().rank.segments) == n_segments
    assert f(d) == d.data.sum() == 3
    d.set_value(np.full(3, 2.0))
    assert f(d) == 6


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.free_memory(),
        lambda d: d.set_length(7),
        lambda d: [d.set_value(np.ones(n)) for n in range(5, 205)],  # many segments are unsent: it posts a command
    ],
)
def test_fork_of_the_master_cannot_change_data(change):
    d, x = synk.data(np.ones(4)), T.dvector("x")
    f = synk.function([x], (x.sum(), "sum"))
    assert f(d) == 4
    if not (pid := os.fork()):
        try:
            change(d)
        except RuntimeError as error:
            os._exit(0 if "copy" in str(error) and d[:].sum() == 4 else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with time_limit():
        assert f(d) == 4
