"""Runs a program on all ranks.

`Call`
    The command: each rank takes its rows, computes, and hands its outputs to the master.
`Part`
    What one rank has of it.
`Whole`, `Scattered`
    Where an input's value lies, and which rows of it are meant.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from synkhronos.data.rows import pieces, select, share
from synkhronos.devices import Selection
from synkhronos.function.combine import Outputs
from synkhronos.function.notice import notice
from synkhronos.function.program import Compiled, Program, Variant
from synkhronos.function.reduce import Accumulator
from synkhronos.graphs.family import AT_FIRST_CALL, IN_TURN
from synkhronos.graphs.mirror import object_of
from synkhronos.ranks import Cancelled, Command, Rank, RowAccess, SharedArray


class Whole(NamedTuple):
    """An input that every rank gets whole."""

    array: SharedArray
    copy: bool


class Scattered(NamedTuple):
    """An input whose rows are shared out."""

    array: SharedArray
    #: The selected rows of all ranks together.
    rows: range | SharedArray
    #: The index that row 0 stands for.
    offset: int
    #: Whether the rank must not be given the shared memory itself.
    copy: bool

    def row_accesses(self, size: int, ranks: range) -> Iterator[RowAccess]:
        """Yield the rows of some ranks."""
        first, last = (share(self._n_rows, size, r) for r in (ranks[0], ranks[-1]))
        rows = self.rows
        if isinstance(rows, range):
            yield RowAccess(self.array, rows[first.start : last.stop], self.offset)
        else:
            index = rows.part(first.start, last.stop)
            yield RowAccess(self.array, index, self.offset)

    @property
    def _n_rows(self) -> int:
        return len(self.rows) if isinstance(self.rows, range) else self.rows.shape[0]

    def part(self, rank: Rank) -> Selection:
        """Return this rank's rows."""
        rows: Selection = self.rows if isinstance(self.rows, range) else self.rows.view(rank.segments)
        part = rows[share(len(rows), rank.size, rank.number)]
        if not self.offset:
            return part
        if isinstance(part, range):
            return range(part.start - self.offset, part.stop - self.offset, part.step)
        return part - self.offset


class _CallFields(NamedTuple):
    #: Its key.
    program: Any
    variant: Variant
    #: Whether some rank may not have compiled the variant yet.
    compile: bool
    inputs: tuple[Scattered | Whole, ...]
    #: The selected rows of all ranks together; None if no input is scattered.
    n_rows: int | None
    #: For each rank what ``batch_s`` picks of its sliceable shared variables: a slice, or a SharedArray of indexes.
    chosen: tuple[Any, ...] | None
    slices: int
    #: Whether the program has any.
    updates: bool
    #: Whether the master gets the outputs now, where an engine would have the ranks keep them until they are read.
    read_at_once: bool = False


class Call(_CallFields, Command):
    """Run a program on all ranks."""

    __slots__ = ()

    @property
    def effect(self) -> str | None:
        """What an error says was done, if it was."""
        return "The function's updates were applied" if self.updates else None

    def run(self, rank: Rank) -> Any:
        """Compute this rank's part; the master returns what the engine makes of all ranks' outputs."""
        return self.complete(rank, self.part(rank))

    def part(self, rank: Rank) -> Part:
        """Return this rank's part, to be computed."""
        program: Program = object_of(rank, self.program)
        return Part(self, program, self._compiled(program, rank), rank)

    def complete(self, rank: Rank, part: Part) -> Any:
        """Compute this rank's part; the master returns what the engine makes of all ranks' outputs."""
        program = part.program
        if part.active or (self.n_rows == 0 and rank.is_master):
            if self.compile:
                self._first_call(rank, part)
            else:
                part.compute()
            rank.commit()
        elif self.compile and self._fills_the_cache(part):
            rank.barrier()
        if self.compile:
            rank.threads.limit()  # what was compiled may have brought a BLAS with it
        if not part.compiled.kinds.ops:
            return []
        if self.read_at_once:
            outputs = part.outputs().detached(rank)
            return outputs.of(program.engine.fetch(outputs.values)).combined(rank)
        return program.engine.collect(rank, part.outputs())

    def _fills_the_cache(self, part: Part) -> bool:
        """Whether a first call compiles for what is on disk afterwards."""
        return part.program.compiles == AT_FIRST_CALL and part.program.library.leaves_on_disk(part.compiled.function)

    def _first_call(self, rank: Rank, part: Part) -> None:
        """Compute; the master before the others if these find on disk then what is compiled with it."""
        fills = self._fills_the_cache(part)
        if fills and not rank.is_master:
            rank.barrier()
        takes_long = rank.is_master and part.program.compiles == AT_FIRST_CALL
        with notice(f"compiling {part.program.name}") if takes_long else contextlib.nullcontext():
            part.compute()
        if fills and rank.is_master:
            rank.barrier()

    def _compiled(self, program: Program, rank: Rank) -> Compiled:
        if not self.compile:
            return program.compile(self.variant)
        # The master first where it fills the compiler's cache, and the others would queue for the compiler's lock.
        if rank.is_master:
            # Numba's part of it comes with the first call.
            what = "rewriting the graph of" if program.compiles == AT_FIRST_CALL else "compiling"
            with notice(f"{what} {program.name}"):
                program.compile(self.variant)
        if program.compiles == IN_TURN:
            rank.barrier()
        return program.compile(self.variant)


