"""Arrays whose rows are distributed: each rank loads its own rows, which stay in its host's memory.

Each host has a segment with the length of the whole array, so that a row has the same offset on all hosts.  Only the
pages of the host's own rows are allocated.
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
from synkhronos.checks import check_at_least, check_name
from synkhronos.data_objects.array import ReadOnlyData
from synkhronos.data_objects.rows import find_max_row, find_min_row, select_rows, split_selection
from synkhronos.ranks import ArrayLocation, Command, Rank, Segment, Session
from synkhronos.ranks.segments import create_unlinked_file
from synkhronos.replication.replicator import Replicator


class PartsData(ReadOnlyData):
    """A read-only `Data` object with distributed rows: each host has the rows of its own ranks; see `data_parts`.

    Attributes
    ----------
    local_rows : range
        Rows on this host.  With one host: all rows.
    """

    _is_published = False

    def __init__(self, load: Callable[[int, int], npt.ArrayLike], length: int, name: str | None):
        session, self._load = ranks.get_session(), load
        with session.call_lock:
            session.wait_until_idle()
            self._parts = split_selection(range(length), session.size)
            key, shape, dtype = _load_parts(session, load, self._parts)
            super().__init__(dtype, len(shape), name=name)
            self._source = "data_parts" if name is None else name
            self._set_segment(key, shape)
        if session.rank.spans_hosts:
            session.replacement_callbacks[self] = PartsData._reload

    def _set_segment(self, key: int, shape: tuple[int, ...]) -> None:
        rank = self._session.rank
        self._map_segment(rank.segments[key], shape)
        self.local_rows = _join_ranges(self._parts, rank.local_ranks)

    def reload_parts(self, parts: Sequence[range]) -> None:
        """Load all rows again, each rank its new part; the parts of a host's ranks are contiguous."""
        with self._session.call_lock:
            self._session.wait_until_idle()
            self._parts = list(parts)
            self._reload()

    def _reload(self) -> None:
        """Load all rows again, each rank its part: after workers were replaced, or the parts have changed."""
        if len(self._parts) != self._session.size:
            self._parts = split_selection(range(len(self)), self._session.size)
        layout = self.shape, self.dtype
        self._release(keep_array=True)
        key, shape, dtype = _load_parts(self._session, self._load, self._parts)
        if (shape, np.dtype(dtype)) != layout:
            self._session.memory.release("segment", key)
            raise ValueError(
                f"load: expected shape {layout[0]} and {layout[1]}, as before, got {shape} and {np.dtype(dtype)}"
            )
        self._set_segment(key, shape)

    def _release(self, keep_array: bool = False) -> None:
        super()._release(keep_array)
        if not keep_array:  # the user has freed the memory, or the session has ended
            self.local_rows = range(0)
            self._session.replacement_callbacks.discard(self)

    @property
    def data(self) -> np.ndarray:
        """NumPy array of all rows, read-only.  On several hosts, index the object with rows of `local_rows` instead.

        Raises
        ------
        IndexError
            If this host does not have all rows.
        """
        self._check_is_local(slice(None))
        return self._array

    def __getitem__(self, key: Any) -> Any:
        self._check_is_local(key)
        return self._array[key]

    def __repr__(self) -> str:
        rows, name = self.local_rows, self._format_repr_name()
        return f"<synkhronos.PartsData{name}: {self.dtype}, shape {self.shape}, rows {rows.start}:{rows.stop}>"

    def _check_is_local(self, key: Any) -> None:
        """Raise IndexError if a row that the key selects is on another host."""
        self._check_open()
        local = self.local_rows
        if len(local) < len(self):
            first = (*key, ...)[0] if isinstance(key, tuple) else key
            if first is None or first is Ellipsis:
                first = slice(None)
            if not isinstance(first, slice):
                first = np.asarray(first)
                is_mask_of_items = first.dtype == bool and first.ndim > 1
                first = np.nonzero(first)[0] if is_mask_of_items else first.ravel()
            rows = select_rows(first, len(self), "key")
            if find_max_row(rows) >= 0 and not (find_min_row(rows) >= local.start and find_max_row(rows) < local.stop):
                raise IndexError(
                    f"{self._source}: this host has rows {local.start:,} to {local.stop - 1:,} of {len(self):,}; "
                    "others have the rest"
                )

    def _get_array_location(self) -> ArrayLocation:
        location = _PartsLocation(self._get_segment_key(), self.dtype.str, self.shape)
        location.parts = self._parts
        return location

    def batches(self, size: int, seed: Any = None) -> Iterator[np.ndarray]:
        """Yield batches of shuffled rows, in which each rank's share is on its own host.

        Parameters
        ----------
        size : int
            Number of rows in a batch: at least one for each rank.
        seed : int, sequence of int, or numpy.random.Generator, optional
            Seed of ``numpy.random.default_rng``.  With ``(seed, epoch)`` each epoch has another order.

        Yields
        ------
        ndarray of int64
            The argument ``batch`` of a call.  No row appears twice.  Iteration ends when a host has too few rows for
            another batch; the remaining rows are not used.

        Notes
        -----
        Rows are shuffled within each host, so batches depend on the number of ranks on each host.
        """
        self._get_segment_key()  # raises an error if the memory was freed
        size, n_ranks = check_at_least(size, "size", 1), self._session.size
        if not n_ranks <= size <= len(self):
            raise ValueError(
                f"size: expected a row for each of {n_ranks} ranks, and at most the {len(self)} rows, got {size}"
            )
        try:
            generator = np.random.default_rng(seed)
        except (TypeError, ValueError) as error:
            raise type(error)(f"seed: {error}") from None
        return iterate_shuffled_batches(len(self), size, self._session.ranks_by_host, generator)


