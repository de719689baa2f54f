"""A short run of `soak`, and faults that longer runs have found."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from library import shared, tensor
from paths import SUPPORT
from system import is_alive

import synkhronos as synk
from synkhronos import ranks
from synkhronos.ranks import Command

pytestmark = pytest.mark.starts_programs


@pytest.mark.faults
@pytest.mark.timeout(100)
def test_short_soak_finds_no_error():
    script = SUPPORT / "soak.py"
    done = subprocess.run(
        [sys.executable, str(script), "--seconds", "8", "--seed", "7"], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "0 wrong results, 0 hangs" in done.stdout


# -- regressions that soaks found ----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3])
def test_soak_oracle_gathers_scalars_over_slices(fork, n):
    fork(n)
    x = tensor.dvector("x")
    f = synk.function([x], [(x.sum(), "gather"), (x.max(), "max")])
    gathered, largest = f(np.arange(12.0), num_slices=2)
    assert gathered.tolist() == np.arange(12.0).reshape(2 * n, -1).sum(axis=1).tolist()
    assert largest == 11


def test_death_before_a_segment_is_sent_is_named(fork):
    fork(3)
    pid = ranks.get_session().worker_pids[1]
    os.kill(pid, signal.SIGKILL)
    while is_alive(pid):
        pass
    x = tensor.dvector("x")
    with pytest.raises(synk.WorkerError, match="rank 1 .* was killed by SIGKILL"):
        synk.function([x], (x.sum(), "sum"))(np.arange(6.0))


class FailAtBarrier(Command):
    """Let a rank fail at its third barrier from now."""

    def __init__(self, failing_rank):
        self.failing_rank = failing_rank

    def run(self, rank):
        if rank.number == self.failing_rank:
            left, real_barrier = [None, None], rank.barrier

            def barrier():
                if not left:
                    del rank.barrier
                    raise OSError("on purpose")
                left.pop()
                real_barrier()

            rank.barrier = barrier


@pytest.mark.parametrize("failing_rank", [0, 1, 2])
def test_failed_broadcast_keeps_the_old_value(fork, failing_rank):
    fork(3)
    s = shared(np.zeros(3), "s")
    f = synk.function([], [], updates=[(s, s + 1)])
    f()
    s.set_value(np.full(300_000, 5.0))  # more than twice the scratch memory
    ranks.get_session().run(FailAtBarrier(failing_rank))
    with pytest.raises(OSError if failing_rank == 0 else synk.WorkerError):
        synk.broadcast(s)
    assert [synk.get_value(r, s).tolist() for r in (1, 2)] == [[1.0] * 3] * 2
    synk.broadcast(s)
    assert synk.get_shapes(s) == [(300_000,)] * 3


REFUSED = {
    "an op": lambda s, i: synk.all_reduce([s, i], "avg"),
    "an op of reduce": lambda s, i: synk.reduce([s, i], "avg", in_place=False),
    "a value": lambda s, i: synk.broadcast([s, i], [np.ones(3), np.ones((3, 3))]),
    "too few values": lambda s, i: synk.scatter([s, i], [np.ones(3)]),
    "a batch": lambda s, i: synk.set_value(1, s, np.ones(3), batch=[7]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_collective_sends_nothing(case, two_ranks_per_test):
    s, i = shared(np.zeros(3), "s"), shared(np.zeros(3, np.int64), "i")
    f = synk.function([], [], updates=[(s, s), (i, i)])
    with pytest.raises((TypeError, ValueError, IndexError)):
        REFUSED[case](s, i)
    s.set_value(np.full(3, 5.0))  # the initial value
    assert synk.get_value(1, s).tolist() == [5.0] * 3
    f()
