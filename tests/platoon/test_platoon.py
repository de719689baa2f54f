"""``synkhronos platoon NAME``: Platoon's controllers and workers on two ranks."""

import contextlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest
from hosts import are_simulated, make_command
from launch_runs import ENVIRONMENT, HOST, make_synkhronos_command
from library import NAME
from paths import SUPPORT
from system import list_marked_processes, wait_until, wait_until_empty

from synkhronos.platoon import launcher

pytestmark = pytest.mark.starts_programs

PROGRAMS = SUPPORT / "platoon_programs"
#: PyTensor's functions are compiled by XLA, as on GPUs.
FLAGS = {"PYTENSOR_FLAGS": "mode=JAX,floatX=float32,traceback__limit=0"} if NAME == "pytensor" else {}
LIMIT = 100
DEVICES = ["-D", "cpu", "cpu"]


def start(folder, experiment, *arguments, **environment):
    """Start an experiment in a folder; return the launcher's process, whose attribute ``mark`` marks all processes."""
    for file in (*PROGRAMS.glob(f"{experiment}_*.py"), PROGRAMS / "helper.py"):
        shutil.copy(file, folder)
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        make_synkhronos_command("platoon", experiment, *arguments),
        cwd=folder,
        env=ENVIRONMENT | {"MARK": mark} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.mark = mark
    return process


def finish(process):
    """Wait until the launcher exits; return its status and output.  Check that no process is left."""
    try:
        out, err = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    wait_until_empty(lambda: list_processes(process))
    return process.returncode, out, err


def list_processes(process):
    """Return the command lines, by process ID, of the launcher's live descendants."""
    marked = list_marked_processes(f"MARK={process.mark}".encode())
    return {pid: line for pid, (_, line) in marked.items() if pid != process.pid}


def run_experiment(folder, experiment, *arguments, status=0, **environment):
    """Run a program of Platoon to its end; return its output, its errors and its log files."""
    code, out, err = finish(start(folder, experiment, *arguments, **environment))
    logs = {path.name: path.read_text() for path in sorted(Path(folder).glob("PLATOON_LOGS/*/*/*"))}
    assert code == status, (code, out, err, logs)
    return out, err, logs


# -- the contract ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def contract(tmp_path_factory):
    """Run the program contract.py once; return the records of both ranks, its output, errors and logs."""
    folder = tmp_path_factory.mktemp("contract")
    arguments = [*DEVICES, "-c=--patience 7 --control-port=6000", "-w=--rate 0.5"]
    out, err, logs = run_experiment(folder, "contract", *arguments, **FLAGS)
    records = [pickle.loads((folder / f"record-{rank}.pkl").read_bytes()) for rank in (0, 1)]
    return records, out, err, logs


def test_platoon_launcher_passes_arguments_and_writes_logs(contract):
    records, out, err, logs = contract
    assert [(result["helper"], result["rate"], result["size"]) for result in records] == [("found", 0.5, 2)] * 2
    arguments = records[0]["said"]["arguments"]
    assert arguments[0] == "contract" and arguments[2:6] == ["--single", "-D", "cpu", "cpu"]
    assert arguments[6:] == ["--patience", "7", "--control-port=6000", "-w=--rate 0.5"]
    assert sorted(logs) == [
        *(f"controller_cpu.{kind}" for kind in ("err", "out")),
        *(f"worker_cpu-{rank}.{kind}" for rank in (0, 1) for kind in ("err", "out")),
    ]
    assert [logs[f"worker_cpu-{rank}.out"].splitlines()[-1] for rank in (0, 1)] == ["worker 0 ends", "worker 1 ends"]
    assert "SUCCESS" in out and not err


def test_platoon_controller_answers_requests(contract):
    records = contract[0]
    for rank, result in enumerate(records):
        assert result["hello"] == [True, 2] and result["echo"] == {"a": [1, 2.5, None, "ä"]}
        assert result["said"]["ranks"][str(result["process"])] == rank
    assert len({records[0]["process"], records[1]["process"], records[0]["said"]["controller"]}) == 3


