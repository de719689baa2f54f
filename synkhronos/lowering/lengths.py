"""Lengths that depend on a function's integer inputs, as static arguments of its JAX function.

XLA compiles for fixed shapes, but the length of ``x[i * b:(i + 1) * b]`` depends on the value of ``i``.  The lengths of
arrays of ``n`` zeros, and of loops of ``n`` steps, depend on ``n``.  Expressions of lengths that depend only on the
inputs' shapes and on scalar integer inputs are extracted from the graph.  Python computes them before each call, and
passes them to XLA as constants.  XLA compiles once for each set of lengths, here once for all ``i`` but the last.  The
start of a slice remains traced.

    graph(i, x) --extract_lengths--> StaticLengthGraph:  n = lengths(i, x)  in Python, before the call
                                                         graph(i, x, n)     by XLA, with n as a constant
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from pytensor.compile.builders import infer_shape
from pytensor.compile.mode import optdb
from pytensor.graph.basic import Apply, Constant
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op
from pytensor.graph.rewriting.basic import GraphRewriter
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
from pytensor.tensor.extra_ops import Bartlett, Repeat
from pytensor.tensor.random.op import RandomVariable
from pytensor.tensor.shape import Reshape, Shape, Shape_i, specify_shape
from pytensor.tensor.subtensor import (
    AdvancedIncSubtensor,
    AdvancedSubtensor,
    IncSubtensor,
    Subtensor,
    indices_from_subtensor,
)
from pytensor.tensor.type import lscalar

from synkhronos.lowering.polynomial import find_constant_extent
from synkhronos.variable_types import Array, Node, Variable

#: Ops by which Python may compute lengths before a call.
_LENGTH_OPS = (
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
_INDEXING_OPS = (Subtensor, AdvancedSubtensor, IncSubtensor, AdvancedIncSubtensor)


class FixedLengthSubtensor(Op):
    """An indexing Op of PyTensor with the lengths of the slices at some positions as its last inputs."""

    __props__ = ("op", "positions")

    def __init__(self, op: Op, positions: tuple[int, ...]):
        self.op, self.positions = op, positions

    def perform(self, node: Node, inputs: Sequence[Array], output_storage: list[list[Any]], params: Any = None) -> None:
        """Raise NotImplementedError: only JAX mode uses this Op."""
        raise NotImplementedError


class _SliceLength(NamedTuple):
    """The length of a slice, as an expression.  Each field is a variable, a number, or None for an omitted bound."""

    start: Any
    stop: Any
    step: Any
    axis_length: Any


class StaticLengthGraph:
    """A graph with lengths as additional inputs, and a list of steps in which Python computes these lengths.

    A call computes a list of values.  A step computes one of them, or several consecutive ones, from others.
    The inputs of ``graph`` are those of the original graph, then the lengths.  ``length_input_positions`` are the
    positions of the scalar inputs whose values determine lengths.
    """

    def __init__(self, graph: FunctionGraph, inputs: Sequence[Any], lengths: Sequence[Any]):
        self.graph, self.n_lengths = graph, len(lengths)
        self.length_input_positions: list[int] = []
        self._input_positions = {variable: position for position, variable in enumerate(inputs)}
        #: Values at the start of a call.  The first is replaced by the sequence of all inputs' values.
        self._initial_values: list[Any] = [None]
        #: Function, indexes of its arguments, index or range of its result.
        self._steps: list[tuple[Callable[..., Any], list[int], int | slice]] = []
        indexes: dict[Any, int] = {}
        terms = chain.from_iterable(x if isinstance(x, _SliceLength) else (x,) for x in lengths)
        for node in io_toposort(list(inputs), [term for term in terms if hasattr(term, "type")]):
            self._add_node(node, indexes)
        self._length_indexes = [self._get_or_add_index(length, indexes) for length in lengths]

    def _add_node(self, node: Node, indexes: dict[Any, int]) -> None:
        """Add the steps of a node.  ``indexes`` maps the variables of its graph to their values' indexes."""
        op = _get_scalar_op(node)
        if isinstance(op, Shape | Shape_i):
            indexes[node.outputs[0]] = self._add_step(
                _make_shape_getter(self._input_positions[node.inputs[0]], op), [0]
            )
        elif isinstance(op, TensorFromScalar | ScalarFromTensor):
            indexes[node.outputs[0]] = self._get_or_add_index(node.inputs[0], indexes)
        elif isinstance(op, Composite):
            # The method `impl` of Composite takes ten times as long.
            inner = op.fgraph
            operands = [self._get_or_add_index(variable, indexes) for variable in node.inputs]
            inner_indexes = dict(zip(inner.inputs, operands, strict=True))
            for inner_node in inner.toposort():
                self._add_node(inner_node, inner_indexes)
            results = [self._get_or_add_index(variable, inner_indexes) for variable in inner.outputs]
            indexes |= dict(zip(node.outputs, results, strict=True))
        else:
            sources = [self._get_or_add_index(variable, indexes) for variable in node.inputs]
            first = self._add_step(_make_python_function(node), sources, len(node.outputs))
            indexes |= {variable: first + i for i, variable in enumerate(node.outputs)}

    def _get_or_add_index(self, value: object, indexes: dict[Any, int]) -> int:
        """Return the index of the value of a variable, a slice's length or a number.  Add a value if there is none."""
        if isinstance(value, _SliceLength):
            return self._add_step(_compute_slice_length, [self._get_or_add_index(part, indexes) for part in value])
        if value in indexes:
            return indexes[value]
        if value in self._input_positions:
            position = self._input_positions[value]
            self.length_input_positions.append(position)
            indexes[value] = self._add_step(lambda values: np.asarray(values[position]).item(), [0])
            return indexes[value]
        self._initial_values.append(to_number_or_array(value.data) if isinstance(value, Constant) else value)
        return len(self._initial_values) - 1

    def _add_step(self, compute: Callable[..., Any], sources: list[int], n_results: int = 1) -> int:
        """Add a step and return the index of its first result."""
        first = len(self._initial_values)
        self._initial_values += [None] * n_results
        self._steps.append((compute, sources, first if n_results == 1 else slice(first, first + n_results)))
        return first

    def compute_lengths(self, values: Sequence[Any]) -> tuple[int, ...]:
        """Return the lengths for given values of all inputs of the original graph."""
        results = [values, *self._initial_values[1:]]
        for compute, sources, destination in self._steps:
            results[destination] = compute(*[results[source] for source in sources])
        return tuple([int(results[index]) for index in self._length_indexes])


