"""The collectives of the public interface.

Each function takes one shared variable, or a list or tuple of them.  The function checks its arguments, and runs one
command on all ranks, or two if there are random generators among the variables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any

from synkhronos import ranks
from synkhronos.checks import check_flag, check_index, check_integer, describe
from synkhronos.collectives.all_reduce_command import AllReduce
from synkhronos.collectives.arguments import (
    check_generator_state,
    check_shape,
    copy_rank_selections_to_shared,
    copy_selection_to_shared,
    has_generator_object,
    match_values,
    parse_variables,
    select_all_rows,
    to_data,
)
from synkhronos.collectives.command_cache import get_cached_command, prepare_command, prepare_new_command
from synkhronos.collectives.commands import (
    AllGather,
    Broadcast,
    Gather,
    GetGenerators,
    GetLayouts,
    GetValue,
    Reduce,
    ReduceScatter,
    Scatter,
    SetGenerators,
)
from synkhronos.data_objects import Data
from synkhronos.data_objects.data_access import get_array_location
from synkhronos.data_objects.rows import BatchArgument, select_rows, split_selection
from synkhronos.graph_libraries import get_library
from synkhronos.ranks import Command, Session
from synkhronos.replication.random_streams import record_new_seeds
from synkhronos.replication.replicator import distribute_variables
from synkhronos.variable_types import SharedVariable, SharedVariables


def broadcast(shared_vars: SharedVariables, values: Any = None, nccl: bool = True) -> None:
    """Set shared variables on all ranks to the master's value, or to a given one.

    Parameters
    ----------
    shared_vars : shared variable, or list of them
    values : array_like or Data, or list of these, optional
        Values for the variables.  Default: the master's.  The value of a random generator is a
        `numpy.random.Generator`, or with Theano a `numpy.random.RandomState` or the state of MRG streams.  The master
        continues from this state, and each worker from a stream of its own, a number of jumps ahead.
    nccl : bool
        Whether arrays on GPUs are transferred by NCCL rather than through host memory.

    Raises
    ------
    TypeError, ValueError
        For wrong arguments.  No variable is changed.

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
    session = ranks.get_session()
    with session.call_lock:
        session.wait_until_idle()
        nccl = check_flag(nccl, "nccl")
        if values is None and (command := get_cached_command(session, shared_vars, Broadcast, (nccl,))) is not None:
            session.run(command)
            return
        variables, is_single = parse_variables(session, shared_vars, allow_generators=True)
        generators = [v for v in variables if get_library(v).is_generator(v)]
        arrays = [v for v in variables if not get_library(v).is_generator(v)]
        shared_values = None
        if values is None:
            states = [get_library(v).copy_generator(v) for v in generators]
        else:
            pairs = list(zip(variables, match_values(values, variables, is_single), strict=True))
            states = [value for v, value in pairs if get_library(v).is_generator(v)]
            shared_values = [
                to_data(session, i, v, value)
                for i, (v, value) in enumerate(pairs)
                if not get_library(v).is_generator(v)
            ]
            for variable, value in zip(arrays, shared_values, strict=True):
                check_shape(variable, value.shape)
        for variable, state in zip(generators, states, strict=True):
            check_generator_state(session, variable, state, must_jump=True)
        if generators:
            keys = distribute_variables(session, generators)
            record_new_seeds(session, generators)
            session.run(SetGenerators(keys, states))
        if not arrays:
            return
        if shared_values is None:
            session.run(prepare_new_command(session, arrays, is_single, Broadcast, (nccl,)))
            return
        rows = [select_all_rows(value) for value in shared_values]
        _run_scatter(session, arrays, shared_values, [rows] * session.size, makes_ranks_differ=False)


