"""Updates of functions, batches without rows, and num_slices."""

from unittest import mock

import numpy as np
import pytest
from function_cases import X, Y, assert_close
from hypothesis import given
from hypothesis import strategies as st
from library import function, grad, limit_examples, shared
from library import tensor as T
from messages import raises

import synkhronos as synk
from synkhronos.functions.call import RankCall

pytestmark = pytest.mark.usefixtures("rewrites")


# -- rows for nobody -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slices", [1, 3])
def test_rank_without_rows_is_skipped(fork, slices):
    fork(3)
    x = T.dvector("x")
    last_sum = shared(np.float64(-1), "last_sum")
    f = synk.function([x], [(x.max(), "max"), (x.min(), "min"), x.sum(), x.sum()], updates=[(last_sum, x.max())])
    high, low, average, _ = f(np.array([5.0, 3.0]), num_slices=slices)
    assert (high, low, average) == (5, 3, 4)
    np.testing.assert_array_equal(synk.gather(last_sum), [5, 3, -1])


@pytest.mark.parametrize("master", [0, 1])
def test_master_without_rows_has_no_own_value(fork, master):
    fork(2, master_rank=master)
    x = T.dvector("x")
    row = np.array([3.0])
    master_value = np.asarray(6.0) if master == 0 else None
    for outputs in (
        [((x * 2).sum(), None)],
        [((x * 2).sum(), None), (x, "sum")],
        [((x * 2).sum(), None), (x.sum(), "sum")],
    ):
        results = synk.function([x], outputs, on_unused_input="ignore")(row)
        assert results[0] == master_value and len(results) == len(outputs)
    assert synk.function([x], ((x * 2).sum(), None))(row) == master_value


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("large", [False, True])
def test_batch_of_no_rows_equals_serial(slices, large, two_ranks_per_test):
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
def test_batch_of_no_rows_updates_nothing(slices, ndim, two_ranks_per_test):
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


def test_failed_call_without_rows_applies_updates_on_no_rank(two_ranks_per_test, monkeypatch):
    x, count = T.dvector("x"), shared(0.0, "count")
    f = synk.function([x], (x.sum(), "sum"), updates=[(count, count + 1)])
    monkeypatch.setattr(RankCall, "get_outputs", mock.Mock(side_effect=MemoryError))  # in the master alone
    with pytest.raises(MemoryError) as caught:
        f(Y, batch=[])
    assert caught.value.__notes__ == ["The function's updates were applied on no rank."]


def test_batch_of_no_rows_raises_like_serial(two_ranks_per_test):
    x = T.dvector("x")
    f = synk.function([x], (x.max(), "max"))
    with pytest.raises(ValueError):
        function([x], x.max())(Y[:0])
    with pytest.raises(ValueError):
        f(Y[:0])
    assert f(Y) == Y.max()


# -- updates ---------------------------------------------------------------------------------------------------


UPDATE_OPS = ["avg", "mean", "sum", "prod", "min", "max", "gather", None]


def accumulate_slices(op, values, weights):
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
    # Each slice reads all variables after the updates of the previous slices.
    old = sum(w.sum() for op, w in ws.items() if op != "gather")
    expressions = {op: w[:2] + (x * 2).sum(axis=0) / 10 for op, w in ws.items()}
    spelled = {op: op if op is None else prefix + op for op in UPDATE_OPS}
    f = synk.function(
        [x],
        [(x * old, "gather")],
        updates=[(ws[op], expressions[op], spelled[op]) for op in UPDATE_OPS],
    )

    @limit_examples(20)
    @given(st.integers(1, 20), st.integers(1, 6))
    def check(length, slices):
        for w in ws.values():
            synk.broadcast(w, start)
        value = np.resize(X, (length, 2))
        assert_close(f(value, num_slices=slices)[0], value * -7.0)
        split = np.array_split(value, n)
        for op, w in ws.items():
            for r, part in enumerate(split):
                rank_value = synk.get_value(r, w)
                if not len(part):
                    np.testing.assert_array_equal(rank_value, start)
                    continue
                pieces = np.array_split(part, min(slices, len(part)))
                values = [start + (piece * 2).sum(axis=0) / 10 for piece in pieces]
                assert_close(rank_value, accumulate_slices(op, values, [len(p) for p in pieces]))

    check()


