"""Reads batches ahead.

`Loader`
    What users make.
`Feed`
    What the trainer, and each rank, takes rows from by their places in an epoch.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from synkhronos import ranks
from synkhronos.casts import as_numbers, check_cast
from synkhronos.checks import at_least, called, flag, index, one_of
from synkhronos.data import Data
from synkhronos.devices import Selection
from synkhronos.graphs import library_of
from synkhronos.loading.augment import generator
from synkhronos.loading.process import Task, packed, start
from synkhronos.loading.ring import NOTHING_LOST, Layout, LoadError, Plan, Ring
from synkhronos.loading.sources import Stream, row_name, source_of
from synkhronos.ranks.interrupts import defer_signals
from synkhronos.ranks.segments import Segment, check_room, create_unlinked

#: Rows that may be unreadable before the first one that says what rows are like.
_TRIES = 100
#: More loaders than this are taken for a mistake.
_MOST = 1024
#: The readers that were made, in which process, and their loaders.
_made: list[tuple[weakref.ref[_Reader], int, list[int]]] = []


class Loader:
    """Reads batches ahead, in processes of its own, into memory that all ranks see.

    Parameters
    ----------
    source
        What to read: a list of arrays, of `npy`, `npz` or `hdf5`, one for each input; an `image_folder` or `Images`;
        any object with ``len()`` and ``[row]``, which returns a tuple of arrays; an iterable of such tuples that begins
        anew in each epoch, or a function that returns one.
    augment : callable, optional
        A function that changes each row: `CropMirror`, or your own, ``augment(row, random)``, which gets a tuple of
        arrays and a `numpy.random.Generator` and returns a tuple.
    processes : int
        The number of loader processes.  An iterable is read by one.
    depth : int
        The number of batches for which there is room.
    shuffle : bool
        Whether each epoch has an order of its own, which follows from the seed and the epoch.  An iterable's order is
        its own.
    on_error : {"raise", "skip"}
        What happens with a row that can't be read: `LoadError` is raised, or the row is left out of its batch and
        counted in `skipped`.
    vars : list of variables, optional
        The function's inputs, whose dtypes the rows get.  A row of numbers that a dtype can't hold can't be read; only
        float64 is rounded, to float32.

    Attributes
    ----------
    waited : float
        The seconds spent on waiting for batches.

    Raises
    ------
    TypeError, ValueError
        For wrong arguments, and a first row that doesn't fit them.
    LoadError
        If the first row can't be read.

    Notes
    -----
    A loader is started anew, as a program is, at the first batch: it shares no threads, locks or GPUs with this
    process, and gets a copy of the source and of the augmentation.  Neither the number of ranks nor that of loaders
    changes which rows come in which order, or what is in them.

    Examples
    --------
    >>> import numpy as np, pytensor.tensor as pt
    >>> import synkhronos as synk
    >>> from synkhronos.loading import Loader
    >>> x, y = pt.dmatrix("x"), pt.dvector("y")
    >>> n = synk.fork(2, use_gpu=False)
    >>> f = synk.function([x, y], (pt.dot(x.T, y), "sum"))
    >>> loader = Loader([np.eye(6), np.arange(6.0)])
    >>> total = 0
    >>> for batch in loader.epoch(0, batch_size=4):
    ...     total = total + f(*loader.data, batch=batch)
    >>> total
    array([0., 1., 2., 3., 4., 5.])
    >>> synk.close()
    """

    def __init__(
        self,
        source: Any,
        *,
        augment: Callable[[tuple[Any, ...], np.random.Generator], tuple[Any, ...]] | None = None,
        processes: int = 1,
        depth: int = 4,
        shuffle: bool = True,
        on_error: str = "raise",
        vars: Sequence[Any] | None = None,  # as synkhronos.data(var=...)
    ):
        self.source = source_of(source)
        if augment is not None and not callable(augment):
            raise TypeError(f"augment: expected a function of a row and a generator, got {augment!r}")
        self.augment = augment
        self.processes = at_least(processes, "processes", 1, "a number of loaders")
        if self.processes > _MOST:
            raise ValueError(f"processes: expected at most {_MOST} loaders, got {processes}")
        if isinstance(self.source, Stream):
            self.processes = 1
        self.depth = at_least(depth, "depth", 2, "a number of batches")
        self.shuffle = flag(shuffle, "shuffle")
        self._skips = one_of(on_error, "on_error", ("raise", "skip")) == "skip"
        self.waited = 0.0
        self._skipped = 0
        row = self._first_row()
        #: The arrays of one row: others have their shapes, and without ``vars`` their dtypes.
        self._row = [as_numbers(value, f"source: array {i} of a row") for i, value in enumerate(row)]
        self._reader: _Reader | None = None
        #: Where the loaders go on by themselves, and the number of that unit: a new tuple after each batch.
        self._next: tuple[Plan, int] | None = None
        self._dtypes = [array.dtype.newbyteorder("=") for array in self._row]
        if vars is not None:
            self.cast_to(vars)

    def __repr__(self) -> str:
        rows = "" if isinstance(self.source, Stream) else f", {len(self):,} rows"
        return f"<synkhronos.loading.Loader of {type(self.source).__name__}{rows}>"

    def __len__(self) -> int:
        if isinstance(self.source, Stream):
            raise TypeError("the rows of an iterable are not known: expected a source with len() and [row]")
        return len(self.source)

    def _first_row(self) -> tuple[Any, ...]:
        """Read a row, which says what all are like."""
        is_stream = isinstance(self.source, Stream)
        for number in range(min(_TRIES, len(self)) if self._skips and not is_stream else 1):
            try:
                row = next(iter(self.source), None) if is_stream else self.source[number]
                if is_stream and row is None:
                    raise ValueError("the iterable is empty")
                made = row if isinstance(row, tuple | list) else (row,)
                if self.augment is not None:
                    made = self.augment(tuple(made), generator(0, 0, number))
                return tuple(made)
            except Exception as error:
                last = error
        raise LoadError(f"{row_name(self.source, number)} can't be read: {type(last).__name__}: {last}") from last

    # -- what is known of it ---------------------------------------------------------------------------------

    @property
    def data(self) -> tuple[Data, ...]:
        """The memory into which `epoch` has batches read, one Data object for each array of a row."""
        if self._reader is None or not isinstance(self._reader.data[0], Data):
            raise RuntimeError("data: expected to be asked for within a loop over epoch(...)")
        return tuple(self._reader.data)

    @property
    def skipped(self) -> int:
        """How many rows were left out, of the batches that were handed out."""
        return self._skipped + (0 if self._reader is None else self._reader.ring.skipped)

    def cast_to(self, variables: Sequence[Any]) -> None:
        """Have rows come with the dtypes of some variables."""
        if len(variables) != len(self._row):
            raise ValueError(
                f"vars: expected {len(self._row)} variables, one for each array of a row, got {len(variables)}"
            )
        dtypes = []
        for i, (variable, array) in enumerate(zip(variables, self._row, strict=True)):
            library_of(variable)
            kind = variable.type
            if kind.ndim != array.ndim + 1:
                raise ValueError(
                    f"vars: expected {array.ndim + 1} dimensions for array {i}, whose rows have shape {array.shape}, "
                    f"got {variable} of {kind.ndim}"
                )
            check_cast(array, kind.dtype, f"vars: array {i} of a row, for {called(variable)}")
            dtypes.append(np.dtype(kind.dtype))
        if dtypes != self._dtypes:
            self.close()
        self._dtypes = dtypes

    # -- batches ---------------------------------------------------------------------------------------------

    def epoch(
        self, epoch: int, batch_size: int, seed: int = 0, row: int = 0, whole: bool = False
    ) -> Iterator[slice | np.ndarray]:
        """Go through the batches of an epoch, to be scattered over the ranks.

        Parameters
        ----------
        epoch : int
            Its number, from which the order of rows follows.  At its end the loader goes on with the next epoch by
            itself.
        batch_size : int
            The rows of a batch, of all ranks together.
        seed : int
            Of the order, and of the augmentation.
        row : int
            The number of rows to skip, to go on in the middle of an interrupted epoch.
        whole : bool
            Whether the last rows are left out if they are fewer than a batch.

        Yields
        ------
        slice or ndarray
            The rows of `data` that are the batch: call ``f(*loader.data, batch=batch)``.  They stay until the next
            batch is asked for.

        Raises
        ------
        LoadError
            If a row can't be read, or a loader has died; it says which, and where to go on.
        MemoryError
            If there is no room for the batches in shared memory.
        """
        ranks.session()
        plan, unit = self._plan(epoch, batch_size, seed, row, whole)
        return (rows for rows, _ in self._batches(plan, unit, True))

    def arrays(
        self,
        epoch: int,
        batch_size: int,
        seed: int = 0,
        row: int = 0,
        whole: bool = False,
        rank: int = 0,
        size: int = 1,
    ) -> Iterator[tuple[np.ndarray, ...]]:
        """Go through the batches of an epoch as NumPy arrays, in a process by itself: no ranks are needed.

        Parameters
        ----------
        epoch, batch_size, seed, row, whole
            As for `epoch`.
        rank, size : int
            Of each ``size`` batches in turn, only that of number ``rank`` is read: where each rank of a run has a
            loader of its own, as in a class of `synkhronos.launch`.  With ``whole``, all have equally many.

        Yields
        ------
        tuple of ndarray
            Views of the ring's memory, which hold until the next batch is asked for.
        """
        index(rank, "rank", at_least(size, "size", 1), ValueError)
        plan, unit = self._plan(epoch, batch_size, seed, row, whole, rank, size)
        return (tuple(a[rows] for a in arrays) for rows, arrays in self._batches(plan, unit, False))

    def _plan(
        self, epoch: Any, batch_size: Any, seed: Any, row: Any, whole: Any, rank: int = 0, size: int = 1
    ) -> tuple[Plan, int]:
        """Check what users say; return the plan, and the rows of a batch."""
        unit = at_least(batch_size, "batch_size", 1)
        for name, value in (("epoch", epoch), ("seed", seed), ("row", row), ("size", size)):
            if at_least(value, name, 0) >= 1 << 63:
                raise ValueError(f"{name}: expected less than 2**63, got {value}")
        whole = flag(whole, "whole")
        if not isinstance(self.source, Stream):
            if whole and unit * size > len(self):
                raise ValueError(
                    f"batch_size: expected at most the {len(self)} rows of the source, got {size} x {unit}"
                )
            if row > len(self):
                raise ValueError(f"row: expected at most the {len(self)} rows of the source, got {row}")
        return Plan(int(epoch), int(row), int(seed), rank, size, int(whole)), unit

    def _batches(self, plan: Plan, batch_size: int, in_session: bool) -> Iterator[tuple[Any, Any]]:
        layout = Layout(1, self.processes, self.depth, batch_size)
        reader, unit = self._read(plan, layout, in_session)
        ring, count = reader.ring, None if isinstance(self.source, Stream) else len(self)
        is_over = count is not None and not plan.starts(count, batch_size)
        if is_over:  # the loaders, too, go on with the next epoch
            self._next = plan.next(), unit
        while not is_over:
            self._next = None  # what fails begins anew
            began = time.perf_counter()
            try:
                ring.wait(unit, (plan.epoch, plan.row))
            except LoadError:
                if ring.death():
                    self.close()
                raise
            finally:
                self.waited += time.perf_counter() - began
            length = ring.lengths[unit % layout.slots]
            rows = ring.rows(unit, length)
            plan = plan._replace(row=plan.row + plan.size * batch_size)
            is_over = length < batch_size if count is None else not plan.starts(count, batch_size)
            plan, unit = plan.next() if is_over else plan, unit + 1
            # Whoever goes on from there has the loaders read on, also without a look at the end of this loop.
            self._next = here = plan, unit
            if len(rows):
                found = slice(rows.start, rows.stop) if isinstance(rows, range) else rows
                yield found, [np.asarray(data) for data in reader.data]
                if self._next is not here or not reader.pids:
                    raise RuntimeError(
                        "this loop over a loader's batches can't go on: another one has begun since, or the loader or "
                        "the ranks were closed"
                    )
            ring.free(unit - 1)

    # -- the loaders -----------------------------------------------------------------------------------------

    def _read(self, plan: Plan, layout: Layout, in_session: bool) -> tuple[_Reader, int]:
        """Have the loaders follow a plan, if they don't already; return also the number of its first unit."""
        if self._reader is None or not self._reader.serves(layout, in_session):
            self.close()
            fields = [(array.shape, dtype.str) for array, dtype in zip(self._row, self._dtypes, strict=True)]
            task = Task(self.source, self.augment, self.shuffle, self._skips, layout, fields)
            self._reader = _Reader(task, in_session)
        elif death := self._reader.ring.death():
            self.close()
            raise LoadError(f"{death}{NOTHING_LOST.format(plan.epoch, plan.row)}", plan.epoch, plan.row)
        if self._next is None or self._next[0] != plan:
            self._reader.begin(plan)
            self._next = plan, 0
        unit = self._next[1]
        if unit:
            self._reader.ring.free(unit - 1)  # a loop that was left has not
        return self._reader, unit

    def feed(self, epoch: int, row: int, batch_size: int, seed: int, takers: int) -> Feed:
        """Return what the trainer takes rows from, from a place on: see `Feed`."""
        plan = Plan(epoch, row, seed)
        layout = Layout(takers, self.processes, self.depth * takers, batch_size)
        reader, unit = self._read(plan, layout, True)
        self._next = None  # until all of it has been taken
        return Feed(reader, unit, plan, len(self))

    def passed(self, feed: Feed, row: int) -> None:
        """Note that all rows of a feed before a place have been taken, and freed."""
        unit, plan = feed.unit_at(row), feed.plan._replace(row=row)
        self._next = (plan.next() if row == len(self) else plan), unit

    def close(self) -> None:
        """End the loaders, and free their memory.  They start anew with the next batch."""
        reader, self._reader, self._next = self._reader, None, None
        if reader is not None:
            self._skipped += reader.ring.skipped
            reader.close()


