"""Programs that tests of `synkhronos.run` start on all ranks."""

import os
import signal
import time
import warnings

import numpy as np

from synkhronos.devices.reduce_op import list_collective_ops


def return_arguments(context, *args, **kwargs):
    """Return this rank's number, the number of ranks, whether it is the master, and the arguments."""
    return context.number, context.size, context.is_master, args, kwargs


def lock_until_cancelled(context, seconds):
    """Fail on the master; acquire a free lock again and again on the other ranks, and store whether they finish."""
    context.barrier("begin")
    if context.is_master:
        raise ValueError("this rank's own")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with context.lock(context.number):
            pass
    context.get_persistent_dict("lock_until_cancelled")["finished"] = True


def get_stored(context, name):
    return dict(context.get_persistent_dict(name))


def count_shown_warnings(context, filter_action):
    """Return the number of a rank's warnings that are shown."""
    shown = []
    with warnings.catch_warnings():
        if filter_action:
            warnings.simplefilter(filter_action, RuntimeWarning)
        warnings.showwarning = lambda *_: shown.append(1)
        warnings.warn("overflow", RuntimeWarning, stacklevel=1)
    return len(shown)


def all_reduce_by_each_op(context, values):
    """All-reduce ``values[rank]``; return the results by op."""
    context.barrier("begin")
    array = np.asarray(values[context.number])
    return {op: context.all_reduce(array, op).tolist() for op in list_collective_ops()}


def convert_rows(context, rows, number):
    """Return the results of NumPy's conversions of rows, and of `len`."""
    results = [np.shares_memory(np.asarray(rows, dtype), rows.array) for dtype in (None, rows.dtype, "float32")]
    for function in (lambda: rows.__array__(np.dtype("float32"), copy=False), lambda: len(number)):
        try:
            results.append(function())
        except (TypeError, ValueError) as error:
            results.append(type(error))
    return [*results, np.asarray(rows[[1, 0]], "float32").tolist()]


def average_float16(context, value):
    return context.all_reduce(np.full(3, value, np.float16)).tolist()


def gather_and_broadcast(context, n):
    """Return lists of n rank numbers, gathered from all ranks, and a string broadcast by the last rank."""
    return context.all_gather([context.number] * n), context.broadcast(f"rank {context.number}", root=context.size - 1)


def send_around(context, n):
    """Send an array and another object to the next rank; return whether the array arrived, and the object."""
    target, source = (context.number + 1) % context.size, (context.number - 1) % context.size
    array = np.arange(n, dtype="float32") + context.number
    if context.number == 0:  # the send of a large array waits for its receiver
        context.send(array, target)
        received = context.receive(source)
    else:
        received = context.receive(source)
        context.send(array, target)
    context.send({"rank": context.number}, target)
    return received.sum() == (np.arange(n, dtype="float32") + source).sum(), context.receive(source)


def send_before_receiving(context, sizes):
    """Send messages to all other ranks before receiving theirs; return the received lengths and contents."""
    peers = [r for r in range(context.size) if r != context.number]
    for r in peers:
        for n in sizes:
            context.send(np.full(n, context.number, "u1"), r)
    return [
        [(len(received), set(received.tolist())) for received in map(context.receive, [r] * len(sizes))] for r in peers
    ]


def exchange_messages(context, steps_by_rank):
    """Send and receive in this rank's order; return the numbers and sizes of the received messages."""
    results, number = [], dict.fromkeys(range(context.size), 0)
    for kind, peer, n in steps_by_rank[context.number]:
        if kind == "send":
            context.send((number[peer], bytes(n)), peer)
            number[peer] += 1
        else:
            k, content = context.receive(peer)
            results.append((k, len(content)))
    return results


def reduce_in_groups(context, n):
    """Return the sum, maximum and numbers of the ranks of this parity, and the sum over all ranks."""
    group = context.group([r for r in range(context.size) if r % 2 == context.number % 2])
    group.barrier("begin")
    array = np.full(n, context.number + 1, "float32")
    total, largest = group.all_reduce(array, "sum"), group.all_reduce(array, "max")
    numbers = group.all_gather(context.number)
    return (
        total[0] == total[-1] and float(total[0]),
        float(largest[-1]),
        numbers,
        float(context.all_reduce(array, "sum")[0]),
    )


