"""Holds Ctrl-C back where half a step must not be left.

`uninterrupted`
    A block of code that a KeyboardInterrupt follows, rather than cuts short.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class uninterrupted:  # noqa: N801
    """Hold SIGINT back until the end of the ``with`` block.

    Blocking the signal would not do: where there are other threads (a BLAS has some), the system hands it to one of
    them, and Python's handler runs in the main thread all the same.  In other threads handlers never run, and there
    is nothing to hold back.  Only for what takes a moment.
    """

    def __enter__(self) -> None:
        self._came = False
        self._handler: Any = None
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):  # else it is ignored, or fatal, or somebody's who is not Python
                self._handler = handler
                signal.signal(signal.SIGINT, self._note)

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._came:
                signal.raise_signal(signal.SIGINT)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True
