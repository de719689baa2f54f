"""What do shared variables hold on each rank?

`broadcast`, `scatter`, `gather`, `all_gather`, `reduce`, `all_reduce`
    Collectives over shared variables.
`set_value`, `get_value`
    One rank's copy.
`get_lengths`, `get_shapes`
    What shapes there are.

Each takes one shared variable or a list or tuple of them, checks its arguments in the master, and runs one command on
all ranks.  A command first lets every rank see the others' shapes, then combines the arrays through the communicator
of the device that holds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from synkhronos import ranks
from synkhronos.data import Data, data
from synkhronos.data.rows import Selection, select, share, take
from synkhronos.devices import HOST, Layout, device_of
from synkhronos.graphs import library_of
from synkhronos.graphs.mirror import Mirror, stored
from synkhronos.ranks import Cancelled, Rank, Session, SharedArray

#: The reductions of collectives.
OPS = ("avg", "sum", "prod", "min", "max")

__all__ = [
    "all_gather",
    "all_reduce",
    "broadcast",
    "gather",
    "get_lengths",
    "get_shapes",
    "get_value",
    "reduce",
    "scatter",
    "set_value",
]


# -- commands ------------------------------------------------------------------------------------------------


class _Copies:
    """One rank's copies of the variables that a command names, and the shapes of all ranks'."""

    def __init__(self, rank: Rank, keys: Sequence[Any]):
        self.rank = rank
        self.shareds = [stored(rank, key) for key in keys]
        self.libraries = [library_of(shared) for shared in self.shareds]
        self.values = [library.get(shared) for library, shared in zip(self.libraries, self.shareds, strict=True)]
        mine = [(tuple(value.shape), np.dtype(value.dtype)) for value in self.values]
        #: For each rank, a layout for each variable.
        self.layouts: list[list[Layout]] = rank.exchange(mine)

    def of(self, position: int) -> list[Layout]:
        """Return one variable's layout on each rank."""
        return [each[position] for each in self.layouts]

    def communicator(self, position: int, nccl: bool) -> Any:
        """Return what combines one variable's arrays."""
        device = device_of(self.values[position]) if nccl else HOST
        return device.communicator(self.rank)

    def writable(self, position: int) -> Any:
        """Return one variable's array to be written in place, and put it into the container if it is a copy."""
        value = self.values[position]
        array = device_of(value).writable(value)
        if array is not value:
            self.put(position, array)
        return array

    def readable(self, position: int) -> Any:
        """Return one variable's array, contiguous."""
        return np.ascontiguousarray(device_of(self.values[position]).to_host(self.values[position]))

    def put(self, position: int, array: Any) -> None:
        """Give one variable another array."""
        self.libraries[position].put(self.shareds[position], array)
        self.values[position] = self.libraries[position].get(self.shareds[position])

    def refuse(self, message: str) -> None:
        """Leave the command on every rank: all see the same, and the master says so."""
        raise ValueError(message) if self.rank.is_master else Cancelled

    def check_equal(self, position: int, what: str) -> None:
        """Refuse to reduce what differs in shape."""
        layouts = self.of(position)
        if len({shape for shape, _ in layouts}) > 1:
            each = ", ".join(f"rank {r} has {shape}" for r, (shape, _) in enumerate(layouts))
            self.refuse(
                f"{what}: {_called(self.shareds[position])} needs the same shape on all ranks, but {each}; "
                "see gather(), which takes any shapes"
            )

    def check_fits(self, position: int, shape: tuple[int, ...], what: str) -> None:
        """Refuse a shape that the variable's type doesn't allow."""
        library, shared = self.libraries[position], self.shareds[position]
        if not library.accepts(shared, shape):
            self.refuse(f"{what}: {_called(shared)} of type {shared.type} can't take shape {shape}")


