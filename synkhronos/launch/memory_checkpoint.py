"""Copies of a run in memory, from which the launcher starts the ranks again after a death.

::

    ranks ── copy, about once a second ──> /dev/shm/synkhronos-copy-...   (the supervisor's folder)
      │ a process dies, all ranks end                   │
      v                                                 v
    DeathLog: rank, cause, time  ──> supervisor ── starts the ranks ──> they resume from the copy

The folder outlives the ranks, the master included, and is removed at the end of the run.
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
from synkhronos.training.checkpoint import Checkpoint
from synkhronos.training.step_interval import adapt_steps

_SHM, _PREFIX = Path("/dev/shm"), "synkhronos-copy-"
#: Seconds after which an unlocked folder is a killed run's: a new one is locked just after its creation.
_ABANDONED = 60.0
#: Approximate seconds between two copies, and their least ratio to the seconds that a copy takes.
_INTERVAL, _RATIO = 1.0, 10.0
DEATHS = "deaths.json"


class CopyFolder:
    """Folder in memory, locked by this process; the kernel releases the lock when the process is killed.

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
        """Remove the copies."""
        for path in self.path.glob("rows-*"):
            shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._file)


def _remove_abandoned() -> None:
    """Remove the folders of this user's runs whose supervisors were killed."""
    for path in _SHM.glob(f"{_PREFIX}{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_ctime < _ABANDONED:
                continue
            file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(file)


class RankCopies:
    """Copies of a run's state, which the ranks write together into the supervisor's folder.

    Parameters
    ----------
    folder : str
    state : ModelState

    Attributes
    ----------
    due : int
        Number of batches of the epoch after which the next copy is due.
    """

    def __init__(self, folder: str, state: ModelState):
        self._folder, self._state, self._checkpoint = folder, state, None  # type: str, ModelState, Checkpoint | None
        self._every = self.due = 1
        self._ended_at = time.monotonic()

    def set_due(self, batch: int) -> None:
        """Set the next copy in an epoch of which ``batch`` batches are trained on."""
        self.due = batch + self._every

    def write(self, metrics: Mapping[str, float] | None) -> None:
        """Copy the state of all ranks after an epoch with these metrics, or within an epoch without; a collective.

        The copy has parameters as at a report, without messages between ranks.
        """
        state, began = self._state, time.monotonic()
        state.worker.barrier("the ranks are copied")
        if state.worker.number == 0 and self._checkpoint is None:
            self._checkpoint = Checkpoint(self._folder, keep=1)
        if metrics is None:
            state.recorder.write()  # the steps since the last line would be missing from the next one after a death
            state.set_reported_params()
        try:
            state.save(metrics, self._checkpoint)
        except OSError as error:
            error.add_note("on_death = 'continue' copies the state of all ranks into /dev/shm: give it more memory")
            raise
        if metrics is None:
            state.restore_own_params()
        self._adapt(began, state.position["batch"])

    def _adapt(self, began: float, batch: int) -> None:
        """Set the next copy, after one of ``batch`` batches that began at this time of `monotonic`; a collective."""
        now = time.monotonic()
        interval = max(_INTERVAL, _RATIO * (now - began))
        steps = adapt_steps(self._every, began - self._ended_at, interval)
        self._every = self._state.worker.broadcast(steps)
        self.set_due(batch)
        self._ended_at = time.monotonic()


class DeathLog:
    """Deaths of a run, in the file ``deaths.json`` of its folder.

    Each is a dict of ``rank``, ``host``, ``cause``, ``time``, and, once the training went on, ``step`` and ``seconds``.
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

    def note_recovery(self, step: int) -> list[dict[str, Any]]:
        """Note the step from which the training goes on, and the seconds lost; return the deaths that this ends."""
        deaths = self.read()
        ended = [death for death in deaths if "step" not in death]
        for death in ended:
            death |= {"step": step, "seconds": round(time.time() - death["time"], 3)}
        if ended:
            self._write(deaths)
        return ended

    def _write(self, deaths: list[dict[str, Any]]) -> None:
        """Replace the file: the writer may be killed meanwhile."""
        aside = self._path.with_suffix(".new")
        aside.write_text(json.dumps(deaths, indent=1) + "\n")
        aside.replace(self._path)