def extract_lengths(graph: FunctionGraph) -> StaticLengthGraph | None:
    """Replace the lengths in a graph for JAX mode that depend on the values of inputs by additional inputs.

    The graph is not changed.  None is returned if no length depends on the value of an input.
    """
    if not any(map(_is_integer_scalar, graph.inputs)):
        return None
    known_variables = KnownVariables(graph)
    varying_scalars: dict[Any, None] = {}
    varying_slices: list[tuple[Any, dict[int, _SliceLength]]] = []
    for node in graph.toposort():
        if not isinstance(node.op, _INDEXING_OPS):
            for source in select_shape_inputs(node):
                varying_scalars.update(dict.fromkeys(_find_varying_scalars(source, known_variables)))
        elif slices := dict(_find_varying_slices(node, known_variables)):
            varying_slices.append((node, slices))
    if not varying_scalars and not varying_slices:
        return None
    # Features are not cloned: they would undo or reject these replacements.
    new_graph, copies = graph.clone_get_equiv(check_integrity=False, attach_feature=False)
    length_expressions: list[Any] = []
    for node, slices in varying_slices:
        length_inputs = [lscalar() for _ in slices]
        copied_node = copies[node]
        op = FixedLengthSubtensor(node.op, tuple(slices))
        new_node = Apply(op, [*copied_node.inputs, *length_inputs], [copied_node.outputs[0].type()])
        for length_input in length_inputs:
            new_graph.add_input(length_input)
        new_graph.replace(copied_node.outputs[0], new_node.outputs[0], import_missing=True)
        length_expressions += slices.values()
    for variable in varying_scalars:
        length_input = variable.type()
        new_graph.add_input(length_input)
        new_graph.replace(copies[variable], length_input)
        length_expressions.append(variable)
    return StaticLengthGraph(new_graph, graph.inputs, length_expressions)


