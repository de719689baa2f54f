"""Sharded updates (ZeRO-1): each rank keeps a part of the optimizer's state, and updates that part of the parameters.

`Shards` rewrites the updates of a rule, which were built for whole parameters.  Every parameter is divided into as many
parts as there are ranks, of equal length; the last parts of a parameter overlap if its size cannot be divided.  The
gradients of all ranks' parts are the rows of a matrix, `grad_shared`::

    rank 0   part 0 of w | part 0 of b | tail         The tail, such as the weight of the gradient,
    rank 1   part 1 of w | part 1 of b | tail         is in every row, because every rank needs it.

A step is three functions with two collectives between them::

    gradient of own rows --> grad_shared --> reduce-scatter --> row of reduced gradients
                                                                 |  local_updates
       params <-- whole_updates <-- grad_shared <-- all-gather <-- row of new parameters

An elementwise operation on a parameter becomes one on its part, with the same result for each element.  An operation
that reads more than one element, such as a norm, is computed of whole arrays on every rank.  These are the parameters
and, after one more all-gather, the gradient.  Variables of the optimizer's state that such an operation reads stay
whole on every rank, as does the momentum of `muon`'s matrices.  A rule that reads all of its state so, such as `lamb`,
cannot be sharded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from synkhronos.graphs import GraphLibrary, library_of
from synkhronos.training.updates.flat_gradient import RuleUpdates, shape_of

#: Operations that change neither the elements nor their order.
_PASSING = frozenset({"Reshape", "Flatten", "Rebroadcast", "SpecifyShape", "Unbroadcast"})


class StatePart(NamedTuple):
    """Variable of an update rule that is divided among the ranks.

    Attributes
    ----------
    shared : shared variable
        Vector with this rank's elements.
    whole : shared variable
        The variable of the unsharded optimizer, which no function updates.
    shape : tuple of int
        Shape of the whole variable.
    first : ndarray
        Initial value of the whole variable, or one element of it if all are equal.
    """

    shared: Any
    whole: Any
    shape: tuple[int, ...]
    first: np.ndarray

    @property
    def size(self) -> int:
        """Number of elements of the whole variable."""
        return int(np.prod(self.shape))


@dataclass(eq=False)
class _Value:
    """A variable of the rule's graph, as the update of one rank's parts has it.

    Attributes
    ----------
    variable : variable
        The original one.
    part : variable or None
        Vector with this rank's elements of `variable`; None if its elements are not those of a parameter.
    owner : int or None
        Index of the parameter whose elements correspond to those of `variable`.
    make_whole : callable
        Returns the whole variable; raises `_NotWholeError` if it depends on a divided one.
    pieces : list of (int, _Value)
        Lengths and values of the vectors that a vector is made of; empty if it is not made of several.
    is_unchanged : bool
        Whether the original variable depends on nothing that is divided.
    """

    variable: Any
    make_whole: Callable[[], Any]
    part: Any = None
    owner: int | None = None
    pieces: list[tuple[int, _Value]] = field(default_factory=list)
    is_unchanged: bool = False
    _whole: Any = None

    @property
    def whole(self) -> Any:
        if self._whole is None:
            self._whole = self.make_whole()
        return self._whole

    @property
    def is_common(self) -> bool:
        """Whether every rank computes the whole variable."""
        return self.owner is None and not self.pieces


class _NotWholeError(Exception):
    """A divided variable would be needed as a whole."""


class Shards:
    """Updates of a rule, divided among the ranks.

    Parameters
    ----------
    updates : RuleUpdates
        Updates of whole parameters from a vector of their gradients, in the order of `params`, and a tail.
    params : list of shared variables
    size : int
        Number of ranks.
    rule_name : str
        Name of the update rule in errors.

    Attributes
    ----------
    grad_shared : shared variable
        Matrix with a row for each rank; see the module's docstring.
    row : shared variable
        This rank's row.
    rank : shared variable
        Number of this rank.
    grad_updates, local_updates, whole_updates : OrderedDict
        New values of shared variables: by a rank's rows of the batch; by the reduced row; by all ranks' new parameters.
    size : int
    parts : dict
        Parts of the rule's variables that are divided, by the whole variable.
    reads_whole_gradient : bool
        Whether `local_updates` read the reduced gradient of all rows from `grad_shared`.

    Raises
    ------
    ValueError
        If the rule reads all of its state as a whole; the message names one of the variables.
    """

    def __init__(self, updates: RuleUpdates, params: Sequence[Any], size: int, rule_name: str):
        self._library = library_of(*params)
        self._tensor = self._library.tensor
        self._params, self._size, self._rule_name = list(params), size, rule_name
        self._shapes = [shape_of(p) for p in params]
        self._is_divided = [_can_divide(p, shape) for p, shape in zip(params, self._shapes, strict=True)]
        self._lengths = [
            _part_length(n, size) if divided else n
            for n, divided in zip(map(_count, self._shapes), self._is_divided, strict=True)
        ]
        self._columns = np.cumsum([0, *self._lengths]).tolist()
        self._vector = updates.grad_shared
        (total,) = shape_of(self._vector)
        self._n_gradients = sum(map(_count, self._shapes))
        self._n_tail = total - self._n_gradients
        # At least one element, because a vector of a single one would be broadcastable.
        dtype, width = self._vector.type.dtype, self._columns[-1] + max(1, self._n_tail)
        self.grad_shared = self._library.shared(np.zeros((size, width), dtype), name="grad_shared")
        self.row = self._library.shared(np.zeros(width, dtype), name="grad_row")
        self.rank = self._library.shared(np.asarray(0, "int64"), name="rank")
        # Lengths and bounds are numbers, so that XLA knows the shapes.
        self._starts = [
            self._tensor.minimum(self.rank * length, n - length)
            for n, length in zip(map(_count, self._shapes), self._lengths, strict=True)
        ]
        self._parts: dict[Any, tuple[int, StatePart]] = {}
        self._divide_state(updates.param_updates)
        self.grad_updates = OrderedDict({self.grad_shared: self._arrange(updates.grad_updates[self._vector])})
        self.local_updates: OrderedDict[Any, Any] = OrderedDict()
        self.whole_updates: OrderedDict[Any, Any] = OrderedDict()
        self._rewrite(updates.param_updates)
        self.size = size
        self.parts = {s: part for s, (_, part) in self._parts.items()}
        used = self._library.find_shareds(list(self.local_updates.values()))
        self.reads_whole_gradient = any(shared is self.grad_shared for shared in used)

    # -- layout ----------------------------------------------------------------------------------------------

    def _arrange(self, vector: Any) -> Any:
        """Return the matrix of all ranks' parts of a vector of gradients and its tail."""
        columns, start = [], 0
        for shape, length, divided in zip(self._shapes, self._lengths, self._is_divided, strict=True):
            size = _count(shape)
            columns.append(self._to_rows(vector[start : start + size], size, length, divided))
            start += size
        columns.append(self._repeat(vector[start:] if self._n_tail else self._tensor.zeros((1,), vector.dtype)))
        return self._library.convert(self.grad_shared, self._tensor.concatenate(columns, axis=1))

    def _to_rows(self, flat: Any, size: int, length: int, divided: bool) -> Any:
        """Return the parts of a vector as rows of a matrix."""
        if not divided:
            return self._repeat(flat)
        n_full = size // length
        if n_full == self._size:
            return flat.reshape((self._size, length))
        last = self._tensor.zeros((self._size - n_full, 1), flat.dtype) + flat[size - length :].dimshuffle("x", 0)
        return self._tensor.concatenate([flat[: n_full * length].reshape((n_full, length)), last], axis=0)

    def _repeat(self, flat: Any) -> Any:
        return self._tensor.zeros((self._size, 1), flat.dtype) + flat.dimshuffle("x", 0)

    def _from_rows(self, i: int) -> Any:
        """Return the vector of one parameter's elements, from the parts in `grad_shared`."""
        size, length = _count(self._shapes[i]), self._lengths[i]
        rows = self.grad_shared[:, self._columns[i] : self._columns[i + 1]]
        if not self._is_divided[i]:
            return rows[0]
        n_full = size // length
        vector = rows[:n_full].reshape((n_full * length,))
        rest = size - n_full * length
        return self._tensor.concatenate([vector, rows[n_full, length - rest :]]) if rest else vector

    def _take_part(self, i: int, variable: Any) -> Any:
        """Return this rank's elements of an array with the elements of a parameter."""
        start, length = self._starts[i], self._lengths[i]
        return variable.flatten()[start : start + length]

    # -- state -----------------------------------------------------------------------------------------------

    def _divide_state(self, updates: OrderedDict[Any, Any]) -> None:
        """Create this rank's parts of the variables whose elements are updated with those of one parameter."""
        states = [s for s in updates if not any(s is p for p in self._params) and np.dtype(s.type.dtype).kind == "f"]
        read_whole, undivided = _find_whole_leaves(list(updates.values())), []
        for i, p in enumerate(self._params):
            if not self._is_divided[i]:
                continue
            beside = {id(v) for v in _leaves_beside([updates[p]])}
            for s in states:
                if shape_of(s) != self._shapes[i] or s in self._parts:
                    continue
                if id(s) in read_whole:
                    undivided.append(s)
                elif id(s) in beside or any(v is p for v in _leaves_beside([updates[s]])):
                    self._parts[s] = i, self._make_part(s, self._lengths[i])
        if undivided and not self._parts:
            raise ValueError(
                f"shard_optimizer: {self._rule_name} reads the whole of {undivided[0].name or 'its variables'}, so "
                "that no part of its state can be divided among the ranks"
            )

    def _make_part(self, state: Any, length: int) -> StatePart:
        value = np.asarray(state.get_value())
        is_uniform = bool((value == value.flat[0]).all())
        first = value.flat[:1].copy() if is_uniform else value
        part = np.full(length, value.flat[0], value.dtype)
        return StatePart(self._library.shared(part, name=state.name), state, value.shape, first)

    # -- graphs ----------------------------------------------------------------------------------------------

    def _rewrite(self, updates: OrderedDict[Any, Any]) -> None:
        """Divide the new values of all variables."""
        values = self._find_values(list(updates.values()))
        row = []
        for i, p in enumerate(self._params):
            new = self._as_value(values, updates[p])
            with self._explain(p):
                if not self._is_divided[i]:
                    self.local_updates[p] = self._library.convert(p, new.whole)
                    row.append(self.row[self._columns[i] : self._columns[i + 1]])
                    continue
                row.append(self._tensor.cast(self._part_of(i, new), self.row.dtype))
                whole = self._tensor.cast(self._from_rows(i).reshape(self._shapes[i]), p.dtype)
                if any(n == 1 and not b for n, b in zip(self._shapes[i], p.type.broadcastable, strict=True)):
                    # The length of 1 makes an axis broadcastable, which it is not in the parameter's type.
                    whole = self._tensor.set_subtensor(p[:], whole)
                self.whole_updates[p] = self._library.convert(p, whole)
        row.append(self.row[self._columns[-1] :])
        self.local_updates[self.row] = self._library.convert(self.row, self._tensor.concatenate(row))
        for s, new in updates.items():
            if any(s is p for p in self._params):
                continue
            value = self._as_value(values, new)
            with self._explain(s):
                if s in self._parts:
                    i, part = self._parts[s]
                    self.local_updates[part.shared] = self._library.convert(part.shared, self._part_of(i, value))
                else:
                    self.local_updates[s] = self._library.convert(s, value.whole)

    @contextmanager
    def _explain(self, shared: Any) -> Iterator[None]:
        """Name the rule and the variable in the error of an update that needs a divided variable as a whole."""
        try:
            yield
        except _NotWholeError as error:
            raise ValueError(
                f"shard_optimizer: {self._rule_name} cannot be sharded: its update of {shared.name or shared!r} reads "
                f"{error}, of which each rank has a part"
            ) from None

    def _as_value(self, values: dict[Any, _Value], variable: Any) -> _Value:
        return values[variable] if variable in values else self._leaf(variable)

    def _leaf(self, variable: Any) -> _Value:
        """Return the value of a variable that nothing computes."""
        for i, p in enumerate(self._params):
            if variable is p and self._is_divided[i]:
                return _Value(variable, lambda: variable, self._take_part(i, p), i)
        if variable in self._parts:
            i, part = self._parts[variable]

            def refuse() -> Any:
                raise _NotWholeError(f"the whole of {part.whole.name or 'a variable of the rule'}")

            return _Value(variable, refuse, part.shared, i)
        if variable is self._vector:
            return self._vector_value()
        return _Value(variable, lambda: variable, is_unchanged=True)

    def _vector_value(self) -> _Value:
        """Return the value of the rule's vector of reduced gradients."""
        pieces: list[tuple[int, _Value]] = []
        for i, shape in enumerate(self._shapes):
            columns = self.row[self._columns[i] : self._columns[i + 1]]
            if self._is_divided[i]:
                piece = _Value(columns, lambda i=i: self._from_rows(i), columns, i)  # type: ignore[misc]
            else:
                piece = _Value(columns, lambda columns=columns: columns)  # type: ignore[misc]
            pieces.append((_count(shape), piece))
        if self._n_tail:
            tail = self.row[self._columns[-1] :]
            pieces.append((self._n_tail, _Value(tail, lambda: tail)))
        return self._join(self._vector, pieces)

    def _join(self, variable: Any, pieces: list[tuple[int, _Value]]) -> _Value:
        if len(pieces) == 1:
            return pieces[0][1]
        return _Value(variable, lambda: self._tensor.concatenate([v.whole for _, v in pieces]), pieces=pieces)

    def _concatenate(self, variable: Any, pieces: list[tuple[int, _Value]]) -> _Value:
        """Return the value of a vector that the rule's graph concatenates.

        The parts of the pieces are concatenated, too, although each of them will be sliced off again: the graph library
        simplifies arithmetic up to a concatenation, and would otherwise round differently than in the rule's graph.
        """
        vector = self._join(variable, pieces)
        parts = [self._tensor.flatten(v.whole if v.is_common else v.part) for _, v in pieces]
        row = self._tensor.concatenate(parts)
        new: list[tuple[int, _Value]] = []
        start = column = 0
        for length, piece in pieces:
            width = length if piece.owner is None else self._lengths[piece.owner]
            part, whole = row[column : column + width], partial(_slice_whole, vector, start, start + length)
            if piece.is_common:
                new.append((length, _Value(part, lambda part=part: part)))  # type: ignore[misc]
            else:
                new.append((length, _Value(part, whole, part, piece.owner)))
            start, column = start + length, column + width
        return self._join(variable, new)

    def _find_values(self, variables: list[Any]) -> dict[Any, _Value]:
        """Return the value of each variable that is computed."""
        values: dict[Any, _Value] = {}
        for node in self._library.sort_nodes(variables):
            inputs = [self._as_value(values, v) for v in node.inputs]
            if all(value.is_unchanged for value in inputs):
                for out in node.outputs:
                    values[out] = _Value(out, lambda out=out: out, is_unchanged=True)  # type: ignore[misc]
                continue
            for i, out in enumerate(node.outputs):
                try:
                    values[out] = self._apply(node, i, inputs)
                except _NotWholeError as error:
                    values[out] = _Value(out, _raising(error))
        return values

    def _apply(self, node: Any, number: int, inputs: list[_Value]) -> _Value:
        """Return the value of an output of a node."""
        kind, out = type(node.op).__name__, node.outputs[number]

        def make_whole() -> Any:
            return node.clone_with_new_inputs([value.whole for value in inputs], strict=False).outputs[number]

        if kind == "Subtensor" and inputs[0].pieces:
            return self._slice(node, inputs[0]) or _Value(out, make_whole)
        if kind == "Join" and out.ndim == 1:
            pieces: list[tuple[int, _Value]] = []
            for value in inputs[1:]:
                length = self._count_elements(value)
                if not value.pieces and length is None:
                    return _Value(out, make_whole)
                pieces += value.pieces or [(length or 0, value)]
            return self._concatenate(out, pieces)
        is_passing = kind in _PASSING or kind == "DimShuffle" and _keeps_order(node.op.new_order)
        if is_passing and inputs[0].owner is not None:
            return _Value(out, make_whole, inputs[0].part, inputs[0].owner)
        if kind == "Elemwise":
            return self._apply_elementwise(node, inputs, make_whole)
        return _Value(out, make_whole)

    def _apply_elementwise(self, node: Any, inputs: list[_Value], make_whole: Callable[[], Any]) -> _Value:
        (out,) = node.outputs
        arrays = [value for value in inputs if not all(value.variable.type.broadcastable) or not value.is_common]
        scalars_only = [value for value in inputs if value not in arrays]
        owners = {value.owner for value in arrays if value.owner is not None}
        if len(owners) == 1 and not any(value.pieces for value in arrays):
            (i,) = owners
            if self._are_alike(i, [value.variable for value in arrays]):
                parts = [_as_number(value) if value in scalars_only else self._part_of(i, value) for value in inputs]
                return _Value(out, make_whole, node.op(*parts), i)
            # Broadcast along some axes only: whole, if that is possible, then this rank's elements of it.
            whole = make_whole()
            return _Value(out, lambda: whole)
        vectors = [value for value in arrays if value.pieces]
        if len(vectors) == 1 and len(arrays) == 1:
            (vector,) = vectors
            pieces = []
            for length, piece in vector.pieces:
                operands = [piece if value is vector else value for value in inputs]
                pieces.append((length, self._apply_to_piece(node, operands, piece)))
            return _Value(out, make_whole, pieces=pieces)
        return _Value(out, make_whole)

    def _are_alike(self, i: int, variables: list[Any]) -> bool:
        """Whether the types of variables show that they have the shape of a parameter, or all are flat."""
        ndim, shape = variables[0].ndim, self._shapes[i]
        if ndim != len(shape):
            shape = (_count(shape),) if ndim == 1 else ()
        return all(
            v.ndim == len(shape) and not any(b and n != 1 for b, n in zip(v.type.broadcastable, shape, strict=True))
            for v in variables
        )

    def _apply_to_piece(self, node: Any, inputs: list[_Value], piece: _Value) -> _Value:
        """Return the value of an elementwise operation on a piece of a vector, and scalars."""
        if piece.owner is None:
            new = node.op(*[value.whole if value is piece else _as_number(value) for value in inputs])
            return _Value(new, lambda: new)
        part = node.op(*[piece.part if value is piece else _as_number(value) for value in inputs])
        return _Value(
            part,
            lambda: node.op(*[piece.whole if value is piece else _as_number(value) for value in inputs]),
            part,
            piece.owner,
        )

    def _part_of(self, i: int, value: _Value) -> Any:
        """Return this rank's elements of a value with the elements of a parameter."""
        return value.part if value.owner == i else self._take_part(i, value.whole)

    def _slice(self, node: Any, vector: _Value) -> _Value | None:
        """Return a run of whole pieces of a vector, or elements of a piece; None if it is neither."""
        total = sum(length for length, _ in vector.pieces)
        bounds = _constant_bounds(self._library, node, total)
        if bounds is None:
            return None
        start, stop = bounds
        ends = np.cumsum([0, *(length for length, _ in vector.pieces)]).tolist()
        inside = [
            j for j in range(len(vector.pieces)) if start <= ends[j] and ends[j + 1] <= stop and ends[j] < ends[j + 1]
        ]
        out = node.outputs[0]
        if out.ndim and inside and ends[inside[0]] == start and ends[inside[-1] + 1] == stop:
            return self._join(out, [vector.pieces[j] for j in inside])
        for j, (_, piece) in enumerate(vector.pieces):
            if ends[j] <= start and stop <= ends[j + 1] and piece.is_common:
                new = piece.whole[start - ends[j] : stop - ends[j]] if out.ndim else piece.whole[start - ends[j]]
                return _Value(out, lambda new=new: new)  # type: ignore[misc]
        return None

    def _count_elements(self, value: _Value) -> int | None:
        """Return the length of a vector; None if it is unknown."""
        if value.owner is not None:
            return _count(self._shapes[value.owner])
        if self._library.is_constant(value.variable):
            return int(np.size(value.variable.data))
        return 1 if all(value.variable.type.broadcastable) else None


