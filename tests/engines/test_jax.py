"""JAX arrays: lazy results, donated memory, workers that start as new processes.

The tests start XLA in this process, after which workers start as new processes rather than forks.  So they run only
with SYNKHRONOS_TEST_DEVICE=jax or gpu.
"""

import copy
import ctypes
import gc
import math
import operator
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from faults.harness import code_run_by
from library import DEVICE, INTERPRETED, XLA, read_results, shared
from library import tensor as T
from system import LIMIT, lives

import synkhronos as synk
from synkhronos import ranks
from synkhronos.devices import JAX
from synkhronos.devices.jax.scalar_log import LOG_CAPACITY, ScalarLog
from synkhronos.engines.lazy import _MAX_CALLS, Result, ResultTable, _get_unread
from synkhronos.engines.xla import XlaEngine
from synkhronos.engines.xla.executable import Executable
from synkhronos.engines.xla.trace import TracedReduction
from synkhronos.function.computation import DEFAULT_VARIANT
from synkhronos.graphs import library_of
from synkhronos.launch.model_class.model_variables import group_variables
from synkhronos.ranks import Command
from synkhronos.ranks.interrupts import defer_signals
from synkhronos.training import make_train_function, make_train_function_serial
from synkhronos.training.updates import adam, momentum, sgd

pytestmark = pytest.mark.skipif(not XLA, reason="these are about JAX arrays")

VALUE = np.arange(4.0)


@pytest.fixture
def double(fork):
    """Make a function that returns a sum, and twice its input."""
    fork(2)
    x = T.dvector("x")
    return synk.function([x], [(x.sum(), "sum"), (x * 2, "gather")])


# -- results ---------------------------------------------------------------------------------------------------

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


def test_lazy_integer_result_is_an_index(fork):
    fork(2)
    x = T.lvector("x")
    count = synk.function([x], (x.sum(), "sum"))(np.array([1, 2]))
    assert operator.index(count) == 3
    assert list(range(count)) == [0, 1, 2]


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


def test_writes_into_a_lazy_result_stay_local(fork):
    fork(2)
    w = shared(np.ones(3), "w")
    own = synk.function([], (w, None))
    result = own()
    result[:] = 7
    np.testing.assert_array_equal(own(), [1, 1, 1])
    np.testing.assert_array_equal(w.get_value(), [1, 1, 1])


def test_lazy_result_copies_are_independent(double):
    result = double(VALUE)[1]
    for made in (copy.copy(result), copy.deepcopy(result), result.copy(), np.array(result)):
        made[0] = 9
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
    before, lost = f(VALUE), f(VALUE + 1)
    assert before == 6  # reads all results
    assert lost == 10
    lost = f(VALUE)
    os.kill(next(iter(ranks.get_session().workers.pids.values())), signal.SIGKILL)
    with pytest.raises(synk.WorkerError, match="SIGKILL"):
        float(lost)
    with pytest.raises(RuntimeError, match=r"ended|SIGKILL"):
        float(lost)
    assert before == 6
    fork(2)
    assert f(VALUE) == 6


class Unread(Command):
    """Command that returns the number of calls whose outputs each rank caches."""

    def run(self, rank):
        return rank.all_gather(len(_get_unread(rank)))


def unread():
    return ranks.get_session().run(Unread())


def to_drop():
    """Return the number of results that the next message to the ranks drops."""
    return len(ResultTable.from_session(ranks.get_session())._dropped)


def test_results_are_read_by_one_fetch(double):
    before = unread()[0] - to_drop()
    results = [double(VALUE + i) for i in range(5)]
    assert unread() == [before + to_drop() + 5] * 2
    assert float(results[2][0]) == 6 + 4 * 2
    assert unread() == [before + to_drop()] * 2
    assert all(total._call.values is not None for total, _ in results)
    assert [float(total) for total, _ in results] == [6 + 4.0 * i for i in range(5)]


@pytest.mark.parametrize("sizes", [[7] * 6, [7, 7, 1, 7, 5, 1, 1], [2, 2, 0, 0, 7]])
def test_results_of_many_calls_are_separate(fork, sizes):
    # Scalars of many calls are reduced together if the ranks had the same numbers of rows in all of them.
    fork(2)
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
    for _ in range(2 * _MAX_CALLS + 10):
        double(VALUE)
    assert max(unread()) <= _MAX_CALLS + 1
    results = double(VALUE)
    for _ in range(2 * _MAX_CALLS):
        double(VALUE + 1)
    assert results[0] == 6
    assert max(unread()) <= _MAX_CALLS + 1
    for _ in range(2 * _MAX_CALLS):
        assert float(double(VALUE)[0]) == 6
    assert max(unread()) <= _MAX_CALLS + 1


def test_dropped_results_run_no_finalizer_code(double):
    results = double(VALUE)
    assert code_run_by(results.clear) == []


def test_large_dropped_results_are_freed_early(fork):
    fork(2)
    x = T.dvector("x")
    f = synk.function([x], (x * 2, "gather"))
    value = synk.data(np.ones(1 << 20))  # half of its eight megabytes on each rank
    for _ in range(20):
        f(value)
    assert max(unread()) <= 6
    for _ in range(20):
        assert f(value).sum() == 2 << 20
    assert max(unread()) <= 6


def test_irreducible_result_raises_when_read_others_do_not(fork):
    fork(2)
    x = T.dvector("x")
    f, g = synk.function([x], (x, "sum")), synk.function([x], (x.sum(), "sum"))
    good, bad, better = g(VALUE), f(np.ones(3)), f(VALUE)
    np.testing.assert_array_equal(better, [2, 4])
    assert good == 6
    for _ in range(2):
        with pytest.raises(ValueError, match="'sum' needs the same shape on all ranks"):
            read_results(bad)
    assert g(VALUE) == 6


def test_missing_scalar_leaves_other_results(fork):
    # Workers send scalars without waiting for the master, so they must keep them whatever happens there.
    fork(2)
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
    before = unread()[0] - to_drop()
    assert len(double(VALUE, output_subset=[])) == 0
    (only,) = double(VALUE, output_subset=[1])
    np.testing.assert_array_equal(only, VALUE * 2)
    assert unread() == [before + to_drop()] * 2


