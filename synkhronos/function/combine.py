"""Combines calls' outputs over the ranks.

`Kinds`
    What outputs a compiled function has.
`Outputs`
    What one rank has computed in a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from synkhronos.devices import HOST, Layout
from synkhronos.function.reduce import Accumulator, Op
from synkhronos.ranks import ROOM, Cancelled, Rank

#: Bytes up to which an output is shown to the master at once; larger ones are streamed.
_SHOWN = 1 << 12


#: Outputs of no dimensions up to which they fit into one slot.
_SCALARS = 1024


class Kinds(NamedTuple):
    """What outputs a compiled function has."""

    ops: list[Op]
    #: Whether there is anything to reduce over ranks.
    reduces: bool
    #: The outputs' dtypes (None for one that isn't reduced) if all that are reduced are numbers, few enough for one
    #: slot; else None.
    scalars: tuple[np.dtype | None, ...] | None

    @classmethod
    def of(cls, types: Sequence[Any], ops: list[Op], in_slices: bool) -> Kinds:
        """Return those of the variables' types, and their ops."""
        reduces = any(op.name is not None for op in ops)
        # A scalar that is gathered over slices is a vector by then.
        if len(types) > _SCALARS or in_slices and any(op.name == "gather" for op in ops):
            return cls(ops, reduces, None)
        # What isn't reduced need not be an array.
        reduced = [None if op.name is None else kind for kind, op in zip(types, ops, strict=True)]
        if any(kind is not None and kind.ndim for kind in reduced):
            return cls(ops, reduces, None)
        return cls(ops, reduces, tuple([None if kind is None else np.dtype(kind.dtype) for kind in reduced]))

    def repeated(self, times: int) -> Kinds:
        """Return those of a launch that returns each output so many times."""
        scalars = None if self.scalars is None else tuple([kind for kind in self.scalars for _ in range(times)])
        return Kinds([op for op in self.ops for _ in range(times)], self.reduces, scalars)


class Outputs(NamedTuple):
    """What one rank has computed in a call."""

    #: What they weigh.
    rows: int
    #: Whether there were rows to compute, or no rows in question.
    active: bool
    #: Host arrays, one an output; maybe none on a rank without rows.
    values: list[Any]
    kinds: Kinds
    #: Returns what the serial library makes of no rows, in case that no rank has any.
    of_none: Callable[[], list[Any]] = list

    @property
    def n_outputs(self) -> int:
        """How many there are."""
        return len(self.kinds.ops)

    def of(self, values: list[Any]) -> Outputs:
        """Return the same with other values."""
        return self._replace(values=values)

    def detached(self, rank: Rank) -> Outputs:
        """Return what doesn't hold the program, which the user may drop before the values are read."""
        if not rank.is_master:
            values = [None if op.name is None else v for v, op in zip(self.values, self.kinds.ops, strict=False)]
            return self._replace(values=values, of_none=list)
        try:  # now, while the variables are as this call found them
            return self._replace(values=self.values or self.of_none(), of_none=list)
        except Exception as error:
            return self._replace(of_none=_Raising(error))

    def combined(self, rank: Rank) -> Any:
        """Return, in the master, the reductions of all ranks' outputs."""
        if not self.kinds.reduces:
            return self.values or [None] * self.n_outputs
        return _reduce_arrays(rank, self) if self.kinds.scalars is None else _reduce_scalars(rank, self)

    @staticmethod
    def combined_together(rank: Rank, calls: Sequence[Outputs]) -> list[Any]:
        """Return what `combined` returns for each of many calls; numbers cross between ranks many at a time."""
        results: list[Any] = []
        waiting: list[Outputs] = []
        nbytes = 0
        for mine in calls:
            size = None if mine.kinds.scalars is None else _record(mine.kinds.scalars).itemsize
            if waiting and (size is None or nbytes + size > ROOM):
                results += _reduce_many(rank, waiting)
                waiting, nbytes = [], 0
            if size is None:
                results.append(_reduce_arrays(rank, mine))
            else:
                waiting.append(mine)
                nbytes += size
        return results + _reduce_many(rank, waiting) if waiting else results