def data_parts(load: Callable[[int, int], npt.ArrayLike], length: int, name: str | None = None) -> PartsData:
    """Load an array in parallel: each rank loads its own rows, which stay on the rank's host.

    Parameters
    ----------
    load : callable
        ``load(start, stop)`` returns an array of numbers: the rows from ``start`` to ``stop - 1``.  Each rank that has
        rows calls it once, in parallel with the others.  The rows are divided as those of a call: contiguous parts, in
        rank order.  A function that the script defines is sent to the other hosts.  If a trainer continues after a
        death on several hosts, all ranks call it again.
    length : int
        Number of rows on all ranks together.
    name : str, optional
        Name in errors.

    Returns
    -------
    PartsData
        A read-only `Data` object.  On one host a call may select any rows.  On several hosts each rank can use only
        rows of its own host: call with all rows, or with batches of `PartsData.batches`.  `scatter` and trainers also
        accept it.

    Raises
    ------
    RuntimeError
        If ``load`` fails on the master.  The message names the rows.
    WorkerError
        If it fails on another rank.  The message names the rows, the rank and its host.
    TypeError, ValueError
        For wrong arguments, or if ranks load rows of different shapes or dtypes.
    MemoryError
        If there is not enough shared memory.
    IndexError
        In a later call, if a rank needs rows of another host.

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
    check_name(name)
    return PartsData(load, check_at_least(length, "length", 1), name)


def iterate_shuffled_batches(
    length: int, rows_per_batch: int, ranks_by_host: Sequence[range], seed: Any
) -> Iterator[np.ndarray]:
    """Yield batches of shuffled rows, as `PartsData.batches`.  ``length`` is the number of all rows."""
    rng, n_ranks = np.random.default_rng(seed), ranks_by_host[-1].stop
    parts, batch_shares = split_selection(range(length), n_ranks), split_selection(range(rows_per_batch), n_ranks)
    orders = [rng.permutation(_join_ranges(parts, host_ranks)) for host_ranks in ranks_by_host]
    counts = [len(_join_ranges(batch_shares, host_ranks)) for host_ranks in ranks_by_host]
    for k in range(min(len(order) // count for order, count in zip(orders, counts, strict=True))):
        yield np.concatenate([order[k * count :][:count] for order, count in zip(orders, counts, strict=True)])


def redistribute_rows(
    rows: np.ndarray, rows_per_rank: int, length: int, ranks_by_host: Sequence[range]
) -> tuple[np.ndarray, list[range]]:
    """Divide an epoch's remaining ``rows`` among hosts, so that each rank has ``rows_per_rank`` rows in each step.

    Return the rows of all steps in order, and the range of the array's ``length`` rows that each rank has to load: its
    part.  The first and last rank of a host load more rows, so that the host has all that its steps need.  Rows at the
    end that do not fill a step are omitted; there have to be enough rows for one step.

    Examples
    --------
    >>> redistribute_rows(np.array([7, 1, 6, 4, 5, 2]), 1, 8, [range(1), range(1, 2)])
    (array([1, 7, 4, 6, 2, 5]), [range(0, 5), range(4, 8)])
    """
    n_ranks = ranks_by_host[-1].stop
    n_steps, parts = len(rows) // (rows_per_rank * n_ranks), split_selection(range(length), n_ranks)
    rows, rows_by_host = rows[: n_steps * rows_per_rank * n_ranks], []
    starts = [host_ranks.start * rows_per_rank * n_steps for host_ranks in ranks_by_host]
    for host_ranks, own in zip(ranks_by_host, np.split(np.sort(rows), starts[1:]), strict=True):
        first, last = host_ranks[0], host_ranks[-1]
        parts[first] = range(min(parts[first].start, int(own[0])), parts[first].stop)
        parts[last] = range(parts[last].start, max(parts[last].stop, int(own[-1]) + 1))
        rows_by_host.append(rows[(rows >= own[0]) & (rows <= own[-1])].reshape(n_steps, -1))
    return np.concatenate(rows_by_host, axis=1).ravel(), parts


def iterate_batches_of_own_rows(length: int, rows_per_batch: int, n_ranks: int) -> Iterator[np.ndarray]:
    """Yield all rows in batches, in which each rank's share consists of rows that the rank has loaded.

    ``rows_per_batch`` is rounded up to a multiple of ``n_ranks``.  The last batch may have fewer rows.

    Examples
    --------
    >>> [rows.tolist() for rows in iterate_batches_of_own_rows(8, 4, 2)]
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    """
    parts = split_selection(np.arange(length), n_ranks)
    count = -(-rows_per_batch // n_ranks)
    for start in range(0, len(parts[0]), count):  # the first parts are the longest
        yield np.concatenate([rows[start : start + count] for rows in parts])


def _join_ranges(ranges: Sequence[range], host_ranks: range) -> range:
    """Return the range of a host's consecutive ranks, from the range of each rank."""
    return range(ranges[host_ranks[0]].start, ranges[host_ranks[-1]].stop)


