"""PyTorch's Gloo, for comparison in `benchmarks.all_reduce` and `benchmarks.hosts`.

Run as a script of its own, since PyTorch has to be imported after its processes are forked, and never beside the graph
library.  It starts as many processes as it is told, or is started as many times by MPICH's mpirun, with the name of a
file in which they meet.  The first reads from standard input one line for each measurement, the number of float32; it
answers each with the seconds that an all_reduce of so many took.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from time import perf_counter
from typing import Any


def serve(rank: int, size: int, meeting: str) -> None:
    """Run one process of the group."""
    os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // size))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    values: dict[int, Any] = {}
    if rank == 0:
        print("ready", torch.__version__, flush=True)
    while True:
        told = torch.tensor([int(sys.stdin.readline().strip() or 0) if rank == 0 else 0])
        dist.broadcast(told, 0)
        count = int(told)
        if count == 0:
            break
        if count not in values:
            values[count] = torch.full((count,), 1e-20)
            dist.all_reduce(values[count])
        values[count].fill_(1e-20)
        dist.barrier()  # all are here, and awake
        start = perf_counter()
        dist.all_reduce(values[count])
        if rank == 0:
            print(perf_counter() - start, flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Run one process; rank 0 starts the others."""
    size = int(sys.argv[1])
    if "PMI_RANK" in os.environ:
        serve(int(os.environ["PMI_RANK"]), size, sys.argv[2])
        return
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        meeting = os.path.join(folder, "meeting")
        others = [context.Process(target=serve, args=(r, size, meeting), daemon=True) for r in range(1, size)]
        for process in others:
            process.start()
        serve(0, size, meeting)
        for process in others:
            process.join()


if __name__ == "__main__":
    main()
