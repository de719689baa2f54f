"""The commands behind the collectives.

`Broadcast`, `Gather`, `AllGather`, `Reduce`
    Ranks combine their copies, through the communicator of the device that holds them.
`Assign`
    Ranks take values, or rows of them, from shared memory.
`GetValue`, `GetShapes`
    The master asks what ranks hold.
`GetStreams`, `SetStreams`
    The same for random generators.

A command first lets every rank see the others' shapes, and which device holds what: what can't be combined is refused
by all alike, before anything is changed.  Arrays travel as their device combines them, or through host memory.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from synkhronos.checks import called
from synkhronos.devices import HOST, Device, Layout, device_named, device_of
from synkhronos.devices.reductions import REDUCTIONS
from synkhronos.graphs import library_of
from synkhronos.graphs.mirror import moved_apart, object_of
from synkhronos.ranks import Cancelled, Command, Rank, RowAccess, SharedArray

#: Plans that a rank keeps.
_KNOWN = 64


class _Plan:
    """What follows from what all ranks show of some variables.

    Attributes
    ----------
    layouts : list of lists
        For each rank, a layout for each variable.
    homes, ways : list of Device
        As in `Copies`.
    epochs : list of int
        Each rank's connection.
    """

    def __init__(self, shown: Sequence[Any], nccl: bool):
        self.layouts: list[list[Layout]] = [[layout[:2] for layout in each] for each, _ in shown]
        self.epochs = [epoch for _, epoch in shown]
        self.homes: list[Device] = []
        self.ways: list[Device] = []
        for i in range(len(self.layouts[0])):
            names = {each[i][2] for each, _ in shown} - {HOST.name}
            home = device_named(names.pop()) if names else HOST
            direct = nccl and all(home.communicates(each[i][1]) for each in self.layouts)
            self.homes.append(home)
            self.ways.append(home if direct else HOST)


class _Plans(dict[Any, _Plan]):
    """The plans that a rank has made, by what all ranks have shown."""


class Copies:
    """One rank's copies of the variables that a command names, and the shapes of all ranks'.

    Attributes
    ----------
    homes : list of Device
        What holds each variable: the GPUs if they do on any rank, for the user may have put NumPy arrays there since.
    ways : list of Device
        What combines each variable's arrays: its home, or the host.

    ``differ`` says that ranks have found already that not all show the same.
    """

    def __init__(self, rank: Rank, keys: Sequence[Any], nccl: bool = False, differ: bool = False):
        self.rank = rank
        self.shareds = [object_of(rank, key) for key in keys]
        self.libraries = [library_of(shared) for shared in self.shareds]
        self.values = [library.get(shared) for library, shared in zip(self.libraries, self.shareds, strict=True)]
        mine = tuple([(value.shape, value.dtype, device_of(value).name) for value in self.values])
        communicator = rank.device.communicator(rank)
        exchange = rank.exchange if differ else rank.exchange_cached
        shown = tuple(exchange((mine, communicator.epoch)))
        # A training loop comes here at every step with the same.
        known = rank.registry.get(_Plans)
        found = known.get((shown, nccl))
        if found is None:
            if len(known) > _KNOWN:
                known.clear()
            found = known[shown, nccl] = _Plan(shown, nccl)
        self.layouts, self.homes, self.ways = found.layouts, found.homes, found.ways
        for i, home in enumerate(self.homes):
            if not home.holds(self.values[i]):
                self.put(i, home.from_host(self.values[i]))
        if rank.device in self.ways:
            communicator.connect(found.epochs)

    def of(self, position: int) -> list[Layout]:
        """Return one variable's layout on each rank."""
        return [each[position] for each in self.layouts]

    def communicator(self, position: int) -> Any:
        """Return what combines one variable's arrays."""
        return self.ways[position].communicator(self.rank)

    def writable(self, position: int) -> Any:
        """Return one variable's array to be written in place, and then to be given to `written`."""
        if self.ways[position] is not self.homes[position]:
            return np.array(self.homes[position].to_host(self.values[position]), order="C")
        library, shared = self.libraries[position], self.shareds[position]
        self.values[position] = None  # whoever has a reference beside the container's is somebody else
        is_referenced = library.is_referenced(shared)
        value = self.values[position] = library.get(shared)
        array = self.homes[position].writable(value, is_referenced)
        if array is not value:
            self.put(position, array)
        return array

    def written(self, position: int, array: Any) -> None:
        """Take an array that was written as the variable's."""
        home, way = self.homes[position], self.ways[position]
        new = home.written(array) if way is home else home.from_host(array)
        if new is not self.values[position]:
            self.put(position, new)

    def readable(self, position: int, way: Device | None = None) -> Any:
        """Return one variable's array, contiguous, where it is combined."""
        way = way or self.ways[position]
        value = self.values[position]
        return way.contiguous(value if way is self.homes[position] else self.homes[position].to_host(value))

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
                f"{what}: {called(self.shareds[position])} needs the same shape on all ranks, but {each}; "
                "see gather(), which takes any shapes"
            )

    def check_fits(self, position: int, shape: tuple[int, ...], what: str) -> None:
        """Refuse a shape that the variable's type doesn't allow."""
        library, shared = self.libraries[position], self.shareds[position]
        if not library.accepts(shared, shape):
            self.refuse(f"{what}: {called(shared)} of type {shared.type} can't take shape {shape}")


