"""Starts a real program in a session of its own, hurts it, and sees what is left of it.

`Program`
    The process: what it tells, what it prints, and how it ends.
`Template`
    A process that has made the imports, of which programs are copies.
`code_run_by`
    What of the library's code a call runs.

Every wait has a limit.  What the program tells comes through a pipe that all its processes hold, so that the pipe's end
is the end of them all.

Most of a program's time would be its imports.  So one process makes them, and forks before it has done anything else; a
program is such a copy, in a session of its own.  With FAULTS=all in the environment each is started anew.
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
from system import LIMIT, list_shared_names, members

#: Seconds from a fault to its error.
PROMPT = 2
_HERE = pathlib.Path(__file__).parent
_SCENARIOS = [sys.executable, str(_HERE / "scenarios.py")]


def _start(words: list[str], events: int, release: int, **settings: Any) -> subprocess.Popen[bytes]:
    """Start a process that tells and is released by these pipes; for a template both are its socket."""
    environment = {
        **os.environ,
        "FAULTS_EVENTS": str(events),
        "FAULTS_RELEASE": str(release),
        # Nothing here is about what the compilers make of a graph.
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
        What to put in front of Python, such as ``unshare -m``.
    **arguments
        For the scenario, as JSON can carry them.
    """

    def __init__(self, scenario: str, *command: str, pass_on: dict[str, Any] | None = None, **arguments: Any):
        self._read, events = os.pipe()
        release, self._release = os.pipe()
        self._text = b""
        self.told: list[dict[str, Any]] = []
        self.output = tempfile.TemporaryFile("w+")
        self._names = list_shared_names()
        asked = [scenario, json.dumps(arguments)]
        self.process: subprocess.Popen[bytes] | Copy
        if command or pass_on or os.environ.get("FAULTS") == "all":
            self.process = _start(
                [*command, *_SCENARIOS, *asked],
                events,
                release,
                **{"stdin": subprocess.DEVNULL, "stdout": self.output, "stderr": self.output, **(pass_on or {})},
            )
        else:
            self.process = Template.only().copy(asked, [self.output.fileno(), events, release])
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
        self.process.wait(LIMIT)
        os.close(self._read)
        self.release()
        self.output.close()

    # -- what it tells ---------------------------------------------------------------------------------------

    def printed(self) -> str:
        """Return all that it has printed."""
        self.output.seek(0)
        return self.output.read()

    def release(self) -> None:
        """Let the ranks go that hold."""
        if self._release is not None:
            os.close(self._release)  # the end of a pipe is there for everyone to see, however often they look
            self._release = None

    def next(self, limit: float = LIMIT) -> dict[str, Any] | None:
        """Return the next event, or None if all processes have ended; fail after `limit` seconds of silence."""
        deadline = time.monotonic() + limit
        while b"\n" not in self._text:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._read], [], [], left)[0]:
                raise AssertionError(f"silent for {limit} s after {self.told}\n{self.printed()}")
            more = os.read(self._read, 1 << 16)
            if not more:
                return None
            self._text += more
        line, self._text = self._text.split(b"\n", 1)
        self.told.append(json.loads(line))
        return self.told[-1]

    def wait(self, event: str, limit: float = LIMIT) -> dict[str, Any]:
        """Return the next event of this name."""
        deadline = time.monotonic() + limit
        while True:
            told = self.next(deadline - time.monotonic())
            assert told is not None, f"it ended before {event!r}, after {self.told}\n{self.printed()}"
            if told["event"] == event:
                return told

    def is_silent(self, seconds: float) -> bool:
        """Whether it tells nothing for so long."""
        return not self._text and not select.select([self._read], [], [], seconds)[0]

    def fault(self) -> float:
        """Return when the last of the ranks reached the point where something happens to it."""
        return max(told["time"] for told in self.told if told["event"] == "inside")

    # -- what is done to it ----------------------------------------------------------------------------------

    def send_signal(self, pid: int | None, number: int) -> float:
        """Send a signal to one process, or for None to all of them as a terminal does; return the time."""
        moment = time.monotonic()
        if pid is None:
            os.killpg(self.pid, number)
        else:
            os.kill(pid, number)
        return moment

    # -- what is left of it ----------------------------------------------------------------------------------

    def end(self, limit: float = LIMIT) -> int:
        """Wait for the master's end, and return its exit code."""
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {limit} s; told {self.told}\n{self.printed()}") from None

    def check_no_leaks(self, limit: float = 1) -> None:
        """Check that all processes are gone, that nothing is left in /dev/shm, and return what was told last."""
        deadline = time.monotonic() + limit
        try:
            while self.next(max(0.001, deadline - time.monotonic())) is not None:
                pass
        except AssertionError:
            raise AssertionError(f"{members(self.pid)} are left\n{self.printed()}") from None
        while members(self.pid):  # the pipe is closed a moment before the process is gone
            assert time.monotonic() < deadline, f"{members(self.pid)} are left"
            time.sleep(0.005)
        # Other programs may use the library just now: their names stay for a moment only.
        while left := list_shared_names() - self._names:
            assert time.monotonic() < deadline + 0.5, f"{left} are left in /dev/shm"
            time.sleep(0.005)


class Template:
    """A process that has made all imports, and copies itself for each program; one at a time."""

    _only: Template | None = None

    def __init__(self) -> None:
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        nothing = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        with theirs:
            self.process = _start([*_SCENARIOS, "template"], theirs.fileno(), theirs.fileno(), **nothing)

    @classmethod
    def only(cls) -> Template:
        """Return the one of this process, which ends with it."""
        if cls._only is None:
            cls._only = cls()
        return cls._only

    @classmethod
    def end(cls) -> None:
        """End the one of this process, for tests that look at all children of theirs."""
        if cls._only is not None:
            cls._only.channel.close()
            cls._only.process.wait()
            cls._only = None

    def copy(self, words: list[str], files: list[int]) -> Copy:
        """Start a copy with these arguments, and its output, and the pipes by which it tells and is released."""
        socket.send_fds(self.channel, [json.dumps(words).encode()], files)
        return Copy(self.channel, int(_received(self.channel, LIMIT)))


class Copy:
    """A program that a template has started; waited for as `subprocess.Popen` is."""

    def __init__(self, channel: socket.socket, pid: int):
        self._channel = channel
        self.pid = pid
        self.returncode: int | None = None

    def wait(self, timeout: float = LIMIT) -> int:
        """Return the exit code; minus a signal's number."""
        if self.returncode is None:
            self.returncode = int(_received(self._channel, timeout))
        return self.returncode


def _received(channel: socket.socket, limit: float) -> bytes:
    if not select.select([channel], [], [], limit)[0]:
        raise subprocess.TimeoutExpired("a template's copy", limit)
    told = channel.recv(64)
    assert told, "the template has ended"
    return told


def code_run_by(call: Callable[[], object]) -> list[str]:
    """Return the lines of the library, and of Python's weak references, that a call runs."""
    places = [str(ROOT / "synkhronos"), weakref.__file__, _weakrefset.__file__]
    ran = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(tuple(places)):
            ran.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return ran