class Feed:
    """What the trainer, or each rank, takes rows from by their places in an epoch.

    It can be sent to the ranks as an argument of `synkhronos.run`; each calls `open` with its number.  There its
    ``data`` are LocalRows.  At most ``most`` units may be taken at once.
    """

    def __init__(self, reader: _Reader, unit: int, plan: Plan, count: int):
        self.layout, self.data, self.plan = reader.layout, reader.data, plan
        self.most = max(1, self.layout.slots // self.layout.takers // 2)
        self._words, self._pids, self._unit, self._count = reader.words, reader.pids, unit, count
        self._ring = reader.ring

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_ring": None}

    def open(self, taker: int) -> None:
        """Take units as the taker of this number."""
        self._ring = Ring(self.layout, np.asarray(self._words), taker, self._pids)

    def unit_at(self, place: int) -> int:
        """Return the number of the first unit that begins at a place or behind it."""
        return self._unit - (self.plan.row - place) // self.layout.unit

    def is_ready(self, first: int, last: int) -> bool:
        """Whether the rows between two places can be taken without waiting."""
        return self._ring.is_filled(self.unit_at(last) - 1)

    def rows(self, first: int, last: int, watch: Callable[[], None] | None = None) -> Selection:
        """Return which rows of `data` are those between two places, once they are there."""
        found = []
        for unit in range(self.unit_at(first), self.unit_at(last)):
            place = self.plan.row + (unit - self._unit) * self.layout.unit
            self._ring.wait(unit, (self.plan.epoch, place), watch)
            found.append(self._ring.rows(unit, min(self.layout.unit, self._count - place)))
        return found[0] if len(found) == 1 else np.concatenate([np.asarray(rows, np.int64) for rows in found])

    def free(self, first: int, last: int) -> None:
        """Let the loaders have the memory of the rows between two places."""
        for unit in range(self.unit_at(first), self.unit_at(last)):
            self._ring.free(unit)


class _Reader:
    """The loaders of a ring, and its memory, in the process that has them."""

    def __init__(self, task: Task, in_session: bool):
        self.layout = task.layout
        self.data: list[Any] = []
        self.pids: list[int] = []
        self._owner = os.getpid()
        self._session = ranks.session() if in_session else None
        layout = task.layout
        shapes = [((layout.slots * layout.unit, *shape), np.dtype(dtype)) for shape, dtype in task.fields]
        files = []
        nbytes = layout.nbytes + sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)
        try:
            check_room(nbytes)
            for shape, dtype in [((layout.nbytes,), np.dtype(np.uint8)), *shapes]:
                array, file = _shared(shape, dtype, in_session)
                self.data.append(array)
                files.append(file)
            self.words = self.data.pop(0)
            packet = packed(task)
        except MemoryError as error:
            error.add_note(
                f"The loader needs room for {layout.slots} batches of {layout.unit} rows, {nbytes:,} bytes in all: "
                "take a smaller depth or batch, or a smaller dtype such as uint8. Arrays of the source are copied "
                "there, too: loading.npy() reads them from their files."
            )
            raise
        self.ring = Ring(layout, np.asarray(self.words), 0, self.pids, made=False)
        self._ours, theirs = socket.socketpair()
        _wait_for_dropped()
        _made.append((weakref.ref(self), self._owner, self.pids))
        try:
            with defer_signals():
                for number in range(layout.loaders):
                    self.pids.append(start(number, layout, packet, files, theirs))
            if self._session is not None:
                self._session.notify_at_close(self)
        except BaseException:
            self.close()
            raise
        finally:
            theirs.close()
            for file in [*files, packet[0]]:
                file.close()

    def serves(self, layout: Layout, in_session: bool) -> bool:
        """Whether it is a ring as is needed, and still there."""
        is_open = bool(self.pids) and self._owner == os.getpid()
        return is_open and self.layout == layout and (self._session is not None) == in_session

    def begin(self, plan: Plan) -> None:
        """Have the loaders follow a plan, once no rank reads what they are to overwrite."""
        if self._session is not None:
            with self._session.turn:
                self._session.settle()
        self.ring.begin(plan)

    def close(self) -> None:
        """End the loaders, and free their memory."""
        if self._owner != os.getpid():
            return  # this process is a copy of theirs
        _end(self.pids)
        self._ours.close()
        for data in self.data:
            if isinstance(data, Data):
                data.free_memory()

    _on_session_close = close  # they end with the ranks


def _end(pids: list[int]) -> None:
    """End loaders: they only read, and have nothing to put away."""
    while pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[0], signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pids[0], 0)
        del pids[0]


def _wait_for_dropped() -> None:
    """Wait for the loaders of readers that nobody has any more.

    They end by themselves.  Not when the reader is collected: an interrupt that came then would be swallowed.
    """
    for made in list(_made):
        reader, owner, pids = made
        if reader() is None:
            if owner == os.getpid():
                _end(pids)
            _made.remove(made)


def _shared(shape: tuple[int, ...], dtype: np.dtype, in_session: bool) -> tuple[Any, Any]:
    """Return memory that loaders can map, as an array, and its file; of a session, memory of all ranks."""
    if in_session:
        return Data._create_with_file(shape, dtype, "batches")
    nbytes = max(1, math.prod(shape) * dtype.itemsize)
    file = create_unlinked(nbytes)
    return Segment(0, file.fileno(), nbytes).array(shape, dtype), file
