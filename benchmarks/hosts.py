"""Overhead of ranks on two machines.

Two hosts are simulated on this one machine, by ``tests/support/hosts/simulated.py``: each has a network, memory and
process ids of its own.  They share the cores, so that the ratios say more than the times.

- An empty function, called on two hosts with one rank each, compared with two ranks on one host.
- `synkhronos.all_reduce` of a float32 shared variable, compared with MPI's Allreduce in the same number of processes on
  the same hosts, with the same MPI; and with PyTorch's gloo, if PyTorch is installed.
- EASGD's exchange of 102 MB with the centre, by a rank on the centre's host and by a rank on the other, compared with
  MPI's send and receive of the same number of bytes to the other host and back.
- Bytes sent to the other host in a training step on rows of a shuffled list of indexes, for each epoch.
- A function of a large Data object that was sent before: the time to find that it has not changed.
- The processor time of an agent while nothing is called.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import sleep
from typing import Any

import numpy as np

import synkhronos as synk
from benchmarks import exchange, make_parser
from benchmarks._measure import (
    ReferenceProcesses,
    Table,
    format_bytes,
    format_duration,
    format_quartiles,
    import_graph_library,
    print_criterion,
    print_heading,
    read_cpu_seconds,
    time_call,
)
from benchmarks.all_reduce import SynkhronosReduction, time_reductions
from synkhronos import exchange_rules
from synkhronos.hosts.mpirun import find_mpirun

HERE = Path(__file__).parent
#: Bytes of the arrays that are reduced: the bar is for the last.
SIZES = (4_000, 4_000_000, 100_000_000)
#: Rows of a training set, numbers in each, rows of a minibatch.
ROWS, WIDTH, BATCH = 20_000, 64, 2_000


@contextlib.contextmanager
def fork_ranks_on(hosts: list[str]) -> Iterator[int]:
    """Fork ranks on hosts, or on this machine if there is one host, and close them on exit."""
    try:
        if len(hosts) == 1:
            yield synk.fork(int(hosts[0].partition(":")[2]), use_gpu=False)
        else:
            yield synk.fork(hosts=hosts, use_gpu=False)
    finally:
        synk.close()


def measure_empty_function(hosts: list[str], turns: int, calls: int) -> None:
    """Time an empty function on hosts, and on one host with the same number of ranks."""
    sides = {"one host": [f"here:{count_ranks(hosts)}"], f"{len(hosts)} hosts": hosts}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(turns):
        for name, side_hosts in sides.items():
            with fork_ranks_on(side_hosts):
                call = synk.function([], [])
                for _ in range(calls // 10):
                    call()
                times[name] += [time_call(call) for _ in range(calls)]
    table = Table({"empty function": 16, "median": 9, "quartiles": 19})
    for name, values in times.items():
        table.print_row(name, *format_quartiles(values))
    one_host, several_hosts = (median(values) for values in times.values())
    print_criterion("an empty function, more than on one host", 1e3 * (several_hosts - one_host), " ms more", at_most=1)


def make_mpirun_argv(hosts: list[str], python: str, script: str, *arguments: str) -> list[str]:
    """Return the command line that starts one process for each rank, on the rank's host."""
    launcher = find_mpirun()
    version = subprocess.run([launcher, "--version"], capture_output=True, text=True, check=False).stdout
    host_options = ["-hosts", ",".join(hosts)] if "HYDRA" in version else ["-H", ",".join(hosts), "--bind-to", "none"]
    return [launcher, *host_options, "-n", str(count_ranks(hosts)), python, str(HERE / script), *arguments]


def count_ranks(hosts: list[str]) -> int:
    """Return the number of ranks on all hosts."""
    return sum(int(host.partition(":")[2]) for host in hosts)


