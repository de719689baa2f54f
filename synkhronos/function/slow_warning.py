"""Log messages about work that takes longer than a user expects, such as compiling."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

_log = logging.getLogger("synkhronos")

#: Number of seconds after which work is logged.
PATIENCE = 5.0


@contextlib.contextmanager
def warn_if_slow(work: str) -> Iterator[None]:
    """Log a warning if the ``with`` block takes longer than `PATIENCE`, and its duration at the end.

    Python prints warnings on stderr by default.

    Parameters
    ----------
    work : str
        Description of the work, as in "compiling f".
    """
    start = time.monotonic()
    timer = threading.Timer(PATIENCE, _log.warning, ["%s; this may take a minute or two", work])
    timer.daemon = True
    try:  # includes the start, so that an interrupt leaves no timer running
        timer.start()
        yield
    finally:
        timer.cancel()
        took = time.monotonic() - start
        if took > PATIENCE:
            _log.warning("%s took %.0f s", work, took)
