"""Failures, deaths and interrupts of ranks in collectives of arrays on GPUs."""

import os
import signal
import threading
import time
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from gpu_commands import (
    FAULT_LIMIT,
    FAULTS,
    N_RANKS,
    ON_GPUS,
    FailBeforeCollectives,
    FailInAllReduce,
    check_ranks_work,
    make_busy_function,
    make_filled_variable,
    needs_jax,
    needs_real_gpus,
)
from library import GPU_DEVICE, shared
from system import time_limit, wait_until

import synkhronos as synk
from synkhronos import ranks
from synkhronos.collectives.all_reduce_command import AllReduce
from synkhronos.collectives.command_cache import prepare_command
from synkhronos.devices.cuda.nccl import NcclCommunicator
from synkhronos.ranks import Command, PendingOperation

pytestmark = ON_GPUS


class ExitWithPending(FailInAllReduce):
    """Command whose all_reduce is still pending at its end, as one rank exits instead of starting it."""

    def run(self, rank):
        communicator = GPU_DEVICE.get_communicator(rank)
        communicator.connect(rank.all_gather(communicator.generation))
        array = GPU_DEVICE.from_numpy(np.ones(1 << 20, "float32"))
        if rank.number == self.failing_rank:
            threading.Timer(0.5, FAULTS[self.action]).start()
            return None
        communicator.all_reduce(array, "sum")
        return GPU_DEVICE.rewrap(array)


