"""Arrays of which each host loads its own rows.

`PartsData`
    An array whose rows lie where the ranks are that compute on them.
`data_parts`
    Makes one.
`batches`, `in_order`
    Shuffled rows, and all rows, each on the host that needs it.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from synkhronos import ranks
from synkhronos.casts import as_numbers
from synkhronos.checks import at_least
from synkhronos.data.fixed import FixedData
from synkhronos.data.rows import get_share, max_row, min_row, select
from synkhronos.graphs.mirror import Mirror, object_of
from synkhronos.ranks import Cancelled, Command, Rank, Segment, Session, SharedArray
from synkhronos.ranks.segments import create_unlinked


class PartsData(FixedData):
    """A `Data` object of which each host has only the rows of its own ranks; made by `data_parts`.

    Its content and shape stay as they are.

    Attributes
    ----------
    here : range
        The rows that this host has: all, where there is one host.
    """

    is_sent = False

    def __init__(self, load: Callable[[int, int], npt.ArrayLike], length: int, name: str | None = None):
        session = ranks.session()
        with session.turn:
            session.settle()
            key, shape, dtype = _load(session, load, length)
            super().__init__(dtype, len(shape), name=name)
            self.origin = "data_parts" if name is None else name
            self._lie_fixed_in(session.rank.segments[key], shape)
        self.here = _rows_of(length, session.size, session.rank.control.here)

    @property
    def data(self) -> np.ndarray:
        """The array itself, read-only.  On several hosts take ``data[here.start : here.stop]``."""
        return self._checked(slice(None))

    def __getitem__(self, key: Any) -> Any:
        return self._checked(key)[key]

    def __repr__(self) -> str:
        return f"<synkhronos.PartsData: {self.dtype}, shape {self.shape}, rows {self.here.start} to {self.here.stop}>"

    def _checked(self, key: Any) -> np.ndarray:
        """Return the array, if what the key picks lies here."""
        self._check()
        if len(self.here) < len(self):
            first = (*key, ...)[0] if isinstance(key, tuple) else key
            if first is None or first is Ellipsis:
                first = slice(None)
            rows = select(first if isinstance(first, slice) else np.ravel(first), len(self), "key")
            if max_row(rows) >= 0 and not (min_row(rows) >= self.here.start and max_row(rows) < self.here.stop):
                raise IndexError(
                    f"{self.origin}: this host has rows {self.here.start:,} to {self.here.stop - 1:,} of "
                    f"{len(self):,}; others have the rest"
                )
        return self._array

    def location(self) -> SharedArray:
        """Return where the array lies, for a command; in the turn of the call that sends it."""
        return _PartsArray(self._key(), self.dtype.str, self.shape)

    def batches(self, size: int, seed: Any = None) -> Iterator[np.ndarray]:
        """Yield batches of shuffled rows; each rank finds its share of a batch on its own host.

        Parameters
        ----------
        size : int
            The number of rows of a batch: at least one for each rank.
        seed : int, sequence of int, or numpy.random.Generator, optional
            As for ``numpy.random.default_rng``.  Give ``(seed, epoch)`` for another order in each epoch.

        Yields
        ------
        ndarray of int64
            A ``batch`` for a call.  No row comes twice.  When a host has too few rows for another batch, the remaining
            rows are left out.

        Notes
        -----
        Rows are shuffled within hosts, so that batches depend on how many ranks each host has.
        """
        size, n_ranks = at_least(size, "size", 1), self._session.size
        if not n_ranks <= size <= len(self):
            raise ValueError(
                f"size: expected a row for each of {n_ranks} ranks, and at most the {len(self)} rows that there are, "
                f"got {size}"
            )
        return batches(len(self), size, self._session.link.ranks_by_host, seed)


def data_parts(load: Callable[[int, int], npt.ArrayLike], length: int, name: str | None = None) -> PartsData:
    """Have each rank load its own rows of an array; each host holds those of its ranks, and no rows are sent.

    Parameters
    ----------
    load : callable
        ``load(start, stop)`` returns the rows from ``start`` up to ``stop``, of numbers.  It is called once on each
        rank that has rows, on all at the same time: rank r of n has the r-th of n nearly equal runs.  A function that
        the script defines is sent to the other hosts.
    length : int
        The number of rows on all ranks together.
    name : str, optional
        Its name in errors.

    Returns
    -------
    PartsData
        A `Data` object that can't be changed.  On one host a call may pick any rows.  On several hosts each rank can
        use only rows of its own host: call with all rows, or with batches of `PartsData.batches`.  `scatter` and
        trainers take it, too.

    Raises
    ------
    RuntimeError
        If ``load`` fails on the master; the message says for which rows.
    WorkerError
        If it fails on another rank; the message says for which rows, the rank, and its host.
    TypeError, ValueError
        For wrong arguments, or if ranks get rows of different shapes or dtypes.
    MemoryError
        If there is no room in shared memory.
    IndexError
        In a call that needs rows which lie elsewhere.

    Examples
    --------
    >>> import numpy as np, synkhronos as synk
    >>> n = synk.fork(2, use_gpu=False)
    >>> def load(start, stop):
    ...     return np.arange(2.0 * start, 2.0 * stop).reshape(-1, 2)
    >>> x = synk.data_parts(load, 5)
    >>> x[3:]
    array([[6., 7.],
           [8., 9.]])
    >>> synk.close()
    """
    if not callable(load):
        raise TypeError(f"load: expected a function of start and stop, got {load!r}")
    return PartsData(load, at_least(length, "length", 1), name)


def batches(length: int, size: int, by_host: Sequence[range], seed: Any = None) -> Iterator[np.ndarray]:
    """Yield shuffled rows, ``size`` at a time, of which each rank's share lies with its host.

    ``size`` is at least the number of ranks, ``by_host`` has the ranks of each host, and ``seed`` is as
    `PartsData.batches` has it.
    """
    rng, n_ranks = np.random.default_rng(seed), by_host[-1].stop
    orders = [rng.permutation(_rows_of(length, n_ranks, of_host)) for of_host in by_host]
    each = [len(_rows_of(size, n_ranks, of_host)) for of_host in by_host]
    for k in range(min(len(order) // count for order, count in zip(orders, each, strict=True))):
        yield np.concatenate([order[k * count :][:count] for order, count in zip(orders, each, strict=True)])


def in_order(length: int, size: int, n_ranks: int) -> Iterator[np.ndarray]:
    """Yield all rows once, about ``size`` at a time, of which each rank's share is of the rows that it has loaded.

    Examples
    --------
    >>> [rows.tolist() for rows in in_order(8, 4, 2)]
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    """
    shares, each = [np.arange(length)[get_share(length, n_ranks, r)] for r in range(n_ranks)], -(-size // n_ranks)
    for start in range(0, len(shares[0]), each):  # the first have one more at most, as in the shares of a batch
        yield np.concatenate([rows[start : start + each] for rows in shares])


def _rows_of(length: int, size: int, some: range) -> range:
    """Return the rows that some ranks have of so many."""
    return range(get_share(length, size, some[0]).start, get_share(length, size, some[-1]).stop)


class _PartsArray(SharedArray):
    """An array that each host has in part."""

    __slots__ = ()

    def rows_of(self, size: int, ranks: range) -> range:
        """Return the rows that a host has."""
        return _rows_of(self.shape[0], size, ranks)


def _load(session: Session, load: Any, length: int) -> tuple[int, tuple[int, ...], str]:
    """Have the ranks load; return the memory's key, the whole array's shape, and its dtype."""
    key = session.memory.key_of_parts()
    loading = _Loading(load)
    try:
        Mirror.of(session).send([(("load", key), loading)], [])
        session.rank.objects["load", key] = lambda: loading
        shape, dtype = session.run(_Load(key, length))
    except BaseException:
        session.memory.release("segment", key)
        raise
    finally:
        session.memory.release("object", ("load", key))
    return key, (length, *shape), dtype


class _Loading:
    """The user's function, on its way to the ranks."""

    code: Any = None

    def __init__(self, load: Callable[[int, int], npt.ArrayLike]):
        self.load = load

    def to_device(self) -> None:
        """Nothing of it goes to a device."""


