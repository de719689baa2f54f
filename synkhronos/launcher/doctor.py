"""The command ``doctor``: reports this machine's hardware and packages, and what to install."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shutil
import sys
from importlib.util import find_spec
from typing import Any, NamedTuple

from synkhronos.checks import list_versions
from synkhronos.devices import list_gpu_devices
from synkhronos.gpus import get_n_gpu
from synkhronos.launcher import core_binding
from synkhronos.ranks import count_available_cores
from synkhronos.ranks.segments import get_free_memory


class _Package(NamedTuple):
    """The package that provides a module.

    If it is optional, ``feature`` is what needs it, and ``extra`` the extra of Synkhronos that installs it.
    """

    name: str
    feature: str = ""
    extra: str = ""


#: The packages by module.
_PACKAGES = {
    "pytensor": _Package("pytensor"),
    "theano": _Package("Theano"),
    "jax": _Package("jax", "PyTensor's JAX mode", "jax"),
    "lasagne": _Package("Lasagne", "Lasagne's layers, and the model zoo", "lasagne"),
    "safetensors": _Package("safetensors", "checkpoints, and train --resume", "training"),
    "mpi4py": _Package("mpi4py", "ranks on several hosts", "hosts"),
    "matplotlib": _Package("matplotlib", "pictures of runs (python -m synkhronos show)", "demos"),
}


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status."""
    argparse.ArgumentParser(
        prog="python -m synkhronos doctor",
        description="List what this machine has, and how to install what is missing.",
    ).parse_args(arguments)
    sys.stdout.write(describe_machine())
    return 0


def describe_machine() -> str:
    """Return the text of ``python -m synkhronos doctor``: facts, required steps, and optional steps."""
    installed = {module for module in _PACKAGES if find_spec(module) is not None}
    n_gpus = get_n_gpu()
    facts = {
        "Python": f"{platform.python_version()}, {sys.executable}",
        "cores": f"{count_available_cores()} for this process, {os.cpu_count()} in all",
        "memory": f"{get_free_memory() / 2**30:.1f} GiB free",
    }
    for module, package in _PACKAGES.items():
        if module in installed:
            facts[package.name] = list_versions([package.name]).get(package.name, "unknown version")
    facts["GPUs"] = str(n_gpus or "none")
    width = max(map(len, facts))
    lines = [f"{name:{width}}  {fact}" for name, fact in facts.items()]
    if n_gpus:
        with contextlib.suppress(Exception):  # NVML's functions fail on some drivers
            lines += _describe_gpus(n_gpus)
    steps, gpu_steps = _list_required_steps(installed), _list_gpu_steps(installed) if n_gpus else []
    lines += ["", "Do first"] if steps else ["", f"Ready: {_describe_ranks(installed, 0 if gpu_steps else n_gpus)}"]
    lines += [f"  {i}. {step}" for i, step in enumerate(steps, 1)]
    if optional := gpu_steps + _list_optional_steps(installed):
        lines += ["", "Optional", *(f"  {step}" for step in optional)]
    return "\n".join(lines) + "\n"


def _describe_ranks(installed: set[str], n_gpus: int) -> str:
    library = "PyTensor" if "pytensor" in installed else "Theano"
    devices, n_ranks = ("GPUs", n_gpus) if n_gpus else ("cores", count_available_cores())
    ranks = "1 rank" if n_ranks == 1 else f"{n_ranks} ranks"
    return f"{library}'s functions run on the {devices}; synkhronos.fork() starts {ranks}"


def _list_required_steps(installed: set[str]) -> list[str]:
    """Return the steps that functions on any device need, the most important first."""
    steps = []
    libraries = installed & {"pytensor", "theano"}
    if not libraries:
        steps.append("install a graph library; without one nothing runs: pip install 'synkhronos[pytensor]'")
    if "theano" in installed and shutil.which("g++") is None:
        steps.append("install g++, with which Theano compiles functions: apt-get install g++")
    return steps


def _list_gpu_steps(installed: set[str]) -> list[str]:
    """Return the steps that ranks on GPUs need.  Without them, ranks run on the cores."""
    return [
        f"ranks on GPUs, which need {', '.join(missing)}: {device.install_hint}"
        for device in list_gpu_devices()
        if device.graph_library_name in installed and (missing := device.list_missing_requirements())
    ]


def _list_optional_steps(installed: set[str]) -> list[str]:
    """Return the steps that optional features need."""
    steps = []
    for module, package in _PACKAGES.items():
        # JAX comes with a NumPy that Theano can't use.
        if package.extra and module not in installed and not (module == "jax" and "theano" in installed):
            steps.append(f"{package.feature}: pip install 'synkhronos[{package.extra}]'")
    if "theano" not in installed and shutil.which("g++") is None:
        steps.append("PyTensor's C mode: apt-get install g++")
    return steps


def _describe_gpus(count: int) -> list[str]:
    """Return a line for each GPU: its name, memory, the cores next to it, and the GPUs linked to it by NVLink."""
    import pynvml

    lines = []
    pynvml.nvmlInit()
    try:
        near_cores = core_binding.find_gpu_cores([f"cuda{i}" for i in range(count)])
        handles = [core_binding.get_nvml_handle(i) for i in range(count)]
        for i, handle in enumerate(handles):
            name: Any = pynvml.nvmlDeviceGetName(handle)
            name = name.decode() if isinstance(name, bytes) else name
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30
            cores = core_binding.format_cores(near_cores.get(f"cuda{i}", [])) or "unknown"
            linked = [str(j) for j, other in enumerate(handles) if j != i and _has_nvlink(pynvml, handle, other)]
            links = f", NVLink to {', '.join(linked)}" if linked else ""
            lines.append(f"  cuda{i}: {name}, {memory:.0f} GiB, next to cores {cores}{links}")
    finally:
        pynvml.nvmlShutdown()
    return lines


def _has_nvlink(pynvml: Any, first: Any, second: Any) -> bool:
    status = pynvml.nvmlDeviceGetP2PStatus(first, second, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    return bool(status == pynvml.NVML_P2P_STATUS_OK)