class _PartsLocation(ArrayLocation):
    """Location of an array with distributed rows: each host has the rows of its own ranks."""

    #: Rows of each rank.
    parts: Sequence[range]

    def find_local_rows(self, size: int, host_ranks: range) -> range:
        """Return the rows on the host with these ranks.  ``size`` is the number of all ranks."""
        # A single host has all rows, also after one of its ranks was left out.
        return range(self.shape[0]) if len(host_ranks) == size else _join_ranges(self.parts, host_ranks)


def _load_parts(session: Session, load: Any, parts: Sequence[range]) -> tuple[int, tuple[int, ...], str]:
    """Load all rows, each rank its part.  Return the segment's key, the array's shape and its dtype."""
    key = session.memory.reserve_key()
    try:
        Replicator.get_or_create(session).send([(("load", key), load)], [])
        session.rank.add_object(("load", key), load)
        shape, dtype = session.run(_LoadRows(key, tuple(parts), os.getcwd()))
    except BaseException:
        session.memory.release("segment", key)
        raise
    finally:
        session.memory.release("object", ("load", key))
    return key, (parts[-1].stop, *shape), dtype


@dataclass(frozen=True, slots=True)
class _LoadRows(Command):
    """Load each rank's rows into a segment that the ranks of its host share."""

    segment_key: int
    #: Rows of each rank.
    parts: tuple[range, ...]
    #: The master's working directory, to which the loader's paths may be relative.
    folder: str

    def run(self, rank: Rank) -> tuple[tuple[int, ...], str]:
        """Load this rank's rows.  Return a row's shape, and the dtype."""
        part, length = self.parts[rank.number], self.parts[-1].stop
        rows = self._call_load(rank, part.start, part.stop) if part else None
        shape, dtype = self._agree_on_layout(rank, rows)
        local_ranks, row_nbytes = rank.local_ranks, math.prod(shape) * np.dtype(dtype).itemsize
        nbytes, local_rows = max(1, length * row_nbytes), _join_ranges(self.parts, local_ranks)
        allocated = range(local_rows.start * row_nbytes, local_rows.stop * row_nbytes)
        with contextlib.ExitStack() as files:
            pid_and_descriptor = None
            if rank.number == local_ranks.start:
                file = files.enter_context(create_unlinked_file(nbytes, [allocated]))
                pid_and_descriptor = os.getpid(), file.fileno()
            pid, descriptor = rank.all_gather(pid_and_descriptor)[local_ranks.start]
            if rank.number != local_ranks.start:
                file = files.enter_context(io.FileIO(f"/proc/{pid}/fd/{descriptor}", "r+"))
            segment = Segment(self.segment_key, file.fileno(), nbytes, allocated_bytes=allocated)
            rank.segments.add(segment)
            if rows is not None:
                segment.view_array((length, *shape), dtype)[part.start : part.stop] = rows
            rank.barrier()  # then ranks may close the file, and read others' rows
        return shape, dtype

    def _call_load(self, rank: Rank, start: int, stop: int) -> np.ndarray:
        try:
            with contextlib.suppress(OSError):  # another host may lack it
                os.chdir(self.folder)
            rows = as_numbers(rank.get_object(("load", self.segment_key))(start, stop), "load")
            if not rows.ndim or len(rows) != stop - start:
                raise ValueError(f"expected {stop - start:,} rows, got an array of shape {rows.shape}")
            rows = rows.astype(rows.dtype.newbyteorder("="), copy=False)
        except Exception as error:
            raise RuntimeError(f"load({start}, {stop}), for rank {rank.number}: {type(error).__name__}: {error}") from (
                error
            )
        return rows

    def _agree_on_layout(self, rank: Rank, rows: np.ndarray | None) -> tuple[tuple[int, ...], str]:
        """Return a row's shape and the dtype.  Raise ValueError if they differ between ranks."""
        by_rank = rank.all_gather(None if rows is None else (rows.shape[1:], rows.dtype.str))
        layout: tuple[tuple[int, ...], str] = by_rank[0]  # rank 0 always has rows
        for r, rank_layout in enumerate(by_rank):
            if rank_layout not in (None, layout):
                message = (
                    f"load: expected rows of one shape and dtype, got {layout[0]} of {np.dtype(layout[1])} on rank 0, "
                    f"and {rank_layout[0]} of {np.dtype(rank_layout[1])} on rank {r}"
                )
                rank.raise_common_error(ValueError(message))
        return layout
