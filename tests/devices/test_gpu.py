"""Tests on GPUs: rows copied by the GPU, NCCL, and failures during both.

Run by ``python3 run.py test --device gpu --here`` on a machine with two GPUs or more, with PyTensor or with Theano.
"""

import ctypes
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from library import ARRAYS, DEVICE, INTERPRETED, NAME, function, read_results, shared
from library import tensor as T

import synkhronos as synk
from synkhronos import ranks
from synkhronos.devices import JAX
from synkhronos.devices.cuda.nccl import NcclCommunicator
from synkhronos.engines.lazy import Result
from synkhronos.engines.xla import trace
from synkhronos.engines.xla.executable import Executable
from synkhronos.ranks import Command
from synkhronos.training import make_train_function, make_train_function_serial, updates

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE != "gpu", reason="needs GPUs")]

of_real_gpus = pytest.mark.skipif("PRETENDED_GPUS" in os.environ, reason="about what pretended GPUs lack")
of_jax = pytest.mark.skipif(NAME != "pytensor", reason="about JAX arrays")

RNG = np.random.default_rng(11)


def program(code, **environment):
    """Run a program in a new process; return its output."""
    path = os.pathsep.join([str(Path(synk.__file__).parent.parent), *sys.path])
    variables = {name: value for name, value in os.environ.items() if name != "JAX_DEFAULT_MATMUL_PRECISION"}
    head = f"import numpy as np, synkhronos as synk, {NAME} as package, {NAME}.tensor as T"
    done = subprocess.run(
        [sys.executable, "-c", f"{head}\n{textwrap.dedent(code)}"],
        env={**variables, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- which rank has which GPU ----------------------------------------------------------------------------------


class GetGpu(Command):
    """Command that returns the GPU of each rank."""

    def run(self, rank):
        from cuda.core import Device

        ARRAYS.staging.set_current()
        return rank.all_gather((ARRAYS.owns(ARRAYS.empty((1,), np.dtype("float32"))), str(Device(0).pci_bus_id)))


def places():
    return ranks.get_session().run(GetGpu())


@pytest.mark.new_ranks
def test_fork_gives_each_rank_a_gpu(fork):
    fork(2)
    first = places()
    assert all(is_on_gpu for is_on_gpu, _ in first)
    assert len({bus for _, bus in first}) == 2
    synk.close()
    fork(2, master_rank=1)  # the master cannot change its GPU
    assert places() == first[::-1]


def test_fork_makes_a_rank_for_each_gpu():
    printed = program("""
        n = synk.fork()
        x, w = T.dvector("x"), package.shared(np.ones(3), "w")
        f = synk.function([x], (x.sum(), "sum"), updates=[(w, w * 2)])
        print(n == synk.get_n_gpu(), float(f(np.ones(12))))
        synk.all_reduce(w)
        from synkhronos.devices import get_array_device
        print(get_array_device(w.container.storage[0]).name, get_array_device(w.container.storage[0]).is_on_gpu)
        synk.close()
    """)
    assert printed.split() == ["True", "12.0", ARRAYS.name, "True"]


@of_jax
def test_fork_with_use_gpu_false_uses_no_gpu():
    printed = program("""
        synk.fork(2, use_gpu=False)
        x = T.dvector("x")
        print(float(synk.function([x], (x.sum(), "sum"), mode="JAX")(np.ones(4))))
        import jax
        print(jax.devices()[0].platform)
        synk.close()
    """)
    assert printed.split() == ["4.0", "cpu"]


def test_cuda_visible_devices_order_is_kept():
    printed = program(
        """
        import os
        synk.fork(2)
        from cuda.core import Device
        Device(0).set_current()
        mine = str(Device(0).pci_bus_id)
        synk.close()
        import pynvml
        pynvml.nvmlInit()
        second = pynvml.nvmlDeviceGetPciInfo(pynvml.nvmlDeviceGetHandleByIndex(1)).busId
        second = second.decode() if isinstance(second, bytes) else second
        print(mine.lower()[-10:] == second.lower()[-10:], os.environ["CUDA_VISIBLE_DEVICES"])
        """,
        CUDA_VISIBLE_DEVICES="1,0",
        CUDA_DEVICE_ORDER="PCI_BUS_ID",
    )
    assert printed.split() == ["True", "1,0"]


def test_fork_refuses_cuda_in_use():
    printed = program("""
        from cuda.core import Device
        Device(0).set_current()
        try:
            synk.fork(2)
        except RuntimeError as error:
            print(error)
        synk.fork(2, use_gpu=False)
        synk.close()
    """)
    assert "has started CUDA already" in printed


def test_fork_refuses_more_ranks_than_gpus():
    with pytest.raises(ValueError, match="each rank needs one"):
        synk.fork(synk.get_n_gpu() + 1)


# -- rows ------------------------------------------------------------------------------------------------------

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
def test_rows_are_picked_by_the_gpu(fork, name):
    fork(2)
    batch = BATCHES[name]
    check_rows(RNG.normal(size=(37, 5)), [batch])
    check_rows(RNG.normal(size=37).astype("float32"), [batch])


@pytest.mark.parametrize("width", range(1, 18))
def test_gpu_picks_rows_of_any_width(fork, width):
    # The kernel copies units of 16, 8, 4, 2 bytes or 1, depending on the alignment of width and addresses.
    fork(2)
    check_rows(RNG.integers(0, 256, (37, width)).astype("uint8"), [BATCHES["indexes"], BATCHES["strided"]])


@pytest.mark.parametrize(
    "dtype",
    [
        "bool",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "int64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    ],
)
def test_gpu_picks_rows_of_any_dtype(fork, dtype):
    fork(2)
    check_rows((RNG.normal(size=(37, 3)) * 9).astype(dtype), [None, *map(BATCHES.get, ("indexes", "reversed", "none"))])


@pytest.mark.parametrize("shape", [(37, 0), (37, 2, 0), (0, 3), (37, 2, 3, 4), (37, 1000)])
def test_gpu_picks_rows_of_any_shape(fork, shape):
    fork(2)
    value = RNG.normal(size=shape)
    check_rows(value, [None, [], *([] if not shape[0] else [BATCHES["indexes"], BATCHES["strided"]])])


@pytest.mark.parametrize(
    "value", [2.5, np.float32(3), np.arange(3.0), np.zeros((0, 2)), np.array(True), np.float16(1.5)]
)
def test_bcast_inputs_reach_every_gpu(fork, value):
    fork(2)
    value = np.asarray(value)
    b = T.TensorType(str(value.dtype), (None,) * value.ndim)("b")
    f = synk.function([], (b, None), bcast_inputs=[b])
    for given in (value, synk.data(value)):
        result = f(given)
        np.testing.assert_array_equal(result, value)
        assert result.dtype == value.dtype and result.shape == value.shape


def test_minibatch_views_are_moved_to_gpus(fork):
    fork(2)
    x, y = T.matrix("x", dtype="uint8"), T.dmatrix("y")
    value, other = RNG.integers(0, 256, (37, 3)).astype("uint8"), RNG.normal(size=(37, 2))
    f = synk.function([x, y], [(x, "gather"), (y, "gather")])
    rows = [9, 5, 30, 5, 12]
    for mini, batch in ((value[7:], slice(7, 20, 3)), (value[rows], rows)):
        results = f(synk.data(mini, minibatch=True), other, batch=batch)
        for result, expected in zip(results, (value, other), strict=True):
            np.testing.assert_array_equal(result, expected[batch])


def test_gpu_picks_rows_of_several_inputs_by_many_indexes(fork):
    # More than the initial page-locked memory, and more than it has after growing once.
    fork(2)
    x, y = T.vector("x", dtype="int32"), T.matrix("y", dtype="uint8")
    f = synk.function([x, y], [(x, "gather"), (y, "gather")])
    value, other = RNG.integers(0, 99, 1000).astype("int32"), RNG.integers(0, 256, (1000, 3)).astype("uint8")
    data, more = synk.data(value), synk.data(other)
    for n in (100, 400_000, 400_000, 100, 900_000, 50):
        rows = RNG.integers(-1000, 1000, n)
        first, second = f(data, more, batch=rows)
        np.testing.assert_array_equal(first, value[rows])
        np.testing.assert_array_equal(second, other[rows])


def test_num_slices_and_sliceable_shareds_work_on_gpus(fork):
    fork(2)
    x, s = T.dvector("x"), shared(np.zeros(1), "s")
    f = synk.function([x], (x * s, "gather"), sliceable_shareds=[s])
    synk.distribute()
    synk.scatter(s, np.arange(8.0))
    data = synk.data(np.arange(20.0))
    np.testing.assert_array_equal(f(data, batch=slice(0, 8)), np.arange(8.0) ** 2)
    np.testing.assert_array_equal(f(data, batch=[1, 2, 3, 4], batch_s=[[3, 0], [1, 1]]), [3, 0, 15, 20])
    np.testing.assert_array_equal(f(data, batch=[1, 2, 3, 4], batch_s=[[3, 0], [1, 1]], num_slices=2), [3, 0, 15, 20])


@of_real_gpus  # there a call waits for the end of the previous one
def test_transfer_buffers_are_not_refilled_too_early(fork):
    # The GPU computes a call for longer than the next one takes to prepare.
    fork(2)
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
    for i, (rows, of_data, of_array) in enumerate(calls):
        np.testing.assert_array_equal(of_data, value[rows, 0])
        np.testing.assert_array_equal(of_array, value[:2048, 0] + i)


def test_data_can_be_changed_after_a_call_returns(fork):
    fork(2)
    x = T.dvector("x")
    f = synk.function([x], (x, "gather"))
    data = synk.data(np.zeros(1 << 20))
    results = []
    for i in range(10):
        data[:] = i
        results.append(f(data))
    for i, result in enumerate(results):
        assert (result.min(), result.max()) == (i, i)


# -- collectives -----------------------------------------------------------------------------------------------

DTYPES = ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"]
LACKING = ["bool", "int16", "uint16", "complex64", "complex128"]
OPS = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}


def make_filled_variable(dtype, shape=(3, 5)):
    """Return a variable with different values on two ranks, and the two values."""
    values = [np.asarray(RNG.integers(0, 5, shape)).astype(dtype) for _ in range(2)]
    w = shared(values[0], "w")
    read_results(synk.function([], (w.sum(), None))())
    for rank, value in enumerate(values):
        synk.set_value(rank, w, value)
    return w, values


def check_held(w, expected):
    for rank in range(2):
        held = synk.get_value(rank, w)
        np.testing.assert_array_equal(held, expected[rank])
        assert held.dtype == expected[rank].dtype


@pytest.mark.parametrize("nccl", [True, False])
@pytest.mark.parametrize("dtype", DTYPES + LACKING)
def test_gpu_collectives_accept_every_dtype(fork, dtype, nccl):
    fork(2)
    w, values = make_filled_variable(dtype)
    kind = np.dtype(dtype)
    for op, ufunc in OPS.items():
        if kind.kind == "c" and op in ("max", "min") or kind.kind == "b" and op == "sum":
            continue
        expected = ufunc(*values).astype(dtype)
        for rank, value in enumerate(values):
            synk.set_value(rank, w, value)
        np.testing.assert_array_equal(synk.reduce(w, op, in_place=False, nccl=nccl), expected)
        check_held(w, values)
        synk.all_reduce(w, op, nccl=nccl)
        check_held(w, [expected, expected])
    for rank, value in enumerate(values):
        synk.set_value(rank, w, value)
    if kind.kind in "fc":
        synk.reduce(w, "avg", nccl=nccl)
        np.testing.assert_allclose(np.asarray(w.get_value()), (values[0] + values[1]) / 2)
        synk.set_value(0, w, values[0])
    np.testing.assert_array_equal(synk.gather(w, nccl=nccl), np.stack(values))
    np.testing.assert_array_equal(synk.gather(w, nd_up=0, nccl=nccl), np.concatenate(values))
    synk.broadcast(w, nccl=nccl)
    check_held(w, [values[0]] * 2)
    synk.all_gather(w, nccl=nccl)
    check_held(w, [np.concatenate([values[0]] * 2)] * 2)
    if kind.kind not in "b":
        for rank, value in enumerate(values):
            synk.set_value(rank, w, value)
        synk.reduce_scatter(w, "sum", nccl=nccl)
        half = (len(values[0]) + 1) // 2
        total = values[0] + values[1]
        for rank, rows in enumerate((total[:half], total[half:])):
            np.testing.assert_allclose(synk.get_value(rank, w), rows)
    # Theano keeps complex numbers on the host.
    assert ARRAYS.owns(w.container.storage[0]) or NAME == "theano" and kind.kind == "c"


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (1 << 22,)])
def test_gpu_collectives_accept_any_size(fork, shape):
    fork(2)
    w, values = make_filled_variable("float32", shape)
    np.testing.assert_array_equal(synk.gather(w), np.stack(values))
    synk.all_reduce(w, "sum")
    check_held(w, [values[0] + values[1]] * 2)
    synk.broadcast(w)


