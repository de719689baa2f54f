"""Products in bfloat16: their results, Ops that stay in float32, and the code for XLA."""

import contextlib
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pytensor")
pytest.importorskip("jax")

import jax
import pytensor
import pytensor.tensor as pt
from system import run_code

from synkhronos.compat.ops.convolution import Conv
from synkhronos.compat.ops.normalization import BatchNormTrain
from synkhronos.compat.ops.pooling import Pool
from synkhronos.compat.ops.rectifier import rectifier
from synkhronos.engines.xla.executable import Executable
from synkhronos.lowering.jax_function import JaxFunction
from synkhronos.lowering.linker import with_static_length_linker

RNG = np.random.default_rng(0)
#: Relative tolerance of a sum of products: bfloat16 has 8 bits.
TOLERANCE = 2.0**-7


def draw_normal(*shape):
    return RNG.normal(size=shape).astype("float32")


@contextlib.contextmanager
def set_precision(name):
    """Set JAX's precision of products."""
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", name)
    try:
        yield
    finally:
        jax.config.update("jax_default_matmul_precision", before)


def make_executable(inputs, outputs, updates=()):
    with pytensor.config.change_flags(floatX="float32"):
        function = pytensor.function(
            inputs, outputs, updates=list(updates), mode=with_static_length_linker("JAX"), on_unused_input="ignore"
        )
    return Executable([JaxFunction(function, len(inputs))])


def compute_in_precision(name, inputs, outputs, values):
    with set_precision(name):
        return [np.asarray(v) for v in make_executable(inputs, outputs)(*map(jax.numpy.asarray, values))]


def lower_to_text(inputs, outputs, values):
    """Return the program that XLA is given for bfloat16."""
    with set_precision("bfloat16"):
        run = make_executable(inputs, outputs)
        return run._program.lower(*values, *[s[0] for s in run._storages]).as_text()


def round_to_bfloat16(array):
    return np.asarray(jax.numpy.asarray(array).astype("bfloat16").astype("float32"))


def check_close(actual, expected, roundings=1):
    assert actual.dtype == expected.dtype == np.float32
    tolerance = roundings * TOLERANCE
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())
    assert not np.array_equal(actual, expected)