@dataclass(frozen=True, slots=True)
class _Broadcast:
    keys: tuple[Any, ...]
    nccl: bool

    def run(self, rank: Rank) -> None:
        copies = _Copies(rank, self.keys)
        for i, layout in enumerate(copies.layouts[rank.root]):
            for r in range(rank.size):
                copies.check_fits(i, layout[0], f"broadcast to rank {r}")
        for i, (shape, dtype) in enumerate(copies.layouts[rank.root]):
            if not rank.is_master and copies.of(i)[rank.number] != (shape, dtype):
                copies.put(i, device_of(copies.values[i]).empty(shape, dtype))
            array = copies.readable(i) if rank.is_master else copies.writable(i)
            copies.communicator(i, self.nccl).broadcast(array, rank.root)


@dataclass(frozen=True, slots=True)
class _Assign:
    """Take rows of values in shared memory: each rank its own, or some ranks all of them."""

    keys: tuple[Any, ...]
    values: tuple[SharedArray, ...]
    rows: tuple[tuple[range | SharedArray | None, ...], ...]

    def run(self, rank: Rank) -> None:
        mine = self.rows[rank.number]
        for key, value, rows in zip(self.keys, self.values, mine, strict=True):
            if rows is None:
                continue
            shared = stored(rank, key)
            view = value.view(rank.segments)
            if view.ndim:
                selection: Selection = rows if isinstance(rows, range) else rows.view(rank.segments)
                view = take(view, selection)
            library = library_of(shared)
            library.put(shared, device_of(library.get(shared)).from_host(view))


@dataclass(frozen=True, slots=True)
class _ScatterRows:
    """Take this rank's share of the selected rows."""

    keys: tuple[Any, ...]
    values: tuple[SharedArray, ...]
    rows: tuple[range | SharedArray, ...]

    def run(self, rank: Rank) -> None:
        for key, value, rows in zip(self.keys, self.values, self.rows, strict=True):
            selection: Selection = rows if isinstance(rows, range) else rows.view(rank.segments)
            part = take(value.view(rank.segments), selection[share(len(selection), rank.size, rank.number)])
            shared = stored(rank, key)
            library = library_of(shared)
            library.put(shared, device_of(library.get(shared)).from_host(part))


@dataclass(frozen=True, slots=True)
class _Gather:
    keys: tuple[Any, ...]
    nd_up: int
    nccl: bool

    def run(self, rank: Rank) -> Any:
        copies = _Copies(rank, self.keys)
        results = []
        for i in range(len(self.keys)):
            layouts = copies.of(i)
            result, out = _room(layouts, self.nd_up) if rank.is_master else (None, None)
            copies.communicator(i, self.nccl).gather(copies.readable(i), rank.root, layouts, out)
            results.append(result)
        return results


@dataclass(frozen=True, slots=True)
class _AllGather:
    keys: tuple[Any, ...]
    nccl: bool

    def run(self, rank: Rank) -> None:
        copies = _Copies(rank, self.keys)
        for i, shared in enumerate(copies.shareds):
            layouts = copies.of(i)
            if not _joinable(layouts):
                each = ", ".join(f"rank {r} has {shape}" for r, (shape, _) in enumerate(layouts))
                copies.refuse(f"all_gather: {_called(shared)} can't be joined along axis 0: {each}")
            rows = sum(shape[0] for shape, _ in layouts)
            copies.check_fits(i, (rows, *layouts[0][0][1:]), "all_gather")
        for i in range(len(self.keys)):
            joined, out = _room(copies.of(i), 0)
            copies.communicator(i, self.nccl).gather(copies.readable(i), None, copies.of(i), out)
            copies.put(i, joined)


@dataclass(frozen=True, slots=True)
class _Reduce:
    keys: tuple[Any, ...]
    op: str
    where: str
    nccl: bool

    def run(self, rank: Rank) -> Any:
        copies = _Copies(rank, self.keys)
        for i in range(len(self.keys)):
            copies.check_equal(i, "all_reduce" if self.where == "everywhere" else "reduce")
        results = []
        for i in range(len(self.keys)):
            communicator, layout = copies.communicator(i, self.nccl), copies.of(i)[0]
            if self.where == "everywhere":
                communicator.all_reduce(copies.writable(i), self.op)
                continue
            out = None
            if rank.is_master:
                out = copies.writable(i) if self.where == "master" else np.empty(*layout)
            communicator.reduce(copies.readable(i), self.op, rank.root, out, layout, range(rank.size))
            results.append(out)
        return results


