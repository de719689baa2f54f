"""Sharded updates (ZeRO-1): each rank has a part of the optimizer's state, and updates that part of the parameters.

`ShardedUpdates` rewrites the updates of a rule for whole parameters.  It divides every parameter into one shard per
rank, of equal lengths; the last shards overlap if the size is not a multiple of the number of ranks.  The gradients of
the shards are the rows of a matrix, `grad_shared`::

    rank 0   shard 0 of w | shard 0 of b | tail         The tail, such as the weight of the gradient,
    rank 1   shard 1 of w | shard 1 of b | tail         is in every row, since every rank needs it.

A step is three functions with two collectives between them::

    gradient of own rows --> grad_shared --> reduce-scatter --> row of reduced gradients
                                                                 |  local_updates
       params <-- whole_updates <-- grad_shared <-- all-gather <-- row of new parameters

An elementwise operation on a parameter becomes an operation on its shard, with the same result for each element.  An
operation that reads several elements, such as a norm, is computed from whole arrays on every rank: from parameters and,
after one more all-gather, from the gradient.  State variables that such an operation reads, such as the momentum of
`muon`'s matrices, stay whole on every rank.  A rule that reads all of its state as whole arrays, such as `lamb`, cannot
be sharded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from synkhronos.graph_libraries import GraphLibrary, get_library
from synkhronos.training.updates.shard_layout import ShardLayout, get_shard_bounds
from synkhronos.training.updates.shared_variables import get_shape
from synkhronos.training.updates.update_rule import RuleUpdates
from synkhronos.variable_types import Node, SharedVariable, Variable

#: Operations that change shapes or types, but neither elements nor their order.
_RESHAPING_OPS = frozenset({"Reshape", "Flatten", "Rebroadcast", "SpecifyShape", "Unbroadcast"})


class ShardedVariable(NamedTuple):
    """Variable of an update rule that is sharded: each rank has some of its elements."""

    #: Vector with this rank's elements.
    shard: Any
    #: The variable of the unsharded optimizer, which functions do not update.
    whole: Any
    shape: tuple[int, ...]
    #: Initial value of the whole variable, or one of its elements if all are equal.
    initial_value: np.ndarray

    def set_shard(self, rank: int, n_ranks: int) -> None:
        """Set `shard` to this rank's elements of the value of `whole`."""
        flat = np.ravel(self.whole.get_value())
        start, stop = get_shard_bounds(flat.size, n_ranks)[rank]
        self.shard.set_value(flat[start:stop])


@dataclass(eq=False)
class _ShardedValue:
    """Value of a variable of the rule's graph, in the rewritten graph of one rank.

    ``shard`` has this rank's elements of the value, if they correspond to elements of the parameter ``param_index``.
    ``make_whole`` returns the whole value, or raises ValueError if it depends on a sharded variable.  ``pieces`` are
    the lengths and values of the parts of a concatenation.  With ``is_unchanged``, the value depends on no sharded
    variable.
    """

    variable: Any
    make_whole: Callable[[], Any]
    shard: Any = None
    param_index: int | None = None
    pieces: list[tuple[int, _ShardedValue]] = field(default_factory=list)
    is_unchanged: bool = False

    @classmethod
    def from_whole(cls, variable: Variable, whole: Variable, is_unchanged: bool = False) -> _ShardedValue:
        """Make the value of a variable whose whole value is known."""
        return cls(variable, lambda: whole, is_unchanged=is_unchanged)

    @cached_property
    def whole(self) -> Variable:
        """The whole value.  Raise ValueError if it depends on a sharded variable."""
        return self.make_whole()

    @property
    def is_replicated(self) -> bool:
        """Whether every rank computes the whole value."""
        return self.param_index is None and not self.pieces


