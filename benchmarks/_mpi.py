"""mpi4py under mpiexec, for comparison in `benchmarks.all_reduce` and `benchmarks.hosts`.

Each process is one rank.  Rank 0 reads one line from standard input for each measurement, a number of float32 values,
and prints the seconds of an in-place Allreduce of them; for a negative number, those of a round trip of the values
between the first rank and the last.
"""

from __future__ import annotations

import sys
from time import perf_counter, sleep
from typing import Any

import numpy as np


def send_round_trip(comm: Any, count: int) -> None:
    """Send float32 values from the first rank to the last and back; rank 0 prints the seconds."""
    first, last, rank = 0, comm.size - 1, comm.rank
    values = np.ones(count, np.float32) if rank in (first, last) else None
    comm.Barrier()
    start = perf_counter()
    if rank == first:
        comm.Send(values, last)
        comm.Recv(values, last)
        print(perf_counter() - start, flush=True)
    elif rank == last:
        comm.Recv(values, first)
        comm.Send(values, first)


def main() -> None:
    """Run one process."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    if comm.rank == 0:
        version = MPI.Get_library_version().splitlines()[0].split(",")[0].replace("\x00", "")
        print("ready", *version.split(), flush=True)
    values: dict[int, np.ndarray] = {}
    while True:
        line = sys.stdin.readline().strip() if comm.rank == 0 else ""
        # Poll with pauses: a blocking wait in MPI would occupy a core that the other side needs for its measurement.
        order = np.array([int(line or 0)])
        request = comm.Ibcast(order)
        while not request.Test():
            sleep(1e-3)
        count = int(order[0])
        if not count:
            break
        if count < 0:
            send_round_trip(comm, -count)
            continue
        if count not in values:
            values[count] = np.full(count, 1e-30, np.float32)
            comm.Allreduce(MPI.IN_PLACE, values[count])
        values[count].fill(1e-30)
        comm.Barrier()
        start = perf_counter()
        comm.Allreduce(MPI.IN_PLACE, values[count])
        if comm.rank == 0:
            print(perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