# -- known variables ---------------------------------------------------------------------------------------------------


class KnownVariables:
    """Classification of a graph's variables by the time at which their values are known.

    Values that depend only on scalar integer inputs and on the inputs' shapes are known before a call.  Values that
    depend only on these and on the shapes of other variables are known while JAX traces the graph.
    """

    def __init__(self, graph: FunctionGraph):
        self._inputs = list(graph.inputs)
        #: Whether a value depends on the value of an input, for each variable that is known before a call.
        self._is_varying: dict[Any, bool] = {
            variable: True for variable in self._inputs if _is_integer_scalar(variable)
        }
        #: Variables that are known while JAX traces the graph, but not before a call.
        self._known_in_trace: set[Any] = set()
        for node in graph.toposort():
            self._classify(node)

    def is_known_before_call(self, variable: Variable) -> bool:
        """Whether the value is known before a call."""
        return not hasattr(variable, "type") or isinstance(variable, Constant) or variable in self._is_varying

    def varies_with_inputs(self, variable: Variable) -> bool:
        """Whether the value is known before a call, and depends on the value of an input."""
        return self._is_varying.get(variable, False)

    def is_known_in_trace(self, variable: Variable) -> bool:
        """Whether the value is known while JAX traces the graph, such as a value that is known before a call."""
        return self.is_known_before_call(variable) or variable in self._known_in_trace

    def build_length(self, variable: Variable, axis: int) -> Any:
        """Return the length of an axis, and classify the nodes of its expression.

        The length is an int, or an expression in the graph's inputs.
        """
        static_length = variable.type.shape[axis]
        if static_length is not None:
            return static_length
        if variable in self._inputs:
            length = Shape_i(axis)(variable)
        else:
            shapes = [[Shape_i(i)(v) for i in range(v.type.ndim)] if _is_array(v) else None for v in self._inputs]
            length = infer_shape([variable], self._inputs, shapes)[0][axis]
        for node in io_toposort(self._inputs, [length]):
            self._classify(node)
        return length

    def _classify(self, node: Node) -> None:
        """Record when the outputs of a node are known, from the times at which its inputs are known."""
        if isinstance(node.op, Shape | Shape_i):
            if node.inputs[0] in self._inputs:
                self._is_varying[node.outputs[0]] = False
            else:
                self._known_in_trace.add(node.outputs[0])
        elif all(map(_is_scalar_or_vector, node.outputs)) and isinstance(node.op, _LENGTH_OPS):
            if all(map(self.is_known_before_call, node.inputs)):
                self._is_varying.update(dict.fromkeys(node.outputs, any(map(self.varies_with_inputs, node.inputs))))
            elif all(map(self.is_known_in_trace, node.inputs)):
                self._known_in_trace.update(node.outputs)
        elif type(node.op).__name__ == "JAXShapeTuple" and all(map(self.is_known_in_trace, node.inputs)):
            self._known_in_trace.update(node.outputs)


def _is_array(variable: Variable) -> bool:
    return hasattr(variable.type, "ndim") and hasattr(variable.type, "shape")


def _is_scalar_or_vector(variable: Variable) -> bool:
    return getattr(variable.type, "ndim", 2) <= 1


def _is_integer_scalar(variable: Variable) -> bool:
    dtype = getattr(variable.type, "dtype", "")
    return getattr(variable.type, "ndim", None) == 0 and (dtype == "bool" or "int" in dtype)


