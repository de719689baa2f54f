"""Reduction of results over slices and ranks: every op equals NumPy's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from library import shared, tensor
from messages import raises

import synkhronos as synk
from synkhronos.data_objects.rows import get_share_slice
from synkhronos.devices.reduce_op import REDUCE_OPS
from synkhronos.engines.accumulator import Accumulator
from synkhronos.functions.arguments import parse_op

FLOATS = ["float16", "float32", "float64"]
INTEGERS = ["int8", "uint8", "int32", "int64", "bool"]
TOLERANCE = {"float16": 2e-3, "float32": 1e-5, "float64": 1e-12}


def accumulate(op, values, weights=None):
    total = Accumulator(op)
    for value, weight in zip(values, weights or [1] * len(values), strict=True):
        total.add(value, weight)
    return total.get_result()


@st.composite
def draw_values(draw, dtypes, least_ndim=0, same_rows=True):
    """Draw arrays of one dtype and one shape; with ``same_rows=False`` lengths of axis 0 differ."""
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    shape = draw(hnp.array_shapes(min_dims=least_ndim, max_dims=3, min_side=0, max_side=4))
    elements = None
    if dtype.kind == "f":
        elements = st.integers(-64, 64).map(lambda i: dtype.type(i / 16))
    arrays = []
    for _ in range(draw(st.integers(1, 5))):
        rows = shape if same_rows else (draw(st.integers(0, 4)), *shape[1:])
        arrays.append(draw(hnp.arrays(dtype, rows, elements=elements)))
    return arrays


@st.composite
def draw_weighted(draw):
    arrays = draw(draw_values(FLOATS))
    return arrays, draw(st.lists(st.integers(1, 1000), min_size=len(arrays), max_size=len(arrays)))


@pytest.mark.parametrize(
    "op, dtype",
    [
        (name, dtype)
        for dtype in ("float16", "float32", "float64", "complex64", "int8")
        for name, op in REDUCE_OPS.items()
        if op.ufunc is not None and op.can_reduce(np.dtype(dtype))
    ],
)
@pytest.mark.parametrize("n_columns", [1, 2, 9])
def test_reduction_of_a_matrix_has_the_bits_of_a_running_one(op, dtype, n_columns):
    reduce_op, rng = REDUCE_OPS[op], np.random.default_rng(0)
    for n in (1, 2, 7, 8, 33):
        values = rng.normal(scale=10, size=(n, n_columns)).astype(dtype)
        if n < 8:
            values[:, 0] = -0.0
        weights = rng.integers(1, 1000, n)
        with np.errstate(all="ignore"):
            result = reduce_op.reduce_first_axis(values, np.repeat(weights[:, None], n_columns, axis=1))
            expected = accumulate(op, values, weights.tolist())
        assert result.dtype == expected.dtype and result.tobytes() == expected.tobytes()


@pytest.mark.parametrize("n_rows", [12, 3])
def test_scalars_of_five_ranks_are_reduced_in_rank_order(fork, n_rows):
    fork(5)
    x = tensor.fvector("x")
    ops = ["sum", "mean", "avg", "prod", "min", "max", "gather", None]
    f = synk.function([x], [(x.max(), op) for op in ops])
    rows = np.random.default_rng(0).normal(size=n_rows).astype("float32")
    shares = [share for share in (rows[get_share_slice(n_rows, 5, r)] for r in range(5)) if len(share)]
    values, weights = [share.max() for share in shares], [len(share) for share in shares]
    for op, result in zip(ops[:-1], f(rows), strict=False):
        assert np.asarray(result).tobytes() == np.asarray(accumulate(op, values, weights)).tobytes()


@pytest.mark.parametrize("size", [0, 1, 4, 1_000, 6_553, 6_554, 300_000])
def test_all_reduce_of_five_ranks_adds_in_rank_order(fork, size):
    fork(5)
    s = shared(np.zeros(size, "float32"), "s")
    synk.function([], [], updates=[(s, s)])()
    values = np.random.default_rng(size).normal(size=(5, size)).astype("float32")
    for r in range(5):
        synk.set_value(r, s, values[r])
    expected = values[0].copy()
    for value in values[1:]:
        expected += value
    assert synk.reduce(s, "sum", in_place=False).tobytes() == expected.tobytes()
    synk.all_reduce(s, "sum")
    for r in range(5):
        assert synk.get_value(r, s).tobytes() == expected.tobytes()


@given(draw_values(FLOATS))
def test_avg_is_unweighted(parts):
    result = accumulate("avg", parts)
    dtype = parts[0].dtype
    assert result.dtype == dtype and result.shape == parts[0].shape
    expected = np.mean([part.astype("float64") for part in parts], axis=0)
    np.testing.assert_allclose(result, expected, rtol=TOLERANCE[dtype.name], atol=TOLERANCE[dtype.name])


@given(draw_weighted())
def test_mean_weighs_values_by_their_rows(case):
    parts, weights = case
    result = accumulate("mean", parts, weights)
    dtype = parts[0].dtype
    assert result.dtype == dtype and result.shape == parts[0].shape
    expected = np.average([part.astype("float64") for part in parts], axis=0, weights=weights)
    np.testing.assert_allclose(result, expected, rtol=TOLERANCE[dtype.name], atol=4 * TOLERANCE[dtype.name])


@pytest.mark.parametrize(
    "op, ufunc", [("sum", np.add), ("prod", np.multiply), ("min", np.minimum), ("max", np.maximum)]
)
@given(parts=draw_values(FLOATS + INTEGERS))
def test_elementwise_ops_equal_numpy_and_keep_dtype(op, ufunc, parts):
    expected = parts[0]
    for part in parts[1:]:
        with np.errstate(over="ignore"):
            expected = ufunc(expected, part)
    with np.errstate(over="ignore"):
        result = accumulate(op, parts)
    assert result.dtype == parts[0].dtype and result.shape == parts[0].shape
    np.testing.assert_array_equal(result, expected)


@given(draw_values(FLOATS + INTEGERS, least_ndim=1, same_rows=False))
def test_gather_concatenates_along_axis_0(parts):
    result = accumulate("gather", parts)
    assert result.dtype == parts[0].dtype
    np.testing.assert_array_equal(result, np.concatenate(parts))


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=5))
def test_gather_of_scalars_returns_a_vector(numbers):
    np.testing.assert_array_equal(accumulate("gather", [np.int64(i) for i in numbers]), numbers)


def test_op_none_keeps_the_last_value():
    last = object()
    assert accumulate(None, [object(), last]) is last


@pytest.mark.parametrize("op", [name for name in REDUCE_OPS if name != "gather"])
def test_reduction_neither_changes_nor_returns_its_inputs(op):
    first, second = np.full(3, 2.0), np.full(3, 5.0)
    result = accumulate(op, [first, second], [1, 3])
    np.testing.assert_array_equal(first, [2.0] * 3)
    np.testing.assert_array_equal(second, [5.0] * 3)
    alone = accumulate(op, [first])
    assert not np.shares_memory(result, first) and not np.shares_memory(alone, first)


@pytest.mark.parametrize("op", ["avg", "mean"])
def test_float16_sums_do_not_overflow(op):
    # The sums are 3 and 66 times the largest float16.
    parts = [np.full(2, 65504, "float16")] * 3
    np.testing.assert_array_equal(accumulate(op, parts, [10, 20, 36]), parts[0])


@pytest.mark.parametrize("op", ["min", "max"])
def test_min_and_max_propagate_nan(op):
    assert np.isnan(accumulate(op, [np.float64(1), np.float64("nan"), np.float64(2)]))


def test_reduction_accepts_numpy_scalars():
    result = accumulate("mean", [np.float32(1), np.float32(2)], [3, 1])
    assert result.dtype == np.float32 and result.shape == () and result == 1.25


def test_avg_accepts_complex_numbers():
    assert accumulate("avg", [np.complex64(1 + 2j), np.complex64(3)]) == np.complex64(2 + 1j)


@pytest.mark.parametrize("op", [name for name in REDUCE_OPS if name != "gather"])
def test_reduction_refuses_different_shapes(op):
    with pytest.raises(ValueError, match=rf"'{op}'.*\(2,\).*\(3,\)"):
        accumulate(op, [np.zeros(2), np.zeros(3)])


@pytest.mark.parametrize("op", REDUCE_OPS)
def test_prefix_of_an_op_changes_nothing(op):
    assert parse_op(op, "op") == parse_op(f"c_{op}", "op") == op


def test_op_may_be_none():
    assert parse_op(None, "op") is None


@pytest.mark.parametrize("op", ["average", "", "c_", "SUM", "c_c_sum", "None"])
def test_op_error_lists_the_known_ops(op):
    with pytest.raises(ValueError, match=f"outputs: .*'gather'.*got {op!r}"):
        parse_op(op, "outputs: the op of output 0")


@pytest.mark.parametrize("op", [1, np.add, ["sum"], True])
def test_op_refuses_other_types(op):
    with raises(TypeError, "outputs"):
        parse_op(op, "outputs: the op of output 0")
