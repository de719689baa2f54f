"""Number of transfers of a shared variable.

Three functions use one large shared variable, and are distributed.  What is sent to a worker is counted: the sizes of
the shared segments that it is given.  The time is shown beside that of one plain copy of the variable.
"""

from __future__ import annotations

import argparse
import importlib
from unittest import mock

import numpy as np

import synkhronos as synk
from benchmarks._measure import Table, bar, duration, graph_library, heading, ranks, seconds, size
from synkhronos.ranks import Segment


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.distribute",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default: %(default)s)")
    parser.add_argument("--megabytes", type=int, default=100, help="of the variable (default: %(default)s)")
    parser.add_argument("--functions", type=int, default=3, help="that use it (default: %(default)s)")
    options = parser.parse_args()

    library, tensor = graph_library()
    nbytes = options.megabytes * 1_000_000
    heading(f"Distribute: {options.functions} functions of one shared variable of {size(nbytes)}")
    value = np.ones(nbytes // 4, np.float32)
    copy_time = min(seconds(value.copy) for _ in range(5))
    with ranks(options.ranks):
        s = library.shared(value, "s", borrow=True)
        x = tensor.fscalar("x")
        functions = [synk.function([], (s.sum() * x * k, "sum"), bcast_inputs=[x]) for k in range(options.functions)]
        crossed: list[int] = []
        memory = importlib.import_module("synkhronos.ranks.memory")
        send_segment = memory.send_segment

        def counted(channel: object, segment: Segment, fd: int) -> None:
            crossed.append(segment.nbytes)
            send_segment(channel, segment, fd)

        with mock.patch.object(memory, "send_segment", counted):
            first = seconds(synk.distribute)
            again = seconds(synk.distribute)
        workers = options.ranks - 1
        each = sum(crossed) / max(1, workers)
        assert synk.get_shapes(s) == [value.shape] * options.ranks
        assert len(functions) == options.functions

    table = Table({"": 26, "time": 9, "to each worker": 15, "segments": 9})
    table.row("one plain copy", duration(copy_time), size(nbytes), "")
    table.row("distribute()", duration(first), size(each), f"{len(crossed) / max(1, workers):.0f}")
    table.row("distribute() again", duration(again), size(0), "0")
    bar("bytes sent to each worker / bytes of the variable", each / nbytes, most=1.01)


if __name__ == "__main__":
    main()
