"""Says what takes long.

`notice`
    Tells the user, after some seconds, what the program is waiting for, and at the end how long it took.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

_log = logging.getLogger("synkhronos")

#: Seconds after which a user wonders.
PATIENCE = 5.0


@contextlib.contextmanager
def notice(what: str) -> Iterator[None]:
    """Log ``what``, as in "compiling f", if it takes longer than `PATIENCE`.

    It is a warning, which Python shows on stderr by itself.
    """
    start = time.monotonic()
    timer = threading.Timer(PATIENCE, _log.warning, ["%s; this may take a minute or two", what])
    timer.daemon = True
    try:  # from here on, lest an interrupt leave a timer that goes off for nothing
        timer.start()
        yield
    finally:
        timer.cancel()
        took = time.monotonic() - start
        if took > PATIENCE:
            _log.warning("%s took %.0f s", what, took)
