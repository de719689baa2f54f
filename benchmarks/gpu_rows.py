"""Throughput of rows of a Data object to the GPUs.

A function that does next to nothing with its input is called with a shuffled list of rows, and with as long a slice.
The call returns when the rows are there: from then on the user may write into the memory that they came from.  Beside
it the bus: a copy of as many bytes to each GPU from the same page-locked memory, by the CUDA driver alone, on all ranks
at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import synkhronos as synk
from benchmarks._measure import Table, bar, duration, gpus, graph_library, heading, interleaved, quartiles, size
from synkhronos import ranks
from synkhronos.data.shared_memory import get_array_location
from synkhronos.devices.cuda.staging import check_result
from synkhronos.ranks import ArrayLocation, Command, Rank

WIDTH = 784


@dataclass(frozen=True)
class Copy(Command):
    """Copy a run of rows to each rank's GPU, by the driver alone."""

    location: ArrayLocation
    rows: int
    nbytes: int

    def run(self, rank: Rank) -> None:
        """Copy this rank's rows, and wait for the copy."""
        device = rank.device
        staging = device.staging
        target = rank.objects.get("benchmark")
        if target is None or target.size != self.nbytes:
            target = rank.objects["benchmark"] = device.empty((self.nbytes,), np.dtype(np.uint8))
        source = staging.pin_segment(rank, self.location.key) + rank.number * self.nbytes
        staging.set_current()
        check_result(
            staging.driver.cuMemcpyAsync(device.get_pointer(target), source, self.nbytes, staging.stream_handle)
        )
        staging.stream.sync()


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_rows", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, help="number of GPUs (default: all)")
    parser.add_argument("--rows", type=int, nargs="+", default=[500, 5000, 20000], help="rows a rank")
    parser.add_argument("--rounds", type=int, default=30, help="turns of each side (default: %(default)s)")
    options = parser.parse_args()
    count = gpus(options.ranks)
    heading(f"rows of {size(4 * WIDTH)} to {count} GPUs, each its own")
    synk.fork(count, use_gpu=True)
    library, tensor = graph_library()
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
        copy = Copy(get_array_location(data), rows, nbytes)

        def by_index(index: np.ndarray = index) -> None:
            f(data, batch=index)

        def by_slice(rows: int = rows) -> None:
            f(data, batch=slice(0, rows * count))

        def by_driver(copy: Copy = copy) -> None:
            session.run(copy)

        sides: dict[str, Callable[[], None]] = {"index": by_index, "slice": by_slice, "driver": by_driver}
        times = interleaved(sides, options.rounds, calls=5, warm=2)
        middle = {name: quartiles(values)[1] for name, values in times.items()}
        rates[rows] = {name: nbytes / time / 1e9 for name, time in middle.items()}
        cells = [cell for name in sides for cell in (duration(middle[name]), f"{rates[rows][name]:.1f}")]
        table.row(str(rows), size(nbytes), *cells)
    synk.close()
    print()
    most = max(options.rows)
    bar(f"rate by index, {most} rows a rank", rates[most]["index"], " GB/s", least=25)
    bar(
        f"rate by index beside the driver's copy, {most} rows a rank",
        100 * rates[most]["index"] / rates[most]["driver"],
        " %",
        least=60,
    )


if __name__ == "__main__":
    main()