@dataclass(frozen=True, slots=True)
class _GetValue:
    keys: tuple[Any, ...]
    source: int

    def run(self, rank: Rank) -> Any:
        copies = _Copies(rank, self.keys)
        results = []
        for i in range(len(self.keys)):
            layouts: list[Layout | None] = [None] * rank.size
            layouts[self.source] = copies.of(i)[self.source]
            mine = copies.readable(i) if rank.number == self.source else None
            out = None
            if rank.is_master:
                out = [None if layout is None else np.empty(*layout) for layout in layouts]
                results.append(out[self.source])
            HOST.communicator(rank).gather(mine, rank.root, layouts, out)
        return results


@dataclass(frozen=True, slots=True)
class _GetShapes:
    keys: tuple[Any, ...]

    def run(self, rank: Rank) -> Any:
        return _Copies(rank, self.keys).layouts


def _joinable(layouts: Sequence[Layout]) -> bool:
    return all(shape and shape[1:] == layouts[0][0][1:] for shape, _ in layouts)


def _room(layouts: Sequence[Layout], nd_up: int) -> tuple[Any, list[np.ndarray]]:
    """Return what gather returns, and the part of it that each rank's array fills."""
    shapes = [shape for shape, _ in layouts]
    dtype = layouts[0][1]
    if nd_up == 1 and len(set(shapes)) == 1:
        stacked = np.empty((len(shapes), *shapes[0]), dtype)
        # Slices, not items: an item of a vector would be a number, not a view.
        return stacked, [stacked[r : r + 1].reshape(shapes[0]) for r in range(len(shapes))]
    if nd_up == 0 and _joinable(layouts):
        ends = np.cumsum([0, *(shape[0] for shape in shapes)])
        joined = np.empty((int(ends[-1]), *shapes[0][1:]), dtype)
        return joined, [joined[a:b] for a, b in zip(ends, ends[1:], strict=False)]
    each = [np.empty(*layout) for layout in layouts]
    return each, each


# -- checks --------------------------------------------------------------------------------------------------


def _called(shared: Any) -> str:
    return repr(shared.name) if getattr(shared, "name", None) else str(shared)


def _keys(session: Session, shared_vars: Any) -> tuple[tuple[Any, ...], list[Any], bool]:
    """Return keys and variables, and whether one was given rather than a list; send those that are still to send."""
    single = not isinstance(shared_vars, list | tuple)
    variables = [shared_vars] if single else list(shared_vars)
    if not variables:
        raise ValueError("shared_vars: expected at least one shared variable, got an empty list")
    mirror, missing = Mirror.of(session), []
    for variable in variables:
        try:
            library = library_of(variable)
        except TypeError as error:
            raise TypeError(f"shared_vars: {error}") from None
        if not library.is_shared(variable):
            raise TypeError(f"shared_vars: expected shared variables, got {variable!r}")
        if not library.is_array(variable):
            raise TypeError(
                f"shared_vars: expected variables whose values are arrays, got {variable!r} of {variable.type}"
            )
        if mirror.key(variable) is None:
            if not mirror.is_declared(variable):
                raise ValueError(
                    f"shared_vars: no function made since fork() uses {_called(variable)}: the workers don't have it"
                )
            missing.append(variable)
    if len({id(variable) for variable in variables}) != len(variables):
        raise ValueError("shared_vars: a shared variable comes twice")
    if missing:
        mirror.send([], missing)
    return tuple(mirror.key(variable) for variable in variables), variables, single


def _values(values: Any, variables: Sequence[Any], single: bool) -> list[Any]:
    if single:
        return [values]
    expected = f"values: expected a list of {len(variables)} values, one for each shared variable, got"
    if not isinstance(values, list | tuple):
        raise TypeError(f"{expected} {type(values).__name__}")
    if len(values) != len(variables):
        raise ValueError(f"{expected} {len(values)} of them")
    return list(values)


