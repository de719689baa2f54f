"""Rewrites of sums: values before and after, and which sums they rewrite."""

from collections import Counter

import numpy as np
import pytest

pytensor = pytest.importorskip("pytensor", reason="the rewrites are PyTensor's")
import pytensor.tensor as pt  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from library import XLA, limit_examples  # noqa: E402
from pytensor.compile.mode import Mode, get_mode  # noqa: E402
from pytensor.graph.fg import FunctionGraph  # noqa: E402
from pytensor.scalar.basic import Add  # noqa: E402
from pytensor.tensor.elemwise import Elemwise  # noqa: E402
from pytensor.tensor.math import Sum  # noqa: E402

from synkhronos.lowering import linker  # noqa: E402
from synkhronos.lowering.sum_rewrites import SUM_REWRITES, PartialSumRewriter, split_centered_sums  # noqa: E402

PLAIN = Mode("py", "fast_run").excluding("fusion", "inplace")
REWRITTEN = PLAIN.including(SUM_REWRITES)
#: A value of each dtype whose double overflows, or for float32 a value whose sum with 1 is rounded.
NARROW_VALUES = [("bool", 1), ("int8", 100), ("uint8", 200), ("int32", 2**31 - 1), ("float32", 2**24)]


def compute(inputs, outputs, values):
    return pytensor.function(inputs, outputs, mode=Mode("py", None), on_unused_input="ignore")(*values)


def rewrite(rewriter, inputs, outputs):
    """Return a rewritten copy of a graph."""
    graph = FunctionGraph(inputs, outputs, clone=True)
    rewriter.rewrite(graph)
    return graph


def list_sums(graph):
    """Return the terms of each elementwise sum of a graph."""
    nodes = [n for n in graph.toposort() if isinstance(n.op, Elemwise) and isinstance(n.op.scalar_op, Add)]
    return [Counter(node.inputs) for node in nodes]


@limit_examples(40)
@given(st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=9), min_size=1, max_size=6))
def test_no_sum_repeats_terms_of_another(sums):
    inputs = [pt.dmatrix("x"), *pt.dvectors(*"vw"), *pt.dmatrices(*"yz")]
    rng = np.random.default_rng(0)
    values = [rng.normal(size=(3, 4)) if x.ndim == 2 else rng.normal(size=4) for x in inputs]
    outputs = [pt.add(*(inputs[i] for i in terms)) for terms in sums]
    graph = rewrite(PartialSumRewriter(), inputs, outputs)
    for value, expected in zip(
        compute(graph.inputs, graph.outputs, values), compute(inputs, outputs, values), strict=True
    ):
        np.testing.assert_allclose(value, expected, rtol=1e-12, atol=1e-12)
    remaining = list_sums(graph)
    assert not any(short < long for short in remaining for long in remaining)
    assert len(remaining) == len(sums)


@pytest.mark.parametrize(("dtype", "number"), NARROW_VALUES)
def test_sum_of_another_dtype_is_not_shared(dtype, number):
    a, b, c = (pt.vector(name, dtype=d) for name, d in (("a", dtype), ("b", dtype), ("c", "float64")))
    values = [np.full(2, number, dtype), np.ones(2, dtype) if dtype == "float32" else np.full(2, number, dtype)]
    f = pytensor.function([a, b, c], [a + b, c + a + b], mode=REWRITTEN)
    np.testing.assert_array_equal(f(*values, np.full(2, 0.5))[1], 0.5 + values[0].astype(float) + values[1])


def test_residual_gradients_have_few_terms():
    """Without the rewrite, the number of terms grows with each block."""
    x, weights = pt.dmatrix("x"), pt.dvectors(*"abcdef")
    state = x
    for weight in weights:
        state = state + pt.tanh(state * weight)
    f = [
        pytensor.function([x, *weights], pytensor.grad((state**2).sum(), [x, *weights]), mode=mode)
        for mode in (PLAIN, REWRITTEN)
    ]
    rng = np.random.default_rng(0)
    values = [rng.normal(size=(3, 4)), *rng.normal(size=(6, 4))]
    for value, expected in zip(f[1](*values), f[0](*values), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-12)
    plain, shared = (max(sum(terms.values()) for terms in list_sums(g.maker.fgraph)) for g in f)
    assert plain > 6
    assert shared <= 3


X, Y = pt.dtensor3("x"), pt.dtensor3("y")
VALUES = list(np.random.default_rng(0).normal(size=(2, 2, 3, 4)))


def center(x, axes, summed=None, factor=0.25):
    return x - factor * (x if summed is None else summed).sum(axis=axes, keepdims=True)


def count_nested_sums(variable):
    """Return the number of sums on the longest path to a variable: a GPU computes them one after another."""
    if variable.owner is None:
        return 0
    inner = max(map(count_nested_sums, variable.owner.inputs), default=0)
    return inner + isinstance(variable.owner.op, Sum)


@limit_examples(20)
@given(
    st.sampled_from([(0,), (2,), (0, 2), (1, 2)]),
    st.integers(0, 2),
    st.sampled_from([0.25, 0.3]),  # the second is not the mean's: the rewrite is exact nevertheless
    st.booleans(),
)
def test_sum_of_centered_terms_is_split(axes, form, factor, is_first):
    centered = center(X, axes, factor=factor)
    statistic = 1 + (Y * centered).sum(axis=axes, keepdims=True) ** 2
    term = (statistic * centered, 0.25 * centered * statistic / statistic**3, centered / statistic)[form]
    total = (pt.add(term, Y, X) if is_first else Y + term).sum(axis=axes)
    graph = rewrite(split_centered_sums, [X, Y], [total])
    (value,), (expected,) = compute(graph.inputs, graph.outputs, VALUES), compute([X, Y], [total], VALUES)
    np.testing.assert_allclose(value, expected, rtol=1e-11, atol=1e-11)
    assert count_nested_sums(total) == 3
    assert count_nested_sums(graph.outputs[0]) == 2


