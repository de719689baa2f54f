"""A function's graph, and the variants in which each rank compiles it.

The master pickles a `Computation` and sends it to the workers, so that every rank compiles the same graph.  Each
variant is compiled at the first call that needs it:

==================  ================================================================================================
`DEFAULT_VARIANT`   the graph as the user wrote it
`row_selector`      the sliceable shared variables are sliced or indexed by additional inputs: ``batch_s``
`returns_updates`   the new values of the updates are returned, to be accumulated over slices: ``num_slices``
`output_subset`     only some of the outputs
==================  ================================================================================================
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from synkhronos.devices import NUMPY, Device
from synkhronos.devices.selection import Buffers
from synkhronos.engines import Engine, Runner, choose_engine
from synkhronos.engines.outputs import OutputSpec
from synkhronos.functions.rank_mean_context import count_rank_means
from synkhronos.graph_libraries import GraphLibrary
from synkhronos.graph_libraries.library import CompileOrder, InputSpec
from synkhronos.replication.replicator import SharedsOwner
from synkhronos.replication.user_code import UserCode
from synkhronos.variable_types import SharedVariable, Variable


class RowSelector(Enum):
    """Kind of the additional inputs that select rows of the sliceable shared variables."""

    #: A vector of indexes.
    INDEXES = "indexes"
    #: Two integers, start and stop.
    SLICE = "slice"

    @property
    def n_inputs(self) -> int:
        """Number of the additional inputs."""
        return 2 if self is RowSelector.SLICE else 1


class Variant(NamedTuple):
    """Options with which a computation is compiled."""

    #: None: all rows of the sliceable shared variables are used.
    row_selector: RowSelector | None = None
    #: Whether the new values of the updates are returned after the outputs.  Then only random generators are updated.
    returns_updates: bool = False
    #: Indexes of the outputs to compute; None for all.
    output_subset: tuple[int, ...] | None = None


#: Variant without options: the graph as the user wrote it.
DEFAULT_VARIANT = Variant()
#: Cached attributes of a computation that depend on the ranks' engine and device.
_ENGINE_ATTRIBUTES = ("engine", "device", "input_devices")


class CompiledVariant(NamedTuple):
    """A compiled variant of a computation."""

    #: The graph library's compiled function.
    function: Callable[..., Any]
    runner: Runner
    output_spec: OutputSpec
    #: Number of means over ranks within the function.
    n_rank_means: int = 0


@dataclass
class Computation(SharedsOwner):
    """The graph of a function, with its reductions and compiled variants."""

    #: The scattered inputs, then the broadcast inputs.
    inputs: list[InputSpec]
    n_scattered: int
    #: Variables, or instances of the library's ``Out``.
    outputs: list[Any]
    output_ops: list[str | None]
    #: The ops of the outputs as the user gave them, some with the prefix ``c_``.
    given_output_ops: list[str | None]
    #: Pairs of a shared variable and its new value.
    updates: list[tuple[Any, Any]]
    update_ops: list[str | None]
    #: The ops of the updates as the user gave them.
    given_update_ops: list[str | None]
    #: Substitutions in the graph.
    givens: list[tuple[Any, Any]]
    #: Shared variables whose rows ``batch_s`` selects and ``num_slices`` divides.
    sliceable_shareds: list[Any]
    #: Other arguments of the library's ``function``.
    library_kwargs: dict[str, Any]
    name: str
    library: GraphLibrary
    #: Variants that this rank has compiled.
    compiled_variants: dict[Variant, CompiledVariant] = field(default_factory=dict)
    #: Device memory for the selected rows of each input, by its position, and for their indexes, by "rows".
    buffers: defaultdict[int | str, Buffers] = field(default_factory=lambda: defaultdict(dict))
    #: User code that the workers import by name; None until the computation is sent.
    user_code: UserCode | None = None

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "compiled_variants": {}, "buffers": defaultdict(dict), "user_code": None}
        # A worker's variable keeps the default update of the first computation that used it, with that one's inputs.
        state["default_updates"] = self.default_updates
        # The process that unpickles it chooses its own engine and device.
        for name in _ENGINE_ATTRIBUTES:
            state.pop(name, None)
        return state

    def list_variables(self) -> list[Variable]:
        """Return the variables of all arguments: inputs, outputs, updates, givens and sliceable shared variables."""
        return [
            *(spec.variable for spec in self.inputs),
            *(self.library.get_output_variable(output) for output in self.outputs),
            *(variable for pair in self.updates for variable in pair),
            *(variable for pair in self.givens for variable in pair),
            *self.sliceable_shareds,
        ]

    def list_shareds(self) -> list[SharedVariable]:
        """Return every shared variable that the computation reads or writes."""
        return self.library.find_shareds(self.list_variables())

    def list_read_shareds(self) -> list[SharedVariable]:
        """Return the shared variables that the updates, and the outputs that are reduced over ranks, depend on.

        Variables that only outputs without a reduction read are omitted: these outputs come from the master alone.
        """
        outputs = [
            self.library.get_output_variable(output)
            for output, op in zip(self.outputs, self.output_ops, strict=True)
            if op is not None
        ]
        new_values = [value for _, value in self.updates + self.givens]
        variables = [v for v in outputs + new_values if self.library.is_variable(v)]
        replaced = {id(key) for key, _ in self.givens}
        return [shared for shared in self.library.find_shareds(variables) if id(shared) not in replaced]

    @cached_property
    def engine(self) -> Engine:
        """Engine that launches the compiled variants."""
        return choose_engine(self.library, self.library_kwargs.get("mode"))

    @property
    def compile_order(self) -> CompileOrder:
        """Order in which ranks compile the function."""
        return self.library.choose_compile_order(self.library_kwargs.get("mode"))

    @cached_property
    def device(self) -> Device:
        """Device that holds the values of the graph's variables."""
        return self.engine.device

    @cached_property
    def input_devices(self) -> list[Device]:
        """Device that holds each input's value."""
        types = [spec.variable.type for spec in self.inputs]
        return [
            self.device if self.device.accepts_input(np.dtype(variable_type.dtype), variable_type.ndim) else NUMPY
            for variable_type in types
        ]

    def choose_input_devices(self, runner: Runner) -> list[Device]:
        """Return the device of each input's value for a runner, which may take some inputs in host memory."""
        if not runner.host_input_positions:
            return self.input_devices
        return [NUMPY if i in runner.host_input_positions else device for i, device in enumerate(self.input_devices)]

    def check_kwargs_picklable(self) -> None:
        """Raise TypeError if a keyword argument can't be pickled."""
        for name, value in self.library_kwargs.items():
            try:
                pickle.dumps(value)
            except Exception as error:
                raise TypeError(
                    f"{name}: {type(value).__name__} can't be pickled, as it has to be for the workers: {error}; "
                    "it must not hold functions that are defined inside functions"
                    + ("; a mode's name can be passed in its place, such as 'NanGuardMode'" if name == "mode" else "")
                ) from error

    def reset_if_engine_changed(self) -> None:
        """Drop compiled variants and buffers of another engine or device, which an earlier session may have used."""
        engine = choose_engine(self.library, self.library_kwargs.get("mode"))
        if "device" in self.__dict__ and (self.engine, self.device) != (engine, engine.device):
            for name in _ENGINE_ATTRIBUTES:
                self.__dict__.pop(name, None)
            self.compiled_variants.clear()
            self.buffers.clear()

    def move_shareds_to_device(self) -> None:
        """Move the values of the computation's shared variables to the device, if the device requires it."""
        if not self.device.must_move_shared_values:
            return
        library = self.library
        for shared in self.list_shareds():
            if library.is_array(shared) and isinstance(library.borrow_value(shared), np.ndarray):
                library.store_value(shared, self.device.from_numpy(library.borrow_value(shared)))

    def get_or_compile(self, variant: Variant) -> CompiledVariant:
        """Return a compiled variant, which this rank compiles at the first request."""
        compiled = self.compiled_variants.get(variant)
        if compiled is None:
            subset = range(len(self.outputs)) if variant.output_subset is None else variant.output_subset
            types = [self.library.get_output_variable(self.outputs[i]).type for i in subset]
            ops = [self.output_ops[i] for i in subset]
            output_spec = OutputSpec.from_types(types, ops, variant.returns_updates)
            with self.library.use_default_updates(self.default_updates):
                function = self.compile_variant(variant)
            n_inputs = len(self.inputs) + (variant.row_selector.n_inputs if variant.row_selector else 0)
            runner = self.engine.make_runner(
                self.library, function, n_inputs, allows_opaque_outputs=not variant.returns_updates
            )
            compiled = CompiledVariant(function, runner, output_spec, count_rank_means(function))
            self.compiled_variants[variant] = compiled
        return compiled

    def compile_variant(self, variant: Variant) -> Callable[..., Any]:
        """Return the function that the graph library compiles for a variant."""
        library = self.library
        inputs = [spec.library_input for spec in self.inputs]
        outputs = self.outputs if variant.output_subset is None else [self.outputs[i] for i in variant.output_subset]
        kwargs = dict(self.library_kwargs)
        if variant != DEFAULT_VARIANT:
            # Some outputs may not need all inputs and sliceable variables.
            kwargs["on_unused_input"] = "ignore"
        if variant.row_selector is None and not variant.returns_updates:
            return library.function(inputs, outputs, updates=self.updates, givens=self.givens, **kwargs)

        updates = self.updates + self.default_updates
        variables = [library.get_output_variable(output) for output in outputs]
        expressions = [library.convert_to_type_of(shared, expression) for shared, expression in updates]
        targets, givens = [shared for shared, _ in updates], self.givens
        if variant.row_selector is not None:
            row_inputs, select = self._make_row_inputs(variant.row_selector)
            inputs = inputs + row_inputs
            # The key of a given may be computed from a sliceable variable.  Then its clone has to be replaced.
            keys = [key if key.owner is not None else expression for key, expression in givens]
            values = [expression for _, expression in givens]
            groups = [variables, expressions, values, keys]
            cloned = iter(
                library.clone([v for group in groups for v in group], {s: select(s) for s in self.sliceable_shareds})
            )
            variables, expressions, values, keys = ([next(cloned) for _ in group] for group in groups)
            givens = [
                (key if key.owner is None else clone, value)
                for (key, _), clone, value in zip(givens, keys, values, strict=True)
            ]
        outputs = [library.replace_output_variable(o, v) for o, v in zip(outputs, variables, strict=True)]
        pairs = list(zip(targets, expressions, strict=True))
        if variant.returns_updates:
            # Random generators advance from slice to slice.  Other variables keep their values until the last slice.
            accumulated = [(shared, expression) for shared, expression in pairs if not library.is_generator(shared)]
            outputs = outputs + [expression for _, expression in accumulated]
            pairs = [(shared, expression) for shared, expression in pairs if library.is_generator(shared)]
            if any(getattr(shared, "default_update", None) is not None for shared, _ in accumulated):
                kwargs["no_default_updates"] = True
        return library.function(inputs, outputs, updates=pairs, givens=givens, **kwargs)

    def list_accumulated_updates(self) -> list[tuple[SharedVariable, str | None]]:
        """Return the shared variables whose updates are accumulated over slices, with their ops."""
        ops = self.update_ops + [_choose_default_update_op(shared) for shared, _ in self.default_updates]
        return [
            (shared, op)
            for (shared, _), op in zip(self.updates + self.default_updates, ops, strict=True)
            if not self.library.is_generator(shared)
        ]

    @cached_property
    def default_updates(self) -> list[tuple[SharedVariable, Variable]]:
        """Default updates, which the library's ``function`` adds to the given ones."""
        no_default_updates = self.library_kwargs.get("no_default_updates", False)
        if no_default_updates is True:
            return []
        excluded = {id(shared) for shared, _ in self.updates} | {id(v) for v in (no_default_updates or [])}
        return [
            (shared, shared.default_update)
            for shared in self.list_shareds()
            if getattr(shared, "default_update", None) is not None and id(shared) not in excluded
        ]

    @cached_property
    def updated_sliceable(self) -> SharedVariable | None:
        """The first of the sliceable shared variables that the function updates, or None."""
        updated_ids = {id(shared) for shared, _ in self.updates + self.default_updates}
        return next((shared for shared in self.sliceable_shareds if id(shared) in updated_ids), None)

    def _make_row_inputs(self, row_selector: RowSelector) -> tuple[list[Any], Callable[[Any], Any]]:
        """Return additional inputs, and a function that maps a shared variable to the rows that they select."""
        tensor = self.library.tensor
        if row_selector is RowSelector.SLICE:
            start, stop = tensor.lscalar("start"), tensor.lscalar("stop")
            return [start, stop], lambda shared: shared[start:stop]
        index = tensor.lvector("rows")
        return [index], lambda shared: shared[index]


def _choose_default_update_op(shared: SharedVariable) -> str | None:
    """Return the op of a default update: "avg", or None for integers, whose average may not be an integer."""
    is_integer = getattr(shared.type, "dtype", "") and np.dtype(shared.type.dtype).kind in "biu"
    return None if is_integer else "avg"