@pytest.mark.parametrize("n_rows", [0, 1, 4, 1 << 20, (1 << 20) + 1])
def test_gpu_reduce_scatter_accepts_any_size(fork, n_rows):
    fork(2)
    w, values = make_filled_variable("float32", (n_rows,))
    total, half = values[0] + values[1], (n_rows + 1) // 2
    synk.reduce_scatter(w, "sum")
    for rank, rows in enumerate((total[:half], total[half:])):
        np.testing.assert_array_equal(synk.get_value(rank, w), rows)
    synk.all_gather(w)
    check_held(w, [total] * 2)


def test_gpu_gather_accepts_different_shapes(fork):
    fork(2)
    w, _ = make_filled_variable("float32")
    parts = [np.arange(6, dtype="float32").reshape(2, 3), np.arange(12, dtype="float32").reshape(4, 3)]
    for rank, part in enumerate(parts):
        synk.set_value(rank, w, part)
    for part, expected in zip(synk.gather(w), parts, strict=True):
        np.testing.assert_array_equal(part, expected)
    np.testing.assert_array_equal(synk.gather(w, nd_up=0), np.concatenate(parts))
    with pytest.raises(ValueError, match="same shape on all ranks"):
        synk.all_reduce(w)
    synk.all_gather(w)
    check_held(w, [np.concatenate(parts)] * 2)


