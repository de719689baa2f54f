"""The commands that the collectives send to the ranks.

A command that transfers arrays of several ranks begins with `prepare_replicas`, an all-gather of layouts.  From this
common data, every rank derives whether the collective is possible, and whether the communicator of its device or that
of `NUMPY` transfers the arrays.  Nothing is changed before all checks have passed on every rank.

The command of `all_reduce`, which training loops repeat, is in `all_reduce_command`.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np

from synkhronos.checks import describe
from synkhronos.containers import BoundedCache
from synkhronos.data_objects.rows import split_selection
from synkhronos.devices import (
    NUMPY,
    ArrayLayout,
    Communicator,
    Device,
    get_array_device,
    get_device,
    get_rank_device,
)
from synkhronos.graph_libraries import get_library
from synkhronos.graph_libraries.library import get_storage, has_other_references
from synkhronos.ranks import ArrayLocation, Command, Rank, RowAccess
from synkhronos.replication.random_streams import jump_to_rank
from synkhronos.variable_types import Array, SharedVariable


class _Transfer(NamedTuple):
    """Layouts of all ranks' replicas of a variable, its device, and the device whose communicator transfers it."""

    layouts: list[ArrayLayout]
    device: Device
    transport_device: Device


class _TransferCache(BoundedCache[Any, tuple[list[_Transfer], bool]]):
    """A rank's transfers, and whether they need a connection of its own device.

    The cache key is the layouts of all ranks, ``uses_device_communicator`` and ``op``.
    """


def _choose_transfers(by_rank: Sequence[Any], uses_device_communicator: bool, op: str | None) -> list[_Transfer]:
    """Return the transfer of each variable, from each rank's (shape, dtype, device name) of all variables."""
    transfers = []
    for layouts in zip(*by_rank, strict=True):
        names = {name for _, _, name in layouts} - {NUMPY.name}
        device = get_device(names.pop()) if names else NUMPY
        is_direct = uses_device_communicator and all(device.can_transfer_directly(dtype, op) for _, dtype, _ in layouts)
        transfers.append(_Transfer([layout[:2] for layout in layouts], device, device if is_direct else NUMPY))
    return transfers


def prepare_replicas(
    rank: Rank,
    shareds: Sequence[Any],
    uses_device_communicator: bool = False,
    op: str | None = None,
    digests_differ: bool = False,
) -> list[VariableReplica]:
    """Prepare a collective, and return this rank's replicas of the variables; a collective operation.

    The ranks exchange the layouts of their replicas.  A NumPy array is moved to the variable's device if another rank's
    value is on it.  With ``uses_device_communicator`` (``nccl`` of the public functions), the ranks are connected by
    NCCL if their device transfers some of the arrays directly, and reduces them by ``op``.

    ``digests_differ`` means that all ranks have just compared digests that differ.  The cached gather would compare
    digests again, so it is not used.
    """
    replicas = [VariableReplica(rank, shared) for shared in shareds]
    own_layouts = tuple([(r.value.shape, r.value.dtype, get_array_device(r.value).name) for r in replicas])
    device = get_rank_device(rank)
    communicator = device.get_communicator(rank)
    all_gather = rank.all_gather if digests_differ else rank.all_gather_if_different
    by_rank, generations = zip(*all_gather((own_layouts, communicator.generation)), strict=True)
    cache = rank.registry.get_or_create(_TransferCache)
    key = by_rank, uses_device_communicator, op
    cached = cache.get(key)
    if cached is None:
        transfers = _choose_transfers(by_rank, uses_device_communicator, op)
        needs_connection = any(transfer.transport_device is device for transfer in transfers)
        cached = cache[key] = transfers, needs_connection
    transfers, needs_connection = cached
    for replica, transfer in zip(replicas, transfers, strict=True):
        replica.prepare_for_transfer(transfer)
    if needs_connection:
        communicator.connect(generations)
    return replicas


