"""Messages of errors of ranks name the cause, the rank, and advice; tests/checks has those of wrong arguments."""

import os
import signal
import sys
import threading
import time

import numpy as np
import pytest
from library import INTERPRETED, PythonOp, shared, tensor
from messages import raises

import synkhronos as synk
from synkhronos import devices


class ActOnRanks(PythonOp):
    """Op that returns its argument after some ranks have run an action."""

    __props__ = ("action", "failing_ranks")

    def __init__(self, action, failing_ranks=(1,)):
        self.action, self.failing_ranks = action, failing_ranks

    def compute(self, x):
        if int(x[0]) in self.failing_ranks:  # each row has the number of its rank
            ACTIONS[self.action]()
        return x.copy()


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
    synk.get_shapes(READ_VARIABLES[0])


READ_VARIABLES = []
ACTIONS = {
    "raise": raise_error,
    "raise after updates": raise_after_other_updates,
    "sleep": lambda: time.sleep(60),
    "exit": lambda: os._exit(3),
    "call": call_again,
    "SIGKILL": lambda: (os.kill(os.getpid(), signal.SIGKILL), time.sleep(60)),
}


def run_action(action, failing_ranks=(1,), n=3, updates=False, **kwargs):
    """Fork, and run an action on some ranks during a call.

    Without ``updates`` the message does not depend on which ranks have applied them.
    """
    synk.fork(n, use_gpu=False, **kwargs)
    x, w = tensor.dvector("x"), shared(np.zeros(()), "w")
    READ_VARIABLES[:] = [w]
    f = synk.function(
        [x],
        ((ActOnRanks(action, failing_ranks)(x) + w).sum(), "sum"),
        updates=[(w, w + 1)] if updates else [],
        name="f",
        mode=INTERPRETED,
    )
    f(np.arange(float(n)))


def call_after_death():
    with pytest.raises(synk.WorkerError):
        run_action("SIGKILL")
    synk.data([1.0])


def pass_old_data():
    synk.fork(2, use_gpu=False)
    d = synk.data(np.ones(4))
    synk.close()
    synk.fork(2, use_gpu=False)
    x = tensor.dvector("x")
    synk.function([x], (x.sum(), "sum"), name="f")(d)


def call_with_unpicklable_op():
    synk.fork(2, use_gpu=False)
    operation = ActOnRanks("raise")
    operation.lock = threading.Lock()
    x = tensor.dvector("x")
    synk.function([x], (operation(x).sum(), "sum"), name="f")(np.ones(4))


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
            class_name, text = pipe.read().split("|", 1)
        raise {"RuntimeError": RuntimeError}[class_name](text)

    return provoke


#: name: (function that provokes the error, exception, argument)
ERRORS = {
    # -- ranks that cannot be used
    "Data of earlier ranks": (pass_old_data, ValueError, "x"),
    "no GPUs": (fork_with_gpus(0, use_gpu=True), RuntimeError, "use_gpu"),
    "GPUs without packages": (fork_with_gpus(2, ["nccl4py", "cuda-core"], use_gpu=True), RuntimeError, "use_gpu"),
    "more ranks than GPUs": (fork_with_gpus(2, n_parallel=3, use_gpu=True), ValueError, "n_parallel"),
    "more ranks than GPUs by default": (fork_with_gpus(2, n_parallel=3), ValueError, "n_parallel"),
    "CUDA in use before the fork": (fork_with_gpus(2, cuda=True, use_gpu=True), RuntimeError),
    "a copy of the master": (call_in_forked_copy(lambda: synk.data([1.0])), RuntimeError),
    "a copy of the master that closes": (call_in_forked_copy(lambda: (synk.close(), synk.data([1.0]))), RuntimeError),
    # -- workers that die
    "killed": (lambda: run_action("SIGKILL"), synk.WorkerError),
    "killed, without an exit status": (die_without_a_code, synk.WorkerError),
    "exited": (lambda: run_action("exit"), synk.WorkerError),
    "after a death": (call_after_death, RuntimeError),
    "timed out": (lambda: run_action("sleep", timeout=0.5), synk.WorkerError),
    # -- ranks that raise
    "a worker raised": (lambda: run_action("raise"), synk.WorkerError),
    "with updates": (lambda: run_action("raise after updates", updates=True), synk.WorkerError),
    "a call inside a call": (lambda: run_action("call", (0,)), RuntimeError),
    # -- arguments
    "an unpicklable graph": (call_with_unpicklable_op, TypeError, "f"),
    "timeout": (lambda: synk.fork(2, timeout=-1), ValueError, "timeout"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_error_of_ranks_names_its_cause(name):
    provoke, expected, *argument = ERRORS[name]
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
