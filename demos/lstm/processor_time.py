"""Processor time of a rank; in a module, because ranks may not import the script that started them."""

from __future__ import annotations

import time
from typing import Any


def get_processor_seconds(context: Any) -> float:
    """Return the processor seconds of all threads of this rank so far."""
    return time.process_time()