class VariableReplica:
    """One rank's replica of a variable in a collective, with the layouts of all ranks' replicas.

    ``device`` owns the value on every rank, and is a device for GPUs if any rank's value is on one.  NumPy arrays that
    users have assigned on other ranks are then moved to it.
    """

    __slots__ = ("_rank", "device", "layouts", "library", "shared", "transport_device", "value")

    layouts: list[ArrayLayout]
    device: Device
    transport_device: Device

    def __init__(self, rank: Rank, shared: SharedVariable):
        self._rank, self.shared, self.library = rank, shared, get_library(shared)
        self.value = self.library.borrow_value(shared)

    def prepare_for_transfer(self, transfer: _Transfer) -> None:
        """Set `layouts`, `device` and `transport_device`, and move the value to this device."""
        self.layouts, self.device, self.transport_device = transfer
        if not self.device.owns(self.value):
            self.set_value(self.device.from_numpy(self.value))

    @property
    def communicator(self) -> Communicator:
        """Communicator that transfers the value."""
        return self.transport_device.get_communicator(self._rank)

    def get_writable(self) -> Any:
        """Return the value as an array that a communicator may overwrite.  Then call `store`."""
        if self.transport_device is not self.device:
            return np.array(self.device.to_numpy(self.value), order="C")
        self.value = None  # then all references but the container's are the user's
        is_referenced = has_other_references(get_storage(self.shared))
        value = self.value = self.library.borrow_value(self.shared)
        array = self.device.as_writable(value, is_referenced)
        if array is not value:
            self.set_value(array)
        return array

    def store(self, array: Array) -> None:
        """Set the variable to an array that a communicator has written, by another operation than `all_reduce`."""
        is_direct = self.transport_device is self.device
        new = self.device.rewrap(array, is_complete=True) if is_direct else self.device.from_numpy(array)
        if new is not self.value:
            self.set_value(new)

    def get_contiguous(self) -> Any:
        """Return the value as a contiguous array on the `transport_device`."""
        device = self.transport_device
        return device.as_contiguous(self.value if device is self.device else self.device.to_numpy(self.value))

    def set_value(self, array: Array) -> None:
        """Set the variable's value on this rank."""
        self.library.store_value(self.shared, array)
        self.value = self.library.borrow_value(self.shared)

    def raise_common_value_error(self, message: str) -> NoReturn:
        """Raise a ValueError that all ranks have found at the same point; see `Rank.raise_common_error`."""
        self._rank.raise_common_error(ValueError(message))

    def check_equal_layouts(self, collective: str) -> None:
        """Raise ValueError on all ranks if the ranks' shapes or dtypes differ."""
        if len(set(self.layouts)) > 1:
            difference = "shape" if len({shape for shape, _ in self.layouts}) > 1 else "dtype"
            self.raise_common_value_error(
                f"{collective}: {describe(self.shared)} needs the same {difference} on all ranks, but "
                f"{self.format_layouts()}; see gather(), which takes any {difference}s"
            )

    def check_shape(self, shape: tuple[int, ...], collective: str) -> None:
        """Raise ValueError on all ranks if the variable's type doesn't allow a shape."""
        if not self.library.accepts_shape(self.shared, shape):
            self.raise_common_value_error(
                f"{collective}: {describe(self.shared)} of type {self.shared.type} can't take shape {shape}"
            )

    def format_layouts(self) -> str:
        """Return a description of each rank's shape for an error message, with dtypes if they differ."""
        dtypes = [str(dtype) for _, dtype in self.layouts]
        names = dtypes if len(set(dtypes)) > 1 else [""] * len(dtypes)
        return ", ".join(
            f"rank {r} has {name}{shape}" for r, (name, (shape, _)) in enumerate(zip(names, self.layouts, strict=True))
        )


