"""GPUs of several hosts, which are pretended: see tests/gpus/pretend.py.  The real ones are for benchmarks/gpu_hosts.py."""

import os
import subprocess
from pathlib import Path

import pytest
from hosts import are_simulated, has_mpi, words
from library import DEVICE, NAME

pytestmark = [
    pytest.mark.skipif(NAME != "pytensor" or DEVICE != "host", reason="pretended GPUs are JAX' CPU"),
    pytest.mark.timeout(300),
]
needs_mpi = pytest.mark.skipif(not has_mpi(), reason="needs mpi4py and mpirun: pip install synkhronos[hosts]")
FOLDER = Path(__file__).parent / "gpus"
PROGRAMS = FOLDER / "programs.py"


def run(hosts, program, **variables):
    """Run a program on hosts with two GPUs each, and return what it prints."""
    command, environment = words(hosts, PROGRAMS, program)
    # Not on this process' path: there are no GPUs for other tests.
    environment["PYTHONPATH"] += os.pathsep + str(FOLDER)
    environment |= {"PRETENDED_GPUS": "2", "JAX_PLATFORMS": "cpu", "PYTENSOR_FLAGS": "mode=JAX", **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@needs_mpi
@pytest.mark.parametrize("program", ["train", "collectives"])
def test_the_same_as_on_one_host(program):
    expected = run(["a:2"], program)
    assert len(expected) == (1 if program == "train" else 12)
    assert run(["a:1", "b:1"], program) == expected


@needs_mpi
def test_a_rank_that_fails_in_a_collective_or_dies_there():
    heard, size = run(["a:1", "b:2"], "faults")
    assert (heard, size) == ("rank 2 on host b was heard of True", "3")


@needs_mpi
@pytest.mark.skipif(not are_simulated(), reason="pretended hosts have one loopback")
def test_who_can_t_connect_hears_which_interface_nccl_took():
    (line,) = run(["a:1", "b:1"], "interface", NCCL_SOCKET_IFNAME="lo")
    assert line.startswith(
        "rank 1 on host b raised RuntimeError: NCCL did not connect the ranks' GPUs: RuntimeError: ncclSystemError. "
        "NCCL took the network interface lo:127.0.0.1 here, and lo:127.0.0.1 on rank 0, which all ranks have to reach; "
        "NCCL_SOCKET_IFNAME names the one to take, for all hosts. NCCL's own words: socketStartConnect: Connect to "
    ), line
    assert "Connection refused" in line


@needs_mpi
def test_more_ranks_than_gpus_are_refused():
    assert run(["a", "b"], "refused") == [
        "hosts: b has 2 GPUs, and 3 ranks there need one each: pass use_gpu=False to compute on CPU cores",
        "hosts: a has 2 GPUs, and 3 ranks there need one each: pass use_gpu=False to compute on CPU cores",
        "4",
        "jax",
    ]