def take_group_steps(context, steps_by_rank):
    """Take this rank's steps; return their results by number."""
    results = {}
    for number, kind, members, n in steps_by_rank[context.number]:
        values = np.arange(n) + 10.0 * number + context.number
        group = context.group(members)
        if kind == "send" and len(members) > 1:
            source, target = members[:2]
            if context.number == source:
                context.send(values, target)
            elif context.number == target:
                results[number] = context.receive(source).tolist()
        elif kind == "exchange":
            results[number] = group.all_gather((number, context.number))
        elif kind == "sum":
            results[number] = group.all_reduce(values, "sum").tolist()
        else:
            group.barrier(f"step {number}")
    return results


def send_masked_arrays(context):
    """Send masked arrays to rank 0, large enough to be sent as bytes without a mask; return their masks."""
    if context.number:
        context.send(np.ma.masked_array(np.zeros(1000), np.arange(1000) == context.number), 0)
        return None
    return [np.ma.getmaskarray(context.receive(r)).tolist() for r in range(1, context.size)]


def add_values(context, values, in_group):
    """Add ``values[rank]`` of all ranks."""
    all_reduce = (context.group(range(context.size)) if in_group else context).all_reduce
    return all_reduce(values[context.number], "sum").tolist()


def write_zeros(context, rows):
    rows.write(np.zeros(rows.shape))


def add_ones(context, counter, times, slow=False):
    """Add 1 to each element `times` times under a lock; return the lock's turns."""
    lock_turns = []
    for _ in range(times):
        with context.lock() as lock:
            lock.pull(counter)
            counter.array[...] = counter.array + 1
            lock.push(counter)
            lock_turns.append(lock.turn)
        context.report_progress()
    return lock_turns


def acquire_with_timeout(context, seconds):
    """Hold a lock on rank 0 while the others try to acquire it; return their results during that time and after."""
    lock, results = context.lock(1), []
    if context.number == 0:
        results.append(lock.acquire())
    for is_held in (True, False):
        context.barrier(f"held: {is_held}")
        if context.number:
            acquired = lock.acquire(timeout=seconds if is_held else 60)
            results.append(acquired)
            if acquired:
                lock.release()
        context.barrier(f"tried: {is_held}")
        if context.number == 0 and is_held:
            lock.release()
    return results


def step_on_own_rows(context, step, w, rows):
    """Take ``rank + 1`` steps on this rank's row; return the losses and the parameters."""
    losses = [float(step(rows[context.number : context.number + 1])) for _ in range(context.number + 1)]
    return losses, np.asarray(w.get_value()).tolist()


def launch_many_steps(context, step, w, rows, times):
    """Return the losses of `times` steps in one launch, None if unsupported, and the parameters."""
    losses = step.launch_many(times, rows[[i % len(rows) for i in range(times)]])
    return None if losses is None else [float(loss) for loss in step.wait_for_outputs(losses)], np.asarray(
        w.get_value()
    ).tolist()


def get_share_of_rows(context, count, epoch, seed):
    return context.rows(count, epoch, seed)


def arrive_at_different_barriers(context, names):
    context.barrier(names[context.number])


def end_before_a_barrier(context, failing_rank):
    if context.number != failing_rank:
        context.barrier("never")


def wait_in_different_groups(context):
    """Wait at barriers of two groups, one of whose common members waits in the other group."""
    members, name = ([0, 1, 2], "north") if context.number < 2 else ([1, 2], "south")
    context.group(members).barrier(name)


def wait_at_barrier_or_message(context, first):
    """Wait at a barrier of a group while the other rank sends or receives a message."""
    group = context.group([0, 1])
    if context.number == 0:
        group.barrier("here")
    elif first == "send":
        context.send(1, 0)
        group.barrier("here")
    else:
        context.receive(0)


