"""Lengths that follow from a function's integer inputs, in JAX mode.

`LengthGraph`
    A graph in JAX mode in which such lengths are inputs of their own, and what computes them on the host.
`extract_lengths`
    Makes one, where a graph has such lengths.
`indices_of`
    The indexes of an Op.
`of_numbers`
    What computes an operation on Python's numbers.
`decisive`
    The inputs of a node that decide shapes.
`SlicedSubtensor`
    Indexing with slices whose lengths are given.

XLA compiles for fixed shapes.  The rows ``x[i * b:(i + 1) * b]`` have a length that depends on the value of ``i``, as
do an array of ``n`` zeros or ``k`` steps of a loop.  So whatever decides a length in a graph, and follows from inputs
without dimensions and from the inputs' shapes alone, is cut out of it: the host computes it at each call, and XLA gets
it as a constant.  It compiles once for each set of lengths, which is once for all ``i`` but the last.  Where a slice
begins is computed by XLA.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from pytensor.compile.builders import infer_shape
from pytensor.graph.basic import Apply, Constant
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op
from pytensor.graph.traversal import io_toposort
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar.basic import EQ, GE, GT, LE, LT, NEQ, Add, Composite, Mul, ScalarOp, Sub, Switch
from pytensor.scan.op import Scan
from pytensor.tensor.basic import (
    Alloc,
    AllocEmpty,
    ARange,
    Eye,
    Join,
    MakeVector,
    ScalarFromTensor,
    Split,
    TensorFromScalar,
)
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.random.op import RandomVariable
from pytensor.tensor.shape import Reshape, Shape, Shape_i
from pytensor.tensor.subtensor import (
    AdvancedIncSubtensor,
    AdvancedSubtensor,
    IncSubtensor,
    Subtensor,
    indices_from_subtensor,
)
from pytensor.tensor.type import lscalar

__all__ = ["Known", "LengthGraph", "SlicedSubtensor", "decisive", "extract_lengths", "indices_of", "of_numbers"]

#: What the host computes lengths by.
_ARITHMETIC = (
    CAReduce,
    CheckAndRaise,
    DimShuffle,
    Elemwise,
    Join,
    MakeVector,
    ScalarFromTensor,
    ScalarOp,
    Subtensor,
    TensorFromScalar,
)
_INCREMENTS = (IncSubtensor, AdvancedIncSubtensor)


class SlicedSubtensor(Op):
    """Indexing, or an update by index, with the lengths of some of its slices as further inputs.

    ``op`` is PyTensor's, ``positions`` say where among the indexes those slices are.
    """

    __props__ = ("op", "positions")

    def __init__(self, op: Op, positions: tuple[int, ...]):
        self.op, self.positions = op, positions

    def perform(self, node: Any, inputs: Any, output_storage: Any, params: Any = None) -> None:
        """Index as PyTensor does; nothing but JAX mode uses it."""
        raise NotImplementedError


class _Length(NamedTuple):
    """The length of a slice of something of a length."""

    start: Any
    stop: Any
    step: Any
    of: Any


class LengthGraph:
    """A graph in which lengths are inputs of their own, behind its other inputs.

    ``inputs`` are those of the graph that it was made of, and ``wanted`` says what the lengths are in that one.  The
    host computes them step by step, in a list that has a slot for each number.
    """

    def __init__(self, graph: FunctionGraph, inputs: Sequence[Any], wanted: Sequence[Any]):
        self.graph, self.n_lengths = graph, len(wanted)
        #: The inputs, without dimensions, whose values decide lengths.
        self.positions: list[int] = []
        self._at = {variable: position for position, variable in enumerate(inputs)}
        #: What is in each slot as a call begins: constants.  The first takes the inputs' values.
        self._start: list[Any] = [None]
        #: What is computed, from which slots, into which.
        self._steps: list[tuple[Callable[..., Any], list[int], int | slice]] = []
        slots: dict[Any, int] = {}
        parts = [part for want in wanted for part in (want if isinstance(want, _Length) else (want,))]
        for node in io_toposort(list(inputs), [part for part in parts if hasattr(part, "type")]):
            self._add(node, slots)
        self._wanted = [self._slot(want, slots) for want in wanted]

    def _add(self, node: Any, slots: dict[Any, int]) -> None:
        """Add what a node computes; ``slots`` are those of the variables in its graph."""
        op = _scalar_op(node)
        if isinstance(op, Shape | Shape_i):
            slots[node.outputs[0]] = self._step(_shape_of(self._at[node.inputs[0]], op), [0])
        elif isinstance(op, TensorFromScalar | ScalarFromTensor | CheckAndRaise):
            slots[node.outputs[0]] = self._slot(node.inputs[0], slots)
        elif isinstance(op, Composite):
            # Its own way to compute takes ten times as long.
            inner = op.fgraph
            inside = {into: self._slot(outer, slots) for into, outer in zip(inner.inputs, node.inputs, strict=True)}
            for part in inner.toposort():
                self._add(part, inside)
            slots |= {o: self._slot(found, inside) for found, o in zip(inner.outputs, node.outputs, strict=True)}
        else:
            sources = [self._slot(variable, slots) for variable in node.inputs]
            first = self._step(_on_host(node), sources, len(node.outputs))
            slots |= {variable: first + i for i, variable in enumerate(node.outputs)}

    def _slot(self, what: Any, slots: dict[Any, int]) -> int:
        """Return the slot of a variable, of a slice's length, or of a plain number; a new one where there is none."""
        if isinstance(what, _Length):
            return self._step(_slice_length, [self._slot(part, slots) for part in what])
        if what in slots:
            return slots[what]
        if what in self._at:
            position = self._at[what]
            self.positions.append(position)
            slots[what] = self._step(lambda values: np.asarray(values[position]).item(), [0])
            return slots[what]
        self._start.append(_plain(what.data) if isinstance(what, Constant) else what)
        return len(self._start) - 1

    def _step(self, compute: Callable[..., Any], sources: list[int], n_results: int = 1) -> int:
        """Add a step; return the slot of its result, or of the first of several."""
        first = len(self._start)
        self._start += [None] * n_results
        self._steps.append((compute, sources, first if n_results == 1 else slice(first, first + n_results)))
        return first

    def lengths(self, values: Sequence[Any]) -> tuple[int, ...]:
        """Return the lengths for values of all inputs of the graph."""
        known = [values, *self._start[1:]]
        for compute, sources, into in self._steps:
            known[into] = compute(*[known[source] for source in sources])
        return tuple([int(known[slot]) for slot in self._wanted])


