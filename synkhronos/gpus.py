"""How many GPUs does this machine have?

`get_n_gpu`
    As many as this process may use.
"""

from __future__ import annotations

import glob
import os


def get_n_gpu() -> int:
    """Return the number of visible NVIDIA GPUs, without creating a CUDA context.

    Returns
    -------
    int
        The GPUs of this machine, or those of them that ``CUDA_VISIBLE_DEVICES`` names; 0 where there is no driver.

    Examples
    --------
    >>> import synkhronos as synk
    >>> synk.get_n_gpu() >= 0
    True
    """
    try:
        import pynvml
    except ImportError:
        # One device file a GPU: what NVML counts, short of MIG slices.
        present = len(glob.glob("/dev/nvidia[0-9]*"))
    else:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return 0
        try:
            present = pynvml.nvmlDeviceGetCount()
        finally:
            pynvml.nvmlShutdown()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    count = 0
    for name in (part.strip() for part in visible.split(",")):
        # CUDA reads the list up to the first entry that names no device.
        if name.isdecimal() and int(name) < present or name.startswith(("GPU-", "MIG-")):
            count += 1
        else:
            break
    return min(count, present)