def _stage(session: Session, variable: Any, value: Any) -> Data:
    """Return a value as Data of the variable's dtype and dimensions: itself, or a copy in shared memory."""
    if isinstance(value, Data):
        value.check_session(session, "values")
        if value.dtype != variable.type.dtype or value.ndim != variable.type.ndim:
            raise TypeError(
                f"values: {_called(variable)} needs {variable.type.dtype} of {variable.type.ndim} dimensions, got Data "
                f"of {value.dtype} and {value.ndim} dimensions"
            )
        return value
    return data(_filtered(variable, value), dtype=variable.type.dtype)


def _filtered(variable: Any, value: Any) -> np.ndarray:
    """Return a value as the variable's own ``set_value`` would take it.

    Of any shape: which rows of it a rank gets, and whether the variable takes so many, is not known yet.
    """
    of_any_shape = library_of(variable).tensor.TensorType(variable.type.dtype, (False,) * variable.type.ndim)
    try:
        return np.asarray(of_any_shape.filter(value, allow_downcast=variable.container.allow_downcast))
    except (TypeError, ValueError, AttributeError) as error:
        wrong = ValueError if isinstance(error, ValueError) else TypeError
        raise wrong(f"values: {_called(variable)} can't take {type(value).__name__}: {error}") from None


def _check_shape(variable: Any, shape: tuple[int, ...]) -> None:
    if not library_of(variable).accepts(variable, shape):
        raise ValueError(f"values: {_called(variable)} of type {variable.type} can't take shape {shape}")


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name}: expected True or False, got {value!r}")
    return bool(value)


def _op(op: Any, variables: Sequence[Any]) -> str:
    if not isinstance(op, str):
        raise TypeError(f"op: expected one of {OPS}, got {op!r}")
    if op not in OPS:
        raise ValueError(f"op: expected one of {OPS}, got {op!r}")
    for variable in variables:
        if op == "avg" and np.dtype(variable.type.dtype).kind in "biu":
            raise ValueError(
                f"op: the 'avg' of {_called(variable)} would not be {variable.type.dtype}, as it is; "
                "choose 'sum', 'prod', 'min' or 'max'"
            )
    return op


def _rank(rank: Any, session: Session) -> int:
    if isinstance(rank, bool) or not isinstance(rank, int | np.integer):
        raise TypeError(f"rank: expected an integer, got {rank!r}")
    if not 0 <= rank < session.size:
        raise IndexError(f"rank: expected 0 to {session.size - 1}, got {rank}")
    return int(rank)


def _shared_rows(rows: Selection, staged: list[Data]) -> range | SharedArray:
    """Return a selection as a command can carry it."""
    if isinstance(rows, range):
        return rows
    index = data(rows)
    staged.append(index)  # lives until the command has run
    return index.where()


# -- what users call -----------------------------------------------------------------------------------------


def broadcast(shared_vars: Any, values: Any = None, nccl: bool = True) -> None:
    """Give all ranks the master's value, or another.

    Parameters
    ----------
    shared_vars : shared variable, or list of them
    values : array_like or Data, or list of these, optional
        What to give; the master's own value by default.
    nccl : bool
        Whether arrays on GPUs travel by NCCL rather than through host memory.

    Raises
    ------
    TypeError, ValueError
        For wrong arguments; nothing is changed then.

    Examples
    --------
    >>> import numpy as np, pytensor, synkhronos as synk
    >>> n = synk.fork(2, use_gpu=False)
    >>> s = pytensor.shared(np.zeros(2), "s")
    >>> f = synk.function([], [], updates=[(s, s + 1)])
    >>> synk.broadcast(s, [5.0, 6.0])
    >>> synk.gather(s).tolist()
    [[5.0, 6.0], [5.0, 6.0]]
    >>> synk.close()
    """
    with ranks.turn() as session:
        nccl = _flag(nccl, "nccl")
        if values is None:
            keys, _, _ = _keys(session, shared_vars)
            session.run(_Broadcast(keys, nccl))
            return
        keys, variables, single = _keys(session, shared_vars)
        staged = [
            _stage(session, variable, value)
            for variable, value in zip(variables, _values(values, variables, single), strict=True)
        ]
        for variable, value in zip(variables, staged, strict=True):
            _check_shape(variable, value.shape)
        everything = tuple(range(len(value)) if value.ndim else range(1) for value in staged)
        session.run(_Assign(keys, tuple(value.where() for value in staged), (everything,) * session.size))


