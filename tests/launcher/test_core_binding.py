"""The launcher binds ranks to cores near their GPUs."""

import os
import sys
import textwrap
from types import SimpleNamespace

import pytest
from launch_runs import run

from synkhronos.launcher import core_binding, doctor
from synkhronos.ranks import count_available_cores

pytestmark = pytest.mark.starts_programs


def test_assign_cores_divides_cores_among_ranks():
    assert core_binding.assign_cores(["cpu"] * 2, range(5), {})[0] == [[0, 1], [2, 3, 4]]
    assert core_binding.assign_cores(["cpu"] * 3, [4, 6, 9], {})[0] == [[4], [6], [9]]
    assert core_binding.assign_cores(["cpu"] * 3, [0, 1], {}) == ([], "not bound: there are 2 cores for 3 ranks")


def test_binding_places_ranks_near_their_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(core_binding, "_PCI_FOLDER", tmp_path)
    for address, cores in (("0000:1b:00.0", "0-3,8-11"), ("0000:3c:00.0", "0-3,8-11"), ("0000:9d:00.0", "4-7")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "local_cpulist").write_text(f"{cores}\n")
    near = {
        f"cuda{i}": core_binding.find_pci_device_cores(address)
        for i, address in enumerate(("00000000:1B:00.0", "00000000:3C:00.0", "00000000:9D:00.0"))
    }
    devices = sorted(near)
    assigned, why = core_binding.assign_cores(devices, range(12), near)
    assert assigned == [[0, 1, 2, 3], [8, 9, 10, 11], [4, 5, 6, 7]] and why.endswith("next to its GPU")
    assert core_binding.assign_cores(devices, [0, 1, 2, 5], near)[0] == [[0], [1, 2], [5]]
    assigned, why = core_binding.assign_cores(devices, [0, 1, 2, 12], near)
    assert assigned[2] == [0, 1, 2, 12] and "next to cuda2 are not among those" in why
    assert (
        core_binding.assign_cores(devices, [0, 5, 6], near)[1] == "not bound: cores 0 are next to the GPUs of 2 ranks"
    )
    assert core_binding.find_pci_device_cores("0000:ff:00.0") == []


def test_binding_and_doctor_follow_cudas_gpu_order(tmp_path, monkeypatch):
    # The slow GPU is first on the bus; CUDA lists the fast one first.
    names = {"GPU-slow": "0000:1b:00.0", "GPU-fast": "0000:9d:00.0"}
    for address, cores in zip(names.values(), ("0-3", "4-7"), strict=True):
        (tmp_path / address).mkdir()
        (tmp_path / address / "local_cpulist").write_text(cores)
    memory = SimpleNamespace(total=80 << 30)
    nvml = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByIndex": [*names].__getitem__,
        "nvmlDeviceGetHandleByUUID": bytes.decode,
        "nvmlDeviceGetName": lambda name: f"a {name}",
        "nvmlDeviceGetMemoryInfo": lambda name: memory,
        "nvmlDeviceGetPciInfo": lambda name: SimpleNamespace(busId=names[name].encode()),
        "nvmlDeviceGetP2PStatus": lambda one, other, index: 0,
        "NVML_P2P_CAPS_INDEX_NVLINK": 2,
        "NVML_P2P_STATUS_OK": 0,
        "NVMLError": OSError,
    }
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(**nvml))
    cuda = SimpleNamespace(Device=lambda number: SimpleNamespace(uuid=["fast", "slow"][number]))
    monkeypatch.setitem(sys.modules, "cuda.core", cuda)
    monkeypatch.setattr(core_binding, "_PCI_FOLDER", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert core_binding.find_gpu_cores(["cuda0", "cuda1"]) == {"cuda0": [4, 5, 6, 7], "cuda1": [0, 1, 2, 3]}
    assert doctor._describe_gpus(2) == [
        "  cuda0: a GPU-fast, 80 GiB, next to cores 4-7, NVLink to 1",
        "  cuda1: a GPU-slow, 80 GiB, next to cores 0-3, NVLink to 0",
    ]
    del cuda.Device
    assert core_binding.find_gpu_cores(["cuda0", "cuda1"]) == {}


@pytest.mark.skipif(count_available_cores() < 2, reason="needs two cores")
@pytest.mark.slow
def test_binding_limits_ranks_and_their_threads(tmp_path):
    (tmp_path / "where.py").write_text(
        textwrap.dedent("""
        import os
        from launch_models.mlp import MLP

        class Where(MLP):
            def cleanup(self):
                threads = {tuple(sorted(os.sched_getaffinity(int(t)))) for t in os.listdir("/proc/self/task")}
                print("cores", sorted(threads))
        """)
    )
    common = ["--set=model='where.py:Where'", "--devices=cpu,cpu", "--set=epochs=1"]
    for folder, *option in [("bound",), ("free", "--no-bind")]:
        run("train", *common, f"--folder={folder}", *option, cwd=tmp_path, new=True)  # BLAS starts threads at import
    allowed = sorted(os.sched_getaffinity(0))
    half = len(allowed) // 2
    for r, rank_cores in enumerate((allowed[:half], allowed[half:])):
        assert f"cores {[tuple(rank_cores)]}" in (tmp_path / "bound" / f"rank-{r}.log").read_text()
        log = (tmp_path / "free" / f"rank-{r}.log").read_text()
        assert f"cores {[tuple(allowed)]}" in log and "not bound" in log
