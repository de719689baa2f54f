"""Programs that tests of `synkhronos.run` start on all ranks."""

import os
import signal
import time

import numpy as np

from synkhronos.devices.reduce_op import list_collective_ops


def return_arguments(worker, *args, **kwargs):
    """Return this rank's number, the number of ranks, whether it is the master, and the arguments."""
    return worker.number, worker.size, worker.is_master, args, kwargs


def lock_until_cancelled(worker, seconds):
    """Fail on the master; acquire a free lock again and again on the other ranks, and store whether they finish."""
    worker.barrier("begin")
    if worker.is_master:
        raise ValueError("this rank's own")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with worker.lock(worker.number):
            pass
    worker.get_storage("lock_until_cancelled")["finished"] = True


def get_stored(worker, name):
    return dict(worker.get_storage(name))


def all_reduce_by_each_op(worker, values):
    """All-reduce ``values[rank]``; return the results by op."""
    worker.barrier("begin")
    array = np.asarray(values[worker.number])
    return {op: worker.all_reduce(array, op).tolist() for op in list_collective_ops()}


def convert_rows(worker, rows, number):
    """Return the results of NumPy's conversions of rows, and of `len`."""
    results = [np.shares_memory(np.asarray(rows, dtype), rows.array) for dtype in (None, rows.dtype, "float32")]
    for function in (lambda: rows.__array__(np.dtype("float32"), copy=False), lambda: len(number)):
        try:
            results.append(function())
        except (TypeError, ValueError) as error:
            results.append(type(error))
    return [*results, np.asarray(rows[[1, 0]], "float32").tolist()]


def average_float16(worker, value):
    return worker.all_reduce(np.full(3, value, np.float16)).tolist()


def gather_and_broadcast(worker, n):
    """Return lists of n rank numbers, gathered from all ranks, and a string broadcast by the last rank."""
    return worker.all_gather([worker.number] * n), worker.broadcast(f"rank {worker.number}", root=worker.size - 1)


def send_around(worker, n):
    """Send an array and another object to the next rank; return whether the array arrived, and the object."""
    target, source = (worker.number + 1) % worker.size, (worker.number - 1) % worker.size
    array = np.arange(n, dtype="float32") + worker.number
    if worker.number == 0:  # the send of a large array waits for its receiver
        worker.send(array, target)
        received = worker.receive(source)
    else:
        received = worker.receive(source)
        worker.send(array, target)
    worker.send({"rank": worker.number}, target)
    return received.sum() == (np.arange(n, dtype="float32") + source).sum(), worker.receive(source)


def send_before_receiving(worker, sizes):
    """Send messages to all other ranks before receiving theirs; return the received lengths and contents."""
    peers = [r for r in range(worker.size) if r != worker.number]
    for r in peers:
        for n in sizes:
            worker.send(np.full(n, worker.number, "u1"), r)
    return [
        [(len(received), set(received.tolist())) for received in map(worker.receive, [r] * len(sizes))] for r in peers
    ]


def exchange_messages(worker, steps_by_rank):
    """Send and receive in this rank's order; return the numbers and sizes of the received messages."""
    results, number = [], dict.fromkeys(range(worker.size), 0)
    for kind, peer, n in steps_by_rank[worker.number]:
        if kind == "send":
            worker.send((number[peer], bytes(n)), peer)
            number[peer] += 1
        else:
            k, content = worker.receive(peer)
            results.append((k, len(content)))
    return results


def reduce_in_groups(worker, n):
    """Return the sum, maximum and numbers of the ranks of this parity, and the sum over all ranks."""
    group = worker.group([r for r in range(worker.size) if r % 2 == worker.number % 2])
    group.barrier("begin")
    array = np.full(n, worker.number + 1, "float32")
    total, largest = group.all_reduce(array, "sum"), group.all_reduce(array, "max")
    numbers = group.all_gather(worker.number)
    return (
        total[0] == total[-1] and float(total[0]),
        float(largest[-1]),
        numbers,
        float(worker.all_reduce(array, "sum")[0]),
    )


def take_group_steps(worker, steps_by_rank):
    """Take this rank's steps; return their results by number."""
    results = {}
    for number, kind, members, n in steps_by_rank[worker.number]:
        values = np.arange(n) + 10.0 * number + worker.number
        group = worker.group(members)
        if kind == "send" and len(members) > 1:
            source, target = members[:2]
            if worker.number == source:
                worker.send(values, target)
            elif worker.number == target:
                results[number] = worker.receive(source).tolist()
        elif kind == "exchange":
            results[number] = group.all_gather((number, worker.number))
        elif kind == "sum":
            results[number] = group.all_reduce(values, "sum").tolist()
        else:
            group.barrier(f"step {number}")
    return results


def send_masked_arrays(worker):
    """Send masked arrays to rank 0, large enough to be sent as bytes without a mask; return their masks."""
    if worker.number:
        worker.send(np.ma.masked_array(np.zeros(1000), np.arange(1000) == worker.number), 0)
        return None
    return [np.ma.getmaskarray(worker.receive(r)).tolist() for r in range(1, worker.size)]


def add_byte_orders(worker, orders, in_group):
    """All-reduce an array whose byte order is ``orders[rank]``."""
    all_reduce = (worker.group(range(worker.size)) if in_group else worker).all_reduce
    return all_reduce(np.arange(5, dtype=f"{orders[worker.number]}f8"), "sum").tolist()


def write_zeros(worker, rows):
    rows.write(np.zeros(rows.shape))


def add_ones(worker, counter, times, slow=False):
    """Add 1 to each element `times` times under a lock; return the lock's turns."""
    lock_turns = []
    for _ in range(times):
        with worker.lock() as lock:
            lock.pull(counter)
            counter.array[...] = counter.array + 1
            lock.push(counter)
            lock_turns.append(lock.turn)
        worker.progress()
    return lock_turns


