"""Runs a program on all ranks.

`Call`
    The command: each rank takes its rows, computes, and hands its outputs to the master.
`Whole`, `Scattered`
    Where an input's value lies, and which rows of it are meant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from synkhronos.data.rows import Selection, pieces, select, share, take
from synkhronos.devices import HOST, Layout, device_of
from synkhronos.devices.xla import check_usable
from synkhronos.function.program import Compiled, Program, Variant
from synkhronos.function.reduce import Accumulator, Op
from synkhronos.graphs.mirror import stored
from synkhronos.ranks import Cancelled, Rank, SharedArray

#: Bytes up to which an output is shown to the master at once; larger ones are streamed.
_SHOWN = 1 << 12


class Whole(NamedTuple):
    """An input that every rank gets whole."""

    array: SharedArray
    copy: bool

    def value(self, rank: Rank) -> np.ndarray:
        """Return the input."""
        view = self.array.view(rank.segments)
        return view.copy() if self.copy else view


class Scattered(NamedTuple):
    """An input whose rows are shared out.

    Attributes
    ----------
    array : SharedArray
    rows : range, or SharedArray of indexes
        The selected rows of all ranks together.
    offset : int
        The index that row 0 stands for.
    copy : bool
        Whether the rank must not be given the shared memory itself.
    """

    array: SharedArray
    rows: range | SharedArray
    offset: int
    copy: bool

    def part(self, rank: Rank) -> Selection:
        """Return this rank's rows."""
        rows: Selection = self.rows if isinstance(self.rows, range) else self.rows.view(rank.segments)
        part = rows[share(len(rows), rank.size, rank.number)]
        if not self.offset:
            return part
        if isinstance(part, range):
            return range(part.start - self.offset, part.stop - self.offset, part.step)
        return part - self.offset


class Call(NamedTuple):
    """Run a program on all ranks.

    Attributes
    ----------
    program : tuple
        Its key.
    variant : Variant
    compile : bool
        Whether some rank may not have compiled the variant yet.
    inputs : tuple of Scattered and Whole
    n_rows : int or None
        The selected rows of all ranks together; None if no input is scattered.
    chosen : tuple, or None
        For each rank what ``batch_s`` picks of its sliceable shared variables: a slice, or a SharedArray of indexes.
    slices : int
    updates : bool
        Whether the program has any.
    """

    program: Any
    variant: Variant
    compile: bool
    inputs: tuple[Scattered | Whole, ...]
    n_rows: int | None
    chosen: tuple[Any, ...] | None
    slices: int
    updates: bool

    @property
    def effect(self) -> str | None:
        """What an error says was done, if it was."""
        return "The function's updates were applied" if self.updates else None

    def run(self, rank: Rank) -> Any:
        """Compute this rank's part; the master returns the outputs' reductions, in a list."""
        program: Program = stored(rank, self.program)
        compiled = self._compiled(program, rank)
        ops = compiled.ops
        local = _Local(self, program, compiled, rank)
        if local.active or (self.n_rows == 0 and rank.is_master):
            local.compute()
            rank.commit()
        if self.compile:
            rank.threads.limit()  # what was compiled may have brought a BLAS with it
        if not compiled.reduces:
            return local.values or [None] * len(ops)
        if compiled.scalars is not None:
            return _reduce_scalars(rank, local, ops, compiled.scalars)
        return _reduce_arrays(rank, local, ops)

    def _compiled(self, program: Program, rank: Rank) -> Compiled:
        if not self.compile:
            return program.compile(self.variant)
        if program.asynchronous:
            check_usable(rank)
        # The master first: it fills the compiler's cache, and the others don't queue for the compiler's lock.
        if rank.is_master:
            program.compile(self.variant)
        rank.barrier()
        return program.compile(self.variant)


