"""mpi4py under mpiexec, for comparison in `benchmarks.all_reduce` and `benchmarks.hosts`.

Each process is one rank.  The first reads from standard input one line for each measurement, the number of float32, and
answers with the seconds that an allreduce in place of so many took; for a negative number, the seconds in which so many
went to the last process and came back.
"""

from __future__ import annotations

import sys
from time import perf_counter, sleep
from typing import Any

import numpy as np


def there_and_back(world: Any, count: int) -> None:
    """Send float32 values from the first process to the last, and back."""
    first, last, me = 0, world.size - 1, world.rank
    values = np.ones(count, np.float32) if me in (first, last) else None
    world.Barrier()
    start = perf_counter()
    if me == first:
        world.Send(values, last)
        world.Recv(values, last)
        print(perf_counter() - start, flush=True)
    elif me == last:
        world.Recv(values, first)
        world.Send(values, first)


def main() -> None:
    """Run one process."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.rank == 0:
        version = MPI.Get_library_version().splitlines()[0].split(",")[0].replace("\x00", "")
        print("ready", *version.split(), flush=True)
    values: dict[int, np.ndarray] = {}
    while True:
        line = sys.stdin.readline().strip() if world.rank == 0 else ""
        # The others look now and then: a wait in MPI would take a core from the side whose turn it is.
        told = np.array([int(line or 0)])
        request = world.Ibcast(told)
        while not request.Test():
            sleep(1e-3)
        count = int(told[0])
        if not count:
            break
        if count < 0:
            there_and_back(world, -count)
            continue
        if count not in values:
            values[count] = np.full(count, 1e-30, np.float32)
            world.Allreduce(MPI.IN_PLACE, values[count])
        values[count].fill(1e-30)
        world.Barrier()
        start = perf_counter()
        world.Allreduce(MPI.IN_PLACE, values[count])
        if world.rank == 0:
            print(perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