def test_updates_on_each_rank_equal_serial(two_ranks_per_test):
    x, lr = T.dmatrix("x"), T.dscalar("lr")
    w = shared(np.ones(2), "w")
    loss = ((x * w).sum(axis=1) ** 2).mean()
    train = synk.function([x], loss, bcast_inputs=[lr], updates={w: w - lr * grad(loss, w)})
    v = shared(np.ones(2), "v")
    serial_loss = ((x * v).sum(axis=1) ** 2).mean()
    serial = function([x, lr], serial_loss, updates=[(v, v - lr * grad(serial_loss, v))])
    for _ in range(3):
        value = train(X[:8], 0.1)
        synk.all_reduce(w)  # equal shares: the average is the gradient over all rows
        assert_close(value, serial(X[:8], 0.1))
    assert_close(synk.get_value(1, w), v.get_value())
    assert_close(w.get_value(), v.get_value())


def test_updates_may_be_a_dict_with_ops(two_ranks_per_test):
    x = T.dvector("x")
    low, last = shared(0.0, "low"), shared(0.0, "last")
    f = synk.function([x], updates={low: (x.min(), "min"), last: (x[-1], None)})
    f(np.array([1.0, 2, 3, 4, 5, 6]), num_slices=3)
    np.testing.assert_array_equal(synk.gather([low, last]), [[1, 4], [3, 6]])
    assert f.update_modes == ["min", None]


def test_updates_of_integers_need_an_integer_op(two_ranks_per_test):
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
def test_default_update_is_applied_once_with_num_slices(dtype, two_ranks_per_test):
    x = T.dvector("x")
    count = shared(np.zeros((), dtype), "count")
    count.default_update = count + 1
    f = synk.function([x], [(x * 0 + count, "gather")])
    f(np.ones(6))
    np.testing.assert_array_equal(f(np.ones(6), num_slices=3)[0], np.ones(6))
    np.testing.assert_array_equal(synk.gather(count), [2, 2])


@pytest.mark.filterwarnings("ignore:Setting default_update is deprecated")
def test_update_replaces_the_default_update_of_each_slice(two_ranks_per_test):
    x = T.dvector("x")
    count = shared(0.0, "count")
    count.default_update = count + 1
    f = synk.function([x], [(x * 0 + count, "gather")], updates=[(count, count + x.sum(), "sum")])
    np.testing.assert_array_equal(f(np.ones(6), num_slices=3)[0], np.zeros(6))
    np.testing.assert_array_equal(synk.gather(count), [3, 3])


@pytest.mark.filterwarnings("ignore:Setting default_update is deprecated")
def test_functions_that_share_a_default_update_may_be_sent_apart(two_ranks_per_test):
    x = T.dvector("x")
    total = shared(0.0, "total")
    total.default_update = total + x.sum()
    f = synk.function([x], (x + total, "gather"))
    f(np.ones(6))
    g = synk.function([x], (x - total, "gather"))  # is sent alone: the workers have the variable
    np.testing.assert_array_equal(g(np.full(6, 2.0)), np.full(6, -1.0))
    np.testing.assert_array_equal(f(np.ones(6)), np.full(6, 10.0))
    np.testing.assert_array_equal(f(np.ones(6), num_slices=3), np.full(6, 13.0))
    np.testing.assert_array_equal(synk.gather(total), [13, 13])  # the average over slices


def test_num_slices_divides_each_ranks_rows(two_ranks_per_test):
    x = T.dvector("x")
    lengths = shared(np.zeros(0, "int64"), "lengths")
    f = synk.function([x], updates=[(lengths, x.shape, "gather")])
    f(np.ones(15), num_slices=3)
    assert [part.tolist() for part in synk.gather(lengths)] == [[3, 3, 2], [3, 2, 2]]
    f(np.ones(3), num_slices=9)  # no more pieces than rows
    assert [part.tolist() for part in synk.gather(lengths)] == [[1, 1], [1]]
