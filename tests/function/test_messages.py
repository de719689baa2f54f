"""Messages of errors name the cause, the rank or the argument, and advice."""

import os
import signal
import sys
import threading
import time

import numpy as np
import pytest
from library import INTERPRETED, NAME, read_results, shared, tensor
from messages import raises

import synkhronos as synk
from synkhronos import devices, ranks

if NAME == "pytensor":
    from pytensor.graph.basic import Apply
    from pytensor.graph.op import Op
else:
    from theano.gof import Apply, Op


class Do(Op):
    """Op that returns its argument after some ranks have run an action."""

    __props__ = ("action", "failing_ranks")

    def __init__(self, action, failing_ranks=(1,)):
        self.action, self.failing_ranks = action, failing_ranks

    def make_node(self, x):
        return Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs, *_):
        if int(inputs[0][0]) in self.failing_ranks:  # each row has the number of its rank
            DEEDS[self.action]()
        outputs[0][0] = inputs[0].copy()


def raise_error():
    raise ArithmeticError("the sum is odd")


def raise_after_other_updates():
    """Raise an error once the other ranks have applied the function's updates, so that the message is deterministic."""
    frame = sys._getframe()
    while "control" not in frame.f_locals:  # frames of the loop that serves commands
        frame = frame.f_back
    control = frame.f_locals["control"]
    while min(control.applied[0], control.applied[2]) < control.words[control.POSTED]:
        time.sleep(0.001)
    raise_error()


def call_again():
    synk.get_shapes(CALLED_AGAIN[0])


CALLED_AGAIN = []
DEEDS = {
    "raise": raise_error,
    "raise after updates": raise_after_other_updates,
    "sleep": lambda: time.sleep(60),
    "exit": lambda: os._exit(3),
    "sys.exit": lambda: sys.exit(3),
    "call": call_again,
    **{f"SIG{name}": (lambda number=getattr(signal, f"SIG{name}"): (os.kill(os.getpid(), number), time.sleep(60)))
       for name in "KILL SEGV BUS ABRT FPE ILL TERM".split()},
}  # fmt: skip


def run_action(action, failing_ranks=(1,), n=3, updates=False, **kwargs):
    """Fork, and run an action on some ranks during a call.

    Without ``updates`` the message does not depend on which ranks have applied them.
    """
    synk.fork(n, use_gpu=False, **kwargs)
    x, w = tensor.dvector("x"), shared(np.zeros(()), "w")
    CALLED_AGAIN[:] = [w]
    f = synk.function(
        [x],
        ((Do(action, failing_ranks)(x) + w).sum(), "sum"),
        updates=[(w, w + 1)] if updates else [],
        name="f",
        mode=INTERPRETED,
    )
    f(np.arange(float(n)))


def call_after_fork(action, n=2, **kwargs):
    def provoke():
        synk.fork(n, use_gpu=False, **kwargs)
        action()

    return provoke


def call_after_close(action):
    def provoke():
        synk.fork(2, use_gpu=False)
        synk.close()
        action()

    return provoke


def make_function_of_x_and_s():
    x, s = tensor.dmatrix("x"), shared(np.zeros((4, 2)), "s")
    f = synk.function([x], (x.sum(axis=0) + s.sum(), "sum"), sliceable_shareds=[s], name="f")
    return f, s


def call_function_of_x_and_s(*args, **kwargs):
    return call_after_fork(lambda: make_function_of_x_and_s()[0](*args, **kwargs))


def call_after_death():
    with pytest.raises(synk.WorkerError):
        run_action("SIGKILL")
    synk.data([1.0])


def pass_old_data():
    synk.fork(2, use_gpu=False)
    d = synk.data(np.ones((4, 2)))
    synk.close()
    synk.fork(2, use_gpu=False)
    make_function_of_x_and_s()[0](d)


def read_old_data():
    synk.fork(2, use_gpu=False)
    d = synk.data([1.0])
    synk.close()
    d[0]


def call_with_unpicklable_op():
    operation = Do("raise")
    operation.lock = threading.Lock()
    x = tensor.dvector("x")
    synk.function([x], (operation(x).sum(), "sum"), name="f")(np.ones(4))


def call_with_different_shapes(collective):
    def provoke():
        _, s = make_function_of_x_and_s()
        synk.scatter(s, np.ones((5, 2)))
        collective(s)

    return call_after_fork(provoke)


def call_with_integer_update():
    x, c = tensor.dvector("x"), shared(np.int64(0), "c")
    synk.function([x], (x.sum(), "sum"), updates=[(c, c + 1)], name="f")(np.ones(4), num_slices=2)


