"""A scheduler's signal asks a training to save and to end: how the process notes it, and how ranks agree on the step.

Only the master notes a signal (workers and agents ignore those that the master handles).  Ranks that step together have
to stop after the same step: about twice a second they ask one another, so that steps cost nothing more.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import signal
import threading
import time
from types import FrameType
from typing import Any, Self

import numpy as np

from synkhronos.ranks.interrupts import handler_of, put_back, set_handler
from synkhronos.tasks import LocalRows, Worker

#: Signals of a scheduler and of a closed terminal: "end", "save and end".
STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
#: Seconds within which a second signal is taken for the first one, sent to all processes of a job.
ECHO = 1.0
#: Seconds between two questions of the ranks, about.
_INTERVAL = 0.5

_requested = 0


def requested_stop() -> int:
    """Return the number of the signal that asks this process to stop, 0 if none does."""
    return _requested


class StopSignals:
    """Note signals that ask this process to stop, during the ``with`` block; handlers of the user's stay.

    Parameters
    ----------
    grace : float or None
        Seconds after the signal at which the process ends by it, whatever it does then.  So it does at the second
        signal, a second or more after the first.  None leaves both to another process.
    flag : ndarray, optional
        The integer that `StopPoll` reads: its only element becomes the signal's number.
    """

    def __init__(self, grace: float | None, flag: np.ndarray | None = None):
        self._grace, self._flag = grace, flag
        self._came_at = 0.0
        self._is_over = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if handler_of(number) == signal.SIG_DFL:
                    self._before[number] = signal.SIG_DFL
                    set_handler(number, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        global _requested
        for number, before in self._before.items():
            put_back(number, self._receive, before)
        if self._came_at:
            number, _requested = _requested, 0
            if self._grace is not None and kind in (
                None,
                GeneratorExit,
            ):  # the loop was left before it could end by the signal
                end_by(number)
            self._is_over = kind is SystemExit

    def _receive(self, number: int, frame: FrameType | None) -> None:
        global _requested
        now = time.monotonic()
        if not self._came_at:
            _requested, self._came_at = number, now
            if self._flag is not None:
                self._flag[0] = number
            if self._grace is not None:
                # Not by `threading`: it may hold a lock of its own where this handler interrupts it.
                _thread.start_new_thread(self._wait, (number, self._grace))
        elif self._grace is not None and now > self._came_at + ECHO:
            end_by(number)

    def _wait(self, number: int, grace: float) -> None:
        time.sleep(grace)
        if not self._is_over:
            end_by(number)


def end_by(number: int) -> None:
    """End this process by a signal, as if nobody handled it; from any thread."""
    libc = ctypes.CDLL(None)  # Python sets handlers in the main thread alone
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(number, None)
    os.kill(os.getpid(), number)


class StopAgreement:
    """Has ranks that step together stop after the same step; each rank makes one, and asks after each step."""

    def __init__(self, worker: Worker):
        self._worker = worker
        self._every = self._left = 1
        self._asked_at = time.monotonic()

    def is_stop(self) -> bool:
        """Return whether to stop now: the same on all ranks, which call this after the same steps."""
        self._left -= 1
        if self._left:
            return False
        seconds = max(time.monotonic() - self._asked_at, 1e-6)
        proposed = max(1, min(2 * self._every, int(self._every * _INTERVAL / seconds)))
        answers = self._worker.exchange((requested_stop(), proposed))
        self._every = self._left = min(each for _, each in answers)
        self._asked_at = time.monotonic()
        return any(number for number, _ in answers)


class StopPoll:
    """Tells ranks at their own pace that the master was asked to stop.

    Parameters
    ----------
    worker : Worker
    flag : LocalRows
        That of `StopSignals`; 0 at first.
    """

    def __init__(self, worker: Worker, flag: LocalRows):
        self._worker, self._flag = worker, flag
        self._next = 0.0

    def is_stop(self) -> bool:
        """Return whether this rank has to stop."""
        now = time.monotonic()
        if now < self._next:
            return bool(self._flag.array[0])
        self._next = now + _INTERVAL
        with self._worker.lock(self._worker.size + 7) as lock:  # it is on the first host, as the master is
            lock.read(self._flag)
        return bool(self._flag.array[0])
