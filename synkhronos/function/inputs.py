"""Puts a call's inputs where all ranks find them.

`Inputs`
    Checks what the user passes, copies into shared memory what isn't there, and says which rows are meant.
`all_slices`
    Whether ``batch_s`` asks for runs of rows alone.
`one_a_rank`, `indexes`
    What ``batch_s`` chooses on each rank; one such choice as an array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos import ranks
from synkhronos.casts import check_dense
from synkhronos.data import Data
from synkhronos.data.rows import flat, highest, lowest, select, select_unbounded
from synkhronos.devices import Selection, take
from synkhronos.function.call import Scattered, Whole
from synkhronos.function.program import Program
from synkhronos.ranks import Session, SharedArray

_MISSING = object()


class Inputs:
    """Puts the inputs of one function's calls where all ranks find them."""

    def __init__(self, program: Program):
        self.program = program
        self._kept: dict[Any, Data] = {}
        self._by_name = {e.name: i for i, e in enumerate(program.inputs) if e.name is not None}
        self._dtypes = [np.dtype(entry.variable.type.dtype) for entry in program.inputs]
        shapes = [program.library.fixed_shape(entry.variable) for entry in program.inputs]
        self._fixed_shapes = [None if all(length is None for length in shape) else shape for shape in shapes]

    def values(self, args: Sequence[Any], named: dict[str, Any]) -> list[Any]:
        """Put positional and named arguments, and defaults, in the inputs' order."""
        entries = self.program.inputs
        if len(args) > len(entries):
            raise TypeError(f"{self.program.name} takes {len(entries)} inputs, got {len(args)}")
        if len(args) == len(entries) and not named:
            return list(args)
        values: list[Any] = [*args, *[_MISSING] * (len(entries) - len(args))]
        for name, value in named.items():
            position = self._by_name.get(name)
            if position is None:
                raise TypeError(f"{self.program.name} has no input {name!r}; its inputs are {list(self._by_name)}")
            if values[position] is not _MISSING:
                raise TypeError(f"{self.program.name}: input {name!r} was given twice")
            values[position] = value
        for i, entry in enumerate(entries):
            if values[i] is _MISSING:
                if not entry.default:
                    raise TypeError(f"{self.program.name}: missing input {i} ({entry.name or entry.variable})")
                values[i] = entry.default[0]
        return values

    def locate(
        self, session: Session, args: Sequence[Any], named: dict[str, Any], batch: Any
    ) -> tuple[tuple[Scattered | Whole, ...], int | None]:
        """Check the inputs, put arrays into shared memory, and say where each rank finds its rows."""
        program, n = self.program, self.program.n_scattered
        if not program.inputs and not args and not named and batch is None:
            return (), None
        values = self.values(args, named)
        checked = [self._checked(i, value, session) for i, value in enumerate(values)]
        if n == 0:
            if batch is not None:
                raise ValueError(f"batch: {self.program.name} has no scattered inputs")
            return tuple(self._whole(i, value) for i, value in enumerate(checked)), None

        rows, low = self._select(checked[:n], batch)
        located: list[Scattered | Whole] = []
        index: SharedArray | None = None
        for i, value in enumerate(checked):
            copy = program.inputs[i].mutable
            if i >= n:
                located.append(self._whole(i, value))
            elif not isinstance(value, Data):
                # The master picks the rows while it copies: nothing is moved that isn't asked for.
                kept = self._keep(i, value.dtype, value.ndim)
                take(value, rows, kept.resized((len(rows), *value.shape[1:])))
                located.append(Scattered(kept.location(), range(len(rows)), 0, copy))
            elif value.minibatch and _is_listed(batch):
                # Its rows have been put into the list's order already.
                located.append(Scattered(value.location(), range(len(rows)), 0, copy))
            else:
                chosen: range | SharedArray
                if isinstance(rows, range):
                    chosen = rows
                else:
                    chosen = index = self._shared_index("batch", rows) if index is None else index
                located.append(Scattered(value.location(), chosen, low if value.minibatch else 0, copy))
        return tuple(located), len(rows)

    def _checked(self, position: int, value: Any, session: Session) -> Data | np.ndarray:
        entry = self.program.inputs[position]
        kind = entry.variable.type
        if isinstance(value, Data):
            if not value.belongs_to(session):
                value.check_session(session, self._called(position))
            if value.dtype != self._dtypes[position] or value.ndim != kind.ndim:
                raise TypeError(
                    f"{self._called(position)}: expected {kind.dtype} of {kind.ndim} dimensions, "
                    f"got Data of {value.dtype} and {value.ndim} dimensions"
                )
            checked: Data | np.ndarray = value
        else:
            if type(value) is not np.ndarray:
                check_dense(value, self._called(position))
            try:
                checked = self.program.library.filter(kind, value, entry.strict, entry.allow_downcast)
            except (TypeError, ValueError, AttributeError) as error:
                wrong = ValueError if isinstance(error, ValueError) else TypeError
                raise wrong(f"{self._called(position)}: expected {kind}, got {_short(value)}: {error}") from None
        fixed = self._fixed_shapes[position]
        if fixed is not None and any(f is not None and f != s for f, s in zip(fixed, checked.shape, strict=True)):
            raise ValueError(
                f"{self._called(position)}: expected shape {fixed} (None is any length), got {checked.shape}"
            )
        return checked

    def _called(self, position: int) -> str:
        entry = self.program.inputs[position]
        return f"input {position} ({entry.name or entry.variable}) of {self.program.name}"

    def _select(self, values: Sequence[Data | np.ndarray], batch: Any) -> tuple[Selection, int]:
        """Return the selected rows of all ranks together, and the lowest index among them."""
        lengths = [len(v) for v in values if not (isinstance(v, Data) and v.minibatch)]
        if not lengths and batch is None:
            lengths = [len(v) for v in values]  # all are minibatches, and the batch is what they hold
        if not lengths:
            rows = select_unbounded(batch)
        else:
            rows = select(batch, min(lengths))
            # What counts from the end picks other rows where there are more of them.
            if any(not np.array_equal(select(batch, length), rows) for length in set(lengths) - {min(lengths)}):
                raise ValueError(
                    f"{self.program.name}: scattered inputs need equally many rows, got {lengths}"
                    + ("" if batch is None else f", of which batch={_short(batch)} picks different ones")
                )
        low = lowest(rows) if any(isinstance(v, Data) and v.minibatch for v in values) else 0
        for i, value in enumerate(values):
            if isinstance(value, Data) and value.minibatch:
                what, needed = ("picks", len(rows)) if _is_listed(batch) else ("spans", highest(rows) - low + 1)
                if needed > len(value):
                    raise IndexError(f"batch: input {i} is a minibatch of {len(value)} rows, but batch {what} {needed}")
        return rows, low

    def _whole(self, position: int, value: Data | np.ndarray) -> Whole:
        if not isinstance(value, Data):
            kept = self._keep(position, value.dtype, value.ndim)
            kept.resized(value.shape)[...] = value
            value = kept
        return Whole(value.location(), self.program.inputs[position].mutable)

    def _keep(self, key: Any, dtype: np.dtype, ndim: int) -> Data:
        """Return the shared memory that is kept for an input."""
        kept = self._kept.get(key)
        session = ranks.session()
        if kept is None or kept.dtype != dtype or not kept.belongs_to(session):
            kept = self._kept[key] = Data(dtype, ndim)
        return kept

    def _shared_index(self, key: Any, index: np.ndarray) -> SharedArray:
        kept = self._keep(key, np.dtype(np.int64), 1)
        kept.resized(index.shape)[...] = index
        return kept.location()

    def choose(self, session: Session, batch_s: Any) -> tuple[Any, ...]:
        """Check ``batch_s`` as far as the master can, and return each rank's."""
        each = one_a_rank(batch_s, session.size)
        chosen: list[Any] = []
        for r, one in enumerate([batch_s] if each is None else each):
            if isinstance(one, slice):
                select(one, 0, "batch_s")  # complains of bounds that are no integers
                chosen.append(one)
            else:
                chosen.append(self._shared_index(("batch_s", r), indexes(one, "batch_s")))
        return tuple(chosen * session.size if each is None else chosen)


