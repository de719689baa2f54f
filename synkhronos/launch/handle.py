"""Runs that a Python script starts.

`LaunchedRun`
    One of them: what ``rule.init`` starts, and ``rule.wait`` waits for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from synkhronos.launch.key_value import exchange_settings
from synkhronos.launch.settings import (
    FAILURE,
    Settings,
    SettingsError,
    from_environment,
    joined,
    options_of,
    resolve,
)
from synkhronos.launch.supervisor import open_standard_streams, prepare, python_path
from synkhronos.rules import Rule
from synkhronos.training.stop import STOP_SIGNALS


def _exchange(rule: Rule) -> Iterator[dict[str, Any]]:
    """Yield the settings for the attributes by which Theano-MPI's users say how ranks exchange."""
    for name in ("sync_type", "exch_strategy"):
        value = getattr(rule, name, None)
        if value is not None:
            try:
                yield exchange_settings(name, value)
            except ValueError as error:
                raise SettingsError(str(error)) from None


class LaunchedRun:
    """A run in processes of its own."""

    def __init__(self, rule: Rule, devices: Sequence[str] | str | None, modelfile: str, modelclass: str, **others: Any):
        asked = joined([{"rule": type(rule).__name__, "rule_options": options_of(rule)}, *_exchange(rule), others])
        for name, value in (("devices", devices), ("modelfile", modelfile), ("modelclass", modelclass)):
            if value not in (None, ""):  # else the environment may say it
                asked[name] = value
        script = sys.argv[0] if sys.argv and os.path.exists(sys.argv[0]) else None
        self.settings: Settings = resolve([asked, from_environment(os.environ)], beside=script)
        self.folder = Path(self.settings.folder)
        open_standard_streams()
        lock = prepare(self.settings, [sys.executable, *sys.argv])
        with contextlib.suppress(OSError, ValueError):  # on a full disk, or closed
            sys.stdout.flush()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "synkhronos.launch.supervisor", str(self.folder), str(os.getpid())],
            env={**os.environ, "PYTHONPATH": python_path()},
            stdin=subprocess.DEVNULL,
            pass_fds=[lock.fileno()],  # it stays open there, until the run has ended
            start_new_session=True,  # Ctrl-C comes to this process alone, which passes it on
        )
        lock.close()

    def wait(self) -> Path:
        """Return the run's folder when it has ended.

        Raises
        ------
        RuntimeError
            If it has failed; with the first failure's traceback.
        """
        came: list[int] = []

        def forward(number: int, frame: FrameType | None) -> None:
            came.append(number)
            self._process.send_signal(number)

        # A scheduler ends a job when this process has ended: not before the ranks have written their checkpoint.
        before = {}
        if threading.current_thread() is threading.main_thread():
            before = {n: signal.signal(n, forward) for n in STOP_SIGNALS if signal.getsignal(n) == signal.SIG_DFL}
        try:
            status = self._process.wait()
        except BaseException:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(15)
            self._process.kill()
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        for received in came:
            signal.raise_signal(received)  # which ends this process, as it would have done at once
        if status:
            failure = self.folder / FAILURE
            words = failure.read_text("utf-8", "backslashreplace") if failure.is_file() else ""
            raise RuntimeError(f"the run in {self.folder} has ended with status {status}\n{words}")
        return self.folder
