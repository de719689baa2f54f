"""Which part of an expression can be computed row by row?

`by_rows`
    Finds the data that run along the same rows as some terms, and makes the terms of these rows alone.
`Mixed`
    Why that can't be done.

The question is asked backwards.  To have some rows of ``a + b``, it takes those rows of ``a`` and of ``b``; to have
rows of ``effects[group]``, it takes those rows of ``group``, and ``effects`` whole.  So it goes from operation to
operation, until it comes to data, which are cut, or to what is needed whole, which is left as it is.  An operation of
which nothing is known here, or one that needs other rows, ends the search with `Mixed`.
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
from pytensor.tensor import TensorType, subtensor
from pytensor.tensor.basic import Alloc, ARange, Join, MakeVector, ScalarFromTensor, TensorFromScalar
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.extra_ops import CumOp
from pytensor.tensor.math import All, Dot
from pytensor.tensor.shape import Reshape, Shape, Shape_i, SpecifyShape
from pytensor.tensor.special import LogSoftmax, Softmax
from pytensor.tensor.subtensor import AdvancedSubtensor, IncSubtensor, Subtensor, indices_from_subtensor
from pytensor.tensor.type_other import MakeSlice

from synkhronos.extensions.rows_sum import rebuilt
from synkhronos.graphs import library_of

__all__ = ["Mixed", "by_rows"]

#: How a rule is called: with the search, the node and the axis of its output that runs along the rows.
Rule = Callable[["Search", Any, int], Any]


class Mixed(ValueError):
    """Terms that can't be computed row by row; the message says why."""


def by_rows(terms: Any, length: int, rules: dict[type, Rule] | None = None) -> tuple[Any, dict[Any, Any]]:
    """Return the terms of some rows, as an expression, and the data of all rows.

    Parameters
    ----------
    terms : variable
        Its axis 0 runs along the rows.
    length : int
        How many rows there are; more than one.
    rules : dict of class to callable, optional
        For operations beside those that are known here.

    Returns
    -------
    terms : variable
        Computed from symbolic inputs that stand for rows, and from what is needed whole.
    rows : dict of variable to ndarray or shared variable
        The values of these inputs: what `synkhronos.extensions.rows_sum.sum_over_rows` takes.

    Raises
    ------
    Mixed
        If the terms of a row depend on other rows, or may do so as far as is known here.
    """
    if not terms.type.ndim:
        raise Mixed("its log-density is one number for all rows, as where these depend on each other")
    search = Search(length, {**_RULES, **(rules or {})})
    made = search.rows(terms, 0)
    nodes = library_of(made).sort_nodes([made])
    read = {made, *(variable for node in nodes for variable in node.inputs)}
    rows = {stand_in: values for stand_in, values in search.sources.items() if stand_in in read}
    if not rows:
        raise Mixed("no data run along its rows")
    made = rebuilt(made, nodes, {search.count: next(iter(rows)).shape[0]})
    search.check_whole(made)
    return made, rows