def acquire_with_timeout(worker, seconds):
    """Hold a lock on rank 0 while the others try to acquire it; return their results during that time and after."""
    lock, results = worker.lock(1), []
    if worker.number == 0:
        results.append(lock.acquire())
    for is_held in (True, False):
        worker.barrier(f"held: {is_held}")
        if worker.number:
            acquired = lock.acquire(timeout=seconds if is_held else 60)
            results.append(acquired)
            if acquired:
                lock.release()
        worker.barrier(f"tried: {is_held}")
        if worker.number == 0 and is_held:
            lock.release()
    return results


def step_on_own_rows(worker, step, w, rows):
    """Take ``rank + 1`` steps on this rank's row; return the losses and the parameters."""
    losses = [float(step(rows[worker.number : worker.number + 1])) for _ in range(worker.number + 1)]
    return losses, np.asarray(w.get_value()).tolist()


def launch_many_steps(worker, step, w, rows, times):
    """Return the losses of `times` steps in one launch, None if unsupported, and the parameters."""
    losses = step.launch_many(times, rows[[i % len(rows) for i in range(times)]])
    return None if losses is None else [float(loss) for loss in step.read(losses)], np.asarray(w.get_value()).tolist()


def get_share_of_rows(worker, count, epoch, seed):
    return worker.rows(count, epoch, seed)


def arrive_at_different_barriers(worker, names):
    worker.barrier(names[worker.number])


def end_before_a_barrier(worker, failing_rank):
    if worker.number != failing_rank:
        worker.barrier("never")


def wait_in_different_groups(worker):
    """Wait at barriers of two groups, one of whose common members waits in the other group."""
    members, name = ([0, 1, 2], "north") if worker.number < 2 else ([1, 2], "south")
    worker.group(members).barrier(name)


def wait_at_barrier_or_message(worker, first):
    """Wait at a barrier of a group while the other rank sends or receives a message."""
    group = worker.group([0, 1])
    if worker.number == 0:
        group.barrier("here")
    elif first == "send":
        worker.send(1, 0)
        group.barrier("here")
    else:
        worker.receive(0)


def receive_from_each_other(worker):
    worker.receive((worker.number + 1) % worker.size)


def receive_before_a_barrier(worker):
    if worker.number == 0:
        worker.receive(1)
    worker.barrier("late")


def fail_on_one_rank(worker, failing_rank, how, seconds):
    """Raise an error on rank `failing_rank` while the others work or wait."""
    if worker.number == failing_rank:
        time.sleep(seconds)
        raise ValueError("this rank's own")
    if how == "computes":
        while True:
            worker.progress()
    elif how == "waits in a barrier":
        worker.barrier("never")
    elif how == "receives":
        worker.receive(failing_rank)
    elif how == "sends":
        while True:
            worker.send(np.zeros(1 << 20), failing_rank)
    elif how == "waits for a lock":
        with worker.lock():
            worker.receive(failing_rank)


def kill_one_rank(worker, killed_rank, how, counter=None):
    """Kill rank `killed_rank` in a lock, in an all-reduce, before a barrier, or while the others compute."""
    if how == "in the lock":
        if worker.number != killed_rank:
            time.sleep(0.1)
        with worker.lock():
            if worker.number == killed_rank:
                os.kill(os.getpid(), signal.SIGKILL)
    elif how == "in an exchange":
        for i in range(1000):
            if worker.number == killed_rank and i == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            worker.all_reduce(np.zeros(1 << 20, "float32"))
    elif how == "before a barrier":
        if worker.number == killed_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        worker.barrier("never")
    elif how == "while others compute":
        if worker.number == killed_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            worker.progress()


def work_slowly(worker, seconds, steps, reporting):
    """Sleep for several steps; the ranks `reporting` report progress after each."""
    for _ in range(steps):
        time.sleep(seconds)
        if worker.number in reporting:
            worker.progress()
    return "done"


def work_forever(worker, how):
    if how == "computes":
        while True:
            worker.progress()
            time.sleep(1e-3)
    if worker.number == 0:
        while True:
            worker.progress()
    worker.barrier("never")


def return_a_lambda(worker):
    return lambda: 0


def call_wrongly(worker, call):
    me = worker.number
    {
        "a lock": lambda: worker.lock(100),
        "half a lock": lambda: worker.lock(0.5),
        "send beyond": lambda: worker.send(0, 5),
        "receive from oneself": lambda: worker.receive(me),
        "receive from a name": lambda: worker.receive("x"),
        "a group of one twice": lambda: worker.group([0, 0]),
        "a group of others": lambda: worker.group([1 - me]),
        "a group of halves": lambda: worker.group([0.5, 1]),
        "an average of integers": lambda: worker.all_reduce(np.arange(3)),
        "an average of integers in a group": lambda: worker.group([0, 1]).all_reduce(np.arange(3)),
        "a decision of nobody": lambda: worker.broadcast(3, root=-1),
        "objects": lambda: worker.all_reduce(np.array([worker])),
        "a mask": lambda: worker.all_reduce(np.ma.masked_array([1.0, 2.0], [False, True])),
        "a mask in a group": lambda: worker.group([0, 1]).all_reduce(np.ma.masked_array([1.0, 2.0], [False, True])),
        "a sum of flags": lambda: worker.all_reduce(np.ones(3, bool), "sum"),
        "op": lambda: worker.all_reduce(np.zeros(2), "mean"),
        "shapes": lambda: worker.all_reduce(np.zeros(2 + me)),
    }[call]()
