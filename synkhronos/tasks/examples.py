"""Programs that the documentation runs."""

from __future__ import annotations

from synkhronos.tasks.worker import Worker


def greet(worker: Worker, word: str) -> str:
    """Return a greeting."""
    return f"{word} from rank {worker.number} of {worker.size}"
