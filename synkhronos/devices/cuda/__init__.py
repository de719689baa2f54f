"""NVIDIA GPUs, whoever computes on them.

`places`, `only`
    Which GPU each rank gets, and how a process is made to see that one alone.
`is_started`
    Whether this process has started CUDA, so that copies of it could not use it.
`DRIVERS`
    What has to be installed beside the library that computes.

`device`
    What devices on GPUs have in common.
`staging`
    From host memory to the GPU: page-locked shared memory, of which the GPU itself picks the rows.
`nccl`, `group`
    The communicator between GPUs: all ranks', and some ranks'.

JAX and pygpu both live in CUDA's primary context of the one GPU that their process sees, and put their work on a stream
of theirs.  What is done here is done in the same context, before or behind their work on that stream: it takes
addresses, and knows nothing of their arrays.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from importlib.util import find_spec

#: What `staging` and `nccl` import, and what to install for it.
DRIVERS: dict[tuple[str, ...], str] = {("nccl.core",): "nccl4py", ("cuda.core",): "cuda-core"}


def places(size: int, root: int, mine: str | None) -> list[str]:
    """Return for each rank which GPU it gets, as ``CUDA_VISIBLE_DEVICES`` names them.

    Parameters
    ----------
    size, root : int
        The number of ranks, and the master's.
    mine : str or None
        The GPU that the master has started already: it can't leave it.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(size)] if visible is None else [name.strip() for name in visible.split(",")]
    if mine is not None and mine in names:
        names.remove(mine)
        names.insert(root, mine)
    return names[:size]


@contextlib.contextmanager
def only(place: str) -> Iterator[None]:
    """Have CUDA see one GPU alone, if it is started now."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = place
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def is_started() -> bool:
    """Whether this process has a CUDA context: then it holds the device of CUDA's unified memory open."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("/dev/nvidia-uvm"):
                return True
        except OSError:  # the one that listed the folder
            continue
    return False


def lacking(needed: dict[tuple[str, ...], str]) -> list[str]:
    """Return what would have to be installed: each entry has modules, one of which is needed, and words for it."""

    def there(name: str) -> bool:
        try:
            return find_spec(name) is not None
        except (ModuleNotFoundError, ValueError):  # of the package around it; of one that was made up
            return False

    return [what for names, what in needed.items() if not any(there(name) for name in names)]
