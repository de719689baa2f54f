"""XLA programs of one or several PyTensor functions in JAX mode."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import chain, repeat, starmap
from operator import setitem
from typing import Any

import numpy as np

from synkhronos.devices import JAX
from synkhronos.devices.jax.ffi_collectives import FfiCollectives
from synkhronos.devices.jax.scalar_log import LOG_CAPACITY, ScalarLog
from synkhronos.engines.engine import Runner
from synkhronos.engines.xla.trace import trace_functions, trace_loop
from synkhronos.engines.xla.traced_exchange import ExchangeSpec
from synkhronos.graph_libraries.library import find_referenced_storages, get_storage
from synkhronos.lowering.jax_function import JaxFunction
from synkhronos.lowering.precision import COMPILER_OPTIONS, is_bfloat16_requested
from synkhronos.ranks.interrupts import defer_signals

#: Fused executables that an executable caches, the most recently used ones.
_MAX_FUSED_EXECUTABLES = 16

# XLA's autotuning measures kernels and takes the fastest.  Ranks that compute the same update from a reduced gradient
# could take different ones, whose sums are rounded in different ways, and their parameters would drift apart.
#: Compiler option without which XLA measures kernels of fused sums, such as a gradient's norm.
_FUSION_AUTOTUNING_OPTION = "xla_gpu_experimental_enable_fusion_autotuner"
#: Compiler options of a program that also multiplies matrices in the update.
_NO_AUTOTUNING = {"xla_gpu_autotune_level": 0}


class Executable(Runner):
    """One or several PyTensor functions in JAX mode, as one XLA program of device arrays.

    PyTensor's own call copies NumPy inputs, and NumPy values of shared variables, to the device at each call.  This
    class calls the same compiled graphs with the values in the variables' storages.  A NumPy value that the user has
    set is moved to the device once.

    The memory of an updated shared variable is donated: XLA writes the new value into it.  As a donated array becomes
    invalid, an array with other references (``get_value(borrow=True)``) is copied first.

    Parameters
    ----------
    spec : ExchangeSpec, optional
        Exchange of a variable that the first function updates.  The other functions read the reduced value.
    logs_scalars : bool
        Whether to return scalar outputs as `LogEntry` objects.
    n_repeats : int
        As in `Runner`.  If it is greater than 1, all outputs must be logged scalars.

    Attributes
    ----------
    ffi_collectives : FfiCollectives or None
        Collectives in the program, which need a `LaunchCollectives` or a communicator in each call; None without
        ``spec``.
    """

    def __init__(
        self,
        functions: Sequence[JaxFunction],
        spec: ExchangeSpec | None = None,
        logs_scalars: bool = False,
        n_repeats: int = 1,
    ):
        import jax
        import jax.numpy as jnp

        # PyTensor's dispatchers, imported when the first function is compiled, disable this option where floatX is
        # float32.  If it were enabled after the first call, JAX would compile the function again.
        jax.config.update("jax_enable_x64", True)
        # A new value can't use the memory of an old value of another shape, which is not an error.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        self._functions = list(functions)
        self._logs_scalars, self.n_repeats = logs_scalars, n_repeats
        self.ffi_collectives = None if spec is None else FfiCollectives(nccl_call_mode=spec.nccl_call_mode, op=spec.op)
        self.collectives = () if spec is None else spec.collectives
        self._fused_executables: dict[Any, Executable] = {}
        self._signatures: set[Any] = set()
        self._n_inputs = sum(function.n_inputs for function in functions)
        self._storages = _remove_duplicates([storage for function in functions for storage in function.storages])
        # These are in the order of the storages, since JAX gives each new value the memory of the first donated array
        # of its shape.  In another order, XLA would copy arrays, and addresses would change from launch to launch.
        updated_ids = {id(storage) for function in functions for storage in function.result_storages}
        self._updated_storages = [storage for storage in self._storages if id(storage) in updated_ids]
        self._donated_storages = _remove_duplicates(
            [storage for function in functions for storage in function.donated_storages]
        )
        self._copy_array = jnp.copy
        length_graph = functions[0].length_graph
        #: Inputs whose values determine the lengths of arrays.
        self.host_input_positions = (
            frozenset() if length_graph is None else frozenset(length_graph.length_input_positions)
        )
        self._has_lengths = any(function.length_graph is not None for function in functions)
        assert len(functions) == 1 or not self._has_lengths
        types = [t for function in functions for t in function.output_types]
        #: Positions and dtypes of the outputs that are logged, and storages of the other outputs of a launch.
        self._logged_positions = [i for i, t in enumerate(types) if logs_scalars and getattr(t, "ndim", None) == 0]
        self._logged_dtypes = [np.dtype(types[i].dtype) for i in self._logged_positions]
        result_storages = [
            storage for function in functions for storage in function.result_storages[: function.n_outputs]
        ]
        self._output_storages = [
            storage for i, storage in enumerate(result_storages) if i not in self._logged_positions
        ]
        self._scalar_log = ScalarLog(self._logged_dtypes) if self._logged_positions or n_repeats > 1 else None
        self._is_launching = False
        #: Whether JAX has compiled the next launch, so that its Python code does not take part.  Lengths may be new at
        #: any launch.
        self._is_compiled = False
        #: JAX's types of the storages' values, each an object with a shape and a dtype, at the last launch.
        self._array_types: list[Any] = []
        self._program = self._make_program(spec)

    def _make_program(self, spec: ExchangeSpec | None) -> Callable[..., Any]:
        """Return the program: a jitted function of the arguments of `_get_arguments`."""
        import jax

        donated_ids = {id(storage) for storage in self._donated_storages}
        donated = [self._n_inputs + i for i, storage in enumerate(self._storages) if id(storage) in donated_ids]
        if self._scalar_log is not None:
            n_arguments = self._n_inputs + len(self._storages)
            donated += range(n_arguments, n_arguments + len(self._scalar_log.storages))
        # The program does not refer to self: a cycle would leave the memory to the garbage collector.
        is_in_loop = self.n_repeats > 1
        compute = partial(trace_functions, self._functions, spec, self.ffi_collectives)
        compute = partial(compute, self._storages, self._updated_storages, self._logged_positions, is_in_loop)
        options: dict[str, Any] = {}
        if self._has_lengths:
            # Lengths are the first argument, and static: XLA compiles anew for others.
            donated, options["static_argnums"] = [position + 1 for position in donated], 0
        else:
            compute = partial(compute, ())
        if is_in_loop:
            positions = {id(storage): i for i, storage in enumerate(self._storages)}
            logs = range(len(positions), len(positions) + 1 + len(self._logged_positions))
            updated = [*(positions[id(storage)] for storage in self._updated_storages), *logs]
            compute = partial(trace_loop, compute, self.n_repeats, self._n_inputs, updated)
        compiler_options: dict[str, Any] = dict(COMPILER_OPTIONS) if is_bfloat16_requested() else {}
        if JAX.is_on_gpu:
            if _is_option_known(_FUSION_AUTOTUNING_OPTION):
                compiler_options[_FUSION_AUTOTUNING_OPTION] = False
            if self._is_update_with_products:
                compiler_options |= _NO_AUTOTUNING
        options["compiler_options"] = compiler_options or None
        # keep_unused: old values that no computation reads donate their memory, too.  Addresses then stay the same, and
        # XLA can replay recorded launches.
        options |= {"donate_argnums": tuple(donated), "keep_unused": True}
        program: Callable[..., Any] = jax.jit(compute, **options)
        return program

    @property
    def _is_update_with_products(self) -> bool:
        """Whether the program only updates variables, so that every rank computes the same, and multiplies matrices."""
        is_update = not self._n_inputs and not any(function.n_outputs for function in self._functions)
        return is_update and any(function.has_products for function in self._functions)

    def fuse(
        self, spec: ExchangeSpec | None = None, others: Sequence[Executable] = (), n_repeats: int = 1
    ) -> Executable | None:
        """Fuse this executable, an exchange and other executables into one launch that computes ``n_repeats`` times.

        The same arguments return the same object.  Return None in four cases: values of inputs determine lengths of
        arrays, this executable does not update the reduced variable, another one multiplies matrices on a GPU (its
        program is not autotuned, and this one should be), or ``n_repeats > 1`` and an output is not a scalar.
        """
        key = spec and spec.key, *others, n_repeats
        fused = self._fused_executables.pop(key, None)
        if fused is None:
            executables = [self, *others]
            if not _can_fuse(executables, spec, n_repeats):
                return None
            functions = [function for executable in executables for function in executable._functions]
            assert len(functions) == len(executables)  # a fused executable would lose its exchange
            while len(self._fused_executables) >= _MAX_FUSED_EXECUTABLES:
                del self._fused_executables[next(iter(self._fused_executables))]
            fused = Executable(functions, spec, self._logs_scalars, n_repeats)
        self._fused_executables[key] = fused  # the most recently used one is last
        return fused

    def get_repeated(self, n_repeats: int) -> Executable | None:
        return self if n_repeats == 1 else self.fuse(n_repeats=n_repeats)

    def record_signature_if_new(self, inputs: Sequence[Any]) -> bool:
        signature = tuple([getattr(value, "shape", ()) for value in inputs])
        if signature in self._signatures:
            return False
        self._signatures.add(signature)
        self._is_compiled = False
        return True

    def __call__(self, *inputs: Any) -> list[Any]:
        """Launch the program.  Return its outputs, which may not be computed yet."""
        try:
            array_types: list[Any] | None = [storage[0].aval for storage in self._storages]
        except AttributeError:  # a value is NumPy's
            array_types = None
        if array_types != self._array_types:  # a value was set, perhaps of another shape
            for storage in self._storages:
                if type(storage[0]) is np.ndarray:
                    storage[0] = JAX.from_numpy(storage[0])
            self._is_compiled = False
            self._array_types = [getattr(storage[0], "aval", None) for storage in self._storages]
        for storage in find_referenced_storages(self._donated_storages):
            with defer_signals():  # as in ScalarLog.__init__
                storage[0] = self._copy_array(storage[0])
        if self._scalar_log is not None and (self._is_launching or not self._scalar_log.has_capacity(self.n_repeats)):
            self._scalar_log = ScalarLog(self._logged_dtypes)
        arguments = self._get_arguments(inputs)
        JAX.order_launch_after_copies()
        # Stays True after an interrupt between the launch, which appends to the log, and the update of the number of
        # entries.  Then the next launch gets a new log.
        self._is_launching = True
        try:
            if self._is_compiled:
                self._launch(arguments)
            else:  # an interrupt in JAX's Python code could discard the new values after the old ones are deleted
                with defer_signals():
                    self._launch(arguments)
            self._is_compiled = not self._has_lengths
        finally:
            del arguments  # an error's traceback would keep the arrays alive
        results = self._pop_results()
        self._is_launching = False
        return results

    def wait(self, results: Sequence[Any]) -> None:
        logs = [] if self._scalar_log is None else self._scalar_log.storages
        JAX.wait([*results, *(storage[0] for storage in (*self._updated_storages, *logs))])

    def _pop_results(self) -> list[Any]:
        """Return the outputs of the last launch, and clear their storages."""
        if self._n_inputs:
            JAX.finish_launch(storage[0] for storage in (*self._output_storages, *self._updated_storages))
        results = [storage[0] for storage in self._output_storages]
        for storage in self._output_storages:
            storage[0] = None  # frees the memory before the next call
        if self._scalar_log is not None:
            for position, entries in zip(
                self._logged_positions, self._scalar_log.record_launch(self.n_repeats), strict=True
            ):
                results[position * self.n_repeats : position * self.n_repeats] = entries
        return results

    def _launch(self, arguments: list[Any]) -> None:
        """Launch, and store the results in their storages.

        Unless JAX compiles, no Python instruction is executed in between, so that no interrupt is raised: after the
        launch the old values are deleted, and the new values have no other references.
        """
        storages = [
            *self._output_storages,
            *self._updated_storages,
            *([] if self._scalar_log is None else self._scalar_log.storages),
        ]
        results = chain.from_iterable(starmap(self._program, (arguments,)))
        deque(map(setitem, storages, repeat(0), results), maxlen=0)

    def _get_arguments(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the program's arguments: lengths, inputs, the storages' values, the arrays of the log."""
        logs = [] if self._scalar_log is None else self._scalar_log.storages
        lengths = []
        if self._has_lengths:
            (function,) = self._functions
            # The inputs are copied, as the user may overwrite them before the launch has been computed.
            inputs = [np.array(v) if i in self.host_input_positions else v for i, v in enumerate(inputs)]
            lengths = [function.compute_lengths(inputs)]
        return [*lengths, *inputs, *[storage[0] for storage in (*self._storages, *logs)]]


