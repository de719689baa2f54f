"""Folder in /dev/shm for memory checkpoints of a run, from which the supervisor starts the ranks again after a death.

::

    ranks ── about one per second ──> /dev/shm/synkhronos-copy-...   (the supervisor's folder)
      │ a process dies, all ranks exit            │
      v                                           v
    DeathLog: rank, cause, time  ──> supervisor ── starts the ranks ──> ranks resume from the newest

The folder outlives all ranks.  The supervisor removes it at the end of the run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from synkhronos.training.checkpoints.checkpoint_folder import list_checkpoints

#: Parent folder of the memory checkpoint folders.
_PARENT_FOLDER = Path("/dev/shm")
#: Prefix of the names of memory checkpoint folders.
_PREFIX = "synkhronos-copy-"
#: Age in seconds from which an unlocked folder belongs to a killed run; a new folder is locked just after its creation.
_ABANDONED_SECONDS = 60.0


class MemoryCheckpointFolder:
    """Folder in memory that this process locks; the kernel releases the lock if the process is killed."""

    def __init__(self) -> None:
        _remove_abandoned()
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getuid()}-", dir=_PARENT_FOLDER))
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def clear(self) -> None:
        """Remove all memory checkpoints."""
        for path in list_checkpoints(self.path):
            shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)


def _remove_abandoned() -> None:
    """Remove the folders of runs of this user whose supervisors were killed."""
    for path in _PARENT_FOLDER.glob(f"{_PREFIX}{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_ctime < _ABANDONED_SECONDS:
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
