"""Deferral of signals where an operation must not be left half done.

Any signal handler may raise an exception: KeyboardInterrupt at SIGINT, or the error of a time limit (``signal.alarm``).
Python runs it between two bytecodes of the main thread.  `defer_signals` replaces all handlers that may raise by one
that records the signal.  Two simpler designs do not work:

- A mask of blocked signals: the system delivers a signal to another thread that has not blocked it, such as one of a
  BLAS, and Python still runs the handler in the main thread.
- ``except BaseException`` around an operation: the exception may be raised within the ``except`` block, too, or within
  JAX's Python code, which leaves JAX unusable.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # typeshed has no stubs of it
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Self, TypeAlias

# The functions of `signal` convert arguments and results to enums, which takes ten times as long.
_getsignal, _setsignal = _signal.getsignal, _signal.signal

#: Seconds after which `defer_signals.stop_deferring_if_late` delivers a deferred signal.
MAX_DEFERRAL_SECONDS = 2.0

#: Handler of a signal, as `signal.signal` takes it.
SignalHandler: TypeAlias = Callable[[int, FrameType | None], object] | int | None

#: Beginning of JAX's error from an exception in the comparison of two arguments' metadata.
_JAX_MESSAGE = "Exception raised while checking equality of metadata fields"

_SIGNALS = [int(member) for member in signal.valid_signals()]
#: Handlers of all signals at the last call of `_find_raising`, and its result.
_last_found: tuple[list[SignalHandler], Sequence[int]] = [], ()


class NonRaisingHandler(partial[object]):
    """Signal handler that raises no exception, and so need not be deferred."""


class defer_signals:  # noqa: N801 - a block, as the functions of contextlib are
    """Defer the handlers of all signals to the end of the ``with`` block.

    A wait within the block may poll `stop_deferring_if_late`, which runs them after `MAX_DEFERRAL_SECONDS`.  In a block
    in another thread nothing is deferred, as handlers never run there.

    Use it for short blocks, and for longer ones of compiled code that no handler interrupts, such as XLA's compiler.

    A block has three phases, each with a flag.  They differ in what a signal does at the block's handler:

    - ``_is_entering``: handlers are being replaced, one after another.  The signal's own handler is called.
    - ``_is_deferring``: the signal is recorded.  The phase includes the restoration of the handlers.
    - ``_has_stopped``: other code has installed the block's handler again.  The signal's own is restored, and called.
    """

    def __enter__(self) -> Self:
        #: Signals that have been deferred, and the time of the first.
        self._deferred: list[int] = []
        self._deferred_since = 0.0
        self._handlers: dict[int, SignalHandler] = {}
        self._is_entering, self._is_deferring, self._has_stopped = True, False, False
        if threading.current_thread() is threading.main_thread():
            try:
                self._replace_handlers()
                self._is_entering, self._is_deferring = False, True
            except BaseException:  # raised by a handler that was not replaced yet
                self._restore_handlers(list(self._handlers.items()))
                raise
        return self

    def _replace_handlers(self) -> None:
        handlers = [*map(_getsignal, _SIGNALS)]
        for i in _find_raising(handlers):
            signal_number = _SIGNALS[i]
            self._handlers[signal_number] = handlers[i]
            # A handler that has just run may have replaced this one.
            self._handlers[signal_number] = _setsignal(signal_number, self._handle_signal)

    def __exit__(self, *_: object) -> None:
        if not self._has_stopped:
            self._stop_deferring()

    def _stop_deferring(self) -> None:
        try:
            self._restore_handlers(list(self._handlers.items()))
        finally:
            self._is_deferring, self._has_stopped = False, True
            deferred, self._deferred = self._deferred, []
            self._deliver_signals(deferred)

    def run_deferred_handlers(self) -> None:
        """Run the handlers of deferred signals, which may raise, and go on deferring; polled in waits in the block."""
        if self._deferred:
            self._stop_deferring()
            self.__enter__()

    def has_deferred(self, excluded: int) -> bool:
        """Whether a signal other than ``excluded`` is deferred."""
        return any(signal_number != excluded for signal_number in self._deferred)

    def restart_time_limit(self) -> None:
        """Restart the time limit of `stop_deferring_if_late`, between long work and a wait."""
        if self._deferred:
            self._deferred_since = time.monotonic()

    def stop_deferring_if_late(self) -> None:
        """Stop deferring if a signal has been deferred for `MAX_DEFERRAL_SECONDS`; polled in waits within the block."""
        if self._deferred and time.monotonic() > self._deferred_since + MAX_DEFERRAL_SECONDS:
            self._stop_deferring()

    def _restore_handlers(self, handlers: list[tuple[int, SignalHandler]]) -> None:
        for i, (signal_number, handler) in enumerate(handlers):
            try:
                (_setsignal if callable(handler) else signal.signal)(signal_number, handler)
            except BaseException:  # raised by a handler that is installed again
                self._restore_handlers(handlers[i:])
                raise

    def _deliver_signals(self, signal_numbers: list[int]) -> None:
        if signal_numbers:
            # The wakeup descriptor was written when the signals arrived.
            wakeup = signal.set_wakeup_fd(-1)
            try:
                signal.raise_signal(signal_numbers[0])
            finally:
                signal.set_wakeup_fd(wakeup)
                self._deliver_signals(signal_numbers[1:])

    def _handle_signal(self, signal_number: int, frame: FrameType | None) -> None:
        """Record a signal, or call the replaced handler while handlers are being replaced or restored."""
        if self._is_deferring:
            if signal_number not in self._deferred:
                self._deferred_since = self._deferred_since or time.monotonic()
                self._deferred.append(signal_number)
            return
        handler = self._handlers[signal_number]
        if not self._is_entering:
            self._restore_handlers([(signal_number, handler)])
        if callable(handler):
            handler(signal_number, frame)


def _find_raising(handlers: list[SignalHandler]) -> Sequence[int]:
    """Return the indexes of the handlers that may raise, among those of all signals, which are nearly always the same.

    Other signals are ignored, are fatal, have a handler that Python did not install, or one that can't raise.
    """
    global _last_found
    last_handlers, indexes = _last_found
    if handlers != last_handlers:
        indexes = [
            i for i, handler in enumerate(handlers) if callable(handler) and type(handler) is not NonRaisingHandler
        ]
        _last_found = handlers, indexes
    return indexes


def get_handler(signal_number: int) -> SignalHandler:
    """Return a signal's handler outside of all `defer_signals` blocks."""
    handler = _getsignal(signal_number)
    while isinstance(block := getattr(handler, "__self__", None), defer_signals):
        handler = block._handlers[signal_number]
    return handler


