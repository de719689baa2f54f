"""The commands behind the collectives.

A command that moves arrays of several ranks begins with `Copies`: the ranks exchange the layout and the device of each
variable.  From the same data each rank decides in the same way whether the collective is possible, and how the arrays
travel: by the communicator of the device that holds them, or through host memory.  So nothing is changed before all
checks have passed on every rank.

An `all_reduce` in a training loop exchanges a digest only, as long as the layouts stay the same (`AllReducePlan`).
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
from synkhronos.devices import HOST, ArrayLayout, Device, array_device, get_device
from synkhronos.devices.reductions import REDUCTIONS
from synkhronos.graphs import library_of
from synkhronos.graphs.mirror import get_object, jump_to_rank
from synkhronos.ranks import Cancelled, Command, Rank, RowAccess, SharedArray

#: Number of plans of each kind that a rank caches.
_MAX_PLANS = 64


class _TransferPlan:
    """Layouts, devices and transports of variables, derived from what all ranks exchanged.

    Parameters
    ----------
    by_rank : sequence of (sequence of (shape, dtype, device name), epoch)
    nccl : bool
        Whether devices transfer arrays directly.

    Attributes
    ----------
    layouts : list of list of ArrayLayout
        For each rank, the layout of each variable.
    devices, transports : list of Device
        As in `Copies`.
    epochs : list of int
        Each rank's number of its device's connection.
    """

    def __init__(self, by_rank: Sequence[Any], nccl: bool):
        self.layouts: list[list[ArrayLayout]] = [[layout[:2] for layout in each] for each, _ in by_rank]
        self.epochs = [epoch for _, epoch in by_rank]
        self.devices: list[Device] = []
        self.transports: list[Device] = []
        for i in range(len(self.layouts[0])):
            names = {each[i][2] for each, _ in by_rank} - {HOST.name}
            device = get_device(names.pop()) if names else HOST
            is_direct = nccl and all(device.can_communicate(each[i][1]) for each in self.layouts)
            self.devices.append(device)
            self.transports.append(device if is_direct else HOST)


class _TransferPlans(dict[Any, _TransferPlan]):
    """Transfer plans that a rank has made, by what all ranks exchanged."""


class Copies:
    """One rank's copies of a command's variables, and the layouts of all ranks' copies.

    Creating it is a collective operation: the ranks exchange their layouts.

    Parameters
    ----------
    rank : Rank
    keys : sequence
        Keys of the variables among the rank's objects.
    nccl : bool
        Whether devices transfer arrays directly rather than through host memory.
    is_changed : bool
        Whether the ranks know already that their layouts differ from those of the last time.

    Attributes
    ----------
    shareds : list of shared variable
    values : list of array
    layouts : list of list of ArrayLayout
        For each rank, the layout of each variable.
    devices : list of Device
        Device that holds each variable: a GPU if it is there on any rank, as the user may have assigned NumPy arrays.
    transports : list of Device
        Device whose communicator transfers each variable: the variable's own device, or the host.
    """

    def __init__(self, rank: Rank, keys: Sequence[Any], nccl: bool = False, is_changed: bool = False):
        self.rank = rank
        self.shareds = [get_object(rank, key) for key in keys]
        self.libraries = [library_of(shared) for shared in self.shareds]
        self.values = [library.get(shared) for library, shared in zip(self.libraries, self.shareds, strict=True)]
        mine = tuple([(value.shape, value.dtype, array_device(value).name) for value in self.values])
        communicator = rank.device.get_communicator(rank)
        all_gather = rank.all_gather if is_changed else rank.all_gather_cached
        by_rank = tuple(all_gather((mine, communicator.epoch)))
        plans = rank.registry.get(_TransferPlans)
        plan = plans.get((by_rank, nccl))
        if plan is None:
            if len(plans) > _MAX_PLANS:
                plans.clear()
            plan = plans[by_rank, nccl] = _TransferPlan(by_rank, nccl)
        self.layouts, self.devices, self.transports = plan.layouts, plan.devices, plan.transports
        for i, device in enumerate(self.devices):
            if not device.owns(self.values[i]):
                self.replace(i, device.from_host(self.values[i]))
        if rank.device in self.transports:
            communicator.connect(plan.epochs)

    def get_layouts(self, position: int) -> list[ArrayLayout]:
        """Return the layout of one variable on each rank."""
        return [each[position] for each in self.layouts]

    def get_communicator(self, position: int) -> Any:
        """Return the communicator that transfers one variable."""
        return self.transports[position].get_communicator(self.rank)

    def get_writable(self, position: int) -> Any:
        """Return an array with one variable's value that a communicator may overwrite; then call `store`."""
        if self.transports[position] is not self.devices[position]:
            return np.array(self.devices[position].to_host(self.values[position]), order="C")
        library, shared = self.libraries[position], self.shareds[position]
        self.values[position] = None  # so that any reference but the container's is the user's
        is_referenced = library.is_referenced(shared)
        value = self.values[position] = library.get(shared)
        array = self.devices[position].as_writable(value, is_referenced)
        if array is not value:
            self.replace(position, array)
        return array

    def store(self, position: int, array: Any) -> None:
        """Set one variable to an array that a communicator has written."""
        device = self.devices[position]
        new = device.refresh(array) if self.transports[position] is device else device.from_host(array)
        if new is not self.values[position]:
            self.replace(position, new)

    def get_contiguous(self, position: int, transport: Device | None = None) -> Any:
        """Return one variable's value as a contiguous array on its transport, or on another one."""
        transport, device = transport or self.transports[position], self.devices[position]
        value = self.values[position]
        return transport.as_contiguous(value if transport is device else device.to_host(value))

    def replace(self, position: int, array: Any) -> None:
        """Put another array into one variable's container."""
        self.libraries[position].put(self.shareds[position], array)
        self.values[position] = self.libraries[position].get(self.shareds[position])

    def fail(self, message: str) -> NoReturn:
        """Fail on all ranks, which have found the same problem: ValueError in the master, `Cancelled` in workers."""
        raise ValueError(message) if self.rank.is_master else Cancelled

    def check_equal_shapes(self, position: int, collective: str) -> None:
        """Fail if the shapes of one variable differ between ranks."""
        layouts = self.get_layouts(position)
        if len({shape for shape, _ in layouts}) > 1:
            each = ", ".join(f"rank {r} has {shape}" for r, (shape, _) in enumerate(layouts))
            self.fail(
                f"{collective}: {describe(self.shareds[position])} needs the same shape on all ranks, but {each}; "
                "see gather(), which takes any shapes"
            )

    def check_shape(self, position: int, shape: tuple[int, ...], collective: str) -> None:
        """Fail if one variable's type doesn't allow a shape."""
        library, shared = self.libraries[position], self.shareds[position]
        if not library.can_hold(shared, shape):
            self.fail(f"{collective}: {describe(shared)} of type {shared.type} can't take shape {shape}")