def test_collectives_leave_results_on_the_gpu(fork):
    fork(2)
    w, _ = make_filled_variable("float32")
    for value in (synk.gather(w), synk.gather(w, nd_up=0), synk.reduce(w, "sum", in_place=False)):
        assert ARRAYS.owns(value) and ARRAYS.is_on_gpu


def test_collectives_mix_host_and_gpu_variables(fork):
    fork(2)
    x = T.dvector("x")
    on_host = {"target": "cpu"} if NAME == "theano" else {}
    host_variable, gpu_variable = shared(np.zeros(2), "here", **on_host), shared(np.zeros(2), "there")
    f = synk.function([x], updates=[(host_variable, host_variable + x.sum())], mode=INTERPRETED)
    g = synk.function([x], updates=[(gpu_variable, gpu_variable + x.sum())])
    value = np.array([1.0, 2.0])
    f(value), g(value)
    assert isinstance(host_variable.container.storage[0], np.ndarray) and ARRAYS.owns(gpu_variable.container.storage[0])
    for gathered in synk.gather([host_variable, gpu_variable]):
        np.testing.assert_array_equal(gathered, [[1, 1], [2, 2]])
    synk.all_reduce([gpu_variable, host_variable], "sum")
    f(value), g(value)
    for gathered in synk.gather([host_variable, gpu_variable], nd_up=0):
        np.testing.assert_array_equal(gathered, [4, 4, 5, 5])
    gpu_variable.set_value(np.full(2, 9.0))  # on the host, in the master alone
    synk.broadcast([host_variable, gpu_variable])
    np.testing.assert_array_equal(synk.get_value(1, gpu_variable), [9, 9])
    np.testing.assert_array_equal(synk.get_value(1, host_variable), [4, 4])


def test_collectives_wait_for_preceding_updates(fork):
    fork(2)
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
    for rank in range(2):
        np.testing.assert_allclose(synk.get_value(rank, w), v.get_value(), rtol=1e-6, atol=1e-9)


def test_get_value_is_fresh_after_a_collective(fork):
    # JAX caches host copies of arrays, and NCCL writes into their memory without its knowledge.
    fork(2)
    w, values = make_filled_variable("float32")
    np.testing.assert_array_equal(np.asarray(w.get_value(borrow=True)), values[0])
    synk.all_reduce(w, "sum")
    np.testing.assert_array_equal(np.asarray(w.get_value(borrow=True)), values[0] + values[1])
    synk.reduce(w, "sum")
    np.testing.assert_array_equal(np.asarray(w.get_value(borrow=True)), 2 * (values[0] + values[1]))


# -- failures --------------------------------------------------------------------------------------------------


class SkipAllReduce(Command):
    """Command of an all_reduce that one rank never starts."""

    def __init__(self, action, failing_rank):
        self.action, self.failing_rank = action, failing_rank

    def run(self, rank):
        communicator = ARRAYS.get_communicator(rank)
        communicator.connect(rank.all_gather(communicator.generation))
        array = ARRAYS.from_host(np.ones(1 << 20, "float32"))
        if rank.number == self.failing_rank:
            time.sleep(0.1)  # the other ranks have started it
            DEEDS[self.action]()
        communicator.all_reduce(array, "sum")


class ExitWithPending(SkipAllReduce):
    """Command whose all_reduce is still pending at its end, as one rank exits instead of starting it."""

    def run(self, rank):
        communicator = ARRAYS.get_communicator(rank)
        communicator.connect(rank.all_gather(communicator.generation))
        array = ARRAYS.from_host(np.ones(1 << 20, "float32"))
        if rank.number == self.failing_rank:
            threading.Timer(0.5, DEEDS[self.action]).start()
            return None
        communicator.all_reduce(array, "sum")
        return ARRAYS.rewrap(array)