@dataclass(frozen=True, slots=True)
class _Load(Command):
    """Load each rank's rows into memory that its host's ranks share.

    The memory has the addresses of all rows on each host, and room for its own.
    """

    key: int
    length: int

    def run(self, rank: Rank) -> tuple[tuple[int, ...], str]:
        """Return a row's shape, and the dtype."""
        mine = get_share(self.length, rank.size, rank.number)
        rows = self._loaded(rank, mine.start, mine.stop) if mine.stop > mine.start else None
        shape, dtype = self._agreed(rank, rows)
        here, row = rank.control.here, math.prod(shape) * np.dtype(dtype).itemsize
        nbytes, of_host = max(1, self.length * row), _rows_of(self.length, rank.size, here)
        held = range(of_host.start * row, of_host.stop * row)
        with contextlib.ExitStack() as files:
            place = None
            if rank.number == here.start:
                file = files.enter_context(create_unlinked(nbytes, [held]))
                place = os.getpid(), file.fileno()
            pid, number = rank.exchange(place)[here.start]
            if rank.number != here.start:
                file = files.enter_context(io.FileIO(f"/proc/{pid}/fd/{number}", "r+"))
            segment = Segment(self.key, file.fileno(), nbytes, here=held)
            rank.segments.add(segment)
            if rows is not None:
                segment.array((self.length, *shape), dtype)[mine] = rows
            rank.barrier()  # nobody closes the file before all have it, or computes before all rows are there
        return shape, dtype

    def _loaded(self, rank: Rank, start: int, stop: int) -> np.ndarray:
        try:
            rows = as_numbers(object_of(rank, ("load", self.key)).load(start, stop), "load")
            if not rows.ndim or len(rows) != stop - start:
                raise ValueError(f"expected {stop - start:,} rows, got an array of shape {rows.shape}")
        except Exception as error:
            raise RuntimeError(f"load({start}, {stop}), for rank {rank.number}: {type(error).__name__}: {error}") from (
                error
            )
        return rows

    def _agreed(self, rank: Rank, rows: np.ndarray | None) -> tuple[tuple[int, ...], str]:
        """Return what all ranks that have rows say of one, or refuse."""
        of_all = rank.exchange(None if rows is None else (rows.shape[1:], rows.dtype.str))
        first: tuple[tuple[int, ...], str] = of_all[0]  # the first ranks have rows
        for r, other in enumerate(of_all):
            if other not in (None, first):
                if not rank.is_master:
                    raise Cancelled
                raise ValueError(
                    f"load: expected rows of one shape and dtype, got {first[0]} of {np.dtype(first[1])} on rank 0, "
                    f"and {other[0]} of {np.dtype(other[1])} on rank {r}"
                )
        return first
