"""NCCL alone, for comparison in `benchmarks.gpu_all_reduce` and `benchmarks.collectives`.

Run as a script of its own: it starts a process for each GPU, and reads from standard input one line for each
measurement, a collective's name and the number of float32 on each GPU; it answers each with the seconds of one in the
first process, when many are queued and when each is waited for.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from statistics import median
from time import perf_counter
from typing import Any

_FLOAT32, _SUM = 7, 0


def make_call(name: str, nccl: Any, at: int, out: int, count: int, rank: int, size: int, handle: Any, on: int) -> Any:
    """Return a function that enqueues one collective on a stream; the first process is the root."""

    def gather() -> None:
        nccl.group_start()
        if rank:
            nccl.send(at, count, _FLOAT32, 0, handle, on)
        for r in range(1, size if rank == 0 else 0):
            nccl.recv(out + 4 * count * r, count, _FLOAT32, r, handle, on)
        nccl.group_end()

    def send() -> None:
        if rank == 0:
            nccl.send(at, count, _FLOAT32, size - 1, handle, on)
        elif rank == size - 1:
            nccl.recv(at, count, _FLOAT32, 0, handle, on)

    return {
        "all_reduce": lambda: nccl.all_reduce(at, at, count, _FLOAT32, _SUM, handle, on),
        "reduce": lambda: nccl.reduce(at, at, count, _FLOAT32, _SUM, 0, handle, on),
        "broadcast": lambda: nccl.broadcast(at, at, count, _FLOAT32, 0, handle, on),
        "all_gather": lambda: nccl.all_gather(at, out, count, _FLOAT32, handle, on),
        "gather": gather,
        "send": send,
    }[name]


def serve(rank: int, size: int, orders: list[Any]) -> None:
    """Run one process of the group."""
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
            line = sys.stdin.readline().split()
            for order in orders:
                order.send(line)
        else:
            line = orders[rank - 1].recv()
        if not line:
            break
        count = int(line[1])
        _, address = driver.cuMemAlloc(4 * count * (1 + size))
        at = int(address)
        driver.cuMemsetD8(address, 0, 4 * count * (1 + size))
        one = make_call(line[0], nccl, at, at + 4 * count, count, rank, size, handle, int(stream.handle))
        for _ in range(10):
            one()
        stream.sync()
        times, rounds = [], 100
        for _ in range(rounds):
            start = perf_counter()
            one()
            stream.sync()
            times.append(perf_counter() - start)
        start = perf_counter()
        for _ in range(rounds):
            one()
        stream.sync()
        if rank == 0:
            print((perf_counter() - start) / rounds, median(times), flush=True)
        driver.cuMemFree(address)
    communicator.destroy()


def main() -> None:
    """Start the other processes; this one is rank 0."""
    size = int(sys.argv[1])
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(size - 1)]
    for r, (_, theirs) in enumerate(pipes, 1):
        context.Process(target=serve, args=(r, size, [None] * (r - 1) + [theirs]), daemon=True).start()
    serve(0, size, [ours for ours, _ in pipes])


if __name__ == "__main__":
    main()
