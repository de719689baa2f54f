"""Throughput of the sum of a large array over the ranks.

`synkhronos.all_reduce` of a float32 shared variable, beside

- one process that adds two arrays with NumPy and copies the result once, into memory that was used before ("warm") and
  into new memory ("cold"): what two ranks have to do at least, done by one;
- the same all_reduce by PyTorch's gloo, in as many processes and with as many threads, if PyTorch is installed;
- the same by mpi4py, in as many processes, if ``--mpiexec`` names the program that starts them.

The first row of each size has medians, which the bars are for; the second has the best times, which say what the
machine can do when nothing else runs: two ranks need two cores at the same moment.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

import synkhronos as synk
from benchmarks._measure import Table, bar, duration, graph_library, heading, ranks, seconds, size

#: Bytes of the arrays: the bars are for the last.
SIZES = (4_000, 4_000_000, 100_000_000)


class Others:
    """Another library's processes.

    Parameters
    ----------
    command : list of str
        Command line that starts them.
    """

    def __init__(self, command: list[str]):
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.version = self._process.stdout.readline().removeprefix("ready ").strip()
        self.there = bool(self.version)

    def all_reduce(self, count: int) -> float:
        """Return the seconds of one all-reduce of `count` float32 values."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(count, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def there_and_back(self, count: int) -> float:
        """Return the seconds in which MPI sends `count` float32 values from the first process to the last and back."""
        return self.all_reduce(-count)

    def close(self) -> None:
        """End the processes."""
        self._process.communicate("0\n")  # Open MPI's mpirun keeps the end of its input to itself


class Ours:
    """The ranks' side: one shared variable for each size."""

    def __init__(self, count: int):
        library, _ = graph_library()
        self._count = count
        self._s = library.shared(np.zeros(1, np.float32), "s")
        self._f = synk.function([], [], updates=[(self._s, self._s)])

    def prepare(self, items: int) -> None:
        """Set each rank's array, and verify one result."""
        for r in range(self._count):
            synk.set_value(r, self._s, np.full(items, 1 + r, np.float32))
        synk.all_reduce(self._s, "sum")
        expected = self._count * (self._count + 1) / 2
        for r in range(self._count):
            assert (synk.get_value(r, self._s) == expected).all()
        synk.broadcast(self._s, np.full(items, 1e-30, np.float32))  # sums that stay far from infinity

    def all_reduce(self) -> float:
        """Reduce, and return the seconds that it took."""
        return seconds(lambda: synk.all_reduce(self._s, "sum"))


def numpy_sides(items: int) -> tuple[Callable[[], float], Callable[[], float]]:
    """Return the operations of one process on two arrays, into used and into new memory."""
    a, b = np.full(items, 1.0, np.float32), np.full(items, 2.0, np.float32)
    c, d = np.zeros_like(a), np.zeros_like(a)

    def add_and_copy() -> None:
        np.add(a, b, out=c)
        np.copyto(d, c)

    return lambda: seconds(add_and_copy), lambda: seconds(lambda: np.add(a, b).copy())


def rounds_for(nbytes: int, rounds: int) -> int:
    """Return more rounds for small arrays."""
    return rounds if nbytes > 10_000_000 else 10 * rounds


#: The other libraries.
OTHERS = ("gloo", "MPI")


def others(options: argparse.Namespace, count: int) -> dict[str, Others]:
    """Start the processes of the other libraries that are installed."""
    folder = Path(__file__).parent
    commands = {"gloo": [options.torch_python, str(folder / "_gloo.py"), str(count)]}
    if options.mpiexec:
        commands["MPI"] = [*options.mpiexec.split(), "-n", str(count), options.mpi_python, str(folder / "_mpi.py")]
    started = {name: Others(command) for name, command in commands.items()}
    for name in OTHERS:
        there = name in started and started[name].there
        print(f"{name}: {started[name].version}" if there else f"{name}: left out")
    return {name: other for name, other in started.items() if other.there}


def print_rows(table: Table, label: str, middle: dict[str, float], best: dict[str, float]) -> dict[str, float]:
    """Print medians and best times, and return the medians' ratios: ours to NumPy's, and others' to ours."""
    for name, time in ((label, middle), ("  best", best)):
        ratios = {"NumPy": time["ours"] / time["warm"], **{o: time[o] / time["ours"] for o in OTHERS if o in time}}
        table.row(
            name,
            *(duration(time[side]) if side in time else "-" for side in ("ours", "warm", "cold", *OTHERS)),
            *(f"{ratios[side]:.2f}" if side in ratios else "-" for side in ("NumPy", *OTHERS)),
        )
        if time is middle:
            result = ratios
    return result


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.all_reduce",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    for count in options.ranks:
        measure(options, count)


def measure(options: argparse.Namespace, count: int) -> None:
    """Measure with one number of ranks."""
    heading(f"all_reduce: the sum of float32 on {count} ranks")
    beside = others(options, count)
    columns = ("ours", "NumPy", "cold", *OTHERS, "ours/NumPy", *(f"{name}/ours" for name in OTHERS))
    print()
    table = Table({"": 8, **dict.fromkeys(columns, 9), "ours/NumPy": 10})
    ratios: dict[int, dict[str, float]] = {}
    with ranks(count):
        ours = Ours(count)
        for nbytes in options.sizes:
            items = nbytes // 4
            ours.prepare(items)
            warm, cold = numpy_sides(items)
            sides: dict[str, Callable[[], float]] = {"ours": ours.all_reduce, "warm": warm, "cold": cold}
            for name, other in beside.items():
                sides[name] = lambda items=items, other=other: other.all_reduce(items)  # type: ignore[misc]
            times: dict[str, list[float]] = {name: [] for name in sides}
            for turn in range(rounds_for(nbytes, options.rounds)):
                if turn % 8 == 0:
                    ours.prepare(items)
                for name, side in sides.items():
                    side()  # after another's turn the caches hold the other's arrays, and processes sleep
                    times[name].append(side())
            middle = {name: median(values) for name, values in times.items()}
            best = {name: min(values) for name, values in times.items()}
            ratios[nbytes] = print_rows(table, size(nbytes), middle, best)
    for other in beside.values():
        other.close()
    largest = max(options.sizes)
    print()
    if count == 2:
        bar(f"time, relative to NumPy's add and copy, {size(largest)}", ratios[largest]["NumPy"], " times", most=1.5)
    for name in beside:
        least = 2 if name == "gloo" and count == 2 else 1
        bar(f"speed, relative to {name}, {size(largest)}, {count} ranks", ratios[largest][name], " times", least=least)


if __name__ == "__main__":
    main()
