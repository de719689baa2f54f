"""Collectives within XLA programs, by foreign functions that XLA calls while it launches a program.

A collective is one call that finishes it, after any number of calls that start a chunk of the array::

    traced      trace_start(chunk 0)    trace_start(chunk 1)    trace_finish(rest)      `FfiCollectives`
                      |                       |                       |
    launched        Start                   Start                   Finish              nccl_ffi.cc, called by XLA
                      |                       |                       |
    NCCL         side stream             side stream             XLA's stream, which waits for the side stream

The call that finishes a collective runs it on the rest of the array, or on all of it if no chunk was started.

The handlers in C++ get the NCCL connection by `FfiCollectives.use_communicator`.  With the mode "python", XLA calls
`_start_callback` and `_finish_callback` instead.  They find the `FfiCollectives` by its number, an attribute of each
call, and pass the arrays to the launch's `LaunchCollectives`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from synkhronos.devices.cuda.launch_state import LaunchState
from synkhronos.devices.cuda.nccl import NCCL_OPS
from synkhronos.devices.jax import nccl_handlers
from synkhronos.devices.jax.xla_communicator import BufferSpan, XlaCommunicator
from synkhronos.devices.jax.xla_ffi import (
    CallFrame,
    ForeignFunction,
    create_collective_error,
    get_stream,
    handle_non_execution,
    register_target,
)
from synkhronos.variable_types import Array

_log = logging.getLogger("synkhronos")

_PYTHON_START_TARGET, _PYTHON_FINISH_TARGET = "synkhronos_start", "synkhronos_finish"

#: Dtypes that NCCL can reduce, by XLA's numbers (XLA_FFI_DataType).
_DTYPE_BY_XLA_NUMBER = {
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


class LaunchCollectives(ABC):
    """Python counterpart of the handlers in C++: runs the collectives of one launch of a program when XLA calls it."""

    def start(self, spans: Sequence[BufferSpan], stream: int | None) -> None:
        """Start collectives that overlap the stream's next work.  Called only for `FfiCollectives.trace_start`."""
        raise NotImplementedError

    @abstractmethod
    def finish(self, spans: Sequence[BufferSpan], valid_flag_address: int, stream: int | None) -> None:
        """Enqueue collectives on the stream, make it wait for those that were started, if any, and then set a flag.

        ``valid_flag_address`` is the address on the device of an int32: 1 if the results are valid, else 0.
        """

    def join_side_stream(self, stream: int | None) -> None:  # noqa: B027 - only NCCL has a side stream
        """Make the stream wait for the collectives that were started, after an error."""


