"""Time of each collective.

All collectives, on float32 of 4 KB, 4 MB and 100 MB a rank, on CPU cores or, with ``--device gpu``, on GPUs.  They are
compared

- on cores, with NumPy in one process, which does the same work on the arrays of all ranks, into memory that was used
  before: a copy for each array that a rank receives, and an addition for each operand;
- on GPUs, with NCCL's own collectives in separate processes.  Transfers between host and GPU (``scatter``,
  ``set_value``, ``get_value``) and calls that transfer nothing have no counterpart.

Values passed to collectives are `synkhronos.Data`.  A call's time ends when the result is in memory.

The last two rows are for calls inside a program under `synkhronos.run`, on arrays of the rank's device: ``send``, from
the first rank to the last (half of a round trip), and ``group``, the all_reduce of a group of all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

import synkhronos as synk
from benchmarks import make_parser
from benchmarks._measure import (
    ReferenceProcesses,
    Table,
    format_bytes,
    format_duration,
    format_quartiles,
    import_graph_library,
    print_heading,
    require_gpus,
    time_call,
)
from synkhronos.devices import get_array_device
from synkhronos.graph_libraries import get_library
from synkhronos.programs import RankContext

SIZES = [4_000, 4_000_000, 100_000_000]
#: NCCL's name of each collective.
NCCL_NAMES = {
    name: name for name in ("broadcast", "gather", "all_gather", "reduce", "all_reduce", "reduce_scatter", "send")
} | {"group": "all_reduce"}


class RankCollectives:
    """A shared variable on all ranks, and the calls of each collective on it."""

    def __init__(self, n_ranks: int):
        library, _ = import_graph_library()
        self._n_ranks = n_ranks
        #: Seconds measured inside a call.
        self._inner_times: list[float] = []
        self._s, self._joined, self._split = (
            library.shared(np.zeros(1, np.float32), name) for name in ("s", "joined", "split")
        )
        self._f = synk.function([], [], updates=[(v, v) for v in (self._s, self._joined, self._split)])
        self._f()

    def make_calls(self, n_values: int) -> dict[str, Callable[[], Any]]:
        """Return a call of each collective on `n_values` elements per rank; they are zero, so that sums stay finite."""
        s, joined, last = self._s, self._joined, self._n_ranks - 1
        data, rows = (
            synk.data(np.zeros(n_values, np.float32)),
            synk.data(np.zeros(n_values * self._n_ranks, np.float32)),
        )
        synk.broadcast(s, data)

        def make_waiting_call(call: Callable[..., None], shared: Any, *arguments: Any) -> Callable[[], None]:
            def call_and_wait() -> None:
                call(shared, *arguments)
                self._wait_until_computed(get_library(shared).borrow_value(shared))

            return call_and_wait

        all_gather = make_waiting_call(synk.all_gather, joined)

        def scatter_and_gather() -> None:
            synk.scatter(joined, rows)  # all_gather would lengthen it with each call
            self._inner_times.append(time_call(all_gather))

        reduce_scatter = make_waiting_call(synk.reduce_scatter, self._split, "sum")

        def broadcast_and_reduce_scatter() -> None:
            synk.broadcast(self._split, data)  # reduce_scatter would shorten it with each call
            self._wait_until_computed(get_library(self._split).borrow_value(self._split))
            self._inner_times.append(time_call(reduce_scatter))

        return {
            "broadcast": make_waiting_call(synk.broadcast, s),
            "scatter": make_waiting_call(synk.scatter, joined, rows),
            "gather": lambda: self._wait_until_computed(synk.gather(s)),
            "all_gather": scatter_and_gather,
            "reduce": make_waiting_call(synk.reduce, s, "sum"),
            "all_reduce": make_waiting_call(synk.all_reduce, s, "sum"),
            "reduce_scatter": broadcast_and_reduce_scatter,
            "set_value": lambda: synk.set_value(last, s, data),
            "get_value": lambda: synk.get_value(last, s),
            "get_lengths": lambda: synk.get_lengths(s),
            "get_shapes": lambda: synk.get_shapes(s),
        }

    def time_program(self, name: str, calls: int) -> list[float]:
        """Return the seconds of a collective that ranks call within a program."""
        return synk.run(time_in_program, name, self._s, calls)[0]

    def _wait_until_computed(self, value: Any) -> None:
        get_array_device(value).wait([value])

    def time_calls(self, name: str, call: Callable[[], Any], rounds: int) -> list[float]:
        """Return the seconds of each call, after one untimed call."""
        call()
        self._inner_times.clear()
        times = [time_call(call) for _ in range(rounds)]
        return list(self._inner_times) or times


def time_in_program(context: RankContext, name: str, shared: Any, calls: int) -> list[float]:
    """Send or reduce a shared variable's value; return the seconds of each call except the first."""
    array, last = get_library(shared).borrow_value(shared), context.size - 1
    group = context.group(range(context.size))

    def send() -> None:
        if context.number == 0:
            context.send(array, last)
            result = context.receive(last)
        elif context.number == last:
            result = context.receive(0)
            context.send(result, 0)
        else:
            return
        get_array_device(result).wait([result])

    def all_reduce() -> None:
        result = group.all_reduce(array, "sum")
        get_array_device(result).wait([result])

    call, factor = (send, 0.5) if name == "send" else (all_reduce, 1.0)
    call()
    context.barrier("connected")
    return [factor * time_call(call) for _ in range(calls)]


