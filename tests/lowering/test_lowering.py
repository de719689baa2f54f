"""Graphs that PyTensor's translation to JAX cannot compile: ranges, lengths, dtypes, scattered additions.

The tests start XLA in this process, and run only with SYNKHRONOS_TEST_DEVICE=jax or gpu, as tests/engines/test_jax.py.
"""

import re
import signal
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from library import XLA, function, grad, package, shared
from library import tensor as T

import synkhronos as synk
from synkhronos.functions.computation import DEFAULT_VARIANT
from synkhronos.lowering import scatter
from synkhronos.lowering.linker import with_static_length_linker
from synkhronos.lowering.polynomial import find_constant_extent
from synkhronos.training import make_train_function
from synkhronos.training.updates import sgd

pytestmark = pytest.mark.skipif(not XLA, reason="these are about JAX mode")


# -- ranges and dtypes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [100, 1000])
def test_arange_may_exceed_its_dtype(rows, two_ranks_per_test):
    # PyTensor 3.0 stores the 0 of a range as int8, and NumPy subtracted it from the number of rows.
    x, y = T.dmatrix("x"), T.lvector("y")
    f = synk.function([x, y], (x[T.arange(y.shape[0]), y], "gather"))
    values, columns = np.random.default_rng(0).normal(size=(2 * rows, 3)), np.arange(2 * rows) % 3
    np.testing.assert_array_equal(f(values, columns), values[np.arange(2 * rows), columns])


@pytest.mark.parametrize(
    ("bounds", "dtype", "expected"),
    [
        (lambda n: (n, -1, -1), "int64", [3, 2, 1, 0]),
        (lambda n: (n, -1, -1), "uint8", [3, 2, 1, 0]),  # the dtype cannot represent the step
        (lambda n: (n, 5.5), "float64", [3.0, 4.0, 5.0]),
        (lambda n: (0, n, 0.5), "float64", [0, 0.5, 1, 1.5, 2, 2.5]),
        (lambda n: (0, n, 2), "int32", [0, 2]),
    ],
)
def test_arange_equals_numpy(bounds, dtype, expected, two_ranks_per_test):
    x = T.dvector("x")
    f = synk.function([x], (T.arange(*bounds(x.shape[0]), dtype=dtype), None))
    result = f(np.zeros(6))
    assert result.dtype == dtype and np.asarray(result).tolist() == expected


def test_float32_graphs_compute_in_float32(two_ranks_per_test):
    # JAX promotes a float32 divided by an integer to float64.
    x, y = T.fmatrix("x"), T.fvector("y")
    w = shared(np.zeros(3, "float32"), "w")
    loss = ((T.dot(x, w) - y) ** 2).mean()
    gradient = grad(loss, w)
    f = synk.function([x, y], [loss, (gradient, "avg")], updates=[(w, w - np.float32(0.1) * gradient)])
    value = np.ones((4, 3), "float32")
    for result in f(value, value[:, 0]):
        assert result.dtype == "float32"
    assert w.get_value().dtype == "float32" and synk.get_value(1, w).dtype == "float32"
    run = f._computation.compiled_variants[DEFAULT_VARIANT].runner
    text = run._program.lower(*run._get_arguments((value[:2], value[:2, 0]))).as_text()
    assert "xf32>" in text and not re.search(r"xf64>", text)  # except scalars: counts of rows


@pytest.mark.parametrize(
    ("build", "dtypes"),
    [
        (lambda i, x: i + x, ("int64", "float32")),
        (lambda i, z: i - z, ("int64", "complex64")),
        (lambda i, u: (i > 0) / u, ("int64", "uint32")),
        (lambda i, x: T.switch(x > 0, i, x), ("int64", "float32")),
        (lambda i, x: T.stack([i, x]), ("int64", "float32")),
        (lambda i, x: T.dot(i[None], x[:, None]), ("int64", "float32")),
        (lambda i, x: T.eq(i, x), ("int64", "float32")),
        (lambda i, x: (x.sum(dtype="float64"), x.mean(dtype="float64")), ("int64", "float32")),
        (lambda i, x: x.prod(dtype="float64"), ("int64", "float32")),
        (lambda i, x: (i[1] + x[2]) + x.sum(dtype="float64"), ("int64", "float32")),
        (lambda i, x: T.polygamma(T.minimum(i, 2), x), ("int64", "float64")),
    ],
)
def test_float64_results_are_computed_in_float64(build, dtypes, fork):
    fork(1)
    inputs = [T.vector(dtype=dtype) for dtype in dtypes]
    values = [np.array([2**24 + 1, 2**31 - 1, 7], dtypes[0]), np.array([2**24 - 1, 2**31, 1.5]).astype(dtypes[1])]
    outputs = build(*inputs)
    expected = package.function(inputs, outputs, mode="FAST_COMPILE", on_unused_input="ignore")(*values)
    results = package.function(inputs, outputs, mode=with_static_length_linker("JAX"), on_unused_input="ignore")(
        *values
    )
    np.testing.assert_allclose(results, expected, rtol=1e-12)