@dataclass(frozen=True, slots=True)
class Broadcast(Command):
    """Give every rank the master's value."""

    keys: tuple[Any, ...]
    nccl: bool

    def run(self, rank: Rank) -> None:
        """Let each rank take what the root shows."""
        copies = Copies(rank, self.keys, self.nccl)
        for i, (shape, dtype) in enumerate(copies.layouts[rank.root]):
            communicator = copies.communicator(i)
            if rank.is_master:
                communicator.broadcast(copies.readable(i), rank.root)
                continue
            if copies.of(i)[rank.number] == (shape, dtype):
                array = copies.writable(i)
            else:
                # Not into the container yet: if a rank fails meanwhile, the old value is better than a part of the new.
                array = copies.ways[i].empty(shape, dtype)
            communicator.broadcast(array, rank.root)
            copies.written(i, array)


@dataclass(frozen=True, slots=True)
class Assign(Command):
    """Take rows of values in shared memory, each rank its own.

    Attributes
    ----------
    keys : tuple
        The variables'.
    values : tuple of SharedArray
        One for each variable.
    rows : tuple of tuples
        For each rank, what it takes of each value: a range, indexes in shared memory, or None for nothing.
    """

    keys: tuple[Any, ...]
    values: tuple[SharedArray, ...]
    rows: tuple[tuple[range | SharedArray | None, ...], ...]

    def row_accesses(self, size: int, ranks: range) -> Iterator[RowAccess]:
        """Yield the rows of some ranks."""
        for r in ranks:
            for value, rows in zip(self.values, self.rows[r], strict=True):
                if rows is not None:
                    yield RowAccess(value, rows if value.shape else None)

    def run(self, rank: Rank) -> None:
        """Copy the rows into the variables' containers."""
        for key, value, rows in zip(self.keys, self.values, self.rows[rank.number], strict=True):
            if rows is None:
                continue
            chosen = None
            if value.shape:
                chosen = rows if isinstance(rows, range) else rows.view(rank.segments)
            shared = object_of(rank, key)
            library = library_of(shared)
            library.put(shared, device_of(library.get(shared)).load(rank, value, chosen))


@dataclass(frozen=True, slots=True)
class Gather(Command):
    """Hand every rank's value to the master."""

    keys: tuple[Any, ...]
    nd_up: int
    nccl: bool

    def run(self, rank: Rank) -> Any:
        """Return, in the master, what `gather` returns for each variable."""
        copies = Copies(rank, self.keys, self.nccl)
        results = []
        for i in range(len(self.keys)):
            layouts = copies.of(i)
            result, out = _room(copies.ways[i], layouts, self.nd_up) if rank.is_master else (None, None)
            copies.communicator(i).gather(copies.readable(i), rank.root, layouts, out)
            results.append(result)
        return results


