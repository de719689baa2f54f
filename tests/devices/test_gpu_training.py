"""Training steps on GPUs, of one launch each, and failures in them."""

import ctypes
import os
import signal
import threading
import time
from functools import partial

import numpy as np
import pytest
from gpu_commands import (
    BUSY_LIMIT,
    FAULT_LIMIT,
    FAULTS,
    ON_GPUS,
    RNG,
    make_busy_function,
    needs_jax,
    needs_real_gpus,
)
from library import shared
from library import tensor as T
from system import time_limit

import synkhronos as synk
from synkhronos import ranks
from synkhronos.devices import JAX
from synkhronos.devices.cuda.nccl import NcclCommunicator
from synkhronos.devices.jax.xla_communicator import XlaCommunicator
from synkhronos.engines.xla import traced_exchange
from synkhronos.engines.xla.executable import Executable
from synkhronos.ranks import Command, Rank
from synkhronos.training import make_train_function, make_train_function_serial, updates
from synkhronos.training.updates.update_rule import update_rule

pytestmark = ON_GPUS


class FailNextLaunch(Command):
    """Command after which the next launch on one rank runs an action."""

    def __init__(self, action, failing_rank):
        self.action, self.failing_rank = action, failing_rank

    def run(self, rank):
        if rank.number != self.failing_rank:
            return
        launch = Executable._launch

        def launch_once(executable, arguments):
            Executable._launch = launch
            time.sleep(0.1)  # the other ranks have started it
            FAULTS[self.action]()

        Executable._launch = launch_once


class FailBeforeOthersLaunch(Command):
    """Command after which the next launch on one rank fails once it is enqueued, and before other ranks launch."""

    def __init__(self, failing_rank):
        self.failing_rank = failing_rank

    def run(self, rank):
        launch = Executable._launch

        def launch_once(executable, arguments):
            Executable._launch = launch
            if rank.number == self.failing_rank:
                launch(executable, arguments)
                FAULTS["raise"]()
            time.sleep(0.3)  # the rank that fails has aborted its collective
            launch(executable, arguments)

        Executable._launch = launch_once


def make_training_steps(times=1, **options):
    """Return a training step on the ranks with options, a serial one, and the parameters of both.

    With ``times``, a call takes several steps and returns the last loss.
    """
    x, y = T.dmatrix("x"), T.dvector("y")
    data = RNG.normal(size=(10, 3)), RNG.normal(size=10)
    batches = [RNG.permutation(10)[:8] for _ in range(times)]
    made = []
    for make in (make_train_function, make_train_function_serial):
        w = shared(np.zeros(3), "w")
        kwargs = {"learning_rate": 0.1, **(options if make is make_train_function else {})}
        made += [make(((x.dot(w) - y) ** 2).mean(), [w], x, y, updates.momentum, **kwargs), w]
    train, w, alone, w_alone = made
    if times == 1:
        return lambda: (train(*data), alone(*data)), w, w_alone
    return (
        lambda: (train.steps(*data, batches=batches)[-1], [alone(*data, batch) for batch in batches][-1]),
        w,
        w_alone,
    )


@needs_jax
@pytest.mark.parametrize(("times", "options"), [(1, {}), (10, {}), (1, {"shard_optimizer": True})])
def test_training_steps_are_one_launch(monkeypatch, times, options, two_ranks_per_test):
    step, w, alone = make_training_steps(times, **options)
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
    """Command that sets the chunk sizes of vectors in a host and between hosts, in bytes."""

    def __init__(self, *sizes):
        self.sizes = sizes

    def run(self, rank):
        traced_exchange.MIN_CHUNK_NBYTES, traced_exchange.MIN_CHUNK_NBYTES_OF_HOSTS = self.sizes


@pytest.fixture
def set_chunk_size():
    """Set the chunk size of vectors, in bytes, until the end of the test."""
    before = traced_exchange.MIN_CHUNK_NBYTES, traced_exchange.MIN_CHUNK_NBYTES_OF_HOSTS
    yield lambda size: ranks.get_session().run(SetChunkSize(size, size))
    ranks.get_session().run(SetChunkSize(*before))


@needs_jax
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
        kwargs = {"exchange_dtype": exchange} if make is make_train_function else {}
        made += [make(loss, ws, x, y, updates.sgd, learning_rate=np.float32(0.1), **kwargs), ws]
    train, ws, alone, ws_alone = made
    for _ in range(3):
        losses = [train(*data, batches[0])] if times == 1 else train.steps(*data, batches=batches)
        expected = [alone(*data, batch) for batch in batches]
        np.testing.assert_allclose(np.array(losses, float), np.array(expected, float), rtol=1e-2 if exchange else 1e-4)
    for w, w_alone in zip(ws, ws_alone, strict=True):
        everywhere = np.asarray(synk.gather(w))
        np.testing.assert_array_equal(everywhere, np.broadcast_to(everywhere[0], everywhere.shape))
        np.testing.assert_allclose(everywhere[0], w_alone.get_value(), atol=2e-2 if exchange else 1e-4)


