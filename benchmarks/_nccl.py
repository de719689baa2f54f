"""The other side of `benchmarks.gpu_all_reduce`: NCCL, and nothing else.

Run as a script of its own: it starts a process for each GPU, and reads from standard input one line for each
measurement, the number of float32; it answers each with the seconds of one all_reduce in the first process, when many
are queued and when each is waited for.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from statistics import median
from time import perf_counter
from typing import Any

_FLOAT32, _SUM = 7, 0


def serve(rank: int, size: int, orders: list[Any]) -> None:
    """Be one process of the group."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    from cuda.bindings import driver
    from cuda.core import Device
    from nccl.bindings import nccl
    from nccl.core import Communicator, UniqueId, get_unique_id

    device = Device(0)
    device.set_current()
    stream = device.create_stream()
    if rank == 0:
        unique_id = bytes(get_unique_id())
        for order in orders:
            order.send(unique_id)
    else:
        unique_id = orders[rank - 1].recv()
    communicator = Communicator.init(size, rank, UniqueId.from_bytes(unique_id))
    handle = communicator._comm
    if rank == 0:
        print("ready", flush=True)
    while True:
        if rank == 0:
            line = sys.stdin.readline().strip()
            count = int(line) if line else 0
            for order in orders:
                order.send(count)
        else:
            count = orders[rank - 1].recv()
        if count == 0:
            break
        _, address = driver.cuMemAlloc(4 * count)
        at, on = int(address), int(stream.handle)
        driver.cuMemsetD8(address, 0, 4 * count)

        def all_reduce(at: int = at, count: int = count, on: int = on) -> None:
            nccl.all_reduce(at, at, count, _FLOAT32, _SUM, handle, on)

        for _ in range(10):
            all_reduce()
        stream.sync()
        times, rounds = [], 100
        for _ in range(rounds):
            start = perf_counter()
            all_reduce()
            stream.sync()
            times.append(perf_counter() - start)
        start = perf_counter()
        for _ in range(rounds):
            all_reduce()
        stream.sync()
        if rank == 0:
            print((perf_counter() - start) / rounds, median(times), flush=True)
        driver.cuMemFree(address)
    communicator.destroy()


def main() -> None:
    """Start the processes, and be the first."""
    size = int(sys.argv[1])
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(size - 1)]
    for r, (_, theirs) in enumerate(pipes, 1):
        context.Process(target=serve, args=(r, size, [None] * (r - 1) + [theirs]), daemon=True).start()
    serve(0, size, [ours for ours, _ in pipes])


if __name__ == "__main__":
    main()
