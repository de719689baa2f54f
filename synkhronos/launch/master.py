"""The process of rank 0, which forks the others.

    python -m synkhronos.launch.master FOLDER PLAN

`main`
    What it does.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from synkhronos.data import data
from synkhronos.launch import binding, program
from synkhronos.launch.settings import FAILURE, PROCESSES, SETTINGS, Settings
from synkhronos.processes import fork_bound
from synkhronos.ranks import WorkerError, session
from synkhronos.ranks.worker import end_with
from synkhronos.rules import shared_memory
from synkhronos.tasks import run
from synkhronos.training.checkpoint import paths_in
from synkhronos.training.stop import StopSignals, requested_stop


def main(folder: str, plan: dict[str, Any]) -> int:
    """Run what the folder's settings say; return the exit status.

    ``plan`` is the supervisor's: its process, the pipes of this host's ranks, that of other hosts, each rank's cores,
    and all cores.
    """
    end_with(plan["supervisor"], in_main_thread=True)
    for stream in (sys.stdout, sys.stderr):  # the supervisor reads UTF-8, whatever the locale
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    settings = Settings.load(Path(folder) / SETTINGS)
    try:
        return _run(settings, plan)
    except BaseException as error:
        if isinstance(error, WorkerError):
            who = error.failures[error.rank].partition(":")[0] if error.worker_traceback else f"rank {error.rank}"
            text = f"{who}:\n{error.worker_traceback or error}\n"
        else:
            text = "rank 0:\n" + "".join(traceback.format_exception(error))
        try:
            (Path(folder) / FAILURE).write_text(text, "utf-8", "backslashreplace")
        except OSError as full:
            sys.stderr.write(f"{FAILURE} can't be written: {full}\n{text}")
        return 130 if isinstance(error, KeyboardInterrupt) else 1


def _run(settings: Settings, plan: dict[str, Any]) -> int:
    """Train; return 0, or 128 plus the number of the signal at which a checkpoint was written."""
    if settings.on_gpu:
        _set_flag("PYTENSOR_FLAGS", "mode", "JAX")  # a class compiles its functions itself
    _set_flag("THEANO_FLAGS", "compile.wait", "1")  # seconds between two looks at the compiler's lock, not 5 to 10

    import synkhronos.compat  # noqa: F401 - classes import theano

    # Once for all ranks: each by itself, they would wait for one another's lock of Theano's compiler.
    with contextlib.suppress(ImportError):
        import theano  # noqa: F401
    np.random.seed(settings.seed)
    random.seed(settings.seed)
    masks = plan["masks"]
    binding.bind(plan["allowed"])  # BLAS' threads have been started within rank 0's cores; the others get theirs
    said = (
        open(plan["hosts"], "w", buffering=1, encoding="utf-8", errors="backslashreplace") if settings.hosts else None
    )
    fork_bound(len(settings.devices), settings.on_gpu, masks, settings.hosts, said)
    processes = run(program.enter, plan["consoles"], masks, list(settings.devices), session().link.ranks_by_host)
    (Path(settings.folder) / PROCESSES).write_text(json.dumps(processes))
    rule = settings.make_rule()
    size, dtype = run(program.build, settings, rule)[0]
    memory = shared_memory(rule, session().size, size, np.dtype(dtype))
    flag = data(shape=(1,), dtype="int64")
    flag._is_published = False
    # Before this there is nothing to save, and signals end the run; the supervisor decides how long it may take.
    with StopSignals(None, flag.data) if settings.saves_on_signal else contextlib.nullcontext():
        is_stopped = run(program.train, settings, rule, memory, _checkpoint(settings), flag)[0]
        return 128 + requested_stop() if is_stopped else 0


def _set_flag(variable: str, name: str, value: str) -> None:
    """Set a flag of the graph library's, unless the user has."""
    flags = os.environ.get(variable, "")
    if f"{name}=" not in flags:
        os.environ[variable] = ",".join(filter(None, [flags, f"{name}={value}"]))


def _checkpoint(settings: Settings) -> str | None:
    """Return the checkpoint from which to go on."""
    if settings.resume != "latest":
        return settings.resume
    return str(paths_in(Path(settings.folder) / "checkpoints")[-1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], json.loads(sys.argv[2])))