class _Local:
    """One rank's part of a call.

    Attributes
    ----------
    rows : int
        What the part weighs.
    active : bool
        Whether there are rows to compute, or no rows in question.
    values : list
        The outputs, reduced over slices, once computed.
    """

    def __init__(self, call: Call, program: Program, compiled: Compiled, rank: Rank):
        self._call, self._program, self._rank = call, program, rank
        self._function, self._ops = compiled.function, compiled.ops
        self._parts = [entry.part(rank) if isinstance(entry, Scattered) else None for entry in call.inputs]
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

    def _lengths(self) -> list[int]:
        library = self._program.library
        return [len(library.get(shared)) for shared in self._program.sliceable]

    def _sliceable_rows(self) -> Selection:
        """Return the rows chosen of this rank's sliceable shared variables.

        All ranks agree that theirs exist before any computes, so that a wrong index changes nothing.
        """
        lengths = self._lengths()
        if self._call.chosen is None:
            if min(lengths) != max(lengths):
                names = [shared.name for shared in self._program.sliceable]
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
        problems = [p for p in self._rank.exchange(problem) if p is not None]
        if problems or rows is None:
            raise IndexError(problems[0]) if self._rank.is_master else Cancelled
        return rows

    def compute(self) -> None:
        """Run the compiled function over this rank's rows, in slices if asked for, and keep the outputs."""
        call = self._call
        if not self.rows:
            # Nobody has any: the outputs are what the serial library makes of none, and nothing is updated.
            self._function = self._program.compile(call.variant._replace(accumulate=True)).function
            self.values = self._run(self._parts, self._sliceable)[: len(self._ops)]
            return
        if not call.variant.accumulate:
            self.values = self._run(self._parts, self._sliceable)
            return
        lengths = [self.rows] if self._sliceable is None else [self.rows, len(self._sliceable)]
        count = max(1, min(call.slices, *lengths))
        targets = self._program.accumulated()
        totals = [Accumulator(op) for op in [*self._ops, *(op for _, op in targets)]]
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
        self.values = results[: len(self._ops)]
        library = self._program.library
        for (shared, _), value in zip(targets, results[len(self._ops) :], strict=True):
            library.put(shared, value)

    def _inputs(self, parts: Sequence[Selection | None], sliceable: Selection | None) -> list[Any]:
        values: list[Any] = []
        for position, (entry, part) in enumerate(zip(self._call.inputs, parts, strict=True)):
            if isinstance(entry, Whole):
                values.append(entry.value(self._rank))
            else:
                assert part is not None
                values.append(self._rows(position, entry, part))
        if sliceable is not None:
            if self._call.variant.rows == "slice":
                assert isinstance(sliceable, range)
                values += [np.int64(sliceable.start), np.int64(sliceable.stop)]
            else:
                values.append(np.asarray(sliceable, np.int64))
        return values

    def _rows(self, position: int, entry: Scattered, part: Selection) -> np.ndarray:
        array = entry.array.view(self._rank.segments)
        if isinstance(part, range):
            rows = take(array, part)
            return rows.copy() if entry.copy else rows
        # Memory that is touched for the first time costs more than the copy: keep it from call to call.  Compiled
        # functions hand out nothing that aliases their inputs.
        shape = (len(part), *array.shape[1:])
        kept = self._program.buffers
        buffer = kept.get(position)
        size = math.prod(shape)
        if buffer is None or buffer.size < size or buffer.dtype != array.dtype:
            buffer = kept[position] = np.empty(size, array.dtype)
        return take(array, part, buffer[:size].reshape(shape))

    def _run(self, parts: Sequence[Selection | None], sliceable: Selection | None) -> list[Any]:
        result = self._function(*self._inputs(parts, sliceable))
        values = [] if result is None else list(result) if isinstance(result, list | tuple) else [result]
        if self._program.asynchronous:
            # It may still be reading the memory that its inputs lie in.
            library = self._program.library
            library.finish([*values, *(library.get(shared) for shared, _ in self._program.updates)])
        return values


def _reduce_scalars(rank: Rank, local: _Local, ops: Sequence[Op], dtypes: Sequence[np.dtype | None]) -> Any:
    """Reduce outputs of no dimensions: the workers leave theirs to the master and wait for nobody.

    What a worker leaves is the number of its rows and the values' bytes: a training loop comes here at every step, and
    pickling small arrays would take longer than all the rest.
    """
    shown = rank.gather(b"" if rank.is_master or not local.active else _packed(local, dtypes))
    if shown is None:
        return None
    contributions = [_unpacked(part, dtypes) for part in shown]
    if local.active:
        contributions[rank.number] = local.rows, local.values
    return _combine(local, ops, contributions)


def _packed(local: _Local, dtypes: Sequence[np.dtype | None]) -> bytes:
    parts = [local.rows.to_bytes(8, "little")]
    for value, dtype in zip(local.values, dtypes, strict=True):
        if dtype is not None:
            parts.append(np.asarray(value, dtype).tobytes())
    return b"".join(parts)


def _unpacked(part: bytes, dtypes: Sequence[np.dtype | None]) -> tuple[int, list[Any] | None]:
    if not part:
        return 0, None
    values: list[Any] = []
    at = 8
    for dtype in dtypes:
        if dtype is None:
            values.append(None)
            continue
        values.append(np.ndarray((), dtype, part, at))
        at += dtype.itemsize
    return int.from_bytes(part[:8], "little"), values


