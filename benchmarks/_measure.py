"""Measurements, processes and tables of all benchmarks.

A *side* is one of the programs that a benchmark compares.  Sides that cannot share a process, such as PyTorch and JAX,
run in commands of their own (`run_command`).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import logging
import multiprocessing
import os
import platform
import shlex
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from types import ModuleType
from typing import Any

import synkhronos as synk


def time_call(call: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    start = perf_counter()
    call()
    return perf_counter() - start


def time_interleaved(
    sides: Mapping[str, Callable[[], Any]], rounds: int, calls: int = 1, n_warmup: int = 1
) -> dict[str, list[float]]:
    """Time several sides in turn.

    Parameters
    ----------
    sides : dict of str to callable
    rounds : int
        Number of turns of each side; the side that begins changes from round to round.
    calls : int
        Timed calls in each turn.
    n_warmup : int
        Untimed calls before them.

    Returns
    -------
    dict of str to list of float
        The seconds of each timed call.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            call = sides[name]
            for _ in range(n_warmup):
                call()
            times[name] += [time_call(call) for _ in range(calls)]
    return times


class HostProbe:
    """Speed of Python on this machine next to the rounds of a benchmark, measured by a fixed loop."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def measure(self) -> None:
        """Time the loop, next to a round."""
        self._times.append(median(time_call(_run_loop) for _ in range(9)))

    def describe(self) -> str:
        """Return the spread of the loop's times as text."""
        fastest = min(self._times)
        slowdowns = [time / fastest for time in self._times]
        return (
            f"a fixed loop of Python next to the rounds: {format_duration(fastest)} at best, else median "
            f"{median(slowdowns):.2f} and at most {max(slowdowns):.2f} times that"
        )


def _run_loop() -> int:
    total = 0
    for i in range(1000):
        total += i
    return total