class FfiCollectives:
    """The collectives of one XLA program, which gets a `LaunchCollectives` for each launch.

    ``trace_start``, ``trace_finish`` and ``trace_all_reduce`` insert its calls into the program, while JAX traces it.
    With the ``nccl_call_mode`` "python" XLA calls NCCL through a `LaunchCollectives`, with "native" through handlers in
    C++.
    An error ends the launch if ``aborts_on_error``.  Otherwise, and always with handlers in C++, the launch continues.
    The undefined reductions of the launch are then marked as invalid, so that the program can return old values of
    donated arrays.
    """

    _numbers = itertools.count()
    _by_number: WeakValueDictionary[int, FfiCollectives] = WeakValueDictionary()

    def __init__(
        self, aborts_on_error: bool = False, nccl_call_mode: nccl_handlers.NcclCallMode = "python", op: str = "sum"
    ) -> None:
        assert nccl_call_mode == "python" or not aborts_on_error
        self._aborts_on_error, self.nccl_call_mode, self.op = aborts_on_error, nccl_call_mode, op
        #: Shape of the array that the launch in progress reduces.  The first launch of a program traces it, so
        #: `use_communicator` sets the shape before `trace_finish` reads it.
        self._launch_shape: tuple[int, ...] = ()
        #: Attribute of the program's calls.  It is a count and not an address, so that JAX's compilation cache finds
        #: the same program of another process.
        self._number = np.int64(next(self._numbers))
        self._by_number[int(self._number)] = self
        #: State of the launch in progress: its `LaunchCollectives`, and the first error that a callback has raised.
        self._launch_collectives: LaunchCollectives | None = None
        self._error: BaseException | None = None
        self._n_started = self._n_finished = 0

    @contextlib.contextmanager
    def use_launch_collectives(
        self, launch_collectives: LaunchCollectives, n_collectives: int | None = 1
    ) -> Iterator[None]:
        """Use a `LaunchCollectives` for the launches in the ``with`` block, and raise its error at the end.

        This is for the mode "python"; "native" needs `use_communicator`.
        RuntimeError is raised if the launch has made another number of collectives than ``n_collectives``, where the
        chunks of an array count as one; None stands for any number.  Signals must be deferred meanwhile
        (`ranks.interrupts.defer_signals`): a signal handler could raise at the first instruction of a callback, where
        nothing can catch the exception.
        """
        self._launch_collectives, self._error, self._n_started, self._n_finished = launch_collectives, None, 0, 0
        try:
            try:
                yield
            except Exception:  # possibly XLA's own, for a launch that a collective's error has ended
                if self._aborts_on_error:
                    self._raise_stored_error()
                raise
            self._raise_stored_error()
            if n_collectives is not None and self._n_finished != n_collectives:
                raise RuntimeError(f"the launch made {self._n_finished} collectives, expected {n_collectives}")
        finally:
            self._launch_collectives = self._error = None

    @contextlib.contextmanager
    def use_communicator(
        self, communicator: XlaCommunicator, shape: tuple[int, ...], n_collectives: int
    ) -> Iterator[LaunchState]:
        """Use a communicator for the launch in the ``with`` block, by the handlers in C++.  Yield the launch's state.

        ``shape`` is that of the reduced array on all ranks.  If this launch traces the program, and the program reduces
        another number of items, ValueError is raised.  RuntimeError is raised if NCCL has failed, the connection was
        aborted, or the launch has made another number of collectives than ``n_collectives``.
        """
        handlers = nccl_handlers.register_handlers()
        self._launch_shape = shape
        try:
            state = communicator.begin_native_calls()
            try:
                handlers.synkhronos_set_launch_state(state)
                yield state
            finally:
                communicator.end_native_calls()
        finally:
            self._launch_shape = ()
        communicator.check_native_calls()
        if state.n_finished != n_collectives:
            raise RuntimeError(f"the launch made {state.n_finished} collectives, expected {n_collectives}")

    def _raise_stored_error(self) -> None:
        """Raise the error of a callback, if there was one."""
        if self._error is not None:
            raise self._error

    # -- traced ----------------------------------------------------------------------------------------------

    def trace_start(self, array: Array, token: Array, shape: tuple[int, ...] | None = None) -> tuple[Any, Any]:
        """Trace the start of a collective on an array.  Return its result and a token.

        XLA may order independent operations differently on different ranks.  The token makes each start depend on the
        previous one, so that all ranks start them in the same order.  The first start takes the token 0.

        The result takes the array's memory, or is a new array of the shape ``shape``.  Its content is undefined until
        `trace_finish`, which takes it and the token.
        """
        import jax

        results = [_to_shape_struct(array, shape), jax.ShapeDtypeStruct((), np.int32)]
        if self.nccl_call_mode == "python":
            register_target(_PYTHON_START_TARGET, _start_callback)
            target, attributes = _PYTHON_START_TARGET, {"number": self._number}
        else:
            target = nccl_handlers.START_TARGET
            attributes = {"op": np.int64(NCCL_OPS[self.op]), "n_started": np.int64(0)}
        call = jax.ffi.ffi_call(target, results, input_output_aliases={0: 0, 1: 1} if shape is None else {1: 1})
        started, token = call(array, token, **attributes)
        return started, token

    def trace_finish(
        self,
        arrays: Sequence[Array],
        started: Sequence[Array] = (),
        token: Array | None = None,
        extra_operands: Sequence[Array] = (),
        shapes: Sequence[tuple[int, ...] | None] | None = None,
    ) -> tuple[list[Any], Any]:
        """Trace the last call of a collective: it runs the collective on the remaining ``arrays``, and waits for all.

        ``started`` are all arrays that `trace_start` has returned, and ``token`` its last token.  ``shapes`` has the
        argument ``shape`` of `trace_start` for each of ``arrays``.  ``extra_operands`` are further operands of the
        call.  In a loop, a value that differs in each iteration prevents XLA from hoisting the call out of the loop.
        Arrays whose collectives were started with a shape are operands so that XLA does not reuse their memory.

        Return the started arrays, then ``arrays``, both reduced (or gathered), and an int32.  The int32 is 0 if the
        collective was aborted, and the arrays are undefined.
        """
        import jax

        operands, shapes = [*started, *arrays], shapes or [None] * len(arrays)
        if self.nccl_call_mode == "python":
            register_target(_PYTHON_FINISH_TARGET, _finish_callback)
            target, attributes = _PYTHON_FINISH_TARGET, {"number": self._number}
        else:
            n_items = sum(math.prod(array.shape) for array in operands)
            if n_items != math.prod(self._launch_shape):
                n_expected = math.prod(self._launch_shape)
                raise ValueError(f"collective: expected {n_expected} items, as before the launch, got {n_items}")
            target = nccl_handlers.FINISH_TARGET
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
        token = np.int32(0) if token is None else token
        *reduced, is_valid = call(*operands, token, *extra_operands, **attributes)
        return reduced, is_valid

    def trace_all_reduce(self, array: Array) -> Any:
        """Trace an all-reduce of an array of floats.  The result is NaN if the connection was aborted.

        Under `jax.vmap`, the whole batch is reduced at once.
        """
        import jax
        import jax.numpy as jnp

        @jax.custom_batching.custom_vmap
        def all_reduce(array: Array) -> Any:
            (reduced,), is_valid = self.trace_finish([array])
            return jnp.where(is_valid != 0, reduced, jnp.nan)

        @all_reduce.def_vmap
        def all_reduce_batch(size: int, in_batched: Sequence[bool], batch: Any) -> tuple[Any, bool]:
            return all_reduce(batch), True

        return all_reduce(array)

    # -- called by XLA ---------------------------------------------------------------------------------------

    @classmethod
    def dispatch(
        cls, frame_address: int, handle_call: Callable[[FfiCollectives, Any, LaunchCollectives], None]
    ) -> int | None:
        """Pass a call by XLA to its program's object.  Return None, or the address of an error to end the launch."""
        collectives = None
        try:
            frame = CallFrame.from_address(frame_address)
            if handle_non_execution(frame):
                return None
            collectives = cls._by_number[frame.attributes.numbers[0].contents.value[0]]
            if collectives._launch_collectives is None:
                _log.error("XLA called a collective outside a launch; the call is ignored")
            elif collectives._aborts_on_error and collectives._error is not None:
                return create_collective_error(frame)
            else:
                handle_call(collectives, frame, collectives._launch_collectives)
        except BaseException as error:
            # An exception can't pass through XLA.  The first error is stored, as it may be the cause of later ones.
            if collectives is None:
                _log.error("XLA's call of a collective can't be read: %r", error)
            else:
                collectives._error = collectives._error or error
                if collectives._aborts_on_error:
                    return create_collective_error(frame)
        return None

    def handle_start(self, frame: Any, launch_collectives: LaunchCollectives) -> None:
        """Start the collective on the arrays of a call of `trace_start`."""
        spans = _read_spans(frame, 0, frame.results.size - 1)
        self._n_started += len(spans)
        if self._error is None:
            launch_collectives.start(spans, get_stream(frame))

    def handle_finish(self, frame: Any, launch_collectives: LaunchCollectives) -> None:
        """Enqueue the collective on the arrays of a call of `trace_finish`, and order the stream after started ones."""
        self._n_finished += 1
        n_started, self._n_started = self._n_started, 0
        flag_index = frame.results.size - 1
        # The started arrays are the first arguments only so that XLA orders their readers after this call.
        spans = _read_spans(frame, n_started, flag_index)
        valid_flag_address = frame.results.buffers[flag_index].contents.data
        if self._error is None:
            launch_collectives.finish(spans, valid_flag_address, get_stream(frame))
        else:
            launch_collectives.join_side_stream(get_stream(frame))


@ForeignFunction
def _start_callback(address: int) -> int | None:
    return FfiCollectives.dispatch(address, FfiCollectives.handle_start)


@ForeignFunction
def _finish_callback(address: int) -> int | None:
    return FfiCollectives.dispatch(address, FfiCollectives.handle_finish)


def _read_spans(frame: Any, start: int, stop: int) -> list[BufferSpan]:
    """Return the spans of a call's arguments and results ``start:stop``."""
    spans = []
    for i in range(start, stop):
        source, target = frame.arguments.buffers[i].contents, frame.results.buffers[i].contents
        n_items = 1
        for axis in range(source.rank):
            n_items *= source.dims[axis]
        spans.append(BufferSpan(source.data, target.data, n_items, _DTYPE_BY_XLA_NUMBER[source.dtype]))
    return spans


def _to_shape_struct(array: Array, shape: tuple[int, ...] | None = None) -> Any:
    import jax

    return jax.ShapeDtypeStruct(array.shape if shape is None else shape, array.dtype)
