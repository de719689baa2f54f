"""Correctness and speed of the GPUs of one machine used as two hosts.

``mpirun`` starts two agents on this machine, each with its own GPUs (one, or ``--gpus 2``), and NCCL_HOSTID makes NCCL
treat them as two hosts.  There are three layouts: one host, with forked ranks; two hosts, where NCCL may not use
transports inside a host (P2P and shared memory); two hosts, where it may use P2P.  In each layout:

- a small network trained for 15 steps, and all collectives, whose digests must be equal;
- failures during collectives, and a rank that is killed during one;
- a ResNet-50: images per second, and the last loss (each run selects its convolution algorithms, so losses differ);
- ``tests/devices/test_gpu*.py``.

Needs mpi4py and MPICH.  The time of every program is limited; the output of a failed program is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import synkhronos as synk
from benchmarks import make_parser
from benchmarks._measure import SideError, Table, print_criterion, print_heading, run_command

ROOT = Path(__file__).resolve().parents[1]
GPUS = ROOT / "tests" / "support" / "gpus"
#: Layouts of the GPUs, with the environment variables for NCCL.
LAYOUTS: dict[str, dict[str, str]] = {
    "one host": {},
    "two hosts": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
    "two hosts, P2P": {},
}
#: Tests that apply to two hosts as well: those that neither count GPUs nor start programs.
TESTS = "collective or step or rows or memory or exception"


def parse_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = make_parser("gpu_hosts", __doc__)
    add = parser.add_argument
    add("--ways", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="(all)")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to run (all)")
    add("--gpus", type=int, default=1, metavar="N", help="of each of the two hosts (%(default)s)")
    add("--limit", type=float, default=240, metavar="S", help="seconds for each program (%(default)s)")
    add("--fake", action="store_true", help="fake GPUs on the CPU, and a small ResNet, to try this script itself")
    return parser.parse_args()


def make_environment(layout: str, options: argparse.Namespace) -> dict[str, str]:
    """Return the environment variables of a layout."""
    count, on_fake_gpus = options.gpus, options.fake
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(str(i) for i in range(2 * count))).split(",")
    gpus_by_host = [",".join(visible[:count]), ",".join(visible[count : 2 * count])]
    folders = [
        ROOT,
        ROOT / "tests" / "support",
        *([GPUS / "one_a_host"] if layout != "one host" else []),
        *([GPUS / "fake"] if on_fake_gpus else []),
    ]
    path = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(path), "NCCL_NVLS_ENABLE": "0", **LAYOUTS[layout]}
    if layout == "one host":
        environment |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus_by_host), "HOSTS": f"a:{2 * count}"}
    else:
        environment |= {
            "CUDA_VISIBLE_DEVICES": gpus_by_host[0],
            "HOST_GPUS": ";".join(gpus_by_host),
            "NCCL_HOSTID": "host-0",
        }
        environment |= {"HYDRA_LAUNCHER": "fork", "HOSTS": f"a:{count},b:{count}"}
    if on_fake_gpus:
        environment |= {"FAKE_GPUS": str(2 * count), "JAX_PLATFORMS": "cpu", "PYTENSOR_FLAGS": "mode=JAX"}
    return environment


def run_program(name: str, options: argparse.Namespace, environment: dict[str, str]) -> str:
    """Run a program of tests/support/gpus/programs.py, and return its output."""
    return run_command([sys.executable, str(GPUS / "programs.py"), name], options.limit, **environment)


def run_train(options: argparse.Namespace, environment: dict[str, str]) -> tuple[str, str]:
    """Train a small network; return the result to print, and the part of it that must be equal in all layouts."""
    # On more than two GPUs, NCCL adds in an order that depends on the machines' connections, unless this fixes it.
    fixed_order = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_MIN_NCHANNELS": "1", "NCCL_MAX_NCHANNELS": "1"}
    digest = run_program("train", options, environment | fixed_order).split()[-1]
    return digest, digest


def run_collectives(options: argparse.Namespace, environment: dict[str, str]) -> tuple[str, str]:
    """Run all collectives; results as for `run_train`."""
    printed = run_program("run_collectives", options, environment)
    return f"{len(printed.splitlines())} digests", printed


def run_faults(options: argparse.Namespace, environment: dict[str, str]) -> tuple[str, str]:
    """Cause failures; results as for `run_train`.  The killed rank differs between layouts."""
    # mpirun may report the killed process in lines of its own.
    lines = run_program("fail_and_reconnect", options, environment).splitlines()
    return next(line for line in lines if "was reported" in line), next(line for line in lines if line.isdecimal())


def run_resnet(options: argparse.Namespace, environment: dict[str, str]) -> tuple[str, str]:
    """Train a ResNet; return the result to print."""
    from benchmarks.gpu_resnet import BLOCKS, SETTINGS, SMALL_SETTINGS

    settings: dict[str, Any] = {**({**SMALL_SETTINGS, "rounds": 1} if options.fake else SETTINGS), "classes": 1000}
    settings |= {"n": 2 * options.gpus, "precision": "tf32", "blocks": BLOCKS[settings["depth"]], "exchange": None}
    settings |= {"compiled": False, "where": ["host"], "device": "gpu", "loaders": 0}
    if environment["HOSTS"].count(",") == 1:
        environment = {**environment, "SYNKHRONOS_HOSTS": environment["HOSTS"]}
    printed = run_command(
        [sys.executable, "-m", "benchmarks._resnet", json.dumps(settings)], options.limit, **environment
    )
    result = json.loads(printed.splitlines()[-1])["results"]["host"]
    images = 2 * options.gpus * settings["batch_size"]
    return f"{images / result['seconds']:,.0f} images/s, loss {result['loss']:.3f}", ""


def run_tests(options: argparse.Namespace, environment: dict[str, str]) -> tuple[str, str]:
    """Run tests/devices/test_gpu*.py; return the number of passed tests."""
    files = sorted((ROOT / "tests" / "devices").glob("test_gpu*.py"))
    command = [sys.executable, "-m", "pytest", "-q", *map(str, files)]
    environment = {**environment, "SYNKHRONOS_TEST_DEVICE": "gpu"}
    environment.pop("PYTENSOR_FLAGS", None)
    if "," in environment["HOSTS"]:
        environment["SYNKHRONOS_TEST_HOSTS"] = "a,b"
        command += ["-k", TESTS]
    return run_command(command, max(options.limit, 550), **environment).splitlines()[-1].strip("= "), ""


PARTS = {
    "train": run_train,
    "collectives": run_collectives,
    "faults": run_faults,
    "resnet": run_resnet,
    "tests": run_tests,
}


def main() -> None:
    """Run all parts in all layouts."""
    options = parse_options()
    if not options.fake and synk.get_n_gpu() < 2 * options.gpus:
        print(f"This benchmark needs {2 * options.gpus} GPUs: left out. --fake tries the script itself.")
        return
    print_heading(f"{2 * options.gpus} GPUs of one machine, as one host and as two")
    table = Table({"": 12, "GPUs as": 14, "seconds": 7, "as on one host": 14, "result": 40})
    failures, are_equal = [], True
    for part in options.parts:
        expected = None
        for layout in options.ways:
            start = perf_counter()
            try:
                shown, equal = PARTS[part](options, make_environment(layout, options))
            except SideError as error:
                failures.append(f"{part}, {layout}: {error}")
                table.print_row(part, layout, f"{perf_counter() - start:.0f}", "", "FAILED")
                continue
            expected = equal if expected is None else expected
            are_equal &= equal == expected
            table.print_row(part, layout, f"{perf_counter() - start:.0f}", "yes" if equal == expected else "NO", shown)
    print()
    print_criterion("programs that failed", len(failures), at_most=0)
    print_criterion("results that differ", 0 if are_equal else 1, at_most=0)
    for failure in failures:
        print(f"\n{failure}")


if __name__ == "__main__":
    main()