def compute_quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    ordered = sorted(times)
    return ordered[len(ordered) // 4], median(ordered), ordered[3 * len(ordered) // 4]


class Table:
    """Table that is printed row by row under a header.

    Parameters
    ----------
    columns : dict of str to int
        Title and width of each column; the first column is left-aligned.
    """

    def __init__(self, columns: Mapping[str, int]):
        self._widths = list(columns.values())
        self.print_row(*columns)
        print("-" * (sum(self._widths) + 2 * (len(self._widths) - 1)), flush=True)

    def print_row(self, *cells: str) -> None:
        """Print one row."""
        first, *other_cells = zip(cells, self._widths, strict=True)
        print("  ".join([f"{first[0]:<{first[1]}}", *(f"{c:>{w}}" for c, w in other_cells)]).rstrip(), flush=True)


def print_criterion(
    label: str, value: float, unit: str = "", at_most: float | None = None, at_least: float | None = None
) -> bool:
    """Print a value with the limit that it must meet, and PASS or FAIL; return whether it passes."""
    passed = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
    limit = f"at most {at_most:g}{unit}" if at_most is not None else f"at least {at_least:g}{unit}"
    print(f"{'PASS' if passed else 'FAIL'}  {label}: {value:.2f}{unit}  (bar: {limit})", flush=True)
    return passed


def format_duration(time: float) -> str:
    """Return a duration in seconds as text with a readable unit."""
    for unit, scale in (("s ", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if time >= scale:
            return f"{time / scale:.3g} {unit}" if time / scale < 100 else f"{time / scale:.0f} {unit}"
    return f"{time * 1e9:.0f} ns"


def format_spread(times: Sequence[float]) -> str:
    """Return the median of durations, and the smallest and the largest, as text."""
    return f"{format_duration(median(times))} ({min(times) * 1e6:.0f}-{max(times) * 1e6:.0f})"


def format_quartiles(times: Sequence[float]) -> tuple[str, str]:
    """Return the median of durations, and the lower and the upper quartile, as text."""
    lower, middle, upper = map(format_duration, compute_quartiles(times))
    return middle, f"{lower} - {upper}"


def format_bytes(nbytes: float) -> str:
    """Return a number of bytes as text with a readable unit."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} B"


def import_graph_library() -> tuple[ModuleType, ModuleType]:
    """Return PyTensor and `pytensor.tensor` where they are installed, else Theano and `theano.tensor`."""
    name = "pytensor" if importlib.util.find_spec("pytensor") else "theano"
    return importlib.import_module(name), importlib.import_module(f"{name}.tensor")


def print_heading(title: str) -> None:
    """Print the benchmark's title, versions, cores and load."""
    library, _ = import_graph_library()
    load = os.getloadavg()[0]
    print(
        f"\n{title}\n{library.__name__} {library.__version__}, Python {platform.python_version()}, "
        f"{len(os.sched_getaffinity(0))} cores, load {load:.1f} before the start\n",
        flush=True,
    )


def prepare_pymc() -> bool:
    """Silence PyMC's messages and warnings; print a line and return False if it is not installed."""
    if not importlib.util.find_spec("pymc"):
        print("This benchmark needs PyMC, which is not installed: left out.")
        return False
    import pymc  # noqa: F401  # sets the level of its logger

    warnings.simplefilter("ignore")
    logging.getLogger("pymc").setLevel(logging.ERROR)
    return True


@contextlib.contextmanager
def fork_ranks(n_ranks: int) -> Iterator[int]:
    """Fork ranks, and close them on exit."""
    try:
        yield synk.fork(n_ranks, use_gpu=False)
    finally:
        synk.close()


def require_gpus(requested: int | None) -> int:
    """Return the requested number of GPUs, by default all; exit with a message if there are none."""
    available = synk.get_n_gpu()
    if not available:
        print("This benchmark needs GPUs, and there are none: left out.")
        raise SystemExit(0)
    return requested or available


def find_first_gpu() -> str:
    """Return the name of the first GPU that CUDA would use in this process."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


class SideError(Exception):
    """A side's process failed or exceeded its limit."""


def run_command(command: Sequence[str], limit: float, **environment: str) -> str:
    """Run one side in its own process, and return its output; parameters and errors as for `read_command_lines`."""
    return "".join(read_command_lines(command, limit, **environment))


def read_command_lines(command: Sequence[str], limit: float, **environment: str) -> Iterator[str]:
    """Run one side in a process of its own, and yield the lines of its output as they come.

    Parameters
    ----------
    command : list of str
    limit : float
        Seconds after which the process and its children are killed.
    **environment
        Variables in addition to those of this process.

    Raises
    ------
    SideError
        If the process exits with an error, or exceeds the limit.
    """
    process = subprocess.Popen(
        list(command),
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,  # a process group, to kill children too
    )
    assert process.stdout is not None
    label = shlex.join(command)[:120]
    timer = threading.Timer(limit, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    try:
        with process.stdout as lines:
            yield from lines
        process.wait()
    finally:
        is_killed = timer.finished.is_set()
        timer.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if is_killed:
        raise SideError(f"{label} was not done after {limit:.0f} s")
    if process.returncode != 0:
        raise SideError(f"{label} ended with {process.returncode}; its messages are above")


def run_side(
    arguments: Sequence[str],
    settings: Mapping[str, Any],
    limit: float,
    python: str = sys.executable,
    **environment: str,
) -> Any:
    """Run one side, a module of this package that prints its results as JSON, in its own process; return the results.

    Parameters
    ----------
    arguments : list of str
        Name of the module, and its arguments before the settings.
    settings : dict
        Settings of the side, passed as JSON.
    limit, **environment
        As for `read_command_lines`.
    python : str
        Path of its Python.
    """
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    module, *options = arguments
    command = [python, "-m", f"benchmarks.{module}", *options, json.dumps(settings)]
    return json.loads(run_command(command, limit, PYTHONPATH=path, **environment).splitlines()[-1])


class ReferenceProcesses:
    """Processes of another library, which measure on request.

    Parameters
    ----------
    command : list of str
        Command line that starts them.  The first prints ``ready`` and a version, and then a line of seconds for each
        line that it reads, until an empty one.
    """

    def __init__(self, command: Sequence[str]):
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(list(command), stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self.is_started, self.version = line.startswith("ready"), line.removeprefix("ready").strip()

    def measure(self, *order: object) -> list[float]:
        """Return the seconds that the processes print for an order."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(*order, file=self._process.stdin, flush=True)
        return list(map(float, self._process.stdout.readline().split()))

    def close(self) -> None:
        """End the processes."""
        # Forked ranks keep their input open, and Open MPI's mpirun does not forward its end.
        self._process.communicate("\n")


def list_children() -> set[int]:
    """Return the process ids of this process's children."""
    pids = set()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # the process has exited meanwhile
            if int(_read_stat_fields(int(name))[1]) == os.getpid():
                pids.add(int(name))
    return pids


def read_cpu_seconds(pids: Iterable[int]) -> float:
    """Return the processor time that processes have used."""
    ticks = sum(int(ticks) for pid in pids for ticks in _read_stat_fields(pid)[11:13])
    return ticks / os.sysconf("SC_CLK_TCK")


def _read_stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


@contextlib.contextmanager
def fork_processes(target: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> Iterator[None]:
    """Fork one process for each tuple of arguments, and terminate them at the end."""
    context = multiprocessing.get_context("fork")
    forked = [context.Process(target=target, args=args, daemon=True) for args in arguments]
    try:
        for process in forked:
            process.start()
        yield
    finally:
        for process in forked:
            process.terminate()
            process.join()
