"""Throughput of all_reduce of shared variables on GPUs.

`synkhronos.all_reduce` is compared with NCCL alone in separate processes, and with ``--torch`` with
`torch.distributed`: when many calls are queued, and when each is waited for.  Times are medians of three rounds, in
which the sides take turns, followed by the smallest and the largest round in microseconds.  The column "call" is the
time until the call returns in the master, which does not wait.  Bus bandwidth is defined as in NCCL's own tests:
2 (n - 1) / n times the bytes, divided by the time.
"""

from __future__ import annotations

import sys
from statistics import median
from time import perf_counter

import numpy as np

import synkhronos as synk
from benchmarks import make_parser
from benchmarks._measure import (
    HostProbe,
    ReferenceProcesses,
    Table,
    format_bytes,
    format_duration,
    format_spread,
    import_graph_library,
    print_criterion,
    print_heading,
    require_gpus,
    time_call,
)
from synkhronos.devices import get_array_device
from synkhronos.graph_libraries import get_library

SIZES = [4_000, 64_000, 4_200_000, 102_000_000]


def main() -> None:
    """Run the benchmark."""
    parser = make_parser("gpu_all_reduce", __doc__)
    parser.add_argument("--ranks", type=int, help="number of GPUs (default: all)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="in bytes (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=200, help="timed calls (default: %(default)s)")
    parser.add_argument("--torch", action="store_true", help="compare with torch.distributed, too")
    options = parser.parse_args()
    count = require_gpus(options.ranks)
    print_heading(f"all_reduce on {count} GPUs: the sum of float32")
    command = [sys.executable, "-m", "benchmarks._nccl", str(count)]
    references = {"NCCL": ReferenceProcesses(command)}
    if options.torch:
        references["torch"] = ReferenceProcesses([*command, "torch"])
    assert all(reference.is_started for reference in references.values())
    synk.fork(count, use_gpu=True)
    library, _ = import_graph_library()
    shared = library.shared(np.zeros(1, np.float32), "s")
    synk.function([], shared, updates=[(shared, shared)])()
    table = Table(
        {"": 8, "call": 9, "queued": 23, **dict.fromkeys(references, 23), "share": 7, "GB/s": 5}
        | {"waited": 23, **{f"{name} ": 23 for name in references}}
    )
    probe = HostProbe()
    device = get_array_device(get_library(shared).borrow_value(shared))

    def wait() -> None:
        device.wait([get_library(shared).borrow_value(shared)])

    def all_reduce_once() -> None:
        synk.all_reduce(shared, "sum")
        wait()

    ratios = {}
    for nbytes in options.sizes:
        items = nbytes // 4
        for r in range(count):
            synk.set_value(r, shared, np.full(items, 1 + r, np.float32))
        synk.all_reduce(shared, "sum")
        expected = count * (count + 1) / 2
        assert all((synk.get_value(r, shared) == expected).all() for r in range(count))
        synk.broadcast(shared, np.zeros(items, np.float32))
        calls: list[float] = []
        rounds: list[tuple[float, float]] = []
        reference_rounds: dict[str, list[list[float]]] = {name: [] for name in references}
        for _ in range(3):
            probe.measure()
            for _ in range(10):
                all_reduce_once()
            start = perf_counter()
            calls += [time_call(lambda: synk.all_reduce(shared, "sum")) for _ in range(options.calls // 3)]
            wait()
            queued_time = (perf_counter() - start) / (options.calls // 3)
            rounds.append((queued_time, median(time_call(all_reduce_once) for _ in range(options.calls // 3))))
            for name, reference in references.items():
                reference_rounds[name].append(reference.measure("all_reduce", items))
        queued, waited = zip(*rounds, strict=True)
        peer_rounds = {name: list(zip(*values, strict=True)) for name, values in reference_rounds.items()}
        bandwidth = 2 * (count - 1) / count * nbytes / median(queued) / 1e9
        nccl_queued, nccl_waited = map(median, peer_rounds["NCCL"])
        ratios[nbytes] = median(queued) / nccl_queued, median(waited) / nccl_waited
        table.print_row(
            format_bytes(nbytes),
            format_duration(median(calls)),
            format_spread(queued),
            *[format_spread(rounds[0]) for rounds in peer_rounds.values()],
            f"{1 / ratios[nbytes][0]:.3f}",
            f"{bandwidth:.0f}",
            format_spread(waited),
            *[format_spread(rounds[1]) for rounds in peer_rounds.values()],
        )
    for reference in references.values():
        reference.close()
    synk.close()
    print(f"{probe.describe()}\n")
    smallest, largest = min(ratios), max(ratios)
    for nbytes, max_queued, max_waited in ((smallest, 2, 2.5), (largest, 1.05, 1.05)):
        for name, ratio, limit in zip(("queued", "waited for"), ratios[nbytes], (max_queued, max_waited), strict=True):
            print_criterion(f"{format_bytes(nbytes)} {name}, relative to NCCL", ratio, " times", at_most=limit)


if __name__ == "__main__":
    main()