def test_updates_of_plain_functions_keep_their_dtype(fork):
    # As in a launcher's model, with floatX=float64: JAX computes the gradient of a norm in float64.
    fork(1)
    x, w = T.fmatrix("x"), shared(np.ones(4, "float32"), "w")
    gradient = grad(w.norm(2) + x.mean(), w)
    train = package.function([x], updates=[(w, w - gradient)], mode=with_static_length_linker("JAX"))
    train(np.ones((4, 3), "float32"))
    assert w.get_value(borrow=True).dtype == "float32"
    np.testing.assert_allclose(w.get_value(), np.full(4, 0.5), rtol=1e-6)


def test_interrupt_while_jax_traces_leaves_no_current_trace(fork, monkeypatch):
    from jax._src.core import TracingContext, trace_ctx

    from synkhronos.engines.xla.executable import _is_option_known

    fork(1)
    x = T.fvector("x")
    f = package.function([x], T.exp(x) + 1, mode=with_static_length_linker("JAX"))
    set_trace, calls = TracingContext.set_trace, []

    def set_and_interrupt(context, trace):
        set_trace(context, trace)
        calls.append(trace)
        if len(calls) == 1:  # a block's ``__enter__``: its ``__exit__`` is not called
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(TracingContext, "set_trace", set_and_interrupt)
    for trace in (lambda: f(np.zeros(2, "float32")), lambda: _is_option_known.__wrapped__("xla_cpu_enable_fast_math")):
        calls.clear()
        with pytest.raises(KeyboardInterrupt):
            trace()
        assert trace_ctx.is_top_level()
    np.testing.assert_array_equal(f(np.zeros(2, "float32")), [2, 2])


def test_loops_keep_the_dtype_of_their_state(fork):
    # PyTensor sums float32 in float64, and XLA needs one dtype in all steps.
    fork(1)
    x, start = T.fmatrix("x"), T.fvector("start")
    states = package.scan(
        lambda row, state: T.log(T.exp(state[:, None] + row).sum(axis=0)),
        sequences=x,
        outputs_info=start,
        return_updates=False,
    )
    rows = np.linspace(-1, 1, 12, dtype="float32").reshape(4, 3)
    expected = np.zeros(3)
    for row in rows:
        expected = np.log(np.exp(expected[:, None] + row).sum(axis=0))
    plain = package.function([x, start], states[-1], mode=with_static_length_linker("JAX"))
    for f in (plain, synk.function([], (states[-1], None), bcast_inputs=[x, start])):
        result = np.asarray(f(rows, np.zeros(3, "float32")))
        assert result.dtype == "float32"
        np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_branches_keep_the_dtype_of_the_graph(fork):
    from synkhronos.lowering.shapes import IfElse

    # XLA needs one dtype in both branches.
    fork(1)
    x, flag = T.fmatrix("x"), T.iscalar("flag")
    chosen = IfElse(n_outs=1)(flag, x[0], x.sum(axis=0))
    rows = np.linspace(-1, 1, 6, dtype="float32").reshape(3, 2)
    plain = package.function([x, flag], chosen, mode=with_static_length_linker("JAX"))
    for f in (plain, synk.function([], (chosen, None), bcast_inputs=[x, flag])):
        np.testing.assert_allclose(np.asarray(f(rows, 0)), rows.sum(axis=0), rtol=1e-6)
        np.testing.assert_array_equal(np.asarray(f(rows, 1)), rows[0])


# -- lengths that follow from integers -------------------------------------------------------------------------


def test_rows_and_columns_of_differences_are_not_one_unknown():
    k = T.lvector("k")
    difference = (k[:, None] - k[None, :])[1, 0]
    assert find_constant_extent(slice(k[0], k[0] + 3 + difference), {}) is None
    assert find_constant_extent(slice(k[0], k[0] + 3), {}) == 3


@pytest.fixture
def table():
    """Return 25 rows of 3 random numbers."""
    return np.random.default_rng(0).normal(size=(25, 3))


def test_symbolic_index_selects_rows(table, two_ranks_per_test):
    x, i, rows = shared(table, "x"), T.lscalar("i"), T.dmatrix("rows")
    w = shared(np.zeros(3), "w")
    updates = [(w, w + rows.sum(axis=0))]
    f = synk.function([], [(rows, None), (rows.shape[0], "sum")], [i], updates, {rows: x[i * 10 : (i + 1) * 10]})
    total = 0
    for index in (0, 1, 2, 1):
        part = table[index * 10 : (index + 1) * 10]
        result, count = f(index)
        np.testing.assert_array_equal(result, part)
        assert int(count) == 2 * len(part)
        total = total + part.sum(axis=0)
    for rank in range(2):
        np.testing.assert_allclose(synk.get_value(rank, w), total)
    # All full batches are one launch, the last batch is another.
    assert f._computation.compiled_variants[DEFAULT_VARIANT].runner._program._cache_size() == 2
    np.testing.assert_array_equal(f.as_theano(2)[0], table[20:])


