"""Speed of training under exchange rules on GPUs.

Rows a second, beside BSP, of the small MLP (784-800-800-10, 500 rows a GPU) and of ResNet-50 (64 images a GPU), under
rules by which the steps between two exchanges are one launch, and under those by which no rank waits; ResNet-50 also
beside PyTorch's DistributedDataParallel and its post-local SGD, in other processes.  Then the time of an exchange
of 102 MB with the centre, and of averages of 102 MB in 32 and in 16 bits.

With ``--slow 3`` the last GPU has a third of its time for us: two other programs multiply matrices on it meanwhile.

One process for each number of GPUs and model: ``python -m benchmarks.gpu_rules --model mlp --ranks 2``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import synkhronos as synk
from benchmarks._measure import Failed, Table, bar, duration, heading
from benchmarks.gpu_resnet import BLOCKS, call
from synkhronos import rules
from synkhronos.training import make_trainer, updates

#: ResNet-50's parameters.
SIZE = 25_557_032
#: A program that keeps a GPU busy until it is killed.
MULTIPLY = """
import jax, jax.numpy as jnp
multiply = jax.jit(lambda x: x @ x / 4096)
x = multiply(jnp.ones((4096, 4096))).block_until_ready()
print("ready", flush=True)
while True:
    x = multiply(x).block_until_ready()
"""


@contextlib.contextmanager
def keep_busy(rank: int, count: int, device: str) -> Iterator[None]:
    """Run ``count`` programs beside ours on the GPU of a rank."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible.split(",")[rank] if visible else str(rank)}
    environment |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_PLATFORMS": {"gpu": "cuda"}.get(device, device)}
    command = [sys.executable, "-c", MULTIPLY]
    programs = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for program in programs:
            assert program.stdout is not None
            if not program.stdout.readline():
                raise Failed(f"a program that keeps the GPU busy ended with exit status {program.wait()}")
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def make_rules(period: int) -> dict[str, rules.Rule]:
    """Return the compared rules by name."""
    return {
        "BSP": rules.BSP(),
        "BSP of parameters": rules.BSP("params"),
        "local SGD": rules.LocalSGD(period),
        "local SGD, bfloat16": rules.LocalSGD(period, precision="bfloat16"),
        "post-local SGD": rules.PostLocal(period, start=1),
        "SlowMo": rules.SlowMo(period),
        "DiLoCo": rules.DiLoCo(period),
        "EASGD": rules.EASGD(period=period),
        "EASGD together": rules.EASGD(period=period, asynchronous=False),
        "ASGD": rules.ASGD(period),
        "GoSGD": rules.GoSGD(1 / period),
    }


def mlp(rng: np.random.Generator, n: int, steps: int, batch: int) -> tuple[Any, ...]:
    """Return loss, parameters, inputs, further updates, and data."""
    import pytensor.tensor as tensor

    from benchmarks.gpu_step import LAYERS, model

    x, y = tensor.fmatrix("x"), tensor.ivector("y")
    loss, params = model(x, y)
    images = synk.data(rng.random((n * steps * batch, LAYERS[0]), dtype=np.float32))
    labels = synk.data(rng.integers(0, LAYERS[-1], len(images)).astype("int32"))
    return loss, params, x, y, None, images, labels


def resnet(rng: np.random.Generator, n: int, steps: int, batch: int) -> tuple[Any, ...]:
    """Return loss, parameters, inputs, further updates, and data."""
    demos = Path(__file__).resolve().parents[1] / "demos"
    sys.path[1:1] = [str(demos), str(demos / "resnet")]
    from network import BLOCKS, build

    net = build(BLOCKS[50], 64, 224, 1000)
    images = synk.data(dtype="uint8", shape=(n * steps * batch, 3, 224, 224))
    some = rng.integers(256, size=(64, 3, 224, 224), dtype=np.uint8)
    for start in range(0, len(images), 64):
        images[start : start + 64] = some[: len(images) - start]
    labels = synk.data(rng.integers(1000, size=len(images), dtype=np.int32))
    return net.loss, net.params, net.x, net.y, net.average_updates, images, labels


def speeds(options: argparse.Namespace) -> None:
    """Print rows a second under each rule."""
    heading(
        f"{options.model}, {options.batch} rows a GPU, {options.ranks} GPUs, exchanges after {options.period} steps"
    )
    table = Table({"rule": 20, "rows/s": 10, "of BSP": 7, "compute": 9, "exchange": 9, "wait": 9})
    make = {"mlp": mlp, "resnet": resnet}[options.model]
    found: dict[str, float] = {}
    for name, rule in make_rules(options.period).items():
        if options.rules and name not in options.rules:
            continue
        loss, params, x, y, extra, images, labels = make(
            np.random.default_rng(0), options.ranks, options.steps, options.batch
        )
        trainer = make_trainer(loss, params, x, y, updates.momentum, rule, 0.01, extra_updates=extra)
        best = None
        for report in trainer.epochs(images, labels, options.batch, options.epochs):
            if report.epoch > 1 and (best is None or report.rows_per_second > best.rows_per_second):
                best = report
        assert best is not None
        found[name] = best.rows_per_second
        beside = found[name] / found["BSP"] if "BSP" in found else float("nan")
        table.row(
            name,
            f"{found[name]:,.0f}",
            f"{beside:.2f}",
            *(duration(best.seconds[key]) for key in ("compute", "exchange", "wait")),
        )
        images.free_memory()


