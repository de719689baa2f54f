"""Estimated time of a training step on many hosts with eight GPUs each.

A model on paper, of ResNet-50 in bfloat16 with float32 gradients: nothing is measured here.  The constants of one
machine were, on H200s: a step's time, the bandwidth between GPUs, what ranks wait for the slowest.  Those of the
network are assumed.  Efficiency is one GPU's step beside all GPUs' step.

- The exchange is hierarchical: between the GPUs of a host, then between hosts by the shorter of a ring and a tree.
- "Not hidden": the update waits for the whole exchange.  "Hidden": gradients go in four pieces, as the backward pass
  computes them; that is two thirds of a step.  The last piece can't be hidden.
- "16 bit": gradients in half the bytes.
"""

from __future__ import annotations

import argparse
import math

from benchmarks._measure import Table, duration

#: Measured: bytes of ResNet-50's gradients, GPUs of a host, bytes a second between them (NCCL's bus bandwidth).
GRADIENTS, GPUS, WITHIN = 102.2e6, 8, 314e9
#: Measured: seconds of a step of so many images on one GPU.
STEPS = {64: 13.3e-3, 256: 39.2e-3}
#: Measured on four GPUs: the part of a step for which ranks wait for the slowest, 2.5 %; for each doubling.
SLOWEST = 0.025 / 2
#: Assumed: seconds of a message between hosts, the part of a network's bandwidth that is used, bytes of a tree's chunk.
LATENCY, USED, CHUNK = 20e-6, 0.85, 1 << 20
#: Pieces of the gradient, and the part of a step that the backward pass takes.
PIECES, BACKWARD = 4, 2 / 3


def exchange(nbytes: float, hosts: int, gigabits: float) -> float:
    """Return the seconds of an all-reduce.

    Parameters
    ----------
    nbytes : float
    hosts : int
    gigabits : float
        A second, of a host's network, each way.
    """
    inside = 2 * (GPUS - 1) / GPUS * nbytes / WITHIN
    if hosts == 1:
        return inside
    rate = gigabits / 8 * 1e9 * USED
    ring = 2 * (hosts - 1) * LATENCY + 2 * (hosts - 1) / hosts * nbytes / rate
    tree = 2 * math.ceil(math.log2(hosts)) * (LATENCY + min(CHUNK, nbytes) / rate) + 2 * nbytes / rate
    return inside + min(ring, tree)


def efficiency(images: int, hosts: int, gigabits: float, hidden: bool, bits: int) -> float:
    """Return a GPU's step alone to the step of all."""
    step, nbytes = STEPS[images], GRADIENTS * bits / 32
    waited = exchange(nbytes, hosts, gigabits)
    if hidden:
        last = exchange(nbytes / PIECES, hosts, gigabits)
        waited = last + max(0.0, waited - last - BACKWARD * step * (1 - 1 / PIECES))
    return step / (step * (1 + SLOWEST * math.log2(hosts * GPUS)) + waited)


def main() -> None:
    """Print the model's tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.growth_hosts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2, 4, 16, 64, 128])
    parser.add_argument("--gigabits", type=float, nargs="+", default=[25, 100, 400, 3200], help="of a host's network")
    options = parser.parse_args()
    for images, step in STEPS.items():
        print(f"\n{images} images a GPU, {duration(step)} a step: efficiency on hosts of {GPUS} GPUs (a model)\n")
        columns = {"Gb/s": 6, "hosts": 5, "GPUs": 5, "exchange": 9, "not hidden": 10, "hidden": 7}
        table = Table({**columns, "16 bit": 7, "16 bit, hidden": 14})
        for gigabits in options.gigabits:
            for hosts in options.hosts:
                figures = [
                    f"{100 * efficiency(images, hosts, gigabits, hidden, bits):.0f} %"
                    for bits in (32, 16)
                    for hidden in (False, True)
                ]
                time = duration(exchange(GRADIENTS, hosts, gigabits))
                table.row(f"{gigabits:g}", str(hosts), f"{hosts * GPUS:,}", time, *figures)


if __name__ == "__main__":
    main()