class FailInBlocking(SkipAllReduce):
    """Command of a blocking collective that one rank never starts, as it fails or waits.

    The other rank can't finish without it; except with "sent" and "given", where the other sends, and may finish.
    """

    def __init__(self, collective, action):
        super().__init__(action, 1)
        self.collective = collective

    def run(self, rank):
        communicator, layout = ARRAYS.get_communicator(rank), ((1 << 20,), np.dtype(np.float32))
        communicator.connect(rank.all_gather(communicator.generation))
        array, output = ARRAYS.from_host(np.ones(*layout)), ARRAYS.empty(*layout)
        if rank.number == self.failing_rank:
            time.sleep(0.1)  # the other rank has started it
            while self.action == "wait":
                rank.check_cancelled()
                time.sleep(0.01)
            DEEDS[self.action]()
        elif self.action == "wait":
            threading.Timer(0.5, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        if self.collective in ("broadcast", "sent"):
            communicator.broadcast(
                array, self.failing_rank if self.collective == "broadcast" else 1 - self.failing_rank
            )
        elif self.collective == "given":
            out = output if rank.number == self.failing_rank else None
            communicator.reduce(array, "sum", self.failing_rank, out, layout, range(rank.size))
        elif self.collective == "reduce":
            communicator.reduce(array, "sum", rank.root, output if rank.is_master else None, layout, range(rank.size))
        else:
            communicator.all_gather(array, [layout] * rank.size, [ARRAYS.slice_items(output, 0, layout[0])] * rank.size)


#: Seconds in which a process ends that has used a GPU: one or two, or more on a busy processor.
DEATH = 5


def fail():
    raise ArithmeticError("the sum is odd")


DEEDS = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "exit": lambda: os._exit(3),
    "raise": fail,
}


def check_works():
    """Check the results of calls and collectives."""
    x = T.dvector("x")
    w = shared(np.ones(3), "w")
    f = synk.function([x], (x.sum(), "sum"), updates=[(w, w + x.sum())])
    assert f(np.array([1.0, 2.0])) == 3
    synk.all_reduce(w, "sum")
    np.testing.assert_array_equal(synk.gather(w), np.full((2, 3), 5.0))


@pytest.mark.new_ranks
@pytest.mark.parametrize(
    ("action", "words"), [("SIGKILL", "killed by SIGKILL"), ("SIGSEGV", "SIGSEGV"), ("exit", "code 3")]
)
def test_death_inside_a_collective_is_noticed(fork, action, words):
    fork(2)
    check_works()
    start = time.monotonic()
    with pytest.raises(synk.WorkerError, match=words):
        ranks.get_session().run(SkipAllReduce(action, 1))
    assert time.monotonic() - start < DEATH
    with pytest.raises(RuntimeError, match="fork"):
        synk.distribute()
    fork(2)
    check_works()


@of_real_gpus  # pretended GPUs have no pending collectives at the end of a command
@pytest.mark.new_ranks
def test_death_is_noticed_while_the_master_waits_for_its_gpu(fork):
    fork(2)
    check_works()
    array = ranks.get_session().run(ExitWithPending("SIGKILL", 1))
    start = time.monotonic()
    with pytest.raises(synk.WorkerError, match="killed by SIGKILL"):
        np.asarray(array)
    assert time.monotonic() - start < DEATH
    del array
    fork(2)
    check_works()


@of_real_gpus
@pytest.mark.new_ranks
def test_close_completes_pending_collectives(fork):
    fork(2)
    w = shared(np.ones(1 << 25, "float32"), "w")
    synk.function([], updates=[(w, w * np.float32(2))])()
    for _ in range(10):
        synk.all_reduce(w, "sum")
    synk.close()
    np.testing.assert_array_equal(np.asarray(w.get_value()), np.float32(2048))


@of_jax
def test_collectives_reuse_gpu_memory_safely(fork):
    fork(2)
    w, values = make_filled_variable("float32")
    storage = w.container.storage
    for collective in (synk.all_reduce, synk.broadcast, synk.reduce):
        before = storage[0].unsafe_buffer_pointer()
        collective(w)
        assert storage[0].unsafe_buffer_pointer() == before
    held = w.get_value(borrow=True)
    synk.all_reduce(w, "sum")
    assert np.asarray(held).shape == (3, 5)


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_collectives_reconnect_after_an_exception(fork, failing_rank):
    fork(2)
    check_works()
    for _ in range(2):
        start = time.monotonic()
        with pytest.raises((synk.WorkerError, ArithmeticError), match="the sum is odd"):
            ranks.get_session().run(SkipAllReduce("raise", failing_rank))
        assert time.monotonic() - start < 2
        check_works()


@pytest.mark.parametrize("action", ["raise", "wait"])
@pytest.mark.parametrize("collective", ["broadcast", "reduce", "gather"])
def test_exception_aborts_a_pending_collective(fork, collective, action):
    fork(2)
    check_works()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt if action == "wait" else synk.WorkerError):
        ranks.get_session().run(FailInBlocking(collective, action))
    assert time.monotonic() - start < 2
    check_works()


@pytest.mark.parametrize("collective", ["sent", "given"])
def test_failed_collective_leaves_no_messages_for_later_ones(fork, collective):
    fork(2)
    check_works()
    with pytest.raises(synk.WorkerError):
        ranks.get_session().run(FailInBlocking(collective, "raise"))
    check_works()


@pytest.mark.new_ranks
@pytest.mark.parametrize("collective", ["broadcast", "reduce", "gather", "sent", "given"])
def test_death_in_a_pending_collective_is_noticed(fork, collective):
    fork(2)
    check_works()
    start = time.monotonic()
    with pytest.raises(synk.WorkerError, match="killed by SIGKILL"):
        ranks.get_session().run(FailInBlocking(collective, "SIGKILL"))
    assert time.monotonic() - start < DEATH


class FailBeforeCollectives(Command):
    """Command in which one rank fails before any collective."""

    def run(self, rank):
        if rank.number == 1:
            fail()


def test_exception_before_a_collective_keeps_connections(fork):
    fork(2)
    check_works()
    with pytest.raises(synk.WorkerError, match="the sum is odd"):
        ranks.get_session().run(FailBeforeCollectives())
    check_works()
    with pytest.raises(ValueError, match="same shape on all ranks"):
        w, _ = make_filled_variable("float32")
        synk.set_value(1, w, np.ones((1, 5), "float32"))
        synk.all_reduce(w)
    check_works()


# -- some ranks ------------------------------------------------------------------------------------------------


def is_on_gpu(value, expected):
    """Return whether a value is an array on the GPU with these elements."""
    return bool(ARRAYS.owns(value)) and np.array_equal(np.asarray(value), expected)


