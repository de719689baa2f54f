"""Runs started from Python: `start_run` starts a supervisor process, `BackgroundRun.wait` waits for its exit.

The run needs another process: the caller continues in the meantime, and a process that has threads, or has started the
GPU's driver, cannot fork ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from synkhronos.exchange_rules import BSP, ExchangeRule
from synkhronos.launcher.configuration.resolve import resolve_settings
from synkhronos.launcher.configuration.settings import SettingsError, merge_tables
from synkhronos.launcher.configuration.sources import check_setting_names, read_environment
from synkhronos.launcher.supervision.rank_output import open_standard_streams
from synkhronos.launcher.supervision.run_folder import FAILURE_FILE, create_and_lock_run_folder
from synkhronos.ranks.child_process import make_python_path
from synkhronos.training.loops.stop_signals import STOP_SIGNALS

#: Seconds after which the supervisor of an interrupted run is killed.
_INTERRUPTED_GRACE_SECONDS = 15


def start_run(
    rule: ExchangeRule,
    devices: Sequence[str] | str | None = None,
    modelfile: str = "",
    modelclass: str = "",
    **settings: Any,
) -> BackgroundRun:
    """Start to train a model class in new processes, without waiting for them.

    Parameters
    ----------
    rule : ExchangeRule
        Its class and options are settings of the run.
    devices : list of str, optional
        Device of each rank: ``cpu``, or ``cuda0``, ``gpu0`` and so on.
    modelfile, modelclass : str
        Module, such as ``models.mlp`` or ``models/mlp.py``, and the class in it.
    **settings
        Other settings of a session file, such as ``folder``, ``epochs`` and ``config``.

    Returns
    -------
    BackgroundRun
        Its method ``wait`` waits for the end of the run.
    """
    check_setting_names(settings, "start_run")
    merged = merge_tables([_to_settings(rule), settings])
    for name, value in (("devices", devices), ("modelfile", modelfile), ("modelclass", modelclass)):
        if value not in (None, ""):  # an empty value is left to the environment
            merged[name] = value
    script = sys.argv[0] if sys.argv and os.path.exists(sys.argv[0]) else None
    resolved = resolve_settings([read_environment(os.environ), merged], source_path=script)
    open_standard_streams()
    lock = create_and_lock_run_folder(resolved, [sys.executable, *sys.argv])
    with contextlib.suppress(OSError, ValueError):  # the disk is full, or the stream is closed
        sys.stdout.flush()
    process = subprocess.Popen(
        [sys.executable, "-m", "synkhronos.launcher.supervision.supervisor", resolved.folder, str(os.getpid())],
        env={**os.environ, "PYTHONPATH": make_python_path()},
        stdin=subprocess.DEVNULL,
        pass_fds=[lock.fileno()],  # the lock is held until the supervisor exits
        start_new_session=True,  # the terminal sends Ctrl-C to this process alone, which passes it on
    )
    lock.close()
    return BackgroundRun(process, Path(resolved.folder))


def _to_settings(rule: ExchangeRule) -> dict[str, Any]:
    """Return the settings that stand for an exchange rule."""
    for name, value in vars(rule).items():
        if callable(value):
            raise SettingsError(f"{name}: start_run takes rules whose options are numbers and strings, got {value!r}")
    options = rule.get_options()
    if isinstance(rule, BSP) and rule.has_default_average:
        del options["average"]  # the model class decides
    return {"rule": type(rule).__name__, "rule_options": options}


class BackgroundRun:
    """Run in other processes, started by `start_run`: the process of its supervisor, and its folder."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path):
        self._process, self.folder = process, folder

    def wait(self) -> Path:
        """Wait for the end of the run, and return its folder.

        Signals of a scheduler are passed on to the run.  After the run has ended, the same signals end this process.

        Raises
        ------
        RuntimeError
            If the run has failed; the message has the traceback of the first failure.
        """
        received_signals: list[int] = []

        def forward(number: int, frame: FrameType | None) -> None:
            received_signals.append(number)
            self._process.send_signal(number)

        # A scheduler ends the job when this process exits: the ranks have to write their checkpoint before.
        previous_handlers = {}
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if signal.getsignal(number) == signal.SIG_DFL:
                    previous_handlers[number] = signal.signal(number, forward)
        try:
            status = self._process.wait()
        except BaseException:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_INTERRUPTED_GRACE_SECONDS)
            self._process.kill()
            raise
        finally:
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)
        for received in received_signals:
            signal.raise_signal(received)  # the default action ends this process
        if status:
            failure = self.folder / FAILURE_FILE
            text = failure.read_text("utf-8", "backslashreplace") if failure.is_file() else ""
            raise RuntimeError(f"the run in {self.folder} has ended with status {status}\n{text}")
        return self.folder
