"""The Ops of neural networks: gradients by finite differences, shapes, XLA's lowerings, and rounding errors."""

import functools
import json

import numpy as np
import pytest

pytest.importorskip("pytensor")

import cases
import jax
import pytensor
import pytensor.tensor as pt
import theano
from hypothesis import given, settings
from hypothesis import strategies as st
from pytensor.compile.mode import Mode, get_mode
from pytensor.gradient import verify_grad
from system import run_code

from synkhronos.compat.ops import convolution
from synkhronos.compat.ops.classification import ClassCrossentropy, Softmax
from synkhronos.compat.ops.convolution import Conv, ConvGradInputs, ConvGradWeights
from synkhronos.compat.ops.normalization import BatchNormTrain, BatchNormTrainGrad, RectifiedBatchNormTrainGrad
from synkhronos.compat.ops.pooling import MODES, MaxPoolGrad, MaxPoolGradGrad, Pool, SumPoolGrad
from synkhronos.compat.ops.rectifier import rectifier
from synkhronos.compat.ops.windows import fold, unfold

crossentropy = ClassCrossentropy()

RNG = np.random.default_rng(0)
INITIAL_STATE = RNG.bit_generator.state
#: The modes that have a compiler of their own. FAST_RUN and the default are NUMBA.
COMPILED = ["NUMBA", "JAX"]


@pytest.fixture(autouse=True)
def reset_generator():
    """Reset the random generator, so that the numbers of a test do not depend on earlier tests."""
    RNG.bit_generator.state = INITIAL_STATE


def softmax(x):
    return Softmax(axis=(-1,))(pt.as_tensor_variable(x))


def draw_normal(*shape):
    return RNG.normal(size=shape)


def make_distinct(*shape):
    """Return numbers further apart than the steps of differences."""
    return RNG.permutation(int(np.prod(shape))).reshape(shape) / 10.0


def verify_gradient(function, *points):
    # Given by name, `verify_grad` would replace the mode by a compiled one, and compile for a few evaluations.
    mode = get_mode("FAST_COMPILE")
    verify_grad(function, list(points), rng=np.random.default_rng(1), mode=mode, eps=1e-6, n_tests=1)


def verify_closely(function, *points):
    """As `verify_gradient`, for gradients that change fast: by central differences with steps ten times as long."""
    variables = [pt.TensorType("float64", point.shape)() for point in points]
    number = function(*variables)
    f = pytensor.function(variables, number, mode="FAST_COMPILE")
    gradients = pytensor.function(variables, pytensor.grad(number, variables), mode="FAST_COMPILE")(*points)
    for i, gradient in enumerate(gradients):
        differences = np.empty_like(gradient)
        for index in np.ndindex(gradient.shape):
            moved = [[point.copy() for point in points] for _ in range(2)]
            for step, values in zip((1e-5, -1e-5), moved, strict=True):
                values[i][index] += step
            differences[index] = (f(*moved[0]) - f(*moved[1])) / 2e-5
        # The largest such distance was 3e-9 in 1800 trials.
        np.testing.assert_allclose(gradient, differences, rtol=0, atol=1e-6 * np.abs(differences).max())


def compute_in_mode(mode, inputs, outputs, *values):
    return pytensor.function(inputs, outputs, mode=mode)(*values)


def test_fast_run_is_the_numba_mode():
    assert get_mode("FAST_RUN") is get_mode("NUMBA")


# -- convolution -----------------------------------------------------------------------------------------------------

CONVOLUTIONS = [
    (Conv(1, "half", (2,)), (2, 2, 7), (3, 2, 3)),
    (Conv(2), (2, 2, 5, 4), (3, 2, 3, 2)),
    (Conv(2, "full", (2, 1), (1, 2), flips_filters=False), (2, 2, 5, 4), (3, 2, 2, 2)),
    (Conv(2, ((1, 0), (2, 1)), (2, 2), n_groups=2), (2, 4, 5, 6), (4, 2, 3, 2)),
    (Conv(3, "half", (1, 2, 1)), (1, 2, 3, 4, 3), (2, 2, 2, 3, 1)),
]


@pytest.mark.parametrize("op, x, w", CONVOLUTIONS)
def test_conv_gradients_equal_finite_differences(op, x, w):
    verify_gradient(op, draw_normal(*x), draw_normal(*w))


@pytest.mark.parametrize("op, x, w", CONVOLUTIONS)
def test_conv_second_derivatives_equal_finite_differences(op, x, w):
    images, weights = draw_normal(*x), draw_normal(*w)
    output = op(images, weights).eval(mode="FAST_COMPILE")
    like_x, like_w = np.zeros(x), np.zeros(w)
    verify_gradient(lambda a, g: op._convert_to(ConvGradWeights)(a, g, like_w), images, draw_normal(*output.shape))
    verify_gradient(lambda b, g: op._convert_to(ConvGradInputs)(b, g, like_x), weights, draw_normal(*output.shape))


@settings(max_examples=25)
@given(st.data())
def test_conv_equals_its_definition(data):
    kernel = data.draw(st.integers(1, 3))
    stride, dilation = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    padding = data.draw(st.sampled_from(["valid", "full", "half", ((2, 0),), ((0, 1),)]))
    length = data.draw(st.integers((kernel - 1) * dilation + 1, 8))
    op = Conv(1, padding, (stride,), (dilation,), flips_filters=data.draw(st.booleans()))
    # The number of examples of Hypothesis varies from run to run; the draws of later tests must not depend on it.
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    x, w = rng.normal(size=(2, 2, length)), rng.normal(size=(3, 2, kernel))
    ((before, behind),) = op.resolve_padding((kernel,))
    padded = np.pad(x, [(0, 0), (0, 0), (before, behind)])
    filters = w[:, :, ::-1] if op.flips_filters else w
    (out,) = op.compute_output_lengths((length,), (kernel,))
    expected = np.zeros((2, 3, out))
    for t in range(out):
        for k in range(kernel):
            expected[:, :, t] += padded[:, :, t * stride + k * dilation] @ filters[:, :, k].T
    np.testing.assert_allclose(op.compute(x, w), expected, atol=1e-12)


