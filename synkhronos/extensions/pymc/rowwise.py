"""Rewriting of a row-wise expression so that it computes chosen rows only.

An expression is row-wise if row ``i`` of its value depends on row ``i`` of the data, and otherwise on nothing that has
rows.  The search starts at the output and walks to the inputs, with one rule for each operation: rows of ``a + b`` need
the same rows of ``a`` and of ``b``; rows of ``effects[group]`` need rows of ``group``, and all of ``effects``.  It ends
at data, which are replaced by inputs of any number of rows, and at parameters, which stay as they are.  An operation
that mixes rows, or that has no rule, raises `NotRowwiseError`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from itertools import takewhile
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile import SharedVariable
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.ops import ViewOp
from pytensor.graph.basic import Constant
from pytensor.graph.replace import vectorize_graph
from pytensor.graph.traversal import walk
from pytensor.scan.op import Scan
from pytensor.sparse.math import Dot as SparseDot
from pytensor.sparse.math import StructuredDot
from pytensor.tensor import TensorType, subtensor
from pytensor.tensor.basic import Alloc, AllocEmpty, ARange, Join, MakeVector, ScalarFromTensor, TensorFromScalar
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.extra_ops import CumOp
from pytensor.tensor.math import All, Dot
from pytensor.tensor.shape import Reshape, Shape, Shape_i, SpecifyShape
from pytensor.tensor.special import LogSoftmax, Softmax
from pytensor.tensor.subtensor import (
    AdvancedIncSubtensor,
    AdvancedSubtensor,
    IncSubtensor,
    Subtensor,
    indices_from_subtensor,
)
from pytensor.tensor.type_other import MakeSlice

from synkhronos.extensions.distributed_rows import PickedRows, get_rows
from synkhronos.extensions.rows_sum_graph import replace_variables
from synkhronos.graph_libraries import get_library
from synkhronos.variable_types import Node, Variable

__all__ = ["NotRowwiseError", "make_rowwise"]

#: A rule for one operation: takes the search, the node, and the axis of its output that runs along the rows.
#: It returns the restricted output.
RowwiseRule = Callable[["RowSearch", Any, int], Any]

#: Maximal number of elements of padded sparse rows, as a multiple of the number of rows and of their elements.
_MAX_PADDING = 4
#: Maximal number of blocks of joined rows: all rows are computed once for each block.
_MAX_BLOCKS = 4


class NotRowwiseError(ValueError):
    """An expression cannot be computed row by row; the message names the reason."""


def make_rowwise(
    terms: Variable, length: int, rules: dict[type, RowwiseRule] | None = None
) -> tuple[Any, dict[Any, Any]]:
    """Return an expression for the terms of any number of rows, and the data that it needs.

    Parameters
    ----------
    terms : variable
        At least one-dimensional; axis 0 runs along the rows.
    length : int
        Number of rows; more than one.
    rules : dict of class to callable, optional
        Rules for further operations, by the class of the Op.

    Returns
    -------
    terms : variable
        Computed from symbolic inputs for the rows, and from parameters.
    rows : dict of variable to ndarray, shared variable or PickedRows
        The values of these inputs, for `synkhronos.extensions.rows_sum.sum_over_rows`.

    Raises
    ------
    NotRowwiseError
        If a row of the terms depends on other rows, or if no rule excludes that.
    """
    if not terms.type.ndim:
        raise NotRowwiseError("its log-density is one number for all rows, as where these depend on each other")
    # The rows of loops are few and costly.
    has_loops = any(isinstance(node.op, Scan) for node in get_library(terms).sort_nodes([terms]))
    search = RowSearch(length, {**_RULES, **(rules or {})}, allow_row_parameters=has_loops)
    restricted = search.restrict(terms, 0)
    nodes = get_library(restricted).sort_nodes([restricted])
    used_variables = {restricted, *(variable for node in nodes for variable in node.inputs)}
    rows = {
        placeholder: values
        for placeholder, values in search.rows_by_placeholder.items()
        if placeholder in used_variables
    }
    if not rows:
        raise NotRowwiseError("no data run along its rows")
    for values in rows.values():
        n_rows = len(get_rows(values))
        if n_rows != length:
            raise NotRowwiseError(f"it has {length} rows, and data along them have {n_rows}")
    restricted = replace_variables(restricted, nodes, {search.n_rows_variable: next(iter(rows)).shape[0]})
    search.check_parameters(restricted)
    return restricted, rows


class RowSearch:
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
    rows_by_placeholder : dict of variable to ndarray, shared variable or `PickedRows`
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
        self._subsearches: dict[Any, RowSearch] = {}
        self._restricted: dict[tuple[Any, int], Any] = {}
        self._placeholders: dict[Any, Any] = {}
        self._values: dict[Any, Any] = {}
        self._row_numbers = pt.constant(np.arange(length))

    def restrict(self, variable: Variable, axis: int) -> Any:
        """Return the expression of `variable` for the computed rows, which run along `axis`."""
        restricted = self._restricted.get((variable, axis))
        if restricted is None:
            folded = self.fold_constants(variable)
            find = self._restrict_data if folded.owner is None else self._restrict_computed
            restricted = self._restricted[variable, axis] = find(folded, axis)
        return restricted

    def restrict_or_broadcast(self, variable: Variable, axis: int) -> Any:
        """Restrict `variable` unless it has length 1 along `axis`, and so is broadcast over the rows."""
        return variable if variable.type.shape[axis] == 1 else self.restrict(variable, axis)

    def merge_equal_rows(self, variable: Variable, axis: int) -> Any:
        """Replace a constant with equal rows, such as a condition that holds everywhere, by one row; else restrict."""
        folded = self.fold_constants(variable)
        if isinstance(folded, Constant):
            first_row = folded.data.take([0], axis)
            if np.array_equal(folded.data, np.broadcast_to(first_row, folded.data.shape)):
                return pt.constant(first_row, name=folded.name)
        return self.restrict_or_broadcast(variable, axis)

    def restrict_picked(self, values: Any, axis: int, index: Any) -> Any:
        """Return the restriction of `values`, indexed along `axis` by a fixed index or slice; None if impossible.

        The data are indexed once, so that everything that is computed from them has these rows only.  With a mask, for
        which there is no other restriction, NotRowwiseError is raised in place of None.
        """
        selection = index
        if not isinstance(index, slice):
            index = self.fold_constants(index)
            if not isinstance(index, Constant) or index.type.ndim != 1:
                return None
            selection = index.data
        for length in _list_lengths(values, axis):
            if length < self.length:
                continue
            key = str(index) if isinstance(index, slice) else index, length
            try:
                return self._get_subsearch(key, length, selection).restrict(values, axis)
            except NotRowwiseError:
                if getattr(selection, "dtype", None) == "bool":
                    raise
        return None

    def restrict_block(self, values: Any, axis: int, start: int) -> Any:
        """Return the restriction of a block of rows, the first of which is row ``start``.

        The other rows repeat the block's first or last row.  A block of one row is broadcast.
        """
        length = values.type.shape[axis]
        if length == 1:
            return values
        selection = np.clip(np.arange(self.length) - start, 0, length - 1)
        return self._get_subsearch((start, length), length, selection).restrict(values, axis)

    def _get_subsearch(self, key: Any, length: int, selection: Any) -> RowSearch:
        """Return the search in data of another length, from which `selection` picks as many rows as this search has."""
        subsearch = self._subsearches.get(key)
        if subsearch is None:
            # The expression is the same for another selection of rows, so that theirs come first.
            selections = (selection, *self.selections)
            subsearch = self._subsearches[key] = RowSearch(length, self.rules, self.allow_row_parameters, selections)
            subsearch.share_data(self)
        return subsearch

    def share_data(self, other: RowSearch) -> None:
        """Add the data that this search finds to those of another one, for the same number of computed rows."""
        self.rows_by_placeholder, self.n_rows_variable = other.rows_by_placeholder, other.n_rows_variable

    def find_row_axis(self, variable: Variable) -> int | None:
        """Return the axis of `variable` that runs along the rows; None if the search has not found one so far."""
        for axis in range(getattr(variable.type, "ndim", 0)):
            if (variable, axis) in self._restricted:
                return axis
        node = variable.owner
        if node is None or not isinstance(node.op, Elemwise | DimShuffle | CAReduce):
            return None
        row_axis = next((axis for axis in map(self.find_row_axis, node.inputs) if axis is not None), None)
        if isinstance(node.op, Elemwise):
            return row_axis
        axes = node.op.new_order if isinstance(node.op, DimShuffle) else _list_kept_axes(node)
        return None if row_axis is None or row_axis not in axes else axes.index(row_axis)

    def restrict_condition(self, variable: Variable) -> Any:
        """Return a condition ``all(...)`` over the computed rows only."""
        if isinstance(variable.type, TensorType):
            variable = self.fold_constants(variable)
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
            if axis is not None:
                return pt.all(self.restrict(inner, axis))
        return variable

    def check_parameters(self, terms: Variable) -> None:
        """Raise NotRowwiseError if a parameter of `terms` is itself computed from the data.

        The master would compute all rows at each evaluation.
        """
        library = get_library(terms)
        nodes = library.sort_nodes([terms])
        from_rows = set(self.rows_by_placeholder)
        for node in nodes:
            if not from_rows.isdisjoint(node.inputs):
                from_rows.update(node.outputs)
        params = {v for node in nodes if not from_rows.isdisjoint(node.outputs) for v in node.inputs} - from_rows
        for variable in params:
            leaves = [leaf for leaf in walk([variable], _list_value_inputs) if leaf.owner is None]
            # Other inputs are random variables and generators.
            data = [leaf for leaf in leaves if isinstance(leaf, Constant) or _is_shared_array(leaf)]
            if len(data) < len(leaves) and any(self.length in _get_shape(leaf) for leaf in data):
                raise NotRowwiseError(f"{_describe(variable)} needs all rows at once")

    def fold_constants(self, variable: Variable) -> Any:
        """Return the value, as a constant, of a variable that is computed from constants; else the variable.

        PyTensor would fold it while compiling; the ranks would compute it at each evaluation.
        """
        if variable.owner is None or not self._is_foldable(variable):
            return variable
        if variable not in self._values:
            values = pytensor.function([], variable, mode="FAST_COMPILE")()
            leaves = [leaf.data for leaf in self.list_leaves(variable)]
            if isinstance(values, np.ndarray) and not any(np.may_share_memory(values, leaf) for leaf in leaves):
                values.flags.writeable = False  # not an array of the user, so evaluations need not check it for changes
            self._values[variable] = pt.constant(values, name=variable.name)
        return self._values[variable]

    @staticmethod
    def list_leaves(variable: Variable) -> list[Any]:
        """Return the inputs and constants from which `variable` is computed."""
        return [leaf for leaf in walk([variable], lambda v: v.owner.inputs if v.owner else []) if leaf.owner is None]

    def _is_foldable(self, variable: Variable) -> bool:
        """Whether a variable depends on constants only, one of which has an axis as long as there are rows."""
        is_set = isinstance(variable.owner.op, IncSubtensor)
        if _is_computed_by(variable.owner.inputs[0] if is_set else variable, AllocEmpty):
            return False  # memory for the states of all steps of a loop, perhaps with the initial states
        leaves = self.list_leaves(variable)
        return all(isinstance(v, Constant) for v in leaves) and any(
            isinstance(v.type, TensorType) and self.length in np.shape(v.data) for v in leaves
        )

    def _restrict_data(self, variable: Variable, axis: int) -> Any:
        """Replace a constant or shared variable by an input for its rows."""
        if not isinstance(variable, Constant | SharedVariable):
            if self.allow_row_parameters and variable.type.shape[axis] in (None, self.length):
                row_numbers = self.restrict(self._row_numbers, 0)
                return variable[(*[slice(None)] * axis, row_numbers)]
            raise NotRowwiseError(f"{_describe(variable)} has an element for each row, but is not data")
        values = variable.data if isinstance(variable, Constant) else variable
        shape = _get_shape(variable)
        if shape[axis] != self.length:
            raise NotRowwiseError(f"{_describe(variable)} has shape {shape}, but there are {self.length} rows")
        if axis and isinstance(variable, SharedVariable):
            raise NotRowwiseError(f"{_describe(variable)} has its rows on axis {axis}: put them on axis 0")
        # An array that is passed twice is sent once.  PyTensor merges equal constants, too, so that they cancel.
        key = variable
        if isinstance(values, np.ndarray):
            key = values.__array_interface__["data"], values.shape, values.strides, variable.type, axis
        if key in self._placeholders:
            return self._placeholders[key]
        lengths = [None, *(length for i, length in enumerate(variable.type.shape) if i != axis)]
        placeholder = TensorType(variable.type.dtype, tuple(lengths))(variable.name)
        values = np.moveaxis(values, axis, 0) if axis else values
        self.rows_by_placeholder[placeholder] = PickedRows(values, self.selections) if self.selections else values
        self._placeholders[key] = pt.moveaxis(placeholder, 0, axis) if axis else placeholder
        return self._placeholders[key]

    def _restrict_computed(self, variable: Variable, axis: int) -> Any:
        """Apply the rule of the operation that computes `variable`."""
        node = variable.owner
        for kind in type(node.op).__mro__:
            if kind in self.rules:
                restricted = self.rules[kind](self, node, axis)
                if isinstance(restricted, list):  # one for each output
                    for output, result in zip(node.outputs, restricted, strict=True):
                        if not isinstance(result, NotRowwiseError):
                            self._restricted.setdefault((output, axis), result)
                    restricted = restricted[node.outputs.index(variable)]
                if isinstance(restricted, NotRowwiseError):
                    raise restricted
                restricted.name = variable.name
                return restricted
        raise NotRowwiseError(f"{_describe(variable)} is computed by {node.op}, which is not known to work row by row")


def _list_lengths(values: Any, axis: int) -> list[int]:
    """Return the lengths that an axis may have: the static one, or those of the data from which it is computed."""
    if values.type.shape[axis] is not None:
        return [values.type.shape[axis]]
    data = [leaf for leaf in walk([values], _list_value_inputs) if _is_shared_array(leaf)]
    return sorted({length for shared in data for length in _get_shape(shared)[:1]})


def _describe(variable: Variable) -> str:
    return repr(variable.name) if variable.name else str(variable)


def _is_computed_by(variable: Variable, op_type: type) -> bool:
    return variable.owner is not None and isinstance(variable.owner.op, op_type)


def _is_shared_array(variable: Variable) -> bool:
    return isinstance(variable, SharedVariable) and isinstance(variable.type, TensorType)


def _list_value_inputs(variable: Variable) -> list[Any]:
    """Return the inputs of the node that computes a variable; none for a shape, which needs no elements."""
    node = variable.owner
    return [] if node is None or isinstance(node.op, Shape | Shape_i) else node.inputs


def _get_shape(data: Any) -> tuple[int, ...]:
    """Return the current shape of a constant or shared variable."""
    return np.shape(data.data if isinstance(data, Constant) else data.get_value(borrow=True))


def _make_mixes_rows_error(node: Node) -> NotRowwiseError:
    return NotRowwiseError(f"{node.op} mixes rows")


# -- one rule for each operation -------------------------------------------------------------------------------


def _restrict_elemwise(search: RowSearch, node: Node, axis: int) -> Any:
    operands = [search.merge_equal_rows(variable, axis) for variable in node.inputs]
    if all(operand.type.shape[axis] == 1 for operand in operands):  # at least one operand has to have the rows
        operands = [search.restrict_or_broadcast(variable, axis) for variable in node.inputs]
    return node.op(*operands)


def _restrict_dimshuffle(search: RowSearch, node: Node, axis: int) -> Any:
    source = node.op.new_order[axis]
    if source == "x":
        raise _make_mixes_rows_error(node)
    return node.op(search.restrict(node.inputs[0], source))


def _restrict_dot(search: RowSearch, node: Node, axis: int) -> Any:
    a, b = node.inputs
    if axis < a.type.ndim - 1:
        return node.op(search.restrict(a, axis), b)
    return node.op(a, search.restrict(b, 1))


def _restrict_blockwise(search: RowSearch, node: Node, axis: int) -> Any:
    n_batch = node.op.batch_ndim(node)
    if axis < n_batch:
        return node.op(*[search.restrict_or_broadcast(variable, axis) for variable in node.inputs], return_list=True)
    if isinstance(node.op.core_op, AdvancedSubtensor):
        return search.restrict(_index_all_batches(node, n_batch), axis)
    if isinstance(node.op.core_op, Alloc):
        return search.restrict(_allocate_all_batches(node, n_batch), axis)
    if isinstance(node.op.core_op, OpFromGraph) and len(node.outputs) == 1:  # PyTensor 3.3's LogSumExp is one
        return search.restrict(_inline_all_batches(node), axis)
    if not isinstance(node.op.core_op, Dot):
        raise _make_mixes_rows_error(node)
    # A product of matrices: rows of the first operand, or columns of the second.
    operand_index = axis - n_batch if node.inputs[0].type.ndim - n_batch == 2 else 1
    operands = list(node.inputs)
    operand = operands[operand_index]
    operands[operand_index] = search.restrict(operand, n_batch + min(operand_index, operand.type.ndim - n_batch - 1))
    return node.op(*operands)


def _inline_all_batches(node: Node) -> Any:
    """Return the graph of an `OpFromGraph` with one output, of all batches."""
    core = node.op.core_op.fgraph
    return vectorize_graph(core.outputs[0], dict(zip(core.inputs, node.inputs, strict=True)))


def _index_all_batches(node: Node, n_batch: int) -> Any:
    """Return an indexing of each batch, such as ``values[batch][index[batch]]``, as one indexing of all batches."""
    values, *index = node.inputs
    idx_list = getattr(node.op.core_op, "idx_list", None)
    if any(isinstance(array, slice) for array in idx_list or []) or any(array.type.dtype == "bool" for array in index):
        raise _make_mixes_rows_error(node)
    width = max(array.type.ndim for array in index) - n_batch
    batches = range(n_batch)
    gaps = [["x"] * (width + n_batch - array.type.ndim) for array in index]
    arrays = [
        array.dimshuffle(*batches, *gap, *range(n_batch, array.type.ndim))
        for array, gap in zip(index, gaps, strict=True)
    ]
    batched = [i for i in batches if not values.type.broadcastable[i]]
    picks = [pt.arange(values.shape[i]).dimshuffle(*["x"] * i, 0, *["x"] * (n_batch + width - i - 1)) for i in batched]
    return values.dimshuffle(*batched, *range(n_batch, values.type.ndim))[(*picks, *arrays)]


def _allocate_all_batches(node: Node, n_batch: int) -> Any:
    """Return an allocation of each batch, which all have the same shape, as one allocation of all batches."""
    value, *_ = node.inputs
    shape = node.outputs[0].type.shape
    if None in shape:
        raise _make_mixes_rows_error(node)
    gap = ["x"] * (len(shape) - value.type.ndim)
    return pt.alloc(value.dimshuffle(*range(n_batch), *gap, *range(n_batch, value.type.ndim)), *shape)


def _restrict_take(search: RowSearch, node: Node, axis: int) -> Any:
    values, index = node.inputs
    if axis:
        return node.op(search.restrict(values, axis), index)
    picked = search.restrict_picked(values, 0, index)
    return node.op(values, search.restrict(index, 0)) if picked is None else picked


def _restrict_advanced_subtensor(search: RowSearch, node: Node, axis: int) -> Any:
    """Restrict ``values[:, a, b]``: full slices, adjacent index arrays, then possibly full slices."""
    values, *operands = node.inputs
    idx_list = getattr(node.op, "idx_list", None)
    index = list(operands if idx_list is None else indices_from_subtensor(operands, idx_list))
    n_slices = next(i for i, selector in enumerate(index) if not _is_full_slice(selector))
    arrays = list(takewhile(lambda selector: isinstance(getattr(selector, "type", None), TensorType), index[n_slices:]))
    if not arrays or not all(map(_is_full_slice, index[n_slices + len(arrays) :])):
        raise _make_mixes_rows_error(node)
    if any(array.type.dtype == "bool" and array.type.ndim > 1 for array in arrays):
        raise _make_mixes_rows_error(node)
    slices = (slice(None),) * n_slices
    ndim = max(array.type.ndim for array in arrays)
    if not n_slices <= axis < n_slices + ndim:
        values_axis = axis if axis < n_slices else axis - ndim + len(arrays)
        return search.restrict(values, values_axis)[(*slices, *arrays)]
    axis -= n_slices
    if len(arrays) == 1:
        picked = search.restrict_picked(values, n_slices, arrays[0])
        if picked is not None:
            return picked
    if any(array.type.dtype == "bool" for array in arrays):
        raise _make_mixes_rows_error(node)
    indexes = []
    for position, array in enumerate(arrays):
        array_axis = axis - (ndim - array.type.ndim)
        if array_axis >= 0 and position == 0 and search.length > 1 and _is_arange(array, array_axis, search.length):
            # values[arange(n), k]: one element of each row; of values with one row, the same row for all.
            if values.type.shape[n_slices] == 1:
                indexes.append(np.zeros([1] * array.type.ndim, "int64"))  # PyTensor may not know the index's length
                continue
            values = search.restrict(values, n_slices)
            pattern = [*["x"] * array_axis, 0, *["x"] * (array.type.ndim - array_axis - 1)]
            indexes.append(pt.arange(search.n_rows_variable).dimshuffle(*pattern))
        else:
            indexes.append(search.restrict_or_broadcast(array, array_axis) if array_axis >= 0 else array)
    return values[(*slices, *indexes)]


def _is_index_vector(index: Any) -> bool:
    return isinstance(getattr(index, "type", None), TensorType) and index.type.ndim == 1 and index.type.dtype != "bool"


def _is_full_slice(index: Any) -> bool:
    """Whether an index selects a full axis."""
    if getattr(index, "owner", None) is not None and isinstance(index.owner.op, MakeSlice):
        return all(isinstance(end, Constant) and end.data is None for end in index.owner.inputs)
    index = index.data if isinstance(index, Constant) else index
    return isinstance(index, slice) and index == slice(None)


def _is_arange(index: Any, axis: int, length: int) -> bool:
    """Whether an index is ``arange(length)`` along `axis`, and has length 1 along all other axes."""
    if any(n != 1 for i, n in enumerate(index.type.shape) if i != axis):
        return False
    if isinstance(index, Constant):
        return bool(np.array_equal(np.ravel(index.data), np.arange(length)))
    while index.owner is not None and isinstance(index.owner.op, DimShuffle | Reshape):
        index = index.owner.inputs[0]
    if index.owner is None or not isinstance(index.owner.op, ARange):
        return False
    start, _, step = index.owner.inputs
    return all(isinstance(bound, Constant) and bound.data == n for bound, n in ((start, 0), (step, 1)))


def _restrict_subtensor(search: RowSearch, node: Node, axis: int) -> Any:
    values, *operands = node.inputs
    index = list(indices_from_subtensor(operands, node.op.idx_list))
    index += [slice(None)] * (values.type.ndim - len(index))
    axes = [i for i, selector in enumerate(index) if isinstance(selector, slice)]
    values_axis = axes[axis]
    if _is_slice_of_all_rows(search, index[values_axis]):
        index[values_axis] = slice(None)
        return search.restrict(values, values_axis)[tuple(index)]
    if index[values_axis] != slice(None):
        selection = _get_fixed_slice(index[values_axis])
        picked = None if selection is None else search.restrict_picked(values, values_axis, selection)
        if picked is None:
            while _is_computed_by(values, Subtensor):
                values = values.owner.inputs[0]
            if _is_computed_by(values, Scan):
                raise NotRowwiseError(f"{values.owner.op} mixes rows: a row depends on the rows before")
            raise NotRowwiseError(f"{node.op} of {_describe(values)} picks rows")
        return picked[tuple(slice(None) if i == values_axis else selector for i, selector in enumerate(index))]
    return node.op(search.restrict(values, values_axis), *operands)


def _is_slice_of_all_rows(search: RowSearch, selection: slice) -> bool:
    """Whether a slice ends at a number that is computed from shapes of data, and is the number of rows.

    Each sequence of a loop is cut off behind the shortest one.
    """
    stop = selection.stop
    if stop is None or isinstance(stop, Constant) or selection.step is not None:
        return False
    if selection.start is not None and getattr(selection.start, "data", None) != 0:
        return False
    read_values = {variable for variable in walk([stop], _list_value_inputs) if variable.owner is None}
    data = [leaf for leaf in search.list_leaves(stop) if not isinstance(leaf, Constant)]
    if not read_values.isdisjoint(data) or not all(map(_is_shared_array, data)):
        return False
    return int(pytensor.function([], stop, mode="FAST_COMPILE")()) == search.length


def _get_fixed_slice(selection: slice) -> slice | None:
    """Return a slice with integers as ends; None if they may change."""
    ends = [selection.start, selection.stop, selection.step]
    if not all(end is None or isinstance(end, Constant) for end in ends):
        return None
    return slice(*[None if end is None else int(end.data) for end in ends])


def _restrict_inc_subtensor(search: RowSearch, node: Node, axis: int) -> Any:
    """Restrict ``set_subtensor(values[:, k], new_values)``."""
    values, new_values, *operands = node.inputs
    index = list(indices_from_subtensor(operands, node.op.idx_list))
    index += [slice(None)] * (values.type.ndim - len(index))
    if index[axis] != slice(None):
        raise _make_mixes_rows_error(node)
    axes = [i for i, selector in enumerate(index) if isinstance(selector, slice)]
    new_values_axis = axes.index(axis) - (len(axes) - new_values.type.ndim)
    return node.op(
        search.restrict(values, axis),
        search.restrict_or_broadcast(new_values, new_values_axis) if new_values_axis >= 0 else new_values,
        *operands,
    )


def _restrict_advanced_inc_subtensor(search: RowSearch, node: Node, axis: int) -> Any:
    """Restrict ``set_subtensor(values[index], new_values)``.

    The index is constant, as for predictors with missing values, or selects an element of each row.
    """
    values, new_values, *operands = node.inputs
    idx_list = getattr(node.op, "idx_list", None)
    index, *other_indexes = operands if idx_list is None else indices_from_subtensor(operands, idx_list)
    is_set = getattr(node.op, "set_instead_of_inc", False)
    if axis == 0 and other_indexes and all(map(_is_index_vector, (index, *other_indexes))):
        if not _is_arange(index, 0, search.length):
            raise _make_mixes_rows_error(node)
        columns = [search.restrict_or_broadcast(other_index, 0) for other_index in other_indexes]
        picked = search.restrict(values, 0)[(pt.arange(search.n_rows_variable), *columns)]
        if new_values.type.ndim:
            new_values = search.restrict_or_broadcast(new_values, 0)
        return (pt.set_subtensor if is_set else pt.inc_subtensor)(picked, new_values)
    index = search.fold_constants(index)
    is_known = isinstance(index, Constant) and index.type.ndim == 1
    if not is_set or axis or not is_known or not all(map(_is_full_slice, other_indexes)):
        raise _make_mixes_rows_error(node)
    picked_rows = np.arange(search.length)[index.data]
    position = np.full(search.length, -1)
    position[picked_rows] = np.arange(len(picked_rows))
    chosen = search.restrict(pt.constant(position), 0)
    if new_values.type.ndim == values.type.ndim and new_values.type.shape[0] != 1:  # else the same for all rows
        new_values = _scatter_constant_values(new_values, picked_rows, search.length)
        if isinstance(new_values, Constant):
            new_values = search.restrict(new_values, 0)
        else:
            new_values = new_values[pt.maximum(chosen, 0)]
    is_new = (chosen >= 0).dimshuffle(0, *["x"] * (values.type.ndim - 1))
    return pt.switch(is_new, new_values, search.restrict(values, 0)).astype(values.type.dtype)


def _scatter_constant_values(values: Any, picked_rows: np.ndarray, length: int) -> Any:
    """Return an array of all rows, if the values of the picked rows are computed from constants; else `values`."""
    leaves = [v for v in walk([values], lambda v: v.owner.inputs if v.owner else []) if not v.owner]
    if not all(isinstance(leaf, Constant) for leaf in leaves):
        return values
    picked_values = pytensor.function([], values, mode="FAST_COMPILE")()
    full = np.zeros((length, *picked_values.shape[1:]), picked_values.dtype)
    full[picked_rows] = picked_values
    return pt.constant(full)


def _restrict_alloc_empty(search: RowSearch, node: Node, axis: int) -> Any:
    shape = node.inputs
    return node.op(*shape[:axis], search.n_rows_variable, *shape[axis + 1 :])


def _restrict_sparse_dot(search: RowSearch, node: Node, axis: int) -> Any:
    """Restrict a product of a constant sparse matrix and a dense one.

    Each row has as many indexes and values as the row with most elements.
    """
    design, dense = node.inputs
    if axis or not isinstance(design, Constant) or not isinstance(dense.type, TensorType):
        raise _make_mixes_rows_error(node)
    rows = design.data.tocsr()
    counts = np.diff(rows.indptr)
    width = max(1, counts.max(initial=0))
    if width * len(counts) > _MAX_PADDING * (rows.nnz + len(counts)):
        raise NotRowwiseError(f"{node.op}: a row of the sparse matrix has {width} elements, and most have far fewer")
    is_element = np.arange(width) < counts[:, None]
    columns, values = np.zeros(is_element.shape, "int64"), np.zeros(is_element.shape, rows.dtype)
    columns[is_element], values[is_element] = rows.indices, rows.data
    picked = dense[search.restrict(pt.constant(columns), 0)]
    product = (search.restrict(pt.constant(values), 0)[:, :, None] * picked).sum(axis=1)
    return product.astype(node.outputs[0].type.dtype)


def _restrict_reduction(search: RowSearch, node: Node, axis: int) -> Any:
    return node.op(search.restrict(node.inputs[0], _list_kept_axes(node)[axis]))


def _list_kept_axes(node: Node) -> list[int]:
    """Return the axes that a reduction keeps."""
    ndim = node.inputs[0].type.ndim
    reduced = range(ndim) if node.op.axis is None else node.op.axis
    return [i for i in range(ndim) if i not in reduced]


def _restrict_unary(search: RowSearch, node: Node, axis: int) -> Any:
    """Restrict an operation on one array along some axes, such as a softmax, or along all if its axis is None."""
    (values,) = node.inputs
    axes = getattr(node.op, "axis", ())  # a view has none
    if axes is None or axis in np.atleast_1d(axes) % values.type.ndim:
        raise _make_mixes_rows_error(node)
    return node.op(search.restrict(values, axis))


def _restrict_join(search: RowSearch, node: Node, axis: int) -> Any:
    join_axis = getattr(node.op, "axis", None)
    axis_inputs = [] if join_axis is not None else node.inputs[:1]
    if join_axis is None:
        join_axis = getattr(axis_inputs[0], "data", None)
    arrays = node.inputs[len(axis_inputs) :]
    if join_axis is None:
        raise _make_mixes_rows_error(node)
    if int(join_axis) % arrays[0].type.ndim == axis:
        return _restrict_joined_blocks(search, node, arrays, axis)
    return node.op(*axis_inputs, *[search.restrict(array, axis) for array in arrays])


def _restrict_joined_blocks(search: RowSearch, node: Node, blocks: list[Any], axis: int) -> Any:
    """Restrict blocks of rows of fixed lengths, one below the other: each row is computed in each block."""
    lengths = [block.type.shape[axis] for block in blocks]
    if None in lengths or sum(lengths) != search.length or len(blocks) > _MAX_BLOCKS:
        raise _make_mixes_rows_error(node)
    block_numbers = search.restrict(pt.constant(np.repeat(np.arange(len(blocks)), lengths)), 0)
    pattern = [0 if i == axis else "x" for i in range(blocks[0].type.ndim)]
    starts = (np.cumsum(lengths) - lengths).tolist()
    joined, *others = map(search.restrict_block, blocks, [axis] * len(blocks), starts)
    for number, block in enumerate(others, 1):
        joined = pt.switch(pt.eq(block_numbers, number).dimshuffle(*pattern), block, joined)
    return joined.astype(node.outputs[0].type.dtype)


def _restrict_alloc(search: RowSearch, node: Node, axis: int) -> Any:
    value, *shape = node.inputs
    value_axis = axis - (len(shape) - value.type.ndim)
    if value_axis >= 0:
        value = search.restrict_or_broadcast(value, value_axis)
    return node.op(value, *shape[:axis], search.n_rows_variable, *shape[axis + 1 :])


def _restrict_specify_shape(search: RowSearch, node: Node, axis: int) -> Any:
    values, *shape = node.inputs
    lengths = [None if i == axis or length.type.ndim != 0 else length for i, length in enumerate(shape)]
    return pt.specify_shape(search.restrict(values, axis), lengths)


def _restrict_reshape(search: RowSearch, node: Node, axis: int) -> Any:
    values, shape = node.inputs
    length = values.type.shape[0] if values.type.ndim else None
    if axis or not length == node.outputs[0].type.shape[0] == search.length:
        raise NotRowwiseError(f"{node.op} of {_describe(values)} may mix rows")
    other_lengths = [shape[i] for i in range(1, node.outputs[0].type.ndim)]
    return pt.reshape(search.restrict(values, 0), [search.n_rows_variable, *other_lengths])


def _restrict_op_from_graph(search: RowSearch, node: Node, axis: int) -> Any:
    graph = node.op.fgraph
    if hasattr(graph, "unfreeze"):  # since 3.1
        graph = graph.unfreeze()
    (output, *other_outputs) = graph.outputs
    if other_outputs:
        raise NotRowwiseError(f"{node.op} has several outputs")
    replaced = dict(zip(graph.inputs, node.inputs, strict=True))
    return search.restrict(replace_variables(output, get_library(output).sort_nodes([output]), replaced), axis)


_RULES: dict[type, RowwiseRule] = {
    Elemwise: _restrict_elemwise,
    DimShuffle: _restrict_dimshuffle,
    Dot: _restrict_dot,
    Blockwise: _restrict_blockwise,
    AdvancedSubtensor: _restrict_advanced_subtensor,
    Subtensor: _restrict_subtensor,
    IncSubtensor: _restrict_inc_subtensor,
    AdvancedIncSubtensor: _restrict_advanced_inc_subtensor,
    AllocEmpty: _restrict_alloc_empty,
    SparseDot: _restrict_sparse_dot,
    StructuredDot: _restrict_sparse_dot,
    CAReduce: _restrict_reduction,
    CumOp: _restrict_unary,
    Softmax: _restrict_unary,
    LogSoftmax: _restrict_unary,
    Join: _restrict_join,
    Alloc: _restrict_alloc,
    SpecifyShape: _restrict_specify_shape,
    Reshape: _restrict_reshape,
    ViewOp: _restrict_unary,
    OpFromGraph: _restrict_op_from_graph,
}
if hasattr(subtensor, "AdvancedSubtensor1"):  # gone in newer versions
    _RULES[subtensor.AdvancedSubtensor1] = _restrict_take
    _RULES[subtensor.AdvancedIncSubtensor1] = _restrict_advanced_inc_subtensor
