"""Sums over rows as expressions equal PyTensor's without ranks."""

import copy
import os
import pickle
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

pytensor = pytest.importorskip("pytensor", reason="the sum is PyTensor's Op")
import pytensor.tensor as pt  # noqa: E402
from library import INTERPRETED, XLA, fork_ranks, function  # noqa: E402

import synkhronos as synk  # noqa: E402
from synkhronos.extensions import distributed_rows, row_slices, rows_sum  # noqa: E402
from synkhronos.extensions.rows_sum import SumOverRows, sum_over_rows  # noqa: E402

N = 11
RNG = np.random.default_rng(1)
X, Y, GROUP = RNG.normal(size=(N, 3)), RNG.normal(size=N), RNG.integers(0, 4, N)

x, y, group = pt.dmatrix("x"), pt.dvector("y"), pt.lvector("group")
w, effects, scale, shift = pt.dvector("w"), pt.dvector("effects"), pt.dscalar("scale"), pt.lscalar("shift")
POINT = [RNG.normal(size=3), RNG.normal(size=4), np.array(0.7), np.array(2)]
DIRECTION = RNG.normal(size=3)


def log_density(x, y, group):
    center = x @ pt.exp(w) + effects[group] + shift
    return -pt.log1p(((y - center) / scale) ** 2) - pt.log(scale)


def sum_both_ways(terms, variables, values):
    """Return two expressions: the sum computed by the ranks, and the sum in this process."""
    constants = {variable: pt.constant(value) for variable, value in zip(variables, values, strict=True)}
    serial = pytensor.graph.replace.graph_replace([terms], constants)[0].sum()
    return sum_over_rows(terms, dict(zip(variables, values, strict=True))), serial


def build_derivatives(total):
    """Return inputs, and a sum with its gradients and with the products of its second derivatives and a vector."""
    gradients = pytensor.grad(total, [w, effects, scale])
    along = pt.dvector("direction")
    products = pytensor.grad((gradients[0] * along).sum(), [w, effects, scale])
    return [w, effects, scale, shift, along], [total, *gradients, *products]


@pytest.fixture
def calls(monkeypatch):
    """Record the functions that the ranks are called with."""
    names = []
    original = rows_sum.DistributedSum._call_function

    def record_call(self, called, *args):
        names.append(called.name.rsplit("_", 1)[1])
        return original(self, called, *args)

    monkeypatch.setattr(rows_sum.DistributedSum, "_call_function", record_call)
    return names


@pytest.fixture
def simple(two_ranks_per_test):
    """Give a function of the sum of ``(y - a)**2`` and its gradient, and one of the sum only."""
    a = pt.dscalar("a")
    total = sum_over_rows((y - a) ** 2, {y: Y})
    return function([a], total), function([a], [total, pytensor.grad(total, a)])


# The last number is the bytes of a slice; a row has 40.
@pytest.mark.parametrize(
    ("n", "rows", "block"), [(1, N, None), (2, N, None), (3, 2, None), (2, 1, None), (3, N, 100), (2, N, 1)]
)
def test_value_gradient_and_hessian_product_equal_pytensors(fork, monkeypatch, n, rows, block):
    if XLA and rows < 2 * n:
        pytest.skip("PyTensor takes the one row of a rank for something to broadcast, and refuses")
    if block is not None:
        monkeypatch.setattr(row_slices, "_MAX_SLICE_NBYTES", block)
    fork(n)
    values = [X[:rows], Y[:rows], GROUP[:rows]]
    total, serial = sum_both_ways(log_density(x, y, group), [x, y, group], values)
    f, serial_f = function(*build_derivatives(total)), function(*build_derivatives(serial))
    # The first call compiles, and later ones compute slices.
    for point in (POINT, [POINT[0] + 0.1, *POINT[1:]], POINT):
        actual, expected = f(*point, DIRECTION), serial_f(*point, DIRECTION)
        assert len(actual) == 7
        for value, expected_value in zip(actual, expected, strict=True):
            assert value.dtype == expected_value.dtype
            np.testing.assert_allclose(value, expected_value, rtol=1e-12, atol=1e-12)


