"""The process of worker 0, which is the master of the ranks, and the program that each rank runs."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace

from synkhronos.compat.theano_import import import_theano_before_fork
from synkhronos.gpus import format_visible_gpus
from synkhronos.platoon.channel import controller_connection
from synkhronos.platoon.channel.controller_process import run_user_file, start_controller
from synkhronos.platoon.channel.sockets import POLL_SECONDS
from synkhronos.platoon.channel.worker_group import UNREPORTED_FAILURE_STATUS, WorkerFailure, WorkerSettings
from synkhronos.platoon.util import EndOfBatches
from synkhronos.programs import RankContext, run
from synkhronos.programs.rank_context import get_rank
from synkhronos.ranks import WorkerError
from synkhronos.ranks.child_process import exit_with_parent
from synkhronos.ranks.errors import Cancelled, describe_exit
from synkhronos.startup import close, fork


class ScriptError(Exception):
    """A worker's file has failed; the worker itself has reported the reason."""


def main() -> None:
    """Fork the ranks and run the worker's file on each; the argument is a `WorkerSettings` as JSON."""
    settings = WorkerSettings.from_json(sys.argv[1])
    exit_with_parent(settings.controller_pid, from_main_thread=True)
    use_gpu = settings.devices[0] != "cpu"
    devices_by_host = {} if settings.hosts is None else settings.hosts.devices_by_host
    hosts = [f"{name}:{len(devices)}" for name, devices in devices_by_host.items()]
    if use_gpu and not hosts:
        numbers = [device.removeprefix("cuda").removeprefix("gpu") or "0" for device in settings.devices]
        os.environ["CUDA_VISIBLE_DEVICES"] = format_visible_gpus(map(int, numbers))
    import_theano_before_fork(use_gpu)
    fork(None if hosts else len(settings.devices), use_gpu=use_gpu, hosts=hosts)
    try:
        with _watch_other_hosts() if hosts else contextlib.nullcontext():
            run(run_script, settings)
    except ScriptError:
        sys.exit(1)
    except WorkerError as error:
        sys.stderr.write(f"{error}\n")
        # A worker of another host has reported only to the controller of its host.
        is_self_reported = bool(error.reports) and error.reports[0].class_name == ScriptError.__name__
        message = error.description.replace(f"rank {error.rank}", f"worker {error.rank}", 1)
        _report_failure(error.reports[0].message if is_self_reported else message, is_self_reported)
        sys.exit(1)
    except RuntimeError as error:  # other workers wait for a worker that has ended
        _report_failure(str(error))
        raise
    finally:
        close()


@contextlib.contextmanager
def _watch_other_hosts() -> Iterator[None]:
    """Report a failure on any host to the first controller, which then limits its wait for the other workers.

    Workers of other hosts report to their own controllers.  The exception reaches worker 0 when all workers have ended.
    """
    has_ended = threading.Event()

    def watch() -> None:
        while not has_ended.wait(POLL_SECONDS * 4):
            connection = controller_connection.current_connection
            rank = None if connection is None else get_rank(connection.context)
            if rank is not None and rank.barriers.has_failed:
                _report_failure("a worker of another host has failed; see the logs of all workers")
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def _report_failure(message: str, is_self_reported: bool = False) -> None:
    """Report a failure to the first controller."""
    if controller_connection.current_connection is not None:
        failure = WorkerFailure(UNREPORTED_FAILURE_STATUS, message, is_self_reported)
        controller_connection.current_connection.report_failure(failure)


def run_script(context: RankContext, settings: WorkerSettings) -> None:
    """Run the worker's file on one rank; raise ScriptError if it fails, or exits with a status other than 0."""
    os.makedirs(os.path.dirname(settings.log_paths[0]), exist_ok=True)  # hosts may share no folder
    if context.number:  # worker 0 was started with its own files
        sys.stdout.flush()
        sys.stderr.flush()
        for file_descriptor, suffix in ((1, "out"), (2, "err")):
            path = f"{settings.log_paths[context.number]}.{suffix}"
            log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(log, file_descriptor)
            os.close(log)
    with _connect_to_controller(context, settings):
        _run_worker_file(context, settings)


@contextlib.contextmanager
def _connect_to_controller(context: RankContext, settings: WorkerSettings) -> Iterator[None]:
    """Connect a worker with its host's controller; the first worker of another host starts the controller."""
    folder, first_rank = os.path.dirname(settings.log_paths[0]), get_rank(context).local_ranks.start
    if settings.hosts is None or not first_rank:
        controller_connection.current_connection = controller_connection.ControllerConnection(
            context, settings.address, f"{folder}/controller_cpu.err", context.report_progress
        )
        yield
        return
    hosts, address, controller = settings.hosts, f"{settings.address}-{first_rank}", None
    index = hosts.find_host_index(first_rank)
    name = list(hosts.devices_by_host)[index]
    log = f"{folder}/controller_{name}"
    if context.number == first_rank:
        controller = start_controller(hosts.controller_command, log, None, replace(hosts, index=index, address=address))

    def report_and_check_controller() -> None:
        context.report_progress()
        if controller is not None and controller.poll() is not None:
            raise ScriptError(f"the controller of host {name} ended before its workers began; see {log}.err")

    controller_connection.current_connection = controller_connection.ControllerConnection(
        context, address, f"{log}.err", report_and_check_controller
    )
    try:
        yield
    finally:
        controller_connection.current_connection.report_end()
    if controller is not None:
        while controller.poll() is None:
            context.report_progress()
            time.sleep(POLL_SECONDS)
        if controller.returncode:
            raise ScriptError(f"the controller of host {name} {describe_exit(controller.returncode)}; see {log}.err")


def _run_worker_file(context: RankContext, settings: WorkerSettings) -> None:
    """Run the worker's file; report a failure to the controller, and raise ScriptError."""
    assert controller_connection.current_connection is not None
    # Every worker is connected before one of them may end.
    context.barrier("the workers are connected")
    try:
        run_user_file(settings.script, settings.arguments)
        return
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if not status:
            return
        outcome = f"exited with status {status}"
        if not isinstance(error.code, int):
            sys.stderr.write(f"{error.code}\n")
            outcome = f"exited with {error.code!r}"
    except Cancelled:  # worker 0 reports the reason
        raise
    except BaseException as error:
        if isinstance(error, EndOfBatches) and error.is_idle:
            sys.stderr.write("this worker has ended: there are no more mini-batches\n")
            return
        # This raises if a peer has failed before, since the error may be a consequence.
        get_rank(context).barriers.check_cancelled()
        traceback.print_exc()
        status, outcome = 1, f"raised {type(error).__name__}: {error}"
    description = f"worker {context.number} ({settings.devices[context.number]}, process {os.getpid()})"
    log = f"{settings.log_paths[context.number]}.err"
    controller_connection.current_connection.report_failure(
        WorkerFailure(status, f"{description} {outcome}; see {log}", is_self_reported=True)
    )
    raise ScriptError(f"{description} {outcome.splitlines()[0]}; see {log}")
