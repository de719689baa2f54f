"""Number of transfers of a shared variable.

Three functions use one large shared variable, and are distributed.  The bytes sent to a worker are the sizes of the
shared segments that it receives.  The time is compared with that of one plain copy of the variable.
"""

from __future__ import annotations

import importlib
from unittest import mock

import numpy as np

import synkhronos as synk
from benchmarks import make_parser
from benchmarks._measure import (
    Table,
    fork_ranks,
    format_bytes,
    format_duration,
    import_graph_library,
    print_criterion,
    print_heading,
    time_call,
)
from synkhronos.ranks import Segment


def main() -> None:
    """Run the benchmark."""
    parser = make_parser("distribute", __doc__)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default: %(default)s)")
    parser.add_argument("--megabytes", type=int, default=100, help="of the variable (default: %(default)s)")
    parser.add_argument("--functions", type=int, default=3, help="that use it (default: %(default)s)")
    options = parser.parse_args()

    library, tensor = import_graph_library()
    nbytes = options.megabytes * 1_000_000
    print_heading(f"Distribute: {options.functions} functions of one shared variable of {format_bytes(nbytes)}")
    value = np.ones(nbytes // 4, np.float32)
    copy_time = min(time_call(value.copy) for _ in range(5))
    with fork_ranks(options.ranks):
        s = library.shared(value, "s", borrow=True)
        x = tensor.fscalar("x")
        functions = [synk.function([], (s.sum() * x * k, "sum"), bcast_inputs=[x]) for k in range(options.functions)]
        sent: list[int] = []
        memory = importlib.import_module("synkhronos.ranks.memory_table")
        send_segment = memory.send_segment

        def count_bytes(channel: object, segment: Segment, fd: int) -> None:
            sent.append(segment.nbytes)
            send_segment(channel, segment, fd)

        with mock.patch.object(memory, "send_segment", count_bytes):
            first = time_call(synk.distribute)
            again = time_call(synk.distribute)
        workers = options.ranks - 1
        bytes_per_worker = sum(sent) / max(1, workers)
        assert synk.get_shapes(s) == [value.shape] * options.ranks
        assert len(functions) == options.functions

    table = Table({"": 26, "time": 9, "to each worker": 15, "segments": 9})
    table.print_row("one plain copy", format_duration(copy_time), format_bytes(nbytes), "")
    table.print_row(
        "distribute()", format_duration(first), format_bytes(bytes_per_worker), f"{len(sent) / max(1, workers):.0f}"
    )
    table.print_row("distribute() again", format_duration(again), format_bytes(0), "0")
    print_criterion("bytes sent to each worker / bytes of the variable", bytes_per_worker / nbytes, at_most=1.01)


if __name__ == "__main__":
    main()
