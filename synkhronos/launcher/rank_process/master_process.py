"""The process of rank 0, which forks the other ranks.

    python -m synkhronos.launcher.rank_process.master_process FOLDER ARGUMENTS

A failure is written into the run's ``failure.txt``, which the supervisor prints.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import traceback
from pathlib import Path

import numpy as np

from synkhronos.compat.theano_import import import_theano_before_fork
from synkhronos.data_objects.data_access import create_unpublished
from synkhronos.exchange_rules import allocate_shared_arrays
from synkhronos.hosts import MissingGpuError, parse_hosts
from synkhronos.launcher import core_binding
from synkhronos.launcher.configuration.settings import Settings, SettingsError
from synkhronos.launcher.model_class.model_interface import ModelInterfaceError
from synkhronos.launcher.rank_process import rank_functions
from synkhronos.launcher.supervision.master_arguments import COMPLETE_EXIT_CODE, MasterArguments
from synkhronos.launcher.supervision.run_folder import FAILURE_FILE, PROCESSES_FILE, DeathLog
from synkhronos.programs import run
from synkhronos.ranks import WorkerError, get_last_session
from synkhronos.ranks.child_process import exit_with_parent
from synkhronos.ranks.errors import Death, describe_rank
from synkhronos.startup import start_ranks
from synkhronos.timelines import timeline
from synkhronos.training.loops.stop_signals import StopSignalHandler, get_stop_signal


def main(folder: str, arguments: MasterArguments) -> int:
    """Train with the settings in a run's folder, and return the exit code."""
    exit_with_parent(arguments.supervisor_pid, from_main_thread=True)
    for stream in (sys.stdout, sys.stderr):  # the supervisor reads UTF-8, whatever the locale
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    settings = Settings.load(folder)
    try:
        return _train(settings, arguments)
    except BaseException as error:
        if arguments.memory_checkpoint_folder:
            _log_failure(folder, error, arguments.is_recovery and not (Path(folder) / PROCESSES_FILE).exists())
        text = _describe_failure(error)
        try:
            (Path(folder) / FAILURE_FILE).write_text(text, "utf-8", "backslashreplace")
        except OSError as full:
            sys.stderr.write(f"{FAILURE_FILE} can't be written: {full}\n{text}")
        return 130 if isinstance(error, KeyboardInterrupt) else 1


def _describe_failure(error: BaseException) -> str:
    """Return the failed rank and the traceback, or only the message of an error that the user can correct."""
    kinds = SettingsError, ModelInterfaceError
    if not isinstance(error, WorkerError):
        is_user_error = isinstance(error, kinds)
        return f"rank 0: {error}\n" if is_user_error else "rank 0:\n" + "".join(traceback.format_exception(error))
    if not error.reports:
        return f"rank {error.rank}:\n{error}\n"
    report = error.reports[0]
    name = describe_rank(report.rank, report.host)
    is_user_error = (report.module, report.class_name) in [(kind.__module__, kind.__qualname__) for kind in kinds]
    return f"{name}: {report.message}\n" if is_user_error else f"{name}:\n{report.traceback}\n"


def _log_failure(folder: str, error: BaseException, is_failed_start: bool) -> None:
    """Log why the session failed: a death, another failure of a rank, or in a failed start any exception."""
    session = get_last_session()
    if session is not None and session.death is not None:
        DeathLog(folder).add(session.death)
    elif isinstance(error, WorkerError) and not error.reports:
        # Its host has no name here: the supervisor would take the host for a lost one.
        DeathLog(folder).add(Death.from_ended_session(error.rank, error.description))
    elif is_failed_start and isinstance(error, WorkerError):
        assert session is not None
        host = session.get_host_name(error.rank)
        n_ranks = next(len(ranks) for ranks in session.ranks_by_host if error.rank in ranks)
        death = Death.from_failed_start(error.rank, host, str(error).partition("\n")[0])
        DeathLog(folder).add(death, n_ranks - 1 if host else None)
    elif is_failed_start and isinstance(error, MissingGpuError):
        DeathLog(folder).add(Death.from_failed_start(0, error.host, "its GPU is missing"), error.n_gpus)
    elif is_failed_start and isinstance(error, Exception):
        DeathLog(folder).add(Death.from_failed_start(0, "", f"{type(error).__name__}: {error}"))


def _train(settings: Settings, arguments: MasterArguments) -> int:
    """Train.  Return `COMPLETE_EXIT_CODE`, or 128 plus the number of the signal at which a checkpoint was written."""
    import_theano_before_fork(settings.uses_gpus)
    np.random.seed(settings.seed)
    random.seed(settings.seed)
    # BLAS has started its threads within rank 0's cores.  Other ranks bind theirs.
    core_binding.bind_to_cores(arguments.allowed_cores)
    hosts_output = None
    if arguments.remote_output_pipe is not None:
        hosts_output = open(arguments.remote_output_pipe, "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    hosts, n_ranks = parse_hosts(settings.hosts), None if settings.hosts else len(settings.devices)
    start_ranks(hosts, n_ranks, settings.uses_gpus, cores=arguments.rank_cores, output=hosts_output)
    processes = run(rank_functions.prepare_rank, settings, arguments)
    (Path(settings.folder) / PROCESSES_FILE).write_text(json.dumps(processes))
    exchange_rule = settings.make_exchange_rule()
    n_elements, dtype = run(rank_functions.build_model, settings, exchange_rule)[0]
    shared_arrays = allocate_shared_arrays(exchange_rule, len(processes), n_elements, np.dtype(dtype))
    stop_flag = create_unpublished((1,), "int64")
    path = Path(settings.folder) / "timeline.json"
    recording = timeline(path) if settings.timeline else contextlib.nullcontext()
    # Before this point there is nothing to save, and signals end the run.  The supervisor limits the time to save.
    with recording, StopSignalHandler(None, stop_flag.data) if settings.saves_on_signal else contextlib.nullcontext():
        is_complete = run(rank_functions.train_model, settings, exchange_rule, shared_arrays, arguments, stop_flag)[0]
        return COMPLETE_EXIT_CODE if is_complete else 128 + get_stop_signal()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], MasterArguments(**json.loads(sys.argv[2]))))
