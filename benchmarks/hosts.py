"""Overhead of ranks on two machines.

Two hosts are simulated on this one machine, by ``tests/support/hosts/simulated.py``: a network, memory and process ids
each. They share the cores, so that ratios of what was measured beside it say more than times.

- An empty function, called on two hosts with a rank each, beside two ranks on one host.
- `synkhronos.all_reduce` of a float32 shared variable, beside MPI's Allreduce in as many processes on the same hosts,
  with the same MPI, and beside PyTorch's gloo if PyTorch is installed.
- EASGD's exchange of 102 MB with the centre, by a rank of its host and by one of the other, beside MPI's send and
  receive: as many bytes to the other host and back.
- Bytes that go to the other host in a training step, on rows by a shuffled list of indexes: epoch by epoch.
- A function of a large Data object that was sent before: what it costs to see that nothing has changed.
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
from benchmarks import exchange
from benchmarks._measure import Table, bar, duration, graph_library, heading, quartiles, seconds, size
from benchmarks.all_reduce import Others, Ours, rounds_for
from benchmarks.latency import cpu_seconds
from synkhronos import rules

HERE = Path(__file__).parent
#: Bytes of the arrays that are reduced: the bar is for the last.
SIZES = (4_000, 4_000_000, 100_000_000)
#: Rows of a training set, numbers in each, rows of a minibatch.
ROWS, WIDTH, BATCH = 20_000, 64, 2_000


@contextlib.contextmanager
def ranks_on(hosts: list[str]) -> Iterator[int]:
    """Fork ranks on hosts, or, where one is named, on this machine alone; and close them at the end."""
    try:
        if len(hosts) == 1:
            yield synk.fork(int(hosts[0].partition(":")[2]), use_gpu=False)
        else:
            yield synk.fork(hosts=hosts, use_gpu=False)
    finally:
        synk.close()


def empty(hosts: list[str], turns: int, calls: int) -> None:
    """Time an empty function on hosts, and on one with as many ranks."""
    sides = {"one host": [f"here:{count_ranks(hosts)}"], f"{len(hosts)} hosts": hosts}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(turns):
        for name, named in sides.items():
            with ranks_on(named):
                call = synk.function([], [])
                for _ in range(calls // 10):
                    call()
                times[name] += [seconds(call) for _ in range(calls)]
    table = Table({"empty function": 16, "median": 9, "quartiles": 19})
    for name, values in times.items():
        low, middle, high = quartiles(values)
        table.row(name, duration(middle), f"{duration(low)} - {duration(high)}")
    one, several = (median(values) for values in times.values())
    bar("an empty function, more than on one host", 1e3 * (several - one), " ms more", most=1)


def mpirun(hosts: list[str], python: str, script: str, *arguments: str) -> list[str]:
    """Return the command line that starts as many processes on each host as it has ranks."""
    beside = Path(sys.executable).with_name("mpirun")
    launcher = str(beside) if beside.exists() else "mpirun"
    said = subprocess.run([launcher, "--version"], capture_output=True, text=True, check=False).stdout
    how = ["-hosts", ",".join(hosts)] if "HYDRA" in said else ["-H", ",".join(hosts), "--bind-to", "none"]
    return [launcher, *how, "-n", str(count_ranks(hosts)), python, str(HERE / script), *arguments]


def count_ranks(hosts: list[str]) -> int:
    """Return the number of ranks on all hosts."""
    return sum(int(host.partition(":")[2]) for host in hosts)


def reduce(hosts: list[str], sizes: list[int], rounds: int, torch_python: str) -> None:
    """Time all_reduce beside other libraries'."""
    beside = {"MPI": Others(mpirun(hosts, sys.executable, "_mpi.py"))}
    has_torch = not subprocess.run([torch_python, "-c", "import torch"], capture_output=True, check=False).returncode
    if has_torch:
        meeting = str(Path(tempfile.mkdtemp(dir=HERE)) / "meeting")  # hosts have a TMPDIR each, and share this folder
        beside["gloo"] = Others(mpirun(hosts, torch_python, "_gloo.py", str(count_ranks(hosts)), meeting))
    for name in ("MPI", "gloo"):
        print(f"{name}: {beside[name].version if name in beside else 'left out'}")
    table = Table({"all_reduce": 10, "ours": 9, **dict.fromkeys(beside, 9), **{f"{n}/ours": 9 for n in beside}})
    ratios: dict[str, float] = {}
    with ranks_on(hosts) as count:
        ours = Ours(count)
        for nbytes in sizes:
            items = nbytes // 4
            ours.prepare(items)
            sides: dict[str, Callable[[], float]] = {"ours": ours.all_reduce}
            for name, other in beside.items():
                sides[name] = lambda items=items, other=other: other.all_reduce(items)  # type: ignore[misc]
            times: dict[str, list[float]] = {name: [] for name in sides}
            for turn in range(rounds_for(nbytes, rounds)):
                if turn % 8 == 0:
                    ours.prepare(items)
                for name, side in sides.items():
                    side()  # after another's turn processes sleep
                    times[name].append(side())
            for label, of in ((size(nbytes), median), ("  best", min)):
                each = {name: of(values) for name, values in times.items()}
                now = {name: each[name] / each["ours"] for name in beside}
                ratios = now if of is median else ratios
                table.row(label, *(duration(t) for t in each.values()), *(f"{ratio:.2f}" for ratio in now.values()))
    for other in beside.values():
        other.close()
    if has_torch:
        shutil.rmtree(Path(meeting).parent)
    bar(f"speed, relative to MPI, {size(sizes[-1])}", ratios["MPI"], " times", least=0.8)


