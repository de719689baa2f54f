"""Runs of the launcher in new processes."""

import atexit
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from library import ENVIRONMENT_WITHOUT_COMPILER
from paths import ROOT, SUPPORT

from synkhronos.__main__ import main
from synkhronos.devices import JAX
from synkhronos.launcher.supervision import supervisor

ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("SYNKHRONOS_")},
    "PYTHONPATH": f"{ROOT}{os.pathsep}{SUPPORT}",
    **ENVIRONMENT_WITHOUT_COMPILER,
}


def make_synkhronos_command(*arguments):
    return [sys.executable, "-m", "synkhronos", *map(str, arguments)]


def run(*arguments, status=0, cwd=None, new=False, **environment):
    """Run a command of the library, and check its exit status.

    A run of ``train``, and its rank 0, are copies of this process, unless it is to be `new` or has an environment of its
    own: imports would take most of its time.
    """
    command = make_synkhronos_command(*arguments)
    if arguments[0] == "train" and not (new or environment):
        done = _run_copy(command, cwd)
    else:
        done = subprocess.run(
            command, cwd=cwd, env=ENVIRONMENT | environment, capture_output=True, text=True, timeout=100
        )
    assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
    return done


def _run_copy(command, cwd):
    """Run a command of the library in a copy of this process; return the completed process."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        copy = multiprocessing.get_context("fork").Process(target=_run_main, args=(command, cwd, output, errors))
        copy.start()
        try:
            copy.join(100)
            if copy.exitcode is None:
                raise subprocess.TimeoutExpired(command, 100)
        finally:
            copy.kill()
            copy.join()
        for file in (output, errors):
            file.seek(0)
        return subprocess.CompletedProcess(command, copy.exitcode, output.read(), errors.read())


def _run_main(command, cwd, output, errors):
    """Run a command in this process, with these files as its output and with the environment of a new process."""
    _set_process_state(output.fileno(), errors.fileno(), ENVIRONMENT)
    os.chdir(cwd or ".")
    sys.path.insert(0, os.getcwd())
    if not JAX.has_unforkable_runtime():
        supervisor.subprocess = SimpleNamespace(Popen=MasterCopy, DEVNULL=subprocess.DEVNULL)
    main(command[3:])


def _set_process_state(output, errors, environment):
    """Give a copy of a process the standard streams and the environment of a new process."""
    os.dup2(output, 1)
    os.dup2(errors, 2)
    sys.stdout, sys.stderr = (open(fd, "w", closefd=False) for fd in (1, 2))  # in place of pytest's
    os.environ.clear()
    os.environ.update(environment)


class MasterCopy:
    """Rank 0 in a copy of its supervisor's process, with what the supervisor calls of `subprocess.Popen`."""

    def __init__(self, command, env, stdout, **options):
        words = command[command.index("-m") + 1 :]
        self._process = multiprocessing.get_context("fork").Process(target=_run_master, args=(env, stdout, *words))
        self._process.start()
        self.pid = self._process.pid
        while os.getpgid(self.pid) != self.pid and self.poll() is None:  # the supervisor may kill the group at once
            time.sleep(0.001)

    def poll(self):
        return self._process.exitcode

    returncode = property(poll)

    def wait(self):
        self._process.join()
        return self.returncode

    def send_signal(self, number):
        os.kill(self.pid, number)


def _run_master(environment, output, module, *arguments):
    """Run rank 0 in this process, with the signal handlers and the exit functions of a new process."""
    os.setsid()
    for number in {signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _set_process_state(output, output, environment)
    sys.argv[1:] = arguments
    atexit._clear()
    try:
        runpy.run_module(module, run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def train(folder, model="MLP", *arguments, status=0, environment=None, **settings):
    """Train a class of launch_models on two ranks, with further environment variables."""
    module = "mlp" if model == "MLP" else "mlp_variants"
    sets = [f"--set={name.replace('__', '.')}={value}" for name, value in settings.items()]
    where = ["--set", f"model='launch_models/{module}.py:{model}'", "--folder", folder]
    return run(
        "train",
        *where,
        *([] if any("devices" in str(a) for a in arguments) else ["--devices=cpu,cpu"]),
        *sets,
        *arguments,
        status=status,
        cwd=SUPPORT,
        **(environment or {}),
    )


def run_cases(code):
    """Run a program that prints a line ``-- case NAME`` before each case; return the output of each case."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=SUPPORT, env=ENVIRONMENT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return dict(part.split("\n", 1) for part in done.stdout.split("-- case ")[1:])


def read_json_lines(folder, name):
    return [json.loads(line) for line in (Path(folder) / f"{name}.jsonl").read_text().splitlines()]


#: Waits for a line, runs a command, prints its exit status, and waits again, so that hosts outlive the run.
HOST = "import subprocess, sys; print(flush=True); input(); print(subprocess.call(sys.argv[1:]), flush=True); input()"