def measure_reduction(hosts: list[str], sizes: list[int], rounds: int, torch_python: str) -> None:
    """Time all_reduce of Synkhronos and of other libraries."""
    libraries = {"MPI": ReferenceProcesses(make_mpirun_argv(hosts, sys.executable, "_mpi.py"))}
    has_torch = not subprocess.run([torch_python, "-c", "import torch"], capture_output=True, check=False).returncode
    if has_torch:
        # Each host has a TMPDIR of its own, but all have this folder.
        rendezvous = str(Path(tempfile.mkdtemp(dir=HERE)) / "rendezvous")
        libraries["gloo"] = ReferenceProcesses(
            make_mpirun_argv(hosts, torch_python, "_gloo.py", str(count_ranks(hosts)), rendezvous)
        )
    for name in ("MPI", "gloo"):
        print(f"{name}: {libraries[name].version if name in libraries else 'left out'}")
    table = Table({"all_reduce": 10, "ours": 9, **dict.fromkeys(libraries, 9), **{f"{n}/ours": 9 for n in libraries}})
    ratios: dict[str, float] = {}
    with fork_ranks_on(hosts) as count:
        reduction = SynkhronosReduction(count)
        for nbytes in sizes:
            times = time_reductions(reduction, libraries, nbytes, rounds)
            for label, statistic in ((format_bytes(nbytes), median), ("  best", min)):
                summary = {name: statistic(values) for name, values in times.items()}
                current_ratios = {name: summary[name] / summary["ours"] for name in libraries}
                ratios = current_ratios if statistic is median else ratios
                table.print_row(
                    label,
                    *(format_duration(t) for t in summary.values()),
                    *(f"{ratio:.2f}" for ratio in current_ratios.values()),
                )
    for library in libraries.values():
        library.close()
    if has_torch:
        shutil.rmtree(Path(rendezvous).parent)
    print_criterion(f"speed, relative to MPI, {format_bytes(sizes[-1])}", ratios["MPI"], " times", at_least=0.8)


def measure_exchanges(hosts: list[str], rounds: int) -> None:
    """Time an elastic exchange of a rank on the centre's host and of one on another, and MPI's messages."""
    library, _ = import_graph_library()
    mpi = ReferenceProcesses(make_mpirun_argv(hosts, sys.executable, "_mpi.py"))
    print(f"MPI: {mpi.version}")
    with fork_ranks_on(hosts) as count:
        rule, params = exchange_rules.EASGD(), [library.shared(np.ones(exchange.SIZE, np.float32), "w")]
        memory = exchange_rules.allocate_shared_arrays(rule, count, exchange.SIZE, np.dtype("float32"))

        def exchange_on(rank: int) -> float:
            seconds: float = synk.run(exchange.time_one_exchange, rule, params, memory, rank)[rank]
            return seconds

        sides: dict[str, Callable[[], float]] = {
            "here": lambda: exchange_on(0),
            "from there": lambda: exchange_on(count - 1),
            "MPI": lambda: mpi.measure(-exchange.SIZE)[0],  # a round trip,
        }
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, side in sides.items():
                times[name].append(side())
    mpi.close()
    table = Table({"exchange of 102 MB": 18, "median": 9, "best": 9})
    for name, values in times.items():
        table.print_row(name, format_duration(median(values)), format_duration(min(values)))
    medians = {name: median(values) for name, values in times.items()}
    print_criterion("exchange from there, relative to MPI", medians["from there"] / medians["MPI"], " times", at_most=2)


def measure_sent_bytes(hosts: list[str]) -> None:
    """Print the bytes sent to the other hosts in the steps of three epochs."""
    library, tensor = import_graph_library()
    updates = importlib.import_module("synkhronos.training.updates")
    train = importlib.import_module("synkhronos.training")
    with fork_ranks_on(hosts):
        x, y, w = tensor.fmatrix("x"), tensor.fvector("y"), library.shared(np.zeros(WIDTH, np.float32), "w")
        loss = ((tensor.dot(x, w) - y) ** 2).mean()
        step = train.make_train_function(loss, [w], x, y, updates.sgd, learning_rate=np.float32(0.01))
        rng = np.random.default_rng(0)
        points = rng.normal(size=(ROWS, WIDTH)).astype("float32")
        data, labels = synk.data(points), synk.data(points[:, 0].copy())
        table = Table({"training": 22, "bytes a step": 12, "in all": 9, "time a step": 11})
        for epoch in range(3):
            order = rng.permutation(ROWS)
            before, times = synk.bytes_sent(), []
            for start in range(0, ROWS, BATCH):
                batch = order[start : start + BATCH]
                times.append(time_call(lambda batch=batch: step(data, labels, batch=batch)))  # type: ignore[misc]
            sent = synk.bytes_sent() - before
            table.print_row(
                f"epoch {epoch}", format_bytes(sent / len(times)), format_bytes(sent), format_duration(median(times))
            )
        print(f"({ROWS:,} rows of {4 * WIDTH} bytes, {format_bytes(ROWS * 4 * WIDTH)}; {BATCH:,} of them in a step)")