def test_conv_of_a_batch_in_parts_equals_the_whole_batch(monkeypatch):
    op, x, w = Conv(2), draw_normal(5, 2, 6, 6), draw_normal(3, 2, 3, 3)
    whole = [op.compute(x, w), op._convert_to(ConvGradWeights).compute(x, draw_normal(5, 3, 4, 4) * 0 + 1, w)]
    monkeypatch.setattr("synkhronos.compat.ops.convolution._MAX_COLUMN_NBYTES", 1)
    parts = [op.compute(x, w), op._convert_to(ConvGradWeights).compute(x, np.ones((5, 3, 4, 4)), w)]
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_allclose(a, b)


def test_conv_refuses_arrays_of_wrong_shapes():
    with pytest.raises(TypeError, match="Conv: expected 4 dimensions"):
        Conv(2)(pt.tensor3(), pt.tensor4())
    with pytest.raises(ValueError, match="do not fit images"):
        Conv(2).compute(np.zeros((1, 2, 4, 4)), np.zeros((1, 3, 2, 2)))
    with pytest.raises(ValueError, match="are larger than images"):
        Conv(2).compute(np.zeros((1, 2, 2, 2)), np.zeros((1, 2, 3, 3)))
    with pytest.raises(ValueError, match="have no output"):
        ConvGradInputs(2).compute(np.zeros((1, 2, 3, 3)), np.zeros((1, 1, 3, 3)), np.zeros((1, 2, 4, 4)))


def test_output_types_have_static_lengths():
    x, w = (
        pt.tensor("x", dtype="float32", shape=(None, 3, 8, None)),
        pt.tensor("w", dtype="float32", shape=(4, 3, 3, 3)),
    )
    assert Conv(2, "half", (2, 1))(x, w).type.shape == (None, 4, 4, None)
    empty = np.zeros((1, 3, 0, 1), "float32")
    assert (
        Conv(2, "full")(empty, w).type.shape
        == (1, 4, 2, 3)
        == Conv(2, "full").compute_output_shape(empty.shape, (4, 3, 3, 3))
    )
    assert Pool((2, 2), (2, 2), (0, 0), "max", False)(x).type.shape == (None, 3, 4, None)
    scale = pt.tensor("scale", dtype="float32", shape=(1, None, 1, 1))
    normalized = BatchNormTrain((0, 2, 3), 1e-4)(x, scale, scale)
    assert [v.type.shape for v in normalized] == [(None, 3, 8, None), (1, 3, 1, 1), (1, 3, 1, 1)]


def test_fold_is_the_transpose_of_unfold():
    x = draw_normal(2, 3, 5, 6)
    columns = unfold(x, (2, 3), (2, 2), (2, 1), (1, 2))
    y = draw_normal(*columns.shape)
    # Unfolding and folding are transposed: the products with any two arrays are the same.
    np.testing.assert_allclose((columns * y).sum(), (x * fold(y, (5, 6), (2, 1), (1, 2))).sum())


# -- pooling ---------------------------------------------------------------------------------------------------------

