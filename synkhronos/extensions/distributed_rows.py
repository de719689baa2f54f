"""The rows of a sum: their values in the master, and each rank's share of them in shared variables."""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytensor
from pytensor.compile import SharedVariable
from pytensor.graph.basic import Constant, Variable
from pytensor.tensor import TensorType

from synkhronos.checks import describe
from synkhronos.collectives.api import scatter
from synkhronos.data_objects import Data
from synkhronos.data_objects.array import ReadOnlyData
from synkhronos.data_objects.rows import get_share_slice
from synkhronos.devices import NUMPY, Device
from synkhronos.extensions.row_slices import compute_queued_slice_bounds, compute_slice_bounds_by_rank
from synkhronos.graph_libraries import get_library
from synkhronos.ranks import Command, Rank, Session
from synkhronos.replication.replicator import distribute_variables
from synkhronos.variable_types import Array

__all__ = ["ComputedRows", "DistributedRows", "get_rows", "get_values"]

#: Maximal number of elements of an array that an evaluation compares with the scattered ones.  Of a larger array it
#: compares a sample: rows and elements at equal distances.  Reading more would delay each evaluation, as nearly
#: every element is in another cache line.
_MAX_COMPARED_SIZE = 1 << 15
#: Approximate number of elements of such a sample.
_SAMPLE_SIZE = 1 << 12


@dataclass(frozen=True, eq=False)
class ComputedRows:
    """Rows that are computed from arrays and shared variables.  They are recomputed when one of these has changed."""

    #: The arrays and shared variables that the rows depend on.
    sources: list[Any]
    #: Returns the rows of the sources' current values.
    compute: Callable[[], Any]


class DistributedRows:
    """The rows of a sum, and the shared variables that hold each rank's share.

    Parameters
    ----------
    rows : dict
        As in `sum_over_rows`.

    Attributes
    ----------
    variables, shareds : list of variable
        The symbolic inputs, and the shared variables that take their places on the ranks.
    n_rows : int
        Number of rows that are scattered.
    slice_bounds : list of int
        First row of each slice that ranks on CPU cores compute, and the number of rows; empty on GPUs.
    inherited_rows : list of ndarray
        In the process of a chain, the rows when its ranks were started.
    ranks_have_all_rows : bool
        Whether each rank has inherited all rows, and not only its share.
    """

    def __init__(self, rows: Mapping[Any, Any]):
        self.variables, self._sources = _parse_rows(rows)
        self.shareds = [_make_shared(variable) for variable in self.variables]
        self.n_rows = 0
        self.slice_bounds: list[int] = []
        self.inherited_rows: list[Any] = []
        self.ranks_have_all_rows = False
        self._inherited_arrays: list[Any] = []
        #: Arrays of the sources, their fingerprints, and the session, when the rows were scattered.
        self._scattered_arrays: list[Any] = []
        self._scattered_fingerprints: list[Any] = []
        self._session: weakref.ref[Session] | None = None

    @property
    def session(self) -> Session | None:
        """Session whose ranks have the rows, or None if there is none."""
        return None if self._session is None else self._session()

    def ensure_scattered(self, session: Session, device: Device, distributed_sum: Any) -> bool:
        """Scatter the rows if they or the session have changed since the last call; return whether they were scattered.

        ``device`` computes the functions of ``distributed_sum``, the `rows_sum.DistributedSum` whose rows these are.
        """
        arrays = self._list_arrays()
        # The process of a chain only samples, so its copies of the arrays do not change.
        fingerprints = [] if self.inherited_rows else [_compute_fingerprint(values) for values in arrays]
        is_unchanged = self.session is session and fingerprints == self._scattered_fingerprints
        if is_unchanged and all(map(operator.is_, arrays, self._scattered_arrays)):
            return False
        has_inherited = len(self.inherited_rows) > 0 and all(map(operator.is_, arrays, self._inherited_arrays))
        rows = self.inherited_rows if has_inherited else list(map(get_rows, self._sources))
        n_rows = _count_rows(self.variables, rows)
        self._session = None  # an error may leave some of the rows as they were
        self.slice_bounds, self.ranks_have_all_rows = [], False
        if n_rows:
            if has_inherited and session.has_forked_workers:
                with session.call_lock:
                    session.wait_until_idle()
                    session.run(LoadInheritedRows(distribute_variables(session, self.shareds), distributed_sum))
                self.ranks_have_all_rows = session.rank.size > 1
            else:
                scatter(self.shareds, rows)
            if device is NUMPY:  # GPUs take all rows at once
                nbytes = sum(np.dtype(values.dtype).itemsize * math.prod(values.shape) for values in rows)
                compute_bounds = (
                    compute_queued_slice_bounds if self.ranks_have_all_rows else compute_slice_bounds_by_rank
                )
                self.slice_bounds = compute_bounds(n_rows, nbytes, session.rank.size)
        self._scattered_arrays, self._scattered_fingerprints, self.n_rows = arrays, fingerprints, n_rows
        self._session = weakref.ref(session)
        return True

    def keep_for_fork(self) -> None:
        """Keep the rows for ranks that this process forks next."""
        self._inherited_arrays = self._list_arrays()
        rows = map(get_rows, self._sources)
        self.inherited_rows = [v if isinstance(v, Data) else np.ascontiguousarray(v) for v in rows]

    def _list_arrays(self) -> list[Array]:
        """Return the arrays that the rows depend on.  They are the same objects until ``set_value`` is called."""
        return [
            get_values(data)
            for source in self._sources
            for data in (source.sources if isinstance(source, ComputedRows) else [source])
        ]


