"""Deaths of a host, an agent or a remote rank: the master's error, its delay, and leaks.

The tests share a set of hosts, on which the program of `hosts.fault_target` forks for each test.
"""

import os
import re
import signal
import time
from importlib.metadata import distribution
from pathlib import Path

import pytest
from faults.harness import check_delay
from hosts import are_simulated
from hosts.tree import SimulatedHosts
from system import LIMIT_SECONDS

pytestmark = [pytest.mark.starts_programs, pytest.mark.hosts, pytest.mark.faults]
needs_namespaces = pytest.mark.skipif(not are_simulated(), reason="no namespaces here, so that no host is lost alone")

#: Seconds of silence after which a host is lost; on a loaded machine, a live one may be silent for a second.
SILENCE = 3
PLACES = ["idle", "computing", "barrier", "collective", "lock", "exchange"]
#: Places, and the ranks that block there: rank 0 is the master, ranks 0 and 1 are on the first host, rank 2 is remote.
BLOCKING_RANKS = {"idle": [0], "computing": [0, 2], "barrier": [2], "collective": [2], "lock": [2], "exchange": [2]}


class SharedHosts:
    """Context with the hosts of all tests here, which are replaced after a failed test.

    `other` is a remote host that is alive.
    """

    def __init__(self):
        self._tree, self._is_sound = None, False

    def __enter__(self):
        if not self._is_sound:
            self.end()
            self._tree = SimulatedHosts(list("abcdefgh"))  # hosts that die in the two places, and one that stays alive
            self.other = "b"
        self._is_sound = False
        return self._tree

    def __exit__(self, kind, *_):
        self._is_sound = kind is None

    def replace_remote_host(self):
        """Use the next remote host from now on, as the present one is dead."""
        self.other = chr(ord(self.other) + 1)

    def end(self):
        if self._tree is not None:
            self._tree.close()


@pytest.fixture(scope="module")
def hosts():
    """Start the hosts' programs that the tests share; end them after the last test."""
    hosts = SharedHosts()
    yield hosts
    hosts.end()


def fork(hosts, tree, **settings):
    """Fork; return the process ids."""
    outcome = tree.fork(["a:2", f"{hosts.other}:1"], **settings)
    assert outcome.get("value") == 3, outcome
    return tree.list_ranks()


def block_ranks_at(tree, place, action="hold", fault_ranks=None):
    """Order ranks to block at a place, and wait until they have reached it."""
    fault_ranks = fault_ranks or BLOCKING_RANKS[place]
    tree.send_order("run_faulty_command", place=place, fault_ranks=fault_ranks, action=action)
    for _ in fault_ranks:
        tree.expect_event("inside")


def check_ranks_work(tree):
    """Check that the ranks reduce arrays."""
    outcome = tree.run_order("run_faulty_command", place="barrier", fault_ranks=[], action="")
    assert outcome.get("value") is True, outcome


def check_error(outcome, fault_time, error="WorkerError", rank=None, words=()):
    """Check the outcome of a fault and its delay, and print the delay."""
    print(
        f"{outcome['ended'] - fault_time:.2f} s: {outcome.get('error')}: {outcome.get('message', '').splitlines()[:1]}"
    )
    assert outcome.get("error") == error, outcome
    for word in words:
        assert word in outcome["message"], outcome
    assert outcome["rank"] == rank, outcome
    check_delay(outcome["ended"] - fault_time)


# -- the ranks live on -----------------------------------------------------------------------------------------


def test_exceptions_and_interrupts_leave_hosts_usable(hosts):
    with hosts as tree:
        fork(hosts, tree)
        for place in PLACES[1:]:
            fault_time = time.monotonic()
            block_ranks_at(tree, place, "raise", fault_ranks=[2])
            words = [f"rank 2 on host {hosts.other} raised KeyError", "a fault", "fault_target.py"]
            check_error(tree.expect_event("outcome"), fault_time, rank=2, words=words)
        fault_time = time.monotonic()
        block_ranks_at(tree, "computing", "raise", fault_ranks=[0])
        check_error(tree.expect_event("outcome"), fault_time, error="KeyError")
        for place in PLACES:
            block_ranks_at(tree, place)
            fault_time = time.monotonic()
            os.kill(tree.pid, signal.SIGINT)
            check_error(tree.expect_event("outcome"), fault_time, error="KeyboardInterrupt")
            tree.release()
            check_ranks_work(tree)
        outcome = tree.run_order("check_results")
        assert outcome.get("value") is True, outcome
        tree.run_order("close")
        tree.check_no_leaks()


# -- something is lost -------------------------------------------------------------------------------------------

