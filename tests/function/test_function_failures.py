"""Calls that fail on one rank or several: exceptions, exits and deaths."""

import os
import signal

import numpy as np
import pytest
from function_cases import FailOnWorkers
from library import INTERPRETED, shared
from library import tensor as T
from system import list_children, time_limit

import synkhronos as synk

pytestmark = pytest.mark.usefixtures("rewrites")


# -- failing ---------------------------------------------------------------------------------------------------


def test_error_of_a_worker_names_its_rank(fork):
    fork(3)
    x, i = T.dvector("x"), T.lvector("i")
    f = synk.function([x, i], (x[i], "gather"), mode=INTERPRETED)  # XLA clamps the index
    value = np.arange(6.0)
    good = np.array([0, 1, 0, 1, 0, 1])
    for failing_rank in (1, 2):
        bad = good.copy()
        bad[2 * failing_rank] = 2  # each rank has two rows
        with pytest.raises(synk.WorkerError, match=f"rank {failing_rank} raised IndexError") as caught:
            f(value, bad)
        assert caught.value.rank == failing_rank
        assert "Traceback" in caught.value.worker_traceback and "IndexError" in caught.value.worker_traceback
        np.testing.assert_array_equal(f(value, good), value)  # the ranks stay usable


def test_error_in_the_master_is_raised_unchanged(fork):
    fork(2)
    x, i = T.dvector("x"), T.lvector("i")
    f = synk.function([x, i], (x[i], "gather"), mode=INTERPRETED)
    with pytest.raises(IndexError):
        f(np.arange(4.0), np.array([2, 0, 0, 1]))
    np.testing.assert_array_equal(f(np.arange(4.0), np.array([1, 0, 0, 1])), [1, 0, 2, 3])


def test_function_error_lists_all_failed_ranks(fork):
    fork(3)
    x = T.dvector("x")
    f = synk.function([x], FailOnWorkers("raise")(x).sum(), mode=INTERPRETED)
    with pytest.raises(synk.WorkerError, match="this worker has had enough") as caught:
        f(np.arange(3.0))
    assert caught.value.rank in (1, 2)
    assert "perform" in caught.value.worker_traceback
    assert all("LookupError" in line for line in caught.value.failures.values())
    # A compiled function without outputs has no barrier, so both workers reach their error.
    g = synk.function([x], updates=[(shared(0.0), FailOnWorkers("raise if 1")(x).sum())], mode=INTERPRETED)
    g(np.zeros(3))
    with pytest.raises(synk.WorkerError, match="Other ranks failed too") as caught:
        g(np.ones(3))
    assert set(caught.value.failures) == {1, 2}
    assert synk.function([x], (x.sum(), "sum"))(np.arange(3.0)) == 3


def test_error_between_slices_keeps_shared_variables(fork):
    fork(2)
    x = T.dvector("x")
    w = shared(0.0, "w")
    f = synk.function([x], updates=[(w, FailOnWorkers("raise if 1")(x).sum(), "sum")], mode=INTERPRETED)
    with pytest.raises(synk.WorkerError, match="this is one"):
        f(np.array([3.0, 3, 0, 1]), num_slices=2)
    np.testing.assert_array_equal(synk.gather(w)[1], 0)


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM"])
def test_killed_worker_ends_all_workers(fork, how):
    fork(3)
    x = T.dvector("x")
    f = synk.function([x], (x.sum(), "sum"))
    f(np.arange(3.0))
    g = synk.function([x], (FailOnWorkers(how)(x).sum(), "sum"), mode=INTERPRETED)
    synk.distribute()
    with time_limit(), pytest.raises(synk.WorkerError, match=rf"rank [12] \(process \d+\) was killed by {how}"):
        g(np.arange(3.0))
    assert list_children(os.getpid()) == []  # the others ended as well
    with pytest.raises(RuntimeError, match="fork"):
        f(np.arange(3.0))
    fork(2)
    assert f(np.arange(3.0)) == 3


def test_exit_code_of_a_worker_is_reported(fork):
    fork(2)
    x = T.dvector("x")
    f = synk.function([x], updates=[(shared(0.0), FailOnWorkers("exit")(x).sum())], mode=INTERPRETED)
    with pytest.raises(synk.WorkerError, match="rank 1 .* exited with code 3"):
        f(np.arange(3.0))


def test_next_call_reports_a_dead_worker(fork):
    fork(2)
    x = T.dvector("x")
    f = synk.function([x], (x.sum(), "sum"))
    f(np.arange(3.0))
    (pid,) = list_children(os.getpid())
    os.kill(pid, signal.SIGKILL)
    with time_limit(), pytest.raises(synk.WorkerError, match=f"rank 1 .process {pid}. was killed by SIGKILL"):
        f(np.arange(3.0))
