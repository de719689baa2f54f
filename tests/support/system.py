"""Processes and shared memory, as the kernel lists them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from paths import ROOT, SUPPORT

#: Maximal seconds of short operations, on a busy machine.
LIMIT_SECONDS = 30
#: States of processes that have ended.
_ENDED = ("Z", "X", "")


def measure_shared_memory() -> int:
    """Return the bytes of segments that are in memory and mapped by this process."""
    with open("/proc/self/smaps") as smaps:
        entries = re.split(r"(?m)^(?=[0-9a-f]+-)", smaps.read())
    return sum(int(re.search(r"Rss: +(\d+)", e)[1]) << 10 for e in entries if "memfd:synkhronos" in e)


def list_children(pid: int) -> list[int]:
    """Return the children of a process's threads, including zombies.

    Children that were waited for, or need not be, are omitted: they remain in the kernel's list for a moment.
    """
    children = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{thread}/children") as listed:
                children += [int(child) for child in listed.read().split()]
        except (FileNotFoundError, ProcessLookupError):
            return list_children(pid)  # the thread has ended, and another thread has its children
    return [child for child in children if read_process_state(child) not in ("X", "")]


def read_process_state(pid: int) -> str:
    """Return a process's state as the kernel writes it.

    R, S, D, T for stopped, Z for a zombie, X for a process that is being removed; "" if it does not exist.
    """
    return (_read_stat_fields(pid) or [""])[0]


def is_alive(pid: int) -> bool:
    """Return whether a process is alive; a zombie is not."""
    return read_process_state(pid) not in _ENDED


def wait_for_state(pid: int, state: str) -> None:
    """Wait until a process is in a state."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while read_process_state(pid) != state:
        assert time.monotonic() < deadline, f"{pid} is {read_process_state(pid)!r}, not {state!r}"
        time.sleep(0.001)


def wait_until(
    condition: Callable[[], object], process: subprocess.Popen[Any] | None = None, limit: float = LIMIT_SECONDS
) -> None:
    """Wait until a condition holds; fail after some seconds, or if a process that has to fulfil it exits."""
    deadline = time.monotonic() + limit
    while not condition():
        assert process is None or process.poll() is None, f"exited with status {process.returncode}"
        assert time.monotonic() < deadline
        time.sleep(0.01)


class _PollDescriptor(ctypes.Structure):
    _fields_ = [("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short)]


def wait_in_c(fd: int, limit_ms: int) -> bool:
    """Wait without running Python, as compiled code does; return whether a file could be read within the limit."""
    poll = ctypes.PyDLL(None).poll  # does not release the interpreter's lock
    return poll(ctypes.byref(_PollDescriptor(fd, select.POLLIN, 0)), 1, limit_ms) > 0


def wait_until_empty(list_left: Callable[[], Collection[object]], limit: float = LIMIT_SECONDS) -> None:
    """Wait until a function returns nothing that is left, such as processes that have to end."""
    deadline = time.monotonic() + limit
    while left := list_left():
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def wait_until_ended(pids: Collection[int]) -> None:
    """Wait until processes have ended."""
    wait_until_empty(lambda: [pid for pid in pids if is_alive(pid)])


def list_session_members(session: int) -> dict[int, str]:
    """Return the states of a session's live processes by process ID, without zombies."""
    statuses = {int(name): _read_stat_fields(int(name)) for name in os.listdir("/proc") if name.isdecimal()}
    return {pid: s[0] for pid, s in statuses.items() if s and int(s[3]) == session and s[0] not in _ENDED}


def list_marked_processes(mark: bytes) -> dict[int, tuple[str, str]]:
    """Return the namespace and the command line of each process that has a mark in its environment, by process ID."""
    processes = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            folder = Path("/proc", name)
            if mark in (folder / "environ").read_bytes() and is_alive(int(name)):
                line = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").replace(b"\n", b" ").decode(errors="replace")
                )
                processes[int(name)] = os.readlink(folder / "ns" / "pid"), line
    return processes


def _read_stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: state, parent, group, session, ..."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


@contextlib.contextmanager
def time_limit(seconds: float = LIMIT_SECONDS) -> Iterator[None]:
    """Fail if the block takes longer than this."""
    start = time.monotonic()
    yield
    duration = time.monotonic() - start
    assert duration < seconds, f"{duration:.2f} s"


def run_code(
    code: str, *arguments: str, timeout: float = 100, cwd: str | os.PathLike[str] | None = None, **environment: str
) -> str:
    """Run code in a new process, with tests/support on its path; return its output."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(SUPPORT), *sys.path]), **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_on_fake_gpus(program: str, n_gpus: int) -> list[str]:
    """Run a program of gpus/launch_programs.py in a new process; return the lines that it prints."""
    gpus = SUPPORT / "gpus"
    return run_code(
        f"import launch_programs; launch_programs.{program}()",
        timeout=240,
        PYTHONPATH=os.pathsep.join([str(ROOT), str(gpus), str(gpus / "fake")]),
        FAKE_GPUS=str(n_gpus),
        JAX_PLATFORMS="cpu",
        PYTENSOR_FLAGS="mode=JAX",
    ).splitlines()
