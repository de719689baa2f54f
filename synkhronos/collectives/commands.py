"""The commands that the collectives send to the ranks.

A command that moves arrays of several ranks begins with `gather_layouts`.  From the same data each rank decides in
the same way whether the collective is possible, and how the arrays travel: by the communicator of the device that holds
them, or through host memory.  So nothing is changed before all checks have passed on every rank.

An `all_reduce` in a training loop compares a digest only, as long as the layouts stay the same (`AllReducePlan`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np

from synkhronos.checks import describe
from synkhronos.data.rows import get_share
from synkhronos.devices import HOST, ArrayLayout, Communicator, Device, get_array_device, get_device
from synkhronos.graphs import GraphLibrary, library_of
from synkhronos.graphs.mirror import get_object, jump_to_rank
from synkhronos.ranks import Command, Rank, RowAccess, SharedArray

#: Number of plans of each kind that a rank caches.
_MAX_PLANS = 64


class _Transfer(NamedTuple):
    """Layouts of all ranks' copies of a variable, its device, and the device whose communicator transfers it."""

    layouts: list[ArrayLayout]
    device: Device
    transport: Device


class _TransferPlans(dict[Any, list[_Transfer]]):
    """A rank's plans of transfers, by the layouts of all ranks."""


def _plan_transfers(by_rank: Sequence[Any], nccl: bool) -> list[_Transfer]:
    """Return the transfer of each variable from each rank's (shape, dtype, device name) of each variable."""
    transfers = []
    for layouts in zip(*by_rank, strict=True):
        names = {name for _, _, name in layouts} - {HOST.name}
        device = get_device(names.pop()) if names else HOST
        is_direct = nccl and all(device.can_communicate(dtype) for _, dtype, _ in layouts)
        transfers.append(_Transfer([layout[:2] for layout in layouts], device, device if is_direct else HOST))
    return transfers


def gather_layouts(rank: Rank, keys: Sequence[Any], nccl: bool = False, is_changed: bool = False) -> list[VariableCopy]:
    """All-gather the layouts of variables, and connect the ranks; a collective operation.

    Parameters
    ----------
    rank : Rank
    keys : sequence
        Keys of the variables among the rank's objects.
    nccl : bool
        Whether devices transfer arrays directly rather than through host memory.
    is_changed : bool
        Whether the ranks know already that their layouts differ from those of the last time.
    """
    shareds = [get_object(rank, key) for key in keys]
    values = [library_of(shared).get(shared) for shared in shareds]
    own_layouts = tuple([(value.shape, value.dtype, get_array_device(value).name) for value in values])
    del values  # each array is to have a single reference besides its container's
    communicator = rank.device.get_communicator(rank)
    all_gather = rank.all_gather if is_changed else rank.all_gather_cached
    by_rank, generations = zip(*all_gather((own_layouts, communicator.generation)), strict=True)
    plans = rank.registry.get(_TransferPlans)
    transfers = plans.get((by_rank, nccl))
    if transfers is None:
        if len(plans) >= _MAX_PLANS:
            plans.clear()
        transfers = plans[by_rank, nccl] = _plan_transfers(by_rank, nccl)
    copies = [VariableCopy(rank, shared, transfer) for shared, transfer in zip(shareds, transfers, strict=True)]
    if any(transfer.transport is rank.device for transfer in transfers):
        communicator.connect(generations)
    return copies