@dataclass(frozen=True, slots=True)
class LoadInheritedRows(Command):
    """Set each rank's shared variables to the rank's share of the rows that it has inherited."""

    #: Keys of the shared variables among the ranks' objects.
    keys: tuple[Any, ...]
    #: A `rows_sum.DistributedSum`.  Its pickle is a reference: the workers, forks of this process, have inherited it.
    distributed_sum: Any

    def run(self, rank: Rank) -> None:
        """Put views of this rank's rows into the variables' containers, or copies where rows are not contiguous."""
        for key, values in zip(self.keys, self.distributed_sum.rows.inherited_rows, strict=True):
            shared = rank.get_object(key)
            rows = values[get_share_slice(len(values), rank.size, rank.number)]
            get_library(shared).store_value(shared, np.ascontiguousarray(rows))


def _parse_rows(rows: Any) -> tuple[list[Any], list[Any]]:
    """Return the symbolic inputs of checked rows, and the sources of their values."""
    if not isinstance(rows, Mapping) or not rows:
        raise TypeError(f"rows: expected a dict of at least one variable and its values, got {rows!r}")
    sources = []
    for variable, value in rows.items():
        if not isinstance(variable, Variable) or not isinstance(variable.type, TensorType):
            raise TypeError(f"rows: expected variables of PyTensor as keys, got {variable!r}")
        if variable.owner is not None or isinstance(variable, Constant | SharedVariable):
            raise TypeError(f"rows: expected a symbolic input as key, got {describe(variable)}")
        if variable.ndim == 0 or variable.type.shape[0] is not None:
            raise ValueError(f"rows: {describe(variable)} of type {variable.type} has no rows to share out")
        sources.append(_to_source(variable, value))
    _count_rows(rows, list(map(get_rows, sources)))
    return list(rows), sources


def _to_source(variable: Variable, value: Any) -> Any:
    """Return a source of the variable's dtype and number of dimensions.  Raise TypeError or ValueError otherwise."""
    if isinstance(value, SharedVariable | ComputedRows | Data):
        array_type = value.type if isinstance(value, SharedVariable) else get_rows(value)
        if (array_type.dtype, array_type.ndim) != (variable.dtype, variable.ndim):
            raise TypeError(
                f"rows: {describe(variable)} needs values of {variable.dtype} and {variable.ndim} dimensions, got "
                f"{value!r} of {array_type.dtype} and {array_type.ndim}"
            )
        return value
    try:
        return get_library(variable).filter(variable.type, value)
    except (TypeError, ValueError) as error:
        error_type = ValueError if isinstance(error, ValueError) else TypeError
        raise error_type(
            f"rows: {describe(variable)} of type {variable.type} cannot take the values: {error}"
        ) from None


def _count_rows(variables: Iterable[Variable], values: Sequence[Any]) -> int:
    """Return the number of rows.  Raise ValueError if it differs between the values."""
    lengths = list(map(len, values))
    if len(set(lengths)) > 1:
        lengths_by_name = dict(zip(map(describe, variables), lengths, strict=True))
        raise ValueError(f"rows: expected the same number of rows for each input, got {lengths_by_name}")
    return lengths[0]


def get_rows(source: Any) -> Array:
    """Return the current rows of an array, a shared variable, a `Data` or a `ComputedRows`."""
    return source.compute() if isinstance(source, ComputedRows) else get_values(source)


def get_values(data: Any) -> Array:
    """Return the current array of a shared variable, or an array or a `Data` as it is."""
    return data.get_value(borrow=True) if isinstance(data, SharedVariable) else data


def _compute_fingerprint(values: Any) -> Any:
    """Return shape and sampled bytes of an array, which show changes in place, or None for read-only data."""
    if isinstance(values, ReadOnlyData):
        return None
    array = np.asarray(values)
    if array.base is None and not array.flags.writeable:
        return None
    if array.size <= _MAX_COMPARED_SIZE:
        return array.shape, array.tobytes()
    # Sampled rows detect changes of whole rows; sampled elements detect changes of a column.
    step = -(-2 * array.size // _SAMPLE_SIZE)
    if array.ndim == 1:
        return array.shape, array[::step].tobytes()
    flat = array.reshape(-1) if array.flags.c_contiguous else array.flat  # an iterator is slow
    return array.shape, array[::step].tobytes(), flat[::step].tobytes()


def _make_shared(variable: Variable) -> SharedVariable:
    """Return the shared variable that holds each rank's rows."""
    shape = [0, *(length or 0 for length in variable.type.shape[1:])]
    return pytensor.shared(np.zeros(shape, variable.dtype), variable.name, shape=variable.type.shape)
