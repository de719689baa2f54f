"""Workers that start as new processes, since XLA has been started in the master."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from library import INTERPRETED, XLA, package, shared
from library import tensor as T
from rank_commands import GatherMessages, GetIdentity, Sleep
from system import is_alive, time_limit, wait_until_ended

import synkhronos as synk
from synkhronos import ranks

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


@pytest.fixture(scope="module")
def finished_program(tmp_path_factory):
    """Run a program that forks after it has used JAX; return the lines that it printed, and its folder."""
    folder = tmp_path_factory.mktemp("program")
    program = start_program(
        """
        import atexit
        import pytensor.tensor as T
        atexit.register(lambda: print("exit", flush=True))
        synk.fork(3, use_gpu=False, profile_workers=True)
        x = T.dvector("x")
        print(np.asarray(synk.function([x], (x * 2, "gather"), mode="JAX")(np.arange(4.0))).tolist())
        print(float(synk.function([x], (x.sum(), "sum"), mode="FAST_COMPILE")(np.arange(4.0))))
        """,
        cwd=folder,
    )
    out, err = program.communicate(timeout=60)
    assert program.returncode == 0, err
    return out.splitlines(), folder


def test_program_that_has_used_jax_can_fork(finished_program):
    assert finished_program[0][:2] == ["[0.0, 2.0, 4.0, 6.0]", "6.0"]


def test_spawned_workers_run_no_atexit_functions_of_the_master(finished_program):
    assert finished_program[0][2:] == ["exit"]


def test_spawned_workers_write_profiles(finished_program):
    names = sorted(path.name.rsplit("_", 1)[0] for path in finished_program[1].glob("*.prof"))
    assert names == ["synkhronos_rank1", "synkhronos_rank2"]


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


@pytest.mark.new_ranks
def test_spawned_workers_have_settings_and_variables_of_the_script(fork, started_xla, tmp_path, monkeypatch):
    (tmp_path / "users_settings.py").write_text("SCALE = 2.0\n")
    (tmp_path / "users_scale.py").write_text(
        textwrap.dedent("""
            import numpy as np
            import pytensor
            import users_settings
            from pytensor.graph.basic import Apply
            from pytensor.graph.op import Op

            class Scale(Op):
                __props__ = ()

                def make_node(self, x):
                    return Apply(self, [x], [x.type()])

                def perform(self, node, inputs, outputs):
                    outputs[0][0] = np.asarray(inputs[0] * users_settings.SCALE, pytensor.config.floatX)
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import users_scale
    import users_settings

    monkeypatch.setattr(package.config, "floatX", "float32")
    users_settings.SCALE = 10.0
    fork(2)
    x = T.fvector("x")
    f = synk.function([x], (users_scale.Scale()(x), "gather"), mode=INTERPRETED)
    np.testing.assert_array_equal(f(np.arange(4000.0, dtype="float32")), np.arange(4000.0, dtype="float32") * 10)


def test_modules_that_import_theano_are_imported_on_spawned_workers(tmp_path):
    (tmp_path / "users_own.py").write_text(
        textwrap.dedent("""
            import theano

            class Twice(theano.Op):
                __props__ = ()

                def make_node(self, x):
                    return theano.Apply(self, [x], [x.type()])

                def perform(self, node, inputs, outputs):
                    outputs[0][0] = inputs[0] * 2

            def get_rank(context):
                return context.number
        """)
    )
    program = start_program(
        """
        import synkhronos.compat, users_own
        import theano.tensor as T
        synk.fork(2, use_gpu=False)
        print(synk.run(users_own.get_rank))
        synk.close()
        synk.fork(2, use_gpu=False)
        x = T.dvector("x")
        print(synk.function([x], (users_own.Twice()(x), "gather"), mode="FAST_COMPILE")(np.arange(4.0)).tolist())
        """,
        cwd=tmp_path,
    )
    out, err = program.communicate(timeout=60)
    assert program.returncode == 0, err
    assert out.splitlines() == ["[0, 1]", "[0.0, 2.0, 4.0, 6.0]"]


def test_spawned_workers_end_when_the_master_is_killed():
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
    wait_until_ended(pids)


@pytest.mark.new_ranks
def test_command_beyond_the_timeout_ends_spawned_workers(fork, started_xla):
    fork(2, timeout=20.0)
    session = ranks.get_session()
    pids = list(session.worker_pids.values())
    session.timeout = 0.5  # starting takes seconds
    with time_limit(), pytest.raises(synk.WorkerError, match=r"rank 1 did not finish within the 0\.5 seconds"):
        session.run(Sleep(60, "workers"))
    assert not any(map(is_alive, pids))
    fork(2)
    assert ranks.get_session().run(GatherMessages((3,))) == 2


@pytest.mark.new_ranks
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSEGV"])
def test_death_of_a_spawned_worker_is_reported(fork, started_xla, how):
    fork(3)
    (_, pid), *_ = ranks.get_session().worker_pids.items()
    os.kill(pid, getattr(signal, how))
    with pytest.raises(synk.WorkerError, match=rf"process {pid}\) was killed by {how}"):
        ranks.get_session().run(GetIdentity())
    assert not is_alive(pid)
