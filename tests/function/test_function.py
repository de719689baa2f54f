"""Functions on several ranks: what they return is what the serial graph library returns."""

import gc
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from library import INTERPRETED, NAME, XLA, few, function, grad, is_array, package, read, same, shared
from library import tensor as T
from messages import raises
from system import LIMIT, children_of

import synkhronos as synk
from synkhronos import ranks
from synkhronos.function.outputs import SMALL_NBYTES
from synkhronos.ranks import Command
from synkhronos.ranks.control import SCRATCH_NBYTES
from synkhronos.ranks.memory import Memory

if NAME == "pytensor":
    from pytensor.graph.basic import Apply
    from pytensor.graph.op import Op
else:
    from theano import Apply, Op

pytestmark = pytest.mark.usefixtures("rewrites")
RNG = np.random.default_rng(7)
In, Out = package.In, package.Out


def close_to(actual, expected):
    """Compare results: the same but for the order of additions."""
    assert is_array(actual)
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)
    assert actual.dtype == expected.dtype


def parts_of(rows, n):
    """Split rows as ranks do, those without rows left out."""
    return [part for part in np.array_split(np.asarray(rows), n) if len(part)]


# -- any rows, any number of ranks -----------------------------------------------------------------------------


@st.composite
def batches(draw, length):
    """Draw a `batch` for data of `length` rows."""
    index = st.integers(-length, length - 1) if length else st.nothing()
    some = st.lists(index, max_size=2 * length + 1) if length else st.just([])
    bound = st.none() | st.integers(-length - 3, length + 3)
    return draw(
        st.none()
        | st.integers(0, length)
        | st.builds(slice, bound, bound, st.none() | st.integers(-4, 4).filter(bool))
        | some
        | some.map(lambda i: np.array(i, "int64"))
        | some.map(lambda i: np.array(i, "int16"))
        | st.lists(st.booleans(), min_size=length, max_size=length).map(lambda m: np.array(m, bool))
    )


def rows_of(batch, length):
    """The row numbers that a batch picks, by NumPy's own indexing."""
    every = np.arange(length)
    if batch is None:
        return every
    if isinstance(batch, int):
        return every[:batch]
    if isinstance(batch, list):
        return every[np.array(batch, "int64")]
    return every[batch]


@st.composite
def calls(draw, most=60):
    """A number of rows, a batch of them, a number of slices, and which inputs come as Data."""
    length = draw(st.integers(0, 12) | st.integers(0, most) | st.sampled_from([0, 1, 299]))
    return (
        length,
        draw(batches(length)),
        draw(st.sampled_from([1, 1, 2, 3, 7])),
        draw(st.tuples(st.booleans(), st.booleans(), st.booleans())),
    )


def averaged(plain, rows, n, slices, *args):
    """The average of ranks' averages of their slices' values."""
    each = []
    for part in parts_of(rows, n):
        each.append(
            np.mean([plain(*(a[piece] for a in args)) for piece in parts_of(part, min(slices, len(part)))], axis=0)
        )
    return np.mean(each, axis=0) if each else plain(*(a[rows] for a in args))


class Many:
    """Two scattered inputs and one that goes whole, into outputs of 0 to 3 dimensions under all ops."""

    def __init__(self, prefix):
        x, y, b = T.dmatrix("x"), T.lvector("y"), T.drow("b")
        both = T.concatenate([x, b])  # so that there is a minimum even of no rows
        wide = x.dimshuffle(0, 1, "x") * b.dimshuffle("x", 0, 1)
        self.exact = [
            ((x * b).sum(axis=0), "sum"),
            (x.sum(), "sum"),
            (y.sum(), "sum"),
            ((1 + x / 100).prod(axis=0), "prod"),
            (both.min(axis=0), "min"),
            (both.max(), "max"),
            (x.mean(axis=0), "mean"),
            ((x.sum(axis=1) * y).mean(), "mean"),
            (x * 2 + y.dimshuffle(0, "x"), "gather"),
            (y, "gather"),
            (wide, "gather"),
        ]
        average = x.sum(axis=0) * b[0]
        outputs = [(v, f"{prefix}{op}") for v, op in self.exact] + [(average, f"{prefix}avg"), average]
        self.synk = synk.function([x, y], outputs, bcast_inputs=[b])
        self.serial = function([x, y, b], [v for v, _ in self.exact])
        self.average = function([x, y, b], average, on_unused_input="ignore")


@pytest.mark.parametrize("n, prefix", [(1, ""), (2, "c_"), (3, ""), (4, "")])
def test_exact_ops_equal_the_serial_function(fork, n, prefix):
    fork(n)
    many = Many(prefix)
    b = np.array([[1.0, -2.0, 0.5]])
    every_x, every_y = RNG.normal(size=(300, 3)), RNG.integers(-9, 9, 300)

    @few(30)
    @given(calls())
    @example((0, None, 1, (False, True, True)))
    @example((299, slice(None, None, -3), 3, (True, False, False)))
    def check(call):
        length, batch, slices, kinds = call
        x, y = every_x[:length], every_y[:length]
        x_in, y_in, b_in = (synk.data(v) if k else v for v, k in zip((x, y, b), kinds, strict=True))
        results = many.synk(x_in, y_in, b_in, batch=batch, num_slices=slices)
        rows = rows_of(batch, length)
        with np.errstate(invalid="ignore", divide="ignore"):
            expected = many.serial(x[rows], y[rows], b)
            average = averaged(lambda *args: many.average(*args, b), rows, n, slices, x, y)
        for result, value in zip(results, expected, strict=False):
            close_to(result, value)
        close_to(results[-1], average)
        close_to(results[-2], average)

    check()


@pytest.mark.parametrize("n", [2, 3])
def test_scalar_outputs_are_reduced(fork, n):
    # Functions all of whose outputs have no dimensions take a path of their own.
    fork(n)
    x = T.dvector("x")
    exact = [(x.sum(), "sum"), (x.mean(), "mean"), ((x + 0.5).prod(), "prod"), (x.shape[0], "sum")]
    f = synk.function([x], [*exact, x.mean(), (x.sum(), "gather"), (x.sum(), None)])
    serial, mean = function([x], [v for v, _ in exact]), function([x], x.mean())
    every = RNG.normal(size=300)

    @few(30)
    @given(calls())
    def check(call):
        length, batch, slices, _ = call
        results = f(every[:length], batch=batch, num_slices=slices)
        rows = rows_of(batch, length)
        with np.errstate(invalid="ignore", divide="ignore"):
            for result, value in zip(results, serial(every[rows]), strict=False):
                close_to(result, value)
            close_to(results[4], averaged(mean, rows, n, slices, every))
        if len(rows) and slices == 1:
            parts = [every[part].sum() for part in parts_of(rows, n)]
            close_to(results[5], np.array(parts))
            close_to(results[6], np.asarray(parts[0]))

    check()


def test_op_none_returns_the_masters_own_value(fork):
    fork(3, master_rank=1)
    x = T.dvector("x")
    f = synk.function([x], [(x, None), (x.sum(), None)])
    own, total = f(np.arange(7.0))
    np.testing.assert_array_equal(own, [3, 4])  # 3, 2 and 2 rows
    assert total == 7


@pytest.mark.parametrize("master", [0, 1, 2])
def test_gather_concatenates_in_rank_order(fork, master):
    fork(3, master_rank=master)
    x = T.dvector("x")
    f = synk.function([x], [(x, "gather"), (x.sum(), "gather")])
    joined, sums = f(np.arange(7.0))
    np.testing.assert_array_equal(joined, np.arange(7.0))
    np.testing.assert_array_equal(sums, [3, 7, 11])
    # With one row rank 0 alone computes, be it the master or not.
    np.testing.assert_array_equal(f(np.arange(1.0) + 4)[1], [4])


