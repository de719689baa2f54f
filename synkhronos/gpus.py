"""The number of GPUs of this machine, found without a CUDA context.

A CUDA context takes memory on each GPU, and a process with one can't be forked.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable


def get_n_gpu() -> int:
    """Return the number of visible NVIDIA GPUs, without creating a CUDA context.

    Returns
    -------
    int
        Number of GPUs of this machine, limited to those in ``CUDA_VISIBLE_DEVICES``; 0 without a driver.

    Examples
    --------
    >>> import synkhronos as synk
    >>> synk.get_n_gpu() >= 0
    True
    """
    try:
        import pynvml
    except ImportError:
        # The driver creates one device file for each GPU.
        n_present = len(glob.glob("/dev/nvidia[0-9]*"))
    else:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return 0
        try:
            n_present = pynvml.nvmlDeviceGetCount()
        finally:
            pynvml.nvmlShutdown()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return n_present
    count = 0
    for entry in (part.strip() for part in visible.split(",")):
        # CUDA ignores the rest of the list after an invalid entry.
        if entry.isdecimal() and int(entry) < n_present or entry.startswith(("GPU-", "MIG-")):
            count += 1
        else:
            break
    return min(count, n_present)


def format_visible_gpus(numbers: Iterable[int]) -> str:
    """Return the value of ``CUDA_VISIBLE_DEVICES`` that leaves only these of the visible GPUs visible."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ",".join(str(n) if visible is None else visible.split(",")[n].strip() for n in numbers)
