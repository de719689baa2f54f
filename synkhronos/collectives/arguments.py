"""Checks of the arguments of collectives, in the master, before anything is sent.

Commands contain no arrays, only locations in shared memory.  Values are copied there as `Data`.  A selection of rows is
a range, or the location of an index array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos.casts import check_dense
from synkhronos.checks import check_choice, check_distinct, check_list, describe
from synkhronos.data_objects import Data
from synkhronos.data_objects.data_access import SharedBuffers, check_session, copy_to_shared, get_array_location
from synkhronos.data_objects.rows import split_selection
from synkhronos.devices import Selection
from synkhronos.devices.reduce_op import REDUCE_OPS, list_collective_ops
from synkhronos.graph_libraries import get_library
from synkhronos.ranks import ArrayLocation, Session
from synkhronos.replication.replicator import Replicator, is_registered
from synkhronos.variable_types import SharedVariable, SharedVariables

#: Maximal number of bytes of a value whose memory is kept for the next collective.
_MAX_BUFFERED_NBYTES = 1 << 16


def parse_variables(
    session: Session, shared_vars: SharedVariables, allow_generators: bool = False
) -> tuple[list[Any], bool]:
    """Check the shared variables of a collective.  Return a list of them, and whether the argument was a single one.

    Raise TypeError or ValueError for a variable that holds neither an array nor an allowed random generator, that no
    function uses, or that is given twice.
    """
    is_single = not isinstance(shared_vars, list | tuple)
    variables = [shared_vars] if is_single else list(shared_vars)
    if not variables:
        raise ValueError("shared_vars: expected at least one shared variable, got an empty list")
    replicator = Replicator.get_or_create(session)
    for variable in variables:
        _check_variable(replicator, variable, allow_generators)
    check_distinct(variables, "shared_vars")
    return variables, is_single


def _check_variable(replicator: Replicator, variable: SharedVariable, allow_generators: bool) -> None:
    """Raise TypeError or ValueError if a collective can't use a variable."""
    try:
        library = get_library(variable)
    except TypeError as error:
        raise TypeError(f"shared_vars: {error}") from None
    if not library.is_shared(variable):
        raise TypeError(f"shared_vars: expected shared variables, got {variable!r}")
    if library.is_generator(variable):
        if not allow_generators:
            raise TypeError(
                f"shared_vars: {describe(variable)} is a random generator, which only broadcast(), gather(), "
                "set_value() and get_value() take"
            )
    elif not library.is_array(variable):
        raise TypeError(f"shared_vars: expected variables whose values are arrays, got {variable!r} of {variable.type}")
    if replicator.get_key(variable) is None and not is_registered(variable):
        raise ValueError(
            f"shared_vars: no function uses {describe(variable)}: the workers have no copy of it; "
            "make a synkhronos.function() of it first"
        )


def has_generator_object(variable: SharedVariable) -> bool:
    """Whether a shared variable is a random generator whose value is an object rather than an array."""
    library = get_library(variable)
    return library.is_generator(variable) and not library.is_array(variable)


def check_generator_state(session: Session, variable: SharedVariable, value: object, must_jump: bool) -> None:
    """Raise TypeError or ValueError unless a value is a valid state of a random generator; see `check_generator`."""
    try:
        get_library(variable).check_generator(variable, value, must_jump and session.size > 1)
    except (TypeError, ValueError) as error:
        raise type(error)(f"values: {describe(variable)}: {error}") from None


def match_values(values: Any, variables: Sequence[SharedVariable], is_single: bool) -> list[Any]:
    """Return a list with one value for each variable.  Raise TypeError or ValueError for another number of values."""
    return (
        [values] if is_single else check_list(values, "values", len(variables), "values, one for each shared variable")
    )


class _ValueBuffers(SharedBuffers):
    """Shared memory for small values of collectives: a new segment for each would take longer than the command."""