#: Killed processes, and words of the error; HOST stands for the other host.
KILLED = {
    "rank": ("ranks", 2, 2, ["rank 2 on host HOST", "SIGKILL"]),
    "rank of this host": ("ranks", 1, 1, ["rank 1 on host a", "SIGKILL"]),
    "agent": ("agents", 1, 2, ["host HOST (rank 2) was lost"]),
    "agent of this host": ("agents", 0, 0, ["host a (ranks 0 to 1) was lost"]),
    "mpirun": ("mpirun", None, 0, ["mpirun", "SIGKILL"]),
}


@pytest.mark.parametrize(
    ("target", "place"),
    [
        *(("rank", place) for place in PLACES),
        ("rank of this host", "exchange"),
        ("agent", "idle"),
        ("agent", "exchange"),
        ("agent of this host", "computing"),
        ("mpirun", "exchange"),
    ],
)
def test_killed_process_on_a_host_is_named(hosts, target, place):
    kind, number, rank, words = KILLED[target]
    with hosts as tree:
        pids = fork(hosts, tree)[kind]
        block_ranks_at(tree, place)
        fault_time = time.monotonic()
        os.kill(pids if number is None else pids[number], signal.SIGKILL)
        tree.release() if place == "idle" else None
        outcome = tree.expect_event("outcome")
        while place == "idle" and outcome.get("value") and time.monotonic() < fault_time + LIMIT_SECONDS:
            outcome = tree.run_order(
                "run_faulty_command", place="barrier", fault_ranks=[], action=""
            )  # it finished before the loss was noticed
        words = [word.replace("HOST", hosts.other) for word in [*words, "synkhronos.fork()"]]
        check_error(outcome, fault_time, rank=rank, words=words)
        tree.check_no_leaks()


def test_death_of_a_lock_holder_is_named_to_a_remote_waiter(hosts):
    with hosts as tree:
        pids = fork(hosts, tree)["ranks"]
        block_ranks_at(tree, "lock", fault_ranks=[1])
        time.sleep(0.3)  # the others do not check the holder before
        fault_time = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        check_error(tree.expect_event("outcome"), fault_time, rank=1, words=["rank 1 on host a", "SIGKILL"])
        tree.check_no_leaks()


@needs_namespaces
@pytest.mark.parametrize(
    ("fault", "place"),
    [
        *(("kill", place) for place in ("idle", "collective", "lock", "exchange")),
        *(("unplug", place) for place in ("idle", "collective", "lock", "exchange")),
        ("freeze", "collective"),
    ],
)
def test_lost_host_is_named(hosts, fault, place):
    with hosts as tree:
        settings = {} if fault == "kill" else {"host_timeout": SILENCE}
        fork(hosts, tree, **settings)
        block_ranks_at(tree, place)
        fault_time = tree.inject_fault(fault, hosts.other) + settings.get("host_timeout", 0)
        tree.release() if place == "idle" else None
        words = [f"host {hosts.other} (rank 2)", "lost" if fault == "kill" else f"has arrived for {SILENCE} seconds"]
        check_error(tree.expect_event("outcome"), fault_time, rank=2, words=words)
        assert tree.run_order("fork", hosts=2, environment={}, settings={})["value"] == 2
        check_ranks_work(tree)
        tree.run_order("close")
        if fault == "kill":
            hosts.replace_remote_host()
        elif fault == "freeze":
            tree.inject_fault("thaw", hosts.other)
        tree.check_no_leaks()
        if fault == "unplug":
            tree.inject_fault("plug", hosts.other)


@needs_namespaces
@pytest.mark.parametrize("kills_master", [False, True])
def test_lost_host_of_three_leaves_no_ssh(hosts, kills_master):
    """MPICH's mpirun then exits without the ssh that waits for the lost host."""
    with hosts as tree:
        assert tree.fork(["a:1", f"{hosts.other}:1", "h:1"], host_timeout=SILENCE).get("value") == 3
        block_ranks_at(tree, "idle")
        tree.inject_fault("unplug", hosts.other)
        if kills_master:
            os.kill(tree.pid, signal.SIGKILL)
            tree.wait_until_started()
        else:
            time.sleep(SILENCE)
            tree.release()
            assert f"host {hosts.other} (rank 1)" in tree.expect_event("outcome")["message"]
        tree.check_no_leaks()
        tree.inject_fault("plug", hosts.other)


