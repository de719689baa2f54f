"""Overhead of the library by number of ranks.

For 1, 2, 4, ... ranks on the cores of this machine: the time to fork them and to end them; the memory of each that is
its own; the round trip of an empty function, which is a launch and a join; that of `get_shapes`, which is one step
more, at which all ranks show each other something; and a call that splits a list of indexes, each rank copying its own
rows.

Where there are more ranks than cores they take turns, and sleep rather than look: figures beyond are of the operating
system's scheduler.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import numpy as np

import synkhronos as synk
from benchmarks._measure import Table, duration, graph_library, heading, quartiles, seconds, size
from benchmarks.latency import children

ROWS, WIDTH = 65_536, 64


def own_bytes(pid: int) -> int:
    """Return the private memory of a process in bytes."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return 1024 * sum(int(line.split()[1]) for line in file if line.startswith("Private"))


def measure_quartiles(call: Callable[[], Any], rounds: int) -> tuple[float, float, float]:
    """Return the quartiles of a call's seconds."""
    for _ in range(max(5, rounds // 10)):
        call()
    return quartiles([seconds(call) for _ in range(rounds)])


def measure(count: int, rounds: int, table: Table) -> None:
    """Measure one number of ranks, and print it."""
    library, tensor = graph_library()
    before = children()
    fork = seconds(lambda: synk.fork(count, use_gpu=False))
    try:
        x, s = tensor.matrix("x", dtype="float32"), library.shared(np.zeros(1, np.float32), "s")
        empty, used = synk.function([], []), synk.function([], [], updates=[(s, s)])
        rows = synk.function([x], (x[0, 0], "sum"))
        data = synk.data(np.ones((ROWS, WIDTH), np.float32))
        order = np.random.default_rng(0).permutation(ROWS)
        assert float(rows(data, batch=order)) == count
        used()
        figures = [
            measure_quartiles(call, n)
            for call, n in (
                (empty, rounds),
                (lambda: synk.get_shapes(s), rounds),
                (lambda: rows(data, batch=order), max(5, rounds // 20)),
            )
        ]
        own = [own_bytes(pid) for pid in children() - before]
    finally:
        close = seconds(synk.close)
    one = np.ones((ROWS, WIDTH), np.float32)
    alone = quartiles([seconds(lambda: one[order]) for _ in range(max(5, rounds // 20))])[1]
    cells = [
        cell for low, middle, high in figures for cell in (duration(middle), f"{duration(low)} - {duration(high)}")
    ]
    table.row(
        *(str(count), duration(fork), duration(close), size(max(own)) if own else "-", *cells),
        f"{alone / figures[2][1]:.2f}",
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.growth", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = [1, 2, 4, 8, 16, 32, 64]
    parser.add_argument("--ranks", type=int, nargs="+", default=default, help="numbers of ranks (default: 1 to 64)")
    parser.add_argument("--rounds", type=int, default=1000, help="calls of each kind (default: %(default)s)")
    options = parser.parse_args()
    heading(f"Growth; rows: {ROWS:,} of {size(4 * WIDTH)} by a shuffled list, beside x[idx] in one process")
    columns = {
        "ranks": 5,
        "fork": 8,
        "close": 8,
        "own": 8,
        "empty": 8,
        " ": 18,
        "agree": 8,
        "  ": 18,
        "rows": 8,
        "   ": 18,
    }
    table = Table({**columns, "speed-up": 8})
    for count in options.ranks:
        measure(count, options.rounds, table)
    cores = len(os.sched_getaffinity(0))
    print(f"\n{cores} cores: from {cores + 1} ranks on they take turns")


if __name__ == "__main__":
    main()