def _is_listed(batch: Any) -> bool:
    """Whether ``batch`` is a list of indexes or a mask, neither a number of rows nor a run of them."""
    return batch is not None and not isinstance(batch, int | np.integer | slice)


def _short(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} and shape {value.shape}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def all_slices(batch_s: Any) -> bool:
    """Whether every rank's choice is a run of rows."""
    candidates = batch_s if isinstance(batch_s, list | tuple) else [batch_s]
    return all(isinstance(one, slice) and one.step in (None, 1) for one in candidates) and len(candidates) > 0


def one_a_rank(batch_s: Any, size: int, name: str = "batch_s") -> list[Any] | None:
    """Return a list of choices if ``batch_s`` is one, None if it is one choice for all ranks."""
    if isinstance(batch_s, slice):
        return None
    if isinstance(batch_s, list | tuple) and any(
        isinstance(one, slice | list | tuple | range) or isinstance(one, np.ndarray) and one.ndim for one in batch_s
    ):
        if len(batch_s) != size:
            raise ValueError(f"{name}: expected one choice of rows for each of {size} ranks, got {len(batch_s)}")
        return list(batch_s)
    if isinstance(batch_s, np.ndarray) and batch_s.ndim == 2:
        return one_a_rank(list(batch_s), size, name)
    return None


def indexes(one: Any, name: str) -> np.ndarray:
    """Check a list of indexes whose range only the rank knows."""
    index = flat(one, name, "a slice, a list of indexes, or a list of these, one a rank")
    if index.dtype == bool:
        raise TypeError(f"{name}: expected integer indexes, got dtype {index.dtype}")
    return index
