"""Search for XLA's compute stream: a small program calls a foreign function, and XLA passes the stream to it."""

from __future__ import annotations

import logging
import threading
from typing import Any, NamedTuple

import numpy as np

from synkhronos.devices.jax.xla_ffi import CallFrame, ForeignFunction, get_stream, handle_non_execution, register_target
from synkhronos.ranks.interrupts import defer_signals

_log = logging.getLogger("synkhronos")


class ComputeStream(NamedTuple):
    """The stream on which XLA computes; ``is_inline`` if XLA calls foreign functions in the launching thread."""

    handle: int
    is_inline: bool


_STREAM_TARGET = "synkhronos_compute_stream"
#: Thread that launches the program with `_stream_callback`.
_probing_thread: threading.Thread | None = None
#: Streams that `_stream_callback` has found.
_found_streams: list[ComputeStream] = []


@ForeignFunction
def _stream_callback(address: int) -> None:
    """Record the stream of a call, as a callback can't return it."""
    try:
        frame = CallFrame.from_address(address)
        if not handle_non_execution(frame):
            handle = get_stream(frame)
            if handle is not None:
                _found_streams.append(ComputeStream(handle, threading.current_thread() is _probing_thread))
    except BaseException as error:  # no exception can pass through XLA
        _log.info("XLA's stream can't be found: %r", error)


def find_compute_stream() -> ComputeStream | None:
    """Return the stream on which XLA computes on a GPU, or None if it can't be found."""
    import jax

    global _probing_thread
    try:
        register_target(_STREAM_TARGET, _stream_callback, "CUDA")
        _found_streams.clear()
        _probing_thread = threading.current_thread()
        result = jax.ShapeDtypeStruct((), np.int8)
        probe: Any = jax.jit(lambda x: jax.ffi.ffi_call(_STREAM_TARGET, result, has_side_effect=True)(x))
        with defer_signals():
            # An explicit device: within JAX's callbacks the default device is the CPU.
            probe(jax.device_put(np.int8(0), jax.local_devices()[0])).block_until_ready()
    except Exception as error:
        _log.info("XLA's stream can't be found, and ranks wait where it would order their work: %s", error)
        return None
    return _found_streams[-1] if _found_streams else None
