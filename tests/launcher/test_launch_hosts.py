"""Runs on several hosts: parameters equal those of one host; logs and records are in one folder; kills."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hosts import are_simulated, make_command
from launch_runs import HOST, read_json_lines, train
from paths import SUPPORT
from system import list_marked_processes, wait_until, wait_until_empty

from synkhronos.launcher.configuration.resolve import resolve_settings
from synkhronos.launcher.configuration.settings import Settings, SettingsError
from synkhronos.launcher.configuration.sources import read_environment
from synkhronos.launcher.supervision.supervisor import Supervisor
from synkhronos.ranks import count_available_cores

MODEL = {"model": f"{SUPPORT}/launch_models/mlp.py:MLP", "devices": "cpu"}
LIMIT = 60
pytestmark = [pytest.mark.starts_programs, pytest.mark.timeout(300)]  # ranks compile, and mpirun starts


def start_run(hosts, folder, model="mlp.py:MLP", **settings):
    """Start a run on these hosts; return its process."""
    sets = [f"--set={name}={value}" for name, value in {"epochs": 2, **settings}.items()]
    where = ["--set", f"model='launch_models/{model}'", "--hosts", ",".join(hosts), "--folder", folder]
    command, environment = make_command(hosts, "-m", "synkhronos", "train", *where, *sets)
    environment = {name: value for name, value in environment.items() if name != "SYNKHRONOS_HOSTS"}
    return subprocess.Popen(
        command, env=environment, cwd=SUPPORT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_end(process, status):
    output, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == status, (process.returncode, output, errors)
    return output, errors


@pytest.mark.hosts
@pytest.mark.parametrize("hosts", [["a:2", "b:2"], ["a:3", "b:1"]], ids="+".join)
def test_launch_on_hosts_equals_one_host(tmp_path, hosts):
    output, _ = wait_for_end(start_run(hosts, tmp_path / "hosts", every=4), 0)
    train(tmp_path / "one", "MLP", "--devices=cpu", "--ranks=4", epochs=2, every=4)
    expected, actual = (np.load(tmp_path / name / "params.npz") for name in ("one", "hosts"))
    assert all(np.array_equal(expected[name], actual[name]) for name in expected)
    for rank in range(4):
        log = (tmp_path / "hosts" / f"rank-{rank}.log").read_text().splitlines()
        lines_of_launcher = [line for line in log if not line.startswith("WARNING (theano.")]
        assert re.fullmatch(r"process \d+ on cpu( of host \S+)?, .*", lines_of_launcher[0]), log
        assert all(f"[rank {rank}] {line}" in output.splitlines() for line in log)
        assert "epoch 2, iteration" in log[-1 if rank else -2]
        steps = [
            [line["step"] for line in read_json_lines(tmp_path / name, f"rank-{rank}")] for name in ("one", "hosts")
        ]
        assert steps[0] == steps[1] and steps[0]
    assert output.startswith(f"ranks on hosts {', '.join(hosts)}; ")
    assert "\x1e" not in output
    settings = json.loads((tmp_path / "hosts" / "settings.json").read_text())
    assert settings["hosts"] == hosts and len(settings["devices"]) == int(hosts[0][-1])


#: Starts a run, resumes it, and moves its folder to the test's folder.
TWICE = """
import shutil, subprocess, sys
folder, to, *words = sys.argv[1:]
for more in (["--set=epochs=1"], ["--set=epochs=3", "--resume"]):
    subprocess.run([sys.executable, *words, *more], check=True)