def scatter(shared_vars: SharedVariables, values: Any, batch: BatchArgument = None) -> None:
    """Divide the rows of values among the ranks: each rank's variable is set to its share.

    Parameters
    ----------
    shared_vars : shared variable, or list of them
    values : array_like or Data, or list of these
        Arrays of at least one dimension.
    batch : int, slice, list of int, or array of int or bool, optional
        Rows to use: a number of rows from the first, a slice, indexes or a mask.  Default: all rows.  They are selected
        before they are divided among the ranks.

    Raises
    ------
    TypeError, ValueError, IndexError
        For wrong arguments.  No variable is changed.

    Notes
    -----
    The selected rows are divided into contiguous shares, in rank order and as evenly as possible.

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
    session = ranks.get_session()
    with session.call_lock:
        session.wait_until_idle()
        variables, is_single = parse_variables(session, shared_vars)
        shared_values: list[Data] = []
        for i, (variable, value) in enumerate(zip(variables, match_values(values, variables, is_single), strict=True)):
            if variable.type.ndim == 0:
                raise ValueError(f"shared_vars: {describe(variable)} has no rows to scatter")
            shared_values.append(to_data(session, i, variable, value))
        selections = [select_rows(batch, len(value)) for value in shared_values]
        for variable, value, selection in zip(variables, shared_values, selections, strict=True):
            for share in split_selection(range(len(selection)), session.size):
                check_shape(variable, (len(share), *value.shape[1:]))
        buffers: list[Data] = []
        by_variable = [copy_rank_selections_to_shared(selection, session.size, buffers) for selection in selections]
        _run_scatter(session, variables, shared_values, zip(*by_variable, strict=True))


def _run_scatter(
    session: Session,
    variables: list[SharedVariable],
    values: list[Data],
    rows_by_rank: Iterable[Iterable[Any]],
    makes_ranks_differ: bool = True,
) -> None:
    """Set each rank's replicas of variables to its rows of each value; see `Scatter`."""
    locations = tuple(map(get_array_location, values))
    keys = distribute_variables(session, variables, makes_ranks_differ)
    session.run(Scatter(keys, locations, tuple(map(tuple, rows_by_rank))))


def gather(shared_vars: SharedVariables, nd_up: int = 1, nccl: bool = True) -> Any:
    """Return all ranks' values of shared variables.

    Parameters
    ----------
    shared_vars : shared variable, or list of them
    nd_up : int
        1 to stack the values on a new axis 0, 0 to concatenate them along axis 0.
    nccl : bool
        Whether arrays on GPUs are transferred by NCCL rather than through host memory.

    Returns
    -------
    ndarray, or list of ndarray
        Values in rank order.  If their shapes don't fit into one array, a list with an array for each rank.  For a
        random generator, a list with a `numpy.random.Generator` or `numpy.random.RandomState` for each rank.  For a
        list of variables, a list of these.

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
    session = ranks.get_session()
    with session.call_lock:
        session.wait_until_idle()
        nd_up = check_integer(nd_up, "nd_up", "0 or 1")
        if nd_up not in (0, 1):
            raise ValueError(f"nd_up: expected 0 or 1, got {nd_up}")
        nccl = check_flag(nccl, "nccl")
        return _get_values(session, shared_vars, Gather, (nd_up, nccl), list)


def all_gather(shared_vars: SharedVariables, nccl: bool = True) -> None:
    """Set shared variables on every rank to all ranks' values, concatenated along axis 0 in rank order.

    Parameters
    ----------
    shared_vars : shared variable, or list of them
        Variables of at least one dimension.
    nccl : bool
        Whether arrays on GPUs are transferred by NCCL rather than through host memory.

    Raises
    ------
    ValueError
        If lengths of axes other than 0 differ between ranks.  No variable is changed.

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
    session = ranks.get_session()
    with session.call_lock:
        session.wait_until_idle()
        nccl = check_flag(nccl, "nccl")
        session.run(prepare_command(session, shared_vars, AllGather, (nccl,)))