def test_symbolic_index_selects_scattered_rows(table, two_ranks_per_test):
    x, i, y = shared(table, "x"), T.iscalar("i"), T.dvector("y")
    f = synk.function([y], (y + x[i : i + 3, 0].sum(), "gather"), [i])
    for index in (4, 24):
        np.testing.assert_allclose(f(np.arange(5.0), index), np.arange(5.0) + table[index : index + 3, 0].sum())


def test_branch_may_select_rows_by_an_index(table, two_ranks_per_test):
    from synkhronos.lowering.shapes import IfElse

    # PyTensor 3.3 would make an inner graph of each branch, which XLA would trace with an unknown index.
    x, i, flag = shared(table, "x"), T.lscalar("i"), T.lscalar("flag")
    chosen = IfElse(n_outs=1)(flag, T.exp(x[:i]).sum(axis=0), x.max(axis=0))
    f = synk.function([], (chosen, None), [i, flag])
    np.testing.assert_allclose(f(10, 1), np.exp(table[:10]).sum(axis=0))
    np.testing.assert_array_equal(f(10, 0), table.max(axis=0))


def test_index_values_are_kept_for_the_launch(table, two_ranks_per_test):
    x, i = shared(table, "x"), T.lscalar("i")
    f = synk.function([], (x[i : i + 2], None), [i])
    index = synk.data(np.asarray(0))
    results = []
    for k in range(20):
        index[...] = k
        results.append(f(index))
    for k, result in enumerate(results):
        np.testing.assert_array_equal(result, table[k : k + 2])


def test_random_draws_follow_the_number_of_rows(table, two_ranks_per_test):
    x, i = shared(table, "x"), T.lscalar("i")
    rows = x[i * 10 : (i + 1) * 10]
    drawn = T.random.RandomStream(1).uniform(size=rows.shape)
    f = synk.function([], (drawn, "gather"), [i])
    assert np.asarray(f(0)).shape == (20, 3) and np.asarray(f(2)).shape == (10, 3)
    assert len(np.unique(np.asarray(f(1)))) == 60


def test_training_function_accepts_a_row_counter(table, two_ranks_per_test):
    x, y, i = T.dvector("x"), T.dvector("y"), shared(np.int64(0), "i")
    w = shared(np.zeros(3), "w")
    loss = ((T.dot(shared(table)[i * 10 : (i + 1) * 10], w) - y.mean()) ** 2).mean() + 0 * x.sum()
    train = make_train_function(loss, [w], x, y, sgd, extra_updates=[(i, i + 1)], learning_rate=0.1)
    expected = np.zeros(3)
    for index in range(3):
        train(np.zeros(4), np.ones(4))
        rows = table[index * 10 : (index + 1) * 10]
        expected -= 0.1 * 2 / len(rows) * rows.T @ (rows @ expected - 1)
    np.testing.assert_allclose(w.get_value(), expected)
    assert int(i.get_value()) == 3


# -- many numbers into few places ------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None)  # XLA compiles for each number of rows
@given(
    st.integers(1, 9), st.lists(st.integers(1, 3), max_size=2), st.integers(0, 60), st.integers(2, 40), st.integers(0)
)
def test_scatter_add_into_copies_equals_scatter_add(places, rest, rows, n_copies, seed):
    from pytensor.link.jax.dispatch.basic import jax  # it enables float64, also where this test runs alone

    add = jax.jit(scatter.scatter_add_rows, static_argnums=3)  # otherwise XLA compiles each operation of both calls
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(places, *rest)), rng.normal(size=(rows, *rest))
    index = rng.integers(-places, places, rows).astype(rng.choice(["int8", "int32", "int64"]))
    expected = x.copy()
    np.add.at(expected, index, y)
    np.testing.assert_allclose(add(x, y, index, n_copies), expected, atol=1e-9)
    # As in JAX, additions out of bounds are dropped.
    np.testing.assert_array_equal(add(x, y, np.full(rows, places), n_copies), x)


def test_scatter_add_to_few_effects_uses_copies_on_gpus(fork, monkeypatch):
    fork(1)
    rng = np.random.default_rng(0)
    effects, index, weights = T.dvector("effects"), T.lvector("index"), T.dvector("weights")
    gradient = grad((T.exp(effects[index]) * weights).sum(), effects)
    inputs = [rng.normal(size=5), rng.integers(-5, 5, 20_000), rng.normal(size=20_000)]
    expected = function([effects, index, weights], gradient)(*inputs)
    scatter_add_rows, numbers_of_copies = scatter.scatter_add_rows, []
    monkeypatch.setattr(scatter, "JAX", SimpleNamespace(is_on_gpu=True))
    monkeypatch.setattr(
        scatter,
        "scatter_add_rows",
        lambda *arguments: (numbers_of_copies.append(arguments[-1]), scatter_add_rows(*arguments))[1],
    )
    result = synk.function([index, weights], (gradient, "sum"), bcast_inputs=[effects])(*inputs[1:], inputs[0])
    np.testing.assert_allclose(result, expected, rtol=1e-9)
    assert numbers_of_copies == [15]
