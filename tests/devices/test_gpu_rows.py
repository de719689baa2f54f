"""Rows of inputs on GPUs."""

import numpy as np
import pytest
from gpu_commands import ON_GPUS, RNG, needs_real_gpus
from library import GPU_DEVICE, shared
from library import tensor as T

import synkhronos as synk

pytestmark = ON_GPUS

BATCHES = {
    "all": None,
    "first": 12,
    "slice": slice(5, 17),
    "strided": slice(1, 37, 3),
    "reversed": slice(None, None, -3),
    "indexes": [36, 0, 7, 7, -1, 3, 20, 11, 2, 35, 1, 0],
    "array": np.array([4, 4, 4, 9], "int16"),
    "mask": np.arange(37) % 3 == 0,
    "one row": [8],
    "none": [],
    "an empty slice": slice(4, 4),
}


def select_rows(value, batch):
    if isinstance(batch, int):
        return value[:batch]
    return value[np.array(batch, int) if isinstance(batch, list) else batch]


def check_rows(value, batches):
    x = T.TensorType(str(value.dtype), (None,) * value.ndim)("x")
    f = synk.function([x], (x, "gather"))
    data = synk.data(value)
    for batch in batches:
        expected = value if batch is None else select_rows(value, batch)
        result = f(data, batch=batch)
        np.testing.assert_array_equal(result, expected)
        assert result.dtype == value.dtype and result.shape == expected.shape


@pytest.mark.parametrize("name", BATCHES)
def test_rows_are_picked_by_the_gpu(name, two_ranks_per_test):
    batch = BATCHES[name]
    check_rows(RNG.normal(size=(37, 5)), [batch])
    check_rows(RNG.normal(size=37).astype("float32"), [batch])


@pytest.mark.parametrize("width", range(1, 18))
def test_gpu_picks_rows_of_any_width(width, two_ranks_per_test):
    # The kernel copies units of 16, 8, 4, 2 bytes or 1, depending on the alignment of width and addresses.
    check_rows(RNG.integers(0, 256, (37, width)).astype("uint8"), [BATCHES["indexes"], BATCHES["strided"]])


@pytest.mark.parametrize(
    "dtype",
    "bool int8 uint8 int16 uint16 int32 int64 float16 float32 float64 complex64 complex128".split(),
)
def test_gpu_picks_rows_of_any_dtype(dtype, two_ranks_per_test):
    check_rows((RNG.normal(size=(37, 3)) * 9).astype(dtype), [None, *map(BATCHES.get, ("indexes", "reversed", "none"))])


@pytest.mark.parametrize("shape", [(37, 0), (37, 2, 0), (0, 3), (37, 2, 3, 4), (37, 1000)])
def test_gpu_picks_rows_of_any_shape(shape, two_ranks_per_test):
    value = RNG.normal(size=shape)
    check_rows(value, [None, [], *([] if not shape[0] else [BATCHES["indexes"], BATCHES["strided"]])])


@pytest.mark.parametrize(
    "value", [2.5, np.float32(3), np.arange(3.0), np.zeros((0, 2)), np.array(True), np.float16(1.5)]
)
def test_bcast_inputs_reach_every_gpu(value, two_ranks_per_test):
    value = np.asarray(value)
    b = T.TensorType(str(value.dtype), (None,) * value.ndim)("b")
    f = synk.function([], (b, None), bcast_inputs=[b])
    for x_data in (value, synk.data(value)):
        result = f(x_data)
        np.testing.assert_array_equal(result, value)
        assert result.dtype == value.dtype and result.shape == value.shape


def test_minibatch_views_are_moved_to_gpus(two_ranks_per_test):
    x, y = T.matrix("x", dtype="uint8"), T.dmatrix("y")
    value, other = RNG.integers(0, 256, (37, 3)).astype("uint8"), RNG.normal(size=(37, 2))
    f = synk.function([x, y], [(x, "gather"), (y, "gather")])
    rows = [9, 5, 30, 5, 12]
    for mini, batch in ((value[7:], slice(7, 20, 3)), (value[rows], rows)):
        results = f(synk.data(mini, minibatch=True), other, batch=batch)
        for result, expected in zip(results, (value, other), strict=True):
            np.testing.assert_array_equal(result, expected[batch])


