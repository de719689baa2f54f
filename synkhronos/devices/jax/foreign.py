"""What XLA calls in the middle of its own programs.

`compute_stream`
    On which CUDA stream XLA computes.
`all_reduced`
    Has XLA's program combine arrays with the other ranks', at this point of it.
`started`
    Has it begin to, while it computes something else.
`combining`
    Who does the combining, during a launch.

XLA calls foreign functions (its "FFI", ``xla/ffi/api/c_api.h``, which jaxlib brings along) as it launches a program, in
the launching thread, and tells each where its arrays will lie and on which stream its work has its place.  Work that is
put on the stream there comes after what XLA was told before and before what it is told later, and nobody has to wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from synkhronos.ranks.interrupts import defer_signals

_log = logging.getLogger("synkhronos")

_METADATA = 1  # XLA_FFI_Extension_Metadata
_EXECUTE = 3  # XLA_FFI_ExecutionStage_EXECUTE


class _Struct(ctypes.Structure):
    """What most of XLA's structures begin with."""

    _fields_ = [("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p)]


class _Version(_Struct):
    _fields_ = [("major", ctypes.c_int), ("minor", ctypes.c_int)]


class _Metadata(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("version", _Version), ("traits", ctypes.c_uint32)]


class _Extension(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.POINTER(_Metadata)),  # of an extension of that type
    ]


class _StreamGet(_Struct):
    _fields_ = [("context", ctypes.c_void_p), ("stream", ctypes.c_void_p)]


_Function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


class _Api(_Struct):
    _fields_ = [
        ("version", _Version),
        ("internal", ctypes.c_void_p),
        ("error_create", ctypes.c_void_p),
        ("error_get_message", ctypes.c_void_p),
        ("error_destroy", _Function),
        ("handler_register", ctypes.c_void_p),
        ("stream_get", _Function),
    ]


class _Buffer(_Struct):
    _fields_ = [
        ("dtype", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    ]


class _Buffers(_Struct):
    """Arguments, or results: their layouts are alike."""

    _fields_ = [
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("buffers", ctypes.POINTER(ctypes.POINTER(_Buffer))),
    ]


class _CallFrame(_Struct):
    _fields_ = [
        ("api", ctypes.POINTER(_Api)),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("arguments", _Buffers),
        ("results", _Buffers),
    ]


class _ErrorDestroy(_Struct):
    _fields_ = [("error", ctypes.c_void_p)]


def _is_launch(frame: Any) -> bool:
    """Whether a call is one of a launch; tell XLA which version of its interface this speaks if it wants to know."""
    extension = _Extension.from_address(frame.extension) if frame.extension else None
    if extension is not None and extension.type == _METADATA:
        metadata, version = extension.metadata.contents, frame.api.contents.version
        metadata.version.major, metadata.version.minor = version.major, version.minor
        metadata.traits = 0
        return False
    return bool(frame.stage == _EXECUTE)


def _stream_of(frame: Any) -> int | None:
    """Return the stream on which a call's work has its place; None if XLA knows of none, as on the CPU."""
    api = frame.api.contents
    asked = _StreamGet(ctypes.sizeof(_StreamGet), None, frame.context, None)
    error = api.stream_get(ctypes.addressof(asked))
    if error:
        destroyed = _ErrorDestroy(ctypes.sizeof(_ErrorDestroy), None, error)
        api.error_destroy(ctypes.addressof(destroyed))
        return None
    return int(asked.stream or 0) or None


def _register(name: str, function: Any, platform: str) -> None:
    import jax

    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform=platform)


# -- XLA's stream ----------------------------------------------------------------------------------------------


class ComputeStream(NamedTuple):
    """The stream on which XLA computes.

    Attributes
    ----------
    handle : int
    is_inline : bool
        Whether foreign functions are called in the thread that launches, before the launch returns.
    """

    handle: int
    is_inline: bool


_ASK = "synkhronos_compute_stream"
#: The thread that asks.
_asking: list[threading.Thread] = []
#: What the foreign function has seen: it is called from within XLA, and can't return it.
_seen: list[ComputeStream] = []


@_Function
def _ask(address: int) -> None:
    """Note the stream of a call."""
    try:
        frame = _CallFrame.from_address(address)
        if _is_launch(frame):
            handle = _stream_of(frame)
            if handle is not None:
                _seen.append(ComputeStream(handle, threading.current_thread() is _asking[0]))
    except BaseException as error:  # as in `_combine`
        _log.info("XLA's stream can't be found: %r", error)


def compute_stream(platform: str = "CUDA") -> ComputeStream | None:
    """Return the stream on which XLA computes, None where it can't be found.

    Parameters
    ----------
    platform : str
        XLA's word for it.
    """
    import jax

    try:
        _register(_ASK, _ask, platform)
        _seen.clear()
        _asking[:] = [threading.current_thread()]
        ask: Any = jax.jit(lambda x: jax.ffi.ffi_call(_ASK, jax.ShapeDtypeStruct((), np.int8), has_side_effect=True)(x))
        with defer_signals():
            ask(np.int8(0)).block_until_ready()
    except Exception as error:
        _log.info("XLA's stream can't be found, and ranks wait where it would order their work: %s", error)
        return None
    return _seen[-1] if _seen else None


# -- combining within a launch ---------------------------------------------------------------------------------

_COMBINE, _START = "synkhronos_combine", "synkhronos_start"
_registered: set[str] = set()

#: XLA's numbers for dtypes (XLA_FFI_DataType), of what ranks combine.
_DTYPES = {
    2: "int8",
    4: "int32",
    5: "int64",
    6: "uint8",
    8: "uint32",
    9: "uint64",
    10: "float16",
    11: "float32",
    12: "float64",
    16: "bfloat16",
}


class Span(NamedTuple):
    """Items at one address, whose combination goes to another, or the same."""

    source: int
    target: int
    n_items: int
    dtype: str


class _Launch:
    """A launch: who combines during it (`combining`), how often that was, and what went wrong."""

    def __init__(self, combine: Any):
        self._combine = combine
        self._started = 0
        self.count = 0
        self.error: BaseException | None = None

    def start(self, frame: Any) -> None:
        """Have what a call brings be started."""
        spans = _spans(frame, 0, frame.results.size - 1)
        self._started += len(spans)
        if self.error is None:
            self._combine.start(spans, _stream_of(frame))

    def finish(self, frame: Any) -> None:
        """Have what a call brings be combined, and what was started before."""
        self.count += 1
        started, self._started = self._started, 0
        n_arrays = frame.results.size - 1
        # What has been started is among the arguments, for XLA to know when it may be read.
        spans = _spans(frame, started, n_arrays)
        counts = frame.results.buffers[n_arrays].contents.data
        if self.error is None:
            self._combine.finish(spans, counts, _stream_of(frame))
        else:
            self._combine.wait(_stream_of(frame))


#: The present launch; None when there is nobody to combine.
_present: _Launch | None = None


def _pass_on(address: int, what: Callable[[_Launch, Any], None]) -> None:
    """Pass a call of XLA's on to the present launch."""
    launch = _present
    try:
        frame = _CallFrame.from_address(address)
        if not _is_launch(frame):
            return
        if launch is None:
            _log.error("XLA called the function that combines the ranks' arrays outside a launch: the call is ignored")
        else:
            what(launch, frame)
    except BaseException as error:  # nothing can be raised through XLA, which would take garbage for what is returned
        # Behind it nothing counts any more, and the first error is the one that says why.
        if launch is not None:
            launch.error = launch.error or error


@_Function
def _start(address: int) -> None:
    _pass_on(address, _Launch.start)


@_Function
def _combine(address: int) -> None:
    _pass_on(address, _Launch.finish)


def _spans(frame: Any, first: int, stop: int) -> list[Span]:
    """Return where some of a call's arrays are, and where their combinations go."""
    spans = []
    for i in range(first, stop):
        source, target = frame.arguments.buffers[i].contents, frame.results.buffers[i].contents
        count = 1
        for axis in range(source.rank):
            count *= source.dims[axis]
        spans.append(Span(source.data, target.data, count, _DTYPES[source.dtype]))
    return spans


def started(array: Any, last: Any) -> tuple[Any, Any]:
    """Return an array that is being traced, which XLA's program begins to combine here, and a number.

    ``last`` is the number that came of what was started last, or 0: XLA, which may have its reasons to order what it
    computes one way on one rank and another way on another, starts in the order of these.  `all_reduced` takes both.
    """
    import jax

    _known(_START, _start)
    results = [_like(array), jax.ShapeDtypeStruct((), np.int32)]
    begun, number = jax.ffi.ffi_call(_START, results, input_output_aliases={0: 0, 1: 1})(array, last)
    return begun, number


def all_reduced(
    arrays: Sequence[Any], begun: Sequence[Any] = (), last: Any = None, turn: Any = None
) -> tuple[list[Any], Any]:
    """Return arrays that are being traced as `combining` will have combined them, and whether that counts (an int32).

    Parameters
    ----------
    arrays : list of jax.Array
    begun : list of jax.Array
        All that were `started` before: they are returned in front of the others.
    last : jax.Array, optional
        The number that came of the last of them.
    turn : jax.Array, optional
        In a loop, what is another number each time: XLA would do once, before the loop, what is the same every time.
    """
    import jax

    _known(_COMBINE, _combine)
    given = [*begun, *arrays]
    results = [*map(_like, given), jax.ShapeDtypeStruct((), np.int32)]
    # Its side effect is not declared: JAX would launch the whole program by way of its slow path, at 0.6 ms a launch.
    # XLA keeps the call, as what it returns is used, and makes it once.
    call = jax.ffi.ffi_call(_COMBINE, results, input_output_aliases={i: i for i in range(len(results))})
    counts = np.int32(0) if last is None else last
    *combined, counts = call(*given, counts, *([] if turn is None else [turn]))
    return combined, counts


def _like(array: Any) -> Any:
    import jax

    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _known(name: str, function: Any) -> None:
    """Tell XLA of a foreign function, once."""
    import jax

    platform = {"gpu": "CUDA"}.get(jax.default_backend(), jax.default_backend())
    if name not in _registered:
        _register(name, function, platform)
        _registered.add(name)


@contextlib.contextmanager
def combining(combine: Any, times: int = 1) -> Iterator[None]:
    """Have somebody combine in the one launch of the ``with`` block, and raise what it raised at the end.

    ``combine`` is what `engines.xla.Combine` is.  It is an error if the launch combines more or less than so many
    times.

    No signal may raise anything meanwhile (see `ranks.interrupts.defer_signals`): that would happen at the first
    instruction of what XLA calls, where nothing can catch it.
    """
    global _present
    _present = launch = _Launch(combine)
    try:
        yield
        if launch.error is not None:
            raise launch.error
        if launch.count != times:
            raise RuntimeError(f"XLA had the ranks' arrays combined {launch.count} times in one launch, not {times}")
    finally:
        _present = None
