"""Attention equals NumPy's in values and gradients; in JAX mode it is JAX's function."""

from types import SimpleNamespace

import numpy as np
import pytest

pytensor = pytest.importorskip("pytensor", reason="the Op is PyTensor's")
import pytensor.tensor as pt  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from library import XLA, limit_examples  # noqa: E402

import synkhronos as synk  # noqa: E402
from synkhronos.extensions import attention  # noqa: E402
from synkhronos.extensions.attention import Attention, AttentionGradient, dot_product_attention  # noqa: E402
from synkhronos.functions.computation import DEFAULT_VARIANT  # noqa: E402

pytestmark = pytest.mark.usefixtures("rewrites")


def make_inputs(dtype="float32"):
    return [pt.tensor(name, dtype=dtype, shape=(None,) * 4) for name in ("query", "key", "value")]


def attend(query, key, value, allowed, scale, cotangent):
    """Return attention and its gradients with respect to query, key and value, in float64."""
    query, key, value, cotangent = [np.moveaxis(x.astype(float), 1, 2) for x in (query, key, value, cotangent)]
    scores = np.where(allowed, scale * query @ np.swapaxes(key, 2, 3), -1e30)
    weights = np.exp(scores - scores.max(3, keepdims=True))
    weights /= weights.sum(3, keepdims=True)
    change = cotangent @ np.swapaxes(value, 2, 3)
    change = allowed * weights * (change - (change * weights).sum(3, keepdims=True)) * scale
    results = weights @ value, change @ key, np.swapaxes(change, 2, 3) @ query, np.swapaxes(weights, 2, 3) @ cotangent
    return [np.moveaxis(x, 1, 2) for x in results]


@limit_examples(6)
@given(
    st.tuples(*[st.integers(1, n) for n in (3, 7, 7, 3)], st.sampled_from([1, 5, 8, 16])),
    st.sampled_from([None, ("length", "keys"), ("rows", 1, 1, "keys"), ("rows", "heads", "length", "keys")]),
    st.booleans(),
    st.sampled_from([None, 0.3]),
    st.sampled_from(["float32", "float64", *["float16"] * XLA]),  # PyTensor computes float16 in JAX mode only
    st.integers(0, 9),
)
def test_attention_values_and_gradients_equal_numpy(two_ranks, lengths, mask_axes, is_causal, scale, dtype, seed):
    """A query may have no key, except with `is_causal` alone."""
    rng = np.random.default_rng(seed)
    rows, length, keys, heads, width = lengths
    sizes = {"rows": 2 * rows, "length": length, "keys": keys, "heads": heads, 1: 1}
    shapes = [(2 * rows, n, heads, width) for n in (length, keys, keys, length)]
    values = [rng.normal(0, 1, shape).astype(dtype) for shape in shapes]
    inputs, cotangent = make_inputs(dtype), pt.tensor("cotangent", dtype=dtype, shape=(None,) * 4)
    allowed = np.tri(length, keys, dtype=bool) if is_causal else np.ones((length, keys), bool)
    arguments, masks = [*inputs, cotangent], []
    if mask_axes:
        masks = [rng.random([sizes[axis] for axis in mask_axes]) < 0.7]
        allowed = allowed & masks[0]
        mask = pt.tensor("mask", dtype="bool", shape=[1 if axis == 1 else None for axis in mask_axes])
        if mask_axes[0] == "rows":
            arguments.append(mask)
            values.append(masks[0])
        else:
            mask = pt.constant(masks[0])
    output = dot_product_attention(*inputs, mask if mask_axes else None, scale=scale, is_causal=is_causal)
    gradients = pytensor.grad((output * cotangent).sum(), inputs)
    results = synk.function(arguments, [(variable, "gather") for variable in (output, *gradients)])(*values)
    expected = attend(*values[:3], allowed, width**-0.5 if scale is None else scale, values[3])
    for value, expected_value in zip(results, expected, strict=True):
        assert value.dtype == dtype
        # Gradients are differences of numbers of this magnitude.
        tolerance = {"float16": 2e-3, "float32": 1e-5, "float64": 1e-13}[dtype]
        tolerance *= max(1, *[np.abs(x).max() for x in values]) ** 3
        np.testing.assert_allclose(value, expected_value, atol=tolerance)


