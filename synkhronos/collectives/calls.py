"""The collectives, as users call them.

Each takes one shared variable or a list or tuple of them, checks its arguments, and runs one command on all ranks.
"""

from __future__ import annotations

from typing import Any

from synkhronos import ranks
from synkhronos.checks import called, flag, index, integer
from synkhronos.collectives.arguments import (
    as_rows,
    check_shape,
    check_stream,
    everything,
    is_state,
    mirrored,
    named,
    one_each,
    op_name,
    shares,
    stage,
)
from synkhronos.collectives.commands import (
    AllGather,
    Assign,
    Broadcast,
    Gather,
    GetShapes,
    GetStreams,
    GetValue,
    Reduce,
    SetStreams,
)
from synkhronos.data import Data
from synkhronos.data.rows import get_share, select
from synkhronos.graphs import library_of
from synkhronos.graphs.mirror import restarted
from synkhronos.ranks import Session, WeakKeys


def broadcast(shared_vars: Any, values: Any = None, nccl: bool = True) -> None:
    """Give all ranks the master's value, or another.

    Parameters
    ----------
    shared_vars : shared variable, or list of them
    values : array_like or Data, or list of these, optional
        The value to give; by default the master's own.  For a random generator what its variable holds
        (`numpy.random.Generator`, or with Theano a `numpy.random.RandomState` or the state of MRG streams): the master
        goes on from there, and the workers from places that are moved apart from it.
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
    session = ranks.session()
    with session.turn:
        session.settle()
        nccl = flag(nccl, "nccl")
        variables, single = named(session, shared_vars, generators=True)
        generators = [v for v in variables if library_of(v).is_generator(v)]
        arrays = [v for v in variables if not library_of(v).is_generator(v)]
        staged = None
        if values is None:
            places = [library_of(v).stream(v) for v in generators]
        else:
            pairs = list(zip(variables, one_each(values, variables, single), strict=True))
            places = [value for v, value in pairs if library_of(v).is_generator(v)]
            staged = [stage(session, v, value) for v, value in pairs if not library_of(v).is_generator(v)]
            for variable, value in zip(arrays, staged, strict=True):
                check_shape(variable, value.shape)
        for variable, place in zip(generators, places, strict=True):
            check_stream(session, variable, place, moves=True)
        if generators:
            keys = mirrored(session, generators)
            restarted(session, generators)
            session.run(SetStreams(keys, places))
        if not arrays:
            return
        if staged is None:
            session.run(Broadcast(mirrored(session, arrays), nccl))
            return
        rows = tuple(everything(value) for value in staged)
        locations = tuple(value.location() for value in staged)
        session.run(Assign(mirrored(session, arrays), locations, (rows,) * session.size))


def scatter(shared_vars: Any, values: Any, batch: Any = None) -> None:
    """Split the rows of values, and give each rank its part.

    Parameters
    ----------
    shared_vars : shared variable, or list of them
    values : array_like or Data, or list of these
        Of at least one dimension.
    batch : int, slice, list of int, or array of int or bool, optional
        Which rows to use.  They are picked before the split, which gives each rank a run of neighbouring rows, in rank
        order and as evenly as possible.

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
    session = ranks.session()
    with session.turn:
        session.settle()
        variables, single = named(session, shared_vars)
        each = one_each(values, variables, single)
        staged: list[Data] = []
        for variable, value in zip(variables, each, strict=True):
            if variable.type.ndim == 0:
                raise ValueError(f"shared_vars: {called(variable)} has no rows to scatter")
            staged.append(stage(session, variable, value))
        selections = [select(batch, len(value)) for value in staged]
        for variable, value, selection in zip(variables, staged, selections, strict=True):
            for r in range(session.size):
                part = get_share(len(selection), session.size, r)
                check_shape(variable, (part.stop - part.start, *value.shape[1:]))
        locations = tuple(value.location() for value in staged)
        kept: list[Data] = []
        by_variable = [shares(selection, session.size, kept) for selection in selections]
        session.run(Assign(mirrored(session, variables), locations, tuple(zip(*by_variable, strict=True))))


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
        In rank order.  If the shapes don't allow one array, a list with an array for each rank.  For a random
        generator, a list with a `numpy.random.Generator` or `numpy.random.RandomState` for each rank.  For a list of
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
    session = ranks.session()
    with session.turn:
        session.settle()
        nd_up = integer(nd_up, "nd_up", "0 or 1")
        if nd_up not in (0, 1):
            raise ValueError(f"nd_up: expected 0 or 1, got {nd_up}")
        nccl = flag(nccl, "nccl")
        variables, single = named(session, shared_vars, generators=True)
        arrays, states = [v for v in variables if not is_state(v)], [v for v in variables if is_state(v)]
        gathered = session.run(Gather(mirrored(session, arrays), nd_up, nccl)) if arrays else []
        if states:
            by_rank = session.run(GetStreams(mirrored(session, states)))
            gathered += [list(each) for each in zip(*by_rank, strict=True)]
    return _in_order(variables, [*arrays, *states], gathered, single)


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
    session = ranks.session()
    with session.turn:
        session.settle()
        nccl = flag(nccl, "nccl")
        variables, _ = named(session, shared_vars)
        session.run(AllGather(mirrored(session, variables), nccl))


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
        None with ``in_place``.

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
    session = ranks.session()
    with session.turn:
        session.settle()
        in_place, nccl = flag(in_place, "in_place"), flag(nccl, "nccl")
        variables, single = named(session, shared_vars)
        op = op_name(op, variables)
        results = session.run(Reduce(mirrored(session, variables), op, "master" if in_place else "returned", nccl))
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
    session = ranks.session()
    with session.turn:
        session.settle()
        nccl = flag(nccl, "nccl")
        session.run(all_reduce_command(session, shared_vars, op, nccl))


