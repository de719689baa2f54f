"""Copies of a run in memory, from which the launcher starts the ranks again after a death.

::

    ranks ── copy, about once a second ──> /dev/shm/synkhronos-copy-...   (the supervisor's folder)
      │ a process dies, all ranks exit                  │
      v                                                 v
    DeathLog: rank, cause, time  ──> supervisor ── starts the ranks ──> ranks resume from the copy

The folder outlives all ranks.  The supervisor removes it at the end of the run.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from synkhronos.launch.model_state import ModelState
from synkhronos.training.checkpoints.checkpoint import Checkpoint
from synkhronos.training.loops.batch_loop import choose_interval_steps

#: Parent folder of the copies, and prefix of their folders' names.
_SHM, _PREFIX = Path("/dev/shm"), "synkhronos-copy-"
#: Age in seconds from which an unlocked folder belongs to a killed run; a new folder is locked just after its creation.
_ABANDONED_SECONDS = 60.0
#: Approximate number of seconds between two copies, and its minimum in units of the duration of a copy.
_INTERVAL, _RATIO = 1.0, 10.0
#: File of `DeathLog`.
DEATHS = "deaths.json"


class CopyFolder:
    """Folder in memory that this process locks; the kernel releases the lock if the process is killed.

    Attributes
    ----------
    path : Path
    """

    def __init__(self) -> None:
        _remove_abandoned()
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getuid()}-", dir=_SHM))
        self._file = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def clear(self) -> None:
        """Remove all copies."""
        for path in self.path.glob("rows-*"):
            shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._file)


def _remove_abandoned() -> None:
    """Remove the folders of runs of this user whose supervisors were killed."""
    for path in _SHM.glob(f"{_PREFIX}{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_ctime < _ABANDONED_SECONDS:
                continue
            file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(file)


class RankCopies:
    """Writer of copies of a run's state; all ranks write a copy together, into the supervisor's folder.

    Parameters
    ----------
    folder : str
    state : ModelState

    Attributes
    ----------
    due : int
        Number of batches in the epoch after which the next copy is due.
    """

    def __init__(self, folder: str, state: ModelState):
        self._folder, self._state, self._checkpoint = folder, state, None  # type: str, ModelState, Checkpoint | None
        self._every = self.due = 1
        self._ended_at = time.monotonic()

    def set_due(self, batch: int) -> None:
        """Schedule the next copy; ``batch`` batches of the epoch are trained on."""
        self.due = batch + self._every

    def write(self, metrics: Mapping[str, float] | None) -> None:
        """Copy the state of all ranks.  A collective.

        As at a report, no message between ranks is pending.

        Parameters
        ----------
        metrics : dict of str to float, or None
            Metrics of the epoch that has just ended; None within an epoch.
        """
        state, began = self._state, time.monotonic()
        state.worker.barrier("the ranks are copied")
        if state.worker.number == 0 and self._checkpoint is None:
            self._checkpoint = Checkpoint(self._folder, keep=1)
        if metrics is None:
            state.recorder.write()  # after a death, the next line starts from the copy
            state.use_consensus_params()
        try:
            state.save(metrics, self._checkpoint)
        except OSError as error:
            error.add_note("on_death = 'continue' copies the state of all ranks into /dev/shm: give it more memory")
            raise
        if metrics is None:
            state.restore_own_params()
        self._schedule_next(began, state.position["batch"])

    def _schedule_next(self, began: float, batch: int) -> None:
        """Schedule the next copy, after one at batch ``batch`` that began at time ``began``.  A collective."""
        now = time.monotonic()
        interval = max(_INTERVAL, _RATIO * (now - began))
        steps = choose_interval_steps(self._every, began - self._ended_at, interval)
        self._every = self._state.worker.broadcast(steps)
        self.set_due(batch)
        self._ended_at = time.monotonic()


class DeathLog:
    """Log of the deaths of a run's processes, in the file ``deaths.json`` of its folder.

    A death is a dict of ``rank``, ``host``, ``cause`` and ``time``, and, once the training continues, of ``step`` and
    ``seconds``.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self._path = Path(folder) / DEATHS

    def read(self) -> list[dict[str, Any]]:
        """Return the deaths, the oldest first."""
        try:
            deaths: list[dict[str, Any]] = json.loads(self._path.read_text())
        except FileNotFoundError:
            return []
        return deaths

    def add(self, rank: int, host: str, cause: str) -> None:
        """Append a death."""
        self._write([*self.read(), {"rank": rank, "host": host, "cause": cause, "time": time.time()}])

    def record_recovery(self, step: int) -> list[dict[str, Any]]:
        """Record, for the last deaths, the step from which the training continues, and the time lost; return them."""
        deaths = self.read()
        recovered = [death for death in deaths if "step" not in death]
        for death in recovered:
            death |= {"step": step, "seconds": round(time.time() - death["time"], 3)}
        if recovered:
            self._write(deaths)
        return recovered

    def _write(self, deaths: list[dict[str, Any]]) -> None:
        """Replace the file atomically, since this process may be killed."""
        temporary = self._path.with_suffix(".new")
        temporary.write_text(json.dumps(deaths, indent=1) + "\n")
        temporary.replace(self._path)