class Part:
    """One rank's part of a call.

    Attributes
    ----------
    run : Runner
        What runs: the compiled function, or what includes it.
    rows : int
        What the part weighs.
    active : bool
        Whether there are rows to compute, or no rows in question.
    values : list
        The outputs, reduced over slices, once computed.
    """

    def __init__(self, call: Call, program: Program, compiled: Compiled, rank: Rank):
        self._call, self._rank = call, rank
        self.program, self.compiled = program, compiled
        self.run = compiled.run
        self._parts: list[Selection | None] = []
        parts: dict[Any, Selection] = {}  # inputs that are cut alike get the same object: it is copied but once
        for entry in call.inputs:
            if isinstance(entry, Scattered):
                part = parts.get((entry.rows, entry.offset))
                if part is None:
                    part = parts[entry.rows, entry.offset] = entry.part(rank)
                self._parts.append(part)
            else:
                self._parts.append(None)
        self._sliceable = self._sliceable_rows() if call.variant.rows is not None else None
        self.values: list[Any] = []
        if call.n_rows is not None:
            scattered = next(part for part in self._parts if part is not None)
            self.rows = len(scattered)
            self.active = self.rows > 0
        elif program.sliceable:
            self.rows = len(self._sliceable) if self._sliceable is not None else self._lengths()[0]
            self.active = self.rows > 0
        else:
            self.rows, self.active = 1, True

    def outputs(self) -> Outputs:
        """Return what was computed."""
        kinds, times = self.compiled.kinds, self.run.times
        if times > 1:
            return Outputs(self.rows // times, self.active, self.values, kinds.repeated(times))
        of_none = self._of_none if self._call.n_rows is None else list
        return Outputs(self.rows, self.active, self.values, kinds, of_none)

    def _of_none(self) -> list[Any]:
        self.compute()
        return self.values

    def _lengths(self) -> list[int]:
        library = self.program.library
        return [library.get(shared).shape[0] for shared in self.program.sliceable]

    def _sliceable_rows(self) -> Selection:
        """Return the rows chosen of this rank's sliceable shared variables.

        All ranks agree that theirs exist before any computes, so that a wrong index changes nothing.
        """
        lengths = self._lengths()
        if self._call.chosen is None:
            if min(lengths) != max(lengths):
                names = [shared.name for shared in self.program.sliceable]
                raise ValueError(
                    f"sliceable_shareds: {names} have {lengths} rows on rank {self._rank.number}; to cut them alike "
                    "they need equally many, or batch_s to choose"
                )
            return range(lengths[0])
        chosen, problem, rows = self._call.chosen[self._rank.number], None, None
        try:
            if isinstance(chosen, SharedArray):
                rows = select(chosen.view(self._rank.segments), min(lengths), "batch_s")
            else:
                rows = range(min(lengths))[chosen]
        except IndexError as error:
            problem = f"{error} on rank {self._rank.number}"
        problems = [p for p in self._rank.exchange_cached(problem) if p is not None]
        if problems or rows is None:
            raise IndexError(problems[0]) if self._rank.is_master else Cancelled
        return rows

    def compute(self) -> None:
        """Run over this rank's rows, in slices if asked for, and keep the outputs."""
        call, ops = self._call, self.compiled.kinds.ops
        if not self.rows:
            # Nobody has any: the outputs are what the serial library makes of none, and nothing is updated.
            self.run = self.program.compile(call.variant._replace(accumulate=True)).run
            self.values = self._run(self._parts, self._sliceable)[: len(ops)]
            return
        if not call.variant.accumulate:
            self.values = self._run(self._parts, self._sliceable)
            return
        lengths = [self.rows] if self._sliceable is None else [self.rows, len(self._sliceable)]
        count = max(1, min(call.slices, *lengths))
        targets = self.program.accumulated()
        totals = [Accumulator(op) for op in [*ops, *(op for _, op in targets)]]
        cut = [None if part is None else list(pieces(part, count)) for part in self._parts]
        sliceable = None if self._sliceable is None else list(pieces(self._sliceable, count))
        for piece in range(count):
            parts = [None if c is None else c[piece] for c in cut]
            chosen = None if sliceable is None else sliceable[piece]
            rows = next((len(part) for part in parts if part is not None), 1 if chosen is None else len(chosen))
            values = self._run(parts, chosen)
            for total, value in zip(totals, values, strict=True):
                total.add(value, rows)
        results = [total.result() for total in totals]
        self.values = results[: len(ops)]
        library = self.program.library
        for (shared, _), value in zip(targets, results[len(ops) :], strict=True):
            takes = self.program.device.takes_shareds and library.is_array(shared)
            library.put(shared, self.program.device.array(value) if takes else value)

    def _inputs(self, parts: Sequence[Selection | None], sliceable: Selection | None) -> list[Any]:
        rank, program, kept = self._rank, self.program, self.program.buffers
        devices = program.devices_for(self.run)
        values = [
            device.input(rank, kept, position, entry.array, part, entry.copy)
            for position, (device, entry, part) in enumerate(zip(devices, self._call.inputs, parts, strict=True))
        ]
        if sliceable is not None:
            if self._call.variant.rows == "slice":
                assert isinstance(sliceable, range)
                values += [np.int64(sliceable.start), np.int64(sliceable.stop)]
            else:
                device = program.library.input_device(np.dtype(np.int64), 1, program.device)
                values.append(device.indexes(rank, kept, "rows", np.asarray(sliceable, np.int64)))
        return values

    def _run(self, parts: Sequence[Selection | None], sliceable: Selection | None) -> list[Any]:
        inputs = self._inputs(parts, sliceable)
        if self._rank.is_master and self.run.is_new(inputs):
            shapes = [getattr(value, "shape", ()) for value in inputs]
            with notice(f"compiling {self.program.name} for inputs of shapes {shapes}"):
                return self.run(*inputs)
        return self.run(*inputs)