def to_data(session: Session, position: int, variable: SharedVariable, value: object) -> Data:
    """Return a value as Data with the variable's dtype and number of dimensions.  Other arrays are copied.

    The next collective overwrites the copy of a small array.  ``position`` is that of the value in its argument.
    """
    if isinstance(value, Data):
        check_session(value, session, "values")
        if value.dtype != variable.type.dtype or value.ndim != variable.type.ndim:
            raise TypeError(
                f"values: {describe(variable)} needs {variable.type.dtype} of {variable.type.ndim} dimensions, got "
                f"Data of {value.dtype} and {value.ndim} dimensions"
            )
        return value
    array = _to_array(variable, value)
    if array.nbytes > _MAX_BUFFERED_NBYTES:
        return copy_to_shared(array)
    return session.registry.get_or_create(_ValueBuffers).write_to_data((position, array.ndim), array)


def _to_array(variable: SharedVariable, value: object) -> np.ndarray:
    """Return a value as an array of any shape that the variable's ``set_value`` accepts.

    `check_shape` checks the shape later, since a rank may get a part of the rows.
    """
    check_dense(value, f"values: {describe(variable)}")
    any_shape = get_library(variable).tensor.TensorType(variable.type.dtype, (False,) * variable.type.ndim)
    try:
        return get_library(variable).filter(any_shape, value, allow_downcast=variable.container.allow_downcast)
    except (TypeError, ValueError, AttributeError) as error:
        error_class = ValueError if isinstance(error, ValueError) else TypeError
        raise error_class(f"values: {describe(variable)} can't take {type(value).__name__}: {error}") from None


def check_shape(variable: SharedVariable, shape: tuple[int, ...]) -> None:
    """Raise ValueError if the variable's type doesn't allow a shape."""
    if not get_library(variable).accepts_shape(variable, shape):
        raise ValueError(f"values: {describe(variable)} of type {variable.type} can't take shape {shape}")


def check_op(op: object, variables: Sequence[SharedVariable]) -> str:
    """Return the name of a reduction.  Raise TypeError or ValueError if it is not defined for a variable's dtype."""
    op = check_op_name(op)
    for variable in variables:
        check_op_dtype(op, np.dtype(variable.type.dtype), describe(variable))
    return op


def check_op_dtype(op: str, dtype: np.dtype, name: str) -> None:
    """Raise ValueError if a reduction is not defined for the dtype of an array.  ``name`` is its name in errors."""
    if not REDUCE_OPS[op].can_reduce(dtype):
        *others, last = map(repr, list_collective_ops(dtype))
        raise ValueError(f"op: {op!r} of {name} is not defined for dtype {dtype}; choose {', '.join(others)} or {last}")


def check_op_name(op: object) -> str:
    """Return the name of a reduction.  Raise TypeError or ValueError if collectives don't have it."""
    return check_choice(op, "op", list_collective_ops())


def select_all_rows(value: Data) -> range:
    """Return the selection of all rows of a value.  A scalar counts as one row."""
    return range(len(value)) if value.ndim else range(1)


def copy_selection_to_shared(selection: Selection, buffers: list[Data]) -> range | ArrayLocation:
    """Convert a selection to the form that commands contain: indexes are copied into shared memory.

    The `Data` object of the indexes is appended to ``buffers``.  The caller keeps it until the command has run.
    """
    if isinstance(selection, range):
        return selection
    index = copy_to_shared(selection)
    buffers.append(index)
    return get_array_location(index)


def copy_rank_selections_to_shared(selection: Selection, size: int, buffers: list[Data]) -> list[range | ArrayLocation]:
    """Return each rank's share of a selection in the form that commands contain; see `copy_selection_to_shared`."""
    rows = copy_selection_to_shared(selection, buffers)
    if isinstance(rows, range):
        return list(split_selection(rows, size))
    return [rows.slice_items(share.start, share.stop) for share in split_selection(range(len(selection)), size)]