# -- variables that have to be known -----------------------------------------------------------------------------------


def select_shape_inputs(node: Node) -> Sequence[Variable]:
    """Return the inputs of a node whose values determine its outputs' shapes."""
    op = node.op
    if isinstance(op, ARange | AllocEmpty | Bartlett | Eye):
        return node.inputs
    if isinstance(op, Repeat):
        return [count for count in node.inputs[1:] if not isinstance(count, Constant)]
    if isinstance(op, Alloc):
        return node.inputs[1:]
    if isinstance(op, Reshape | RandomVariable):
        return node.inputs[1:2]
    if isinstance(op, Split):
        return node.inputs[-1:]
    if isinstance(op, Scan):
        return [node.inputs[0], *op.outer_nitsot(node.inputs)]
    return []


def _find_varying_scalars(variable: Variable, known_variables: KnownVariables) -> Iterator[Variable]:
    """Yield the scalars that determine a length or shape, are known before a call, and vary with inputs."""
    if known_variables.varies_with_inputs(variable) and getattr(variable.type, "ndim", 0) == 0:
        yield variable
        return
    is_fixed = known_variables.is_known_before_call(variable) and not known_variables.varies_with_inputs(variable)
    if not is_fixed and known_variables.is_known_in_trace(variable) and variable.owner is not None:
        for source in variable.owner.inputs:
            yield from _find_varying_scalars(source, known_variables)


def _find_varying_slices(node: Node, known_variables: KnownVariables) -> Iterator[tuple[int, _SliceLength]]:
    """Yield position among the indices, and length, of each slice whose length varies with the values of inputs."""
    x = node.inputs[0]
    if known_variables.is_known_before_call(x):
        return  # a shape, for example: Python computes this node
    axis = 0
    for position, index in enumerate(split_indexing(node.op, node.inputs)[1]):
        if isinstance(index, slice):
            bounds = index.start, index.stop, index.step
            if all(map(known_variables.is_known_before_call, bounds)) and any(
                map(known_variables.varies_with_inputs, bounds)
            ):
                length = known_variables.build_length(x, axis)
                if known_variables.is_known_before_call(length):
                    yield position, _SliceLength(*bounds, length)
        # A boolean mask indexes one axis for each of its own.
        index_type: Any = None if isinstance(index, slice) else index.type
        axis += index_type.ndim if getattr(index_type, "dtype", "") == "bool" else 1


def split_indexing(op: Op, inputs: Sequence[Any]) -> tuple[Sequence[Any], tuple[Any, ...]]:
    """Split the inputs of an indexing Op, or the inputs' values, into operands and indices, as in ``x[indices]``.

    The operands are the array and, for an update, the new values.  Indices are slices and integers or arrays.
    """
    n_operands = 2 if isinstance(op, IncSubtensor | AdvancedIncSubtensor) else 1
    # Before 3.0, advanced indexing has slices among its inputs and no `idx_list`.
    return inputs[:n_operands], indices_from_subtensor(inputs[n_operands:], getattr(op, "idx_list", None))


# -- computation in Python ---------------------------------------------------------------------------------------------


def to_number_or_array(value: object) -> Any:
    """Convert a scalar to a Python number, whose arithmetic is faster, and any other value to an array."""
    array = np.asarray(value)
    return array if array.ndim else array.item()


def _make_shape_getter(position: int, op: Shape | Shape_i) -> Callable[..., Any]:
    """Return a function that maps the values of all inputs to the shape, or one length, of one input."""
    if isinstance(op, Shape):
        return lambda values: np.array(np.shape(values[position]))
    axis = op.i
    return lambda values: np.shape(values[position])[axis]


def _compute_slice_length(start: Any, stop: Any, step: Any, axis_length: int) -> int:
    bounds = [None if bound is None else int(bound) for bound in (start, stop, step)]
    return len(range(*slice(*bounds).indices(int(axis_length))))