class _AllReduces(WeakKeys[Any, dict[Any, Reduce]]):
    """The commands of `all_reduce` that were checked before, by variable, op and way."""


def all_reduce_command(session: Session, shared_vars: Any, op: Any, nccl: bool) -> Reduce:
    """Return the command of `all_reduce`: the one that was checked before where a training loop asks for it again."""
    commands = session.registry.get(_AllReduces)
    try:
        known = commands.get(shared_vars) or {}
        command = known.get((op, nccl))
    except TypeError:  # a list of variables, or what is none
        known, command = {}, None
    if command is None:
        variables, single = named(session, shared_vars)
        checked = op_name(op, variables)
        command = Reduce(mirrored(session, variables), checked, "everywhere", nccl)
        if single:
            commands[shared_vars] = {**known, (op, nccl): command}
    return command


def set_value(rank: int, shared_vars: Any, values: Any, batch: Any = None) -> None:
    """Set one rank's copy.

    Parameters
    ----------
    rank : int
    shared_vars : shared variable, or list of them
    values : array_like or Data, or list of these
        For a random generator a value as its variable holds it (see `broadcast`), from which the rank goes on.
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
    session = ranks.session()
    with session.turn:
        session.settle()
        rank = index(rank, "rank", session.size)
        variables, single = named(session, shared_vars, generators=True)
        pairs = list(zip(variables, one_each(values, variables, single), strict=True))
        states = [(variable, value) for variable, value in pairs if is_state(variable)]
        for variable, value in states:
            check_stream(session, variable, value, moves=False)
        for variable in variables if batch is not None else ():
            if is_state(variable) or variable.type.ndim == 0:
                raise ValueError(f"batch: the value for {called(variable)} has no rows to choose from")
        variables = [variable for variable in variables if not is_state(variable)]
        staged = [stage(session, variable, value) for variable, value in pairs if not is_state(variable)]
        kept: list[Data] = []
        rows: list[Any] = []
        for variable, value in zip(variables, staged, strict=True):
            selection = everything(value) if batch is None else select(batch, len(value))
            check_shape(variable, (len(selection), *value.shape[1:]) if value.ndim else ())
            rows.append(as_rows(selection, kept))
        if states:
            keys = mirrored(session, [variable for variable, _ in states])
            session.run(SetStreams(keys, [value for _, value in states], alone=rank))
        if not variables:
            return
        locations = tuple(value.location() for value in staged)
        nothing = (None,) * len(variables)
        session.run(
            Assign(
                mirrored(session, variables),
                locations,
                tuple(tuple(rows) if r == rank else nothing for r in range(session.size)),
            )
        )


def get_value(rank: int, shared_vars: Any) -> Any:
    """Return one rank's copy.

    Parameters
    ----------
    rank : int
    shared_vars : shared variable, or list of them

    Returns
    -------
    ndarray, or list of ndarray
        For a random generator, a `numpy.random.Generator` or `numpy.random.RandomState`.

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
    session = ranks.session()
    with session.turn:
        session.settle()
        rank = index(rank, "rank", session.size)
        variables, single = named(session, shared_vars, generators=True)
        arrays, states = [v for v in variables if not is_state(v)], [v for v in variables if is_state(v)]
        values = session.run(GetValue(mirrored(session, arrays), rank)) if arrays else []
        if states:
            values += session.run(GetStreams(mirrored(session, states)))[rank]
    return _in_order(variables, [*arrays, *states], values, single)


def _in_order(variables: list[Any], asked: list[Any], values: list[Any], single: bool) -> Any:
    """Return the values of variables in the order in which the user named them."""
    by_variable = {id(variable): value for variable, value in zip(asked, values, strict=True)}
    ordered = [by_variable[id(variable)] for variable in variables]
    return ordered[0] if single else ordered


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
    session = ranks.session()
    with session.turn:
        session.settle()
        variables, single = named(session, shared_vars)
        layouts = session.run(GetShapes(mirrored(session, variables)))
    each = [[layouts[r][i][0] for r in range(len(layouts))] for i in range(len(variables))]
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
            raise ValueError(f"shared_vars: {called(variable)} has no length")
    shapes = get_shapes(shared_vars)
    return [shape[0] for shape in shapes] if single else [[shape[0] for shape in each] for each in shapes]