class FailInBlocking(FailInAllReduce):
    """Command of a blocking collective, with this rank as root, that rank 1 never starts, as it fails or waits."""

    def __init__(self, collective, root, action):
        super().__init__(action, 1)
        self.collective, self.root = collective, root

    def run(self, rank):
        communicator, layout = GPU_DEVICE.get_communicator(rank), ((1 << 20,), np.dtype(np.float32))
        communicator.connect(rank.all_gather(communicator.generation))
        array, output = GPU_DEVICE.from_numpy(np.ones(*layout)), GPU_DEVICE.empty(*layout)
        if rank.number == self.failing_rank:
            time.sleep(0.1)  # the other ranks have started it
            while self.action == "wait":
                rank.barriers.check_cancelled()
                time.sleep(0.01)
            FAULTS[self.action]()
        elif self.action == "wait":
            threading.Timer(0.5, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        if self.collective == "broadcast":
            communicator.broadcast(array, self.root)
        elif self.collective == "reduce":
            out = output if rank.number == self.root else None
            communicator.reduce(array, "sum", self.root, out, layout, range(rank.size))
        else:
            communicator.all_gather(
                array, [layout] * rank.size, [GPU_DEVICE.slice_items(output, 0, layout[0])] * rank.size
            )


#: Collectives and their roots: the other ranks can't finish without rank 1, or they only send, and may finish.
RECEIVING = [("broadcast", 1), ("reduce", 0), ("all_gather", None)]
SENDING = [("broadcast", 0), ("reduce", 1)]


@pytest.mark.new_ranks
@pytest.mark.parametrize(
    ("action", "words"), [("SIGKILL", "killed by SIGKILL"), ("SIGSEGV", "SIGSEGV"), ("exit", "code 3")]
)
def test_death_inside_a_collective_is_noticed(fork, action, words):
    fork(N_RANKS)
    check_ranks_work()
    with time_limit(FAULT_LIMIT), pytest.raises(synk.WorkerError, match=words):
        ranks.get_session().run(FailInAllReduce(action, 1))
    with pytest.raises(RuntimeError, match="fork"):
        synk.distribute()
    fork(N_RANKS)
    check_ranks_work()


@needs_real_gpus  # fake GPUs have no pending collectives at the end of a command
@pytest.mark.new_ranks
def test_death_is_noticed_while_the_master_waits_for_its_gpu(fork):
    fork(N_RANKS)
    check_ranks_work()
    array = ranks.get_session().run(ExitWithPending("SIGKILL", 1))
    with time_limit(FAULT_LIMIT), pytest.raises(synk.WorkerError, match="killed by SIGKILL"):
        np.asarray(array)
    del array
    fork(N_RANKS)
    check_ranks_work()


@needs_real_gpus
@pytest.mark.new_ranks
def test_close_completes_pending_collectives(fork):
    fork(N_RANKS)
    w = shared(np.ones(1 << 25, "float32"), "w")
    synk.function([], updates=[(w, w * np.float32(2))])()
    for _ in range(10):
        synk.all_reduce(w, "sum")
    synk.close()
    np.testing.assert_array_equal(np.asarray(w.get_value()), np.float32(2) * np.float32(N_RANKS) ** 10)


@pytest.mark.parametrize("failing_rank", [0, N_RANKS - 1])
def test_collectives_reconnect_after_an_exception(fork, failing_rank):
    fork(N_RANKS)
    check_ranks_work()
    for _ in range(2):
        with time_limit(FAULT_LIMIT), pytest.raises((synk.WorkerError, ArithmeticError), match="the sum is odd"):
            ranks.get_session().run(FailInAllReduce("raise", failing_rank))
        check_ranks_work()


@pytest.mark.parametrize("action", ["raise", "wait"])
@pytest.mark.parametrize(("collective", "root"), RECEIVING)
def test_exception_aborts_a_pending_collective(fork, collective, root, action):
    fork(N_RANKS)
    check_ranks_work()
    with time_limit(FAULT_LIMIT), pytest.raises(KeyboardInterrupt if action == "wait" else synk.WorkerError):
        ranks.get_session().run(FailInBlocking(collective, root, action))
    check_ranks_work()


@pytest.mark.parametrize(("collective", "root"), SENDING)
def test_failed_collective_leaves_no_messages_for_later_ones(fork, collective, root):
    fork(N_RANKS)
    check_ranks_work()
    with pytest.raises(synk.WorkerError):
        ranks.get_session().run(FailInBlocking(collective, root, "raise"))
    check_ranks_work()


@pytest.mark.new_ranks
@pytest.mark.parametrize(("collective", "root"), [*RECEIVING, *SENDING])
def test_death_in_a_pending_collective_is_noticed(fork, collective, root):
    fork(N_RANKS)
    check_ranks_work()
    with time_limit(FAULT_LIMIT), pytest.raises(synk.WorkerError, match="killed by SIGKILL"):
        ranks.get_session().run(FailInBlocking(collective, root, "SIGKILL"))


@needs_jax
def test_interrupt_after_the_start_of_an_all_reduce_keeps_the_result(fork, monkeypatch):
    fork(N_RANKS)
    variables, sums = [], []
    for _ in range(2):
        w, values = make_filled_variable("float32")
        variables.append(w)
        sums.append(sum(values))
    arrays = [w.get_value(borrow=True, return_internal_type=True) for w in variables]
    wait_until_started = NcclCommunicator.wait_until_started

    def interrupt(communicator):
        wait_until_started(communicator)
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(NcclCommunicator, "wait_until_started", interrupt)
        synk.all_reduce(variables, "sum")
    for w, array, total in zip(variables, arrays, sums, strict=True):
        assert w.get_value(borrow=True, return_internal_type=True) is not array
        np.testing.assert_array_equal(synk.gather(w), [total] * N_RANKS)


def prepare_repeated_all_reduce(fork):
    """Fork, and reduce a variable twice.  Return the variable, its value, and the command that reduces it again."""
    fork(N_RANKS)
    w, values = make_filled_variable("float32")
    for _ in range(2):
        synk.all_reduce(w, "sum")
    # A death makes values invalid that the GPU has not completed.
    wait_until(lambda: not ranks.get_session().rank.pending_operations.has_writes_at_risk())
    return w, sum(values) * N_RANKS, prepare_command(ranks.get_session(), w, AllReduce, ("sum", True))


def check_sum(w, total):
    """Check that all ranks have the value ``total``, and can reduce it."""
    np.testing.assert_array_equal(synk.gather(w), [total] * N_RANKS)
    synk.all_reduce(w, "sum")
    np.testing.assert_array_equal(synk.gather(w), [total * N_RANKS] * N_RANKS)


class SlowOperation(PendingOperation):
    """An operation whose end takes long: the other ranks run the next command already."""

    def resolve_failed_command(self, command_number):
        time.sleep(0.2)


class FailInRepeatedAllReduce(Command):
    """A repeated all-reduce in which rank 1 fails instead of starting it, or after the start, before it stores results."""

    def __init__(self, command, action="raise", method="all_reduce_into"):
        self.command, self.action, self.method = command, action, method

    def run(self, rank):
        communicator = GPU_DEVICE.get_communicator(rank)
        if rank.number == 1:
            setattr(communicator, self.method, self.fail)
            if self.method == "wait_briefly":
                rank.pending_operations.insert(0, SlowOperation())
        try:
            self.command.run(rank)
        finally:
            vars(communicator).pop(self.method, None)

    def fail(self, *_):
        time.sleep(0.1)  # the other ranks have started it
        FAULTS[self.action]()


def test_exception_in_a_repeated_all_reduce_keeps_the_values(fork):
    w, total, command = prepare_repeated_all_reduce(fork)
    with pytest.raises(synk.WorkerError, match="the sum is odd"):
        ranks.get_session().run(FailInRepeatedAllReduce(command))
    check_sum(w, total)


@needs_jax  # Theano's all-reduces start after the comparison, in place
@pytest.mark.new_ranks
def test_death_in_a_repeated_all_reduce_keeps_the_values(fork):
    w, total, command = prepare_repeated_all_reduce(fork)
    with time_limit(FAULT_LIMIT), pytest.raises(synk.WorkerError, match="killed by SIGKILL") as caught:
        ranks.get_session().run(FailInRepeatedAllReduce(command, "SIGKILL"))
    assert "invalid" not in str(caught.value)
    np.testing.assert_array_equal(np.asarray(w.get_value()), total)


def test_exception_on_a_worker_after_the_start_of_a_repeated_all_reduce_keeps_the_results(fork):
    w, total, command = prepare_repeated_all_reduce(fork)
    with pytest.raises(synk.WorkerError, match="the sum is odd"):
        ranks.get_session().run(FailInRepeatedAllReduce(command, method="wait_briefly"))
    check_sum(w, total * N_RANKS)


@needs_jax
@pytest.mark.parametrize(
    ("method", "is_stored"), [("all_reduce_into", False), ("compare_digests_after_start", True), ("wait_briefly", True)]
)
def test_interrupt_in_a_repeated_all_reduce_changes_all_ranks_or_none(fork, monkeypatch, method, is_stored):
    w, total, _ = prepare_repeated_all_reduce(fork)
    original = getattr(NcclCommunicator, method)

    def interrupt(*arguments):
        result = original(*arguments)
        os.kill(os.getpid(), signal.SIGINT)
        return result

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(NcclCommunicator, method, interrupt)
        synk.all_reduce(w, "sum")
    total *= N_RANKS if is_stored else 1
    np.testing.assert_array_equal(synk.gather(w), [total] * N_RANKS)
    for _ in range(2):
        synk.all_reduce(w, "sum")
    np.testing.assert_array_equal(synk.gather(w), [total * N_RANKS**2] * N_RANKS)
    check_ranks_work()


@needs_jax
@needs_real_gpus  # fake GPUs compute at once
@pytest.mark.parametrize("failing_rank", [0, N_RANKS - 1])
def test_failed_all_reduce_keeps_earlier_results_that_gpus_still_compute(fork, monkeypatch, failing_rank):
    w, total, command = prepare_repeated_all_reduce(fork)
    keep_busy = make_busy_function()
    earlier, values = make_filled_variable("float32")
    synk.all_reduce(earlier, "sum")
    keep_busy()
    synk.all_reduce(earlier, "sum")

    def interrupt(*_):
        time.sleep(0.1)  # the other ranks have started it
        os.kill(os.getpid(), signal.SIGINT)

    if failing_rank == 0:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(NcclCommunicator, "all_reduce_into", interrupt)
            synk.all_reduce(w, "sum")
    else:
        with pytest.raises(synk.WorkerError, match="the sum is odd"):
            ranks.get_session().run(FailInRepeatedAllReduce(command))
    np.testing.assert_array_equal(synk.gather(earlier), [sum(values) * N_RANKS] * N_RANKS)
    check_sum(w, total)


@needs_jax
@needs_real_gpus
def test_differing_plans_keep_the_results_that_gpus_still_compute(fork):
    fork(N_RANKS)
    keep_busy = make_busy_function()
    variables, sums = [], []
    for _ in range(2):
        w, values = make_filled_variable("float32")
        variables.append(w)
        sums.append(sum(values))
        for _ in range(2):
            synk.all_reduce(w, "sum")
    first, second = variables
    keep_busy()
    synk.all_reduce(first, "sum")
    second.set_value(np.zeros((3, 5), "float32"))  # in the master alone
    synk.all_reduce(second, "sum")
    np.testing.assert_array_equal(synk.gather(first), [sums[0] * N_RANKS**2] * N_RANKS)
    np.testing.assert_array_equal(synk.gather(second), [sums[1] * N_RANKS * (N_RANKS - 1)] * N_RANKS)


@dataclass(frozen=True)
class InterruptBeforeOthersStart(Command):
    """A command in which the master is interrupted after it has started an all-reduce, and before the others start it."""

    command: Command

    def run(self, rank):
        communicator = GPU_DEVICE.get_communicator(rank)
        if rank.is_master:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            communicator.all_reduce = partial(self.start_late, communicator.all_reduce)
        try:
            self.command.run(rank)
        finally:
            vars(communicator).pop("all_reduce", None)

    @staticmethod
    def start_late(all_reduce, *arguments):
        time.sleep(0.5)
        all_reduce(*arguments)


@needs_jax
def test_interrupt_before_others_start_a_large_all_reduce_changes_all_ranks(fork):
    fork(N_RANKS)
    w, values = make_filled_variable("float32", (1 << 18,))
    command = prepare_command(ranks.get_session(), w, AllReduce, ("sum", True))
    ranks.get_session().run(command)
    with time_limit(FAULT_LIMIT), pytest.raises(KeyboardInterrupt):
        ranks.get_session().run(InterruptBeforeOthersStart(command))
    check_sum(w, sum(values) * N_RANKS)


@needs_jax
def test_repeated_all_reduce_allocates_before_it_starts(fork, monkeypatch):
    fork(N_RANKS)
    variables = [make_filled_variable("float32", shape)[0] for shape in [(3,), (4,)]]
    synk.all_reduce(variables)
    calls = []

    def record(owner, name):
        original = getattr(owner, name)

        def called(*arguments):
            calls.append(name)
            return original(*arguments)

        monkeypatch.setattr(owner, name, called)

    record(type(GPU_DEVICE), "empty")
    record(NcclCommunicator, "all_reduce_into")
    synk.all_reduce(variables)
    assert calls == ["empty"] * 2 + ["all_reduce_into"] * 2


def test_exception_before_a_collective_keeps_connections(fork):
    fork(N_RANKS)
    check_ranks_work()
    with pytest.raises(synk.WorkerError, match="the sum is odd"):
        ranks.get_session().run(FailBeforeCollectives())
    check_ranks_work()
    with pytest.raises(ValueError, match="same shape on all ranks"):
        w, _ = make_filled_variable("float32")
        synk.set_value(1, w, np.ones((1, 5), "float32"))
        synk.all_reduce(w)
    check_ranks_work()


@pytest.mark.new_ranks
def test_fork_timeout_ends_a_hanging_rank(fork):
    fork(N_RANKS, timeout=60.0)
    check_ranks_work()
    session = ranks.get_session()
    session.timeout = 1.0
    with time_limit(FAULT_LIMIT), pytest.raises(synk.WorkerError, match="did not finish within the 1 seconds"):
        session.run(StartLate())
    fork(N_RANKS)
    check_ranks_work()


class StartLate(FailInAllReduce):
    """Command in which rank 1 starts a minute late."""

    def __init__(self):
        super().__init__("raise", 1)

    def run(self, rank):
        if rank.number == 1:
            time.sleep(60)
        super().run(rank)