@dataclass(frozen=True, slots=True)
class AllGather(Command):
    """Give every rank all ranks' values, joined."""

    keys: tuple[Any, ...]
    nccl: bool

    def run(self, rank: Rank) -> None:
        """Check that they can be joined, then join them."""
        copies = Copies(rank, self.keys, self.nccl)
        for i, shared in enumerate(copies.shareds):
            layouts = copies.of(i)
            if not _joinable(layouts):
                each = ", ".join(f"rank {r} has {shape}" for r, (shape, _) in enumerate(layouts))
                copies.refuse(f"all_gather: {called(shared)} can't be joined along axis 0: {each}")
            rows = sum(shape[0] for shape, _ in layouts)
            copies.check_fits(i, (rows, *layouts[0][0][1:]), "all_gather")
        for i in range(len(self.keys)):
            joined, out = _room(copies.ways[i], copies.of(i), 0)
            copies.communicator(i).gather(copies.readable(i), None, copies.of(i), out)
            copies.written(i, joined)


@dataclass(frozen=True, slots=True)
class Reduce(Command):
    """Reduce every rank's value.

    ``taker`` says whose variable takes the result: "everywhere", "master", or nobody's ("returned").
    """

    keys: tuple[Any, ...]
    op: str
    taker: str
    nccl: bool

    def run(self, rank: Rank) -> Any:
        """Check that shapes agree, then reduce."""
        if rank.size == 1 and self.taker != "returned":
            return []  # a reduction over one rank is that rank's value
        if self.taker == "everywhere":
            self._reduce_everywhere(rank, self.agree(rank))
            return []
        copies, in_place = self._copies(rank), rank.is_master and self.taker == "master"
        results = []
        for i in range(len(self.keys)):
            copies.check_equal(i, "reduce")
        for i in range(len(self.keys)):
            layout, out = copies.of(i)[0], None
            if rank.is_master:
                out = copies.writable(i) if in_place else copies.ways[i].empty(*layout)
            # Named nowhere else: `Device.written` looks whether anybody holds the array.
            copies.communicator(i).reduce(
                out if in_place else copies.readable(i), self.op, rank.root, out, layout, range(rank.size)
            )
            if in_place:
                copies.written(i, out)
            results.append(out)
        return results

    def agree(self, rank: Rank) -> Agreed | Copies:
        """Return what all ranks have, which they know from the last time as long as it is the same everywhere.

        `Copies` where some variable doesn't travel as its device combines it.
        """
        known = rank.registry.get(_KnownAgreements)
        last, differ = known.get(self), False
        if last is not None and last.holds(rank):
            if rank.agree(last.digest):
                return last
            differ = True
        copies = self._copies(rank, differ)
        for i in range(len(self.keys)):
            copies.check_equal(i, "all_reduce")
        if copies.homes != copies.ways:
            return copies
        if len(known) > _KNOWN:
            known.clear()
        agreed = known[self] = Agreed.of(rank, self.keys, copies)
        return agreed

    def _copies(self, rank: Rank, differ: bool = False) -> Copies:
        return Copies(rank, self.keys, self.nccl and REDUCTIONS[self.op].nccl is not None, differ)

    def _reduce_everywhere(self, rank: Rank, agreed: Agreed | Copies) -> None:
        if isinstance(agreed, Agreed):
            agreed.all_reduce(rank, self.op)
            return
        for i in range(len(self.keys)):
            array = agreed.writable(i)
            agreed.communicator(i).all_reduce(array, self.op)
            agreed.written(i, array)
        for communicator in set(map(agreed.communicator, range(len(self.keys)))):
            communicator.come()


class Agreed(NamedTuple):
    """What all ranks have found alike before an `all_reduce`.

    It holds no array: whether anybody holds one beside its container decides whether it is written in place.

    Attributes
    ----------
    parts : list of tuples
        Each variable's key, library, device and layout.
    epoch : int
        The connection.
    digest : bytes
        Shown by a rank on which all of it still holds.
    """

    parts: list[tuple[Any, Any, Device, Layout]]
    epoch: int
    digest: bytes

    @classmethod
    def of(cls, rank: Rank, keys: Sequence[Any], copies: Copies) -> Agreed:
        """Return what copies of equal shapes say, as it is now that all are on their devices."""
        layouts = copies.layouts[rank.number]
        epoch = rank.device.communicator(rank).epoch
        shown = tuple([(*layout, home.name) for layout, home in zip(layouts, copies.homes, strict=True)])
        parts = list(zip(keys, copies.libraries, copies.homes, layouts, strict=True))
        return cls(parts, epoch, rank.digest((shown, epoch)))

    def holds(self, rank: Rank) -> bool:
        """Whether this rank's variables and its connection are still the same."""
        for key, library, device, (shape, dtype) in self.parts:
            value = library.get(object_of(rank, key))
            if device_of(value) is not device or value.shape != shape or value.dtype != dtype:
                return False
        return bool(rank.device.communicator(rank).epoch == self.epoch)

    def all_reduce(self, rank: Rank, op: str) -> None:
        """Reduce into every rank's variables."""
        for key, library, device, _ in self.parts:
            shared = object_of(rank, key)
            is_referenced = library.is_referenced(shared)
            value = library.get(shared)
            array = device.writable(value, is_referenced)
            new = device.written(array, device.communicator(rank).all_reduce(array, op))
            if new is not value:
                library.put(shared, new)
        for communicator in {device.communicator(rank) for _, _, device, _ in self.parts}:
            communicator.come()


