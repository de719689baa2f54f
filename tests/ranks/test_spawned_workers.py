"""Workers that start as new processes, since XLA has been started in the master."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from library import INTERPRETED, XLA, shared
from library import tensor as T
from rank_commands import GetIdentity
from system import LIMIT, is_alive, time_limit

import synkhronos as synk
from synkhronos import ranks
from synkhronos.ranks import Command

pytestmark = pytest.mark.skipif(not XLA, reason="forks after XLA was started")

VALUE = np.arange(4.0)


@pytest.fixture
def started_xla():
    """Start XLA in this process."""
    import jax

    jax.devices()


@pytest.mark.new_ranks
def test_fork_can_be_repeated_after_jax_was_used(fork, started_xla):
    x = T.dvector("x")
    w = shared(1.0, "w")
    f = None
    for n in (2, 1, 2):
        fork(n)
        if f is None:
            f = synk.function([x], (x * w, "gather"), updates=[(w, w + 1)])
        before = float(np.asarray(w.get_value()))
        np.testing.assert_array_equal(f(VALUE), VALUE * before)
        np.testing.assert_array_equal(synk.gather(w), [before + 1] * n)
        synk.close()


def start_program(code, **kwargs):
    """Start a program in which XLA has been started."""
    head = "import jax, numpy as np, synkhronos as synk; jax.config.update('jax_enable_x64', True); jax.numpy.ones(1);"
    path = os.pathsep.join([str(Path(synk.__file__).parent.parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    code = f"{head}\n{textwrap.dedent(code)}"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **kwargs,
    )


def test_fork_after_jax_was_used():
    done = start_program("""
        import pytensor.tensor as T
        synk.fork(3, use_gpu=False)
        x = T.dvector("x")
        print(np.asarray(synk.function([x], (x * 2, "gather"), mode="JAX")(np.arange(4.0))).tolist())
        print(float(synk.function([x], (x.sum(), "sum"), mode="FAST_COMPILE")(np.arange(4.0))))
    """)
    out, err = done.communicate(timeout=60)
    assert done.returncode == 0, err
    assert out.splitlines() == ["[0.0, 2.0, 4.0, 6.0]", "6.0"]


@pytest.mark.new_ranks
def test_spawned_workers_inherit_sys_path(fork, started_xla, tmp_path, monkeypatch):
    (tmp_path / "users_own.py").write_text(
        textwrap.dedent("""
            from pytensor.graph.basic import Apply
            from pytensor.graph.op import Op

            class Twice(Op):
                __props__ = ()

                def make_node(self, x):
                    return Apply(self, [x], [x.type()])

                def perform(self, node, inputs, outputs):
                    outputs[0][0] = inputs[0] * 2
        """)
    )
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.syspath_prepend(tmp_path.name)  # relative to the master's present directory
    import users_own

    fork(2)
    x = T.dvector("x")
    f = synk.function([x], (users_own.Twice()(x), "gather"), mode=INTERPRETED)
    np.testing.assert_array_equal(f(VALUE), VALUE * 2)


def test_spawned_workers_end_with_the_master():
    master = start_program("""
        import os, time
        synk.fork(3, use_gpu=False)
        print(*open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read().split(), flush=True)
        time.sleep(60)
    """)
    pids = [int(pid) for pid in master.stdout.readline().split()]
    assert len(pids) == 2
    master.kill()
    master.communicate()
    deadline = time.monotonic() + LIMIT
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_alive, pids))


def test_spawned_workers_profile_print_and_skip_atexit(tmp_path):
    done = start_program(
        """
        import atexit
        from synkhronos import ranks
        atexit.register(lambda: print("exit", flush=True))
        synk.fork(3, use_gpu=False, profile_workers=True)
        synk.data([1.0])
        """,
        cwd=tmp_path,
    )
    out, err = done.communicate(timeout=60)
    assert done.returncode == 0, err
    assert out.split() == ["exit"]
    names = sorted(path.name.rsplit("_", 1)[0] for path in tmp_path.glob("*.prof"))
    assert names == ["synkhronos_rank1", "synkhronos_rank2"]


class Sleep(Command):
    """Command from which the workers never return."""

    def run(self, rank):
        if not rank.is_master:
            time.sleep(60)


@pytest.mark.new_ranks
def test_spawned_workers_end_after_the_fork_timeout(fork, started_xla):
    fork(2, timeout=20.0)
    session = ranks.get_session()
    session.timeout = 0.5  # starting takes seconds
    with time_limit(), pytest.raises(synk.WorkerError, match=r"rank 1 did not finish within the 0\.5 seconds"):
        session.run(Sleep())
    fork(2)
    assert len(ranks.get_session().worker_pids) == 1


@pytest.mark.new_ranks
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSEGV"])
def test_death_of_a_spawned_worker_is_reported(fork, started_xla, how):
    fork(3)
    (_, pid), *_ = ranks.get_session().worker_pids.items()
    os.kill(pid, getattr(signal, how))
    with pytest.raises(synk.WorkerError, match=rf"process {pid}\) was killed by {how}"):
        ranks.get_session().run(GetIdentity())
    assert not is_alive(pid)
