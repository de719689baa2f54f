"""Calls from several threads and from signal handlers run one at a time, each with its own inputs."""

import signal
import sys
import threading
import time

import numpy as np
import pytest
from library import DEVICE, INTERPRETED, PythonOp, shared, tensor
from system import LIMIT_SECONDS

import synkhronos as synk

#: In the master: functions that a `Sleep` calls when it starts to compute, and an event that ends it.
AT_START, WOKEN = [], threading.Event()


class Sleep(PythonOp):
    """Op that returns its argument after some seconds, or in the master when the event is set."""

    __props__ = ("seconds",)

    def __init__(self, seconds):
        self.seconds = seconds

    def compute(self, x):
        for action in AT_START:
            action()
        deadline = time.monotonic() + self.seconds
        while time.monotonic() < deadline and not WOKEN.is_set():
            time.sleep(0.01)
        return x


@pytest.fixture
def call_at_start():
    """Give a function that calls an action in the master, in the middle of a call whose graph has a `Sleep`."""
    yield AT_START.append
    AT_START.clear()


def make_sum_function():
    x = tensor.dvector("x")
    return synk.function([x], (x.sum(), "sum"))


def call_in_threads(*calls):
    """Give a function that runs calls in parallel threads, and returns the error of each, or None."""
    raised = [None] * len(calls)

    def guarded(i):
        try:
            calls[i]()
        except BaseException as error:
            raised[i] = error

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_data_made_by_threads_is_separate(fork):
    fork(3)
    total = make_sum_function()
    total(np.ones(3))
    arrays = [[], []]

    def make(thread):
        for i in range(100):
            arrays[thread].append((synk.data(np.full(50 + i, thread * 100.0 + i)), (50 + i) * (thread * 100.0 + i)))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # let threads switch between any two lines of the library
    try:
        assert call_in_threads(lambda: make(0), lambda: make(1)) == [None, None]
    finally:
        sys.setswitchinterval(interval)
    for array, expected in arrays[0] + arrays[1]:
        assert float(total(array)) == expected


def test_data_filled_by_a_thread(two_ranks_per_test):
    total = make_sum_function()
    total(np.ones(3))
    ready, n = [], 40

    def prefetch():
        for i in range(n):
            array = synk.data(np.full(10 + i, float(i)))
            array.set_length(11 + i)
            ready.append((array, i * (10.0 + i)))
            if i > 1:
                ready[i - 2][0].free_memory()

    def train():
        ones = synk.data(np.ones(100))
        while len(ready) < n:
            assert float(total(ones)) == 100

    assert call_in_threads(prefetch, train) == [None, None]
    for array, expected in ready[-2:]:
        assert float(total(array)) == expected


def test_threads_run_collectives_and_functions_in_turn(two_ranks_per_test):
    total, x = make_sum_function(), tensor.dvector("x")
    w = shared(np.zeros(3), "w")
    add = synk.function([x], updates=[(w, w + x.sum())])

    def reduce():
        for _ in range(20):
            synk.all_reduce(w, "max")

    def call():
        for i in range(20):
            assert float(total(np.full(7, float(i)))) == 7 * i
            add(np.ones(4))

    assert call_in_threads(reduce, call, reduce) == [None] * 3
    synk.all_reduce(w, "max")
    assert len(np.unique(synk.gather(w))) == 1


def test_signal_handler_cannot_call_the_running_function(two_ranks_per_test):
    total = make_sum_function()
    total(np.ones(3))
    refused, inside, wrong = [], [], []

    def handle(number, frame):
        # Another length, to detect reuse of the memory of the other call's input.
        try:
            inside.append(float(total(np.full(5, 1000.0))) == 5000)
        except RuntimeError as error:
            refused.append(str(error))

    before = signal.signal(signal.SIGALRM, handle)
    try:
        for i in range(600):
            signal.setitimer(signal.ITIMER_REAL, 1e-5 + i % 50 * 2e-5)
            value = float(total(np.full(4 + i % 3, float(i))))
            wrong += [i] if value != (4 + i % 3) * i else []
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not wrong
    assert refused and all("from inside another call" in text and "set a flag" in text for text in refused)
    assert all(inside)


def test_signal_handler_cannot_make_data_during_a_call(call_at_start, two_ranks_per_test):
    x = tensor.dvector("x")
    f = synk.function([x], (Sleep(0.05)(x).sum(), "sum"), mode=INTERPRETED)
    f(np.ones(2))
    calls = []

    def handle(number, frame):
        with pytest.raises(RuntimeError, match="from inside another call"):
            synk.data(np.ones(3))
        calls.append(1)

    before = signal.signal(signal.SIGALRM, handle)
    try:
        call_at_start(lambda: signal.raise_signal(signal.SIGALRM))
        assert float(f(np.ones(4))) == 4
    finally:
        signal.signal(signal.SIGALRM, before)
    assert calls


@pytest.mark.new_ranks
@pytest.mark.parametrize("seconds", [0.5, 60])
@pytest.mark.slow
def test_close_waits_two_seconds_for_other_threads(fork, seconds, call_at_start):
    if DEVICE != "host":
        pytest.skip("what computes on a GPU is not interrupted")
    fork(2)
    x = tensor.dvector("x")
    f = synk.function([x], (Sleep(seconds)(x).sum(), "sum"), mode=INTERPRETED)
    outcome = []

    def call():
        try:
            outcome.append(float(f(np.ones(4))))
        except BaseException as error:
            outcome.append(error)

    computing = threading.Event()
    call_at_start(computing.set)
    thread = threading.Thread(target=call)
    thread.start()
    assert computing.wait(LIMIT_SECONDS)
    synk.close()
    ended = bool(outcome)
    WOKEN.set()
    thread.join()
    WOKEN.clear()
    if seconds < 1:
        assert outcome == [4.0]
    else:
        assert not ended, "close waited for all of the call"
        assert type(outcome[0]) is RuntimeError
        assert "the ranks were closed" in str(outcome[0]) and "while this call ran" in str(outcome[0])
    fork(2)
    assert float(make_sum_function()(np.ones(3))) == 3


@pytest.mark.new_ranks
def test_signal_handler_can_close_during_a_call(fork, call_at_start):
    fork(2)
    x = tensor.dvector("x")
    f = synk.function([x], (Sleep(0.05)(x).sum(), "sum"), mode=INTERPRETED)

    def handle(number, frame):
        synk.close()

    before = signal.signal(signal.SIGALRM, handle)
    try:
        call_at_start(lambda: signal.raise_signal(signal.SIGALRM))
        with pytest.raises(RuntimeError, match="while this call ran, the ranks were closed"):
            f(np.ones(4))
    finally:
        signal.signal(signal.SIGALRM, before)
    fork(2)
    assert float(make_sum_function()(np.ones(3))) == 3
