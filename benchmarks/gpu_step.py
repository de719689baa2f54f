"""Time of a training step.

An MLP 784-800-800-10 with Nesterov momentum: gradient, all_reduce, update.  The rows of each batch are selected by a
shuffled list of indexes, either from Data objects on the host or from shared variables on the GPUs (`batch_s`); with
one step per launch, and with many (`TrainFunction.steps`).  Every step returns the loss, which is read after the last.
One GPU and all GPUs are measured in one run.  ``--mesh`` adds the same network in JAX, under ``jit`` on one GPU and
over a mesh of all GPUs, in separate processes.  Times are medians of five rounds, followed by the smallest and the
largest round in microseconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

import synkhronos as synk
from benchmarks import make_parser
from benchmarks._measure import (
    HostProbe,
    SideError,
    Table,
    format_duration,
    format_spread,
    import_graph_library,
    print_criterion,
    print_heading,
    require_gpus,
    run_side,
)
from synkhronos.training import make_train_function, updates

ROWS = 60_000
LAYERS = (784, 800, 800, 10)


def build_mlp(x: Any, y: Any, layers: Sequence[int] = LAYERS) -> tuple[Any, list[Any], Any]:
    """Return the loss, the parameters and the share of wrong answers."""
    library, tensor = import_graph_library()
    rng = np.random.default_rng(0)
    params, h = [], x
    for i, (n_in, n_out) in enumerate(zip(layers, layers[1:], strict=False)):
        w = library.shared((rng.standard_normal((n_in, n_out)) / np.sqrt(n_in)).astype("float32"), f"w{i}")
        b = library.shared(np.zeros(n_out, "float32"), f"b{i}")
        params += [w, b]
        h = h.dot(w) + b
        if i < len(layers) - 2:
            h = tensor.maximum(h, np.float32(0))
    scores = h - h.max(axis=1, keepdims=True)
    log_p = scores - tensor.log(tensor.exp(scores).sum(axis=1, keepdims=True))
    loss = -log_p[tensor.arange(y.shape[0]), y].mean()
    return loss, params, tensor.neq(h.argmax(axis=1), y).mean(dtype="float32")


#: Takes a step on each batch of a list, and returns the last loss.
TakeSteps = Callable[[list[np.ndarray]], Any]


def make_host_steps(rng: np.random.Generator) -> tuple[TakeSteps, int]:
    """Return a function that takes steps on rows of Data objects, and the number of their rows."""
    _, tensor = import_graph_library()
    x, y = tensor.fmatrix("x"), tensor.ivector("y")
    loss, params, _ = build_mlp(x, y)
    train = make_train_function(loss, params, x, y, updates.nesterov_momentum, learning_rate=np.float32(0.01))
    images = synk.data(rng.random((ROWS, LAYERS[0]), dtype=np.float32))
    labels = synk.data(rng.integers(0, LAYERS[-1], ROWS).astype("int32"))

    def take_steps(batches: list[np.ndarray]) -> Any:
        if len(batches) == 1:
            return train(images, labels, batch=batches[0])
        return train.steps(images, labels, batches=batches)[-1]

    return take_steps, ROWS


def make_gpu_steps(rng: np.random.Generator, n_ranks: int) -> tuple[TakeSteps, int]:
    """Return a function that takes steps on rows of variables on the GPUs, and each GPU's number of rows."""
    library, tensor = import_graph_library()
    x, y = tensor.fmatrix("x"), tensor.ivector("y")
    images, labels = library.shared(np.zeros((1, LAYERS[0]), "float32")), library.shared(np.zeros(1, "int32"))
    loss, params, _ = build_mlp(x, y)
    rule, rate = updates.nesterov_momentum, np.float32(0.01)
    train = make_train_function(loss, params, x, y, rule, sliceable_shareds=[images, labels], learning_rate=rate)
    synk.distribute()
    synk.scatter(images, rng.random((ROWS, LAYERS[0]), dtype=np.float32))
    synk.scatter(labels, rng.integers(0, LAYERS[-1], ROWS).astype("int32"))

    def take_steps(batches: list[np.ndarray]) -> Any:
        return train(batch_s=batches[0]) if len(batches) == 1 else train.steps(batches_s=batches)[-1]

    return take_steps, ROWS // n_ranks


def generate_batches(rng: np.random.Generator, rows: int, size: int) -> Iterator[np.ndarray]:
    """Yield an endless sequence of batches of row numbers, from a few epochs shuffled beforehand."""
    orders = [rng.permutation(rows) for _ in range(5)]
    while True:
        for order in orders:
            for start in range(0, rows - size + 1, size):
                yield order[start : start + size]


