"""Starts a program in a new session, injects faults, and checks that no process is left.

Every wait has a limit.  All processes of the program hold the pipe on which it reports events, so that end of file on
the pipe means that all of them have exited.

Imports would take most of a program's time.  So one process, the `Template`, imports the modules and is forked for each
program.  With FAULTS=all in the environment each program is started anew.
"""

from __future__ import annotations

import _weakrefset
import contextlib
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from typing import Any

from paths import ROOT, SUPPORT
from system import LIMIT_SECONDS, list_session_members

#: Maximal median of the seconds from a fault to its error; on a busy machine, single errors are late.
MAX_ERROR_SECONDS = 2
#: Seconds from each fault of a test file to its error.
_delays: list[float] = []
_HERE = pathlib.Path(__file__).parent
_SCENARIOS = [sys.executable, str(_HERE / "scenarios.py")]


def check_delay(seconds: float) -> None:
    """Check the seconds from a fault to its error, and store them for `check_delays`."""
    assert seconds < LIMIT_SECONDS
    _delays.append(seconds)


def check_delays() -> None:
    """Check that the errors of a test file were prompt: the median of their delays."""
    delays = sorted(_delays)
    _delays.clear()
    assert not delays or delays[len(delays) // 2] < MAX_ERROR_SECONDS, delays


def _start(words: list[str], events: int, release: int, **settings: Any) -> subprocess.Popen[bytes]:
    """Start a process with the pipes of its events and of its release; both are the socket of a template."""
    environment = {
        **os.environ,
        "FAULTS_EVENTS": str(events),
        "FAULTS_RELEASE": str(release),
        # Compiled code is not the subject of these tests.
        "PYTENSOR_FLAGS": "mode=Mode,linker=py,optimizer=None",
        "THEANO_FLAGS": "blas.ldflags=,mode=Mode,linker=py,optimizer=None",
        "PYTHONPATH": os.pathsep.join([str(SUPPORT), str(ROOT)]),
    }
    return subprocess.Popen(words, start_new_session=True, pass_fds=(events, release), env=environment, **settings)


class Program:
    """A scenario of `scenarios.py`, running.

    Parameters
    ----------
    scenario : str
        The function in `scenarios.py`.
    *command : str
        Words before the interpreter in the command line, such as ``unshare -m``.
    **arguments
        Arguments of the scenario, sent as JSON.
    """

    def __init__(self, scenario: str, *command: str, pass_on: dict[str, Any] | None = None, **arguments: Any):
        self._read, events = os.pipe()
        release, self._release = os.pipe()
        self._text = b""
        self.events: list[dict[str, Any]] = []
        self.output = tempfile.TemporaryFile("w+")
        scenario_arguments = [scenario, json.dumps(arguments)]
        self.process: subprocess.Popen[bytes] | ForkedProgram
        if command or pass_on or os.environ.get("FAULTS") == "all":
            self.process = _start(
                [*command, *_SCENARIOS, *scenario_arguments],
                events,
                release,
                **{"stdin": subprocess.DEVNULL, "stdout": self.output, "stderr": self.output, **(pass_on or {})},
            )
        else:
            self.process = Template.get_instance().copy(scenario_arguments, [self.output.fileno(), events, release])
        os.close(events)
        os.close(release)

    @property
    def pid(self) -> int:
        """The master's process, and the number of the session."""
        return self.process.pid

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait(LIMIT_SECONDS)
        os.close(self._read)
        self.release()
        self.output.close()

    # -- events ----------------------------------------------------------------------------------------------

    def read_output(self) -> str:
        """Return the program's output."""
        self.output.seek(0)
        return self.output.read()

    def release(self) -> None:
        """Release the ranks that block."""
        if self._release is not None:
            os.close(self._release)  # each read then returns the end of file
            self._release = None

    def read_event(self, limit: float = LIMIT_SECONDS) -> dict[str, Any] | None:
        """Return the next event, or None if all processes have ended; fail after `limit` seconds of silence."""
        deadline = time.monotonic() + limit
        while b"\n" not in self._text:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._read], [], [], left)[0]:
                raise AssertionError(f"silent for {limit} s after {self.events}\n{self.read_output()}")
            chunk = os.read(self._read, 1 << 16)
            if not chunk:
                return None
            self._text += chunk
        line, self._text = self._text.split(b"\n", 1)
        self.events.append(json.loads(line))
        return self.events[-1]

    def wait_for_event(self, event: str, limit: float = LIMIT_SECONDS) -> dict[str, Any]:
        """Return the next event of this name."""
        deadline = time.monotonic() + limit
        while True:
            message = self.read_event(deadline - time.monotonic())
            assert message is not None, f"it ended before {event!r}, after {self.events}\n{self.read_output()}"
            if message["event"] == event:
                return message

    def is_silent(self, seconds: float) -> bool:
        """Return whether the program reports no event for this time."""
        return not self._text and not select.select([self._read], [], [], seconds)[0]

    def get_fault_time(self) -> float:
        """Return the time at which the last rank reached the point of the fault."""
        return max(message["time"] for message in self.events if message["event"] == "inside")

    # -- faults ----------------------------------------------------------------------------------------------

    def send_signal(self, pid: int | None, number: int) -> float:
        """Send a signal to a process, or with None to all of them, as a terminal does; return the time."""
        send_time = time.monotonic()
        if pid is None:
            os.killpg(self.pid, number)
        else:
            os.kill(pid, number)
        return send_time

    # -- the end ---------------------------------------------------------------------------------------------

    def check_calls_and_exit(self) -> None:
        """Check that the next calls return the right results, and that the program exits by itself without leaks."""
        works = self.wait_for_event("works")
        assert works.get("value") == works["right"], works
        check_footprint(self.wait_for_event("closed"))
        assert self.wait_for_exit() == 0, self.read_output()
        self.check_no_leaks()

    def wait_for_exit(self) -> int:
        """Wait until the master exits; return its exit code."""
        try:
            return self.process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"still there after {LIMIT_SECONDS} s; events {self.events}\n{self.read_output()}"
            ) from None

    def check_no_leaks(self) -> None:
        """Check that all processes have exited, which frees their memory."""
        deadline = time.monotonic() + LIMIT_SECONDS
        try:
            while self.read_event(max(0.001, deadline - time.monotonic())) is not None:
                pass
        except AssertionError:
            raise AssertionError(f"{list_session_members(self.pid)} are left\n{self.read_output()}") from None
        while list_session_members(self.pid):  # the pipe is closed shortly before the process ends
            assert time.monotonic() < deadline, f"{list_session_members(self.pid)} are left"
            time.sleep(0.005)


