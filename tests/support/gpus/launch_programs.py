"""Programs on fake GPUs that print the all-reduces of each launch; each needs a process of its own."""

import numpy as np
import pytensor
import pytensor.tensor as T
from cuda.core import XLA_STREAM
from nccl import wire
from nccl.bindings import nccl

import synkhronos as synk
from synkhronos import exchange_rules
from synkhronos.engines import xla
from synkhronos.engines.xla.executable import Executable
from synkhronos.training import make_train_function, make_train_function_serial, make_trainer
from synkhronos.training.trainer.local_batch_loop import LocalBatchLoop
from synkhronos.training.updates import momentum, sgd

_collectives = []


def fork_and_record(n):
    """Fork ranks on fake GPUs, and record the master's all-reduces."""
    all_reduce = nccl.all_reduce

    def record_all_reduce(source, target, count, dtype, op, handle, stream):
        all_reduce(source, target, count, dtype, op, handle, stream)
        name = "all-reduced" if stream in (None, XLA_STREAM) else "started"  # None: XLA on a CPU has no streams
        _collectives.append(f"{name} {count} of {np.dtype(wire.DTYPES[dtype]).name};")

    nccl.all_reduce = record_all_reduce
    pytensor.config.floatX = "float32"
    synk.fork(n)


def take_collectives():
    """Return descriptions of the master's all-reduces since the last call."""
    descriptions = " ".join(_collectives)
    _collectives.clear()
    return descriptions


def train_by_rules():
    """Train by three exchange rules; print the steps of each launch and the collectives of each rule."""
    fork_and_record(2)
    launches = []
    get_repeated = Executable.get_repeated
    Executable.get_repeated = lambda self, n_repeats: launches.append(n_repeats) or get_repeated(self, n_repeats)
    # XLA on the CPU would take one step per launch; a loop sets this attribute, which then has no effect.
    LocalBatchLoop.max_steps_per_launch = property(lambda self: 64, lambda self, value: None)
    rng = np.random.default_rng(0)
    x_data = rng.normal(size=(120, 30)).astype("float32")
    y_data = x_data.sum(axis=1)
    losses = []
    for rule in (
        exchange_rules.LocalSGD(5),
        exchange_rules.LocalSGD(5, precision="bfloat16"),
        exchange_rules.DiLoCo(5, 1.0, 0.0),
    ):
        x, y, w = T.fmatrix("x"), T.fvector("y"), pytensor.shared(np.zeros(30, "float32"), "w")
        trainer = make_trainer(((x.dot(w) - y) ** 2).mean(), [w], x, y, momentum, rule, 0.01)
        reports = list(trainer.epochs(x_data, y_data, batch_size=4, epochs=3))
        losses.append(reports[-1].loss)
        print(launches, take_collectives(), sep="; ", flush=True)
        launches.clear()
    assert losses[0] < 3 and abs(losses[0] - losses[2]) < 1e-3 and abs(losses[0] - losses[1]) < 0.05, losses
    synk.close()


def make_model(make, **options):
    """Return a training function of a small network, its parameters, and a running average of its inputs."""
    x, y, rng = T.fmatrix("x"), T.fvector("y"), np.random.default_rng(1)
    ws = [pytensor.shared(rng.normal(size=shape).astype("float32") / 6) for shape in ((30, 40), (40, 40), (40,))]
    loss = ((T.tanh(T.tanh(x.dot(ws[0])).dot(ws[1])).dot(ws[2]) - y) ** 2).mean()
    average = pytensor.shared(np.zeros(30, "float32"))
    extra = [(average, np.float32(0.5) * (average + x.mean(axis=0)))]
    return make(loss, ws, x, y, sgd, extra_updates=extra, learning_rate=np.float32(0.1), **options), ws, average


def train_in_one_launch():
    """Train as one process does, in two precisions, then make four collectives; print the collectives of each."""
    xla.traced_exchange.MIN_CHUNK_NBYTES = xla.traced_exchange.MIN_CHUNK_NBYTES_OF_HOSTS = 1000
    fork_and_record(3)
    rng = np.random.default_rng(0)
    data = rng.normal(size=(60, 30)).astype("float32"), rng.normal(size=60).astype("float32")
    for exchange in (None, "bfloat16"):
        train, ws, average = make_model(make_train_function, exchange_dtype=exchange)
        train_serial, serial_ws, serial_average = make_model(make_train_function_serial)
        for i in range(3):
            rows = rng.permutation(60)[: 50 + i]
            np.testing.assert_allclose(float(train(*data, rows)), float(train_serial(*data, rows)), rtol=1e-2)
        for w, serial_w in zip(ws, serial_ws, strict=True):
            by_rank = synk.gather(w, nccl=False)
            assert (by_rank == by_rank[0]).all()
            np.testing.assert_allclose(by_rank[0], serial_w.get_value(), atol=1e-2 if exchange else 1e-5)
        np.testing.assert_allclose(average.get_value(), serial_average.get_value(), atol=1e-6)
        print(take_collectives(), flush=True)
    w = pytensor.shared(np.ones(3, "float32"), "w")
    f = synk.function([], [], updates=[(w, w + 1)])
    f()
    for _ in range(4):
        synk.all_reduce(w, "sum")
    print(synk.gather(w, nccl=False).tolist(), take_collectives())
    synk.close()
