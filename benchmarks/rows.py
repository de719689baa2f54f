"""Throughput of the selection of rows.

A function selects a batch by a shuffled list of indexes and uses only its shape.  Its time is therefore that of the
selection, in which each rank copies its own rows.  It is compared with NumPy's ``x[idx]`` in one process, which
allocates its result in each call, and with ``np.take`` into allocated memory.
"""

from __future__ import annotations

from statistics import median

import numpy as np

import synkhronos as synk
from benchmarks import make_parser
from benchmarks._measure import (
    Table,
    fork_ranks,
    format_bytes,
    format_quartiles,
    import_graph_library,
    print_criterion,
    print_heading,
    time_interleaved,
)


def main() -> None:
    """Run the benchmark."""
    parser = make_parser("rows", __doc__)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=60_000, help="rows of the data (default: %(default)s)")
    parser.add_argument("--pick", type=int, default=20_000, help="rows of the batch (default: %(default)s)")
    parser.add_argument("--columns", type=int, default=784, help="float32 in a row (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each side (default: %(default)s)")
    options = parser.parse_args()

    _, tensor = import_graph_library()
    print_heading(
        f"Rows: {options.pick} of {options.rows} rows of {format_bytes(4 * options.columns)}, by a shuffled list, "
        f"on {options.ranks} ranks"
    )
    rng = np.random.default_rng(0)
    with fork_ranks(options.ranks):
        data = synk.data(shape=(options.rows, options.columns), dtype="float32")
        for block in np.array_split(data.data, 16):
            block[:] = rng.random(block.shape, dtype=np.float32)
        x = tensor.fmatrix("x")
        f = synk.function([x], (x.shape[0], "sum"))
        plain = np.array(data.data)  # NumPy's side reads private memory
        index = rng.permutation(options.rows)[: options.pick]
        buffer = np.empty((options.pick, options.columns), np.float32)
        assert f(data, batch=index) == options.pick

        sides = {
            "x[idx]": lambda: plain[index],
            "np.take(out=...)": lambda: np.take(plain, index, axis=0, out=buffer, mode="clip"),
            "synk, batch=idx": lambda: f(data, batch=index),
        }
        times = time_interleaved(sides, options.rounds, calls=2)
    medians = {name: median(values) for name, values in times.items()}
    table = Table({"": 18, "median": 9, "quartiles": 19, "speed": 6})
    for name, values in times.items():
        table.print_row(name, *format_quartiles(values), f"{medians['x[idx]'] / medians[name]:.2f}")
    ratio = medians["x[idx]"] / medians["synk, batch=idx"]
    print_criterion("speed, relative to x[idx]", ratio, " times", at_least=1.5)


if __name__ == "__main__":
    main()
