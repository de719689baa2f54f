"""Loaders: batches that other processes read ahead.

A `Loader` owns at most one pool of loader processes, with their ring.  Three interfaces take units from the ring::

    Loader.epoch    the master takes batches of Data rows, and scatters them by function calls   1 consumer
    Loader.arrays   a single process takes batches as NumPy arrays                               1 consumer
    LoaderRows      the trainer, or each rank, takes rows by position in the epoch               1 or n consumers

The first batch starts the pool.  After an epoch the pool continues with the next one.  If the requested batch is not
the next one, the pool restarts from the position of that batch.
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
from synkhronos.checks import check_at_least, check_choice, check_flag, check_index, describe, suggest_keywords
from synkhronos.data_objects import Data
from synkhronos.data_objects.data_access import create_data_with_file
from synkhronos.devices import Selection
from synkhronos.graph_libraries import get_library
from synkhronos.loading.augment import augment_row
from synkhronos.loading.loader_process import LoaderConfig, pack_config, start_loader_process
from synkhronos.loading.ring import RESUME_HINT, LoadError, ReadPlan, Ring, RingLayout
from synkhronos.loading.sources import IterableSource, SourceArgument, as_source, describe_row
from synkhronos.ranks.interrupts import defer_signals
from synkhronos.ranks.segments import Segment, check_free_memory, create_unlinked_file
from synkhronos.variable_types import Variable

#: Maximal number of rows to try, with on_error="skip", until one can be read.
_MAX_SAMPLE_ATTEMPTS = 100
#: Maximal number of processes; a larger number is probably a mistake.
_MAX_PROCESSES = 1024
#: All pools: a weak reference, the process id of the owner, and the process ids of the loader processes.
_pools: list[tuple[weakref.ref[_LoaderPool], int, list[int]]] = []


class Loader:
    """Batches that other processes read ahead, into memory that all ranks share.

    Parameters
    ----------
    source
        One of:

        - a list of arrays, or of `npy`, `npz` or `hdf5`, one for each input;
        - an `image_folder` or `Images`;
        - an object with ``len()`` and ``[row]``, which returns a tuple of arrays;
        - an iterable of such tuples, which is iterated once per epoch, or a function that returns one.
    augment : callable, optional
        Function that changes each row: a `CropMirror`, or ``augment(row, random)``, which takes a tuple of arrays and a
        `numpy.random.Generator` and returns a tuple of arrays.  The arrays are copies, which it may overwrite.
    processes : int
        Number of loader processes.  An iterable is read by one.
    depth : int
        Number of batches that the shared memory holds, at least 2.
    shuffle : bool
        Whether each epoch has a random order, which depends on the seed and the epoch.  An iterable is not shuffled.
    on_error : {"raise", "skip"}
        Whether a row that can't be read raises `LoadError`, or is skipped and counted in `n_skipped`.
    vars : list of variables, optional
        Inputs of the function; rows are cast to their dtypes.  A cast that would change a value is an error, except for
        rounding float64 to float32.

    Attributes
    ----------
    wait_seconds : float
        Seconds spent waiting for batches.

    Raises
    ------
    LoadError
        If the first row can't be read.

    Notes
    -----
    Loader processes are started at the first batch, and get copies of the source and the augmentation.  The order of
    rows and their values do not depend on the number of ranks or of processes.

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

    @suggest_keywords
    def __init__(
        self,
        source: SourceArgument,
        *,
        augment: Callable[[tuple[Any, ...], np.random.Generator], tuple[Any, ...]] | None = None,
        processes: int = 1,
        depth: int = 4,
        shuffle: bool = True,
        on_error: str = "raise",
        vars: Sequence[Any] | None = None,  # as synkhronos.data(var=...)
    ):
        self.source = as_source(source)
        if augment is not None and not callable(augment):
            raise TypeError(f"augment: expected a function of a row and a generator, got {augment!r}")
        self.augment = augment
        self.processes = check_at_least(processes, "processes", 1, "a number of processes")
        if self.processes > _MAX_PROCESSES:
            raise ValueError(f"processes: expected at most {_MAX_PROCESSES}, got {processes}")
        if isinstance(self.source, IterableSource):
            self.processes = 1
        self.depth = check_at_least(depth, "depth", 2, "a number of batches")
        self.shuffle = check_flag(shuffle, "shuffle")
        self.skips_unreadable = check_choice(on_error, "on_error", ("raise", "skip")) == "skip"
        self.wait_seconds = 0.0
        self._n_skipped_before = 0
        row = self._read_sample()
        #: Arrays of one row, whose shapes all rows have; without ``vars`` also their dtypes.
        self._sample = [as_numbers(value, f"source: array {i} of a row") for i, value in enumerate(row)]
        if not self._sample:
            raise ValueError("source: expected rows of at least one array, got an empty tuple")
        self._pool: _LoaderPool | None = None
        self._dtypes = [array.dtype.newbyteorder("=") for array in self._sample]
        if vars is not None:
            set_row_dtypes(self, vars)

    def __repr__(self) -> str:
        rows = "" if isinstance(self.source, IterableSource) else f", {len(self):,} rows"
        return f"<synkhronos.loading.Loader of {type(self.source).__name__}{rows}>"

    def __len__(self) -> int:
        if isinstance(self.source, IterableSource):
            raise TypeError("an iterable has no length: expected a source with len() and [row]")
        return len(self.source)

    def _read_sample(self) -> tuple[Any, ...]:
        """Read and augment the first row that can be read."""
        is_stream = isinstance(self.source, IterableSource)
        for number in range(min(_MAX_SAMPLE_ATTEMPTS, len(self)) if self.skips_unreadable and not is_stream else 1):
            try:
                for row in self.source if is_stream else [self.source[number]]:
                    return augment_row(row, self.augment, 0, 0, number)
                raise ValueError("the iterable is empty")
            except Exception as error:
                last_error = error
        reason = f"{type(last_error).__name__}: {last_error}"
        raise LoadError(f"{describe_row(self.source, number)} can't be read: {reason}") from last_error

    @property
    def data(self) -> tuple[Data, ...]:
        """Data objects into which the batches of `epoch` are read, one for each array of a row."""
        if self._pool is None or not isinstance(self._pool.data[0], Data):
            raise RuntimeError("data: available only within a loop over epoch(...)")
        return tuple(self._pool.data)

    @property
    def n_skipped(self) -> int:
        """Number of rows skipped in the batches so far."""
        return self._n_skipped_before + (0 if self._pool is None else self._pool.ring.n_skipped)

    # -- batches ---------------------------------------------------------------------------------------------

    def epoch(
        self, epoch: int, batch_size: int, seed: int = 0, start_row: int = 0, drop_last: bool = False
    ) -> Iterator[slice | np.ndarray]:
        """Iterate over the batches of an epoch, to be scattered over the ranks.

        Parameters
        ----------
        epoch : int
            Number of the epoch; the order of rows depends on it.  After the last batch the loader processes continue
            with the next epoch.
        batch_size : int
            Number of rows of a batch, of all ranks together.
        seed : int
            Seed of the order and of the augmentation.
        start_row : int
            Number of rows to skip at the start, to resume an interrupted epoch.
        drop_last : bool
            Whether to drop the last batch if it has fewer rows than the others.

        Yields
        ------
        slice or ndarray
            Indexes of rows in `data`: call ``f(*loader.data, batch=batch)``.  Rows are valid until the next iteration.

        Raises
        ------
        LoadError
            If a row can't be read, or a loader process has died.  Its ``epoch`` and ``row`` are the `epoch` and
            `start_row` with which to resume.
        """
        ranks.get_session()
        plan, batch_size = self._make_plan(epoch, batch_size, seed, start_row, drop_last)
        return (rows for rows, _ in self._iterate_batches(plan, batch_size, True))

    def arrays(
        self,
        epoch: int,
        batch_size: int,
        seed: int = 0,
        start_row: int = 0,
        drop_last: bool = False,
        rank: int = 0,
        size: int = 1,
    ) -> Iterator[tuple[np.ndarray, ...]]:
        """Iterate over the batches of an epoch as NumPy arrays.  No ranks are needed.

        Parameters
        ----------
        epoch, batch_size, seed, start_row, drop_last
            As for `epoch`.
        rank, size : int
            Only batch ``rank`` of every ``size`` successive batches is read, for ranks that have their own loaders, as
            in a model class of `synkhronos.launcher`.  With ``drop_last`` all ranks have equally many batches.

        Yields
        ------
        tuple of ndarray
            Views of shared memory, of shape ``(rows, ...)``.  They are valid until the next iteration.

        Examples
        --------
        >>> import numpy as np
        >>> loader = Loader([np.arange(5)], shuffle=False)
        >>> [x.tolist() for (x,) in loader.arrays(epoch=0, batch_size=2)]
        [[0, 1], [2, 3], [4]]
        >>> loader.close()
        """
        check_index(rank, "rank", check_at_least(size, "size", 1), ValueError)
        plan, batch_size = self._make_plan(epoch, batch_size, seed, start_row, drop_last, rank, size)
        return (tuple(a[rows] for a in arrays) for rows, arrays in self._iterate_batches(plan, batch_size, False))

    def _make_plan(
        self, epoch: Any, batch_size: Any, seed: Any, start_row: Any, drop_last: Any, rank: int = 0, size: int = 1
    ) -> tuple[ReadPlan, int]:
        """Check the arguments of `epoch` and `arrays`.  Return the plan and the batch size."""
        batch_size = check_at_least(batch_size, "batch_size", 1)
        for name, value in (("epoch", epoch), ("seed", seed), ("start_row", start_row), ("size", size)):
            if check_at_least(value, name, 0) >= 1 << 63:
                raise ValueError(f"{name}: expected less than 2**63, got {value}")
        drop_last = check_flag(drop_last, "drop_last")
        if not isinstance(self.source, IterableSource):
            if drop_last and batch_size * size > len(self):
                raise ValueError(
                    f"batch_size: expected at most the {len(self)} rows of the source, got {size} x {batch_size}"
                )
            if start_row > len(self):
                raise ValueError(f"start_row: expected at most the {len(self)} rows of the source, got {start_row}")
        return ReadPlan(int(epoch), int(start_row), int(seed), rank, size, int(drop_last)), batch_size

    def _iterate_batches(self, plan: ReadPlan, batch_size: int, in_session: bool) -> Iterator[tuple[Any, Any]]:
        """Yield the row indexes of each batch, a slice or an array, and the arrays that they index."""
        layout = RingLayout(1, self.processes, self.depth, batch_size)
        pool, unit = self._prepare_pool(plan, layout, in_session)
        ring, count = pool.ring, None if isinstance(self.source, IterableSource) else len(self)
        is_over = count is not None and not plan.list_unit_starts(count, batch_size)
        if is_over:  # the loader processes continue with the next epoch
            pool.position = plan.advance_epoch(), unit
        while not is_over:
            pool.position = None  # after a failure the plan starts anew
            start_time = time.perf_counter()
            try:
                ring.wait_until_filled(unit, (plan.epoch, plan.position))
            except LoadError:
                if ring.describe_death():
                    self.close()
                raise
            finally:
                self.wait_seconds += time.perf_counter() - start_time
            length = ring.unit_lengths[unit % layout.n_slots]
            rows = ring.take_readable_rows(unit, length)
            plan = plan._replace(position=plan.position + plan.n_ranks * batch_size)
            is_over = length < batch_size if count is None else not plan.list_unit_starts(count, batch_size)
            plan, unit = plan.advance_epoch() if is_over else plan, unit + 1
            # Set before the yield: the caller may leave this loop, and continue from here with another loop.
            pool.position = position = plan, unit
            if len(rows):
                selection = slice(rows.start, rows.stop) if isinstance(rows, range) else rows
                yield selection, [np.asarray(data) for data in pool.data]
                if pool.position is not position or not pool.pids:
                    raise RuntimeError(
                        "this loop over a loader's batches can't continue: another one has started since, or the "
                        "loader or the ranks were closed"
                    )
            ring.free(unit - 1)

    # -- loader processes ------------------------------------------------------------------------------------

    def _prepare_pool(self, plan: ReadPlan, layout: RingLayout, in_session: bool) -> tuple[_LoaderPool, int]:
        """Return a pool that reads by a plan, started if necessary, and the number of the plan's first unit."""
        pool = self._pool
        if pool is None or not pool.can_serve(layout, in_session):
            self.close()
            array_specs = [(array.shape, dtype.str) for array, dtype in zip(self._sample, self._dtypes, strict=True)]
            config = LoaderConfig(self.source, self.augment, self.shuffle, self.skips_unreadable, layout, array_specs)
            pool = self._pool = _LoaderPool(config, in_session)
        elif death := pool.ring.describe_death():
            self.close()
            raise LoadError(f"{death}{RESUME_HINT.format(plan.epoch, plan.position)}", plan.epoch, plan.position)
        if pool.position is None or pool.position[0] != plan:
            pool.position = None  # an interrupt may come before the plan has started, or just after
            pool.start_plan(plan)
            pool.position = plan, 0
        unit = pool.position[1]
        if unit:
            pool.ring.free(unit - 1)  # the caller may have left a loop before it freed this unit
        return pool, unit

    def close(self) -> None:
        """End the loader processes and free their memory; the next batch starts new ones."""
        pool, self._pool = self._pool, None
        if pool is not None:
            self._n_skipped_before += pool.ring.n_skipped
            pool.close()


