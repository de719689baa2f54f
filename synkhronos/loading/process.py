"""What a loader process does.

`start`
    Starts one, from the process that has it.
`main`
    Is one: reads rows, as the ring's plan says, until its owner ends.
`Task`
    What it is told once.
`packed`
    A task as memory that all loaders see.

It is no copy of the process that starts it, so that it has none of its threads, locks and GPUs.  It shares three things
with it: the ring's memory, the memory of the task, and a pair of sockets, through which nothing passes: when the owner
lets go of its end, or dies, the other end says so.
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
import struct
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import cloudpickle
import numpy as np

from synkhronos.casts import as_numbers, check_cast
from synkhronos.data.rows import get_share
from synkhronos.loading.augment import generator
from synkhronos.loading.ring import SKIPPED, THERE, Layout, Plan, Ring, order_of, units_of
from synkhronos.loading.sources import Arrays, Stream, row_name
from synkhronos.ranks.segments import create_unlinked, map_file
from synkhronos.ranks.threads import ONE_THREAD
from synkhronos.ranks.worker import SENT_TO_ALL, end_with, spawn

_log = logging.getLogger("synkhronos")

#: Seconds between two looks of an idle loader at its owner.
_LOOK = 0.5
#: Where arrays begin in a task's memory: at multiples of so many bytes.
_ALIGNED = 64


@dataclass
class Task:
    """What a loader is told once."""

    #: What `source_of` returns.
    source: Any
    augment: Any
    shuffle: bool
    #: Whether rows that can't be read are left out.
    skip: bool
    layout: Layout
    #: Shape and dtype of each array of a row.
    fields: list[tuple[tuple[int, ...], str]]


def packed(task: Task) -> tuple[io.FileIO, int]:
    """Return memory with a task in it, as an open file, and its size; TypeError if it can't be pickled.

    Arrays are there once, and all loaders see them.
    """
    buffers: list[pickle.PickleBuffer] = []
    try:
        head = cloudpickle.dumps(task, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"source, augment: the loaders need a copy of them, which can't be pickled: {error}") from error
    parts = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    index = struct.pack(f"={1 + len(parts)}Q", len(parts), *(len(part) for part in parts))
    places, at = [], len(index)
    for part in parts:
        at = -(-at // _ALIGNED) * _ALIGNED
        places.append(at)
        at += len(part)
    file = create_unlinked(at)
    memory = memoryview(map_file(file.fileno(), at)).cast("B")
    memory[: len(index)] = index
    for part, place in zip(parts, places, strict=True):
        memory[place : place + len(part)] = part
    return file, at


def _unpacked(file: int, nbytes: int) -> Task:
    memory = memoryview(map_file(file, nbytes)).cast("B")
    (n,) = struct.unpack_from("=Q", memory)
    lengths = struct.unpack_from(f"={n}Q", memory, 8)
    parts, at = [], 8 * (1 + n)
    for length in lengths:
        at = -(-at // _ALIGNED) * _ALIGNED
        parts.append(memory[at : at + length].toreadonly())
        at += length
    task: Task = pickle.loads(parts[0], buffers=parts[1:])
    return task


def start(
    number: int, layout: Layout, task: tuple[io.FileIO, int], memory: Sequence[io.FileIO], end: socket.socket
) -> int:
    """Start a loader, and return its process.

    ``task`` is what `packed` returns, ``memory`` the ring's words and its arrays, and ``end`` the other end of a pair.
    """
    files = [task[0].fileno(), end.fileno(), *(file.fileno() for file in memory)]
    in_main_thread = threading.current_thread() is threading.main_thread()
    settings = [number, list(layout), task[1], files, os.getpid(), in_main_thread]
    # One thread each: there are as many loaders as were asked for.  And no GPU, whatever a source imports.
    environment = {**os.environ, **ONE_THREAD, "CUDA_VISIBLE_DEVICES": ""}
    return spawn("synkhronos.loading.process", "main", settings, files, in_main_thread, environment)


def main() -> NoReturn:
    """Be the loader that `start` has started."""
    number, layout, nbytes, files, owner, in_main_thread = json.loads(sys.argv[2])
    # These go to every process of a terminal or a job: the owner says what they mean, and a loader ends with it.
    for sent in (signal.SIGINT, *SENT_TO_ALL):
        signal.signal(sent, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, *SENT_TO_ALL})
    end_with(owner, in_main_thread)
    layout = Layout(*layout)
    task_file, end, words, *arrays = files
    memory = np.frombuffer(map_file(words, layout.nbytes), np.uint8)
    ring = Ring(layout, memory, layout.takers + number, [])
    try:
        task = _unpacked(task_file, nbytes)
        slots = [_mapped(file, layout, *field) for file, field in zip(arrays, task.fields, strict=True)]
        _Loader(number, task, ring, slots, end).serve()
    except BaseException as error:
        text = f"loader {number} could not begin: {type(error).__name__}: {error}"
        ring.fail(number, f"{text}\n\nIts traceback:\n{traceback.format_exc()}")
    os._exit(1)


def _mapped(file: int, layout: Layout, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    shape_of_all = (layout.slots * layout.unit, *shape)
    nbytes = int(np.prod(shape_of_all, dtype=np.int64)) * np.dtype(dtype).itemsize
    return np.ndarray(shape_of_all, dtype, map_file(file, max(1, nbytes)))


class _Loader:
    """One loader: its share of each unit."""

    def __init__(self, number: int, task: Task, ring: Ring, arrays: list[np.ndarray], end: int):
        self.number, self.task, self.ring, self.arrays = number, task, ring, arrays
        self._owner = select.poll()
        self._owner.register(end, 0)
        self._told: set[int] = set()
        self.generation = 0

    def serve(self) -> NoReturn:
        """Follow plans, for ever."""
        ring = self.ring
        while True:
            ring.sleep(lambda: ring.generation != self.generation, self._look, _LOOK)
            self.generation = ring.generation
            plan = ring.plan
            if ring.generation == self.generation:
                self._follow(plan)

    def _look(self) -> None:
        """End if the owner has let go of its end of the pair of sockets."""
        if self._owner.poll(0):
            os._exit(0)

    def _follow(self, plan: Plan) -> None:
        """Fill units until there is another plan, or a row can't be read."""
        ring, slots, length = self.ring, self.ring.layout.slots, self.ring.layout.unit
        for number, (epoch, rows) in enumerate(self._units(plan)):
            ring.sleep(lambda: ring.is_free(number, self.generation) or self._is_over(), self._look, _LOOK)  # noqa: B023
            slot = number % slots
            if self._is_over():
                return
            try:
                self._write(slot * length, ring.there[slot], rows, epoch, plan.seed)
            except _Unreadable as error:
                ring.fail(self.number, str(error), number, self.generation)
                return
            if self._is_over():
                return
            ring.lengths[slot] = len(rows)
            ring.fill(self.number, number, self.generation)

    def _is_over(self) -> bool:
        return self.ring.generation != self.generation

    # -- which rows ------------------------------------------------------------------------------------------

    def _units(self, plan: Plan) -> Iterator[tuple[int, Any]]:
        """Yield the epoch and the rows of each unit: their numbers, or of a stream (number, row) or (number, error)."""
        task, unit = self.task, self.ring.layout.unit
        if isinstance(task.source, Stream):
            yield from self._stream(plan)  # for ever
        count, known = len(task.source), -1
        for epoch, start, length in units_of(plan, count, unit):
            if epoch != known:
                order, known = order_of(count, plan.seed, epoch, task.shuffle), epoch
            yield epoch, order[start : start + length]

    def _stream(self, plan: Plan) -> Iterator[tuple[int, Any]]:
        """Yield the units of a stream: the one in which it ends is shorter than the others, or empty."""
        unit = self.ring.layout.unit
        while True:
            # An error is not passed over, nor left out with the last rows: nobody would hear of it.
            passed = plan.row
            numbered = (each for each in enumerate(self._read_on()) if each[0] >= passed or _is_error(each))
            ended = False
            while not ended:
                mine: list[Any] = []
                for turn in range(plan.size):
                    batch = list(itertools.islice(numbered, unit))
                    mine = batch if turn == plan.rank else mine
                    if len(batch) < unit:
                        break
                ended = len(batch) < unit
                if ended and plan.whole:
                    mine = list(filter(_is_error, mine))
                yield plan.epoch, mine
                if ended and len(mine) == unit:
                    yield plan.epoch, []
            plan = plan.next()

    def _read_on(self) -> Iterator[Any]:
        """Yield a stream's rows; an error in the place of what it raises, behind which there are no rows."""
        try:
            yield from self.task.source
        except Exception as error:
            yield _Raised(error)

    # -- what is in them -------------------------------------------------------------------------------------

    def _write(self, at: int, there: np.ndarray, rows: Any, epoch: int, seed: int) -> None:
        """Write this loader's share of a unit."""
        mine = get_share(len(rows), self.ring.layout.loaders, self.number)
        task = self.task
        if task.augment is None and isinstance(task.source, Arrays):
            taken = task.source.take(rows[mine])
            if taken is not None and self._can_hold(taken):
                for array, values in zip(self.arrays, taken, strict=True):
                    array[at + mine.start : at + mine.stop] = values
                there[mine] = THERE
                return
        for i in range(mine.start, mine.stop):
            if self._is_over():
                return
            number, row = rows[i] if isinstance(task.source, Stream) else (int(rows[i]), None)
            try:
                self._put(at + i, number, row, epoch, seed)
                there[i] = THERE
            except Exception as error:
                there[i] = SKIPPED
                self._complain(error, number, epoch, isinstance(row, _Raised))

    def _can_hold(self, taken: list[np.ndarray]) -> bool:
        """Return whether the ring's dtypes hold all rows; if not, to write them one by one tells which is wrong."""
        try:
            for array, values in zip(self.arrays, taken, strict=True):
                check_cast(values, array.dtype, "")
        except TypeError:
            return False
        return True

    def _put(self, at: int, number: int, row: Any, epoch: int, seed: int) -> None:
        if isinstance(row, _Raised):
            raise row.error
        values = self.task.source[number] if row is None else row
        put = values if isinstance(values, tuple | list) else (values,)
        if self.task.augment is not None:
            put = self.task.augment(tuple(put), generator(seed, epoch, number))
        if len(put) != len(self.arrays):
            raise ValueError(f"expected {len(self.arrays)} arrays, as in the first row, got {len(put)}")
        for i, (array, value) in enumerate(zip(self.arrays, put, strict=True)):
            if type(value) is not np.ndarray or value.dtype != array.dtype:
                value = as_numbers(value, f"array {i}")
                check_cast(value, array.dtype, f"array {i}")
            if value.shape != array.shape[1:]:
                raise ValueError(f"array {i}: expected shape {array.shape[1:]}, as in the first row, got {value.shape}")
            array[at] = value

    def _complain(self, error: Exception, number: int, epoch: int, raised: bool) -> None:
        """Say that a row can't be read; of an iterable that has ``raised``, all that were to come are lost."""
        try:
            name = row_name(self.task.source, number)
        except Exception:
            name = f"row {number}"
        said = f"{type(error).__name__}: {error}"
        if not self.task.skip or raised:
            lines = "".join(traceback.format_exception(error))
            raise _Unreadable(
                f"{name} can't be read (row {number}, epoch {epoch}): {said}. Mend it and go on where the batches "
                "ended, or have such rows left out, with on_error='skip'"
                f"\n\nThe traceback of loader {self.number}:\n{lines}"
            )
        if number not in self._told:
            self._told.add(number)
            _log.warning("%s is left out, since it can't be read: %s", name, said)


class _Unreadable(Exception):
    """A row that can't be read."""


class _Raised:
    """What a stream has raised."""

    def __init__(self, error: Exception):
        self.error = error


def _is_error(numbered: tuple[int, Any]) -> bool:
    return isinstance(numbered[1], _Raised)