@dataclass(frozen=True, slots=True)
class Broadcast(Command):
    """Copy the master's values to every rank."""

    keys: tuple[Any, ...]
    nccl: bool

    def run(self, rank: Rank) -> None:
        """Send or receive each variable's value."""
        copies = Copies(rank, self.keys, self.nccl)
        for i, (shape, dtype) in enumerate(copies.layouts[rank.root]):
            communicator = copies.get_communicator(i)
            if rank.is_master:
                communicator.broadcast(copies.get_contiguous(i), rank.root)
                continue
            if copies.get_layouts(i)[rank.number] == (shape, dtype):
                array = copies.get_writable(i)
            else:
                # Stored at the end: if a rank fails before, the variable keeps its old value.
                array = copies.transports[i].empty(shape, dtype)
            communicator.broadcast(array, rank.root)
            copies.store(i, array)


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

    def row_accesses(self, size: int, ranks: range) -> Iterator[RowAccess]:
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
            library.put(shared, array_device(library.get(shared)).load(rank, value, selection))


@dataclass(frozen=True, slots=True)
class Gather(Command):
    """Gather every rank's values in the master."""

    keys: tuple[Any, ...]
    nd_up: int
    nccl: bool

    def run(self, rank: Rank) -> Any:
        """Return a list with the gathered values of each variable; its items are None in workers."""
        copies = Copies(rank, self.keys, self.nccl)
        results = []
        for i in range(len(self.keys)):
            layouts = copies.get_layouts(i)
            result, out = (
                _allocate_gathered(copies.transports[i], layouts, self.nd_up) if rank.is_master else (None, None)
            )
            copies.get_communicator(i).gather(copies.get_contiguous(i), rank.root, layouts, out)
            results.append(result)
        return results