class ShardedUpdates:
    """Updates of a rule, sharded over the ranks.

    ``updates`` read a vector of the gradients of whole parameters, in their order, followed by a tail.  Errors name the
    rule by ``update_rule_name``.

    Attributes
    ----------
    grad_shared, row, rank_number : shared variable
        Matrix with a row for each rank (see the module's docstring); this rank's row; this rank's number.
    grad_updates, local_updates, whole_updates : OrderedDict
        New values of shared variables: from the rank's rows of the batch, from the reduced row, and from the new
        parameters of all ranks.
    sharded_variables : dict
        Sharded variable of each whole variable that is sharded.
    gathers_gradient : bool
        Whether `local_updates` reads the reduced gradient of all ranks' shards from `grad_shared`.

    Raises
    ------
    ValueError
        If operations of the rule read all of its state whole; the message names a variable.
    """

    def __init__(self, updates: RuleUpdates, params: Sequence[SharedVariable], n_ranks: int, update_rule_name: str):
        self._library = get_library(*params)
        self._tensor = self._library.tensor
        self._params, self._update_rule_name = list(params), update_rule_name
        self._vector = updates.grad_shared
        self._layout = ShardLayout(self._vector, params, n_ranks)
        self.grad_shared, self.row = self._layout.matrix, self._layout.row
        self.rank_number = self._layout.rank_number
        #: Index of the parameter, and sharded variable, of each whole variable that is sharded.
        self._param_index_and_shards: dict[Any, tuple[int, ShardedVariable]] = {}
        self._shard_state(updates.param_updates)
        gradient = self._layout.stack_shards(updates.grad_updates[self._vector])
        self.grad_updates = OrderedDict({self.grad_shared: gradient})
        self.local_updates: OrderedDict[Any, Any] = OrderedDict()
        self.whole_updates: OrderedDict[Any, Any] = OrderedDict()
        self._rewrite_updates(updates.param_updates)
        self.sharded_variables = {s: variable for s, (_, variable) in self._param_index_and_shards.items()}
        read_variables = self._library.find_shareds(list(self.local_updates.values()))
        self.gathers_gradient = any(shared is self.grad_shared for shared in read_variables)

    # -- state -----------------------------------------------------------------------------------------------

    def _shard_state(self, updates: OrderedDict[Any, Any]) -> None:
        """Shard the state variables that elementwise operations relate to a parameter."""
        states = [s for s in updates if not any(s is p for p in self._params) and np.dtype(s.type.dtype).kind == "f"]
        whole_ids = {id(leaf) for leaf, is_whole in _iterate_leaves(list(updates.values())) if is_whole}
        whole_states = []
        for i, p in enumerate(self._params):
            if not self._layout.is_sharded[i]:
                continue
            elementwise = _find_elementwise_leaves(updates[p])
            for s in states:
                if get_shape(s) != self._layout.shapes[i] or s in self._param_index_and_shards:
                    continue
                if id(s) in whole_ids:
                    whole_states.append(s)
                elif id(s) in elementwise or id(p) in _find_elementwise_leaves(updates[s]):
                    self._param_index_and_shards[s] = i, self._make_sharded_variable(s, self._layout.lengths[i])
        if whole_states and not self._param_index_and_shards:
            raise ValueError(
                f"shard_optimizer: {self._update_rule_name} reads the whole of "
                f"{whole_states[0].name or 'its variables'}, so that "
                "no part of its state can be divided among the ranks"
            )

    def _make_sharded_variable(self, state: SharedVariable, length: int) -> ShardedVariable:
        value = np.asarray(state.get_value())
        is_uniform = bool((value == value.flat[0]).all())
        first = value.flat[:1].copy() if is_uniform else value
        shard = np.full(length, value.flat[0], value.dtype)
        return ShardedVariable(self._library.shared(shard, name=state.name), state, value.shape, first)

    # -- graphs ----------------------------------------------------------------------------------------------

    def _set_update(self, updates: OrderedDict[Any, Any], shared: SharedVariable, new: Variable) -> None:
        updates[shared] = self._library.convert_to_type_of(shared, new)

    def _rewrite_updates(self, updates: OrderedDict[Any, Any]) -> None:
        """Rewrite the new values of all variables for this rank's shards."""
        values = self._rewrite_nodes(list(updates.values()))
        row_pieces = []
        for i, p in enumerate(self._params):
            new = self._get_value(values, updates[p])
            if not self._layout.is_sharded[i]:
                self._set_update(self.local_updates, p, new.whole)
                row_pieces.append(self._layout.get_columns(i))
                continue
            row_pieces.append(self._tensor.cast(self._get_shard(i, new), self.row.dtype))
            whole = self._tensor.cast(self._layout.join_rows(i).reshape(self._layout.shapes[i]), p.dtype)
            if any(n == 1 and not b for n, b in zip(self._layout.shapes[i], p.type.broadcastable, strict=True)):
                # An axis of length 1 is broadcastable here, but not in the parameter's type.
                whole = self._tensor.set_subtensor(p[:], whole)
            self._set_update(self.whole_updates, p, whole)
        row_pieces.append(self._layout.tail)
        self._set_update(self.local_updates, self.row, self._tensor.concatenate(row_pieces))
        for s, new in updates.items():
            if any(s is p for p in self._params):
                continue
            value = self._get_value(values, new)
            if s in self._param_index_and_shards:
                i, variable = self._param_index_and_shards[s]
                self._set_update(self.local_updates, variable.shard, self._get_shard(i, value))
            else:
                self._set_update(self.local_updates, s, value.whole)

    def _get_value(self, values: dict[Any, _ShardedValue], variable: Variable) -> _ShardedValue:
        return values[variable] if variable in values else self._make_leaf_value(variable)

    def _make_leaf_value(self, variable: Variable) -> _ShardedValue:
        """Make the value of a variable that no node computes."""
        for i, p in enumerate(self._params):
            if variable is p and self._layout.is_sharded[i]:
                return _ShardedValue(variable, lambda: variable, self._layout.take_shard(i, p), i)
        if variable in self._param_index_and_shards:
            i, state = self._param_index_and_shards[variable]
            return _ShardedValue(variable, partial(self._refuse_whole, variable), state.shard, i)
        if variable is self._vector:
            return self._make_vector_value()
        return _ShardedValue.from_whole(variable, variable, is_unchanged=True)

    def _refuse_whole(self, state: SharedVariable) -> Any:
        raise ValueError(
            f"shard_optimizer: {self._update_rule_name} cannot be sharded: it reads the whole of "
            f"{state.name or 'a variable'}, of which each rank has a part"
        )

    def _make_vector_value(self) -> _ShardedValue:
        """Make the value of the rule's vector of reduced gradients."""
        pieces: list[tuple[int, _ShardedValue]] = []
        for i, size in enumerate(self._layout.sizes):
            columns = self._layout.get_columns(i)
            if self._layout.is_sharded[i]:
                piece = _ShardedValue(columns, partial(self._layout.join_rows, i), columns, i)
            else:
                piece = _ShardedValue.from_whole(columns, columns)
            pieces.append((size, piece))
        if self._layout.n_tail:
            tail = self._layout.tail
            pieces.append((self._layout.n_tail, _ShardedValue.from_whole(tail, tail)))
        return self._join_pieces(self._vector, pieces)

    def _join_pieces(self, variable: Variable, pieces: list[tuple[int, _ShardedValue]]) -> _ShardedValue:
        if len(pieces) == 1:
            return pieces[0][1]
        return _ShardedValue(variable, lambda: self._tensor.concatenate([v.whole for _, v in pieces]), pieces=pieces)

    def _rewrite_concatenation(self, variable: Variable, pieces: list[tuple[int, _ShardedValue]]) -> _ShardedValue:
        """Make the value of a vector that the rule's graph concatenates.

        The shards are concatenated, and then sliced again.  A graph library simplifies arithmetic up to a
        concatenation, so without this one, results would be rounded differently than in the rule's graph.
        """
        vector = self._join_pieces(variable, pieces)
        shards = [self._tensor.flatten(v.whole if v.is_replicated else v.shard) for _, v in pieces]
        row = self._tensor.concatenate(shards)
        new_pieces: list[tuple[int, _ShardedValue]] = []
        start = column = 0
        for length, piece in pieces:
            width = length if piece.param_index is None else self._layout.lengths[piece.param_index]
            shard, whole = row[column : column + width], partial(_slice_whole, vector, start, start + length)
            if piece.is_replicated:
                new_pieces.append((length, _ShardedValue.from_whole(shard, shard)))
            else:
                new_pieces.append((length, _ShardedValue(shard, whole, shard, piece.param_index)))
            start, column = start + length, column + width
        return self._join_pieces(variable, new_pieces)

    def _rewrite_nodes(self, variables: list[Variable]) -> dict[Any, _ShardedValue]:
        """Rewrite the nodes that compute variables.  Return the value of each of their outputs."""
        values: dict[Any, _ShardedValue] = {}
        for node in self._library.sort_nodes(variables):
            inputs = [self._get_value(values, v) for v in node.inputs]
            if all(value.is_unchanged for value in inputs):
                for out in node.outputs:
                    values[out] = _ShardedValue.from_whole(out, out, is_unchanged=True)
                continue
            for i, out in enumerate(node.outputs):
                values[out] = self._rewrite_node(node, i, inputs)
        return values

    def _rewrite_node(self, node: Node, number: int, inputs: list[_ShardedValue]) -> _ShardedValue:
        """Return the sharded value of output ``number`` of a node, by the rewrite for the node's Op."""
        kind, out = type(node.op).__name__, node.outputs[number]

        def make_whole() -> Variable:
            return node.clone_with_new_inputs([value.whole for value in inputs], strict=False).outputs[number]

        if kind == "Subtensor" and inputs[0].pieces:
            return self._rewrite_slice(node, inputs[0]) or _ShardedValue(out, make_whole)
        if kind == "Join" and out.ndim == 1:
            pieces: list[tuple[int, _ShardedValue]] = []
            # The first input is the axis; in PyTensor 3.3 it is an attribute.
            for value in inputs if hasattr(node.op, "axis") else inputs[1:]:
                length = self._count_elements(value)
                if not value.pieces and length is None:
                    return _ShardedValue(out, make_whole)
                pieces += value.pieces or [(length or 0, value)]
            return self._rewrite_concatenation(out, pieces)
        is_reshaping = kind in _RESHAPING_OPS or kind == "DimShuffle" and _keeps_axis_order(node.op.new_order)
        if is_reshaping and inputs[0].param_index is not None:
            return _ShardedValue(out, make_whole, inputs[0].shard, inputs[0].param_index)
        if kind == "Elemwise":
            return self._rewrite_elementwise(node, inputs, make_whole)
        return _ShardedValue(out, make_whole)

    def _rewrite_elementwise(
        self, node: Node, inputs: list[_ShardedValue], make_whole: Callable[[], Any]
    ) -> _ShardedValue:
        (out,) = node.outputs
        arrays = [value for value in inputs if not all(value.variable.type.broadcastable) or not value.is_replicated]
        scalars_only = [value for value in inputs if value not in arrays]
        param_indexes = {value.param_index for value in arrays if value.param_index is not None}
        if len(param_indexes) == 1 and not any(value.pieces for value in arrays):
            (i,) = param_indexes
            # If an operand is broadcast along an axis, the whole is computed for this rank's elements.
            if self._all_have_param_shape(i, [value.variable for value in arrays]):
                shards = [_drop_axes(value) if value in scalars_only else self._get_shard(i, value) for value in inputs]
                return _ShardedValue(out, make_whole, node.op(*shards), i)
        vectors = [value for value in arrays if value.pieces]
        if len(vectors) == 1 and len(arrays) == 1:
            (vector,) = vectors
            pieces = []
            for length, piece in vector.pieces:
                operands = [piece if value is vector else value for value in inputs]
                pieces.append((length, self._rewrite_piece(node, operands, piece)))
            return _ShardedValue(out, make_whole, pieces=pieces)
        return _ShardedValue(out, make_whole)

    def _all_have_param_shape(self, i: int, variables: list[Variable]) -> bool:
        """Whether all variables have the shape of parameter ``i``, or are flat, according to their types."""
        ndim, shape = variables[0].ndim, self._layout.shapes[i]
        if ndim != len(shape):
            shape = (self._layout.sizes[i],) if ndim == 1 else ()
        return all(
            v.ndim == len(shape) and not any(b and n != 1 for b, n in zip(v.type.broadcastable, shape, strict=True))
            for v in variables
        )

    def _rewrite_piece(self, node: Node, inputs: list[_ShardedValue], piece: _ShardedValue) -> _ShardedValue:
        """Make the value of an elementwise operation on a piece of a vector, and scalars."""

        def apply(operand: Variable) -> Any:
            return node.op(*[operand if value is piece else _drop_axes(value) for value in inputs])

        if piece.param_index is None:
            new = apply(piece.whole)
            return _ShardedValue.from_whole(new, new)
        shard = apply(piece.shard)
        return _ShardedValue(shard, lambda: apply(piece.whole), shard, piece.param_index)

    def _get_shard(self, i: int, value: _ShardedValue) -> Variable:
        """Return this rank's elements of a value with as many elements as parameter ``i``."""
        return value.shard if value.param_index == i else self._layout.take_shard(i, value.whole)

    def _rewrite_slice(self, node: Node, vector: _ShardedValue) -> _ShardedValue | None:
        """Return the value of a slice of whole pieces, or of elements of a replicated piece; None for other slices."""
        total = sum(length for length, _ in vector.pieces)
        bounds = _find_constant_bounds(self._library, node, total)
        if bounds is None:
            return None
        start, stop = bounds
        ends = np.cumsum([0, *(length for length, _ in vector.pieces)]).tolist()
        inner_pieces = [
            j for j in range(len(vector.pieces)) if start <= ends[j] and ends[j + 1] <= stop and ends[j] < ends[j + 1]
        ]
        out = node.outputs[0]
        if out.ndim and inner_pieces and ends[inner_pieces[0]] == start and ends[inner_pieces[-1] + 1] == stop:
            return self._join_pieces(out, [vector.pieces[j] for j in inner_pieces])
        for j, (_, piece) in enumerate(vector.pieces):
            if ends[j] <= start and stop <= ends[j + 1] and piece.is_replicated:
                new = piece.whole[start - ends[j] : stop - ends[j]] if out.ndim else piece.whole[start - ends[j]]
                return _ShardedValue.from_whole(out, new)
        return None

    def _count_elements(self, value: _ShardedValue) -> int | None:
        """Return the length of a vector, or None if it is unknown."""
        if value.param_index is not None:
            return self._layout.sizes[value.param_index]
        if self._library.is_constant(value.variable):
            return int(np.size(value.variable.data))
        return 1 if all(value.variable.type.broadcastable) else None


