"""Throughput of all_reduce of shared variables on GPUs.

`synkhronos.all_reduce` is compared with NCCL alone in separate processes: when many calls are queued, and when each is
waited for.  The column "call" is the time until the call returns in the master, which does not wait.  Bus bandwidth is
defined as in NCCL's own tests: 2 (n - 1) / n times the bytes, divided by the time.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from statistics import median
from time import perf_counter

import numpy as np

import synkhronos as synk
from benchmarks._measure import (
    Table,
    format_bytes,
    format_duration,
    import_graph_library,
    print_criterion,
    print_heading,
    require_gpus,
    time_call,
)
from synkhronos.devices import get_array_device
from synkhronos.graph_libraries import get_library

SIZES = [4_000, 4_200_000, 102_000_000]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_all_reduce",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, help="number of GPUs (default: all)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="in bytes (default: 4 KB, 4.2 MB, 102 MB)")
    parser.add_argument("--calls", type=int, default=200, help="timed calls (default: %(default)s)")
    options = parser.parse_args()
    count = require_gpus(options.ranks)
    print_heading(f"all_reduce on {count} GPUs: the sum of float32")
    nccl = subprocess.Popen(
        [sys.executable, "-m", "benchmarks._nccl", str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert nccl.stdin is not None and nccl.stdout is not None
    assert nccl.stdout.readline().strip() == "ready"
    synk.fork(count, use_gpu=True)
    library, _ = import_graph_library()
    shared = library.shared(np.zeros(1, np.float32), "s")
    synk.function([], shared, updates=[(shared, shared)])()
    columns = ("call", "queued", "NCCL", "share", "GB/s", "waited", "NCCL ")
    table = Table({"": 8, **dict.fromkeys(columns, 9)})
    device = get_array_device(get_library(shared).borrow_value(shared))

    def wait() -> None:
        device.wait([get_library(shared).borrow_value(shared)])

    def all_reduce_once() -> None:
        synk.all_reduce(shared, "sum")
        wait()

    results = {}
    for nbytes in options.sizes:
        items = nbytes // 4
        for r in range(count):
            synk.set_value(r, shared, np.full(items, 1 + r, np.float32))
        synk.all_reduce(shared, "sum")
        expected = count * (count + 1) / 2
        assert all((synk.get_value(r, shared) == expected).all() for r in range(count))
        synk.broadcast(shared, np.zeros(items, np.float32))
        calls: list[float] = []
        rank_times: list[tuple[float, float]] = []
        nccl_times: list[tuple[float, float]] = []
        for _ in range(3):
            for _ in range(10):
                all_reduce_once()
            start = perf_counter()
            calls += [time_call(lambda: synk.all_reduce(shared, "sum")) for _ in range(options.calls // 3)]
            wait()
            queued_time = (perf_counter() - start) / (options.calls // 3)
            rank_times.append((queued_time, median(time_call(all_reduce_once) for _ in range(options.calls // 3))))
            print("all_reduce", items, file=nccl.stdin, flush=True)
            queued, waited = map(float, nccl.stdout.readline().split())
            nccl_times.append((queued, waited))
        queued, waited = (median(values) for values in zip(*rank_times, strict=True))
        nccl_queued, nccl_waited = (median(values) for values in zip(*nccl_times, strict=True))
        bandwidth = 2 * (count - 1) / count * nbytes / queued / 1e9
        results[nbytes] = median(calls), nccl_queued / queued, queued, waited
        table.print_row(
            format_bytes(nbytes),
            *map(format_duration, (results[nbytes][0], queued, nccl_queued)),
            f"{nccl_queued / queued:.3f}",
            f"{bandwidth:.0f}",
            *map(format_duration, (waited, nccl_waited)),
        )
    nccl.communicate("\n")  # an empty line ends it: forked ranks keep its input open
    synk.close()
    print()
    largest, smallest = max(options.sizes), min(options.sizes)
    print_criterion(
        f"bus bandwidth, relative to NCCL, {format_bytes(largest)}", 100 * results[largest][1], " %", at_least=95
    )
    print_criterion(f"call to return, {format_bytes(smallest)}", 1e6 * results[smallest][0], " us", at_most=100)
    if smallest <= 4_000:
        print_criterion(f"queued, {format_bytes(smallest)}", 1e6 * results[smallest][2], " us", at_most=25)
        print_criterion(
            f"waited for, {format_bytes(smallest)}", 1e6 * results[smallest][3], " us", at_most=40 if count == 2 else 60
        )


if __name__ == "__main__":
    main()