@dataclass(frozen=True, slots=True)
class AllGather(Command):
    """Set each variable on every rank to all ranks' values, joined along axis 0."""

    keys: tuple[Any, ...]
    nccl: bool

    def run(self, rank: Rank) -> None:
        """Check that all variables can be joined, then join them."""
        copies = Copies(rank, self.keys, self.nccl)
        for i, shared in enumerate(copies.shareds):
            layouts = copies.get_layouts(i)
            if not _can_join(layouts):
                each = ", ".join(f"rank {r} has {shape}" for r, (shape, _) in enumerate(layouts))
                copies.fail(f"all_gather: {describe(shared)} can't be joined along axis 0: {each}")
            rows = sum(shape[0] for shape, _ in layouts)
            copies.check_shape(i, (rows, *layouts[0][0][1:]), "all_gather")
        for i in range(len(self.keys)):
            joined, out = _allocate_gathered(copies.transports[i], copies.get_layouts(i), 0)
            copies.get_communicator(i).gather(copies.get_contiguous(i), None, copies.get_layouts(i), out)
            copies.store(i, joined)


@dataclass(frozen=True, slots=True)
class ReduceScatter(Command):
    """Set each variable on every rank to the rank's rows of the reduction over all ranks."""

    keys: tuple[Any, ...]
    op: str
    nccl: bool

    def run(self, rank: Rank) -> None:
        """Check that all variables have equal shapes that can be divided, then reduce."""
        copies = Copies(rank, self.keys, self.nccl and REDUCTIONS[self.op].nccl is not None)
        shares = []
        for i, shared in enumerate(copies.shareds):
            copies.check_equal_shapes(i, "reduce_scatter")
            shape = copies.get_layouts(i)[0][0]
            if not shape:
                copies.fail(f"reduce_scatter: {describe(shared)} has no rows to divide")
            shares.append([get_share(shape[0], rank.size, r) for r in range(rank.size)])
            for share in shares[i]:
                copies.check_shape(i, (share.stop - share.start, *shape[1:]), "reduce_scatter")
        for i, rows in enumerate(shares):
            shape, dtype = copies.get_layouts(i)[0]
            n_items = math.prod(shape[1:])
            bounds = [0, *(share.stop * n_items for share in rows)]
            mine = rows[rank.number]
            out = copies.transports[i].empty((mine.stop - mine.start, *shape[1:]), dtype)
            copies.get_communicator(i).reduce_scatter(copies.get_contiguous(i), self.op, bounds, out)
            copies.store(i, out)


@dataclass(frozen=True, slots=True)
class Reduce(Command):
    """Reduce every rank's values.

    Attributes
    ----------
    keys : tuple
        Keys of the variables.
    op : str
    destination : {"all", "master", "returned"}
        Ranks whose variables are set to the result; "returned": none, the master returns it.
    nccl : bool
    """

    keys: tuple[Any, ...]
    op: str
    destination: str
    nccl: bool

    def run(self, rank: Rank) -> Any:
        """Check that shapes are equal, then reduce; return the results in the master unless all ranks get them."""
        if rank.size == 1 and self.destination != "returned":
            return []  # a reduction over one rank is that rank's value
        if self.destination == "all":
            self._all_reduce(rank, self.plan(rank))
            return []
        copies, in_place = self._exchange_layouts(rank), rank.is_master and self.destination == "master"
        results = []
        for i in range(len(self.keys)):
            copies.check_equal_shapes(i, "reduce")
        for i in range(len(self.keys)):
            layout, out = copies.get_layouts(i)[0], None
            if rank.is_master:
                out = copies.get_writable(i) if in_place else copies.transports[i].empty(*layout)
            # The argument has no name of its own: `Device.refresh` checks whether there are other references to it.
            copies.get_communicator(i).reduce(
                out if in_place else copies.get_contiguous(i), self.op, rank.root, out, layout, range(rank.size)
            )
            if in_place:
                copies.store(i, out)
            results.append(out)
        return results

    def plan(self, rank: Rank) -> AllReducePlan | Copies:
        """Agree on the layouts of an all-reduce; a collective operation.

        Returns
        -------
        AllReducePlan or Copies
            `Copies` if some variable is not transferred by its own device.
        """
        plans = rank.registry.get(_AllReducePlans)
        last, is_changed = plans.get(self), False
        if last is not None and last.is_valid(rank):
            if rank.is_same_on_all(last.digest):
                return last
            is_changed = True
        copies = self._exchange_layouts(rank, is_changed)
        for i in range(len(self.keys)):
            copies.check_equal_shapes(i, "all_reduce")
        if copies.devices != copies.transports:
            return copies
        if len(plans) > _MAX_PLANS:
            plans.clear()
        plan = plans[self] = AllReducePlan.from_copies(rank, self.keys, copies)
        return plan

    def _exchange_layouts(self, rank: Rank, is_changed: bool = False) -> Copies:
        return Copies(rank, self.keys, self.nccl and REDUCTIONS[self.op].nccl is not None, is_changed)

    def _all_reduce(self, rank: Rank, plan: AllReducePlan | Copies) -> None:
        if isinstance(plan, AllReducePlan):
            plan.all_reduce(rank, self.op)
            return
        for i in range(len(self.keys)):
            array = plan.get_writable(i)
            plan.get_communicator(i).all_reduce(array, self.op)
            plan.store(i, array)
        for communicator in set(map(plan.get_communicator, range(len(self.keys)))):
            communicator.notify_started()