def _slice_whole(vector: _ShardedValue, start: int, stop: int) -> Variable:
    return vector.whole[start:stop]


def _keeps_axis_order(new_order: Sequence[Any]) -> bool:
    axes = [axis for axis in new_order if axis != "x"]
    return axes == sorted(axes)


def _drop_axes(value: _ShardedValue) -> Variable:
    """Return a value of one element as a variable without axes."""
    whole = value.whole
    return whole.dimshuffle() if whole.ndim else whole


def _iterate_leaves(variables: Sequence[Variable]) -> Iterator[tuple[Any, bool]]:
    """Yield the leaves of a graph, each with False if elementwise operations read it, and True if others do."""
    stack, visited = [(variable, False) for variable in variables], set()
    while stack:
        variable, is_whole = stack.pop()
        if (id(variable), is_whole) in visited:
            continue
        visited.add((id(variable), is_whole))
        node = variable.owner
        if node is None:
            yield variable, is_whole
        else:
            is_whole = is_whole or type(node.op).__name__ not in ("Elemwise", *_RESHAPING_OPS)
            stack.extend((operand, is_whole) for operand in node.inputs)


def _find_elementwise_leaves(variable: Variable) -> set[int]:
    """Return the ids of the leaves that elementwise operations alone connect to a variable."""
    return {id(leaf) for leaf, is_whole in _iterate_leaves([variable]) if not is_whole}


def _find_constant_bounds(library: GraphLibrary, node: Node, total: int) -> tuple[int, int] | None:
    """Return the bounds of a slice or an index of a vector of ``total`` elements, or None if they are not constant."""
    if len(node.op.idx_list) != 1:
        return None
    (index,), inputs = node.op.idx_list, iter(node.inputs[1:])

    def read(entry: Any) -> Any:
        if entry is None:
            return None
        variable = node.inputs[1 + entry] if isinstance(entry, int) else next(inputs)
        return int(variable.data) if library.is_constant(variable) else variable

    if not isinstance(index, slice):
        number = read(index)
        return (number % total, number % total + 1) if isinstance(number, int) else None
    bounds = [read(entry) for entry in (index.start, index.stop, index.step)]
    if not all(entry is None or isinstance(entry, int) for entry in bounds):
        return None
    start, stop, step = slice(*bounds).indices(total)
    return (start, max(start, stop)) if step == 1 else None
