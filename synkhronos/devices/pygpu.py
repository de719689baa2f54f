"""GpuArrays: what Theano computes with on GPUs, through pygpu.

`Pygpu`
    The device.

Theano's flags leave the GPU alone until the ranks are forked (``device=cpu,force_device=True``); each rank then opens
its own.  From there on Theano puts shared variables and computations on the GPU by itself.

All of libgpuarray's work is on one stream, and so is what is done for it here: only what reads on the host waits.
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

from synkhronos.devices.cuda.device import CudaDevice
from synkhronos.devices.host import Selection
from synkhronos.devices.reductions import Reduction
from synkhronos.ranks import Rank, SharedArray

_log = logging.getLogger("synkhronos")


class Pygpu(CudaDevice):
    """GpuArrays on the GPU to which the rank was bound."""

    name = "pygpu"
    takes_shareds = False
    needed = {("theano",): "Theano==1.0.5", ("pygpu",): "pygpu"}  # noqa: RUF012 - nobody writes into it
    install = "pip install 'synkhronos[theano-gpu]', and pygpu as docs/theano.rst says"

    def started(self) -> bool:
        """Whether this process computes on a GPU."""
        return self.on_gpu

    def start(self, place: str) -> None:
        """Have Theano open the GPU, and use it for what is made from now on.

        Raises
        ------
        RuntimeError
            If it can't.
        """
        # Theano tells itself by this variable that a parent has opened a GPU; this process has been started anew since.
        os.environ.pop("THEANO_GPU_IS_ALREADY_ACTIVE", None)
        import theano.gpuarray

        if not theano.config.gpuarray.single_stream:
            raise RuntimeError("Theano's flag gpuarray.single_stream=False: Synkhronos needs all of its work in order")
        said = io.StringIO()  # by each rank, that it uses the first GPU: the only one that it sees
        try:
            with contextlib.redirect_stderr(said):
                theano.gpuarray.use("cuda0")
        except Exception as error:
            raise RuntimeError(f"Theano can't compute on GPU {place}: {error}") from error
        _log.debug("GPU %s: %s", place, said.getvalue())

    @property
    def _context(self) -> Any:
        from theano.gpuarray.type import get_context

        return get_context(None)

    @cached_property
    def stream(self) -> int:
        """The stream of libgpuarray."""
        library = ctypes.CDLL("libgpuarray.so.3")
        library.gpuarray_get_extension.restype = ctypes.c_void_p
        function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
        get_stream = function(library.gpuarray_get_extension(b"cuda_get_stream"))
        return int(get_stream(self._context.ptr))

    # -- arrays ----------------------------------------------------------------------------------------------

    def holds(self, value: Any) -> bool:
        """Whether it is a GpuArray."""
        return type(value).__module__.startswith("pygpu")

    def writable(self, value: Any, is_referenced: bool) -> Any:
        """Return the value itself, if it is contiguous, else a copy."""
        return self.contiguous(value)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return a new array."""
        import pygpu

        return pygpu.empty(shape, dtype, context=self._context)

    def pointer(self, array: Any) -> int:
        """Return an array's address."""
        return int(array.gpudata)

    def wait_for(self, array: Any) -> None:
        """Wait until an array has been computed."""
        array.sync()

    def contiguous(self, value: Any) -> Any:
        """Return the value, or else a contiguous copy."""
        return value if value.flags.c_contiguous else value.copy()

    def to_host(self, value: Any) -> np.ndarray:
        """Return a copy in host memory, once the value is computed."""
        return np.asarray(value)

    def from_host(self, array: np.ndarray) -> Any:
        """Return a NumPy array as a GpuArray, which nobody else holds."""
        import pygpu

        return pygpu.array(array, context=self._context)

    def input(
        self, rank: Rank, kept: dict[Any, Any], key: Any, location: SharedArray, rows: Selection | None, copy: bool
    ) -> Any:
        """Return rows of an array in shared memory as an input, in memory that is used again unless ``copy``."""
        # What a function may overwrite, it may keep as a shared variable's new value.
        return self.load(rank, location, rows) if copy else super().input(rank, kept, key, location, rows, copy)

    def combine(self, op: Reduction, one: Any, other: Any) -> Any:
        """Return what a reduction makes of two arrays of one shape."""
        if op.kernel is None:
            name = getattr(op.combine, "__name__", "")
            raise NotImplementedError(f"libgpuarray has no kernel for {name!r}: this op can't combine GpuArrays")
        from pygpu.elemwise import elemwise2

        return elemwise2(one, None, other, one, odtype=one.dtype, oper=op.kernel)

    def join(self, parts: Sequence[Any]) -> Any:
        """Return arrays joined along axis 0."""
        import pygpu

        return pygpu.concatenate(list(parts), context=self._context)

    def array(self, value: Any) -> Any:
        """Return the value as a GpuArray with NumPy's operators."""
        from pygpu._array import ndgpuarray

        array = value if self.holds(value) else self.from_host(np.asarray(value))
        return array if isinstance(array, ndgpuarray) else array.view(ndgpuarray)


DEVICE = Pygpu()
