"""The process of worker 0, which is the master of the ranks, and the program of each rank."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback

import synkhronos
from synkhronos.compat.platoon.channel import link
from synkhronos.compat.platoon.channel.group import Failure, Plan
from synkhronos.compat.platoon.program import run_file
from synkhronos.compat.platoon.util import EndOfBatches
from synkhronos.ranks import WorkerError
from synkhronos.ranks.worker import end_with
from synkhronos.tasks import Worker, run


class ScriptError(Exception):
    """A worker's program has failed; the worker has reported why."""


def main() -> None:
    """Fork the ranks of a `Plan`, and run the worker's file on each; the process of worker 0."""
    plan = Plan(**json.loads(sys.argv[1]))
    end_with(plan.controller, in_main_thread=True)
    on_gpu = plan.devices[0] != "cpu"
    if on_gpu:
        _set_flag("PYTENSOR_FLAGS", "mode", "JAX")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(_visible(device) for device in plan.devices)
    _set_flag("THEANO_FLAGS", "compile.wait", "1")  # seconds between two looks at the compiler's lock, not 5 to 10
    with contextlib.suppress(ImportError):  # once for all ranks
        import theano  # noqa: F401
    synkhronos.fork(len(plan.devices), use_gpu=on_gpu)
    try:
        run(run_script, plan)
    except ScriptError:
        sys.exit(1)
    except WorkerError as error:
        sys.stderr.write(f"{error}\n")
        text, _, _ = str(error).splitlines()[0].partition("; the other workers")
        _report(error.rank, text.replace(f"rank {error.rank}", f"worker {error.rank}", 1))
        sys.exit(1)
    except RuntimeError as error:  # a worker has ended that others wait for
        _report(0, str(error))
        raise
    finally:
        synkhronos.close()


def _report(rank: int, message: str) -> None:
    """Report a failure that no worker reports itself."""
    if link.current is not None:
        link.current.report(Failure(rank, 2, message, is_own=False))


def _set_flag(variable: str, name: str, value: str) -> None:
    """Set a flag of the graph library, unless the user has."""
    flags = os.environ.get(variable, "")
    if f"{name}=" not in flags:
        os.environ[variable] = ",".join(filter(None, [flags, f"{name}={value}"]))


def _visible(device: str) -> str:
    """Return CUDA's name of a device such as ``cuda1`` among those that this process sees."""
    number = device.removeprefix("cuda").removeprefix("gpu") or "0"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return number if visible is None else visible.split(",")[int(number)].strip()


def run_script(worker: Worker, plan: Plan) -> None:
    """Run the worker's file on one rank.

    Raises
    ------
    ScriptError
        If the program raises, or exits with another status than 0; all other ranks leave their programs then.
    """
    if worker.number:  # worker 0 was started with files of its own
        sys.stdout.flush()
        sys.stderr.flush()
        for file, kind in ((1, "out"), (2, "err")):
            log = os.open(f"{plan.logs[worker.number]}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(log, file)
            os.close(log)
    link.current = link.Link(worker, plan.address)
    # The controller learns of all workers before one of them may end.
    worker.barrier("the workers are connected")
    try:
        run_file(plan.script, plan.arguments)
        return
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if not status:
            return
        what = f"exited with status {status}"
        if not isinstance(error.code, int):
            sys.stderr.write(f"{error.code}\n")
            what = f"exited with {error.code!r}"
    except BaseException as error:
        if isinstance(error, EndOfBatches) and error.is_idle:
            sys.stderr.write("this worker has ended: there are no more mini-batches\n")
            return
        worker._rank.check()  # raises if a peer has failed before: this error may be a consequence
        traceback.print_exc()
        status, what = 1, f"raised {type(error).__name__}: {error}"
    log_name = f"{plan.logs[worker.number]}.err"
    message = f"worker {worker.number} ({plan.devices[worker.number]}, process {os.getpid()}) {what}; see {log_name}"
    link.current.report(Failure(worker.number, status, message, is_own=True))
    raise ScriptError(what)