def test_attention_has_second_derivatives_for_repeated_inputs():
    x = make_inputs("float64")[0]
    values = np.random.default_rng(1).normal(size=(2, 3, 2, 4))
    direction = np.random.default_rng(2).normal(size=values.shape)

    def differentiate(attention):
        gradient = pytensor.grad((attention(x, x, x) ** 3).sum(), x)
        return pytensor.grad((gradient * direction[:1]).sum(), x)

    def write_out(query, key, value):
        weights = pt.special.softmax(pt.einsum("btnh,bsnh->bnts", query, key) / 2, axis=-1)
        return pt.einsum("bnts,bsnh->btnh", weights, value)

    outputs = [differentiate(attention) for attention in (dot_product_attention, write_out)]
    value, expected_value = pytensor.function([x], outputs, mode=pytensor.compile.Mode("py", None))(values)
    np.testing.assert_allclose(value, expected_value, rtol=1e-10, atol=1e-10)


def test_attention_is_computed_without_rewrites():
    inputs = make_inputs()
    values = [np.random.default_rng(i).normal(size=(1, 2, 1, 3)).astype("float32") for i in range(4)]
    gradients = pytensor.grad((dot_product_attention(*inputs) * values[3]).sum(), inputs)
    mode = pytensor.compile.Mode("py", None)
    f = pytensor.function(inputs, gradients, mode=mode)(*values[:3])
    expected = attend(*values[:3], np.True_, 3**-0.5, values[3])[1:]
    for value, expected_value in zip(f, expected, strict=True):
        np.testing.assert_allclose(value, expected_value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_attention_in_jax_mode_keeps_float32_ops(two_ranks, dtype):
    inputs = make_inputs(dtype)
    gradients = pytensor.grad(dot_product_attention(*inputs, is_causal=True).sum(), inputs)
    f = synk.function(inputs, [(gradient, "gather") for gradient in gradients])
    nodes = f._computation.get_or_compile(DEFAULT_VARIANT).function.maker.fgraph.toposort()
    count = sum(isinstance(node.op, Attention | AttentionGradient) for node in nodes)
    assert count == (1 if XLA and dtype == "float32" else 0)


@pytest.mark.skipif(not XLA, reason="it starts XLA in this process")
@pytest.mark.parametrize(
    ("dtype", "width", "lengths", "has_mask", "capability", "expected"),
    [
        ("bfloat16", 64, (5, 7), False, "9.0", True),
        ("float16", 128, (4, 8), True, "8.0", True),
        ("bfloat16", 64, (4, 7), True, "9.0", False),
        ("bfloat16", 60, (4, 8), False, "9.0", False),
        ("bfloat16", 136, (4, 8), False, "9.0", False),
        ("float32", 64, (4, 8), False, "9.0", False),
        ("bfloat16", 64, (4, 8), False, "7.5", False),
        ("bfloat16", 64, (4, 8), False, None, False),
    ],
)
def test_attention_calls_cudnn_only_for_supported_arguments(
    two_ranks, monkeypatch, dtype, width, lengths, has_mask, capability, expected
):
    import jax
    import jax.numpy as jnp

    device = SimpleNamespace(**({"compute_capability": capability} if capability else {}))
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    chosen = []

    def record(query, key, value, implementation=None, **options):
        chosen.append(implementation)
        return query

    monkeypatch.setattr(jax.nn, "dot_product_attention", record)
    query, key = (jax.ShapeDtypeStruct((2, n, 3, width), jnp.dtype(dtype)) for n in lengths)
    masks = [jax.ShapeDtypeStruct((1, 1, *lengths), bool)] * has_mask
    jax.eval_shape(
        lambda *inputs: attention._compute_attention_vjp(Attention(None, True), *inputs)[0], query, key, key, *masks
    )
    assert chosen == ["cudnn" if expected else None]


QUERY, WRONG_DTYPE = make_inputs()[0], make_inputs("float64")[0]


@pytest.mark.parametrize(
    ("arguments", "options", "error"),
    [
        ((QUERY, WRONG_DTYPE, QUERY), {}, TypeError("key: expected query's dtype, a float, got float64")),
        ((QUERY[0], QUERY, QUERY), {}, ValueError("query: expected (batch, length, heads, width), got 3 dimensions")),
        ((pt.itensor4(), QUERY, QUERY), {}, TypeError("query: expected query's dtype, a float, got int32")),
        (
            (QUERY, np.zeros((1, 2, 3, 4), "float32"), np.zeros((1, 3, 3, 4), "float32")),
            {},
            ValueError("value: expected a length of 2 at axis 1, got 3"),
        ),
        ((QUERY, QUERY, QUERY, pt.matrix()), {}, TypeError(f"mask: expected bool, got {pytensor.config.floatX}")),
        ((QUERY,) * 3, {"scale": np.nan}, ValueError("scale: expected a finite number, got nan")),
    ],
)
def test_attention_refuses_wrong_arguments(arguments, options, error):
    with pytest.raises(type(error)) as info:
        dot_product_attention(*arguments, **options)
    assert str(info.value) == str(error)
