"""Errors of ranks in the threads of a sampler, which treats any error as a point without a density."""

from __future__ import annotations

import _thread
import contextlib
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

from synkhronos import ranks

#: Seconds that a sampler gets to stop its threads.
_STOP_SECONDS = 1.0

#: The session or the servers whose failure has last interrupted the main thread.
_last_failed: weakref.ref[Any] | None = None

#: Guards `_last_failed`, since threads of a sampler fail at the same time.
_interrupt_lock = threading.Lock()


class WorkerExitInterrupt(ranks.WorkerError, KeyboardInterrupt):
    """A worker exited during sampling.

    The class derives from KeyboardInterrupt, so PyMC's samplers stop and return the draws so far.
    """


def stop_sampler(error: ranks.WorkerError, failed_object: Any) -> NoReturn:
    """Warn, stop the sampler that this thread belongs to, and raise `WorkerExitInterrupt`.

    ``failed_object`` is the `Session` or `ChainServers` that has failed.  Each failure interrupts the main thread once:
    a second interrupt would stop the main thread while it collects the draws.
    """
    global _last_failed
    warnings.warn(f"stopped early, with the results so far: {error}", RuntimeWarning, stacklevel=3)
    if is_foreign_thread():
        with _interrupt_lock:
            if _last_failed is None or _last_failed() is not failed_object:
                _last_failed = weakref.ref(failed_object)
                _thread.interrupt_main()
        # The main thread stops the sampler's threads.  Until then they wait here: without a density they would record
        # a wrong draw.
        time.sleep(_STOP_SECONDS)
    raise WorkerExitInterrupt(str(error), error.rank, error.reports) from error


def is_foreign_thread() -> bool:
    """Whether this thread was not started by Python; nutpie's threads are Rust's."""
    return isinstance(threading.current_thread(), threading._DummyThread)


@contextlib.contextmanager
def warn_of_ignored_errors() -> Iterator[None]:
    """Warn of errors in foreign threads, which nutpie takes for points without a density."""
    try:
        yield
    except Exception as error:
        if is_foreign_thread() and not isinstance(error, WorkerExitInterrupt):
            session = ranks.get_last_session()
            if session is not None and session.death is not None:
                time.sleep(_STOP_SECONDS)  # the sampler is being stopped, but may evaluate other points before
            warnings.warn(f"no density: {error}", RuntimeWarning, stacklevel=3)
        raise
