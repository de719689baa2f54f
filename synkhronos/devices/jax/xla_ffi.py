"""XLA's foreign function interface (FFI), by which XLA calls functions of this process while it launches a program.

The structures are those of ``xla/ffi/api/c_api.h``, which is part of jaxlib.  XLA passes the stream and the addresses
of the arrays.  Work that a foreign function enqueues on that stream is ordered between XLA's earlier and later work,
and no thread waits.
"""

from __future__ import annotations

import ctypes
from typing import Any

_METADATA = 1  # XLA_FFI_Extension_Metadata
_EXECUTE = 3  # XLA_FFI_ExecutionStage_EXECUTE
_ABORTED = 10  # XLA_FFI_Error_Code_ABORTED


class _StructHeader(ctypes.Structure):
    """Header of most of XLA's structures."""

    _fields_ = [("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p)]


class _Version(_StructHeader):
    _fields_ = [("major", ctypes.c_int), ("minor", ctypes.c_int)]


class _Metadata(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("version", _Version), ("traits", ctypes.c_uint32)]


class _Extension(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.POINTER(_Metadata)),  # if the type is _METADATA
    ]


class _StreamGet(_StructHeader):
    _fields_ = [("context", ctypes.c_void_p), ("stream", ctypes.c_void_p)]


#: A foreign function: takes the address of a `CallFrame`; returns the address of an error, or None.
ForeignFunction = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


class _Api(_StructHeader):
    _fields_ = [
        ("version", _Version),
        ("internal", ctypes.c_void_p),
        ("error_create", ctypes.c_void_p),
        ("error_get_message", ctypes.c_void_p),
        ("error_destroy", ForeignFunction),
        ("handler_register", ctypes.c_void_p),
        ("stream_get", ForeignFunction),
    ]


class _FfiBuffer(_StructHeader):
    _fields_ = [
        ("dtype", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    ]


class _FfiBuffers(_StructHeader):
    """Arguments (XLA_FFI_Args) or results (XLA_FFI_Rets), which have the same layout."""

    _fields_ = [
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("buffers", ctypes.POINTER(ctypes.POINTER(_FfiBuffer))),
    ]


class _Int64Attribute(ctypes.Structure):
    """A scalar attribute (XLA_FFI_Scalar) of dtype int64."""

    _fields_ = [("dtype", ctypes.c_int), ("value", ctypes.POINTER(ctypes.c_int64))]


class _Attributes(_StructHeader):
    """Attributes of a call (XLA_FFI_Attrs); the calls here have none, or one of int64."""

    _fields_ = [
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("names", ctypes.c_void_p),
        ("numbers", ctypes.POINTER(ctypes.POINTER(_Int64Attribute))),
    ]


class CallFrame(_StructHeader):
    """A call of a foreign function (XLA_FFI_CallFrame); XLA passes its address."""

    _fields_ = [
        ("api", ctypes.POINTER(_Api)),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("arguments", _FfiBuffers),
        ("results", _FfiBuffers),
        ("attributes", _Attributes),
    ]


class _ErrorDestroy(_StructHeader):
    _fields_ = [("error", ctypes.c_void_p)]


class _ErrorCreate(_StructHeader):
    _fields_ = [("message", ctypes.c_char_p), ("code", ctypes.c_int)]


def create_collective_error(frame: Any) -> int:
    """Return the address of a new error with the code ABORTED.  A foreign function returns it to end the launch."""
    request = _ErrorCreate(ctypes.sizeof(_ErrorCreate), None, b"a collective failed", _ABORTED)
    address: int = ForeignFunction(frame.api.contents.error_create)(ctypes.addressof(request))
    return address


def handle_non_execution(frame: Any) -> bool:
    """Handle a call that does not execute the function: answer a request for the interface's version, ignore others.

    Return False if a call executes the function.
    """
    extension = _Extension.from_address(frame.extension) if frame.extension else None
    if extension is not None and extension.type == _METADATA:
        metadata, version = extension.metadata.contents, frame.api.contents.version
        metadata.version.major, metadata.version.minor = version.major, version.minor
        metadata.traits = 0
        return True
    return bool(frame.stage != _EXECUTE)


def get_stream(frame: Any) -> int | None:
    """Return the handle of the stream of a call, or None if XLA has no stream, as on the CPU."""
    api = frame.api.contents
    request = _StreamGet(ctypes.sizeof(_StreamGet), None, frame.context, None)
    error = api.stream_get(ctypes.addressof(request))
    if error:
        destroy = _ErrorDestroy(ctypes.sizeof(_ErrorDestroy), None, error)
        api.error_destroy(ctypes.addressof(destroy))
        return None
    return int(request.stream or 0) or None


#: Names and platforms of the registered functions.
_registered: set[tuple[str, str]] = set()


def register_target(name: str, callback: Any, platform: str | None = None) -> None:
    """Register a foreign function with XLA under a name, unless the name is registered for the platform already.

    ``platform`` is by default the one on which JAX computes.
    """
    import jax

    backend: str = jax.default_backend()
    platform = platform or ("CUDA" if backend == "gpu" else backend)
    if (name, platform) not in _registered:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(callback), platform=platform)
        _registered.add((name, platform))
