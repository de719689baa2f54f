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
from pytensor.graph.traversal import walk
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

from synkhronos.extensions.rows_sum import replace_variables
from synkhronos.graphs import library_of

__all__ = ["NotRowwiseError", "make_rowwise"]

#: A rule for one operation: takes the search, the node, and the axis of its output that runs along the rows.
#: It returns the restricted output.
Rule = Callable[["RowSearch", Any, int], Any]


#: Most elements of padded sparse rows, as a multiple of the rows and their elements.
_MAX_PADDING = 4


class NotRowwiseError(ValueError):
    """An expression that cannot be computed row by row; the message names the reason."""


def make_rowwise(terms: Any, length: int, rules: dict[type, Rule] | None = None) -> tuple[Any, dict[Any, Any]]:
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
    rows : dict of variable to ndarray or shared variable
        The values of these inputs, for `synkhronos.extensions.rows_sum.sum_over_rows`.

    Raises
    ------
    NotRowwiseError
        If a row of the terms depends on other rows, or if no rule excludes that.
    """
    if not terms.type.ndim:
        raise NotRowwiseError("its log-density is one number for all rows, as where these depend on each other")
    search = RowSearch(length, {**_RULES, **(rules or {})})
    made = search.restrict(terms, 0)
    nodes = library_of(made).sort_nodes([made])
    read = {made, *(variable for node in nodes for variable in node.inputs)}
    rows = {stand_in: values for stand_in, values in search.sources.items() if stand_in in read}
    if not rows:
        raise NotRowwiseError("no data run along its rows")
    made = replace_variables(made, nodes, {search.count: next(iter(rows)).shape[0]})
    search.check_parameters(made)
    return made, rows


class RowSearch:
    """Search for the data of one expression.

    Parameters
    ----------
    length : int
        Number of rows.
    rules : dict of class to callable
        Rules by the class of the Op.
    index : ndarray, optional
        Indexes of the rows that are taken from longer data.

    Attributes
    ----------
    length : int
        Number of rows.
    sources : dict of variable to ndarray or shared variable
        The data found so far, by the input that replaces them.
    count : variable
        Integer scalar: the number of rows that are computed.
    """

    def __init__(self, length: int, rules: dict[type, Rule], index: np.ndarray | None = None):
        self.length = length
        self.sources: dict[Any, Any] = {}
        self.count = pt.lscalar("count")
        self._rules = rules
        self._index = index
        self._subsearches: dict[Any, RowSearch] = {}
        self._restricted: dict[tuple[Any, int], Any] = {}
        self._values: dict[Any, Any] = {}

    def restrict(self, variable: Any, axis: int) -> Any:
        """Return the expression of `variable` for the computed rows, which run along `axis`."""
        made = self._restricted.get((variable, axis))
        if made is None:
            found = self.fold_constants(variable)
            find = self._restrict_data if found.owner is None else self._restrict_computed
            made = self._restricted[variable, axis] = find(found, axis)
        return made

    def restrict_or_broadcast(self, variable: Any, axis: int) -> Any:
        """Restrict `variable` unless it has length 1 along `axis`, and so is broadcast over the rows."""
        return variable if variable.type.shape[axis] == 1 else self.restrict(variable, axis)

    def merge_equal_rows(self, variable: Any, axis: int) -> Any:
        """Replace a constant with equal rows, such as a condition that holds everywhere, by one row; else restrict."""
        found = self.fold_constants(variable)
        if isinstance(found, Constant):
            one = found.data.take([0], axis)
            if np.array_equal(found.data, np.broadcast_to(one, found.data.shape)):
                return pt.constant(one, name=found.name)
        return self.restrict_or_broadcast(variable, axis)

    def restrict_picked(self, values: Any, axis: int, index: Any) -> Any:
        """Return the restriction of ``values[index]`` for a constant index into longer data; None if impossible.

        The data are indexed once, so that everything that is computed from them has these rows only.
        """
        length = values.type.shape[axis]
        if not isinstance(index, Constant) or index.type.ndim != 1 or length is None or length < self.length:
            return None
        picks = np.arange(length)[index.data]
        other = self._subsearches.get((index, length))
        if other is None:
            other = self._subsearches[index, length] = RowSearch(length, self._rules, picks)
            other.sources, other.count = self.sources, self.count
        try:
            return other.restrict(values, axis)
        except NotRowwiseError:
            return None

    def find_row_axis(self, variable: Any) -> int | None:
        """Return the axis of `variable` that runs along the rows; None if the search has not found one so far."""
        for axis in range(getattr(variable.type, "ndim", 0)):
            if (variable, axis) in self._restricted:
                return axis
        node = variable.owner
        if node is None or not isinstance(node.op, Elemwise | DimShuffle | CAReduce):
            return None
        found = next((axis for axis in map(self.find_row_axis, node.inputs) if axis is not None), None)
        if isinstance(node.op, Elemwise):
            return found
        kept = node.op.new_order if isinstance(node.op, DimShuffle) else _list_kept_axes(node)
        return None if found is None or found not in kept else kept.index(found)

    def restrict_condition(self, variable: Any) -> Any:
        """Return a condition ``all(...)`` over the computed rows only."""
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

    def check_parameters(self, terms: Any) -> None:
        """Raise NotRowwiseError if a parameter of `terms` is itself computed from the data.

        The master would compute all rows at each evaluation.
        """
        library = library_of(terms)
        nodes = library.sort_nodes([terms])
        from_rows = set(self.sources)
        for node in nodes:
            if not from_rows.isdisjoint(node.inputs):
                from_rows.update(node.outputs)
        params = {v for node in nodes if not from_rows.isdisjoint(node.outputs) for v in node.inputs} - from_rows
        for variable in params:
            read = [one for one in walk([variable], _list_value_inputs) if one.owner is None]
            # Other inputs are random variables and generators.
            data = [one for one in read if isinstance(one, Constant) or _is_shared_array(one)]
            if len(data) < len(read) and any(self.length in _get_shape(one) for one in data):
                raise NotRowwiseError(f"{_describe(variable)} needs all rows at once")

    def fold_constants(self, variable: Any) -> Any:
        """Return the value, as a constant, of a variable that is computed from constants; else the variable.

        PyTensor would fold it while compiling; the ranks would compute it at each evaluation.
        """
        if variable.owner is None or not self._is_foldable(variable):
            return variable
        if variable not in self._values:
            values = pytensor.function([], variable, mode="FAST_COMPILE")()
            self._values[variable] = pt.constant(values, name=variable.name)
        return self._values[variable]

    def _is_foldable(self, variable: Any) -> bool:
        """Whether a variable depends on constants only, one of which has an axis as long as there are rows."""
        leaves = [variable]
        for node in library_of(variable).sort_nodes([variable]):
            leaves += [v for v in node.inputs if v.owner is None]
        leaves = [v for v in leaves if v.owner is None]
        return all(isinstance(v, Constant) for v in leaves) and any(
            isinstance(v.type, TensorType) and self.length in np.shape(v.data) for v in leaves
        )

    def _restrict_data(self, variable: Any, axis: int) -> Any:
        """Replace a constant or shared variable by an input for its rows."""
        if not isinstance(variable, Constant | SharedVariable):
            raise NotRowwiseError(f"{_describe(variable)} has an element for each row, but is not data")
        values = variable.data if isinstance(variable, Constant) else variable
        shape = _get_shape(variable)
        if shape[axis] != self.length:
            raise NotRowwiseError(f"{_describe(variable)} has shape {shape}, but there are {self.length} rows")
        if axis and isinstance(variable, SharedVariable):
            raise NotRowwiseError(f"{_describe(variable)} has its rows on axis {axis}: put them on axis 0")
        if self._index is not None:
            if isinstance(variable, SharedVariable):
                raise NotRowwiseError(f"{_describe(variable)} may change, and some of its rows are picked")
            values = np.take(values, self._index, axis)
        lengths = [None, *(length for i, length in enumerate(variable.type.shape) if i != axis)]
        stand_in = TensorType(variable.type.dtype, tuple(lengths))(variable.name)
        self.sources[stand_in] = np.moveaxis(values, axis, 0) if axis else values
        return pt.moveaxis(stand_in, 0, axis) if axis else stand_in

    def _restrict_computed(self, variable: Any, axis: int) -> Any:
        """Apply the rule of the operation that computes `variable`."""
        node = variable.owner
        for kind in type(node.op).__mro__:
            if kind in self._rules:
                made = self._rules[kind](self, node, axis)
                made = made[node.outputs.index(variable)] if isinstance(made, list) else made
                made.name = variable.name
                return made
        raise NotRowwiseError(f"{_describe(variable)} is computed by {node.op}, which is not known to work row by row")


def _describe(variable: Any) -> str:
    return repr(variable.name) if variable.name else str(variable)


def _is_shared_array(variable: Any) -> bool:
    return isinstance(variable, SharedVariable) and isinstance(variable.type, TensorType)


def _list_value_inputs(variable: Any) -> list[Any]:
    """Return the inputs of the node that computes a variable; none for a shape, which needs no elements."""
    node = variable.owner
    return [] if node is None or isinstance(node.op, Shape | Shape_i) else node.inputs


def _get_shape(data: Any) -> tuple[int, ...]:
    """Return the current shape of a constant or shared variable."""
    return np.shape(data.data if isinstance(data, Constant) else data.get_value(borrow=True))


def _make_error(node: Any) -> NotRowwiseError:
    return NotRowwiseError(f"{node.op} mixes rows")


# -- one rule for each operation -------------------------------------------------------------------------------


def _restrict_elemwise(search: RowSearch, node: Any, axis: int) -> Any:
    made = [search.merge_equal_rows(variable, axis) for variable in node.inputs]
    if all(one.type.shape[axis] == 1 for one in made):  # at least one operand has to have the rows
        made = [search.restrict_or_broadcast(variable, axis) for variable in node.inputs]
    return node.op(*made)


def _restrict_dimshuffle(search: RowSearch, node: Any, axis: int) -> Any:
    source = node.op.new_order[axis]
    if source == "x":
        raise _make_error(node)
    return node.op(search.restrict(node.inputs[0], source))


def _restrict_dot(search: RowSearch, node: Any, axis: int) -> Any:
    a, b = node.inputs
    if axis < a.type.ndim - 1:
        return node.op(search.restrict(a, axis), b)
    return node.op(a, search.restrict(b, 1))


def _restrict_blockwise(search: RowSearch, node: Any, axis: int) -> Any:
    n_batch = node.op.batch_ndim(node)
    if axis < n_batch:
        return node.op(*[search.restrict_or_broadcast(variable, axis) for variable in node.inputs], return_list=True)
    if isinstance(node.op.core_op, AdvancedSubtensor):
        return search.restrict(_index_all_batches(node, n_batch), axis)
    if not isinstance(node.op.core_op, Dot):
        raise _make_error(node)
    # A product of matrices: rows of the first operand, or columns of the second.
    which = axis - n_batch if node.inputs[0].type.ndim - n_batch == 2 else 1
    operands = list(node.inputs)
    operands[which] = search.restrict(operands[which], n_batch + min(which, operands[which].type.ndim - n_batch - 1))
    return node.op(*operands)


def _index_all_batches(node: Any, n_batch: int) -> Any:
    """Return an indexing of each batch, such as ``values[batch][index[batch]]``, as one indexing of all batches."""
    values, *index = node.inputs
    idx_list = getattr(node.op.core_op, "idx_list", None)
    if any(isinstance(one, slice) for one in idx_list or []) or any(one.type.dtype == "bool" for one in index):
        raise _make_error(node)
    width = max(one.type.ndim for one in index) - n_batch
    batches = range(n_batch)
    gaps = [["x"] * (width + n_batch - one.type.ndim) for one in index]
    arrays = [
        one.dimshuffle(*batches, *gap, *range(n_batch, one.type.ndim)) for one, gap in zip(index, gaps, strict=True)
    ]
    batched = [i for i in batches if not values.type.broadcastable[i]]
    picks = [pt.arange(values.shape[i]).dimshuffle(*["x"] * i, 0, *["x"] * (n_batch + width - i - 1)) for i in batched]
    return values.dimshuffle(*batched, *range(n_batch, values.type.ndim))[(*picks, *arrays)]


def _restrict_take(search: RowSearch, node: Any, axis: int) -> Any:
    values, index = node.inputs
    if axis:
        return node.op(search.restrict(values, axis), index)
    picked = search.restrict_picked(values, 0, index)
    return node.op(values, search.restrict(index, 0)) if picked is None else picked


def _restrict_advanced(search: RowSearch, node: Any, axis: int) -> Any:
    """Restrict ``values[:, a, b]``: full slices, adjacent index arrays, then possibly full slices."""
    values, *operands = node.inputs
    idx_list = getattr(node.op, "idx_list", None)
    index = list(operands if idx_list is None else indices_from_subtensor(operands, idx_list))
    first = next(i for i, one in enumerate(index) if not _is_full_slice(one))
    arrays = list(takewhile(lambda one: isinstance(getattr(one, "type", None), TensorType), index[first:]))
    if not arrays or not all(map(_is_full_slice, index[first + len(arrays) :])):
        raise _make_error(node)
    if any(one.type.dtype == "bool" and one.type.ndim > 1 for one in arrays):
        raise _make_error(node)
    before = (slice(None),) * first
    ndim = max(one.type.ndim for one in arrays)
    if not first <= axis < first + ndim:
        own = axis if axis < first else axis - ndim + len(arrays)
        return search.restrict(values, own)[(*before, *arrays)]
    axis -= first
    if len(arrays) == 1:
        picked = search.restrict_picked(values, first, arrays[0])
        if picked is not None:
            return picked
    if any(one.type.dtype == "bool" for one in arrays):
        raise _make_error(node)
    chosen = []
    for position, one in enumerate(arrays):
        own = axis - (ndim - one.type.ndim)
        if own >= 0 and position == 0 and search.length > 1 and _is_row_number(one, own, search.length):
            # values[arange(n), k]: one element of each row; of values with one row, the same row for all.
            if values.type.shape[first] == 1:
                chosen.append(one)
                continue
            values = search.restrict(values, first)
            chosen.append(pt.arange(search.count).dimshuffle(*["x"] * own, 0, *["x"] * (one.type.ndim - own - 1)))
        else:
            chosen.append(search.restrict_or_broadcast(one, own) if own >= 0 else one)
    return values[(*before, *chosen)]


def _is_full_slice(one: Any) -> bool:
    """Whether an index selects a full axis."""
    if getattr(one, "owner", None) is not None and isinstance(one.owner.op, MakeSlice):
        return all(isinstance(end, Constant) and end.data is None for end in one.owner.inputs)
    index = one.data if isinstance(one, Constant) else one
    return isinstance(index, slice) and index == slice(None)


def _is_row_number(index: Any, axis: int, length: int) -> bool:
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
    return all(isinstance(one, Constant) and one.data == n for one, n in ((start, 0), (step, 1)))


def _restrict_subtensor(search: RowSearch, node: Any, axis: int) -> Any:
    values, *operands = node.inputs
    index = list(indices_from_subtensor(operands, node.op.idx_list))
    index += [slice(None)] * (values.type.ndim - len(index))
    kept = [i for i, one in enumerate(index) if isinstance(one, slice)]
    own = kept[axis]
    if index[own] != slice(None):
        picks = _get_constant_index(index[own], values.type.shape[own])
        picked = None if picks is None else search.restrict_picked(values, own, picks)
        if picked is None:
            raise NotRowwiseError(f"{node.op} of {_describe(values)} picks rows")
        return picked[tuple(slice(None) if i == own else one for i, one in enumerate(index))]
    return node.op(search.restrict(values, own), *operands)


def _get_constant_index(selection: slice, length: int | None) -> Any:
    """Return the indexes that a slice selects from an axis, as a constant; None if they may change."""
    ends = [selection.start, selection.stop, selection.step]
    if length is None or not all(end is None or isinstance(end, Constant) for end in ends):
        return None
    return pt.constant(np.arange(length)[slice(*[None if end is None else end.data for end in ends])])


def _restrict_inc_subtensor(search: RowSearch, node: Any, axis: int) -> Any:
    """Restrict ``set_subtensor(values[:, k], part)``."""
    values, part, *operands = node.inputs
    index = list(indices_from_subtensor(operands, node.op.idx_list))
    index += [slice(None)] * (values.type.ndim - len(index))
    if index[axis] != slice(None):
        raise _make_error(node)
    kept = [i for i, one in enumerate(index) if isinstance(one, slice)]
    own = kept.index(axis) - (len(kept) - part.type.ndim)
    return node.op(
        search.restrict(values, axis), search.restrict_or_broadcast(part, own) if own >= 0 else part, *operands
    )


def _restrict_advanced_set(search: RowSearch, node: Any, axis: int) -> Any:
    """Restrict ``set_subtensor(values[index], part)`` for a constant index, as of predictors with missing values."""
    values, part, *operands = node.inputs
    idx_list = getattr(node.op, "idx_list", None)
    index, *others = operands if idx_list is None else indices_from_subtensor(operands, idx_list)
    index = search.fold_constants(index)
    is_set = getattr(node.op, "set_instead_of_inc", False)
    is_known = isinstance(index, Constant) and index.type.ndim == 1
    if not is_set or axis or not is_known or not all(map(_is_full_slice, others)):
        raise _make_error(node)
    picks = np.arange(search.length)[index.data]
    position = np.full(search.length, -1)
    position[picks] = np.arange(len(picks))
    chosen = search.restrict(pt.constant(position), 0)
    if part.type.ndim == values.type.ndim and part.type.shape[0] != 1:  # else the same for all rows
        part = _fold_part(part, picks, search.length)
        part = search.restrict(part, 0) if isinstance(part, Constant) else part[pt.maximum(chosen, 0)]
    is_new = (chosen >= 0).dimshuffle(0, *["x"] * (values.type.ndim - 1))
    return pt.switch(is_new, part, search.restrict(values, 0)).astype(values.type.dtype)


def _fold_part(part: Any, picks: np.ndarray, length: int) -> Any:
    """Return an array of all rows, if the values of the picked rows are computed from constants; else `part`."""
    if any(
        not isinstance(v, Constant) for v in walk([part], lambda v: v.owner.inputs if v.owner else []) if not v.owner
    ):
        return part
    values = pytensor.function([], part, mode="FAST_COMPILE")()
    full = np.zeros((length, *values.shape[1:]), values.dtype)
    full[picks] = values
    return pt.constant(full)


def _restrict_alloc_empty(search: RowSearch, node: Any, axis: int) -> Any:
    shape = node.inputs
    return node.op(*shape[:axis], search.count, *shape[axis + 1 :])


def _restrict_sparse_dot(search: RowSearch, node: Any, axis: int) -> Any:
    """Restrict a product of a constant sparse matrix and a dense one.

    Each row has as many indexes and values as the row with most elements.
    """
    design, dense = node.inputs
    if axis or not isinstance(design, Constant) or not isinstance(dense.type, TensorType):
        raise _make_error(node)
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


def _restrict_reduction(search: RowSearch, node: Any, axis: int) -> Any:
    return node.op(search.restrict(node.inputs[0], _list_kept_axes(node)[axis]))


def _list_kept_axes(node: Any) -> list[int]:
    """Return the axes that a reduction keeps."""
    ndim = node.inputs[0].type.ndim
    reduced = range(ndim) if node.op.axis is None else node.op.axis
    return [i for i in range(ndim) if i not in reduced]


def _restrict_cumulative(search: RowSearch, node: Any, axis: int) -> Any:
    if node.op.axis is None or node.op.axis == axis:
        raise _make_error(node)
    return node.op(search.restrict(node.inputs[0], axis))


def _restrict_softmax(search: RowSearch, node: Any, axis: int) -> Any:
    (values,) = node.inputs
    over = node.op.axis
    over = range(values.type.ndim) if over is None else np.atleast_1d(over) % values.type.ndim
    if axis in over:
        raise _make_error(node)
    return node.op(search.restrict(values, axis))


def _restrict_join(search: RowSearch, node: Any, axis: int) -> Any:
    along = getattr(node.op, "axis", None)
    first = [] if along is not None else node.inputs[:1]
    if along is None:
        along = getattr(first[0], "data", None)
    arrays = node.inputs[len(first) :]
    if along is None or int(along) % arrays[0].type.ndim == axis:
        raise _make_error(node)
    return node.op(*first, *[search.restrict(one, axis) for one in arrays])


def _restrict_alloc(search: RowSearch, node: Any, axis: int) -> Any:
    value, *shape = node.inputs
    own = axis - (len(shape) - value.type.ndim)
    if own >= 0:
        value = search.restrict_or_broadcast(value, own)
    return node.op(value, *shape[:axis], search.count, *shape[axis + 1 :])


def _restrict_specify_shape(search: RowSearch, node: Any, axis: int) -> Any:
    values, *shape = node.inputs
    lengths = [None if i == axis or one.type.ndim != 0 else one for i, one in enumerate(shape)]
    return pt.specify_shape(search.restrict(values, axis), lengths)


def _restrict_reshape(search: RowSearch, node: Any, axis: int) -> Any:
    values, shape = node.inputs
    same = axis == 0 and values.type.ndim and values.type.shape[0] == node.outputs[0].type.shape[0] == search.length
    if not same:
        raise NotRowwiseError(f"{node.op} of {_describe(values)} may mix rows")
    others = [shape[i] for i in range(1, node.outputs[0].type.ndim)]
    return pt.reshape(search.restrict(values, 0), [search.count, *others])


def _restrict_view(search: RowSearch, node: Any, axis: int) -> Any:
    return node.op(search.restrict(node.inputs[0], axis))


def _restrict_op_from_graph(search: RowSearch, node: Any, axis: int) -> Any:
    graph = node.op.fgraph
    if hasattr(graph, "unfreeze"):  # since 3.1
        graph = graph.unfreeze()
    (output, *others) = graph.outputs
    if others:
        raise NotRowwiseError(f"{node.op} has several outputs")
    replaced = dict(zip(graph.inputs, node.inputs, strict=True))
    return search.restrict(replace_variables(output, library_of(output).sort_nodes([output]), replaced), axis)


_RULES: dict[type, Rule] = {
    Elemwise: _restrict_elemwise,
    DimShuffle: _restrict_dimshuffle,
    Dot: _restrict_dot,
    Blockwise: _restrict_blockwise,
    AdvancedSubtensor: _restrict_advanced,
    Subtensor: _restrict_subtensor,
    IncSubtensor: _restrict_inc_subtensor,
    AdvancedIncSubtensor: _restrict_advanced_set,
    AllocEmpty: _restrict_alloc_empty,
    SparseDot: _restrict_sparse_dot,
    StructuredDot: _restrict_sparse_dot,
    CAReduce: _restrict_reduction,
    CumOp: _restrict_cumulative,
    Softmax: _restrict_softmax,
    LogSoftmax: _restrict_softmax,
    Join: _restrict_join,
    Alloc: _restrict_alloc,
    SpecifyShape: _restrict_specify_shape,
    Reshape: _restrict_reshape,
    ViewOp: _restrict_view,
    OpFromGraph: _restrict_op_from_graph,
}
if hasattr(subtensor, "AdvancedSubtensor1"):  # gone in newer versions
    _RULES[subtensor.AdvancedSubtensor1] = _restrict_take
    _RULES[subtensor.AdvancedIncSubtensor1] = _restrict_advanced_set