def _store_on_all_or_no_rank(rank: Rank, replicas: Sequence[VariableReplica], arrays: Sequence[Any]) -> None:
    """Store the results of a collective on all ranks or, after an interrupt of the master, on none of them."""

    def store() -> None:
        for replica, array in zip(replicas, arrays, strict=True):
            replica.store(array)

    rank.run_on_all_or_no_rank(store)


@dataclass(frozen=True, slots=True)
class Broadcast(Command):
    """Copy the master's values to every rank."""

    variable_keys: tuple[Any, ...]
    uses_device_communicator: bool

    def run(self, rank: Rank) -> None:
        for replica in prepare_replicas(rank, rank.get_objects(self.variable_keys), self.uses_device_communicator):
            if rank.is_master:
                replica.communicator.broadcast(replica.get_contiguous(), rank.master_rank)
                continue
            if replica.layouts[rank.number] == replica.layouts[rank.master_rank]:
                array = replica.get_writable()
            else:
                # A new array, so that the variable keeps its old value if a rank fails.
                array = replica.transport_device.empty(*replica.layouts[rank.master_rank])
            replica.communicator.broadcast(array, rank.master_rank)
            replica.store(array)


@dataclass(frozen=True, slots=True)
class Scatter(Command):
    """Set each rank's replicas of variables to the rank's rows of values in shared memory.

    ``rows`` has for each rank its rows of each value, or None for a variable that is not changed.
    """

    variable_keys: tuple[Any, ...]
    values: tuple[ArrayLocation, ...]
    rows: tuple[tuple[range | ArrayLocation | None, ...], ...]

    def find_row_accesses(self, size: int, host_ranks: range) -> Iterator[RowAccess]:
        """Yield the rows of the values that ``host_ranks`` read."""
        for r in host_ranks:
            for value, rows in zip(self.values, self.rows[r], strict=True):
                if rows is not None:
                    yield RowAccess(value, rows if value.shape else None)

    def run(self, rank: Rank) -> None:
        """Read this rank's rows, then store them on all ranks, or after an interrupt of the master on none of them."""
        new_values = []
        for key, value, rows in zip(self.variable_keys, self.values, self.rows[rank.number], strict=True):
            if rows is None:
                continue
            selection = None
            if value.shape:
                selection = rows if isinstance(rows, range) else rows.view(rank.segments)
            shared = rank.get_object(key)
            library = get_library(shared)
            device = get_array_device(library.borrow_value(shared))
            new_values.append((library, shared, device.transfers.read_rows(rank, value, selection)))

        def store() -> None:
            for library, shared, array in new_values:
                library.store_value(shared, array)

        rank.run_on_all_or_no_rank(store)


@dataclass(frozen=True, slots=True)
class Gather(Command):
    """Gather every rank's values in the master."""

    variable_keys: tuple[Any, ...]
    nd_up: int
    uses_device_communicator: bool

    def run(self, rank: Rank) -> Any:
        """Return a list with the gathered values of each variable in the master, a list of None in workers."""
        results = []
        for replica in prepare_replicas(rank, rank.get_objects(self.variable_keys), self.uses_device_communicator):
            result = out = None
            if rank.is_master:
                result, out = _allocate_gathered(replica.transport_device, replica.layouts, self.nd_up)
            replica.communicator.gather(replica.get_contiguous(), rank.master_rank, replica.layouts, out)
            results.append(result)
        return results


@dataclass(frozen=True, slots=True)
class AllGather(Command):
    """Set each variable on every rank to all ranks' values, concatenated along axis 0."""

    variable_keys: tuple[Any, ...]
    uses_device_communicator: bool

    def run(self, rank: Rank) -> None:
        """Check that all variables can be concatenated, then gather them."""
        replicas = prepare_replicas(rank, rank.get_objects(self.variable_keys), self.uses_device_communicator)
        for replica in replicas:
            if not _can_concatenate(replica.layouts):
                layouts = replica.format_layouts()
                replica.raise_common_value_error(
                    f"all_gather: {describe(replica.shared)} can't be concatenated along axis 0: {layouts}"
                )
            rows = sum(shape[0] for shape, _ in replica.layouts)
            replica.check_shape((rows, *replica.layouts[0][0][1:]), "all_gather")
        arrays = []
        for replica in replicas:
            concatenated, out = _allocate_gathered(replica.transport_device, replica.layouts, 0)
            replica.communicator.all_gather(replica.get_contiguous(), replica.layouts, out)
            arrays.append(concatenated)
        _store_on_all_or_no_rank(rank, replicas, arrays)


