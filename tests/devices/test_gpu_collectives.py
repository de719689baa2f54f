"""Collectives of arrays on GPUs, over NCCL and through host memory."""

from functools import reduce

import numpy as np
import pytest
from gpu_commands import N_RANKS, ON_GPUS, RNG, make_filled_variable, needs_jax
from library import GPU_DEVICE, INTERPRETED, NAME, function, shared
from library import tensor as T

import synkhronos as synk

pytestmark = ON_GPUS

DTYPES = ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"]
LACKING = ["bool", "int16", "uint16", "complex64", "complex128"]
OPS = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}


def check_values(w, expected):
    assert len(expected) == N_RANKS
    for rank, expected_value in enumerate(expected):
        value = synk.get_value(rank, w)
        np.testing.assert_array_equal(value, expected_value)
        assert value.dtype == expected_value.dtype


def test_large_all_reduce_in_host_memory_needs_no_connection(fork):
    fork(N_RANKS)
    w, values = make_filled_variable("float64", (200, 200))  # too large for a single barrier
    synk.all_reduce(w, "sum", nccl=False)
    check_values(w, [sum(values)] * N_RANKS)


@pytest.mark.parametrize("nccl", [True, False])
@pytest.mark.parametrize("dtype", DTYPES + LACKING)
def test_gpu_collectives_accept_every_dtype(fork, dtype, nccl):
    fork(N_RANKS)
    w, values = make_filled_variable(dtype)
    kind = np.dtype(dtype).kind  # a letter
    for op, ufunc in OPS.items():
        if kind == "c" and op in ("max", "min") or kind == "b" and op == "sum":
            continue
        expected = reduce(ufunc, values).astype(dtype)
        for rank, value in enumerate(values):
            synk.set_value(rank, w, value)
        np.testing.assert_array_equal(synk.reduce(w, op, in_place=False, nccl=nccl), expected)
        check_values(w, values)
        synk.all_reduce(w, op, nccl=nccl)
        check_values(w, [expected] * N_RANKS)
    for rank, value in enumerate(values):
        synk.set_value(rank, w, value)
    if kind in "fc":
        synk.reduce(w, "avg", nccl=nccl)
        np.testing.assert_allclose(np.asarray(w.get_value()), sum(values) / N_RANKS)
        synk.set_value(0, w, values[0])
    np.testing.assert_array_equal(synk.gather(w, nccl=nccl), np.stack(values))
    np.testing.assert_array_equal(synk.gather(w, nd_up=0, nccl=nccl), np.concatenate(values))
    synk.broadcast(w, nccl=nccl)
    check_values(w, [values[0]] * N_RANKS)
    synk.all_gather(w, nccl=nccl)
    check_values(w, [np.concatenate([values[0]] * N_RANKS)] * N_RANKS)
    if kind not in "b":
        for rank, value in enumerate(values):
            synk.set_value(rank, w, value)
        synk.reduce_scatter(w, "sum", nccl=nccl)
        for rank, rows in enumerate(np.array_split(sum(values), N_RANKS)):
            np.testing.assert_allclose(synk.get_value(rank, w), rows)
    # Theano keeps complex numbers on the host.
    assert GPU_DEVICE.owns(w.container.storage[0]) or NAME == "theano" and kind == "c"


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (1 << 22,)])
def test_gpu_collectives_accept_any_size(fork, shape):
    fork(N_RANKS)
    w, values = make_filled_variable("float32", shape)
    np.testing.assert_array_equal(synk.gather(w), np.stack(values))
    synk.all_reduce(w, "sum")
    check_values(w, [np.sum(values, axis=0)] * N_RANKS)
    synk.set_value(0, w, values[0])
    synk.broadcast(w)
    check_values(w, [values[0]] * N_RANKS)