class AllReducePlan(NamedTuple):
    """Layouts that all ranks have agreed on, for an all-reduce that is repeated.

    It has no reference to an array: an array is written in place only if its container has the only one.

    Attributes
    ----------
    variables : list of (key, GraphLibrary, Device, ArrayLayout)
    epoch : int
        Number of the device's connection.
    digest : bytes
        Digest of all of it.  Each rank on which the plan is still valid passes it to `Rank.is_same_on_all`.
    """

    variables: list[tuple[Any, Any, Device, ArrayLayout]]
    epoch: int
    digest: bytes

    @classmethod
    def from_copies(cls, rank: Rank, keys: Sequence[Any], copies: Copies) -> AllReducePlan:
        """Return the plan for copies of equal shapes, which are on their devices now."""
        layouts = copies.layouts[rank.number]
        epoch = rank.device.get_communicator(rank).epoch
        described = tuple([(*layout, device.name) for layout, device in zip(layouts, copies.devices, strict=True)])
        variables = list(zip(keys, copies.libraries, copies.devices, layouts, strict=True))
        return cls(variables, epoch, rank.digest((described, epoch)))

    def is_valid(self, rank: Rank) -> bool:
        """Whether this rank's variables and its connection have not changed."""
        for key, library, device, (shape, dtype) in self.variables:
            value = library.get(get_object(rank, key))
            if array_device(value) is not device or value.shape != shape or value.dtype != dtype:
                return False
        return bool(rank.device.get_communicator(rank).epoch == self.epoch)

    def all_reduce(self, rank: Rank, op: str) -> None:
        """Reduce into every rank's variables."""
        for key, library, device, _ in self.variables:
            shared = get_object(rank, key)
            is_referenced = library.is_referenced(shared)
            value = library.get(shared)
            array = device.as_writable(value, is_referenced)
            new = device.refresh(array, device.get_communicator(rank).all_reduce(array, op))
            if new is not value:
                library.put(shared, new)
        for communicator in {device.get_communicator(rank) for _, _, device, _ in self.variables}:
            communicator.notify_started()


class _AllReducePlans(dict[Reduce, AllReducePlan]):
    """A rank's plans of repeated all-reduces, by command."""


@dataclass(frozen=True, slots=True)
class GetValue(Command):
    """Send one rank's values to the master."""

    keys: tuple[Any, ...]
    source: int

    def run(self, rank: Rank) -> Any:
        """Return the source's value of each variable in the master, an empty list in workers."""
        copies = Copies(rank, self.keys)
        results = []
        for i in range(len(self.keys)):
            layouts: list[ArrayLayout | None] = [None] * rank.size
            layouts[self.source] = copies.get_layouts(i)[self.source]
            mine = copies.get_contiguous(i, HOST) if rank.number == self.source else None
            out = None
            if rank.is_master:
                out = [None if layout is None else np.empty(*layout) for layout in layouts]
                results.append(out[self.source])
            HOST.get_communicator(rank).gather(mine, rank.root, layouts, out)
        return results


@dataclass(frozen=True, slots=True)
class GetShapes(Command):
    """Exchange the shapes of every rank's values."""

    keys: tuple[Any, ...]

    def run(self, rank: Rank) -> Any:
        """Return for each rank the layout of each variable."""
        return Copies(rank, self.keys).layouts


@dataclass(frozen=True, slots=True)
class GetStreams(Command):
    """Exchange the states of every rank's random generators."""

    keys: tuple[Any, ...]

    def run(self, rank: Rank) -> Any:
        """Return for each rank the state of each variable."""
        shareds = [get_object(rank, key) for key in self.keys]
        return rank.all_gather([library_of(shared).copy_generator(shared) for shared in shareds])


@dataclass(frozen=True, slots=True)
class SetStreams(Command):
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