@dataclass(frozen=True, slots=True)
class ReduceScatter(Command):
    """Set each rank's replicas of variables to the rank's rows of the reduction over all ranks."""

    variable_keys: tuple[Any, ...]
    op: str
    uses_device_communicator: bool

    def run(self, rank: Rank) -> None:
        """Check that each variable has equal shapes on all ranks, with rows to divide, then reduce."""
        replicas = prepare_replicas(rank, rank.get_objects(self.variable_keys), self.uses_device_communicator, self.op)
        shares = []
        for replica in replicas:
            replica.check_equal_layouts("reduce_scatter")
            shape = replica.layouts[0][0]
            if not shape:
                replica.raise_common_value_error(f"reduce_scatter: {describe(replica.shared)} has no rows to divide")
            shares.append(split_selection(range(shape[0]), rank.size))
            for share in shares[-1]:
                replica.check_shape((len(share), *shape[1:]), "reduce_scatter")
        arrays = []
        for replica, rows in zip(replicas, shares, strict=True):
            shape, dtype = replica.layouts[0]
            n_items = math.prod(shape[1:])
            bounds = [0, *(share.stop * n_items for share in rows)]
            out = replica.transport_device.empty((len(rows[rank.number]), *shape[1:]), dtype)
            replica.communicator.reduce_scatter(replica.get_contiguous(), self.op, bounds, out)
            arrays.append(out)
        _store_on_all_or_no_rank(rank, replicas, arrays)


@dataclass(frozen=True, slots=True)
class Reduce(Command):
    """Reduce every rank's values into the master's variables, or return the reductions in the master."""

    variable_keys: tuple[Any, ...]
    op: str
    in_place: bool
    uses_device_communicator: bool

    def run(self, rank: Rank) -> Any:
        """Check that shapes are equal, then reduce.  Return the results in the master."""
        if rank.size == 1 and self.in_place:
            return []  # a reduction over one rank is that rank's value
        replicas = prepare_replicas(rank, rank.get_objects(self.variable_keys), self.uses_device_communicator, self.op)
        for replica in replicas:
            replica.check_equal_layouts("reduce")
        in_place, results = self.in_place and rank.is_master, []
        for replica in replicas:
            layout, out = replica.layouts[0], None
            if rank.is_master:
                out = replica.get_writable() if in_place else replica.transport_device.empty(*layout)
            array = out if in_place else replica.get_contiguous()
            replica.communicator.reduce(array, self.op, rank.master_rank, out, layout, range(rank.size))
            if in_place:
                replica.store(out)
            results.append(out)
        return results


@dataclass(frozen=True, slots=True)
class GetValue(Command):
    """Send one rank's values to the master."""

    variable_keys: tuple[Any, ...]
    source_rank: int

    def run(self, rank: Rank) -> Any:
        """Return the value of each variable on ``source_rank`` in the master, an empty list in workers."""
        results = []
        for replica in prepare_replicas(rank, rank.get_objects(self.variable_keys)):
            layouts: list[ArrayLayout | None] = [None] * rank.size
            layouts[self.source_rank] = replica.layouts[self.source_rank]
            own = replica.device.transfers.as_byte_source(replica.value) if rank.number == self.source_rank else None
            out = None
            if rank.is_master:
                allocate = get_rank_device(rank).transfers.empty_in_host_memory
                out = [None if layout is None else allocate(*layout) for layout in layouts]
                results.append(out[self.source_rank])
            NUMPY.get_communicator(rank).gather(own, rank.master_rank, layouts, out)
        return results


