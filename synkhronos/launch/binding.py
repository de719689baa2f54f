"""Which cores does each rank get?

`masks`
    Cores for each rank: those next to its GPU, or a share of all.
`gpu_cores`
    The cores next to each GPU, as the system says.
`gpu`
    What NVML knows a GPU by.
`parse_cores`
    Linux' lists of cores.
`said`
    What a rank says of its binding.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PCI = Path("/sys/bus/pci/devices")


def masks(devices: Sequence[str], allowed: Sequence[int], near: dict[str, list[int]]) -> tuple[list[list[int]], str]:
    """Return each rank's cores, and a line that says why; no cores where ranks are better not bound.

    ``devices`` has ``"cpu"`` or ``"cuda0"`` and so on for each rank, ``allowed`` the cores that this process may use,
    and ``near`` the cores next to a GPU.

    Examples
    --------
    >>> masks(["cpu", "cpu"], [0, 1, 2, 3], {})
    ([[0, 1], [2, 3]], 'each rank has a share of the 4 cores')
    """
    allowed = sorted(allowed)
    if len(devices) > len(allowed):
        return [], f"not bound: there are {len(allowed)} cores for {len(devices)} ranks"
    homes = [tuple(core for core in near.get(device, ()) if core in set(allowed)) for device in devices]
    away = [device for device, home in zip(devices, homes, strict=True) if device in near and not home]
    homes = [home or tuple(allowed) for home in homes]
    found: list[list[int]] = [[] for _ in devices]
    for home in set(homes):  # the ranks whose GPUs are next to the same cores share them
        ranks = [r for r, each in enumerate(homes) if each == home]
        if len(home) < len(ranks):
            return [], f"not bound: cores {text(home)} are next to the GPUs of {len(ranks)} ranks"
        bounds = [len(home) * i // len(ranks) for i in range(len(ranks) + 1)]
        for i, r in enumerate(ranks):
            found[r] = list(home[bounds[i] : bounds[i + 1]])
    if away:
        return found, f"the cores next to {', '.join(away)} are not among those that this process may use"
    if any(device in near for device in devices):
        return found, "each rank has a share of the cores next to its GPU"
    return found, f"each rank has a share of the {len(allowed)} cores"


def gpu_cores(devices: Sequence[str], pci: Path = _PCI) -> dict[str, list[int]]:
    """Return the cores next to each GPU, as far as CUDA, NVML and the system say."""
    try:
        import pynvml

        pynvml.nvmlInit()
        found = {}
        for device in {each for each in devices if each != "cpu"}:
            address = pynvml.nvmlDeviceGetPciInfo(gpu(int(device.removeprefix("cuda")))).busId
            found[device] = cores_of(address.decode() if isinstance(address, bytes) else address, pci)
    except Exception:  # a package or library of theirs is not there, or finds no driver
        return {}
    return {device: cores for device, cores in found.items() if cores}


def gpu(number: int) -> Any:
    """Return NVML's handle of a GPU, by CUDA's number: CUDA counts unlike ones by their speed, NVML by their places."""
    import pynvml
    from cuda.core import Device

    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{Device(number).uuid}".encode())


def cores_of(address: str, pci: Path = _PCI) -> list[int]:
    """Return the cores next to a device on the PCI bus; none where the system doesn't say."""
    domain, _, rest = address.lower().partition(":")
    try:
        return parse_cores((pci / f"{domain[-4:]}:{rest}" / "local_cpulist").read_text())
    except (OSError, ValueError):
        return []


def parse_cores(text: str) -> list[int]:
    """Return the cores of a list as Linux writes it.

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
    """Bind this thread, and those that it starts."""
    if cores:
        os.sched_setaffinity(0, cores)


def said(mask: Sequence[int] | None) -> str:
    """Return what a rank says of its binding."""
    return f"bound to cores {text(mask)}" if mask else "not bound"


def text(cores: Sequence[int]) -> str:
    """Write cores as Linux does."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