def extract_lengths(graph: FunctionGraph) -> LengthGraph | None:
    """Return a graph for JAX with its lengths as inputs; None where no input's value decides one."""
    if not any(map(_is_integer, graph.inputs)):
        return None
    known = Known(graph)
    demands = [(node, *_demands(node, known)) for node in graph.toposort()]
    cuts = list(dict.fromkeys(variable for _, variables, _ in demands for variable in variables))
    sliced = [(node, slices) for node, _, slices in demands if slices]
    if not cuts and not sliced:
        return None
    # A copy, which has no features: they would undo what is done here, or forbid it.
    copy, copies = graph.clone_get_equiv(check_integrity=False, attach_feature=False)
    wanted: list[Any] = []
    for node, slices in sliced:
        lengths = [lscalar() for _ in slices]
        here = copies[node]
        rows = Apply(SlicedSubtensor(node.op, tuple(slices)), [*here.inputs, *lengths], [here.outputs[0].type()])
        for length in lengths:
            copy.add_input(length)
        copy.replace(here.outputs[0], rows.outputs[0], import_missing=True)
        wanted += slices.values()
    for variable in cuts:
        length = variable.type()
        copy.add_input(length)
        copy.replace(copies[variable], length)
        wanted.append(variable)
    return LengthGraph(copy, graph.inputs, wanted)


# -- what the host knows ---------------------------------------------------------------------------------------------


