"""Ring of batches in shared memory, and the synchronization of its producers and consumers.

A *unit* is a block of consecutive rows of an epoch's order, the rows that a consumer takes at once.  Numbers of units
continue from one epoch into the next.  Unit u occupies slot ``u % slots``::

    producers: loader processes, each writes its share      consumers: one process, or each rank
      wait until unit u - slots has been freed  ◀──────────   free(u - slots)
      write rows, and the status of each
      filled[loader] = u + 1                    ──────────▶   wait until all loaders have filled u

Invariant: each word of the ring has one writer, and only grows.  The upper bits of a word are the number of its plan.
A new plan can start at any time, since words of earlier plans no longer match.  Each loader process writes only its own
rows of a slot (the same rows for units of all lengths), one unit after another.  A process that is late with a unit of
an earlier plan thus never overwrites rows that another has written for a later one.

A waiting process sleeps on its own semaphore, and regularly checks that the other processes live.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from synkhronos.devices import Selection
from synkhronos.ranks.control_memory import POLL_SECONDS, Semaphore
from synkhronos.ranks.errors import UNKNOWN_EXIT_CODE, describe_exit, shorten_middle

#: Status of a row that can't be read, one byte.
SKIPPED = 0
#: Status of a row that is read.
READ = 1
#: Number of low bits of a word with the number of the unit; the upper bits have the number of the plan.
_UNIT_BITS = 40
#: Failure word of a loader process that could not start.
_FAILED_AT_START = (1 << 64) - 1
#: End of the message on the death of a loader process; format with the epoch and the row to resume from.
RESUME_HINT = (
    ". No data is lost: the ranks and their parameters are unchanged, and new loader processes continue at row {1} of "
    "epoch {0}, with epoch={0}, start_row={1}, or when a trainer's epochs() is called again"
)
#: Size of a loader process's failure report.
_REPORT_NBYTES = 1 << 14
#: Size of a semaphore with its padding.
_SEMAPHORE_NBYTES = 64


class LoadError(RuntimeError):
    """A row can't be read, or a loader process has died.

    Attributes
    ----------
    epoch, row : int
        Position from which to resume: that of the first row that was not taken.
    """

    def __init__(self, message: str, epoch: int = 0, row: int = 0):
        super().__init__(message)
        self.epoch, self.row = epoch, row

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.epoch, self.row)


class ReadPlan(NamedTuple):
    """Position and order in which loader processes read rows.

    Attributes
    ----------
    epoch, position : int
        First epoch, and position in its order of rows at which to start.
    seed : int
        Seed of the shuffle and of the augmentation.
    rank, n_ranks : int
        Only unit ``rank`` of every ``n_ranks`` successive units is read.
    drop_last : int
        1 to drop the last rows of an epoch if these do not fill ``n_ranks`` units, else 0.
    """

    epoch: int
    position: int
    seed: int
    rank: int = 0
    n_ranks: int = 1
    drop_last: int = 0

    def list_unit_starts(self, count: int, unit_rows: int) -> range:
        """Return the positions at which the units of an epoch of ``count`` rows start."""
        stride = self.n_ranks * unit_rows
        stop = self.position + (count - self.position) // stride * stride if self.drop_last else count
        return range(self.position + self.rank * unit_rows, stop, stride)

    def advance_epoch(self) -> ReadPlan:
        """Return a plan from the start of the next epoch."""
        return self._replace(epoch=self.epoch + 1, position=0)


def order_rows(count: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """Return the row numbers of an epoch in the order in which they are read; an int64 array of length ``count``."""
    return np.random.default_rng((seed, epoch)).permutation(count) if shuffle else np.arange(count)


def iterate_units(plan: ReadPlan, count: int, unit_rows: int) -> Iterator[tuple[int, int, int]]:
    """Yield the epoch, start and length of each unit, endlessly.  Yield nothing if epochs have no unit."""
    while plan.position or plan.list_unit_starts(count, unit_rows):
        for start in plan.list_unit_starts(count, unit_rows):
            yield plan.epoch, start, min(unit_rows, count - start)
        plan = plan.advance_epoch()


class RingLayout(NamedTuple):
    """Dimensions of a ring of ``n_slots`` units, each of ``unit_rows`` rows."""

    n_consumers: int
    n_loaders: int
    n_slots: int
    unit_rows: int

    @property
    def dtype(self) -> np.dtype:
        """Structured dtype of the ring's memory.  Semaphores come first, since they need an aligned address."""
        n_consumers, n_loaders, n_slots, unit_rows = self
        n_processes = n_consumers + n_loaders
        words = {
            "plan_number": 1,
            "plan": len(ReadPlan._fields),
            "filled": n_loaders,
            "failed": n_loaders,
            "sleeping": n_processes,
            "skipped": n_consumers,
            "freed": n_slots,
            "unit_lengths": n_slots,
        }
        fields: list[Any] = [("semaphores", np.uint8, (n_processes, _SEMAPHORE_NBYTES))]
        fields += [(name, np.uint64, (length,)) for name, length in words.items()]
        fields += [("reports", np.uint8, (n_loaders, _REPORT_NBYTES)), ("row_status", np.uint8, (n_slots, unit_rows))]
        return np.dtype(fields)