shutil.move(folder, to)
"""


@pytest.mark.hosts
@pytest.mark.parametrize("rule", ["BSP", "EASGD"])
def test_resume_on_hosts_needs_no_shared_folder(tmp_path, rule):
    pytest.importorskip("safetensors")
    hosts = ["a:2", "b:1"]
    folder = Path("/dev/shm", tmp_path.name)  # simulated hosts do not share this folder
    run = ["-m", "synkhronos", "train", "--hosts", ",".join(hosts), "--folder", folder, f"--set=rule='{rule}'"]
    run += ["--set", "model='launch_models/mlp.py:MLP'", "--set=checkpoint=1"]
    command, environment = make_command(hosts, "-c", TWICE, folder, tmp_path / "run", *run)
    environment.pop("SYNKHRONOS_HOSTS", None)
    done = subprocess.run(command, env=environment, cwd=SUPPORT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line["epoch"] for line in read_json_lines(tmp_path / "run", "reports")] == [1, 2, 3]
    if rule == "BSP":  # under the other rule the order of exchanges is random
        train(tmp_path / "one", "MLP", "--devices=cpu", "--ranks=3", epochs=3, rule=f"'{rule}'")
        expected, actual = (np.load(tmp_path / name / "params.npz") for name in ("one", "run"))
        assert all(np.array_equal(expected[name], actual[name]) for name in expected)


@pytest.mark.hosts
def test_first_failure_of_another_host_is_printed_last(tmp_path):
    output, errors = wait_for_end(start_run(["a:1", "b:1"], tmp_path, "mlp_variants.py:FailingMLP"), 1)
    errors = errors.rstrip().splitlines()
    assert errors[-1] == "ValueError: the third batch is damaged" and errors[0] == "rank 1 on host b:"
    assert "[rank 1] process" in output


@pytest.mark.hosts
@pytest.mark.faults
@pytest.mark.parametrize("victim", [0, 1])
def test_restart_works_on_two_hosts(tmp_path, victim):
    pytest.importorskip("safetensors")
    config = {"config.marks": f"'{tmp_path}'", "config.victim": victim, "config.epochs": "[1]"}
    run = start_run(["a:1", "b:1"], tmp_path / "run", "mlp_variants.py:DyingMLP", checkpoint=1, restarts=1, **config)
    _, errors = wait_for_end(run, 0)
    assert "restart 1 of 1 from " in errors and "rows-000000000009" in errors
    assert [line["epoch"] for line in read_json_lines(tmp_path / "run", "reports")] == [1, 2]
    assert [line["step"] for line in read_json_lines(tmp_path / "run", "rank-1")] == [9, 18]


@pytest.fixture(scope="module")
def one_host_run(tmp_path_factory):
    """Train on two ranks of this machine; return the run's folder."""
    folder = tmp_path_factory.mktemp("one")
    train(folder, "MLP", "--devices=cpu", "--ranks=2", epochs=2)
    return folder


@pytest.mark.hosts
@pytest.mark.faults
@pytest.mark.parametrize("has_lost_host", [False, True])
def test_on_death_continue_works_on_two_hosts(tmp_path, one_host_run, has_lost_host):
    """The agent of a host is the parent of its ranks: its death ends them all."""
    pytest.importorskip("safetensors")
    config = {"config.marks": f"'{tmp_path}'", "config.victim": 1, "config.epochs": "[1]"}
    config["config.parent"] = str(has_lost_host).lower()
    run = start_run(["a:1", "b:1"], tmp_path / "run", "mlp_variants.py:DyingMLP", on_death="continue", **config)
    _, errors = wait_for_end(run, 0)
    assert "death 1 of at most 100: from the checkpoint " in errors
    expected, actual = (np.load(folder / "params.npz") for folder in (one_host_run, tmp_path / "run"))
    assert all(np.array_equal(expected[name], actual[name]) for name in expected)
    (death,) = json.loads((tmp_path / "run" / "deaths.json").read_text())
    assert read_json_lines(tmp_path / "run", "reports")[1]["deaths"] == [death]
    assert death["rank"] == 1 and (has_lost_host or death["host"] == "b")
    for rank in range(2):
        assert sum(line["rows"] for line in read_json_lines(tmp_path / "run", f"rank-{rank}")) == 180


