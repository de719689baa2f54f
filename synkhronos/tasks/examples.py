"""Programs for the examples of the documentation."""

from __future__ import annotations

from synkhronos.tasks.worker import Worker


def greet(worker: Worker, word: str) -> str:
    """Return a greeting from this rank."""
    return f"{word} from rank {worker.number} of {worker.size}"
