"""Functions compiled by the graph libraries' real compilers equal the serial function in the same mode, or NumPy.

Other tests use Python's linker, without rewrites or with those of FAST_COMPILE; see conftest.py.
"""

import multiprocessing
import signal

import numpy as np
import pytest
from library import NAME, XLA, PythonOp, function, grad, package, shared
from library import tensor as T

import synkhronos as synk
from synkhronos import ranks
from synkhronos.functions import get_dispatcher
from synkhronos.ranks import Command
from synkhronos.training import make_train_function
from synkhronos.training.updates import adam

pytestmark = pytest.mark.usefixtures("compiler")
RNG = np.random.default_rng(5)
X, Y = RNG.normal(size=(11, 3)), RNG.normal(size=11)


def assert_close(actual, expected):
    actual = np.asarray(actual)
    np.testing.assert_allclose(actual, expected, rtol=1e-7, atol=1e-9)
    assert actual.dtype == np.asarray(expected).dtype


# -- checks of each mode ---------------------------------------------------------------------------------------


def check_outputs_and_rows(mode):
    x, y, b = T.dmatrix("x"), T.dvector("y"), T.dscalar("b")
    hidden = T.tanh(x * b)
    exact = [
        (hidden.sum(axis=0), "sum"),
        (((hidden.sum(axis=1) - y) ** 2).mean(), "mean"),
        (x.max(), "max"),
        (hidden, "gather"),
        (T.dot(x.T, x), "sum"),
    ]
    f = synk.function([x, y], [*exact, (x.shape[0], "sum")], bcast_inputs=[b], mode=mode)
    serial = function([x, y, b], [v for v, _ in exact], mode=mode)
    data = synk.data(X), synk.data(Y), synk.data(0.5)
    for batch in (None, slice(None, None, -2), [0, 10, 3, 3, 7]):
        rows = np.arange(11)[slice(None) if batch is None else batch]
        expected = serial(X[rows], Y[rows], 0.5)
        for slices, inputs in ((1, (X, Y, 0.5)), (1, data), (3, data)):
            *results, count = f(*inputs, batch=batch, num_slices=slices)
            for result, value in zip(results, expected, strict=True):
                assert_close(result, value)
            assert count == len(rows)


def check_updates(mode):
    def make(w):
        x, y = T.dmatrix("x"), T.dvector("y")
        loss = ((T.tanh(T.dot(x, w)) - y) ** 2).mean()
        return [x, y], loss, [(w, w - 0.1 * grad(loss, w))]

    start = np.array([0.3, -0.2, 0.1])
    w, v = shared(start, "w"), shared(start, "v")
    inputs, loss, pairs = make(w)
    f = synk.function(inputs, (loss, "mean"), updates=[(w, new, "mean") for w, new in pairs], mode=mode)
    inputs, loss, pairs = make(v)
    serial = function(inputs, loss, updates=pairs, mode=mode)
    for slices in (1, 2, 3):
        assert_close(f(X[:10], Y[:10], num_slices=slices), serial(X[:10], Y[:10]))
        synk.all_reduce(w)
        assert_close(w.get_value(), v.get_value())
        assert_close(synk.get_value(1, w), v.get_value())


def check_sliceable_shareds(mode):
    s, t = shared(np.zeros((1, 3)), "s"), shared(np.zeros(1), "t")
    f = synk.function(
        [], [((s * t.dimshuffle(0, "x")).sum(axis=0), "sum"), (s, "gather")], sliceable_shareds=[s, t], mode=mode
    )
    synk.distribute()
    synk.scatter([s, t], [X, Y])  # rows 0 to 5, and 6 to 10
    for choice, rows in (
        (None, range(11)),
        (slice(1, 3), [1, 2, 7, 8]),
        ([[4, 0], [1]], [4, 0, 7]),
        ([[], [2, 2]], [8, 8]),
    ):
        for slices in (1, 2):
            total, joined = f(batch_s=choice, num_slices=slices)
            assert_close(total, (X[list(rows)] * Y[list(rows), None]).sum(axis=0))
            assert_close(joined, X[list(rows)])