def all_reduce_in_groups(worker, members, dtype):
    """All-reduce arrays in a group, and in a group of one on each other rank; return the names of those with wrong results."""
    mine = members if worker.number in members else [worker.number]
    group = worker.group(mine)
    values = {r: (np.arange(1000) % 5 + r).astype(dtype) for r in mine}
    array, errors = ARRAYS.from_host(values[worker.number]), []
    for op, combine in (("sum", np.add), ("max", np.maximum), ("prod", np.multiply)):
        result, expected = group.all_reduce(array, op), combine.reduce(list(values.values()), dtype=dtype)
        if dtype == "int16":  # NCCL lacks this dtype: through host memory
            errors += [] if isinstance(result, np.ndarray) and np.array_equal(result, expected) else [op]
        elif not is_on_gpu(result, expected):
            errors.append(op)
    if not is_on_gpu(array, values[worker.number]):
        errors.append("the argument has changed")
    return errors


@pytest.mark.parametrize("dtype", ["float32", "int64", "int16"])
@pytest.mark.parametrize("members", [[0, 1], [1, 0], [1], [2, 0], [3, 1, 0]])
def test_groups_all_reduce_on_gpus(fork, members, dtype):
    n = max(2, max(members) + 1)
    fork(n)
    assert synk.run(all_reduce_in_groups, members, dtype) == [[]] * n


def send_around(worker, n, dtype):
    """Send arrays from rank to rank, with other messages and collectives between them; return the errors found."""
    to, source = (worker.number + 1) % worker.size, (worker.number - 1) % worker.size
    mine, its = ((np.arange(n) % 100 + r).astype(dtype) for r in (worker.number, source))
    array, errors = ARRAYS.from_host(mine), []
    for turn in range(2):
        worker.send(turn, to)
        if worker.number == 0:
            worker.send(array, to)
        if worker.receive(source) != turn or not is_on_gpu(worker.receive(source), its):
            errors.append(turn)
        if worker.number:
            worker.send(array, to)
        worker.all_reduce(array, "sum")
    if not is_on_gpu(array, mine):
        errors.append("the sent array has changed")
    return errors


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize(
    ("n", "dtype"), [pytest.param(10, "float32", marks=of_jax), (100_000, "float32"), (1 << 22, "float64")]
)
def test_send_and_receive_keep_order_between_gpus(fork, n_ranks, n, dtype):
    fork(n_ranks)
    assert synk.run(send_around, n, dtype) == [[]] * n_ranks


def send_every_dtype(worker):
    """Send an array of each dtype to the other rank, and back; return the arrays received on rank 0."""
    received = []
    for dtype in ("int8", "uint32", "int64", "float16", "float32", "bfloat16"):
        array = worker.receive(0) if worker.number else ARRAYS.as_array(np.arange(200_000) % 100).astype(dtype)
        worker.send(array, 1 - worker.number)
        if worker.number == 0:
            back = worker.receive(1)
            received.append((str(back.dtype), back.shape, is_on_gpu(back, np.asarray(array))))
    return received


@of_jax
def test_send_and_receive_accept_every_dtype_between_gpus(fork):
    fork(2)
    received = synk.run(send_every_dtype)[0]
    assert [dtype for dtype, *_ in received] == ["int8", "uint32", "int64", "float16", "float32", "bfloat16"]
    assert all(message[1:] == ((200_000,), True) for message in received)


def send_to_each_other(worker):
    worker.send(ARRAYS.from_host(np.ones(1 << 20, "float32")), 1 - worker.number)
    return worker.receive(1 - worker.number)


def test_send_deadlock_is_detected(fork):
    fork(2)
    with pytest.raises(
        (RuntimeError, synk.WorkerError),
        match="rank 0 waits until rank 1 receives a message, rank 1 waits until rank 0 receives a message",
    ):
        synk.run(send_to_each_other)
    assert synk.run(send_around, 100_000, "float32") == [[]] * 2


