"""A loader process: reads its share of the rows in the order of the ring's plan.

The process is started anew rather than forked, so it inherits no threads, locks or GPUs.  It shares with its owner the
ring's memory, the memory of a pickled `LoaderConfig`, and a pair of sockets.  Nothing is sent through the sockets.
They report when the owner closes its end, or dies.
"""

from __future__ import annotations

import io
import itertools
import json
import logging
import os
import pickle
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import cloudpickle
import numpy as np

from synkhronos.casts import as_numbers, check_cast
from synkhronos.data_objects.rows import get_share_slice
from synkhronos.loading.augment import augment_row
from synkhronos.loading.ring import READ, SKIPPED, ReadPlan, Ring, RingLayout, iterate_units, order_rows
from synkhronos.loading.sources import ArraySource, IterableSource, describe_row
from synkhronos.ranks.child_process import JOB_SIGNALS, exit_with_parent, spawn
from synkhronos.ranks.pickle_buffers import measure_buffers, read_buffers, write_buffers
from synkhronos.ranks.segments import create_unlinked_file, map_file
from synkhronos.ranks.thread_limit import ONE_THREAD

_log = logging.getLogger("synkhronos")

#: Seconds between two checks of a waiting loader process that its owner lives.
_OWNER_POLL_SECONDS = 0.5


@dataclass
class LoaderConfig:
    """Configuration of a loader's processes.  ``array_specs`` are shape and dtype string of each array of a row."""

    source: Any
    augment: Any
    shuffle: bool
    skips_unreadable: bool
    layout: RingLayout
    array_specs: list[tuple[tuple[int, ...], str]]


def pack_config(config: LoaderConfig) -> tuple[io.FileIO, int]:
    """Pickle a configuration into shared memory, which all processes map.  Return the memory's file and size."""
    buffers: list[pickle.PickleBuffer] = []
    try:
        head = cloudpickle.dumps(config, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"source, augment: can't be pickled, as loader processes require: {error}") from error
    parts = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    nbytes = measure_buffers(parts)
    file = create_unlinked_file(nbytes)
    write_buffers(parts, memoryview(map_file(file.fileno(), nbytes)))
    return file, nbytes


def start_loader_process(
    number: int,
    layout: RingLayout,
    packed_config: tuple[io.FileIO, int],
    ring_files: Sequence[io.FileIO],
    process_socket: socket.socket,
) -> int:
    """Start loader process ``number``, and return its process id.  ``ring_files`` are of the ring and its arrays."""
    config_file, config_nbytes = packed_config
    fds = [config_file.fileno(), process_socket.fileno(), *(file.fileno() for file in ring_files)]
    from_main_thread = threading.current_thread() is threading.main_thread()
    arguments = [number, list(layout), config_nbytes, fds, os.getpid(), from_main_thread]
    # One thread per process, since the user chooses the number of processes.  No GPU, even if the source imports CUDA.
    environment = {**os.environ, **ONE_THREAD, "CUDA_VISIBLE_DEVICES": ""}
    return spawn("synkhronos.loading.loader_process", "main", arguments, fds, from_main_thread, environment)


def main() -> NoReturn:
    """Run the loader process that `start_loader_process` has started."""
    number, layout, config_nbytes, fds, owner, from_main_thread = json.loads(sys.argv[2])
    # These signals reach all processes of a terminal or a job.  The owner handles them, and this process exits with it.
    for signum in (signal.SIGINT, *JOB_SIGNALS):
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, *JOB_SIGNALS})
    exit_with_parent(owner, from_main_thread)
    layout = RingLayout(*layout)
    config_fd, socket_fd, ring_fd, *array_fds = fds
    memory = np.frombuffer(map_file(ring_fd, layout.dtype.itemsize), np.uint8)
    ring = Ring(layout, memory, layout.n_consumers + number, [])
    try:
        head, *buffers = read_buffers(memoryview(map_file(config_fd, config_nbytes)).toreadonly())
        config: LoaderConfig = pickle.loads(head, buffers=buffers)
        arrays = [_map_slots(fd, layout, *spec) for fd, spec in zip(array_fds, config.array_specs, strict=True)]
        _LoaderProcess(number, config, ring, arrays, socket_fd).run()
    except BaseException as error:
        text = f"loader {number} could not start: {type(error).__name__}: {error}"
        ring.report_failure(number, f"{text}\n\nIts traceback:\n{traceback.format_exc()}")
    os._exit(1)