@pytest.mark.hosts
@pytest.mark.faults
@pytest.mark.skipif(not are_simulated(), reason="no namespaces here, so that no host is lost alone")
def test_on_death_continue_leaves_out_a_lost_host(tmp_path):
    pytest.importorskip("safetensors")
    run = start_run(["a:1", "b:1"], tmp_path, "mlp_variants.py:HostKillingMLP", on_death="continue")
    _, errors = wait_for_end(run, 0)
    assert errors.count("host b can't be reached, and is left out: the run continues on a:1\n") == 1
    deaths = json.loads((tmp_path / "deaths.json").read_text())
    causes = [death["cause"] for death in deaths]
    assert len(causes) == 3 and "was lost" in causes[0], causes
    assert all("the hosts a, b could not be reached: " in cause for cause in causes[1:]), causes
    assert json.loads((tmp_path / "settings.json").read_text())["hosts"] == []
    reports = read_json_lines(tmp_path, "reports")
    assert [report["epoch"] for report in reports] == [1, 2] and reports[1]["deaths"] == deaths
    assert [report["batch"].split()[0] for report in reports] == ["2", "1"]


def test_a_run_without_a_lost_host_cannot_leave_out_any(tmp_path, capfd):
    settings = Settings("module", "Class", ".", ("cpu",), folder=str(tmp_path), hosts=("a:1", "b:1", "c:1"))
    supervisor = Supervisor(settings)
    deaths = [{"host": "b", "step": 3}, {"host": "a"}, {"host": ""}]
    assert not supervisor._remove_ranks_of_hosts(deaths)
    assert "can't start again on a:1, b:1, c:1, and no host but the first was lost" in capfd.readouterr().err
    assert supervisor._remove_ranks_of_hosts([*deaths, {"host": "b"}, {"host": "c"}, {"host": ""}])
    assert supervisor.settings.hosts == ("a:1", "b:1") == Settings.load(str(tmp_path)).hosts
    assert not supervisor._remove_ranks_of_hosts([{"host": "a", "ranks_left": 0}])
    assert supervisor._remove_ranks_of_hosts([{"host": "b", "ranks_left": 0}])
    assert supervisor.settings.hosts == () and supervisor.settings.devices == ("cpu",)


@pytest.mark.parametrize(
    ("host", "hosts", "devices"), [("a", ("a:2", "b"), ("cuda0", "cuda1")), ("b", ("a:3", "b:2"), ("cuda0",) * 3)]
)
def test_a_run_goes_on_with_the_gpus_that_a_host_has_left(tmp_path, host, hosts, devices):
    all_devices = "cuda0", "cuda1", "cuda2"
    settings = Settings("module", "Class", ".", all_devices, folder=str(tmp_path), hosts=("a:3", "b"))
    supervisor = Supervisor(settings)
    assert supervisor._remove_ranks_of_hosts([{"host": host, "ranks_left": 2}])
    assert supervisor.settings.hosts == hosts and len(supervisor.settings.devices) == len(devices)


#: Patterns of the command lines of a run's processes.
KINDS = {
    "supervisor": r"\S*python\S* -m synkhronos train",
    "rank 0": r"\S*python\S* -m synkhronos\.launcher\.rank_process\.master_process",
    "rank of another host": r"\S*python\S* -c .*fork_server import run_server",
    "agent": r"\S*python\S* -c .*hosts\.agent_main import",
    "mpirun": r"\S*(mpirun|prterun) -",  # Open MPI's mpirun becomes this
    "what passes lines on": r"\S*python\S* -ISc .*os\.write",
}


