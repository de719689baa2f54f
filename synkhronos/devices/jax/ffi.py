"""All-reduces within XLA programs, through XLA's foreign function interface (FFI).

XLA calls foreign functions (``xla/ffi/api/c_api.h``, part of jaxlib) while it launches a program, in the launching
thread, and passes the stream and the addresses of the arrays.  Work that a foreign function launches on that stream is
ordered between XLA's earlier and later work, and no thread waits.  The calls of an all-reduce in a program::

    traced        trace_start(chunk 0)   trace_start(chunk 1)   trace_finish(rest)          `FfiAllReduce`
                        |                      |                      |
    launched      _start_callback        _start_callback        _finish_callback            called by XLA
                        |                      |                      |
                  GradientReducer.start  GradientReducer.start  GradientReducer.finish      given to `use_reducer`
                        |                      |                      |
    NCCL          start_in_launch        start_in_launch        finish_in_launch            `NcclCommunicator`

Each call has an attribute, the number of its program's `FfiAllReduce`, by which the callbacks find the object.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import numpy as np

from synkhronos.devices.cuda.nccl import NCCL_OPS, BufferSpan
from synkhronos.devices.jax import nccl_handlers
from synkhronos.ranks.interrupts import defer_signals

_log = logging.getLogger("synkhronos")

_METADATA = 1  # XLA_FFI_Extension_Metadata
_EXECUTE = 3  # XLA_FFI_ExecutionStage_EXECUTE
_ABORTED = 10  # XLA_FFI_Error_Code_ABORTED


class _Struct(ctypes.Structure):
    """Header of most of XLA's structures."""

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
        ("metadata", ctypes.POINTER(_Metadata)),  # if the type is _METADATA
    ]


class _StreamGet(_Struct):
    _fields_ = [("context", ctypes.c_void_p), ("stream", ctypes.c_void_p)]


_Callback = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


class _Api(_Struct):
    _fields_ = [
        ("version", _Version),
        ("internal", ctypes.c_void_p),
        ("error_create", ctypes.c_void_p),
        ("error_get_message", ctypes.c_void_p),
        ("error_destroy", _Callback),
        ("handler_register", ctypes.c_void_p),
        ("stream_get", _Callback),
    ]


class _FfiBuffer(_Struct):
    _fields_ = [
        ("dtype", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    ]


class _FfiBuffers(_Struct):
    """Arguments (XLA_FFI_Args) or results (XLA_FFI_Rets), which have the same layout."""

    _fields_ = [
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("buffers", ctypes.POINTER(ctypes.POINTER(_FfiBuffer))),
    ]


class _NumberAttribute(ctypes.Structure):
    """A scalar attribute (XLA_FFI_Scalar) of dtype int64."""

    _fields_ = [("dtype", ctypes.c_int), ("value", ctypes.POINTER(ctypes.c_int64))]


class _Attributes(_Struct):
    """Attributes of a call (XLA_FFI_Attrs); the calls here have none, or one number."""

    _fields_ = [
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("names", ctypes.c_void_p),
        ("numbers", ctypes.POINTER(ctypes.POINTER(_NumberAttribute))),
    ]


class _CallFrame(_Struct):
    _fields_ = [
        ("api", ctypes.POINTER(_Api)),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("arguments", _FfiBuffers),
        ("results", _FfiBuffers),
        ("attributes", _Attributes),
    ]


class _ErrorDestroy(_Struct):
    _fields_ = [("error", ctypes.c_void_p)]


class _ErrorCreate(_Struct):
    _fields_ = [("message", ctypes.c_char_p), ("code", ctypes.c_int)]


def _create_error(frame: Any) -> int:
    """Return the address of a new error.  A callback returns it to XLA to end the launch."""
    request = _ErrorCreate(ctypes.sizeof(_ErrorCreate), None, b"an all-reduce failed", _ABORTED)
    address: int = _Callback(frame.api.contents.error_create)(ctypes.addressof(request))
    return address


def _is_execution(frame: Any) -> bool:
    """Whether a call executes the function; answers XLA's call for the version of the interface."""
    extension = _Extension.from_address(frame.extension) if frame.extension else None
    if extension is not None and extension.type == _METADATA:
        metadata, version = extension.metadata.contents, frame.api.contents.version
        metadata.version.major, metadata.version.minor = version.major, version.minor
        metadata.traits = 0
        return False
    return bool(frame.stage == _EXECUTE)


def _get_stream(frame: Any) -> int | None:
    """Return the handle of the stream of a call; None if XLA has no stream, as on the CPU."""
    api = frame.api.contents
    request = _StreamGet(ctypes.sizeof(_StreamGet), None, frame.context, None)
    error = api.stream_get(ctypes.addressof(request))
    if error:
        destroy = _ErrorDestroy(ctypes.sizeof(_ErrorDestroy), None, error)
        api.error_destroy(ctypes.addressof(destroy))
        return None
    return int(request.stream or 0) or None


def _register(name: str, callback: Any, platform: str) -> None:
    import jax

    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(callback), platform=platform)


