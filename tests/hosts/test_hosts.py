"""Ranks on several hosts compute the same results as on one."""

import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest import mock

import hosts as host_programs
import numpy as np
import pytest
from hosts import are_simulated, run
from hypothesis import given, settings
from hypothesis import strategies as st
from library import NAME
from system import list_children, list_marked_processes, time_limit, wait_until_empty

import synkhronos as synk
from synkhronos import startup
from synkhronos.hosts import agent as agents
from synkhronos.hosts import mpi_link, mpirun
from synkhronos.hosts.agent import Agent
from synkhronos.hosts.host_list import Host, parse_hosts
from synkhronos.hosts.messenger import MessageType
from synkhronos.hosts.mpi_link import MpiLink
from synkhronos.hosts.mpirun import find_lost_hosts
from synkhronos.hosts.page_table import PAGE_NBYTES, PageTable, find_pages
from synkhronos.hosts.program_agent import ProgramAgent
from synkhronos.ranks import ArrayLocation, RowAccess
from synkhronos.ranks.control_memory import ControlMemory
from synkhronos.ranks.errors import Death, DeathKind, ReconnectError
from synkhronos.ranks.pipes import FRAME_NBYTES, MAX_FAILURE_NBYTES, N_FRAMES, LinkMemory

pytestmark = pytest.mark.timeout(300)  # programs that compile on all ranks
#: Hosts of programs.  Most use the last, one after another, as `run` reuses the ranks while the hosts are the same.
HOST_LISTS = [["a:3", "b:1"], ["a:1", "b:1", "c:1", "d:1"], ["a:2", "b:2"]]
THREE_HOSTS = ["a:1", "b:2", "c:1"]


@pytest.mark.hosts
@pytest.mark.timeout(600)
@pytest.mark.parametrize("program", ["train_network", "run_collectives", "train_by_trainer", "train_with_options"])
def test_hosts_compute_the_same_bits_as_one_host(program):
    if program in ("train_by_trainer", "train_with_options"):
        pytest.importorskip("safetensors")
    print("hosts are simulated" if are_simulated() else "no namespaces here: the hosts are fake")
    expected = run(["a:4"], program)
    assert expected
    for hosts in HOST_LISTS[1:] if program == "train_network" and NAME == "pytensor" else HOST_LISTS[-1:]:
        assert run(hosts, program) == expected, hosts


@pytest.mark.hosts
def test_asynchronous_rules_train_and_resume_on_two_hosts():
    pytest.importorskip("safetensors")
    assert run(HOST_LISTS[-1], "train_asynchronously") == "passed\n"


@pytest.mark.hosts
def test_asynchronous_rules_on_two_hosts_keep_their_invariants():
    assert run(HOST_LISTS[-1], "run_rule_tests") == "passed\n"


@pytest.mark.hosts
@pytest.mark.parametrize(("named", "kind"), [(HOST_LISTS[-1], "simulated"), (HOST_LISTS[0], "fake")], ids=str)
def test_functions_on_two_hosts_equal_numpy(named, kind, monkeypatch):
    if kind == "fake":
        if not host_programs.can_fake_hosts():
            pytest.skip("this mpirun does not take one machine for several")
        monkeypatch.setattr(host_programs, "are_simulated", lambda: False)
    assert run(named, "call_functions") == "passed\n"


@pytest.mark.hosts
def test_interrupted_all_reduce_on_two_hosts_is_applied_on_all_ranks():
    assert run(["a:2", "b:1"], "interrupt_all_reduce") == "passed\n"


@pytest.mark.hosts
def test_programs_of_ranks_communicate_between_hosts():
    for hosts, sums in ((["a:2", "b:1"], "0: 2, 1: 1, 2: 2"), (THREE_HOSTS, "0: 2, 1: 4, 2: 2, 3: 4")):
        assert run(hosts, "run_rank_programs").splitlines() == [sums] * 4


@pytest.mark.hosts
def test_locks_on_three_hosts_are_exclusive():
    assert run(THREE_HOSTS, "use_locks") == "passed\n"


