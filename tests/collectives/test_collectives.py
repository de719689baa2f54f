"""Collectives of shared variables: results, which equal NumPy's in rank order, accepted arguments, and refusals."""

import functools
import itertools
import signal

import numpy as np
import pytest
from batches import draw_batch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from library import DEVICE, NAME, XLA, fork_ranks, function, is_array, limit_examples, shared
from library import tensor as T
from messages import raises

import synkhronos as synk
from synkhronos.data_objects.rows import get_share_slice
from synkhronos.graph_libraries import get_library
from synkhronos.ranks.command_barriers import CommandBarriers
from synkhronos.ranks.control_memory import SCRATCH_NBYTES

INTEGERS = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float16", "float32", "float64", "complex64", "complex128"]
DTYPES = INTEGERS + FLOATS
UFUNCS = {"avg": np.add, "sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


def list_reducible_dtypes(op):
    """Return the dtypes that an op reduces."""
    return {"avg": tuple(FLOATS), "sum": tuple(DTYPES[1:])}.get(op, tuple(DTYPES))


pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # inf - inf

#: Numbers of ranks, and the master's rank: the last, or one in the middle.  In other tests it is the first.  3 ranks cover 2.
RANKS = {
    "host": [(3, 1)] if NAME == "theano" else [(1, 0), (3, 1)],
    "jax": [(3, 1)],
    "gpu": [(1, 0), (2, 0), (3, 1), (4, 3)],
}[DEVICE]


@pytest.fixture(scope="module", params=RANKS, ids=lambda p: f"{p[0]}ranks-master{p[1]}")
def n(request):
    """Fork ranks, and yield their number."""
    size, master = request.param
    synk.close()
    fork_ranks(size, master_rank=master)
    _variables.clear()
    yield size
    synk.close()


@pytest.fixture
def master(request, n):
    """Yield the master's rank."""
    return request.node.callspec.params["n"][1]


_variables = {}


def get_variable(dtype="float64", ndim=1, number=0):
    """Return a shared variable that all ranks have; it is cached, as compiling takes longer than testing."""
    key = str(dtype), ndim, number
    if key not in _variables:
        s = shared(np.zeros((0,) * ndim, dtype), f"s{number}")
        # The function sends the variable to the ranks; it need not be called.
        _variables[key] = s, synk.function([], [], updates=[(s, s)])
        if XLA:
            synk.distribute()  # moves the variable to the device
    return _variables[key][0]


def set_values(s, values):
    """Set a different value on each rank."""
    for r, value in enumerate(values):
        synk.set_value(r, s, value)


def make_on_ranks(values):
    """Return a shared variable with a value on each rank."""
    s = get_variable(values[0].dtype, values[0].ndim)
    set_values(s, values)
    return s


def get_values(s, n):
    """Return the value of `s` on each rank."""
    return [synk.get_value(r, s) for r in range(n)]


def reduce_in_order(values, op):
    """Return the reduction in rank order, in the values' dtype."""
    total = functools.reduce(UFUNCS[op], values)
    return np.asarray(total / len(values) if op == "avg" else total, values[0].dtype)


def assert_same(actual, expected):
    """Check dtype, shape and elements; NaN equals NaN."""
    assert is_array(actual)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    # NCCL adds in another order, and NumPy divides complex scalars differently from arrays.
    if expected.dtype.kind == "c" or DEVICE == "gpu" and expected.dtype.kind == "f":
        accuracy = 16 * float(np.finfo(expected.dtype).eps)
        np.testing.assert_allclose(actual, expected, rtol=accuracy, atol=accuracy)
    else:
        np.testing.assert_array_equal(actual, expected)


def assert_values(s, expected):
    """Check the value of `s` on each rank."""
    for actual, value in zip(get_values(s, len(expected)), expected, strict=True):
        assert_same(actual, value)


shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
layouts = st.sampled_from(["contiguous", "reversed", "transposed", "repeated"])


def change_layout(array, layout):
    """Return an equal array with another memory layout."""
    if layout == "transposed":
        return array.T.copy().T
    if layout == "reversed" and array.ndim:
        return array[::-1].copy()[::-1]
    return np.repeat(array, 2, axis=-1)[..., ::2] if layout == "repeated" and array.ndim else array


def choose_elements(dtype):
    """Return a strategy of numbers with exact products for complex dtypes and for floats on GPUs, else None."""
    if np.dtype(dtype).kind == "c":  # rounding of large products depends on the processor
        return st.builds(complex, st.integers(-5, 5), st.integers(-5, 5))
    if DEVICE == "gpu" and np.dtype(dtype).kind == "f":  # NCCL treats infinities differently
        return st.builds(float, st.integers(-5, 5))
    return None


@st.composite
def draw_rank_values(draw, n, dtypes=tuple(DTYPES), same_shape=True, min_dims=0):
    """Draw a dtype and a value for each rank."""
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(hnp.array_shapes(min_dims=min_dims, max_dims=4, min_side=0, max_side=4))
    values = []
    for _ in range(n):
        if not same_shape:
            shape = (draw(st.integers(0, 4)), *shape[1:])
        values.append(
            draw(st.builds(change_layout, hnp.arrays(dtype, shape, elements=choose_elements(dtype)), layouts))
        )
    return values


def wrap_value(value, form):
    return synk.data(value) if form == "data" else value


input_forms = st.sampled_from(["array", "data"])


# -- broadcast -----------------------------------------------------------------------------------------------


@given(st.data(), st.sampled_from([None, "array", "data"]))
@limit_examples(25)
def test_broadcast_sends_a_given_value_or_the_masters(n, draw, form):
    (value,) = draw.draw(draw_rank_values(1))
    s = get_variable(value.dtype, value.ndim)
    if form is None:
        s.set_value(value)
        synk.broadcast(s)
    else:
        synk.broadcast(s, wrap_value(value, form))
    assert_values(s, [value] * n)


def test_broadcast_accepts_lists(n):
    a, b, c = get_variable("int8", 0), get_variable("float32", 1), get_variable("float64", 2)
    values = [np.array(3, "int8"), np.arange(4, dtype="float32"), np.ones((2, 2))]
    synk.broadcast([a, b, c], [values[0], synk.data(values[1]), values[2].tolist()])
    for s, value in zip((a, b, c), values, strict=True):
        assert_values(s, [value] * n)
        s.set_value(np.zeros_like(value))
    synk.broadcast((a, b, c))
    for s, value in zip((a, b, c), values, strict=True):
        assert_values(s, [np.zeros_like(value)] * n)


def test_broadcast_and_set_value_cast_like_the_variable(n):
    s = get_variable("float64", 1)
    synk.broadcast(s, [1, 2, 3])
    assert_values(s, [np.array([1.0, 2.0, 3.0])] * n)
    synk.broadcast(s, np.array([4, 5], "int8"))
    assert_values(s, [np.array([4.0, 5.0])] * n)


def test_broadcast_gives_each_rank_a_copy(n):
    s, value = get_variable(), np.arange(3.0)
    d = synk.data(value)
    synk.broadcast(s, d)
    d[...] = 9.0
    assert_values(s, [np.arange(3.0)] * n)
    synk.broadcast(s, value)
    value[...] = 9.0
    assert_values(s, [np.arange(3.0)] * n)


# -- scatter -------------------------------------------------------------------------------------------------


@given(st.data())
@limit_examples(15)
def test_scatter_splits_rows_as_evenly_as_possible(n, draw):
    (value,) = draw.draw(draw_rank_values(1, min_dims=1))
    batch, index = draw.draw(draw_batch(len(value)))
    s = get_variable(value.dtype, value.ndim)
    synk.scatter(s, wrap_value(value, draw.draw(input_forms)), batch=batch)
    assert_values(s, np.array_split(value[index], n))


def test_scatter_of_a_list_applies_batch_to_each(n):
    a, b = get_variable("int32", 1), get_variable("float64", 2)
    values = [np.arange(9, dtype="int32"), np.arange(18.0).reshape(9, 2)]
    synk.scatter([a, b], values, batch=[8, 0, 3, 3, 1])
    for s, value in zip((a, b), values, strict=True):
        assert_values(s, np.array_split(value[[8, 0, 3, 3, 1]], n))


# -- set_value and get_value ---------------------------------------------------------------------------------


@given(st.data())
@limit_examples(15)
def test_set_value_changes_one_rank(n, draw):
    before = draw.draw(draw_rank_values(n))
    s = get_variable(before[0].dtype, before[0].ndim)
    set_values(s, before)
    (value,) = draw.draw(draw_rank_values(1, (str(before[0].dtype),)).filter(lambda v: v[0].ndim == before[0].ndim))
    rank = draw.draw(st.integers(0, n - 1))
    if value.ndim:
        batch, index = draw.draw(draw_batch(len(value)))
        synk.set_value(rank, s, wrap_value(value, draw.draw(input_forms)), batch=batch)
        before[rank] = value[index]
    else:
        synk.set_value(np.int64(rank), s, wrap_value(value, draw.draw(input_forms)))
        before[rank] = value
    assert_values(s, before)


def test_set_value_and_get_value_accept_lists(n):
    a, b = get_variable("int8", 0), get_variable("float64", 2)
    for r in range(n):
        synk.set_value(r, (a, b), [np.array(r, "int8"), np.full((r, 2), float(r))])
    for r in range(n):
        first, second = synk.get_value(r, [a, b])
        assert_same(first, np.array(r, "int8"))
        assert_same(second, np.full((r, 2), float(r)))


def test_get_value_and_gather_return_copies(n, master):
    s = get_variable()
    set_values(s, [np.full(2, float(r)) for r in range(n)])
    synk.get_value(master, s)[...] = 9.0
    for result in (synk.gather(s), synk.gather(s, nd_up=0), synk.reduce(s, "sum", in_place=False)):
        if DEVICE == "gpu" and XLA:
            assert not isinstance(result, np.ndarray)  # JAX arrays cannot be written
        else:
            result[...] = 9.0
    assert_values(s, [np.full(2, float(r)) for r in range(n)])


def test_collectives_use_the_masters_variable_itself(n, master):
    s = get_variable()
    set_values(s, [np.full(2, float(r)) for r in range(n)])
    assert s.get_value().tolist() == [float(master)] * 2
    s.set_value(np.array([7.0]))
    assert synk.get_value(master, s).tolist() == [7.0]
    assert synk.get_lengths(s) == [1 if r == master else 2 for r in range(n)]


# -- gather --------------------------------------------------------------------------------------------------


@given(st.data())
@limit_examples(20)
def test_gather_stacks_or_concatenates(n, draw):
    values = draw.draw(draw_rank_values(n) | draw_rank_values(n, same_shape=False, min_dims=1))
    s = make_on_ranks(values)
    gathered = synk.gather(s)
    if len({value.shape for value in values}) == 1:
        assert_same(gathered, np.stack(values))
    else:
        assert isinstance(gathered, list)
        for actual, expected in zip(gathered, values, strict=True):
            assert_same(actual, expected)
    if values[0].ndim:
        assert_same(synk.gather(s, nd_up=0), np.concatenate(values))
        assert synk.get_lengths(s) == [len(value) for value in values]
    assert synk.get_shapes(s) == [value.shape for value in values]
    assert_values(s, values)


def test_gather_stacks_scalars_but_cannot_concatenate_them(n):
    s = get_variable("int32", 0)
    set_values(s, [np.array(r, "int32") for r in range(n)])
    assert_same(synk.gather(s), np.arange(n, dtype="int32"))
    assert [value.tolist() for value in synk.gather(s, nd_up=0)] == list(range(n))


def test_gather_returns_a_list_if_shapes_differ_beyond_axis_0(n):
    s = get_variable(ndim=2)
    values = [np.full((2, r + 1), float(r)) for r in range(n)]
    set_values(s, values)
    for gathered in (synk.gather(s, nd_up=0), synk.gather(s, nd_up=1)):
        assert isinstance(gathered, list) if n > 1 else is_array(gathered)
        if n > 1:
            for actual, expected in zip(gathered, values, strict=True):
                assert_same(actual, expected)


def test_gather_accepts_lists(n):
    a, b = get_variable("int8", 0), get_variable("float64", 1)
    set_values(a, [np.array(r, "int8") for r in range(n)])
    set_values(b, [np.full(r, float(r)) for r in range(n)])
    first, second = synk.gather([a, b], nd_up=0)
    assert [value.tolist() for value in first] == list(range(n))
    assert second.tolist() == [float(r) for r in range(n) for _ in range(r)]
    assert isinstance(synk.gather([a]), list)


# -- all_gather ----------------------------------------------------------------------------------------------


@given(st.data())
@limit_examples(15)
def test_all_gather_concatenates_on_every_rank(n, draw):
    values = draw.draw(draw_rank_values(n, same_shape=False, min_dims=1))
    s = make_on_ranks(values)
    synk.all_gather(s)
    assert_values(s, [np.concatenate(values)] * n)


def test_all_gather_accepts_lists(n):
    a, b = get_variable("int8", 1), get_variable("float64", 2)
    set_values(a, [np.full(r, r, "int8") for r in range(n)])
    set_values(b, [np.full((1, 2), float(r)) for r in range(n)])
    synk.all_gather([a, b])
    assert_values(a, [np.repeat(np.arange(n), np.arange(n)).astype("int8")] * n)
    assert_values(b, [np.repeat(np.arange(float(n)), 2).reshape(n, 2)] * n)


# -- reduce_scatter ------------------------------------------------------------------------------------------


@given(st.data())
@limit_examples(15)
def test_reduce_scatter_splits_the_all_reduce_result(n, draw):
    op = draw.draw(st.sampled_from(list(UFUNCS)))
    values = draw.draw(draw_rank_values(n, list_reducible_dtypes(op), min_dims=1))
    s = make_on_ranks(values)
    synk.reduce_scatter(s, op)
    whole = reduce_in_order(values, op)
    assert_values(s, [whole[get_share_slice(len(whole), n, r)] for r in range(n)])
    synk.all_gather(s)
    assert_values(s, [whole] * n)


@pytest.mark.parametrize("n_rows", [1, 5, 3 * SCRATCH_NBYTES // 8 + 1])
def test_reduce_scatter_of_several_chunks_equals_numpy(n, n_rows):
    values = [np.arange(2.0 * n_rows).reshape(n_rows, 2) * (r + 1) for r in range(n)]
    s = get_variable("float64", 2)
    set_values(s, values)
    synk.reduce_scatter(s, "sum")
    whole = reduce_in_order(values, "sum")
    assert_values(s, [whole[get_share_slice(n_rows, n, r)] for r in range(n)])


# -- reduce and all_reduce -----------------------------------------------------------------------------------


@given(st.data())
@limit_examples(25)
def test_reductions_equal_numpy(n, master, draw):
    op = draw.draw(st.sampled_from(list(UFUNCS)))
    values = draw.draw(draw_rank_values(n, list_reducible_dtypes(op)))
    s, reduced = make_on_ranks(values), reduce_in_order(values, op)
    assert_same(synk.reduce(s, op, in_place=False), reduced)
    assert_values(s, values)
    assert synk.reduce(s, op) is None
    assert_values(s, [reduced if r == master else value for r, value in enumerate(values)])
    set_values(s, values)
    synk.all_reduce(s, op)
    after = get_values(s, n)
    for value in after:
        assert_same(value, reduced)
    assert len({value.tobytes() for value in after}) == 1


def test_all_reduce_averages_by_default(n, master):
    s = get_variable("float32", 1)
    set_values(s, [np.full(2, r, "float32") for r in range(n)])
    average = np.full(2, (n - 1) / 2, "float32")
    assert_same(synk.reduce(s, in_place=False), average)
    synk.reduce(s)
    assert_same(s.get_value(), average)
    set_values(s, [np.full(2, r, "float32") for r in range(n)])
    synk.all_reduce(s)
    assert_values(s, [average] * n)


def test_reductions_accept_lists(n):
    a, b, c = get_variable("int16", 0), get_variable("float64", 1), get_variable("bool", 2)
    for r in range(n):
        synk.set_value(r, [a, b, c], [np.array(r + 1, "int16"), np.full(3, 2.0), np.full((1, 1), r == 0)])
    product, two_to_n, sum_of_c = synk.reduce([a, b, c], "prod", in_place=False)
    assert product == np.prod(np.arange(n) + 1)
    assert two_to_n.tolist() == [2.0**n] * 3
    assert sum_of_c.tolist() == [[n == 1]]
    assert synk.reduce((a, b, c), "max") is None
    synk.all_reduce((a, b, c), "max")
    assert_values(a, [np.array(n, "int16")] * n)
    assert_values(c, [np.array([[True]])] * n)


# -- get_lengths and get_shapes ------------------------------------------------------------------------------


def test_get_lengths_and_get_shapes_accept_lists(n):
    a, b = get_variable("int8", 0), get_variable("float64", 2)
    set_values(a, [np.array(0, "int8")] * n)
    set_values(b, [np.zeros((r, 3)) for r in range(n)])
    assert synk.get_shapes((a, b)) == [[()] * n, [(r, 3) for r in range(n)]]
    assert synk.get_lengths([b]) == [list(range(n))]


# -- arrays longer than one chunk ---------------------------------------------------------------------------

#: Bytes near multiples of the scratch memory; no size divides evenly among all ranks.
SIZES = [
    SCRATCH_NBYTES - 8,
    SCRATCH_NBYTES,
    SCRATCH_NBYTES + 8,
    2 * SCRATCH_NBYTES,
    2 * SCRATCH_NBYTES + 24,
    3 * SCRATCH_NBYTES - 8,
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["uint8", "float64"])
def test_collectives_stream_large_arrays(n, master, size, dtype):
    s = get_variable(dtype)
    rng = np.random.default_rng(size)
    odd = 5 if dtype == "uint8" else 0
    values = [rng.integers(0, 100, size // np.dtype(dtype).itemsize - odd).astype(dtype) for _ in range(n)]
    set_values(s, values)
    assert_same(synk.gather(s), np.stack(values))
    assert_same(synk.reduce(s, "sum", in_place=False), reduce_in_order(values, "sum"))
    synk.all_reduce(s, "max")
    assert_values(s, [reduce_in_order(values, "max")] * n)
    s.set_value(values[master])
    synk.broadcast(s)
    assert_values(s, [values[master]] * n)
    synk.scatter(s, values[0])
    synk.all_gather(s)
    assert_values(s, [values[0]] * n)


def test_gather_accepts_different_numbers_of_chunks(n):
    s = get_variable("uint8")
    values = [np.full(r * SCRATCH_NBYTES + 3 * r, r, "uint8") for r in range(n)]
    set_values(s, values)
    assert_same(synk.gather(s, nd_up=0), np.concatenate(values))
    synk.all_gather(s)
    assert_values(s, [np.concatenate(values)] * n)


@pytest.mark.parametrize("collective", ["broadcast", "gather", "all_gather", "reduce", "all_reduce", "reduce_scatter"])
@pytest.mark.slow
def test_collectives_stream_a_list_one_by_one(n, master, collective):
    # A fast rank writes the second array while others still read the first: they must not read the second one's bytes.
    # Without strict alternation of the chunks, some collided every few rounds.
    lengths = (100_000, 131_072, 50_000, 77_777, 131_073)
    many = [get_variable("float64", 1, number) for number in range(len(lengths))]
    for turn in range(8):
        for r in range(n):
            synk.set_value(r, many, [np.full(size, turn * 100.0 + i * 10 + r) for i, size in enumerate(lengths)])
        first = [turn * 100.0 + i * 10 for i in range(len(lengths))]
        if collective == "gather":
            for value, base in zip(synk.gather(many), first, strict=True):
                assert (value == base + np.arange(n)[:, None]).all()
            continue
        if collective == "reduce":
            for value, base in zip(synk.reduce(many, "max", in_place=False), first, strict=True):
                assert (value == base + n - 1).all()
            continue
        getattr(synk, collective)(many, *(["max"] if collective in ("all_reduce", "reduce_scatter") else []))
        expected = {
            "broadcast": lambda size, base: base + master,
            "all_gather": lambda size, base: base + np.repeat(np.arange(n), size),
            "all_reduce": lambda size, base: base + n - 1,
            "reduce_scatter": lambda size, base: base + n - 1,
        }[collective]
        for s, size, base in zip(many, lengths, first, strict=True):
            for value in get_values(s, n):
                assert (value == expected(size, base)).all()


@pytest.mark.slow
def test_collectives_accept_lists_longer_than_the_mailbox(n):
    many = [shared(np.full(i % 3, float(i)), f"s{i}") for i in range(2500)]
    declared = synk.function([], [], updates=[(s, s) for s in many])
    synk.set_value(n - 1, many, [np.full(i % 3, -float(i)) for i in range(len(many))])
    assert synk.get_shapes(many) == [[(i % 3,)] * n for i in range(len(many))]
    synk.all_reduce(many, "min")
    for i, value in enumerate(synk.gather(many)):
        assert value.tolist() == [[-float(i)] * (i % 3)] * n
    del declared


# -- arrays that are not contiguous in their containers ------------------------------------------------------


def test_collectives_accept_transposed_arrays(n, master):
    """The variable's array is a transposed view on every rank."""
    s = get_variable(ndim=2)
    transpose = synk.function([], [], updates=[(s, s.T)])
    values = [np.arange(6.0).reshape(2, 3).T + 10 * r for r in range(n)]

    def set_transposed():
        set_values(s, [value.T for value in values])
        transpose()

    set_transposed()
    assert_same(synk.gather(s), np.stack(values))
    assert_values(s, values)
    for op in UFUNCS:
        reduced = reduce_in_order(values, op)
        assert_same(synk.reduce(s, op, in_place=False), reduced)
        synk.all_reduce(s, op)
        assert_values(s, [reduced] * n)
        set_transposed()
    synk.reduce(s, "sum")
    assert_values(s, [reduce_in_order(values, "sum") if r == master else value for r, value in enumerate(values)])
    set_transposed()
    synk.broadcast(s)
    assert_values(s, [values[master]] * n)


def test_all_reduce_of_a_read_only_array_makes_a_copy(n, master):
    # As when the user passes an array that belongs to other code.
    s, value = get_variable(ndim=2), np.broadcast_to(np.arange(3.0), (2, 3))
    set_values(s, [value + r for r in range(n)])
    s.set_value(value, borrow=True)
    values = [value if r == master else value + r for r in range(n)]
    synk.all_reduce(s, "sum")
    assert_values(s, [reduce_in_order(values, "sum")] * n)
    assert value.tolist() == [[0.0, 1.0, 2.0]] * 2


# -- shapes that differ --------------------------------------------------------------------------------------


def describe_shapes(values):
    return ", ".join(f"rank {r} has {value.shape}" for r, value in enumerate(values))


@pytest.mark.parametrize("collective", ["reduce", "all_reduce"])
def test_reductions_refuse_different_shapes(n, collective):
    if n == 1:
        pytest.skip("needs two ranks")
    fine, s = get_variable("float64", 1, 1), get_variable()
    values = [np.arange(float(r + 1)) for r in range(n)]
    set_values(s, values)
    set_values(fine, [np.ones(2)] * n)
    reduce = getattr(synk, collective)
    for variables in (s, [fine, s]):
        with pytest.raises(ValueError) as caught:
            reduce(variables, "sum")
        assert str(caught.value).startswith(f"{collective}: 's0' needs the same shape on all ranks, but ")
        assert describe_shapes(values) in str(caught.value)
    if collective == "reduce":
        with raises(ValueError):
            synk.reduce(s, "sum", in_place=False)
    assert_values(s, values)
    assert_values(fine, [np.ones(2)] * n)
    synk.all_reduce(fine, "sum")  # the ranks still communicate
    assert_values(fine, [np.full(2, float(n))] * n)


def test_reductions_check_shapes_again_after_a_change(n):
    if n == 1:
        pytest.skip("needs two ranks")
    s, other = get_variable(), get_variable("float64", 1, 1)
    set_values(s, [np.ones(2)] * n)
    set_values(other, [np.ones(1)] * n)
    for _ in range(3):
        synk.all_reduce(s, "sum")
        synk.all_reduce([s, other], "max")
    assert_values(s, [np.full(2, float(n**3))] * n)
    for rank in (0, n - 1):
        before = synk.get_value(rank, s)
        synk.set_value(rank, s, np.ones(3))
        for variables in (s, [s, other]):
            for _ in range(2):
                with pytest.raises(
                    ValueError, match=rf"needs the same shape on all ranks, but .*rank {rank} has \(3,\)"
                ):
                    synk.all_reduce(variables, "sum")
        synk.set_value(rank, s, before)
        synk.all_reduce(s, "max")
        assert_values(s, [np.full(2, float(n**3))] * n)
    # A change to the same shape on all ranks is accepted.
    set_values(s, [np.ones((4,))] * n)
    synk.all_reduce(s, "sum")
    assert_values(s, [np.full(4, float(n))] * n)


def store_float32(context, variable):
    """Put an array of another dtype into the container of rank 0's copy, which ``set_value`` would refuse."""
    if context.number == 0:
        variable.container.storage[0] = np.arange(3, dtype="float32")


@pytest.mark.parametrize("nccl", [True, False])
def test_collectives_refuse_different_dtypes(n, nccl):
    if n == 1:
        pytest.skip("needs two ranks")
    s, values = get_variable(), [np.arange(3.0)] * n
    set_values(s, values)
    synk.all_reduce(s, "max", nccl=nccl)
    synk.run(store_float32, s)
    for collective in ("reduce", "all_reduce", "reduce_scatter"):
        for _ in range(2):
            with pytest.raises(
                ValueError, match=rf"^{collective}: 's0' needs the same dtype on all ranks, but rank 0 has"
            ):
                getattr(synk, collective)(s, "max", nccl=nccl)
    with pytest.raises(ValueError, match=r"rank 0 has float32\(3,\), rank 1 has float64\(3,\)"):
        synk.all_gather(s, nccl=nccl)
    for nd_up in (0, 1):
        gathered = synk.gather(s, nd_up, nccl=nccl)
        assert [np.asarray(value).dtype.name for value in gathered] == ["float32", *["float64"] * (n - 1)]
        np.testing.assert_array_equal(gathered, values)
    synk.broadcast(s, nccl=nccl)
    assert_values(s, values)


def test_reductions_refuse_equal_sizes_of_different_shapes(n):
    if n == 1:
        pytest.skip("needs two ranks")
    s = get_variable(ndim=2)
    values = [np.ones((2, 3) if r else (3, 2)) for r in range(n)]
    set_values(s, values)
    with raises(ValueError):
        synk.all_reduce(s, "sum")
    assert_values(s, values)


def test_all_gather_refuses_mismatched_shapes(n):
    if n == 1:
        pytest.skip("needs two ranks")
    fine, s = get_variable("float64", 1), get_variable(ndim=2)
    values = [np.ones((2, r + 1)) for r in range(n)]
    set_values(s, values)
    set_values(fine, [np.ones(2)] * n)
    with pytest.raises(ValueError) as caught:
        synk.all_gather([fine, s])
    assert str(caught.value) == f"all_gather: 's0' can't be concatenated along axis 0: {describe_shapes(values)}"
    assert_values(s, values)
    assert_values(fine, [np.ones(2)] * n)


def test_reduce_scatter_refuses_indivisible_lengths(n):
    fine, number = get_variable("float64", 1), get_variable("float64", 0)
    set_values(fine, [np.ones(2)] * n)
    with raises(ValueError, "reduce_scatter"):
        synk.reduce_scatter([fine, number], "sum")
    assert_values(fine, [np.ones(2)] * n)
    if n > 1:
        set_values(fine, [np.ones(r + 1) for r in range(n)])
        with raises(ValueError, "reduce_scatter"):
            synk.reduce_scatter(fine, "sum")
        assert_values(fine, [np.ones(r + 1) for r in range(n)])


# -- types with static lengths -------------------------------------------------------------------------------


def make_row_variable():
    """Return a shared variable whose type fixes the length of axis 0 to 1, and a function that sends it to the ranks."""
    fixed = {"shape": (1, None)} if NAME == "pytensor" else {"broadcastable": (True, False)}
    s = shared(np.zeros((1, 2)), "row", **fixed)
    return s, synk.function([], [], updates=[(s, s)])


def test_collectives_keep_static_lengths(n):
    s, declared = make_row_variable()
    synk.broadcast(s, np.ones((1, 4)))
    assert_values(s, [np.ones((1, 4))] * n)
    for attempt in (
        lambda: synk.broadcast(s, np.ones((2, 2))),
        lambda: synk.broadcast(s, synk.data(np.ones((2, 2)))),
        lambda: synk.scatter(s, np.ones((n + 1, 4))),
        lambda: synk.set_value(0, s, np.ones((2, 2))),
        lambda: synk.set_value(0, s, synk.data(np.ones((2, 2)))),
    ):
        with raises(ValueError, "values"):
            attempt()
        assert_values(s, [np.ones((1, 4))] * n)
    synk.scatter(s, np.zeros((n, 3)))
    assert_values(s, [np.zeros((1, 3))] * n)
    synk.set_value(n - 1, s, np.ones((9, 2)), batch=1)
    assert synk.get_shapes(s)[n - 1] == (1, 2)


def test_all_gather_keeps_static_lengths(n):
    s, declared = make_row_variable()
    if n == 1:
        synk.all_gather(s)
    else:
        with pytest.raises(ValueError, match=rf"all_gather: 'row' of type .* can't take shape \({n}, 2\)"):
            synk.all_gather(s)
    assert_values(s, [np.zeros((1, 2))] * n)


# -- which variables the ranks have --------------------------------------------------------------------------


def test_collectives_send_a_variable_at_its_first_use(n):
    s = shared(np.arange(3.0), "s")
    f = synk.function([], (s * 2, None))
    s.set_value(np.array([4.0]))
    assert synk.gather(s).tolist() == [[4.0]] * n
    assert f().tolist() == [8.0]


def test_collectives_send_variables_inside_a_graph(n):
    s, t = shared(np.arange(3.0), "s"), shared(np.ones(3), "t")
    f = synk.function([], ((T.sqr(s) + t).sum(), "sum"))
    set_values(s, [np.full(3, float(r)) for r in range(n)])
    assert f() == sum(3 * r**2 + 3 for r in range(n))


def test_plain_functions_change_only_the_master(n, master):
    s = get_variable()
    set_values(s, [np.zeros(2)] * n)
    function([], [], updates=[(s, s + 1)])()
    assert synk.gather(s).tolist() == [[float(r == master)] * 2 for r in range(n)]


def test_collectives_accept_unnamed_variables(n):
    s, t = shared(np.zeros(2)), shared(np.ones(2))
    declared = synk.function([], [], updates=[(s, s + t)])
    synk.broadcast([s, t], [np.full(2, 3.0), np.full(2, 4.0)])
    assert_values(s, [np.full(2, 3.0)] * n)
    assert_values(t, [np.full(2, 4.0)] * n)
    declared()
    assert_values(s, [np.full(2, 7.0)] * n)


@pytest.mark.parametrize("nccl", [True, False, np.True_])
def test_nccl_option_is_ignored_in_host_memory(n, nccl):
    s = get_variable()
    set_values(s, [np.full(2, float(r)) for r in range(n)])
    assert synk.gather(s, nccl=nccl).tolist() == [[float(r)] * 2 for r in range(n)]
    assert synk.reduce(s, "sum", in_place=False, nccl=nccl).tolist() == [n * (n - 1) / 2] * 2
    synk.all_reduce(s, "max", nccl=nccl)
    synk.all_gather(s, nccl=nccl)
    synk.broadcast(s, nccl=nccl)
    assert_values(s, [np.full(2 * n, n - 1.0)] * n)


#: Collectives that change a variable, and the ranks' values after them, from those before them.
CHANGING = {
    "broadcast": (synk.broadcast, lambda old, master: [old[master]] * len(old)),
    "broadcast of a value": (
        lambda s: synk.broadcast(s, np.ones(s.get_value().shape)),
        lambda old, master: [np.ones_like(value) for value in old],
    ),
    "scatter": (lambda s: synk.scatter(s, np.ones(12)), lambda old, master: [np.ones(12 // len(old))] * len(old)),
    "reduce": (
        lambda s: synk.reduce(s, "sum"),
        lambda old, master: [sum(old) if r == master else value for r, value in enumerate(old)],
    ),
    "all_reduce": (lambda s: synk.all_reduce(s, "sum"), lambda old, master: [sum(old)] * len(old)),
    "all_gather": (synk.all_gather, lambda old, master: [np.concatenate(old)] * len(old)),
    "reduce_scatter": (
        lambda s: synk.reduce_scatter(s, "sum"),
        lambda old, master: [sum(old)[get_share_slice(len(old[0]), len(old), r)] for r in range(len(old))],
    ),
}


def interrupt_at(monkeypatch, moment):
    """Interrupt this process at a moment: the ``moment``-th beginning or end of a barrier or of a variable's change."""
    moments = itertools.count(1)

    def patch(owner, name):
        original = getattr(owner, name)

        def called(*arguments):
            if next(moments) == moment:
                signal.raise_signal(signal.SIGINT)
            result = original(*arguments)
            if next(moments) == moment:
                signal.raise_signal(signal.SIGINT)
            return result

        monkeypatch.setattr(owner, name, called)

    patch(CommandBarriers, "arrive_and_wait")
    patch(type(get_library(get_variable())), "store_value")


SMALL, LARGE = 24, 2 * SCRATCH_NBYTES // 8 + 8


@pytest.mark.parametrize(
    ("collective", "size"),
    # A long array is broadcast, and reduced in the master, in place.
    [*((name, SMALL) for name in CHANGING), *((name, LARGE) for name in list(CHANGING)[-3:])],
)
def test_interrupted_collective_changes_the_variable_on_all_ranks_or_none(n, master, monkeypatch, collective, size):
    run, compute_new = CHANGING[collective]
    s, old = get_variable(), [np.full(size, r + 2.0) for r in range(n)]
    new = compute_new(old, master)
    for moment in itertools.count(1):
        set_values(s, old)
        with monkeypatch.context() as patch:
            interrupt_at(patch, moment)
            try:
                run(s)
            except KeyboardInterrupt:
                pass
            else:
                break
        values = get_values(s, n)
        assert any(all(map(np.array_equal, values, expected)) for expected in (old, new)), (moment, values)
    assert moment > 2 or n == 1
    assert_values(s, new)