def test_avg_weighs_ranks_equally_and_mean_by_rows(fork):
    fork(2)
    x = T.dvector("x")
    f = synk.function([x], [x.mean(), (x.mean(), "mean")])
    average, mean = f(np.array([0.0, 0.0, 9.0]))
    assert (average, mean) == (4.5, 3.0)


def test_elementwise_ops_refuse_shapes_that_differ_between_ranks(fork):
    fork(3)
    x = T.dmatrix("x")
    f = synk.function([x], [(x, "sum")])
    assert f(np.ones((6, 2)))[0].shape == (2, 2)
    with raises(ValueError, "sum"):
        read(f(np.ones((7, 2))))
    assert f(np.ones((6, 2)))[0].shape == (2, 2)


def test_gather_refuses_mismatched_shapes(fork):
    fork(2)
    x = T.dvector("x")
    f = synk.function([x], (T.zeros((2, x.shape[0])), "gather"))
    with raises(ValueError, "gather"):
        read(f(np.ones(3)))
    assert f(np.ones(4)).shape == (4, 2)


# -- dtypes and sizes ------------------------------------------------------------------------------------------

OF_TWO = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


@pytest.fixture(scope="module")
def two_parts():
    """Rows whose halves are one for each of two ranks."""
    return np.array([[3, 1, 0], [2, 7, 1], [5, 1, 1], [1, 0, 4]])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "int32", "int64", "uint8", "bool"])
def test_outputs_keep_their_dtype(fork, two_parts, dtype):
    fork(2)
    x = T.matrix("x", dtype=dtype)
    of_two = {op: ufunc for op, ufunc in OF_TWO.items() if (op, dtype) != ("sum", "bool")}
    f = synk.function([x], [(x, op) for op in [*of_two, "gather", None]])
    value = two_parts.astype(dtype)
    results = f(value)
    for ufunc, result in zip(of_two.values(), results, strict=False):
        np.testing.assert_array_equal(result, ufunc(value[:2], value[2:]))
    np.testing.assert_array_equal(results[-2], value)
    np.testing.assert_array_equal(results[-1], value[:2])
    assert {result.dtype for result in results} == {np.dtype(dtype)}


@pytest.mark.parametrize("dtype", ["float16", "float32", "complex128"])
def test_avg_keeps_float_dtypes(fork, two_parts, dtype):
    fork(2)
    x = T.matrix("x", dtype=dtype)
    for result in synk.function([x], [x, (x, "mean")])(two_parts.astype(dtype)):
        np.testing.assert_array_equal(result, (two_parts[:2] + two_parts[2:]) / 2)
        assert result.dtype == dtype


@pytest.mark.parametrize("op", ["avg", "mean", "c_avg", "c_mean"])
@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_function_refuses_avg_of_integers(fork, op, dtype):
    fork(1)
    x = T.vector("x", dtype=dtype)
    with pytest.raises(ValueError, match=rf"outputs: op '{op}' of output 0 is not defined for dtype {dtype}"):
        synk.function([x], [(x, op)])


@pytest.mark.parametrize("op", ["sum", "c_sum"])
def test_function_refuses_sum_of_booleans(fork, op):
    fork(2)
    x = T.dvector("x")
    positive = T.gt(x, 0)
    with raises(ValueError, "outputs"):
        synk.function([x], (positive.any(), op))
    value = np.array([1.0, 2.0, -1.0, -2.0])
    most, least, count = synk.function(
        [x], [(positive.any(), "max"), (positive.any(), "min"), (T.cast(positive, "int64").sum(), op)]
    )(value)
    assert (bool(most), bool(least), int(count)) == (True, False, 2)
    # Slices accumulate by the same op.
    flag = shared(np.zeros(2, bool), "flag")
    f = synk.function([x], [], updates=[(flag, T.gt(x[:2], 0), op)])
    with raises(ValueError, "num_slices"):
        f(value, num_slices=2)
    with raises(ValueError, "op"):
        synk.all_reduce(flag, "sum")


@pytest.mark.parametrize("argument, given", [("num_slices", {"num_slices": 2}), ("batch_s", {"batch_s": slice(0, 2)})])
def test_batch_s_refuses_updates_of_a_sliced_variable(fork, argument, given):
    fork(2)
    cut, other = shared(np.arange(4.0), "cut"), shared(np.zeros(4), "other")
    f = synk.function([], (cut.sum(), "sum"), updates=[(cut, 2 * cut)], sliceable_shareds=[cut], name="f")
    with pytest.raises(ValueError, match=f"^{argument}: f updates 'cut', which is one of its sliceable_shareds"):
        f(**given)
    assert synk.get_lengths(cut) == [4, 4]
    assert float(f()) == 12  # all of it is no part of it
    np.testing.assert_array_equal(synk.gather(cut), [[0, 2, 4, 6]] * 2)
    # Another variable may be made of the rows that are chosen.
    g = synk.function([], [], updates=[(other, cut + 1, "gather")], sliceable_shareds=[cut])
    g(**given)
    np.testing.assert_array_equal(synk.get_value(1, other), [1, 3, 5, 7] if argument == "num_slices" else [1, 3])


@pytest.mark.skipif(NAME == "pytensor", reason="Theano's default updates")
def test_batch_s_refuses_default_updates_of_a_sliced_variable(fork):
    fork(2)
    cut = shared(np.arange(4.0), "cut")
    cut.default_update = 2 * cut
    f = synk.function([], (cut.sum(), "sum"), sliceable_shareds=[cut], name="f")
    with raises(ValueError, "batch_s"):
        f(batch_s=[0])


@pytest.mark.parametrize("dtype", ["float64", "float16", "int8"])
def test_large_outputs_are_streamed_in_chunks(fork, dtype):
    fork(3)
    x = T.matrix("x", dtype=dtype)
    column = x[0]
    ops = ["sum", "min", "max", "prod"] + (["avg", "mean"] if dtype != "int8" else [])
    f = synk.function([x], [*((column, op) for op in ops), (x, "gather"), (x, None)])
    width = 5 * SCRATCH_NBYTES // 2 // np.dtype(dtype).itemsize + 1
    value = RNG.integers(-3, 4, size=(5, width)).astype(dtype)
    for n_rows in (2, 5):  # the third rank has none of two
        rows = value[:n_rows]
        firsts = np.stack([part[0] for part in parts_of(rows, 3)])
        *results, joined, own = f(rows)
        expected = {
            "sum": firsts.sum(axis=0, dtype=dtype),
            "prod": firsts.prod(axis=0, dtype=dtype),
            "min": firsts.min(axis=0),
            "max": firsts.max(axis=0),
        }
        if dtype != "int8":
            weights = [len(part) for part in parts_of(rows, 3)]
            expected["avg"] = firsts.mean(axis=0, dtype="float32").astype(dtype)
            expected["mean"] = np.average(firsts.astype("float32"), axis=0, weights=weights).astype(dtype)
        for op, result in zip(ops, results, strict=True):
            np.testing.assert_allclose(result, expected[op], rtol=1e-3 if dtype == "float16" else 1e-6)
            assert result.dtype == dtype
        np.testing.assert_array_equal(joined, rows)
        np.testing.assert_array_equal(own, parts_of(rows, 3)[0])


