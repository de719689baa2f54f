"""The device for JAX arrays: on the rank's GPU, or in host memory where ranks compute on the CPU.

Methods import JAX when they need it, so that this package can be imported without JAX.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from synkhronos.devices.cuda.cuda_device import CudaDevice
from synkhronos.devices.cuda.staging import MAX_FETCH_NBYTES
from synkhronos.devices.jax import nccl_handlers
from synkhronos.devices.jax.compute_stream import ComputeStream, find_compute_stream
from synkhronos.devices.jax.scalar_log import LogEntry
from synkhronos.devices.jax.xla_communicator import XlaCommunicator
from synkhronos.devices.reduce_op import ReduceOp
from synkhronos.ranks import Rank
from synkhronos.ranks.interrupts import defer_signals
from synkhronos.variable_types import Array


class JaxDevice(CudaDevice):
    """JAX arrays on the rank's GPU, or on the CPU."""

    name = "jax"
    requirements = {  # noqa: RUF012 - never modified
        ("jax",): "jax",
        ("jax_cuda13_plugin", "jax_cuda12_plugin"): "jax[cuda13] or jax[cuda12]",
    }
    install_hint = "pip install 'synkhronos[gpu]'"
    graph_library_name = "pytensor"
    default_mode = "JAX"
    has_arithmetic = True

    def has_unforkable_runtime(self) -> bool:
        """Whether this process has started XLA, whose threads a fork would lack."""
        bridge = sys.modules.get("jax._src.xla_bridge")
        return bridge is not None and bool(bridge.backends_are_initialized())

    def open_gpu(self, gpu: str) -> None:
        """Start JAX on the only GPU that is visible.  Raise RuntimeError if JAX does not compute on it."""
        jax = self._import_jax()
        devices = jax.devices()
        if devices[0].platform != "gpu":
            platforms = jax.config.jax_platforms
            advice = "its CUDA plugin does not match the driver; try `python -c 'import jax; print(jax.devices())'`"
            if platforms:
                advice = f"JAX_PLATFORMS is {platforms!r}: remove it, or pass use_gpu=False"
            raise RuntimeError(f"JAX computes on {devices[0].platform!r} although GPU {gpu} is visible: {advice}")

    def _import_jax(self) -> Any:
        import jax

        jax.config.update("jax_enable_x64", True)  # PyTensor needs it: JAX would turn float64 into float32
        return jax

    @property
    def _jax_numpy(self) -> Any:
        self._import_jax()
        import jax.numpy

        return jax.numpy

    # -- XLA's stream ----------------------------------------------------------------------------------------

    @property
    def stream(self) -> int | None:
        return None if self._compute_stream is None else self._compute_stream.handle

    @cached_property
    def _compute_stream(self) -> ComputeStream | None:
        return find_compute_stream()

    @property
    def _launches_inline(self) -> bool:
        """Whether a launch on the GPU is on XLA's stream, which is known, when it returns."""
        return self.is_on_gpu and self._compute_stream is not None and self._compute_stream.is_inline

    def get_communicator(self, rank: Rank) -> XlaCommunicator:
        return rank.registry.get_or_create(XlaCommunicator, lambda: XlaCommunicator(rank, self.gpu_context))

    def can_reduce_in_launch(self, dtype: np.dtype) -> bool:
        """Whether the communicator can reduce arrays of a dtype in the middle of a launch."""
        return self.can_transfer_directly(dtype) and self._launches_inline

    @cached_property
    def nccl_call_mode(self) -> nccl_handlers.NcclCallMode:
        """The way in which XLA calls NCCL: the environment variable's value, or "python" without a compiler."""
        mode = nccl_handlers.read_nccl_call_mode()
        return "python" if mode == "python" or nccl_handlers.register_handlers() is None else mode

    # -- arrays ----------------------------------------------------------------------------------------------

    def owns(self, value: object) -> bool:
        return type(value).__module__.startswith("jaxlib") and hasattr(value, "__array__")

    def snapshot(self, value: Array) -> Array:
        """Return the value itself: an update copies arrays with other references before it donates their memory."""
        return value

    def as_writable(self, value: Array, has_other_references: bool) -> Array:
        """Return a shared variable's value if only its container references it, else a copy."""
        return self._copy_array(value) if has_other_references else value

    def rewrap(self, value: Array, is_complete: bool = False) -> Array:
        """Return a new array object for memory that is written in place; the old object becomes invalid.

        A JAX array caches whether it is computed, and its copy in host memory.  Both are outdated once the memory is
        written.  If the memory has been written already, another object for it is made without a launch.
        """
        if is_complete and (new_object := value.addressable_data(0)) is not value:
            return new_object
        return self._reuse_memory(value)

    @cached_property
    def _copy_array(self) -> Any:
        """Compiled identity function that copies its argument."""
        jax = self._import_jax()
        return jax.jit(jax.lax.optimization_barrier)  # without the barrier, JAX would return the argument itself

    @cached_property
    def _reuse_memory(self) -> Any:
        """Compiled identity function that returns a new array in the memory of its argument."""
        jax = self._import_jax()
        return jax.jit(jax.lax.optimization_barrier, donate_argnums=0)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """Return a new array of zeros: XLA has no uninitialized arrays."""
        with defer_signals():  # XLA would turn the exception of a handler into a RuntimeError while it compiles
            array = self._zeros(tuple(shape), dtype)
        # Work that is enqueued later on XLA's stream, such as NCCL's, needs no wait.
        return array if self._launches_inline else array.block_until_ready()

    @cached_property
    def _zeros(self) -> Any:
        # A compiled function is much faster than jax.numpy.zeros, most of which is Python.
        return self._import_jax().jit(self._jax_numpy.zeros, static_argnums=(0, 1))

    def get_address(self, array: Array) -> int:
        return int(array.unsafe_buffer_pointer())

    def wait(self, values: Sequence[Any]) -> None:
        is_any_pending = False
        for value in filter(self.owns, values):
            # JAX 0.10 crashes where it is asked whether a deleted array is ready.
            if self.is_on_gpu and not value.is_deleted() and not value.is_ready():
                with contextlib.suppress(BufferError, RuntimeError):  # the array is on the CPU, or on several GPUs
                    self._order_copies_after(value)
                    is_any_pending = True
                    continue
            value.block_until_ready()  # raises the error of a failed launch
        if is_any_pending:
            self.gpu_context.set_current_gpu()
            self.gpu_context.copy_stream.sync()  # JAX notices later that the GPU is done

    def _order_copies_after(self, array: Array) -> None:
        """Make later work on the stream of copies wait until an array has been computed."""
        array.__dlpack__(stream=self.gpu_context.copy_stream_handle)

    def reduce_pair(self, op: ReduceOp, left: Array, right: Array) -> Array:
        name = getattr(op.ufunc, "__name__", "")
        function = getattr(self._jax_numpy, name, None)
        if function is None:
            raise NotImplementedError(f"jax.numpy has no {name!r}: this op can't reduce JAX arrays")
        return function(left, right)

    def concatenate(self, arrays: Sequence[Array]) -> Array:
        return self._jax_numpy.concatenate(list(arrays))

    def pack(self, values: Sequence[Any], dtype: np.dtype) -> Array:
        return self._compiled_pack(list(values), dtype)

    def unpack(self, vector: Array, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype]) -> Sequence[Any]:
        arrays: Sequence[Any] = self._compiled_unpack(vector, tuple(shapes), tuple(dtypes))
        return arrays

    @cached_property
    def _compiled_pack(self) -> Any:
        return self._import_jax().jit(super().pack, static_argnums=1)

    @cached_property
    def _compiled_unpack(self) -> Any:
        return self._import_jax().jit(super().unpack, static_argnums=(1, 2))

    # -- host memory -----------------------------------------------------------------------------------------

    def to_numpy(self, value: Array) -> np.ndarray:
        """Convert an array to NumPy, after it has been computed."""
        if not self._is_large(value):
            return np.asarray(value)
        array = self.staging.empty_in_host_memory(value.shape, value.dtype)  # JAX's own copy takes longer
        self.staging.as_byte_source(value).copy_to(array.reshape(-1).view(np.uint8), 0)
        return array

    def _is_large(self, value: Array) -> bool:
        """Whether an array on a GPU is copied to host memory without JAX."""
        return bool(self.is_on_gpu and value.nbytes > MAX_FETCH_NBYTES)

    def from_numpy(self, array: np.ndarray) -> Array:
        # A copy, since JAX on the CPU may alias the argument's memory.  On the GPU, the transfer has a stream of its
        # own, and NCCL's work is not ordered after it, so the transfer is waited for.
        return self._import_jax().device_put(np.array(array, order="C")).block_until_ready()

    def to_numpy_many(self, values: Sequence[Any], leaves_large: bool = False) -> list[Any]:
        """Convert arrays and log entries to NumPy, in one transfer.  Values of other types are returned unchanged."""
        logs = {id(value.log): value.log for value in values if isinstance(value, LogEntry)}.values()
        unread = [(log, log.get_arrays_to_copy()) for log in logs]
        arrays = [value for value in values if self.owns(value)]
        log_arrays = [array for _, arrays_of_log in unread for array in arrays_of_log]
        copies = iter(self._copy_to_numpy(arrays + log_arrays, leaves_large))
        fetched = [next(copies) if self.owns(value) else value for value in values]
        for log, arrays_of_log in unread:
            if arrays_of_log:
                log.store_copies([next(copies) for _ in arrays_of_log])
        return [value.read() if isinstance(value, LogEntry) else value for value in fetched]

    def _copy_to_numpy(self, arrays: Sequence[Array], leaves_large: bool) -> list[Any]:
        """Copy JAX arrays to NumPy, in one transfer if they are small; for the parameter see `to_numpy_many`."""
        if arrays and self.is_on_gpu and self.stream is not None:
            # JAX's own copy of a scalar takes much longer.
            copies = self.staging.to_numpy_if_small(arrays)
            if copies is not None:
                # Raises the error of a failed launch.  JAX notices later that others are done.
                self.wait([array for array in arrays if array.is_ready()])
                return copies
        for array in arrays:
            if not self._is_large(array):
                array.copy_to_host_async()
        return [array if leaves_large and self._is_large(array) else self.to_numpy(array) for array in arrays]


DEVICE = JaxDevice()