X, W, V = pt.fmatrix("x"), pt.fmatrix("w"), pt.fvector("v")
B, C = pt.ftensor3("b"), pt.ftensor3("c")
PRODUCTS = {
    "matrices": (X.dot(W), [X, W], [(6, 40), (40, 5)]),
    "vector": (X.dot(V), [X, V], [(6, 40), (40,)]),
    "batches": (pt.matmul(B, C), [B, C], [(3, 4, 50), (3, 50, 2)]),
    "broadcast": (pt.matmul(B, W), [B, W], [(3, 4, 50), (50, 2)]),
    "tensordot": (pt.tensordot(B, C, axes=[[0, 2], [0, 1]]), [B, C], [(3, 4, 50), (3, 50, 2)]),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_bfloat16_dot_rounds_only_factors(name):
    product, inputs, shapes = PRODUCTS[name]
    outputs = [product, *pytensor.grad((product**2).sum(), inputs)]
    values = [draw_normal(*shape) for shape in shapes]
    exact, coarse = (compute_in_precision(p, inputs, outputs, values) for p in ("highest", "bfloat16"))
    for i, (actual, expected) in enumerate(zip(coarse, exact, strict=True)):
        check_close(actual, expected, roundings=2 if i else 1)  # the gradients are products of the product
    # Factors that bfloat16 can hold give the same product: sums and the result are float32.
    values = [round_to_bfloat16(value) for value in values]
    exact, coarse = (compute_in_precision(p, inputs, product, values)[0] for p in ("highest", "bfloat16"))
    np.testing.assert_allclose(coarse, exact, rtol=1e-5, atol=1e-5)
    assert not np.array_equal(coarse, round_to_bfloat16(coarse))


@pytest.mark.parametrize("name", PRODUCTS)
def test_bfloat16_product_within_a_graph_is_rounded(name):
    product, inputs, shapes = PRODUCTS[name]
    # PyTensor 3.3 computes the gradient of the matrix in x @ v elementwise, from a product that is thus not rounded.
    factors = inputs[1:] if name == "vector" else inputs
    outputs = [(product**2).sum(), product.sum(axis=0), *pytensor.grad((product**2).sum(), factors)]
    values = [round_to_bfloat16(draw_normal(*shape)) for shape in shapes]
    exact, coarse = (compute_in_precision(p, inputs, outputs, values) for p in ("highest", "bfloat16"))
    for actual, expected in zip(coarse, exact, strict=True):
        check_close(actual, expected, roundings=2)
        assert not np.array_equal(actual, round_to_bfloat16(actual))  # sums and gradients keep their digits
    kinds = re.findall(r"stablehlo\.dot_general .* : .* -> tensor<\w*x(\w+)>", lower_to_text(inputs, outputs, values))
    assert kinds == ["bf16", *["f32"] * len(factors)]


@pytest.mark.parametrize(
    ("build_outputs", "expected"),
    [
        (lambda y: [y], "f32"),
        (lambda y: [pt.tanh(y + 1)], "f32"),
        (lambda y: [pt.concatenate([2 * y.T.flatten()[3:], pt.ones(1, "float32")])], "f32"),
        (lambda y: [y.sum(), y.reshape((-1, 3))], "f32"),
        (lambda y: [pt.tanh(y).sum()], "bf16"),
        (lambda y: [y.max(axis=1), pt.exp(y).mean(axis=0)], "bf16"),
        (lambda y: [pt.special.softmax(y, axis=1)[:, 0].sum()], "bf16"),
        (lambda y: [y.sum(axis=0) ** 2], "f32"),  # XLA can compute such a sum within the product
    ],
)
def test_bfloat16_results_keep_float32_if_they_are_returned(build_outputs, expected):
    """Elementwise functions, and parts of what is returned, count as returned."""
    text = lower_to_text([X, W], build_outputs(X.dot(W)), [draw_normal(6, 40), draw_normal(40, 5)])
    assert re.findall(r"stablehlo\.dot_general .* -> tensor<\w*x(\w+)>", text) == [expected]


CONVOLUTIONS = [
    (Conv(2, "half"), (2, 3, 7, 6), (4, 3, 3, 3)),
    (Conv(2, "half", (2, 2), flips_filters=False), (2, 3, 7, 6), (4, 3, 3, 3)),
    (Conv(2, "valid", (2, 1), (1, 2), n_groups=2), (2, 4, 7, 6), (4, 2, 2, 2)),
    (Conv(1), (2, 3, 9), (4, 3, 3)),
    (Conv(3), (2, 3, 5, 4, 5), (2, 3, 2, 2, 2)),
]


@pytest.mark.parametrize("op, image, filters", CONVOLUTIONS)
def test_bfloat16_convolutions_and_gradients_are_close_to_float32(op, image, filters):
    kinds = [pt.TensorType("float32", (None,) * len(image))(name) for name in ("x", "w")]
    y = op(*kinds)
    outputs = [y, *pytensor.grad((y**2).sum(), kinds)]
    values = [draw_normal(*image), draw_normal(*filters)]
    exact, coarse = (compute_in_precision(p, kinds, outputs, values) for p in ("highest", "bfloat16"))
    for actual, expected in zip(coarse, exact, strict=True):
        check_close(actual, expected)


def test_bfloat16_setting_changes_no_integers_and_no_other_ops():
    whole = pt.imatrix("whole")
    values = [draw_normal(5, 50), RNG.integers(1000, size=(3, 4)).astype("int32")]
    outputs = [X.sum(axis=1), pt.exp(X), (X * X).mean(), whole.dot(whole.T)]
    exact, coarse = (compute_in_precision(p, [X, whole], outputs, values) for p in ("highest", "bfloat16"))
    for actual, expected in zip(coarse, exact, strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_xla_multiplies_bfloat16_and_adds_float32():
    text = lower_to_text([X, W], X.dot(W), [draw_normal(6, 40), draw_normal(40, 5)])
    (product,) = re.findall(r"stablehlo\.dot_general .* : (.*)", text)
    assert product == "(tensor<6x40xbf16>, tensor<40x5xbf16>) -> tensor<6x5xf32>"


def build_network_gradients(x, filters):
    """Return two convolutions, the layers between them, and the gradients; both read the activation."""
    h = rectifier(Conv(2, "half")(x, filters[0]))
    y = Conv(2, "half")(h, filters[1]) + h
    return pytensor.grad((y**2).mean(), filters)


def test_bfloat16_shared_values_are_rounded_once():
    x = pt.ftensor4("x")
    filters = [pytensor.shared(draw_normal(4, 4, 3, 3), name) for name in "uv"]
    text = lower_to_text([x], build_network_gradients(x, filters), [draw_normal(2, 4, 8, 8)])
    kinds = re.findall(r"stablehlo\.convolution.* : \((tensor<[^>]*>), (tensor<[^>]*>)\) -> (tensor<[^>]*>)", text)
    assert len(kinds) == 5  # two forward, two of the filters, one of the activation
    assert all("bf16" in kind for conv in kinds for kind in conv)
    assert "f64" not in text
    # The residual sum adds the rounded activation to the second convolution.
    definitions = dict(re.findall(r"(%\w+) = (.*)", text))
    (maximum,) = (name for name, line in definitions.items() if line.startswith("stablehlo.maximum"))
    users = [line for line in definitions.values() if re.search(rf"{maximum}\b", line)]
    assert len(users) == 1
    assert users[0].startswith("stablehlo.convert") and users[0].endswith("xbf16>")


def test_bfloat16_batch_normalization_rounds_its_output():
    x, scale = pt.ftensor4("x"), pt.TensorType("float32", (1, None, 1, 1))("scale")
    inputs = [x, pt.ftensor4("u"), pt.ftensor4("v"), scale, scale.type("shift")]
    values = [draw_normal(*shape) for shape in [(2, 4, 8, 8), *[(4, 4, 3, 3)] * 2, *[(1, 4, 1, 1)] * 2]]
    h, mean, invstd = BatchNormTrain((0, 2, 3), 1e-4)(Conv(2, "half")(x, inputs[1]), *inputs[3:])
    y = Conv(2, "half")(h, inputs[2])
    outputs = [*pytensor.grad((y**2).mean(), inputs), mean, invstd]
    definitions = dict(re.findall(r"(%\w+) = (.*)", lower_to_text(inputs, outputs, values)))

    def find_origin(name):
        """Return the origin of a number, through conversions and transpositions."""
        line = definitions.get(name, "")
        same = re.match(r"stablehlo\.(?:convert|reverse|transpose|optimization_barrier) (%\w+)", line)
        return find_origin(same[1]) if same else name

    convolutions = [line for line in definitions.values() if line.startswith("stablehlo.convolution")]
    assert len(convolutions) == 6  # two forward, and the gradients of the images and the filters of each
    factors = {find_origin(name) for line in convolutions for name in re.findall(r"%\w+", line)}
    added = [name for name in factors if definitions.get(name, "").startswith("stablehlo.add")]
    assert len(added) == 2  # the normalized values and their gradient, each for two convolutions
    for name in added:
        (user,) = [line for line in definitions.values() if re.search(rf"{name}\b", line)]
        assert user.startswith("stablehlo.convert") and user.endswith("xbf16>")

    exact, coarse = (compute_in_precision(p, inputs, outputs, values) for p in ("highest", "bfloat16"))
    for actual, expected in zip(coarse, exact, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0.05, atol=0.05 * np.abs(expected).max())
    for actual in coarse[3:]:  # sums and statistics keep their digits
        assert actual.dtype == np.float32
        assert not np.array_equal(actual, round_to_bfloat16(actual))


def test_bfloat16_normalization_and_pool_inputs_are_rounded():
    x, scale = pt.ftensor4("x"), pt.TensorType("float32", (1, None, 1, 1))("scale")
    inputs = [x, pt.ftensor4("w"), scale, scale.type("shift")]
    values = [draw_normal(*shape) for shape in [(2, 4, 8, 8), (4, 4, 3, 3), *[(1, 4, 1, 1)] * 2]]
    h, *_ = BatchNormTrain((0, 2, 3), 1e-4)(Conv(2, "half")(x, inputs[1]), *inputs[2:])
    y = Pool((3, 3), (2, 2), (1, 1), "max", True)(rectifier(h))
    outputs = pytensor.grad((y**2).sum(), inputs)
    text = lower_to_text(inputs, outputs, values)
    definitions = dict(re.findall(r"(%\w+) = (.*)", text))
    # The rectifier's output, which is kept for the gradient of the pool.
    barriers = re.findall(r"stablehlo\.optimization_barrier %\w+ : .*", text)
    assert barriers and all(barrier.endswith("<2x4x8x8xbf16>") for barrier in barriers)
    whole = r"stablehlo\.maximum .*<2x4x8x8x"  # and not that of the variances
    (maximum,) = (name for name, line in definitions.items() if re.match(whole, line))
    (user,) = {line for line in definitions.values() if re.search(rf"{maximum}\b", line)}
    assert user.startswith("stablehlo.convert") and user.endswith("xbf16>")

    exact, coarse = (compute_in_precision(p, inputs, outputs, values) for p in ("highest", "bfloat16"))
    for actual, expected in zip(coarse, exact, strict=True):
        close = np.isclose(actual, expected, rtol=0.05, atol=0.05 * np.abs(expected).max())
        assert np.mean(close) > 0.97  # where two numbers of a window round to one, both have its gradient
    for actual in coarse[2:]:  # sums keep their digits
        assert not np.array_equal(actual, round_to_bfloat16(actual))


def test_parameters_stay_float32_and_keep_small_steps():
    x = pt.ftensor4("x")
    filters = [pytensor.shared(draw_normal(4, 4, 3, 3), name) for name in "uv"]
    before = [f.get_value() for f in filters]
    step = np.float32(1e-4)  # smaller than the resolution of bfloat16
    new = [f - step * pt.sign(g) for f, g in zip(filters, build_network_gradients(x, filters), strict=True)]
    # The new values are used in a product as well.
    loss = Conv(2, "half")(x, new[0]).sum()
    with set_precision("bfloat16"):
        run = make_executable([x], loss, zip(filters, new, strict=True))
        run(jax.numpy.asarray(draw_normal(2, 4, 8, 8)))
    for storage, old in zip(run._storages, before, strict=True):
        value = np.asarray(storage[0])
        assert value.dtype == np.float32
        np.testing.assert_allclose(np.abs(value - old), step, rtol=1e-2)


def test_strided_convolution_gradient_reverses_its_filters_behind_a_barrier():
    """XLA's GPU compiler knows them by that; else it would multiply with the zeros between the elements."""
    x, w = pt.ftensor4("x"), pt.ftensor4("w")
    y = Conv(2, "half", (2, 2))(x, w)
    with set_precision("highest"):
        run = make_executable([x, w], pytensor.grad((y**2).sum(), x))
        text = run._program.lower(draw_normal(1, 2, 6, 6), draw_normal(2, 2, 3, 3)).as_text()
    definitions = dict(re.findall(r"(%\w+) = (.*)", text))
    (gradient,) = (line for line in definitions.values() if "lhs_dilate = [2, 2]" in line)
    turned = definitions[re.search(r"convolution\(%\w+, (%\w+)\)", gradient)[1]]
    assert turned.startswith("stablehlo.reverse")
    assert definitions[re.search(r"reverse (%\w+)", turned)[1]].startswith("stablehlo.optimization_barrier")


PROGRAM = """
    import json, sys
    import numpy as np, pytensor, pytensor.tensor as pt
    import synkhronos as synk
    pytensor.config.floatX = "float32"
    pytensor.config.mode = "JAX"
    synk.fork(2, use_gpu=False)
    rng = np.random.default_rng(0)
    x, w = pt.fmatrix("x"), pytensor.shared(rng.normal(size=(40, 3)).astype("float32"), "w")
    f = synk.function([x], (x.dot(w), "gather"))
    print(json.dumps(np.asarray(f(rng.normal(size=(4, 40)).astype("float32"))).tolist()))
    synk.close()
"""


def test_bfloat16_setting_from_environment_on_all_ranks():
    def compute_in_environment(name):
        output = run_code(PROGRAM, JAX_PLATFORMS="cpu", JAX_DEFAULT_MATMUL_PRECISION=name)
        return np.array(json.loads(output.splitlines()[-1]), "float32")

    exact, coarse = compute_in_environment("highest"), compute_in_environment("bfloat16")
    for rows in (slice(0, 2), slice(2, 4)):  # those of one rank, and of the other
        check_close(coarse[rows], exact[rows])


COMPILING = """
    import numpy as np, pytensor
    import synkhronos as synk
    pytensor.config.floatX = "float32"
    pytensor.config.mode = "JAX"
    synk.fork(1, use_gpu=False)
    a, b = (pytensor.shared(np.zeros((4, 3), "float32"), name) for name in "ab")
    f, g = (synk.function([], (v.sum(), "sum"), sliceable_shareds=[v]) for v in (a, b))
    for function in (f, g, f, g):
        float(function(batch_s=[0, 1]))
    synk.close()
"""


def test_function_is_compiled_once_with_floatx_float32():
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "JAX_LOG_COMPILES": "1"}
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(COMPILING)]
    printed = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=100, check=True)
    assert printed.stderr.count("Compiling jit(trace_functions)") == 2