def test_gather_mixes_streamed_and_small_parts(fork):
    fork(2)
    x = T.dvector("x")
    f = synk.function([x], (x, "gather"))
    for length in (SMALL_NBYTES // 4 - 1, SMALL_NBYTES // 4, SMALL_NBYTES // 4 + 1):  # 8 bytes each, half on each rank
        value = RNG.normal(size=length)
        np.testing.assert_array_equal(f(value), value)


# -- inputs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def difference():
    """Make a function whose value tells its inputs apart."""
    x, y, b = T.dmatrix("x"), T.dvector("y"), T.dscalar("b")

    def make():
        return synk.function([x, y], (x * y.dimshuffle(0, "x") + b, "gather"), bcast_inputs=[b], name="difference")

    return make


X, Y = RNG.normal(size=(9, 2)), RNG.normal(size=9)


def test_inputs_mix_data_arrays_and_lists(fork, difference):
    fork(2)
    f = difference()
    expected = X * Y[:, None] + 2
    same(f(synk.data(X), Y, 2), expected)
    same(f(X, synk.data(Y), synk.data(2.0)), expected)
    same(f(X.tolist(), Y.tolist(), 2.0), expected)
    same(f(X.astype("float32"), Y, 2), X.astype("float32") * Y[:, None] + 2)


def test_inputs_by_name(fork, difference):
    fork(2)
    f = difference()
    expected = X * Y[:, None] + 2
    same(f(b=2, x=X, y=Y), expected)
    same(f(X, b=2, y=synk.data(Y)), expected)
    with raises(TypeError, "z"):
        f(X, Y, z=1)
    with raises(TypeError, "x"):
        f(X, Y, x=X)
    with raises(TypeError, "input 2"):
        f(X, Y)


def test_one_data_object_as_two_inputs(fork):
    fork(2)
    x, y = T.dvectors("x", "y")
    f = synk.function([x, y], (x * y, "sum"))
    d = synk.data(np.arange(4.0))
    np.testing.assert_array_equal(f(d, d), [0 + 4, 1 + 9])


@pytest.mark.parametrize("batch", [5, slice(4, 8), slice(7, 3, -2)])
def test_minibatch_row_0_is_the_lowest_index(fork, difference, batch):
    fork(2)
    f = difference()
    low = rows_of(batch, 9).min()
    mini = synk.data(X[low:], minibatch=True)
    np.testing.assert_array_equal(f(mini, Y, 0, batch=batch), f(X, Y, 0, batch=batch))
    # What comes as an array is whole, even beside a minibatch; and all of them may be minibatches.
    both = f(mini, synk.data(Y[low:], minibatch=True), 0, batch=batch)
    np.testing.assert_array_equal(both, f(X, Y, 0, batch=batch))


@pytest.mark.parametrize(
    "batch", [[7, 4, 4, 6], [8, 0, 3], range(7, 2, -2), np.array([5, 1]), np.arange(9) % 2 == 0, np.arange(9) > 9, []]
)
@pytest.mark.parametrize("room", [0, 2])
def test_minibatch_rows_follow_the_index_list(fork, difference, batch, room):
    # As one trains on files: the order is shuffled, the next of it are read and put into a minibatch, row by row.
    fork(2)
    f = difference()
    rows = rows_of(batch, 9)
    mini_x, mini_y = (synk.data(np.concatenate([value[rows], value[:room]]), minibatch=True) for value in (X, Y))
    whole_x, whole_y = synk.data(X), synk.data(Y)
    for x, y in ((mini_x, Y), (mini_x, whole_y), (whole_x, mini_y), (mini_x, mini_y)):
        np.testing.assert_array_equal(f(x, y, 0, batch=batch), X[rows] * Y[rows, None])
        np.testing.assert_array_equal(f(x, y, 0, batch=batch, num_slices=2), X[rows] * Y[rows, None])


def test_index_list_longer_than_the_minibatch_is_refused(fork, difference):
    fork(2)
    f = difference()
    with raises(IndexError, "batch"):
        f(synk.data(X[:3], minibatch=True), Y, 0, batch=[1, 2, 1, 2])


def test_minibatches_without_batch_are_used_whole(fork, difference):
    fork(2)
    f = difference()
    x, y = synk.data(X, minibatch=True), synk.data(Y, minibatch=True)
    np.testing.assert_array_equal(f(x, y, 0), X * Y[:, None])


def test_minibatches_refuse_negative_indexes(fork, difference):
    fork(2)
    f = difference()
    x, y = synk.data(X, minibatch=True), synk.data(Y, minibatch=True)
    for batch in ([-1], [3, -2], slice(-3, None), slice(2, None)):
        with raises((ValueError, IndexError), "batch"):
            f(x, y, 0, batch=batch)


def test_slice_longer_than_the_minibatch_is_refused(fork, difference):
    fork(2)
    f = difference()
    with raises(IndexError, "batch"):
        f(synk.data(X[:3], minibatch=True), Y, 0, batch=slice(2, 6))


def test_batch_selects_from_inputs_of_different_lengths(fork, difference):
    fork(2)
    f = difference()
    for batch in (6, slice(2, 6), [5, 0, 6]):
        rows = rows_of(batch, 7)
        np.testing.assert_array_equal(f(X, Y[:7], 0, batch=batch), X[rows] * Y[rows, None])


@pytest.mark.parametrize("batch", [None, slice(2, None), slice(-3, None), slice(None, -1), [-1, 0], [8], 8])
def test_batch_must_select_equal_rows_of_all_inputs(fork, difference, batch):
    fork(2)
    f = difference()
    with raises((ValueError, IndexError)):
        f(X, Y[:7], 0, batch=batch)


def test_results_do_not_alias_reused_inputs(fork):
    fork(2)
    x, b = T.dmatrix("x"), T.dvector("b")
    f = synk.function([x], [(x, "gather"), (x, None), (b, None)], bcast_inputs=[b])
    for make in (np.array, synk.data):
        value, whole = make(X), make(Y)
        results = f(value, whole)
        value[:], whole[:] = 0, 0
        f(value, whole)
        np.testing.assert_array_equal(results[0], X)
        np.testing.assert_array_equal(results[1], X[:5])
        np.testing.assert_array_equal(results[2], Y)


@pytest.mark.parametrize("n", [1, 2])
def test_identity_outputs_do_not_alias(fork, n):
    # Each rank keeps the memory into which it picks rows from call to call.
    fork(n)
    x = T.dmatrix("x")
    f = synk.function([x], [(x, "gather"), (x, None), (x[::2], "gather")])
    d = synk.data(X)
    first = f(d, batch=[0, 1, 2, 3])
    copies = [result.copy() for result in first]
    second = f(d, batch=[8, 7, 6, 5])
    for one, copy, two in zip(first, copies, second, strict=True):
        np.testing.assert_array_equal(one, copy)
        assert not np.shares_memory(one, two) and not np.shares_memory(one, d.data)


@pytest.mark.parametrize("batch", [None, [3, 1, 2]])
def test_update_by_an_input_does_not_alias_it(fork, batch):
    fork(2)
    x, b = T.dmatrix("x"), T.dvector("b")
    rows, whole = shared(np.zeros((1, 2)), "rows"), shared(np.zeros(1), "whole")
    f = synk.function([x], bcast_inputs=[b], updates=[(rows, x), (whole, b)])
    d, e = synk.data(X), synk.data(Y)
    f(d, e, batch=batch)
    expected = X[rows_of(batch, 9)]
    d[:], e[:] = 0, 0
    f.as_theano(X[:1] * 0, Y)  # the master's variables take other values, and the workers' are asked for theirs
    np.testing.assert_array_equal(synk.get_value(1, rows), np.array_split(expected, 2)[1])
    np.testing.assert_array_equal(synk.get_value(1, whole), Y)


@pytest.mark.parametrize("batch", [None, slice(0, 6), [0, 1, 2]])
def test_mutable_input_does_not_change_data(fork, batch):
    fork(2)
    x, b = T.dmatrix("x"), T.dvector("b")
    f = synk.function(
        [In(x, mutable=True)],
        [(T.inc_subtensor(x[0], 100.0), "gather"), (T.inc_subtensor(b[0], 100.0), None)],
        bcast_inputs=[In(b, mutable=True)],
    )
    d, e = synk.data(X), synk.data(Y)
    for _ in range(2):
        changed, whole = f(d, e, batch=batch)
        assert changed[0, 0] == X[0, 0] + 100 and whole[0] == Y[0] + 100
    np.testing.assert_array_equal(d, X)
    np.testing.assert_array_equal(e, Y)


def test_in_renames_and_allows_downcast(fork):
    fork(2)
    x = T.fvector("x")
    f = synk.function([In(x, name="rows", allow_downcast=True)], (x, "gather"))
    np.testing.assert_array_equal(f(rows=np.array([0.1, 0.2])), np.array([0.1, 0.2], "float32"))
    with raises(TypeError, "x"):
        synk.function([x], (x, "gather"))(np.array([0.1, 0.2]))


def test_allow_input_downcast_casts_inputs(fork):
    fork(2)
    x, b = T.fvector("x"), T.iscalar("b")
    f = synk.function([x], (x * b, "gather"), bcast_inputs=[b], allow_input_downcast=True)
    np.testing.assert_array_equal(f(np.array([0.1, 0.2]), 2.9), np.array([0.1, 0.2], "float32") * 2)
    g = synk.function([In(x, allow_downcast=False)], (x, "gather"), allow_input_downcast=True)
    with raises(TypeError, "x"):
        g(np.array([0.1, 0.2]))


if NAME == "theano":  # PyTensor has given defaults up

    def test_in_with_a_default_value(fork):
        fork(2)
        x, b = T.dvector("x"), T.dscalar("b")
        f = synk.function([x], (x * b, "gather"), bcast_inputs=[In(b, value=3.0)])
        for args, factor in (([], 3), ([2.0], 2), ([], 3)):
            np.testing.assert_array_equal(f(Y, *args), Y * factor)
            np.testing.assert_array_equal(f(Y, *args, num_slices=2), Y * factor)


@pytest.mark.parametrize("n", [1, 3])
def test_outputs_of_shared_variables_and_constants_are_copies(fork, n):
    fork(n)
    w = shared(np.ones(2), "w")
    f = synk.function([], [(w, "gather"), w, (w, None), (T.constant(np.ones(2)), "sum")])
    for _ in range(2):
        *results, constant = f()
        np.testing.assert_array_equal(constant, [n, n])
        for result in (*results, constant):
            np.testing.assert_array_equal(np.unique(result), [n] if result is constant else [1])
            result[...] = 7
        np.testing.assert_array_equal(w.get_value(), [1, 1])


def test_out_with_borrow(fork):
    fork(2)
    x = T.dmatrix("x")
    f = synk.function([x], (Out(x * 2, borrow=True), "gather"))
    np.testing.assert_array_equal(f(X), X * 2)
    np.testing.assert_array_equal(f(X, num_slices=2), X * 2)


# -- the shape of the answer -----------------------------------------------------------------------------------


def test_list_of_outputs_returns_a_list(fork):
    fork(2)
    x = T.dvector("x")
    total = x.sum()
    ones = np.ones(4)
    assert is_array(synk.function([x], total)(ones))
    assert is_array(synk.function([x], (total, "sum"))(ones))
    for outputs in ([total], [(total, "sum")]):
        (result,) = synk.function([x], outputs)(ones)
        assert is_array(result) and result.shape == ()
    assert len(synk.function([x], (total, total + 1))(ones)) == 2


def test_function_without_outputs_returns_like_serial(fork):
    fork(2)
    x = T.dvector("x")
    total = shared(0.0, "total")
    for outputs in (None, []):
        f = synk.function([x], outputs, updates=[(total, total + x.sum())])
        assert f(np.ones(4)) == function([x], outputs, on_unused_input="ignore")(np.ones(4))
    np.testing.assert_array_equal(synk.gather(total), [4, 4])  # two calls of two rows each


@pytest.mark.parametrize("ndim", [0, 1])
def test_output_subset_keeps_the_requested_order(fork, ndim):
    fork(2)
    x, y = T.dvectors("x", "y")
    outputs = [(x.sum(), "sum"), (y.max(), "max"), (x.min(), "min"), (y, "gather" if ndim else None)]
    f = synk.function([x, y], outputs[: 3 + ndim])
    a, b = np.arange(4.0), np.arange(4.0) + 10
    assert [float(v) for v in f(a, b, output_subset=[2, 1])] == [0, 13]
    # Inputs that no output of the subset needs are passed all the same.
    assert [float(v) for v in f(a, b, output_subset=[0])] == [6]
    assert [float(v) for v in f(a, b, output_subset=[0], num_slices=2)] == [6]
    assert f(a, b, output_subset=[]) == []
    assert len(f(a, b)) == 3 + ndim
    for wrong, error in (([4], IndexError), ([-1], IndexError), (["x"], TypeError), (1, TypeError)):
        with raises(error, "output_subset"):
            f(a, b, output_subset=wrong)


def test_output_subset_applies_all_updates(fork):
    fork(2)
    x = T.dvector("x")
    count = shared(0.0, "count")
    f = synk.function([x], [(x.sum(), "sum"), (x.max(), "max")], updates=[(count, count + 1)])
    f(np.ones(4), output_subset=[1])
    f(np.ones(4), output_subset=[])
    f(np.ones(4), output_subset=[0], num_slices=2)
    np.testing.assert_array_equal(synk.gather(count), [3, 3])


def test_function_repr(fork):
    fork(1)
    x = T.dvector("x")
    w, v = shared(0.0, "w"), shared(0.0, "v")
    f = synk.function([x], [x, (x, "c_sum"), (x, None)], updates=[(w, x.sum()), (v, x.sum(), "max")], name="train")
    assert f.name == "train"
    assert f.output_modes == ["avg", "c_sum", None]
    assert f.update_modes == ["avg", "max"]
    assert "train" in repr(f) and "x" in repr(f)
    assert isinstance(synk.function([x], x).name, str)
    assert synk.function([x], x).output_modes == ["avg"]


# -- rows for nobody -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slices", [1, 3])
def test_rank_without_rows_is_skipped(fork, slices):
    fork(3)
    x = T.dvector("x")
    seen = shared(np.float64(-1), "seen")
    f = synk.function([x], [(x.max(), "max"), (x.min(), "min"), x.sum(), x.sum()], updates=[(seen, x.max())])
    high, low, average, _ = f(np.array([5.0, 3.0]), num_slices=slices)
    assert (high, low, average) == (5, 3, 4)
    np.testing.assert_array_equal(synk.gather(seen), [5, 3, -1])


@pytest.mark.parametrize("master", [0, 1])
def test_master_without_rows_has_no_own_value(fork, master):
    fork(2, master_rank=master)
    x = T.dvector("x")
    one = np.array([3.0])
    own = np.asarray(6.0) if master == 0 else None
    for outputs in (
        [((x * 2).sum(), None)],
        [((x * 2).sum(), None), (x, "sum")],
        [((x * 2).sum(), None), (x.sum(), "sum")],
    ):
        results = synk.function([x], outputs, on_unused_input="ignore")(one)
        assert results[0] == own and len(results) == len(outputs)
    assert synk.function([x], ((x * 2).sum(), None))(one) == own


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("large", [False, True])
def test_batch_of_no_rows_equals_serial(fork, slices, large):
    fork(2)
    x = T.dmatrix("x")
    exact = [
        (x.sum(), "sum"),
        (x.mean(), "mean"),
        (x.mean(), "avg"),
        (x.prod(), "prod"),
        (x.sum(), None),
        (x.sum(), "gather"),
    ]
    if large:
        exact += [(x * 2, "gather"), (x.sum(axis=0), "avg"), (x, None)]
    f, serial = synk.function([x], exact), function([x], [v for v, _ in exact])
    with np.errstate(invalid="ignore", divide="ignore"):
        expected = serial(X[:0])
        for results in (f(X[:0], num_slices=slices), f(synk.data(X), batch=[], num_slices=slices)):
            for result, value in zip(results, expected, strict=True):
                np.testing.assert_array_equal(result, value)
                assert result.shape == value.shape


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("ndim", [0, 1])
def test_batch_of_no_rows_updates_nothing(fork, slices, ndim):
    fork(2)
    x = T.dvector("x")
    count, s = shared(0.0, "count"), shared(np.arange(3.0), "s")
    output = x * 2 if ndim else x.sum()
    f = synk.function([x], (output, "gather" if ndim else "sum"), updates=[(count, count + 1)])
    assert f(Y[:0], num_slices=slices).sum() == 0
    g = synk.function(
        [],
        (s * 2 if ndim else s.sum(), "gather" if ndim else "sum"),
        updates=[(count, count + 1)],
        sliceable_shareds=[s],
    )
    assert g(batch_s=slice(0, 0), num_slices=slices).sum() == g(batch_s=[[], []], num_slices=slices).sum() == 0
    np.testing.assert_array_equal(synk.gather(count), [0, 0])
    f(Y)
    np.testing.assert_array_equal(synk.gather(count), [1, 1])


def test_batch_of_no_rows_raises_like_serial(fork):
    fork(2)
    x = T.dvector("x")
    f = synk.function([x], (x.max(), "max"))
    with pytest.raises(ValueError):
        function([x], x.max())(Y[:0])
    with pytest.raises(ValueError):
        f(Y[:0])
    assert f(Y) == Y.max()


# -- updates ---------------------------------------------------------------------------------------------------

UPDATE_OPS = ["avg", "mean", "sum", "prod", "min", "max", "gather", None]


def accumulated(op, values, weights):
    """Return the result of accumulating the values of slices."""
    match op:
        case "avg":
            return np.mean(values, axis=0)
        case "mean":
            return np.average(values, axis=0, weights=weights)
        case "gather":
            return np.concatenate(values)
        case None:
            return values[-1]
    return {"sum": np.sum, "prod": np.prod, "min": np.min, "max": np.max}[op](values, axis=0)


@pytest.mark.parametrize("n, prefix", [(1, ""), (2, "c_"), (3, "")])
def test_updates_accumulate_over_num_slices(fork, n, prefix):
    fork(n)
    x = T.dmatrix("x")
    start = np.array([1.0, -2.0])
    ws = {op: shared(start, f"w_{op}") for op in UPDATE_OPS}
    # Each slice reads all the variables that other slices have been through.
    old = sum(w.sum() for op, w in ws.items() if op != "gather")
    expressions = {op: w[:2] + (x * 2).sum(axis=0) / 10 for op, w in ws.items()}
    spelled = {op: op if op is None else prefix + op for op in UPDATE_OPS}
    f = synk.function(
        [x],
        [(x * old, "gather")],
        updates=[(ws[op], expressions[op], spelled[op]) for op in UPDATE_OPS],
    )

    @few(20)
    @given(st.integers(1, 20), st.integers(1, 6))
    def check(length, slices):
        for w in ws.values():
            synk.broadcast(w, start)
        value = np.resize(X, (length, 2))
        close_to(f(value, num_slices=slices)[0], value * -7.0)
        split = np.array_split(value, n)
        for op, w in ws.items():
            for r, part in enumerate(split):
                held = synk.get_value(r, w)
                if not len(part):
                    np.testing.assert_array_equal(held, start)
                    continue
                pieces = np.array_split(part, min(slices, len(part)))
                values = [start + (piece * 2).sum(axis=0) / 10 for piece in pieces]
                close_to(held, accumulated(op, values, [len(p) for p in pieces]))

    check()


def test_updates_on_each_rank_equal_serial(fork):
    fork(2)
    x, lr = T.dmatrix("x"), T.dscalar("lr")
    w = shared(np.ones(2), "w")
    loss = ((x * w).sum(axis=1) ** 2).mean()
    train = synk.function([x], loss, bcast_inputs=[lr], updates={w: w - lr * grad(loss, w)})
    v = shared(np.ones(2), "v")
    serial_loss = ((x * v).sum(axis=1) ** 2).mean()
    serial = function([x, lr], serial_loss, updates=[(v, v - lr * grad(serial_loss, v))])
    for step in range(3):
        value = train(X[:8], 0.1)
        synk.all_reduce(w)  # of equally many rows: the average is the gradient over all
        if step == 0:
            close_to(value, serial(X[:8], 0.1))
        else:
            serial(X[:8], 0.1)
    close_to(synk.get_value(1, w), v.get_value())
    close_to(w.get_value(), v.get_value())


def test_updates_as_a_dict_with_ops(fork):
    fork(2)
    x = T.dvector("x")
    low, last = shared(0.0, "low"), shared(0.0, "last")
    f = synk.function([x], updates={low: (x.min(), "min"), last: (x[-1], None)})
    f(np.array([1.0, 2, 3, 4, 5, 6]), num_slices=3)
    np.testing.assert_array_equal(synk.gather([low, last]), [[1, 4], [3, 6]])
    assert f.update_modes == ["min", None]


def test_updates_of_integers_need_an_integer_op(fork):
    fork(2)
    x = T.lvector("x")
    count = shared(np.int64(0), "count")
    f = synk.function([x], updates=[(count, count + x.sum())])
    f(np.arange(4))  # nothing is accumulated here
    np.testing.assert_array_equal(synk.gather(count), [1, 5])
    with raises(ValueError, "avg"):
        f(np.arange(4), num_slices=2)
    g = synk.function([x], updates=[(count, x.sum(), "sum")])
    g(np.arange(4), num_slices=2)
    np.testing.assert_array_equal(synk.gather(count), [1, 5])


@pytest.mark.filterwarnings("ignore:Setting default_update is deprecated")
@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_default_update_is_applied_once_with_num_slices(fork, dtype):
    fork(2)
    x = T.dvector("x")
    count = shared(np.zeros((), dtype), "count")
    count.default_update = count + 1
    f = synk.function([x], [(x * 0 + count, "gather")])
    f(np.ones(6))
    np.testing.assert_array_equal(f(np.ones(6), num_slices=3)[0], np.ones(6))
    np.testing.assert_array_equal(synk.gather(count), [2, 2])


def test_num_slices_divides_each_ranks_rows(fork):
    fork(2)
    x = T.dvector("x")
    lengths = shared(np.zeros(0, "int64"), "lengths")
    f = synk.function([x], updates=[(lengths, x.shape, "gather")])
    f(np.ones(15), num_slices=3)
    assert [part.tolist() for part in synk.gather(lengths)] == [[3, 3, 2], [3, 2, 2]]
    f(np.ones(3), num_slices=9)  # no more pieces than rows
    assert [part.tolist() for part in synk.gather(lengths)] == [[1, 1], [1]]


# -- givens and sliceable shared variables ---------------------------------------------------------------------


def test_givens_equal_serial(fork):
    fork(2)
    x, y = T.dmatrix("x"), T.dvector("y")
    w = shared(np.array([2.0, 3.0]), "w")
    f = synk.function([x], (x * y, "gather"), givens=[(y, w + 1)])
    np.testing.assert_array_equal(f(X), X * [3, 4])
    np.testing.assert_array_equal(f(X, num_slices=2), X * [3, 4])


def test_givens_of_sliceable_shareds_are_sliced(fork):
    # The pattern of a data set that lies in the ranks' own memory.
    fork(2)
    x = T.dmatrix("x")
    s = shared(X, "s")
    f = synk.function([], [((x * 2).sum(axis=0), "sum")], givens={x: s}, sliceable_shareds=[s])
    synk.distribute()
    synk.scatter(s, X)
    close_to(f()[0], (X * 2).sum(axis=0))
    close_to(f(num_slices=3)[0], (X * 2).sum(axis=0))
    close_to(f(batch_s=slice(1, 3))[0], (X[[1, 2, 6, 7]] * 2).sum(axis=0))
    close_to(f(batch_s=[[0], [3, 0]])[0], (X[[0, 8, 5]] * 2).sum(axis=0))


def test_givens_inside_the_graph_with_num_slices(fork):
    fork(2)
    s = shared(np.arange(6.0), "s")
    inside = s * 2
    outputs = (inside + 1).sum()
    f = synk.function([], (outputs, "sum"), givens={inside: s * 10}, sliceable_shareds=[s])
    synk.distribute()
    synk.scatter(s, np.arange(6.0))
    expected = function([], outputs, givens={inside: s * 10})
    s.set_value(np.arange(6.0))
    whole = expected()
    synk.scatter(s, np.arange(6.0))
    assert f() == f(num_slices=2) == f(batch_s=slice(0, 3)) == whole == 15 * 10 + 6


@st.composite
def choices(draw, lengths):
    """Draw a `batch_s` for ranks with these numbers of rows."""

    def spans(length):
        bound = st.none() | st.integers(-length - 1, length + 1)
        return st.builds(slice, bound, bound, st.sampled_from([None, None, 1, 2, -1]))

    def indexes(length):
        return st.lists(st.integers(-length, length - 1), max_size=6)

    shortest = min(lengths)
    one = spans(shortest) | indexes(shortest) | indexes(shortest).map(lambda i: np.array(i, "int64"))
    each = st.tuples(*(spans(length) | indexes(length) for length in lengths)).map(list)
    return draw(st.none() | one | each)


@pytest.mark.parametrize("n", [1, 3])
def test_batch_s_selects_rows_of_each_rank(fork, n):
    fork(n)
    s, t = shared(np.zeros((1, 2)), "s"), shared(np.zeros(1), "t")
    outputs = [(s.sum(axis=0), "sum"), (s * t.dimshuffle(0, "x"), "gather"), (t.mean(), "mean")]
    f = synk.function([], outputs, sliceable_shareds=[s, t])
    synk.distribute()
    value, numbers = RNG.normal(size=(14, 2)), RNG.normal(size=14)
    synk.scatter([s, t], [value, numbers])
    split = np.array_split(np.arange(14), n)

    @few(40)
    @given(choices([len(part) for part in split]), st.sampled_from([1, 1, 2, 5]))
    @example(slice(0, 3), 2)
    @example([0, 1, -1], 2)
    def check(choice, slices):
        per_rank = [choice] * n
        if isinstance(choice, list) and choice and isinstance(choice[0], slice | list):
            per_rank = choice
        rows = np.concatenate([part[rows_of(one, len(part))] for part, one in zip(split, per_rank, strict=True)])
        results = f(batch_s=choice, num_slices=slices)
        close_to(results[0], value[rows].sum(axis=0))
        close_to(results[1], value[rows] * numbers[rows, None])
        with np.errstate(invalid="ignore", divide="ignore"):
            if len(rows):
                close_to(results[2], np.asarray(numbers[rows].mean()))
            else:
                assert np.isnan(results[2])

    check()


def test_rank_without_batch_s_rows_contributes_nothing(fork):
    fork(3)
    s = shared(np.arange(4.0), "s")
    seen = shared(0.0, "seen")
    f = synk.function([], [(s.max(), "max"), s.sum()], updates=[(seen, s.max())], sliceable_shareds=[s])
    high, average = f(batch_s=[[0], [], [1, 2]])
    assert (high, average) == (2, 1.5)
    np.testing.assert_array_equal(synk.gather(seen), [0, 0, 2])


def test_batch_s_with_batch(fork):
    fork(2)
    x = T.dvector("x")
    s = shared(np.arange(4.0), "s")
    f = synk.function([x], (x * s, "gather"), sliceable_shareds=[s])
    synk.distribute()
    expected = [10 * 0, 11 * 1, 12 * 2, 13 * 3]
    result = f(np.arange(20.0), batch=slice(10, 14), batch_s=[slice(0, 2), slice(2, 4)])
    np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(
        f(np.arange(20.0), batch=slice(10, 14), batch_s=[[0, 1], [2, 3]], num_slices=2), expected
    )


def test_num_slices_with_few_sliceable_rows(fork):
    fork(2)
    x = T.dvector("x")
    s = shared(np.array([2.0, 4.0]), "s")
    f = synk.function([x], (x.sum() * 0 + s.mean(), "avg"), sliceable_shareds=[s])
    assert f(np.ones(10)) == f(np.ones(10), num_slices=2) == f(np.ones(10), num_slices=5) == 3


@pytest.mark.parametrize("choice", [[4], [-5], [[0], [7]]])
def test_batch_s_out_of_range_changes_nothing(fork, choice):
    fork(2)
    s, count = shared(np.arange(4.0), "s"), shared(0.0, "count")
    f = synk.function([], (s.sum(), "sum"), updates=[(count, count + 1)], sliceable_shareds=[s])
    with pytest.raises(IndexError, match=r"batch_s: index -?\d is out of range for 4 rows on rank [01]"):
        f(batch_s=choice)
    np.testing.assert_array_equal(synk.gather(count), [0, 0])
    assert f() == 12


def test_num_slices_of_sliceable_shareds_weigh_by_rows(fork):
    fork(2)
    s = shared(np.arange(7.0), "s")
    f = synk.function([], [(s.mean(), "mean"), s.mean()], sliceable_shareds=[s])
    synk.distribute()
    synk.scatter(s, np.arange(7.0))
    mean, average = f(num_slices=2)
    close_to(mean, np.asarray(3.0))
    close_to(average, np.asarray(((0.5 + 2.5) / 2 + (4.5 + 6) / 2) / 2))


# -- many kinds of functions -----------------------------------------------------------------------------------


def test_function_without_inputs_runs_on_every_rank(fork):
    fork(3)
    w = shared(np.array([1.0, 2.0]), "w")
    f = synk.function([], [(w.sum(), "sum"), (w, "gather"), w])
    total, joined, average = f()
    assert total == 9
    np.testing.assert_array_equal(joined, [1, 2] * 3)
    np.testing.assert_array_equal(average, [1, 2])
    with raises(ValueError, "batch"):
        f(batch=1)
    with raises(ValueError, "num_slices"):
        f(num_slices=2)


def test_function_with_only_bcast_inputs(fork):
    fork(3)
    b = T.dvector("b")
    f = synk.function([], [(b.sum(), "sum"), (b.sum(), "mean")], bcast_inputs=[b])
    total, mean = f(np.ones(2))
    assert (total, mean) == (6, 2)


@pytest.mark.skipif(XLA, reason="PyTensor's JAX mode has no generators as outputs")
def test_op_none_of_a_non_array_output(fork):
    fork(2)
    x = T.dvector("x")
    if NAME == "pytensor":
        rng = shared(np.random.default_rng(1), "rng")
        other = T.random.normal(rng=rng).owner.outputs[0]
    else:
        other = T.shared_randomstreams.RandomStreams(1).normal(size=(1,)).owner.outputs[0]
    for value, op in ((x.sum(), "sum"), (x, "gather")):
        state, result = synk.function([x], [(other, None), (value, op)])(np.arange(4.0))
        assert type(state).__module__.startswith("numpy.random")
        np.testing.assert_array_equal(result, np.arange(4.0) if op == "gather" else 6)


def test_scan_runs_on_every_rank(fork):
    fork(2)
    x, steps = T.dmatrix("x"), T.iscalar("steps")
    w = shared(np.array([2.0, 3.0]), "w")
    if NAME == "pytensor":
        powers = package.scan(
            lambda a, w: a * w, outputs_info=[x], non_sequences=[w], n_steps=steps, return_updates=False
        )
    else:
        powers, _ = package.scan(lambda a, w: a * w, outputs_info=[x], non_sequences=[w], n_steps=steps)
    # XLA needs to know the number of steps when it compiles.
    f = synk.function([x], (powers[-1], "gather"), bcast_inputs=[steps], sliceable_shareds=[], mode=INTERPRETED)
    np.testing.assert_allclose(f(X, 3), X * [8, 27])
    np.testing.assert_allclose(f(X, 2, num_slices=2), X * [4, 9])


def test_scan_over_sliceable_shareds_is_sliced(fork):
    fork(2)
    s = shared(np.arange(6.0), "s")
    if NAME == "pytensor":
        running = package.scan(lambda a, t: t + a, s, outputs_info=[T.as_tensor(np.float64(0))], return_updates=False)
    else:
        running, _ = package.scan(lambda a, t: t + a, s, outputs_info=[T.constant(np.float64(0))])
    f = synk.function([], (running, "gather"), sliceable_shareds=[s])
    np.testing.assert_array_equal(f(batch_s=[slice(0, 3), slice(3, 6)]), [0, 1, 3, 3, 7, 12])


def chain(x, length):
    for _ in range(length):
        x = x + 1.0
    return x


def test_deep_graph_is_sent_to_workers(fork):
    # Pickle follows references recursively, and 3000 are more than Python allows.
    fork(2)
    x = T.dvector("x")
    f = synk.function([x], (chain(x, 3000), "gather"))
    synk.distribute()
    assert all(size == 1 for size in ranks.session().run(StoreSizes()))
    assert f.name


def test_deep_graph_computes(fork):
    # The libraries' own compilers are recursive: whoever has such graphs raises the limit, after fork() or before.
    fork(2)
    x = T.dvector("x")
    f = synk.function([x], (chain(x, 1200), "gather"))
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    try:
        np.testing.assert_array_equal(f(np.arange(4.0)), np.arange(4.0) + 1200)
    finally:
        sys.setrecursionlimit(limit)


def test_functions_share_variables(fork):
    fork(2)
    x = T.dvector("x")
    w = shared(0.0, "w")
    add = synk.function([x], updates=[(w, w + x.sum())])
    read = synk.function([], (w, "gather"))
    add(np.arange(4.0))
    np.testing.assert_array_equal(read(), [1, 5])
    late = synk.function([], (w * 2, "gather"))  # made when the ranks' values differ already
    np.testing.assert_array_equal(late(), [2, 10])


# -- distributing ----------------------------------------------------------------------------------------------


def test_distribute_can_be_repeated(fork):
    fork(3)
    synk.distribute()  # nothing is there yet
    x = T.dvector("x")
    w = shared(1.0, "w")
    add = synk.function([x], updates=[(w, w + x.sum())])
    synk.distribute()
    add(np.arange(3.0))
    synk.distribute()
    np.testing.assert_array_equal(synk.gather(w), [1, 2, 3])
    other = shared(5.0, "other")
    both = synk.function([], (w + other, "gather"))
    synk.distribute()
    np.testing.assert_array_equal(both(), [6, 7, 8])
    np.testing.assert_array_equal(synk.gather(w), [1, 2, 3])


def test_distribute_sends_current_values(fork):
    fork(2)
    w = shared(1.0, "w")
    read = synk.function([], (w, "gather"))
    w.set_value(2.0)
    synk.distribute()
    w.set_value(3.0)
    np.testing.assert_array_equal(read(), [3, 2])


def counted(monkeypatch):
    """Collect the sizes of all shared memory made from now on."""
    sizes = []
    create = Memory.create

    def counting(self, nbytes, *args, **kwargs):
        sizes.append(nbytes)
        return create(self, nbytes, *args, **kwargs)

    monkeypatch.setattr(Memory, "create", counting)
    return sizes


def test_large_shared_variable_is_sent_once(fork, monkeypatch):
    fork(2)
    sizes = counted(monkeypatch)
    w = shared(np.ones(2_000_000), "w")
    functions = [synk.function([], ((w * i).sum(), "sum")) for i in range(3)]
    synk.distribute()
    functions += [synk.function([], ((w * i).sum(), "sum")) for i in range(3, 5)]
    synk.distribute()
    assert [float(f()) for f in functions] == [4e6 * i for i in range(5)]
    assert 16e6 <= sum(sizes) < 17e6


def test_large_constant_is_sent_once_per_distribute(fork, monkeypatch):
    fork(2)
    sizes = counted(monkeypatch)
    c = T.constant(np.arange(2_000_000.0))
    x = T.dvector("x")
    functions = [synk.function([x], ((c.sum() * i + x.sum()), "avg")) for i in range(3)]
    synk.distribute()
    assert 16e6 <= sum(sizes) < 17e6
    assert functions[1](np.zeros(2)) == np.arange(2_000_000.0).sum()


def test_functions_work_after_close_and_fork(fork):
    x = T.dvector("x")
    fork(2)
    w = shared(1.0, "w")
    f = synk.function([x], (x * w, "gather"), updates=[(w, w + x.sum())])
    f(np.arange(4.0))
    synk.close()
    with raises(RuntimeError):
        f(np.arange(4.0))
    fork(3)
    # The new ranks start from the master's value, 1 + 0 + 1.
    np.testing.assert_array_equal(f(np.arange(4.0)), np.arange(4.0) * 2)
    np.testing.assert_array_equal(synk.gather(w), [3, 4, 5])
    np.testing.assert_array_equal(f(np.arange(3.0), num_slices=2), np.arange(3.0) * [3, 4, 5])


def test_workers_drop_collected_functions(fork):
    fork(2)
    x = T.dvector("x")
    f = synk.function([x], (x, "gather"))
    f(np.arange(4.0))
    before = ranks.session().run(StoreSizes())
    del f
    gc.collect()
    ranks.session().send_releases()
    after = ranks.session().run(StoreSizes())
    assert all(a == b - 1 for a, b in zip(after, before, strict=True))


class StoreSizes(Command):
    """A command: how many functions each rank keeps."""

    def run(self, rank):
        return rank.all_gather(sum(isinstance(key, tuple) and key[0] == "function" for key in rank.objects))


# -- as_theano and build_inputs --------------------------------------------------------------------------------


def test_as_theano_runs_only_in_the_master(fork):
    fork(2)
    x, b = T.dvector("x"), T.dscalar("b")
    w = shared(0.0, "w")
    f = synk.function([x], x.sum() * b, bcast_inputs=[b], updates=[(w, w + x.sum())])
    assert f.as_theano(np.arange(5.0), 2) == 20
    assert f.as_theano(synk.data(np.arange(5.0)), b=2) == 20
    synk.distribute()
    assert w.get_value() == 20  # all rows, twice
    assert f.as_theano(np.arange(5.0), 1) == 10
    np.testing.assert_array_equal(synk.gather(w), [30, 20])
    (listed,) = synk.function([x], [x.sum()]).as_theano(np.arange(5.0))
    assert listed == 10


def test_build_inputs_makes_data_for_the_inputs(fork, difference):
    fork(2)
    f = difference()
    x, y, b = f.build_inputs(X, Y, b=2.0, minibatch=[False, True, False], oversize=1.5)
    assert (x.name, y.name, b.name) == ("x", "y", "b")
    assert (x.minibatch, y.minibatch, b.minibatch) == (False, True, False)
    assert x.alloc_size >= 1.5 * X.size
    same(f(x, y, b), X * Y[:, None] + 2)
    with raises(TypeError, "value"):
        synk.function([T.fvector("z")]).build_inputs(Y)
    forced = synk.function([T.fvector("z")]).build_inputs(Y, force_cast=True)
    assert isinstance(forced, synk.Data) and forced.dtype == "float32"
    with raises(ValueError, "minibatch"):
        f.build_inputs(X, Y, 2.0, minibatch=[True])


# -- failing ---------------------------------------------------------------------------------------------------


class OnWorkers(Op):
    """Do something terrible in the workers, and nothing in the master."""

    __props__ = ("what",)

    def __init__(self, what):
        self.what = what
        self.master = os.getpid()

    def make_node(self, x):
        return Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs):
        if os.getpid() != self.master:
            if self.what == "raise":
                raise LookupError("this worker has had enough")
            if self.what == "raise if 1" and inputs[0][0] == 1:
                raise LookupError("this is one")
            if self.what == "exit":
                os._exit(3)
            if self.what.startswith("SIG"):
                os.kill(os.getpid(), getattr(signal, self.what))
        outputs[0][0] = inputs[0] + 0