class Search:
    """One search through one expression.

    Attributes
    ----------
    length : int
        How many rows there are.
    sources : dict of variable to ndarray or shared variable
        What was found so far.
    count : variable
        Stands for the number of rows that are computed.
    """

    def __init__(self, length: int, rules: dict[type, Rule], picks: np.ndarray | None = None):
        self.length = length
        self.sources: dict[Any, Any] = {}
        self.count = pt.lscalar("count")
        self._rules = rules
        self._picks = picks
        self._picking: dict[Any, Search] = {}
        self._made: dict[tuple[Any, int], Any] = {}
        self._values: dict[Any, Any] = {}

    def rows(self, variable: Any, axis: int) -> Any:
        """Return the rows of a variable whose axis runs along them."""
        made = self._made.get((variable, axis))
        if made is None:
            found = self._folded(variable)
            find = self._leaf if found.owner is None else self._computed
            made = self._made[variable, axis] = find(found, axis)
        return made

    def part(self, variable: Any, axis: int) -> Any:
        """Return the rows of a variable, or all of it if it is the same for all rows."""
        return variable if variable.type.shape[axis] == 1 else self.rows(variable, axis)

    def alike(self, variable: Any, axis: int) -> Any:
        """Return one row of constants whose rows are all the same, as of a condition that holds; else the rows."""
        found = self._folded(variable)
        if isinstance(found, Constant):
            one = found.data.take([0], axis)
            if np.array_equal(found.data, np.broadcast_to(one, found.data.shape)):
                return pt.constant(one, name=found.name)
        return self.part(variable, axis)

    def picked(self, values: Any, axis: int, index: Any) -> Any:
        """Return those rows of other, longer rows that a constant index picks; None if that can't be.

        The data are picked, once, and what is computed from them is computed of these alone.
        """
        length = values.type.shape[axis]
        if not isinstance(index, Constant) or index.type.ndim != 1 or length is None or length < self.length:
            return None
        picks = np.arange(length)[index.data]
        other = self._picking.get((index, length))
        if other is None:
            other = self._picking[index, length] = Search(length, self._rules, picks)
            other.sources, other.count = self.sources, self.count
        try:
            return other.rows(values, axis)
        except Mixed:
            return None

    def axis_of(self, variable: Any) -> int | None:
        """Return the axis along which a variable runs, as far as is known by now."""
        for axis in range(getattr(variable.type, "ndim", 0)):
            if (variable, axis) in self._made:
                return axis
        node = variable.owner
        if node is None or not isinstance(node.op, Elemwise | DimShuffle | CAReduce):
            return None
        found = next((axis for axis in map(self.axis_of, node.inputs) if axis is not None), None)
        if isinstance(node.op, Elemwise):
            return found
        kept = node.op.new_order if isinstance(node.op, DimShuffle) else _kept(node)
        return None if found is None or found not in kept else kept.index(found)

    def condition(self, variable: Any) -> Any:
        """Return a number that says whether all elements fulfil a condition, for the rows that are computed."""
        node = variable.owner
        if node is None:
            return variable
        if isinstance(node.op, ScalarFromTensor | TensorFromScalar):
            return node.op(self.condition(node.inputs[0]))
        if isinstance(node.op, All) and variable.type.ndim == 0:
            (inner,) = node.inputs
            if inner.owner is not None and isinstance(inner.owner.op, MakeVector):
                return reduce(pt.and_, map(self.condition, inner.owner.inputs))
            axis = self.axis_of(inner)
            if axis is not None:
                return pt.all(self.rows(inner, axis))
        return variable

    def check_whole(self, terms: Any) -> None:
        """Refuse what would have the master compute all rows again and again."""
        library = library_of(terms)
        nodes = library.sort_nodes([terms])
        inside = set(self.sources)
        for node in nodes:
            if not inside.isdisjoint(node.inputs):
                inside.update(node.outputs)
        whole = {v for node in nodes if not inside.isdisjoint(node.outputs) for v in node.inputs} - inside
        for variable in whole:
            read = [one for one in walk([variable], _inputs_but_for_shapes) if one.owner is None]
            # Not parameters, nor generators.
            data = [one for one in read if isinstance(one, Constant) or _is_shared_array(one)]
            if len(data) < len(read) and any(self.length in _shape_of(one) for one in data):
                raise Mixed(f"{_named(variable)} needs all rows at once")

    def _folded(self, variable: Any) -> Any:
        """Return a variable, or its values if they come of constants alone.

        They are computed once, as PyTensor does when it compiles: the ranks would do it at each evaluation.
        """
        if variable.owner is None or not self._comes_of_constant_rows(variable):
            return variable
        if variable not in self._values:
            values = pytensor.function([], variable, mode="FAST_COMPILE")()
            self._values[variable] = pt.constant(values, name=variable.name)
        return self._values[variable]

    def _comes_of_constant_rows(self, variable: Any) -> bool:
        """Whether a variable is computed from constants alone, among them one that is as long as there are rows."""
        leaves = [variable]
        for node in library_of(variable).sort_nodes([variable]):
            leaves += [v for v in node.inputs if v.owner is None]
        leaves = [v for v in leaves if v.owner is None]
        return all(isinstance(v, Constant) for v in leaves) and any(
            isinstance(v.type, TensorType) and self.length in np.shape(v.data) for v in leaves
        )

    def _leaf(self, variable: Any, axis: int) -> Any:
        """Return the rows of data."""
        if not isinstance(variable, Constant | SharedVariable):
            raise Mixed(f"{_named(variable)} has an element for each row, and is no data")
        values = variable.data if isinstance(variable, Constant) else variable
        shape = _shape_of(variable)
        if shape[axis] != self.length:
            raise Mixed(f"{_named(variable)} has shape {shape}, but there are {self.length} rows")
        if axis and isinstance(variable, SharedVariable):
            raise Mixed(f"{_named(variable)} has its rows on axis {axis}: put them on axis 0")
        if self._picks is not None:
            if isinstance(variable, SharedVariable):
                raise Mixed(f"{_named(variable)} may change, and some of its rows are picked")
            values = np.take(values, self._picks, axis)
        kind = variable.type
        lengths = [None, *(length for i, length in enumerate(kind.shape) if i != axis)]
        stand_in = TensorType(kind.dtype, tuple(lengths))(variable.name)
        self.sources[stand_in] = np.moveaxis(values, axis, 0) if axis else values
        return pt.moveaxis(stand_in, 0, axis) if axis else stand_in

    def _computed(self, variable: Any, axis: int) -> Any:
        node = variable.owner
        for kind in type(node.op).__mro__:
            if kind in self._rules:
                made = self._rules[kind](self, node, axis)
                made = made[node.outputs.index(variable)] if isinstance(made, list) else made
                made.name = variable.name
                return made
        raise Mixed(f"{_named(variable)} is computed by {node.op}, of which it is not known whether it mixes rows")