def test_repeated_small_all_reduce_keeps_arrays_of_the_user(fork):
    fork(N_RANKS)
    w, values = make_filled_variable("float32")
    add_one, user_arrays = synk.function([], [], updates=[(w, w + 1)]), []
    expected = sum(values)
    for i in range(6):
        synk.all_reduce(w, "sum")
        check_values(w, [expected] * N_RANKS)
        if i % 2:
            user_arrays.append((w.get_value(borrow=True, return_internal_type=True), expected))
        if i == 3:
            add_one()
            expected = expected + 1
        expected = expected * N_RANKS
    for array, value in user_arrays:
        np.testing.assert_array_equal(np.asarray(array), value)


def test_ranks_of_different_shapes_keep_their_values_in_a_repeated_all_reduce(fork):
    fork(N_RANKS)
    w, values = make_filled_variable("float32")
    for _ in range(2):
        synk.all_reduce(w, "sum")
    synk.set_value(1, w, np.ones((1, 5), "float32"))
    with pytest.raises(ValueError, match="needs the same shape on all ranks"):
        synk.all_reduce(w, "sum")
    total = sum(values) * N_RANKS
    check_values(w, [np.ones((1, 5), "float32") if r == 1 else total for r in range(N_RANKS)])
    synk.set_value(1, w, total)
    synk.all_reduce(w, "sum")
    check_values(w, [total * N_RANKS] * N_RANKS)


@pytest.mark.parametrize("n_rows", [0, 1, 4, 1 << 20, (1 << 20) + 1])
def test_gpu_reduce_scatter_accepts_any_size(fork, n_rows):
    fork(N_RANKS)
    w, values = make_filled_variable("float32", (n_rows,))
    total = sum(values)
    synk.reduce_scatter(w, "sum")
    for rank, rows in enumerate(np.array_split(total, N_RANKS)):
        np.testing.assert_array_equal(synk.get_value(rank, w), rows)
    synk.all_gather(w)
    check_values(w, [total] * N_RANKS)


def test_gpu_gather_accepts_different_shapes(fork):
    fork(N_RANKS)
    w, _ = make_filled_variable("float32")
    parts = [np.arange(6 * n, dtype="float32").reshape(2 * n, 3) for n in range(1, 1 + N_RANKS)]
    for rank, part in enumerate(parts):
        synk.set_value(rank, w, part)
    for part, expected in zip(synk.gather(w), parts, strict=True):
        np.testing.assert_array_equal(part, expected)
    np.testing.assert_array_equal(synk.gather(w, nd_up=0), np.concatenate(parts))
    with pytest.raises(ValueError, match="same shape on all ranks"):
        synk.all_reduce(w)
    synk.all_gather(w)
    check_values(w, [np.concatenate(parts)] * N_RANKS)


def test_collectives_leave_results_on_the_gpu(fork):
    fork(N_RANKS)
    w, _ = make_filled_variable("float32")
    for value in (synk.gather(w), synk.gather(w, nd_up=0), synk.reduce(w, "sum", in_place=False)):
        assert GPU_DEVICE.owns(value) and GPU_DEVICE.is_on_gpu


def test_collectives_mix_host_and_gpu_variables(fork):
    fork(N_RANKS)
    x = T.dvector("x")
    host_options = {"target": "cpu"} if NAME == "theano" else {}
    host_variable, gpu_variable = shared(np.zeros(2), "here", **host_options), shared(np.zeros(2), "there")
    f = synk.function([x], updates=[(host_variable, host_variable + x.sum())], mode=INTERPRETED)
    g = synk.function([x], updates=[(gpu_variable, gpu_variable + x.sum())])
    value = np.arange(1.0, 1 + N_RANKS)
    f(value), g(value)
    assert isinstance(host_variable.container.storage[0], np.ndarray) and GPU_DEVICE.owns(
        gpu_variable.container.storage[0]
    )
    for gathered in synk.gather([host_variable, gpu_variable]):
        np.testing.assert_array_equal(gathered, np.stack([value, value], 1))
    synk.all_reduce([gpu_variable, host_variable], "sum")
    f(value), g(value)
    for gathered in synk.gather([host_variable, gpu_variable], nd_up=0):
        np.testing.assert_array_equal(gathered, np.repeat(value.sum() + value, 2))
    gpu_variable.set_value(np.full(2, 9.0))  # on the host, in the master alone
    synk.broadcast([host_variable, gpu_variable])
    np.testing.assert_array_equal(synk.get_value(1, gpu_variable), [9, 9])
    np.testing.assert_array_equal(synk.get_value(1, host_variable), [value.sum() + 1] * 2)