def get_bounds(size: int, n_parts: int) -> list[tuple[int, int]]:
    """Return the first and the last element of each part of an array; parts are equally long, the last ones overlap."""
    length = _part_length(size, n_parts)
    starts = [min(r * length, size - length) for r in range(n_parts)]
    return [(start, start + length) for start in starts]


def _part_length(size: int, n_parts: int) -> int:
    """Return the length of each part: two, if possible; graph libraries simplify arithmetic with single elements."""
    return min(size, max(2, -(-size // n_parts)))


def _slice_whole(vector: _Value, start: int, stop: int) -> Any:
    return vector.whole[start:stop]


def _raising(error: Exception) -> Callable[[], Any]:
    def raise_again() -> Any:
        raise error

    return raise_again


def _count(shape: Sequence[int]) -> int:
    return int(np.prod(shape))


def _can_divide(param: Any, shape: tuple[int, ...]) -> bool:
    """Whether a parameter is divided: not a scalar, nor an array of a type with one element, nor one without any."""
    return bool(_count(shape)) and not all(param.type.broadcastable)


def _keeps_order(new_order: Sequence[Any]) -> bool:
    axes = [axis for axis in new_order if axis != "x"]
    return axes == sorted(axes)


def _as_number(value: _Value) -> Any:
    """Return a variable of one element without axes."""
    whole = value.whole
    return whole.dimshuffle() if whole.ndim else whole


def _leaves_beside(variables: Sequence[Any]) -> Iterator[Any]:
    """Yield the variables without an owner whose elements are operands of elementwise operations only."""
    stack, seen = list(variables), set()
    while stack:
        variable = stack.pop()
        if id(variable) in seen:
            continue
        seen.add(id(variable))
        node = variable.owner
        if node is None:
            yield variable
        elif type(node.op).__name__ in ("Elemwise", *_PASSING):
            stack.extend(node.inputs)


def _find_whole_leaves(variables: Sequence[Any]) -> set[int]:
    """Return the ids of the variables without an owner that some operation other than an elementwise one reads."""
    stack, seen, leaves = [(variable, False) for variable in variables], set(), set()
    while stack:
        variable, is_whole = stack.pop()
        if (id(variable), is_whole) in seen:
            continue
        seen.add((id(variable), is_whole))
        node = variable.owner
        if node is not None:
            is_whole = is_whole or type(node.op).__name__ not in ("Elemwise", *_PASSING)
            stack.extend((operand, is_whole) for operand in node.inputs)
        elif is_whole:
            leaves.add(id(variable))
    return leaves


def _constant_bounds(library: GraphLibrary, node: Any, total: int) -> tuple[int, int] | None:
    """Return the bounds of a slice or an index of a vector of ``total`` elements; None if they are not constant."""
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