# -- XLA's stream ----------------------------------------------------------------------------------------------


class ComputeStream(NamedTuple):
    """The stream on which XLA computes.

    Attributes
    ----------
    handle : int
    is_inline : bool
        Whether XLA calls foreign functions in the launching thread, before the launch returns.
    """

    handle: int
    is_inline: bool


_STREAM_TARGET = "synkhronos_compute_stream"
#: Thread that launches the program that calls `_stream_callback`.
_probing_thread: list[threading.Thread] = []
#: Streams that `_stream_callback` has found.
_found_streams: list[ComputeStream] = []


@_Callback
def _stream_callback(address: int) -> None:
    """Record the stream of a call, as a callback can't return it."""
    try:
        frame = _CallFrame.from_address(address)
        if _is_execution(frame):
            handle = _get_stream(frame)
            if handle is not None:
                _found_streams.append(ComputeStream(handle, threading.current_thread() is _probing_thread[0]))
    except BaseException as error:  # as in `FfiAllReduce.dispatch`
        _log.info("XLA's stream can't be found: %r", error)


def find_compute_stream() -> ComputeStream | None:
    """Return the stream on which XLA computes on a GPU; None if it can't be found."""
    import jax

    try:
        _register(_STREAM_TARGET, _stream_callback, "CUDA")
        _found_streams.clear()
        _probing_thread[:] = [threading.current_thread()]
        result = jax.ShapeDtypeStruct((), np.int8)
        probe: Any = jax.jit(lambda x: jax.ffi.ffi_call(_STREAM_TARGET, result, has_side_effect=True)(x))
        with defer_signals():
            # An explicit device: within JAX's callbacks the default device is the CPU.
            probe(jax.device_put(np.int8(0), jax.local_devices()[0])).block_until_ready()
    except Exception as error:
        _log.info("XLA's stream can't be found, and ranks wait where it would order their work: %s", error)
        return None
    return _found_streams[-1] if _found_streams else None


# -- all-reduce within a launch --------------------------------------------------------------------------------

_START_TARGET, _FINISH_TARGET = "synkhronos_start", "synkhronos_all_reduce"
_registered: set[str] = set()

#: Dtypes that NCCL can reduce, by XLA's numbers (XLA_FFI_DataType).
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


class Reducer(Protocol):
    """Launches the reductions of one launch of a program; called by XLA."""

    def start(self, spans: Sequence[BufferSpan], stream: int | None) -> None:
        """Start reductions that overlap the stream's next work."""

    def finish(self, spans: Sequence[BufferSpan], valid_flag_address: int, stream: int | None) -> None:
        """Launch reductions on the stream, make it wait for the started ones, and set the int32 at an address.

        ``valid_flag_address`` is an address on the device.
        """

    def wait(self, stream: int | None) -> None:
        """Make the stream wait for the reductions that were started, after an error."""


