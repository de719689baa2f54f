"""Time of a training step.

An MLP 784-800-800-10 with Nesterov momentum: gradient, all_reduce, update.  The rows of each batch are picked by a
shuffled list of indexes, once from Data objects on the host, once from shared variables on the GPUs (`batch_s`); step
by step, and many steps in one launch (`TrainFunction.steps`).  The loss is returned by every step and read after the
last.  On one GPU and on all, in one run.  ``--mesh`` adds the same network in JAX, under ``jit`` over a mesh of the
GPUs, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

import synkhronos as synk
from benchmarks._measure import Failed, Table, bar, duration, gpus, graph_library, heading, run_alone
from synkhronos.training import make_train_function, updates

ROWS = 60_000
LAYERS = (784, 800, 800, 10)


def model(x: Any, y: Any) -> tuple[Any, list[Any]]:
    """Return the loss and the parameters."""
    library, tensor = graph_library()
    rng = np.random.default_rng(0)
    params, h = [], x
    for i, (n_in, n_out) in enumerate(zip(LAYERS, LAYERS[1:], strict=False)):
        w = library.shared((rng.standard_normal((n_in, n_out)) / np.sqrt(n_in)).astype("float32"), f"w{i}")
        b = library.shared(np.zeros(n_out, "float32"), f"b{i}")
        params += [w, b]
        h = h.dot(w) + b
        if i < len(LAYERS) - 2:
            h = tensor.maximum(h, np.float32(0))
    scores = h - h.max(axis=1, keepdims=True)
    log_p = scores - tensor.log(tensor.exp(scores).sum(axis=1, keepdims=True))
    return -log_p[tensor.arange(y.shape[0]), y].mean(), params


#: Takes a step on each batch of a list, and returns the last loss.
Take = Callable[[list[np.ndarray]], Any]


def host_steps(rng: np.random.Generator) -> tuple[Take, int]:
    """Return a function that takes steps on rows of Data objects, and the number of their rows."""
    _, tensor = graph_library()
    x, y = tensor.fmatrix("x"), tensor.ivector("y")
    loss, params = model(x, y)
    train = make_train_function(loss, params, x, y, updates.nesterov_momentum, learning_rate=np.float32(0.01))
    images = synk.data(rng.random((ROWS, LAYERS[0]), dtype=np.float32))
    labels = synk.data(rng.integers(0, LAYERS[-1], ROWS).astype("int32"))

    def take(batches: list[np.ndarray]) -> Any:
        if len(batches) == 1:
            return train(images, labels, batch=batches[0])
        return train.steps(images, labels, batches=batches)[-1]

    return take, ROWS


def gpu_steps(rng: np.random.Generator, count: int) -> tuple[Take, int]:
    """Return a function that takes steps on rows of variables on the GPUs, and each GPU's number of rows."""
    library, tensor = graph_library()
    x, y = tensor.fmatrix("x"), tensor.ivector("y")
    images, labels = library.shared(np.zeros((1, LAYERS[0]), "float32")), library.shared(np.zeros(1, "int32"))
    loss, params = model(x, y)
    rule, rate = updates.nesterov_momentum, np.float32(0.01)
    train = make_train_function(loss, params, x, y, rule, sliceable_shareds=[images, labels], learning_rate=rate)
    synk.distribute()
    synk.scatter(images, rng.random((ROWS, LAYERS[0]), dtype=np.float32))
    synk.scatter(labels, rng.integers(0, LAYERS[-1], ROWS).astype("int32"))

    def take(batches: list[np.ndarray]) -> Any:
        return train(batch_s=batches[0]) if len(batches) == 1 else train.steps(batches_s=batches)[-1]

    return take, ROWS // count


def batches_of(rng: np.random.Generator, rows: int, size: int) -> Iterator[np.ndarray]:
    """Yield batches of rows without end, from a few epochs shuffled beforehand."""
    orders = [rng.permutation(rows) for _ in range(5)]
    while True:
        for order in orders:
            for start in range(0, rows - size + 1, size):
                yield order[start : start + size]