@pytest.mark.hosts
@pytest.mark.faults
@pytest.mark.skipif(not are_simulated(), reason="no namespaces here, which tell the agents apart")
@pytest.mark.parametrize("target", [*KINDS, "Ctrl-C", "all, by a scheduler"])
def test_kill_of_any_process_on_hosts_leaves_nothing(tmp_path, target):
    # All deaths are detected within a step, except that of the process that forwards lines: with the next record.
    model = "mlp.py:MLP" if target in ("what passes lines on", "all, by a scheduler") else "mlp_variants.py:StuckMLP"
    sets = ["--set=every=1", "--set=epochs=100000", "--set", f"model='launch_models/{model}'"]
    sets += ["--set=checkpoint=1"] if target == "all, by a scheduler" else []
    train = ["-m", "synkhronos", "train", "--hosts", "a:1,b:1", "--folder", tmp_path / "run", *sets]
    command, environment = make_command(["a:1", "b:1"], "-c", HOST, sys.executable, *train)
    mark = f"mark-{tmp_path.name}-{os.getpid()}"
    environment["PYTHONPATH"] += os.pathsep + mark  # ssh passes this variable on
    host = subprocess.Popen(
        command,
        env=environment,
        cwd=SUPPORT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        host.stdout.readline()
        before = list_marked_processes(mark.encode())
        host.stdin.write("\n")
        host.stdin.flush()
        wait_until((tmp_path / "run" / "rank-1.jsonl").exists, host, LIMIT)
        everyone = {pid: process for pid, process in list_marked_processes(mark.encode()).items() if pid not in before}
        pids_by_kind = {kind: [p for p, (_, line) in everyone.items() if re.match(KINDS[kind], line)] for kind in KINDS}
        pids_by_kind["Ctrl-C"] = pids_by_kind["supervisor"]
        pids_by_kind["rank of another host"].sort(reverse=True)  # the first process is the server that forks the rank
        if target == "all, by a scheduler":
            for pid in everyone:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        else:
            os.kill(pids_by_kind[target][0], signal.SIGINT if target == "Ctrl-C" else signal.SIGKILL)
        began = time.monotonic()
        # The status is printed last, after the output of the ranks.  A buffered file cannot be polled.
        timer = threading.Timer(LIMIT, host.kill)
        timer.start()
        status = next(line for line in host.stdout if line.strip().lstrip("-").isdecimal())
        timer.cancel()
        print(target, status, time.monotonic() - began)
        if target == "all, by a scheduler":
            record = json.loads((tmp_path / "run" / "run.json").read_text())
            assert int(status) == record["status"] == 143
            assert Path(record["checkpoint"], "meta.json").exists()
        else:
            assert int(status) != 0 and time.monotonic() - began < LIMIT
        wait_until_empty(
            lambda: [(pid, line) for pid, line in list_marked_processes(mark.encode()).items() if pid not in before],
            LIMIT,
        )
    finally:
        host.kill()
        output = host.communicate()
        print(*output)


@pytest.mark.parametrize(
    ("asked", "hosts", "n_here"),
    [
        ({"hosts": ["a:2", "b"]}, ("a:2", "b"), 2),
        ({"hosts": "a, b:3"}, (f"a:{count_available_cores()}", "b:3"), count_available_cores()),
        ({"hosts": ["a", "b:3"], "ranks": 5}, ("a:5", "b:3"), 5),
        (
            {"hosts": ["a:2", "b:3"], "devices": ["cpu", "cpu"]},
            ("a:2", "b:3"),
            2,
        ),  # as in settings.json of a run folder
        (read_environment({"SYNKHRONOS_HOSTS": "a:1,b"}), ("a:1", "b"), 1),
        ({"hosts": ""}, (), 1),
    ],
)
def test_hosts_are_read_from_settings_and_environment(tmp_path, asked, hosts, n_here):
    settings = resolve_settings([{**MODEL, "folder": str(tmp_path / "run"), **asked}])
    assert settings.hosts == hosts and settings.devices == ("cpu",) * n_here
    (tmp_path / "run").mkdir()
    settings.save()
    assert type(settings).load(settings.folder) == settings


def test_launch_refuses_several_srun_tasks(tmp_path, monkeypatch):
    for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    settings = {**MODEL, "folder": str(tmp_path / "run")}
    with pytest.raises(SettingsError, match="2 processes of this program were started.*srun --nodes=1 --ntasks=1"):
        resolve_settings([{**settings, "hosts": "a,b"}])
    assert resolve_settings([settings]).hosts == ()  # independent runs
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert resolve_settings([{**settings, "hosts": "a:1,b"}]).hosts == ("a:1", "b")