def test_accepts_any_shape_and_dtype(two_ranks_per_test):
    z, b = pt.ftensor3("z"), pt.fscalar("b")
    values = RNG.normal(size=(5, 2, 3)).astype("float32")
    total, serial = sum_both_ways(pt.tanh(z * b), [z], [values])
    actual, expected = (function([b], [s, pytensor.grad(s, b)])(np.float32(0.5)) for s in (total, serial))
    assert [value.dtype for value in actual] == ["float32", "float32"]
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_accepts_rows_as_terms(two_ranks_per_test):
    total = sum_over_rows(y, {y: Y})
    np.testing.assert_allclose(function([], total)(), Y.sum())


def test_moves_other_terms_outside(two_ranks_per_test):
    heavy = pt.cumsum(w)
    total = sum_over_rows(x @ heavy, {x: X})
    assert total.owner.inputs == [heavy]
    # What is computed from small parameters is computed by the ranks: rewrites, as of log(exp(scale)), need its formula.
    total = sum_over_rows(y * pt.log(pt.exp(scale)), {y: Y})
    assert total.owner.inputs == [scale]
    f = function([scale], [total, pytensor.grad(total, scale)])
    np.testing.assert_allclose(f(-800.0), [-800 * Y.sum(), Y.sum()])
    # Results that depend on scalars only are not sent if other terms need these.
    total = sum_over_rows(y * pt.exp(scale * 2 + pt.log(3.0)) + scale, {y: Y})
    assert total.owner.inputs == [scale]


class UsersOp(pytensor.graph.Op):
    """An Op with state that can't be sent."""

    itypes = otypes = [pt.dscalar]

    def __init__(self):
        self.lock, self.n_calls = threading.Lock(), 0

    def perform(self, node, inputs, outputs):
        self.n_calls += 1
        outputs[0][0] = np.asarray(inputs[0] * 2)


def test_leaves_users_ops_to_the_master(two_ranks_per_test):
    op = UsersOp()
    doubled = op(scale)
    total = sum_over_rows(y * doubled, {y: Y})
    assert total.owner.inputs == [doubled]
    np.testing.assert_allclose(total.eval({scale: 3.0}, mode=INTERPRETED), 6 * Y.sum())
    assert op.n_calls == 1


@pytest.mark.parametrize("mode", ["CVM", "NUMBA"])
def test_works_in_compiled_modes(compiler, two_ranks_per_test, mode):
    a = pt.dvector("a")
    total, serial = sum_both_ways((y[:, None] - a) ** 3, [y], [Y])
    point = np.array([0.5, 1.5])
    results = []
    for s in (total, serial):
        f = pytensor.function([a], [2 * s, pytensor.grad(pt.exp(s / 100), a)], mode=mode if s is total else INTERPRETED)
        results.append(f(point))
    for value, expected_value in zip(*results, strict=True):
        np.testing.assert_allclose(value, expected_value)


def test_works_within_a_scan(two_ranks_per_test):
    a = pt.dscalar("a")
    total = sum_over_rows((y - a) ** 2, {y: Y})
    step = lambda now, *_: now - 0.01 * pytensor.graph.replace.graph_replace(pytensor.grad(total, a), {a: now})  # noqa: E731
    states = pytensor.scan(step, outputs_info=[a], n_steps=200, return_updates=False)
    np.testing.assert_allclose(function([a], states[-1])(5.0), Y.mean())


# -- caching -----------------------------------------------------------------------------------------------------


def test_caches_value_and_gradient_of_a_point(simple, calls):
    value, value_and_gradient = simple
    first = value_and_gradient(1.0)
    assert calls == ["gradient"]
    np.testing.assert_array_equal(value_and_gradient(1.0), first)
    np.testing.assert_array_equal(value(1.0), first[0])
    assert calls == ["gradient"]
    value(2.0)
    value_and_gradient(2.0)
    assert calls == ["gradient"] * 2


def test_value_and_gradient_are_one_evaluation(two_ranks_per_test, monkeypatch):
    evaluations = []
    original = rows_sum.DistributedSum.evaluate
    monkeypatch.setattr(rows_sum.DistributedSum, "evaluate", lambda *a, **k: evaluations.append(1) or original(*a, **k))
    a = pt.dscalar("a")
    total = sum_over_rows((y - a) ** 2, {y: Y})
    f = function([a], [total, pytensor.grad(total, a)], mode="FAST_COMPILE")  # the tests' default rewrites nothing
    np.testing.assert_allclose(f(1.0), [((Y - 1) ** 2).sum(), -2 * (Y - 1).sum()])
    assert len(evaluations) == 1