def set_handler(signal_number: int, handler: SignalHandler) -> None:
    """Set a signal's handler; within `defer_signals`, it is installed at the end of the outermost block."""
    block = getattr(_getsignal(signal_number), "__self__", None)
    if not isinstance(block, defer_signals):
        signal.signal(signal_number, handler)
        return
    while isinstance(outer := getattr(block._handlers[signal_number], "__self__", None), defer_signals):
        block = outer
    block._handlers[signal_number] = handler


def find_handler_exception(error: BaseException) -> BaseException:
    """Return the exception of a signal's handler that has caused an error of compiled code, or else the error itself.

    Compiled code calls Python functions.  Numba's ignores their exceptions; after it has returned, Python raises
    SystemError from such an exception.  JAX's compares the metadata of arguments, and raises ValueError from it.
    """
    cause = error
    while cause.__cause__ is not None and (
        isinstance(cause, SystemError) or (isinstance(cause, ValueError) and str(cause).startswith(_JAX_MESSAGE))
    ):
        cause = cause.__cause__
    return cause


def restore_handler(signal_number: int, handler: SignalHandler, previous: SignalHandler) -> None:
    """Restore a signal's previous handler if ``handler`` is still installed."""
    if get_handler(signal_number) == handler:
        set_handler(signal_number, previous)