def test_platoon_sync_params_follows_the_easgd_formula(contract):
    records = contract[0]
    local = [[np.arange(4, dtype="float32") + 10 * rank, np.float64(rank)] for rank in (0, 1)]
    central = [value.copy() for value in local[0]]
    for result in records:
        for actual, expected in zip(result["initial"], central, strict=True):
            np.testing.assert_array_equal(actual, expected)
    for turn in (0, 1, 0):
        for i in (0, 1):
            force = local[turn][i].dtype.type(0.25) * (local[turn][i] - central[i])
            local[turn][i], central[i] = local[turn][i] - force, central[i] + force
    for rank, result in enumerate(records):
        for i, dtype in enumerate(("float32", "float64")):
            np.testing.assert_array_equal(result["local"][i], local[rank][i])
            np.testing.assert_array_equal(result["central"][i], central[i])
            assert result["local"][i].dtype == result["central"][i].dtype == dtype
        np.testing.assert_array_equal(result["copied"][0], local[1][0])
        assert result["copied"][1] == 123


def test_platoon_lock_is_exclusive(contract):
    records = contract[0]
    assert [result["counter"] for result in records] == [80, 80]
    assert records[1]["busy after 0"] and records[1]["busy after 0.1"]
    assert "holds the lock already" in records[0]["lock"] and "unlock" not in records[0]
    assert "does not hold the lock" in records[1]["unlock"]


def test_platoon_all_reduce_equals_numpy(contract):
    records = contract[0]
    arrays = [np.arange(6, dtype="float32").reshape(2, 3) + rank + 1 for rank in (0, 1)]
    expected = {"+": arrays[0] + arrays[1], "*": arrays[0] * arrays[1], "max": arrays[1], "minimum": arrays[0]}
    expected |= {"sum": expected["+"], "add": expected["+"], "mul": expected["*"]}
    for result in records:
        assert result["reduced"].keys() == expected.keys()
        for op, value in result["reduced"].items():
            np.testing.assert_array_equal(value, expected[op])
            assert value.dtype == "float32"
        np.testing.assert_array_equal(result["dest"], expected["sum"])


def test_platoon_global_dynamics_equal_their_formulas(contract):
    records = contract[0]
    arrays = [np.arange(6, dtype="float32").reshape(2, 3) + rank + 1 for rank in (0, 1)]
    total = arrays[0] + arrays[1]
    forces = [np.float32(0.1) * (value - 1) for value in arrays]
    for rank, result in enumerate(records):
        np.testing.assert_array_equal(result["SumSGD"][0], total)
        assert result["SumSGD"][1] == total.sum() and result["SumSGD"][1].dtype == "float32"
        assert result["SumSGD"][2] == 2**61 + 1  # not representable as a float
        np.testing.assert_array_equal(result["AverageSGD"], total / 2)
        np.testing.assert_allclose(result["EASGD"][0], arrays[rank] - forces[rank], rtol=1e-6)
        np.testing.assert_allclose(result["EASGD"][1], 1 + forces[0] + forces[1], rtol=1e-6)
        for value, expected in zip(result["Downpour"], (1 + total, 0 * total, 1 + total), strict=True):
            np.testing.assert_array_equal(value, expected)
        assert result["own"] == 1


def test_platoon_all_reduce_ops_work_in_graphs(contract):
    arrays = [np.arange(6, dtype="float32").reshape(2, 3) + rank + 1 for rank in (0, 1)]
    for result in contract[0]:
        total, updated, largest = result["in a graph"]
        assert total == 2 * (arrays[0] + arrays[1]).sum()
        np.testing.assert_array_equal(updated, arrays[0] + arrays[1])
        np.testing.assert_array_equal(largest, arrays[1])
        np.testing.assert_array_equal(result["summed"][0], 2 * (arrays[0] + arrays[1]))
        np.testing.assert_array_equal(result["summed"][1], 2 * arrays[1])
        assert not result.get("64 bits")


def test_platoon_mini_batches_reach_one_worker_each(contract):
    records = contract[0]
    received = [batch for result in records for batch in result["batches"]]
    assert sorted(int(batch[1]) for batch in received) == list(range(30))
    for full, number, empty, transposed in received:
        np.testing.assert_array_equal(full, np.full((2, 3), number, "float32"))
        assert (full.dtype, empty.shape, empty.dtype) == ("float32", (0, 4), bool)
        np.testing.assert_array_equal(transposed, np.arange(6).reshape(2, 3).T)
    assert all("has closed the queue" in result["closed"] for result in records)


# -- ends --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "rank", "message"),
    [
        ("raise", 1, "worker 1 (cpu, process {}) raised ValueError: the third batch is damaged"),
        ("exit", 0, "worker 0 (cpu, process {}) exited with status 3"),
        ("controller", 1, "KeyError: 'no such decision'"),
    ],
)
def test_platoon_launcher_reports_the_first_failure(tmp_path, how, rank, message):
    _, err, logs = run_experiment(tmp_path, "fails", *DEVICES, f"-w={how} {rank}", status=1)
    before, _, after = message.partition("{}")
    assert before in err and after in err, err
    assert f"worker {1 - rank}" not in err
    if how == "raise":
        assert logs["worker_cpu-1.err"].rstrip().splitlines()[-1] == "ValueError: the third batch is damaged"


