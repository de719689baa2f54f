"""Timed training steps, and groups of PyTorch's processes, for the sides of benchmarks.

Each side has its own process, and PyTorch and JAX never share one, so this module imports neither.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter
from typing import Any


def measure_steps(step: Callable[[], Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``first`` step's seconds, the median ``seconds`` of a step over some rounds, and the last ``loss``.

    Parameters
    ----------
    step : callable
        Starts a step, and returns its loss, which ``float`` waits for.
    settings : dict
        ``warm``: number of steps before the rounds.  ``steps``: those in each round.  ``rounds``: their number, 3 by
        default.
    """
    start = perf_counter()
    float(step())
    first = perf_counter() - start
    for _ in range(settings["warm"]):
        step()
    times, value = [], 0.0
    for _ in range(settings.get("rounds", 3)):
        float(step())  # waits for all steps before the clock starts
        start = perf_counter()
        losses = [step() for _ in range(settings["steps"])]
        value = float(losses[-1])
        times.append((perf_counter() - start) / len(losses))
    return {"first": first, "seconds": median(times), "loss": value}


def run_processes(target: Callable[..., Any], n_processes: int, *arguments: Any) -> Any:
    """Run a function on several ranks, each in a process; this one is rank 0, whose result is returned.

    Parameters
    ----------
    target : callable
        Takes the rank, the path of the file by which `torch.distributed` connects the processes, and ``arguments``.
    n_processes : int
    *arguments
    """
    context: Any = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = os.path.join(folder, "rendezvous")
        workers = [
            context.Process(target=target, args=(rank, rendezvous, *arguments), daemon=True)
            for rank in range(1, n_processes)
        ]
        for process in workers:
            process.start()
        result = target(0, rendezvous, *arguments)
        for process in workers:
            process.join()
    return result


def join_group(rank: int, rendezvous: str, world_size: int, on_gpu: bool) -> Any:
    """Connect this process to the others of `run_processes` by NCCL or Gloo; return its device."""
    import torch

    if on_gpu:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world_size))
    torch.distributed.init_process_group(
        "nccl" if on_gpu else "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
    )
    return torch.device("cuda", rank) if on_gpu else torch.device("cpu")
