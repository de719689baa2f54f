"""Collectives of some ranks, and messages between two, on GPUs."""

import signal
import threading
import time

import numpy as np
import pytest
from gpu_commands import (
    FAULT_LIMIT,
    FAULTS,
    ON_GPUS,
    FailBeforeCollectives,
    check_ranks_work,
    needs_jax,
)
from library import GPU_DEVICE
from system import time_limit

import synkhronos as synk
from synkhronos import ranks

pytestmark = ON_GPUS


def is_gpu_array_equal(value, expected):
    """Return whether a value is an array on the GPU with these elements."""
    return bool(GPU_DEVICE.owns(value)) and np.array_equal(np.asarray(value), expected)


def all_reduce_in_groups(context, members, dtype):
    """All-reduce arrays in a group, and in a group of one on each other rank; return the names of those with wrong results."""
    own_members = members if context.number in members else [context.number]
    group = context.group(own_members)
    values = {r: (np.arange(1000) % 5 + r).astype(dtype) for r in own_members}
    array, errors = GPU_DEVICE.from_numpy(values[context.number]), []
    for op, combine in (("sum", np.add), ("max", np.maximum), ("prod", np.multiply)):
        result, expected = group.all_reduce(array, op), combine.reduce(list(values.values()), dtype=dtype)
        if not GPU_DEVICE.can_transfer_directly(np.dtype(dtype), op):  # through host memory
            errors += [] if isinstance(result, np.ndarray) and np.array_equal(result, expected) else [op]
        elif not is_gpu_array_equal(result, expected):
            errors.append(op)
    if not is_gpu_array_equal(array, values[context.number]):
        errors.append("the argument has changed")
    return errors


@pytest.mark.parametrize("dtype", ["float32", "int64", "int16"])
@pytest.mark.parametrize("members", [[0, 1], [1, 0], [1], [2, 0], [3, 1, 0]])
def test_groups_all_reduce_on_gpus(fork, members, dtype):
    n = max(2, max(members) + 1)
    fork(n)
    assert synk.run(all_reduce_in_groups, members, dtype) == [[]] * n


def send_around(context, n, dtype):
    """Send arrays from rank to rank, with other messages and collectives between them; return the errors found."""
    target, source = (context.number + 1) % context.size, (context.number - 1) % context.size
    values, source_values = ((np.arange(n) % 100 + r).astype(dtype) for r in (context.number, source))
    array, errors = GPU_DEVICE.from_numpy(values), []
    for turn in range(2):
        context.send(turn, target)
        if context.number == 0:
            context.send(array, target)
        if context.receive(source) != turn or not is_gpu_array_equal(context.receive(source), source_values):
            errors.append(turn)
        if context.number:
            context.send(array, target)
        context.all_reduce(array, "sum")
    if not is_gpu_array_equal(array, values):
        errors.append("the sent array has changed")
    return errors


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize(
    ("n", "dtype"), [pytest.param(10, "float32", marks=needs_jax), (100_000, "float32"), (1 << 22, "float64")]
)
def test_send_and_receive_keep_order_between_gpus(fork, n_ranks, n, dtype):
    fork(n_ranks)
    assert synk.run(send_around, n, dtype) == [[]] * n_ranks


def send_every_dtype(context):
    """Send an array of each dtype to the other rank, and back; return the arrays received on rank 0."""
    received = []
    for dtype in ("int8", "uint32", "int64", "float16", "float32", "bfloat16"):
        array = context.receive(0) if context.number else GPU_DEVICE.as_array(np.arange(200_000) % 100).astype(dtype)
        context.send(array, 1 - context.number)
        if context.number == 0:
            back = context.receive(1)
            received.append((str(back.dtype), back.shape, is_gpu_array_equal(back, np.asarray(array))))
    return received


@needs_jax
def test_send_and_receive_accept_every_dtype_between_gpus(two_ranks_per_test):
    received = synk.run(send_every_dtype)[0]
    assert [dtype for dtype, *_ in received] == ["int8", "uint32", "int64", "float16", "float32", "bfloat16"]
    assert all(message[1:] == ((200_000,), True) for message in received)


def send_to_each_other(context):
    context.send(GPU_DEVICE.from_numpy(np.ones(1 << 20, "float32")), 1 - context.number)
    return context.receive(1 - context.number)


def test_send_deadlock_is_detected(two_ranks_per_test):
    with pytest.raises(
        (RuntimeError, synk.WorkerError),
        match="rank 0 waits until rank 1 receives a message, rank 1 waits until rank 0 receives a message",
    ):
        synk.run(send_to_each_other)
    assert synk.run(send_around, 100_000, "float32") == [[]] * 2