class LoaderRows:
    """Access to a loader's rows by their positions in an epoch, for the trainer or for each rank.

    The object may be an argument of `synkhronos.run`.  Then each rank calls `open` with its number.  ``data`` are the
    ring's arrays, one for each array of a row.  A consumer may hold at most ``max_steps_per_launch`` units at a time.
    If ``skips_unreadable``, a range of positions may have fewer rows.
    """

    def __init__(self, pool: _LoaderPool, unit: int, plan: ReadPlan, n_rows: int):
        self.layout, self.data, self.plan = pool.layout, pool.data, plan
        self.max_steps_per_launch = max(1, self.layout.n_slots // self.layout.n_consumers // 2)
        self.skips_unreadable = pool.skips_unreadable
        self._memory, self._pids, self._first_unit, self._n_rows = pool.ring_memory, pool.pids, unit, n_rows
        self._pool, self._ring = pool, pool.ring

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_pool": None, "_ring": None}

    def open(self, consumer: int) -> None:
        """Map the ring into this rank's memory.  ``consumer`` is the number of the rank."""
        self._ring = Ring(self.layout, np.asarray(self._memory), consumer, self._pids)

    def find_unit(self, position: int) -> int:
        """Return the number of the first unit that starts at or after a position, which may lie within a unit."""
        return self._first_unit - (self.plan.position - position) // self.layout.unit_rows

    @property
    def has_ended(self) -> bool:
        """Whether the loader processes have ended, and only rows that they have read before are left."""
        return not self._pids

    def is_loaded(self, stop: int) -> bool:
        """Whether the rows up to position ``stop`` are loaded."""
        return self._ring.is_filled(self.find_unit(stop) - 1)

    def wait_for_row_indexes(self, start: int, stop: int, on_poll: Callable[[], None] | None = None) -> Selection:
        """Wait until the rows at positions ``start`` to ``stop`` are loaded, and return their indexes in `data`.

        ``start`` is the start of a unit.  ``stop`` may lie within a unit, whose further rows are then not returned.
        """
        selections = []
        for unit in range(self.find_unit(start), self.find_unit(stop)):
            position = self.plan.position + (unit - self._first_unit) * self.layout.unit_rows
            self._ring.wait_until_filled(unit, (self.plan.epoch, position), on_poll)
            selections.append(self._ring.take_readable_rows(unit, min(self.layout.unit_rows, stop - position)))
        return (
            selections[0]
            if len(selections) == 1
            else np.concatenate([np.asarray(rows, np.int64) for rows in selections])
        )

    def free(self, start: int, stop: int) -> None:
        """Allow the loader processes to overwrite the rows at positions ``start`` to ``stop``."""
        for unit in range(self.find_unit(start), self.find_unit(stop)):
            self._ring.free(unit)

    def record_position(self, position: int) -> None:
        """Record, in the pool's process, that the rows before a position are freed.  The pool continues there.

        If the position is within a unit, the pool restarts there: the next units start at other positions.
        """
        plan = self.plan._replace(position=position)
        if position == self._n_rows:
            self._pool.position = plan.advance_epoch(), self.find_unit(position)
        elif (position - self.plan.position) % self.layout.unit_rows == 0:
            self._pool.position = plan, self.find_unit(position)


def set_row_dtypes(loader: Loader, variables: Sequence[Variable]) -> None:
    """Set the dtypes of a loader's rows to those of variables, if casts are safe.  End loader processes of others."""
    sample = loader._sample
    if len(variables) != len(sample):
        raise ValueError(f"vars: expected {len(sample)} variables, one per array of a row, got {len(variables)}")
    dtypes = []
    for i, (variable, array) in enumerate(zip(variables, sample, strict=True)):
        get_library(variable)
        variable_type = variable.type
        if variable_type.ndim != array.ndim + 1:
            raise ValueError(
                f"vars: expected {array.ndim + 1} dimensions for array {i}, whose rows have shape {array.shape}, got "
                f"{variable} of {variable_type.ndim}"
            )
        check_cast(array, variable_type.dtype, f"vars: array {i} of a row, for {describe(variable)}")
        dtypes.append(np.dtype(variable_type.dtype))
    if dtypes != loader._dtypes:
        loader.close()
    loader._dtypes = dtypes


def open_rows(loader: Loader, epoch: int, position: int, unit_rows: int, seed: int, n_consumers: int) -> LoaderRows:
    """Open an epoch's rows from a position on.  Start the loader's pool, or its plan, if necessary."""
    plan = ReadPlan(epoch, position, seed)
    layout = RingLayout(n_consumers, loader.processes, loader.depth * n_consumers, unit_rows)
    pool, unit = loader._prepare_pool(plan, layout, True)
    pool.position = None  # until `LoaderRows.record_position` is called
    return LoaderRows(pool, unit, plan, len(loader))


class _LoaderPool:
    """Loader processes and the memory of their ring, in the process that owns them.

    If ``in_session``, the ring's arrays are Data, which all ranks map; else this process and the loader processes map
    them.
    """

    def __init__(self, config: LoaderConfig, in_session: bool):
        self.layout, self.skips_unreadable = config.layout, config.skips_unreadable
        self.data: list[Any] = []
        self.pids: list[int] = []
        #: Plan and number of the unit with which the pool continues; a new tuple after each batch.
        self.position: tuple[ReadPlan, int] | None = None
        self._owner = os.getpid()
        self._session = ranks.get_session() if in_session else None
        layout = config.layout
        shapes = [((layout.n_slots * layout.unit_rows, *shape), np.dtype(dtype)) for shape, dtype in config.array_specs]
        files = []
        nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)
        try:
            check_free_memory(nbytes)
            for shape, dtype in [((layout.dtype.itemsize,), np.dtype(np.uint8)), *shapes]:
                array, file = _allocate_array(shape, dtype, in_session)
                self.data.append(array)
                files.append(file)
            self.ring_memory = self.data.pop(0)
            packed_config = pack_config(config)
        except MemoryError as error:
            error.add_note(
                f"The loader needs shared memory for {layout.n_slots} batches of {layout.unit_rows} rows, {nbytes:,} "
                "bytes: use a smaller depth or batch, or a smaller dtype such as uint8. Arrays of the source are "
                "copied to shared memory, too: loading.npy() reads them from their files."
            )
            raise
        self.ring = Ring(layout, np.asarray(self.ring_memory), 0, self.pids, is_initialized=False)
        self._owner_socket, process_socket = socket.socketpair()
        _reap_abandoned()
        _pools.append((weakref.ref(self), self._owner, self.pids))
        try:
            with defer_signals():
                for number in range(layout.n_loaders):
                    self.pids.append(start_loader_process(number, layout, packed_config, files, process_socket))
            if self._session is not None:
                self._session.close_callbacks[self] = _LoaderPool.close
                self._session.replacement_callbacks[self] = _LoaderPool.end_if_memory_moved
        except BaseException:
            self.close()
            raise
        finally:
            process_socket.close()
            for file in [*files, packed_config[0]]:
                file.close()

    def can_serve(self, layout: RingLayout, in_session: bool) -> bool:
        """Whether the pool is open, belongs to this process, and has a ring of this layout."""
        is_open = bool(self.pids) and self._owner == os.getpid()
        return is_open and self.layout == layout and (self._session is not None) == in_session

    def start_plan(self, plan: ReadPlan) -> None:
        """Start a plan, once all ranks have finished reading rows of the previous plan."""
        if self._session is not None:
            with self._session.call_lock:
                self._session.wait_until_idle()
        self.ring.start_plan(plan)

    def end_if_memory_moved(self) -> None:
        """End the loader processes after a replacement of workers by new processes, whose memory is another."""
        if self._session is not None and not self._session.has_forked_workers:
            _kill_loaders(self.pids)

    def close(self) -> None:
        """End the loader processes and free their memory."""
        if self._owner != os.getpid():
            return  # this process is a fork of the owner
        _kill_loaders(self.pids)
        self._owner_socket.close()
        for data in self.data:
            if isinstance(data, Data):
                data.free_memory()


def _kill_loaders(pids: list[int]) -> None:
    """Kill loader processes and wait for them; they have nothing to clean up."""
    while pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[0], signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pids[0], 0)
        del pids[0]


def _reap_abandoned() -> None:
    """Wait for the processes of garbage-collected pools, which exit.  A finalizer would swallow an interrupt."""
    for pool_entry in list(_pools):
        pool, owner, pids = pool_entry
        if pool() is None:
            if owner == os.getpid():
                _kill_loaders(pids)
            _pools.remove(pool_entry)


def _allocate_array(shape: tuple[int, ...], dtype: np.dtype, in_session: bool) -> tuple[Any, Any]:
    """Allocate memory that loader processes can map.  Return an array, or in a session Data, and the memory's file."""
    if in_session:
        return create_data_with_file(shape, dtype)
    nbytes = max(1, math.prod(shape) * dtype.itemsize)
    file = create_unlinked_file(nbytes)
    return Segment(0, file.fileno(), nbytes).view_array(shape, dtype), file
