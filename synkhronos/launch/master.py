"""The process of rank 0, which forks the other ranks.

    python -m synkhronos.launch.master FOLDER PLAN

A failure is written into the run's ``failure.txt``, which the supervisor prints.
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

from synkhronos.data.shared import create_unpublished
from synkhronos.launch import binding, program
from synkhronos.launch.settings import FAILURE, PROCESSES, SETTINGS, Settings
from synkhronos.processes import fork_bound
from synkhronos.ranks import WorkerError, session
from synkhronos.ranks.child_process import exit_with_parent
from synkhronos.rules import shared_memory
from synkhronos.tasks import run
from synkhronos.tracing import timeline
from synkhronos.training.checkpoint import paths_in
from synkhronos.training.stop import StopSignals, requested_stop


def main(folder: str, plan: dict[str, Any]) -> int:
    """Train with the settings in a folder, and return the exit status.

    Parameters
    ----------
    folder : str
        The run's folder.
    plan : dict
        From the supervisor: ``supervisor``, its process ID; ``consoles``, a pipe for each rank of this host; ``hosts``,
        the pipe of other hosts, or None; ``masks``, the cores of each rank; ``allowed``, all cores.
    """
    exit_with_parent(plan["supervisor"], in_main_thread=True)
    for stream in (sys.stdout, sys.stderr):  # the supervisor reads UTF-8, whatever the locale
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    settings = Settings.load(Path(folder) / SETTINGS)
    try:
        return _run(settings, plan)
    except BaseException as error:
        if isinstance(error, WorkerError):
            name = error.failures[error.rank].partition(":")[0] if error.worker_traceback else f"rank {error.rank}"
            text = f"{name}:\n{error.worker_traceback or error}\n"
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
    _set_flag("THEANO_FLAGS", "compile.wait", "1")  # seconds between two tries for the compiler's lock, not 5 to 10

    import synkhronos.compat  # noqa: F401 - classes import theano

    # Before the fork: ranks that import Theano each by itself wait for one another's lock of its compiler.
    with contextlib.suppress(ImportError):
        import theano  # noqa: F401
    np.random.seed(settings.seed)
    random.seed(settings.seed)
    masks = plan["masks"]
    binding.bind(plan["allowed"])  # BLAS has started its threads within rank 0's cores; other ranks bind theirs
    host_output = (
        open(plan["hosts"], "w", buffering=1, encoding="utf-8", errors="backslashreplace") if settings.hosts else None
    )
    fork_bound(len(settings.devices), settings.on_gpu, masks, settings.hosts, host_output)
    processes = run(program.enter, plan["consoles"], masks, list(settings.devices), session().link.ranks_by_host)
    (Path(settings.folder) / PROCESSES).write_text(json.dumps(processes))
    rule = settings.make_rule()
    size, dtype = run(program.build, settings, rule)[0]
    memory = shared_memory(rule, session().size, size, np.dtype(dtype))
    flag = create_unpublished((1,), "int64")
    path = Path(settings.folder) / "timeline.json"
    recording = timeline(path) if settings.timeline else contextlib.nullcontext()
    # Before this there is nothing to save, and signals end the run.  The supervisor bounds the time to save.
    with recording, StopSignals(None, flag.data) if settings.saves_on_signal else contextlib.nullcontext():
        is_stopped = run(program.train, settings, rule, memory, _checkpoint(settings), flag)[0]
        return 128 + requested_stop() if is_stopped else 0


def _set_flag(variable: str, name: str, value: str) -> None:
    """Set a flag of the graph library, unless the user has set it."""
    flags = os.environ.get(variable, "")
    if f"{name}=" not in flags:
        os.environ[variable] = ",".join(filter(None, [flags, f"{name}={value}"]))


def _checkpoint(settings: Settings) -> str | None:
    """Return the path of the checkpoint to resume from, or None."""
    if settings.resume != "latest":
        return settings.resume
    return str(paths_in(Path(settings.folder) / "checkpoints")[-1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], json.loads(sys.argv[2])))
