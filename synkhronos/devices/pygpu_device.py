"""The device for GpuArrays, with which Theano computes on GPUs through pygpu.

Theano's flags ``device=cpu,force_device=True`` keep it from opening a GPU before the ranks are forked.  Each rank then
opens its own GPU, and from then on Theano places shared variables and computations on it.

libgpuarray uses a single stream, on which this device launches as well.  Only copies to host memory have to wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from synkhronos.devices.cuda.cuda_device import CudaDevice
from synkhronos.devices.reduce_op import ReduceOp
from synkhronos.variable_types import Array

_log = logging.getLogger("synkhronos")


class PygpuDevice(CudaDevice):
    """GpuArrays on the rank's GPU."""

    name = "pygpu"
    must_move_shared_values = False
    may_return_inputs = True
    requirements = {("theano",): "Theano==1.0.5", ("pygpu",): "pygpu"}  # noqa: RUF012 - never modified
    install_hint = "pip install 'synkhronos[theano-gpu]', and pygpu as docs/theano.rst describes"
    graph_library_name = "theano"

    def has_unforkable_runtime(self) -> bool:
        """Whether this process computes on a GPU."""
        return self.is_on_gpu

    def open_gpu(self, gpu: str) -> None:
        """Make Theano open the GPU, for all variables and functions that are made from then on.

        RuntimeError is raised if Theano can't open the GPU, or doesn't launch on a single stream.
        """
        # Theano has set this variable for its child processes if the master has opened a GPU.
        os.environ.pop("THEANO_GPU_IS_ALREADY_ACTIVE", None)
        import theano.gpuarray

        if not theano.config.gpuarray.single_stream:
            raise RuntimeError("Theano's flag gpuarray.single_stream is False: Synkhronos requires a single stream")
        # Each rank would print that it uses GPU 0, the only one that is visible to it.
        output = io.StringIO()
        try:
            with contextlib.redirect_stderr(output):
                theano.gpuarray.use("cuda0")
        except Exception as error:
            raise RuntimeError(f"Theano can't compute on GPU {gpu}: {error}") from error
        _log.debug("GPU %s: %s", gpu, output.getvalue())

    @property
    def _context(self) -> Any:
        from theano.gpuarray.type import get_context

        return get_context(None)

    @cached_property
    def stream(self) -> int:
        library = ctypes.CDLL("libgpuarray.so.3")
        library.gpuarray_get_extension.restype = ctypes.c_void_p
        function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
        get_stream = function(library.gpuarray_get_extension(b"cuda_get_stream"))
        return int(get_stream(self._context.ptr))

    def accepts_input(self, dtype: np.dtype, ndim: int) -> bool:
        """Whether to copy inputs to the GPU: no labels, indices and complex arrays, which Theano would copy back."""
        return not (dtype.kind == "c" or dtype.kind in "biu" and ndim < 2)

    # -- arrays ----------------------------------------------------------------------------------------------

    def owns(self, value: object) -> bool:
        return type(value).__module__.startswith("pygpu")

    def as_array(self, value: Array) -> Array:
        """Convert a value to a GpuArray with NumPy's operators."""
        from pygpu._array import ndgpuarray

        array = value if self.owns(value) else self.from_numpy(np.asarray(value))
        return array if isinstance(array, ndgpuarray) else array.view(ndgpuarray)

    def as_contiguous(self, value: Array) -> Array:
        return value if value.flags.c_contiguous else value.copy()

    def as_writable(self, value: Array, has_other_references: bool) -> Array:
        """Return an array if it is contiguous, else a contiguous copy."""
        return self.as_contiguous(value)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        import pygpu

        return pygpu.empty(shape, dtype, context=self._context)

    def get_address(self, array: Array) -> int:
        return int(array.gpudata)

    def wait(self, values: Sequence[Any]) -> None:
        for value in values:
            if self.owns(value):
                value.sync()

    def reduce_pair(self, op: ReduceOp, left: Array, right: Array) -> Array:
        if op.gpuarray_expression is None:
            name = getattr(op.ufunc, "__name__", "")
            raise NotImplementedError(f"libgpuarray has no kernel for {name!r}: this op can't reduce GpuArrays")
        from pygpu.elemwise import elemwise2

        return elemwise2(left, None, right, left, odtype=left.dtype, oper=op.gpuarray_expression)

    def concatenate(self, arrays: Sequence[Array]) -> Array:
        import pygpu

        return pygpu.concatenate(list(arrays), context=self._context)

    # -- host memory -----------------------------------------------------------------------------------------

    def to_numpy(self, value: Array) -> np.ndarray:
        return np.asarray(value)

    def from_numpy(self, array: np.ndarray) -> Array:
        import pygpu

        return pygpu.array(array, context=self._context)


DEVICE = PygpuDevice()
