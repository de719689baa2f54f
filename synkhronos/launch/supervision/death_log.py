"""Log of the deaths of a run's processes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from synkhronos.launch.supervision.run_folder import DEATHS_FILE


class DeathLog:
    """Log of the deaths of a run's processes, in the file ``deaths.json`` of its folder.

    A death is a dict of ``rank``, ``host``, ``cause`` and ``time``, and, once the training continues, of ``step`` and
    ``seconds``.
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
