"""JAX arrays: on the rank's own GPU, or in host memory where ranks compute on the CPU.

`Jax`
    The device.

`foreign`
    What XLA calls in the middle of its own programs.
`log`
    Numbers that a function computes launch after launch, in memory that stays where it is.

Nothing here imports JAX before a rank needs it: a process that has started XLA can't be forked any more.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from synkhronos.devices.cuda.device import CudaDevice
from synkhronos.devices.jax.foreign import ComputeStream, compute_stream
from synkhronos.devices.jax.log import Entry
from synkhronos.devices.reductions import Reduction


class Jax(CudaDevice):
    """JAX arrays.  One process has one device: the GPU to which its rank was bound, or else the CPU."""

    name = "jax"
    needed = {  # noqa: RUF012 - nobody writes into it
        ("jax",): "jax",
        ("jax_cuda13_plugin", "jax_cuda12_plugin"): "jax[cuda13] or jax[cuda12]",
    }
    install = "pip install 'synkhronos[gpu]'"

    def started(self) -> bool:
        """Whether this process has started XLA, whose threads a forked process would lack and wait for."""
        bridge = sys.modules.get("jax._src.xla_bridge")
        return bridge is not None and bool(bridge.backends_are_initialized())

    def start(self, place: str) -> None:
        """Start JAX.

        Raises
        ------
        RuntimeError
            If it can't compute on the GPU.
        """
        platforms = os.environ.pop("JAX_PLATFORMS", None)
        try:
            devices = self._jax().devices()
        finally:
            if platforms is not None:
                os.environ["JAX_PLATFORMS"] = platforms
        if devices[0].platform != "gpu":
            raise RuntimeError(
                f"JAX computes on {devices[0].platform!r} though GPU {place} is there: its CUDA plugin and the driver "
                "don't fit together, or jax_platforms is set; try `python -c 'import jax; print(jax.devices())'`"
            )

    def _jax(self) -> Any:
        import jax

        jax.config.update("jax_enable_x64", True)  # as PyTensor needs it: dtypes mean what they say
        return jax

    @property
    def _numpy(self) -> Any:
        self._jax()
        import jax.numpy

        return jax.numpy

    # -- arrays ----------------------------------------------------------------------------------------------

    def holds(self, value: Any) -> bool:
        """Whether it is a JAX array."""
        return type(value).__module__.startswith("jaxlib")

    def writable(self, value: Any, is_referenced: bool) -> Any:
        """Return the value itself if nobody but its container holds it, else a copy: collectives write in it."""
        return self._renew[0](value) if is_referenced else value

    def written(self, value: Any, is_there: bool = False) -> Any:
        """Return an array that was written in place, or soon will be, in the same memory; the old one is gone.

        What JAX knows of the old one is of the time before: when it is computed, and what the host has read of it.
        Where it is there nothing has to be launched: another array of the same memory knows nothing of what was read.
        """
        if is_there and (other := value.addressable_data(0)) is not value:
            return other
        return self._renew[1](value)

    @cached_property
    def _renew(self) -> tuple[Any, Any]:
        jax = self._jax()
        # Without the barrier, JAX would return the argument.
        renew = jax.lax.optimization_barrier
        return jax.jit(renew), jax.jit(renew, donate_argnums=0)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return a new array, of zeros: XLA has no other."""
        return self._zeros(tuple(shape), dtype).block_until_ready()

    @cached_property
    def _zeros(self) -> Any:
        # Compiled by hand: what JAX does by itself takes seven times as long, in Python.
        return self._jax().jit(self._numpy.zeros, static_argnums=(0, 1))

    def pointer(self, array: Any) -> int:
        """Return an array's address."""
        return int(array.unsafe_buffer_pointer())

    def wait_for(self, array: Any) -> None:
        """Wait until an array has been computed."""
        array.block_until_ready()

    @property
    def stream(self) -> int | None:
        """XLA's stream."""
        return None if self._compute_stream is None else self._compute_stream.handle

    @cached_property
    def _compute_stream(self) -> ComputeStream | None:
        return compute_stream()

    def combines_within(self, dtype: np.dtype) -> bool:
        """Whether the communicator combines arrays of a dtype in the middle of a launch."""
        return self.communicates(dtype) and self._compute_stream is not None and self._compute_stream.is_inline

    def to_host(self, value: Any) -> np.ndarray:
        """Return the value as NumPy sees it, once it is computed."""
        return np.asarray(value)

    def fetch(self, values: Sequence[Any]) -> list[Any]:
        """Return values on the host: all cross at once."""
        logs = {id(value.log): value.log for value in values if isinstance(value, Entry)}
        arrays = [[value] if self.holds(value) else [] for value in values] + [log.unread() for log in logs.values()]
        copies = iter(self._copies([array for some in arrays for array in some]))
        fetched = [next(copies) if some else value for value, some in zip(values, arrays, strict=False)]
        for log, some in zip(logs.values(), arrays[len(values) :], strict=True):
            if some:
                log.keep([next(copies) for _ in some])
        return [value.read() if isinstance(value, Entry) else value for value in fetched]

    def _copies(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """Return arrays as NumPy sees them."""
        if arrays and self.on_gpu and self.stream is not None:
            # JAX takes 0.2 ms to copy a number, and 0.3 ms for several at once: ten times as long as it has to be.
            copies = self.staging.fetch(arrays)
            if copies is not None:
                self.wait(arrays)  # they are there, unless something went wrong: that is raised
                return copies
        for array in arrays:
            array.copy_to_host_async()
        return [self.to_host(array) for array in arrays]

    def from_host(self, array: np.ndarray) -> Any:
        """Return a NumPy array as a JAX array, which nobody else holds."""
        # A copy: on the CPU, JAX may keep the very memory that it is given.  Waited for, as it crosses on another
        # stream than the one on which NCCL would read it.
        return self._jax().device_put(np.array(array, order="C")).block_until_ready()

    def combine(self, op: Reduction, one: Any, other: Any) -> Any:
        """Return what a reduction makes of two arrays."""
        name = getattr(op.combine, "__name__", "")
        function = getattr(self._numpy, name, None)
        if function is None:
            raise NotImplementedError(f"jax.numpy has no {name!r}: this op can't combine JAX arrays")
        return function(one, other)

    def join(self, parts: Sequence[Any]) -> Any:
        """Return arrays joined along axis 0."""
        return self._numpy.concatenate(list(parts))


DEVICE = Jax()