def die_without_a_code():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        run_action("SIGKILL")
    finally:
        signal.signal(signal.SIGCHLD, before)


def fork_with_gpus(count, lacking=(), cuda=False, **kwargs):
    """Return a function that forks on a machine which appears to have GPUs."""

    def provoke():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(devices, "get_n_gpu", lambda: count)
            for device in (devices.JAX, devices.PYGPU):
                patch.setattr(device, "list_missing_requirements", lambda: list(lacking))
                patch.setattr(type(device), "is_on_gpu", False)
            patch.setattr(devices.cuda, "has_context", lambda: cuda)
            synk.fork(**kwargs)

    return provoke


def call_in_forked_copy(action):
    """Return a function that calls `action` in a forked process, and raises its error here."""

    def provoke():
        synk.fork(2, use_gpu=False)
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                action()
            except BaseException as error:
                os.write(writing, f"{type(error).__name__}|{error}".encode())
            finally:
                os._exit(0)
        os.close(writing)
        os.waitpid(pid, 0)
        with open(reading) as pipe:
            kind, text = pipe.read().split("|", 1)
        raise {"RuntimeError": RuntimeError}[kind](text)

    return provoke


def return_two_shapes():
    x = tensor.dmatrix("x")
    read_results(synk.function([x], (x.sum(axis=1), "sum"), name="f")(np.ones((3, 2))))


