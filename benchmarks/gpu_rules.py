"""Speed of training under exchange rules on GPUs.

Rows per second of the small MLP (784-800-800-10, 500 rows a GPU) or of ResNet-50 (64 images a GPU), relative to BSP.
The rules include those that launch all steps between two exchanges at once, and asynchronous ones.  ResNet-50 is also
compared with PyTorch's DistributedDataParallel and its post-local SGD, in separate processes.  At the end the time of
an exchange of 102 MB with the centre, and of averages of 102 MB in 32 and in 16 bits.

With ``--slow 3`` two other programs multiply matrices on the last GPU meanwhile, so that it has a third of its time for
training.

Run the benchmark once for each number of GPUs and model: ``python -m benchmarks.gpu_rules --model mlp --ranks 2``.
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
from benchmarks import make_parser
from benchmarks._measure import SideError, Table, format_duration, print_criterion, print_heading, run_side
from benchmarks.gpu_resnet import BLOCKS
from synkhronos import exchange_rules
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
    """Run ``count`` other programs on the GPU of a rank."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible.split(",")[rank] if visible else str(rank)}
    environment |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_PLATFORMS": {"gpu": "cuda"}.get(device, device)}
    command = [sys.executable, "-c", MULTIPLY]
    programs = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for program in programs:
            assert program.stdout is not None
            if not program.stdout.readline():
                raise SideError(f"a program that keeps the GPU busy ended with exit status {program.wait()}")
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def make_rules(period: int) -> dict[str, exchange_rules.ExchangeRule]:
    """Return the compared rules by name."""
    return {
        "BSP": exchange_rules.BSP(),
        "BSP of parameters": exchange_rules.BSP("params"),
        "local SGD": exchange_rules.LocalSGD(period),
        "local SGD, bfloat16": exchange_rules.LocalSGD(period, precision="bfloat16"),
        "post-local SGD": exchange_rules.PostLocal(period, start=1),
        "SlowMo": exchange_rules.SlowMo(period),
        "DiLoCo": exchange_rules.DiLoCo(period),
        "EASGD": exchange_rules.EASGD(period=period),
        "EASGD together": exchange_rules.EASGD(period=period, asynchronous=False),
        "ASGD": exchange_rules.ASGD(period),
        "GoSGD": exchange_rules.GoSGD(1 / period),
    }


def make_mlp(rng: np.random.Generator, n: int, steps: int, batch: int) -> tuple[Any, ...]:
    """Return loss, parameters, inputs, additional updates, images and labels."""
    import pytensor.tensor as tensor

    from benchmarks.gpu_step import LAYERS, build_mlp

    x, y = tensor.fmatrix("x"), tensor.ivector("y")
    loss, params, _ = build_mlp(x, y)
    images = synk.data(rng.random((n * steps * batch, LAYERS[0]), dtype=np.float32))
    labels = synk.data(rng.integers(0, LAYERS[-1], len(images)).astype("int32"))
    return loss, params, x, y, None, images, labels


def make_resnet(rng: np.random.Generator, n: int, steps: int, batch: int) -> tuple[Any, ...]:
    """Return loss, parameters, inputs, additional updates, images and labels."""
    demos = Path(__file__).resolve().parents[1] / "demos"
    sys.path[1:1] = [str(demos), str(demos / "resnet")]
    from network import BLOCKS, build_network

    net = build_network(BLOCKS[50], 64, 224, 1000)
    images = synk.data(dtype="uint8", shape=(n * steps * batch, 3, 224, 224))
    block = rng.integers(256, size=(64, 3, 224, 224), dtype=np.uint8)
    for start in range(0, len(images), 64):
        images[start : start + 64] = block[: len(images) - start]
    labels = synk.data(rng.integers(1000, size=len(images), dtype=np.int32))
    return net.loss, net.params, net.x, net.y, net.average_updates, images, labels


def compare_rules(options: argparse.Namespace) -> None:
    """Print rows per second under each rule."""
    print_heading(
        f"{options.model}, {options.batch} rows a GPU, {options.ranks} GPUs, exchanges after {options.period} steps"
    )
    table = Table({"rule": 20, "rows/s": 10, "of BSP": 7, "compute": 9, "exchange": 9, "wait": 9})
    make_model = {"mlp": make_mlp, "resnet": make_resnet}[options.model]
    results: dict[str, float] = {}
    for name, rule in make_rules(options.period).items():
        if options.rules and name not in options.rules:
            continue
        loss, params, x, y, extra, images, labels = make_model(
            np.random.default_rng(0), options.ranks, options.steps, options.batch
        )
        trainer = make_trainer(loss, params, x, y, updates.momentum, rule, 0.01, extra_updates=extra)
        best = None
        for report in trainer.epochs(images, labels, options.batch, options.epochs):
            if report.epoch > 1 and (best is None or report.rows_per_second > best.rows_per_second):
                best = report
        assert best is not None
        results[name] = best.rows_per_second
        ratio = results[name] / results["BSP"] if "BSP" in results else float("nan")
        table.print_row(
            name,
            f"{results[name]:,.0f}",
            f"{ratio:.2f}",
            *(format_duration(best.seconds[key]) for key in ("compute", "exchange", "wait")),
        )
        images.free_memory()


