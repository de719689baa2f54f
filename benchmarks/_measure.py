"""Measurements and tables of all benchmarks.

`interleaved`
    Runs several sides in turn and keeps their times.
`Table`
    Prints rows under a header, as they come.
`bar`
    Prints a figure beside its bar.
`graph_library`
    PyTensor or Theano.
`processes`
    The forked peers of a benchmark.
`run_alone`, `read_alone`, `Failed`
    A side that has processes of its own.
`prepare_pymc`
    PyMC without its messages.
`gpus`
    How many GPUs a benchmark of theirs uses.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import multiprocessing
import os
import platform
import shlex
import signal
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from time import perf_counter
from types import ModuleType
from typing import Any

import synkhronos as synk


def seconds(call: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    start = perf_counter()
    call()
    return perf_counter() - start


def interleaved(
    sides: Mapping[str, Callable[[], Any]], rounds: int, calls: int = 1, warm: int = 1
) -> dict[str, list[float]]:
    """Time several sides in turn.

    Parameters
    ----------
    sides : dict of str to callable
    rounds : int
        Number of turns of each side; the side that begins changes from round to round.
    calls : int
        Timed calls in each turn.
    warm : int
        Calls before these, not timed.

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
            for _ in range(warm):
                call()
            times[name] += [seconds(call) for _ in range(calls)]
    return times


def quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    ordered = sorted(times)
    return ordered[len(ordered) // 4], median(ordered), ordered[3 * len(ordered) // 4]


class Table:
    """Table that is printed row by row under a header.

    Parameters
    ----------
    columns : dict of str to int
        Each column's title and width; the first is set flush left.
    """

    def __init__(self, columns: Mapping[str, int]):
        self._widths = list(columns.values())
        self.row(*columns)
        print("-" * (sum(self._widths) + 2 * (len(self._widths) - 1)), flush=True)

    def row(self, *cells: str) -> None:
        """Print one row."""
        first, *rest = zip(cells, self._widths, strict=True)
        print("  ".join([f"{first[0]:<{first[1]}}", *(f"{c:>{w}}" for c, w in rest)]).rstrip(), flush=True)


def bar(what: str, figure: float, unit: str = "", most: float | None = None, least: float | None = None) -> bool:
    """Print a figure beside its bar, and return whether it passes."""
    passed = (most is None or figure <= most) and (least is None or figure >= least)
    words = f"at most {most:g}{unit}" if most is not None else f"at least {least:g}{unit}"
    print(f"{'PASS' if passed else 'FAIL'}  {what}: {figure:.2f}{unit}  (bar: {words})", flush=True)
    return passed


def duration(time: float) -> str:
    """Return seconds in a readable unit."""
    for unit, scale in (("s ", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if time >= scale:
            return f"{time / scale:.3g} {unit}" if time / scale < 100 else f"{time / scale:.0f} {unit}"
    return f"{time * 1e9:.0f} ns"


def size(nbytes: float) -> str:
    """Return bytes in a readable unit."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} B"


def graph_library() -> tuple[ModuleType, ModuleType]:
    """Return PyTensor and its tensors where it is installed, else Theano and its."""
    name = "pytensor" if importlib.util.find_spec("pytensor") else "theano"
    return importlib.import_module(name), importlib.import_module(f"{name}.tensor")


def heading(title: str) -> None:
    """Print the benchmark's title, versions, cores and load."""
    library, _ = graph_library()
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
def ranks(count: int) -> Iterator[int]:
    """Fork ranks, and close them at the end."""
    try:
        yield synk.fork(count, use_gpu=False)
    finally:
        synk.close()


def gpus(asked: int | None) -> int:
    """Return the number of GPUs to use, by default all; without GPUs, print a line and exit."""
    there = synk.get_n_gpu()
    if not there:
        print("This benchmark needs GPUs, and there are none: left out.")
        raise SystemExit(0)
    return asked or there


def find_first_gpu() -> str:
    """Return the name of the first GPU that CUDA would use in this process."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


class Failed(Exception):
    """A side's process failed or exceeded its limit."""


def run_alone(command: Sequence[str], limit: float, **environment: str) -> str:
    """Run one side in a process of its own, and return its output; parameters and errors are those of `read_alone`."""
    return "".join(read_alone(command, limit, **environment))


def read_alone(command: Sequence[str], limit: float, **environment: str) -> Iterator[str]:
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
    Failed
        If the process exits with an error, or exceeds the limit.
    """
    process = subprocess.Popen(
        list(command),
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,  # a process group, which ends as one
    )
    assert process.stdout is not None
    what = shlex.join(command)[:120]
    timer = threading.Timer(limit, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    try:
        with process.stdout as lines:
            yield from lines
        process.wait()
    finally:
        is_late = timer.finished.is_set()
        timer.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if is_late:
        raise Failed(f"{what} was not done after {limit:.0f} s")
    if process.returncode != 0:
        raise Failed(f"{what} ended with {process.returncode}; its messages are above")


@contextlib.contextmanager
def processes(target: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> Iterator[None]:
    """Fork one process for each tuple of arguments, and end them at the end."""
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=target, args=args, daemon=True) for args in arguments]
    try:
        for process in started:
            process.start()
        yield
    finally:
        for process in started:
            process.terminate()
            process.join()
