"""What does this machine have, and what is missing for what?

`report`
    The answer, as text.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sys
from importlib.util import find_spec
from typing import Any

from synkhronos.checks import versions
from synkhronos.devices import JAX, PYGPU
from synkhronos.gpus import get_n_gpu
from synkhronos.launch import binding
from synkhronos.ranks import available_cores

#: Modules, the packages that they come in, what they are for, and the extra that brings them.
_PACKAGES = (
    ("pytensor", "pytensor", "PyTensor's functions, in an environment of its own", "pytensor"),
    ("theano", "Theano", "Theano's functions, in an environment of its own", "theano"),
    ("jax", "jax", "PyTensor's JAX mode, in that environment", "jax"),
    ("lasagne", "Lasagne", "Lasagne's layers", "lasagne"),
    ("safetensors", "safetensors", "checkpoints, and train --resume", "training"),
    ("mpi4py", "mpi4py", "ranks on several hosts", "hosts"),
    ("matplotlib", "matplotlib", "python -m synkhronos show", "demos"),
)
#: Bytes in /dev/shm under which data and parameters hardly have room.
_LITTLE = 1 << 30


def report() -> str:
    """Return what there is, a line each, and what is missing for what, with the command that mends it."""
    lines = [f"Python {platform.python_version()}, {sys.executable}"]
    missing: list[str] = []
    lines.append(f"cores: {available_cores()} for this process, {os.cpu_count()} in all")
    for module, package, use, extra in _PACKAGES:
        if find_spec(module) is None:
            missing.append(f"{use}: {package} is not installed: pip install 'synkhronos[{extra}]'")
        else:
            lines.append(f"{package} {versions([package]).get(package, '(of no known version)')}")
    if find_spec("pytensor") is None and find_spec("theano") is None:
        missing.insert(0, "anything: no graph library is installed: pip install 'synkhronos[pytensor]'")
    _shared_memory(lines, missing)
    if shutil.which("g++") is None:
        missing.append("Theano, and PyTensor's C mode: there is no g++: apt-get install g++")
    _gpus(lines, missing)
    text = "".join(f"{line}\n" for line in lines)
    return text + ("missing for\n" + "".join(f"  {line}\n" for line in missing) if missing else "nothing is missing\n")


def _shared_memory(lines: list[str], missing: list[str]) -> None:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        missing.append(f"ranks: /dev/shm can't be used: {error}; mount a tmpfs there")
        return
    lines.append(f"/dev/shm: {free / 2**30:.1f} GiB free")
    if free < _LITTLE:
        missing.append(
            f"large data: /dev/shm has {free / 2**20:.0f} MiB: mount -o remount,size=8G /dev/shm, or docker run "
            "--shm-size=8g"
        )


def _gpus(lines: list[str], missing: list[str]) -> None:
    count = get_n_gpu()
    lines.append(f"GPUs: {count}")
    if not count:
        return
    for device, words in ((JAX, "PyTensor on GPUs"), (PYGPU, "Theano on GPUs")):
        lacking = device.missing()
        if lacking:
            missing.append(f"{words}: {', '.join(lacking)}: {device.install}")
    with contextlib.suppress(Exception):  # answers differ by driver; what isn't said is left out
        lines.extend(_of_nvml(count))


def _of_nvml(count: int) -> list[str]:
    """Return each GPU's name, memory, cores next to it, and the GPUs that it reaches by NVLink."""
    import pynvml

    lines = []
    pynvml.nvmlInit()
    try:
        near = binding.gpu_cores([f"cuda{i}" for i in range(count)])
        handles = [binding.gpu(i) for i in range(count)]
        for i, handle in enumerate(handles):
            name: Any = pynvml.nvmlDeviceGetName(handle)
            name = name.decode() if isinstance(name, bytes) else name
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30
            cores = binding.text(near.get(f"cuda{i}", [])) or "unknown"
            linked = [str(j) for j, other in enumerate(handles) if j != i and _by_nvlink(pynvml, handle, other)]
            links = f", NVLink to {', '.join(linked)}" if linked else ""
            lines.append(f"  cuda{i}: {name}, {memory:.0f} GiB, next to cores {cores}{links}")
    finally:
        pynvml.nvmlShutdown()
    return lines


def _by_nvlink(pynvml: Any, one: Any, other: Any) -> bool:
    status = pynvml.nvmlDeviceGetP2PStatus(one, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    return bool(status == pynvml.NVML_P2P_STATUS_OK)