def check_footprint(event: dict[str, Any]) -> None:
    """Check that open files, mappings of shared memory and child processes are the same as before."""
    before, after = event["before"], event["after"]
    assert len(after.pop("maps")) == len(before.pop("maps")), event
    assert after == before
    assert after["children"] == []


class Template:
    """A process that has imported all modules, and forks for each program, one at a time."""

    _instance: Template | None = None

    def __init__(self) -> None:
        self.channel, template_channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        no_streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        with template_channel:
            self.process = _start(
                [*_SCENARIOS, "template"], template_channel.fileno(), template_channel.fileno(), **no_streams
            )

    @classmethod
    def get_instance(cls) -> Template:
        """Return this process' only template; it exits with this process."""
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    @classmethod
    def end(cls) -> None:
        """End the template, for tests that list all child processes."""
        if cls._instance is not None:
            cls._instance.channel.close()
            cls._instance.process.wait()
            cls._instance = None

    def copy(self, words: list[str], files: list[int]) -> ForkedProgram:
        """Start a copy with these arguments; `files` are its output and the pipes of its events and of its release."""
        socket.send_fds(self.channel, [json.dumps(words).encode()], files)
        return ForkedProgram(self.channel, int(_receive_message(self.channel, LIMIT_SECONDS)))


class ForkedProgram:
    """A program that a template has forked; `wait` is that of `subprocess.Popen`."""

    def __init__(self, channel: socket.socket, pid: int):
        self._channel = channel
        self.pid = pid
        self.returncode: int | None = None

    def wait(self, timeout: float = LIMIT_SECONDS) -> int:
        """Return the exit code; a signal's number is negative."""
        if self.returncode is None:
            self.returncode = int(_receive_message(self._channel, timeout))
        return self.returncode


def _receive_message(channel: socket.socket, limit: float) -> bytes:
    if not select.select([channel], [], [], limit)[0]:
        raise subprocess.TimeoutExpired("a template's copy", limit)
    message = channel.recv(64)
    assert message, "the template has ended"
    return message


def list_called_functions(call: Callable[[], object]) -> list[str]:
    """Return the names of functions of the library, and of Python's weak references, that a call runs."""
    files = [str(ROOT / "synkhronos"), weakref.__file__, _weakrefset.__file__]
    names = []

    def record_call(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(tuple(files)):
            names.append(frame.f_code.co_qualname)

    sys.setprofile(record_call)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names