def exchanges(hosts: list[str], rounds: int) -> None:
    """Time an elastic exchange of a rank on the centre's host, and of one on another, beside MPI's messages."""
    library, _ = graph_library()
    other = Others(mpirun(hosts, sys.executable, "_mpi.py"))
    print(f"MPI: {other.version}")
    with ranks_on(hosts) as count:
        rule, params = rules.EASGD(), [library.shared(np.ones(exchange.SIZE, np.float32), "w")]
        memory = rules.shared_memory(rule, count, exchange.SIZE, np.dtype("float32"))

        def exchange_on(who: int) -> float:
            seconds: float = synk.run(exchange.one_exchange, rule, params, memory, who)[who]
            return seconds

        sides: dict[str, Callable[[], float]] = {
            "here": lambda: exchange_on(0),
            "from there": lambda: exchange_on(count - 1),
            "MPI": lambda: other.there_and_back(exchange.SIZE),
        }
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, side in sides.items():
                times[name].append(side())
    other.close()
    table = Table({"exchange of 102 MB": 18, "median": 9, "best": 9})
    for name, values in times.items():
        table.row(name, duration(median(values)), duration(min(values)))
    middle = {name: median(values) for name, values in times.items()}
    bar("exchange from there, relative to MPI", middle["from there"] / middle["MPI"], " times", most=2)


def sending(hosts: list[str]) -> None:
    """Count what goes to the other hosts in the steps of three epochs."""
    library, tensor = graph_library()
    updates = importlib.import_module("synkhronos.training.updates")
    train = importlib.import_module("synkhronos.training")
    with ranks_on(hosts):
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
            for at in range(0, ROWS, BATCH):
                batch = order[at : at + BATCH]
                times.append(seconds(lambda batch=batch: step(data, labels, batch=batch)))  # type: ignore[misc]
            sent = synk.bytes_sent() - before
            table.row(f"epoch {epoch}", size(sent / len(times)), size(sent), duration(median(times)))
        print(f"({ROWS:,} rows of {4 * WIDTH} bytes, {size(ROWS * 4 * WIDTH)}; {BATCH:,} of them in a step)")


def comparing(hosts: list[str], nbytes: int) -> None:
    """Time a function of a large Data object that does nothing with it."""
    _, tensor = graph_library()
    with ranks_on(hosts):
        x = tensor.fmatrix("x")
        f = synk.function([x], (x[0, 0], "sum"))
        data = synk.data(np.ones((nbytes // 4096, 1024), np.float32))
        first, before = seconds(lambda: f(data)), synk.bytes_sent()
        again = median([seconds(lambda: f(data)) for _ in range(9)])
        assert synk.bytes_sent() == before
    print(f"{size(before)} for the other hosts: {duration(first)} with the sending of them, {duration(again)} again")
    print(f"comparing: {before / 1e9 / again:.1f} GB/s")


def agents() -> set[int]:
    """Return the process ids of this host's agents."""
    found = set()
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdecimal() and b"synkhronos.hosts.agent" in Path(f"/proc/{name}/cmdline").read_bytes():
                command = Path(f"/proc/{name}/comm").read_text()
                found |= {int(name)} if command.startswith("python") else set()
    return found


def idle(hosts: list[str], time: float) -> None:
    """See what an agent uses while nothing is called."""
    with ranks_on(hosts):
        synk.function([], [])()
        sleep(1)
        (agent,) = agents()
        before = cpu_seconds({agent})
        sleep(time)
        used = 100 * (cpu_seconds({agent}) - before) / time
    bar("processor use of an idle agent", used, " % of a core", most=5)


def measure(options: argparse.Namespace) -> None:
    """Measure all of it: on the first host."""
    hosts = options.on.split(",")
    heading(f"Several hosts, simulated: {', '.join(hosts)}")
    parts: dict[str, Callable[[], Any]] = {
        "empty": lambda: empty(hosts, options.turns, options.calls),
        "reduce": lambda: reduce(hosts, options.sizes, options.rounds, options.torch_python),
        "exchanges": lambda: exchanges(hosts, options.rounds),
        "sending": lambda: sending(hosts),
        "comparing": lambda: comparing(hosts, 200_000_000),
        "idle": lambda: idle(hosts, options.idle),
    }
    for name in options.parts or parts:
        parts[name]()
        print(flush=True)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hosts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