def scatter(shared_vars: Any, values: Any, batch: Any = None) -> None:
    """Share the rows of values out among ranks.

    Parameters
    ----------
    shared_vars : shared variable, or list of them
    values : array_like or Data, or list of these
        Of at least one dimension.
    batch : int, slice, list of int, or array of int or bool, optional
        Which rows, before they are split: into contiguous runs in rank order, as evenly as possible.

    Raises
    ------
    TypeError, ValueError, IndexError
        For wrong arguments; nothing is changed then.

    Examples
    --------
    >>> import numpy as np, pytensor, synkhronos as synk
    >>> n = synk.fork(2, use_gpu=False)
    >>> s = pytensor.shared(np.zeros(1), "s")
    >>> f = synk.function([], s.sum(), sliceable_shareds=[s])
    >>> synk.scatter(s, np.arange(5.0))
    >>> synk.get_lengths(s)
    [3, 2]
    >>> synk.close()
    """
    with ranks.turn() as session:
        keys, variables, single = _keys(session, shared_vars)
        each = _values(values, variables, single)
        staged: list[Data] = []
        for variable, value in zip(variables, each, strict=True):
            if variable.type.ndim == 0:
                raise ValueError(f"shared_vars: {_called(variable)} has no rows to scatter")
            staged.append(_stage(session, variable, value))
        rows = [select(batch, len(value)) for value in staged]
        for variable, value, selection in zip(variables, staged, rows, strict=True):
            for r in range(session.size):
                part = selection[share(len(selection), session.size, r)]
                _check_shape(variable, (len(part), *value.shape[1:]))
        where = tuple(value.where() for value in staged)
        session.run(_ScatterRows(keys, where, tuple(_shared_rows(selection, staged) for selection in rows)))


def gather(shared_vars: Any, nd_up: int = 1, nccl: bool = True) -> Any:
    """Return all ranks' values.

    Parameters
    ----------
    shared_vars : shared variable, or list of them
    nd_up : int
        1 to stack them on a new axis 0, 0 to join them along axis 0.
    nccl : bool
        Whether arrays on GPUs travel by NCCL rather than through host memory.

    Returns
    -------
    ndarray, or list of ndarray
        In rank order.  Where the shapes don't allow what ``nd_up`` asks, a list with one array a rank.  For a list of
        variables, a list of these.

    Examples
    --------
    >>> import numpy as np, pytensor, synkhronos as synk
    >>> n = synk.fork(2, use_gpu=False)
    >>> s = pytensor.shared(np.zeros(2), "s")
    >>> f = synk.function([], [], updates=[(s, s + 1)])
    >>> synk.set_value(1, s, [3.0, 4.0])
    >>> synk.gather(s).tolist(), synk.gather(s, nd_up=0).tolist()
    ([[0.0, 0.0], [3.0, 4.0]], [0.0, 0.0, 3.0, 4.0])
    >>> synk.close()
    """
    with ranks.turn() as session:
        if isinstance(nd_up, bool) or not isinstance(nd_up, int | np.integer):
            raise TypeError(f"nd_up: expected 0 or 1, got {nd_up!r}")
        if nd_up not in (0, 1):
            raise ValueError(f"nd_up: expected 0 or 1, got {nd_up}")
        nccl = _flag(nccl, "nccl")
        keys, _, single = _keys(session, shared_vars)
        results = session.run(_Gather(keys, int(nd_up), nccl))
    return results[0] if single else results


