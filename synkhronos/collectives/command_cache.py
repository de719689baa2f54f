"""Commands of collectives, cached for variables on which a training loop runs the same collective in each step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from synkhronos.collectives.all_reduce_command import AllReduce
from synkhronos.collectives.arguments import check_op, parse_variables
from synkhronos.collectives.commands import Reduce, ReduceScatter
from synkhronos.ranks import Command, Session
from synkhronos.replication.replicator import CollectiveCache, distribute_variables
from synkhronos.variable_types import SharedVariable, SharedVariables

C = TypeVar("C", bound=Command)

#: Commands whose field after the keys is an op.
_REDUCTIONS = (AllReduce, Reduce, ReduceScatter)


def prepare_command(
    session: Session, shared_vars: SharedVariables, command_class: type[C], arguments: tuple[Any, ...]
) -> C:
    """Send the workers the variables that they lack, and return the command of a collective on the variables.

    ``arguments`` are the command's fields after the variables' keys.  The variables, and the op of a reduction, are
    checked.  A command on a single variable is cached, since a training loop runs it in each step.
    """
    command = get_cached_command(session, shared_vars, command_class, arguments)
    if command is None:
        variables, is_single = parse_variables(session, shared_vars)
        if command_class in _REDUCTIONS:
            check_op(arguments[0], variables)
        command = prepare_new_command(session, variables, is_single, command_class, arguments)
    return command


def get_cached_command(
    session: Session, shared_vars: SharedVariables, command_class: type[C], arguments: tuple[Any, ...]
) -> C | None:
    """Return the cached command of a collective on a single variable, or None if there is none."""
    try:
        cached: C | None = session.registry.get_or_create(CollectiveCache).get(
            (weakref.ref(shared_vars), command_class, arguments)
        )
    except TypeError:  # a list of variables, or invalid arguments
        return None
    return cached


def prepare_new_command(
    session: Session,
    variables: list[SharedVariable],
    is_single: bool,
    command_class: Callable[..., C],
    arguments: tuple[Any, ...],
) -> C:
    """Send the variables to the workers, and return a new command; it is cached if a single variable was given."""
    keys = distribute_variables(session, variables, makes_ranks_differ=command_class is ReduceScatter)
    command = command_class(keys, *arguments)
    if is_single:
        cache = session.registry.get_or_create(CollectiveCache)
        cache[weakref.ref(variables[0]), command_class, arguments] = command
    return command
