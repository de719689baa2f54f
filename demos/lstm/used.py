"""What a rank has used: in a module of its own, since ranks that are started beside JAX have no script."""

from __future__ import annotations

import time
from typing import Any


def processor_seconds(worker: Any) -> float:
    """Return this rank's processor time so far, of all its threads."""
    return time.process_time()