POOLS = [((2, 2), (2, 2), (0, 0), True), ((3, 2), (2, 3), (0, 0), False), ((3, 3), (1, 2), (1, 2), True)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("settings", POOLS)
def test_pool_gradients_equal_finite_differences(mode, settings):
    window, stride, pad, ignore = settings
    op = Pool(window, stride, pad, mode, ignore)
    x = make_distinct(2, 1, 5, 6)
    verify_gradient(op, x)
    y = op.compute(x)
    g = draw_normal(*y.shape)
    if mode == "max":
        verify_gradient(lambda d: op._convert_to(MaxPoolGrad)(x, y, d), g)
        verify_gradient(lambda d: op._convert_to(MaxPoolGradGrad)(x, y, d), draw_normal(*x.shape))
    else:
        verify_gradient(lambda d: op._convert_to(SumPoolGrad)(d, x), g)


def test_max_pool_accepts_integers():
    x = np.arange(-8, 8, dtype="int32").reshape(1, 1, 4, 4)
    np.testing.assert_array_equal(
        Pool((3, 3), (2, 2), (1, 1), "max", True)(x).eval(mode="FAST_COMPILE"), [[[[-3, -1], [5, 7]]]]
    )
    for mode in ("FAST_COMPILE", "JAX"):
        pooled = Pool((2, 2), (2, 2), (1, 1), "max", True)(x > 6).eval(mode=mode)
        assert pooled.shape == (1, 1, 3, 3) and np.argwhere(pooled).tolist() == [[0, 0, 2, 2]]


def test_pool_refuses_wrong_settings():
    with pytest.raises(ValueError, match="mode: expected one of max, sum"):
        Pool((2, 2), (2, 2), (0, 0), "median", True)
    with pytest.raises(NotImplementedError, match="ignore_border=True"):
        Pool((2, 2), (2, 2), (1, 1), "max", False)
    with pytest.raises(NotImplementedError, match="less than the window"):
        Pool((2, 2), (2, 2), (2, 2), "max", True)
    with pytest.raises(TypeError, match="expected at least . dimensions"):
        Pool((2, 2), (2, 2), (0, 0), "max", True)(pt.vector())


@pytest.mark.parametrize("max_marked_elements", [64, 5])
@pytest.mark.parametrize("settings", [*POOLS, ((3, 3), (2, 2), (1, 1), True)])
def test_max_pool_and_gradient_in_the_gpu_lowering_equal_numpy(settings, max_marked_elements, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr("synkhronos.compat.ops.pooling.MAX_MARKED_ELEMENTS", max_marked_elements)
    window, stride, pad, ignore = settings
    op = Pool(window, stride, pad, "max", ignore)
    x = RNG.integers(4, size=(2, 3, 7, 8)).astype("float64")  # with equal maxima in a window
    x[0, 0, 3, 3:5] = np.nan, -np.inf
    y = op.compute(x)
    values = x, y, draw_normal(*y.shape)
    inputs = [pt.tensor4(), pt.tensor4(), pt.tensor4()]
    np.testing.assert_array_equal(compute_in_mode("JAX", inputs[:1], op(inputs[0]), x), y)
    gradient = op._convert_to(MaxPoolGrad)
    np.testing.assert_allclose(
        compute_in_mode("JAX", inputs, gradient(*inputs), *values), gradient.compute(*values), atol=1e-12
    )


def test_mask_of_a_rectified_max_pool_gradient_is_applied_first():
    x, pool = pt.tensor4(), Pool((3, 3), (2, 2), (1, 1), "max", True)
    y = rectifier(x)
    top = pool(y)
    weights, value = draw_normal(2, 3, 4, 4), draw_normal(2, 3, 7, 8) - 1  # some windows have no positive element
    for loss, is_moved in [((weights * top).sum(), True), ((weights * top).sum() + (y**2).sum(), False)]:
        gradient = pytensor.grad(loss, x)
        f = pytensor.function([x], gradient, mode="JAX")
        (node,) = (n for n in f.maker.fgraph.apply_nodes if isinstance(n.op, MaxPoolGrad))
        assert (f.maker.fgraph.outputs[0].owner is node) == is_moved
        np.testing.assert_allclose(f(value), compute_in_mode("FAST_COMPILE", [x], gradient, value), atol=1e-12)


# -- batch normalization ---------------------------------------------------------------------------------------------

AXES = [(0,), (0, 2, 3), (1, 3)]
SHAPE = (5, 2, 2, 3)
#: So large that differences are exact where few numbers lie close together.
EPSILON = 0.1


def make_batch(axes, dtype="float64"):
    """Return an array, a scale and a shift."""
    shape = [1 if axis in axes else length for axis, length in enumerate(SHAPE)]
    return [a.astype(dtype) for a in (draw_normal(*SHAPE), draw_normal(*shape), draw_normal(*shape))]


def normalize_in_numpy(x, scale, shift, axes):
    """Return the normalized array, its mean and its inverse standard deviation, as Theano's Op does."""
    mean, invstd = x.mean(axes, keepdims=True), 1 / np.sqrt(x.var(axes, keepdims=True) + EPSILON)
    return [(x - mean) * invstd * scale + shift, mean, invstd]


def sum_nonlinearly(variables):
    """Return a scalar that depends on each element of each variable, each in another way."""
    rng = np.random.default_rng(2)
    terms = [(v * rng.normal(size=SHAPE).astype(v.dtype)).sum() for v in variables]
    return sum(terms[1:], terms[0])


def build_batch_norm_graph(axes, dtype):
    """Return the inputs, and the outputs with first and second derivatives."""
    inputs = [
        pt.TensorType(dtype, [1 if axis in axes and i else None for axis in range(4)])(n) for i, n in enumerate("xst")
    ]
    outputs = BatchNormTrain(axes, EPSILON)(*inputs)
    first = pytensor.grad(sum_nonlinearly([v**2 for v in outputs]), inputs)
    return inputs, [*outputs, *first, *pytensor.grad(sum_nonlinearly([v**2 for v in first]), inputs)]


@pytest.mark.parametrize("axes", AXES)
def test_batch_normalization_equals_numpy_and_finite_differences(axes):
    op, values = BatchNormTrain(axes, EPSILON), make_batch(axes)
    for output, expected in zip(
        compute_in_mode("FAST_COMPILE", [], op(*values)), normalize_in_numpy(*values, axes), strict=True
    ):
        np.testing.assert_allclose(output, expected, atol=1e-12)
    verify_gradient(lambda *v: op(*v)[0], *values)
    for position in (1, 2):
        verify_gradient(lambda x, p=position: op(x, *values[1:])[p], values[0])
        verify_gradient(lambda *v, p=position: sum_nonlinearly([v[1], op(*v)[0], op(*v)[p] ** 2]), *values)
    verify_gradient(lambda *v: sum_nonlinearly([output**2 for output in op(*v)]), *values)


@pytest.mark.parametrize("axes", AXES)
def test_batch_normalization_second_derivatives_equal_finite_differences(axes):
    (x, scale, shift), dy = make_batch(axes), draw_normal(*SHAPE)
    _, mean, invstd = normalize_in_numpy(x, scale, shift, axes)
    for position in range(3):
        verify_gradient(lambda *v, p=position: BatchNormTrainGrad(axes)(*v)[p], x, dy, scale, mean, invstd)
    verify_closely(lambda *v: sum_nonlinearly([g**2 for g in BatchNormTrainGrad(axes)(*v)]), x, dy, scale, mean, invstd)

    def sum_squared_gradients(x, scale, shift):  # the output's gradient depends on the inputs, too
        outputs = BatchNormTrain(axes, EPSILON)(x, scale, shift)
        return sum_nonlinearly(
            [g**2 for g in pytensor.grad(sum_nonlinearly([v**2 for v in outputs]), [x, scale, shift])]
        )

    verify_closely(sum_squared_gradients, x, scale, shift)


@functools.cache
def compute_batch_norm_values(axes, dtype):
    """Return inputs, and the expected outputs of all modes: computed in float64 by FAST_COMPILE."""
    values = make_batch(axes, dtype)
    wide = [v.astype("float64") for v in values]
    return values, compute_in_mode("FAST_COMPILE", *build_batch_norm_graph(axes, "float64"), *wide)


@pytest.mark.parametrize(
    "mode, axes, dtype",
    [
        ("FAST_COMPILE", AXES[1], "float32"),
        *(("JAX", *kind) for kind in zip(AXES, ("float64", "float32", "float64"), strict=True)),
    ],
)
def test_batch_normalization_in_float32_and_in_jax_mode_equals_float64(mode, axes, dtype):
    values, wide = compute_batch_norm_values(axes, dtype)
    tolerance = {"float32": 1e-3, "float64": 1e-9}[dtype]
    for i, (value, expected) in enumerate(
        zip(compute_in_mode(mode, *build_batch_norm_graph(axes, dtype), *values), wide, strict=True)
    ):
        # Outside of the Ops, JAX has a float32 times a length be a float64.
        assert np.asarray(value).dtype == dtype or (mode == "JAX" and i > 2)
        np.testing.assert_allclose(value, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


def test_batch_normalization_in_the_gpu_lowering_equals_float64(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    test_batch_normalization_in_float32_and_in_jax_mode_equals_float64("JAX", AXES[1], "float64")


@pytest.mark.parametrize("mode", ["FAST_COMPILE", "JAX"])
def test_batch_normalization_far_from_zero_is_accurate(mode):
    v, dy = pt.tensor4("v", dtype="float32"), pt.tensor4("dy", dtype="float32")
    ones = np.ones((1, 2, 1, 1), "float32")
    y, mean, invstd = BatchNormTrain((0, 2, 3), EPSILON)(v, ones, 0 * ones)
    f = pytensor.function([v, dy], [y, mean, invstd, pytensor.grad((y * dy).sum(), v)], mode=mode)
    for _ in range(20):
        x, output_gradient = (
            (1e4 + draw_normal(64, 2, 8, 8)).astype("float32"),
            draw_normal(64, 2, 8, 8).astype("float32"),
        )
        y, mean, invstd, gradient = f(x, output_gradient)
        xhat, exact, factor = normalize_in_numpy(x.astype("float64"), 1, 0, (0, 2, 3))
        # The mean is a multiple of 2**-10 there, and XLA normalizes with this mean.
        np.testing.assert_allclose(y, xhat, rtol=0, atol=1e-3)
        np.testing.assert_allclose(mean, exact, rtol=0, atol=1e-3)
        np.testing.assert_allclose(invstd, factor, rtol=1e-5)
        sums = [(output_gradient * factor_of_sum).mean((0, 2, 3), keepdims=True) for factor_of_sum in (1, xhat)]
        np.testing.assert_allclose(gradient, factor * (output_gradient - sums[0] - xhat * sums[1]), atol=1e-4)


@pytest.mark.parametrize("mode", ["FAST_COMPILE", "JAX"])
def test_batch_normalization_of_float16_is_accurate(mode):
    x = (100 + RNG.normal(size=(64, 2, 40))).astype("float16")
    v, ones = pt.tensor3("v", dtype="float16"), np.ones((1, 2, 1), "float16")
    y, mean, invstd = BatchNormTrain((0, 2), EPSILON)(v, ones, 0 * ones)
    outputs = [y, mean, invstd, pytensor.grad((y**2).sum(), v)]
    *values, gradient = compute_in_mode(mode, [v], outputs, x)
    for value, expected in zip(values, normalize_in_numpy(x.astype("float64"), 1, 0, (0, 2)), strict=True):
        assert np.asarray(value).dtype == "float16"
        np.testing.assert_allclose(value, expected, rtol=2e-3, atol=2e-3)
    assert np.asarray(gradient).dtype == "float16"


@pytest.mark.parametrize("mode", ["FAST_COMPILE", "JAX"])
def test_batch_normalization_accepts_mixed_dtypes(mode):
    x, scale, shift = make_batch((0,))
    kinds = [pt.TensorType(d, s)() for d, s in (("float32", (None,) * 4), ("float64", (1, None, None, None)))]
    y, mean, invstd = BatchNormTrain((0,), EPSILON)(*kinds, shift.astype("float32"))
    first = pytensor.grad((y**2).sum(), kinds)
    outputs = [y, mean, invstd, *first, *pytensor.grad((first[0] ** 2).sum(), kinds)]
    assert [v.dtype for v in outputs[:5]] == ["float64", "float32", "float32", "float32", "float64"]
    values = compute_in_mode(mode, kinds, outputs, x.astype("float32"), scale)
    for value, expected in zip(values, normalize_in_numpy(x, scale, shift, (0,)), strict=False):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)
    # Whole numbers become floating-point ones.
    y, mean, _ = BatchNormTrain((0,), EPSILON)(pt.imatrix(), np.ones((1, 2), "int8"), np.ones((1, 2), "float32"))
    assert y.dtype == mean.dtype == "float64"


def test_running_averages_keep_their_dtype():
    x, parameter = pt.fmatrix(), np.ones(2, "float32")
    results = theano.tensor.nnet.bn.batch_normalization_train(
        x, parameter, parameter, running_average_factor=np.float64(0.1), running_mean=parameter, running_var=parameter
    )
    assert [v.dtype for v in results] == ["float32"] * 5


@pytest.mark.parametrize("mode", ["FAST_COMPILE", "JAX"])
def test_batch_normalization_accepts_one_scale_for_all_channels(mode):
    x = draw_normal(5, 3)
    v, scale = pt.dmatrix("v"), pt.TensorType("float64", (1, 1))("scale")
    y = BatchNormTrain((0,), EPSILON)(v, scale, np.zeros((1, 1)))[0]
    value, gradient = compute_in_mode(
        mode, [v, scale], [y, pytensor.grad((y**2).sum(), scale)], x, np.full((1, 1), 2.0)
    )
    expected = normalize_in_numpy(x, 2, 0, (0,))[0]
    np.testing.assert_allclose(value, expected)
    np.testing.assert_allclose(gradient, [[(expected**2).sum()]])


@pytest.mark.parametrize("mode", ["FAST_COMPILE", "JAX"])
def test_batch_normalization_refuses_scales_of_other_lengths(mode):
    x, scale = pt.dmatrix("x"), pt.TensorType("float64", (1, None))("scale")
    f = pytensor.function([x, scale], BatchNormTrain((0,), EPSILON)(x, scale, scale)[0], mode=mode)
    with pytest.raises(ValueError, match=r"scale, shift: expected shape \(1, 3\) for \(5, 3\), got \(1, 1\)"):
        f(draw_normal(5, 3), draw_normal(1, 1))
    for wrong in (pt.dvector(), pt.dmatrix()):
        with pytest.raises(TypeError, match="scale, shift: expected 2 dimensions, length 1 on"):
            BatchNormTrain((0,), EPSILON)(x, scale, wrong)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradient_of_a_rectified_normalization_is_one_op(dtype):
    axes = AXES[1]
    inputs = [pt.TensorType(dtype, [1 if axis in axes and i else None for axis in range(4)])() for i in range(3)]
    weights = draw_normal(*SHAPE).astype(dtype)
    y = rectifier(BatchNormTrain(axes, EPSILON)(*inputs)[0])
    gradients = pytensor.grad((weights * y).sum(), inputs)
    f = pytensor.function(inputs, gradients, mode="JAX")
    assert sum(isinstance(n.op, RectifiedBatchNormTrainGrad) for n in f.maker.fgraph.apply_nodes) == 1
    values = make_batch(axes, dtype)
    expected = compute_in_mode("FAST_COMPILE", inputs, gradients, *values)
    tolerance = {"float32": 1e-5, "float64": 1e-12}[dtype]
    for actual, wanted in zip(f(*values), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=tolerance, atol=tolerance)


def test_other_masked_gradients_of_normalizations_are_not_fused():
    x, scale, shift = inputs = [pt.TensorType("float64", (1 if i else None, None))() for i in range(3)]
    y = BatchNormTrain((0,), EPSILON)(*inputs)[0]
    weights, values = draw_normal(5, 3), [draw_normal(5, 3), draw_normal(1, 3), draw_normal(1, 3)]
    others = [
        rectifier(y) + 2 * y,  # the gradient of the normalization is a sum
        rectifier(2 * y),  # the rectifier's operand is not the normalized array
        pt.switch(pt.le(rectifier(y), 0.5), 0.0, y),
        pt.switch(pt.le(rectifier(y), 0.0), 0.5 * y, y),
    ]
    for other in others:
        gradients = pytensor.grad((weights * other).sum(), inputs)
        f = pytensor.function(inputs, gradients, mode="JAX")
        assert not any(isinstance(n.op, RectifiedBatchNormTrainGrad) for n in f.maker.fgraph.apply_nodes)
        expected = compute_in_mode("FAST_COMPILE", inputs, gradients, *values)
        for actual, wanted in zip(f(*values), expected, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-12, atol=1e-12)


def test_statistics_do_not_depend_on_the_scale():
    x, scale, shift = pt.dmatrix(), pt.drow(), pt.drow()
    _, mean, invstd = BatchNormTrain((0,), EPSILON)(x, scale, shift)
    with pytest.raises(pytensor.gradient.DisconnectedInputError):
        pytensor.grad((mean + invstd).sum(), scale)


def test_shapes_of_normalized_arrays_need_no_normalization():
    x, scale, shift = pt.dmatrix(), pt.TensorType("float64", (1, None))(), pt.TensorType("float64", (1, None))()
    outputs = BatchNormTrain((0,), EPSILON)(x, scale, shift)
    arrays = [*outputs, *pytensor.grad((outputs[0] ** 2).sum(), [x, scale, shift])]
    f = pytensor.function([x, scale, shift], [v.shape for v in arrays], mode="FAST_RUN", on_unused_input="ignore")
    ops = {type(node.op) for node in f.maker.fgraph.apply_nodes}
    assert not ops & {BatchNormTrain, BatchNormTrainGrad}
    shapes = f(draw_normal(4, 3), draw_normal(1, 3), draw_normal(1, 3))
    assert [tuple(s) for s in shapes] == [(4, 3), (1, 3), (1, 3), (4, 3), (1, 3), (1, 3)]


# -- the rectifier ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["FAST_COMPILE", *COMPILED])
def test_relu_and_its_derivatives_equal_exact_values(mode):
    v = pt.dvector("v")
    y = rectifier(v)
    first = pytensor.grad((y**2).sum(), v)
    second = pytensor.grad((first**3).sum(), v)
    values = compute_in_mode(mode, [v], [y, first, second], np.array([-1.0, 0.0, 2.0, np.inf]))
    for value, expected in zip(values, ([0, 0, 2, np.inf], [0, 0, 4, np.inf], [0, 0, 96, np.inf]), strict=True):
        np.testing.assert_array_equal(np.asarray(value), expected)
    assert np.isnan(np.asarray(compute_in_mode(mode, [v], y, np.array([np.nan]))))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_relu_keeps_type_and_shape(dtype):
    v = pt.TensorType(dtype, (2, None, 1))("v")
    y = rectifier(v)
    assert y.type == v.type
    assert pytensor.grad(y.sum(), v).dtype == dtype


# -- softmax and crossentropy ----------------------------------------------------------------------------------------

FAR = np.array([[0.0, 2000.0, -2000.0], [1.0, 2.0, 3.0]])
CLASSES = np.array([0, 2])


def make_losses(x):
    """Return the ways in which programs write one loss."""
    rows = pt.arange(2)
    one_hot = np.eye(3)[CLASSES]
    return {
        "crossentropy": crossentropy(softmax(x), CLASSES),
        "indexed log": -pt.log(softmax(x))[rows, CLASSES],
        "log of indexed": -pt.log(softmax(x)[rows, CLASSES]),
        "one-hot": -(one_hot * pt.log(softmax(x))).sum(axis=1),
        "log_softmax": -pt.special.log_softmax(x, axis=-1)[rows, CLASSES],
    }


#: Graphs as rewritten for Numba, which need no compiler to be tested.
REWRITTEN = Mode(linker="py", optimizer=get_mode("NUMBA").provided_optimizer)


@pytest.mark.parametrize(
    "name, mode",
    [
        *((name, REWRITTEN) for name in ("crossentropy", "indexed log", "one-hot", "log_softmax")),
        *((name, "JAX") for name in ("crossentropy", "indexed log", "one-hot", "log_softmax")),
    ],
)
def test_losses_far_from_zero_equal_exact_values(name, mode):
    x = pt.dmatrix("x")
    loss = make_losses(x)[name]
    value, gradient = compute_in_mode(mode, [x], [loss, pytensor.grad(loss.sum(), x)], FAR)
    np.testing.assert_allclose(value, [2000.0, 0.40760596], rtol=1e-6)
    near = np.exp([1.0, 2, 3]) / np.exp([1.0, 2, 3]).sum()
    np.testing.assert_allclose(gradient, [[-1, 1, 0], near - [0, 0, 1]], atol=1e-7)


@pytest.mark.parametrize("name", ["crossentropy", "indexed log", "log of indexed", "one-hot", "log_softmax"])
def test_loss_gradients_equal_finite_differences(name):
    verify_gradient(lambda x: make_losses(x)[name], draw_normal(2, 3))


def test_crossentropy_of_other_probabilities_has_gradients():
    p = np.abs(draw_normal(2, 3)) + 0.1
    verify_gradient(lambda v: crossentropy(v, CLASSES), p)
    v = pt.dmatrix()
    first = pytensor.grad(crossentropy(v, CLASSES).sum(), v)
    verify_gradient(lambda v: pytensor.grad((crossentropy(v, CLASSES) ** 2).sum(), v), p)
    np.testing.assert_allclose(first.eval({v: p}, mode="FAST_COMPILE")[[0, 1], CLASSES], -1 / p[[0, 1], CLASSES])


def test_givens_replace_the_softmax_of_a_loss():
    x, other = pt.dmatrix("x"), pt.dmatrix("other")
    p = softmax(x)
    loss = crossentropy(p, CLASSES)
    f = pytensor.function([x, other], loss, givens={p: other}, on_unused_input="ignore", mode="FAST_COMPILE")
    np.testing.assert_allclose(f(draw_normal(2, 3), np.full((2, 3), 0.5)), np.log(2) * np.ones(2))


@pytest.mark.parametrize("shape", [(2, 3), (2, 1), (1, 3), (1, 1)])
def test_softmax_cancels_quotients_of_broadcast_numerators(shape):
    numerator = draw_normal(*shape)
    x, r = pt.dmatrix("x"), pt.TensorType("float64", [1 if n == 1 else None for n in shape])("r")
    p = softmax(x)
    gradients = [pytensor.grad(None, x, known_grads={p: g}) for g in (r / p, -(r / p), r + r / p)]
    *computed, probabilities = compute_in_mode("FAST_COMPILE", [x, r], [*gradients, p], FAR, numerator)
    for product, gradient in zip((numerator, -numerator, numerator * probabilities + numerator), computed, strict=True):
        product = np.broadcast_to(product, (2, 3))
        np.testing.assert_allclose(gradient, product - probabilities * product.sum(axis=1, keepdims=True), rtol=1e-12)


BROADCAST_OUTPUTS = {  # outputs for an array of the shape (3, 2, 5, 5)
    "batch normalization": lambda x: BatchNormTrain((0, 2, 3), 1e-3)(x, *[pt.ones((1, 2, 1, 1))] * 2)[0],
    "max pool": Pool((2, 2), (2, 2), (0, 0), "max", True),
    "mean pool": Pool((2, 2), (1, 1), (0, 0), "average_inc_pad", True),
    "filters": lambda x: Conv(2)(pt.ones((3, 2, 6, 6)), x),
}


@pytest.mark.parametrize("mode", ["FAST_COMPILE", "JAX"])
@pytest.mark.parametrize("name", BROADCAST_OUTPUTS)
def test_gradients_of_fewer_elements_are_broadcast(name, mode):
    x, g = pt.dtensor4("x"), pt.TensorType("float64", (1, None, 1, 1))("g")
    y = BROADCAST_OUTPUTS[name](x)
    first = [pytensor.grad(None, x, known_grads={y: output_grad}) for output_grad in (g, g + pt.zeros_like(y))]
    second = [pytensor.grad((gradient**2).sum(), g) for gradient in first]
    lengths = 1, 3 if name == "filters" else 2, 1, 1
    results = compute_in_mode(mode, [x, g], [*first, *second], draw_normal(3, 2, 5, 5), draw_normal(*lengths))
    for computed, expected in zip((results[0], results[2]), (results[1], results[3]), strict=True):
        np.testing.assert_allclose(computed, expected, rtol=1e-9, atol=1e-12)


def test_second_derivatives_through_softmax_equal_finite_differences():
    verify_gradient(lambda x: pytensor.grad((crossentropy(softmax(x), CLASSES) ** 2).sum(), x), draw_normal(2, 3))


def test_crossentropy_refuses_wrong_classes():
    with pytest.raises(TypeError, match="classes: expected integers"):
        crossentropy(pt.matrix(), pt.vector())
    with pytest.raises(TypeError, match="a matrix and a vector"):
        crossentropy(pt.matrix(), pt.lmatrix())
    p, classes = pt.matrix(), pt.lvector()
    for mode in ("FAST_COMPILE", "JAX"):
        for n_rows in (1, 2):  # XLA would broadcast a single row
            with pytest.raises(ValueError, match=f"classes: expected {n_rows}, one for each row of probabilities"):
                compute_in_mode(mode, [p, classes], crossentropy(p, classes), np.ones((n_rows, 2), p.dtype), [0, 0, 0])


@pytest.mark.parametrize("wrong_class", [-1, 3])
def test_crossentropy_of_a_class_out_of_range_is_no_number(wrong_class):
    x, classes = pt.dmatrix("x"), pt.lvector()
    for p in (x, softmax(x)):
        with pytest.raises(IndexError, match=f"classes: expected 0 to 2, got {wrong_class}"):
            compute_in_mode(
                "FAST_COMPILE", [x, classes], crossentropy(p, classes), np.full((2, 3), 0.5), [0, wrong_class]
            )
        loss = compute_in_mode("JAX", [x, classes], crossentropy(p, classes), np.full((2, 3), 0.5), [0, wrong_class])
        np.testing.assert_array_equal(np.isnan(loss), [False, True])


@pytest.mark.parametrize(
    ("dtype", "n_classes", "wrong_class"), [("int8", 200, -1), ("uint32", 3, 2**32 - 1), ("int64", 3, 2**32 + 1)]
)
def test_no_dtype_turns_a_class_out_of_range_into_another_in_xla(dtype, n_classes, wrong_class):
    p, classes = pt.dmatrix(), pt.vector(dtype=dtype)
    values = np.full((2, n_classes), 0.5), np.array([0, wrong_class], dtype)
    loss = compute_in_mode("JAX", [p, classes], crossentropy(p, classes), *values)
    np.testing.assert_array_equal(np.isnan(loss), [False, True])


def test_crossentropy_accepts_all_integers():
    p = np.array([[0.25, 0.75]])
    for dtype in ("int8", "uint64"):
        classes = pt.vector(dtype=dtype)
        for mode in ("FAST_COMPILE", "JAX"):
            loss = compute_in_mode(mode, [classes], crossentropy(p, classes), np.array([1], dtype))
            np.testing.assert_allclose(loss, -np.log(0.75), rtol=1e-6)


def test_softmax_op_extends_that_of_pytensor():
    assert isinstance(softmax(pt.matrix()).owner.op, pt.special.Softmax)
    assert isinstance(softmax(pt.matrix()).owner.op, Softmax)


def test_binary_crossentropy_of_a_sigmoid_far_from_zero_is_exact():
    import theano.tensor.nnet as nnet

    x = pt.dvector("x")
    for output in (nnet.binary_crossentropy(nnet.sigmoid(x), 0.0), nnet.sigmoid_binary_crossentropy(x, 0.0)):
        value, gradient = compute_in_mode(
            "FAST_RUN", [x], [output, pytensor.grad(output.sum(), x)], np.array([800.0, -800.0])
        )
        np.testing.assert_allclose(value, [800, 0], atol=1e-300)
        np.testing.assert_allclose(gradient, [1, 0], atol=1e-12)


# -- XLA and Numba ---------------------------------------------------------------------------------------------------

# Numbers of classes are known only when the function runs.
NOT_FOR_XLA = {"confusion_matrix"}
CHOSEN = [case for position, case in enumerate(cases.CASES) if position % 9 == 0 and case.name not in NOT_FOR_XLA]


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore:Skipping Assert")
def test_xla_results_of_every_ninth_case_equal_numpy(case):
    numpy_results, xla_results = case.compute("FAST_COMPILE"), case.compute("JAX")
    for kind, values in numpy_results.items():
        for value, other in zip(values, xla_results[kind], strict=True):
            assert np.asarray(other).dtype == value.dtype
            np.testing.assert_allclose(other, value, rtol=1e-7, atol=1e-9, err_msg=kind)


@settings(max_examples=15)
@given(st.data())
def test_xla_max_pool_gradient_with_equal_maxima_equals_numpy(data):
    window, stride = (data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4)), label=n) for n in ("window", "stride"))
    ignore = data.draw(st.booleans())
    pad = tuple(data.draw(st.integers(0, w - 1)) if ignore else 0 for w in window)
    shape = (1, 2, *(data.draw(st.integers(w, 9)) for w in window))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    x = pt.dtensor4("x")
    y = Pool(window, stride, pad, "max", ignore)(x)
    gradient = pytensor.grad((y**2).sum(), x)
    values = rng.integers(-1, 2, size=shape).astype("float64")  # so few that windows have several maxima
    np.testing.assert_allclose(
        compute_in_mode("JAX", [x], gradient, values), compute_in_mode("FAST_COMPILE", [x], gradient, values)
    )