#: name: (function that provokes the error, exception, argument)
TABLE = {
    # -- no ranks
    "function before fork": (lambda: synk.function([]), RuntimeError),
    "data before fork": (lambda: synk.data([1.0]), RuntimeError),
    "call after close": (call_after_close(lambda: synk.data([1.0])), RuntimeError),
    "distribute after close": (call_after_close(synk.distribute), RuntimeError),
    "forked twice": (call_after_fork(lambda: synk.fork(3)), RuntimeError),
    "Data after close": (read_old_data, RuntimeError),
    "Data of earlier ranks": (pass_old_data, ValueError, "x"),
    "no GPUs": (fork_with_gpus(0, use_gpu=True), RuntimeError, "use_gpu"),
    "GPUs that nothing can drive": (fork_with_gpus(2, ["nccl4py", "cuda-core"], use_gpu=True), RuntimeError, "use_gpu"),
    "more ranks than GPUs": (fork_with_gpus(2, n_parallel=3, use_gpu=True), ValueError, "n_parallel"),
    "more ranks than GPUs by default": (fork_with_gpus(2, n_parallel=3), ValueError, "n_parallel"),
    "CUDA in use before the fork": (fork_with_gpus(2, cuda=True, use_gpu=True), RuntimeError),
    "a copy of the master": (call_in_forked_copy(lambda: synk.data([1.0])), RuntimeError),
    "a copy of the master that closes": (call_in_forked_copy(lambda: (synk.close(), synk.data([1.0]))), RuntimeError),
    "a death without a code": (die_without_a_code, synk.WorkerError),
    # -- workers that die
    **{
        f"killed by {name}": (lambda name=name: run_action(name), synk.WorkerError)
        for name in ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL", "SIGTERM")
    },
    "exited": (lambda: run_action("exit"), synk.WorkerError),
    "after a death": (call_after_death, RuntimeError),
    "timed out": (lambda: run_action("sleep", timeout=0.5), synk.WorkerError),
    # -- ranks that raise
    "a worker raised": (lambda: run_action("raise"), synk.WorkerError),
    "a worker called exit": (lambda: run_action("sys.exit"), synk.WorkerError),
    "the master raised": (lambda: run_action("raise", (0,)), ArithmeticError),
    "with updates": (lambda: run_action("raise after updates", updates=True), synk.WorkerError),
    "a call inside a call": (lambda: run_action("call", (0,)), RuntimeError),
    # -- memory
    "no room": (call_after_fork(lambda: synk.data(shape=1 << 45, dtype="float64")), MemoryError),
    # -- functions
    "an unpicklable graph": (call_after_fork(call_with_unpicklable_op), TypeError, "f"),
    "avg of an integer output": (
        call_after_fork(lambda: synk.function([v := tensor.lvector("v")], v.sum())),
        ValueError,
        "outputs",
    ),
    "an unknown op": (
        call_after_fork(lambda: synk.function([v := tensor.dvector("v")], (v.sum(), "average"))),
        ValueError,
        "outputs",
    ),
    "a scattered scalar": (call_after_fork(lambda: synk.function([tensor.dscalar("v")])), ValueError, "inputs"),
    # -- inputs
    "too few inputs": (call_function_of_x_and_s(), TypeError, "f"),
    "too many inputs": (call_function_of_x_and_s(1, 2), TypeError),
    "an unknown input": (call_function_of_x_and_s(y=1), TypeError),
    "dimensions": (call_function_of_x_and_s(np.ones(3)), TypeError, "x"),
    "a dtype": (call_function_of_x_and_s(np.ones((3, 2), complex)), TypeError, "x"),
    "Data of another dtype": (
        call_after_fork(lambda: make_function_of_x_and_s()[0](synk.data(np.ones((3, 2), "float32")))),
        TypeError,
        "x",
    ),
    "Data that can't be cast": (
        call_after_fork(lambda: synk.data(dtype="float32", ndim=1, name="d").set_value([1.5])),
        TypeError,
        "x",
    ),
    # -- batches
    "batch too long": (call_function_of_x_and_s(np.ones((3, 2)), batch=4), IndexError, "batch"),
    "batch out of range": (call_function_of_x_and_s(np.ones((3, 2)), batch=[0, 3]), IndexError, "batch"),
    "batch of another kind": (call_function_of_x_and_s(np.ones((3, 2)), batch="all"), TypeError, "batch"),
    "a mask of another length": (call_function_of_x_and_s(np.ones((3, 2)), batch=[True]), ValueError, "batch"),
    "batch_s out of range": (call_function_of_x_and_s(np.ones((4, 2)), batch_s=[9]), IndexError, "batch_s"),
    "batch_s for other ranks": (
        call_function_of_x_and_s(np.ones((4, 2)), batch_s=[[0], [1], [2]]),
        ValueError,
        "batch_s",
    ),
    "no slices": (call_function_of_x_and_s(np.ones((4, 2)), num_slices=0), ValueError, "num_slices"),
    "an integer's average over slices": (call_after_fork(call_with_integer_update), ValueError, "num_slices"),
    "an unknown output": (call_function_of_x_and_s(np.ones((4, 2)), output_subset=[1]), IndexError, "output_subset"),
    "shapes of outputs": (call_after_fork(return_two_shapes), ValueError),
    # -- collectives
    "an unknown shared variable": (
        call_after_fork(lambda: synk.broadcast(shared(1.0, "u"))),
        ValueError,
        "shared_vars",
    ),
    "no shared variable": (call_after_fork(lambda: synk.gather(3)), TypeError, "shared_vars"),
    "shapes in reduce": (call_with_different_shapes(synk.reduce), ValueError, "reduce"),
    "shapes in all_reduce": (call_with_different_shapes(lambda s: synk.all_reduce(s, "sum")), ValueError, "all_reduce"),
    "shapes in all_gather": (
        call_with_different_shapes(lambda s: (synk.set_value(1, s, np.ones((1, 3))), synk.all_gather(s))),
        ValueError,
        "all_gather",
    ),
    "op of a collective": (
        call_after_fork(lambda: synk.reduce(make_function_of_x_and_s()[1], "mean")),
        ValueError,
        "op",
    ),
    "a rank that isn't": (
        call_after_fork(lambda: synk.get_value(2, make_function_of_x_and_s()[1])),
        IndexError,
        "rank",
    ),
    # -- fork
    "no ranks": (lambda: synk.fork(0), ValueError, "n_parallel"),
    "master_rank": (lambda: synk.fork(2, use_gpu=False, master_rank=2), ValueError, "master_rank"),
    "timeout": (lambda: synk.fork(2, timeout=-1), ValueError, "timeout"),
}


@pytest.mark.parametrize("name", TABLE)
def test_wrong_call_messages(name, monkeypatch):
    provoke, expected, *argument = TABLE[name]
    if "before fork" in name:
        monkeypatch.setattr(ranks.current_session, "_current", None)
    try:
        with raises(expected, *argument) as caught:
            provoke()
    finally:
        synk.close()
    assert caught.type is expected
    text = str(caught.value).split("\n\nThe traceback")[0]
    assert len(text.splitlines()[0]) < 400
    assert "<object" not in text


def test_message_when_all_ranks_raise():
    try:
        # Ranks that have not reached the step abort the command, possibly the master, too.
        with pytest.raises((ArithmeticError, synk.WorkerError), match="the sum is odd"):
            run_action("raise", (0, 1, 2))
    finally:
        synk.close()


def test_message_names_all_raising_workers(fork):
    with pytest.raises(synk.WorkerError) as caught:
        run_action("raise", (1, 2, 3), n=4)
    error = caught.value
    assert error.rank == min(error.failures)
    assert set(error.failures) <= {1, 2, 3}
    for rank in list(error.failures)[1:]:
        assert f"rank {rank}: ArithmeticError: the sum is odd" in str(error)
    assert str(error).startswith(f"rank {error.rank} raised ArithmeticError")
