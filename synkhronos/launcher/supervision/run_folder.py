"""The folder of a run: its lock, its settings, ``run.json`` (the record of the run), and the log of deaths."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from synkhronos.checks import list_versions
from synkhronos.launcher.configuration.settings import Settings, SettingsError
from synkhronos.ranks.errors import Death

#: File of the folder with the record of the run.
RECORD_FILE = "run.json"
#: File with the message of the first failure.
FAILURE_FILE = "failure.txt"
#: File with the process IDs of the ranks.
PROCESSES_FILE = "processes.json"
#: File with the deaths of ranks.
DEATHS_FILE = "deaths.json"
#: Number of bytes of the record reserved for the exit status: the disk may be full at the end of the run.
_RESERVED_NBYTES = 1024
#: Packages whose versions are recorded.
_PACKAGES = ("synkhronos", "numpy", "pytensor", "Theano", "jax", "Lasagne", "safetensors")


def create_and_lock_run_folder(settings: Settings, command: list[str]) -> IO[str]:
    """Make and lock a run's folder, remove the last run's records from it, and write settings and versions.

    The records are the files of failures, processes and deaths; checkpoints and logs stay.  Nothing is removed while
    another run has the lock.

    Return the open file that holds the lock.
    """
    folder = Path(settings.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / RECORD_FILE, "a")  # noqa: SIM115 - open as long as the run lasts
    except OSError as error:
        raise SettingsError(f"folder: {folder} can't be made or written: {error}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove_old_records(folder)
        settings.save()
        record = {**describe_software(settings.pythonpath), "command": command, "began": _format_present_time()}
        _write_run_record(folder, record, _RESERVED_NBYTES)
    except BlockingIOError:
        lock.close()
        raise SettingsError(
            f"folder: {folder} is in use by a run that hasn't ended: wait for it, or choose another folder"
        ) from None
    except OSError as error:
        lock.close()
        raise SettingsError(f"folder: {folder} can't be written: {error}") from None
    return lock


def _remove_old_records(folder: Path) -> None:
    """Remove the last run's files of failures, processes and deaths."""
    for path in (*folder.glob(FAILURE_FILE.replace(".", "*.")), folder / PROCESSES_FILE, folder / DEATHS_FILE):
        path.unlink(missing_ok=True)


def describe_software(model_folder: str) -> dict[str, Any]:
    """Return the versions of Python and of packages, the host's name, and the commit of the model's folder."""
    versions: dict[str, Any] = {"python": platform.python_version(), "host": platform.node()}
    versions |= list_versions(_PACKAGES)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        for name, arguments in (("commit", ["rev-parse", "HEAD"]), ("changed", ["status", "--porcelain", "-uno"])):
            result = subprocess.run(["git", "-C", model_folder, *arguments], capture_output=True, text=True, timeout=10)
            if result.returncode == 0:
                versions[name] = result.stdout.strip() if name == "commit" else bool(result.stdout.strip())
    return versions


def record_run_end(folder: Path, entries: Mapping[str, Any]) -> None:
    """Add the present time, as ``ended``, and entries on the end of the run to ``run.json``."""
    record: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        record = json.loads((folder / RECORD_FILE).read_text())
    _write_run_record(folder, {**record, "ended": _format_present_time(), **entries})


def _format_present_time() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _write_run_record(folder: Path, entries: dict[str, Any], reserved_nbytes: int = 0) -> None:
    """Write ``run.json`` in place: the lock is on its inode, and its blocks are allocated even on a full disk."""
    text = json.dumps(entries, indent=1)
    with open(folder / RECORD_FILE, "r+b", buffering=0) as file:
        size = len(text) + reserved_nbytes if reserved_nbytes else max(len(text), os.fstat(file.fileno()).st_size - 1)
        data = f"{text.ljust(size)}\n".encode()
        if file.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file.truncate()


class DeathLog:
    """Log of the deaths of a run's processes, in the file ``deaths.json`` of its folder.

    A death is a dict with ``rank``, ``host``, ``cause``, ``is_failed_start`` and ``time``.  Once the training
    continues, it also has ``step`` and ``seconds``.  If one of several hosts can't start all of its ranks,
    ``ranks_left`` is the number of ranks that the host can start.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self._path = Path(folder) / DEATHS_FILE

    def read(self) -> list[dict[str, Any]]:
        """Return the deaths, the oldest first."""
        try:
            deaths: list[dict[str, Any]] = json.loads(self._path.read_text())
        except FileNotFoundError:
            return []
        return deaths

    def add(self, death: Death, n_ranks_left: int | None = None) -> None:
        """Append a death.  ``n_ranks_left`` is its host's number of ranks, if the host can't start all of its ranks."""
        entry: dict[str, Any] = {"rank": death.rank, "host": death.host, "cause": death.exit_description}
        entry["is_failed_start"] = death.is_failed_start
        if n_ranks_left is not None:
            entry["ranks_left"] = n_ranks_left
        self._write([*self.read(), {**entry, "time": time.time()}])

    def record_recovery(self, step: int) -> list[dict[str, Any]]:
        """Record, for the last deaths, the step from which the training continues, and the time lost.  Return them."""
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
