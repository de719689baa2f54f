"""Estimated time of a training step on many hosts with eight GPUs each.

An analytical model of ResNet-50 in bfloat16 with float32 gradients: nothing is measured here.  The constants of one
host were measured on H200s: the time of a step, the bandwidth between GPUs, and the loss beyond the exchange.  Those
of the network are assumptions.  Efficiency is the time of a step on one GPU, divided by that on all GPUs.

- The exchange is hierarchical: between the GPUs of a host, then between hosts by the faster of a ring and a tree.
- "Not hidden": the update waits for the whole exchange.  "Hidden": gradients are exchanged in four pieces during the
  backward pass, which is two thirds of a step.  The last piece cannot be hidden.
- "16 bit": gradients with half the bytes.
"""

from __future__ import annotations

import math

from benchmarks import make_parser
from benchmarks._measure import Table, format_duration

#: Measured: bytes of ResNet-50's gradients, GPUs of a host, bytes a second between them (NCCL's bus bandwidth).
GRADIENT_NBYTES, GPUS, HOST_BANDWIDTH = 102.2e6, 8, 314e9
#: Measured: seconds of a step on one GPU, by number of images.
STEP_SECONDS = {64: 10.5e-3, 256: 32.2e-3}
#: Measured on two and four GPUs: share of a step that is lost beyond the exchange.
LOST_SHARE = 0.014
#: Assumed: seconds of a message between hosts, usable share of a network's bandwidth, bytes of a tree's chunk.
LATENCY, USABLE_SHARE, CHUNK = 20e-6, 0.85, 1 << 20
#: Pieces of the gradient, and share of the backward pass in a step.
N_PIECES, BACKWARD_SHARE = 4, 2 / 3


def estimate_exchange(nbytes: float, hosts: int, gigabits: float) -> float:
    """Return the seconds of an all-reduce.

    Parameters
    ----------
    nbytes : float
    hosts : int
    gigabits : float
        Gb/s of a host's network in each direction.
    """
    within_host = 2 * (GPUS - 1) / GPUS * nbytes / HOST_BANDWIDTH
    if hosts == 1:
        return within_host
    bandwidth = gigabits / 8 * 1e9 * USABLE_SHARE
    ring = 2 * (hosts - 1) * LATENCY + 2 * (hosts - 1) / hosts * nbytes / bandwidth
    tree = 2 * math.ceil(math.log2(hosts)) * (LATENCY + min(CHUNK, nbytes) / bandwidth) + 2 * nbytes / bandwidth
    return within_host + min(ring, tree)


def estimate_efficiency(images: int, hosts: int, gigabits: float, is_hidden: bool, bits: int) -> float:
    """Return the time of a step on one GPU, divided by that on all GPUs."""
    step, nbytes = STEP_SECONDS[images], GRADIENT_NBYTES * bits / 32
    exposed = estimate_exchange(nbytes, hosts, gigabits)
    if is_hidden:
        last_piece = estimate_exchange(nbytes / N_PIECES, hosts, gigabits)
        exposed = last_piece + max(0.0, exposed - last_piece - BACKWARD_SHARE * step * (1 - 1 / N_PIECES))
    return step / (step * (1 + LOST_SHARE) + exposed)


def main() -> None:
    """Print the tables of the model."""
    parser = make_parser("growth_hosts", __doc__)
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2, 4, 16, 64, 128])
    parser.add_argument("--gigabits", type=float, nargs="+", default=[25, 100, 400, 3200], help="of a host's network")
    options = parser.parse_args()
    for images, step in STEP_SECONDS.items():
        print(
            f"\n{images} images a GPU, {format_duration(step)} a step: efficiency on hosts of {GPUS} GPUs (a model)\n"
        )
        columns = {"Gb/s": 6, "hosts": 5, "GPUs": 5, "exchange": 9, "not hidden": 10, "hidden": 7}
        table = Table({**columns, "16 bit": 7, "16 bit, hidden": 14})
        for gigabits in options.gigabits:
            for hosts in options.hosts:
                figures = [
                    f"{100 * estimate_efficiency(images, hosts, gigabits, hidden, bits):.0f} %"
                    for bits in (32, 16)
                    for hidden in (False, True)
                ]
                time = format_duration(estimate_exchange(GRADIENT_NBYTES, hosts, gigabits))
                table.print_row(f"{gigabits:g}", str(hosts), f"{hosts * GPUS:,}", time, *figures)


if __name__ == "__main__":
    main()