def fail_in_group_or_pair(context, action, place, failing_rank):
    """Use a group and a pair of ranks twice; the second time, one rank fails instead of calling NCCL."""
    group, array = context.group([0, 1]), GPU_DEVICE.from_numpy(np.ones(1 << 20, "float32"))

    def communicate(where):
        if where == "group":
            group.all_reduce(array, "sum")
        elif (where == "send") == (context.number == failing_rank):
            context.send(array, 1 - context.number)
        else:
            context.receive(1 - context.number)

    def leave(*_):
        time.sleep(0.2)  # the other rank has started it
        while action == "wait":
            context.report_progress()
        FAULTS[action]()

    for where in ("group", "send", "receive"):
        communicate(where)
    if context.number == failing_rank:
        over_nccl = GPU_DEVICE.get_group_communicator(context._rank, (0, 1))
        over_nccl.all_reduce = over_nccl.send = over_nccl.receive = leave
    elif action == "wait":
        threading.Timer(0.5, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    try:
        communicate(place)
    finally:
        if context.number == failing_rank:
            del over_nccl.all_reduce, over_nccl.send, over_nccl.receive


def check_groups_work():
    check_ranks_work()
    assert synk.run(all_reduce_in_groups, [0, 1], "float32") == [[]] * 2
    assert synk.run(send_around, 100_000, "float32") == [[]] * 2


PLACES = ["group", "send", "receive"]


@pytest.mark.parametrize("failing_rank", [0, 1])
@pytest.mark.parametrize("place", PLACES)
def test_groups_reconnect_after_an_exception(place, failing_rank, two_ranks_per_test):
    check_groups_work()
    with time_limit(FAULT_LIMIT), pytest.raises((synk.WorkerError, ArithmeticError), match="the sum is odd"):
        synk.run(fail_in_group_or_pair, "raise", place, failing_rank)
    check_groups_work()


@pytest.mark.parametrize("place", PLACES)
def test_interrupt_ends_group_collectives(place, two_ranks_per_test):
    check_groups_work()
    with time_limit(FAULT_LIMIT), pytest.raises(KeyboardInterrupt):
        synk.run(fail_in_group_or_pair, "wait", place, 1)
    check_groups_work()


@pytest.mark.new_ranks
@pytest.mark.parametrize("place", PLACES)
def test_death_in_a_group_is_noticed(fork, place):
    fork(2)
    check_groups_work()
    with time_limit(FAULT_LIMIT), pytest.raises(synk.WorkerError, match="killed by SIGKILL"):
        synk.run(fail_in_group_or_pair, "SIGKILL", place, 1)
    fork(2)
    check_groups_work()


def all_reduce_in_a_group(context, action):
    """All-reduce in a group without end, while a rank outside of the group runs an action."""
    if context.number == 2:
        time.sleep(0.5)
        FAULTS[action]()
    group, array = context.group([0, 1]), GPU_DEVICE.from_numpy(np.ones(1 << 20, "float32"))
    while True:
        group.all_reduce(array)


@pytest.mark.new_ranks
@pytest.mark.parametrize("action", ["raise", "SIGKILL"])
def test_group_notices_failures_of_other_ranks(fork, action):
    fork(3)
    assert synk.run(all_reduce_in_groups, [0, 1], "float32") == [[]] * 3
    with time_limit(FAULT_LIMIT), pytest.raises(synk.WorkerError, match="the sum is odd|killed by SIGKILL"):
        synk.run(all_reduce_in_a_group, action)
    if action == "raise":
        assert synk.run(all_reduce_in_groups, [0, 1], "float32") == [[]] * 3


def abort_pair(context, aborting_rank):
    """Abort the pair's connection on one rank; then rank 0 sends."""
    if context.number == aborting_rank:
        GPU_DEVICE.get_group_communicator(context._rank, (0, 1))._connection.abort()
    array = GPU_DEVICE.from_numpy(np.ones(1 << 20, "float32"))
    if context.number == 0:
        context.send(array, 1)
    else:
        return is_gpu_array_equal(context.receive(0), np.ones(1 << 20))


def test_pair_reconnects_after_one_rank_failed(two_ranks_per_test):
    assert synk.run(send_around, 100_000, "float32") == [[]] * 2
    assert synk.run(abort_pair, 0) == [None, True]
    with pytest.raises(synk.WorkerError, match="rank 1 has closed the connection of its GPU with that of rank 0"):
        synk.run(abort_pair, 1)
    assert synk.run(abort_pair, None) == [None, True]
    with pytest.raises(synk.WorkerError, match="the sum is odd"):  # any failure aborts the connections of all groups
        ranks.get_session().run(FailBeforeCollectives())
    assert synk.run(abort_pair, None) == [None, True]