STRIDES = [
    (Conv(2, "half", (2, 2)), (2, 3, 9, 8), (4, 3, 7, 5)),
    (Conv(2, ((0, 2), (1, 0)), (4, 3), flips_filters=False), (2, 1, 12, 11), (3, 1, 4, 5)),
    (Conv(1, "valid", (3,)), (2, 4, 14), (3, 4, 3)),
    (Conv(3, "half", (2, 2, 2)), (1, 2, 5, 6, 7), (3, 2, 3, 3, 3)),
]


@pytest.mark.parametrize("op, x, w", STRIDES)
def test_strided_conv_of_few_channels_in_the_gpu_lowering_equals_numpy(op, x, w, monkeypatch):
    import jax

    kinds = [pt.TensorType("float64", (None,) * len(shape))() for shape in (x, w)]
    y = op(*kinds)
    outputs = [y, pytensor.grad((y**2).sum(), kinds[1])]
    values = draw_normal(*x), draw_normal(*w)
    expected = compute_in_mode("FAST_COMPILE", kinds, outputs, *values)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    given_to_xla, convolve = [], convolution._convolve_with_xla
    monkeypatch.setattr(
        convolution,
        "_convolve_with_xla",
        lambda op, x, w: given_to_xla.append((op.strides, x.shape[1])) or convolve(op, x, w),
    )
    for actual, value in zip(compute_in_mode("JAX", kinds, outputs, *values), expected, strict=True):
        np.testing.assert_allclose(actual, value, atol=1e-10)
    assert len(given_to_xla) == 2
    assert all(set(strides) == {1} and channels % 8 == 0 for strides, channels in given_to_xla)


