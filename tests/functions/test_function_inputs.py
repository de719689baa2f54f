"""Inputs of functions: arrays, Data, names, batches, casts, and aliasing of inputs and outputs."""

import numpy as np
import pytest
from function_cases import X, Y, select_rows
from library import NAME, assert_same, package, shared
from library import tensor as T
from messages import raises

import synkhronos as synk

pytestmark = pytest.mark.usefixtures("rewrites")


In, Out = package.In, package.Out


# -- inputs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def difference():
    """Give a factory of functions whose value differs for each assignment of inputs."""
    x, y, b = T.dmatrix("x"), T.dvector("y"), T.dscalar("b")

    def make():
        return synk.function([x, y], (x * y.dimshuffle(0, "x") + b, "gather"), bcast_inputs=[b], name="difference")

    return make


def test_function_accepts_data_arrays_and_lists_together(difference, two_ranks_per_test):
    f = difference()
    expected = X * Y[:, None] + 2
    assert_same(f(synk.data(X), Y, 2), expected)
    assert_same(f(X, synk.data(Y), synk.data(2.0)), expected)
    assert_same(f(X.tolist(), Y.tolist(), 2.0), expected)
    assert_same(f(X.astype("float32"), Y, 2), X.astype("float32") * Y[:, None] + 2)


def test_function_accepts_inputs_by_name(difference, two_ranks_per_test):
    f = difference()
    expected = X * Y[:, None] + 2
    assert_same(f(b=2, x=X, y=Y), expected)
    assert_same(f(X, b=2, y=synk.data(Y)), expected)


def test_function_takes_a_data_object_twice(two_ranks_per_test):
    x, y = T.dvectors("x", "y")
    f = synk.function([x, y], (x * y, "sum"))
    d = synk.data(np.arange(4.0))
    np.testing.assert_array_equal(f(d, d), [0 + 4, 1 + 9])


@pytest.mark.parametrize("batch", [5, slice(4, 8), slice(7, 3, -2)])
def test_minibatch_row_0_is_the_lowest_index(difference, batch, two_ranks_per_test):
    f = difference()
    low = select_rows(batch, 9).min()
    mini = synk.data(X[low:], minibatch=True)
    np.testing.assert_array_equal(f(mini, Y, 0, batch=batch), f(X, Y, 0, batch=batch))
    # An array is used whole, even beside a minibatch; and all inputs may be minibatches.
    result = f(mini, synk.data(Y[low:], minibatch=True), 0, batch=batch)
    np.testing.assert_array_equal(result, f(X, Y, 0, batch=batch))


@pytest.mark.parametrize(
    "batch", [[7, 4, 4, 6], [8, 0, 3], range(7, 2, -2), np.array([5, 1]), np.arange(9) % 2 == 0, np.arange(9) > 9, []]
)
@pytest.mark.parametrize("n_spare_rows", [0, 2])
def test_minibatch_rows_follow_the_index_list(difference, batch, n_spare_rows, two_ranks_per_test):
    # As in training from files: the order is shuffled, and the next rows are read into a minibatch.
    f = difference()
    rows = select_rows(batch, 9)
    mini_x, mini_y = (
        synk.data(np.concatenate([value[rows], value[:n_spare_rows]]), minibatch=True) for value in (X, Y)
    )
    whole_x, whole_y = synk.data(X), synk.data(Y)
    for x, y in ((mini_x, Y), (mini_x, whole_y), (whole_x, mini_y), (mini_x, mini_y)):
        np.testing.assert_array_equal(f(x, y, 0, batch=batch), X[rows] * Y[rows, None])
        np.testing.assert_array_equal(f(x, y, 0, batch=batch, num_slices=2), X[rows] * Y[rows, None])


def test_minibatches_without_batch_are_used_whole(difference, two_ranks_per_test):
    f = difference()
    x, y = synk.data(X, minibatch=True), synk.data(Y, minibatch=True)
    np.testing.assert_array_equal(f(x, y, 0), X * Y[:, None])


def test_minibatches_refuse_rows_that_they_lack(difference, two_ranks_per_test):
    f = difference()
    x, y = synk.data(X, minibatch=True), synk.data(Y, minibatch=True)
    for batch in (-1, [-1], [3, -2], slice(-3, None), slice(2, None)):
        with raises((ValueError, IndexError), "batch"):
            f(x, y, 0, batch=batch)
    for batch in ([1, 2, 1, 2], slice(2, 6)):
        with raises(IndexError, "batch"):
            f(synk.data(X[:3], minibatch=True), Y, 0, batch=batch)


def test_batch_selects_from_inputs_of_different_lengths(difference, two_ranks_per_test):
    f = difference()
    for batch in (6, slice(2, 6), [5, 0, 6]):
        rows = select_rows(batch, 7)
        np.testing.assert_array_equal(f(X, Y[:7], 0, batch=batch), X[rows] * Y[rows, None])


def test_batch_must_select_equal_rows_of_all_inputs(difference, two_ranks_per_test):
    f = difference()
    for batch in (None, slice(2, None), slice(-3, None), slice(None, -1), [-1, 0], [8], 8):
        with raises((ValueError, IndexError)):
            f(X, Y[:7], 0, batch=batch)


