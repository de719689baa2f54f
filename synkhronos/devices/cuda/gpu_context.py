"""The GPU of this process: CUDA's driver, streams of this package, and page-locked memory."""

from __future__ import annotations

import logging
import mmap
import threading
from abc import abstractmethod
from functools import cached_property
from typing import Any

import numpy as np

from synkhronos.devices.device import Device
from synkhronos.variable_types import Array

_log = logging.getLogger("synkhronos")

#: CUDA_SUCCESS, as an integer.
_SUCCESS = 0


def unwrap_cuda_result(results: Any) -> Any:
    """Return the value of a call of the CUDA driver.  Raise RuntimeError if the call has failed."""
    error, *values = results
    if error != _SUCCESS:
        from cuda.bindings import driver

        _, name = driver.cuGetErrorName(error)
        raise RuntimeError(f"CUDA: {name.decode() if isinstance(name, bytes) else error}")
    return values[0] if values else None


class GpuArrays(Device):
    """Arrays on the GPU, and the stream on which their library computes.

    Attributes
    ----------
    may_return_inputs : bool
        Whether a function that may overwrite an input may also return it, as a shared variable's new value.
    """

    may_return_inputs = False

    @property
    @abstractmethod
    def stream(self) -> int | None:
        """Handle of the stream on which the library computes, or None if it is unknown."""

    @abstractmethod
    def get_address(self, array: Array) -> int:
        """Return an array's address on the GPU."""


class GpuContext:
    """The only GPU that is visible to this process, and the streams on which this package uses it.

    Attributes
    ----------
    array_device : GpuArrays
        Device of the arrays.  Its library computes on ``array_device.stream``, if that is known.
    driver : module
        CUDA's driver API.
    device : cuda.core.Device
    copy_stream : cuda.core.Stream
        Stream of copies between host memory and the GPU.  Its priority is higher than that of computations, so that the
        next step's rows are copied during a step.
    copy_stream_handle : int
        Handle of ``copy_stream``.
    event : cuda.bindings.driver.CUevent
        Event that `order_after` uses in every call.
    host_mark : ndarray of int32, shape (1,)
        Number in page-locked memory that `write_mark` lets the GPU write.
    """

    def __init__(self, array_device: GpuArrays):
        from cuda.bindings import driver
        from cuda.core import Device as Gpu
        from cuda.core import StreamOptions

        self.array_device = array_device
        self.driver = driver
        self.device = Gpu(0)
        self._thread_locals = threading.local()
        self.set_current_gpu()
        self.copy_stream = self.device.create_stream(options=StreamOptions(priority=-1))
        self.copy_stream_handle = int(self.copy_stream.handle)
        self.event = unwrap_cuda_result(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        page = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.int32)
        self.pin_pages(page.ctypes.data, page.nbytes)
        self.host_mark = page[:1]
        self._mark_address = unwrap_cuda_result(driver.cuMemHostGetDevicePointer(self.host_mark.ctypes.data, 0))

    @cached_property
    def side_stream(self) -> int:
        """Handle of a high-priority stream for communication that overlaps the library's computations."""
        from cuda.core import StreamOptions

        self._side_stream = self.device.create_stream(options=StreamOptions(priority=-1))
        return int(self._side_stream.handle)

    @cached_property
    def _compute_stream(self) -> Any:
        """The stream on which the library computes, or None if it is unknown."""
        from cuda.core import Stream

        handle = self.array_device.stream
        return None if handle is None else Stream.from_handle(handle)

    def set_current_gpu(self) -> None:
        """Make the GPU current in this thread; CUDA requires it once per thread."""
        if not hasattr(self._thread_locals, "is_set"):
            self.device.set_current()
            self._thread_locals.is_set = True

    def record_event(self) -> Any:
        """Return an event on the compute stream, or None if the stream is unknown, as each launch is waited for."""
        return None if self._compute_stream is None else self._compute_stream.record()

    def order_after(self, stream: int | None, earlier_stream: int | None) -> None:
        """Make a stream wait for the work enqueued so far on another stream."""
        unwrap_cuda_result(self.driver.cuEventRecord(self.event, earlier_stream))
        unwrap_cuda_result(self.driver.cuStreamWaitEvent(stream, self.event, 0))

    def write_mark(self, stream: int, mark: int) -> None:
        """Let the GPU write a number into `host_mark` once the work enqueued so far on a stream is done."""
        unwrap_cuda_result(self.driver.cuStreamWriteValue32(stream, self._mark_address, mark, 0))

    def allocate_scratch(self, nbytes: int) -> int:
        """Free the last block of scratch memory on the GPU, and return the address of a new one."""
        self._scratch = self.array_device.empty((nbytes,), np.dtype(np.uint8))
        return self.array_device.get_address(self._scratch)

    # -- page-locked memory ----------------------------------------------------------------------------------

    def pin_pages(self, address: int, nbytes: int) -> None:
        """Lock the pages of a range of host memory, and map them on the GPU."""
        flags = self.driver.CU_MEMHOSTREGISTER_PORTABLE | self.driver.CU_MEMHOSTREGISTER_DEVICEMAP
        results = self.driver.cuMemHostRegister(address, nbytes, flags)
        if results[0] == self.driver.CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED:
            # An interrupt has ended an earlier call between the registration and its record.
            self.unpin_pages(address)
            results = self.driver.cuMemHostRegister(address, nbytes, flags)
        unwrap_cuda_result(results)

    def unpin_pages(self, address: int) -> None:
        """Unlock pages before they are unmapped.  Errors are only logged, as memory may be freed at any point."""
        try:
            self.set_current_gpu()
            (error,) = self.driver.cuMemHostUnregister(address)
        except Exception as raised:
            error = raised
        if error != self.driver.CUresult.CUDA_SUCCESS:
            _log.debug("page-locked memory could not be unlocked: %s", error)