class VariableCopy:
    """One rank's copy of a variable in a collective.

    Attributes
    ----------
    shared : shared variable
    library : GraphLibrary
    value : array
    layouts : list of ArrayLayout
        Layout of each rank's copy.
    device : Device
        Device that holds the value: a GPU if it is there on any rank, as the user may have assigned NumPy arrays.
    transport : Device
        Device whose communicator transfers the value: its own device, or the host.
    """

    __slots__ = ("_rank", "device", "layouts", "library", "shared", "transport", "value")

    def __init__(self, rank: Rank, shared: Any, transfer: _Transfer):
        self._rank, self.shared, self.library = rank, shared, library_of(shared)
        self.layouts, self.device, self.transport = transfer
        self.value = self.library.get(shared)
        if not self.device.owns(self.value):
            self.replace(self.device.from_host(self.value))

    @property
    def communicator(self) -> Communicator:
        """Communicator that transfers the value."""
        return self.transport.get_communicator(self._rank)

    def get_writable(self) -> Any:
        """Return an array with the value that a communicator may overwrite; then call `store`."""
        if self.transport is not self.device:
            return np.array(self.device.to_host(self.value), order="C")
        self.value = None  # so that any reference but the container's is the user's
        is_referenced = self.library.is_referenced(self.shared)
        value = self.value = self.library.get(self.shared)
        array = self.device.as_writable(value, is_referenced)
        if array is not value:
            self.replace(array)
        return array

    def store(self, array: Any) -> None:
        """Set the variable to an array that a communicator has written."""
        new = self.device.rewrap(array) if self.transport is self.device else self.device.from_host(array)
        if new is not self.value:
            self.replace(new)

    def get_contiguous(self, transport: Device | None = None) -> Any:
        """Return the value as a contiguous array on its transport, or on another one."""
        transport = transport or self.transport
        return transport.as_contiguous(self.value if transport is self.device else self.device.to_host(self.value))

    def replace(self, array: Any) -> None:
        """Put another array into the variable's container."""
        self.library.put(self.shared, array)
        self.value = self.library.get(self.shared)

    def refuse(self, message: str) -> NoReturn:
        """Raise ValueError, which all ranks have found."""
        self._rank.raise_collectively(ValueError(message))

    def check_equal_shapes(self, collective: str) -> None:
        """Raise ValueError on all ranks if their shapes differ."""
        if len({shape for shape, _ in self.layouts}) > 1:
            self.refuse(
                f"{collective}: {describe(self.shared)} needs the same shape on all ranks, but {self.list_shapes()}; "
                "see gather(), which takes any shapes"
            )

    def check_shape(self, shape: tuple[int, ...], collective: str) -> None:
        """Raise ValueError on all ranks if the variable's type doesn't allow a shape."""
        if not self.library.can_hold(self.shared, shape):
            self.refuse(f"{collective}: {describe(self.shared)} of type {self.shared.type} can't take shape {shape}")

    def list_shapes(self) -> str:
        """Return the shape on each rank, for an error message."""
        return ", ".join(f"rank {r} has {shape}" for r, (shape, _) in enumerate(self.layouts))


@dataclass(frozen=True, slots=True)
class Broadcast(Command):
    """Copy the master's values to every rank."""

    keys: tuple[Any, ...]
    nccl: bool

    def run(self, rank: Rank) -> None:
        """Send or receive each variable's value."""
        for variable in gather_layouts(rank, self.keys, self.nccl):
            if rank.is_master:
                variable.communicator.broadcast(variable.get_contiguous(), rank.root)
                continue
            if variable.layouts[rank.number] == variable.layouts[rank.root]:
                array = variable.get_writable()
            else:
                # Stored at the end: if a rank fails before, the variable keeps its old value.
                array = variable.transport.empty(*variable.layouts[rank.root])
            variable.communicator.broadcast(array, rank.root)
            variable.store(array)


@dataclass(frozen=True, slots=True)
class Assign(Command):
    """Set variables to rows of values in shared memory, on each rank to its own.

    Attributes
    ----------
    keys : tuple
        Keys of the variables.
    values : tuple of SharedArray
        One for each variable.
    rows : tuple of tuple of (range, SharedArray or None)
        For each rank, its rows of each value; None leaves the variable as it is.
    """

    keys: tuple[Any, ...]
    values: tuple[SharedArray, ...]
    rows: tuple[tuple[range | SharedArray | None, ...], ...]

    def find_row_accesses(self, size: int, ranks: range) -> Iterator[RowAccess]:
        """Yield the accesses of some ranks to rows of the values."""
        for r in ranks:
            for value, rows in zip(self.values, self.rows[r], strict=True):
                if rows is not None:
                    yield RowAccess(value, rows if value.shape else None)

    def run(self, rank: Rank) -> None:
        """Copy this rank's rows into the variables' containers."""
        for key, value, rows in zip(self.keys, self.values, self.rows[rank.number], strict=True):
            if rows is None:
                continue
            selection = None
            if value.shape:
                selection = rows if isinstance(rows, range) else rows.view(rank.segments)
            shared = get_object(rank, key)
            library = library_of(shared)
            library.put(shared, get_array_device(library.get(shared)).load(rank, value, selection))