class Ring:
    """One process's view of a ring in shared memory.

    ``index`` is the number of this process: consumers come first, then loader processes, whose process ids are
    ``pids``.  If ``is_initialized``, another process has initialized the semaphores.

    Attributes
    ----------
    unit_lengths : memoryview
        Number of rows of the unit in each slot.
    row_status : ndarray of uint8, shape (slots, unit_rows)
        `READ` or `SKIPPED` for each row.
    """

    def __init__(
        self, layout: RingLayout, memory: np.ndarray, index: int, pids: list[int], is_initialized: bool = True
    ):
        self.layout, self.index, self.pids = layout, index, pids
        self._fields = fields = memory.view(layout.dtype)
        # Elements of memoryviews are built-in integers.
        self._plan_number, self._plan, self._filled, self._failed = (
            fields[name][0].data for name in ("plan_number", "plan", "filled", "failed")
        )
        self._sleeping, self._skipped, self._freed, self.unit_lengths = (
            fields[name][0].data for name in ("sleeping", "skipped", "freed", "unit_lengths")
        )
        self.row_status = fields["row_status"][0]
        n_consumers, n_processes = layout.n_consumers, layout.n_consumers + layout.n_loaders
        self._semaphores = [Semaphore(row, 0, is_initialized) for row in fields["semaphores"][0]]
        self._fence_lock = threading.Lock()
        self._consumer_indexes = range(n_consumers)
        self._loader_indexes = range(n_consumers, n_processes)

    # -- all processes ---------------------------------------------------------------------------------------

    @property
    def plan_number(self) -> int:
        """Number of the current plan."""
        return self._plan_number[0]

    @property
    def plan(self) -> ReadPlan:
        """The current plan."""
        return ReadPlan(*self._plan)

    def wait_until(
        self, is_ready: Callable[[], bool], on_poll: Callable[[], None], poll_seconds: float = POLL_SECONDS
    ) -> None:
        """Wait until ``is_ready()`` is true.  About every ``poll_seconds``, call ``on_poll``, which may raise."""
        next_poll = time.perf_counter() + poll_seconds
        try:
            while True:
                self._sleeping[self.index] = 1
                self._fence()
                if is_ready():
                    return
                if not self._semaphores[self.index].wait_for_wakeup(poll_seconds) or time.perf_counter() > next_poll:
                    on_poll()
                    next_poll = time.perf_counter() + poll_seconds
        finally:
            self._sleeping[self.index] = 0

    def _wake(self, processes: range) -> None:
        self._fence()
        for i in processes:
            if self._sleeping[i]:
                self._semaphores[i].release()

    def _fence(self) -> None:
        """Order this process's writes before its next reads: see `ControlMemory.fence`."""
        with self._fence_lock:
            pass

    # -- owner of the loader processes -----------------------------------------------------------------------

    def start_plan(self, plan: ReadPlan) -> None:
        """Start a plan.  No consumer may hold a unit of the previous one."""
        for i, value in enumerate(plan):
            self._plan[i] = value
        self._fence()
        self._plan_number[0] += 1
        self._wake(self._loader_indexes)

    @property
    def n_skipped(self) -> int:
        """Number of rows that the loader skipped, in the units that consumers have taken since the ring was made."""
        return sum(self._skipped)

    # -- consumers -------------------------------------------------------------------------------------------

    def is_filled(self, unit: int) -> bool:
        """Whether all loader processes have filled a unit."""
        return min(self._filled) >= self._make_tag(unit + 1)

    def wait_until_filled(
        self, unit: int, position: tuple[int, int], on_poll: Callable[[], None] | None = None
    ) -> None:
        """Wait until a unit is filled.  If that is impossible, LoadError has ``position``, its epoch and row."""

        def check_and_poll() -> None:
            self._raise_failure(unit, position)
            if on_poll is not None:
                on_poll()

        if not self.is_filled(unit):
            self.wait_until(lambda: self.is_filled(unit) or bool(self._find_failed_loaders(unit)), check_and_poll)
            if not self.is_filled(unit):
                self._raise_failure(unit, position)

    def _find_failed_loaders(self, unit: int) -> list[int]:
        """Return the numbers of the loader processes that can't fill a unit."""
        first_tag, last_tag = self._make_tag(0), self._make_tag(unit + 1)
        return [i for i, tag in enumerate(self._failed) if tag == _FAILED_AT_START or first_tag <= tag <= last_tag]

    def _raise_failure(self, unit: int, position: tuple[int, int]) -> None:
        for loader in self._find_failed_loaders(unit):
            raise LoadError(self._read_report(loader), *position)
        death = self.describe_death()
        if death and not self.is_filled(unit):
            raise LoadError(f"{death}{RESUME_HINT.format(*position)}", *position)

    def describe_death(self) -> str:
        """Describe the death of a loader process.  Return "" if all live."""
        for loader, pid in enumerate(self.pids):
            if has_exited(pid):
                return f"loader {loader} (process {pid}) {_describe_exit(pid)}"
        return ""

    def take_readable_rows(self, unit: int, length: int) -> Selection:
        """Return the indexes, in the ring's arrays, of the readable rows among the first ``length`` rows of a unit.

        The other rows are added to `n_skipped`.
        """
        slot = unit % self.layout.n_slots
        start = slot * self.layout.unit_rows
        status = self.row_status[slot, :length]
        if status.all():
            return range(start, start + length)
        self._skipped[self.index] += length - int(np.count_nonzero(status))
        return start + np.flatnonzero(status)

    def free(self, unit: int) -> None:
        """Allow the loader processes to overwrite a unit."""
        self._freed[unit % self.layout.n_slots] = self._make_tag(unit + 1)
        self._wake(self._loader_indexes)

    def _make_tag(self, unit: int) -> int:
        """Return a word: the current plan's number in its upper bits, and the number of a unit in its lower bits."""
        return self._plan_number[0] << _UNIT_BITS | unit

    def _read_report(self, loader: int) -> str:
        text = bytes(self._fields["reports"][0, loader]).split(b"\0", 1)[0].decode(errors="replace")
        return str(json.loads(text))

    # -- loader processes ------------------------------------------------------------------------------------

    def is_free(self, unit: int, plan_number: int) -> bool:
        """Whether a loader process may write to the slot of a unit."""
        previous = unit - self.layout.n_slots
        return previous < 0 or self._freed[unit % self.layout.n_slots] == plan_number << _UNIT_BITS | previous + 1

    def mark_filled(self, loader: int, unit: int, plan_number: int) -> None:
        """Signal that a loader process has written its share of a unit."""
        self._fence()
        self._filled[loader] = plan_number << _UNIT_BITS | unit + 1
        self._wake(self._consumer_indexes)

    def report_failure(self, loader: int, message: str, unit: int = 0, plan_number: int = -1) -> None:
        """Signal that a loader process can't write its share of a unit, or, without a plan, of any unit."""
        # JSON takes up to six bytes for a character.
        text = json.dumps(shorten_middle(message, _REPORT_NBYTES // 6 - 16), ensure_ascii=False)
        report = text.encode(errors="backslashreplace").ljust(_REPORT_NBYTES, b"\0")
        self._fields["reports"][0, loader] = np.frombuffer(report, np.uint8)
        self._fence()
        self._failed[loader] = _FAILED_AT_START if plan_number < 0 else plan_number << _UNIT_BITS | unit + 1
        self._wake(self._consumer_indexes)


def has_exited(pid: int) -> bool:
    """Whether a process has exited.  Unlike with `os.waitid`, it need not be a child of this process."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            state = stat.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"  # a zombie: its parent has not waited for it


def _describe_exit(pid: int) -> str:
    """Describe the exit of a process, as far as the kernel tells this process."""
    try:
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # WNOWAIT: the pid is not reused
    except ChildProcessError:  # a child of another rank
        return "has ended"
    if result is None:
        return describe_exit(UNKNOWN_EXIT_CODE)
    return describe_exit(result.si_status if result.si_code == os.CLD_EXITED else -result.si_status)