def reduce(shared_vars: SharedVariables, op: str = "avg", in_place: bool = True, nccl: bool = True) -> Any:
    """Reduce all ranks' values into the master's variable, or return the reduction.

    Parameters
    ----------
    shared_vars : shared variable, or list of them
    op : str
        Elementwise op such as "avg" or "sum" (see :ref:`ops`), applied in rank order.
    in_place : bool
        Whether the master's variable is set to the result.  If not, the result is returned and no variable changes.
    nccl : bool
        Whether arrays on GPUs are transferred by NCCL rather than through host memory.

    Returns
    -------
    None, or ndarray, or list of ndarray
        The reduction; None with ``in_place``.

    Raises
    ------
    ValueError
        If shapes or dtypes differ between ranks; the message lists them.  No variable is changed.

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
    session = ranks.get_session()
    with session.call_lock:
        session.wait_until_idle()
        in_place, nccl = check_flag(in_place, "in_place"), check_flag(nccl, "nccl")
        results = session.run(prepare_command(session, shared_vars, Reduce, (op, in_place, nccl)))
    return None if in_place else _unpack_single(shared_vars, results)


def all_reduce(shared_vars: SharedVariables, op: str = "avg", nccl: bool = True) -> None:
    """Reduce all ranks' values into every rank's variable.

    Parameters
    ----------
    shared_vars : shared variable, or list of them
    op : str
        Elementwise op such as "avg" or "sum" (see :ref:`ops`), applied in rank order: every rank gets the same bits.
    nccl : bool
        Whether arrays on GPUs are transferred by NCCL rather than through host memory.

    Raises
    ------
    ValueError
        If shapes or dtypes differ between ranks; the message lists them.  No variable is changed.

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
    session = ranks.get_session()
    with session.call_lock:
        session.wait_until_idle()
        nccl = check_flag(nccl, "nccl")
        session.run(prepare_command(session, shared_vars, AllReduce, (op, nccl)))


def reduce_scatter(shared_vars: SharedVariables, op: str = "avg", nccl: bool = True) -> None:
    """Reduce all ranks' values, and set each rank's variable to its share of the rows.

    Followed by `all_gather` it equals `all_reduce`.

    Parameters
    ----------
    shared_vars : shared variable, or list of them
        Variables of at least one dimension.
    op : str
        Elementwise op such as "avg" or "sum" (see :ref:`ops`), applied in rank order.
    nccl : bool
        Whether arrays on GPUs are transferred by NCCL rather than through host memory.

    Raises
    ------
    ValueError
        If shapes or dtypes differ between ranks; the message lists them.  No variable is changed.

    Notes
    -----
    Rows are divided among the ranks as by `scatter`.

    Examples
    --------
    >>> import numpy as np, pytensor, synkhronos as synk
    >>> n = synk.fork(2, use_gpu=False)
    >>> s = pytensor.shared(np.arange(3.0), "s")
    >>> f = synk.function([], s.sum(), sliceable_shareds=[s])
    >>> synk.broadcast(s)
    >>> synk.reduce_scatter(s, "sum")
    >>> synk.get_value(0, s).tolist(), synk.get_value(1, s).tolist()
    ([0.0, 2.0], [4.0])
    >>> synk.close()
    """
    session = ranks.get_session()
    with session.call_lock:
        session.wait_until_idle()
        nccl = check_flag(nccl, "nccl")
        session.run(prepare_command(session, shared_vars, ReduceScatter, (op, nccl)))