def test_gpu_picks_rows_of_several_inputs_by_many_indexes(two_ranks_per_test):
    # More than the initial page-locked memory, and more than it has after growing once.
    x, y = T.vector("x", dtype="int32"), T.matrix("y", dtype="uint8")
    f = synk.function([x, y], [(x, "gather"), (y, "gather")])
    value, other = RNG.integers(0, 99, 1000).astype("int32"), RNG.integers(0, 256, (1000, 3)).astype("uint8")
    data, more = synk.data(value), synk.data(other)
    for n in (100, 400_000, 400_000, 100, 900_000, 50):
        rows = RNG.integers(-1000, 1000, n)
        first, second = f(data, more, batch=rows)
        np.testing.assert_array_equal(first, value[rows])
        np.testing.assert_array_equal(second, other[rows])


def test_num_slices_and_sliceable_shareds_work_on_gpus(two_ranks_per_test):
    x, s = T.dvector("x"), shared(np.zeros(1), "s")
    f = synk.function([x], (x * s, "gather"), sliceable_shareds=[s])
    synk.distribute()
    synk.scatter(s, np.arange(8.0))
    data = synk.data(np.arange(20.0))
    np.testing.assert_array_equal(f(data, batch=slice(0, 8)), np.arange(8.0) ** 2)
    np.testing.assert_array_equal(f(data, batch=[1, 2, 3, 4], batch_s=[[3, 0], [1, 1]]), [3, 0, 15, 20])
    np.testing.assert_array_equal(f(data, batch=[1, 2, 3, 4], batch_s=[[3, 0], [1, 1]], num_slices=2), [3, 0, 15, 20])


@needs_real_gpus  # there a call waits for the end of the previous one
def test_transfer_buffers_are_not_refilled_too_early(two_ranks_per_test):
    # The GPU computes a call for longer than the next one takes to prepare.
    x = T.fmatrix("x")
    y = x
    for _ in range(8):
        y = T.tanh(T.dot(y, y.T).dot(y) / 1000)
    f = synk.function([x], [(x[:, 0], "gather"), (y.sum(), "sum")])
    value = RNG.normal(size=(4096, 512)).astype("float32")
    data = synk.data(value)
    calls = []
    for i in range(30):
        rows = RNG.integers(0, 4096, 2048) if i % 3 else slice(i, i + 2048)
        calls.append((rows, f(data, batch=rows)[0], f(value[:2048] + i)[0]))
    for i, (rows, data_result, array_result) in enumerate(calls):
        np.testing.assert_array_equal(data_result, value[rows, 0])
        np.testing.assert_array_equal(array_result, value[:2048, 0] + i)


def test_data_can_be_changed_after_a_call_returns(two_ranks_per_test):
    x = T.dvector("x")
    f = synk.function([x], (x, "gather"))
    data = synk.data(np.zeros(1 << 20))
    results = []
    for i in range(10):
        data[:] = i
        results.append(f(data))
    for i, result in enumerate(results):
        assert (result.min(), result.max()) == (i, i)


def call_and_overwrite_last_row(context, f, rows):
    """Call a function, and overwrite a row that it takes.  Return whether a copy to the GPU could still read it."""
    f(rows)
    is_pending = GPU_DEVICE.staging._has_pending_copies
    rows.array[-1] = 0
    return is_pending


def test_program_may_overwrite_rows_after_a_call(fork):
    fork(1)
    x, w = T.fmatrix("x"), shared(np.zeros((), "float32"), "w")
    f = synk.function([x], [], updates=[(w, w + x[:, 0].sum(dtype="float32"))])
    rows = synk.data(np.ones((1 << 20, 32), "float32"))
    for n_calls in (1, 2):  # the first call compiles, during which the copy ends
        rows[:] = 1
        assert synk.run(call_and_overwrite_last_row, f, rows) == [False]
        assert w.get_value() == n_calls << 20
