"""NCCL alone, for comparison in `benchmarks.gpu_all_reduce` and `benchmarks.collectives`.

A script of its own, which starts a process for each GPU.  With ``torch`` as second argument, all_reduce is that of
`torch.distributed`.  Rank 0 reads one line from standard input for each
measurement, a collective's name and the number of float32 values on each GPU, and prints its own seconds per call: when
many calls are queued, and when it waits for each.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
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
        "reduce_scatter": lambda: nccl.reduce_scatter(source, destination, count // size, _FLOAT32, _SUM, comm, stream),
        "broadcast": lambda: nccl.broadcast(source, source, count, _FLOAT32, 0, comm, stream),
        "all_gather": lambda: nccl.all_gather(source, destination, count, _FLOAT32, comm, stream),
        "gather": gather,
        "send": send,
    }[name]


class NcclCollectives:
    """NCCL's collectives, as one process of the group calls them."""

    def __init__(self, rank: int, size: int, pipes: list[Any]):
        from cuda.bindings import driver
        from cuda.core import Device
        from nccl.bindings import nccl
        from nccl.core import Communicator, UniqueId, get_unique_id

        self._driver, self._nccl, self._rank, self._size = driver, nccl, rank, size
        device = Device(0)
        device.set_current()
        self._stream = device.create_stream()
        self.sync = self._stream.sync
        if rank == 0:
            unique_id = bytes(get_unique_id())
            for pipe in pipes:
                pipe.send(unique_id)
        else:
            unique_id = pipes[rank - 1].recv()
        self._communicator = Communicator.init(size, rank, UniqueId.from_bytes(unique_id))
        self._address: Any = None

    def make_call(self, name: str, count: int) -> Callable[[], None]:
        """Return a function that enqueues a collective of new zeros; the last one's memory is freed."""
        self.free()
        nbytes = 4 * count * (1 + self._size)
        _, self._address = self._driver.cuMemAlloc(nbytes)
        source = int(self._address)
        self._driver.cuMemsetD8(self._address, 0, nbytes)
        comm, stream = self._communicator._comm, int(self._stream.handle)
        call: Callable[[], None] = make_collective_call(
            name, self._nccl, source, source + 4 * count, count, self._rank, self._size, comm, stream
        )
        return call

    def free(self) -> None:
        """Free the memory of the last collective."""
        if self._address is not None:
            self._driver.cuMemFree(self._address)
            self._address = None

    def close(self) -> None:
        """Leave the group."""
        self.free()
        self._communicator.destroy()


class TorchCollectives:
    """all_reduce of `torch.distributed`, as one process of the group calls it."""

    def __init__(self, rank: int, size: int, store: str):
        import torch
        from torch import distributed

        self._torch, self._distributed, self.sync = torch, distributed, torch.cuda.synchronize
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        distributed.init_process_group(
            "nccl", init_method=f"file://{store}", rank=rank, world_size=size, device_id=device
        )

    def make_call(self, name: str, count: int) -> Callable[[], None]:
        """Return a function that enqueues an all_reduce of new zeros."""
        assert name == "all_reduce"
        tensor, all_reduce = self._torch.zeros(count, device="cuda"), self._distributed.all_reduce

        def call() -> None:
            all_reduce(tensor)

        return call

    def close(self) -> None:
        """Leave the group."""
        self._distributed.destroy_process_group()


def run_rank(rank: int, size: int, pipes: list[Any], store: str) -> None:
    """Run one process of the group; ``pipes`` has rank 0's pipes to the others, or at ``rank - 1`` a worker's own.

    ``store`` is the path by which torch's processes meet; empty for NCCL alone.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[rank] if visible else str(rank)
    collectives: Any = TorchCollectives(rank, size, store) if store else NcclCollectives(rank, size, pipes)
    sync = collectives.sync
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
        enqueue = collectives.make_call(line[0], int(line[1]))
        for _ in range(10):
            enqueue()
        sync()
        times, calls = [], 100
        for _ in range(calls):
            start = perf_counter()
            enqueue()
            sync()
            times.append(perf_counter() - start)
        start = perf_counter()
        for _ in range(calls):
            enqueue()
        sync()
        if rank == 0:
            print((perf_counter() - start) / calls, median(times), flush=True)
    collectives.close()


def main() -> None:
    """Start the other processes; this one is rank 0."""
    size, uses_torch = int(sys.argv[1]), sys.argv[2:] == ["torch"]
    context = multiprocessing.get_context("fork")
    ends = [context.Pipe() for _ in range(size - 1)]
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store" if uses_torch else ""
        for r, (_, worker_end) in enumerate(ends, 1):
            arguments = r, size, [None] * (r - 1) + [worker_end], store
            context.Process(target=run_rank, args=arguments, daemon=True).start()
        run_rank(0, size, [master_end for master_end, _ in ends], store)


if __name__ == "__main__":
    main()