@dataclass(frozen=True, slots=True)
class Gather(Command):
    """Gather every rank's values in the master."""

    keys: tuple[Any, ...]
    nd_up: int
    nccl: bool

    def run(self, rank: Rank) -> Any:
        """Return a list with the gathered values of each variable; its items are None in workers."""
        results = []
        for variable in gather_layouts(rank, self.keys, self.nccl):
            result = out = None
            if rank.is_master:
                result, out = _allocate_gathered(variable.transport, variable.layouts, self.nd_up)
            variable.communicator.gather(variable.get_contiguous(), rank.root, variable.layouts, out)
            results.append(result)
        return results


@dataclass(frozen=True, slots=True)
class AllGather(Command):
    """Set each variable on every rank to all ranks' values, joined along axis 0."""

    keys: tuple[Any, ...]
    nccl: bool

    def run(self, rank: Rank) -> None:
        """Check that all variables can be joined, then join them."""
        variables = gather_layouts(rank, self.keys, self.nccl)
        for variable in variables:
            if not _can_join(variable.layouts):
                shapes = variable.list_shapes()
                variable.refuse(f"all_gather: {describe(variable.shared)} can't be joined along axis 0: {shapes}")
            rows = sum(shape[0] for shape, _ in variable.layouts)
            variable.check_shape((rows, *variable.layouts[0][0][1:]), "all_gather")
        for variable in variables:
            joined, out = _allocate_gathered(variable.transport, variable.layouts, 0)
            variable.communicator.all_gather(variable.get_contiguous(), variable.layouts, out)
            variable.store(joined)


@dataclass(frozen=True, slots=True)
class ReduceScatter(Command):
    """Set each variable on every rank to the rank's rows of the reduction over all ranks."""

    keys: tuple[Any, ...]
    op: str
    nccl: bool

    def run(self, rank: Rank) -> None:
        """Check that all variables have equal shapes that can be divided, then reduce."""
        variables = gather_layouts(rank, self.keys, self.nccl)
        shares = []
        for variable in variables:
            variable.check_equal_shapes("reduce_scatter")
            shape = variable.layouts[0][0]
            if not shape:
                variable.refuse(f"reduce_scatter: {describe(variable.shared)} has no rows to divide")
            shares.append([get_share(shape[0], rank.size, r) for r in range(rank.size)])
            for share in shares[-1]:
                variable.check_shape((share.stop - share.start, *shape[1:]), "reduce_scatter")
        for variable, rows in zip(variables, shares, strict=True):
            shape, dtype = variable.layouts[0]
            n_items = math.prod(shape[1:])
            bounds = [0, *(share.stop * n_items for share in rows)]
            own_rows = rows[rank.number]
            out = variable.transport.empty((own_rows.stop - own_rows.start, *shape[1:]), dtype)
            variable.communicator.reduce_scatter(variable.get_contiguous(), self.op, bounds, out)
            variable.store(out)


