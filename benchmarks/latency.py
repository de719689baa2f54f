"""Latency of a call.

An empty function is called on 2 ranks and then on 8, beside the cheapest thing that could tell so many processes to
start and wait until they have done: a pair of POSIX semaphores for each worker.  Two of Python's barriers, one before
and one after the work, are what one would write without this library.

Then nothing is called for some seconds, to see what ranks cost that have nothing to do.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import secrets
from collections.abc import Callable
from time import sleep
from typing import Any

import posix_ipc

import synkhronos as synk
from benchmarks._measure import Table, bar, duration, heading, interleaved, processes, quartiles, ranks


def semaphore() -> posix_ipc.Semaphore:
    """Return a new semaphore without a name."""
    made = posix_ipc.Semaphore(f"/bench-{secrets.token_hex(8)}", posix_ipc.O_CREX)
    made.unlink()
    return made


def answer(start: posix_ipc.Semaphore, done: posix_ipc.Semaphore) -> None:
    """Answer each start, as a worker with bare semaphores."""
    while True:
        start.acquire()
        done.release()


def pass_barriers(before: Any, after: Any) -> None:
    """Pass two barriers again and again, as a worker between them."""
    while True:
        before.wait()
        after.wait()


def semaphore_call(pairs: list[tuple[posix_ipc.Semaphore, posix_ipc.Semaphore]]) -> Callable[[], None]:
    """Return the master's side of the semaphores: send to all, wait for all."""

    def call() -> None:
        for start, _ in pairs:
            start.release()
        for _, done in pairs:
            done.acquire()

    return call


def barrier_call(before: Any, after: Any) -> Callable[[], None]:
    """Return the master's side of the barriers."""

    def call() -> None:
        before.wait()
        after.wait()

    return call


def children() -> set[int]:
    """Return the ids of this process's children."""
    found = set()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:  # it ended meanwhile
                continue
            if int(fields[1]) == os.getpid():
                found.add(int(name))
    return found


def cpu_seconds(pids: set[int]) -> float:
    """Return the processor time that processes have used."""
    ticks = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(size: int, rounds: int, calls: int, idle: float) -> None:
    """Measure one number of ranks, and print it."""
    pairs = [(semaphore(), semaphore()) for _ in range(size - 1)]
    context = multiprocessing.get_context("fork")
    barriers = context.Barrier(size), context.Barrier(size)
    with processes(answer, pairs), processes(pass_barriers, [barriers] * (size - 1)):
        others = children()
        with ranks(size):
            workers = children() - others
            sides: dict[str, Callable[[], Any]] = {
                "semaphore pair": semaphore_call(pairs),
                "two Barriers": barrier_call(*barriers),
                "empty function": synk.function([], []),
            }
            times = interleaved(sides, rounds, calls, warm=10)
            middle = {name: quartiles(values) for name, values in times.items()}
            reference = middle["semaphore pair"][1]

            print(f"{size} ranks")
            table = Table({"": 16, "median": 9, "quartiles": 19, "ratio": 6})
            for name, (low, mid, high) in middle.items():
                table.row(name, duration(mid), f"{duration(low)} - {duration(high)}", f"{mid / reference:.2f}")
            ours, barrier = middle["empty function"][1], middle["two Barriers"][1]
            bar(f"empty function / semaphore pair, {size} ranks", ours / reference, most=5)
            bar(f"empty function / two Barriers, {size} ranks", ours / barrier, most=1)

            before = cpu_seconds(workers)
            sleep(idle)
            used = (cpu_seconds(workers) - before) / idle * 100
            bar(f"processor use of {len(workers)} idle workers together", used, " % of a core", most=1)
            print()


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.latency", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8], help="numbers of ranks (default: 2 8)")
    parser.add_argument("--rounds", type=int, default=30, help="turns of each side (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=100, help="timed calls in a turn (default: %(default)s)")
    parser.add_argument("--idle", type=float, default=5.0, help="seconds to do nothing (default: %(default)s)")
    options = parser.parse_args()
    heading("Latency: the round trip of a call that does nothing")
    for size in options.ranks:
        measure(size, options.rounds, options.calls, options.idle)


if __name__ == "__main__":
    main()
