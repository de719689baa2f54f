"""Programs that test_tasks.py and the tests of faults run on all ranks."""

import os
import signal
import time

import numpy as np


def identity(worker, *args, **kwargs):
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


def together(worker, values):
    worker.barrier("begin")
    array = np.asarray(values[worker.number])
    return [worker.all_reduce(array, op).tolist() for op in ("sum", "avg", "min", "max")]


def as_arrays(worker, rows, number):
    """Return results of NumPy's conversions of rows, and of `len`."""
    made = [np.shares_memory(np.asarray(rows, dtype), rows.array) for dtype in (None, rows.dtype, "float32")]
    for function in (lambda: rows.__array__(np.dtype("float32"), copy=False), lambda: len(number)):
        try:
            made.append(function())
        except (TypeError, ValueError) as error:
            made.append(type(error))
    return [*made, np.asarray(rows[[1, 0]], "float32").tolist()]


def float16_average(worker, value):
    return worker.all_reduce(np.full(3, value, np.float16)).tolist()


def values(worker, n):
    return worker.all_gather([worker.number] * n), worker.broadcast(f"rank {worker.number}", root=worker.size - 1)


def ring(worker, n):
    """Pass an array and other objects from rank to rank."""
    to, source = (worker.number + 1) % worker.size, (worker.number - 1) % worker.size
    array = np.arange(n, dtype="float32") + worker.number
    if worker.number == 0:  # large ones wait until they are received
        worker.send(array, to)
        got = worker.receive(source)
    else:
        got = worker.receive(source)
        worker.send(array, to)
    worker.send({"rank": worker.number}, to)
    return got.sum() == (np.arange(n, dtype="float32") + source).sum(), worker.receive(source)


def all_send_first(worker, sizes):
    """Send messages to all other ranks, and only then receive theirs."""
    others = [r for r in range(worker.size) if r != worker.number]
    for r in others:
        for n in sizes:
            worker.send(np.full(n, worker.number, "u1"), r)
    return [[(len(got), set(got.tolist())) for got in map(worker.receive, [r] * len(sizes))] for r in others]


def messages(worker, of_ranks):
    """Send and receive in this rank's order; return the numbers and sizes of the received messages."""
    came, number = [], dict.fromkeys(range(worker.size), 0)
    for kind, peer, n in of_ranks[worker.number]:
        if kind == "send":
            worker.send((number[peer], bytes(n)), peer)
            number[peer] += 1
        else:
            k, content = worker.receive(peer)
            came.append((k, len(content)))
    return came


def in_groups(worker, n):
    """Even ranks and odd ones by themselves; then all."""
    group = worker.group([r for r in range(worker.size) if r % 2 == worker.number % 2])
    group.barrier("begin")
    array = np.full(n, worker.number + 1, "float32")
    total, largest = group.all_reduce(array, "sum"), group.all_reduce(array, "max")
    shown = group.all_gather(worker.number)
    return (
        total[0] == total[-1] and float(total[0]),
        float(largest[-1]),
        shown,
        float(worker.all_reduce(array, "sum")[0]),
    )


def steps(worker, of_ranks):
    """Take this rank's steps; return the result of each by its number."""
    came = {}
    for number, kind, members, n in of_ranks[worker.number]:
        mine = np.arange(n) + 10.0 * number + worker.number
        group = worker.group(members)
        if kind == "send" and len(members) > 1:
            source, to = members[:2]
            if worker.number == source:
                worker.send(mine, to)
            elif worker.number == to:
                came[number] = worker.receive(source).tolist()
        elif kind == "exchange":
            came[number] = group.all_gather((number, worker.number))
        elif kind == "sum":
            came[number] = group.all_reduce(mine, "sum").tolist()
        else:
            group.barrier(f"step {number}")
    return came


def masked_array(worker):
    """Send an array with a mask that is large enough to be sent as bytes, were it not for the mask."""
    if worker.number:
        worker.send(np.ma.masked_array(np.zeros(1000), np.arange(1000) == worker.number), 0)
        return None
    return [np.ma.getmaskarray(worker.receive(r)).tolist() for r in range(1, worker.size)]


def in_the_order_of_bytes(worker, orders, in_group):
    """Add up numbers of some orders of bytes, one for each rank."""
    all_reduce = (worker.group(range(worker.size)) if in_group else worker).all_reduce
    return all_reduce(np.arange(5, dtype=f"{orders[worker.number]}f8"), "sum").tolist()