def _named(variable: Any) -> str:
    return repr(variable.name) if variable.name else str(variable)


def _is_shared_array(variable: Any) -> bool:
    return isinstance(variable, SharedVariable) and isinstance(variable.type, TensorType)


def _inputs_but_for_shapes(variable: Any) -> list[Any]:
    """Return what a variable is computed from; nothing if that is a shape, which is known without its elements."""
    node = variable.owner
    return [] if node is None or isinstance(node.op, Shape | Shape_i) else node.inputs


def _shape_of(data: Any) -> tuple[int, ...]:
    """Return the present shape of a constant or shared variable."""
    return np.shape(data.data if isinstance(data, Constant) else data.get_value(borrow=True))


def _mixes(node: Any) -> Mixed:
    return Mixed(f"{node.op} mixes rows")


# -- rules ------------------------------------------------------------------------------------------------------


def _elemwise(search: Search, node: Any, axis: int) -> Any:
    made = [search.alike(variable, axis) for variable in node.inputs]
    if all(one.type.shape[axis] == 1 for one in made):  # none would have the rows
        made = [search.part(variable, axis) for variable in node.inputs]
    return node.op(*made)


def _dimshuffle(search: Search, node: Any, axis: int) -> Any:
    source = node.op.new_order[axis]
    if source == "x":
        raise _mixes(node)
    return node.op(search.rows(node.inputs[0], source))


def _dot(search: Search, node: Any, axis: int) -> Any:
    a, b = node.inputs
    if axis < a.type.ndim - 1:
        return node.op(search.rows(a, axis), b)
    return node.op(a, search.rows(b, 1))


def _blockwise(search: Search, node: Any, axis: int) -> Any:
    n_batch = node.op.batch_ndim(node)
    if axis < n_batch:
        return node.op(*[search.part(variable, axis) for variable in node.inputs], return_list=True)
    if not isinstance(node.op.core_op, Dot):
        raise _mixes(node)
    # A product of matrices: rows of the first operand, or columns of the second.
    which = axis - n_batch if node.inputs[0].type.ndim - n_batch == 2 else 1
    operands = list(node.inputs)
    operands[which] = search.rows(operands[which], n_batch + min(which, operands[which].type.ndim - n_batch - 1))
    return node.op(*operands)


