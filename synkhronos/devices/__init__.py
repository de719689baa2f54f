"""Where does an array live?

A device knows one kind of array: how to bind a rank to it, how to move arrays to and from host memory, and how ranks
combine arrays of its kind (its communicator).  A new kind is one new module here, entered in `KINDS`.

`Device`, `Communicator`
    The protocols.
`choose`
    The device that `fork` uses.
`device_of`
    The device that holds a value.
`get_n_gpu`
    How many GPUs are visible.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from synkhronos.devices.host import Host, Layout
from synkhronos.ranks import Rank, available_cores

__all__ = ["HOST", "Communicator", "Device", "Layout", "choose", "device_of", "get_n_gpu"]


class Communicator(Protocol):
    """How ranks combine arrays of one kind.  Every method is called on every rank, with arguments that agree.

    Arrays are contiguous.  ``root`` is a rank; shapes are known to all ranks beforehand.  Nothing that calls a
    communicator may assume that ranks share memory.
    """

    def broadcast(self, array: Any, root: int) -> None:
        """Copy the root's array into every other rank's, in place."""

    def all_reduce(self, array: Any, op: str) -> None:
        """Replace every rank's array by the reduction of all ranks'."""

    def reduce(
        self, array: Any | None, op: str, root: int, out: Any | None, layout: Layout, contributors: Sequence[int]
    ) -> None:
        """Write the reduction of the contributors' arrays into the root's ``out``."""

    def gather(
        self, array: Any | None, root: int | None, layouts: Sequence[Layout | None], out: Sequence[Any | None] | None
    ) -> None:
        """Copy rank r's array into ``out[r]`` on the root, or on every rank if ``root`` is None.

        ``layouts`` has None for a rank that gives nothing, ``out`` is None on ranks that take nothing.
        """


class Device(Protocol):
    """One kind of array."""

    name: str

    def bind(self, rank: Rank) -> None:
        """Make this process use its own device; runs once on every rank, after the fork."""

    def communicator(self, rank: Rank) -> Communicator:
        """Return the rank's communicator for arrays of this kind."""

    def holds(self, value: Any) -> bool:
        """Whether a value is an array of this kind."""

    def writable(self, value: Any) -> Any:
        """Return the value as a contiguous array that may be written in place: itself, or else a copy."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return a new array of this kind."""

    def to_host(self, value: Any) -> np.ndarray:
        """Return the value as a NumPy array, without a copy where there can be one."""

    def from_host(self, array: np.ndarray) -> Any:
        """Return a NumPy array as one of this kind, which nobody else holds."""


#: Host memory, which every rank has.
HOST = Host()
#: All kinds, most particular first: the host's holds whatever NumPy can read.
KINDS: tuple[Device, ...] = (HOST,)


def device_of(value: Any) -> Device:
    """Return the device that holds a value."""
    for device in KINDS:
        if device.holds(value):
            return device
    raise TypeError(f"no device holds a {type(value).__module__}.{type(value).__qualname__}")


def choose(use_gpu: bool | None, n_parallel: int | None) -> tuple[Device, int]:
    """Return the device to use and the number of ranks.

    Parameters
    ----------
    use_gpu : bool or None
        None for whatever is there.
    n_parallel : int or None
        None for one rank for each GPU, or for each core that this process may use.
    """
    if use_gpu:
        raise RuntimeError(
            f"use_gpu=True, but nothing installed here can drive GPUs ({get_n_gpu()} visible): "
            "this release computes on CPU cores; leave use_gpu out, or pass False"
        )
    return HOST, available_cores() if n_parallel is None else n_parallel


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
