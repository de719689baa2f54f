"""Rewriting of a row-wise expression so that it computes some rows only, the *computed rows*.

An expression is row-wise if row ``i`` of its value depends on row ``i`` of the data, and otherwise on nothing that has
rows.  The search starts at the output and walks to the inputs, with one rule for each operation (`rowwise_rules`).  For
example, rows of ``a + b`` need the same rows of ``a`` and of ``b``.  Rows of ``effects[group]`` need rows of ``group``,
and all of ``effects``.  The search ends at data, which are replaced by inputs of any number of rows, and at parameters,
which stay as they are.  An operation that mixes rows, or that has no rule, raises `NotRowwiseError`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, KeysView
from functools import partial, reduce
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile import SharedVariable
from pytensor.compile.mode import get_mode
from pytensor.graph.basic import Constant
from pytensor.graph.traversal import walk
from pytensor.scan.op import Scan
from pytensor.tensor import TensorType
from pytensor.tensor.basic import AllocEmpty, MakeVector, ScalarFromTensor, TensorFromScalar
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.math import All
from pytensor.tensor.shape import Shape, Shape_i
from pytensor.tensor.subtensor import IncSubtensor

from synkhronos.extensions.distributed_rows import ComputedRows, get_rows, get_values
from synkhronos.extensions.rows_sum_graph import replace_variables
from synkhronos.graph_libraries import get_library
from synkhronos.variable_types import Node, Variable

#: A rule for one operation.  The rule takes the restrictor, the node, and the axis of its output that runs along the
#: rows.  It returns the restricted output.
RowwiseRule = Callable[["RowRestrictor", Any, int], Any]


class NotRowwiseError(ValueError):
    """An expression cannot be computed row by row.  The message names the reason."""


def make_rowwise(terms: Variable, length: int, rules: dict[type, RowwiseRule]) -> tuple[Any, dict[Any, Any]]:
    """Return an expression for the terms of any number of rows, and its data as `sum_over_rows` takes them.

    The axis 0 of ``terms`` runs along the rows, of which there are ``length``, at least two.  ``rules`` are those of
    `RowRestrictor`.  Raise NotRowwiseError if a row of the terms depends on other rows, or if no rule excludes that.
    """
    if not terms.type.ndim:
        raise NotRowwiseError("the log-density is one number for all rows, as where these depend on each other")
    # The rows of loops are few and costly.
    has_loops = any(isinstance(node.op, Scan) for node in get_library(terms).sort_nodes([terms]))
    restrictor = RowRestrictor(length, rules, allow_row_parameters=has_loops)
    restricted = restrictor.restrict(terms, 0)
    nodes = get_library(restricted).sort_nodes([restricted])
    used_variables = {restricted, *(variable for node in nodes for variable in node.inputs)}
    rows = {
        placeholder: values
        for placeholder, values in restrictor.rows_by_placeholder.items()
        if placeholder in used_variables
    }
    if not rows:
        raise NotRowwiseError("no data run along the rows")
    for values in rows.values():
        n_rows = len(get_rows(values))
        if n_rows != length:
            raise NotRowwiseError(f"the log-density has {length} rows, and data along them have {n_rows}")
    restricted = replace_variables(restricted, nodes, {restrictor.n_rows_variable: next(iter(rows)).shape[0]})
    restrictor.check_parameters(restricted)
    return restricted, rows


class RowRestrictor:
    """Restricts an expression to any number of rows, by a search from its output to its data.

    Parameters
    ----------
    length : int
        Number of rows of the data; with ``selections`` the expression has another number of rows.
    rules : dict of class to callable
        Rules by the class of the Op.
    allow_row_parameters : bool
        Whether a parameter may have an element for each row.  All elements are sent to all ranks at each evaluation.
    selections : tuple of ndarray or slice, optional
        Indexes by which rows of the data are selected, one after another, before the expression is computed from them.

    Attributes
    ----------
    rows_by_placeholder : dict of variable to ndarray, shared variable or `ComputedRows`
        The data found so far, by the input that replaces them.
    n_rows_variable : variable
        Integer scalar: the number of rows that are computed.

    Notes
    -----
    `find_row_axis` and `restrict_condition` depend on earlier calls of `restrict`: an axis along the rows is unknown
    until the search has reached it.
    """

    def __init__(
        self,
        length: int,
        rules: dict[type, RowwiseRule],
        allow_row_parameters: bool = False,
        selections: tuple[Any, ...] = (),
    ):
        self.length, self.allow_row_parameters = length, allow_row_parameters
        self.rows_by_placeholder: dict[Any, Any] = {}
        self.n_rows_variable = pt.lscalar("n_rows")
        self.rules = rules
        self.selections = selections
        self._subrestrictors: dict[Any, RowRestrictor] = {}
        self._restricted: dict[tuple[Any, int], Any] = {}
        self._placeholders: dict[Any, Any] = {}
        self._folded_constants: dict[Any, Any] = {}
        self._data: dict[Any, tuple[ComputedRows, tuple[int, ...]] | None] = {}
        self._row_numbers = pt.constant(np.arange(length))

    def restrict(self, variable: Variable, axis: int) -> Variable:
        """Return the expression of `variable` for the computed rows, which run along `axis`."""
        restricted = self._restricted.get((variable, axis))
        if restricted is None:
            folded = self.fold_row_constants(variable)
            restricted = self._restricted[variable, axis] = self._restrict_folded(folded, axis)
        return restricted

    def _restrict_folded(self, variable: Variable, axis: int) -> Variable:
        """Restrict a variable by the rule of its operation, or replace it by an input if it is data."""
        node = variable.owner
        # A view of data is left to the ranks, which need no copy for it.
        if node is not None and (node.op.view_map or not self._has_data_rows(variable, axis)):
            try:
                return self._restrict_computed(variable, axis)
            except NotRowwiseError:
                if not self._has_data_rows(variable, axis):
                    raise
        return self._restrict_data(variable, axis)

    def restrict_or_broadcast(self, variable: Variable, axis: int) -> Variable:
        """Restrict `variable` unless it has length 1 along `axis`, and so is broadcast over the rows."""
        return variable if variable.type.shape[axis] == 1 else self.restrict(variable, axis)

    def restrict_or_merge_equal(self, variable: Variable, axis: int) -> Variable:
        """Replace a constant with equal rows, such as a condition that holds everywhere, by one row; else restrict."""
        folded = self.fold_row_constants(variable)
        if isinstance(folded, Constant):
            first_row = folded.data.take([0], axis)
            if np.array_equal(folded.data, np.broadcast_to(first_row, folded.data.shape)):
                return pt.constant(first_row, name=folded.name)
        return self.restrict_or_broadcast(variable, axis)

    def restrict_picked(self, values: Any, axis: int, index: Any) -> Any:
        """Return the restriction of `values`, indexed along `axis` by a fixed index or slice, or None if impossible.

        The data are indexed once, so that everything that is computed from them has these rows only.  A mask has no
        other restriction, so NotRowwiseError is raised in place of None.
        """
        selection = index
        if not isinstance(index, slice):
            index = self.fold_row_constants(index)
            if not isinstance(index, Constant) or index.type.ndim != 1:
                return None
            selection = index.data
        for length in _list_possible_lengths(values, axis):
            if length < self.length:
                continue
            key = str(index) if isinstance(index, slice) else index, length
            try:
                return self._get_subrestrictor(key, length, selection).restrict(values, axis)
            except NotRowwiseError:
                if getattr(selection, "dtype", None) == "bool":
                    raise
        return None

    def restrict_block(self, values: Any, axis: int, start: int) -> Variable:
        """Return the restriction of a block of rows, the first of which is row ``start``.

        The other rows repeat the block's first or last row.  A block of one row is broadcast.
        """
        length = values.type.shape[axis]
        if length == 1:
            return values
        selection = np.clip(np.arange(self.length) - start, 0, length - 1)
        return self._get_subrestrictor((start, length), length, selection).restrict(values, axis)

    def _get_subrestrictor(self, key: Any, length: int, selection: Any) -> RowRestrictor:
        """Return the restrictor for data of `length` rows, from which `selection` picks the rows of this restrictor."""
        subrestrictor = self._subrestrictors.get(key)
        if subrestrictor is None:
            # The selections of this object index the rows that `selection` picks from the data.
            selections = (selection, *self.selections)
            subrestrictor = RowRestrictor(length, self.rules, self.allow_row_parameters, selections)
            self._subrestrictors[key] = subrestrictor
            subrestrictor.use_data_of(self)
        return subrestrictor

    def use_data_of(self, other: RowRestrictor) -> None:
        """Share the table of found data, and the number of computed rows, with another restrictor."""
        self.rows_by_placeholder, self.n_rows_variable = other.rows_by_placeholder, other.n_rows_variable
        self._data = other._data

    def find_row_axis(self, variable: Variable) -> int | None:
        """Return the axis of `variable` that runs along the rows, or None if the search has not found one so far."""
        for axis in range(getattr(variable.type, "ndim", 0)):
            if (variable, axis) in self._restricted:
                return axis
        node = variable.owner
        if node is None or not isinstance(node.op, Elemwise | DimShuffle | CAReduce):
            return None
        row_axis = next((axis for axis in map(self.find_row_axis, node.inputs) if axis is not None), None)
        if isinstance(node.op, Elemwise):
            return row_axis
        axes = node.op.new_order if isinstance(node.op, DimShuffle) else list_kept_axes(node)
        return None if row_axis is None or row_axis not in axes else axes.index(row_axis)

    def restrict_condition(self, variable: Variable) -> Variable:
        """Return a condition ``all(...)`` over the computed rows only."""
        if isinstance(variable.type, TensorType):
            variable = self.fold_row_constants(variable)
        node = variable.owner
        if node is None:
            return variable
        if isinstance(node.op, ScalarFromTensor | TensorFromScalar):
            return node.op(self.restrict_condition(node.inputs[0]))
        if isinstance(node.op, All) and variable.type.ndim == 0:
            (inner,) = node.inputs
            if inner.owner is not None and isinstance(inner.owner.op, MakeVector):
                return reduce(pt.and_, map(self.restrict_condition, inner.owner.inputs))
            axis = self.find_row_axis(inner)
            if axis is None:
                axis = next((i for i in range(inner.type.ndim) if self._has_data_rows(inner, i)), None)
            if axis is not None:
                return pt.all(self.restrict(inner, axis))
        return variable

    def check_parameters(self, terms: Variable) -> None:
        """Raise NotRowwiseError if a parameter of `terms` is itself computed from the data.

        Otherwise the master would compute all rows at each evaluation.
        """
        library = get_library(terms)
        nodes = library.sort_nodes([terms])
        from_rows = set(self.rows_by_placeholder)
        for node in nodes:
            if not from_rows.isdisjoint(node.inputs):
                from_rows.update(node.outputs)
        params = {v for node in nodes if not from_rows.isdisjoint(node.outputs) for v in node.inputs} - from_rows
        for variable in params:
            leaves = list_leaves([variable], with_shapes=False)
            # Other inputs are random variables and generators.
            data = [leaf for leaf in leaves if isinstance(leaf, Constant) or is_shared_array(leaf)]
            if len(data) < len(leaves) and any(self.length in _get_shape(leaf) for leaf in data):
                raise NotRowwiseError(f"{describe_variable(variable)} needs all rows at once")

    def fold_row_constants(self, variable: Variable) -> Variable:
        """Return a variable that is computed from constants with rows as a constant, any other variable unchanged.

        The restricted variable would be computed at each evaluation, since its constants become inputs.
        """
        if variable.owner is None or not self._is_row_constant(variable):
            return variable
        if variable not in self._folded_constants:
            values = _compile_data(variable)()
            leaves = [leaf.data for leaf in list_leaves([variable])]
            if isinstance(values, np.ndarray) and not any(np.may_share_memory(values, leaf) for leaf in leaves):
                values.flags.writeable = False  # not an array of the user, so evaluations need not check it for changes
            self._folded_constants[variable] = pt.constant(values, name=variable.name)
        return self._folded_constants[variable]

    def _is_row_constant(self, variable: Variable) -> bool:
        """Whether a variable is computed from constants only, and a constant has an axis of the number of rows."""
        leaves = list_leaves([variable])
        return (
            not _is_uninitialized(variable)
            and all(isinstance(v, Constant) for v in leaves)
            and any(isinstance(v.type, TensorType) and self.length in np.shape(v.data) for v in leaves)
        )

    def _find_data(self, variable: Variable) -> tuple[ComputedRows, tuple[int, ...]] | None:
        """Return the values of a variable that is computed from data only, and their shape; None for other variables.

        The values are computed when rows are sent, and not by the ranks at each evaluation.  Also return None if the
        values have more elements than the data, and so would take much memory.
        """
        if variable not in self._data:
            self._data[variable] = self._make_data(variable)
        return self._data[variable]

    def _make_data(self, variable: Variable) -> tuple[ComputedRows, tuple[int, ...]] | None:
        leaves = list_leaves([variable])
        if not all(isinstance(leaf, Constant) or is_shared_array(leaf) for leaf in leaves):
            return None
        if variable.owner is None:
            source = variable.data if isinstance(variable, Constant) else variable
            return ComputedRows([source], partial(get_values, source)), np.shape(get_values(source))
        shareds = list(filter(is_shared_array, leaves))
        if not shareds or _is_uninitialized(variable):
            return None
        data = ComputedRows(shareds, _compile_data(variable))
        shape = np.shape(data.compute())
        return (data, shape) if math.prod(shape) <= sum(np.size(get_values(shared)) for shared in shareds) else None

    def _has_data_rows(self, variable: Variable, axis: int) -> bool:
        """Whether a variable is computed from data only, and `axis` has the number of rows."""
        found = self._find_data(variable)
        return found is not None and found[1][axis] == self.length

    def _restrict_data(self, variable: Variable, axis: int) -> Variable:
        """Replace a constant or shared array, or a variable that is computed from these, by an input for its rows."""
        found = self._find_data(variable)
        if found is None:
            if self.allow_row_parameters and variable.type.shape[axis] in (None, self.length):
                row_numbers = self.restrict(self._row_numbers, 0)
                return variable[(*[slice(None)] * axis, row_numbers)]
            raise NotRowwiseError(f"{describe_variable(variable)} has an element for each row, but is not data")
        data, shape = found
        if shape[axis] != self.length:
            raise NotRowwiseError(f"{describe_variable(variable)} has shape {shape}, but there are {self.length} rows")
        # An array that is passed twice is sent once.  PyTensor merges equal constants, too, so that they cancel.
        key: Any = variable, axis
        if isinstance(variable, Constant):
            array = variable.data
            key = array.__array_interface__["data"], array.shape, array.strides, variable.type, axis
        if key in self._placeholders:
            return self._placeholders[key]
        lengths = [None, *(length for i, length in enumerate(variable.type.shape) if i != axis)]
        # Errors name rows that are computed from data by the data.
        name = variable.name or variable.owner and ", ".join(map(str, data.sources))
        placeholder = TensorType(variable.type.dtype, tuple(lengths))(name)
        rows: Any = ComputedRows(data.sources, partial(_pick_rows, data.compute, axis, self.selections))
        if variable.owner is None and not axis and not self.selections:
            (rows,) = data.sources
        self.rows_by_placeholder[placeholder] = rows
        self._placeholders[key] = pt.moveaxis(placeholder, 0, axis) if axis else placeholder
        return self._placeholders[key]

    def _restrict_computed(self, variable: Variable, axis: int) -> Variable:
        """Apply the rule of the operation that computes `variable`."""
        node = variable.owner
        for op_class in type(node.op).__mro__:
            if op_class in self.rules:
                restricted = self.rules[op_class](self, node, axis)
                if isinstance(restricted, list):  # one for each output
                    for output, result in zip(node.outputs, restricted, strict=True):
                        if not isinstance(result, NotRowwiseError):
                            self._restricted.setdefault((output, axis), result)
                    restricted = restricted[node.outputs.index(variable)]
                if isinstance(restricted, NotRowwiseError):
                    raise restricted
                restricted.name = variable.name
                return restricted
        raise NotRowwiseError(
            f"{describe_variable(variable)} is computed by {node.op}, which is not known to work row by row"
        )


def _pick_rows(compute: Callable[[], Any], axis: int, selections: tuple[Any, ...]) -> np.ndarray:
    """Return the rows along an axis that indexes select one after another, as axis 0."""
    rows = np.moveaxis(compute(), axis, 0)
    for selection in selections:
        rows = rows[selection]
    return rows


def _compile_data(variable: Variable) -> Any:
    """Compile the function of a variable that is computed from data alone."""
    # In Python, PyTensor evaluates operations of at most 31 inputs.  Rewrites make one addition of many.
    is_wide = any(len(node.inputs) > 31 for node in get_library(variable).sort_nodes([variable]))
    python_mode = get_mode("FAST_COMPILE").excluding("local_add_canonizer", "local_mul_canonizer")
    return pytensor.function([], variable, mode=None if is_wide else python_mode)


def _is_uninitialized(variable: Variable) -> bool:
    """Whether a variable is uninitialized memory, such as the memory into which a loop writes its states."""
    is_inc_subtensor = is_computed_by(variable, IncSubtensor)
    return is_computed_by(variable.owner.inputs[0] if is_inc_subtensor else variable, AllocEmpty)


def _list_possible_lengths(values: Any, axis: int) -> list[int]:
    """Return the lengths that an axis may have: the static one, or those of the data from which it is computed."""
    if values.type.shape[axis] is not None:
        return [values.type.shape[axis]]
    data = filter(is_shared_array, list_leaves([values], with_shapes=False))
    return sorted({length for shared in data for length in _get_shape(shared)[:1]})


def list_leaves(variables: Iterable[Any], with_shapes: bool = True) -> KeysView[Any]:
    """Return the inputs and constants from which variables are computed, in a fixed order.

    With ``with_shapes=False``, arrays of which only the shape is read are left out.
    """

    def list_inputs(variable: Any) -> list[Variable]:
        node = variable.owner
        return [] if node is None or not with_shapes and isinstance(node.op, Shape | Shape_i) else node.inputs

    return dict.fromkeys(v for v in walk(variables, list_inputs) if v.owner is None).keys()


def describe_variable(variable: Variable) -> str:
    """Return the name of a variable, or else its expression."""
    return repr(variable.name) if variable.name else str(variable)


def is_computed_by(variable: Variable, op_type: type) -> bool:
    """Whether a variable is an output of an Op of a class."""
    return variable.owner is not None and isinstance(variable.owner.op, op_type)


def is_shared_array(variable: Variable) -> bool:
    """Whether a variable is a shared variable with a dense array."""
    return isinstance(variable, SharedVariable) and isinstance(variable.type, TensorType)


def _get_shape(data: Any) -> tuple[int, ...]:
    """Return the current shape of a constant or shared variable."""
    return np.shape(data.data if isinstance(data, Constant) else data.get_value(borrow=True))


def list_kept_axes(node: Node) -> list[int]:
    """Return the axes of its input that a reduction keeps."""
    ndim = node.inputs[0].type.ndim
    reduced = range(ndim) if node.op.axis is None else node.op.axis
    return [i for i in range(ndim) if i not in reduced]
