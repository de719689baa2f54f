"""Runs started from Python: ``rule.init(...)`` starts a supervisor process, ``rule.wait()`` waits for its exit.

The run needs another process: the caller continues between `init` and `wait`, and a process that has threads, or has
started the GPU's driver, cannot fork ranks.
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

from synkhronos.exchange_rules import ExchangeRule
from synkhronos.launcher.configuration.resolve import resolve_settings
from synkhronos.launcher.configuration.settings import (
    Settings,
    convert_to_settings_error,
    get_exchange_rule_options,
    merge_tables,
)
from synkhronos.launcher.configuration.sources import check_setting_names, read_environment
from synkhronos.launcher.configuration.theano_mpi_session import parse_exchange_option
from synkhronos.launcher.supervision.process_environment import make_python_path, open_standard_streams
from synkhronos.launcher.supervision.run_folder import FAILURE_FILE, create_and_lock_run_folder
from synkhronos.training.loops.stop_signals import STOP_SIGNALS

#: Seconds after which the supervisor of an interrupted run is killed.
_INTERRUPTED_GRACE_SECONDS = 15


class LaunchedRun:
    """Handle of a run in other processes, which the constructor starts with the settings of ``rule.init``."""

    def __init__(
        self,
        exchange_rule: ExchangeRule,
        devices: Sequence[str] | str | None,
        modelfile: str,
        modelclass: str,
        **other_settings: Any,
    ):
        check_setting_names(other_settings, "init")
        rule_settings = {"rule": type(exchange_rule).__name__, "rule_options": get_exchange_rule_options(exchange_rule)}
        attributes = {
            name: getattr(exchange_rule, name, None) for name in ("sync_type", "exch_strategy")
        }  # Theano-MPI's
        with convert_to_settings_error():
            exchange = [parse_exchange_option(name, value) for name, value in attributes.items() if value is not None]
        settings = merge_tables([rule_settings, *exchange, other_settings])
        for name, value in (("devices", devices), ("modelfile", modelfile), ("modelclass", modelclass)):
            if value not in (None, ""):  # an empty value is left to the environment
                settings[name] = value
        script = sys.argv[0] if sys.argv and os.path.exists(sys.argv[0]) else None
        self.settings: Settings = resolve_settings([settings, read_environment(os.environ)], source_path=script)
        self.folder = Path(self.settings.folder)
        open_standard_streams()
        lock = create_and_lock_run_folder(self.settings, [sys.executable, *sys.argv])
        with contextlib.suppress(OSError, ValueError):  # the disk is full, or the stream is closed
            sys.stdout.flush()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "synkhronos.launcher.supervision.supervisor", str(self.folder), str(os.getpid())],
            env={**os.environ, "PYTHONPATH": make_python_path()},
            stdin=subprocess.DEVNULL,
            pass_fds=[lock.fileno()],  # the lock is held until the supervisor exits
            start_new_session=True,  # the terminal sends Ctrl-C to this process alone, which passes it on
        )
        lock.close()

    def wait(self) -> Path:
        """Wait for the end of the run, and return its folder.

        Signals of a scheduler are passed on to the run; when it has ended they end this process.

        Raises
        ------
        RuntimeError
            If the run has failed; the message has the traceback of the first failure.
        """
        received_signals: list[int] = []

        def forward(number: int, frame: FrameType | None) -> None:
            received_signals.append(number)
            self._process.send_signal(number)

        # A scheduler ends the job when this process exits, so it exits after the ranks have written their checkpoint.
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
