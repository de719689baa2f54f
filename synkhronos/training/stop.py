"""Stop of a training at a scheduler's signal: the master records the signal, and the ranks agree on the last step.

Workers and agents ignore signals that the master handles.  Synchronous ranks have to stop after the same step.  They
exchange the request about twice a second rather than at each step, so that steps stay as fast.
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

from synkhronos.ranks.interrupts import get_handler, restore_handler, set_handler
from synkhronos.tasks import LocalRows, Worker
from synkhronos.training.step_interval import adapt_steps

#: Signals of a scheduler or a closed terminal that ask a training to save and to exit.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
#: Seconds within which a second signal is a copy of the first, which was sent to all processes of a job.
ECHO = 1.0
#: Approximate seconds between two exchanges of the request.
_INTERVAL = 0.5

_requested = 0


def get_requested_stop() -> int:
    """Return the number of the signal received, or 0."""
    return _requested


class StopSignals:
    """Context manager that records `STOP_SIGNALS`; signals that the user handles are left to the user.

    Parameters
    ----------
    grace : float or None
        Seconds after the signal at which the process is killed by it.  A second signal, `ECHO` seconds or more after
        the first, kills it too.  None: another process does both.
    flag : ndarray, optional
        One integer, which is set to the signal's number; `StopPoll` reads it.
    """

    def __init__(self, grace: float | None, flag: np.ndarray | None = None):
        self._grace, self._flag = grace, flag
        self._signalled_at = 0.0
        self._is_over = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if get_handler(number) == signal.SIG_DFL:
                    self._before[number] = signal.SIG_DFL
                    set_handler(number, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        global _requested
        for number, before in self._before.items():
            restore_handler(number, self._receive, before)
        if self._signalled_at:
            number, _requested = _requested, 0
            if self._grace is not None and kind in (
                None,
                GeneratorExit,
            ):  # the loop was left before it could end by the signal
                exit_by_signal(number)
            self._is_over = kind is SystemExit

    def _receive(self, number: int, frame: FrameType | None) -> None:
        global _requested
        now = time.monotonic()
        if not self._signalled_at:
            _requested, self._signalled_at = number, now
            if self._flag is not None:
                self._flag[0] = number
            if self._grace is not None:
                # Not `threading`: this handler may interrupt it while it holds one of its locks.
                _thread.start_new_thread(self._exit_after, (number, self._grace))
        elif self._grace is not None and now > self._signalled_at + ECHO:
            exit_by_signal(number)

    def _exit_after(self, number: int, grace: float) -> None:
        time.sleep(grace)
        if not self._is_over:
            exit_by_signal(number)


def exit_by_signal(number: int) -> None:
    """Kill this process by a signal's default action; from any thread."""
    libc = ctypes.CDLL(None)  # Python sets handlers only in the main thread
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(number, None)
    os.kill(os.getpid(), number)


class StopAgreement:
    """Agreement of synchronous ranks on the step after which they stop; each rank calls `is_stop` after each step."""

    def __init__(self, worker: Worker):
        self._worker = worker
        self._every = self._left = 1
        self._asked_at = time.monotonic()

    def is_stop(self) -> bool:
        """Return True if training stops here; a collective of all ranks after each step, with one common answer."""
        self._left -= 1
        if self._left:
            return False
        proposed = adapt_steps(self._every, time.monotonic() - self._asked_at, _INTERVAL)
        answers = self._worker.all_gather((get_requested_stop(), proposed))
        self._every = self._left = min(steps for _, steps in answers)
        self._asked_at = time.monotonic()
        return any(number for number, _ in answers)


class StopPoll:
    """Poll of the master's request to stop, for asynchronous ranks.

    Parameters
    ----------
    worker : Worker
    flag : LocalRows
        The flag of `StopSignals`; 0 before a signal.
    """

    def __init__(self, worker: Worker, flag: LocalRows):
        self._worker, self._flag = worker, flag
        self._next = 0.0

    def is_stop(self) -> bool:
        """Return True if the master has requested a stop; acquires a lock at most about twice a second."""
        now = time.monotonic()
        if now < self._next:
            return bool(self._flag.array[0])
        self._next = now + _INTERVAL
        with self._worker.lock(self._worker.size + 7) as lock:  # the flag is in memory of the first host
            lock.read(self._flag)
        return bool(self._flag.array[0])
