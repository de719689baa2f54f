"""Results of calls on JAX arrays, which the master reads from the ranks at the first access."""

import copy
import math
import operator
import os
import pickle
import signal

import numpy as np
import pytest
from faults.harness import list_called_functions
from library import XLA, read_results, shared
from library import tensor as T

import synkhronos as synk
from synkhronos import ranks
from synkhronos.engines.lazy import _MAX_DROPPABLE_CALLS, Result, ResultTable, _get_stored_outputs
from synkhronos.ranks import Command

pytestmark = pytest.mark.skipif(not XLA, reason="about JAX arrays")

VALUE = np.arange(4.0)


@pytest.fixture
def double(fork):
    """Make a function that returns a sum, and twice its input."""
    fork(2)
    x = T.dvector("x")
    return synk.function([x], [(x.sum(), "sum"), (x * 2, "gather")])


USES = {
    "add": lambda r: r + 1,
    "add from the right": lambda r: 1 + r,
    "two": lambda r: r * r - r,
    "an array on the left": lambda r: np.ones(4) / (1 + r),
    "negative": lambda r: -r,
    "power": lambda r: r**2,
    "divmod": lambda r: divmod(r, 3)[1],
    "product": lambda r: r @ np.ones(4),
    "compare": lambda r: (r > 2) & (r != 6),
    "equal": lambda r: r == np.array([0, 2, 4, 6]),
    "ufunc": np.sin,
    "ufunc's method": np.add.reduce,
    "function": lambda r: np.mean(r, axis=0),
    "concatenate": lambda r: np.concatenate([r, [1], r]),
    "stack": lambda r: np.stack([r, r]),
    "where": lambda r: np.where(r > 2, r, 0),
    "an item": lambda r: r[1],
    "a slice": lambda r: r[::-2],
    "indexes": lambda r: r[[0, 3]],
    "a mask": lambda r: r[r > 1],
    "a new axis": lambda r: r[:, None],
    "method": lambda r: r.reshape(2, 2).sum(axis=1),
    "attribute": lambda r: r.T,
    "shape": lambda r: (*r.shape, r.ndim, r.size, r.nbytes, len(r)),
    "dtype": lambda r: r.dtype,
    "astype": lambda r: r.astype("float32"),
    "iteration": lambda r: [float(v) for v in r],
    "in": lambda r: (4.0 in r, 5.0 in r),
    "tolist": lambda r: r.tolist(),
    "asarray": np.asarray,
    "asarray with a dtype": lambda r: np.asarray(r, "float32"),
    "array": np.array,
    "an index": lambda r: np.arange(9)[r.astype(int)],
    "repr": repr,
    "str": str,
    "format": lambda r: f"{r}",
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda r: pickle.loads(pickle.dumps(r)),
}


def test_lazy_result_is_used_as_its_array(double):
    for name, use in USES.items():
        result = double(VALUE)[1]
        assert type(result) is Result
        actual, expected = use(result), use(VALUE * 2)
        np.testing.assert_array_equal(actual, expected, err_msg=name)
        assert type(actual) is type(expected), name


SCALAR_USES = {
    "float": float,
    "int": int,
    "complex": complex,
    "bool": bool,
    "format": lambda r: f"{float(r):.2f}",
    "percent": lambda r: "%.3f %d" % (r, r),  # noqa: UP031
    "sqrt": math.sqrt,
    "sum": lambda r: sum([r, r]),
    "max": lambda r: float(max([r, r * 2])),
    "item": lambda r: r.item(),
    "less": lambda r: r < 7,
}


def test_lazy_scalar_result_is_used_as_a_number(double):
    for name, use in SCALAR_USES.items():
        assert use(double(VALUE)[0]) == use(np.asarray(6.0)), name


def test_lazy_integer_result_is_an_index(two_ranks_per_test):
    x = T.lvector("x")
    count = synk.function([x], (x.sum(), "sum"))(np.array([1, 2]))
    assert operator.index(count) == 3
    assert list(range(count)) == [0, 1, 2]


