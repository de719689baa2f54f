"""Environment of the processes of a run: PYTHONPATH and standard streams."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def make_python_path() -> str:
    """Make the PYTHONPATH with which a process imports this copy of the library, in any working directory."""
    paths = [str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(path for path in paths if path)


def open_standard_streams() -> None:
    """Open ``/dev/null`` for closed standard streams, whose file descriptors pipes would get otherwise."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "w", closefd=False))
