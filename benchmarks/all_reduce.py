"""Throughput of the sum of a large array over the ranks.

`synkhronos.all_reduce` of a float32 shared variable, beside

- one process that adds two arrays with NumPy and copies the result once, into memory that was used before ("warm") and
  into new memory ("cold"): the least work of two ranks, by one process;
- the same all_reduce by PyTorch's gloo, with the same numbers of processes and threads, if PyTorch is installed;
- the same by mpi4py, with the same number of processes, if ``--mpiexec`` names the program that starts them.

The first row of each size has medians, to which the limits apply.  The second has the best times, which are closest to
those of an idle machine: two ranks need two cores at the same time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

import synkhronos as synk
from benchmarks import make_parser
from benchmarks._measure import (
    ReferenceProcesses,
    Table,
    fork_ranks,
    format_bytes,
    format_duration,
    import_graph_library,
    print_criterion,
    print_heading,
    time_call,
)

#: Bytes of the arrays; the limits apply to the last.
SIZES = (4_000, 4_000_000, 100_000_000)


class SynkhronosReduction:
    """Synkhronos' side: one shared variable, reduced over the ranks."""

    def __init__(self, n_ranks: int):
        library, _ = import_graph_library()
        self._n_ranks = n_ranks
        self._s = library.shared(np.zeros(1, np.float32), "s")
        self._f = synk.function([], [], updates=[(self._s, self._s)])

    def set_arrays(self, n_values: int) -> None:
        """Set each rank's array, and verify one result."""
        for r in range(self._n_ranks):
            synk.set_value(r, self._s, np.full(n_values, 1 + r, np.float32))
        synk.all_reduce(self._s, "sum")
        expected = self._n_ranks * (self._n_ranks + 1) / 2
        for r in range(self._n_ranks):
            assert (synk.get_value(r, self._s) == expected).all()
        synk.broadcast(self._s, np.full(n_values, 1e-30, np.float32))  # repeated sums must not overflow

    def all_reduce(self) -> float:
        """Reduce, and return the seconds."""
        return time_call(lambda: synk.all_reduce(self._s, "sum"))


def make_numpy_sides(n_values: int) -> dict[str, Callable[[], float]]:
    """Return functions that time the sum of two arrays in one process, into used and into new memory."""
    a, b = np.full(n_values, 1.0, np.float32), np.full(n_values, 2.0, np.float32)
    c, d = np.zeros_like(a), np.zeros_like(a)

    def add_and_copy() -> None:
        np.add(a, b, out=c)
        np.copyto(d, c)

    return {"warm": lambda: time_call(add_and_copy), "cold": lambda: time_call(lambda: np.add(a, b).copy())}


def _measure_library(library: ReferenceProcesses, n_values: int) -> float:
    return library.measure(n_values)[0]


def time_reductions(
    reduction: SynkhronosReduction,
    libraries: dict[str, ReferenceProcesses],
    nbytes: int,
    rounds: int,
    **other_sides: Callable[[], float],
) -> dict[str, list[float]]:
    """Return the seconds of each side in turn: ours, the other sides, and the libraries."""
    n_values = nbytes // 4
    sides = {"ours": reduction.all_reduce, **other_sides}
    sides |= {name: partial(_measure_library, library, n_values) for name, library in libraries.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds if nbytes > 10_000_000 else 10 * rounds):
        if turn % 8 == 0:
            reduction.set_arrays(n_values)
        for name, side in sides.items():
            side()  # warms up: another side has filled the caches, and processes sleep
            times[name].append(side())
    return times


#: The other libraries.
LIBRARIES = ("gloo", "MPI")


def start_libraries(options: argparse.Namespace, n_ranks: int) -> dict[str, ReferenceProcesses]:
    """Start the processes of the other libraries that are installed."""
    folder = Path(__file__).parent
    commands = {"gloo": [options.torch_python, str(folder / "_gloo.py"), str(n_ranks)]}
    if options.mpiexec:
        commands["MPI"] = [*options.mpiexec.split(), "-n", str(n_ranks), options.mpi_python, str(folder / "_mpi.py")]
    started = {name: ReferenceProcesses(command) for name, command in commands.items()}
    for name in LIBRARIES:
        is_started = name in started and started[name].is_started
        print(f"{name}: {started[name].version}" if is_started else f"{name}: left out")
    return {name: library for name, library in started.items() if library.is_started}


def print_rows(table: Table, label: str, medians: dict[str, float], best: dict[str, float]) -> dict[str, float]:
    """Print medians and best times; return the ratios of medians: Synkhronos to NumPy, and libraries to Synkhronos."""
    for row, time in ((label, medians), ("  best", best)):
        ratios = {
            "NumPy": time["ours"] / time["warm"],
            **{name: time[name] / time["ours"] for name in LIBRARIES if name in time},
        }
        table.print_row(
            row,
            *(format_duration(time[side]) if side in time else "-" for side in ("ours", "warm", "cold", *LIBRARIES)),
            *(f"{ratios[side]:.2f}" if side in ratios else "-" for side in ("NumPy", *LIBRARIES)),
        )
        if time is medians:
            result = ratios
    return result


def main() -> None:
    """Run the benchmark."""
    parser = make_parser("all_reduce", __doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="numbers of ranks (default: 2)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="in bytes (default: 4 KB, 4 MB, 100 MB)")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each side (default: %(default)s)")
    parser.add_argument(
        "--torch-python", default=sys.executable, metavar="PATH", help="a Python that has PyTorch (default: this one)"
    )
    parser.add_argument("--mpiexec", metavar="COMMAND", help="such as 'mpiexec --bind-to none' (default: without MPI)")
    parser.add_argument(
        "--mpi-python", default=sys.executable, metavar="PATH", help="a Python that has mpi4py (default: this one)"
    )
    options = parser.parse_args()
    for n_ranks in options.ranks:
        measure_reductions(options, n_ranks)


def measure_reductions(options: argparse.Namespace, n_ranks: int) -> None:
    """Measure the sums on `n_ranks` ranks beside the other libraries' on as many."""
    print_heading(f"all_reduce: the sum of float32 on {n_ranks} ranks")
    libraries = start_libraries(options, n_ranks)
    columns = ("ours", "NumPy", "cold", *LIBRARIES, "ours/NumPy", *(f"{name}/ours" for name in LIBRARIES))
    print()
    table = Table({"": 8, **dict.fromkeys(columns, 9), "ours/NumPy": 10})
    ratios: dict[int, dict[str, float]] = {}
    with fork_ranks(n_ranks):
        reduction = SynkhronosReduction(n_ranks)
        for nbytes in options.sizes:
            times = time_reductions(reduction, libraries, nbytes, options.rounds, **make_numpy_sides(nbytes // 4))
            medians = {name: median(values) for name, values in times.items()}
            best = {name: min(values) for name, values in times.items()}
            ratios[nbytes] = print_rows(table, format_bytes(nbytes), medians, best)
    for library in libraries.values():
        library.close()
    largest = max(options.sizes)
    print()
    if n_ranks == 2:
        print_criterion(
            f"time, relative to NumPy's add and copy, {format_bytes(largest)}",
            ratios[largest]["NumPy"],
            " times",
            at_most=1.5,
        )
    for name in libraries:
        least = 2 if name == "gloo" and n_ranks == 2 else 1
        print_criterion(
            f"speed, relative to {name}, {format_bytes(largest)}, {n_ranks} ranks",
            ratios[largest][name],
            " times",
            at_least=least,
        )


if __name__ == "__main__":
    main()
