"""Latency of a call.

An empty function is called on 2 ranks and then on 8.  It is compared with a pair of POSIX semaphores for each worker,
the cheapest way to start processes and to wait for them; and with two of Python's barriers, one before and one after
the work, the simplest way without this library.

After that, nothing is called for some seconds, to measure the processor use of idle ranks.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from statistics import median
from time import sleep
from typing import Any

import synkhronos as synk
from benchmarks import make_parser
from benchmarks._measure import (
    Table,
    fork_processes,
    fork_ranks,
    format_quartiles,
    list_children,
    print_criterion,
    print_heading,
    read_cpu_seconds,
    time_interleaved,
)


def answer_starts(start: Any, done: Any) -> None:
    """Run a worker that answers each start by semaphores alone."""
    while True:
        start.acquire()
        done.release()


def pass_barriers(before: Any, after: Any) -> None:
    """Run a worker that waits at two barriers in a loop."""
    while True:
        before.wait()
        after.wait()


def make_semaphore_call(pairs: list[tuple[Any, Any]]) -> Callable[[], None]:
    """Return the master's call with semaphores: start all workers, and wait for all."""

    def call() -> None:
        for start, _ in pairs:
            start.release()
        for _, done in pairs:
            done.acquire()

    return call


def make_barrier_call(before: Any, after: Any) -> Callable[[], None]:
    """Return the master's call with barriers."""

    def call() -> None:
        before.wait()
        after.wait()

    return call


def measure(size: int, rounds: int, calls: int, idle: float) -> None:
    """Measure one number of ranks, and print it."""
    pairs = [(multiprocessing.Semaphore(0), multiprocessing.Semaphore(0)) for _ in range(size - 1)]
    context = multiprocessing.get_context("fork")
    barriers = context.Barrier(size), context.Barrier(size)
    with fork_processes(answer_starts, pairs), fork_processes(pass_barriers, [barriers] * (size - 1)):
        reference_pids = list_children()
        with fork_ranks(size):
            workers = list_children() - reference_pids
            sides: dict[str, Callable[[], Any]] = {
                "semaphore pair": make_semaphore_call(pairs),
                "two Barriers": make_barrier_call(*barriers),
                "empty function": synk.function([], []),
            }
            times = time_interleaved(sides, rounds, calls, n_warmup=10)
            medians = {name: median(values) for name, values in times.items()}
            reference = medians["semaphore pair"]

            print(f"{size} ranks")
            table = Table({"": 16, "median": 9, "quartiles": 19, "ratio": 6})
            for name, values in times.items():
                table.print_row(name, *format_quartiles(values), f"{medians[name] / reference:.2f}")
            empty_function, barrier = medians["empty function"], medians["two Barriers"]
            print_criterion(f"empty function / semaphore pair, {size} ranks", empty_function / reference, at_most=5)
            print_criterion(f"empty function / two Barriers, {size} ranks", empty_function / barrier, at_most=1)

            start = read_cpu_seconds(workers)
            sleep(idle)
            percent = (read_cpu_seconds(workers) - start) / idle * 100
            print_criterion(
                f"processor use of {len(workers)} idle workers together", percent, " % of a core", at_most=1
            )
            print()


def main() -> None:
    """Run the benchmark."""
    parser = make_parser("latency", __doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8], help="numbers of ranks (default: 2 8)")
    parser.add_argument("--rounds", type=int, default=30, help="turns of each side (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=100, help="timed calls in a turn (default: %(default)s)")
    parser.add_argument("--idle", type=float, default=5.0, help="seconds to do nothing (default: %(default)s)")
    options = parser.parse_args()
    print_heading("Latency: the round trip of a call that does nothing")
    for size in options.ranks:
        measure(size, options.rounds, options.calls, options.idle)


if __name__ == "__main__":
    main()