def test_lazy_mask_selects_elements_of_a_ufunc(two_ranks_per_test):
    x = T.dvector("x")
    mask = synk.function([x], (x > 1, "gather"))(VALUE)
    np.testing.assert_array_equal(np.add(VALUE, 1, where=mask, out=np.zeros(4)), [0, 0, 3, 4])
    assert np.sum(VALUE, where=mask) == 5


def test_lazy_result_is_writable(double):
    (_, first), (_, second) = double(VALUE), double(VALUE)
    first[0] = 7
    first[2:] += 1
    np.testing.assert_array_equal(first, [7, 2, 5, 7])
    np.add(first, 1, out=first)
    np.testing.assert_array_equal(first, [8, 3, 6, 8])
    other = first
    other += 1
    np.testing.assert_array_equal(other, [9, 4, 7, 9])
    np.testing.assert_array_equal(first, other)
    np.testing.assert_array_equal(second, VALUE * 2)
    total = double(VALUE)[0]
    total[...] = 3
    assert total == 3


def test_writes_into_a_lazy_result_stay_local(two_ranks_per_test):
    w = shared(np.ones(3), "w")
    read_w = synk.function([], (w, None))
    result = read_w()
    result[:] = 7
    np.testing.assert_array_equal(read_w(), [1, 1, 1])
    np.testing.assert_array_equal(w.get_value(), [1, 1, 1])


def test_lazy_result_copies_are_independent(double):
    result = double(VALUE)[1]
    for duplicate in (copy.copy(result), copy.deepcopy(result), result.copy(), np.array(result)):
        duplicate[0] = 9
    np.testing.assert_array_equal(result, VALUE * 2)


def test_unread_results_can_be_read_after_close(double):
    total, doubled = double(VALUE)
    synk.close()
    assert total == 6
    np.testing.assert_array_equal(doubled, VALUE * 2)


@pytest.mark.new_ranks
def test_unread_results_are_lost_when_a_worker_dies(fork):
    fork(2)
    x = T.dvector("x")
    f = synk.function([x], (x.sum(), "sum"))
    before, unread = f(VALUE), f(VALUE + 1)
    assert before == 6  # reads all results
    assert unread == 10
    unread = f(VALUE)
    os.kill(next(iter(ranks.get_session().worker_pids.values())), signal.SIGKILL)
    with pytest.raises(synk.WorkerError, match="SIGKILL"):
        float(unread)
    with pytest.raises(RuntimeError, match=r"ended|SIGKILL"):
        float(unread)
    assert before == 6
    fork(2)
    assert f(VALUE) == 6


class CountUnread(Command):
    """Command that returns the number of calls whose outputs each rank caches."""

    def run(self, rank):
        return rank.all_gather(len(_get_stored_outputs(rank)))


def count_stored():
    """Return the number of calls whose outputs each rank caches."""
    return ranks.get_session().run(CountUnread())


def count_dropped():
    """Return the number of results that the next message to the ranks drops."""
    return len(ResultTable.get_or_create(ranks.get_session())._droppable_numbers)


def test_results_are_read_by_one_fetch(double):
    before = count_stored()[0] - count_dropped()
    results = [double(VALUE + i) for i in range(5)]
    assert count_stored() == [before + count_dropped() + 5] * 2
    assert float(results[2][0]) == 6 + 4 * 2
    assert count_stored() == [before + count_dropped()] * 2
    assert all(total._call.values is not None for total, _ in results)
    assert [float(total) for total, _ in results] == [6 + 4.0 * i for i in range(5)]