# -- memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("look", [lambda held: held, np.asarray], ids=["array", "view"])
def test_get_value_borrow_survives_donated_updates(fork, look):
    fork(2)
    w = shared(np.arange(1000.0), "w")
    f = synk.function([], updates=[(w, w + 1)])
    f()
    held = look(w.get_value(borrow=True))
    for _ in range(3):
        f()
        read_results(synk.function([], (w.sum(), "sum"))())
    np.testing.assert_array_equal(held, np.arange(1000.0) + 1)
    np.testing.assert_array_equal(w.get_value(), np.arange(1000.0) + 4)
    np.testing.assert_array_equal(synk.get_value(1, w), np.arange(1000.0) + 4)


def test_launch_passes_one_array_per_random_generator(fork):
    fork(2)
    random = T.random.RandomStream(seed=1)
    w = shared(np.zeros(3), "w")
    f = synk.function([], (w.sum(), "avg"), updates=[(w, w + random.normal(size=3) * random.uniform(size=3))])
    first = [float(f()) for _ in range(3)]
    assert len(set(first)) == 3
    executable = f._computation.compile(DEFAULT_VARIANT).runner
    storages = [storage[0] for storage in executable._storages]
    assert len(storages) == 3 and all(JAX.owns(value) for value in storages)
    assert sorted(value.shape for value in storages) == [(2,), (2,), (3,)]


# -- several functions in one launch -----------------------------------------------------------------------------


@pytest.fixture
def pair(fork):
    """Make two functions; return their runners, and their variables."""
    fork(1)
    x = T.dvector("x")
    g, w, n = shared(np.zeros(3), "g"), shared(np.ones(3), "w"), shared(np.zeros((), "int64"), "n")
    first = synk.function([x], (x.sum(), "sum"), updates=[(g, x * w)])
    second = synk.function([], updates=[(w, w - g), (n, n + 1)])
    synk.distribute()
    return [f._computation.compile(DEFAULT_VARIANT).runner for f in (first, second)], (g, w, n)


@pytest.fixture
def fuse_pair(pair):
    """Return a fused launch of a function, an all-reduce and another function, and its variables."""
    runs, (g, w, n) = pair
    launch = runs[0].fuse(TracedReduction(g.container.storage), runs[1])
    assert launch is runs[0].fuse(TracedReduction(g.container.storage), runs[1])
    # Only outputs of the first function can be reduced after it.
    assert runs[0].fuse(TracedReduction(n.container.storage), runs[1]) is None
    return launch, (g, w, n)


def launch_and_wait(launch, shareds, combine):
    """Launch, wait, and return the outputs."""
    with defer_signals(), launch.ffi_reduction.bind(combine):
        (total,) = launch(JAX.from_host(np.arange(3.0)))
        JAX.wait([library_of(s).borrow_value(s) for s in shareds])
    return [float(JAX.fetch([total])[0]), *(np.asarray(s.get_value()).tolist() for s in shareds)]


class Doubling:
    """Stand-in for a second rank with the same values."""

    def __init__(self, calls=(), counts=1):
        self.calls, self.counts, self.begun, self.waits = [] if calls == () else calls, counts, [], 0

    def start(self, spans, stream):
        self.begun += spans

    def finish(self, spans, counts, stream):
        for source, target, count, dtype in [*self.begun, *spans]:
            dtype = np.dtype(dtype)
            items = [
                np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(a), dtype)
                for a in (source, target)
            ]
            items[1][:] = items[0] + items[0]
        self.calls.append([span.n_items for span in spans] if self.begun else spans[0].n_items)
        self.begun = []
        assert ctypes.c_int32.from_address(counts).value == 0
        ctypes.c_int32.from_address(counts).value = self.counts

    def wait(self, stream):
        self.begun = []
        self.waits += 1


on_host = pytest.mark.skipif(DEVICE == "gpu", reason="stands in for other ranks in host memory")


@on_host
def test_fuse_runs_function_all_reduce_function_in_one_launch(fuse_pair):
    launch, shareds = fuse_pair
    calls = []
    assert launch_and_wait(launch, shareds, Doubling(calls)) == [3.0, [0.0, 2.0, 4.0], [1.0, -1.0, -3.0], 1]
    assert launch_and_wait(launch, shareds, Doubling(calls)) == [3.0, [0.0, -2.0, -12.0], [1.0, 1.0, 9.0], 2]
    assert calls == [3, 3]


@on_host
@pytest.mark.parametrize("counts", [1, 0])
def test_fused_launch_advances_to_the_next_rows(pair, counts):
    runs, shareds = pair
    launch = runs[0].fuse(TracedReduction(shareds[0].container.storage), runs[1], n_repeats=4)
    rows, calls = np.arange(12.0), []
    for _ in range(2):
        g, w, n = (np.asarray(s.get_value()) for s in shareds)
        for row in rows.reshape(4, 3) if counts else []:
            g = 2 * row * w
            w, n = w - g, n + 1
        with defer_signals(), launch.ffi_reduction.bind(Doubling(calls, counts), 4):
            totals = launch(JAX.from_host(rows))
            JAX.wait([library_of(s).borrow_value(s) for s in shareds])
        assert [float(total) for total in JAX.fetch(totals)] == [3.0, 12.0, 21.0, 30.0]
        for shared_, expected in zip(shareds[not counts :], [g, w, n][not counts :], strict=True):
            np.testing.assert_array_equal(shared_.get_value(), expected)
    assert calls == [3] * 8


@on_host
def test_fused_launch_reduces_nothing_after_an_error(pair):
    runs, shareds = pair
    launch = runs[0].fuse(TracedReduction(shareds[0].container.storage), runs[1], n_repeats=4)
    calls = []

    class Fails(Doubling):
        def finish(self, *arguments):
            calls.append(arguments)
            if len(calls) == 2:
                raise Alarm
            super().finish(*arguments)

    fails = Fails()
    with pytest.raises(Alarm):
        with defer_signals(), launch.ffi_reduction.bind(fails, 4):
            launch(JAX.from_host(np.arange(12.0)))
    assert len(calls) == fails.waits == 2
    np.testing.assert_array_equal(shareds[1].get_value(), [1.0, -1.0, -3.0])
    assert int(shareds[2].get_value()) == 1