def fail_in_group_or_pair(worker, action, place, failing_rank):
    """Use a group and a pair of ranks twice; the second time, one rank fails instead of calling NCCL."""
    group, array = worker.group([0, 1]), ARRAYS.from_host(np.ones(1 << 20, "float32"))

    def communicate(where):
        if where == "group":
            group.all_reduce(array, "sum")
        elif (where == "send") == (worker.number == failing_rank):
            worker.send(array, 1 - worker.number)
        else:
            worker.receive(1 - worker.number)

    def leave(*_):
        time.sleep(0.2)  # the other rank has started it
        while action == "wait":
            worker.progress()
        DEEDS[action]()

    for where in ("group", "send", "receive"):
        communicate(where)
    if worker.number == failing_rank:
        over_nccl = ARRAYS.get_group(worker._rank, (0, 1))
        over_nccl.all_reduce = over_nccl.send = over_nccl.receive = leave
    elif action == "wait":
        threading.Timer(0.5, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    try:
        communicate(place)
    finally:
        if worker.number == failing_rank:
            del over_nccl.all_reduce, over_nccl.send, over_nccl.receive


def check_groups_work():
    check_works()
    assert synk.run(all_reduce_in_groups, [0, 1], "float32") == [[]] * 2
    assert synk.run(send_around, 100_000, "float32") == [[]] * 2


PLACES = ["group", "send", "receive"]


@pytest.mark.parametrize("failing_rank", [0, 1])
@pytest.mark.parametrize("place", PLACES)
def test_groups_reconnect_after_an_exception(fork, place, failing_rank):
    fork(2)
    check_groups_work()
    start = time.monotonic()
    with pytest.raises((synk.WorkerError, ArithmeticError), match="the sum is odd"):
        synk.run(fail_in_group_or_pair, "raise", place, failing_rank)
    assert time.monotonic() - start < DEATH
    check_groups_work()


@pytest.mark.parametrize("place", PLACES)
def test_interrupt_ends_group_collectives(fork, place):
    fork(2)
    check_groups_work()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        synk.run(fail_in_group_or_pair, "wait", place, 1)
    assert time.monotonic() - start < DEATH
    check_groups_work()


@pytest.mark.new_ranks
@pytest.mark.parametrize("place", PLACES)
def test_death_in_a_group_is_noticed(fork, place):
    fork(2)
    check_groups_work()
    start = time.monotonic()
    with pytest.raises(synk.WorkerError, match="killed by SIGKILL"):
        synk.run(fail_in_group_or_pair, "SIGKILL", place, 1)
    assert time.monotonic() - start < DEATH
    fork(2)
    check_groups_work()


def all_reduce_in_a_group(worker, action):
    """All-reduce in a group without end, while a rank outside of the group runs an action."""
    if worker.number == 2:
        time.sleep(0.5)
        DEEDS[action]()
    group, array = worker.group([0, 1]), ARRAYS.from_host(np.ones(1 << 20, "float32"))
    while True:
        group.all_reduce(array)


@pytest.mark.new_ranks
@pytest.mark.parametrize("action", ["raise", "SIGKILL"])
def test_group_notices_failures_of_other_ranks(fork, action):
    fork(3)
    assert synk.run(all_reduce_in_groups, [0, 1], "float32") == [[]] * 3
    start = time.monotonic()
    with pytest.raises(synk.WorkerError, match="the sum is odd|killed by SIGKILL"):
        synk.run(all_reduce_in_a_group, action)
    assert time.monotonic() - start < DEATH
    if action == "raise":
        assert synk.run(all_reduce_in_groups, [0, 1], "float32") == [[]] * 3


def abort_pair(worker, aborting_rank):
    """Abort the pair's connection on one rank; then rank 0 sends."""
    if worker.number == aborting_rank:
        ARRAYS.get_group(worker._rank, (0, 1))._connection.abort()
    array = ARRAYS.from_host(np.ones(1 << 20, "float32"))
    if worker.number == 0:
        worker.send(array, 1)
    else:
        return is_on_gpu(worker.receive(0), np.ones(1 << 20))


def test_pair_reconnects_after_one_rank_failed(fork):
    fork(2)
    assert synk.run(send_around, 100_000, "float32") == [[]] * 2
    assert synk.run(abort_pair, 0) == [None, True]
    with pytest.raises(synk.WorkerError, match="rank 1 has closed the connection of its GPU with that of rank 0"):
        synk.run(abort_pair, 1)
    assert synk.run(abort_pair, None) == [None, True]
    with pytest.raises(synk.WorkerError, match="the sum is odd"):  # any failure aborts the connections of all groups
        ranks.get_session().run(FailBeforeCollectives())
    assert synk.run(abort_pair, None) == [None, True]


class Sabotage(Command):
    """Command after which the next launch on one rank runs an action."""

    def __init__(self, action, failing_rank):
        self.action, self.failing_rank = action, failing_rank

    def run(self, rank):
        if rank.number != self.failing_rank:
            return
        launch = Executable._launch

        def once(executable, arguments):
            Executable._launch = launch
            time.sleep(0.1)  # the other ranks have started it
            DEEDS[self.action]()

        Executable._launch = once


def make_training_steps(times=1):
    """Return a training step on the ranks, a serial one, and the parameters of both.

    With ``times``, a call takes several steps and returns the last loss.
    """
    x, y = T.dmatrix("x"), T.dvector("y")
    data = RNG.normal(size=(10, 3)), RNG.normal(size=10)
    batches = [RNG.permutation(10)[:8] for _ in range(times)]
    made = []
    for make in (make_train_function, make_train_function_serial):
        w = shared(np.zeros(3), "w")
        made += [make(((x.dot(w) - y) ** 2).mean(), [w], x, y, updates.momentum, learning_rate=0.1), w]
    train, w, alone, w_alone = made
    if times == 1:
        return lambda: (train(*data), alone(*data)), w, w_alone
    return lambda: tuple(f.steps(*data, batches=batches)[-1] for f in (train, alone)), w, w_alone


@of_jax
@pytest.mark.parametrize("times", [1, 10])
def test_training_steps_are_one_launch(fork, monkeypatch, times):
    fork(2)
    step, w, alone = make_training_steps(times)
    launches = []
    launch = Executable._launch
    monkeypatch.setattr(Executable, "_launch", lambda self, arguments: launches.append(1) or launch(self, arguments))
    for _ in range(5):
        launches.clear()
        loss, loss_alone = step()
        assert launches == [1]
        np.testing.assert_allclose(loss, loss_alone)
        np.testing.assert_allclose(synk.gather(w), [alone.get_value()] * 2)


class SetChunkSize(Command):
    """Command that sets the chunk size of vectors, in bytes."""

    def __init__(self, piece):
        self.piece = piece

    def run(self, rank):
        trace.MIN_CHUNK_BYTES = self.piece


@pytest.fixture
def set_chunk_size():
    """Set the chunk size of vectors, in bytes, until the end of the test."""
    before = trace.MIN_CHUNK_BYTES
    yield lambda piece: ranks.get_session().run(SetChunkSize(piece))
    ranks.get_session().run(SetChunkSize(before))


@of_jax
@pytest.mark.parametrize("times", [1, 5])
@pytest.mark.parametrize("exchange", [None, "bfloat16"])
def test_gradients_are_reduced_in_chunks_and_in_bfloat16(fork, set_chunk_size, exchange, times):
    n = fork(min(4, synk.get_n_gpu()))
    set_chunk_size(1000)
    x, y = T.fmatrix("x"), T.fvector("y")
    data = RNG.normal(size=(200, 30)).astype("float32"), RNG.normal(size=200).astype("float32")
    batches = [RNG.permutation(200)[: 67 * n] for _ in range(times)]
    made = []
    for make in (make_train_function, make_train_function_serial):
        rng = np.random.default_rng(0)
        ws = [shared(rng.normal(size=s).astype("float32") / 6, "w") for s in ((30, 40), (40, 40), (40,))]
        loss = ((T.tanh(T.tanh(x.dot(ws[0])).dot(ws[1])).dot(ws[2]) - y) ** 2).mean()
        kwargs = {"exchange": exchange} if make is make_train_function else {}
        made += [make(loss, ws, x, y, updates.sgd, learning_rate=np.float32(0.1), **kwargs), ws]
    train, ws, alone, ws_alone = made
    for _ in range(3):
        losses = [train(*data, batches[0])] if times == 1 else train.steps(*data, batches=batches)
        expected = [alone(*data, batches[0])] if times == 1 else alone.steps(*data, batches=batches)
        np.testing.assert_allclose(np.array(losses, float), np.array(expected, float), rtol=1e-2 if exchange else 1e-4)
    for w, w_alone in zip(ws, ws_alone, strict=True):
        everywhere = np.asarray(synk.gather(w))
        np.testing.assert_array_equal(everywhere, np.broadcast_to(everywhere[0], everywhere.shape))
        np.testing.assert_allclose(everywhere[0], w_alone.get_value(), atol=2e-2 if exchange else 1e-4)


@of_jax
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_failed_chunked_step_updates_nothing(fork, set_chunk_size, failing_rank):
    fork(2)
    set_chunk_size(4)
    step, w, alone = make_training_steps()
    step()
    np.testing.assert_allclose(synk.gather(w), [alone.get_value()] * 2)
    for _ in range(2):
        before = np.asarray(w.get_value()).copy()
        ranks.get_session().run(Sabotage("raise", failing_rank))
        with pytest.raises((synk.WorkerError, ArithmeticError), match="the sum is odd"):
            step()
        np.testing.assert_array_equal(synk.gather(w), [before] * 2)
        loss, loss_alone = step()
        np.testing.assert_allclose(loss, loss_alone)
        np.testing.assert_allclose(synk.gather(w), [alone.get_value()] * 2)


@of_jax
@pytest.mark.parametrize("times", [1, 10, 200])  # the launches of 200 exceed the capacity of a stream
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_failed_training_step_updates_nothing(fork, failing_rank, times):
    fork(2)
    step, w, alone = make_training_steps(times)
    step()
    for _ in range(2):
        before = np.asarray(w.get_value()).copy()
        ranks.get_session().run(Sabotage("raise", failing_rank))
        start = time.monotonic()
        with pytest.raises((synk.WorkerError, ArithmeticError), match="the sum is odd"):
            step()
        # Ranks that wait for a full stream are checked twice.
        assert time.monotonic() - start < (2 if times < 200 else 4)
        np.testing.assert_array_equal(synk.gather(w), [before] * 2)
        loss, loss_alone = step()
        np.testing.assert_allclose(loss, loss_alone)
        np.testing.assert_allclose(synk.gather(w), [alone.get_value()] * 2)


class FailNthAllReduce(Command):
    """Command after which the n-th all-reduce fails on one rank."""

    def __init__(self, count, failing_rank):
        self.count, self.failing_rank = count, failing_rank

    def run(self, rank):
        if rank.number != self.failing_rank:
            return
        if JAX.nccl_calls != "python":
            self.replace_nccl(rank)
            return
        reduce, left = NcclCommunicator.finish_in_launch, [self.count]

        def falter(*arguments):
            left[0] -= 1
            if left[0]:
                return reduce(*arguments)
            NcclCommunicator.finish_in_launch = reduce
            raise ArithmeticError("the sum is odd")

        NcclCommunicator.finish_in_launch = falter

    def replace_nccl(self, rank):
        state, left = JAX.get_communicator(rank)._connection.launch_state, [self.count]
        p, i = ctypes.c_void_p, ctypes.c_int
        signature = ctypes.CFUNCTYPE(i, p, p, ctypes.c_size_t, i, i, p, p)
        address = state.all_reduce
        reduce = signature(address)

        def falter(*arguments):
            left[0] -= 1
            if left[0]:
                return reduce(*arguments)
            state.all_reduce = address
            return 3  # ncclInternalError

        FALTERING.append(signature(falter))
        state.all_reduce = ctypes.cast(FALTERING[-1], p).value


#: References to C functions, which must live as long as the process.
FALTERING = []


@of_jax
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_failed_steps_report_how_many_were_taken(fork, failing_rank):
    fork(2)
    if JAX.nccl_calls == "graph":
        pytest.skip("NCCL is not called where a CUDA graph is replayed")
    step, w, _ = make_training_steps(200)
    step()
    for count in (1, 50):
        before = np.asarray(w.get_value()).copy()
        ranks.get_session().run(FailNthAllReduce(count, failing_rank))
        start = time.monotonic()
        with pytest.raises(
            (synk.WorkerError, ArithmeticError, RuntimeError), match="the sum is odd|ncclResult_t 3"
        ) as caught:
            step()
        assert time.monotonic() - start < 3
        text = "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
        assert "Some steps may have been taken, on some ranks more than on others" in text
        if count == 1:
            np.testing.assert_array_equal(synk.gather(w), [before] * 2)
        else:
            assert not np.array_equal(w.get_value(), before)
        synk.broadcast(w)
        assert np.isfinite(float(step()[0]))


@of_jax
@pytest.mark.parametrize("times", [1, 10])
def test_interrupted_step_is_all_or_nothing(fork, times):
    n = fork(min(4, synk.get_n_gpu()))
    x, y, w = T.dmatrix("x"), T.dvector("y"), shared(np.zeros(3), "w")
    train = make_train_function(((x.dot(w) - y) ** 2).mean(), [w], x, y, updates.sgd, learning_rate=0.1)
    data = synk.data(RNG.normal(size=(16, 3))), synk.data(RNG.normal(size=16))
    step = partial(train, *data) if times == 1 else partial(train.steps, *data, batches=[range(8), range(8, 16)] * 5)
    for _ in range(3):
        step()
    interrupts = 0
    for delay in RNG.uniform(0.0005, 0.003, 40):
        timer = threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGINT))
        try:
            timer.start()
            for _ in range(100_000):
                step()
        except KeyboardInterrupt:
            interrupts += 1
        timer.join()
        value = np.asarray(w.get_value())  # waits for the GPU
        np.testing.assert_array_equal(synk.gather(w), [value] * n)
    assert interrupts == 40