def compare_torch(options: argparse.Namespace) -> None:
    """Print images per second of PyTorch's DDP and post-local SGD."""
    print_heading(f"PyTorch, {options.batch} images a GPU, {options.ranks} GPUs")
    table = Table({"": 20, "rows/s": 10})
    settings = {
        **{"n": options.ranks, "precision": "tf32", "blocks": BLOCKS[50], "classes": 1000, "width": 64, "size": 224},
        **{"batch_size": options.batch, "device": "cpu" if options.cpu else "gpu", "where": ["host"]},
        **{"warm": 2 * options.period, "steps": 3 * options.period, "compiled": False},
    }
    for name, period in (("DDP", 0), ("post-local SGD", options.period)):
        try:
            results = run_side(["_ddp"], {**settings, "period": period}, 240, options.torch_python)
            table.print_row(name, f"{options.ranks * options.batch / results['results']['host']['seconds']:,.0f}")
        except SideError as failure:
            print(f"{name}: {failure}")


def measure_exchanges(
    context: Any, rule: exchange_rules.ExchangeRule, params: list[Any], shared: Any, rounds: int
) -> dict[str, float]:
    """Return the median seconds of an exchange with the centre, and of averages."""
    from synkhronos.devices import JAX
    from synkhronos.exchange_rules.rule import all_reduce_mean
    from synkhronos.graph_libraries import get_library

    get_library(params[0]).store_value(params[0], JAX.from_numpy(np.ones(SIZE, np.float32)))
    state = exchange_rules.ExchangeState(params, [], shared)
    rule.setup(context, state)
    times: dict[str, list[float]] = {}

    def time_and_record(name: str, function: Any) -> None:
        context.barrier(name)
        start = time.perf_counter()
        result = function()
        if hasattr(result, "block_until_ready"):
            result.block_until_ready()
        times.setdefault(name, []).append(time.perf_counter() - start)

    def exchange() -> Any:
        rule.exchange(context, state)
        return state.vector

    def copy_centre() -> Any:  # lower bound of the exchange: the centre to the GPU, and back
        state.shared_rows["centre"].write(state.shared_rows["centre"].to_device(JAX))
        return state.vector

    for _ in range(1 + rounds):  # the first round is discarded
        for turn in range(context.size):  # one rank at a time, so that no exchange waits for another
            context.barrier("turn")
            if turn == context.number:
                for name, copy in (("exchange with the centre", exchange), ("the centre there and back", copy_centre)):
                    start = time.perf_counter()
                    copy().block_until_ready()
                    times.setdefault(name, []).append(time.perf_counter() - start)
        for precision in (None, "float16", "bfloat16"):
            time_and_record(
                f"average in {precision or 'float32'}", lambda p=precision: all_reduce_mean(context, state.vector, p)
            )
    return {name: median(values[1:]) for name, values in times.items()}


def main() -> None:
    """Run the benchmark."""
    parser = make_parser("gpu_rules", __doc__)
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
            compare_rules(options)
    print_heading("102 MB")
    rule, params = exchange_rules.EASGD(), [pytensor.shared(np.ones(SIZE, np.float32), "w")]
    memory = exchange_rules.allocate_shared_arrays(rule, options.ranks, SIZE, np.dtype("float32"))
    results = synk.run(measure_exchanges, rule, params, memory, options.rounds)[0]
    table = Table({"": 26, "median": 9})
    for name, value in results.items():
        table.print_row(name, format_duration(value))
    print_criterion("exchange with the centre", 1e3 * results["exchange with the centre"], " ms", at_most=25)
    ratio = results["exchange with the centre"] / results["the centre there and back"]
    print_criterion("exchange with the centre, relative to the bus", ratio, " times", at_most=2)
    print_criterion(
        "average in bfloat16, to float32",
        results["average in bfloat16"] / results["average in float32"],
        "",
        at_most=0.6,
    )
    synk.close()
    if options.model == "resnet":
        compare_torch(options)


if __name__ == "__main__":
    main()