def time_steps(
    take_steps: TakeSteps, batches: Iterator[np.ndarray], calls: int, steps_per_launch: int, probe: HostProbe
) -> tuple[list[float], float]:
    """Return a step's seconds in each of five rounds, and the last loss."""
    times = []
    loss = 0.0
    for _ in range(5):
        probe.measure()
        for _ in range(3):
            loss = float(take_steps([next(batches) for _ in range(steps_per_launch)]))
        launches = [[next(batches) for _ in range(steps_per_launch)] for _ in range(max(1, calls // steps_per_launch))]
        start = perf_counter()
        losses = [take_steps(batch_list) for batch_list in launches]
        loss = float(losses[-1])
        times.append((perf_counter() - start) / (len(launches) * steps_per_launch))
        assert np.isfinite([float(value) for value in losses]).all()
    return times, loss


def measure_mesh(n: int, options: argparse.Namespace) -> dict[tuple[str, int], list[float]]:
    """Return JAX's seconds of a step on ``n`` GPUs in each round, by placement of the rows and batch size."""
    settings = {"n": n, "batches": options.batches, "calls": options.calls}
    report = run_side(["_mesh"], settings, options.limit)
    print(f"jit on {n} GPUs: {report['title']}", flush=True)
    return {
        (placement, int(size)): seconds
        for placement, by_size in report["results"].items()
        for size, seconds in by_size.items()
    }


def main() -> None:
    """Run the benchmark."""
    parser = make_parser("gpu_step", __doc__)
    parser.add_argument("--ranks", type=int, help="number of GPUs (default: all)")
    parser.add_argument("--batches", type=int, nargs="+", default=[500, 4000, 20000], help="rows of all ranks together")
    parser.add_argument("--calls", type=int, default=100, help="steps between two readings (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=20, help="steps in one launch (default: %(default)s)")
    parser.add_argument("--mesh", action="store_true", help="compare with JAX under jit over a mesh of all GPUs, too")
    parser.add_argument("--limit", type=float, default=240, help="seconds for JAX's process (default: %(default)s)")
    options = parser.parse_args()
    count = require_gpus(options.ranks)
    print_heading(f"a training step of the MLP {'-'.join(map(str, LAYERS))} on 1 and on {count} GPUs")
    times: dict[tuple[str, int, int, int], float] = {}
    probe = HostProbe()
    launch_sizes = dict.fromkeys((1, options.at_once))
    for n in dict.fromkeys((1, count)):
        synk.fork(n, use_gpu=True)
        rng = np.random.default_rng(1)
        for placement, (take_steps, rows) in (("host", make_host_steps(rng)), ("GPU", make_gpu_steps(rng, n))):
            for size in options.batches:
                for steps_per_launch in launch_sizes:
                    batches = generate_batches(rng, rows, size if placement == "host" else size // n)
                    rounds, loss = time_steps(take_steps, batches, options.calls, steps_per_launch, probe)
                    times[placement, n, size, steps_per_launch] = median(rounds)
                    label = f"{n} GPUs, batch {size:5d} from {placement:4s}, {steps_per_launch:2d} at once"
                    print(f"{label}: {format_spread(rounds)}, loss {loss:.3f}", flush=True)
        synk.close()
    print(f"{probe.describe()}\n")
    table = Table({"batch": 6, "data": 5, "at once": 7, "1 GPU": 9, f"{count} GPUs": 9, "speed-up": 8})
    for size in options.batches:
        for placement in ("host", "GPU"):
            for steps_per_launch in launch_sizes:
                single, parallel = (times[placement, n, size, steps_per_launch] for n in (1, count))
                table.print_row(
                    str(size),
                    placement,
                    str(steps_per_launch),
                    format_duration(single),
                    format_duration(parallel),
                    f"{single / parallel:.2f}",
                )
    print()
    for n in dict.fromkeys((1, count)) if options.mesh else ():
        try:
            for (placement, size), rounds in measure_mesh(n, options).items():
                ratio = median(rounds) / times[placement, n, size, 1]
                print(
                    f"{n} GPUs, batch {size:5d} from {placement:4s}: {format_duration(times[placement, n, size, 1])}, "
                    f"jit {format_spread(rounds)}: {ratio:.2f} times as fast",
                    flush=True,
                )
        except SideError as failure:
            print(f"jit on {n} GPUs: {failure}", flush=True)
    if count == 2 and 500 in options.batches:
        for placement in ("host", "GPU"):
            ratio = times[placement, 2, 500, 1] / times[placement, 1, 500, 1]
            print_criterion(f"batch 500 from {placement}, 2 GPUs relative to one", ratio, " times", at_most=1.3)


if __name__ == "__main__":
    main()