def test_error_of_a_worker_names_its_rank(fork):
    fork(3)
    x, i = T.dvector("x"), T.lvector("i")
    f = synk.function([x, i], (x[i], "gather"), mode=INTERPRETED)  # XLA takes the nearest index that there is
    value = np.arange(6.0)
    good = np.array([0, 1, 0, 1, 0, 1])
    for culprit in (1, 2):
        bad = good.copy()
        bad[2 * culprit] = 2  # each rank has two rows
        with pytest.raises(synk.WorkerError, match=f"rank {culprit} raised IndexError") as caught:
            f(value, bad)
        assert caught.value.rank == culprit
        assert "Traceback" in caught.value.worker_traceback and "IndexError" in caught.value.worker_traceback
        np.testing.assert_array_equal(f(value, good), value)  # the ranks stay usable


def test_error_in_the_master_is_raised_unchanged(fork):
    fork(2)
    x, i = T.dvector("x"), T.lvector("i")
    f = synk.function([x, i], (x[i], "gather"), mode=INTERPRETED)
    with pytest.raises(IndexError):
        f(np.arange(4.0), np.array([2, 0, 0, 1]))
    np.testing.assert_array_equal(f(np.arange(4.0), np.array([1, 0, 0, 1])), [1, 0, 2, 3])


