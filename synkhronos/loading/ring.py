"""How loaders and those who take their batches keep in step.

`Ring`
    Memory for a few units of rows, and the words that say which are filled and which are free.
`Layout`
    How long its parts are.
`Plan`
    Which rows are to be read, in which order.
`LoadError`
    A row can't be read, or a loader has died.

A *unit* is the rows that are handed out at once.  Units are numbered in the order in which they are handed out, from
one epoch into the next.  Unit u lies in slot u modulo the number of slots::

    loaders, each its share of the rows                     who takes them: one process, or each rank
      wait until unit u - slots has been freed  ◀──────────   free(u - slots)
      write rows, and which of them are there
      filled[loader] = u + 1                    ──────────▶   wait until all loaders have filled u

Each word has one writer, and all of them grow: with a new plan begins a new *generation*, which is the upper part of
each word.  So loaders can be sent to another place at any time.  What they wrote for the generation before counts no
more, and as each writes its own share, one unit after the other, none writes into what another generation has.

Whoever waits sleeps on a semaphore of its own, and looks from time to time whether the others live.
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
from synkhronos.ranks.control import POLL, Bell
from synkhronos.ranks.errors import UNKNOWN, cause_of_death, shorten

#: What a byte says of a row: it has been left out, because it can't be read, or it is there.
SKIPPED, THERE = 0, 1
#: Bits of a word for the unit, below those of the generation.
_UNITS = 40
#: What a loader says that can't begin at all.
_NEVER = (1 << 64) - 1
#: What is said of a loader's death beside its cause.
NOTHING_LOST = (
    ". Nothing is lost: the ranks and what they have learnt are as they were, and new loaders go on from epoch={}, "
    "row={}"
)
#: Bytes in which a loader says what went wrong, and those of a semaphore.
_REPORT, _BELL = 1 << 14, 64


class LoadError(RuntimeError):
    """A row can't be read, or a loader has died.

    Attributes
    ----------
    epoch, row : int
        Where to go on: the place of the first row that you have not got.
    """

    def __init__(self, message: str, epoch: int = 0, row: int = 0):
        super().__init__(message)
        self.epoch, self.row = epoch, row

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.epoch, self.row)


class Plan(NamedTuple):
    """Which rows are to be read, in which order."""

    #: The place in this epoch's order of rows at which to begin.
    epoch: int
    row: int
    seed: int
    #: Which units are read: of each ``size`` in turn that of this number.
    rank: int = 0
    size: int = 1
    #: Whether the last rows are left out, which are not enough for ``size`` units.
    whole: int = 0

    def starts(self, count: int, unit: int) -> range:
        """Return the places of the first rows of the units to be read of an epoch of so many rows."""
        together = self.size * unit
        stop = self.row + (count - self.row) // together * together if self.whole else count
        return range(self.row + self.rank * unit, stop, together)

    def next(self) -> Plan:
        """Return the plan of the next epoch."""
        return self._replace(epoch=self.epoch + 1, row=0)


def order_of(count: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """Return the order of an epoch's rows."""
    return np.random.default_rng((seed, epoch)).permutation(count) if shuffle else np.arange(count)