@pytest.mark.faults
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("text 1", "exited with 'there is no data'"),
        ("lock 1", "ValueError: the holder of the lock has failed"),
        ("reduce 0", "ERROR! the ranks wait for each other in different places"),
        ("kill 1", "ERROR! worker 1 (process"),
        ("end 1", "exited with code 7"),
        ("controller_init", "RuntimeError: the controller has no data"),
        ("controller_main", "RuntimeError: the controller has no plan"),
    ],
)
def test_platoon_launcher_reports_failures_of_any_kind(tmp_path, how, message):
    _, err, _ = run_experiment(tmp_path, "fails", *DEVICES, f"-w={how}", status=1)
    assert message in err


def test_platoon_worker_may_exit_early_with_status_0(tmp_path):
    """Two simultaneous experiments with the same ports and names do not interfere."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    processes = [start(folder, "fails", *DEVICES, f"-w=leave {rank}") for rank, folder in enumerate(folders)]
    for process in processes:
        status, out, err = finish(process)
        assert status == 0, out + err


@pytest.mark.faults
def test_platoon_worker_fails_if_the_queue_ends_during_its_batch(tmp_path):
    """A worker that has reported its last mini-batch exits with 0."""
    _, _, logs = run_experiment(tmp_path, "fails", "-D", "cpu", "-w=idle")
    assert "there are no more mini-batches" in logs["worker_cpu.err"]
    _, err, _ = run_experiment(tmp_path, "fails", "-D", "cpu", "-w=busy", status=1)
    assert "EndOfBatches" in err


@pytest.mark.faults
@pytest.mark.parametrize(
    ("how", "number", "status"),
    [("compute", signal.SIGINT, 3), ("receive", signal.SIGINT, 3), ("ask", signal.SIGKILL, -signal.SIGKILL)],
)
def test_platoon_launcher_ends_by_a_signal(tmp_path, how, number, status):
    process = start(tmp_path, "fails", *DEVICES, f"-w={how}")
    wait_until_ready(process, tmp_path)
    process.send_signal(number)
    assert finish(process)[0] == status


@pytest.mark.faults
def test_platoon_launcher_names_a_killed_controller(tmp_path):
    process = start(tmp_path, "fails", *DEVICES, "-w=ask")
    wait_until_ready(process, tmp_path)
    controller = next(pid for pid, line in list_processes(process).items() if "controller_process.main()" in line)
    os.kill(controller, signal.SIGKILL)
    status, _, err = finish(process)
    assert status == 3 and "the controller was killed by SIGKILL" in err


def wait_until_ready(process, folder):
    logs = "PLATOON_LOGS/*/*/controller_cpu.out"
    wait_until(lambda: any("ready" in path.read_text() for path in folder.glob(logs)), process, LIMIT)


# -- the command line --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing", "-D", "cpu"], "there is no missing_worker.py"),
        (["fails", "-H", "lisa0", "lisa1"], "hosts: the first has to be this machine"),
        (["fails", "-H", socket.gethostname(), "lisa1"], "devices: name those of"),
        (["fails", "-D"], "expected at least one argument"),
    ],
)
def test_platoon_launcher_refuses_wrong_arguments(tmp_path, arguments, message):
    shutil.copy(PROGRAMS / "fails_worker.py", tmp_path)
    done = subprocess.run(
        make_synkhronos_command("platoon", *arguments),
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 2 and message in done.stderr
    assert not (tmp_path / "PLATOON_LOGS").exists()


def test_platoon_launcher_reads_devices_from_the_environment(tmp_path):
    (tmp_path / "alone_worker.py").write_text(
        "from platoon.channel import Worker\nprint('rank', Worker(5567).local_rank)\n"
    )
    _, _, logs = run_experiment(tmp_path, "alone", PLATOON_DEVICES="cpu,cpu,cpu")
    assert [logs[f"worker_cpu-{rank}.out"] for rank in range(3)] == ["rank 0\n", "rank 1\n", "rank 2\n"]


def test_platoon_controller_without_handle_control_refuses_requests(tmp_path):
    (tmp_path / "alone_worker.py").write_text("from platoon.channel import Worker\nWorker(5567).send_req('next')\n")
    _, err, _ = run_experiment(tmp_path, "alone", "-D", "cpu", status=1, PLATOON_DEVICES="cpu,cpu,cpu")
    assert "Controller has no handle_control(), to answer the request 'next'" in err


def test_platoon_launcher_separates_logs_of_simultaneous_experiments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher.time, "strftime", lambda form: "now")
    folders = [launcher._make_log_folder("lstm").name for _ in range(3)]
    assert folders == ["now", "now_1", "now_2"]
    assert all((tmp_path / "PLATOON_LOGS" / "lstm" / folder).is_dir() for folder in folders)


def test_platoon_accepts_names_of_its_first_version(tmp_path):
    (tmp_path / "old_controller.py").write_text(
        "from platoon.channel import Lieutenant\n"
        "class Old(Lieutenant):\n"
        "    n = 0\n"
        "    def handle_control(self, req):\n"
        "        self.n += 1\n"
        "        return 'stop' if self.n > 4 else req['done'] + 1\n"
        "l = Old()\nl.init_control(port=5567)\nl.serve()\n"
    )
    (tmp_path / "old_worker.py").write_text(
        "import sys, numpy as np\n"
        "from platoon.channel import Soldier\n"
        "from platoon.param_sync import EASGD\n"
        "class Shared:\n"
        "    dtype = np.dtype('float64')\n"
        "    def __init__(self): self.value = np.ones(3)\n"
        "    def get_value(self, borrow=False): return self.value\n"
        "    def set_value(self, value): self.value = value\n"
        "s = Soldier(cport=5567)\n"
        "s.init_shared_params('job', [Shared()], param_sync_rule=EASGD(0.5), cleanup=(sys.argv[1] == 'init'))\n"
        "while True:\n"
        "    answer = s.send_req(dict(done=10))\n"
        "    s.lock_params()\n"
        "    s.unlock_params()\n"
        "    if answer == 'stop':\n"
        "        break\n"
        "    assert answer == 11\n"
        "    s.sync_params(synchronous=True)\n"
    )
    run_experiment(tmp_path, "old", *DEVICES, "-w", "init")


def test_platoon_worker_needs_the_launcher():
    code = "import synkhronos.compat; from platoon.channel import Worker; Worker(5567)"
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 1 and "start NAME_worker.py with `synkhronos platoon NAME`" in done.stderr


# -- several hosts -----------------------------------------------------------------------------------------------

needs_namespaces = pytest.mark.skipif(
    not are_simulated(), reason="needs Linux namespaces, which give hosts their names"
)


def start_on_hosts(folder, experiment, *arguments, before=("-m", "synkhronos")):
    """Start an experiment with two workers on each of two hosts, which a .platoonrc in the working directory names."""
    for file in PROGRAMS.glob(f"{experiment}_*.py"):
        shutil.copy(file, folder)
    (folder / ".platoonrc").write_text("[platoon]\nhosts = a,b\n[devices]\na = cpu,cpu\nb = cpu,cpu\n")
    line, environment = make_command(["a:2", "b:2"], *before, "platoon", experiment, *arguments)
    environment["PYTHONPATH"] += os.pathsep + folder.name  # a mark that ssh passes on
    return subprocess.Popen(
        line,
        cwd=folder,
        env=environment | FLAGS,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_on_hosts(folder, experiment, *arguments, status=0):
    process = start_on_hosts(folder, experiment, *arguments)
    try:
        out, err = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    logs = {path.name: path.read_text() for path in sorted(folder.glob("PLATOON_LOGS/*/*/*"))}
    assert process.returncode == status, (process.returncode, out, err, logs)
    return err, logs


@pytest.mark.hosts
@needs_namespaces
def test_platoon_shares_parameters_within_a_host_and_reduces_over_all(tmp_path):
    """Shared parameters are per host; collectives span all hosts."""
    err, logs = run_on_hosts(tmp_path, "hosts")
    assert not err
    records = [pickle.loads((tmp_path / f"record-{rank}.pkl").read_bytes()) for rank in range(4)]
    assert [result["ranks"] for result in records] == [(0, 4, 0, 2), (1, 4, 1, 2), (2, 4, 0, 2), (3, 4, 1, 2)]
    arrays = [np.arange(6, dtype="float32").reshape(2, 3) / 3 + rank for rank in range(4)]
    forces = [np.float32(0.1) * (value - 1) for value in arrays]
    for first in (0, 2):
        pair = records[first : first + 2]
        _, host, processes, *sizes = pair[0]["hello"]
        assert pair[0]["hello"] == pair[1]["hello"] and sizes == [2, 4]
        assert sorted(result["process"] for result in pair) == processes
        assert [result["host"] for result in pair] == [host, host]
        local = [np.arange(4, dtype="float32") + 10 * (first + i) for i in (0, 1)]
        central = local[0].copy()
        for turn in (0, 1, 0):
            force = np.float32(0.25) * (local[turn] - central)
            local[turn], central = local[turn] - force, central + force
        for result, value in zip(pair, local, strict=True):
            np.testing.assert_array_equal(result["shared"], [value, central])
            assert result["counter"] == 40
        batches = sorted(batch[0] for result in pair for batch in result["batches"])
        assert batches == [5 * first + i for i in range(6)]
    for rank, result in enumerate(records):
        for op, value in result["reduced"].items():
            np.testing.assert_allclose(value, getattr(np, op)(arrays, axis=0), rtol=1e-6)
            np.testing.assert_array_equal(value, records[0]["reduced"][op])
            assert value.dtype == "float32"
        mean, local, central = result["dynamics"]
        np.testing.assert_allclose(mean, np.mean(arrays, axis=0), rtol=1e-6)
        np.testing.assert_allclose(local, arrays[rank] - forces[rank], rtol=1e-6)
        np.testing.assert_allclose(central, 1 + sum(forces), rtol=1e-6)
        assert logs[f"worker_cpu-{rank}.out"].splitlines()[-1] == f"worker {rank} ends"
    for name in ("controller_cpu.out", "controller_b.out"):
        assert logs[name].splitlines()[-1] == "served with status 0"


@pytest.mark.hosts
@needs_namespaces
@pytest.mark.faults
@pytest.mark.parametrize(
    ("experiment", "how", "message"),
    [
        ("fails", "kill 3", "worker 3 on host b (process {}) was killed by SIGKILL"),
        ("fails", "controller 3", "no answer of the controller: its process has ended; see {}/controller_b.err"),
        ("fails", "stuck 3", "ERROR! "),  # one of two messages, depending on timing
        ("hosts", "controller", "the controller of host b exited with code 1"),
    ],
)
def test_platoon_launcher_reports_failures_on_hosts(tmp_path, experiment, how, message):
    err, _ = run_on_hosts(tmp_path, experiment, "-H", "a", "b", f"-w={how}", status=1)
    before, _, after = message.partition("{}")
    assert before in err and after in err, err
    assert "were ended" not in err  # only the cause is reported, without the session's advice


@pytest.mark.hosts
@needs_namespaces
def test_platoon_worker_of_another_host_may_exit_early(tmp_path):
    """The controller that it has started still serves the host's other worker."""
    run_on_hosts(tmp_path, "fails", "-w=leave 2")