class _KnownAgreements(dict[Reduce, Agreed]):
    """What a rank remembers of what all ranks have found alike."""


@dataclass(frozen=True, slots=True)
class GetValue(Command):
    """Hand one rank's value to the master."""

    keys: tuple[Any, ...]
    source: int

    def run(self, rank: Rank) -> Any:
        """Return, in the master, the source's value of each variable."""
        copies = Copies(rank, self.keys)
        results = []
        for i in range(len(self.keys)):
            layouts: list[Layout | None] = [None] * rank.size
            layouts[self.source] = copies.of(i)[self.source]
            mine = copies.readable(i, HOST) if rank.number == self.source else None
            out = None
            if rank.is_master:
                out = [None if layout is None else np.empty(*layout) for layout in layouts]
                results.append(out[self.source])
            HOST.communicator(rank).gather(mine, rank.root, layouts, out)
        return results


@dataclass(frozen=True, slots=True)
class GetShapes(Command):
    """Tell the shapes of every rank's values."""

    keys: tuple[Any, ...]

    def run(self, rank: Rank) -> Any:
        """Return the layouts, by rank and variable."""
        return Copies(rank, self.keys).layouts


@dataclass(frozen=True, slots=True)
class GetStreams(Command):
    """Show where every rank is in its random generators' streams."""

    keys: tuple[Any, ...]

    def run(self, rank: Rank) -> Any:
        """Return a list for each rank, with a value for each variable."""
        shareds = [object_of(rank, key) for key in self.keys]
        return rank.exchange([library_of(shared).stream(shared) for shared in shareds])


@dataclass(frozen=True, slots=True)
class SetStreams(Command):
    """Have random generators go on from a place in their streams: each rank, moved apart, or one alone."""

    keys: tuple[Any, ...]
    #: A list, which has no hash: equal generators may have drawn since, and the session keeps pickles of commands.
    values: list[Any]
    alone: int | None = None

    def run(self, rank: Rank) -> None:
        """Put the values, or this rank's own behind them, into the containers."""
        for key, value in zip(self.keys, self.values, strict=True):
            shared = object_of(rank, key)
            library = library_of(shared)
            if self.alone is None:
                library.set_stream(shared, moved_apart(library, copy.deepcopy(value), rank))
            elif self.alone == rank.number:
                library.set_stream(shared, copy.deepcopy(value))


def _joinable(layouts: Sequence[Layout]) -> bool:
    return all(shape and shape[1:] == layouts[0][0][1:] for shape, _ in layouts)


def _room(device: Device, layouts: Sequence[Layout], nd_up: int) -> tuple[Any, list[Any]]:
    """Return what gather returns, and the part of it that each rank's array fills."""
    shapes = [shape for shape, _ in layouts]
    dtype = layouts[0][1]
    if nd_up == 1 and len(set(shapes)) == 1:
        whole: Any = device.empty((len(shapes), *shapes[0]), dtype)
    elif nd_up == 0 and _joinable(layouts):
        whole = device.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype)
    else:
        whole = [device.empty(*layout) for layout in layouts]
        return whole, [device.part(array, 0, shape) for array, shape in zip(whole, shapes, strict=True)]
    starts = np.cumsum([0, *(math.prod(shape) for shape in shapes)])
    return whole, [device.part(whole, int(start), shape) for start, shape in zip(starts, shapes, strict=False)]