def set_value(rank: int, shared_vars: SharedVariables, values: Any, batch: BatchArgument = None) -> None:
    """Set one rank's copy of shared variables.

    Parameters
    ----------
    rank : int
    shared_vars : shared variable, or list of them
    values : array_like or Data, or list of these
        Values for the variables; for a random generator, the state from which the rank continues (see `broadcast`).
    batch : int, slice, list of int, or array of int or bool, optional
        Rows of the values to use.  Default: all rows.

    Raises
    ------
    TypeError, ValueError, IndexError
        For wrong arguments.  No variable is changed.

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
    session = ranks.get_session()
    with session.call_lock:
        session.wait_until_idle()
        rank = check_index(rank, "rank", session.size)
        variables, is_single = parse_variables(session, shared_vars, allow_generators=True)
        states: list[tuple[SharedVariable, Any]] = []
        arrays: list[tuple[SharedVariable, Any]] = []
        for variable, value in zip(variables, match_values(values, variables, is_single), strict=True):
            is_state = has_generator_object(variable)
            if is_state:
                check_generator_state(session, variable, value, must_jump=False)
            if batch is not None and (is_state or variable.type.ndim == 0):
                raise ValueError(f"batch: the value for {describe(variable)} has no rows to select")
            (states if is_state else arrays).append((variable, value))
        variables = [variable for variable, _ in arrays]
        shared_values = [to_data(session, i, variable, value) for i, (variable, value) in enumerate(arrays)]
        buffers: list[Data] = []
        rows: list[Any] = []
        for variable, value in zip(variables, shared_values, strict=True):
            selection = select_all_rows(value) if batch is None else select_rows(batch, len(value))
            check_shape(variable, (len(selection), *value.shape[1:]) if value.ndim else ())
            rows.append(copy_selection_to_shared(selection, buffers))
        if states:
            keys = distribute_variables(session, [variable for variable, _ in states])
            session.run(SetGenerators(keys, [value for _, value in states], only_rank=rank))
        if variables:
            no_rows = [None] * len(variables)
            _run_scatter(
                session, variables, shared_values, [rows if r == rank else no_rows for r in range(session.size)]
            )


def get_value(rank: int, shared_vars: SharedVariables) -> Any:
    """Return one rank's copy of shared variables.

    Parameters
    ----------
    rank : int
    shared_vars : shared variable, or list of them

    Returns
    -------
    ndarray, or list of ndarray
        The rank's value.  For a random generator, a `numpy.random.Generator` or `numpy.random.RandomState`.

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
    session = ranks.get_session()
    with session.call_lock:
        session.wait_until_idle()
        rank = check_index(rank, "rank", session.size)
        return _get_values(session, shared_vars, GetValue, (rank,), itemgetter(rank))


def _get_values(
    session: Session,
    shared_vars: SharedVariables,
    command_class: type[Command],
    arguments: tuple[Any, ...],
    select: Callable[[Any], Any],
) -> Any:
    """Return the values of variables.

    A command reads arrays.  For generators, ``select`` picks from the states of all ranks.
    """
    command = get_cached_command(session, shared_vars, command_class, arguments)
    if command is not None:
        return session.run(command)[0]
    variables, is_single = parse_variables(session, shared_vars, allow_generators=True)
    arrays = [v for v in variables if not has_generator_object(v)]
    generators = [v for v in variables if has_generator_object(v)]
    values: list[Any] = []
    if arrays:
        values = session.run(prepare_new_command(session, arrays, is_single, command_class, arguments))
    if generators:
        by_rank = session.run(GetGenerators(distribute_variables(session, generators)))
        values += map(select, zip(*by_rank, strict=True))
    by_variable = {id(variable): value for variable, value in zip([*arrays, *generators], values, strict=True)}
    ordered = [by_variable[id(variable)] for variable in variables]
    return ordered[0] if is_single else ordered


def get_shapes(shared_vars: SharedVariables) -> list[Any]:
    """Return the shape of each rank's copy of shared variables.

    Parameters
    ----------
    shared_vars : shared variable, or list of them

    Returns
    -------
    list of tuple of int
        One for each rank; for a list of variables, a list of these.

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
    session = ranks.get_session()
    with session.call_lock:
        session.wait_until_idle()
        layouts = session.run(prepare_command(session, shared_vars, GetLayouts, ()))
    return _unpack_single(shared_vars, [[shape for shape, _ in by_rank] for by_rank in layouts])


def get_lengths(shared_vars: SharedVariables) -> list[Any]:
    """Return the length along axis 0 of each rank's copy of shared variables.

    Parameters
    ----------
    shared_vars : shared variable, or list of them
        Variables of at least one dimension.

    Returns
    -------
    list of int
        One for each rank; for a list of variables, a list of these.

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
    variables = shared_vars if isinstance(shared_vars, list | tuple) else [shared_vars]
    shapes = get_shapes(variables)
    for variable, by_rank in zip(variables, shapes, strict=True):
        if () in by_rank:
            raise ValueError(f"shared_vars: {describe(variable)} has no length")
    return _unpack_single(shared_vars, [[shape[0] for shape in by_rank] for by_rank in shapes])


def _unpack_single(shared_vars: SharedVariables, results: list[Any]) -> Any:
    """Return a list with a result for each variable, or the only result if ``shared_vars`` is not a list."""
    return results if isinstance(shared_vars, list | tuple) else results[0]
