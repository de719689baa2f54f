"""Holds Ctrl-C back where half a step must not be left.

`uninterrupted`
    A block of code that a KeyboardInterrupt follows, rather than cuts short.
`undisturbed`
    The same for whatever Python's signal handlers may raise.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

# Those of `signal` make enums of what goes in and comes out, which takes ten times as long.
_handler_of, _handle = _signal.getsignal, _signal.signal


class uninterrupted:  # noqa: N801
    """Hold SIGINT back until the end of the ``with`` block.

    Blocking the signal would not do: where there are other threads (a BLAS has some), the system hands it to one of
    them, and Python's handler runs in the main thread all the same.  In other threads handlers never run, and there
    is nothing to hold back.  Only for what takes a moment.
    """

    signals: Iterable[int] = (int(signal.SIGINT),)

    def __enter__(self) -> None:
        self._came: list[int] = []
        self._handlers: dict[int, Any] = {}
        self._holds = False
        if threading.current_thread() is threading.main_thread():
            try:
                self._take_over()
                self._holds = True
            except BaseException:  # from a handler to which a signal has come before it was this one's turn
                self._restore(list(self._handlers.items()))
                raise

    def _take_over(self) -> None:
        for number in self.signals:
            handler = _handler_of(number)
            if callable(handler):  # else it is ignored, or fatal, or somebody's who is not Python
                self._handlers[number] = handler
                _handle(number, self._note)

    def __exit__(self, *_: object) -> None:
        try:
            self._restore(list(self._handlers.items()))
        finally:
            self._holds = False
            self._raise(self._came)

    def _restore(self, handlers: list[tuple[int, Any]]) -> None:
        for i, (number, handler) in enumerate(handlers):
            try:
                _handle(number, handler)
            except BaseException:  # from a handler that is back, to which a signal has come
                self._restore(handlers[i:])
                raise

    def _raise(self, numbers: list[int]) -> None:
        if numbers:
            try:
                signal.raise_signal(numbers[0])
            finally:
                self._raise(numbers[1:])

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._holds:
            if number not in self._came:
                self._came.append(number)
            return
        # A signal has come between the first and the last of them.
        _handle(number, self._handlers[number])
        self._handlers[number](number, frame)


class undisturbed(uninterrupted):  # noqa: N801
    """Hold back all signals that Python handles, for what must not raise: a function that is called from C."""

    signals = [int(number) for number in signal.valid_signals()]