def test_value_beside_gradients_has_derivatives(two_ranks_per_test):
    a = pt.dscalar("a")
    total = sum_over_rows((y - a) ** 3, {y: Y})
    value, gradient = total.owner.op.sum.gradient_op(a)
    f = function([a], [value, gradient, pytensor.grad(value * gradient, a)])
    terms = Y - 0.5
    first, second, third = (terms**3).sum(), -3 * (terms**2).sum(), 6 * terms.sum()
    np.testing.assert_allclose(f(0.5), [first, second, second**2 + first * third])


def test_gradient_leaves_the_graph_of_the_value_as_it_was(two_ranks_per_test):
    a = pt.dscalar("a")
    rows = sum_over_rows((pt.log(pt.exp(a)) * y + 0) ** 2, {y: Y}).owner.op.sum
    graph = pytensor.dprint(rows.total, file="str")
    assert rows._value_and_gradients and pytensor.dprint(rows.total, file="str") == graph


def test_value_computes_no_gradient(two_ranks_per_test, calls):
    a = pt.dscalar("a")
    value = function([a], sum_over_rows((y - a) ** 2, {y: Y}))
    np.testing.assert_allclose(value(1.0), ((Y - 1) ** 2).sum())
    assert calls == ["value"]


def test_cache_compares_shapes(two_ranks_per_test):
    a = pt.dmatrix("a")
    value = function([a], sum_over_rows(y * a.shape[0], {y: Y}))
    np.testing.assert_allclose(value(np.ones((2, 3))), 2 * Y.sum())
    np.testing.assert_allclose(value(np.ones((3, 2))), 3 * Y.sum())


def test_results_are_writable_copies(two_ranks_per_test):
    total = sum_over_rows((y[:, None] - w) ** 2, {y: Y})
    f = function([w], pytensor.grad(total, w))
    point = np.zeros(3)
    first = f(point)
    copied = first.copy()
    first[:] = 0
    np.testing.assert_array_equal(f(point), copied)


def test_accepts_shared_variables(two_ranks_per_test):
    a = pytensor.shared(1.0, "a")
    total = sum_over_rows(y * a, {y: Y})
    f = function([], [total, pytensor.grad(total, a)])
    np.testing.assert_allclose(f(), [Y.sum(), Y.sum()])
    a.set_value(3.0)
    np.testing.assert_allclose(f(), [3 * Y.sum(), Y.sum()])


def test_sends_new_values_of_shared_rows(two_ranks_per_test):
    xs, ys = pytensor.shared(X, "xs"), pytensor.shared(Y, "ys")
    total = sum_over_rows((y - x @ w) ** 2, {x: xs, y: ys})
    f = function([w], [total, pytensor.grad(total, w)])

    def check(x_now, y_now):
        residual = y_now - x_now @ np.ones(3)
        value, gradient = f(np.ones(3))
        np.testing.assert_allclose(value, (residual**2).sum())
        np.testing.assert_allclose(gradient, -2 * x_now.T @ residual)

    check(X, Y)
    ys.set_value(Y + 1)
    check(X, Y + 1)
    ys.set_value(Y[:4])
    with pytest.raises(
        ValueError, match="rows: expected the same number of rows for each input, got {\"'x'\": 11, \"'y'\": 4}"
    ):
        f(np.ones(3))
    xs.set_value(X[:4])
    check(X[:4], Y[:4])
    for shared in (xs, ys):
        shared.set_value(shared.get_value()[:0])
    check(X[:0], Y[:0])
    xs.set_value(X), ys.set_value(Y)
    check(X, Y)


def test_over_no_rows_is_zero(two_ranks_per_test):
    inputs, outputs = build_derivatives(sum_over_rows(log_density(x, y, group), {x: X[:0], y: Y[:0], group: GROUP[:0]}))
    for value, shape in zip(
        function(inputs, outputs)(*POINT, DIRECTION), [(), (3,), (4,), (), (3,), (4,), ()], strict=True
    ):
        assert value.shape == shape and not value.any()


