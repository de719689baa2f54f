"""Where does an array live?

A device knows one kind of array: how to bind a rank to it, how to move arrays to and from host memory, and how ranks
combine arrays of its kind (its communicator).  A new kind is one new module here: `through_host` says what has to be in
it.

`Device`, `Communicator`
    The protocols.
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
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any, Protocol

import numpy as np

from synkhronos.devices import cuda, host, jax, pygpu
from synkhronos.devices.host import Layout, Selection, take
from synkhronos.devices.reductions import Reduction
from synkhronos.gpus import get_n_gpu
from synkhronos.ranks import Rank, SharedArray, available_cores

__all__ = [
    "HOST",
    "JAX",
    "PYGPU",
    "Communicator",
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


class Communicator(Protocol):
    """How ranks combine arrays of one kind.  Every method is called on every rank, with arguments that agree.

    Arrays are contiguous.  ``root`` is a rank; shapes are known to all ranks beforehand.  Nothing that calls a
    communicator may assume that ranks share memory.
    """

    #: Counts the connections that this rank has made; 0 while it has none.
    epoch: int

    def connect(self, epochs: Sequence[int]) -> None:
        """Connect the ranks unless they are; ``epochs`` has each rank's."""

    def broadcast(self, array: Any, root: int) -> None:
        """Copy the root's array into every other rank's, in place."""

    def all_reduce(self, array: Any, op: str) -> bool:
        """Replace every rank's array by the reduction of all ranks', and return whether it is there.

        It may come later than this returns: `Device.written` gives the array that tells when.
        """

    def meet(self, look: Callable[[], None] | None = None) -> None:
        """Wait until every rank has started what this one has; ``look`` is called now and then, and may raise."""

    def come(self) -> None:
        """Tell the others that this rank has started what it has: at the end of a command, in the place of `meet`."""

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
    #: Whether shared variables' values are moved here before a function is called; where not, they come by themselves.
    takes_shareds: bool

    def places(self, size: int, root: int) -> list[str]:
        """Return for each rank a word for its own device; called in the master."""

    def bind(self, rank: Rank, place: str) -> None:
        """Make this process use its own device; runs once on every rank, after the fork."""

    def communicator(self, rank: Rank) -> Any:
        """Return the rank's `Communicator` for arrays of this kind."""

    def communicates(self, dtype: np.dtype) -> bool:
        """Whether it combines arrays of this dtype; if not, they go through host memory."""

    def group(self, rank: Rank, members: Iterable[int]) -> Any:
        """Return what combines and sends arrays among some ranks (`cuda.group`); None: they go through host memory."""

    def combines_within(self, dtype: np.dtype) -> bool:
        """Whether the communicator has `all_reduce_within`, for launches that combine arrays of this dtype."""

    def holds(self, value: Any) -> bool:
        """Whether a value is an array of this kind."""

    def writable(self, value: Any, is_referenced: bool) -> Any:
        """Return a container's value as a contiguous array that may be written in place: itself, or else a copy.

        ``is_referenced`` says whether anybody else than the container has the value.
        """

    def written(self, value: Any, is_there: bool = False) -> Any:
        """Return an array that a communicator has written in place, or will have, for its container."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return a new array of this kind."""

    def part(self, array: Any, start: int, shape: tuple[int, ...]) -> Any:
        """Return a run of an array's items, from item ``start`` on, as `Communicator.gather` takes it."""

    def contiguous(self, value: Any) -> Any:
        """Return the value, or else a contiguous copy."""

    def to_host(self, value: Any) -> np.ndarray:
        """Return the value as a NumPy array, without a copy where there can be one."""

    def fetch(self, values: Sequence[Any]) -> list[Any]:
        """Return values as NumPy arrays, all at once; what is no array of this kind stays."""

    def from_host(self, array: np.ndarray) -> Any:
        """Return a NumPy array as one of this kind, which nobody else holds."""

    def load(self, rank: Rank, location: SharedArray, rows: Selection | None) -> Any:
        """Return rows of an array in shared memory, or all of it, as a new array."""

    def array(self, value: Any) -> Any:
        """Return the value as an array of this kind."""

    def combine(self, op: Reduction, one: Any, other: Any) -> Any:
        """Return what a reduction makes of two arrays of one shape; it may be written into the first."""

    def join(self, parts: Sequence[Any]) -> Any:
        """Return arrays joined along axis 0."""

    def input(
        self, rank: Rank, kept: dict[Any, Any], key: Any, location: SharedArray, rows: Selection | None, copy: bool
    ) -> Any:
        """Return rows of an array in shared memory, or all of it, as an input of the next launch.

        ``kept`` is where memory may be kept from call to call, under ``key``; ``copy`` says that the function may
        overwrite what it gets.
        """

    def indexes(self, rank: Rank, kept: dict[Any, Any], key: Any, values: np.ndarray) -> Any:
        """Return a vector of indexes as an input of the next launch."""

    def launching(self) -> None:
        """Have the function that is launched next wait for its inputs."""

    def launched(self, results: Any) -> None:
        """Note that the function launched last, which gives these results, reads the inputs until it has computed."""

    def wait(self, values: Sequence[Any]) -> None:
        """Wait until values have been computed."""


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
