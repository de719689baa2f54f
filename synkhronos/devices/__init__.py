"""Devices: adapters for NumPy arrays, JAX arrays and GpuArrays, and the collectives on these arrays.

A `Device` is the adapter for one kind of array: it starts the library that computes with these arrays, copies them to
and from host memory, and provides their communicator.  All other packages handle arrays through their device
(`get_array_device`).

Devices are discovered: each module of this package that defines ``DEVICE`` adds one.  The module `device` describes how
to write a device.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules

from synkhronos.devices import cuda, jax_device, numpy_device, pygpu_device
from synkhronos.devices.communicator import ArrayLayout, Communicator
from synkhronos.devices.cuda.cuda_device import CudaDevice
from synkhronos.devices.device import Device
from synkhronos.devices.jax import nccl_handlers
from synkhronos.devices.selection import Selection, take_rows
from synkhronos.gpus import get_n_gpu
from synkhronos.ranks import Rank, count_available_cores
from synkhronos.variable_types import Array

__all__ = [
    "NUMPY",
    "JAX",
    "PYGPU",
    "ArrayLayout",
    "Communicator",
    "Device",
    "Selection",
    "get_array_device",
    "choose_device",
    "read_environment_device",
    "find_device",
    "force_jax_on_cpu",
    "get_device",
    "get_rank_device",
    "is_fork_unsafe",
    "list_devices",
    "list_gpu_devices",
    "set_rank_device",
    "take_rows",
    "undo_force_jax_on_cpu",
]

#: NumPy arrays in host memory, which every rank has.
NUMPY = numpy_device.DEVICE
#: JAX arrays, on the rank's GPU if it has one, else in host memory.
JAX = jax_device.DEVICE
#: JAX's setting ``jax_platforms`` before `force_jax_on_cpu`; empty if that has not changed it.
_user_platforms: tuple[str | None, ...] = ()
#: GpuArrays, with which Theano computes on GPUs.
PYGPU = pygpu_device.DEVICE


@cache
def list_devices() -> tuple[Device, ...]:
    """Return the ``DEVICE`` of every module here.  `NUMPY` is last, as it owns every array that NumPy can read."""
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    devices = [module.DEVICE for module in modules if hasattr(module, "DEVICE")]
    return (*(device for device in devices if device is not NUMPY), NUMPY)


def list_gpu_devices() -> list[CudaDevice]:
    """Return the devices whose arrays are on GPUs."""
    return [device for device in list_devices() if isinstance(device, CudaDevice)]


def get_device(name: str) -> Device:
    """Return the device of this name.  Raise KeyError if there is none."""
    return {device.name: device for device in list_devices()}[name]


class _RankDevice:
    """Device with whose arrays a rank computes, set by the first command after `fork`."""

    device: Device


def get_rank_device(rank: Rank) -> Device:
    """Return the device with which a rank computes."""
    return rank.registry.get_or_create(_RankDevice).device


def set_rank_device(rank: Rank, device: Device) -> None:
    """Set the device with which a rank computes, until the rank joins another group."""
    rank.registry.get_or_create(_RankDevice).device = device


#: Devices by the class of the values that they own, since it takes long to ask each device.
_device_by_class: dict[type, Device] = {}


def find_device(value: object) -> Device:
    """Return the device that owns a value, or `NUMPY` if no other device owns it."""
    device = _device_by_class.get(type(value))
    if device is None:
        device = next(device for device in list_devices() if device is NUMPY or device.owns(value))
        _device_by_class[type(value)] = device
    return device


def get_array_device(array: Array) -> Device:
    """Return the device that owns an array.  Raise TypeError for a value that no device owns."""
    device = find_device(array)
    if device is NUMPY and not NUMPY.owns(array):
        raise TypeError(f"no device supports arrays of type {type(array).__module__}.{type(array).__qualname__}")
    return device


def read_environment_device() -> Device | None:
    """Return the device that SYNKHRONOS_DEVICE names, or None.  Raise ValueError for one on GPUs or an unknown one."""
    name = os.environ.get("SYNKHRONOS_DEVICE")
    if not name:
        return None
    devices = {device.name: device for device in list_devices() if not (device is NUMPY or device.needs_gpu)}
    if name not in devices:
        known = f"one of {[*devices]}, or nothing" if devices else "nothing, as no device is registered"
        raise ValueError(f"SYNKHRONOS_DEVICE: expected {known}, got {name!r}")
    return devices[name]


def choose_device(use_gpu: bool | None, n_parallel: int | None) -> tuple[Device, int]:
    """Choose the device and the number of ranks for `fork`, and return both.

    By default there is one rank for each GPU, if there are GPUs and the packages for them.  Else there is one for each
    core that this process may use.  Raise RuntimeError if the GPUs can't be used as requested, or if Theano
    already computes on a GPU and can't return to the CPU.  Raise ValueError if there are fewer GPUs than ranks.
    """
    nccl_handlers.read_nccl_call_mode()  # raises ValueError for an unknown value, on all machines alike
    environment_device = read_environment_device()
    if environment_device is not None:
        return environment_device, count_available_cores() if n_parallel is None else n_parallel
    n_gpu = get_n_gpu() if use_gpu is None or use_gpu else 0
    if use_gpu and not n_gpu:
        raise RuntimeError("use_gpu=True, but there is no GPU: leave use_gpu out, or pass False to compute on the CPU")
    device = _choose_gpu_device()
    if n_gpu and (missing := device.list_missing_requirements()):
        if use_gpu:
            raise RuntimeError(
                f"use_gpu=True, and {n_gpu} GPUs are visible, but packages for them are missing: "
                f"install {', '.join(missing)}: {device.install_hint}"
            )
        n_gpu = 0
    if not n_gpu:
        if PYGPU.is_on_gpu:
            raise RuntimeError(
                "Theano computes on a GPU in this process since an earlier fork, and can't go back to the CPU: "
                "start a new process for ranks on the CPU"
            )
        return NUMPY, count_available_cores() if n_parallel is None else n_parallel
    if n_parallel is not None and n_parallel > n_gpu:
        raise ValueError(
            f"n_parallel={n_parallel}, but {n_gpu} GPUs are visible, and each rank needs one: "
            "pass use_gpu=False to compute on the CPU"
        )
    if not device.is_on_gpu and cuda.has_context():
        raise RuntimeError(
            "this process has already started CUDA, so that its workers can't: call synkhronos.fork() before anything "
            "uses a GPU (some imports, jax.devices(), torch.cuda, Theano's flag device=cuda, ...), or pass "
            "use_gpu=False"
        )
    return device, n_gpu if n_parallel is None else n_parallel


def _choose_gpu_device() -> CudaDevice:
    """Return the device for GPUs: `JAX` for PyTensor, `PYGPU` for Theano."""
    theano = sys.modules.get("theano")
    if theano is not None:
        # `synkhronos.compat` serves a module `theano` whose variables are PyTensor's.
        return JAX if hasattr(theano, "__served_on__") else PYGPU
    return PYGPU if find_spec("pytensor") is None and find_spec("theano") is not None else JAX


def is_fork_unsafe() -> bool:
    """Whether workers must start as new processes, because a fork of this one could not compute.

    A fork lacks XLA's threads, and would wait for them forever.  CUDA can't be used in a fork.
    """
    return any(device.has_unforkable_runtime() for device in list_devices())


def force_jax_on_cpu() -> None:
    """Make this rank's JAX compute on the CPU even if there are GPUs.  This has no effect once JAX has started."""
    global _user_platforms
    if not JAX.has_unforkable_runtime() and get_n_gpu():
        if (platforms := _get_jax_platforms()) != "cpu":
            _user_platforms = (platforms,)
        _set_jax_platforms("cpu")


def undo_force_jax_on_cpu() -> None:
    """Restore the user's setting of JAX's platforms, before a fork that may use GPUs."""
    global _user_platforms
    if _user_platforms and not JAX.has_unforkable_runtime():
        platforms = _get_jax_platforms()
        _set_jax_platforms(_user_platforms[0] if platforms == "cpu" else platforms)  # the user may have changed it
        _user_platforms = ()


def _get_jax_platforms() -> str | None:
    if "jax" in sys.modules:  # JAX reads the variable when it is imported
        platforms: str | None = sys.modules["jax"].config.jax_platforms
        return platforms
    return os.environ.get("JAX_PLATFORMS")


def _set_jax_platforms(platforms: str | None) -> None:
    os.environ.pop("JAX_PLATFORMS", None)
    if platforms is not None:
        os.environ["JAX_PLATFORMS"] = platforms
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_platforms", platforms or None)
