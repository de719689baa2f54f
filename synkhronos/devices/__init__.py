"""Where does an array live?

A device knows one kind of array: how to bind a rank to it, how to move arrays to and from host memory, and how ranks
combine arrays of its kind (its communicator).  A new kind is one new module here: `through_host` says what has to be in
it.

`Device`
    What a kind of array can do; NumPy's, from which the others derive.
`HOST`, `JAX`, `PYGPU`
    The kinds that others speak of by name.
`kinds`
    All that are found here.
`choose`
    The device that `fork` uses.
`device_of`, `device_named`, `device_in_environment`
    The device that holds a value, has a name, or is named by the environment.
`is_on_gpus`
    Whether a device's ranks need a GPU each.
`keep_off_gpus`
    Have a rank compute on the CPU although there are GPUs.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any

import numpy as np

from synkhronos.devices import cuda, host, jax, pygpu
from synkhronos.devices.host import Device, Layout, Selection, take
from synkhronos.gpus import get_n_gpu
from synkhronos.ranks import available_cores

__all__ = [
    "HOST",
    "JAX",
    "PYGPU",
    "Device",
    "Layout",
    "Selection",
    "choose",
    "device_in_environment",
    "device_named",
    "device_of",
    "is_on_gpus",
    "keep_off_gpus",
    "kinds",
    "needs_fresh_processes",
    "take",
]

#: Host memory, which every rank has.
HOST = host.DEVICE
#: JAX arrays, on GPUs where ranks are bound to them.
JAX = jax.DEVICE
#: GpuArrays, on which Theano computes.
PYGPU = pygpu.DEVICE


@cache
def kinds() -> tuple[Device, ...]:
    """Return the ``DEVICE`` of each module here that has one; last the host's, which holds whatever NumPy can read."""
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    found = [module.DEVICE for module in modules if hasattr(module, "DEVICE")]
    return (*(device for device in found if device is not HOST), HOST)


def device_named(name: str) -> Device:
    """Return the device of this name."""
    return next(device for device in kinds() if device.name == name)


def device_of(value: Any) -> Device:
    """Return the device that holds a value."""
    # Nearly always, and to ask each device takes long.  A class derived from these arrays may be a device's.
    if type(value) is np.ndarray or isinstance(value, np.generic):
        return HOST
    for device in kinds():
        if device.holds(value):
            return device
    raise TypeError(f"no device holds a {type(value).__module__}.{type(value).__qualname__}")


def device_in_environment() -> Device | None:
    """Return the device that the environment variable SYNKHRONOS_DEVICE names; those on GPUs are for `fork` to choose.

    Raises
    ------
    ValueError
        If there is none of this name.
    """
    name = os.environ.get("SYNKHRONOS_DEVICE")
    if not name:
        return None
    devices = {device.name: device for device in kinds() if not (device is HOST or is_on_gpus(device))}
    if name not in devices:
        raise ValueError(f"SYNKHRONOS_DEVICE: expected one of {[*devices]}, or nothing, got {name!r}")
    return devices[name]


def choose(use_gpu: bool | None, n_parallel: int | None) -> tuple[Device, int]:
    """Return the device to use and the number of ranks.

    Parameters
    ----------
    use_gpu : bool or None
        None for whatever is there.
    n_parallel : int or None
        None for one rank for each GPU, or for each core that this process may use.
    """
    named = device_in_environment()
    if named is not None:
        return named, available_cores() if n_parallel is None else n_parallel
    n_gpu = get_n_gpu() if use_gpu is None or use_gpu else 0
    if use_gpu and not n_gpu:
        raise RuntimeError("use_gpu=True, but there is no GPU: leave use_gpu out, or pass False to compute on the CPU")
    device = _of_gpus()
    if n_gpu and (lacking := device.missing()):
        if use_gpu:
            raise RuntimeError(
                f"use_gpu=True, and {n_gpu} GPUs are visible, but nothing installed here can drive them: "
                f"install {', '.join(lacking)}: {device.install}"
            )
        n_gpu = 0
    if not n_gpu:
        if PYGPU.on_gpu:
            raise RuntimeError(
                "Theano computes on a GPU in this process since an earlier fork, and can't go back to the CPU: "
                "start a new process for ranks on the CPU"
            )
        return HOST, available_cores() if n_parallel is None else n_parallel
    if n_parallel is not None and n_parallel > n_gpu:
        raise ValueError(
            f"n_parallel={n_parallel}, but {n_gpu} GPUs are visible, and each rank needs one: "
            "pass use_gpu=False to compute on the CPU"
        )
    if not device.on_gpu and cuda.is_started():
        raise RuntimeError(
            "this process has started CUDA already, so that its workers could not: call synkhronos.fork() before "
            "anything touches a GPU (an import that does so, jax.devices(), torch.cuda, Theano's flag device=cuda, "
            "...), or pass use_gpu=False"
        )
    return device, n_gpu if n_parallel is None else n_parallel


def _of_gpus() -> jax.Jax | pygpu.Pygpu:
    """Return the kind of array that there would be on GPUs: Theano has its own, PyTensor JAX's."""
    theano = sys.modules.get("theano")
    if theano is not None:
        # `synkhronos.compat` serves a `theano` whose variables are PyTensor's.
        return JAX if hasattr(theano, "__served_on__") else PYGPU
    return PYGPU if find_spec("pytensor") is None and find_spec("theano") is not None else JAX


def is_on_gpus(device: Device) -> bool:
    """Whether each rank needs a GPU of its own, if `choose` has returned this device."""
    return device is JAX or device is PYGPU


def needs_fresh_processes() -> bool:
    """Whether workers have to start anew, since copies of this process could not compute.

    XLA, once started, has threads that a copy lacks and waits for; CUDA refuses to work in a copy.
    """
    return JAX.started() or PYGPU.started()


def keep_off_gpus() -> None:
    """Have this rank's JAX compute on the CPU although there are GPUs, unless it has been started already."""
    if not JAX.started() and get_n_gpu():
        os.environ["JAX_PLATFORMS"] = "cpu"