class _Raising:
    """Raises an error when somebody asks for the values."""

    def __init__(self, error: Exception):
        self.error = error

    def __call__(self) -> list[Any]:
        raise self.error


# -- outputs of no dimensions ------------------------------------------------------------------------------------
#
# The workers leave theirs to the master and wait for nobody: of each call a record, as bytes.  A training loop comes
# here for every step, and pickling small arrays would take longer than all the rest.

#: Stands for the number of rows of a rank that has computed nothing.
_IDLE = -1


@lru_cache(maxsize=256)
def _record(dtypes: tuple[np.dtype | None, ...]) -> np.dtype:
    """Return the dtype of what a rank shows of one call: its rows, and the values that are reduced."""
    return np.dtype([("rows", np.int64), *((str(i), dtype) for i, dtype in enumerate(dtypes) if dtype is not None)])


def _reduce_scalars(rank: Rank, mine: Outputs) -> list[Any] | None:
    """Reduce one call's; without records as NumPy makes them, which takes longer for one."""
    shown = rank.gather(b"" if rank.is_master else _packed(mine))
    if shown is None:
        return None
    kinds = mine.kinds.scalars or ()
    own = mine.rows, mine.values if mine.active else None
    return _combine(mine, [own if r == rank.number else _unpacked(part, kinds) for r, part in enumerate(shown)])


def _packed(mine: Outputs) -> bytes:
    parts = [(mine.rows if mine.active else _IDLE).to_bytes(8, "little", signed=True)]
    if mine.active:
        for value, dtype in zip(mine.values, mine.kinds.scalars or (), strict=True):
            if dtype is not None:
                parts.append(np.asarray(value, dtype).tobytes())
    return b"".join(parts)


def _unpacked(part: bytes, dtypes: Sequence[np.dtype | None]) -> tuple[int, list[Any] | None]:
    """Return a rank's rows, and its values, if there are any."""
    rows = int.from_bytes(part[:8], "little", signed=True)
    if rows == _IDLE:
        return 0, None
    values: list[Any] = []
    at = 8
    for dtype in dtypes:
        values.append(None if dtype is None else np.ndarray((), dtype, part, at))
        at += 0 if dtype is None else dtype.itemsize
    return rows, values


def _reduce_many(rank: Rank, calls: Sequence[Outputs]) -> list[Any]:
    """Reduce those of many calls."""
    # (By their ops too: to NumPy 1.23 None is a dtype.)
    runs = [list(run) for _, run in groupby(calls, lambda mine: mine.kinds)]
    mine = [_records(run) for run in runs]
    shown = rank.gather(b"" if rank.is_master else b"".join([records.tobytes() for records in mine]))
    if shown is None:
        return [None] * len(calls)
    results: list[Any] = []
    at = 0
    for run, own in zip(runs, mine, strict=True):
        results += _reduce_run(
            run,
            [own if r == rank.number else np.frombuffer(part, own.dtype, len(run), at) for r, part in enumerate(shown)],
        )
        at += own.nbytes
    return results


def _records(run: Sequence[Outputs]) -> np.ndarray:
    """Return what this rank shows of calls with outputs of the same kinds."""
    kinds = run[0].kinds.scalars or ()
    reduced = [i for i, kind in enumerate(kinds) if kind is not None]
    nothing = _IDLE, *(0 for _ in reduced)
    shown = [(mine.rows, *[mine.values[i] for i in reduced]) if mine.active else nothing for mine in run]
    return np.array(shown, _record(kinds))