class Known:
    """Which variables of a graph are numbers before it is computed.

    The host knows what follows from integer inputs and from the inputs' shapes; only the former varies with an input's
    value.  JAX also knows what follows from other shapes, when it traces the graph.
    """

    def __init__(self, graph: FunctionGraph):
        self._inputs = list(graph.inputs)
        self._varies: dict[Any, bool] = {variable: True for variable in self._inputs if _is_integer(variable)}
        self._traced: set[Any] = set()
        for node in graph.toposort():
            self._look_at(node)

    def varies(self, variable: Any) -> bool | None:
        """Return whether a variable depends on an input's value; None if it is not known on the host at all."""
        if not hasattr(variable, "type") or isinstance(variable, Constant):
            return False
        return self._varies.get(variable)

    def is_known_to_jax(self, variable: Any) -> bool:
        """Whether it is a number when JAX traces the graph, provided that what the host knows is one."""
        return self.varies(variable) is not None or variable in self._traced

    def length(self, variable: Any, axis: int) -> Any:
        """Return what says how long a variable's axis is, in terms of the inputs."""
        fixed = variable.type.shape[axis]
        if fixed is not None:
            return fixed
        if variable in self._inputs:
            length = Shape_i(axis)(variable)
        else:
            shapes = [[Shape_i(i)(v) for i in range(v.type.ndim)] if _is_array(v) else None for v in self._inputs]
            length = infer_shape([variable], self._inputs, shapes)[0][axis]
        for node in io_toposort(self._inputs, [length]):
            self._look_at(node)
        return length

    def _look_at(self, node: Any) -> None:
        if isinstance(node.op, Shape | Shape_i):
            if node.inputs[0] in self._inputs:
                self._varies[node.outputs[0]] = False
            else:
                self._traced.add(node.outputs[0])
        elif all(map(_is_small, node.outputs)) and isinstance(node.op, _ARITHMETIC):
            of_inputs = [self.varies(variable) for variable in node.inputs]
            if None not in of_inputs:
                self._varies.update((variable, any(of_inputs)) for variable in node.outputs)
            elif all(map(self.is_known_to_jax, node.inputs)):
                self._traced.update(node.outputs)
        elif type(node.op).__name__ == "JAXShapeTuple" and all(map(self.is_known_to_jax, node.inputs)):
            self._traced.update(node.outputs)


def _is_array(variable: Any) -> bool:
    return hasattr(variable.type, "ndim") and hasattr(variable.type, "shape")


def _is_small(variable: Any) -> bool:
    return getattr(variable.type, "ndim", 2) <= 1


def _is_integer(variable: Any) -> bool:
    """Whether a variable is a whole number, or true or false."""
    dtype = getattr(variable.type, "dtype", "")
    return getattr(variable.type, "ndim", None) == 0 and (dtype == "bool" or "int" in dtype)


# -- what has to be known --------------------------------------------------------------------------------------------


def _demands(node: Any, known: Known) -> tuple[list[Any], dict[int, _Length]]:
    """Return the variables that decide lengths at a node, and slices of unknown lengths by their positions."""
    if isinstance(node.op, Subtensor | AdvancedSubtensor | IncSubtensor | AdvancedIncSubtensor):
        return [], dict(_slices(node, known))
    return [variable for source in decisive(node) for variable in _numbers(source, known)], {}


def decisive(node: Any) -> Sequence[Any]:
    """Return the inputs of a node that have to be known for its outputs' shapes to be known."""
    op = node.op
    if isinstance(op, ARange | AllocEmpty | Eye):
        return node.inputs
    if isinstance(op, Alloc):
        return node.inputs[1:]
    if isinstance(op, Reshape | RandomVariable):
        return node.inputs[1:2]
    if isinstance(op, Split):
        return node.inputs[-1:]
    if isinstance(op, Scan):
        return [node.inputs[0], *op.outer_nitsot(node.inputs)]
    return []