def receive_from_each_other(context):
    context.receive((context.number + 1) % context.size)


def receive_before_a_barrier(context):
    if context.number == 0:
        context.receive(1)
    context.barrier("late")


def fail_on_one_rank(context, failing_rank, how, seconds):
    """Raise an error on rank `failing_rank` while the others work or wait."""
    if context.number == failing_rank:
        time.sleep(seconds)
        raise ValueError("this rank's own")
    if how == "computes":
        while True:
            context.report_progress()
    elif how == "waits in a barrier":
        context.barrier("never")
    elif how == "receives":
        context.receive(failing_rank)
    elif how == "sends":
        while True:
            context.send(np.zeros(1 << 20), failing_rank)
    elif how == "waits for a lock":
        with context.lock():
            context.receive(failing_rank)


def kill_one_rank(context, killed_rank, how, counter=None):
    """Kill rank `killed_rank` in a lock, in an all-reduce, before a barrier, or while the others compute."""
    if how == "in the lock":
        if context.number != killed_rank:
            time.sleep(0.1)
        with context.lock():
            if context.number == killed_rank:
                os.kill(os.getpid(), signal.SIGKILL)
    elif how == "in an exchange":
        for i in range(1000):
            if context.number == killed_rank and i == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            context.all_reduce(np.zeros(1 << 20, "float32"))
    elif how == "before a barrier":
        if context.number == killed_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        context.barrier("never")
    elif how == "while others compute":
        if context.number == killed_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            context.report_progress()


def work_slowly(context, seconds, steps, reporting):
    """Sleep for several steps; the ranks `reporting` report progress after each."""
    for _ in range(steps):
        time.sleep(seconds)
        if context.number in reporting:
            context.report_progress()
    return "done"


def work_forever(context, how):
    if how == "computes":
        while True:
            context.report_progress()
            time.sleep(1e-3)
    if context.number == 0:
        while True:
            context.report_progress()
    context.barrier("never")


def return_a_lambda(context):
    return lambda: 0


class TwoArgumentsError(Exception):
    """Exception whose pickle can't be read, as its class needs two arguments."""

    def __init__(self, a, b):
        super().__init__(f"{a} {b}")


def return_an_error_of_two_arguments(context):
    return TwoArgumentsError(1, 2) if context.number else None


def select_rows_by_an_integer(context, rows):
    return rows[np.int64(5)]


def call_wrongly(context, call):
    me = context.number
    {
        "a lock": lambda: context.lock(100),
        "half a lock": lambda: context.lock(0.5),
        "send beyond": lambda: context.send(0, 5),
        "receive from oneself": lambda: context.receive(me),
        "receive from a name": lambda: context.receive("x"),
        "a group of one twice": lambda: context.group([0, 0]),
        "a group of others": lambda: context.group([1 - me]),
        "a group of halves": lambda: context.group([0.5, 1]),
        "an average of integers": lambda: context.all_reduce(np.arange(3)),
        "an average of integers in a group": lambda: context.group([0, 1]).all_reduce(np.arange(3)),
        "a broadcast from rank -1": lambda: context.broadcast(3, root=-1),
        "objects": lambda: context.all_reduce(np.array([context])),
        "dates": lambda: context.all_reduce(np.zeros(3, "M8[s]"), "max"),
        "records in a group": lambda: context.group([0, 1]).all_reduce(np.zeros(3, "i4,f8"), "sum"),
        "a mask": lambda: context.all_reduce(np.ma.masked_array([1.0, 2.0], [False, True])),
        "a mask in a group": lambda: context.group([0, 1]).all_reduce(np.ma.masked_array([1.0, 2.0], [False, True])),
        "a sum of flags": lambda: context.all_reduce(np.ones(3, bool), "sum"),
        "op": lambda: context.all_reduce(np.zeros(2), "mean"),
        "shapes": lambda: context.all_reduce(np.zeros(2 + me)),
    }[call]()
