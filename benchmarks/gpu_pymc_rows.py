"""Time of the gradient of a likelihood of many rows, on GPUs.

A hierarchical logistic regression, computed by the ranks as in `synkhronos.extensions.pymc.data_parallel`: the rows
are in the GPUs' memory, and an evaluation of the log-likelihood and its gradient sends parameters and receives a sum.
1, 2 and more GPUs, among which the rows are divided, are compared with NumPyro on one GPU, in a separate process, if it
is installed.  Each evaluation is at a new point, and waited for.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks import make_parser
from benchmarks._hierarchical import N_GROUPS, compute_log_likelihood, make_data
from benchmarks._measure import (
    SideError,
    Table,
    find_first_gpu,
    format_duration,
    print_criterion,
    print_heading,
    require_gpus,
    run_command,
)

ROUNDS = 3


def make_points(columns: int, dtype: str) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
    """Return a function that maps the number of an evaluation to its parameters."""
    rng = np.random.default_rng(1)
    effects, slopes = rng.normal(size=N_GROUPS), rng.normal(size=columns) / 10
    return lambda i: ((effects + 1e-5 * i).astype(dtype), (slopes - 1e-5 * i).astype(dtype))


def measure(evaluate: Callable[[int], Any], calls: int) -> tuple[float, list[float]]:
    """Return the value at point 0, and an evaluation's time in each round."""
    value = float(evaluate(0)[0])
    times = []
    index = 1
    for _ in range(ROUNDS):
        evaluate(index)
        start = perf_counter()
        for i in range(index + 1, index + 1 + calls):
            evaluate(i)
        times.append((perf_counter() - start) / calls)
        index += calls + 1
    return value, times


def measure_ranks(n_ranks: int, options: argparse.Namespace) -> tuple[float, list[float]]:
    """Measure the ranks."""
    import pytensor
    import pytensor.tensor as pt

    import synkhronos as synk
    from synkhronos.extensions.rows_sum import sum_over_rows

    synk.fork(n_ranks, use_gpu=not options.cpu)
    dtype = options.dtype
    with pytensor.config.change_flags(floatX=dtype):
        values = make_data(options.rows, options.columns, dtype)
        x, y = pt.matrix("x", dtype=dtype), pt.vector("y", dtype=dtype)
        group = pt.ivector("group")
        effects, slopes = pt.vector("effects", dtype=dtype), pt.vector("slopes", dtype=dtype)
        total = sum_over_rows(
            compute_log_likelihood(x, group, y, effects, slopes), dict(zip((x, group, y), values, strict=True))
        )
        outputs = [total, *pytensor.grad(total, [effects, slopes])]
        evaluate = pytensor.function([effects, slopes], outputs, mode="FAST_COMPILE")
        point = make_points(options.columns, dtype)
        result = measure(lambda i: evaluate(*point(i)), options.calls)
    synk.close()
    return result


def measure_numpyro(options: argparse.Namespace) -> None:
    """Measure NumPyro, and print the result."""
    import jax
    import jax.numpy as jnp
    import numpyro
    from numpyro import distributions as dist
    from numpyro.infer.util import log_density

    jax.config.update("jax_enable_x64", options.dtype == "float64")
    x, group, y = (jax.device_put(a) for a in make_data(options.rows, options.columns, options.dtype))

    def model(x: Any, group: Any, y: Any) -> None:
        # Flat priors: only the likelihood is measured.
        effects = numpyro.sample("effects", dist.ImproperUniform(dist.constraints.real, (), (N_GROUPS,)))
        slopes = numpyro.sample("slopes", dist.ImproperUniform(dist.constraints.real, (), (options.columns,)))
        numpyro.sample("y", dist.Bernoulli(logits=effects[group] + x @ slopes), obs=y)

    def log_posterior(params: Any, x: Any, group: Any, y: Any) -> Any:
        return log_density(model, (x, group, y), {}, params)[0]

    compiled = jax.jit(jax.value_and_grad(log_posterior))
    point = make_points(options.columns, options.dtype)

    def evaluate(i: int) -> Any:
        effects, slopes = point(i)
        params = {"effects": jnp.asarray(effects), "slopes": jnp.asarray(slopes)}
        value, gradient = compiled(params, x, group, y)
        return np.asarray(value), [np.asarray(array) for array in gradient.values()]

    print(json.dumps(measure(evaluate, options.calls)), flush=True)


def main() -> None:
    """Run the benchmark."""
    parser = make_parser("gpu_pymc_rows", __doc__)
    parser.add_argument("--ranks", type=int, help="number of GPUs (default: all)")
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows of all GPUs together (default: %(default)s)")
    parser.add_argument("--columns", type=int, default=50, help="(default: %(default)s)")
    parser.add_argument("--calls", type=int, default=100, help="evaluations in a round (default: %(default)s)")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64", help="(default: %(default)s)")
    parser.add_argument("--cpu", action="store_true", help="in JAX mode on cores, to try the benchmark without GPUs")
    parser.add_argument("--numpyro", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.numpyro:
        measure_numpyro(options)
        return
    if options.cpu:
        os.environ["PYTENSOR_FLAGS"] = "mode=JAX"
        count = options.ranks or 2
    else:
        count = require_gpus(options.ranks)
    sides: dict[str, tuple[float, list[float]]] = {}
    if importlib.util.find_spec("numpyro"):
        command = [sys.executable, "-m", "benchmarks.gpu_pymc_rows", "--numpyro", *sys.argv[1:]]
        try:
            sides["NumPyro, 1 GPU"] = tuple(
                json.loads(run_command(command, 200, CUDA_VISIBLE_DEVICES=find_first_gpu()).splitlines()[-1])
            )
        except SideError as error:
            print(error)
    else:
        print("NumPyro is not installed: left out.")
    print_heading(f"log-likelihood and gradient, {options.rows} rows of {options.columns} columns, {options.dtype}")
    counts = [n for n in (1, 2, 4, 8) if n <= count]
    for n in counts:
        sides[f"{n} GPUs" if n > 1 else "1 GPU"] = measure_ranks(n, options)
    table = Table({"": 16, "median": 10, "rounds": 32, "a second": 9, "value": 16})
    for name, (value, times) in sides.items():
        rounds = " ".join(format_duration(time) for time in times)
        table.print_row(name, format_duration(median(times)), rounds, f"{1 / median(times):.0f}", f"{value:.8g}")
    print()
    single_gpu = median(sides["1 GPU"][1])
    for n in counts[1:]:
        print_criterion(f"{n} GPUs, part of linear", single_gpu / median(sides[f"{n} GPUs"][1]) / n, at_least=0.95)
    if "NumPyro, 1 GPU" in sides:
        print_criterion("NumPyro's time / ours, 1 GPU", median(sides["NumPyro, 1 GPU"][1]) / single_gpu, at_least=1)


if __name__ == "__main__":
    main()