@needs_jax
def test_chunked_step_accepts_ranks_without_rows(set_chunk_size, two_ranks_per_test):
    set_chunk_size(4)
    x, y = T.dmatrix("x"), T.dvector("y")
    data, made = (RNG.normal(size=(10, 3)), RNG.normal(size=10)), []
    for make in (make_train_function, make_train_function_serial):
        w, b = shared(np.zeros(3), "w"), shared(np.zeros(()), "b")
        made += [make(((x.dot(w) + b - y) ** 2).mean(), [w, b], x, y, updates.momentum, learning_rate=0.1), w]
    train, w, alone, w_alone = made
    for batch in (8, 1, 8):
        with time_limit(FAULT_LIMIT):
            np.testing.assert_allclose(train(*data, batch), alone(*data, batch))
        np.testing.assert_allclose(synk.gather(w), [w_alone.get_value()] * 2)


@needs_jax
@pytest.mark.parametrize(
    ("times", "chunk_size", "shard_optimizer"),
    # The launches of 200 steps exceed the capacity of a stream.
    [(1, None, False), (10, None, False), (200, None, False), (1, 4, False), (1, 4, True)],
)
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_failed_training_step_updates_nothing(
    set_chunk_size, failing_rank, times, chunk_size, shard_optimizer, two_ranks_per_test
):
    if chunk_size:
        set_chunk_size(chunk_size)
    step, w, alone = make_training_steps(times, shard_optimizer=shard_optimizer)
    step()
    np.testing.assert_allclose(synk.gather(w), [alone.get_value()] * 2)
    for _ in range(2):
        before = np.asarray(w.get_value()).copy()
        ranks.get_session().run(FailNextLaunch("raise", failing_rank))
        with time_limit(FAULT_LIMIT), pytest.raises((synk.WorkerError, ArithmeticError), match="the sum is odd"):
            step()
        np.testing.assert_array_equal(synk.gather(w), [before] * 2)
        loss, loss_alone = step()
        np.testing.assert_allclose(loss, loss_alone)
        np.testing.assert_allclose(synk.gather(w), [alone.get_value()] * 2)


@needs_jax
@needs_real_gpus  # an aborted collective of fakes sends nothing
@pytest.mark.parametrize(("times", "options"), [(1, {}), (10, {}), (1, {"shard_optimizer": True})])
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_launch_after_another_rank_has_aborted_updates_nothing(failing_rank, times, options, two_ranks_per_test):
    step, w, alone = make_training_steps(times, **options)
    step()
    for _ in range(3):
        before = np.asarray(w.get_value()).copy()
        ranks.get_session().run(FailBeforeOthersLaunch(failing_rank))
        with time_limit(FAULT_LIMIT), pytest.raises((synk.WorkerError, ArithmeticError), match="the sum is odd"):
            step()
        np.testing.assert_array_equal(synk.gather(w), [before] * 2)
        step()
        np.testing.assert_allclose(synk.gather(w), [alone.get_value()] * 2)


@needs_jax
@needs_real_gpus
@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True}])
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_failed_step_keeps_earlier_ones_that_gpus_still_compute(failing_rank, options, two_ranks_per_test):
    x, w, w_alone = T.dvector("x"), shared(1.0, "w"), shared(1.0, "w")
    train = make_train_function((w * x).mean(), [w], x, [], updates.momentum, learning_rate=0.1, **options)
    alone = make_train_function_serial((w_alone * x).mean(), [w_alone], x, [], updates.momentum, learning_rate=0.1)
    keep_busy, rows = make_busy_function(), RNG.normal(size=10)
    for _ in range(3):
        train(rows, [])
        keep_busy()
        train(rows, [])
        ranks.get_session().run(FailNextLaunch("raise", failing_rank))
        with (
            time_limit(BUSY_LIMIT + FAULT_LIMIT),
            pytest.raises((synk.WorkerError, ArithmeticError), match="the sum is odd"),
        ):
            train(rows, [])
        for _ in range(2):
            alone(rows, [])
    np.testing.assert_allclose(synk.gather(w), [w_alone.get_value()] * 2)


class DisconnectWorker(Command):
    """Command in which rank 1 alone loses its connection."""

    def run(self, rank):
        if rank.number == 1:
            JAX.get_communicator(rank)._connection.abort()


