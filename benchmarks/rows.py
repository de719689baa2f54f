"""Throughput of the selection of rows.

A function takes a batch by a shuffled list of indexes and looks at nothing but its shape, so that the time is that of
picking the rows: each rank copies its own.  Beside it is NumPy's ``x[idx]`` in one process, which allocates its
result each time, and ``np.take`` into memory that is kept.
"""

from __future__ import annotations

import argparse

import numpy as np

import synkhronos as synk
from benchmarks._measure import Table, bar, duration, graph_library, heading, interleaved, quartiles, ranks, size


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rows", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=60_000, help="rows of the data (default: %(default)s)")
    parser.add_argument("--pick", type=int, default=20_000, help="rows of the batch (default: %(default)s)")
    parser.add_argument("--columns", type=int, default=784, help="float32 in a row (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each side (default: %(default)s)")
    options = parser.parse_args()

    _, tensor = graph_library()
    heading(
        f"Rows: {options.pick} of {options.rows} rows of {size(4 * options.columns)}, by a shuffled list, "
        f"on {options.ranks} ranks"
    )
    rng = np.random.default_rng(0)
    with ranks(options.ranks):
        data = synk.data(shape=(options.rows, options.columns), dtype="float32")
        for part in np.array_split(data.data, 16):
            part[:] = rng.random(part.shape, dtype=np.float32)
        x = tensor.fmatrix("x")
        f = synk.function([x], (x.shape[0], "sum"))
        plain = np.array(data.data)  # the one process has its data in plain memory
        index = rng.permutation(options.rows)[: options.pick]
        kept = np.empty((options.pick, options.columns), np.float32)
        assert f(data, batch=index) == options.pick

        sides = {
            "x[idx]": lambda: plain[index],
            "np.take(out=...)": lambda: np.take(plain, index, axis=0, out=kept, mode="clip"),
            "synk, batch=idx": lambda: f(data, batch=index),
        }
        times = interleaved(sides, options.rounds, calls=2)
    middle = {name: quartiles(values) for name, values in times.items()}
    table = Table({"": 18, "median": 9, "quartiles": 19, "speed": 6})
    for name, (low, mid, high) in middle.items():
        speed = middle["x[idx]"][1] / mid
        table.row(name, duration(mid), f"{duration(low)} - {duration(high)}", f"{speed:.2f}")
    bar("speed, relative to x[idx]", middle["x[idx]"][1] / middle["synk, batch=idx"][1], " times", least=1.5)


if __name__ == "__main__":
    main()