class Layout(NamedTuple):
    """How long the parts of a ring are."""

    #: Those who take units, at most.
    takers: int
    loaders: int
    #: The units that there is room for.
    slots: int
    #: The rows of each.
    unit: int

    @property
    def words(self) -> int:
        """The number of words."""
        return 1 + len(Plan._fields) + 2 * self.takers + 3 * self.loaders + 2 * self.slots

    @property
    def reports_at(self) -> int:
        """Where loaders say what went wrong."""
        return self.words * 8

    @property
    def bells_at(self) -> int:
        """Where the semaphores are."""
        return -(-(self.reports_at + self.loaders * _REPORT) // _BELL) * _BELL

    @property
    def there_at(self) -> int:
        """Where there is a byte for each row."""
        return self.bells_at + (self.takers + self.loaders) * _BELL

    @property
    def nbytes(self) -> int:
        """The size of all of it."""
        return self.there_at + self.slots * self.unit


class Ring:
    """The words of a ring, as each process sees them.

    ``me`` says which taker this is; or behind them all, which loader.  ``pids`` are the loaders' processes.  Where
    ``made`` the semaphores are there already.
    """

    def __init__(self, layout: Layout, memory: np.ndarray, me: int, pids: list[int], made: bool = True):
        self.layout, self.me, self.pids, self._memory = layout, me, pids, memory
        words = memoryview(memory[: layout.words * 8].data).cast("Q")
        self._words, at = words, 1 + len(Plan._fields)
        takers, loaders, slots, unit = layout
        parts = []
        for n in (loaders, loaders, loaders + takers, takers, slots, slots):
            parts.append(words[at : at + n])
            at += n
        self._filled, self._failed, self._sleeping, self._skipped, self._freed, self.lengths = parts
        self.there = memory[layout.there_at : layout.nbytes].reshape(slots, unit)
        self._bells = [Bell(memory, layout.bells_at + i * _BELL, made) for i in range(takers + loaders)]
        self._fence_lock = threading.Lock()

    # -- all -------------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """Which plan is followed."""
        return self._words[0]

    @property
    def plan(self) -> Plan:
        """The plan that is followed."""
        return Plan(*self._words[1 : 1 + len(Plan._fields)])

    def sleep(self, ready: Callable[[], bool], look: Callable[[], None], poll: float = POLL) -> None:
        """Return when ``ready()``; now and then call ``look()``, which raises where there is nothing to wait for."""
        next_look = time.perf_counter() + poll
        try:
            while True:
                self._sleeping[self.me] = 1
                self._fence()
                if ready():
                    return
                if not self._bells[self.me].wait(poll) or time.perf_counter() > next_look:
                    look()
                    next_look = time.perf_counter() + poll
        finally:
            self._sleeping[self.me] = 0

    def _ring(self, others: range) -> None:
        self._fence()
        for i in others:
            if self._sleeping[i]:
                self._bells[i].ring()

    def _fence(self) -> None:
        """Make what this process wrote visible before it reads on: see `synkhronos.ranks.control.Control.fence`."""
        with self._fence_lock:
            pass

    @property
    def _takers(self) -> range:
        return range(self.layout.takers)

    @property
    def _loaders(self) -> range:
        return range(self.layout.takers, self.layout.takers + self.layout.loaders)

    # -- who has the loaders ---------------------------------------------------------------------------------

    def begin(self, plan: Plan) -> None:
        """Have the loaders follow a plan; nobody may be reading units of the one before."""
        for i, value in enumerate(plan):
            self._words[1 + i] = value
        self._fence()
        self._words[0] += 1
        self._ring(self._loaders)

    @property
    def skipped(self) -> int:
        """How many rows were left out, of the units that were taken."""
        return sum(self._skipped)

    # -- who takes units -------------------------------------------------------------------------------------

    def is_filled(self, unit: int) -> bool:
        """Whether a unit can be taken."""
        return min(self._filled) >= self._word(unit + 1)

    def wait(self, unit: int, place: tuple[int, int], watch: Callable[[], None] | None = None) -> None:
        """Return when a unit is filled; raise LoadError, with the ``place`` at which it begins, if it can't be.

        ``watch`` is called meanwhile.
        """

        def look() -> None:
            self._check(unit, place)
            if watch is not None:
                watch()

        if not self.is_filled(unit):
            self.sleep(lambda: self.is_filled(unit) or bool(self._has_failed(unit)), look)
            if not self.is_filled(unit):
                self._check(unit, place)

    def _has_failed(self, unit: int) -> list[int]:
        """Return the loaders that can't fill a unit."""
        first, last = self._word(0), self._word(unit + 1)
        return [i for i, failed in enumerate(self._failed) if failed == _NEVER or first <= failed <= last]

    def _check(self, unit: int, place: tuple[int, int]) -> None:
        for loader in self._has_failed(unit):
            raise LoadError(self._report(loader), *place)
        death = self.death()
        if death and not self.is_filled(unit):
            raise LoadError(f"{death}{NOTHING_LOST.format(*place)}", *place)

    def death(self) -> str:
        """Say which loader has died, and how; nothing if all live."""
        for loader, pid in enumerate(self.pids):
            if has_exited(pid):
                return f"loader {loader} (process {pid}) {_cause(pid)}"
        return ""

    def rows(self, unit: int, length: int) -> Selection:
        """Return which rows of the ring a unit's are: so many, but for those that were left out."""
        slot = unit % self.layout.slots
        start = slot * self.layout.unit
        there = self.there[slot, :length]
        if there.all():
            return range(start, start + length)
        self._skipped[self.me] += length - int(np.count_nonzero(there))
        return start + np.flatnonzero(there)

    def free(self, unit: int) -> None:
        """Let the loaders have a unit's memory."""
        self._freed[unit % self.layout.slots] = self._word(unit + 1)
        self._ring(self._loaders)

    def _word(self, unit: int) -> int:
        return self._words[0] << _UNITS | unit

    def _report(self, loader: int) -> str:
        at = self.layout.reports_at + loader * _REPORT
        text = bytes(self._memory[at : at + _REPORT]).split(b"\0", 1)[0].decode(errors="replace")
        return str(json.loads(text))

    # -- loaders ---------------------------------------------------------------------------------------------

    def is_free(self, unit: int, generation: int) -> bool:
        """Whether a unit may be written."""
        before = unit - self.layout.slots
        return before < 0 or self._freed[unit % self.layout.slots] == generation << _UNITS | before + 1

    def fill(self, loader: int, unit: int, generation: int) -> None:
        """Say that a loader has written its share of a unit."""
        self._fence()
        self._filled[loader] = generation << _UNITS | unit + 1
        self._ring(self._takers)

    def fail(self, loader: int, message: str, unit: int = 0, generation: int = -1) -> None:
        """Say that a loader can't write its share of a unit; or without one, nothing at all."""
        at = self.layout.reports_at + loader * _REPORT
        # A character takes six bytes at most.
        text = json.dumps(shorten(message, _REPORT // 6 - 16), ensure_ascii=False).encode(errors="backslashreplace")
        self._memory[at : at + _REPORT] = np.frombuffer(text.ljust(_REPORT, b"\0"), np.uint8)
        self._fence()
        self._failed[loader] = _NEVER if generation < 0 else generation << _UNITS | unit + 1
        self._ring(self._takers)


def has_exited(pid: int) -> bool:
    """Whether a process has ended, whosever child it is."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            state = stat.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"  # nobody has waited for it yet


def _cause(pid: int) -> str:
    """Say how a process has ended, as far as this one may know."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # its number stays taken
    except ChildProcessError:  # another rank's
        return "has ended"
    if found is None:
        return cause_of_death(UNKNOWN)
    return cause_of_death(found.si_status if found.si_code == os.CLD_EXITED else -found.si_status)


def units_of(plan: Plan, count: int, unit: int) -> Iterator[tuple[int, int, int]]:
    """Yield epoch, place and length of each unit, for ever; none if no epoch has any."""
    while plan.row or plan.starts(count, unit):
        for start in plan.starts(count, unit):
            yield plan.epoch, start, min(unit, count - start)
        plan = plan.next()