def all_gather(shared_vars: Any, nccl: bool = True) -> None:
    """Give every rank all ranks' values, joined along axis 0 in rank order.

    Parameters
    ----------
    shared_vars : shared variable, or list of them
        Of at least one dimension.
    nccl : bool
        Whether arrays on GPUs travel by NCCL rather than through host memory.

    Raises
    ------
    ValueError
        If lengths differ elsewhere than along axis 0; nothing is changed then.

    Examples
    --------
    >>> import numpy as np, pytensor, synkhronos as synk
    >>> n = synk.fork(2, use_gpu=False)
    >>> s = pytensor.shared(np.zeros(1), "s")
    >>> f = synk.function([], [], updates=[(s, s + 1)])
    >>> synk.scatter(s, [1.0, 2.0, 3.0])
    >>> synk.all_gather(s)
    >>> synk.gather(s).tolist()
    [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]
    >>> synk.close()
    """
    with ranks.turn() as session:
        nccl = _flag(nccl, "nccl")
        keys, _, _ = _keys(session, shared_vars)
        session.run(_AllGather(keys, nccl))


def reduce(shared_vars: Any, op: str = "avg", in_place: bool = True, nccl: bool = True) -> Any:
    """Reduce all ranks' values into the master's variable, or return the reduction.

    Parameters
    ----------
    shared_vars : shared variable, or list of them
    op : str
        "avg", "sum", "prod", "min" or "max", elementwise and in rank order.
    in_place : bool
        Whether the master's variable takes the result; if not, it is returned and no variable changes.
    nccl : bool
        Whether arrays on GPUs travel by NCCL rather than through host memory.

    Returns
    -------
    None, or ndarray, or list of ndarray
        None if in place.

    Raises
    ------
    ValueError
        If shapes differ between ranks, naming each rank's; nothing is changed then.

    Examples
    --------
    >>> import numpy as np, pytensor, synkhronos as synk
    >>> n = synk.fork(2, use_gpu=False)
    >>> s = pytensor.shared(np.ones(2), "s")
    >>> f = synk.function([], [], updates=[(s, s + 1)])
    >>> synk.reduce(s, "sum", in_place=False)
    array([2., 2.])
    >>> synk.close()
    """
    with ranks.turn() as session:
        in_place, nccl = _flag(in_place, "in_place"), _flag(nccl, "nccl")
        keys, variables, single = _keys(session, shared_vars)
        results = session.run(_Reduce(keys, _op(op, variables), "master" if in_place else "returned", nccl))
    if in_place:
        return None
    return results[0] if single else results


def all_reduce(shared_vars: Any, op: str = "avg", nccl: bool = True) -> None:
    """Reduce all ranks' values into every rank's variable.

    Parameters
    ----------
    shared_vars : shared variable, or list of them
    op : str
        "avg", "sum", "prod", "min" or "max", elementwise and in rank order, so that every rank has the same bits.
    nccl : bool
        Whether arrays on GPUs travel by NCCL rather than through host memory.

    Raises
    ------
    ValueError
        If shapes differ between ranks, naming each rank's; nothing is changed then.

    Examples
    --------
    >>> import numpy as np, pytensor, synkhronos as synk
    >>> n = synk.fork(2, use_gpu=False)
    >>> s = pytensor.shared(np.ones(2), "s")
    >>> f = synk.function([], [], updates=[(s, s + 1)])
    >>> synk.all_reduce(s, "sum")
    >>> synk.gather(s).tolist()
    [[2.0, 2.0], [2.0, 2.0]]
    >>> synk.close()
    """
    with ranks.turn() as session:
        nccl = _flag(nccl, "nccl")
        keys, variables, _ = _keys(session, shared_vars)
        session.run(_Reduce(keys, _op(op, variables), "everywhere", nccl))


