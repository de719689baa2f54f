"""Overhead of the library by number of ranks.

For 1, 2, 4, ... ranks on the cores of this machine: the time to fork and to close them; the private memory of a rank;
the round trip of an empty function, which is a launch and a join; the round trip of `get_shapes`, which has one more
barrier, at which the ranks exchange a value; and a call that splits a list of indexes, where each rank copies its own
rows.

More ranks than cores take turns, and sleep instead of spinning: these figures are those of the operating system's
scheduler.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import numpy as np

import synkhronos as synk
from benchmarks._measure import (
    Table,
    compute_quartiles,
    format_bytes,
    format_duration,
    import_graph_library,
    print_heading,
    time_call,
)
from benchmarks.latency import find_children

ROWS, WIDTH = 65_536, 64


def read_private_bytes(pid: int) -> int:
    """Return the private memory of a process in bytes."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return 1024 * sum(int(line.split()[1]) for line in file if line.startswith("Private"))


def measure_quartiles(call: Callable[[], Any], rounds: int) -> tuple[float, float, float]:
    """Return the quartiles of a call's seconds."""
    for _ in range(max(5, rounds // 10)):
        call()
    return compute_quartiles([time_call(call) for _ in range(rounds)])


def measure(n_ranks: int, rounds: int, table: Table) -> None:
    """Measure one number of ranks, and print it."""
    library, tensor = import_graph_library()
    before = find_children()
    fork = time_call(lambda: synk.fork(n_ranks, use_gpu=False))
    try:
        x, s = tensor.matrix("x", dtype="float32"), library.shared(np.zeros(1, np.float32), "s")
        empty, uses_shared = synk.function([], []), synk.function([], [], updates=[(s, s)])
        rows = synk.function([x], (x[0, 0], "sum"))
        data = synk.data(np.ones((ROWS, WIDTH), np.float32))
        order = np.random.default_rng(0).permutation(ROWS)
        assert float(rows(data, batch=order)) == n_ranks
        uses_shared()
        figures = [
            measure_quartiles(call, n)
            for call, n in (
                (empty, rounds),
                (lambda: synk.get_shapes(s), rounds),
                (lambda: rows(data, batch=order), max(5, rounds // 20)),
            )
        ]
        private_bytes = [read_private_bytes(pid) for pid in find_children() - before]
    finally:
        close = time_call(synk.close)
    array = np.ones((ROWS, WIDTH), np.float32)
    alone = compute_quartiles([time_call(lambda: array[order]) for _ in range(max(5, rounds // 20))])[1]
    cells = [
        cell
        for lower, middle, upper in figures
        for cell in (format_duration(middle), f"{format_duration(lower)} - {format_duration(upper)}")
    ]
    table.print_row(
        *(
            str(n_ranks),
            format_duration(fork),
            format_duration(close),
            format_bytes(max(private_bytes)) if private_bytes else "-",
            *cells,
        ),
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
    print_heading(
        f"Growth; rows: {ROWS:,} of {format_bytes(4 * WIDTH)} by a shuffled list, beside x[idx] in one process"
    )
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
