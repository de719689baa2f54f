"""Throughput of rows of a Data object to the GPUs.

A function that uses one row of its input is called with a shuffled list of rows, and with a slice of the same length.
The call returns when the rows are on the GPUs: from then on the user may write to the memory that held them.  For
comparison, the CUDA driver alone copies the same number of bytes to each GPU from the same page-locked memory, on all
ranks at once.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    print_criterion,
    print_heading,
    require_gpus,
    time_interleaved,
)
from synkhronos import ranks
from synkhronos.data_objects.data_access import get_array_location
from synkhronos.devices import get_rank_device
from synkhronos.devices.cuda.gpu_context import unwrap_cuda_result
from synkhronos.ranks import ArrayLocation, Command, Rank

WIDTH = 784


@dataclass(frozen=True)
class CopyRows(Command):
    """Copy a run of rows to each rank's GPU, by the driver alone."""

    location: ArrayLocation
    rows: int
    nbytes: int

    def run(self, rank: Rank) -> None:
        """Copy this rank's rows, and wait for the copy."""
        device: Any = get_rank_device(rank)  # one on GPUs
        gpu = device.gpu_context
        target = rank.objects.get("benchmark")
        if target is None or target.size != self.nbytes:
            target = rank.objects["benchmark"] = device.empty((self.nbytes,), np.dtype(np.uint8))
        source = device.staging.pinned_segments.pin(rank, self.location.segment_key) + rank.number * self.nbytes
        gpu.set_current_gpu()
        unwrap_cuda_result(
            gpu.driver.cuMemcpyAsync(device.get_address(target), source, self.nbytes, gpu.copy_stream_handle)
        )
        gpu.copy_stream.sync()


def main() -> None:
    """Run the benchmark."""
    parser = make_parser("gpu_rows", __doc__)
    parser.add_argument("--ranks", type=int, help="number of GPUs (default: all)")
    parser.add_argument("--rows", type=int, nargs="+", default=[500, 5000, 20000], help="rows a rank")
    parser.add_argument("--rounds", type=int, default=30, help="turns of each side (default: %(default)s)")
    options = parser.parse_args()
    count = require_gpus(options.ranks)
    print_heading(f"rows of {format_bytes(4 * WIDTH)} to {count} GPUs, each its own")
    synk.fork(count, use_gpu=True)
    library, tensor = import_graph_library()
    x, last = tensor.fmatrix("x"), library.shared(np.zeros(WIDTH, np.float32), "last")
    f = synk.function([x], [], updates=[(last, x[-1])])
    rng = np.random.default_rng(0)
    data = synk.data(rng.random((max(options.rows) * count * 2, WIDTH), dtype=np.float32))
    session = ranks.get_session()

    table = Table({"rows": 7, "bytes": 8, "by index": 9, "GB/s": 6, "slice": 9, "GB/s ": 6, "driver": 9, "GB/s  ": 6})
    rates = {}
    for rows in options.rows:
        nbytes = rows * WIDTH * 4
        index = rng.permutation(len(data))[: rows * count]
        f(data, batch=index)
        assert (synk.get_value(0, last) == data[index[rows - 1]]).all()
        copy = CopyRows(get_array_location(data), rows, nbytes)

        def copy_by_index(index: np.ndarray = index) -> None:
            f(data, batch=index)

        def copy_by_slice(rows: int = rows) -> None:
            f(data, batch=slice(0, rows * count))

        def copy_by_driver(copy: CopyRows = copy) -> None:
            session.run(copy)

        sides: dict[str, Any] = {"index": copy_by_index, "slice": copy_by_slice, "driver": copy_by_driver}
        times = time_interleaved(sides, options.rounds, calls=5, n_warmup=2)
        medians = {name: compute_quartiles(values)[1] for name, values in times.items()}
        rates[rows] = {name: nbytes / time / 1e9 for name, time in medians.items()}
        cells = [cell for name in sides for cell in (format_duration(medians[name]), f"{rates[rows][name]:.1f}")]
        table.print_row(str(rows), format_bytes(nbytes), *cells)
    synk.close()
    print()
    largest = max(options.rows)
    print_criterion(f"rate by index, {largest} rows a rank", rates[largest]["index"], " GB/s", at_least=25)
    print_criterion(
        f"rate by index beside the driver's copy, {largest} rows a rank",
        100 * rates[largest]["index"] / rates[largest]["driver"],
        " %",
        at_least=60,
    )


if __name__ == "__main__":
    main()