@pytest.mark.parametrize("kind", ["shared", "array", "Data"])
def test_sends_rows_changed_in_place(two_ranks_per_test, kind):
    values = np.arange(5000.0)
    source = {"shared": lambda: pytensor.shared(values), "array": lambda: values, "Data": lambda: synk.data(values)}[
        kind
    ]()
    memory = {"shared": lambda: source.get_value(borrow=True), "array": lambda: values, "Data": lambda: source.data}[
        kind
    ]()
    a = pt.dscalar("a")
    total = sum_over_rows((y - a) ** 2, {y: source})
    f = function([a], [total, pytensor.grad(total, a)])
    for change in (
        lambda: None,
        lambda: memory.fill(1),
        lambda: memory.__setitem__(4321, np.nan),
        lambda: memory.fill(2),
    ):
        change()
        np.testing.assert_allclose(f(0.5), [((memory - 0.5) ** 2).sum(), -2 * (memory - 0.5).sum()])


def test_detects_a_change_in_long_rows(two_ranks_per_test):
    values = np.ones((8, 1 << 14))
    a, rows = pt.dscalar("a"), pt.dmatrix("rows")
    f = function([a], sum_over_rows(((rows - a) ** 2).sum(axis=1), {rows: values}))
    f(0.5)
    values[3] = 2
    np.testing.assert_allclose(f(0.5), ((values - 0.5) ** 2).sum())


def test_notices_a_change_of_many_rows(two_ranks_per_test, calls):
    columns = pytensor.shared(np.ones((300_000, 2), order="F"))
    a = pt.dscalar("a")
    f = function([a], sum_over_rows(x.sum(axis=1) * a, {x: columns}))
    assert f(1.0) == f(1.0) == 600_000
    assert calls == ["value"]  # unchanged inputs are not computed again
    columns.get_value(borrow=True)[:, 1] = 2
    assert f(1.0) == 900_000


# -- processes and threads ---------------------------------------------------------------------------------------


@pytest.mark.new_ranks
def test_sends_rows_to_new_ranks(fork):
    fork(2)
    a = pt.dscalar("a")
    total = sum_over_rows((y - a) ** 2, {y: Y})
    f = function([a], [total, pytensor.grad(total, a)])
    expected = ((Y - 1) ** 2).sum(), -2 * (Y - 1).sum()
    np.testing.assert_allclose(f(1.0), expected)
    synk.close()
    fork(3)
    np.testing.assert_allclose(f(1.0), expected)
    synk.close()
    with pytest.raises(RuntimeError, match="fork"):
        f(2.0)


def test_can_be_made_before_fork(fork):
    synk.close()
    a = pt.dscalar("a")
    f = function([a], sum_over_rows(y * a, {y: Y}))
    fork(2)
    np.testing.assert_allclose(f(2.0), 2 * Y.sum())