def _numbers(variable: Any, known: Known) -> Iterator[Any]:
    """Yield the numbers that a length, or a shape, depends on and that the host knows."""
    if known.varies(variable) and getattr(variable.type, "ndim", 0) == 0:
        yield variable
    elif known.varies(variable) is not False and known.is_known_to_jax(variable) and variable.owner is not None:
        for source in variable.owner.inputs:
            yield from _numbers(source, known)


def _slices(node: Any, known: Known) -> Iterator[tuple[int, _Length]]:
    """Yield the slices at a node whose lengths depend on an input's value, by their positions among the indexes."""
    x = node.inputs[0]
    if known.varies(x) is not None:
        return  # a shape's elements, say
    first = 2 if isinstance(node.op, _INCREMENTS) else 1
    axis = 0
    for position, index in enumerate(indices_of(node.op, node.inputs[first:])):
        if isinstance(index, slice):
            bounds = index.start, index.stop, index.step
            varying = [known.varies(bound) for bound in bounds]
            if None not in varying and any(varying):
                length = known.length(x, axis)
                if known.varies(length) is not None:
                    yield position, _Length(*bounds, length)
        # A mask takes as many axes as it has.
        kind: Any = None if isinstance(index, slice) else index.type
        axis += kind.ndim if getattr(kind, "dtype", "") == "bool" else 1


def indices_of(op: Op, flat: Sequence[Any]) -> tuple[Any, ...]:
    """Return indexes, slices among them, from an Op's inputs or their values."""
    # Before 3.0 advanced indexing has slices as they are.
    return indices_from_subtensor(flat, getattr(op, "idx_list", None))


# -- on the host -----------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """Return a number as Python's, which are faster."""
    return np.asarray(value).item() if np.ndim(value) == 0 and value is not None else value


def _shape_of(position: int, op: Shape | Shape_i) -> Callable[..., Any]:
    """Return what takes an input's shape, or one length of it, from the values of all."""
    if isinstance(op, Shape):
        return lambda values: np.array(np.shape(values[position]))
    axis = op.i
    return lambda values: np.shape(values[position])[axis]


def _slice_length(start: Any, stop: Any, step: Any, of: int) -> int:
    bounds = [None if bound is None else int(bound) for bound in (start, stop, step)]
    return len(range(*slice(*bounds).indices(int(of))))


_COMPARISONS: dict[type[ScalarOp], Callable[..., Any]] = {
    EQ: operator.eq,
    GE: operator.ge,
    GT: operator.gt,
    LE: operator.le,
    LT: operator.lt,
    NEQ: operator.ne,
}


def of_numbers(op: ScalarOp) -> Callable[..., Any]:
    """Return what computes an operation on Python's numbers."""
    if type(op) in _COMPARISONS:
        return _COMPARISONS[type(op)]
    if isinstance(op, Add | Sub | Mul | Switch):
        return op.impl

    def compute(*values: Any) -> Any:
        # ~True is False for NumPy, and -2 for Python.
        return op.impl(*[np.bool_(value) if value is True or value is False else value for value in values])

    return compute


def _scalar_op(node: Any) -> Any:
    """Return an elementwise operation on numbers as one of scalars, any other as it is."""
    return node.op.scalar_op if isinstance(node.op, Elemwise) and node.outputs[0].type.ndim == 0 else node.op


def _on_host(node: Any) -> Callable[..., Any]:
    """Return what computes a node's output, or its outputs in a list."""
    op = _scalar_op(node)
    if isinstance(op, ScalarOp):
        compute = of_numbers(op)
        is_bool = node.outputs[0].type.dtype == "bool" and type(op) not in _COMPARISONS
        return (lambda *values: bool(compute(*values))) if is_bool else compute

    def perform(*values: Any) -> Any:
        storage: list[list[Any]] = [[None] for _ in node.outputs]
        arrays = [np.asarray(x, getattr(v.type, "dtype", None)) for x, v in zip(values, node.inputs, strict=True)]
        op.perform(node, arrays, storage)
        return storage[0][0] if len(storage) == 1 else [cell[0] for cell in storage]

    return perform
