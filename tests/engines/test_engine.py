"""A user-defined engine is one file in synkhronos/engines/ (here in tests/support/toy_engines/), without other edits."""

import copy
import gc
import sys

import numpy as np
import pytest
from library import DEVICE, shared, tensor
from paths import SUPPORT

import synkhronos as synk
from synkhronos import engines, ranks
from synkhronos.engines.lazy import Result
from synkhronos.graph_libraries import get_library
from synkhronos.graph_libraries.library import CompileOrder
from synkhronos.training import make_train_function, make_train_function_serial
from synkhronos.training.updates import adam

pytestmark = [
    pytest.mark.skipif(DEVICE != "host", reason="the toy computes with NumPy's arrays"),
    pytest.mark.new_ranks,
]

X = np.random.default_rng(0).normal(size=(7, 3))
FOLDER = str(SUPPORT / "toy_engines")


@pytest.fixture
def toy(monkeypatch):
    """Add toy.py to the package of engines."""
    monkeypatch.setattr(engines, "__path__", [*engines.__path__, FOLDER])
    engines.list_engines.cache_clear()
    assert [type(engine).__name__ for engine in engines.list_engines()[-2:]] == ["ToyEngine", "NumpyEngine"]
    module = sys.modules["synkhronos.engines.toy"]
    monkeypatch.setattr(module.ENGINE, "runs_functions", True)
    monkeypatch.setattr(module.Launch, "n_launches", 0)
    yield module
    synk.close()
    engines.list_engines.cache_clear()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_toy_engine_runs_functions_with_lazy_outputs(toy, fork, n):
    fork(n)
    x, s = tensor.dmatrix("x"), shared(np.zeros(3), "s")
    f = synk.function([x], [(x.sum(axis=0), "sum"), (x**2, "gather"), x.max()], updates=[(s, x.sum(axis=0), "sum")])
    data = synk.data(X)
    results = [f(data), f(data, num_slices=3), f(data, batch=[5, 1, 1])]
    assert all(type(result) is Result for results_of_call in results for result in results_of_call)
    assert toy.Launch.n_launches == 2  # accumulation over slices needs arrays
    for rows, (total, squares, _) in zip((X, X, X[[5, 1, 1]]), results, strict=True):
        np.testing.assert_allclose(total, rows.sum(axis=0))
        np.testing.assert_allclose(squares, rows**2)
    np.testing.assert_allclose(copy.deepcopy(f)(data)[0], X.sum(axis=0))


def test_unread_outputs_are_lost_when_ranks_end(toy, fork):
    fork(2)
    x = tensor.dmatrix("x")
    f = synk.function([x], (x.sum(), "sum"))
    unread = f(X)
    ranks.get_session().close(kill=True)
    for _ in range(2):
        fork(2)
        gc.collect()
        with pytest.raises(RuntimeError, match="the ranks ended before this output was read"):
            float(unread)
        np.testing.assert_allclose(float(f(X)), X.sum())
        synk.close()


def make_adam_function(make, **kwargs):
    x, y, w = tensor.dmatrix("x"), tensor.dvector("y"), shared(np.zeros(3), "w")
    loss = ((tensor.dot(x, w) - y) ** 2).mean()
    return make(loss, [w], x, y, adam, learning_rate=0.1, **kwargs), w


@pytest.mark.parametrize("n", [1, 2])
def test_toy_engine_fuses_training_steps(toy, fork, n):
    fork(n)
    (train, w), (train_serial, w_serial) = (
        make_adam_function(make_train_function),
        make_adam_function(make_train_function_serial),
    )
    y = X @ np.array([1.0, 2.0, 3.0])
    batches = [[0, 1], [2, 3], [4, 5], [1, 6]]
    losses = [float(train(X, y, rows)) for rows in ([0, 1, 2], [3, 4])]
    assert toy.Launch.n_launches == 2
    losses += map(float, train.steps(X, y, batches))
    assert toy.Launch.n_launches == 3
    losses.append(float(train(X, y, num_slices=2)))
    expected = [train_serial(X, y, rows) for rows in ([0, 1, 2], [3, 4], *batches, None)]
    np.testing.assert_allclose(losses, expected)
    np.testing.assert_allclose(synk.gather(w), [w_serial.get_value()] * n)


def test_functions_compiled_at_the_first_call_are_fused_later(toy, fork, monkeypatch):
    # The master compiles first; it cannot wait for the other ranks in that launch.
    library = type(get_library(tensor.dmatrix()))
    monkeypatch.setattr(library, "choose_compile_order", lambda self, mode: CompileOrder.AT_FIRST_CALL)
    monkeypatch.setattr(library, "writes_cache_at_first_call", lambda self, function: True)
    monkeypatch.setattr(library, "compile_now", lambda self, function: None)
    fork(2)
    (train, w), (train_serial, w_serial) = (
        make_adam_function(make_train_function),
        make_adam_function(make_train_function_serial),
    )
    for _ in range(3):
        np.testing.assert_allclose(float(train(X, X[:, 0])), train_serial(X, X[:, 0]))
    assert toy.Launch.n_launches == 4  # two of the first step, of gradient and update, and one of each later step
    np.testing.assert_allclose(synk.gather(w), [w_serial.get_value()] * 2)


def launch_six_times(context, f, x):
    """Run a function six times in three launches."""
    return [float(v) for _ in range(3) for v in f.wait_for_outputs(f.launch_many(2, x))], f.max_repeats


def test_run_programs_launch_many_times_on_a_toy_engine(toy, two_ranks_per_test):
    x, s = tensor.dmatrix("x"), shared(np.zeros(()), "s")
    f = synk.function([x], (x.sum() + s, "sum"), updates=[(s, s + 1)])
    for losses, max_repeats in synk.run(launch_six_times, f, synk.data(X[:6])):
        np.testing.assert_allclose(losses, [X[3 * (i % 2) :][:3].sum() + i for i in range(6)])
        assert max_repeats == 8
