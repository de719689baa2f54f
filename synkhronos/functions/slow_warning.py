"""Warnings in the log about work that takes unexpectedly long, such as compiling."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

_log = logging.getLogger("synkhronos")

#: Number of seconds after which `warn_if_slow` logs a warning.
WARN_AFTER_SECONDS = 5.0


@contextlib.contextmanager
def warn_if_slow(work: str) -> Iterator[None]:
    """Log a warning if the ``with`` block takes longer than `WARN_AFTER_SECONDS`, and its duration at the end.

    ``work`` describes it, as in "compiling f".  Python prints warnings on stderr by default.
    """
    start = time.monotonic()
    timer = threading.Timer(WARN_AFTER_SECONDS, _log.warning, ["%s; this may take a minute or two", work])
    timer.daemon = True
    try:  # includes the start, so that an interrupt leaves no timer running
        timer.start()
        yield
    finally:
        timer.cancel()
        took = time.monotonic() - start
        if took > WARN_AFTER_SECONDS:
            _log.warning("%s took %.0f s", work, took)