@on_host
def test_repeated_launch_all_reduces_each_time(pair):
    runs, shareds = pair
    launch = runs[0].fuse(TracedReduction(shareds[0].container.storage), runs[1], n_repeats=2)
    with pytest.raises(RuntimeError, match="made 2 all-reduces, expected 1"):
        with defer_signals(), launch.ffi_reduction.bind(Doubling()):
            launch(JAX.from_host(np.arange(6.0)))


@on_host
def test_repeated_launch_all_reduces_constants_each_time(fork):
    fork(1)
    g, w, s = shared(np.zeros(3), "g"), shared(np.ones(3), "w"), shared(np.arange(3.0), "s")
    first = synk.function([], (w.sum(), "sum"), updates=[(g, s * 1)])
    second = synk.function([], updates=[(w, w - g)])
    synk.distribute()
    runs = [f._computation.compile(DEFAULT_VARIANT).runner for f in (first, second)]
    launch, calls = runs[0].fuse(TracedReduction(g.container.storage), runs[1], n_repeats=4), []
    with defer_signals(), launch.ffi_reduction.bind(Doubling(calls), 4):
        totals = launch()
        JAX.wait([library_of(w).borrow_value(w)])
    assert [float(total) for total in JAX.fetch(totals)] == [3.0, -3.0, -9.0, -15.0]
    np.testing.assert_array_equal(w.get_value(), [1.0, -7.0, -15.0])
    assert calls == [3] * 4


#: Lengths of three parameters' gradients, and of the number of rows that follows them.
SIZES = (5, 300, 700, 1)


