"""PyTorch's Gloo, for comparison in `benchmarks.all_reduce` and `benchmarks.hosts`.

A script of its own: PyTorch must be imported after its processes are forked, and not in the process of the graph
library.  It starts its processes itself, or MPICH's mpirun starts them, with the path of the file by which they
connect.  Rank 0 reads one line from standard input for each measurement, a number of float32 values, and prints the
seconds of an all_reduce of them.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from time import perf_counter
from typing import Any


def run_rank(rank: int, size: int, rendezvous: str) -> None:
    """Run one process of the group."""
    os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // size))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    values: dict[int, Any] = {}
    if rank == 0:
        print("ready", torch.__version__, flush=True)
    while True:
        order = torch.tensor([int(sys.stdin.readline().strip() or 0) if rank == 0 else 0])
        dist.broadcast(order, 0)
        count = int(order)
        if count == 0:
            break
        if count not in values:
            values[count] = torch.full((count,), 1e-20)
            dist.all_reduce(values[count])
        values[count].fill_(1e-20)
        dist.barrier()  # every process has woken up before the clock starts
        start = perf_counter()
        dist.all_reduce(values[count])
        if rank == 0:
            print(perf_counter() - start, flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Run one process; rank 0 starts the others."""
    size = int(sys.argv[1])
    if "PMI_RANK" in os.environ:
        run_rank(int(os.environ["PMI_RANK"]), size, sys.argv[2])
        return
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = os.path.join(folder, "rendezvous")
        workers = [context.Process(target=run_rank, args=(r, size, rendezvous), daemon=True) for r in range(1, size)]
        for process in workers:
            process.start()
        run_rank(0, size, rendezvous)
        for process in workers:
            process.join()


if __name__ == "__main__":
    main()