@pytest.mark.hosts
@pytest.mark.skipif(not are_simulated(), reason="fake hosts have all files")
def test_data_file_is_mapped_on_each_host(tmp_path):
    # A file missing on one host ends the ranks, so no program follows.
    assert run(THREE_HOSTS, "map_files", tmp_path / "x.npy", "/dev/shm/x.npy") == "error names the host\n"


@pytest.mark.hosts
@pytest.mark.skipif(not are_simulated(), reason="fake hosts are not processes")
def test_simulated_hosts_end_with_a_killed_parent(tmp_path):
    command = [sys.executable, host_programs.SIMULATED, "--hosts", "a", "--", "sh", "-c", "echo ready; sleep 1000"]
    code = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    environment = {**os.environ, "MARK": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", code, *command], env=environment, stdout=subprocess.PIPE)
    with parent:
        assert parent.stdout.readline() == b"ready\n"
        assert list_marked_processes(str(tmp_path).encode()).keys() > {parent.pid}
        parent.kill()
    wait_until_empty(lambda: list_marked_processes(str(tmp_path).encode()), 60)


@pytest.mark.parametrize("size", ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_fork_refuses_several_processes_of_a_script(size, monkeypatch):
    monkeypatch.setenv(size, "2")
    for hosts in (None, ["a", "b"]):
        with pytest.raises(ValueError, match="^hosts: 2 processes of this program were started.*srun --nodes=1"):
            synk.fork(hosts=hosts, use_gpu=False)
    assert synk.fork(1, hosts=[], use_gpu=False) == 1
    monkeypatch.setenv(size, "1")
    synk.close()
    assert synk.fork(1, use_gpu=False) == 1
    synk.close()


@pytest.mark.parametrize(
    ("hosts", "error", "words"),
    [
        ("a", TypeError, "list of names"),
        (["a", 3], TypeError, "expected names"),
        (["a", "a"], ValueError, "a is named twice; write a:2"),
        (["a b"], ValueError, "name of a host"),
        (["-x"], ValueError, "name of a host"),
        (["a:0"], ValueError, "number of ranks"),
        (["a:99999"], ValueError, "from 1 to 1024"),
        ("all", ValueError, "in none"),
    ],
)
def test_fork_refuses_wrong_hosts(hosts, error, words, monkeypatch):
    for name in ("SLURM_JOB_NODELIST", "PBS_NODEFILE", "LSB_MCPU_HOSTS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(error, match=words):
        parse_hosts(hosts)


def test_fork_on_hosts_needs_mpirun(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", "/nowhere/python")
        patched.setenv("PATH", "/nowhere")
        with pytest.raises(RuntimeError, match="there is no mpirun: pip install"):
            synk.fork(hosts=["a", "b"], use_gpu=False)
    assert synk.fork(2, use_gpu=False) == 2
    synk.close()


def test_silent_host_is_lost_with_all_its_ranks():
    link = MpiLink([Host("a", 2), Host("b", 1024)], 1.0)
    link.ranks_by_host = [range(2), range(2, 1026)]
    words, layout = [0] * 64, SimpleNamespace(failure_json=memoryview(bytearray(MAX_FAILURE_NBYTES)))
    link._control, link._link_memory = mock.Mock(words=words), layout
    agent = Agent.__new__(Agent)
    agent._control, agent._link_memory, agent._config = link._control, layout, {"master": 0}
    with mock.patch.object(os, "kill") as kill:
        agent._report_failure("host b is silent", 2, Death.from_lost_host(range(2, 1026), "b", "is silent"))
    assert kill.called and link.find_failure().death.lost_ranks == range(2, 1026)
    words[ControlMemory.FAILURE_NBYTES] = 0
    with mock.patch.object(os, "kill"):
        agent._report_failure("rank 3 has exited", 3, Death.from_exit(3, "b", 77, -9))
    death = link.find_failure().death
    assert (death.rank, death.host, death.pid, death.lost_ranks) == (3, "b", 77, [])
    assert death.exit_description.startswith("was killed by SIGKILL") and death.kind == DeathKind.EXIT


def test_link_to_the_host_that_is_left_counts_the_bytes_sent_before():
    link = MpiLink([Host("a", 2), Host("b", 2)], 1.0)
    link.ranks_by_host, link._earlier_bytes_sent = [range(2), range(2, 4)], 123
    assert link.reconnect((2, 3)).bytes_sent == 123 and link.reconnect((2, 3)).reconnect((1,)).bytes_sent == 123


@pytest.fixture
def old_link(monkeypatch):
    """Link of hosts a, b and c with two ranks each on GPUs; the GPUs of ``found`` are there when it is connected again."""
    link, found = MpiLink([Host(name, 2) for name in "abc"], 1.0), {"a": 2, "b": 2, "c": 2}
    link._n_gpus_by_host, link._n_cores_by_host = [2] * 3, [2] * 3
    link.assign_ranks(None, True)

    def start_agents(link):
        if not all(found[name] is not None for name in link.host_names):
            raise RuntimeError("the hosts could not be reached")
        link._n_gpus_by_host = link._n_cores_by_host = [found[name] for name in link.host_names]

    monkeypatch.setattr(MpiLink, "start_agents", start_agents)
    return link, found


@pytest.mark.parametrize(
    ("found", "excluded_ranks", "host", "lost_ranks"),
    [
        ({"b": 1}, (), "b", [3]),
        ({"b": 0, "c": 1}, (), "b", [2, 3, 5]),
        ({"c": 0}, (4,), "c", [5]),
        ({"c": None}, (), "c", [4, 5]),
        ({"b": None}, (4, 5), "b", [2, 3]),
    ],
)
def test_link_names_ranks_that_cannot_start_again(old_link, found, excluded_ranks, host, lost_ranks):
    link, now = old_link
    now.update(found)
    with pytest.raises(ReconnectError) as caught:
        link.reconnect(excluded_ranks)
    death = caught.value.death
    assert (death.rank, death.host, death.lost_ranks) == (lost_ranks[0], host, lost_ranks)
    reconnected = link.reconnect({*excluded_ranks, *lost_ranks})
    assert sum(map(len, reconnected.ranks_by_host)) == 6 - len({*excluded_ranks, *lost_ranks})


@pytest.mark.parametrize("excluded_ranks", [(), (4, 5)])
def test_own_failure_to_start_an_agent_is_not_blamed_on_the_other_hosts(old_link, excluded_ranks):
    link, found = old_link
    found["a"] = None
    with pytest.raises(
        RuntimeError, match="^this host, a, can't start an agent: the hosts could not be reached$"
    ) as error:
        link.reconnect(excluded_ranks)
    assert not isinstance(error.value, ReconnectError)


def test_rank_left_out_on_another_host_leaves_out_its_gpu(monkeypatch):
    opened = []
    device = SimpleNamespace(choose_gpus=lambda size, root: ["x", "y", "z"][:size], initialize=opened.append)
    monkeypatch.setattr(startup, "get_device", lambda name: device)
    monkeypatch.setattr(startup, "set_rank_device", lambda rank, device: None)
    monkeypatch.setattr(startup, "_keep_freed_memory", lambda: None)
    command = startup._SetUpRank("jax", ["0", "1"], (b"", b""), {}, gpu_numbers=(0, 1, 0, 1, 2)).without_rank(2)
    for n_gpus, gpus in (
        (3, ["0", "1", "y", "z"]),
        (2, ["0", "1", "x", "y"]),
    ):  # 2: the broken one is not visible any more
        monkeypatch.setattr(startup, "get_n_gpu", lambda n_gpus=n_gpus: n_gpus)
        for number, local_ranks in enumerate([range(2), range(2), range(2, 4), range(2, 4)]):
            command.run(SimpleNamespace(number=number, master_rank=0, is_master=True, local_ranks=local_ranks))
        assert opened == gpus
        opened.clear()


def test_fork_on_one_host_needs_no_mpirun(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", "/nowhere/python")
        patched.setenv("PATH", "/nowhere")
        with pytest.raises(RuntimeError, match="the machine that calls fork.., and nowhere.invalid is not"):
            synk.fork(hosts=["nowhere.invalid"], use_gpu=False)
    assert synk.fork(1, hosts=["localhost:2"], use_gpu=False) == 2
    synk.close()


def test_forkable_modules_are_imported_under_their_own_names(monkeypatch):
    """Theano's C code for scans is disabled by None in place of its module."""
    monkeypatch.setitem(sys.modules, "numpy.disabled", None)
    monkeypatch.setitem(sys.modules, "numpy.other_name", np)
    modules = mpi_link._list_forkable_modules()
    assert "numpy" in modules and not {"numpy.disabled", "numpy.other_name"} & set(modules)


def test_leftovers_of_mpirun_do_not_block(monkeypatch):
    leaves = ["sh", "-c", "sleep 60 & echo no route to host b >&2; exit 255"]
    monkeypatch.setattr(mpirun, "make_mpirun_argv", lambda names, address: leaves)
    with time_limit(), pytest.raises(RuntimeError, match="hosts a, b could not be reached: no route to host b$"):
        synk.fork(hosts=["a", "b"], use_gpu=False)


def test_agent_messages_are_separated_from_mpirun_output(monkeypatch):
    reason = "the first host has to be the machine that calls fork(), and a is not"
    output = f"Traceback:\n  in _connect\nRuntimeError: {reason}\n[proxy:1@b] main (pmip.c:123): demux engine error"
    monkeypatch.setattr(mpirun, "make_mpirun_argv", lambda names, address: ["sh", "-c", f"echo '{output}' >&2; exit 7"])
    with pytest.raises(RuntimeError, match=f"^the hosts a, b could not be reached: {re.escape(reason)}$"):
        synk.fork(hosts=["a", "b"], use_gpu=False)


class AgentsStarted(Exception):
    """Ends a start of ranks once the agents have started."""


def start_hosts_interrupted(press):
    """Start hosts, with Ctrl-C before instruction `press`; return the number of instructions."""
    codes = {
        mpi_link.MpiLink.start_agents.__code__,
        mpi_link.MpiLink.__init__.__code__,
        startup.start_ranks.__code__,
    }
    before, count = sys.gettrace(), 0

    def trace(frame, event, argument):
        nonlocal count
        frame.f_trace_opcodes = frame.f_code in codes
        count += event == "opcode" and frame.f_trace_opcodes
        if count == press:
            sys.settrace(before)
            signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        with pytest.raises(AgentsStarted):
            startup.start_ranks([Host("a", 1), Host("b", 1)], None, False)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.faults
def test_interrupt_at_any_moment_leaves_no_mpirun(monkeypatch):
    host_programs.end()  # these are children of this process, too
    children = set(list_children(os.getpid()))
    reports = [{"name": name, "n_cores": 1, "n_gpus": 0, "versions": {}} for name in "ab"]
    monkeypatch.setattr(mpirun, "make_mpirun_argv", lambda names, address: ["sleep", "60"])
    monkeypatch.setattr(mpi_link.MpiLink, "_accept_agent", lambda self, listener: reports)
    before = sys.gettrace()

    def stop(*_):
        sys.settrace(before)
        raise AgentsStarted

    monkeypatch.setattr(startup, "choose_device", stop)
    for press in range(1, 1 + start_hosts_interrupted(-1)):
        with pytest.raises(KeyboardInterrupt):
            start_hosts_interrupted(press)
        assert set(list_children(os.getpid())) <= children, press


def test_fork_refuses_an_mpirun_of_another_mpi(monkeypatch):
    host_programs.end()  # these are children of this process, too
    monkeypatch.setattr(mpirun, "make_mpirun_argv", lambda names, address: ["sleep", "60"])
    monkeypatch.setattr(mpirun, "find_mpirun", lambda: "/opt/mpi/bin/mpirun")
    # The process on the first host, which sees no other MPI process.
    monkeypatch.setattr(
        mpi_link.MpiLink, "_accept_agent", lambda self, listener: [{"name": "a", "n_cores": 4, "n_gpus": 0}]
    )
    with pytest.raises(RuntimeError, match=r"^/opt/mpi/bin/mpirun started 2 processes, and MPI connects 1 of them"):
        synk.fork(hosts=["a", "b"], use_gpu=False)
    assert list_children(os.getpid()) == []


def test_frames_allocate_no_extra_memory():
    control = ControlMemory(3, 0.0, local_ranks=range(2), link_nbytes=LinkMemory.compute_nbytes(2))
    frame = LinkMemory(control).view_frame(3, N_FRAMES - 1)
    assert len(frame) == FRAME_NBYTES
    frame[-1] = 1
    assert control.link_memory[-1] == 1


def test_remote_ranks_take_little_control_memory():
    few, many = (ControlMemory.create_file(size, 2) for size in (3, 103))
    with few, many:
        few_bytes, many_bytes = (512 * os.fstat(file.fileno()).st_blocks for file in (few, many))
        assert 0 < many_bytes - few_bytes <= 100 * 13_000
        controls = [ControlMemory(103, 0.0, many.fileno(), i > 0, range(5, 7)) for i in range(2)]
        for rank in range(103):
            for number in range(3):
                controls[0].get_slot(rank, number)[:] = bytes([rank, number]) * (
                    len(controls[0].get_slot(rank, number)) // 2
                )
        controls[0].scratch[:] = b"x" * len(controls[0].scratch)
        controls[0].mailbox[:] = b"y" * len(controls[0].mailbox)
        for rank in range(103):
            for number in range(3):
                slot = controls[1].get_slot(rank, number)
                assert bytes(slot) == bytes([rank, number]) * (len(slot) // 2)
        assert not any(controls[1].done)


def test_mpirun_output_names_the_lost_host():
    known_as = [("a", "node-a"), ("b", "node-b"), ("c", "node-c")]
    assert find_lost_hosts("=   PID 10 RUNNING AT node-b\n=   EXIT CODE: 9", known_as) == [1]
    assert find_lost_hosts("=   PID 10 RUNNING AT node-b\n=   EXIT CODE: 11\n=   CLEANING", known_as) == [0, 2]
    assert find_lost_hosts("=   PID 10 RUNNING AT node-b\n=   EXIT CODE: 110", known_as) == [1]
    assert find_lost_hosts("=   PID 10 RUNNING AT node-b\n=   EXIT CODE: 12\n=   CLEANING", known_as) == [0, 2]
    assert find_lost_hosts("PID 28 on node c exited on signal 12 (User defined signal 2)", known_as) == [0, 1]
    assert find_lost_hosts("HNP daemon   : [p@0,0] on node a\n  Remote daemon: [p@0,1] on node b", known_as) == [1]
    assert find_lost_hosts("process rank 1 with PID 28 on\nnode c exited on\nsignal 9 (Killed)", known_as) == [2]
    assert find_lost_hosts("[b:00000] *** An error occurred in Socket closed", known_as) == [0, 2]
    assert find_lost_hosts("[mpiexec@a] control_cb: assert (!closed) failed", known_as) == [1, 2]


@pytest.mark.parametrize(("error", "number"), [("mpi4py.MPI.Exception(1)", 12), ("OSError(1)", 9)])
def test_agent_exit_signal_tells_whether_mpi_failed(error, number):
    pytest.importorskip("mpi4py")
    python, option, code, *arguments = mpirun.make_agent_argv("somewhere")
    raises = (
        "import mpi4py.MPI, synkhronos.hosts.agent_main as agent_main\n"
        f"def main(address): raise {error}\nagent_main.main = main\n"
    )
    done = subprocess.run([python, option, raises + code, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == -number, done
    assert error.split("(")[0].split(".")[-1] in done.stderr


def test_hosts_are_read_from_environment_and_allocations(monkeypatch, tmp_path):
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    monkeypatch.delenv("SYNKHRONOS_HOSTS", raising=False)
    assert parse_hosts(None) == parse_hosts([]) == []
    monkeypatch.setenv("SYNKHRONOS_HOSTS", "a, b:3")
    assert parse_hosts(None) == [("a", None), ("b", 3)]
    # The output of scontrol of Slurm 22.05.
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames a[08-10,7],login1,r[1-2]n[1,3]" ] && printf %s "$NAMES"\n')
    scontrol.chmod(0o700)
    nodes = tmp_path / "nodes"
    nodes.write_text("n1.cluster\n" * 2 + "n2.cluster\n")  # a line for each process
    batch_systems = [
        ({"SLURM_JOB_NODELIST": "a[08-10,7],login1,r[1-2]n[1,3]"}, "a08 a09 a10 a7 login1 r1n1 r1n3 r2n1 r2n3".split()),
        ({"PBS_NODEFILE": str(nodes)}, ["n1.cluster", "n2.cluster"]),
        (
            {"LSB_MCPU_HOSTS": "m1 16 m2 16 m11 4 "},
            ["m1", "m2", "m11"],
        ),  # LSB_HOSTS is missing if there are many processes
        ({"LSB_MCPU_HOSTS": "m1 1"}, ["m1"]),
    ]
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SYNKHRONOS_HOSTS", "all")
    for variables, names in batch_systems:
        with monkeypatch.context() as patched:
            for name, value in {**variables, "NAMES": "\n".join(names)}.items():
                patched.setenv(name, value)
            assert parse_hosts("all") == parse_hosts(None) == [(name, None) for name in names]


def test_mpirun_in_a_slurm_step_uses_the_jobs_allocation(monkeypatch):
    # Variables of srun --nodes=1 --ntasks=1 --mpi=pmix, or pmi2, in a job of two hosts.
    step_variables = {
        "SLURM_NODELIST": "a",
        "SLURM_TASKS_PER_NODE": "1",
        "SLURM_MPI_TYPE": "pmix",
        "SLURM_STEP_ID": "0",
    }
    mpi_variables = {
        "PMIX_NAMESPACE": "slurm.pmix.5.0",
        "PMIX_SECURITY_MODE": "munge,native",
        "PMI_RANK": "0",
        "PMI_FD": "11",
    }
    user_variables = {"PMIX_MCA_psec": "native", "SLURM_CONF": "/etc/slurm/slurm.conf", "UCX_LOG_LEVEL": "info"}
    job_variables = {"SLURM_JOB_NODELIST": "a,b", "SLURM_JOB_NUM_NODES": "2"}
    monkeypatch.setattr(os, "environ", {**step_variables, **mpi_variables, **user_variables, **job_variables})
    expected = {
        "SLURM_NODELIST": "a,b",
        "SLURM_TASKS_PER_NODE": "1(x2)",
        "SLURM_MPI_TYPE": "none",
        "SLURM_OVERLAP": "1",
    }
    assert mpirun.make_mpirun_environment() == {
        **expected,
        "SLURM_STEP_ID": "0",
        **user_variables,
        **job_variables,
    }


ROWS = st.one_of(
    st.tuples(st.integers(0, 60), st.integers(0, 60), st.sampled_from([1, 2, 7])),
    st.tuples(st.integers(0, 59), st.integers(-1, 59), st.sampled_from([-1, -3])),
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_pull_sends_read_data_to_other_hosts(data):
    """After any writes and reads, a host that pulls the pages it lacks has the current rows."""
    row = data.draw(st.sampled_from([1, 8, 100, 5000, 12288]))
    paged = {
        key: np.zeros((-(-60 * nbytes // PAGE_NBYTES), PAGE_NBYTES), np.uint8) for key, nbytes in ((1, row), (2, 8))
    }
    memory = {
        key: pages.reshape(-1)[: 60 * nbytes] for (key, pages), nbytes in zip(paged.items(), (row, 8), strict=True)
    }
    hosts = [{key: np.zeros_like(pages) for key, pages in paged.items()} for _ in range(2)]
    contents = PageTable(2, lambda: None)
    for key, array in paged.items():
        contents.add(key, array)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    for _ in range(data.draw(st.integers(1, 5))):
        offset, count = data.draw(st.integers(0, 60 * row - 1)), data.draw(st.integers(0, 9000))
        memory[1][offset : offset + count] = rng.integers(0, 256, len(memory[1][offset : offset + count]))
        indexes = rng.integers(0, 60, data.draw(st.integers(0, 20)))
        memory[2].view(np.int64)[: len(indexes)] = indexes
        needed, expected = [], []
        for _ in hosts:
            rows = data.draw(st.one_of(st.none(), ROWS))
            selected = ArrayLocation(2, "<i8", (len(indexes),)) if rows is None else range(*rows)
            read = RowAccess(ArrayLocation(1, "u1", (60, row)), selected)
            needed.append(find_pages([read], paged))
            expected.append(list(range(*rows)) if rows is not None else indexes.tolist())
        for host, pages, rows in zip(hosts, contents.pop_missing_pages(needed), expected, strict=True):
            for key, host_pages in pages.items():
                host[key][host_pages] = paged[key][host_pages]
            for r in rows:
                assert np.array_equal(host[1].reshape(-1)[r * row : (r + 1) * row], memory[1][r * row : (r + 1) * row])
        assert contents.pop_missing_pages(needed) == [{}, {}]  # no page is sent twice


def test_agent_reads_messages_before_it_decides():
    class Sending:
        """Mail whose message is sent after three polls, and which receives messages all the time."""

        looks = 3
        last_received = {1: 0.0}

        def post_receives(self, limit):
            self.last_received[1] = time.monotonic()

        def complete_sends(self):
            self.looks -= 1
            return 17 if self.looks > 0 else 16

    agent = object.__new__(Agent)
    agent._messenger, silences = Sending(), []
    agent._run_periodic_work = lambda now: silences.append(now - agent._messenger.last_received[1])
    agent.keep_alive(16)
    assert len(silences) == 3 and max(silences) < 60, silences


def test_early_messages_of_a_program_are_queued():
    messages = []
    bridge = SimpleNamespace(
        update_channel=lambda *update: messages.append(update),
        poll_channels=list,
        poll_requests=list,
    )
    mail = SimpleNamespace(n_hosts=2, host=0, other_hosts=[1])
    control = SimpleNamespace(fence=lambda: None, wake=lambda rank, reason: None)
    agent = ProgramAgent(mail, control, [range(1), range(1, 2)], {})
    agent.start_command(4, None)
    agent.handlers[MessageType.CHANNEL_UPDATE](1, 5, 1, 0, 1, b"first")
    assert not agent.advance() and not messages
    agent.start_command(5, None)
    agent._bridge = bridge
    agent.handlers[MessageType.CHANNEL_UPDATE](1, 5, 1, 0, 2, b"second")
    agent.handlers[MessageType.CHANNEL_UPDATE](1, 4, 1, 0, 1, b"of a command that has failed")
    assert agent.advance() and messages == [(1, 0, 1, b"first"), (1, 0, 2, b"second")]
    assert not agent.has_unfinished_work


def test_agent_reports_missing_memory(monkeypatch):
    def unmapped(key, fd, nbytes, is_file):
        raise MemoryError(f"{nbytes} bytes of shared memory can't be mapped")

    monkeypatch.setattr(agents, "Segment", unmapped)
    agent, sent = object.__new__(Agent), []
    agent._host_names, agent._host, agent._local_ranks, agent._segments = "ab", 1, range(2, 3), {}
    agent._messenger = SimpleNamespace(send=lambda *message: sent.append(message))
    agent._on_new_segment(0, 1, 4096, None)
    assert sent == [(0, MessageType.PEER_FAILURE, "host b (rank 2): 4096 bytes of shared memory can't be mapped", 2)]
    assert agent._segments == {}


def test_find_pages_of_a_range_lists_no_row_numbers():
    rows = 1 << 40
    memory = {1: np.broadcast_to(np.uint8(0), rows)}
    array = ArrayLocation(1, "u1", (rows,))
    for span in (range(rows - 2 * PAGE_NBYTES, rows), range(rows - 1, rows - 2 * PAGE_NBYTES - 1, -1)):
        pages = find_pages([RowAccess(array, span)], memory)[1]
        assert pages.tolist() == [rows // PAGE_NBYTES - 2, rows // PAGE_NBYTES - 1]
    began = time.process_time()
    assert len(find_pages([RowAccess(array, range(1 << 28))], memory)[1]) == (1 << 28) // PAGE_NBYTES
    assert time.process_time() - began < 1