def test_collectives_wait_for_preceding_updates(fork):
    fork(N_RANKS)
    start = RNG.normal(size=(1024, 1024))
    w, v = shared(start, "w"), shared(start, "v")

    def step(w):
        new = w
        for _ in range(6):
            new = T.tanh(T.dot(new, new) / 32)
        return new

    f = synk.function([], updates=[(w, step(w))])
    serial = function([], updates=[(v, step(v))])
    for _ in range(3):
        f()
        synk.all_reduce(w, "avg")
        serial()
    for rank in range(N_RANKS):
        np.testing.assert_allclose(synk.get_value(rank, w), v.get_value(), rtol=1e-6, atol=1e-9)


def test_get_value_is_fresh_after_a_collective(fork):
    # JAX caches host copies of arrays, and NCCL writes into their memory without its knowledge.
    fork(N_RANKS)
    w, values = make_filled_variable("float32")
    np.testing.assert_array_equal(np.asarray(w.get_value(borrow=True)), values[0])
    synk.all_reduce(w, "sum")
    np.testing.assert_array_equal(np.asarray(w.get_value(borrow=True)), sum(values))
    synk.reduce(w, "sum")
    np.testing.assert_array_equal(np.asarray(w.get_value(borrow=True)), N_RANKS * sum(values))


@needs_jax
def test_collectives_reuse_gpu_memory_safely(fork):
    fork(N_RANKS)
    w, values = make_filled_variable("float32")
    storage = w.container.storage
    for collective in (synk.all_reduce, synk.broadcast, synk.reduce):
        before = storage[0].unsafe_buffer_pointer()
        collective(w)
        assert storage[0].unsafe_buffer_pointer() == before
    borrowed = w.get_value(borrow=True)
    synk.all_reduce(w, "sum")
    # The borrowed array is still readable; its values are undefined, since a collective may write into its memory.
    assert np.asarray(borrowed).shape == (3, 5)
    np.testing.assert_allclose(np.asarray(w.get_value()), sum(values), rtol=1e-6)


@pytest.mark.parametrize("nccl", [True, False])
@pytest.mark.parametrize("op", ["sum", "prod", "max", "min", "avg"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_gpu_collectives_keep_nan(fork, dtype, op, nccl):
    # The C functions fmax and fmin, and NCCL's kernels, return the other operand.
    fork(N_RANKS)
    w, values = make_filled_variable(dtype, (1001,))
    values[0][[3, 500]], values[1][[7, 500]] = np.nan, np.nan
    expected = np.zeros(1001, bool)
    expected[[3, 7, 500]] = True

    def assign():
        for rank, value in enumerate(values):
            synk.set_value(rank, w, value)

    assign()
    np.testing.assert_array_equal(np.isnan(np.asarray(synk.reduce(w, op, in_place=False, nccl=nccl))), expected)
    synk.all_reduce(w, op, nccl=nccl)
    for rank in range(N_RANKS):
        np.testing.assert_array_equal(np.isnan(synk.get_value(rank, w)), expected)
    assign()
    synk.reduce_scatter(w, op, nccl=nccl)
    for rank, part in enumerate(np.array_split(expected, N_RANKS)):
        np.testing.assert_array_equal(np.isnan(synk.get_value(rank, w)), part)


@pytest.mark.parametrize("op", ["max", "min"])
def test_outputs_on_gpus_keep_nan(fork, op):
    fork(N_RANKS)
    x = T.dvector("x")
    f = synk.function([x], [(T.sqrt(x).max(), op), (x.sum(), op)])
    for value in (np.array([-1.0, -1.0, 4.0, 9.0]), np.array([4.0, 9.0, -1.0, -1.0])):
        outputs, sums = f(value), [part.sum() for part in np.array_split(value, N_RANKS)]
        assert np.isnan(float(outputs[0]))
        assert float(outputs[1]) == {"max": max, "min": min}[op](sums)
