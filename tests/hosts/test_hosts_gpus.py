"""Fake GPUs on several hosts (tests/support/gpus/fake); benchmarks/gpu_hosts.py uses real GPUs."""

import json
import os
import subprocess

import hosts as host_programs
import numpy as np
import pytest
from hosts import GPUS, are_simulated, make_command
from library import DEVICE, NAME

from synkhronos.hosts import agent_main, mpi_link

pytestmark = [pytest.mark.skipif(DEVICE != "host", reason="fake GPUs are JAX's CPU"), pytest.mark.timeout(300)]
needs_jax = pytest.mark.skipif(NAME != "pytensor", reason="fake GPUs are JAX's CPU")
#: Hosts of most programs, one after another, as `run` reuses the ranks.
TWO_HOSTS = ["a:1", "b:1"]


def run(hosts, program):
    """Run a program on hosts with GPUs; return the lines that it prints."""
    return host_programs.run(hosts, program, gpus=True).splitlines()


@pytest.mark.hosts
@needs_jax
@pytest.mark.parametrize("program", ["train", "run_collectives", "run_groups"])
def test_gpus_on_hosts_compute_the_same_as_on_one_host(program):
    expected = run(["a:2"], program)
    assert len(expected) == {"train": 1, "run_collectives": 12, "run_groups": 2}[program]
    assert run(TWO_HOSTS, program) == expected


@pytest.mark.hosts
@needs_jax
def test_data_parts_locks_only_local_pages():
    sums, used = run(TWO_HOSTS, "use_parts")
    assert sums == "1.0 1.0 1.0"
    assert 15 <= int(used) <= 18, used  # half of 32 MB


@pytest.mark.hosts
@needs_jax
@pytest.mark.skipif(not are_simulated(), reason="fake hosts have one loopback")
def test_nccl_connection_error_names_the_interface():
    (line,) = run(TWO_HOSTS, "report_interface_error")
    assert line.startswith(
        "rank 1 on host b raised RuntimeError: NCCL did not connect the ranks' GPUs: RuntimeError: ncclSystemError. "
        "NCCL uses the network interface lo:127.0.0.1 here, and lo:127.0.0.1 on rank 0, which all ranks have to reach; "
        "NCCL_SOCKET_IFNAME selects the interface, for all hosts. NCCL's warnings: socketStartConnect: Connect to "
    ), line
    assert "Connection refused" in line


@pytest.mark.hosts
@needs_jax
def test_failure_or_death_in_a_gpu_collective_on_hosts_is_reported():
    messages, size = run(["a:1", "b:2"], "fail_and_reconnect")
    assert (messages, size) == ("rank 2 on host b was reported True", "3")


@pytest.mark.hosts
@needs_jax
def test_fork_on_hosts_refuses_more_ranks_than_gpus():
    assert run(["a:1", "b:2"], "request_too_many_gpus") == [  # the hosts of the test before
        "hosts: b has 2 GPUs, and 3 ranks there need one each: pass use_gpu=False, or in a session file "
        "devices = 'cpu', to compute on CPU cores",
        "hosts: a has 2 GPUs, and 3 ranks there need one each: pass use_gpu=False, or in a session file "
        "devices = 'cpu', to compute on CPU cores",
    ]


def train(hosts, folder, *arguments, status=0, **variables):
    """Train a class in a session; return its output."""
    model = ["--set", "model='launch_models/mlp.py:MLP'", "--folder", folder, "--set=epochs=2"]
    command, environment = make_command(hosts, "-m", "synkhronos", "train", *model, *arguments, gpus=True)
    environment |= variables
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, cwd=GPUS.parent)
    assert done.returncode == status, done.stdout + done.stderr
    return (done.stderr if status else done.stdout).splitlines()