@on_host
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("piece", [100, 2000, 10**6])
@pytest.mark.parametrize("tail", [1, 451])
def test_fused_all_reduce_accepts_chunks_and_another_dtype(fork, monkeypatch, tail, piece, dtype, times):
    monkeypatch.setattr("synkhronos.engines.xla.trace.MIN_CHUNK_BYTES", piece)
    fork(1)
    rng = np.random.default_rng(0)
    x = T.fmatrix("x")
    g, w = shared(np.zeros(sum(SIZES), "float32"), "g"), shared(np.ones(sum(SIZES) - 1, "float32"), "w")
    bounds = np.cumsum((0, *SIZES[:-1]))
    parts = [x[0, a:b] * w[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    first = synk.function([x], (x.sum(), "sum"), updates=[(g, T.join(0, *parts, x[0, -1:]))])
    second = synk.function([], updates=[(w, w - g[:-1] / g[-1])])
    synk.distribute()
    runs = [f._computation.compile(DEFAULT_VARIANT).runner for f in (first, second)]
    launch = runs[0].fuse(TracedReduction(g.container.storage, dtype, 2, tail), runs[1], n_repeats=times)
    rows = rng.uniform(1, 2, (times, sum(SIZES))).astype("float32")
    rows[:, -1] = 67  # rounds to 66 with eight bits of mantissa after a division by 3
    standing_in = Doubling()
    with defer_signals(), launch.ffi_reduction.bind(standing_in, times):
        launch(JAX.from_host(rows))
        JAX.wait([library_of(w).borrow_value(w)])
    expected, scale = np.ones(sum(SIZES) - 1), 2 if dtype is None else 1
    for row in rows:
        combined = scale * np.append(row[:-1] * expected, row[-1])
        expected = expected - combined[:-1] / combined[-1]
    np.testing.assert_allclose(g.get_value(), combined, rtol=0.01 if dtype else 1e-5)
    np.testing.assert_allclose(w.get_value(), expected, rtol=1e-3 if dtype else 1e-5)
    np.testing.assert_allclose(np.asarray(g.get_value())[-tail:], combined[-tail:], rtol=1e-6 if times == 1 else 1e-3)
    assert abs(float(np.asarray(g.get_value())[-1]) / combined[-1] - 1) < 1e-6
    if times == 1 and dtype is None:
        # The last chunk comes first, as it is computed last and waited for at once.
        assert standing_in.calls == {100: [[5]], 2000: [[305]], 10**6: [1006]}[piece]


def needs(jaxpr, variables):
    """Return the equations that variables are computed from."""
    source = {id(v): i for i, equation in enumerate(jaxpr.eqns) for v in equation.outvars}
    found, left = set(), [*variables]
    while left:
        i = source.get(id(left.pop()))
        if i is not None and i not in found:
            found.add(i)
            left += jaxpr.eqns[i].invars
    return [jaxpr.eqns[i] for i in sorted(found)]


@on_host
def test_chunk_all_reduce_starts_during_the_backward_pass(fork, monkeypatch):
    import jax

    monkeypatch.setattr("synkhronos.engines.xla.trace.MIN_CHUNK_BYTES", 100)
    fork(1)
    x = T.fmatrix("x")
    rng = np.random.default_rng(0)
    ws = [shared(rng.normal(size=(8, 8)).astype("float32"), f"w{i}") for i in range(3)]
    h = x
    for w in ws:
        h = T.tanh(h.dot(w))
    grad_updates, _, g = sgd((h**2).mean(), ws, learning_rate=0.1, weight=x.shape[0])
    first = synk.function([x], ((h**2).mean(), "mean"), updates=grad_updates)
    synk.distribute()
    run = first._computation.compile(DEFAULT_VARIANT).runner
    chain = run.fuse(TracedReduction(g.container.storage))
    chain._log = ScalarLog(chain._dtypes)
    jaxpr = (
        jax.make_jaxpr(chain._run)(*chain._get_arguments([np.ones((5, 8), "float32")])).jaxpr.eqns[0].params["jaxpr"]
    )
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    calls = [equation for equation in jaxpr.eqns if equation.primitive.name == "ffi_call"]
    assert [call.params["target_name"] for call in calls] == ["synkhronos_start"] * 2 + ["synkhronos_all_reduce"]
    products = [
        [equation for equation in needs(jaxpr, call.invars) if equation.primitive.name == "dot_general"]
        for call in calls
    ]
    # Three products of the forward pass, then the gradients by each layer's weights and by its input.
    assert [len(equations) for equations in products] == [4, 6, 8]
    for call, before, behind in zip(calls, products, products[1:], strict=False):
        for product in behind[len(before) :]:
            assert call in needs(jaxpr, product.invars)
    # The forward pass precedes all chunks.
    (loss,) = [equation for equation in jaxpr.eqns if equation.primitive.name == "reduce_sum"][:1]
    assert not any(call in needs(jaxpr, loss.invars) for call in calls)


@on_host
def test_shared_variables_keep_their_memory_between_launches(fork):
    fork(1)
    rng = np.random.default_rng(0)
    ws = [shared(rng.normal(size=(64, 64)), f"w{i}") for i in range(3)]
    x = T.dmatrix("x")
    h = x
    for w in ws:
        h = T.tanh(h.dot(w))
    train = make_train_function((h**2).mean(), ws, x, [], momentum, learning_rate=0.1)
    held = [*ws, *train.optimizer_state, train.grad_shared]

    def addresses():
        return [library_of(variable).borrow_value(variable).unsafe_buffer_pointer() for variable in held]

    for _ in range(2):
        train(np.ones((5, 64)), [])
    before = addresses()
    for _ in range(3):
        train(np.ones((5, 64)), [])
        assert addresses() == before


@on_host
def test_error_after_a_started_chunk_waits_and_updates_nothing(fork, monkeypatch):
    monkeypatch.setattr("synkhronos.engines.xla.trace.MIN_CHUNK_BYTES", 100)
    fork(1)
    g, w = shared(np.zeros(60, "float32"), "g"), shared(np.ones(60, "float32"), "w")
    first = synk.function([], (w.sum(), "sum"), updates=[(g, T.join(0, w[:30] * 2, w[30:] * 3))])
    second = synk.function([], updates=[(w, w - g)])
    synk.distribute()
    runs = [f._computation.compile(DEFAULT_VARIANT).runner for f in (first, second)]
    launch = runs[0].fuse(TracedReduction(g.container.storage), runs[1])

    class Fails(Doubling):
        def start(self, spans, stream):
            raise Alarm

    fails = Fails()
    with pytest.raises(Alarm):
        with defer_signals(), launch.ffi_reduction.bind(fails):
            launch()
    assert fails.waits == 1 and fails.calls == []
    np.testing.assert_array_equal(w.get_value(), np.ones(60))
    with defer_signals(), launch.ffi_reduction.bind(Doubling()):
        launch()
    np.testing.assert_array_equal(w.get_value(), [-3.0] * 30 + [-5.0] * 30)


def test_recently_used_launches_are_cached(fork):
    fork(1)
    x, w = T.dvector("x"), shared(np.zeros(3), "w")
    f, g = synk.function([x], (x.sum(), "sum")), synk.function([], updates=[(w, w + 1)])
    runs = [compiled._computation.compile(DEFAULT_VARIANT).runner for compiled in (f, g)]
    made = {times: runs[0].fuse(second=runs[1], n_repeats=times) for times in range(1, 17)}
    assert made[1] is runs[0].fuse(second=runs[1], n_repeats=1)
    runs[0].fuse(second=runs[1], n_repeats=17)
    assert made[1] is runs[0].fuse(second=runs[1], n_repeats=1)
    assert made[2] is not runs[0].fuse(second=runs[1], n_repeats=2)


LENGTHS_AND_CONSTANTS = {
    "a length": (np.int64(0), lambda x, y: x.shape[0]),
    "of lengths": (np.int64(0), lambda x, y: x.shape[0] + y.shape[0]),
    "a number": (np.float64(0), lambda x, y: T.constant(np.float64(3))),
    "a filled array": (np.zeros(3), lambda x, y: T.alloc(np.float64(2), 3)),
    "an integer": (np.int8(0), lambda x, y: T.cast(x.shape[1], "int8")),
}


@pytest.mark.parametrize("which", LENGTHS_AND_CONSTANTS)
def test_updates_by_lengths_and_constants_are_compiled_once(fork, many_steps_a_launch, which):
    fork(1)
    made = []
    value, expression = LENGTHS_AND_CONSTANTS[which]
    for make in (make_train_function, make_train_function_serial):
        x, y, w, k = T.dmatrix("x"), T.dvector("y"), shared(np.zeros(3), "w"), shared(value, "k")
        loss = ((x @ w - y) ** 2).mean()
        made += [make(loss, [w], x, y, sgd, extra_updates=[(k, expression(x, y), None)], learning_rate=0.1), w, k]
    train, w, k, alone, w_alone, k_alone = made
    data = np.eye(4, 3), np.ones(4)
    for one in (train, alone):
        for _ in range(3):
            one(*data, batch=[0, 1])
            one.steps(*data, batches=[[0, 1], [2, 3], [3, 1]])
    for shared_, expected in ((w, w_alone), (k, k_alone)):
        np.testing.assert_allclose(shared_.get_value(), expected.get_value())
        assert np.asarray(shared_.get_value()).dtype == np.asarray(expected.get_value()).dtype
    runs = [f._computation.compile(DEFAULT_VARIANT).runner for f in (train.gradient, train.update)]
    for times in (1, 3):
        assert runs[0].fuse(second=runs[1], n_repeats=times)._run._cache_size() == 1


def test_repeated_launch_returns_only_scalars(fork):
    fork(1)
    x, w = T.dvector("x"), shared(np.zeros(3), "w")
    f, g = synk.function([x], (x * 2, "gather")), synk.function([], updates=[(w, w + 1)])
    runs = [compiled._computation.compile(DEFAULT_VARIANT).runner for compiled in (f, g)]
    assert runs[0].fuse(second=runs[1], n_repeats=2) is None


def test_repeated_launch_keeps_many_results(fork):
    fork(1)
    x, w = T.dvector("x"), shared(np.zeros(()), "w")
    f, g = synk.function([x], (x.sum(), "sum")), synk.function([], updates=[(w, w + 1)])
    runs = [compiled._computation.compile(DEFAULT_VARIANT).runner for compiled in (f, g)]
    launch = runs[0].fuse(second=runs[1], n_repeats=100)
    rows = JAX.from_host(np.arange(200.0))
    expected = np.arange(200.0).reshape(100, 2).sum(axis=1)
    launches = [launch(rows) for _ in range(5)]
    for numbers in launches:
        np.testing.assert_array_equal(JAX.fetch(numbers), expected)
    assert float(w.get_value()) == 500


@on_host
def test_invalid_all_reduce_updates_nothing(fuse_pair):
    launch, shareds = fuse_pair
    assert launch_and_wait(launch, shareds, Doubling(counts=0))[2:] == [[1.0, 1.0, 1.0], 0]
    assert launch_and_wait(launch, shareds, Doubling())[2:] == [[1.0, -1.0, -3.0], 1]


@on_host
@pytest.mark.parametrize("by_signal", [False, True])
def test_error_in_all_reduce_is_raised_after_the_launch(fuse_pair, by_signal):
    launch, shareds = fuse_pair

    class Fails(Doubling):
        def finish(self, *arguments):
            if not by_signal:
                raise Alarm
            signal.raise_signal(signal.SIGALRM)  # a real timer could fire before the `with` block
            super().finish(*arguments)

    handler = signal.getsignal(signal.SIGALRM)
    for _ in range(2):
        with pytest.raises(Alarm):
            launch_and_wait(launch, shareds, Fails(counts=0))
        assert np.asarray(shareds[1].get_value()).tolist() == [1.0, 1.0, 1.0]
        assert signal.getsignal(signal.SIGALRM) is handler
    assert launch_and_wait(launch, shareds, Doubling())[2:] == [[1.0, -1.0, -3.0], 1]


@on_host
def test_fused_launch_all_reduces_once(fuse_pair):
    launch, shareds = fuse_pair
    with pytest.raises(RuntimeError, match="made 0 all-reduces, expected 1"):
        with defer_signals(), launch.ffi_reduction.bind(Doubling()):
            pass
    # Launches outside of a block are not counted.
    launch(JAX.from_host(np.arange(3.0)))
    assert np.asarray(shareds[1].get_value()).tolist() == [1.0, 1.0, 1.0]
    assert launch_and_wait(launch, shareds, Doubling())[2:] == [[1.0, -1.0, -3.0], 1]


@on_host
def test_ffi_reduction_is_bound_to_its_reducer(fuse_pair, pair):
    """Another launch during the binding changes nothing: callbacks find the reducer by their argument."""
    runs, _ = pair
    launch, shareds = fuse_pair
    other = runs[0].fuse(TracedReduction(shareds[0].container.storage), runs[1], n_repeats=2)
    calls, other_calls = [], []
    with defer_signals(), launch.ffi_reduction.bind(Doubling(calls)):
        with other.ffi_reduction.bind(Doubling(other_calls), 2):
            other(JAX.from_host(np.arange(6.0)))
        launch(JAX.from_host(np.arange(3.0)))
        JAX.wait([library_of(s).borrow_value(s) for s in shareds])
    assert len(other_calls) == 2 and len(calls) == 1
    g, w = np.zeros(3), np.ones(3)
    for row in (np.arange(3.0), np.arange(3.0, 6.0), np.arange(3.0)):
        g = 2 * row * w
        w = w - g
    np.testing.assert_array_equal(shareds[1].get_value(), w)


def test_launches_are_freed_with_their_function(fork):
    fork(1)
    x, w = T.dvector("x"), shared(np.zeros(3), "w")
    f, g = synk.function([x], (x.sum(), "sum"), updates=[(w, w + x)]), synk.function([], updates=[(w, 2 * w)])
    f(np.ones(3)), g()
    runs = [compiled._computation.compile(DEFAULT_VARIANT).runner for compiled in (f, g)]
    runs.append(runs[0].fuse(second=runs[1]))
    runs[-1](JAX.from_host(np.ones(3)))
    references = [weakref.ref(run) for run in runs]
    gc.collect()
    gc.disable()
    try:
        del f, g
        runs.clear()
        assert [reference() for reference in references] == [None] * 3
    finally:
        gc.enable()


def test_training_step_of_one_rank_is_one_launch(fork, monkeypatch):
    fork(1)
    launches = []
    launch = Executable._launch
    monkeypatch.setattr(Executable, "_launch", lambda self, arguments: launches.append(1) or launch(self, arguments))
    x, y, w = T.dmatrix("x"), T.dvector("y"), shared(np.zeros(3), "w")
    train = make_train_function(((x @ w - y) ** 2).mean(), [w], x, y, sgd, learning_rate=0.1)
    data = np.eye(3), np.ones(3)
    for _ in range(3):
        train(*data)
    assert launches == [1, 1, 1]
    np.testing.assert_allclose(np.asarray(w.get_value()), 1 - (1 - 2 * 0.1 / 3) ** 3, rtol=1e-6)


@pytest.fixture
def many_steps_a_launch(monkeypatch):
    """Fuse many steps into one launch on the CPU too, where the library does not by default."""
    monkeypatch.setattr(XlaEngine, "max_repeats", lambda self, combined=None: LOG_CAPACITY)


def test_steps_that_cannot_be_fused_run_one_by_one(fork, many_steps_a_launch):
    fork(2)
    made = []
    for make in (make_train_function, make_train_function_serial):
        x, y, w, k = T.dmatrix("x"), T.dvector("y"), shared(np.zeros(3), "w"), shared(np.int64(3), "k")
        # PyTensor compiles again for each value of a variable that is a length.
        loss = ((x @ w - y) ** 2).mean() + (x.reshape((-1, k)).sum() * w[0]) / x.shape[0]
        made += [make(loss, [w], x, y, sgd, learning_rate=0.1), w]
    train, w, alone, w_alone = made
    batches = [[0, 1], [2, 3], [3, 1]]
    for _ in range(2):
        losses = train.steps(np.eye(4, 3), np.ones(4), batches)
        np.testing.assert_allclose(np.array(losses, float), alone.steps(np.eye(4, 3), np.ones(4), batches))
        np.testing.assert_allclose(synk.gather(w), [w_alone.get_value()] * 2)


def test_repeated_launch_keeps_shapes(fork, many_steps_a_launch):
    fork(1)
    x, y, w, last = T.dmatrix("x"), T.dvector("y"), shared(np.zeros(3), "w"), shared(np.zeros((1, 3)), "last")
    loss = ((x @ w - y) ** 2).mean()
    train = make_train_function(loss, [w], x, y, sgd, extra_updates=[(last, x, None)], learning_rate=0.1)
    with pytest.raises(ValueError, match=r"variable of shape \(1, 3\) is updated by a value of shape \(2, 3\)"):
        train.steps(np.eye(4, 3), np.ones(4), [[0, 1], [2, 3]])
    np.testing.assert_array_equal(w.get_value(), np.zeros(3))
    train(np.eye(4, 3), np.ones(4), [0, 1])
    np.testing.assert_array_equal(last.get_value(), np.eye(4, 3)[:2])


@pytest.mark.parametrize("held", [False, True])
def test_steps_of_one_rank_are_one_launch(fork, monkeypatch, many_steps_a_launch, held):
    fork(1)
    launches = []
    launch = Executable._launch
    monkeypatch.setattr(Executable, "_launch", lambda self, arguments: launches.append(1) or launch(self, arguments))
    made = []
    for make in (make_train_function, make_train_function_serial):
        x, y, w = T.dmatrix("x"), T.dvector("y"), shared(np.zeros(3), "w")
        held_by = [shared(VALUE[:, None] * [1.0, 2.0, 3.0], "x"), shared(VALUE, "y")] if held else None
        loss = ((x @ w - y) ** 2).mean()
        made += [make(loss, [w], x, y, adam, sliceable_shareds=held_by, learning_rate=0.1), w]
    train, w, alone, w_alone = made
    batches = [[0, 1], [2, 3], [3, 1], [0, 3]]
    of_host = {"x_data": np.eye(4, 3), "y_data": np.ones(4), "batches": batches}
    arguments = {"batches_s": batches} if held else of_host
    losses = [train.steps(**arguments) for _ in range(70)]
    assert launches == [1] * 70
    launches.clear()
    # A shorter step in between is a separate launch, and launches that need too much memory are split.
    argument = "batches_s" if held else "batches"
    some = {**arguments, argument: [*batches[:2], [1], *batches[2:]]}
    losses.append(train.steps(**some))
    assert launches == [1, 1, 1]
    monkeypatch.setattr("synkhronos.training.train_function.train_function._MAX_LAUNCH_NBYTES", 2 * 2 * 4 * 8)
    losses.append(train.steps(**arguments))
    assert launches == [1] * (4 if held else 5)  # an array on the device needs no copy
    # A step on many bytes is a separate launch.
    monkeypatch.setattr("synkhronos.training.train_function.train_function._LONG_STEP_NBYTES", 2 * 4 * 8)
    launches.clear()
    losses.append(train.steps(**arguments))
    assert launches == [1] * (1 if held else 4)
    expected = [alone.steps(**keywords) for keywords in [*[arguments] * 70, some, arguments, arguments]]
    for got, wanted in zip(losses, expected, strict=True):
        np.testing.assert_allclose(np.array(got, float), np.array(wanted, float))
    np.testing.assert_allclose(w.get_value(), w_alone.get_value())


def test_references_to_a_containers_array_are_detected(fork):
    fork(2)
    w = shared(np.arange(3.0), "w")
    f = synk.function([], updates=[(w, w + 1)])
    f()
    library = library_of(w)
    assert not library.has_other_references(w)
    held = w.get_value(borrow=True)
    assert JAX.owns(held) and library.has_other_references(w)
    del held
    assert not library.has_other_references(w)


def test_get_value_survives_updates_and_collectives(fork):
    fork(2)
    w = shared(np.arange(3.0), "w")
    f = synk.function([], (w, None), updates=[(w, w + 1)])
    results = [f() for _ in range(3)]
    value = w.get_value()
    synk.all_reduce(w, "sum")
    f()
    for i, result in enumerate(results):
        np.testing.assert_array_equal(result, np.arange(3.0) + i)
    np.testing.assert_array_equal(value, np.arange(3.0) + 3)
    np.testing.assert_array_equal(w.get_value(), 2 * (np.arange(3.0) + 3) + 1)


@pytest.mark.parametrize("batch", [None, [3, 1, 2, 0], slice(None, None, -1)])
def test_identity_outputs_do_not_alias_inputs(fork, batch):
    # XLA may return an input as an output, and the memory of inputs is reused.
    fork(2)
    x = T.dvector("x")
    s, t = shared(np.zeros(1), "s"), shared(np.zeros(1), "t")
    f = synk.function([x], [(x, "gather"), (x, None)], updates=[(s, x), (t, x)])
    data = synk.data(VALUE)
    order = np.arange(4) if batch is None else np.arange(4)[batch]
    results = []
    for i in range(5):
        data[:] = VALUE + i
        results.append((f(data, batch=batch), f(VALUE - i, batch=batch)))
        for own in synk.gather([s, t], nd_up=0):
            np.testing.assert_array_equal(own, (VALUE - i)[order])
    for i, (of_data, of_array) in enumerate(results):
        for (joined, own), value in ((of_data, VALUE + i), (of_array, VALUE - i)):
            np.testing.assert_array_equal(joined, value[order])
            np.testing.assert_array_equal(own, value[order][:2])


def test_updates_of_two_variables_do_not_alias(fork):
    fork(2)
    s, t = shared(np.zeros(2), "s"), shared(np.zeros(2), "t")
    both = synk.function([], updates=[(s, s + t + 1), (t, s + t + 1)])
    one = synk.function([], updates=[(s, s * 10)])
    for _ in range(2):
        both()
        synk.all_reduce(s, "avg")
    one()
    np.testing.assert_array_equal(synk.gather([s, t]), np.stack([np.full((2, 2), 30), np.full((2, 2), 3)]))


def test_updates_can_swap_variables(fork):
    fork(2)
    s, t = shared(np.zeros(2), "s"), shared(np.ones(2), "t")
    swap = synk.function([], updates=[(s, t), (t, s)])
    for i in range(3):
        swap()
        ones, zeros = np.ones((2, 2)), np.zeros((2, 2))
        np.testing.assert_array_equal(synk.gather([s, t]), [zeros, ones] if i % 2 else [ones, zeros])


# -- dtypes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "int8", "uint16", "int64", "bool"])
def test_shared_variables_keep_their_dtype(fork, dtype):
    fork(2)
    w = shared(np.ones(4, dtype), "w")
    f = synk.function([], (w, "gather"), updates=[(w, w[::-1])])
    assert f().dtype == dtype
    for collective in (
        lambda: synk.all_reduce(w, "max"),
        lambda: synk.broadcast(w),
        lambda: synk.scatter(w, w.get_value()),
    ):
        if dtype != "complex64":
            collective()
    assert {synk.get_value(r, w).dtype for r in range(2)} == {np.dtype(dtype)}


# -- containers given by the user ------------------------------------------------------------------------------

COLLECTIVES = {
    "call": (lambda f, w: f(), [5, 5, 1, 1]),
    "broadcast": (lambda f, w: synk.broadcast(w), [5, 5, 5, 5]),
    "broadcast values": (lambda f, w: synk.broadcast(w, [7.0, 7.0]), [7, 7, 7, 7]),
    "scatter": (lambda f, w: synk.scatter(w, np.arange(4.0)), [0, 1, 2, 3]),
    "gather": (lambda f, w: synk.gather(w), [5, 5, 1, 1]),
    "all_gather": (lambda f, w: synk.all_gather(w), [5, 5, 1, 1] * 2),
    "reduce": (lambda f, w: synk.reduce(w, "sum"), [6, 6, 1, 1]),
    "all_reduce": (lambda f, w: synk.all_reduce(w, "sum"), [6, 6, 6, 6]),
    "reduce_scatter": (lambda f, w: synk.reduce_scatter(w, "sum"), [6, 6]),
    "set_value": (lambda f, w: synk.set_value(1, w, [3.0, 3.0]), [5, 5, 3, 3]),
    "get_value": (lambda f, w: synk.get_value(0, w), [5, 5, 1, 1]),
    "get_shapes": (lambda f, w: synk.get_shapes(w), [5, 5, 1, 1]),
}


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("nccl", [True, False] if DEVICE == "gpu" else [True])
def test_numpy_values_of_shared_variables_become_jax_arrays(fork, name, nccl, monkeypatch):
    fork(2)
    act, expected = COLLECTIVES[name]
    w = shared(np.ones(2), "w")
    f = synk.function([], (w, "gather"))
    f()
    assert JAX.owns(w.container.storage[0])
    w.set_value(np.full(2, 5.0))
    act(f, w)
    np.testing.assert_array_equal(f(), expected)
    w.set_value(np.full(2, 9.0))
    assert np.asarray(f())[0] == 9
    assert JAX.owns(w.container.storage[0])


def test_jax_and_host_functions_share_variables(fork):
    fork(2)
    x = T.dvector("x")
    w = shared(np.ones(2), "w")
    compiled = synk.function([x], (w * x.sum(), "gather"), updates=[(w, w + 1)])
    interpreted = synk.function([x], (w * x.sum(), "gather"), updates=[(w, w + 1)], mode=INTERPRETED)
    for i in range(3):
        np.testing.assert_array_equal(compiled(np.ones(2)), [1 + 2 * i] * 4)
        np.testing.assert_array_equal(interpreted(np.ones(2)), [2 + 2 * i] * 4)
        synk.all_reduce(w)
    np.testing.assert_array_equal(synk.gather(w), np.full((2, 2), 7))


# -- workers that start anew -----------------------------------------------------------------------------------


@pytest.fixture
def started_xla():
    """Start XLA in this process."""
    import jax

    jax.devices()


@pytest.mark.new_ranks
def test_fork_can_be_repeated_after_jax_was_used(fork, started_xla):
    x = T.dvector("x")
    w = shared(1.0, "w")
    f = None
    for n in (2, 1, 2):
        fork(n)
        if f is None:
            f = synk.function([x], (x * w, "gather"), updates=[(w, w + 1)])
        before = float(np.asarray(w.get_value()))
        np.testing.assert_array_equal(f(VALUE), VALUE * before)
        np.testing.assert_array_equal(synk.gather(w), [before + 1] * n)
        synk.close()


def program(code, **kwargs):
    """Start a program in which XLA has been started."""
    head = "import jax, numpy as np, synkhronos as synk; jax.config.update('jax_enable_x64', True); jax.numpy.ones(1);"
    path = os.pathsep.join([str(Path(synk.__file__).parent.parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    code = f"{head}\n{textwrap.dedent(code)}"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **kwargs,
    )


def test_fork_after_jax_was_used():
    done = program("""
        import pytensor.tensor as T
        synk.fork(3, use_gpu=False)
        x = T.dvector("x")
        print(np.asarray(synk.function([x], (x * 2, "gather"), mode="JAX")(np.arange(4.0))).tolist())
        print(float(synk.function([x], (x.sum(), "sum"), mode="FAST_COMPILE")(np.arange(4.0))))
    """)
    out, err = done.communicate(timeout=60)
    assert done.returncode == 0, err
    assert out.splitlines() == ["[0.0, 2.0, 4.0, 6.0]", "6.0"]


@pytest.mark.new_ranks
def test_spawned_workers_inherit_sys_path(fork, started_xla, tmp_path, monkeypatch):
    (tmp_path / "users_own.py").write_text(
        textwrap.dedent("""
            from pytensor.graph.basic import Apply
            from pytensor.graph.op import Op

            class Twice(Op):
                __props__ = ()

                def make_node(self, x):
                    return Apply(self, [x], [x.type()])

                def perform(self, node, inputs, outputs):
                    outputs[0][0] = inputs[0] * 2
        """)
    )
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.syspath_prepend(tmp_path.name)  # relative to the master's present directory
    import users_own

    fork(2)
    x = T.dvector("x")
    f = synk.function([x], (users_own.Twice()(x), "gather"), mode=INTERPRETED)
    np.testing.assert_array_equal(f(VALUE), VALUE * 2)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_spawned_workers_end_with_the_master(number):
    master = program("""
        import os, time
        synk.fork(3, use_gpu=False)
        print(*open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read().split(), flush=True)
        time.sleep(60)
    """)
    pids = [int(pid) for pid in master.stdout.readline().split()]
    assert len(pids) == 2
    master.send_signal(number)
    master.communicate()
    deadline = time.monotonic() + LIMIT
    while any(map(lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(lives, pids))


def test_spawned_workers_profile_print_and_skip_atexit(tmp_path):
    done = program(
        """
        import atexit
        from synkhronos import ranks
        atexit.register(lambda: print("exit", flush=True))
        synk.fork(3, use_gpu=False, profile_workers=True)
        synk.data([1.0])
        """,
        cwd=tmp_path,
    )
    out, err = done.communicate(timeout=60)
    assert done.returncode == 0, err
    assert out.split() == ["exit"]
    names = sorted(path.name.rsplit("_", 1)[0] for path in tmp_path.glob("*.prof"))
    assert names == ["synkhronos_rank1", "synkhronos_rank2"]


class Sleep(Command):
    """Command from which the workers never return."""

    def run(self, rank):
        if not rank.is_master:
            time.sleep(60)


@pytest.mark.new_ranks
def test_spawned_workers_end_after_the_fork_timeout(fork, started_xla):
    fork(2, timeout=20.0)
    session = ranks.get_session()
    session.timeout = 0.5  # starting takes seconds
    began = time.monotonic()
    with pytest.raises(synk.WorkerError, match=r"rank 1 did not finish within the 0\.5 seconds"):
        session.run(Sleep())
    assert time.monotonic() - began < LIMIT
    fork(2)
    assert len(ranks.get_session().workers.pids) == 1


@pytest.mark.new_ranks
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSEGV"])
def test_death_of_a_spawned_worker_is_reported(fork, started_xla, how):
    fork(3)
    (_, pid), *_ = ranks.get_session().workers.pids.items()
    os.kill(pid, getattr(signal, how))
    with pytest.raises(synk.WorkerError, match=rf"process {pid}\) was killed by {how}"):
        ranks.get_session().run(Unread())
    assert not lives(pid)


def test_interrupt_in_a_launch_keeps_values(fork):
    # The old value is donated, and the new one is not stored yet.
    fork(2)
    w = shared(np.zeros(1000), "w")
    f = synk.function([], [(w.sum() / 1000, None)], updates=[(w, w + 1)])
    losses = [f()[0] for _ in range(20)]
    took = []
    for _ in range(20):
        start = time.perf_counter()
        losses.append(f()[0])
        took.append(time.perf_counter() - start)
    usual = np.median(took)  # on a machine with other programs too
    count, interrupted = len(losses), 0
    for delay in np.random.default_rng(0).uniform(1e-5, 1.2 * usual, 150):
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, delay)
                losses.append(f()[0])
                count += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Alarm:
            interrupted += 1
            now = float(np.asarray(w.get_value())[0])
            assert now in (count, count + 1)
            count = int(now)
    assert interrupted > 10
    values = [float(loss) for loss in losses]
    assert values == sorted(values) and values[0] == 0 and f()[0] == count


@pytest.mark.parametrize("entry_added", [False, True])
def test_interrupt_after_a_launch_keeps_results_aligned(fork, monkeypatch, entry_added):
    # The launch has written its number, which is unread; the next launch's number could be confused with it.
    fork(2)
    w = shared(np.zeros(3), "w")
    f = synk.function([], [(w.sum() / 3, None)], updates=[(w, w + 1)])
    first, entries, raised = f()[0], ScalarLog.add_entries, []

    def interrupted(log, times):
        if not raised:
            raised.append(entries(log, times) if entry_added else 1)
            raise Alarm
        return entries(log, times)

    monkeypatch.setattr(ScalarLog, "add_entries", interrupted)
    with pytest.raises(Alarm):
        f()
    assert [float(f()[0]) for _ in range(3)] == [2, 3, 4] and float(first) == 0


class Alarm(BaseException):
    """Raised by a signal handler."""


@pytest.fixture(autouse=True)
def alarms():
    def ring(number, frame):
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    yield
    signal.signal(signal.SIGALRM, before)


class Draws:
    """Class of the launcher that compiles its own functions, with the same seed on all ranks."""

    def __init__(self):
        import pytensor

        self.rng, self.params = T.random.shared_rng(seed=5), [shared(np.zeros(3), "w")]
        new, drawn = self.rng.normal(size=3)
        self.train = pytensor.function([], drawn, updates={self.rng: new}, mode="JAX")
        self.again = pytensor.function([], drawn * 1.0, updates={self.rng: new}, mode="JAX")


def test_random_streams_of_own_functions_are_seeded_and_saved():
    plain, model = Draws(), Draws()
    found = group_variables(model)
    assert found.generators == [model.rng]
    library = library_of(model.rng)
    library.set_generator(model.rng, library.jump_generator(library.copy_generator(model.rng), 1))
    first, again = model.train(), model.again()
    assert not np.intersect1d(plain.train(), [first, again]).size
    saved = library.copy_generator(model.rng)
    drawn = model.train()
    assert not np.intersect1d(drawn, first).size
    library.set_generator(model.rng, saved)
    np.testing.assert_array_equal(model.train(), drawn)


def test_in_place_updates_reuse_memory():
    for is_there in (True, False):
        # Not from_host: on the CPU, JAX may share NumPy's memory if it is aligned to 64 bytes, and copies it when donated.
        array = JAX.empty((3,), np.dtype("float32"))
        at = JAX.get_pointer(array)
        written = JAX.rewrap(array, is_there)
        # JAX's cached host copy of the old array would not be updated.
        assert written is not array and JAX.get_pointer(written) == at