def _can_fuse(executables: Sequence[Executable], spec: ExchangeSpec | None, n_repeats: int) -> bool:
    """Whether executables can be fused into one launch; see `Executable.fuse`."""
    if any(executable._has_lengths for executable in executables):
        return False
    if n_repeats > 1 and (n_repeats > LOG_CAPACITY or any(executable._output_storages for executable in executables)):
        return False
    if spec is None:
        return True
    if JAX.is_on_gpu and any(executable._is_update_with_products for executable in executables[1:]):
        return False
    needed = [(spec.storage, executables[0]._functions[0].result_storages)]
    if spec.shards is not None:
        needed.append((get_storage(spec.shards.row), executables[1]._storages))
    return all(any(storage is item for item in storages) for storage, storages in needed)


def _remove_duplicates(lists: Sequence[list[Any]]) -> list[list[Any]]:
    """Return lists without duplicates, compared by identity, in the order of their first occurrence."""
    return list({id(items): items for items in lists}.values())


@cache
def _is_option_known(name: str) -> bool:
    """Whether XLA has a boolean compiler option; experimental ones are removed at times."""
    import jax

    try:
        with defer_signals():  # as in StaticLengthLinker.jit_compile
            jax.jit(lambda x: x, compiler_options={name: False}).lower(np.int8(0)).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True