@pytest.mark.parametrize(("dtype", "number"), NARROW_VALUES)
def test_other_terms_are_added_in_the_dtype_of_the_sum(dtype, number):
    x, p, q = pt.dmatrix("x"), pt.matrix("p", dtype=dtype), pt.matrix("q", dtype=dtype)
    total = (2.0 * center(x, (0,)) + p + q).sum(axis=0)
    terms = [np.full((4, 2), number, dtype), np.full((4, 2), 1 if dtype == "float32" else number, dtype)]
    f = pytensor.function([x, p, q], total, mode=REWRITTEN)
    assert count_nested_sums(f.maker.fgraph.outputs[0]) == 2
    np.testing.assert_array_equal(f(np.zeros((4, 2)), *terms), sum(term.sum(axis=0, dtype=float) for term in terms))


@pytest.mark.parametrize(
    "build_terms",
    [
        lambda c: [c * center(X, (2,), summed=Y), Y],  # not centered by its own sum
        lambda c: [c * center(X, (1,)), Y],  # along another axis
        lambda c: [c * X, Y],
        lambda c: [pt.exp(c * center(X, (2,))), Y],
        lambda c: [Y * c * center(X, (2,)), Y],  # the other factor varies along the axis
        lambda c: [c * center(X, (2,)), 2 * c * center(Y, (2,))],  # no other term
        # The other term is one number for all that are summed.
        lambda c: [c * center(X, (2,)), X[:, :, 0].dimshuffle(0, 1, "x")],
    ],
)
def test_other_sums_are_left_alone(build_terms):
    statistic = 1 + (Y * center(X, (2,))).sum(axis=2, keepdims=True) ** 2
    total = pt.add(*build_terms(statistic)).sum(axis=2)
    graph = rewrite(split_centered_sums, [X, Y], [total])
    (value,), (expected,) = compute(graph.inputs, graph.outputs, VALUES), compute([X, Y], [total], VALUES)
    np.testing.assert_allclose(value, expected, rtol=1e-11, atol=1e-11)
    assert count_nested_sums(graph.outputs[0]) == count_nested_sums(total) == 3


def build_norm_gradients(x, gain):
    """Return the gradients of a residual network of two normalized layers."""
    state = x
    for _ in range(2):
        centered = state - state.mean(axis=-1, keepdims=True)
        state = state + pt.tanh(centered / pt.sqrt((centered**2).mean(axis=-1, keepdims=True) + 1e-5) * gain)
    return pytensor.grad((state**3).sum(), [x, gain])


@pytest.mark.parametrize("width", [4, None])
def test_gradients_of_normalized_layers_are_rewritten_in_jax_mode(width):
    x, gain = pt.tensor("x", dtype="float64", shape=(None, width)), pt.dvector("gain")
    gradients = build_norm_gradients(x, gain)
    plain, rewritten = (pytensor.function([x, gain], gradients, mode=mode) for mode in (PLAIN, REWRITTEN))
    rng = np.random.default_rng(0)
    values = [rng.normal(size=(3, 4)), rng.normal(size=4)]
    for value, expected in zip(rewritten(*values), plain(*values), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-12)
    depths = [max(map(count_nested_sums, f.maker.fgraph.outputs)) for f in (plain, rewritten)]
    assert depths[1] < depths[0]


@pytest.mark.skipif(not XLA, reason="JAX mode")
def test_jax_mode_includes_the_rewrites():
    x, gain = pt.dmatrix("x"), pt.dvector("gain")
    f = pytensor.function([x, gain], build_norm_gradients(x, gain), mode=linker.with_static_length_linker("JAX"))
    sums = list_sums(f.maker.fgraph)
    assert not any(short < long for short in sums for long in sums)


@pytest.mark.skipif(not XLA, reason="JAX mode")
def test_functions_that_pytensor_compiles_are_not_rewritten():
    x, gain = pt.dmatrix("x"), pt.dvector("gain")
    mode = get_mode("JAX").excluding("fusion")  # a fused sum is no node of its own
    sums = list_sums(pytensor.function([x, gain], build_norm_gradients(x, gain), mode=mode).maker.fgraph)
    assert any(short < long for short in sums for long in sums)


def build_norm(x):
    centered = x - x.mean(axis=1, keepdims=True)
    return centered / pt.sqrt((centered**2).mean(axis=1, keepdims=True))


@pytest.mark.skipif(not XLA, reason="JAX mode")
@pytest.mark.parametrize(
    ("build_output", "n_separate"),
    [
        (build_norm, 2),  # the mean and the variance
        (lambda x: x - x.sum(axis=1, keepdims=True) / 2, 1),
        (lambda x: pt.exp(x) / pt.exp(x).sum(axis=1, keepdims=True), 0),
        (lambda x: x - x.sum(), 0),
        (lambda x: x - pt.exp(x).sum(axis=1, keepdims=True), 0),
        (lambda x: (x**2).sum(axis=1), 0),
    ],
)
def test_statistics_of_normalized_rows_are_separate_results(build_output, n_separate):
    import jax

    from synkhronos.lowering.jax_function import JaxFunction

    x, value = pt.fmatrix("x"), np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
    f = pytensor.function([x], build_output(x), mode=linker.with_static_length_linker("JAX"))
    run = JaxFunction(f, 1).run
    (expected,) = compute([x], [build_output(x)], [value])
    np.testing.assert_allclose(run(value)[0], expected, rtol=1e-4, atol=1e-5)
    assert str(jax.make_jaxpr(run)(value)).count("optimization_barrier") == n_separate
