"""What errors say: what happened, to whom, and what to try.

A table: each row has a name, what provokes the error, the exception, and the words that have to be in its text.
"""

import os
import re
import signal
import sys
import threading
import time

import numpy as np
import pytest
from library import INTERPRETED, NAME, read, shared, tensor

import synkhronos as synk
from synkhronos import devices

if NAME == "pytensor":
    from pytensor.graph.basic import Apply
    from pytensor.graph.op import Op
else:
    from theano.gof import Apply, Op


class Do(Op):
    """Returns its argument, after a worker has done something; or the master, or all."""

    __props__ = ("deed", "who")

    def __init__(self, deed, who=(1,)):
        self.deed, self.who = deed, who

    def make_node(self, x):
        return Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs, *_):
        if int(inputs[0][0]) in self.who:  # rows are numbered by the rank that has them
            DEEDS[self.deed]()
        outputs[0][0] = inputs[0].copy()


def raise_error():
    raise ArithmeticError("the sum is odd")


def call_again():
    synk.get_shapes(CALLED_AGAIN[0])


CALLED_AGAIN = []
DEEDS = {
    "raise": raise_error,
    "sleep": lambda: time.sleep(60),
    "exit": lambda: os._exit(3),
    "sys.exit": lambda: sys.exit(3),
    "call": call_again,
    **{f"SIG{name}": (lambda number=getattr(signal, f"SIG{name}"): (os.kill(os.getpid(), number), time.sleep(60)))
       for name in "KILL SEGV BUS ABRT FPE ILL TERM".split()},
}  # fmt: skip


def do(deed, who=(1,), n=3, updates=False, **kwargs):
    """Fork, and have some ranks do something in a call."""
    synk.fork(n, use_gpu=False, **kwargs)
    x, w = tensor.dvector("x"), shared(np.zeros(()), "w")
    CALLED_AGAIN[:] = [w]
    f = synk.function(
        [x], (Do(deed, who)(x).sum(), "sum"), updates=[(w, w + 1)] if updates else [(w, w)], name="f", mode=INTERPRETED
    )
    f(np.arange(float(n)))


def forked(action, n=2, **kwargs):
    def provoke():
        synk.fork(n, use_gpu=False, **kwargs)
        action()

    return provoke


def after_close(action):
    def provoke():
        synk.fork(2, use_gpu=False)
        synk.close()
        action()

    return provoke


def x_and_s():
    x, s = tensor.dmatrix("x"), shared(np.zeros((4, 2)), "s")
    f = synk.function([x], (x.sum(axis=0) + s.sum(), "sum"), sliceable_shareds=[s], name="f")
    return f, s


def call(*args, **kwargs):
    return forked(lambda: x_and_s()[0](*args, **kwargs))


def dead_and_again():
    with pytest.raises(synk.WorkerError):
        do("SIGKILL")
    synk.data([1.0])


def old_data():
    synk.fork(2, use_gpu=False)
    d = synk.data(np.ones((4, 2)))
    synk.close()
    synk.fork(2, use_gpu=False)
    x_and_s()[0](d)


def old_data_read():
    synk.fork(2, use_gpu=False)
    d = synk.data([1.0])
    synk.close()
    d[0]


def unpicklable():
    operation = Do("raise")
    operation.lock = threading.Lock()
    x = tensor.dvector("x")
    synk.function([x], (operation(x).sum(), "sum"), name="f")(np.ones(4))


def different_shapes(collective):
    def provoke():
        _, s = x_and_s()
        synk.scatter(s, np.ones((5, 2)))
        collective(s)

    return forked(provoke)


def integer_update():
    x, c = tensor.dvector("x"), shared(np.int64(0), "c")
    synk.function([x], (x.sum(), "sum"), updates=[(c, c + 1)], name="f")(np.ones(4), num_slices=2)


def death_without_a_code():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        do("SIGKILL")
    finally:
        signal.signal(signal.SIGCHLD, before)


