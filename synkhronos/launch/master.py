"""The process of rank 0, which forks the other ranks.

    python -m synkhronos.launch.master FOLDER PLAN

A failure is written into the run's ``failure.txt``, which the supervisor prints.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from synkhronos.compat.startup import import_theano_before_fork
from synkhronos.data.shared_memory import create_unpublished
from synkhronos.launch import binding, rank_main
from synkhronos.launch.memory_checkpoint import DeathLog
from synkhronos.launch.settings import FAILURE, PROCESSES, SETTINGS, Settings
from synkhronos.processes import fork_bound
from synkhronos.ranks import WorkerError, get_session, last_death
from synkhronos.ranks.child_process import exit_with_parent
from synkhronos.ranks.errors import FAILED_START_PREFIX
from synkhronos.rules import shared_memory
from synkhronos.tasks import run
from synkhronos.tracing import timeline
from synkhronos.training.loops.stop_signals import StopSignals, get_requested_stop


def main(folder: str, plan: dict[str, Any]) -> int:
    """Train with the settings in a folder, and return the exit status.

    Parameters
    ----------
    folder : str
        The run's folder.
    plan : dict
        Arguments of the supervisor:

        - ``supervisor``: its process ID
        - ``consoles``: file descriptors of pipes, for each rank of this host
        - ``hosts``: file descriptor of the pipe for other hosts, or None
        - ``masks``: cores of each rank; empty if ranks are not bound
        - ``allowed``: cores of this process
        - ``checkpoint``: path of the checkpoint or copy to resume from, or None
        - ``copies``: folder of copies in memory, or None
        - ``recovers``: whether the ranks start again after a death
    """
    exit_with_parent(plan["supervisor"], in_main_thread=True)
    for stream in (sys.stdout, sys.stderr):  # the supervisor reads UTF-8, whatever the locale
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    settings = Settings.load(Path(folder) / SETTINGS)
    try:
        return _run(settings, plan)
    except BaseException as error:
        if plan["copies"]:
            _log_death(folder, error, plan["recovers"] and not (Path(folder) / PROCESSES).exists())
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


def _log_death(folder: str, error: BaseException, is_failed_start: bool) -> None:
    """Log the cause of an error: a death, the loss of a host, or a rank that can't start.

    Parameters
    ----------
    folder : str
    error : BaseException
    is_failed_start : bool
        Whether this is a recovery in which not all ranks have started; then any exception means an unusable device.
    """
    death = last_death()
    if death is not None:
        DeathLog(folder).add(death.rank, death.host, death.cause)
    elif isinstance(error, WorkerError) and not error.worker_traceback:
        text = str(error).partition(";")[0]
        DeathLog(folder).add(error.rank, "", f"ended: {text}")
    elif is_failed_start and isinstance(error, Exception):
        rank = error.rank if isinstance(error, WorkerError) else 0
        text = str(error).partition("\n")[0] if isinstance(error, WorkerError) else f"{type(error).__name__}: {error}"
        DeathLog(folder).add(rank, "", f"{FAILED_START_PREFIX}: {text}")


def _run(settings: Settings, plan: dict[str, Any]) -> int:
    """Train; return 0, or 128 plus the number of the signal at which a checkpoint was written."""
    import_theano_before_fork(settings.on_gpu)
    np.random.seed(settings.seed)
    random.seed(settings.seed)
    masks = plan["masks"]
    binding.bind(plan["allowed"])  # BLAS has started its threads within rank 0's cores; other ranks bind theirs
    host_output = (
        open(plan["hosts"], "w", buffering=1, encoding="utf-8", errors="backslashreplace") if settings.hosts else None
    )
    fork_bound(len(settings.devices), settings.on_gpu, masks, settings.hosts, host_output)
    processes = run(
        rank_main.prepare_rank, plan["consoles"], masks, list(settings.devices), get_session().link.ranks_by_host
    )
    (Path(settings.folder) / PROCESSES).write_text(json.dumps(processes))
    rule = settings.make_rule()
    size, dtype = run(rank_main.build_instance, settings, rule)[0]
    memory = shared_memory(rule, get_session().size, size, np.dtype(dtype))
    flag = create_unpublished((1,), "int64")
    path = Path(settings.folder) / "timeline.json"
    recording = timeline(path) if settings.timeline else contextlib.nullcontext()
    # Before this point there is nothing to save, and signals end the run.  The supervisor limits the time to save.
    with recording, StopSignals(None, flag.data) if settings.saves_on_signal else contextlib.nullcontext():
        is_stopped = run(rank_main.train_instance, settings, rule, memory, plan["checkpoint"], plan["copies"], flag)[0]
        return 128 + get_requested_stop() if is_stopped else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], json.loads(sys.argv[2])))
