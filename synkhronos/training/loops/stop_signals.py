"""Stop of a training run at a scheduler's signal.  The master records the signal; the ranks agree on the last step.

Workers and agents ignore signals that the master handles.  Synchronous ranks have to stop after the same step.  They
exchange the request about twice a second rather than at each step, which would be slower.
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

from synkhronos.programs import LocalRows, RankContext
from synkhronos.programs.rank_context import get_stop_flag_lock
from synkhronos.ranks.interrupts import get_handler, restore_handler, set_handler
from synkhronos.training.loops.batch_loop import adapt_interval_steps

#: Signals of schedulers, and of a closed terminal, at which a training run writes a checkpoint and exits.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
#: Seconds within which a second signal counts as a copy of the first: schedulers signal all processes of a job.
DUPLICATE_SIGNAL_SECONDS = 1.0
#: Approximate number of seconds between two checks for a request, which are exchanges of all ranks or reads of a flag.
CHECK_INTERVAL_SECONDS = 0.5

_stop_signal = 0


def get_stop_signal() -> int:
    """Return the number of the signal that requests a stop, or 0."""
    return _stop_signal


class StopSignalHandler:
    """Context manager that records `STOP_SIGNALS`, except for signals with a handler of the user.

    The signal's default action kills this process ``grace_seconds`` after the signal.  A second signal kills it at once
    if it arrives more than `DUPLICATE_SIGNAL_SECONDS` after the first one.  If ``grace_seconds`` is None, the handler
    kills nothing: in the launcher's runs the supervisor does this.  ``flag`` is an array of one integer, which is set
    to the signal's number for `StopPoll`.
    """

    def __init__(self, grace_seconds: float | None, flag: np.ndarray | None = None):
        self._grace_seconds, self._flag = grace_seconds, flag
        self._signal_time = 0.0
        self._is_exiting = False
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if get_handler(number) == signal.SIG_DFL:
                    self._previous_handlers[number] = signal.SIG_DFL
                    set_handler(number, self._handle_signal)
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        global _stop_signal
        for number, handler in self._previous_handlers.items():
            restore_handler(number, self._handle_signal, handler)
        if self._signal_time:
            number, _stop_signal = _stop_signal, 0
            # Without an exception, or when a generator is closed, the caller does not exit by the signal.
            if self._grace_seconds is not None and error_type in (None, GeneratorExit):
                kill_this_process(number)
            self._is_exiting = error_type is SystemExit

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        global _stop_signal
        now = time.monotonic()
        if not self._signal_time:
            _stop_signal, self._signal_time = number, now
            if self._flag is not None:
                self._flag[0] = number
            if self._grace_seconds is not None:
                # `threading` is not used, since the signal may have interrupted it while it held a lock.
                _thread.start_new_thread(self._exit_after, (number, self._grace_seconds))
        elif self._grace_seconds is not None and now > self._signal_time + DUPLICATE_SIGNAL_SECONDS:
            kill_this_process(number)

    def _exit_after(self, number: int, grace_seconds: float) -> None:
        time.sleep(grace_seconds)
        if not self._is_exiting:
            kill_this_process(number)


def kill_this_process(number: int) -> None:
    """End this process by the default action of a signal.  Any thread may call this."""
    libc = ctypes.CDLL(None)  # the signal module sets handlers only in the main thread
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(number, None)
    os.kill(os.getpid(), number)


class StopAgreement:
    """Agreement of synchronous ranks on the step after which they stop."""

    def __init__(self, context: RankContext):
        self._context = context
        self._interval_steps = self._steps_left = 1
        self._exchanged_at = time.monotonic()

    def agree_on_stop(self) -> bool:
        """Return True if all ranks stop after this step.  Every rank must call this after every step."""
        self._steps_left -= 1
        if self._steps_left:
            return False
        elapsed = time.monotonic() - self._exchanged_at
        proposed = adapt_interval_steps(self._interval_steps, elapsed, CHECK_INTERVAL_SECONDS)
        requests = self._context.all_gather((get_stop_signal(), proposed))
        self._interval_steps = self._steps_left = min(steps for _, steps in requests)
        self._exchanged_at = time.monotonic()
        return any(number for number, _ in requests)


class StopPoll:
    """Poll of the master's request to stop, the flag of `StopSignalHandler`, for asynchronous ranks."""

    def __init__(self, context: RankContext, flag: LocalRows):
        self._context, self._flag = context, flag
        self._next_read_at = 0.0

    def poll(self) -> bool:
        """Return True if the master has requested a stop.  The flag is read about twice a second, under a lock."""
        now = time.monotonic()
        if now < self._next_read_at:
            return bool(self._flag.array[0])
        self._next_read_at = now + CHECK_INTERVAL_SECONDS
        with get_stop_flag_lock(self._context) as lock:
            lock.pull(self._flag)
        return bool(self._flag.array[0])