@dataclass(frozen=True, slots=True)
class Reduce(Command):
    """Reduce every rank's values into the master's variables, or return the reductions in the master.

    Attributes
    ----------
    keys : tuple
        Keys of the variables.
    op : str
    in_place : bool
        Whether the master's variables are set to the results.
    nccl : bool
    """

    keys: tuple[Any, ...]
    op: str
    in_place: bool
    nccl: bool

    def run(self, rank: Rank) -> Any:
        """Check that shapes are equal, then reduce; return the results in the master."""
        if rank.size == 1 and self.in_place:
            return []  # a reduction over one rank is that rank's value
        variables = gather_layouts(rank, self.keys, self.nccl)
        for variable in variables:
            variable.check_equal_shapes("reduce")
        in_place, results = self.in_place and rank.is_master, []
        for variable in variables:
            layout, out = variable.layouts[0], None
            if rank.is_master:
                out = variable.get_writable() if in_place else variable.transport.empty(*layout)
            # The argument has no name of its own: `Device.rewrap` checks whether there are other references to it.
            variable.communicator.reduce(
                out if in_place else variable.get_contiguous(), self.op, rank.root, out, layout, range(rank.size)
            )
            if in_place:
                variable.store(out)
            results.append(out)
        return results


@dataclass(frozen=True, slots=True)
class AllReduceValues(Command):
    """Reduce every rank's values into every rank's variables."""

    keys: tuple[Any, ...]
    op: str
    nccl: bool

    def run(self, rank: Rank) -> None:
        """Check that shapes are equal, then reduce."""
        if rank.size > 1:
            self.plan(rank).all_reduce(rank, self.op)

    def plan(self, rank: Rank) -> AllReducePlan:
        """Return the plan, after all ranks have checked that they have the same; a collective operation."""
        plans = rank.registry.get(_AllReducePlans)
        last, is_changed = plans.get(self), False
        if last is not None and last.is_valid(rank):
            if rank.all_equal(last.digest):
                return last
            is_changed = True
        variables = gather_layouts(rank, self.keys, self.nccl, is_changed)
        for variable in variables:
            variable.check_equal_shapes("all_reduce")
        if len(plans) >= _MAX_PLANS:
            plans.clear()
        plan = plans[self] = AllReducePlan.from_copies(rank, self.keys, variables)
        return plan


class PlannedVariable(NamedTuple):
    """A variable of a repeated all-reduce; `VariableCopy` has the attributes."""

    key: Any
    library: GraphLibrary
    layout: ArrayLayout
    device: Device
    transport: Device


class AllReducePlan(NamedTuple):
    """Layouts of an all-reduce that is repeated, the same on all ranks.

    It has no reference to an array: an array is written in place only if its container has the only one.

    Attributes
    ----------
    variables : list of PlannedVariable
    generation : int
        Number of the device's connection.
    digest : bytes
        Digest of all of it.  Each rank on which the plan is still valid passes it to `Rank.all_equal`.
    """

    variables: list[PlannedVariable]
    generation: int
    digest: bytes

    @classmethod
    def from_copies(cls, rank: Rank, keys: Sequence[Any], copies: Sequence[VariableCopy]) -> AllReducePlan:
        """Return the plan for copies of equal shapes, which are on their devices now."""
        generation = rank.device.get_communicator(rank).generation
        variables = [
            PlannedVariable(key, own.library, own.layouts[rank.number], own.device, own.transport)
            for key, own in zip(keys, copies, strict=True)
        ]
        layouts = tuple([(*variable.layout, variable.device.name) for variable in variables])
        return cls(variables, generation, rank.compute_digest((layouts, generation)))

    def is_valid(self, rank: Rank) -> bool:
        """Whether this rank's variables and its connection have not changed."""
        for key, library, (shape, dtype), device, _ in self.variables:
            value = library.get(get_object(rank, key))
            if get_array_device(value) is not device or value.shape != shape or value.dtype != dtype:
                return False
        return bool(rank.device.get_communicator(rank).generation == self.generation)

    def all_reduce(self, rank: Rank, op: str) -> None:
        """Reduce into every rank's variables."""
        for key, library, _, device, transport in self.variables:
            shared, communicator = get_object(rank, key), transport.get_communicator(rank)
            if transport is not device:
                array = np.array(device.to_host(library.get(shared)), order="C")
                communicator.all_reduce(array, op)
                library.put(shared, device.from_host(array))
                continue
            is_referenced = library.is_referenced(shared)
            value = library.get(shared)
            array = device.as_writable(value, is_referenced)
            new = device.rewrap(array, communicator.all_reduce(array, op))
            if new is not value:
                library.put(shared, new)
        for communicator in {variable.transport.get_communicator(rank) for variable in self.variables}:
            communicator.notify_started()


