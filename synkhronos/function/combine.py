"""Combines calls' outputs over the ranks.

`Outputs`
    What one rank has computed in a call.
`combined`
    The reductions of all ranks' outputs, in the master.
`combined_together`
    Those of many calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from synkhronos.devices import HOST, Layout
from synkhronos.function.reduce import Accumulator, Op
from synkhronos.ranks import ROOM, Cancelled, Rank

#: Bytes up to which an output is shown to the master at once; larger ones are streamed.
_SHOWN = 1 << 12


class Outputs(NamedTuple):
    """What one rank has computed in a call.

    Attributes
    ----------
    rows : int
        What they weigh.
    active : bool
        Whether there were rows to compute, or no rows in question.
    values : list
        Host arrays, one an output; maybe none on a rank without rows.
    ops : list of Op
    scalars : list of dtype or None, or None
        As in `Compiled`.
    of_none : callable
        Returns what the serial library makes of no rows.
    """

    rows: int
    active: bool
    values: list[Any]
    ops: list[Op]
    scalars: list[np.dtype | None] | None
    of_none: Callable[[], list[Any]]


def combined(rank: Rank, mine: Outputs) -> Any:
    """Return, in the master, the reductions of all ranks' outputs."""
    if mine.scalars is not None:
        (results,) = _reduce_scalars(rank, [mine])
        return results
    return _reduce_arrays(rank, mine)


def combined_together(rank: Rank, calls: Sequence[Outputs]) -> list[Any]:
    """Return what `combined` returns for each of many calls; numbers cross between ranks many at a time."""
    results: list[Any] = []
    waiting: list[Outputs] = []
    nbytes = 0
    for mine in calls:
        size = None if mine.scalars is None else _nbytes(mine.scalars)
        if waiting and (size is None or nbytes + size > ROOM):
            results += _reduce_scalars(rank, waiting)
            waiting, nbytes = [], 0
        if size is None:
            results.append(_reduce_arrays(rank, mine))
        else:
            waiting.append(mine)
            nbytes += size
    return results + _reduce_scalars(rank, waiting) if waiting else results


def _reduce_scalars(rank: Rank, calls: Sequence[Outputs]) -> list[Any]:
    """Reduce outputs of no dimensions: the workers leave theirs to the master and wait for nobody.

    What a worker leaves is the number of its rows and the values' bytes: a training loop comes here at every step, and
    pickling small arrays would take longer than all the rest.
    """
    shown = rank.gather(b"" if rank.is_master else b"".join([_packed(mine) for mine in calls]))
    if shown is None:
        return [None] * len(calls)
    results, at = [], [0] * rank.size
    for mine in calls:
        contributions: list[tuple[int, list[Any] | None]] = []
        for r, part in enumerate(shown):
            if r == rank.number:
                contributions.append((mine.rows, mine.values if mine.active else None))
            else:
                rows, values, at[r] = _unpacked(part, at[r], mine.scalars or ())
                contributions.append((rows, values))
        results.append(_combine(mine, contributions))
    return results


#: Stands for the number of rows of a rank that has computed nothing, and shows no values.
_IDLE = b"\xff" * 8


def _nbytes(dtypes: Sequence[np.dtype | None]) -> int:
    return len(_IDLE) + sum(dtype.itemsize for dtype in dtypes if dtype is not None)


def _packed(mine: Outputs) -> bytes:
    if not mine.active:
        return _IDLE
    parts = [mine.rows.to_bytes(8, "little")]
    for value, dtype in zip(mine.values, mine.scalars or (), strict=True):
        if dtype is not None:
            parts.append(np.asarray(value, dtype).tobytes())
    return b"".join(parts)


def _unpacked(part: bytes, at: int, dtypes: Sequence[np.dtype | None]) -> tuple[int, list[Any] | None, int]:
    """Return a rank's rows and values, and where those of the next call begin."""
    rows = part[at : at + 8]
    at += 8
    if rows == _IDLE:
        return 0, None, at
    values: list[Any] = []
    for dtype in dtypes:
        if dtype is None:
            values.append(None)
            continue
        values.append(np.ndarray((), dtype, part, at))
        at += dtype.itemsize
    return int.from_bytes(rows, "little"), values, at


def _combine(mine: Outputs, contributions: Sequence[tuple[int, list[Any] | None]]) -> list[Any]:
    active = [(rows, values) for rows, values in contributions if values is not None]
    if not active:  # no rank has rows: what the serial library makes of none
        return mine.values or mine.of_none()
    results = []
    for i, op in enumerate(mine.ops):
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
    host = [None if op.name is None else np.asarray(v) for v, op in zip(mine.values, mine.ops, strict=False)]
    shown = rank.exchange((mine.rows, [_show(value) for value in host]) if mine.active else (0, None))
    contributors = [r for r, (_, values) in enumerate(shown) if values is not None]
    if not contributors:
        return _combine(mine, shown) if rank.is_master else None
    results: list[Any] = []
    for i, op in enumerate(mine.ops):
        if op.name is None:
            results.append(mine.values[i] if mine.active else None)
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
            results.append(_gather(rank, host[i] if mine.active else None, layouts))
        else:
            weights = {r: shown[r][0] for r in contributors}
            results.append(_stream(rank, op, host[i] if mine.active else None, layouts, weights))
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
