"""Sliceable shared variables: givens, batch_s and num_slices."""

import numpy as np
import pytest
from function_cases import RNG, X, assert_close, select_rows
from hypothesis import example, given
from hypothesis import strategies as st
from library import NAME, function, limit_examples, shared
from library import tensor as T
from messages import raises

import synkhronos as synk

pytestmark = pytest.mark.usefixtures("rewrites")


# -- updates of sliced variables ------------------------------------------------------------------------------------------


SELECTIONS = pytest.mark.parametrize("selection", [{"num_slices": 2}, {"batch_s": slice(0, 2)}], ids=["slices", "rows"])


@SELECTIONS
def test_batch_s_and_num_slices_refuse_updates_of_a_sliced_variable(selection, two_ranks_per_test):
    s = shared(np.arange(4.0), "s")
    f = synk.function([], (s.sum(), "sum"), updates=[(s, 2 * s)], sliceable_shareds=[s], name="f")
    (argument,) = selection
    with pytest.raises(ValueError, match=f"^{argument}: f updates 's', which is one of its sliceable_shareds"):
        f(**selection)
    assert synk.get_lengths(s) == [4, 4]
    np.testing.assert_array_equal(synk.gather(s), [[0, 1, 2, 3]] * 2)


def test_updates_of_a_sliced_variable_need_no_selection(two_ranks_per_test):
    s = shared(np.arange(4.0), "s")
    f = synk.function([], (s.sum(), "sum"), updates=[(s, 2 * s)], sliceable_shareds=[s])
    assert float(f()) == 12
    np.testing.assert_array_equal(synk.gather(s), [[0, 2, 4, 6]] * 2)


@SELECTIONS
def test_other_variables_are_updated_from_selected_rows(selection, two_ranks_per_test):
    s, target = shared(np.arange(4.0), "s"), shared(np.zeros(4), "target")
    f = synk.function([], [], updates=[(target, s + 1, "gather")], sliceable_shareds=[s])
    f(**selection)
    np.testing.assert_array_equal(synk.get_value(1, target), [1, 2, 3, 4][: 4 if "num_slices" in selection else 2])


@pytest.mark.skipif(NAME == "pytensor", reason="Theano's default updates")
def test_batch_s_refuses_default_updates_of_a_sliced_variable(two_ranks_per_test):
    cut = shared(np.arange(4.0), "cut")
    cut.default_update = 2 * cut
    f = synk.function([], (cut.sum(), "sum"), sliceable_shareds=[cut], name="f")
    with raises(ValueError, "batch_s"):
        f(batch_s=[0])


# -- givens and sliceable shared variables ---------------------------------------------------------------------


def test_givens_replace_a_variable(two_ranks_per_test):
    x, y = T.dmatrix("x"), T.dvector("y")
    w = shared(np.array([2.0, 3.0]), "w")
    f = synk.function([x], (x * y, "gather"), givens=[(y, w + 1)])
    np.testing.assert_array_equal(f(X), X * [3, 4])
    np.testing.assert_array_equal(f(X, num_slices=2), X * [3, 4])


def test_givens_of_sliceable_shareds_are_sliced(two_ranks_per_test):
    # As for a data set that is distributed over the ranks' memory.
    x = T.dmatrix("x")
    s = shared(X, "s")
    f = synk.function([], [((x * 2).sum(axis=0), "sum")], givens={x: s}, sliceable_shareds=[s])
    synk.distribute()
    synk.scatter(s, X)
    assert_close(f()[0], (X * 2).sum(axis=0))
    assert_close(f(num_slices=3)[0], (X * 2).sum(axis=0))
    assert_close(f(batch_s=slice(1, 3))[0], (X[[1, 2, 6, 7]] * 2).sum(axis=0))
    assert_close(f(batch_s=[[0], [3, 0]])[0], (X[[0, 8, 5]] * 2).sum(axis=0))


def test_givens_inside_the_graph_with_num_slices(two_ranks_per_test):
    s = shared(np.arange(6.0), "s")
    doubled = s * 2
    output = (doubled + 1).sum()
    f = synk.function([], (output, "sum"), givens={doubled: s * 10}, sliceable_shareds=[s])
    synk.distribute()
    synk.scatter(s, np.arange(6.0))
    serial_f = function([], output, givens={doubled: s * 10})
    s.set_value(np.arange(6.0))
    expected = serial_f()
    synk.scatter(s, np.arange(6.0))
    assert f() == f(num_slices=2) == f(batch_s=slice(0, 3)) == expected == 15 * 10 + 6