class FfiAllReduce:
    """The all-reduce of one XLA program, which gets a reducer for each launch.

    ``trace_start``, ``trace_finish`` and ``trace_sum`` insert its calls into the program, while JAX traces it.

    Parameters
    ----------
    aborts : bool
        Whether an error ends the launch.  If not, the launch continues with undefined reductions that are marked as
        invalid, so that the program can return the old values of donated arrays.
    nccl_caller : {"python", "native", "graph"}
        Code by which XLA calls NCCL: "python" for a reducer in Python, "native" for handlers in C++, "graph" for
        handlers in C++ that XLA may record in a CUDA graph.  The latter two need `use_communicator`, and an error never
        ends the launch.
    op : str
        Name of the reduction, for handlers in C++.

    Examples
    --------
    >>> all_reduce = FfiAllReduce()
    >>> program = jax.jit(lambda gradient: all_reduce.trace_finish([gradient]))  # doctest: +SKIP
    >>> with defer_signals(), all_reduce.use_reducer(reducer):  # doctest: +SKIP
    ...     (total,), is_valid = program(gradient)
    """

    _numbers = itertools.count()
    _by_number: WeakValueDictionary[int, FfiAllReduce] = WeakValueDictionary()

    def __init__(self, aborts: bool = False, nccl_caller: str = "python", op: str = "sum") -> None:
        assert nccl_caller == "python" or not aborts
        self._aborts, self.nccl_caller, self.op = aborts, nccl_caller, op
        #: Shape of the array that the next launch reduces.
        self._expected_shape: tuple[int, ...] = ()
        #: Attribute of the program's calls.  It is a count and not an address, so that JAX's compilation cache finds
        #: the same program of another process.
        self._number = np.int64(next(self._numbers))
        self._by_number[int(self._number)] = self
        #: State of the launch in progress: its reducer, and the first error that a callback has raised.
        self._reducer: Reducer | None = None
        self._error: BaseException | None = None
        self._n_started = self._n_finished = 0

    @contextlib.contextmanager
    def use_reducer(self, reducer: Reducer, n_reductions: int | None = 1) -> Iterator[None]:
        """Use a reducer for the launches in the ``with`` block, and raise its error at the end.

        Signals must be deferred meanwhile (`ranks.interrupts.defer_signals`): a signal handler could raise at the first
        instruction of a callback, where nothing can catch the exception.

        Parameters
        ----------
        reducer : Reducer
        n_reductions : int or None
            Number of all-reduces that the launch must make; None for any number.

        Raises
        ------
        RuntimeError
            If the launch has made another number of all-reduces.
        """
        self._reducer, self._error, self._n_started, self._n_finished = reducer, None, 0, 0
        try:
            try:
                yield
            except Exception:  # possibly XLA's own, for a launch that this all-reduce's error has ended
                if self._aborts:
                    self._raise_error()
                raise
            self._raise_error()
            if n_reductions is not None and self._n_finished != n_reductions:
                raise RuntimeError(f"the launch made {self._n_finished} all-reduces, expected {n_reductions}")
        finally:
            self._reducer = self._error = None

    @contextlib.contextmanager
    def use_communicator(self, communicator: Any, shape: tuple[int, ...], n_reductions: int) -> Iterator[None]:
        """Use a communicator for the launch in the ``with`` block, by the handlers in C++.

        Parameters
        ----------
        communicator : NcclCommunicator
        shape : tuple of int
            Shape of the reduced array on all ranks, checked when the program is traced.
        n_reductions : int
            Number of all-reduces that the launch must make.

        Raises
        ------
        ValueError
            If the program reduces another number of items.
        RuntimeError
            If NCCL has failed, the connection was aborted, or the launch has made another number of all-reduces.
        """
        self._expected_shape = shape
        library, is_recordable = nccl_handlers.load_handlers(), self.nccl_caller == "graph"
        with communicator.use_in_launch(is_recordable) as state:
            library.synkhronos_set_launch_state(state)
            yield
        if not is_recordable and state.n_finished != n_reductions:
            raise RuntimeError(f"the launch made {state.n_finished} all-reduces, expected {n_reductions}")

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    # -- traced ----------------------------------------------------------------------------------------------

    def trace_start(self, array: Any, token: Any, shape: tuple[int, ...] | None = None) -> tuple[Any, Any]:
        """Trace the start of an array's all-reduce, or of another collective of the reducer.

        XLA may order independent operations differently on different ranks.  The token makes each start depend on the
        previous one, so that all ranks start the all-reduces in the same order.

        Parameters
        ----------
        array : traced jax.Array
        token : jax.Array of int32
            Token of the previous start; 0 for the first start.
        shape : tuple of int, optional
            Shape of the result; default: the result replaces the array.

        Returns
        -------
        array : jax.Array
            Its content is undefined until `trace_finish`, which takes it and the token.
        token : jax.Array of int32
        """
        import jax

        results = [_to_shape_struct(array, shape), jax.ShapeDtypeStruct((), np.int32)]
        if self.nccl_caller == "python":
            _register_once(_START_TARGET, _start_callback)
            target, attributes = _START_TARGET, {"number": self._number}
        else:
            target, attributes = nccl_handlers.START, {"op": np.int64(NCCL_OPS[self.op]), "n_started": np.int64(0)}
        call = jax.ffi.ffi_call(target, results, input_output_aliases={0: 0, 1: 1} if shape is None else {1: 1})
        started, token = call(array, token, **attributes)
        return started, token

    def trace_finish(
        self,
        arrays: Sequence[Any],
        started: Sequence[Any] = (),
        token: Any = None,
        others: Sequence[Any] = (),
        shapes: Sequence[tuple[int, ...] | None] | None = None,
    ) -> tuple[list[Any], Any]:
        """Trace the all-reduce of arrays, and the wait for the all-reduces that were started.

        Parameters
        ----------
        arrays : list of traced jax.Array
        started : list of jax.Array
            All arrays that `trace_start` has returned.
        token : jax.Array, optional
            Last token that `trace_start` has returned.
        others : list of jax.Array
            Further operands of the call.  In a loop: a value that differs in each iteration, without which XLA would
            hoist the call out of the loop.  Arrays whose collectives were started with a shape: XLA would reuse their
            memory.
        shapes : list, optional
            For each of ``arrays``, the shape as in `trace_start`.

        Returns
        -------
        reduced : list of jax.Array
            The started arrays, then the others.
        is_valid : jax.Array of int32
            0 if the connection was aborted, so that the reduced arrays are undefined.
        """
        import jax

        operands, shapes = [*started, *arrays], shapes or [None] * len(arrays)
        if self.nccl_caller == "python":
            _register_once(_FINISH_TARGET, _finish_callback)
            target, attributes = _FINISH_TARGET, {"number": self._number}
        else:
            n_items = sum(math.prod(array.shape) for array in operands)
            if n_items != math.prod(self._expected_shape):
                raise ValueError(
                    f"all_reduce: expected shape {self._expected_shape}, as before the launch, got {n_items} items"
                )
            # A CUDA graph can't wait for the side stream, on which chunks are reduced outside of the graph.
            target = (
                nccl_handlers.RECORDABLE_FINISH if self.nccl_caller == "graph" and not started else nccl_handlers.FINISH
            )
            attributes = {"op": np.int64(NCCL_OPS[self.op]), "n_started": np.int64(len(started))}
        results = [
            *map(_to_shape_struct, started),
            *map(_to_shape_struct, arrays, shapes),
            jax.ShapeDtypeStruct((), np.int32),
        ]
        is_in_place = [*[True] * len(started), *(shape is None for shape in shapes), True]
        # The side effect is not declared, as JAX would then use a slower way to launch.  XLA still makes the call
        # exactly once, as its results are used.
        aliases = {i: i for i, is_same in enumerate(is_in_place) if is_same}
        call = jax.ffi.ffi_call(target, results, input_output_aliases=aliases)
        is_valid = np.int32(0) if token is None else token
        *reduced, is_valid = call(*operands, is_valid, *others, **attributes)
        return reduced, is_valid

    def trace_sum(self, array: Any) -> Any:
        """Trace the sum of an array over the ranks.

        Parameters
        ----------
        array : traced jax.Array of floats
            Under `jax.vmap`, the whole batch is reduced at once.

        Returns
        -------
        jax.Array
            NaN if the connection was aborted.
        """
        import jax
        import jax.numpy as jnp

        @jax.custom_batching.custom_vmap
        def total(array: Any) -> Any:
            (reduced,), is_valid = self.trace_finish([array])
            return jnp.where(is_valid != 0, reduced, jnp.nan)

        @total.def_vmap
        def total_of_batch(size: int, in_batched: Sequence[bool], batch: Any) -> tuple[Any, bool]:
            return total(batch), True

        return total(array)

    # -- called by XLA ---------------------------------------------------------------------------------------

    @classmethod
    def dispatch(cls, address: int, handle_call: Callable[[FfiAllReduce, Any, Reducer], None]) -> int | None:
        """Pass a call by XLA to its program's object; return None, or the address of an error to end the launch."""
        all_reduce = None
        try:
            frame = _CallFrame.from_address(address)
            if not _is_execution(frame):
                return None
            all_reduce = cls._by_number[frame.attributes.numbers[0].contents.value[0]]
            if all_reduce._reducer is None:
                _log.error("XLA called an all-reduce outside a launch; the call is ignored")
            elif all_reduce._aborts and all_reduce._error is not None:
                return _create_error(frame)
            else:
                handle_call(all_reduce, frame, all_reduce._reducer)
        # An exception can't pass through XLA.  Only the first error is stored, as it may be the cause of later ones.
        except BaseException as error:
            if all_reduce is None:
                _log.error("XLA's call of an all-reduce can't be read: %r", error)
            else:
                all_reduce._error = all_reduce._error or error
                if all_reduce._aborts:
                    return _create_error(frame)
        return None

    def start(self, frame: Any, reducer: Reducer) -> None:
        """Start the reduction of the arrays of a call."""
        spans = _read_spans(frame, 0, frame.results.size - 1)
        self._n_started += len(spans)
        if self._error is None:
            reducer.start(spans, _get_stream(frame))

    def finish(self, frame: Any, reducer: Reducer) -> None:
        """Reduce the arrays of a call, and make the stream wait for the started reductions."""
        self._n_finished += 1
        n_started, self._n_started = self._n_started, 0
        n_arrays = frame.results.size - 1
        # The started arrays are the first arguments only so that XLA orders their readers after this call.
        spans = _read_spans(frame, n_started, n_arrays)
        valid_flag_address = frame.results.buffers[n_arrays].contents.data
        if self._error is None:
            reducer.finish(spans, valid_flag_address, _get_stream(frame))
        else:
            reducer.wait(_get_stream(frame))


@_Callback
def _start_callback(address: int) -> int | None:
    return FfiAllReduce.dispatch(address, FfiAllReduce.start)


@_Callback
def _finish_callback(address: int) -> int | None:
    return FfiAllReduce.dispatch(address, FfiAllReduce.finish)


def _read_spans(frame: Any, start: int, stop: int) -> list[BufferSpan]:
    """Return the addresses of a call's arguments and results ``start`` to ``stop``."""
    spans = []
    for i in range(start, stop):
        source, target = frame.arguments.buffers[i].contents, frame.results.buffers[i].contents
        count = 1
        for axis in range(source.rank):
            count *= source.dims[axis]
        spans.append(BufferSpan(source.data, target.data, count, _DTYPES[source.dtype]))
    return spans


def _to_shape_struct(array: Any, shape: tuple[int, ...] | None = None) -> Any:
    import jax

    return jax.ShapeDtypeStruct(array.shape if shape is None else shape, array.dtype)


def _register_once(name: str, callback: Any) -> None:
    if name not in _registered:
        _register(name, callback, nccl_handlers.get_platform())
        _registered.add(name)
