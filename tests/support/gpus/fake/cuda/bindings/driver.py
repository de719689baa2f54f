"""Stands for CUDA's driver: memory of the host, streams on which everything is done at once."""

import ctypes
import mmap
import types

from nccl import wire

CUresult = types.SimpleNamespace(
    CUDA_SUCCESS=0, CUDA_ERROR_NOT_READY=600, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED=712
)
CUevent_flags = types.SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP = 1, 2
_locked = {}


def cuMemcpyAsync(target, source, nbytes, stream):  # noqa: N802 - CUDA's name
    ctypes.memmove(target, source, nbytes)
    return (0,)


def cuStreamQuery(stream):  # noqa: N802 - CUDA's name
    return (600 if wire.is_busy() else 0,)


def cuStreamSynchronize(stream):  # noqa: N802 - CUDA's name
    return (0,)


def cuStreamWaitEvent(stream, event, flags):  # noqa: N802 - CUDA's name
    return (0,)


def cuStreamWriteValue32(stream, address, value, flags):  # noqa: N802 - CUDA's name
    ctypes.c_int32.from_address(address).value = value
    return (0,)


def cuEventCreate(flags):  # noqa: N802 - CUDA's name
    return 0, 1


def cuEventRecord(event, stream):  # noqa: N802 - CUDA's name
    return (0,)


def cuMemHostRegister(address, nbytes, flags):  # noqa: N802 - CUDA's name
    if address in _locked:
        return (712,)
    # Locking makes pages resident.
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    code = ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(address + nbytes - first), 23)
    assert code == 0, "MADV_POPULATE_WRITE"
    _locked[address] = nbytes
    return (0,)


def cuMemHostGetDevicePointer(address, flags):  # noqa: N802 - CUDA's name
    return 0, address


def cuMemHostUnregister(address):  # noqa: N802 - CUDA's name
    return (0 if _locked.pop(address, None) else 713,)


def cuGetErrorName(error):  # noqa: N802 - CUDA's name
    return 0, f"error {error}".encode()