@of_jax
@pytest.mark.new_ranks
@pytest.mark.parametrize("times", [1, 10, 200])
def test_death_in_a_training_step_keeps_parameters(fork, times):
    fork(2)
    step, w, alone = make_training_steps(times)
    step()
    before = np.asarray(w.get_value()).copy()
    ranks.get_session().run(Sabotage("SIGKILL", 1))
    start = time.monotonic()
    with pytest.raises(synk.WorkerError, match="killed by SIGKILL"):
        step()
    assert time.monotonic() - start < DEATH
    np.testing.assert_array_equal(w.get_value(), before)
    fork(2)
    loss, loss_alone = step()
    np.testing.assert_allclose(loss, loss_alone)
    np.testing.assert_allclose(synk.gather(w), [alone.get_value()] * 2)


@pytest.mark.new_ranks
def test_fork_timeout_ends_a_hanging_rank(fork):
    fork(2, timeout=60.0)
    check_works()
    session = ranks.get_session()
    session.timeout = 1.0
    start = time.monotonic()
    with pytest.raises(synk.WorkerError, match="did not finish within the 1 seconds"):
        session.run(StartLate())
    assert time.monotonic() - start < 4
    fork(2)
    check_works()


class StartLate(SkipAllReduce):
    """Command in which rank 1 starts a minute late."""

    def __init__(self):
        super().__init__("raise", 1)

    def run(self, rank):
        if rank.number == 1:
            time.sleep(60)
        super().run(rank)