def make_numpy_sides(n_values: int, n_ranks: int) -> dict[str, Callable[[], Any]]:
    """Return, for each collective, the equivalent NumPy operation on the arrays of all ranks in one process."""
    arrays = [np.zeros(n_values, np.float32) for _ in range(n_ranks)]
    whole = np.zeros((n_ranks, n_values), np.float32)
    total = np.zeros(n_values, np.float32)

    def make_copy_call(n: int) -> Callable[[], None]:
        def copy() -> None:
            for k in range(n):
                np.copyto(whole[k % n_ranks], arrays[k % n_ranks])

        return copy

    def reduce() -> None:
        np.add(arrays[0], arrays[1 % n_ranks], out=total)
        for array in arrays[2:]:
            np.add(total, array, out=total)

    def all_reduce() -> None:
        reduce()
        for k in range(n_ranks - 1):
            np.copyto(arrays[k], total)

    return {
        "broadcast": make_copy_call(n_ranks - 1),
        "reduce_scatter": reduce,
        "scatter": make_copy_call(n_ranks),
        "gather": make_copy_call(n_ranks),
        "all_gather": make_copy_call(n_ranks * n_ranks),
        "reduce": reduce,
        "all_reduce": all_reduce,
        "set_value": make_copy_call(1),
        "get_value": make_copy_call(1),
    }


def main() -> None:
    """Run the benchmark."""
    parser = make_parser("collectives", __doc__)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="(default: %(default)s)")
    parser.add_argument("--ranks", type=int, help="number of ranks (default: 2, or all GPUs)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="in bytes (default: 4 KB, 4 MB, 100 MB)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=10, help="calls in a turn (default: %(default)s)")
    options = parser.parse_args()
    on_gpu = options.device == "gpu"
    n_ranks = require_gpus(options.ranks) if on_gpu else options.ranks or 2
    reference = "NCCL" if on_gpu else "NumPy"
    print_heading(f"All collectives of float32 on {n_ranks} {'GPUs' if on_gpu else 'ranks'}, beside {reference}")
    nccl = ReferenceProcesses([sys.executable, "-m", "benchmarks._nccl", str(n_ranks)]) if on_gpu else None
    assert nccl is None or nccl.is_started
    synk.fork(n_ranks, use_gpu=on_gpu)
    ranks = RankCollectives(n_ranks)
    table = Table({"": 14, "a rank": 8, "ours": 9, "quartiles": 19, reference: 9, f"ours/{reference}": 10})
    for nbytes in options.sizes:
        n_values = nbytes // 4
        calls = ranks.make_calls(n_values)
        sides = {} if on_gpu else make_numpy_sides(n_values, n_ranks)
        n_calls = options.calls if nbytes > 10_000_000 else 10 * options.calls
        for name in [*calls, "send", "group"]:
            rank_times: list[float] = []
            reference_times: list[float] = []
            for _ in range(options.rounds):
                rank_times += (
                    ranks.time_calls(name, calls[name], n_calls) if name in calls else ranks.time_program(name, n_calls)
                )
                if nccl is not None and name in NCCL_NAMES:
                    reference_times.append(nccl.measure(NCCL_NAMES[name], n_values)[1])  # with waiting
                elif name in sides:
                    sides[name]()
                    reference_times += [time_call(sides[name]) for _ in range(n_calls)]
            table.print_row(
                *(name, format_bytes(nbytes), *format_quartiles(rank_times)),
                *(
                    (format_duration(median(reference_times)), f"{median(rank_times) / median(reference_times):.2f}")
                    if reference_times
                    else ("-", "-")
                ),
            )
    if nccl is not None:
        nccl.close()
    synk.close()


if __name__ == "__main__":
    main()