def test_errors_on_several_ranks_are_all_told(fork):
    fork(3)
    x = T.dvector("x")
    f = synk.function([x], OnWorkers("raise")(x).sum(), mode=INTERPRETED)
    with pytest.raises(synk.WorkerError, match="this worker has had enough") as caught:
        f(np.arange(3.0))
    assert caught.value.rank in (1, 2)
    assert "perform" in caught.value.worker_traceback
    assert all("LookupError" in line for line in caught.value.failures.values())
    # Nobody waits for anybody in a function without outputs that is compiled: both workers come to their error.
    g = synk.function([x], updates=[(shared(0.0), OnWorkers("raise if 1")(x).sum())], mode=INTERPRETED)
    g(np.zeros(3))
    with pytest.raises(synk.WorkerError, match="Other ranks failed too") as caught:
        g(np.ones(3))
    assert set(caught.value.failures) == {1, 2}
    assert synk.function([x], (x.sum(), "sum"))(np.arange(3.0)) == 3


def test_error_between_slices_keeps_shared_variables(fork):
    fork(2)
    x = T.dvector("x")
    w = shared(0.0, "w")
    f = synk.function([x], updates=[(w, OnWorkers("raise if 1")(x).sum(), "sum")], mode=INTERPRETED)
    with pytest.raises(synk.WorkerError, match="this is one"):
        f(np.array([3.0, 3, 0, 1]), num_slices=2)
    np.testing.assert_array_equal(synk.gather(w)[1], 0)


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM"])
def test_killed_worker_ends_all_workers(fork, how):
    fork(3)
    x = T.dvector("x")
    f = synk.function([x], (x.sum(), "sum"))
    f(np.arange(3.0))
    g = synk.function([x], (OnWorkers(how)(x).sum(), "sum"), mode=INTERPRETED)
    synk.distribute()
    start = time.monotonic()
    with pytest.raises(synk.WorkerError, match=rf"rank [12] \(process \d+\) was killed by {how}"):
        g(np.arange(3.0))
    assert time.monotonic() - start < LIMIT
    assert children_of(os.getpid()) == []  # the others were ended with it
    with pytest.raises(RuntimeError, match="fork"):
        f(np.arange(3.0))
    fork(2)
    assert f(np.arange(3.0)) == 3