def test_calls_of_threads_return_own_results(simple):
    _, value_and_gradient = simple
    copies = [value_and_gradient.copy() for _ in range(4)]  # a function runs in one thread at a time
    wrong = []

    def work(f, start):
        for point in start + np.arange(25.0):
            value, gradient = f(point)
            if not np.allclose([value, gradient], [((Y - point) ** 2).sum(), -2 * (Y - point).sum()]):
                wrong.append(point)

    threads = [threading.Thread(target=work, args=(f, 100 * i)) for i, f in enumerate(copies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_in_a_forked_process_names_cores(simple):
    value, _ = simple
    value(1.0)
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            value(2.0)
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.waitpid(pid, 0)
    message = os.read(reader, 10_000).decode()
    os.close(reader), os.close(writer)
    assert message.startswith("RuntimeError") and "cores=1" in message
    np.testing.assert_allclose(value(2.0), ((Y - 2) ** 2).sum())


def test_unpickled_elsewhere_names_cores(two_ranks_per_test):
    a = pt.dscalar("a")
    total = sum_over_rows((y - a) ** 2, {y: Y})
    code = "import pickle, sys; pickle.load(sys.stdin.buffer).perform(None, [1.0], [[None]])"
    # Not by multiprocessing, whose resource tracker would outlive the test.
    ended = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(total.owner.op), capture_output=True)
    assert b"RuntimeError" in ended.stderr and b'mp_ctx="fork"' in ended.stderr and b"cores=1" in ended.stderr


def test_copies_share_rows(two_ranks_per_test):
    a = pt.dscalar("a")
    total = sum_over_rows((y - a) ** 2, {y: Y})
    op = total.owner.op
    for other in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert isinstance(other, SumOverRows) and other.sum is op.sum
        np.testing.assert_allclose(function([a], other(a))(1.0), ((Y - 1) ** 2).sum())


# -- failures ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(XLA, reason="XLA raises nothing")
def test_raises_errors_of_ranks(two_ranks_per_test):
    a = pt.dscalar("a")
    terms = pytensor.raise_op.Assert("too large")(y * a, pt.all(y * a < 100))
    f = function([a], sum_over_rows(terms, {y: np.append(np.ones(9), 200.0)}))
    with pytest.raises(synk.WorkerError, match="too large"):
        f(1.0)
    np.testing.assert_allclose(f(0.25), 9 / 4 + 50)


@pytest.mark.new_ranks
def test_works_after_a_death_and_a_new_fork(two_ranks_per_test):
    a = pt.dscalar("a")
    f = function([a], sum_over_rows((y - a) ** 2, {y: Y}))
    f(0.0)
    (pid,) = synk.ranks.get_session().worker_pids.values()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(synk.WorkerError, match="was killed by SIGKILL"):
        f(1.0)
    fork_ranks(2)
    np.testing.assert_allclose(f(1.0), ((Y - 1) ** 2).sum())


# -- wrong arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("terms", "rows", "error", "message"),
    [
        (3.0, {y: Y}, TypeError, "terms: expected a variable of PyTensor, got 3.0"),
        (group, {group: GROUP}, TypeError, "terms: expected floats, got int64"),
        ((y**2).mean(), {y: Y}, ValueError, "terms: expected an element or more for each row, or their sum"),
        (y.sum() + w.sum(), {y: Y}, ValueError, "terms: expected an element or more for each row, or their sum"),
        (w, {y: Y}, ValueError, "rows: the terms are not computed from 'y'"),
        (y, {}, TypeError, "rows: expected a dict of at least one variable"),
        (y, [(y, Y)], TypeError, "rows: expected a dict of at least one variable"),
        (y, {"y": Y}, TypeError, "rows: expected variables of PyTensor as keys, got 'y'"),
        (y * 2, {y * 2: Y}, TypeError, "rows: expected a symbolic input as key, got Mul.0"),
        (y * scale, {scale: 1.0}, ValueError, r"rows: 'scale' of type Scalar\(float64, shape=\(\)\) has no rows"),
        (y, {y: X}, TypeError, "rows: 'y' of type .* cannot take the values"),
        (y, {y: pytensor.shared(X)}, TypeError, "rows: 'y' needs values of float64 and 1 dimensions, got .* and 2"),
        (x @ w + y, {x: X, y: Y[:3]}, ValueError, "rows: expected the same number of rows for each input, got"),
        (y + pt.random.normal(size=y.shape), {y: Y}, TypeError, "cannot be sent"),
    ],
)
def test_refuses_wrong_arguments(terms, rows, error, message):
    with pytest.raises(error, match=message):
        sum_over_rows(terms, rows)


def test_refuses_third_derivatives():
    a = pt.dscalar("a")
    total = sum_over_rows((y - a) ** 4, {y: Y})
    second = pytensor.grad(pytensor.grad(total, a), a)
    with pytest.raises(pytensor.gradient.NullTypeGradError, match="third derivatives of a sum over rows"):
        pytensor.grad(second, a)


def test_compares_only_arrays_that_may_change():
    array = np.zeros(4)
    view = array[:]
    view.flags.writeable = False
    assert (
        distributed_rows._compute_fingerprint(array)
        == distributed_rows._compute_fingerprint(view)
        != distributed_rows._compute_fingerprint(array + 1)
    )
    array.flags.writeable = False
    assert distributed_rows._compute_fingerprint(array) is None
