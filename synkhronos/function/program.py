"""What a function computes, on any rank.

`Program`
    The user's inputs, outputs and updates, and the compiled functions made of them.
`Variant`, `Compiled`
    One of the ways in which a program is compiled, and what comes of it.

A program is compiled in variants, each when it is first called for: as the user wrote it; with rows chosen from the
sliceable shared variables; with updates returned, to be accumulated over slices; with a subset of the outputs.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from synkhronos.devices import HOST, Device
from synkhronos.engines import Engine, Runner, engine_of
from synkhronos.function.combine import Kinds
from synkhronos.function.reduce import Op
from synkhronos.graphs import GraphLibrary
from synkhronos.graphs.code import UserCode
from synkhronos.graphs.family import Input


class Variant(NamedTuple):
    """One of the ways in which a program is compiled."""

    #: How rows of the sliceable shared variables are chosen by additional inputs: "slice" by start and stop, "index" by
    #: a vector of indexes, None not at all.
    rows: str | None = None
    #: Whether the values for the user's updates are returned behind the outputs, and nothing is updated but random
    #: generators.
    accumulate: bool = False
    #: Which outputs; None for all.
    subset: tuple[int, ...] | None = None


#: As the user wrote it.
PLAIN = Variant()
#: What a program knows of where it computes.
_PLACED = ("engine", "device", "input_devices")


class Compiled(NamedTuple):
    """A compiled variant."""

    #: The graph library's.
    function: Callable[..., Any]
    #: How ranks run it.
    run: Runner
    #: Of its outputs.
    kinds: Kinds


@dataclass
class Program:
    """What a function computes."""

    #: First those that are scattered, then those that go whole to every rank.
    inputs: list[Input]
    n_scattered: int
    #: Variables, or the library's ``Out`` around them.
    outputs: list[Any]
    output_ops: list[Op]
    #: Pairs of a shared variable and an expression.
    updates: list[tuple[Any, Any]]
    update_ops: list[Op]
    #: Pairs of a variable and an expression.
    givens: list[tuple[Any, Any]]
    #: Shared variables.
    sliceable: list[Any]
    #: For the library's ``function``.
    kwargs: dict[str, Any]
    name: str
    #: Whose variables these are.
    library: GraphLibrary
    #: What this rank has compiled so far.
    compiled: dict[Variant, Compiled] = field(default_factory=dict)
    #: Memory that its device keeps for the rows that this rank picks for each input.
    buffers: dict[int, Any] = field(default_factory=dict)
    #: The user's own code in it that the workers have by name, once it has been sent.
    code: UserCode | None = None

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "compiled": {}, "buffers": {}, "code": None}
        # Where another process computes is for itself to say.
        for name in _PLACED:
            state.pop(name, None)
        return state

    def variables(self) -> list[Any]:
        """Return all variables that the program names."""
        return [
            *(entry.variable for entry in self.inputs),
            *(self.library.output_variable(output) for output in self.outputs),
            *(variable for pair in self.updates for variable in pair),
            *(variable for pair in self.givens for variable in pair),
            *self.sliceable,
        ]

    def shareds(self) -> list[Any]:
        """Return every shared variable that the program reads or writes."""
        return self.library.shareds(self.variables())

    @cached_property
    def engine(self) -> Engine:
        """What runs it."""
        return engine_of(self.library, self.kwargs.get("mode"))

    @property
    def compiles(self) -> str:
        """How ranks best compile it; see `GraphLibrary.compiles`."""
        return self.library.compiles(self.kwargs.get("mode"))

    @cached_property
    def device(self) -> Device:
        """What holds the values that it computes with."""
        return self.engine.device

    @cached_property
    def input_devices(self) -> list[Device]:
        """What holds the values of each input."""
        kinds = [entry.variable.type for entry in self.inputs]
        return [self.library.input_device(np.dtype(kind.dtype), kind.ndim, self.device) for kind in kinds]

    def devices_for(self, run: Runner) -> list[Device]:
        """Return what holds the values of each input that something takes which runs the program."""
        if not run.on_host:
            return self.input_devices
        return [HOST if i in run.on_host else device for i, device in enumerate(self.input_devices)]

    def check_kwargs(self) -> None:
        """Raise TypeError naming the keyword argument that can't be pickled, as it has to be for the workers."""
        for name, value in self.kwargs.items():
            try:
                pickle.dumps(value)
            except Exception as error:
                raise TypeError(
                    f"{name}: {type(value).__name__} can't be pickled, as it has to be for the workers: {error}; "
                    "it must not hold functions that are defined inside functions"
                    + ("; a mode's name can be passed in its place, such as 'NanGuardMode'" if name == "mode" else "")
                ) from error

    def place(self) -> None:
        """Forget what was compiled for another engine or device: the ranks may be others than before."""
        engine = engine_of(self.library, self.kwargs.get("mode"))
        if "device" in self.__dict__ and (self.engine, self.device) != (engine, engine.device):
            for name in _PLACED:
                self.__dict__.pop(name, None)
            self.compiled.clear()
            self.buffers.clear()

    def to_device(self) -> None:
        """Move the shared variables' values to the device."""
        if not self.device.takes_shareds:
            return
        library = self.library
        for shared in self.shareds():
            if library.is_array(shared) and isinstance(library.get(shared), np.ndarray):
                library.put(shared, self.device.from_host(library.get(shared)))

    def compile(self, variant: Variant) -> Compiled:
        """Return the compiled variant, compiling it now if it isn't yet."""
        compiled = self.compiled.get(variant)
        if compiled is None:
            chosen = range(len(self.outputs)) if variant.subset is None else variant.subset
            ops = [self.output_ops[i] for i in chosen]
            kinds = [self.library.output_variable(self.outputs[i]).type for i in chosen]
            function = self._compile(variant)
            n_inputs = len(self.inputs) + {None: 0, "index": 1, "slice": 2}[variant.rows]
            run = self.engine.runner(self.library, function, n_inputs, fetched=not variant.accumulate)
            compiled = self.compiled[variant] = Compiled(function, run, Kinds.of(kinds, ops, variant.accumulate))
        return compiled

    def _compile(self, variant: Variant) -> Callable[..., Any]:
        library = self.library
        inputs = [entry.wrapped for entry in self.inputs]
        outputs = self.outputs if variant.subset is None else [self.outputs[i] for i in variant.subset]
        kwargs = dict(self.kwargs)
        if variant != PLAIN:
            # A subset of the outputs may need a subset of the inputs, and some outputs no sliceable variable.
            kwargs["on_unused_input"] = "ignore"
        if variant.rows is None and not variant.accumulate:
            return library.function(inputs, outputs, updates=self.updates, givens=self.givens, **kwargs)

        updates = self.updates + self.default_updates
        variables = [library.output_variable(output) for output in outputs]
        expressions = [library.convert(shared, expression) for shared, expression in updates]
        targets, givens = [shared for shared, _ in updates], self.givens
        if variant.rows is not None:
            rows, cut = self._row_inputs(variant.rows)
            inputs = inputs + rows
            # What givens replace may lie inside the graph, and then it is the copy that has to be replaced.
            inside = [key if key.owner is not None else expression for key, expression in givens]
            given = [expression for _, expression in givens]
            cloned = library.clone([*variables, *expressions, *given, *inside], {s: cut(s) for s in self.sliceable})
            n, m, k = len(variables), len(expressions), len(given)
            variables, expressions, given, inside = (
                cloned[:n],
                cloned[n : n + m],
                cloned[n + m : n + m + k],
                cloned[n + m + k :],
            )
            givens = [
                (key if key.owner is None else copy, expression)
                for (key, _), copy, expression in zip(givens, inside, given, strict=True)
            ]
        outputs = [library.with_output_variable(o, v) for o, v in zip(outputs, variables, strict=True)]
        pairs = list(zip(targets, expressions, strict=True))
        if variant.accumulate:
            # Generators go on from slice to slice; all else that is updated must look the same to every slice.
            outputs = outputs + [expression for shared, expression in pairs if not library.is_generator(shared)]
            pairs = [(shared, expression) for shared, expression in pairs if library.is_generator(shared)]
            if any(not library.is_generator(shared) for shared, _ in self.default_updates):
                kwargs["no_default_updates"] = True
        return library.function(inputs, outputs, updates=pairs, givens=givens, **kwargs)

    def accumulated(self) -> list[tuple[Any, Op]]:
        """Return the shared variables whose updates are accumulated over slices, with their ops."""
        ops = self.update_ops + [_default_op(shared) for shared, _ in self.default_updates]
        return [
            (shared, op)
            for (shared, _), op in zip(self.updates + self.default_updates, ops, strict=True)
            if not self.library.is_generator(shared)
        ]

    @cached_property
    def default_updates(self) -> list[tuple[Any, Any]]:
        """The updates that the library would add by itself."""
        without = self.kwargs.get("no_default_updates", False)
        if without is True:
            return []
        excluded = {id(shared) for shared, _ in self.updates} | {id(v) for v in (without or [])}
        return [
            (shared, shared.default_update)
            for shared in self.shareds()
            if getattr(shared, "default_update", None) is not None and id(shared) not in excluded
        ]

    def _row_inputs(self, rows: str) -> tuple[list[Any], Callable[[Any], Any]]:
        tensor = self.library.tensor
        if rows == "slice":
            start, stop = tensor.lscalar("start"), tensor.lscalar("stop")
            return [start, stop], lambda shared: shared[start:stop]
        index = tensor.lvector("rows")
        return [index], lambda shared: shared[index]


def _default_op(shared: Any) -> Op:
    """Return the op of an update that the library would add: nobody named one, and an average of integers is none."""
    return Op(None if getattr(shared.type, "dtype", "") and np.dtype(shared.type.dtype).kind in "biu" else "avg")
