"""Overhead of the library by number of ranks.

For 1, 2, 4, ... ranks on the cores of this machine, the times of

- ``fork`` and ``close``, and the private memory of a rank;
- "empty": an empty function, which is a launch and a join;
- "asleep": the same after a pause of 1 ms, in which the workers have fallen asleep;
- "agree": `get_shapes`, which has one more barrier, at which the ranks exchange a value;
- "scalar": a function of a scalar that all ranks get, whose result is summed;
- "data": a function of rows that are divided among the ranks, of which each rank copies its own;
- "4 KB" and "4 MB": `all_reduce` of a float32 shared variable;
- "step": a training step of an MLP 64-64-10 on 512 rows;
- "rows": 65,536 rows of 256 bytes by a shuffled list, and how many times as fast this is as ``x[idx]`` in one process.

More ranks than cores take turns, and sleep instead of spinning: these figures are those of the operating system's
scheduler.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

import synkhronos as synk
from benchmarks import make_parser
from benchmarks._measure import (
    Table,
    compute_quartiles,
    format_bytes,
    format_duration,
    import_graph_library,
    list_children,
    print_heading,
    time_call,
)
from synkhronos.training import make_train_function, updates

ROWS, WIDTH = 65_536, 64
N_HIDDEN, N_CLASSES, BATCH_SIZE = 64, 10, 512
#: Bytes of the arrays of `all_reduce`.
SMALL_NBYTES, LARGE_NBYTES = 4_000, 4_000_000
#: Seconds of the pause after which workers sleep.
PAUSE = 1e-3
#: Rounds in which the calls take turns.
N_TURNS = 5
COLUMNS = ("empty", "asleep", "agree", "scalar", "data", "4 KB", "4 MB", "step", "rows")


def read_private_bytes(pid: int) -> int:
    """Return the private memory of a process in bytes."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return 1024 * sum(int(line.split()[1]) for line in file if line.startswith("Private"))


def make_step() -> Any:
    """Return a training step of an MLP."""
    library, tensor = import_graph_library()
    rng = np.random.default_rng(0)
    x, y = tensor.matrix("x", dtype="float32"), tensor.ivector("y")
    w, v = (
        library.shared(rng.standard_normal(shape).astype("float32") / 8, name)
        for name, shape in (("w", (WIDTH, N_HIDDEN)), ("v", (N_HIDDEN, N_CLASSES)))
    )
    probabilities = tensor.exp(tensor.tanh(x.dot(w)).dot(v))
    log_probabilities = tensor.log(probabilities / probabilities.sum(axis=1, keepdims=True))
    loss = -log_probabilities[tensor.arange(y.shape[0]), y].mean()
    return make_train_function(loss, [w, v], x, y, updates.sgd, learning_rate=0.01)


def make_calls(n_ranks: int, order: np.ndarray) -> dict[str, Callable[[], Any]]:
    """Return the calls to time, one for each of `COLUMNS`."""
    library, tensor = import_graph_library()
    x, c, s = tensor.matrix("x", dtype="float32"), tensor.scalar("c", dtype="float32"), library.shared(np.ones(3), "s")
    small, large = (library.shared(np.full(n // 4, 1e-30, "float32")) for n in (SMALL_NBYTES, LARGE_NBYTES))
    empty = synk.function([], [])
    uses_shareds = synk.function([], [], updates=[(v, v) for v in (s, small, large)])
    scale = synk.function([], (2 * c, "sum"), bcast_inputs=[c])
    rows = synk.function([x], (x[0, 0], "sum"))
    step = make_step()
    data = synk.data(np.ones((ROWS, WIDTH), np.float32))
    labels = synk.data(np.zeros(ROWS, np.int32))
    batch = order[:BATCH_SIZE]
    assert float(rows(data, batch=order)) == n_ranks
    uses_shareds()
    return {
        "empty": empty,
        "asleep": empty,
        "agree": lambda: synk.get_shapes(s),
        "scalar": lambda: scale(np.float32(3)),
        "data": lambda: rows(data, batch=batch),
        "4 KB": lambda: synk.all_reduce(small, "avg"),
        "4 MB": lambda: synk.all_reduce(large, "avg"),
        "step": lambda: step(data, labels, batch=batch),
        "rows": lambda: rows(data, batch=order),
    }


def time_calls(call: Callable[[], Any], n_calls: int, pause: float) -> list[float]:
    """Return the seconds of each call, after some untimed ones; the master computes for ``pause`` before each."""
    times = []
    for _ in range(max(3, n_calls // 10) + n_calls):
        start = perf_counter()
        while perf_counter() - start < pause:
            pass
        times.append(time_call(call))
    return times[-n_calls:]


def measure(n_ranks: int, rounds: int, table: Table) -> None:
    """Measure one number of ranks, and print it: medians, and lower and upper quartiles in the second line."""
    before = list_children()
    order = np.random.default_rng(0).permutation(ROWS)
    fork = time_call(lambda: synk.fork(n_ranks, use_gpu=False))
    try:
        private_bytes = [read_private_bytes(pid) for pid in list_children() - before]
        calls = make_calls(n_ranks, order)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(N_TURNS):
            for name, call in calls.items():
                n_calls = max(5, rounds // N_TURNS // (20 if name in ("4 MB", "rows") else 1))
                times[name] += time_calls(call, n_calls, PAUSE if name == "asleep" else 0.0)
    finally:
        close = time_call(synk.close)
    array = np.ones((ROWS, WIDTH), np.float32)
    alone = compute_quartiles([time_call(lambda: array[order]) for _ in range(max(5, rounds // 20))])[1]
    quartiles = {name: compute_quartiles(values) for name, values in times.items()}
    table.print_row(
        *(str(n_ranks), format_duration(fork), format_duration(close)),
        format_bytes(max(private_bytes)) if private_bytes else "-",
        *(format_duration(quartiles[name][1]) for name in COLUMNS),
        f"{alone / quartiles['rows'][1]:.2f}",
    )
    for i in (0, 2):
        table.print_row(*[""] * 4, *(format_duration(quartiles[name][i]) for name in COLUMNS), "")


def main() -> None:
    """Run the benchmark."""
    parser = make_parser("growth", __doc__)
    default = [1, 2, 4, 8, 16, 32, 64]
    parser.add_argument("--ranks", type=int, nargs="+", default=default, help="numbers of ranks (default: 1 to 64)")
    parser.add_argument("--rounds", type=int, default=1000, help="calls of each kind (default: %(default)s)")
    options = parser.parse_args()
    print_heading("Growth: medians, and below them lower and upper quartiles")
    table = Table({"ranks": 5, "fork": 8, "close": 8, "own": 8, **dict.fromkeys(COLUMNS, 8), "speed-up": 8})
    for count in options.ranks:
        measure(count, options.rounds, table)
    cores = len(os.sched_getaffinity(0))
    print(f"\n{cores} cores: from {cores + 1} ranks on they take turns")


if __name__ == "__main__":
    main()