def test_numba_calls_the_ops_without_a_warning(recwarn):
    x, w = pt.dtensor4("x"), pt.dtensor4("w")
    output = Pool((2, 2), (2, 2), (0, 0), "max", True)(Conv(2)(x, w))
    values = draw_normal(2, 2, 6, 6), draw_normal(3, 2, 3, 3)
    outputs = [output, *pytensor.grad((output**2).sum(), [x, w])]
    expected = compute_in_mode("FAST_COMPILE", [x, w], outputs, *values)
    for actual, value in zip(compute_in_mode("NUMBA", [x, w], outputs, *values), expected, strict=True):
        np.testing.assert_allclose(actual, value)
    assert not [w for w in recwarn if "object mode" in str(w.message)]


def test_numba_compiles_an_op_once_for_all_its_nodes():
    from pytensor.link.numba.dispatch.basic import numba_funcify

    def compile_op(op, x):
        w = pt.TensorType(x.dtype, (None,) * 4)()
        pytensor.function([x, w], op(x, w), mode="NUMBA")  # which tells Numba of the Ops
        return numba_funcify(op, node=op(x, w).owner)

    first = compile_op(Conv(2), pt.dtensor4())
    assert compile_op(Conv(2), pt.TensorType("float64", (None, 2, 7, None))()) is first
    assert compile_op(Conv(2), pt.ftensor4()) is not first
    assert compile_op(Conv(2, "half"), pt.dtensor4()) is not first