def torch(options: argparse.Namespace) -> None:
    """Print images a second of PyTorch's two ways."""
    heading(f"PyTorch, {options.batch} images a GPU, {options.ranks} GPUs")
    table = Table({"": 20, "rows/s": 10})
    settings = {
        **{"n": options.ranks, "precision": "tf32", "blocks": BLOCKS[50], "classes": 1000, "width": 64, "size": 224},
        **{"batch_size": options.batch, "device": "cpu" if options.cpu else "gpu", "where": ["host"]},
        **{"warm": 2 * options.period, "steps": 3 * options.period, "rounds": 3, "compiled": False},
    }
    for name, period in (("DDP", 0), ("post-local SGD", options.period)):
        try:
            found = call("_ddp", options.torch_python, {**settings, "period": period}, {}, 240)
            table.row(name, f"{options.ranks * options.batch / found['results']['host'][1]:,.0f}")
        except Failed as failure:
            print(f"{name}: {failure}")


def exchanges(worker: Any, rule: rules.Rule, params: list[Any], shared: Any, rounds: int) -> dict[str, float]:
    """Return the median seconds of an exchange with the centre, and of averages."""
    from synkhronos.devices import JAX
    from synkhronos.graphs import library_of
    from synkhronos.rules.rule import average

    library_of(params[0]).store_value(params[0], JAX.from_host(np.ones(SIZE, np.float32)))
    state = rules.State(params, [], shared)
    rule.setup(worker, state)
    times: dict[str, list[float]] = {}

    def timed(name: str, call: Any) -> None:
        worker.barrier(name)
        start = time.perf_counter()
        result = call()
        if hasattr(result, "block_until_ready"):
            result.block_until_ready()
        times.setdefault(name, []).append(time.perf_counter() - start)

    def exchange() -> Any:
        rule.exchange(worker, state)
        return state.vector

    def bus() -> Any:  # what the exchange can't do without: the centre to the GPU, and back
        state.rows["centre"].write(state.rows["centre"].to_device(JAX))
        return state.vector

    for _ in range(1 + rounds):  # the first is not timed
        for turn in range(worker.size):  # one rank at a time: what one exchange takes, not what waiting does
            worker.barrier("turn")
            if turn == worker.number:
                for name, call in (("exchange with the centre", exchange), ("the centre there and back", bus)):
                    start = time.perf_counter()
                    call().block_until_ready()
                    times.setdefault(name, []).append(time.perf_counter() - start)
        for precision in (None, "float16", "bfloat16"):
            timed(f"average in {precision or 'float32'}", lambda p=precision: average(worker, state.vector, p))
    return {name: median(values[1:]) for name, values in times.items()}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_rules", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="number of GPUs (default: %(default)s)")
    parser.add_argument("--model", choices=("mlp", "resnet", "none"), default="mlp", help="(default: %(default)s)")
    parser.add_argument("--rules", nargs="+", help="which, by name (default: all)")
    parser.add_argument("--period", type=int, default=20, help="steps between exchanges (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="of each GPU in an epoch (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="the first is not counted (default: %(default)s)")
    parser.add_argument("--slow", type=int, default=1, metavar="N", help="slow the last GPU down N times (default: no)")
    parser.add_argument("--batch", type=int, help="rows of a GPU's step (default: 500, or 64 images)")
    parser.add_argument("--rounds", type=int, default=10, help="timed exchanges (default: %(default)s)")
    parser.add_argument("--torch-python", default=sys.executable, metavar="PATH", help="a Python that has PyTorch")
    parser.add_argument("--cpu", action="store_true", help="try the benchmark itself, on JAX arrays on the CPU")
    options = parser.parse_args()
    options.batch = options.batch or {"mlp": 500}.get(options.model, 64)
    import synkhronos.compat  # noqa: F401 - before Lasagne

    # isort: split
    import pytensor

    pytensor.config.floatX = "float32"
    if options.cpu:
        pytensor.config.mode = "JAX"
    synk.fork(options.ranks, use_gpu=not options.cpu)
    if options.model != "none":
        with keep_busy(options.ranks - 1, options.slow - 1, "cpu" if options.cpu else "gpu"):
            speeds(options)
    heading("102 MB")
    rule, params = rules.EASGD(), [pytensor.shared(np.ones(SIZE, np.float32), "w")]
    memory = rules.shared_memory(rule, options.ranks, SIZE, np.dtype("float32"))
    found = synk.run(exchanges, rule, params, memory, options.rounds)[0]
    table = Table({"": 26, "median": 9})
    for name, value in found.items():
        table.row(name, duration(value))
    bar("exchange with the centre", 1e3 * found["exchange with the centre"], " ms", most=25)
    beside = found["exchange with the centre"] / found["the centre there and back"]
    bar("exchange with the centre, relative to the bus", beside, " times", most=2)
    bar(
        "average in bfloat16, to float32",
        found["average in bfloat16"] / found["average in float32"],
        "",
        most=0.6,
    )
    synk.close()
    if options.model == "resnet":
        torch(options)


if __name__ == "__main__":
    main()