def _take(search: Search, node: Any, axis: int) -> Any:
    values, index = node.inputs
    if axis:
        return node.op(search.rows(values, axis), index)
    picked = search.picked(values, 0, index)
    return node.op(values, search.rows(index, 0)) if picked is None else picked


def _advanced(search: Search, node: Any, axis: int) -> Any:
    """Return rows of ``values[:, a, b]``: full slices, arrays side by side, and maybe full slices again."""
    values, *operands = node.inputs
    idx_list = getattr(node.op, "idx_list", None)
    index = list(operands if idx_list is None else indices_from_subtensor(operands, idx_list))
    first = next(i for i, one in enumerate(index) if not _is_full(one))
    arrays = list(takewhile(lambda one: isinstance(getattr(one, "type", None), TensorType), index[first:]))
    if not arrays or not all(map(_is_full, index[first + len(arrays) :])):
        raise _mixes(node)
    if any(one.type.dtype == "bool" and one.type.ndim > 1 for one in arrays):
        raise _mixes(node)
    before = (slice(None),) * first
    ndim = max(one.type.ndim for one in arrays)
    if not first <= axis < first + ndim:
        own = axis if axis < first else axis - ndim + len(arrays)
        return search.rows(values, own)[(*before, *arrays)]
    axis -= first
    if len(arrays) == 1:
        picked = search.picked(values, first, arrays[0])
        if picked is not None:
            return picked
    if any(one.type.dtype == "bool" for one in arrays):
        raise _mixes(node)
    chosen = []
    for position, one in enumerate(arrays):
        own = axis - (ndim - one.type.ndim)
        if own >= 0 and position == 0 and search.length > 1 and _counts_rows(one, own, search.length):
            # values[arange(n), k]: of each row one element.
            values = search.rows(values, first)
            chosen.append(pt.arange(search.count).dimshuffle(*["x"] * own, 0, *["x"] * (one.type.ndim - own - 1)))
        else:
            chosen.append(search.part(one, own) if own >= 0 else one)
    return values[(*before, *chosen)]


def _is_full(one: Any) -> bool:
    """Whether an index takes all of an axis."""
    if getattr(one, "owner", None) is not None and isinstance(one.owner.op, MakeSlice):
        return all(isinstance(end, Constant) and end.data is None for end in one.owner.inputs)
    index = one.data if isinstance(one, Constant) else one
    return isinstance(index, slice) and index == slice(None)


def _counts_rows(index: Any, axis: int, length: int) -> bool:
    """Whether an index is 0, 1, 2 and so on along the rows, and the same along all other axes."""
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


def _subtensor(search: Search, node: Any, axis: int) -> Any:
    values, *operands = node.inputs
    index = list(indices_from_subtensor(operands, node.op.idx_list))
    index += [slice(None)] * (values.type.ndim - len(index))
    kept = [i for i, one in enumerate(index) if isinstance(one, slice)]
    own = kept[axis]
    if index[own] != slice(None):
        picks = _constant_picks(index[own], values.type.shape[own])
        picked = None if picks is None else search.picked(values, own, picks)
        if picked is None:
            raise Mixed(f"{node.op} of {_named(values)} picks rows")
        return picked[tuple(slice(None) if i == own else one for i, one in enumerate(index))]
    return node.op(search.rows(values, own), *operands)


def _constant_picks(some: slice, length: int | None) -> Any:
    """Return the indexes that a slice picks of so many, as a constant; None if they may change."""
    ends = [some.start, some.stop, some.step]
    if length is None or not all(end is None or isinstance(end, Constant) for end in ends):
        return None
    return pt.constant(np.arange(length)[slice(*[None if end is None else end.data for end in ends])])


def _set_part(search: Search, node: Any, axis: int) -> Any:
    """Return rows of ``set_subtensor(values[:, k], part)``."""
    values, part, *operands = node.inputs
    index = list(indices_from_subtensor(operands, node.op.idx_list))
    index += [slice(None)] * (values.type.ndim - len(index))
    if index[axis] != slice(None):
        raise _mixes(node)
    kept = [i for i, one in enumerate(index) if isinstance(one, slice)]
    own = kept.index(axis) - (len(kept) - part.type.ndim)
    return node.op(search.rows(values, axis), search.part(part, own) if own >= 0 else part, *operands)


