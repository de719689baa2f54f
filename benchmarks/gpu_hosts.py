"""Correctness and speed of the GPUs of one machine used as two hosts.

``mpirun`` starts two agents on this machine, each with GPUs of its own (one, or ``--gpus 2``), and NCCL is told that
they are on two hosts (NCCL_HOSTID): once it may not use what only one host has (P2P and shared memory off), once it
may.  Beside them the same GPUs as one host, with ranks that are forked.  On each of the three:

- a small network trained for 15 steps, and all collectives, whose digests have to be equal;
- failures in the middle of collectives, and a rank that is killed there;
- a ResNet-50, images a second and the loss at the end (each run chooses its convolutions anew, so losses differ);
- ``tests/devices/test_gpu*.py``.

Needs mpi4py and MPICH.  Every program runs for a limited time; what it said is printed if it failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from time import perf_counter

import synkhronos as synk
from benchmarks._measure import Failed, Table, bar, heading, run_alone

ROOT = Path(__file__).resolve().parents[1]
GPUS = ROOT / "tests" / "support" / "gpus"
#: The three ways to have GPUs, with the variables that NCCL reads.
WAYS: dict[str, dict[str, str]] = {
    "one host": {},
    "two hosts": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
    "two hosts, P2P": {},
}
#: Tests of one host that say something about two: where GPUs, or programs of their own, are not counted.
TESTS = "collective or step or rows or memory or exception"


def parse() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_hosts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="(all)")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to run (all)")
    add("--gpus", type=int, default=1, metavar="N", help="of each of the two hosts (%(default)s)")
    add("--limit", type=float, default=240, metavar="S", help="seconds for each program (%(default)s)")
    add("--depth", type=int, choices=(14, 26, 50), default=50, help="of the ResNet (%(default)s)")
    add("--width", type=int, default=64, metavar="N", help="filters of its first layer (%(default)s)")
    add("--size", type=int, default=224, metavar="N", help="height and width of the images (%(default)s)")
    add("--batch-size", type=int, default=64, metavar="N", help="images a step for each GPU (%(default)s)")
    add("--steps", type=int, default=60, help="timed steps in each of three rounds (%(default)s)")
    add("--pretended", action="store_true", help="pretend that there are GPUs: tries this script itself")
    return parser.parse_args()


def variables(way: str, options: argparse.Namespace) -> dict[str, str]:
    """Return the variables for a program on one host or on two."""
    count, pretended = options.gpus, options.pretended
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(str(i) for i in range(2 * count))).split(",")
    by_host = [",".join(visible[:count]), ",".join(visible[count : 2 * count])]
    folders = [
        ROOT,
        ROOT / "tests" / "support",
        *([GPUS / "one_a_host"] if way != "one host" else []),
        *([GPUS / "pretended"] if pretended else []),
    ]
    path = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = {"PYTHONPATH": os.pathsep.join(path), "NCCL_NVLS_ENABLE": "0", **WAYS[way]}
    if way == "one host":
        found |= {"CUDA_VISIBLE_DEVICES": ",".join(by_host), "HOSTS": f"a:{2 * count}"}
    else:
        found |= {"CUDA_VISIBLE_DEVICES": by_host[0], "HOST_GPUS": ";".join(by_host), "NCCL_HOSTID": "host-0"}
        found |= {"HYDRA_LAUNCHER": "fork", "HOSTS": f"a:{count},b:{count}"}
    if pretended:
        found |= {"PRETENDED_GPUS": str(2 * count), "JAX_PLATFORMS": "cpu", "PYTENSOR_FLAGS": "mode=JAX"}
    return found


def program(name: str, options: argparse.Namespace, environment: dict[str, str]) -> str:
    """Run a program of tests/support/gpus/programs.py, and return its output."""
    return run_alone([sys.executable, str(GPUS / "programs.py"), name], options.limit, **environment)


def train(options: argparse.Namespace, environment: dict[str, str]) -> tuple[str, str]:
    """Train a small network; return the printed result, and the part that must be equal on all sides."""
    digest = program("train", options, environment).split()[-1]
    return digest, digest


def collectives(options: argparse.Namespace, environment: dict[str, str]) -> tuple[str, str]:
    """Run all collectives; results as for `train`."""
    printed = program("collectives", options, environment)
    return f"{len(printed.splitlines())} digests", printed


def faults(options: argparse.Namespace, environment: dict[str, str]) -> tuple[str, str]:
    """Cause failures; results as for `train`, but the killed rank differs between sides."""
    heard, size = program("faults", options, environment).splitlines()
    return heard, size


def resnet(options: argparse.Namespace, environment: dict[str, str]) -> tuple[str, str]:
    """Train a ResNet; return the printed result."""
    from benchmarks.gpu_resnet import BLOCKS

    settings = {
        **{name: getattr(options, name) for name in ("steps", "batch_size", "width", "size")},
        **{
            "n": 2 * options.gpus,
            "precision": "tf32",
            "blocks": BLOCKS[options.depth],
            "classes": 1000,
            "rounds": 3,
            "warm": 20,
        },
        **{"exchange": None, "compiled": False, "images": 1024, "where": ["host"], "device": "gpu", "loaders": 0},
    }
    if options.pretended:
        settings |= {"warm": 1, "rounds": 1, "images": 4 * options.batch_size, "classes": 10}
    if environment["HOSTS"].count(",") == 1:
        environment = {**environment, "SYNKHRONOS_HOSTS": environment["HOSTS"]}
    printed = run_alone(
        [sys.executable, "-m", "benchmarks._resnet", json.dumps(settings)], options.limit, **environment
    )
    _, step, loss = json.loads(printed.splitlines()[-1])["results"]["host"]
    return f"{2 * options.gpus * options.batch_size / step:,.0f} images/s, loss {loss:.3f}", ""


def tests(options: argparse.Namespace, environment: dict[str, str]) -> tuple[str, str]:
    """Run tests/devices/test_gpu*.py; return the number of passed tests."""
    files = sorted((ROOT / "tests" / "devices").glob("test_gpu*.py"))
    command = [sys.executable, "-m", "pytest", "-q", *map(str, files)]
    environment = {**environment, "SYNKHRONOS_TEST_DEVICE": "gpu"}
    environment.pop("PYTENSOR_FLAGS", None)
    if "," in environment["HOSTS"]:
        environment["SYNKHRONOS_TEST_HOSTS"] = "a,b"
        command += ["-k", TESTS]
    return run_alone(command, max(options.limit, 550), **environment).splitlines()[-1].strip("= "), ""


PARTS = {"train": train, "collectives": collectives, "faults": faults, "resnet": resnet, "tests": tests}


def main() -> None:
    """Run all parts in all ways."""
    options = parse()
    if not options.pretended and synk.get_n_gpu() < 2 * options.gpus:
        print(f"This benchmark needs {2 * options.gpus} GPUs: left out. --pretended tries the script itself.")
        return
    heading(f"{2 * options.gpus} GPUs of one machine, as one host and as two")
    table = Table({"": 12, "GPUs as": 14, "seconds": 7, "as on one host": 14, "result": 40})
    failures, is_alike = [], True
    for part in options.parts:
        expected = None
        for way in options.ways:
            start = perf_counter()
            try:
                shown, equal = PARTS[part](options, variables(way, options))
            except Failed as error:
                failures.append(f"{part}, {way}: {error}")
                table.row(part, way, f"{perf_counter() - start:.0f}", "", "FAILED")
                continue
            expected = equal if expected is None else expected
            is_alike &= equal == expected
            table.row(part, way, f"{perf_counter() - start:.0f}", "yes" if equal == expected else "NO", shown)
    print()
    bar("programs that failed", len(failures), most=0)
    bar("results that differ", 0 if is_alike else 1, most=0)
    for failure in failures:
        print(f"\n{failure}")


if __name__ == "__main__":
    main()