def measure_page_comparison(hosts: list[str]) -> None:
    """Time a function that uses one item of a Data object of 200 MB."""
    _, tensor = import_graph_library()
    with fork_ranks_on(hosts):
        x = tensor.fmatrix("x")
        f = synk.function([x], (x[0, 0], "sum"))
        data = synk.data(np.ones((48_828, 1024), np.float32))
        first, before = time_call(lambda: f(data)), synk.bytes_sent()
        again = median([time_call(lambda: f(data)) for _ in range(9)])
        assert synk.bytes_sent() == before
    print(
        f"{format_bytes(before)} for the other hosts: {format_duration(first)} with the sending of them, "
        f"{format_duration(again)} again"
    )
    print(f"comparing: {before / 1e9 / again:.1f} GB/s")


def find_agents() -> set[int]:
    """Return the process ids of this host's agents."""
    pids = set()
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdecimal() and b"synkhronos.hosts.agent" in Path(f"/proc/{name}/cmdline").read_bytes():
                command = Path(f"/proc/{name}/comm").read_text()
                pids |= {int(name)} if command.startswith("python") else set()
    return pids


def measure_idle_agent(hosts: list[str], time: float) -> None:
    """Print the processor use of an agent while nothing is called."""
    with fork_ranks_on(hosts):
        synk.function([], [])()
        sleep(1)
        (agent,) = find_agents()
        before = read_cpu_seconds({agent})
        sleep(time)
        used = 100 * (read_cpu_seconds({agent}) - before) / time
    print_criterion("processor use of an idle agent", used, " % of a core", at_most=5)


def measure(options: argparse.Namespace) -> None:
    """Run all parts; called on the first host."""
    hosts = options.on.split(",")
    print_heading(f"Several hosts, simulated: {', '.join(hosts)}")
    parts: dict[str, Callable[[], Any]] = {
        "empty": lambda: measure_empty_function(hosts, options.turns, options.calls),
        "reduce": lambda: measure_reduction(hosts, options.sizes, options.rounds, options.torch_python),
        "exchanges": lambda: measure_exchanges(hosts, options.rounds),
        "sending": lambda: measure_sent_bytes(hosts),
        "comparing": lambda: measure_page_comparison(hosts),
        "idle": lambda: measure_idle_agent(hosts, options.idle),
    }
    for name in options.parts or parts:
        parts[name]()
        print(flush=True)


def main() -> None:
    """Run the benchmark."""
    parser = make_parser("hosts", __doc__)
    parser.add_argument("--hosts", type=int, default=2, help="how many (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=1, help="of each host (default: %(default)s)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="in bytes (default: 4 KB, 4 MB, 100 MB)")
    parser.add_argument("--rounds", type=int, default=15, help="turns in all_reduce (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="turns of the empty function (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=500, help="of it in a turn (default: %(default)s)")
    parser.add_argument("--idle", type=float, default=5.0, help="seconds to do nothing (default: %(default)s)")
    names = ("empty", "reduce", "exchanges", "sending", "comparing", "idle")
    parser.add_argument("--parts", nargs="+", choices=names, help="what to measure (default: all)")
    parser.add_argument(
        "--torch-python", default=sys.executable, metavar="PATH", help="a Python that has PyTorch (default: this one)"
    )
    parser.add_argument("--on", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.on:
        measure(options)
        return
    sys.path.append(str(HERE.parent / "tests" / "support"))
    simulated = importlib.import_module("hosts")
    if not simulated.has_mpi():
        print("This benchmark needs mpi4py and an mpirun (pip install synkhronos[hosts]): left out.")
        return
    hosts = [f"{chr(ord('a') + i)}:{options.ranks}" for i in range(options.hosts)]
    command, environment = simulated.make_command(
        hosts, "-m", "benchmarks.hosts", "--on", ",".join(hosts), *sys.argv[1:]
    )
    raise SystemExit(subprocess.run(command, env=environment, cwd=HERE.parent, check=False).returncode)


if __name__ == "__main__":
    main()