CONVOLVE = """
import json, re, numpy as np, pytensor, pytensor.tensor as pt, jax
import synkhronos.compat
from synkhronos.compat.ops.convolution import Conv
x, w = pt.tensor4("x"), pt.tensor4("w")
y = Conv(2, "half")(x, w)
f = pytensor.function([x, w], [y, *pytensor.grad((y ** 2).sum(), [x, w])], mode="JAX")
values = np.ones((4, 3, 8, 8), "float32"), np.ones((5, 3, 3, 3), "float32")
f(*values)
text = str(jax.make_jaxpr(f.vm.jit_fn)(*values))
print(json.dumps([text.count("conv_general_dilated["), "float64" in text or "f64" in text]))
"""


def test_conv_is_one_xla_convolution_in_float32():
    """Forward and two gradients: three convolutions, and nothing in float64."""
    output = run_code(CONVOLVE, PYTENSOR_FLAGS="floatX=float32")
    assert json.loads(output.splitlines()[-1]) == [3, False]


# -- lengths under XLA -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Skipping Assert")
@pytest.mark.parametrize(
    "build",
    [
        lambda x: x.reshape((x.shape[0] * x.shape[1], -1)),
        lambda x: x.reshape((x.shape[0], pt.prod(x.shape[1:]))),
        lambda x: x.reshape(pt.concatenate([x.shape[:1], x.shape[1:] // 1])),
        lambda x: x[: x.shape[0] // 2],
        lambda x: pt.arange(x.shape[0] * 2 + 1),
        lambda x: pt.zeros((pt.maximum(x.shape[0], x.shape[1]), 2)),
        lambda x: pt.concatenate([x[:, :1], x], axis=1)[:, : x.shape[1] - 1],
    ],
)
def test_shape_arithmetic_in_jax_mode_equals_fast_compile(build):
    x = pt.tensor3("x")
    value = draw_normal(4, 3, 2)
    np.testing.assert_allclose(
        compute_in_mode("JAX", [x], build(x), value), compute_in_mode("FAST_COMPILE", [x], build(x), value)
    )


def test_length_may_have_more_than_32_terms():
    rows = pt.matrices(70)
    total = pt.zeros(pt.add(*(x.shape[0] for x in rows)))
    f = pytensor.function(rows, total, mode="JAX", on_unused_input="ignore")
    assert f(*(np.zeros((i, 2)) for i in range(70))).shape == (69 * 35,)


@pytest.mark.parametrize(
    "build",
    [
        lambda x: x.prod() + (x.prod(axis=1) * np.arange(3)).sum(),  # rows with one and two zeros
        lambda x: (theano.tensor.split(x, [1, 2], 2, axis=1)[1] ** 2).sum(),  # updates a shape
    ],
)
def test_gradient_in_jax_mode_equals_fast_compile(build):
    x, value = pt.matrix("x"), np.array([[1.0, 2, 0], [0, 0, 3], [2, 3, 4]])
    gradient = pytensor.grad(build(x), x)
    np.testing.assert_allclose(
        compute_in_mode("JAX", [x], gradient, value), compute_in_mode("FAST_COMPILE", [x], gradient, value)
    )


def test_functions_of_integers_in_jax_mode_are_accurate():
    x = pt.ivector("x")
    short = x.astype("int8")
    outputs = [pt.exp(x), 1 / x, x / x[::-1], short / short[::-1], pt.arctan2(x, x + 1).sum(), pt.log(x).mean()]
    values = [compute_in_mode(mode, [x], outputs, np.array([1, 2, 7], "int32")) for mode in ("JAX", "FAST_COMPILE")]
    for value, expected in zip(*values, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-14)


def test_value_dependent_shape_is_named():
    x = pt.lvector("x")
    with pytest.raises(NotImplementedError, match="depends on the values of arrays"):
        compute_in_mode("JAX", [x], pt.arange(x.sum()), [1, 2])
