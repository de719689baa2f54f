"""Binding of ranks to CPU cores: the cores next to the rank's GPU, or an equal share of all cores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: Folder in which Linux describes PCI devices.
_PCI_FOLDER = Path("/sys/bus/pci/devices")


def assign_cores(
    devices: Sequence[str], allowed_cores: Sequence[int], gpu_cores: dict[str, list[int]]
) -> tuple[list[list[int]], str]:
    """Return a list of cores for each rank, chosen by its device, and a description of the assignment.

    The first list is empty if ranks should not be bound, because some would share a core.  ``allowed_cores`` are the
    cores that this process may use, ``gpu_cores`` the cores next to each GPU.

    Examples
    --------
    >>> assign_cores(["cpu", "cpu"], [0, 1, 2, 3], {})
    ([[0, 1], [2, 3]], 'each rank has a share of the 4 cores')
    """
    allowed_cores = sorted(allowed_cores)
    if len(devices) > len(allowed_cores):
        return [], f"not bound: there are {len(allowed_cores)} cores for {len(devices)} ranks"
    near_cores = [tuple(core for core in gpu_cores.get(device, ()) if core in set(allowed_cores)) for device in devices]
    unreachable = [
        device for device, local in zip(devices, near_cores, strict=True) if device in gpu_cores and not local
    ]
    near_cores = [local or tuple(allowed_cores) for local in near_cores]
    cores: list[list[int]] = [[] for _ in devices]
    for local in set(near_cores):  # divided among the ranks with GPUs next to them
        ranks = [r for r, candidate in enumerate(near_cores) if candidate == local]
        if len(local) < len(ranks):
            return [], f"not bound: cores {format_cores(local)} are next to the GPUs of {len(ranks)} ranks"
        bounds = [len(local) * i // len(ranks) for i in range(len(ranks) + 1)]
        for i, r in enumerate(ranks):
            cores[r] = list(local[bounds[i] : bounds[i + 1]])
    if unreachable:
        return cores, f"the cores next to {', '.join(unreachable)} are not among those that this process may use"
    if any(device in gpu_cores for device in devices):
        return cores, "each rank has a share of the cores next to its GPU"
    return cores, f"each rank has a share of the {len(allowed_cores)} cores"


def find_gpu_cores(devices: Sequence[str]) -> dict[str, list[int]]:
    """Return the cores next to each GPU, by its name.  GPUs whose cores are unknown have no entry."""
    try:
        import pynvml

        pynvml.nvmlInit()
        cores_by_device = {}
        for device in {name for name in devices if name != "cpu"}:
            address = pynvml.nvmlDeviceGetPciInfo(get_nvml_handle(int(device.removeprefix("cuda")))).busId
            cores_by_device[device] = find_pci_device_cores(address.decode() if isinstance(address, bytes) else address)
    except Exception:  # a package, a library or the driver is missing
        return {}
    return {device: cores for device, cores in cores_by_device.items() if cores}


def get_nvml_handle(cuda_index: int) -> Any:
    """Return NVML's handle of the GPU ``cuda:cuda_index``.  CUDA orders GPUs by speed, NVML does not."""
    import pynvml
    from cuda.core import Device

    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{Device(cuda_index).uuid}".encode())


def find_pci_device_cores(address: str) -> list[int]:
    """Return the cores next to a PCI device, or an empty list if Linux does not list them."""
    domain, _, bus_address = address.lower().partition(":")
    try:
        return parse_cores((_PCI_FOLDER / f"{domain[-4:]}:{bus_address}" / "local_cpulist").read_text())
    except (OSError, ValueError):
        return []


def parse_cores(text: str) -> list[int]:
    """Parse a list of cores in Linux's format.

    Examples
    --------
    >>> parse_cores("0-2,8")
    [0, 1, 2, 8]
    """
    cores: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores += range(int(first), int(last or first) + 1)
    return cores


def bind_to_cores(cores: Sequence[int]) -> None:
    """Bind this thread, and the threads that it will start, to cores, unless the list of cores is empty."""
    if cores:
        os.sched_setaffinity(0, cores)


def describe_binding(cores: Sequence[int] | None) -> str:
    """Describe the binding of a rank, for its first line of output."""
    if not cores:
        return "not bound"
    return f"bound to {'core' if len(cores) == 1 else 'cores'} {format_cores(cores)}"


def format_cores(cores: Sequence[int]) -> str:
    """Format a list of cores as Linux does, such as ``0-2,8``."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