def test_results_do_not_alias_reused_inputs(two_ranks_per_test):
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
    # Each rank reuses the buffer into which it copies picked rows.
    fork(n)
    x = T.dmatrix("x")
    f = synk.function([x], [(x, "gather"), (x, None), (x[::2], "gather")])
    d = synk.data(X)
    first = f(d, batch=[0, 1, 2, 3])
    copies = [result.copy() for result in first]
    second = f(d, batch=[8, 7, 6, 5])
    for first_result, copy, second_result in zip(first, copies, second, strict=True):
        np.testing.assert_array_equal(first_result, copy)
        assert not np.shares_memory(first_result, second_result) and not np.shares_memory(first_result, d.data)


@pytest.mark.parametrize("batch", [None, [3, 1, 2]])
def test_update_by_an_input_does_not_alias_it(batch, two_ranks_per_test):
    x, b = T.dmatrix("x"), T.dvector("b")
    rows, whole = shared(np.zeros((1, 2)), "rows"), shared(np.zeros(1), "whole")
    f = synk.function([x], bcast_inputs=[b], updates=[(rows, x), (whole, b)])
    d, e = synk.data(X), synk.data(Y)
    f(d, e, batch=batch)
    expected = X[select_rows(batch, 9)]
    d[:], e[:] = 0, 0
    f.as_theano(X[:1] * 0, Y)  # set the master's variables, and read the workers'
    np.testing.assert_array_equal(synk.get_value(1, rows), np.array_split(expected, 2)[1])
    np.testing.assert_array_equal(synk.get_value(1, whole), Y)


@pytest.mark.parametrize("batch", [None, slice(0, 6), [0, 1, 2]])
def test_mutable_input_does_not_change_data(batch, two_ranks_per_test):
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


def test_in_renames_and_allows_downcast(two_ranks_per_test):
    x = T.fvector("x")
    f = synk.function([In(x, name="rows", allow_downcast=True)], (x, "gather"))
    np.testing.assert_array_equal(f(rows=np.array([0.1, 0.2])), np.array([0.1, 0.2], "float32"))
    with raises(TypeError, "x"):
        synk.function([x], (x, "gather"))(np.array([0.1, 0.2]))


def test_input_with_the_name_of_an_option_is_passed_by_position(two_ranks_per_test):
    x, batch = T.dvector("x"), T.dvector("batch")
    f = synk.function([x, batch], (x * batch, "gather"), name="f")
    np.testing.assert_array_equal(f(np.ones(3), np.ones(3) * 2, batch=[2, 0]), [2, 2])
    with raises(TypeError, "batch"):
        f(np.ones(3), batch=np.ones(3))


@pytest.mark.skipif(NAME != "theano", reason="PyTensor's inputs have no defaults")
def test_input_with_a_default_and_the_name_of_an_option_is_refused(two_ranks_per_test):
    x = T.dvector("x")
    with raises(ValueError, "batch"):  # f(batch=...) would select rows of the default
        synk.function([In(x, name="batch", value=np.ones(3))], (x, "gather"))


def test_allow_input_downcast_casts_inputs(two_ranks_per_test):
    x, b = T.fvector("x"), T.iscalar("b")
    f = synk.function([x], (x * b, "gather"), bcast_inputs=[b], allow_input_downcast=True)
    np.testing.assert_array_equal(f(np.array([0.1, 0.2]), 2.9), np.array([0.1, 0.2], "float32") * 2)
    g = synk.function([In(x, allow_downcast=False)], (x, "gather"), allow_input_downcast=True)
    with raises(TypeError, "x"):
        g(np.array([0.1, 0.2]))


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


def test_function_accepts_out_with_borrow(two_ranks_per_test):
    x = T.dmatrix("x")
    f = synk.function([x], (Out(x * 2, borrow=True), "gather"))
    np.testing.assert_array_equal(f(X), X * 2)
    np.testing.assert_array_equal(f(X, num_slices=2), X * 2)


# -- as_theano and build_inputs --------------------------------------------------------------------------------


def test_as_theano_runs_only_in_the_master(two_ranks_per_test):
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


def test_build_inputs_makes_data_for_the_inputs(difference, two_ranks_per_test):
    f = difference()
    x, y, b = f.build_inputs(X, Y, b=2.0, minibatch=[False, True, False], oversize=1.5)
    assert (x.name, y.name, b.name) == ("x", "y", "b")
    assert (x.minibatch, y.minibatch, b.minibatch) == (False, True, False)
    assert x.alloc_size >= 1.5 * X.size
    assert_same(f(x, y, b), X * Y[:, None] + 2)
    with raises(TypeError, "value"):
        synk.function([T.fvector("z")]).build_inputs(Y)
    forced = synk.function([T.fvector("z")]).build_inputs(Y, force_cast=True)
    assert isinstance(forced, synk.Data) and forced.dtype == "float32"


def test_name_of_several_inputs_is_refused(two_ranks_per_test):
    first, second = T.dvector("x"), T.dvector("x")
    f = synk.function([first, second], ((first - second).sum(), "sum"), name="f")
    assert float(f(np.ones(3), np.zeros(3))) == 3
    with raises(TypeError, "several"):
        f(np.ones(3), x=np.zeros(3))