def measure(take: Take, batches: Iterator[np.ndarray], calls: int, at_once: int) -> tuple[float, float]:
    """Return a step's median time in five runs, all work waited for, and the last loss."""
    times = []
    loss = 0.0
    for _ in range(5):
        for _ in range(3):
            loss = float(take([next(batches) for _ in range(at_once)]))
        picked = [[next(batches) for _ in range(at_once)] for _ in range(max(1, calls // at_once))]
        start = perf_counter()
        losses = [take(some) for some in picked]
        loss = float(losses[-1])
        times.append((perf_counter() - start) / (len(picked) * at_once))
        assert np.isfinite([float(value) for value in losses]).all()
    return median(times), loss


def measure_mesh(n: int, options: argparse.Namespace) -> dict[tuple[str, int], float]:
    """Return JAX's seconds of a step on a mesh of ``n`` GPUs, by place of the rows and batch size."""
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    settings = {"n": n, "batches": options.batches, "calls": options.calls}
    command = [sys.executable, "-m", "benchmarks._mesh", json.dumps(settings)]
    found = json.loads(run_alone(command, options.limit, PYTHONPATH=path).splitlines()[-1])
    print(f"jit on a mesh of {n} GPUs: {found['title']}", flush=True)
    return {(where, int(size)): time for where, by_size in found["results"].items() for size, time in by_size.items()}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, help="number of GPUs (default: all)")
    parser.add_argument("--batches", type=int, nargs="+", default=[500, 4000, 20000], help="rows of all ranks together")
    parser.add_argument("--calls", type=int, default=100, help="steps between two readings (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=20, help="steps in one launch (default: %(default)s)")
    parser.add_argument("--mesh", action="store_true", help="compare with JAX under jit over a mesh of all GPUs, too")
    parser.add_argument("--limit", type=float, default=240, help="seconds for JAX's process (default: %(default)s)")
    options = parser.parse_args()
    count = gpus(options.ranks)
    heading(f"a training step of the MLP {'-'.join(map(str, LAYERS))} on 1 and on {count} GPUs")
    times: dict[tuple[str, int, int, int], float] = {}
    at_onces = dict.fromkeys((1, options.at_once))
    for n in dict.fromkeys((1, count)):
        synk.fork(n, use_gpu=True)
        rng = np.random.default_rng(1)
        for where, (take, rows) in (("host", host_steps(rng)), ("GPU", gpu_steps(rng, n))):
            for size in options.batches:
                for at_once in at_onces:
                    batches = batches_of(rng, rows, size if where == "host" else size // n)
                    time, loss = measure(take, batches, options.calls, at_once)
                    times[where, n, size, at_once] = time
                    what = f"{n} GPUs, batch {size:5d} from {where:4s}, {at_once:2d} at once"
                    print(f"{what}: {duration(time)}, loss {loss:.3f}", flush=True)
        synk.close()
    print()
    table = Table({"batch": 6, "data": 5, "at once": 7, "1 GPU": 9, f"{count} GPUs": 9, "speed-up": 8})
    for size in options.batches:
        for where in ("host", "GPU"):
            for at_once in at_onces:
                one, all_ = times[where, 1, size, at_once], times[where, count, size, at_once]
                table.row(str(size), where, str(at_once), duration(one), duration(all_), f"{one / all_:.2f}")
    print()
    if options.mesh:
        try:
            for (where, size), time in measure_mesh(count, options).items():
                ours = times[where, count, size, 1]
                print(
                    f"{count} GPUs, batch {size:5d} from {where:4s}: {duration(ours)}, jit on a mesh {duration(time)}: "
                    f"{time / ours:.2f} times as fast",
                    flush=True,
                )
        except Failed as failure:
            print(f"jit on a mesh: {failure}", flush=True)
    if count == 2 and {500, 20000} <= set(options.batches):
        for at_once in at_onces:
            label = f", {at_once} at once"
            bar(f"batch 500 from the host, 2 GPUs{label}", 1e3 * times["host", 2, 500, at_once], " ms", most=0.55)
            bar(f"batch 500 on the GPUs, 2 GPUs{label}", 1e3 * times["GPU", 2, 500, at_once], " ms", most=0.35)
            ratio = times["host", 1, 20000, at_once] / times["host", 2, 20000, at_once]
            bar(f"batch 20000, 2 GPUs, relative to one{label}", ratio, " times", least=1.8)


if __name__ == "__main__":
    main()
