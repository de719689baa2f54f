"""Programs on the GPUs of one host or of several: ``programs.py NAME`` runs one, on the hosts that HOSTS names.

``programs.py serve`` runs many, on the same ranks.  GPUs may be fake or real.
"""

import json
import os
import sys
import time
from unittest import mock

import numpy as np
from gpu_commands import AllReduceRows, FailInAllReduce, exchange_arrays, run_in_groups
from hosts import slow_down_agents
from library import compute_digest
from system import LIMIT_SECONDS, measure_shared_memory

import synkhronos as synk
from synkhronos import ranks
from synkhronos.data_objects.data_access import get_array_location
from synkhronos.devices import get_rank_device

HOSTS = os.environ["HOSTS"].split(",")


def fork():
    """Start ranks on GPUs unless they run: on several hosts, or with one host on this machine only."""
    try:
        return ranks.get_session().size
    except RuntimeError:
        pass
    if len(HOSTS) == 1:
        return synk.fork(int(HOSTS[0].partition(":")[2]), use_gpu=True)
    return synk.fork(hosts=HOSTS)  # where there are GPUs, on these


def train():
    """Train a small network by steps of one launch with an all-reduce; print a digest."""
    import pytensor
    import pytensor.tensor as T

    from synkhronos.training import make_train_function, updates

    n = fork()
    rng = np.random.default_rng(0)
    x, y = T.fmatrix("x"), T.fvector("y")
    shapes = [(20, 30), (30,)]
    w, v = (pytensor.shared((rng.normal(size=shape) / 6).astype("float32")) for shape in shapes)
    loss = ((T.tanh(x.dot(w)).dot(v) - y) ** 2).mean()
    step = make_train_function(loss, [w, v], x, y, updates.adam, learning_rate=np.float32(0.01))
    x_data, y_data = (synk.data(rng.normal(size=shape).astype("float32")) for shape in ((301, 20), (301,)))
    losses = []
    for k in range(10):
        losses.append(float(step(x_data, y_data, batch=rng.permutation(301)[: 100 + k % 3])))
    step.steps(x_data, y_data, batches=[rng.permutation(301)[:40] for _ in range(5)])
    copies = [np.asarray(synk.get_value(r, w)) for r in range(n)]
    assert all(np.array_equal(copy, copies[0]) for copy in copies)
    print(compute_digest(w.get_value(), v.get_value(), np.array(losses)))


def run_collectives():
    """Run all collectives, and print digests of the results."""
    import pytensor

    n = fork()
    rng = np.random.default_rng(1)
    for dtype in ("float32", "float64", "int64", "int16"):  # NCCL lacks the last dtype
        s = pytensor.shared(np.zeros(1001, dtype), "s")
        synk.function([], (s.sum(), None))()
        values = [rng.integers(-9, 9, 1001).astype(dtype) for _ in range(n)]
        for op in ("sum", "max", "prod"):
            for r, value in enumerate(values):
                synk.set_value(r, s, value)
            np.testing.assert_array_equal(synk.gather(s), np.stack(values))
            np.testing.assert_array_equal(synk.reduce(s, op, in_place=False), _reduce_values(values, op))
            synk.all_reduce(s, op)
            np.testing.assert_array_equal(synk.gather(s), [_reduce_values(values, op)] * n)
            print(dtype, op, compute_digest(s.get_value()))
        synk.set_value(0, s, values[-1])
        synk.broadcast(s)
        np.testing.assert_array_equal(synk.gather(s), [values[-1]] * n)
        synk.all_gather(s)
        assert synk.get_shapes(s) == [(1001 * n,)] * n


def run_groups():
    """Run collectives in groups, and send arrays between two ranks; print digests of the results."""
    fork()
    for results in synk.run(run_in_groups):
        print(*results)


def _reduce_values(values, op):
    ufunc = {"sum": np.add, "max": np.maximum, "prod": np.multiply}[op]
    return ufunc.reduce(values, dtype=values[0].dtype)


def fail_and_reconnect():
    """Fail on each rank in turn, in a collective or after it, and reconnect; then kill one rank."""
    import pytensor

    n = fork()
    s = pytensor.shared(np.ones(5, "float32"), "s")
    synk.function([], (s.sum(), None))()
    for failing_rank in range(n):
        for is_late in (False, True):
            for waits_until_started in (True, False):
                start = time.monotonic()
                try:
                    ranks.get_session().run(FailInAllReduce("raise", failing_rank, is_late, waits_until_started))
                    raise AssertionError("nothing was raised")
                except (ArithmeticError, synk.WorkerError) as error:
                    assert "the sum is odd" in str(error), error
                synk.broadcast(s)
                synk.all_reduce(s, "sum")
                assert synk.get_value(n - 1, s)[0] == n
                s.set_value(np.ones(5, "float32"))
                assert time.monotonic() - start < 3 * LIMIT_SECONDS, (failing_rank, is_late, waits_until_started)
    start = time.monotonic()
    try:
        ranks.get_session().run(FailInAllReduce("SIGKILL", n - 1))
    except synk.WorkerError as error:
        print(str(error).partition(" (process")[0], "was reported", time.monotonic() - start < LIMIT_SECONDS)
    print(fork())


@mock.patch.dict(os.environ, NCCL_SOCKET_IFNAME="lo")
def report_interface_error():
    """Start new ranks for which NCCL uses the loopback interface; print the error of its connection."""
    import pytensor

    synk.close()
    fork()
    s = pytensor.shared(np.ones(5, "float32"), "s")
    synk.function([], (s.sum(), None))()
    try:
        synk.all_reduce(s)
    except synk.WorkerError as error:
        print(str(error).partition("\n")[0])


def request_too_many_gpus():
    """Request more ranks than there are GPUs, and print the error."""
    synk.close()
    for hosts in (["a:1", "b:3"], ["a:3", "b:1"]):
        try:
            synk.fork(hosts=hosts, use_gpu=True)
        except ValueError as error:
            print(error)


def use_parts():
    """Compute on rows that each host has loaded; print the page-locked memory on this host."""
    import pytensor.tensor as T

    n = fork()
    x = T.fmatrix("x")
    f = synk.function([x], (x.sum(), "sum"))
    f(synk.data(np.zeros((n, 1 << 10), "float32")))
    before = measure_shared_memory()
    data = synk.data_parts(lambda start, stop: np.ones((stop - start, 1 << 10), "float32"), 1 << 13)
    print(float(f(data)) / (1 << 23), *(float(f(data, batch=rows)) / (1 << 22) for rows in data.batches(1 << 12, 0)))
    print((measure_shared_memory() - before) >> 20)
    data.free_memory()


def all_reduce_theano_arrays():
    """All-reduce Theano's arrays on GPUs, and copy rows to them; print the results."""
    import theano  # noqa: F401 - by which the library knows whose GPUs they are

    n = fork()
    assert get_rank_device(ranks.get_session().rank).name == "pygpu"
    data = synk.data(np.arange(1000, dtype="float32"))
    with ranks.get_session().call_lock:
        for op in ("sum", "max"):
            results = ranks.get_session().run(AllReduceRows(op, get_array_location(data)))
            assert results == results[:1] * n
            print(op, results[0])
    print(*synk.run(exchange_arrays))


def serve():
    """Run the programs named on standard input, each with its arguments; print a line at the end of each."""
    slow_down_agents()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        globals()[name](*arguments)
        print("ended", flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    synk.close()