@needs_jax
def test_later_steps_do_not_compare_plans(monkeypatch, two_ranks_per_test):
    step, _, _ = make_training_steps()
    step()
    compare, digests = Rank.compare_digests, []
    monkeypatch.setattr(Rank, "compare_digests", lambda rank, digest: digests.append(digest) or compare(rank, digest))
    step()
    assert not digests
    ranks.get_session().run(DisconnectWorker())
    with time_limit(FAULT_LIMIT), pytest.raises(synk.WorkerError):
        step()
    assert not digests
    step()
    assert digests


@needs_jax
@pytest.mark.parametrize(
    ("n_steps", "options"), [(1, {}), (1, {"exchange_dtype": "bfloat16"}), (1, {"shard_optimizer": True}), (3, {})]
)
def test_no_rank_fuses_a_step_that_the_master_cannot_fuse(n_steps, options, two_ranks_per_test):
    x, y = T.dmatrix("x"), T.dvector("y")
    data = RNG.normal(size=(10, 3)), RNG.normal(size=10)
    made = []
    for make in (make_train_function, make_train_function_serial):
        w = shared(np.zeros(3), "w")
        kwargs = options if make is make_train_function else {}
        made += [make(((x.dot(w) - y) ** 2).mean(), [w], x, y, updates.momentum, learning_rate=0.1, **kwargs), w]
    train, w, train_alone, w_alone = made
    rtol, atol = (0.02, 0.002) if "exchange_dtype" in options else (1e-7, 0)
    for _ in range(3):
        for _ in range(2):
            with time_limit(FAULT_LIMIT):
                losses = train.steps(*data, [8] * n_steps)
            expected = [train_alone(*data, 8) for _ in range(n_steps)]
            np.testing.assert_allclose(np.array(losses, float), expected, rtol=rtol, atol=atol)
            np.testing.assert_allclose(synk.gather(w), [w_alone.get_value()] * 2, rtol=rtol, atol=atol)
        train.grad_shared.set_value(np.zeros_like(train.grad_shared.get_value()))  # a NumPy array, in the master alone


@update_rule("learning_rate=0.25", 1.5)
def descend_along_products(p, g, c, learning_rate):
    """Return the new value of a matrix, by products of its gradient; other parameters do not change."""
    return {p: p - c(learning_rate) * g.dot(g.T).dot(g) if p.ndim == 2 else p}


@needs_jax
@needs_real_gpus  # XLA chooses no kernel by its time on CPUs
@pytest.mark.parametrize(
    ("rule", "options"), [(updates.adam, {"clip_norm": 0.5}), (descend_along_products, {"learning_rate": 0.01})]
)
def test_ranks_round_sums_of_updates_equally(rule, options, two_ranks_per_test):
    x, y = T.fmatrix("x"), T.fvector("y")
    for width in (30, 128, 500):
        data = RNG.normal(size=(63, width)).astype("float32"), RNG.normal(size=63).astype("float32")
        ws = [shared(RNG.normal(size=shape).astype("float32") / 30) for shape in ((width, width), (width,))]
        loss = ((T.tanh(x.dot(ws[0])).dot(ws[1]) - y) ** 2).mean()
        train = make_train_function(loss, ws, x, y, rule, **options)
        for rows in (63, 32) * 5:
            train(*data, rows)
        for w in [*ws, *train.optimizer_state]:
            first, second = synk.gather(w)
            np.testing.assert_array_equal(first, second)


@needs_jax
def test_step_is_taken_on_no_rank_if_a_worker_has_lost_its_connection(two_ranks_per_test):
    step, w, alone = make_training_steps()
    for _ in range(2):
        step()
    before = np.asarray(w.get_value()).copy()
    ranks.get_session().run(DisconnectWorker())
    expected = "rank 1 has another gradient or connection than in the last step"
    with time_limit(FAULT_LIMIT), pytest.raises(synk.WorkerError, match=expected) as caught:
        step()
    assert "The function's updates were applied on no rank." in str(caught.value)
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
        if JAX.nccl_call_mode != "python":
            self.replace_nccl(rank)
            return
        reduce, left = XlaCommunicator.enqueue_on_xla_stream, [self.count]

        def fail_nth(*arguments):
            left[0] -= 1
            if left[0]:
                return reduce(*arguments)
            XlaCommunicator.enqueue_on_xla_stream = reduce
            raise ArithmeticError("the sum is odd")

        XlaCommunicator.enqueue_on_xla_stream = fail_nth

    def replace_nccl(self, rank):
        state, left = JAX.get_communicator(rank)._connection.launch_state, [self.count]
        p, i = ctypes.c_void_p, ctypes.c_int
        signature = ctypes.CFUNCTYPE(i, p, p, ctypes.c_size_t, i, i, p, p)
        address = state.all_reduce_address
        reduce = signature(address)

        def fail_nth(*arguments):
            left[0] -= 1
            if left[0]:
                return reduce(*arguments)
            state.all_reduce_address = address
            return 3  # ncclInternalError

        FAILING_FUNCTIONS.append(signature(fail_nth))
        state.all_reduce_address = ctypes.cast(FAILING_FUNCTIONS[-1], p).value