@st.composite
def draw_batch_s(draw, lengths):
    """Draw a `batch_s` for ranks with these numbers of rows."""

    def spans(length):
        bound = st.none() | st.integers(-length - 1, length + 1)
        return st.builds(slice, bound, bound, st.sampled_from([None, None, 1, 2, -1]))

    def indexes(length):
        return st.lists(st.integers(-length, length - 1), max_size=6)

    shortest = min(lengths)
    selection = spans(shortest) | indexes(shortest) | indexes(shortest).map(lambda i: np.array(i, "int64"))
    selections = st.tuples(*(spans(length) | indexes(length) for length in lengths)).map(list)
    return draw(st.none() | selection | selections)


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

    @limit_examples(40)
    @given(draw_batch_s([len(part) for part in split]), st.sampled_from([1, 1, 2, 5]))
    @example(slice(0, 3), 2)
    @example([0, 1, -1], 2)
    def check(choice, slices):
        per_rank = [choice] * n
        if isinstance(choice, list) and choice and isinstance(choice[0], slice | list):
            per_rank = choice
        rows = np.concatenate(
            [part[select_rows(selection, len(part))] for part, selection in zip(split, per_rank, strict=True)]
        )
        results = f(batch_s=choice, num_slices=slices)
        assert_close(results[0], value[rows].sum(axis=0))
        assert_close(results[1], value[rows] * numbers[rows, None])
        with np.errstate(invalid="ignore", divide="ignore"):
            if len(rows):
                assert_close(results[2], np.asarray(numbers[rows].mean()))
            else:
                assert np.isnan(results[2])

    check()


@pytest.mark.parametrize("selection", [slice(-2, None), [-1]], ids=str)
def test_batch_s_refuses_different_rows_of_sliceable_variables(selection, two_ranks_per_test):
    long, short = shared(np.arange(5.0), "long"), shared(np.arange(3.0), "short")
    f = synk.function([], [(long + 0, "gather"), (short + 0, "gather")], sliceable_shareds=[long, short])
    with pytest.raises(ValueError, match=r"'short'\] have \[5, 3\] rows on rank 0, and batch_s selects different rows"):
        f(batch_s=selection)
    for same, rows in ((slice(2), [0, 1]), ([2, 0], [2, 0]), (slice(0, 5), [0, 1, 2])):
        np.testing.assert_array_equal(f(batch_s=same), [rows * 2] * 2)


@pytest.mark.parametrize("n", [1, 2])
def test_own_value_of_the_master_without_rows_on_any_rank_is_that_of_zero_rows(fork, n):
    fork(n)
    s = shared(np.arange(4.0), "s")
    f = synk.function([], [(s.sum(), None), (2 * s, None)], sliceable_shareds=[s])
    total, double = f(batch_s=slice(0, 0))
    assert total == 0 and np.shape(double) == (0,)


def test_rank_without_batch_s_rows_contributes_nothing(fork):
    fork(3)
    s = shared(np.arange(4.0), "s")
    maximum = shared(0.0, "maximum")
    f = synk.function([], [(s.max(), "max"), s.sum()], updates=[(maximum, s.max())], sliceable_shareds=[s])
    total_maximum, average_sum = f(batch_s=[[0], [], [1, 2]])
    assert (total_maximum, average_sum) == (2, 1.5)
    np.testing.assert_array_equal(synk.gather(maximum), [0, 0, 2])


def test_batch_s_and_batch_select_independently(two_ranks_per_test):
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


def test_num_slices_may_exceed_the_sliceable_rows(two_ranks_per_test):
    x = T.dvector("x")
    s = shared(np.array([2.0, 4.0]), "s")
    f = synk.function([x], (x.sum() * 0 + s.mean(), "avg"), sliceable_shareds=[s])
    # Slices are weighted by rows of x, of which each slice has two.
    assert f(np.ones(8)) == f(np.ones(8), num_slices=2) == f(np.ones(8), num_slices=5) == 3


@pytest.mark.parametrize("choice", [[4], [-5], [[0], [7]]])
def test_batch_s_out_of_range_changes_nothing(choice, two_ranks_per_test):
    s, count = shared(np.arange(4.0), "s"), shared(0.0, "count")
    f = synk.function([], (s.sum(), "sum"), updates=[(count, count + 1)], sliceable_shareds=[s])
    with pytest.raises(IndexError, match=r"batch_s: index -?\d is out of range for 4 rows on rank [01]"):
        f(batch_s=choice)
    np.testing.assert_array_equal(synk.gather(count), [0, 0])
    assert f() == 12


def test_num_slices_of_sliceable_shareds_weigh_by_rows(two_ranks_per_test):
    s = shared(np.arange(7.0), "s")
    f = synk.function([], [(s.mean(), "mean"), s.mean()], sliceable_shareds=[s])
    synk.distribute()
    synk.scatter(s, np.arange(7.0))
    mean, average = f(num_slices=2)
    assert_close(mean, np.asarray(3.0))
    # The average over ranks, each with the mean of its rows, as without slices.
    assert_close(average, np.asarray((1.5 + 5) / 2))
    assert_close(f()[1], average)