@needs_namespaces
def test_lack_of_memory_on_a_host_is_named(hosts):
    nbytes = 1 << 23
    with hosts as tree:
        fork(hosts, tree)
        tree.limit_shared_memory(hosts.other, nbytes - 1)
        words, fault_time = [f"host {hosts.other} (rank 2)", "ulimit -f"], time.monotonic()
        check_error(tree.run_order("sum_shared_bytes", nbytes=nbytes), fault_time, rank=2, words=words)
        fault_time = time.monotonic()
        check_error(tree.fork(["a:2", f"{hosts.other}:1"]), fault_time, rank=2, words=words)
        tree.limit_shared_memory(hosts.other, None)
        tree.check_no_leaks()
        fork(hosts, tree)
        tree.limit_shared_memory("a", nbytes - 1)
        error, fault_time = "MemoryError", time.monotonic()
        check_error(tree.run_order("sum_shared_bytes", nbytes=nbytes), fault_time, error=error, words=["ulimit -f"])
        check_ranks_work(tree)
        tree.run_order("close")
        tree.limit_shared_memory("a", None)
        tree.check_no_leaks()


# -- the start fails -------------------------------------------------------------------------------------------


@needs_namespaces
@pytest.mark.parametrize(
    ("package", "file", "content", "words"),
    [
        ("numpy", "METADATA", "Metadata-Version: 2.1\nName: numpy\nVersion: 9.9\n", ["numpy is", "9.9 on HOST"]),
        ("mpi4py", "mpi4py/__init__.py", "raise ModuleNotFoundError('no mpi4py')", ["a, HOST", "no mpi4py"]),
    ],
)
def test_hosts_with_different_packages_are_refused(hosts, tmp_path, package, file, content, words):
    (file,) = (f.locate() for f in distribution(package).files if str(f).endswith(file))
    (tmp_path / "other").write_text(content)
    with hosts as tree:
        tree.replace(hosts.other, file, tmp_path / "other")
        fault_time = time.monotonic()
        outcome = tree.fork(["a:1", f"{hosts.other}:1"])
        check_error(outcome, fault_time, "RuntimeError", words=[word.replace("HOST", hosts.other) for word in words])
        tree.check_no_leaks(allowed_prefix="mpich_shm")  # MPICH leaves a segment if it is killed while it starts
        tree.restore(hosts.other, file)
        fork(hosts, tree)
        tree.run_order("close")


@needs_namespaces
@pytest.mark.parametrize(
    ("named", "words"),
    [(["a", "nowhere"], []), (["OTHER", "a"], ["the first host has to be the machine that calls fork(), and"])],
)
def test_wrong_hosts_are_named(hosts, named, words):
    with hosts as tree:
        named = [hosts.other if name == "OTHER" else name for name in named]
        fault_time = time.monotonic()
        check_error(tree.fork(named), fault_time, "RuntimeError", words=[", ".join(named), *words])
        tree.check_no_leaks(allowed_prefix="mpich_shm")  # MPICH leaves a segment if it is killed while it starts
        fork(hosts, tree)
        tree.run_order("close")


def test_agents_map_no_shared_memory_by_name(hosts):
    with hosts as tree:
        for agent in fork(hosts, tree)["agents"]:
            segments = re.findall(r"ucx_shm\S+|SYSV\S+", Path(f"/proc/{agent}/maps").read_text())
            assert not segments, segments
        tree.run_order("close")


# -- the master ends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["idle", "computing", "collective"])
def test_master_death_ends_all_processes(hosts, place):
    with hosts as tree:
        fork(hosts, tree)
        block_ranks_at(tree, place)
        os.kill(tree.pid, signal.SIGKILL)
        tree.wait_until_started()
        tree.check_no_leaks()


def test_exit_and_close_in_a_handler_end_hosts(hosts):
    with hosts as tree:
        fork(hosts, tree)
        tree.send_order("exit")
        tree.wait_until_started()
        tree.check_no_leaks()
        fork(hosts, tree)
        tree.send_order("close_in_handler")
        tree.expect_event("inside")
        fault_time = time.monotonic()
        os.kill(tree.pid, signal.SIGUSR1)
        tree.release()
        check_error(tree.expect_event("outcome"), fault_time, "RuntimeError", words=["closed"])
        tree.check_no_leaks()


# -- at rest ---------------------------------------------------------------------------------------------------


def test_idle_hosts_use_no_cores(hosts):
    with hosts as tree:
        processes = fork(hosts, tree)
        check_ranks_work(tree)
        pids = [tree.pid, *processes["agents"], *processes["ranks"]]
        time.sleep(0.3)
        before, began = [read_cpu_seconds(pid) for pid in pids], time.monotonic()
        time.sleep(2)
        seconds = time.monotonic() - began
        used = [(read_cpu_seconds(pid) - was) / seconds for pid, was in zip(pids, before, strict=True)]
        print([f"{share:.1%}" for share in used])
        assert max(used) <= 0.05, used
        tree.run_order("close")
        tree.check_no_leaks()


def read_cpu_seconds(pid):
    """Return the processor time, in seconds, that a process has used."""
    with open(f"/proc/{pid}/stat") as stat:
        user, system = stat.read().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