_COMPARISONS: dict[type[ScalarOp], Callable[..., Any]] = {
    EQ: operator.eq,
    GE: operator.ge,
    GT: operator.gt,
    LE: operator.le,
    LT: operator.lt,
    NEQ: operator.ne,
}


def to_python_function(op: ScalarOp) -> Callable[..., Any]:
    """Return a function of Python numbers that computes a scalar Op."""
    if type(op) in _COMPARISONS:
        return _COMPARISONS[type(op)]
    if isinstance(op, Add | Sub | Mul | Switch):
        return op.impl

    def compute(*values: Any) -> Any:
        # ~True is False in NumPy, and -2 in Python.
        return op.impl(*[np.bool_(value) if value is True or value is False else value for value in values])

    return compute


def _get_scalar_op(node: Node) -> Op:
    """Return the scalar Op of an Elemwise node with scalar outputs, and any other node's Op."""
    return node.op.scalar_op if isinstance(node.op, Elemwise) and node.outputs[0].type.ndim == 0 else node.op


def _make_python_function(node: Node) -> Callable[..., Any]:
    """Return a function of a node's input values that returns its output, or a list of its outputs."""
    op = _get_scalar_op(node)
    if isinstance(op, ScalarOp):
        compute, dtype = to_python_function(op), np.dtype(node.outputs[0].type.dtype)
        if type(op) in _COMPARISONS or dtype.kind not in "biu" or dtype == np.int64:
            return compute
        if dtype.kind == "b":
            return lambda *values: bool(compute(*values))
        # Python's integers do not overflow, but XLA's do, and with them the start of the slice.
        limits = np.iinfo(dtype)
        lowest, n_values = int(limits.min), int(limits.max) - int(limits.min) + 1
        return lambda *values: (int(compute(*values)) - lowest) % n_values + lowest

    def perform(*values: Any) -> Any:
        storage: list[list[Any]] = [[None] for _ in node.outputs]
        arrays = [np.asarray(x, getattr(v.type, "dtype", None)) for x, v in zip(values, node.inputs, strict=True)]
        op.perform(node, arrays, storage)
        return storage[0][0] if len(storage) == 1 else [cell[0] for cell in storage]

    return perform


# -- slices by data ----------------------------------------------------------------------------------------------------


class SliceLengthRewriter(GraphRewriter):
    """Rewrite that specifies the lengths of slices whose bounds are data and differ by a constant.

    PyTensor infers a length for ``x[i:i + 28]`` that is less than 28 near the end of ``x``.  If ``i`` is data, as in a
    random crop, XLA can't compile an array of that length.  The lowering in `shapes` returns 28 rows, or NaN.  This
    rewrite specifies the length 28.  No inferred shape then depends on data.
    """

    def apply(self, fgraph: FunctionGraph) -> None:
        """Rewrite a graph in place."""
        slices = [node for node in fgraph.toposort() if isinstance(node.op, Subtensor)]
        known_variables = KnownVariables(fgraph) if slices else None
        for node in slices:
            lengths = _find_constant_lengths(node, known_variables)
            out = node.outputs[0]
            if any(length is not None for length in lengths):
                fgraph.replace(out, specify_shape(node.op(*node.inputs), lengths), reason="slice_lengths")


def _find_constant_lengths(node: Node, known_variables: Any) -> list[int | None]:
    """Return the constant length of each axis of a node's output that is sliced by data-dependent bounds, else None."""
    lengths: list[int | None] = []
    for index in split_indexing(node.op, node.inputs)[1]:
        if not isinstance(index, slice):
            continue
        bounds = [bound for bound in (index.start, index.stop, index.step) if bound is not None]
        is_data = not all(map(known_variables.is_known_in_trace, bounds))
        lengths.append(find_constant_extent(index, {}) if is_data else None)
    return lengths + [None] * (node.outputs[0].type.ndim - len(lengths))


# Before shapes are inferred, at 0.1.
optdb.register("slice_lengths", SliceLengthRewriter(), "jax", position=0.05)
