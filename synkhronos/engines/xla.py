"""Functions that XLA compiles: PyTensor's in JAX mode.

An `Executable` is one XLA program.  It consists of one or several PyTensor functions, takes the inputs and the values
of all shared variables, and returns the outputs and the variables' new values::

                      ┌────────────────────────── one launch ──────────────────────────┐
    inputs ─────────> │ gradient function ──> all-reduce (`FusedReduction`) ──> update │ ──> outputs
    shared variables  │                                                    function    │ ──> new values
    (donated) ──────> └────────────────────────────────────────────────────────────────┘

The all-reduce is a foreign function that XLA calls during the launch (`devices.jax.ffi`).  `_FusedRunner` binds a
`LaunchReducer` to the program's `ProgramReduction`.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import chain, repeat, starmap
from operator import setitem
from typing import Any

import numpy as np

from synkhronos.devices import JAX, Device
from synkhronos.devices.jax.ffi import ProgramReduction
from synkhronos.devices.jax.scalar_log import LOG_CAPACITY, ScalarLog
from synkhronos.engines.base import GradientReduction, Runner
from synkhronos.engines.lazy import LazyEngine
from synkhronos.engines.xla_trace import FusedReduction, trace_functions, trace_loop, trace_with_lengths
from synkhronos.graphs import GraphLibrary
from synkhronos.graphs.library import is_referenced
from synkhronos.lowering.jax_function import JaxFunction
from synkhronos.lowering.precision import COMPILER_OPTIONS, computes_in_bfloat16
from synkhronos.ranks import Rank
from synkhronos.ranks.interrupts import defer_signals

#: Fused executables that a function caches, the most recently used ones.
_MAX_FUSED = 16


class Executable(Runner):
    """One or several PyTensor functions in JAX mode, as one XLA program of device arrays.

    PyTensor's own call takes NumPy inputs, and leaves the values of shared variables where they are, so that NumPy
    values are copied to the device at each call.  This class calls the same compiled graphs with the storages' values.
    NumPy arrays that the user has put there are moved to the device once.

    The memory of an updated shared variable is donated: XLA writes the new value into it.  An array with further
    references (``get_value(borrow=True)``) is copied before, as a donated array becomes invalid.

    Parameters
    ----------
    functions : list of JaxFunction
        Computed in this order in one launch.
    reduction : FusedReduction, optional
        Of a variable that the first function updates; the others read the reduced value.
    logs_scalars : bool
        Whether to return scalar outputs as `LogEntry` objects.
    times : int
        As in `Runner`.  If it is more than 1, all outputs must be logged scalars.

    Attributes
    ----------
    program_reduction : ProgramReduction or None
        The all-reduce in the program, to be bound to a reducer for each call; None without ``reduction``.
    """

    def __init__(
        self,
        functions: Sequence[JaxFunction],
        reduction: FusedReduction | None = None,
        logs_scalars: bool = False,
        times: int = 1,
    ):
        import jax
        import jax.numpy as jnp

        # PyTensor's dispatchers, imported when the first function is compiled, turn this off where floatX is float32.
        # Turning it on after the first call would compile that function again.
        jax.config.update("jax_enable_x64", True)
        self._functions = list(functions)
        self._logs_scalars, self.times = logs_scalars, times
        self.program_reduction = None if reduction is None else ProgramReduction(calls=reduction.calls, op=reduction.op)
        self._fused: dict[Any, Executable] = {}
        self._signatures: set[Any] = set()
        self._n_inputs = sum(function.n_inputs for function in functions)
        self._storages = _remove_duplicates([storage for function in functions for storage in function.storages])
        #: Cells for the results of a launch: first the outputs, then the updated storages.
        self._outputs = [cell for function in functions for cell in function.cells[: function.n_outputs]]
        # In the order of the storages: JAX gives each new value the memory of the first donated array of its shape.  In
        # another order XLA would copy arrays, and addresses would change from launch to launch.
        updated = {id(cell) for function in functions for cell in function.cells}
        self._updated = [storage for storage in self._storages if id(storage) in updated]
        self._donated = _remove_duplicates([storage for function in functions for storage in function.donated])
        self._copy = jnp.copy
        self._log: ScalarLog | None = None
        self._is_interrupted = False
        #: Inputs whose values decide the lengths of arrays.
        self.host_inputs = frozenset(
            position
            for function in functions[:1]
            if function.length_graph is not None
            for position in function.length_graph.deciding_inputs
        )
        self._has_lengths = any(function.length_graph is not None for function in functions)
        assert len(functions) == 1 or not self._has_lengths
        types = [kind for function in functions for kind in function.types]
        self._logged = [i for i, kind in enumerate(types) if logs_scalars and getattr(kind, "ndim", None) == 0]
        self._dtypes = [np.dtype(types[i].dtype) for i in self._logged]
        self._outputs = [cell for i, cell in enumerate(self._outputs) if i not in self._logged]
        if self._logged or times > 1:
            self._log = ScalarLog(self._dtypes)
        # A new value of another shape than the old one can't reuse its memory, which is no error.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        donated = {id(storage) for storage in self._donated}
        positions = [self._n_inputs + i for i, storage in enumerate(self._storages) if id(storage) in donated]
        if self._log is not None:
            n_arguments = self._n_inputs + len(self._storages)
            positions += range(n_arguments, n_arguments + len(self._log.cells))
        # keep_unused: old values that no computation reads still donate their memory, so that addresses stay the same
        # and XLA can replay recorded launches.
        options = COMPILER_OPTIONS if computes_in_bfloat16() else None
        # No reference to self: the cycle would leave its memory to the garbage collector.
        run = partial(
            trace_functions,
            self._functions,
            reduction,
            self.program_reduction,
            self._storages,
            self._updated,
            self._logged,
        )
        if times > 1:
            index = {id(storage): i for i, storage in enumerate(self._storages)}
            logs = range(len(index), len(index) + 1 + len(self._logged))
            changed = [*(index[id(cell)] for cell in self._updated), *logs]
            run = partial(trace_loop, partial(run, in_loop=True), times, self._n_inputs, changed)
        if self._has_lengths:
            # Lengths are the first argument, and static: XLA compiles anew for others.
            run, positions = partial(trace_with_lengths, run), [position + 1 for position in positions]
        static = {"static_argnums": 0} if self._has_lengths else {}
        # Each time another function object: JAX would return the program that it has compiled for the same one.
        self._jit = lambda: jax.jit(
            partial(run), donate_argnums=tuple(positions), keep_unused=True, compiler_options=options, **static
        )
        self._run, self._serial = self._jit(), 0

    def fuse(
        self, reduction: FusedReduction | None = None, then: Executable | None = None, times: int = 1
    ) -> Executable | None:
        """Fuse this executable, a reduction and another executable into one launch, which computes ``times`` times.

        Returns
        -------
        Executable or None
            The same object for the same arguments.  None if values of inputs decide shapes, if the reduced variable is
            not updated here, or if ``times > 1`` and an output is no scalar.
        """
        key = reduction and (id(reduction.storage), *reduction[1:]), then, times
        fused = self._fused.pop(key, None)
        if fused is None:
            executables = [self] if then is None else [self, then]
            can_fuse = reduction is None or any(cell is reduction.storage for cell in self._functions[0].cells)
            can_fuse = can_fuse and not any(each._has_lengths for each in executables)
            if times > 1:
                can_fuse = can_fuse and times <= LOG_CAPACITY and not any(each._outputs for each in executables)
            if not can_fuse:
                return None
            functions = [function for each in executables for function in each._functions]
            assert len(functions) == len(executables)  # a fused executable would lose its reduction
            while len(self._fused) >= _MAX_FUSED:
                del self._fused[next(iter(self._fused))]
            fused = Executable(functions, reduction, self._logs_scalars, times)
        self._fused[key] = fused  # most recently used: last
        return fused

    def repeat(self, times: int) -> Executable | None:
        """Return the executable that computes ``times`` times in one launch; None if there is none."""
        return self if times == 1 else self.fuse(times=times)

    def is_new_signature(self, inputs: Sequence[Any]) -> bool:
        """Whether XLA compiles for these inputs: True at the first call with inputs of their shapes."""
        signature = tuple([getattr(value, "shape", ()) for value in inputs])
        if signature in self._signatures:
            return False
        self._signatures.add(signature)
        return True

    def bind_connection(self, serial: int) -> None:
        """Drop what XLA has recorded as CUDA graphs for another connection: it contains that one's communicator."""
        if serial != self._serial:
            if self._serial:
                self._run = self._jit()
                self._signatures.clear()
            self._serial = serial

    def __call__(self, *inputs: Any) -> list[Any]:
        """Launch the program; return its outputs, which may not be computed yet."""
        for storage in self._storages:
            if type(storage[0]) is np.ndarray:
                storage[0] = JAX.from_host(storage[0])
        for storage in self._donated:
            if is_referenced(storage):
                with defer_signals():  # as in ScalarLog.__init__
                    storage[0] = self._copy(storage[0])
        if self._log is not None and (self._is_interrupted or not self._log.has_capacity(self.times)):
            self._log = ScalarLog(self._dtypes)
        arguments = self._get_arguments(inputs)
        JAX.before_launch()
        # An interrupt may come between the launch, which appends to the log, and the log's count of its entries.
        self._is_interrupted = True
        try:
            self._launch(arguments)
        finally:
            del arguments  # an error's traceback would keep the arrays alive
        results = self._take_results()
        self._is_interrupted = False
        return results

    def wait(self, results: Sequence[Any]) -> None:
        """Wait until the last launch is computed."""
        import jax

        logs = [] if self._log is None else self._log.cells
        jax.block_until_ready([*(r for r in results if JAX.owns(r)), *(cell[0] for cell in (*self._updated, *logs))])

    def _take_results(self) -> list[Any]:
        """Return the outputs of the last launch, and clear their cells."""
        if self._n_inputs:
            JAX.after_launch([cell[0] for cell in (*self._outputs, *self._updated)])
        results = [cell[0] for cell in self._outputs]
        for cell in self._outputs:
            cell[0] = None  # frees the memory before the next call
        if self._log is not None:
            for position, entries in zip(self._logged, self._log.add_entries(self.times), strict=True):
                results[position * self.times : position * self.times] = entries
        return results

    def _launch(self, arguments: list[Any]) -> None:
        """Launch, and store the results in their cells.

        In C without a Python instruction in between, so that an interrupt is raised only when both are done: after the
        launch the old values are deleted, and the new ones are referenced by nothing else.
        """
        cells = [*self._outputs, *self._updated, *([] if self._log is None else self._log.cells)]
        results = chain.from_iterable(starmap(self._run, (arguments,)))
        deque(map(setitem, cells, repeat(0), results), maxlen=0)

    def _get_arguments(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the program's arguments: lengths, inputs, the storages' values, the log."""
        logs = [] if self._log is None else self._log.cells
        lengths = []
        if self._has_lengths:
            (function,) = self._functions
            # Copied, as the user may write into an input before the launch has been computed.
            inputs = [np.array(v) if i in self.host_inputs else v for i, v in enumerate(inputs)]
            lengths = [function.compute_lengths(inputs)]
        return [*lengths, *inputs, *[cell[0] for cell in (*self._storages, *logs)]]


def _remove_duplicates(lists: Sequence[list[Any]]) -> list[list[Any]]:
    """Return lists without duplicates, compared by identity, in the order of their first occurrence."""
    return list({id(each): each for each in lists}.values())


# -- launches with an all-reduce -------------------------------------------------------------------------------


class _FusedRunner(Runner):
    """An executable with an all-reduce, which all ranks launch together.

    Parameters
    ----------
    rank : Rank
    executable : Executable
    reduction : GradientReduction
    """

    def __init__(self, rank: Rank, executable: Executable, reduction: GradientReduction):
        self._rank, self._executable, self._reduction = rank, executable, reduction
        self.times = executable.times
        assert executable.program_reduction is not None
        self._program_reduction = executable.program_reduction

    def is_new_signature(self, inputs: Sequence[Any]) -> bool:
        """Whether XLA compiles for these inputs: True at the first call with inputs of their shapes."""
        return self._executable.is_new_signature(inputs)

    def __call__(self, *inputs: Any) -> list[Any]:
        """Launch, and wait until all ranks have launched."""
        communicator, shape = self._reduction.gather_layout(self._rank)
        # No signal handler may raise within XLA's callbacks.  Once this rank has launched, all others will in a moment:
        # then the updates are valid on all ranks, or, if one of them fails, on none.
        with defer_signals() as signals:
            launch = self._launch if self._program_reduction.calls == "python" else self._launch_native
            results = launch(inputs, communicator, shape)
            signals.restart_patience()
            communicator.wait_started(signals.deliver_if_late)
            self._rank.commit()
        return results

    def _launch(self, inputs: Sequence[Any], communicator: Any, shape: tuple[int, ...]) -> list[Any]:
        reducer = LaunchReducer(self._rank, communicator, self._program_reduction.op, shape, self.times > 1)
        with self._program_reduction.bind(reducer, self.times):
            return self._executable(*inputs)

    def _launch_native(self, inputs: Sequence[Any], communicator: Any, shape: tuple[int, ...]) -> list[Any]:
        if self._program_reduction.calls == "graph":
            self._executable.bind_connection(communicator.serial)
        with self._program_reduction.bind_native(communicator, shape, self.times):
            try:
                return self._executable(*inputs)
            finally:
                if self.times > 1:
                    self._rank.commit()  # an earlier step may be valid although a later one fails


class LaunchReducer:
    """All-reduce of the ranks' gradients during one launch, called by XLA (`devices.jax.ffi.Reducer`).

    Parameters
    ----------
    rank : Rank
    communicator : NcclCommunicator
    op : str
    shape : tuple of int
        Shape of the gradient on all ranks.
    is_repeated : bool
        Whether the launch makes several all-reduces.
    """

    def __init__(self, rank: Rank, communicator: Any, op: str, shape: tuple[int, ...], is_repeated: bool):
        self._rank, self._communicator, self._op, self._is_repeated = rank, communicator, op, is_repeated
        self._shape = shape
        self._n_started = 0

    def start(self, spans: Sequence[Any], stream: int | None) -> None:
        """Start to reduce a chunk of the gradient, overlapping the stream's next work."""
        self._communicator.start_in_launch(spans, self._op, stream)
        self._n_started += sum(span.n_items for span in spans)

    def finish(self, spans: Sequence[Any], is_valid: int, stream: int | None) -> None:
        """Reduce the rest of the gradient, and make the stream wait for all of it.

        Parameters
        ----------
        spans : list of ReduceSpan
        is_valid : int
            Address of an int32 on the GPU: 0 before a valid reduction, 1 after it.
        stream : int

        Raises
        ------
        ValueError
            If the gradient has not the shape that all ranks have.
        """
        if self._is_repeated:
            self._rank.commit()  # an earlier step may be valid although a later one fails
        n_items, self._n_started = self._n_started + sum(span.n_items for span in spans), 0
        if n_items != math.prod(self._shape):
            self.wait(stream)
            raise ValueError(f"all_reduce: expected shape {self._shape}, as before the launch, got {n_items} items")
        self._communicator.finish_in_launch(spans, self._op, is_valid, stream)

    def wait(self, stream: int | None) -> None:
        """Make the stream wait for the chunks that were started, after an error."""
        self._communicator.wait_in_launch(stream)


class XlaEngine(LazyEngine):
    """Launches PyTensor's functions in JAX mode."""

    fixed_lengths = True

    def can_run(self, library: GraphLibrary, mode: Any) -> bool:
        """Whether the mode is JAX mode."""
        return library.is_xla_mode(mode)

    @property
    def device(self) -> Device:
        """JAX arrays."""
        return JAX

    def make_runner(self, library: GraphLibrary, function: Any, n_inputs: int, is_fetched: bool) -> Runner:
        """Make an executable; it returns scalars as log entries if only `fetch` reads them."""
        return Executable([JaxFunction(function, n_inputs, JAX)], logs_scalars=is_fetched)

    def fuse_step(
        self, rank: Rank, first: Runner, reduction: GradientReduction, second: Runner, times: int
    ) -> Runner | None:
        """Fuse two executables and NCCL's all-reduce into one launch; None if that is impossible.

        Ranks need not agree on the answer.  Those that fuse and those that don't pass the same steps of the command.
        """
        assert isinstance(first, Executable) and isinstance(second, Executable)
        if rank.size == 1:
            return first.fuse(then=second, times=times)
        shared = reduction.get_shared(rank)
        value = shared.container.storage[0]
        # A value that the user has set may have to be moved or cast first, by an unfused step.
        if not JAX.owns(value) or value.dtype != shared.type.dtype or not JAX.can_reduce_in_launch(value.dtype):
            return None
        # Values that are sent in another dtype are divided by the program.
        op = "sum" if reduction.wire_dtype else reduction.op
        fused_reduction = FusedReduction(
            shared.container.storage, reduction.wire_dtype, rank.size, reduction.tail, JAX.nccl_calls, op
        )
        fused = first.fuse(fused_reduction, second, times=times)
        return None if fused is None else _FusedRunner(rank, fused, reduction)

    def max_repeats(self, dtype: np.dtype | None = None) -> int:
        """Return the log's capacity; 1 on the CPU, where XLA computes convolutions in loops with a single thread."""
        can_repeat = JAX.is_on_gpu if dtype is None else JAX.can_reduce_in_launch(dtype)
        return LOG_CAPACITY if can_repeat else 1


ENGINE = XlaEngine()