def writes(worker, rows):
    rows.write(np.zeros(rows.shape))


def add_ones(worker, counter, times, slow=False):
    """Add 1 to each element, many times; reading and writing are far apart."""
    turns = []
    for _ in range(times):
        with worker.lock() as lock:
            lock.read(counter)
            counter.array[...] = counter.array + 1
            lock.write(counter)
            turns.append(lock.turn)
        worker.progress()
    return turns


def take_with_a_limit(worker, seconds):
    """Hold a lock on rank 0 while the others try to acquire it; return whether each acquired it, then and later."""
    lock, found = worker.lock(1), []
    if worker.number == 0:
        found.append(lock.acquire())
    for held in (True, False):
        worker.barrier(f"held: {held}")
        if worker.number:
            got = lock.acquire(timeout=seconds if held else 60)
            found.append(got)
            if got:
                lock.release()
        worker.barrier(f"tried: {held}")
        if worker.number == 0 and held:
            lock.release()
    return found


def own_steps(worker, step, w, rows):
    """Take a number of steps that differs from rank to rank, each on rows of this rank's own."""
    losses = [float(step(rows[worker.number : worker.number + 1])) for _ in range(worker.number + 1)]
    return losses, np.asarray(w.get_value()).tolist()


def many_steps(worker, step, w, rows, times):
    losses = step.launch_many(times, rows[[i % len(rows) for i in range(times)]])
    return None if losses is None else [float(loss) for loss in step.read(losses)], np.asarray(w.get_value()).tolist()


def share(worker, count, epoch, seed):
    return worker.rows(count, epoch, seed)


def stopped(worker, who):
    """Work until a rank stops."""
    steps = 0
    while not worker.stopping:
        steps += 1
        if worker.number == who and steps == 5:
            worker.stop()
        time.sleep(1e-3)
    return steps


def different_barriers(worker, names):
    worker.barrier(names[worker.number])


def ends_early(worker, who):
    if worker.number != who:
        worker.barrier("never")


def different_groups(worker):
    """Wait at the barrier of a group one of whose members waits in another group."""
    members, name = ([0, 1, 2], "north") if worker.number < 2 else ([1, 2], "south")
    worker.group(members).barrier(name)


def barrier_or_message(worker, first):
    """Wait at a barrier of a group where the other rank sends or receives a message."""
    group = worker.group([0, 1])
    if worker.number == 0:
        group.barrier("here")
    elif first == "send":
        worker.send(1, 0)
        group.barrier("here")
    else:
        worker.receive(0)


def all_receive(worker):
    worker.receive((worker.number + 1) % worker.size)


def barrier_and_receive(worker):
    if worker.number == 0:
        worker.receive(1)
    worker.barrier("late")


def fails(worker, who, how, seconds):
    """Fail on one rank, in the middle of the work of the others."""
    if worker.number == who:
        time.sleep(seconds)
        raise ValueError("this rank's own")
    if how == "computes":
        while True:
            worker.progress()
    elif how == "waits in a barrier":
        worker.barrier("never")
    elif how == "receives":
        worker.receive(who)
    elif how == "sends":
        while True:
            worker.send(np.zeros(1 << 20), who)
    elif how == "waits for a lock":
        with worker.lock():
            worker.receive(who)


def dies(worker, who, how, counter=None):
    """Kill one rank, which holds a lock, or is in the middle of an exchange, or which the others wait for."""
    if how == "in the lock":
        if worker.number != who:
            time.sleep(0.1)
        with worker.lock():
            if worker.number == who:
                os.kill(os.getpid(), signal.SIGKILL)
    elif how == "in an exchange":
        for i in range(1000):
            if worker.number == who and i == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            worker.all_reduce(np.zeros(1 << 20, "float32"))
    elif how == "before a barrier":
        if worker.number == who:
            os.kill(os.getpid(), signal.SIGKILL)
        worker.barrier("never")
    elif how == "while others compute":
        if worker.number == who:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            worker.progress()


def takes_its_time(worker, seconds, steps, says):
    """Work for long; some ranks reset their timeout."""
    for _ in range(steps):
        time.sleep(seconds)
        if worker.number in says:
            worker.progress()
    return "done"


def forever(worker, how):
    if how == "computes":
        while True:
            worker.progress()
            time.sleep(1e-3)
    if worker.number == 0:
        while True:
            worker.progress()
    worker.barrier("never")


def returns_a_lambda(worker):
    return lambda: 0


def wrong(worker, call):
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
