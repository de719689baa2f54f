"""Rules by which `RowRestrictor` restricts each operation to the computed rows."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.ops import ViewOp
from pytensor.graph.basic import Constant
from pytensor.graph.replace import vectorize_graph
from pytensor.scan.op import Scan
from pytensor.sparse.math import Dot as SparseDot
from pytensor.sparse.math import StructuredDot
from pytensor.tensor import TensorType, subtensor
from pytensor.tensor.basic import Alloc, AllocEmpty, ARange, Join
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.extra_ops import CumOp
from pytensor.tensor.math import Dot
from pytensor.tensor.shape import Reshape, SpecifyShape
from pytensor.tensor.special import LogSoftmax, Softmax
from pytensor.tensor.subtensor import (
    AdvancedIncSubtensor,
    AdvancedSubtensor,
    IncSubtensor,
    Subtensor,
    indices_from_subtensor,
)
from pytensor.tensor.type_other import MakeSlice

from synkhronos.extensions.pymc.row_restrictor import (
    NotRowwiseError,
    RowRestrictor,
    RowwiseRule,
    describe_variable,
    is_computed_by,
    is_shared_array,
    list_kept_axes,
    list_leaves,
)
from synkhronos.extensions.rows_sum_graph import replace_variables
from synkhronos.graph_libraries import get_library
from synkhronos.variable_types import Node, Variable

#: Maximal ratio of the elements of padded sparse rows to the stored elements and rows.
_MAX_PADDING = 4
#: Maximal number of blocks of joined rows: all rows are computed once for each block.
_MAX_BLOCKS = 4


def _make_mixes_rows_error(node: Node) -> NotRowwiseError:
    return NotRowwiseError(f"{node.op} mixes rows")


def _restrict_elemwise(restrictor: RowRestrictor, node: Node, axis: int) -> Variable:
    """Restrict ``a + b``, in which an operand may be broadcast over the rows."""
    operands = [restrictor.restrict_or_merge_equal(variable, axis) for variable in node.inputs]
    if all(operand.type.shape[axis] == 1 for operand in operands):  # at least one operand has to have the rows
        operands = [restrictor.restrict_or_broadcast(variable, axis) for variable in node.inputs]
    return node.op(*operands)


def _restrict_dimshuffle(restrictor: RowRestrictor, node: Node, axis: int) -> Variable:
    """Restrict ``values.dimshuffle(1, 0, 'x')``."""
    source = node.op.new_order[axis]
    if source == "x":
        raise _make_mixes_rows_error(node)
    return node.op(restrictor.restrict(node.inputs[0], source))


def _restrict_dot(restrictor: RowRestrictor, node: Node, axis: int) -> Variable:
    """Restrict ``dot(a, b)``: rows of `a`, or columns of `b`."""
    a, b = node.inputs
    if axis < a.type.ndim - 1:
        return node.op(restrictor.restrict(a, axis), b)
    return node.op(a, restrictor.restrict(b, 1))


def _restrict_blockwise(restrictor: RowRestrictor, node: Node, axis: int) -> Variable:
    """Restrict an operation on each batch, such as ``matmul(a, b)``, along a batch axis or within the batches."""
    n_batch_dims = node.op.batch_ndim(node)
    if axis < n_batch_dims:
        return node.op(
            *[restrictor.restrict_or_broadcast(variable, axis) for variable in node.inputs], return_list=True
        )
    if isinstance(node.op.core_op, AdvancedSubtensor):
        return restrictor.restrict(_index_all_batches(node, n_batch_dims), axis)
    if isinstance(node.op.core_op, Alloc):
        return restrictor.restrict(_allocate_all_batches(node, n_batch_dims), axis)
    if isinstance(node.op.core_op, OpFromGraph) and len(node.outputs) == 1:  # PyTensor 3.3's LogSumExp is one
        return restrictor.restrict(_inline_all_batches(node), axis)
    if not isinstance(node.op.core_op, Dot):
        raise _make_mixes_rows_error(node)
    # A product of matrices: rows of the first operand, or columns of the second.
    operand_index = axis - n_batch_dims if node.inputs[0].type.ndim - n_batch_dims == 2 else 1
    operands = list(node.inputs)
    operand = operands[operand_index]
    operands[operand_index] = restrictor.restrict(
        operand, n_batch_dims + min(operand_index, operand.type.ndim - n_batch_dims - 1)
    )
    return node.op(*operands)


def _inline_all_batches(node: Node) -> Any:
    """Return the graph of an `OpFromGraph` with one output, of all batches."""
    core = node.op.core_op.fgraph
    return vectorize_graph(core.outputs[0], dict(zip(core.inputs, node.inputs, strict=True)))


def _index_all_batches(node: Node, n_batch_dims: int) -> Any:
    """Return an indexing of each batch, such as ``values[batch][index[batch]]``, as one indexing of all batches."""
    values, *index = node.inputs
    idx_list = getattr(node.op.core_op, "idx_list", None)
    if any(isinstance(array, slice) for array in idx_list or []) or any(array.type.dtype == "bool" for array in index):
        raise _make_mixes_rows_error(node)
    n_index_dims = max(array.type.ndim for array in index) - n_batch_dims
    batches = range(n_batch_dims)
    gaps = [["x"] * (n_index_dims + n_batch_dims - array.type.ndim) for array in index]
    arrays = [
        array.dimshuffle(*batches, *gap, *range(n_batch_dims, array.type.ndim))
        for array, gap in zip(index, gaps, strict=True)
    ]
    batched = [i for i in batches if not values.type.broadcastable[i]]
    batch_indexes = [
        pt.arange(values.shape[i]).dimshuffle(*["x"] * i, 0, *["x"] * (n_batch_dims + n_index_dims - i - 1))
        for i in batched
    ]
    return values.dimshuffle(*batched, *range(n_batch_dims, values.type.ndim))[(*batch_indexes, *arrays)]


def _allocate_all_batches(node: Node, n_batch_dims: int) -> Any:
    """Return an allocation of each batch, which all have the same shape, as one allocation of all batches."""
    value, *_ = node.inputs
    shape = node.outputs[0].type.shape
    if None in shape:
        raise _make_mixes_rows_error(node)
    gap = ["x"] * (len(shape) - value.type.ndim)
    return pt.alloc(value.dimshuffle(*range(n_batch_dims), *gap, *range(n_batch_dims, value.type.ndim)), *shape)


def _restrict_advanced_subtensor(restrictor: RowRestrictor, node: Node, axis: int) -> Variable:
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
        return restrictor.restrict(values, values_axis)[(*slices, *arrays)]
    axis -= n_slices
    if len(arrays) == 1:
        picked = restrictor.restrict_picked(values, n_slices, arrays[0])
        if picked is not None:
            return picked
    if any(array.type.dtype == "bool" for array in arrays):
        raise _make_mixes_rows_error(node)
    indexes = []
    for position, array in enumerate(arrays):
        array_axis = axis - (ndim - array.type.ndim)
        if (
            array_axis >= 0
            and position == 0
            and (len(arrays) > 1 or not isinstance(array, Constant))  # a constant index alone has rows as any other
            and restrictor.length > 1
            and _is_arange(array, array_axis, restrictor.length)
        ):
            # values[arange(n), k]: one element of each row; of values with one row, the same row for all.
            if values.type.shape[n_slices] == 1:
                indexes.append(np.zeros([1] * array.type.ndim, "int64"))  # PyTensor may not know the index's length
                continue
            values = restrictor.restrict(values, n_slices)
            pattern = [*["x"] * array_axis, 0, *["x"] * (array.type.ndim - array_axis - 1)]
            indexes.append(pt.arange(restrictor.n_rows_variable).dimshuffle(*pattern))
        else:
            indexes.append(restrictor.restrict_or_broadcast(array, array_axis) if array_axis >= 0 else array)
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


def _restrict_subtensor(restrictor: RowRestrictor, node: Node, axis: int) -> Variable:
    """Restrict ``values[start:stop, k]``."""
    values, *operands = node.inputs
    index = list(indices_from_subtensor(operands, node.op.idx_list))
    index += [slice(None)] * (values.type.ndim - len(index))
    axes = [i for i, selector in enumerate(index) if isinstance(selector, slice)]
    values_axis = axes[axis]
    if _has_stop_computed_as_length(restrictor, index[values_axis]):
        index[values_axis] = slice(None)
        return restrictor.restrict(values, values_axis)[tuple(index)]
    if index[values_axis] != slice(None):
        selection = _get_fixed_slice(index[values_axis])
        picked = None if selection is None else restrictor.restrict_picked(values, values_axis, selection)
        if picked is None:
            while is_computed_by(values, Subtensor):
                values = values.owner.inputs[0]
            if is_computed_by(values, Scan):
                raise NotRowwiseError(f"{values.owner.op} mixes rows: a row depends on the rows before")
            raise NotRowwiseError(f"{node.op} of {describe_variable(values)} picks rows")
        return picked[tuple(slice(None) if i == values_axis else selector for i, selector in enumerate(index))]
    return node.op(restrictor.restrict(values, values_axis), *operands)


def _has_stop_computed_as_length(restrictor: RowRestrictor, selection: slice) -> bool:
    """Whether a slice stops at an expression of the data's shapes whose value is the number of rows.

    A loop cuts off each sequence at the length of the shortest one.
    """
    stop = selection.stop
    if stop is None or isinstance(stop, Constant) or selection.step is not None:
        return False
    if selection.start is not None and getattr(selection.start, "data", None) != 0:
        return False
    data = [leaf for leaf in list_leaves([stop]) if not isinstance(leaf, Constant)]
    if not list_leaves([stop], with_shapes=False).isdisjoint(data) or not all(map(is_shared_array, data)):
        return False
    return int(pytensor.function([], stop, mode="FAST_COMPILE")()) == restrictor.length


def _get_fixed_slice(selection: slice) -> slice | None:
    """Return a slice with integers as ends, or None if they may change."""
    ends = [selection.start, selection.stop, selection.step]
    if not all(end is None or isinstance(end, Constant) for end in ends):
        return None
    return slice(*[None if end is None else int(end.data) for end in ends])


def _restrict_inc_subtensor(restrictor: RowRestrictor, node: Node, axis: int) -> Variable:
    """Restrict ``set_subtensor(values[:, k], new_values)``."""
    values, new_values, *operands = node.inputs
    index = list(indices_from_subtensor(operands, node.op.idx_list))
    index += [slice(None)] * (values.type.ndim - len(index))
    if index[axis] != slice(None):
        raise _make_mixes_rows_error(node)
    axes = [i for i, selector in enumerate(index) if isinstance(selector, slice)]
    new_values_axis = axes.index(axis) - (len(axes) - new_values.type.ndim)
    return node.op(
        restrictor.restrict(values, axis),
        restrictor.restrict_or_broadcast(new_values, new_values_axis) if new_values_axis >= 0 else new_values,
        *operands,
    )


def _restrict_advanced_inc_subtensor(restrictor: RowRestrictor, node: Node, axis: int) -> Variable:
    """Restrict ``set_subtensor(values[index], new_values)``.

    The index is constant, as for predictors with missing values, or selects an element of each row.
    """
    values, new_values, *operands = node.inputs
    idx_list = getattr(node.op, "idx_list", None)
    index, *other_indexes = operands if idx_list is None else indices_from_subtensor(operands, idx_list)
    is_set = getattr(node.op, "set_instead_of_inc", False)
    if axis == 0 and other_indexes and all(map(_is_index_vector, (index, *other_indexes))):
        if not _is_arange(index, 0, restrictor.length):
            raise _make_mixes_rows_error(node)
        columns = [restrictor.restrict_or_broadcast(other_index, 0) for other_index in other_indexes]
        picked = restrictor.restrict(values, 0)[(pt.arange(restrictor.n_rows_variable), *columns)]
        if new_values.type.ndim:
            new_values = restrictor.restrict_or_broadcast(new_values, 0)
        return (pt.set_subtensor if is_set else pt.inc_subtensor)(picked, new_values)
    index = restrictor.fold_row_constants(index)
    is_known = isinstance(index, Constant) and index.type.ndim == 1
    if not is_set or axis or not is_known or not all(map(_is_full_slice, other_indexes)):
        raise _make_mixes_rows_error(node)
    picked_rows = np.arange(restrictor.length)[index.data]
    position = np.full(restrictor.length, -1)
    position[picked_rows] = np.arange(len(picked_rows))
    new_rows = restrictor.restrict(pt.constant(position), 0)
    if new_values.type.ndim == values.type.ndim and new_values.type.shape[0] != 1:  # else the same for all rows
        new_values = _scatter_constant_values(new_values, picked_rows, restrictor.length)
        if isinstance(new_values, Constant):
            new_values = restrictor.restrict(new_values, 0)
        else:
            new_values = new_values[pt.maximum(new_rows, 0)]
    is_new = (new_rows >= 0).dimshuffle(0, *["x"] * (values.type.ndim - 1))
    return pt.switch(is_new, new_values, restrictor.restrict(values, 0)).astype(values.type.dtype)


def _scatter_constant_values(values: Any, picked_rows: np.ndarray, length: int) -> Variable:
    """Return an array of all rows, if the values of the picked rows are computed from constants; else `values`."""
    if not all(isinstance(leaf, Constant) for leaf in list_leaves([values])):
        return values
    picked_values = pytensor.function([], values, mode="FAST_COMPILE")()
    full = np.zeros((length, *picked_values.shape[1:]), picked_values.dtype)
    full[picked_rows] = picked_values
    return pt.constant(full)


def _restrict_alloc_empty(restrictor: RowRestrictor, node: Node, axis: int) -> Variable:
    """Restrict ``empty((n, k))``."""
    shape = node.inputs
    return node.op(*shape[:axis], restrictor.n_rows_variable, *shape[axis + 1 :])


def _restrict_sparse_dot(restrictor: RowRestrictor, node: Node, axis: int) -> Variable:
    """Restrict a product of a constant sparse matrix and a dense one.

    Each row has as many indexes and values as the row with most elements.
    """
    design, dense = node.inputs
    if axis or not isinstance(design, Constant) or not isinstance(dense.type, TensorType):
        raise _make_mixes_rows_error(node)
    csr = design.data.tocsr()
    counts = np.diff(csr.indptr)
    n_columns = max(1, counts.max(initial=0))
    if n_columns * len(counts) > _MAX_PADDING * (csr.nnz + len(counts)):
        raise NotRowwiseError(
            f"{node.op}: a row of the sparse matrix has {n_columns} elements, and most have far fewer"
        )
    is_element = np.arange(n_columns) < counts[:, None]
    columns, values = np.zeros(is_element.shape, "int64"), np.zeros(is_element.shape, csr.dtype)
    columns[is_element], values[is_element] = csr.indices, csr.data
    picked = dense[restrictor.restrict(pt.constant(columns), 0)]
    product = (restrictor.restrict(pt.constant(values), 0)[:, :, None] * picked).sum(axis=1)
    return product.astype(node.outputs[0].type.dtype)


def _restrict_reduction(restrictor: RowRestrictor, node: Node, axis: int) -> Variable:
    """Restrict ``values.sum(axis)``, along an axis that the sum keeps."""
    return node.op(restrictor.restrict(node.inputs[0], list_kept_axes(node)[axis]))


def _restrict_along_other_axes(restrictor: RowRestrictor, node: Node, axis: int) -> Variable:
    """Restrict an operation on one array along some axes, such as a softmax, or along all if its axis is None."""
    (values,) = node.inputs
    axes = getattr(node.op, "axis", ())  # a view has none
    if axes is None or axis in np.atleast_1d(axes) % values.type.ndim:
        raise _make_mixes_rows_error(node)
    return node.op(restrictor.restrict(values, axis))


def _restrict_join(restrictor: RowRestrictor, node: Node, axis: int) -> Variable:
    """Restrict ``concatenate([a, b], axis)``."""
    join_axis = getattr(node.op, "axis", None)
    axis_inputs = [] if join_axis is not None else node.inputs[:1]
    if join_axis is None:
        join_axis = getattr(axis_inputs[0], "data", None)
    arrays = node.inputs[len(axis_inputs) :]
    if join_axis is None:
        raise _make_mixes_rows_error(node)
    if int(join_axis) % arrays[0].type.ndim == axis:
        return _restrict_joined_blocks(restrictor, node, arrays, axis)
    return node.op(*axis_inputs, *[restrictor.restrict(array, axis) for array in arrays])


def _restrict_joined_blocks(restrictor: RowRestrictor, node: Node, blocks: list[Any], axis: int) -> Variable:
    """Restrict blocks of rows of fixed lengths, one below the other: each row is computed in each block."""
    lengths = [block.type.shape[axis] for block in blocks]
    if None in lengths or sum(lengths) != restrictor.length or len(blocks) > _MAX_BLOCKS:
        raise _make_mixes_rows_error(node)
    block_numbers = restrictor.restrict(pt.constant(np.repeat(np.arange(len(blocks)), lengths)), 0)
    pattern = [0 if i == axis else "x" for i in range(blocks[0].type.ndim)]
    starts = (np.cumsum(lengths) - lengths).tolist()
    joined, *others = map(restrictor.restrict_block, blocks, [axis] * len(blocks), starts)
    for number, block in enumerate(others, 1):
        joined = pt.switch(pt.eq(block_numbers, number).dimshuffle(*pattern), block, joined)
    return joined.astype(node.outputs[0].type.dtype)


def _restrict_alloc(restrictor: RowRestrictor, node: Node, axis: int) -> Variable:
    """Restrict ``full((n, k), value)``."""
    value, *shape = node.inputs
    value_axis = axis - (len(shape) - value.type.ndim)
    if value_axis >= 0:
        value = restrictor.restrict_or_broadcast(value, value_axis)
    return node.op(value, *shape[:axis], restrictor.n_rows_variable, *shape[axis + 1 :])


def _restrict_specify_shape(restrictor: RowRestrictor, node: Node, axis: int) -> Variable:
    """Restrict ``specify_shape(values, shape)``."""
    values, *shape = node.inputs
    lengths = [None if i == axis or length.type.ndim != 0 else length for i, length in enumerate(shape)]
    return pt.specify_shape(restrictor.restrict(values, axis), lengths)


def _restrict_reshape(restrictor: RowRestrictor, node: Node, axis: int) -> Variable:
    """Restrict ``values.reshape((n, -1))``, which keeps axis 0."""
    values, shape = node.inputs
    length = values.type.shape[0] if values.type.ndim else None
    if axis or not length == node.outputs[0].type.shape[0] == restrictor.length:
        raise NotRowwiseError(f"{node.op} of {describe_variable(values)} may mix rows")
    other_lengths = [shape[i] for i in range(1, node.outputs[0].type.ndim)]
    return pt.reshape(restrictor.restrict(values, 0), [restrictor.n_rows_variable, *other_lengths])


def _restrict_op_from_graph(restrictor: RowRestrictor, node: Node, axis: int) -> Variable:
    """Restrict an `OpFromGraph` by the rules of the operations in its graph."""
    graph = node.op.fgraph
    if hasattr(graph, "unfreeze"):  # since 3.1
        graph = graph.unfreeze()
    (output, *other_outputs) = graph.outputs
    if other_outputs:
        raise NotRowwiseError(f"{node.op} has several outputs")
    replacements = dict(zip(graph.inputs, node.inputs, strict=True))
    return restrictor.restrict(replace_variables(output, get_library(output).sort_nodes([output]), replacements), axis)


#: The rule of each operation, by the class of the Op.
RULES: dict[type, RowwiseRule] = {
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
    CumOp: _restrict_along_other_axes,
    Softmax: _restrict_along_other_axes,
    LogSoftmax: _restrict_along_other_axes,
    Join: _restrict_join,
    Alloc: _restrict_alloc,
    SpecifyShape: _restrict_specify_shape,
    Reshape: _restrict_reshape,
    ViewOp: _restrict_along_other_axes,
    OpFromGraph: _restrict_op_from_graph,
}
if hasattr(subtensor, "AdvancedSubtensor1"):  # gone in newer versions
    RULES[subtensor.AdvancedSubtensor1] = _restrict_advanced_subtensor
    RULES[subtensor.AdvancedIncSubtensor1] = _restrict_advanced_inc_subtensor