def set_value(rank: int, shared_vars: Any, values: Any, batch: Any = None) -> None:
    """Set one rank's copy.

    Parameters
    ----------
    rank : int
    shared_vars : shared variable, or list of them
    values : array_like or Data, or list of these
    batch : int, slice, list of int, or array of int or bool, optional
        Which rows of the values.

    Raises
    ------
    TypeError, ValueError, IndexError
        For wrong arguments; nothing is changed then.

    Examples
    --------
    >>> import numpy as np, pytensor, synkhronos as synk
    >>> n = synk.fork(2, use_gpu=False)
    >>> s = pytensor.shared(np.zeros(2), "s")
    >>> f = synk.function([], [], updates=[(s, s + 1)])
    >>> synk.set_value(1, s, np.arange(9.0), batch=slice(7, 9))
    >>> synk.get_value(1, s)
    array([7., 8.])
    >>> synk.close()
    """
    with ranks.turn() as session:
        rank = _rank(rank, session)
        keys, variables, single = _keys(session, shared_vars)
        each = _values(values, variables, single)
        staged = [_stage(session, variable, value) for variable, value in zip(variables, each, strict=True)]
        rows: list[Any] = []
        for variable, value in zip(variables, list(staged), strict=True):
            if not value.ndim:
                if batch is not None:
                    raise ValueError(f"batch: the value for {_called(variable)} has no rows to choose from")
                rows.append(range(1))
                continue
            selection = select(batch, len(value))
            _check_shape(variable, (len(selection), *value.shape[1:]))
            rows.append(_shared_rows(selection, staged))
        where = tuple(value.where() for value in staged[: len(keys)])
        nothing = (None,) * len(keys)
        session.run(_Assign(keys, where, tuple(tuple(rows) if r == rank else nothing for r in range(session.size))))


def get_value(rank: int, shared_vars: Any) -> Any:
    """Return one rank's copy.

    Parameters
    ----------
    rank : int
    shared_vars : shared variable, or list of them

    Returns
    -------
    ndarray, or list of ndarray

    Examples
    --------
    >>> import numpy as np, pytensor, synkhronos as synk
    >>> n = synk.fork(2, use_gpu=False)
    >>> s = pytensor.shared(np.zeros(2), "s")
    >>> f = synk.function([], [], updates=[(s, s + 1)])
    >>> synk.get_value(0, s)
    array([0., 0.])
    >>> synk.close()
    """
    with ranks.turn() as session:
        rank = _rank(rank, session)
        keys, _, single = _keys(session, shared_vars)
        results = session.run(_GetValue(keys, rank))
    return results[0] if single else results


def get_shapes(shared_vars: Any) -> list[Any]:
    """Return the shape of each rank's copy.

    Parameters
    ----------
    shared_vars : shared variable, or list of them

    Returns
    -------
    list of tuple of int
        One a rank; for a list of variables, a list of these.

    Examples
    --------
    >>> import numpy as np, pytensor, synkhronos as synk
    >>> n = synk.fork(2, use_gpu=False)
    >>> s = pytensor.shared(np.zeros((2, 3)), "s")
    >>> f = synk.function([], [], updates=[(s, s + 1)])
    >>> synk.get_shapes(s)
    [(2, 3), (2, 3)]
    >>> synk.close()
    """
    with ranks.turn() as session:
        keys, _, single = _keys(session, shared_vars)
        layouts = session.run(_GetShapes(keys))
    each = [[layouts[r][i][0] for r in range(len(layouts))] for i in range(len(keys))]
    return each[0] if single else each


def get_lengths(shared_vars: Any) -> list[Any]:
    """Return the length along axis 0 of each rank's copy.

    Parameters
    ----------
    shared_vars : shared variable, or list of them
        Of at least one dimension.

    Returns
    -------
    list of int
        One a rank; for a list of variables, a list of these.

    Examples
    --------
    >>> import numpy as np, pytensor, synkhronos as synk
    >>> n = synk.fork(2, use_gpu=False)
    >>> s = pytensor.shared(np.zeros((2, 3)), "s")
    >>> f = synk.function([], [], updates=[(s, s + 1)])
    >>> synk.get_lengths(s)
    [2, 2]
    >>> synk.close()
    """
    single = not isinstance(shared_vars, list | tuple)
    for variable in [shared_vars] if single else shared_vars:
        if getattr(getattr(variable, "type", None), "ndim", None) == 0:
            raise ValueError(f"shared_vars: {_called(variable)} has no length")
    shapes = get_shapes(shared_vars)
    return [shape[0] for shape in shapes] if single else [[shape[0] for shape in each] for each in shapes]
