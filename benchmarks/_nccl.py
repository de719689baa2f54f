"""NCCL alone, for comparison in `benchmarks.gpu_all_reduce` and `benchmarks.collectives`.

A script of its own, which starts a process for each GPU.  Rank 0 reads one line from standard input for each
measurement, a collective's name and the number of float32 values on each GPU, and prints its own seconds per call: when
many calls are queued, and when it waits for each.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from statistics import median
from time import perf_counter
from typing import Any

_FLOAT32, _SUM = 7, 0


def make_collective_call(
    name: str,
    nccl: Any,
    source: int,
    destination: int,
    count: int,
    rank: int,
    size: int,
    comm: Any,
    stream: int,
) -> Any:
    """Return a function that enqueues one collective on a stream; the first process is the root."""

    def gather() -> None:
        nccl.group_start()
        if rank:
            nccl.send(source, count, _FLOAT32, 0, comm, stream)
        for r in range(1, size if rank == 0 else 0):
            nccl.recv(destination + 4 * count * r, count, _FLOAT32, r, comm, stream)
        nccl.group_end()

    def send() -> None:
        if rank == 0:
            nccl.send(source, count, _FLOAT32, size - 1, comm, stream)
        elif rank == size - 1:
            nccl.recv(source, count, _FLOAT32, 0, comm, stream)

    return {
        "all_reduce": lambda: nccl.all_reduce(source, source, count, _FLOAT32, _SUM, comm, stream),
        "reduce": lambda: nccl.reduce(source, source, count, _FLOAT32, _SUM, 0, comm, stream),
        "broadcast": lambda: nccl.broadcast(source, source, count, _FLOAT32, 0, comm, stream),
        "all_gather": lambda: nccl.all_gather(source, destination, count, _FLOAT32, comm, stream),
        "gather": gather,
        "send": send,
    }[name]


def run_rank(rank: int, size: int, pipes: list[Any]) -> None:
    """Run one process of the group; ``pipes`` has rank 0's pipes to the others, or at ``rank - 1`` a worker's own."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[rank] if visible else str(rank)
    from cuda.bindings import driver
    from cuda.core import Device
    from nccl.bindings import nccl
    from nccl.core import Communicator, UniqueId, get_unique_id

    device = Device(0)
    device.set_current()
    stream = device.create_stream()
    if rank == 0:
        unique_id = bytes(get_unique_id())
        for pipe in pipes:
            pipe.send(unique_id)
    else:
        unique_id = pipes[rank - 1].recv()
    communicator = Communicator.init(size, rank, UniqueId.from_bytes(unique_id))
    comm = communicator._comm
    if rank == 0:
        print("ready", flush=True)
    while True:
        if rank == 0:
            line = sys.stdin.readline().split()
            for pipe in pipes:
                pipe.send(line)
        else:
            line = pipes[rank - 1].recv()
        if not line:
            break
        count = int(line[1])
        _, address = driver.cuMemAlloc(4 * count * (1 + size))
        source = int(address)
        driver.cuMemsetD8(address, 0, 4 * count * (1 + size))
        enqueue = make_collective_call(
            line[0], nccl, source, source + 4 * count, count, rank, size, comm, int(stream.handle)
        )
        for _ in range(10):
            enqueue()
        stream.sync()
        times, calls = [], 100
        for _ in range(calls):
            start = perf_counter()
            enqueue()
            stream.sync()
            times.append(perf_counter() - start)
        start = perf_counter()
        for _ in range(calls):
            enqueue()
        stream.sync()
        if rank == 0:
            print((perf_counter() - start) / calls, median(times), flush=True)
        driver.cuMemFree(address)
    communicator.destroy()


def main() -> None:
    """Start the other processes; this one is rank 0."""
    size = int(sys.argv[1])
    context = multiprocessing.get_context("fork")
    ends = [context.Pipe() for _ in range(size - 1)]
    for r, (_, worker_end) in enumerate(ends, 1):
        context.Process(target=run_rank, args=(r, size, [None] * (r - 1) + [worker_end]), daemon=True).start()
    run_rank(0, size, [master_end for master_end, _ in ends])


if __name__ == "__main__":
    main()