@pytest.mark.parametrize("sizes", [[7] * 6, [7, 7, 1, 7, 5, 1, 1], [2, 2, 0, 0, 7]])
def test_results_of_many_calls_are_separate(sizes, two_ranks_per_test):
    # Scalars of many calls are reduced together if the ranks had the same numbers of rows in all of them.
    x, n = T.fvector("x"), T.lvector("n")
    numbers = [
        (x.sum(), "sum"), (x.mean(), "mean"), (x.max() if all(sizes) else x.sum(), "avg"), (n.sum(), "sum"),
        (n.prod(), "prod"), (x.sum().astype("float16"), "mean"), (x.sum() > 2, "max"), (x.sum(), None), (n.sum(), "gather"),
    ]  # fmt: skip
    functions = [synk.function([x, n], numbers[:8]), synk.function([x, n], numbers[6:])]
    values = np.random.default_rng(5).normal(size=7).astype("float32"), np.arange(7)
    calls = [(f, size) for size in sizes for f in functions]

    def run(f, size):
        return f(*values, batch=size)

    read_at_once = [[np.array(result) for result in run(f, size)] for f, size in calls]
    read_together = [run(f, size) for f, size in calls]
    for results, expected in zip(read_together, read_at_once, strict=True):
        for result, value in zip(results, expected, strict=True):
            assert np.asarray(result).dtype == value.dtype
            np.testing.assert_array_equal(result, value)


def test_dropped_results_are_freed(double):
    for _ in range(2 * _MAX_DROPPABLE_CALLS + 10):
        double(VALUE)
    assert max(count_stored()) <= _MAX_DROPPABLE_CALLS + 1
    results = double(VALUE)
    for _ in range(2 * _MAX_DROPPABLE_CALLS):
        double(VALUE + 1)
    assert results[0] == 6
    assert max(count_stored()) <= _MAX_DROPPABLE_CALLS + 1
    for _ in range(2 * _MAX_DROPPABLE_CALLS):
        assert float(double(VALUE)[0]) == 6
    assert max(count_stored()) <= _MAX_DROPPABLE_CALLS + 1


def test_dropped_results_run_no_finalizer_code(double):
    results = double(VALUE)
    assert list_called_functions(results.clear) == []


def test_large_dropped_results_are_freed_early(two_ranks_per_test):
    x = T.dvector("x")
    f = synk.function([x], (x * 2, "gather"))
    value = synk.data(np.ones(1 << 20))  # half of its eight megabytes on each rank
    for _ in range(20):
        f(value)
    assert max(count_stored()) <= 6
    for _ in range(20):
        assert f(value).sum() == 2 << 20
    assert max(count_stored()) <= 6


def test_irreducible_result_raises_when_read_others_do_not(two_ranks_per_test):
    x = T.dvector("x")
    f, g = synk.function([x], (x, "sum")), synk.function([x], (x.sum(), "sum"))
    good, bad, better = g(VALUE), f(np.ones(3)), f(VALUE)
    np.testing.assert_array_equal(better, [2, 4])
    assert good == 6
    for _ in range(2):
        with pytest.raises(ValueError, match="'sum' needs the same shape on all ranks"):
            read_results(bad)
    assert g(VALUE) == 6


def test_missing_scalar_leaves_other_results(two_ranks_per_test):
    # Workers send scalars without waiting for the master, so they must keep them whatever happens there.
    s = shared(np.zeros(1), "s")
    largest = synk.function([], (s.max(), "max"), sliceable_shareds=[s])
    total = synk.function([], (s.sum(), "sum"), sliceable_shareds=[s])
    synk.distribute()
    synk.scatter(s, np.arange(8.0))
    results = [total(batch_s=[0]), largest(batch_s=[[], []]), total(batch_s=[1]), largest(batch_s=[[], [1]])]
    assert [float(results[i]) for i in (0, 2, 3)] == [4.0, 6.0, 5.0]
    with pytest.raises(ValueError, match="zero-size|empty|identity"):
        float(results[1])
    assert float(total(batch_s=[0])) == 4.0


def test_output_subset_selects_lazy_results(double):
    before = count_stored()[0] - count_dropped()
    assert len(double(VALUE, output_subset=[])) == 0
    (only,) = double(VALUE, output_subset=[1])
    np.testing.assert_array_equal(only, VALUE * 2)
    assert count_stored() == [before + count_dropped()] * 2