def check_results_alias_nothing(mode):
    x, b = T.dmatrix("x"), T.dvector("b")
    rows, whole = shared(np.zeros((1, 3)), "rows"), shared(np.zeros(1), "whole")
    f = synk.function(
        [x],
        [(x, "gather"), (x, None), (b, None), (x[::-1], None)],
        bcast_inputs=[b],
        updates=[(rows, x), (whole, b)],
        mode=mode,
    )
    for batch in (None, [5, 1, 3, 2]):
        data, numbers = synk.data(X), synk.data(Y)
        picked = X if batch is None else X[batch]
        rank_rows = picked[: (len(picked) + 1) // 2]
        results = f(data, numbers, batch=batch)
        data[:], numbers[:] = 0, 0
        for result, expected in zip(results, (picked, rank_rows, Y, rank_rows[::-1]), strict=True):
            np.testing.assert_array_equal(result, expected)
        np.testing.assert_array_equal(rows.get_value(), rank_rows)
        np.testing.assert_array_equal(whole.get_value(), Y)
        np.testing.assert_array_equal(synk.get_value(1, rows), picked[len(rank_rows) :])
        np.testing.assert_array_equal(synk.get_value(1, whole), Y)
        f(data, numbers, batch=batch)
        np.testing.assert_array_equal(results[1], rank_rows)


def check_large_outputs(mode):
    x = T.dmatrix("x")
    f = synk.function([x], [x.sum(axis=0), (x * 2, "gather")], mode=mode)
    value = RNG.normal(size=(4, 200_000))
    average, doubled = f(value)
    assert_close(average, value.sum(axis=0) / 2)
    assert_close(doubled, value * 2)


def check_dtypes(mode):
    for dtype in ("float32", "int64", "int8", "bool"):
        x = T.matrix("x", dtype=dtype)
        f = synk.function([x], [(x, "gather"), (x, "max"), (x, None)], mode=mode)
        value = (X[:10] > 0).astype(dtype)
        joined, high, master_value = f(value)
        assert_close(joined, value)
        assert_close(high, np.maximum(value[:5], value[5:]))
        assert_close(master_value, value[:5])


def check_variable_updated_and_reduced_in_turn(mode):
    """Check a shared variable that functions and collectives change in turn."""
    x = T.dvector("x")
    w = shared(np.zeros(2), "w")
    f = synk.function([x], w.sum(), updates=[(w, w + x.sum())], mode=mode)
    for step in range(3):
        f(np.arange(4.0))
        synk.all_reduce(w)
        np.testing.assert_array_equal(synk.gather(w), np.full((2, 2), 3.0 * (step + 1)))


CHECKS = [
    check_outputs_and_rows,
    check_updates,
    check_sliceable_shareds,
    check_results_alias_nothing,
    check_large_outputs,
    check_dtypes,
    check_variable_updated_and_reduced_in_turn,
]


# -- the modes -------------------------------------------------------------------------------------------------


def make_mode(name):
    if name == "Mode object":
        return package.compile.mode.Mode(linker="cvm", optimizer="fast_run")
    return name


#: Modes; the first is the library's default, Numba for PyTensor, C for Theano.
MODES = {
    "pytensor": ["NUMBA", "Mode object", "FAST_COMPILE"],
    "theano": ["Mode", "Mode object", "FAST_COMPILE"],
}[NAME]
if XLA:
    MODES = ["JAX"]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", [MODES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in MODES[1:])])
def test_results_are_correct_in_each_mode(name, check, two_ranks_per_test):
    check(make_mode(name))


class CountCompilations(Command):
    """Command that returns each rank's numbers of cache hits and of compilations of a Numba function."""

    def __init__(self, keys):
        self.keys = keys

    def run(self, rank):
        compiled = [c for key in self.keys for c in rank.get_object(key).compiled_variants.values()]
        stats = [c.function.vm.jit_fn.stats for c in compiled]
        return rank.all_gather([(sum(s.cache_hits.values()), sum(s.cache_misses.values())) for s in stats])


@pytest.mark.skipif(NAME == "theano" or XLA, reason="Numba compiles at the first call")
@pytest.mark.slow
def test_each_numba_function_is_compiled_by_one_rank(monkeypatch):
    monkeypatch.setattr(package.config, "mode", "NUMBA")
    synk.fork(3, use_gpu=False)  # on one host, even if ranks of other tests are on several
    try:
        new = 1 + float(np.random.default_rng().random())  # otherwise an earlier run could have cached it
        x, w = T.dmatrix("x"), shared(np.zeros(3), "w")
        # One input only: PyTensor takes the number of rows from either of two inputs, and ranks may choose differently.
        loss = ((x @ w * new - x[:, 0]) ** 2).mean()
        train = make_train_function(loss, [w], x, [], adam, learning_rate=new / 1000)
        losses = [float(train(X, [])) for _ in range(3)]
        assert losses[0] > losses[1] > losses[2]
        f = synk.function([x], ((x * new).sum(), "sum"))
        assert_close(f(X), (X * new).sum())
        assert_close(synk.gather(w), [w.get_value()] * 3)
        session = ranks.get_session()
        keys = [get_dispatcher(function).computation_key for function in (train.gradient, train.update, f)]
        with session.call_lock:
            session.wait_until_idle()
            counts = session.run(CountCompilations(keys))
        read, compiled = (1, 0), (0, 1)  # cache hits, compilations
        assert counts == [  # by rank; columns: gradient, update, f
            [compiled, read, compiled],
            [read, compiled, read],  # rank 1 compiles the update while rank 0 compiles the gradient
            [read, read, read],
        ]
    finally:
        synk.close()


class InterruptingDict(dict):
    def __getitem__(self, key):
        signal.raise_signal(signal.SIGINT)
        return super().__getitem__(key)


@pytest.mark.skipif(NAME == "theano" or XLA, reason="about Numba")
def test_interrupt_at_the_end_of_numba_code_is_raised(fork, monkeypatch):
    from numba.core import serialize

    fork(1)
    x = T.dvector("x")
    f = synk.function([x], (x + 1, "gather"), mode="NUMBA")
    assert_close(f(Y), Y + 1)
    # The compiled code reads the dictionary as it returns the array, in a Python function whose exceptions it ignores.
    monkeypatch.setattr(serialize, "_unpickled_memo", InterruptingDict(serialize._unpickled_memo))
    with pytest.raises(KeyboardInterrupt):
        f(Y)
    monkeypatch.undo()
    assert_close(f(Y), Y + 1)


#: Barrier of both ranks.
BOTH_RANKS_BARRIER = multiprocessing.Barrier(2)


class WaitForBothRanks(PythonOp):
    """The identity, after a barrier of both ranks.  Numba calls it in Python, and so caches no function with it."""

    def compute(self, x):
        BOTH_RANKS_BARRIER.wait(60)
        return x.copy()


@pytest.mark.skipif(NAME == "theano" or XLA, reason="Numba compiles at the first call")
@pytest.mark.filterwarnings("ignore:Numba will use object mode")
@pytest.mark.slow
def test_numba_uncacheable_functions_compile_on_all_ranks():
    synk.fork(2, use_gpu=False)  # forks of this process, which share the barrier
    try:
        x = T.dvector("x")
        f = synk.function([x], (WaitForBothRanks()(x).sum(), "sum"), mode="NUMBA")
        assert_close(f(Y), Y.sum())  # the barrier breaks if a worker waits for the end of the master's first call
    finally:
        synk.close()