@pytest.mark.hosts
@needs_jax
def test_launch_on_hosts_with_gpus_equals_one_host(tmp_path):
    output = train(["a:1", "b:1"], tmp_path / "hosts", "--hosts=a:1,b:1")
    assert output[0].startswith("ranks on hosts a:1, b:1; ")
    for rank, where in enumerate(["on cuda0", "on cuda0 of host "]):
        assert where in (tmp_path / "hosts" / f"rank-{rank}.log").read_text().splitlines()[0]
    one_host = train(["a:2"], tmp_path / "one")
    assert one_host[0].startswith("2 ranks on cuda0, cuda1; ")
    expected, actual = (np.load(tmp_path / folder_name / "params.npz") for folder_name in ("one", "hosts"))
    assert all(np.array_equal(expected[name], actual[name]) for name in expected)


@pytest.mark.hosts
@needs_jax
def test_launcher_takes_all_gpus_of_each_host(tmp_path):
    output = train(["a", "b"], tmp_path / "gpus", "--hosts=a,b")
    assert output[0].startswith("ranks on hosts a:2, b; ")
    where = [(tmp_path / "gpus" / f"rank-{rank}.log").read_text().splitlines()[0] for rank in range(4)]
    assert [line.split()[3].rstrip(",") for line in where] == ["cuda0", "cuda1", "cuda0", "cuda1"]
    # Not in JAX mode: the mode does not affect the devices, and XLA compiles for seconds.
    mode = {"PYTENSOR_FLAGS": os.environ["PYTENSOR_FLAGS"]}
    output = train(["a", "b"], tmp_path / "cores", "--hosts=a:1,b:1", "--devices=cpu", **mode)
    assert "on cpu of host" in (tmp_path / "cores" / "rank-1.log").read_text().splitlines()[0]
    errors = train(["a", "b"], tmp_path / "refused", "--hosts=a:1,b", "--devices=cuda1", status=2)
    assert "devices: expected cpu, or cuda0 to cuda0 in this order" in errors[-1]


@pytest.mark.hosts
@pytest.mark.faults
@needs_jax
@pytest.mark.skipif(not are_simulated(), reason="all hosts would lose the GPU")
def test_launcher_goes_on_without_a_lost_gpu_of_another_host(tmp_path):
    pytest.importorskip("safetensors")
    model = "--set=model='launch_models/mlp_variants.py:GpuLosingMLP'"
    train(["a", "b"], tmp_path, "--hosts=a:1,b:2", model, "--set=on_death='continue'")
    assert json.loads((tmp_path / "settings.json").read_text())["hosts"] == ["a:1", "b:1"]
    deaths = json.loads((tmp_path / "deaths.json").read_text())
    assert [(death["host"], death.get("ranks_left")) for death in deaths] == [("b", None), ("b", 1), ("b", 1)]
    reports = [json.loads(line) for line in (tmp_path / "reports.jsonl").read_text().splitlines()]
    assert [report["epoch"] for report in reports] == [1, 2] and reports[1]["deaths"] == deaths
    assert len((tmp_path / "rank-1.jsonl").read_text().splitlines()) > 1


@pytest.mark.hosts
@pytest.mark.skipif(NAME != "theano", reason="pygpu's arrays are Theano's")
def test_all_reduce_accepts_theano_gpu_arrays_on_hosts():
    expected = ["sum (3.0, 2997.0)", "max (2.0, 1998.0)", "[7.0, 8.0, 15.0] [8.0, 7.0, 15.0]"]
    assert run(TWO_HOSTS, "all_reduce_theano_arrays") == expected


def test_fork_refuses_hosts_without_pygpu(monkeypatch):
    versions = agent_main._get_host_info()["versions"]
    assert "pygpu" not in versions
    monkeypatch.syspath_prepend(GPUS / "fake")
    monkeypatch.setattr(agent_main, "get_n_gpu", lambda: 2)
    with pytest.raises(RuntimeError, match="hosts need the same versions: pygpu is installed on a and missing on b"):
        mpi_link.check_versions(["a", "b"], [agent_main._get_host_info()["versions"], versions])
