"""A user-defined reduction, one row of the table, works wherever ranks reduce values; which ones JAX and NCCL have."""

import numpy as np
import pytest
from library import DEVICE, GPU_DEVICE, shared, tensor

import synkhronos as synk
from synkhronos.devices import JAX, NUMPY, PYGPU
from synkhronos.devices.reduce_op import REDUCE_OPS, ReduceOp, list_collective_ops, list_metric_ops
from synkhronos.engines.accumulator import Accumulator
from synkhronos.training import make_trainer
from synkhronos.training.updates import sgd

# row begins
ROW = {"logaddexp": ReduceOp(np.logaddexp, unsupported_kinds="biuc")}
# row ends

on_host = pytest.mark.skipif(DEVICE != "host", reason="where XLA was used, workers start anew and lack the row")

X = np.random.default_rng(0).normal(size=(13, 3))
LARGE = 3_000  # elements, which are streamed


@pytest.fixture
def logaddexp_op(monkeypatch):
    """Add the reduction to the table of reductions."""
    for name, op in ROW.items():
        monkeypatch.setitem(REDUCE_OPS, name, op)


def all_reduce_rank_numbers(context, group=False):
    way = context.group(list(range(context.size))) if group else context
    return np.asarray(way.all_reduce(np.full(3, float(context.number)), "logaddexp"))


@on_host
@pytest.mark.parametrize("n", [1, 2, 3])
def test_own_reduction_is_an_op_of_functions(logaddexp_op, fork, n):
    fork(n)
    x = tensor.dmatrix("x")
    total = tensor.log(tensor.exp(x).sum(axis=0))
    f = synk.function(
        [x], [(total, "logaddexp"), (total, "c_logaddexp"), (total + tensor.zeros((LARGE, 3)), "logaddexp")]
    )
    expected = np.logaddexp.reduce(X, axis=0)
    for num_slices in (1, 3):
        for result in f(X, num_slices=num_slices):
            np.testing.assert_allclose(result, np.broadcast_to(expected, np.shape(result)), rtol=1e-12)


@on_host
def test_own_reduction_is_an_op_of_updates(logaddexp_op, two_ranks_per_test):
    x, s = tensor.dmatrix("x"), shared(np.zeros(3), "s")
    total = tensor.log(tensor.exp(x).sum(axis=0))
    synk.function([x], updates=[(s, total, "logaddexp")])(X, num_slices=3)
    synk.all_reduce(s, "logaddexp")
    np.testing.assert_allclose(synk.gather(s), [np.logaddexp.reduce(X, axis=0)] * 2, rtol=1e-12)


@on_host
@pytest.mark.parametrize("size", [3, LARGE])
def test_own_reduction_is_an_op_of_collectives(logaddexp_op, fork, size):
    n = fork(2)
    s = shared(np.zeros(size), "s")
    synk.function([], updates=[(s, s)])
    for r in range(n):
        synk.set_value(r, s, np.full(size, float(r)))
    expected = np.full(size, np.logaddexp(0, 1))
    np.testing.assert_allclose(synk.reduce(s, "logaddexp", in_place=False), expected, rtol=1e-12)
    synk.all_reduce(s, "logaddexp")
    np.testing.assert_allclose(synk.gather(s), [expected] * n, rtol=1e-12)


@on_host
def test_own_reduction_is_an_op_of_metrics(logaddexp_op, two_ranks_per_test):
    x, w = tensor.dmatrix("x"), shared(np.zeros(3), "w")
    validate = {"log": (tensor.log(tensor.exp(x).sum()), "logaddexp")}
    trainer = make_trainer(tensor.dot(x, w).mean(), [w], x, [], sgd, learning_rate=0.1, validate=validate)
    (report,) = trainer.epochs(X, [], batch_size=2, epochs=1, valid=(X, []))
    np.testing.assert_allclose(report.validation["log"], np.logaddexp.reduce(X, axis=None), rtol=1e-12)


def reduce_batches(op, batches):
    total = Accumulator(op)
    for batch in batches:
        part = Accumulator(op)
        for value in batch:
            part.add(np.float64(value), 1)
        total.add(part.get_result(), len(batch))
    return total.get_result()


@pytest.mark.parametrize("name", [*REDUCE_OPS, *ROW])
def test_ops_of_metrics_do_not_depend_on_the_batches(logaddexp_op, name):
    whole, batched = (reduce_batches(name, batches) for batches in ([[1, 2, 4, 8, 16]], [[1, 2], [4, 8], [16]]))
    assert (name in list_metric_ops()) == (np.ndim(whole) == 0 and np.isclose(whole, batched))


@on_host
@pytest.mark.parametrize("group", [False, True])
def test_own_reduction_is_an_op_of_programs(logaddexp_op, group, two_ranks_per_test):
    np.testing.assert_allclose(
        synk.run(all_reduce_rank_numbers, group=group), np.full((2, 3), np.logaddexp(0, 1)), rtol=1e-12
    )


@on_host
def test_own_reduction_is_listed_in_error_messages(logaddexp_op, two_ranks_per_test):
    i = shared(np.zeros(3, "int64"), "i")
    synk.function([], updates=[(i, i)])
    *others, last = map(repr, list_collective_ops(np.dtype("int64")))
    choices = f"choose {', '.join(others)} or {last}"
    assert "'logaddexp'" not in choices and "'max'" in choices
    with pytest.raises(ValueError, match=f"^op: 'logaddexp' of 'i' is not defined for dtype int64; {choices}"):
        synk.all_reduce(i, "logaddexp")
    with pytest.raises(ValueError, match="^outputs: op 'logaddexp' of output 0 is not defined for dtype int64"):
        synk.function([], (i, "logaddexp"))
    for wrong in (lambda: synk.reduce(i, "logsum"), lambda: synk.function([], (i, "logsum"))):
        with pytest.raises(ValueError, match="'logaddexp'.* got 'logsum'"):
            wrong()
    with pytest.raises(ValueError, match="^op: expected one of .* got 'mean'"):
        synk.reduce(i, "mean")


def test_own_reduction_missing_on_a_device_is_named(logaddexp_op):
    x = np.ones(2)
    np.testing.assert_allclose(NUMPY.reduce_pair(ROW["logaddexp"], x.copy(), x), np.logaddexp(1, 1))
    with pytest.raises(NotImplementedError, match="libgpuarray has no kernel for 'logaddexp'"):
        PYGPU.reduce_pair(ROW["logaddexp"], None, None)


@pytest.mark.skipif(DEVICE == "host" or GPU_DEVICE is not JAX, reason="starts XLA")
def test_reductions_exist_in_jax_numpy():
    x = JAX.as_array(np.ones(2))
    np.testing.assert_allclose(JAX.reduce_pair(ROW["logaddexp"], x, x), np.logaddexp(1, 1))
    with pytest.raises(NotImplementedError, match="jax.numpy has no 'scale_by_power"):
        JAX.reduce_pair(ReduceOp(np.frompyfunc(scale_by_power, 2, 1)), x, x)


def scale_by_power(x, y):
    return x


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "uint64"])
def test_nccl_reduces_only_what_it_reduces_as_numpy(dtype, monkeypatch):
    # tests/devices/test_gpu_collectives.py shows NaNs on GPUs.
    monkeypatch.setattr(JAX, "_gpu", "0")
    supported = {op for op in REDUCE_OPS if JAX.can_transfer_directly(np.dtype(dtype), op)}
    assert supported == {"avg", "sum", "prod"} | ({"min", "max"} if dtype[0] in "iu" else set())
    assert not JAX.can_transfer_directly(np.dtype("int16"), "sum")