#: References to C functions, which must live as long as the process.
FAILING_FUNCTIONS = []


@needs_jax
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_failed_steps_report_how_many_were_taken(failing_rank, two_ranks_per_test):
    step, w, _ = make_training_steps(200)
    step()
    for count in (1, 50):
        before = np.asarray(w.get_value()).copy()
        ranks.get_session().run(FailNthAllReduce(count, failing_rank))
        with (
            time_limit(FAULT_LIMIT),
            pytest.raises(
                (synk.WorkerError, ArithmeticError, RuntimeError), match="the sum is odd|ncclResult_t 3"
            ) as caught,
        ):
            step()
        text = "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
        assert "Some steps may have been taken, on some ranks more than on others" in text
        if count == 1:
            np.testing.assert_array_equal(synk.gather(w), [before] * 2)
        else:
            assert not np.array_equal(w.get_value(), before)
        synk.broadcast(w)
        assert np.isfinite(float(step()[0]))


@needs_jax
@pytest.mark.parametrize("times", [1, 10])
def test_interrupted_step_is_all_or_nothing(fork, times):
    n = fork(min(4, synk.get_n_gpu()))
    x, y, w = T.dmatrix("x"), T.dvector("y"), shared(np.zeros(3), "w")
    train = make_train_function(((x.dot(w) - y) ** 2).mean(), [w], x, y, updates.sgd, learning_rate=0.1)
    data = synk.data(RNG.normal(size=(16, 3))), synk.data(RNG.normal(size=16))
    step = partial(train, *data) if times == 1 else partial(train.steps, *data, batches=[range(8), range(8, 16)] * 5)
    for _ in range(3):
        step()
    interrupts, notes = 0, []
    for delay in RNG.uniform(0.0005, 0.003, 40):
        timer = threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGINT))
        try:
            timer.start()
            for _ in range(100_000):
                step()
        except KeyboardInterrupt as error:
            interrupts, notes = interrupts + 1, getattr(error, "__notes__", [])
        timer.join()
        value = np.asarray(w.get_value())  # waits for the GPU
        np.testing.assert_array_equal(synk.gather(w), [value] * n, err_msg=" ".join(notes))
    assert interrupts == 40


@needs_jax
def test_interrupt_before_the_masters_all_reduce_updates_no_rank(fork, monkeypatch):
    n = fork(min(4, synk.get_n_gpu()))
    x, y, w = T.dmatrix("x"), T.dvector("y"), shared(np.ones(3), "w")
    train = make_train_function(((x.dot(w) - y) ** 2).mean(), [w], x, y, updates.sgd, learning_rate=0.1)
    step = partial(train, RNG.normal(size=(16, 3)), RNG.normal(size=16), num_slices=2)  # of several launches
    for _ in range(3):
        step()
    before = np.asarray(w.get_value()).copy()

    def interrupt_late(*_):
        time.sleep(0.1)  # the workers have started the all-reduce, and would update
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(NcclCommunicator, "all_reduce", interrupt_late)
        step()
    np.testing.assert_array_equal(synk.gather(w), [before] * n)
    step()
    assert not np.array_equal(w.get_value(), before)
    np.testing.assert_array_equal(synk.gather(w), [w.get_value()] * n)


@needs_jax
@pytest.mark.new_ranks
@pytest.mark.parametrize("times", [1, 10, 200])
def test_death_in_a_training_step_keeps_parameters(fork, times):
    fork(2)
    step, w, alone = make_training_steps(times)
    step()
    before = np.asarray(w.get_value()).copy()
    ranks.get_session().run(FailNextLaunch("SIGKILL", 1))
    with time_limit(FAULT_LIMIT), pytest.raises(synk.WorkerError, match="killed by SIGKILL"):
        step()
    np.testing.assert_array_equal(w.get_value(), before)
    fork(2)
    loss, loss_alone = step()
    np.testing.assert_allclose(loss, loss_alone)
    np.testing.assert_allclose(synk.gather(w), [alone.get_value()] * 2)
