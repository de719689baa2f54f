"""How long does a training step take?

An MLP 784-800-800-10 with Nesterov momentum: gradient, all_reduce, update.  The rows of each batch are picked by a
shuffled list of indexes, once from Data objects on the host, once from shared variables on the GPUs (`batch_s`).  The
loss is returned by every step and read after the last.  On one GPU and on all, in one run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

import synkhronos as synk
from benchmarks._measure import Table, bar, duration, gpus, graph_library, heading
from synkhronos.extensions import updates
from synkhronos.extensions.train import make_train_function

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


def host_steps(rng: np.random.Generator) -> Callable[[int], Callable[[], Any]]:
    """Return what makes, for a batch size, a step on rows of Data objects."""
    _, tensor = graph_library()
    x, y = tensor.fmatrix("x"), tensor.ivector("y")
    loss, params = model(x, y)
    train = make_train_function(loss, params, x, y, updates.nesterov_momentum, learning_rate=np.float32(0.01))
    images = synk.data(rng.random((ROWS, LAYERS[0]), dtype=np.float32))
    labels = synk.data(rng.integers(0, LAYERS[-1], ROWS).astype("int32"))

    def steps(size: int) -> Callable[[], Any]:
        batches = batches_of(rng, ROWS, size)
        return lambda: train(images, labels, batch=next(batches))

    return steps


def gpu_steps(rng: np.random.Generator, count: int) -> Callable[[int], Callable[[], Any]]:
    """Return what makes, for a batch size, a step on rows of variables on the GPUs."""
    library, tensor = graph_library()
    x, y = tensor.fmatrix("x"), tensor.ivector("y")
    images, labels = library.shared(np.zeros((1, LAYERS[0]), "float32")), library.shared(np.zeros(1, "int32"))
    loss, params = model(x, y)
    rule, rate = updates.nesterov_momentum, np.float32(0.01)
    train = make_train_function(loss, params, x, y, rule, sliceable_shareds=[images, labels], learning_rate=rate)
    synk.distribute()
    synk.scatter(images, rng.random((ROWS, LAYERS[0]), dtype=np.float32))
    synk.scatter(labels, rng.integers(0, LAYERS[-1], ROWS).astype("int32"))

    def steps(size: int) -> Callable[[], Any]:
        batches = batches_of(rng, ROWS // count, size // count)
        return lambda: train(batch_s=next(batches))

    return steps


def batches_of(rng: np.random.Generator, rows: int, size: int) -> Any:
    """Yield batches of shuffled rows for ever: of a few epochs that are shuffled beforehand."""
    orders = [rng.permutation(rows) for _ in range(5)]
    while True:
        for order in orders:
            for start in range(0, rows - size + 1, size):
                yield order[start : start + size]


def measure(step: Callable[[], Any], calls: int) -> tuple[float, float]:
    """Return a step's median time in five runs, all work waited for, and the last loss."""
    times = []
    loss = 0.0
    for _ in range(5):
        for _ in range(5):
            step()
        float(step())
        start = perf_counter()
        losses = [step() for _ in range(calls)]
        loss = float(losses[-1])
        times.append((perf_counter() - start) / calls)
        assert np.isfinite([float(value) for value in losses]).all()
    return median(times), loss


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, help="number of GPUs (default: all)")
    parser.add_argument("--batches", type=int, nargs="+", default=[500, 4000, 20000], help="rows of all ranks together")
    parser.add_argument("--calls", type=int, default=100, help="steps between two readings (default: %(default)s)")
    options = parser.parse_args()
    count = gpus(options.ranks)
    heading(f"a training step of the MLP {'-'.join(map(str, LAYERS))} on 1 and on {count} GPUs")
    times: dict[tuple[str, int, int], float] = {}
    for n in dict.fromkeys((1, count)):
        synk.fork(n, use_gpu=True)
        rng = np.random.default_rng(1)
        for where, steps in (("host", host_steps(rng)), ("GPU", gpu_steps(rng, n))):
            for size in options.batches:
                times[where, n, size], loss = measure(steps(size), options.calls)
                print(f"{n} GPUs, batch {size:5d} from {where:4s}: {duration(times[where, n, size])}, loss {loss:.3f}")
        synk.close()
    print()
    table = Table({"batch": 6, "data": 5, "1 GPU": 9, f"{count} GPUs": 9, "speed-up": 8})
    for size in options.batches:
        for where in ("host", "GPU"):
            one, all_ = times[where, 1, size], times[where, count, size]
            table.row(str(size), where, duration(one), duration(all_), f"{one / all_:.2f}")
    print()
    if count == 2 and {500, 20000} <= set(options.batches):
        bar("batch 500 from the host, 2 GPUs", 1e3 * times["host", 2, 500], " ms", most=0.55)
        bar("batch 500 on the GPUs, 2 GPUs", 1e3 * times["GPU", 2, 500], " ms", most=0.35)
        bar("batch 20000, 2 GPUs beside one", times["host", 1, 20000] / times["host", 2, 20000], " times", least=1.8)


if __name__ == "__main__":
    main()
