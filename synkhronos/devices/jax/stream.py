"""On which CUDA stream XLA computes.

`compute_stream`
    Its handle.

Work that is put on the stream by others comes after what XLA was told before and before what it is told later, and
nobody has to wait.  JAX doesn't say which stream it is, but XLA tells every foreign function that it calls (its "FFI",
``xla/ffi/api/c_api.h``, which jaxlib brings along): so a computation with one such call asks.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import numpy as np

_log = logging.getLogger("synkhronos")

_METADATA = 1  # XLA_FFI_Extension_Metadata
_EXECUTE = 3  # XLA_FFI_ExecutionStage_EXECUTE


class _Version(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    ]


class _Metadata(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("version", _Version), ("traits", ctypes.c_uint32)]


class _Extension(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.POINTER(_Metadata)),  # of an extension of that type
    ]


class _StreamGet(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    ]


_Function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


class _Api(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("version", _Version),
        ("internal", ctypes.c_void_p),
        ("error_create", ctypes.c_void_p),
        ("error_get_message", ctypes.c_void_p),
        ("error_destroy", _Function),
        ("handler_register", ctypes.c_void_p),
        ("stream_get", _Function),
    ]


class _CallFrame(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.POINTER(_Extension)),
        ("api", ctypes.POINTER(_Api)),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
    ]


class _ErrorDestroy(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p), ("error", ctypes.c_void_p)]


_NAME = "synkhronos_compute_stream"
#: What the foreign function has seen: it is called from within XLA, and can't return it.
_seen: dict[str, int] = {}


@_Function
def _handler(address: int) -> None:
    """Tell XLA which version of its interface this speaks, or note the stream of a call."""
    frame = _CallFrame.from_address(address)
    api = frame.api.contents
    if frame.extension and frame.extension.contents.type == _METADATA:
        metadata = frame.extension.contents.metadata.contents
        metadata.version.major, metadata.version.minor = api.version.major, api.version.minor
        metadata.traits = 0
        return
    if frame.stage != _EXECUTE:
        return
    _seen["calls"] = _seen.get("calls", 0) + 1
    asked = _StreamGet(ctypes.sizeof(_StreamGet), None, frame.context, None)
    error = api.stream_get(ctypes.addressof(asked))
    if error:
        api.error_destroy(ctypes.addressof(_ErrorDestroy(ctypes.sizeof(_ErrorDestroy), None, error)))
    else:
        _seen["stream"] = int(asked.stream or 0)


def compute_stream(platform: str = "CUDA") -> int | None:
    """Return the handle of the stream on which XLA computes, None where it can't be found.

    Parameters
    ----------
    platform : str
        XLA's word for it.
    """
    import jax

    try:
        jax.ffi.register_ffi_target(_NAME, jax.ffi.pycapsule(_handler), platform=platform)
        _seen.clear()
        ask: Any = jax.jit(
            lambda x: jax.ffi.ffi_call(_NAME, jax.ShapeDtypeStruct((), np.int8), has_side_effect=True)(x)
        )
        ask(np.int8(0)).block_until_ready()
    except Exception as error:
        _log.info("XLA's stream can't be found, and ranks wait where it would order their work: %s", error)
        return None
    return _seen.get("stream") or None