@pytest.mark.hosts
@needs_namespaces
@pytest.mark.faults
@pytest.mark.parametrize(
    ("number", "target", "status"),
    [
        (signal.SIGINT, "launcher", 3),
        (signal.SIGKILL, "launcher", -signal.SIGKILL),
        (signal.SIGKILL, "controller of b", 1),
    ],
)
def test_platoon_kill_on_hosts_leaves_nothing(tmp_path, number, target, status):
    process = start_on_hosts(tmp_path, "fails", "-w=ask", before=("-c", HOST, sys.executable, "-m", "synkhronos"))
    mark = tmp_path.name.encode()
    try:
        process.stdout.readline()
        before = list_marked_processes(mark)
        process.stdin.write("\n")
        process.stdin.flush()
        logs = "PLATOON_LOGS/*/*/controller_b.out"
        wait_until(lambda: any("ready" in path.read_text() for path in tmp_path.glob(logs)), process, LIMIT)
        running = {pid: process for pid, process in sorted(list_marked_processes(mark).items()) if pid not in before}
        pids = {"launcher": next(pid for pid, (_, line) in running.items() if "-m synkhronos platoon" in line)}
        for pid, (space, line) in running.items():
            if "controller_process.main()" in line:  # and so the processes that it has forked, later
                host = "a" if space == running[pids["launcher"]][0] else "b"
                pids.setdefault(f"controller of {host}", pid)
        os.kill(pids[target], number)
        lines = iter(process.stdout.readline, "")
        assert f"{status:d}\n" in lines
        wait_until_empty(
            lambda: [(p, line) for p, line in list_marked_processes(mark).items() if p not in before], LIMIT
        )
    finally:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # others have its pipes, where the test has failed
            print(*process.communicate(timeout=5))