@dataclass(frozen=True, slots=True)
class GetLayouts(Command):
    """All-gather the layouts of every rank's values."""

    variable_keys: tuple[Any, ...]

    def run(self, rank: Rank) -> Any:
        """Return each rank's layout of each variable, by variable."""
        return [replica.layouts for replica in prepare_replicas(rank, rank.get_objects(self.variable_keys))]


@dataclass(frozen=True, slots=True)
class GetGenerators(Command):
    """All-gather the states of every rank's random generators."""

    variable_keys: tuple[Any, ...]

    def run(self, rank: Rank) -> Any:
        """Return the state of each variable on each rank, by rank."""
        shareds = rank.get_objects(self.variable_keys)
        return rank.all_gather([get_library(shared).copy_generator(shared) for shared in shareds])


@dataclass(frozen=True, slots=True)
class SetGenerators(Command):
    """Set the states of random generators: on one rank, or on all ranks, each of which jumps to its own stream.

    ``states`` is a list, so that the command is unhashable and the session does not cache its pickle: an equal
    generator may have drawn numbers since.
    """

    variable_keys: tuple[Any, ...]
    states: list[Any]
    only_rank: int | None = None

    def run(self, rank: Rank) -> None:
        for key, state in zip(self.variable_keys, self.states, strict=True):
            shared = rank.get_object(key)
            library = get_library(shared)
            if self.only_rank is None:
                library.set_generator(shared, jump_to_rank(library, copy.deepcopy(state), rank))
            elif self.only_rank == rank.number:
                library.set_generator(shared, copy.deepcopy(state))


def gather_pickles(rank: Rank, pickled: bytes, name: str) -> list[Any]:
    """Gather a pickled object of each rank.  Return the objects in the master, an empty list in workers.

    Raise TypeError in the master if one can't be unpickled.  ``name`` is the object's name in the error.
    """
    layouts: list[ArrayLayout] = [((length,), np.dtype(np.uint8)) for length in rank.all_gather(len(pickled))]
    out = [np.empty(*layout) for layout in layouts] if rank.is_master else None
    NUMPY.get_communicator(rank).gather(np.frombuffer(pickled, np.uint8), rank.master_rank, layouts, out)
    objects = []
    for number, array in enumerate(out or ()):
        try:
            objects.append(pickle.loads(array.data))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise TypeError(f"{name} of rank {number} can't be unpickled: {reason}") from error
    return objects


def _can_concatenate(layouts: Sequence[ArrayLayout]) -> bool:
    """Whether arrays of these layouts can be concatenated along axis 0."""
    first_shape, first_dtype = layouts[0]
    return all(shape and shape[1:] == first_shape[1:] and dtype == first_dtype for shape, dtype in layouts)


def _allocate_gathered(device: Device, layouts: Sequence[ArrayLayout], nd_up: int) -> tuple[Any, list[Any]]:
    """Allocate the result of a gather.  Return it, and for each rank the items that the rank's array fills.

    The result is a list of arrays if the shapes don't fit into one array, or the dtypes differ.
    """
    shapes = [shape for shape, _ in layouts]
    dtype = layouts[0][1]
    if nd_up == 1 and len(set(layouts)) == 1:
        result: Any = device.empty((len(shapes), *shapes[0]), dtype)
    elif nd_up == 0 and _can_concatenate(layouts):
        result = device.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype)
    else:
        result = [device.empty(*layout) for layout in layouts]
        return result, [device.slice_items(array, 0, shape) for array, shape in zip(result, shapes, strict=True)]
    starts = np.cumsum([0, *(math.prod(shape) for shape in shapes)])
    return result, [device.slice_items(result, int(start), shape) for start, shape in zip(starts, shapes, strict=False)]
