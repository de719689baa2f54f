"""Checks the arguments of collectives, in the master, before anything is sent.

`named`
    The shared variables that a collective names.
`mirrored`
    The keys by which the workers know them.
`one_each`, `stage`, `check_shape`
    Values for them, in shared memory.
`is_state`, `check_stream`
    Random generators among them, and values for these.
`everything`, `as_rows`, `shares`
    Which rows of the values.
`op_name`, `op_word`, `check_suits`
    Reductions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos.casts import check_dense
from synkhronos.checks import called, listed, one_of
from synkhronos.data import Data
from synkhronos.data.rows import get_share
from synkhronos.devices import Selection
from synkhronos.devices.reductions import REDUCTIONS, of_collectives
from synkhronos.graphs import library_of
from synkhronos.graphs.mirror import Mirror, is_declared
from synkhronos.ranks import Session, SharedArray, WeakKeys


class _NamedBefore(WeakKeys[Any, bool]):
    """Shared variables that have been checked."""


def named(session: Session, shared_vars: Any, generators: bool = False) -> tuple[list[Any], bool]:
    """Return the shared variables that a collective names, and whether one was given rather than a list.

    ``generators`` says whether random generators may be among them.
    """
    single = not isinstance(shared_vars, list | tuple)
    variables = [shared_vars] if single else list(shared_vars)
    if not variables:
        raise ValueError("shared_vars: expected at least one shared variable, got an empty list")
    mirror = Mirror.of(session)
    seen = session.registry.get(_NamedBefore)
    try:
        if single and shared_vars in seen:  # a training loop's gradients, say
            return variables, single
    except TypeError:  # no variable at all
        pass
    for variable in variables:
        try:
            library = library_of(variable)
        except TypeError as error:
            raise TypeError(f"shared_vars: {error}") from None
        if not library.is_shared(variable):
            raise TypeError(f"shared_vars: expected shared variables, got {variable!r}")
        if library.is_generator(variable):
            if not generators:
                raise TypeError(
                    f"shared_vars: {called(variable)} is a random generator, which only broadcast(), gather(), "
                    "set_value() and get_value() take"
                )
        elif not library.is_array(variable):
            raise TypeError(
                f"shared_vars: expected variables whose values are arrays, got {variable!r} of {variable.type}"
            )
        if mirror.key(variable) is None and not is_declared(variable):
            raise ValueError(
                f"shared_vars: no function uses {called(variable)}: the workers have no copy of it; "
                "make a synkhronos.function() of it first"
            )
    if len({id(variable) for variable in variables}) != len(variables):
        raise ValueError("shared_vars: a shared variable is given twice")
    for variable in variables:
        if not library_of(variable).is_generator(variable):
            seen[variable] = True
    return variables, single


def mirrored(session: Session, variables: Sequence[Any]) -> tuple[Any, ...]:
    """Return the keys by which the workers know variables; send them those that they don't have yet.

    To be called when all arguments have been checked: from now on the workers' copies are their own, which a call that
    is refused must not bring about.
    """
    mirror = Mirror.of(session)
    missing = [variable for variable in variables if mirror.key(variable) is None]
    if missing:
        mirror.send([], missing)
    return tuple(mirror.key(variable) for variable in variables)


def is_state(variable: Any) -> bool:
    """Whether a shared variable is a random generator whose value is no array."""
    library = library_of(variable)
    return library.is_generator(variable) and not library.is_array(variable)


def check_stream(session: Session, variable: Any, value: Any, moves: bool) -> None:
    """Refuse a value that a random generator can't take, or that can't be moved apart for the ranks."""
    try:
        library_of(variable).check_stream(variable, value, moves and session.size > 1)
    except (TypeError, ValueError) as error:
        raise type(error)(f"values: {called(variable)}: {error}") from None


def one_each(values: Any, variables: Sequence[Any], single: bool) -> list[Any]:
    """Return a list with one value for each variable."""
    return [values] if single else listed(values, "values", len(variables), "values, one for each shared variable")


def stage(session: Session, variable: Any, value: Any) -> Data:
    """Return a value as Data of the variable's dtype and dimensions: itself, or a copy in shared memory."""
    if isinstance(value, Data):
        value.check_session(session, "values")
        if value.dtype != variable.type.dtype or value.ndim != variable.type.ndim:
            raise TypeError(
                f"values: {called(variable)} needs {variable.type.dtype} of {variable.type.ndim} dimensions, got Data "
                f"of {value.dtype} and {value.ndim} dimensions"
            )
        return value
    return Data.holding(_filtered(variable, value))


def _filtered(variable: Any, value: Any) -> np.ndarray:
    """Return a value as the variable's own ``set_value`` would take it.

    Of any shape: which rows of it a rank gets, and whether the variable takes so many, is not known yet.
    """
    check_dense(value, f"values: {called(variable)}")
    of_any_shape = library_of(variable).tensor.TensorType(variable.type.dtype, (False,) * variable.type.ndim)
    try:
        return library_of(variable).filter(of_any_shape, value, allow_downcast=variable.container.allow_downcast)
    except (TypeError, ValueError, AttributeError) as error:
        wrong = ValueError if isinstance(error, ValueError) else TypeError
        raise wrong(f"values: {called(variable)} can't take {type(value).__name__}: {error}") from None


def check_shape(variable: Any, shape: tuple[int, ...]) -> None:
    """Refuse a shape that the variable's type doesn't allow."""
    if not library_of(variable).accepts(variable, shape):
        raise ValueError(f"values: {called(variable)} of type {variable.type} can't take shape {shape}")


def op_name(op: Any, variables: Sequence[Any]) -> str:
    """Return the name of a reduction that makes sense for all the variables."""
    op = op_word(op)
    for variable in variables:
        check_suits(op, np.dtype(variable.type.dtype), called(variable))
    return op


def check_suits(op: str, dtype: np.dtype, of: str) -> None:
    """Refuse a reduction that is not of the dtype of what is reduced."""
    if not REDUCTIONS[op].suits(dtype):
        *others, last = [repr(name) for name in of_collectives() if REDUCTIONS[name].suits(dtype)]
        raise ValueError(f"op: {op!r} of {of} is not defined for dtype {dtype}; choose {', '.join(others)} or {last}")


def op_word(op: Any) -> str:
    """Return the name of a reduction of collectives."""
    return one_of(op, "op", of_collectives())


def everything(value: Data) -> range:
    """Return all rows of a value, as `Assign` takes them."""
    return range(len(value)) if value.ndim else range(1)


def as_rows(selection: Selection, kept: list[Data]) -> range | SharedArray:
    """Return a selection as a command can carry it; ``kept`` takes what must live until the command has run."""
    if isinstance(selection, range):
        return selection
    index = Data.holding(selection)
    kept.append(index)
    return index.location()


def shares(selection: Selection, size: int, kept: list[Data]) -> list[range | SharedArray]:
    """Return each rank's share of a selection, as commands can carry it."""
    rows, parts = as_rows(selection, kept), [get_share(len(selection), size, r) for r in range(size)]
    if isinstance(rows, range):
        return [rows[part] for part in parts]
    return [rows.part(part.start, part.stop) for part in parts]