class _AllReducePlans(dict[AllReduceValues, AllReducePlan]):
    """A rank's plans of repeated all-reduces, by command."""


@dataclass(frozen=True, slots=True)
class GetValue(Command):
    """Send one rank's values to the master."""

    keys: tuple[Any, ...]
    source: int

    def run(self, rank: Rank) -> Any:
        """Return the source's value of each variable in the master, an empty list in workers."""
        results = []
        for variable in gather_layouts(rank, self.keys):
            layouts: list[ArrayLayout | None] = [None] * rank.size
            layouts[self.source] = variable.layouts[self.source]
            own = variable.get_contiguous(HOST) if rank.number == self.source else None
            out = None
            if rank.is_master:
                out = [None if layout is None else np.empty(*layout) for layout in layouts]
                results.append(out[self.source])
            HOST.get_communicator(rank).gather(own, rank.root, layouts, out)
        return results


@dataclass(frozen=True, slots=True)
class GetShapes(Command):
    """All-gather the shapes of every rank's values."""

    keys: tuple[Any, ...]

    def run(self, rank: Rank) -> Any:
        """Return for each variable the layout on each rank."""
        return [variable.layouts for variable in gather_layouts(rank, self.keys)]


@dataclass(frozen=True, slots=True)
class GetGenerators(Command):
    """All-gather the states of every rank's random generators."""

    keys: tuple[Any, ...]

    def run(self, rank: Rank) -> Any:
        """Return for each rank the state of each variable."""
        shareds = [get_object(rank, key) for key in self.keys]
        return rank.all_gather([library_of(shared).copy_generator(shared) for shared in shareds])


@dataclass(frozen=True, slots=True)
class SetGenerators(Command):
    """Set the states of random generators.

    Attributes
    ----------
    keys : tuple
        Keys of the variables.
    states : list
        One for each variable.  The list makes the command unhashable, so that the session does not cache its pickle:
        a generator that compares equal may have drawn numbers since.
    only_rank : int or None
        Rank whose generators are set; None for all ranks, with states that are moved apart.
    """

    keys: tuple[Any, ...]
    states: list[Any]
    only_rank: int | None = None

    def run(self, rank: Rank) -> None:
        """Set this rank's generators."""
        for key, state in zip(self.keys, self.states, strict=True):
            shared = get_object(rank, key)
            library = library_of(shared)
            if self.only_rank is None:
                library.set_generator(shared, jump_to_rank(library, copy.deepcopy(state), rank))
            elif self.only_rank == rank.number:
                library.set_generator(shared, copy.deepcopy(state))


def _can_join(layouts: Sequence[ArrayLayout]) -> bool:
    """Whether arrays of these layouts can be joined along axis 0."""
    return all(shape and shape[1:] == layouts[0][0][1:] for shape, _ in layouts)


def _allocate_gathered(device: Device, layouts: Sequence[ArrayLayout], nd_up: int) -> tuple[Any, list[Any]]:
    """Allocate the result of a gather.

    Returns
    -------
    result : array, or list of array
        A list if the shapes don't fit into one array.
    out : list of array
        For each rank, the flat part of the result that its array fills.
    """
    shapes = [shape for shape, _ in layouts]
    dtype = layouts[0][1]
    if nd_up == 1 and len(set(shapes)) == 1:
        result: Any = device.empty((len(shapes), *shapes[0]), dtype)
    elif nd_up == 0 and _can_join(layouts):
        result = device.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype)
    else:
        result = [device.empty(*layout) for layout in layouts]
        return result, [device.slice_items(array, 0, shape) for array, shape in zip(result, shapes, strict=True)]
    starts = np.cumsum([0, *(math.prod(shape) for shape in shapes)])
    return result, [device.slice_items(result, int(start), shape) for start, shape in zip(starts, shapes, strict=False)]