def _combine(local: _Local, ops: Sequence[Op], contributions: Sequence[tuple[int, list[Any] | None]]) -> list[Any]:
    active = [(rows, values) for rows, values in contributions if values is not None]
    if not active:  # no rank has rows: what the serial library makes of none
        if not local.values:
            local.compute()
        return local.values
    results = []
    for i, op in enumerate(ops):
        if op.name is None:
            results.append(local.values[i] if local.values else None)
            continue
        total = Accumulator(op)
        for rows, values in active:
            total.add(values[i], rows)
        results.append(total.result())
    return results


def _reduce_arrays(rank: Rank, local: _Local, ops: Sequence[Op]) -> Any:
    """Reduce outputs of any shape: every rank learns of all shapes, and large arrays are streamed."""
    host = [None if op.name is None else device_of(v).to_host(v) for v, op in zip(local.values, ops, strict=False)]
    mine = (local.rows, [_show(value) for value in host]) if local.active else (0, None)
    shown = rank.exchange(mine)
    contributors = [r for r, (_, values) in enumerate(shown) if values is not None]
    if not contributors:
        return _combine(local, ops, shown) if rank.is_master else None
    results: list[Any] = []
    for i, op in enumerate(ops):
        if op.name is None:
            results.append(local.values[i] if local.values else None)
            continue
        entries = {r: shown[r][1][i] for r in contributors}
        layouts = {r: _layout(entry) for r, entry in entries.items()}
        _check_shapes(rank, i, op, layouts)
        if all(isinstance(entry, np.ndarray) for entry in entries.values()):
            if rank.is_master:
                total = Accumulator(op)
                for r in contributors:
                    total.add(entries[r], shown[r][0])
                results.append(total.result())
        elif op.name == "gather":
            results.append(_gather(rank, host[i] if local.active else None, layouts))
        else:
            weights = {r: shown[r][0] for r in contributors}
            results.append(_stream(rank, op, host[i] if local.active else None, layouts, weights))
    return results if rank.is_master else None


def _show(value: np.ndarray | None) -> Any:
    """Return a small array itself, of a large one its layout."""
    if value is None or value.nbytes <= _SHOWN:
        return value
    return value.shape, value.dtype


def _layout(entry: Any) -> Layout:
    return (entry.shape, entry.dtype) if isinstance(entry, np.ndarray) else entry


def _check_shapes(rank: Rank, position: int, op: Op, layouts: dict[int, Layout]) -> None:
    shapes = {r: shape for r, (shape, _) in layouts.items()}
    compared = {shape if op.elementwise else shape[1:] for shape in shapes.values()}
    if len(compared) > 1:
        if not rank.is_master:
            raise Cancelled
        needed = "the same shape" if op.elementwise else "the same lengths behind axis 0"
        each = ", ".join(f"rank {r} has {shape}" for r, shape in shapes.items())
        raise ValueError(f"output {position}: op {op.spelled!r} needs {needed} on all ranks, but {each}")


def _gather(rank: Rank, value: np.ndarray | None, layouts: dict[int, Layout]) -> np.ndarray | None:
    """Join arrays along axis 0 in the master."""
    communicator = HOST.communicator(rank)
    everyone = [layouts.get(r) for r in range(rank.size)]
    mine = None if value is None else np.ascontiguousarray(value)
    if not rank.is_master:
        communicator.gather(mine, rank.root, everyone, None)
        return None
    (_, *rest), dtype = next(iter(layouts.values()))
    joined = np.empty((sum(shape[0] for shape, _ in layouts.values()), *rest), dtype)
    out, at = [], 0
    for layout in everyone:
        rows = 0 if layout is None else layout[0][0]
        out.append(None if layout is None else joined[at : at + rows])
        at += rows
    communicator.gather(mine, rank.root, everyone, out)
    return joined


def _stream(
    rank: Rank, op: Op, value: np.ndarray | None, layouts: dict[int, Layout], weights: dict[int, int]
) -> np.ndarray | None:
    """Reduce large arrays into the master, each rank doing its share of the work."""
    shape, dtype = next(iter(layouts.values()))
    # What each rank adds is weighted by itself; what remains is a plain reduction, and one division.
    working = np.dtype(np.float32) if op.divides and dtype == np.float16 else dtype
    mine = None
    if value is not None:
        mine = np.ascontiguousarray(value, working)
        if op.name == "mean":
            mine = np.multiply(mine, weights[rank.number], dtype=working)
    out = np.empty(shape, working) if rank.is_master else None
    plain = "sum" if op.divides else str(op.name)
    HOST.communicator(rank).reduce(mine, plain, rank.root, out, (shape, working), sorted(layouts))
    if out is None:
        return None
    if op.divides:
        total = sum(weights.values()) if op.name == "mean" else len(weights)
        np.true_divide(out, total, out=out)
    return out.astype(dtype, copy=False)