def beside_gpus(count, lacking=(), cuda=False, **kwargs):
    """Fork on a machine that seems to have GPUs."""

    def provoke():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(devices, "get_n_gpu", lambda: count)
            for device in (devices.JAX, devices.PYGPU):
                patch.setattr(device, "missing_requirements", lambda: list(lacking))
                patch.setattr(type(device), "is_on_gpu", False)
            patch.setattr(devices.cuda, "is_started", lambda: cuda)
            synk.fork(**kwargs)

    return provoke


def in_a_copy(action):
    """Have a process that the user forked do something, and raise here what it raised there."""

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


def two_shapes():
    x = tensor.dmatrix("x")
    read(synk.function([x], (x.sum(axis=1), "sum"), name="f")(np.ones((3, 2))))


START_AGAIN = r"Call synkhronos\.fork\(\) to start again"

#: name: (what provokes it, exception, words in its text)
TABLE = {
    # -- no ranks
    "function before fork": (lambda: synk.function([]), RuntimeError, ["no ranks are running", r"call synkhronos\.fork"]),
    "data before fork": (lambda: synk.data([1.0]), RuntimeError, ["no ranks are running", r"call synkhronos\.fork"]),
    "call after close": (after_close(lambda: synk.data([1.0])), RuntimeError, ["were closed", r"call synkhronos\.fork"]),
    "distribute after close": (after_close(synk.distribute), RuntimeError, ["were closed", r"call synkhronos\.fork"]),
    "forked twice": (forked(lambda: synk.fork(3)), RuntimeError, ["2 ranks are running", r"call synkhronos\.close\(\)"]),
    "Data after close": (old_data_read, RuntimeError, ["Data object's memory was freed", "make a new one"]),
    "Data of earlier ranks": (old_data, ValueError, ["input 0 .x. of f", "before the present fork", "make a new one"]),
    "no GPUs": (beside_gpus(0, use_gpu=True), RuntimeError, ["use_gpu=True", "there is no GPU", "leave use_gpu out", "False"]),
    "GPUs that nothing can drive": (
        beside_gpus(2, ["nccl4py", "cuda-core"], use_gpu=True), RuntimeError,
        ["use_gpu=True", "2 GPUs are visible", "install nccl4py, cuda-core", r"synkhronos\[(gpu|theano-gpu)\]"],
    ),
    "more ranks than GPUs": (
        beside_gpus(2, n_parallel=3, use_gpu=True), ValueError, ["n_parallel=3, but 2 GPUs", "each rank needs one", "use_gpu=False"]
    ),
    "more ranks than GPUs by default": (
        beside_gpus(2, n_parallel=3), ValueError, ["n_parallel=3, but 2 GPUs", "use_gpu=False"]
    ),
    "CUDA in use before the fork": (
        beside_gpus(2, cuda=True, use_gpu=True), RuntimeError,
        ["has started CUDA already", r"call synkhronos\.fork\(\) before", "use_gpu=False"],
    ),
    "a copy of the master": (
        in_a_copy(lambda: synk.data([1.0])), RuntimeError, ["belong to the process that", "copy", r"call synkhronos\.fork"]
    ),
    "a copy of the master that closes": (
        in_a_copy(lambda: (synk.close(), synk.data([1.0]))), RuntimeError, ["belong to the process", "call it here"]
    ),
    "a death without a code": (
        death_without_a_code, synk.WorkerError,
        [r"rank 1 \(process \d+\) ended \(how is not known", "SIGCHLD", "os.wait", r"Call synkhronos\.fork\(\)"],
    ),
    # -- workers that die
    **{
        f"killed by {name}": (
            lambda name=name: do(name), synk.WorkerError,
            [rf"rank 1 \(process \d+\) was killed by {name}", why, "the other workers were ended", START_AGAIN],
        )
        for name, why in {
            "SIGKILL": "memory runs out", "SIGSEGV": "compiled code", "SIGBUS": "/dev/shm was full",
            "SIGABRT": "", "SIGFPE": "", "SIGILL": "", "SIGTERM": "",
        }.items()
    },
    "exited": (
        lambda: do("exit"), synk.WorkerError,
        [r"rank 1 \(process \d+\) exited with code 3", "see what it printed", "the other workers were ended", START_AGAIN],
    ),
    "after a death": (dead_and_again, RuntimeError, [r"rank 1 \(process \d+\) was killed by SIGKILL", START_AGAIN]),
    "timed out": (
        lambda: do("sleep", timeout=0.5), synk.WorkerError,
        ["rank 1 did not finish within the 0.5 seconds", r"fork\(timeout=\.\.\.\)", "workers were ended", START_AGAIN],
    ),
    # -- ranks that raise
    "a worker raised": (
        lambda: do("raise"), synk.WorkerError,
        ["rank 1 raised ArithmeticError: the sum is odd", "The traceback of rank 1:", "raise_error"],
    ),
    "a worker called exit": (lambda: do("sys.exit"), synk.WorkerError, ["rank 1 raised SystemExit: 3", "traceback"]),
    "the master raised": (lambda: do("raise", (0,)), ArithmeticError, ["the sum is odd"]),
    # The others are heard too, if they have come as far; those that have not leave the command: the master, too, may.
    "all raised": (lambda: do("raise", (0, 1, 2)), (ArithmeticError, synk.WorkerError), ["the sum is odd"]),
    "with updates": (
        lambda: do("raise", updates=True), synk.WorkerError,
        [r"updates were applied on ranks \[0, 2\], and not on ranks \[1\]", r"broadcast\(\) makes them equal again"],
    ),
    "a call inside a call": (
        lambda: do("call", (0,)), RuntimeError, ["made from inside another call", "after that call has returned"]
    ),
    # -- memory
    "no room": (
        forked(lambda: synk.data(shape=1 << 45, dtype="float64")), MemoryError,
        ["no room for 281,474,976,710,656 bytes of shared memory", "df -h /dev/shm", "--shm-size", "free Data objects"],
    ),
    # -- functions
    "an unpicklable graph": (
        forked(unpicklable), TypeError, ["f: the graph can't be pickled", "lock"]
    ),
    "avg of an integer output": (
        forked(lambda: synk.function([v := tensor.lvector("v")], v.sum())), ValueError,
        ["outputs: op 'avg' of output 0", "int64", "choose 'sum'", "or cast"],
    ),
    "an unknown op": (
        forked(lambda: synk.function([v := tensor.dvector("v")], (v.sum(), "average"))), ValueError,
        ["outputs: the op of output 0", "'avg', 'mean'", "got 'average'"],
    ),
    "a scattered scalar": (
        forked(lambda: synk.function([tensor.dscalar("v")])), ValueError, ["'v' has no rows", "put it into bcast_inputs"]
    ),
    # -- inputs
    "too few inputs": (call(), TypeError, ["f: missing input 0", "x"]),
    "too many inputs": (call(1, 2), TypeError, ["f takes 1 inputs, got 2"]),
    "an unknown input": (call(y=1), TypeError, ["f has no input 'y'", r"its inputs are \['x'\]"]),
    "dimensions": (call(np.ones(3)), TypeError, [r"input 0 \(x\) of f", "matrix|Matrix", r"shape \(3,\)"]),
    "a dtype": (call(np.ones((3, 2), complex)), TypeError, [r"input 0 \(x\) of f", "float64", "complex128"]),
    "Data of another dtype": (
        forked(lambda: x_and_s()[0](synk.data(np.ones((3, 2), "float32")))), TypeError,
        [r"input 0 \(x\) of f", "expected float64 of 2 dimensions", "got Data of float32"],
    ),
    "Data that can't be cast": (
        forked(lambda: synk.data(dtype="float32", ndim=1, name="d").set_value([1.5])), TypeError,
        ["x: float64 can't be cast safely to float32 for 'd'", "force_cast=True"],
    ),
    # -- batches
    "batch too long": (call(np.ones((3, 2)), batch=4), IndexError, ["batch=4", "0 to 3"]),
    "batch out of range": (call(np.ones((3, 2)), batch=[0, 3]), IndexError, ["batch: index 3", "3 rows"]),
    "batch of another kind": (call(np.ones((3, 2)), batch="all"), TypeError, ["batch", "slice", "got 'all'"]),
    "a mask of another length": (call(np.ones((3, 2)), batch=[True]), ValueError, ["batch: a mask", "3 rows", "got 1"]),
    "batch_s out of range": (call(np.ones((4, 2)), batch_s=[9]), IndexError, ["batch_s: index 9", "4 rows", "on rank 0"]),
    "batch_s for other ranks": (
        call(np.ones((4, 2)), batch_s=[[0], [1], [2]]), ValueError, ["batch_s", "each of 2 ranks", "got 3"]
    ),
    "no slices": (call(np.ones((4, 2)), num_slices=0), ValueError, ["num_slices: expected at least 1, got 0"]),
    "an integer's average over slices": (
        forked(integer_update), ValueError, ["num_slices=2", "'avg' of the update of 'c'", "int64", "another op"]
    ),
    "an unknown output": (call(np.ones((4, 2)), output_subset=[1]), IndexError, ["output_subset: f has 1 outputs", "1"]),
    "shapes of outputs": (
        forked(two_shapes), ValueError, ["output 0: op 'sum'", "the same shape", r"rank 0 has \(2,\), rank 1 has \(1,\)"]
    ),
    # -- collectives
    "an unknown shared variable": (
        forked(lambda: synk.broadcast(shared(1.0, "u"))), ValueError, ["shared_vars: no function uses 'u'", "make a"]
    ),
    "no shared variable": (forked(lambda: synk.gather(3)), TypeError, ["shared_vars: expected a variable", "got 3"]),
    "shapes in reduce": (
        different_shapes(synk.reduce), ValueError,
        [r"reduce: 's' needs the same shape", r"rank 0 has \(3, 2\), rank 1 has \(2, 2\)", r"see gather\(\)"],
    ),
    "shapes in all_reduce": (
        different_shapes(lambda s: synk.all_reduce(s, "sum")), ValueError,
        ["all_reduce: 's' needs", r"rank 0 has \(3, 2\), rank 1 has \(2, 2\)"],
    ),
    "shapes in all_gather": (
        different_shapes(lambda s: (synk.set_value(1, s, np.ones((1, 3))), synk.all_gather(s))), ValueError,
        ["all_gather: 's' can't be joined along axis 0", r"rank 0 has \(3, 2\), rank 1 has \(1, 3\)"],
    ),
    "op of a collective": (
        forked(lambda: synk.reduce(x_and_s()[1], "mean")), ValueError, ["op: expected one of", "'avg'", "got 'mean'"]
    ),
    "a rank that isn't": (
        forked(lambda: synk.get_value(2, x_and_s()[1])), IndexError, ["rank: expected 0 to 1, got 2"]
    ),
    # -- fork
    "no ranks": (lambda: synk.fork(0), ValueError, ["n_parallel: expected a number of ranks", "got 0"]),
    "master_rank": (
        lambda: synk.fork(2, use_gpu=False, master_rank=2), ValueError, ["master_rank: expected 0 to 1, got 2"]
    ),
    "timeout": (lambda: synk.fork(2, timeout=-1), ValueError, ["timeout: expected a positive number of seconds", "-1"]),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_errors_say_what_happened_to_whom_and_what_to_try(name, monkeypatch):
    provoke, expected, words = TABLE[name]
    if "before fork" in name:
        monkeypatch.setattr(sys.modules["synkhronos.ranks.session"], "_current", None)
    try:
        with pytest.raises(expected) as caught:
            provoke()
    finally:
        synk.close()
    assert caught.type is expected or expected is not RuntimeError
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    for word in words:
        assert re.search(word, text), f"no {word!r} in:\n{text}"
    first = text.splitlines()[0]
    assert len(first) < 400
    assert "<object" not in text.split("\n\nThe traceback")[0]


def test_several_workers_that_raise_are_all_named(fork):
    with pytest.raises(synk.WorkerError) as caught:
        do("raise", (1, 2, 3), n=4)
    error = caught.value
    assert error.rank == min(error.failures)
    assert set(error.failures) <= {1, 2, 3}
    for rank in list(error.failures)[1:]:
        assert f"rank {rank}: ArithmeticError: the sum is odd" in str(error)
    assert str(error).startswith(f"rank {error.rank} raised ArithmeticError")