def _map_slots(fd: int, layout: RingLayout, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Map one array of the ring, of shape ``(slots * unit_rows, *shape)``."""
    ring_shape = (layout.n_slots * layout.unit_rows, *shape)
    nbytes = int(np.prod(ring_shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return np.ndarray(ring_shape, dtype, map_file(fd, max(1, nbytes)))


class _LoaderProcess:
    """Producer of a ring: writes its share of each unit."""

    def __init__(self, number: int, config: LoaderConfig, ring: Ring, arrays: list[np.ndarray], socket_fd: int):
        self.number, self.config, self.ring, self.arrays = number, config, ring, arrays
        self._owner_poll = select.poll()
        self._owner_poll.register(socket_fd, 0)
        self._reported_rows: set[int] = set()
        self.plan_number = 0

    def run(self) -> NoReturn:
        """Fill units by one plan after another, until the owner exits."""
        ring = self.ring
        while True:
            ring.wait_until(self._is_replaced, self._exit_if_owner_closed, _OWNER_POLL_SECONDS)
            self.plan_number = ring.plan_number
            plan = ring.plan
            # If the number has changed since, the words read may be of two plans.
            if ring.plan_number == self.plan_number:
                self._fill_units(plan)

    def _exit_if_owner_closed(self) -> None:
        """Exit if the owner has closed its end of the pair of sockets."""
        if self._owner_poll.poll(0):
            os._exit(0)

    def _fill_units(self, plan: ReadPlan) -> None:
        """Fill units of a plan until the plan is replaced, or a row can't be read."""
        ring, slots, unit_rows = self.ring, self.ring.layout.n_slots, self.ring.layout.unit_rows
        for unit, (epoch, rows) in enumerate(self._iterate_unit_rows(plan)):
            ring.wait_until(
                lambda: ring.is_free(unit, self.plan_number) or self._is_replaced(),  # noqa: B023
                self._exit_if_owner_closed,
                _OWNER_POLL_SECONDS,
            )
            slot = unit % slots
            if self._is_replaced():
                return
            try:
                self._write_share(slot * unit_rows, ring.row_status[slot], rows, epoch, plan.seed)
            except _UnreadableRowError as error:
                ring.report_failure(self.number, str(error), unit, self.plan_number)
                return
            if self._is_replaced():
                return
            ring.unit_lengths[slot] = len(rows)
            ring.mark_filled(self.number, unit, self.plan_number)

    def _is_replaced(self) -> bool:
        """Whether a new plan has started."""
        return self.ring.plan_number != self.plan_number

    # -- order of rows ---------------------------------------------------------------------------------------

    def _iterate_unit_rows(self, plan: ReadPlan) -> Iterator[tuple[int, Any]]:
        """Yield the epoch and the rows of each unit: row numbers, or for an iterable ``(number, row or error)``."""
        config, unit_rows = self.config, self.ring.layout.unit_rows
        if isinstance(config.source, IterableSource):
            yield from self._iterate_stream_units(plan)  # endless
        count, current_epoch = len(config.source), -1
        for epoch, start, length in iterate_units(plan, count, unit_rows):
            if epoch != current_epoch:
                order, current_epoch = order_rows(count, plan.seed, epoch, config.shuffle), epoch
            yield epoch, order[start : start + length]

    def _iterate_stream_units(self, plan: ReadPlan) -> Iterator[tuple[int, Any]]:
        """Yield the units of an iterable.  The last unit of an epoch is shorter than the others, or empty."""
        unit_rows = self.ring.layout.unit_rows
        while True:
            # Errors are neither skipped nor dropped with the last rows, so that they are reported.
            first_row = plan.position
            numbered_rows = (
                pair for pair in enumerate(self._read_stream()) if pair[0] >= first_row or _is_failure(pair)
            )
            is_epoch_over = False
            while not is_epoch_over:
                unit: list[Any] = []
                for unit_rank in range(plan.n_ranks):
                    batch = list(itertools.islice(numbered_rows, unit_rows))
                    unit = batch if unit_rank == plan.rank else unit
                    if len(batch) < unit_rows:
                        break
                is_epoch_over = len(batch) < unit_rows
                if is_epoch_over and plan.drop_last:
                    unit = list(filter(_is_failure, unit))
                yield plan.epoch, unit
                if is_epoch_over and len(unit) == unit_rows:
                    yield plan.epoch, []
            plan = plan.advance_epoch()

    def _read_stream(self) -> Iterator[Any]:
        """Yield an iterable's rows.  If it raises an exception, yield a `_StreamFailure` last."""
        try:
            yield from self.config.source
        except Exception as error:
            yield _StreamFailure(error)

    # -- values of rows --------------------------------------------------------------------------------------

    def _write_share(self, start: int, row_status: np.ndarray, rows: Any, epoch: int, seed: int) -> None:
        """Write this process's share of the unit that begins at row ``start`` of the ring's arrays."""
        layout, config = self.ring.layout, self.config
        share = get_share_slice(layout.unit_rows, layout.n_loaders, self.number)
        share = slice(min(share.start, len(rows)), min(share.stop, len(rows)))
        if config.augment is None and isinstance(config.source, ArraySource):
            values = config.source.read_rows(rows[share])
            if values is not None and self._can_hold(values):
                for array, value in zip(self.arrays, values, strict=True):
                    array[start + share.start : start + share.stop] = value
                row_status[share] = READ
                return
        for i in range(share.start, share.stop):
            if self._is_replaced():
                return
            is_stream = isinstance(config.source, IterableSource)
            number, row = rows[i] if is_stream else (int(rows[i]), None)
            try:
                if isinstance(row, _StreamFailure):
                    raise row.error
                self._write_row(start + i, number, row if is_stream else config.source[number], epoch, seed)
                row_status[i] = READ
            except Exception as error:
                row_status[i] = SKIPPED
                self._skip_or_raise(error, number, epoch, isinstance(row, _StreamFailure))

    def _can_hold(self, values: list[np.ndarray]) -> bool:
        """Whether the ring's dtypes can hold all values.  If not, `_write_row` finds the row that does not fit."""
        try:
            for array, value in zip(self.arrays, values, strict=True):
                check_cast(value, array.dtype, "")
        except TypeError:
            return False
        return True

    def _write_row(self, index: int, number: int, row: Any, epoch: int, seed: int) -> None:
        """Augment a row and write it to index ``index``."""
        values = augment_row(row, self.config.augment, seed, epoch, number)
        if len(values) != len(self.arrays):
            raise ValueError(f"expected {len(self.arrays)} arrays, as in the first row, got {len(values)}")
        for i, (array, value) in enumerate(zip(self.arrays, values, strict=True)):
            if type(value) is not np.ndarray or value.dtype != array.dtype:
                value = as_numbers(value, f"array {i}")
                check_cast(value, array.dtype, f"array {i}")
            if value.shape != array.shape[1:]:
                raise ValueError(f"array {i}: expected shape {array.shape[1:]}, as in the first row, got {value.shape}")
            array[index] = value

    def _skip_or_raise(self, error: Exception, number: int, epoch: int, has_stream_failed: bool) -> None:
        """Log a skipped row, or raise `_UnreadableRowError`.  An iterable that has raised can't be continued."""
        try:
            name = describe_row(self.config.source, number)
        except Exception:
            name = f"row {number}"
        reason = f"{type(error).__name__}: {error}"
        if not self.config.skips_unreadable or has_stream_failed:
            lines = "".join(traceback.format_exception(error))
            raise _UnreadableRowError(
                f"{name} can't be read (row {number}, epoch {epoch}): {reason}. Repair it and continue after the last "
                "batch, or call a trainer's epochs() again, or skip such rows with on_error='skip'"
                f"\n\nThe traceback of loader {self.number}:\n{lines}"
            )
        if number not in self._reported_rows:
            self._reported_rows.add(number)
            _log.warning("%s is skipped, as it can't be read: %s", name, reason)


class _UnreadableRowError(Exception):
    """A row can't be read, and is not skipped."""


class _StreamFailure:
    """Exception that an iterable has raised, in place of its next row."""

    def __init__(self, error: Exception):
        self.error = error


def _is_failure(numbered_row: tuple[int, Any]) -> bool:
    return isinstance(numbered_row[1], _StreamFailure)
