"""NVIDIA GPUs, independent of the library that computes on them.

JAX and pygpu use CUDA's primary context of the only GPU that is visible to their process, and compute on one stream.
This package works in the same context: it copies inputs to the GPU and communicates between GPUs, in order with the
work on that stream.  It uses addresses and sizes, and is independent of the libraries' arrays.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

#: Requirements of every device on GPUs, as `find_missing_packages` takes them.
GPU_REQUIREMENTS: dict[tuple[str, ...], str] = {("nccl.core",): "nccl4py", ("cuda.core",): "cuda-core"}


def has_context() -> bool:
    """Whether this process has a CUDA context, and so has opened the device file of CUDA's unified memory."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("/dev/nvidia-uvm"):
                return True
        except OSError:  # the descriptor that listed the directory
            continue
    return False


def find_missing_packages(requirements: dict[tuple[str, ...], str]) -> list[str]:
    """Return the names of the requirements that are not installed.

    ``requirements`` maps alternative modules, of which one suffices, to the name of the requirement in messages.
    """

    def is_installed(name: str) -> bool:
        try:
            return find_spec(name) is not None
        except (ModuleNotFoundError, ValueError):  # its package is missing; a test has put a fake module there
            return False

    return [label for names, label in requirements.items() if not any(is_installed(name) for name in names)]
