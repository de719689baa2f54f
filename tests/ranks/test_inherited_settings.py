"""Settings that workers inherit from the master: seeds, NumPy's error handling, flags of the graph library."""

import random

import numpy as np
import pytest
from library import DEVICE, INTERPRETED, PythonOp, package
from library import tensor as T

import synkhronos as synk

pytestmark = pytest.mark.skipif(DEVICE != "host", reason="operations that are written in Python")


class Draws(PythonOp):
    """Op that returns numbers of NumPy's and Python's global generators, as users' Ops may."""

    def compute(self, x):
        return np.array([*np.random.random(4), random.random()])


class Reciprocal(PythonOp):
    """Op that divides by NumPy, which respects `np.seterr`; the libraries' Ops do not."""

    def compute(self, x):
        return 1 / x


def draw_values(n, calls=2):
    x = T.dvector("x")
    f = synk.function([x], (Draws()(x), "gather"), mode=INTERPRETED)
    return np.array([f(np.ones(n)) for _ in range(calls)]).reshape(calls, n, 5)


@pytest.fixture(autouse=True)
def restore_random_states():
    before = np.random.get_state(), random.getstate()
    yield
    np.random.set_state(before[0])
    random.setstate(before[1])


def test_global_generators_differ_between_ranks(fork):
    fork(3)
    values = draw_values(3)
    assert len(np.unique(values)) == values.size


@pytest.mark.parametrize("master", [0, 2])
def test_global_generators_repeat_from_the_masters_seed(fork, master):
    def run(seed):
        np.random.seed(seed)
        random.seed(seed)
        fork(3, master_rank=master)
        values = draw_values(3)
        synk.close()
        return values

    first = run(7)
    np.testing.assert_array_equal(run(7), first)
    assert not np.isin(run(8), first).any()
    # The master's numbers are those of the serial script.
    np.random.seed(7)
    random.seed(7)
    for values in first[:, master]:
        np.testing.assert_array_equal(values, [*np.random.random(4), random.random()])


def make_reciprocal_function():
    x = T.dvector("x")
    return synk.function([x], (Reciprocal()(x), "gather"), mode=INTERPRETED)


def test_workers_inherit_numpy_errstate(two_ranks_per_test):
    f = make_reciprocal_function()
    with np.errstate(all="ignore"):
        assert f(np.array([1.0, 0.0])).tolist() == [1, np.inf]
    with np.errstate(divide="raise"):
        with pytest.raises(synk.WorkerError, match="rank 1 raised FloatingPointError: divide by zero"):
            f(np.array([1.0, 0.0]))
        with pytest.raises(FloatingPointError):
            f(np.array([0.0, 1.0]))
    with np.errstate(all="ignore"):
        assert f(np.array([1.0, 0.0])).tolist() == [1, np.inf]


class GetDivideSetting(PythonOp):
    """Op that returns NumPy's setting for divisions by zero."""

    def compute(self, x):
        return np.array([WAYS.index(np.geterr()["divide"])], float)


WAYS = ["ignore", "warn", "raise", "call", "print", "log"]


def test_workers_inherit_numpy_error_settings_except_call(two_ranks_per_test):
    x = T.dvector("x")
    f = synk.function([x], (GetDivideSetting()(x), "gather"), mode=INTERPRETED)
    for how in WAYS:
        with np.errstate(divide=how):
            master, worker = (WAYS[int(number)] for number in f(np.ones(2)))
        assert master == how
        assert worker == ("warn" if how in ("call", "log") else how)


class IsFloat32(PythonOp):
    """Op that returns 1 on ranks of which ``config.floatX`` is float32."""

    def compute(self, x):
        return np.array([float(package.config.floatX == "float32")])


def get_floatx(context):
    return package.config.floatX


def test_workers_compile_with_library_settings_changed_after_fork(two_ranks_per_test, monkeypatch):
    x = T.dvector("x")
    f = synk.function([x], [(IsFloat32()(x), "gather")], mode=INTERPRETED)
    monkeypatch.setattr(package.config, "floatX", "float32")
    assert f(np.ones(2))[0].tolist() == [1, 1]
    package.config.floatX = "float64"
    assert f(np.ones(2), output_subset=[0])[0].tolist() == [0, 0]  # compiles another variant


def test_programs_run_with_library_settings_changed_after_fork(two_ranks_per_test, monkeypatch):
    monkeypatch.setattr(package.config, "floatX", "float32")
    assert synk.run(get_floatx) == ["float32"] * 2
