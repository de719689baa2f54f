"""`fork` and `close` in programs: processes, output, signals, threads."""

import gc
import os

import pytest
from system import is_alive, list_children, run_code

import synkhronos as synk
from synkhronos.ranks import count_available_cores

pytestmark = pytest.mark.new_ranks


def test_fork_of_one_rank_starts_no_workers(fork):
    assert fork(1) == 1
    assert list_children(os.getpid()) == []


def test_fork_makes_a_rank_for_each_core():
    try:
        assert synk.fork(use_gpu=False) == count_available_cores()
    finally:
        synk.close()


def test_close_ends_workers_and_can_be_repeated(fork):
    assert fork(3) == 3
    assert len(list_children(os.getpid())) == 2
    synk.close()
    assert list_children(os.getpid()) == []
    synk.close()
    assert fork(2) == 2


def test_fork_server_keeps_its_caller_alive_during_imports(tmp_path):
    (tmp_path / "slow_module.py").write_text("import time; time.sleep(0.3)")
    run_code(
        """
        import os, signal, sys
        import pytest
        from synkhronos.ranks.fork_server import ForkServer
        sys.path.append(sys.argv[1])
        server, calls = ForkServer(1), []
        server.import_modules(["missing_module", "slow_module"], lambda: calls.append(server.has_exited))
        assert len(calls) > 3 and not any(calls)
        server.import_modules(["slow_module"], calls.clear)  # the second time at once
        os.kill(server._pid, signal.SIGKILL)
        os.waitid(os.P_PID, server._pid, os.WEXITED | os.WNOWAIT)
        assert server.has_exited
        with pytest.raises(OSError):
            server.import_modules([], calls.clear)
        server.close()
        """,
        str(tmp_path),
    )


@pytest.mark.slow
def test_many_sessions_leave_nothing():
    def footprint():
        gc.collect()  # collect garbage cycles of earlier tests, which could be freed at any moment
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), sum("memfd:" in line or "/dev/zero" in line for line in maps)

    def use_session():
        synk.fork(2, use_gpu=False)
        synk.data([1.0, 2.0])
        synk.close()

    use_session()
    before = footprint()
    for _ in range(20):
        use_session()
    assert footprint() == before


@pytest.fixture(scope="module")
def finished_program(tmp_path_factory):
    """Run a program that does not close its ranks; return the words that it and its workers printed, and its folder."""
    folder = tmp_path_factory.mktemp("program")
    printed = run_code(
        """
        import atexit, os
        import synkhronos as synk
        from synkhronos import ranks
        class Print(ranks.Command):
            def run(self, rank): print(f"rank{rank.number} ", end="")  # in one write
        atexit.register(lambda: print("exit", flush=True))
        print("before ", end="")
        synk.fork(3, use_gpu=False, profile_workers=True)
        print(open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read(), end=" ")
        ranks.get_session().run(Print())
        """,
        cwd=folder,
    )
    return printed.split(), folder


def test_workers_end_at_exit_without_close(finished_program):
    pids = [int(word) for word in finished_program[0] if word.isdecimal()]
    assert len(pids) == 2
    assert not any(map(is_alive, pids))


def test_workers_run_no_atexit_functions_of_the_master(finished_program):
    assert finished_program[0].count("exit") == 1


def test_workers_print_where_the_master_prints(finished_program):
    words = [word for word in finished_program[0] if word.startswith("rank")]
    assert sorted(words) == ["rank0", "rank1", "rank2"]


def test_output_buffered_before_fork_is_printed_once(finished_program):
    assert finished_program[0].count("before") == 1


def test_workers_write_profiles(finished_program):
    names = sorted(path.name.rsplit("_", 1)[0] for path in finished_program[1].glob("*.prof"))
    assert names == ["synkhronos_rank1", "synkhronos_rank2"]


def test_inherited_sockets_do_not_stay_open_in_workers():
    printed = run_code("""
        import socket, synkhronos as synk
        server = socket.create_server(("127.0.0.1", 0))
        address = server.getsockname()
        synk.fork(2, use_gpu=False)
        server.close()
        try:
            socket.create_connection(address, 1)
        except ConnectionRefusedError:
            print("refused")
    """)
    assert printed.split() == ["refused"]


def test_close_gives_each_worker_time_to_end(tmp_path):
    run_code(
        """
        import os, time
        import synkhronos as synk
        from synkhronos import ranks

        class Slow(ranks.Command):
            def run(self, rank):
                if rank.number == 2:  # from then on, whatever it does at its end takes a while
                    end = os._exit
                    os._exit = lambda code: (time.sleep(0.5), open("ended", "w"), end(code))

        synk.fork(3, use_gpu=False)
        ranks.get_session().run(Slow())
        synk.close()
        """,
        cwd=tmp_path,
    )
    assert (tmp_path / "ended").exists()


def test_fork_divides_threads_and_close_restores_them():
    threadpoolctl = pytest.importorskip("threadpoolctl")

    def threads():
        return [pool["num_threads"] for pool in threadpoolctl.threadpool_info()]

    before = threads()
    n = synk.fork(2, use_gpu=False)
    try:
        assert all(number <= max(1, count_available_cores() // n) for number in threads())
    finally:
        synk.close()
    assert threads() == before


def test_failed_fork_leaves_nothing(monkeypatch):
    forked = []

    def failing(real):
        def fork(*args, **kwargs):
            if len(forked) == 2:
                raise BlockingIOError("no more processes")
            forked.append(real(*args, **kwargs))
            return forked[-1]

        return fork

    monkeypatch.setattr(os, "fork", failing(os.fork))
    monkeypatch.setattr(os, "posix_spawn", failing(os.posix_spawn))
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(BlockingIOError):
        synk.fork(4, use_gpu=False)
    monkeypatch.undo()
    assert list_children(os.getpid()) == []
    assert len(os.listdir("/proc/self/fd")) == files
    assert synk.fork(2, use_gpu=False) == 2
    synk.close()


def test_get_n_gpu_counts_visible_gpus(monkeypatch):
    present = synk.get_n_gpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert synk.get_n_gpu() == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,-1,1")
    assert synk.get_n_gpu() == min(present, 1)


@pytest.mark.skipif(count_available_cores() < 2, reason="one core can't be shared out")
def test_threads_of_a_late_loaded_blas_are_limited():
    printed = run_code("""
        import numpy as np, threadpoolctl
        from library import COMPILER, package, tensor as T, shared
        import synkhronos as synk
        from synkhronos.ranks import count_available_cores
        package.config.cxx = COMPILER
        synk.fork(2, use_gpu=False)
        x, w = T.matrix("x"), shared(np.ones((3, 3)), "w")
        f = synk.function([x], (T.dot(x, w).sum(), "sum"), mode="FAST_COMPILE")
        f(np.ones((4, 3)))
        print([pool["num_threads"] for pool in threadpoolctl.threadpool_info()], count_available_cores() // 2)
    """)
    *threads, share = printed.replace("[", "").replace("]", "").replace(",", "").split()
    assert threads
    assert all(int(number) <= max(1, int(share)) for number in threads)