def _reduction(search: Search, node: Any, axis: int) -> Any:
    return node.op(search.rows(node.inputs[0], _kept(node)[axis]))


def _kept(node: Any) -> list[int]:
    """Return the axes over which a reduction does not reduce."""
    ndim = node.inputs[0].type.ndim
    reduced = range(ndim) if node.op.axis is None else node.op.axis
    return [i for i in range(ndim) if i not in reduced]


def _cumulative(search: Search, node: Any, axis: int) -> Any:
    if node.op.axis is None or node.op.axis == axis:
        raise _mixes(node)
    return node.op(search.rows(node.inputs[0], axis))


def _softmax(search: Search, node: Any, axis: int) -> Any:
    (values,) = node.inputs
    over = node.op.axis
    over = range(values.type.ndim) if over is None else np.atleast_1d(over) % values.type.ndim
    if axis in over:
        raise _mixes(node)
    return node.op(search.rows(values, axis))


def _join(search: Search, node: Any, axis: int) -> Any:
    along = getattr(node.op, "axis", None)
    first = [] if along is not None else node.inputs[:1]
    if along is None:
        along = getattr(first[0], "data", None)
    arrays = node.inputs[len(first) :]
    if along is None or int(along) % arrays[0].type.ndim == axis:
        raise _mixes(node)
    return node.op(*first, *[search.rows(one, axis) for one in arrays])


def _alloc(search: Search, node: Any, axis: int) -> Any:
    value, *shape = node.inputs
    own = axis - (len(shape) - value.type.ndim)
    if own >= 0:
        value = search.part(value, own)
    return node.op(value, *shape[:axis], search.count, *shape[axis + 1 :])


def _specify_shape(search: Search, node: Any, axis: int) -> Any:
    values, *shape = node.inputs
    lengths = [None if i == axis or one.type.ndim != 0 else one for i, one in enumerate(shape)]
    return pt.specify_shape(search.rows(values, axis), lengths)


def _reshape(search: Search, node: Any, axis: int) -> Any:
    values, shape = node.inputs
    same = axis == 0 and values.type.ndim and values.type.shape[0] == node.outputs[0].type.shape[0] == search.length
    if not same:
        raise Mixed(f"{node.op} of {_named(values)} may mix rows")
    others = [shape[i] for i in range(1, node.outputs[0].type.ndim)]
    return pt.reshape(search.rows(values, 0), [search.count, *others])


def _view(search: Search, node: Any, axis: int) -> Any:
    return node.op(search.rows(node.inputs[0], axis))


def _inlined(search: Search, node: Any, axis: int) -> Any:
    graph = node.op.fgraph
    if hasattr(graph, "unfreeze"):  # since 3.1
        graph = graph.unfreeze()
    (output, *others) = graph.outputs
    if others:
        raise Mixed(f"{node.op} has several outputs")
    replaced = dict(zip(graph.inputs, node.inputs, strict=True))
    return search.rows(rebuilt(output, library_of(output).sort_nodes([output]), replaced), axis)


_RULES: dict[type, Rule] = {
    Elemwise: _elemwise,
    DimShuffle: _dimshuffle,
    Dot: _dot,
    Blockwise: _blockwise,
    AdvancedSubtensor: _advanced,
    Subtensor: _subtensor,
    IncSubtensor: _set_part,
    CAReduce: _reduction,
    CumOp: _cumulative,
    Softmax: _softmax,
    LogSoftmax: _softmax,
    Join: _join,
    Alloc: _alloc,
    SpecifyShape: _specify_shape,
    Reshape: _reshape,
    ViewOp: _view,
    OpFromGraph: _inlined,
}
if hasattr(subtensor, "AdvancedSubtensor1"):  # gone in newer versions
    _RULES[subtensor.AdvancedSubtensor1] = _take
