"""State of the all-reduces within a launch of XLA, shared with their handlers in C++ (``devices/jax/nccl_ffi.cc``)."""

from __future__ import annotations

import ctypes
from typing import Any

#: Values of `LaunchState.failure_kind`: the connection was aborted; NCCL has failed.  Any other: CUDA has failed.
_ABORTED, _NCCL = 1, 2


class LaunchState(ctypes.Structure):
    """Communicator, addresses of functions, counters and errors of a launch.

    The fields are those of the struct in nccl_ffi.cc, which describes them; a test compares the two.
    """

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("comm_handle", "valid_flag_address", "side_stream", "event"),
            *("all_reduce_address", "copy_address", "fill_address", "record_address", "wait_address"),
            *("is_active", "n_finished", "has_side_work", "failure_kind", "error_code"),
        )
    ]

    def reset(self) -> None:
        """Reset counters and errors before a launch."""
        self.is_active = 1
        self.n_finished = self.has_side_work = self.failure_kind = self.error_code = 0

    def raise_if_failed(self) -> None:
        """Raise RuntimeError for the first error of the last launch, if there was one."""
        if not self.failure_kind:
            return
        if self.failure_kind == _ABORTED:
            raise RuntimeError("the connection between the ranks' GPUs was aborted")
        if self.failure_kind == _NCCL:
            raise RuntimeError(f"NCCL failed within a launch (ncclResult_t {self.error_code})")
        raise RuntimeError(f"CUDA failed within a launch (CUresult {self.error_code})")


def find_function_addresses() -> dict[str, int]:
    """Return the addresses of the functions that the handlers call, by their names in `LaunchState`."""
    from nccl.bindings._internal import nccl as loaded

    driver: Any = ctypes.CDLL("libcuda.so.1")
    names = {
        "copy_address": "cuMemcpyAsync",
        "fill_address": "cuMemsetD32Async",
        "record_address": "cuEventRecord",
        "wait_address": "cuStreamWaitEvent",
    }
    functions = {field: ctypes.cast(getattr(driver, name), ctypes.c_void_p).value for field, name in names.items()}
    # The library is the one in which nccl4py makes communicators: JAX may have loaded another one.
    functions["all_reduce_address"] = int(loaded._inspect_function_pointer("__ncclAllReduce"))
    if not all(functions.values()):
        raise RuntimeError(f"functions of CUDA or NCCL have not been found: {functions}")
    return {field: address for field, address in functions.items() if address}
