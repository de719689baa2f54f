"""Binding of ranks to cores: those next to the rank's GPU, or an equal share of all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PCI = Path("/sys/bus/pci/devices")


def assign_cores(
    devices: Sequence[str], allowed: Sequence[int], near: dict[str, list[int]]
) -> tuple[list[list[int]], str]:
    """Return the cores of each rank, and the reason as a text.

    Parameters
    ----------
    devices : sequence of str
        ``"cpu"`` or ``"cuda0"`` and so on, one per rank.
    allowed : sequence of int
        The cores that this process may use.
    near : dict of str to list of int
        The cores next to each GPU.

    Returns
    -------
    list of list of int
        Empty if ranks should not be bound, because some would share a core.
    str

    Examples
    --------
    >>> assign_cores(["cpu", "cpu"], [0, 1, 2, 3], {})
    ([[0, 1], [2, 3]], 'each rank has a share of the 4 cores')
    """
    allowed = sorted(allowed)
    if len(devices) > len(allowed):
        return [], f"not bound: there are {len(allowed)} cores for {len(devices)} ranks"
    homes = [tuple(core for core in near.get(device, ()) if core in set(allowed)) for device in devices]
    away = [device for device, home in zip(devices, homes, strict=True) if device in near and not home]
    homes = [home or tuple(allowed) for home in homes]
    cores: list[list[int]] = [[] for _ in devices]
    for home in set(homes):  # the ranks whose GPUs are next to the same cores share them
        ranks = [r for r, candidate in enumerate(homes) if candidate == home]
        if len(home) < len(ranks):
            return [], f"not bound: cores {format_cores(home)} are next to the GPUs of {len(ranks)} ranks"
        bounds = [len(home) * i // len(ranks) for i in range(len(ranks) + 1)]
        for i, r in enumerate(ranks):
            cores[r] = list(home[bounds[i] : bounds[i + 1]])
    if away:
        return cores, f"the cores next to {', '.join(away)} are not among those that this process may use"
    if any(device in near for device in devices):
        return cores, "each rank has a share of the cores next to its GPU"
    return cores, f"each rank has a share of the {len(allowed)} cores"


def find_gpu_cores(devices: Sequence[str], pci: Path = _PCI) -> dict[str, list[int]]:
    """Return the cores next to each GPU; GPUs whose cores CUDA, NVML or Linux does not know are left out."""
    try:
        import pynvml

        pynvml.nvmlInit()
        cores_by_device = {}
        for device in {name for name in devices if name != "cpu"}:
            address = pynvml.nvmlDeviceGetPciInfo(get_nvml_handle(int(device.removeprefix("cuda")))).busId
            cores_by_device[device] = find_device_cores(
                address.decode() if isinstance(address, bytes) else address, pci
            )
    except Exception:  # a package, a library or the driver is missing
        return {}
    return {device: cores for device, cores in cores_by_device.items() if cores}


def get_nvml_handle(number: int) -> Any:
    """Return NVML's handle of CUDA's GPU ``number``: CUDA orders GPUs by speed, NVML by PCI address."""
    import pynvml
    from cuda.core import Device

    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{Device(number).uuid}".encode())


def find_device_cores(address: str, pci: Path = _PCI) -> list[int]:
    """Return the cores next to a PCI device; empty if Linux does not list them."""
    domain, _, rest = address.lower().partition(":")
    try:
        return parse_cores((pci / f"{domain[-4:]}:{rest}" / "local_cpulist").read_text())
    except (OSError, ValueError):
        return []


def parse_cores(text: str) -> list[int]:
    """Return the cores of a list in Linux's format.

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


def bind(cores: Sequence[int]) -> None:
    """Bind this thread and the threads that it starts; no cores leave the binding as it is."""
    if cores:
        os.sched_setaffinity(0, cores)


def describe_binding(mask: Sequence[int] | None) -> str:
    """Return the description of a rank's binding, for its first line of output."""
    if not mask:
        return "not bound"
    return f"bound to {'core' if len(mask) == 1 else 'cores'} {format_cores(mask)}"


def format_cores(cores: Sequence[int]) -> str:
    """Return a list of cores in Linux's format, such as ``0-2,8``."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