def test_exit_code_of_a_worker_is_reported(fork):
    fork(2)
    x = T.dvector("x")
    f = synk.function([x], updates=[(shared(0.0), OnWorkers("exit")(x).sum())], mode=INTERPRETED)
    with pytest.raises(synk.WorkerError, match="rank 1 .* exited with code 3"):
        f(np.arange(3.0))


def test_next_call_reports_a_dead_worker(fork):
    fork(2)
    x = T.dvector("x")
    f = synk.function([x], (x.sum(), "sum"))
    f(np.arange(3.0))
    (pid,) = children_of(os.getpid())
    os.kill(pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(synk.WorkerError, match=f"rank 1 .process {pid}. was killed by SIGKILL"):
        f(np.arange(3.0))
    assert time.monotonic() - start < LIMIT


class Unpicklable(OnWorkers):
    """An Op that holds a lock, which is of one process."""

    def __init__(self, what):
        super().__init__(what)
        self.lock = threading.Lock()


@pytest.mark.parametrize("how", ["distribute", "call"])
def test_unpicklable_graph_leaves_ranks_usable(fork, how):
    fork(2)
    x = T.dvector("x")
    w = shared(1.0, "w")
    f = synk.function([x], (Unpicklable("nothing")(x) * w, "gather"), name="nameless")
    with raises(TypeError, "nameless"):
        synk.distribute() if how == "distribute" else f(np.arange(4.0))
    del f
    gc.collect()
    synk.distribute()
    g = synk.function([x], (x * w, "gather"))
    np.testing.assert_array_equal(g(np.arange(4.0)), np.arange(4.0))


def test_one_rank_needs_no_pickle(fork):
    fork(1)
    x = T.dvector("x")
    f = synk.function([x], (Unpicklable("nothing")(x), "gather"), mode=INTERPRETED)
    np.testing.assert_array_equal(f(np.arange(4.0)), np.arange(4.0))


def test_functions_work_after_a_new_fork(fork):
    fork(2)
    weights = shared(np.zeros(2), "weights")
    f = synk.function([], [], updates=[(weights, weights + 1)])
    synk.distribute()
    synk.close()
    fork(3)
    synk.broadcast(weights, [1.0, 2.0])  # no function of these ranks uses it yet, but one does
    synk.distribute()
    f()
    assert synk.gather(weights).tolist() == [[2.0, 3.0]] * 3


def test_slow_compilation_is_reported_once(fork, monkeypatch, caplog):
    monkeypatch.setattr(sys.modules["synkhronos.function.notice"], "PATIENCE", 0.0)
    fork(2)
    x = T.dvector("x")
    f = synk.function([x], (x.sum(), "sum"), name="slow")
    for _ in range(3):
        f(np.ones(6))
    said = [record.getMessage() for record in caplog.records if "compiling slow" in record.getMessage()]
    ends = [message for message in said if " took " in message]
    assert ends[0].startswith("compiling slow took ")
    # In the master alone: the graph, and where XLA compiles the shapes of its part.
    assert len(ends) == (2 if XLA else 1)
    if XLA:
        f(np.ones(8))
        assert "for inputs of shapes [(4,)]" in caplog.records[-1].getMessage()
