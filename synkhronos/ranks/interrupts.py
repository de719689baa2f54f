"""Holds signals back where half a step must not be left.

`defer_signals`
    A block of code that signals' handlers follow, rather than cut short.
`handler_of`, `set_handler`, `put_back`
    Read and change a signal's handler, though such a block may be on.

Any handler may raise: KeyboardInterrupt is only the best known.  A time limit's (``signal.alarm``) raises too.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # typeshed has no stubs of it
import signal
import threading
import time
from types import FrameType
from typing import Any, Self

# Those of `signal` make enums of what goes in and comes out, which takes ten times as long.
_handler_of, _handle = _signal.getsignal, _signal.signal

#: Seconds after which `defer_signals.relent` gives in.
PATIENCE = 2.0


_SIGNALS = [int(number) for number in signal.valid_signals()]


class defer_signals:  # noqa: N801 - a block, as the functions of contextlib are
    """Hold all signals that Python handles back until the end of the ``with`` block.

    Blocking the signals would not do: where there are other threads (a BLAS has some), the system hands them to one of
    those, and Python's handler runs in the main thread all the same.  In other threads handlers never run, and there
    is nothing to hold back.

    Only for what takes a moment, and for longer where that is C's time anyway: while XLA compiles, say.
    """

    def __enter__(self) -> Self:
        #: Signals that have been held back, and when the first came.
        self._came: list[int] = []
        self._since = 0.0
        self._handlers: dict[int, Any] = {}
        self._entering, self._holds, self._left = True, False, False
        if threading.current_thread() is threading.main_thread():
            try:
                self._take_over()
                self._entering, self._holds = False, True
            except BaseException:  # from a handler to which a signal has come before it was this one's turn
                self._restore(list(self._handlers.items()))
                raise
        return self

    def _take_over(self) -> None:
        for number in _SIGNALS:
            handler = _handler_of(number)
            if callable(handler):  # else it is ignored, or fatal, or somebody's who is not Python
                self._handlers[number] = handler
                _handle(number, self._note)

    def __exit__(self, *_: object) -> None:
        if not self._left:
            self._leave()

    def _leave(self) -> None:
        try:
            self._restore(list(self._handlers.items()))
        finally:
            self._holds, self._left = False, True
            came, self._came = self._came, []
            self._raise(came)

    def is_holding(self, besides: int) -> bool:
        """Whether a signal is held back, besides one of this number."""
        return any(number != besides for number in self._came)

    def renew(self) -> None:
        """Begin `PATIENCE` anew, for the wait that comes now: what was before it took its time."""
        if self._came:
            self._since = time.monotonic()

    def relent(self) -> None:
        """Hold nothing back any more if something has been for `PATIENCE` seconds: for a wait inside the block."""
        if self._came and time.monotonic() > self._since + PATIENCE:
            self._leave()

    def _restore(self, handlers: list[tuple[int, Any]]) -> None:
        for i, (number, handler) in enumerate(handlers):
            try:
                (_handle if callable(handler) else signal.signal)(number, handler)
            except BaseException:  # from a handler that is back, to which a signal has come
                self._restore(handlers[i:])
                raise

    def _raise(self, numbers: list[int]) -> None:
        if numbers:
            # Whoever reads signals from a file was told when they came.
            wakeup = signal.set_wakeup_fd(-1)
            try:
                signal.raise_signal(numbers[0])
            finally:
                signal.set_wakeup_fd(wakeup)
                self._raise(numbers[1:])

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._holds:
            if number not in self._came:
                self._since = self._since or time.monotonic()
                self._came.append(number)
            return
        # A signal has come between the first and the last of them.
        handler = self._handlers[number]
        if not self._entering:
            self._restore([(number, handler)])
        if callable(handler):
            handler(number, frame)


def handler_of(number: int) -> Any:
    """Return a signal's handler: the one that comes back after the blocks that are on."""
    handler = _handler_of(number)
    while isinstance(block := getattr(handler, "__self__", None), defer_signals):
        handler = block._handlers[number]
    return handler


def set_handler(number: int, handler: Any) -> None:
    """Set a signal's handler; while blocks are on, the one that comes back after them."""
    block = getattr(_handler_of(number), "__self__", None)
    if not isinstance(block, defer_signals):
        signal.signal(number, handler)
        return
    while isinstance(outer := getattr(block._handlers[number], "__self__", None), defer_signals):
        block = outer
    block._handlers[number] = handler


def put_back(number: int, handler: Any, before: Any) -> None:
    """Have a signal's handler be what it was before it was ``handler``; if that isn't the handler now, leave it."""
    if handler_of(number) == handler:
        set_handler(number, before)