def _reduce_run(run: Sequence[Outputs], shown: Sequence[np.ndarray]) -> list[Any]:
    """Return the reductions of calls with outputs of the same kinds; ``shown`` has each rank's records.

    All calls at once if each rank has computed as many rows in all of them: a hundred losses, say.
    """
    ops, kinds = run[0].kinds.ops, run[0].kinds.scalars or ()
    rows = [int(records["rows"][0]) for records in shown]
    alike = all((records["rows"] == n).all() for records, n in zip(shown, rows, strict=True))
    if not alike or _IDLE in rows or any(op.name == "gather" for op in ops):
        parts = [[_unpacked(record.tobytes(), kinds) for record in records] for records in shown]
        return [_combine(mine, each) for mine, each in zip(run, zip(*parts, strict=True), strict=True)]
    columns: list[Any] = []
    for i, op in enumerate(ops):
        if op.name is None:
            columns.append([mine.values[i] for mine in run])
            continue
        total = Accumulator(op)
        for records, n in zip(shown, rows, strict=True):
            total.add(np.ascontiguousarray(records[str(i)]), n)
        reduced = total.result()
        columns.append([reduced[k, ...] for k in range(len(run))])
    return [list(row) for row in zip(*columns, strict=True)] if columns else [[] for _ in run]


# -- outputs of any kind -----------------------------------------------------------------------------------------


def _combine(mine: Outputs, contributions: Sequence[tuple[int, list[Any] | None]]) -> list[Any]:
    active = [(rows, values) for rows, values in contributions if values is not None]
    if not active:  # no rank has rows: what the serial library makes of none
        return mine.values or mine.of_none()
    results = []
    for i, op in enumerate(mine.kinds.ops):
        if op.name is None:
            results.append(mine.values[i] if mine.active else None)
            continue
        total = Accumulator(op)
        for rows, values in active:
            total.add(values[i], rows)
        results.append(total.result())
    return results


def _reduce_arrays(rank: Rank, mine: Outputs) -> Any:
    """Reduce outputs of any shape: every rank learns of all shapes, and large arrays are streamed."""
    host = [None if op.name is None else np.asarray(v) for v, op in zip(mine.values, mine.kinds.ops, strict=False)]
    own: Any = (mine.rows, [_show(value) for value in host]) if mine.active else (0, None)
    shown = rank.exchange(own) if rank.size > 1 else [own]
    contributors = [r for r, (_, values) in enumerate(shown) if values is not None]
    if not contributors:
        return _combine(mine, shown) if rank.is_master else None
    results: list[Any] = []
    for i, op in enumerate(mine.kinds.ops):
        if op.name is None:
            results.append(mine.values[i] if mine.active else None)
            continue
        entries = {r: shown[r][1][i] for r in contributors}
        layouts: dict[int, Layout] = {r: (shape, np.dtype(dtype)) for r, (shape, dtype, _) in entries.items()}
        _check_shapes(rank, i, op, layouts)
        if all(content is not None for _, _, content in entries.values()):
            if rank.is_master:
                total = Accumulator(op)
                for r in contributors:
                    total.add(host[i] if r == rank.number else _array(*entries[r]), shown[r][0])
                results.append(total.result())
        elif op.name == "gather":
            results.append(_gather(rank, host[i] if mine.active else None, layouts))
        else:
            weights = {r: shown[r][0] for r in contributors}
            results.append(_stream(rank, op, host[i] if mine.active else None, layouts, weights))
    return results if rank.is_master else None


def _show(value: np.ndarray | None) -> tuple[tuple[int, ...], str, bytes | None] | None:
    """Return an array's layout, and of a small one its content: as bytes, since to pickle an array takes longer."""
    if value is None:
        return None
    return value.shape, value.dtype.str, value.tobytes() if value.nbytes <= _SHOWN else None


def _array(shape: tuple[int, ...], dtype: str, content: bytes) -> np.ndarray:
    """Return the array that `_show` has shown."""
    return np.array(np.frombuffer(content, dtype).reshape(shape))


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
    working = op.row.working(dtype)
    mine = None
    if value is not None:
        mine = np.ascontiguousarray(value, working)
        if op.row.by_rows:
            mine = np.multiply(mine, weights[rank.number], dtype=working)
    out = np.empty(shape, working) if rank.is_master else None
    plain = "sum" if op.row.divides else str(op.name)
    HOST.communicator(rank).reduce(mine, plain, rank.root, out, (shape, working), sorted(layouts))
    if out is None:
        return None
    if op.row.divides:
        total = sum(weights.values()) if op.row.by_rows else len(weights)
        np.true_divide(out, total, out=out)
    return out.astype(dtype, copy=False)