# -- memory ----------------------------------------------------------------------------------------------------


class GetMemoryInUse(Command):
    """Command that returns each rank's memory in use, on its GPU and in its process."""

    def run(self, rank):
        gc.collect()
        on_gpu = 0
        if NAME == "pytensor":  # pygpu doesn't report how much of its pool is in use
            import jax

            stats = jax.devices()[0].memory_stats()  # None for the CPU, which stands in for pretended GPUs
            on_gpu = stats["bytes_in_use"] if stats else sum(array.nbytes for array in jax.live_arrays())
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
        return rank.all_gather((on_gpu, resident))


def test_memory_stays_flat_over_a_thousand_calls(fork):
    fork(2)
    x, s = T.fmatrix("x"), shared(np.zeros((1, 64), "float32"), "s")
    w = shared(np.ones((64, 64), "float32"), "w")
    loss = (T.tanh(T.dot(x, w)).sum(axis=1) + s.sum()).mean()
    f = synk.function([x], [loss, (x, None)], updates=[(w, w * np.float32(0.999))], sliceable_shareds=[s])
    synk.distribute()
    synk.scatter(s, np.ones((64, 64), "float32"))
    data = synk.data(RNG.normal(size=(1000, 64)).astype("float32"))

    def calls(count):
        for i in range(count):
            result, _ = f(data, batch=RNG.integers(0, 1000, 200), batch_s=[[i % 8, 1], [0, i % 8]])
            synk.all_reduce(w)
            if i % 10 == 0:
                float(result)
                synk.gather(w)
                synk.broadcast(w, nccl=False)
        read_results(result)

    calls(600)  # results of unread calls are dropped some hundreds at a time
    before = ranks.get_session().run(GetMemoryInUse())
    calls(1000)
    after = ranks.get_session().run(GetMemoryInUse())
    for (on_gpu, resident), (on_gpu_then, resident_then) in zip(after, before, strict=True):
        # Unread outputs are cached for at most 256 calls, here of 100 rows on each rank.
        assert on_gpu - on_gpu_then <= 260 * 100 * 64 * 4
        assert resident - resident_then < 64 << 20


def test_closed_ranks_leave_no_page_locked_memory(fork):
    # Locked pages that were unmapped would make the next lock of the same address fail.
    for _ in range(3):
        fork(2)
        x = T.dmatrix("x")
        f = synk.function([x], (x, "gather"))
        for n in (10, 1000, 100_000):
            data = synk.data(RNG.normal(size=(n, 3)))
            np.testing.assert_array_equal(f(data), data)
            np.testing.assert_array_equal(f(data, batch=[3, 1]), data[[3, 1]])
            del data
        synk.close()


# -- precision -------------------------------------------------------------------------------------------------


@of_jax
@of_real_gpus
def test_matmul_precision_is_tf32_by_default():
    code = """
        synk.fork(2)
        rng = np.random.default_rng(0)
        a, b = rng.normal(size=(512, 512)).astype("float32"), rng.normal(size=(512, 512)).astype("float32")
        x, y = T.fmatrix("x"), T.fmatrix("y")
        product = np.asarray(synk.function([x], (T.dot(x, y), "gather"), bcast_inputs=[y])(a, b))
        exact = a.astype("float64") @ b.astype("float64")
        print(product.dtype, np.abs(product - exact).max() / np.abs(exact).max())
        synk.close()
    """
    for variables, least, most in (({}, 1e-5, 1e-2), ({"JAX_DEFAULT_MATMUL_PRECISION": "highest"}, 0, 1e-6)):
        dtype, error = program(code, **variables).split()
        assert dtype == "float32"
        assert least <= float(error) < most


@of_jax
@pytest.mark.parametrize("width", [None, 3])
def test_scatter_add_of_many_rows_to_few_effects_equals_numpy(fork, width):
    fork(2)
    places, rows = 50, 300_000
    effects = (T.dvector if width is None else T.dmatrix)("effects")
    weights, index = (T.dvector if width is None else T.dmatrix)("weights"), T.ivector("index")
    f = synk.function(
        [index, weights], (T.grad((effects[index] ** 2 * weights).sum(), effects), "sum"), bcast_inputs=[effects]
    )
    shape = () if width is None else (width,)
    picked, weight = RNG.integers(0, places, rows).astype("int32"), RNG.random((rows, *shape))
    at = RNG.random((places, *shape))
    expected = np.zeros_like(at)
    np.add.at(expected, picked, 2 * at[picked] * weight)
    np.testing.assert_allclose(f(picked, weight, at), expected, rtol=1e-9)


@of_jax
def test_results_are_fetched_from_the_gpu_once(fork):
    fork(2)
    x = T.dvector("x")
    result = synk.function([x], (x * 2, "gather"))(np.arange(4.0))
    assert type(result) is Result
    assert np.asarray(result) is np.asarray(result)


@of_jax
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 4, 5), (1 << 17,), ((1 << 17) + 1,)])
def test_results_of_any_dtype_and_size_are_fetched(fork, shape):
    fork(2)
    dtypes = ["bool", "uint8", "float16", "int32", "float64", "complex64"]
    expected = [(RNG.random(shape) * 9).astype(dtype) for dtype in dtypes]
    on_gpu = [ARRAYS.from_host(array) for array in expected]
    for _ in range(2):
        fetched = ARRAYS.fetch([*[array.copy() for array in on_gpu], 7])
        assert fetched.pop() == 7
        for array, value in zip(fetched, expected, strict=True):
            np.testing.assert_array_equal(array, value, strict=True)
        ARRAYS.staging._fetch_memory.used = 64  # as an interrupt leaves it
