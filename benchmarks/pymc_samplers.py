"""Gradient evaluations a second of NumPyro's NUTS, which PyMC calls: in one process, and on ranks.

A hierarchical logistic regression with 10⁴, 10⁵, 10⁶ and 10⁷ rows.  Each side runs in a separate process.  Every draw
has the same number of leapfrog steps: the step size is small and fixed, and the depth of the tree is limited.  Each
side has a short and a long run.  On one rank and without ranks, the rate follows from the difference of their times,
both without the durations that JAX reports for tracing and compiling.  On more ranks, it follows from the times of the
all-reduces in the last three quarters of the long run, since a rank may wait while another compiles.  The last column
is the time of the short run, most of which is compiling.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import math
import os
import sys
import warnings
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks import make_parser
from benchmarks._measure import (
    SideError,
    Table,
    find_first_gpu,
    format_duration,
    print_heading,
    read_command_lines,
)
from benchmarks.pymc_rows import make_logistic
from synkhronos import get_n_gpu
from synkhronos.devices.jax.xla_reducer import XlaReducer

#: Depth of the tree, and leapfrog steps of a draw.
_TREE_DEPTH = 5
_STEPS_PER_DRAW = 2**_TREE_DEPTH - 1
#: Draws of the short run; draws times rows of the long run, and its maximal number of draws.
_SHORT_DRAWS = 4
_LONG_DRAWS_TIMES_ROWS, _MAX_LONG_DRAWS = 4 * 10**8, 200

#: Durations that JAX has reported for tracing and compiling, in seconds, and the times at which all-reduces began.
_compiling_times: list[float] = []
_reduction_times: list[float] = []


def record_times() -> None:
    """Record the durations that JAX reports, and the start times of all-reduces, in this process."""
    import jax

    def record_duration(event: str, seconds: float, **_: Any) -> None:
        if event.startswith("/jax/core/compile"):
            _compiling_times.append(seconds)

    def begin_sum(self: XlaReducer) -> None:
        _reduction_times.append(perf_counter())
        original(self)

    # The library has no hook for sums within XLA programs, as only this benchmark counts them.
    original = XlaReducer.begin_sum
    XlaReducer.begin_sum = begin_sum  # type: ignore[method-assign] # a method is replaced on purpose
    jax.monitoring.register_event_duration_secs_listener(record_duration)


def sample(model: Any, rows: int, draws: int, method: str, chains: int) -> tuple[float, float, int]:
    """Sample; return the sampler's time with and without compiling in seconds, and the number of evaluations."""
    import pymc as pm

    _compiling_times.clear()
    _reduction_times.clear()
    kernel = {
        "step_size": 1e-3 / math.sqrt(rows),  # the posterior narrows with the rows
        "adapt_step_size": False,
        "adapt_mass_matrix": False,
        "max_tree_depth": _TREE_DEPTH,
    }
    is_flat = int(pm.__version__.split(".")[0]) >= 6  # PyMC 6 takes the kernel's options beside the others
    with model:
        samples = pm.sample(
            draws,
            tune=1,
            chains=chains,
            random_seed=1,
            progressbar=False,
            compute_convergence_checks=False,
            nuts_sampler="numpyro",
            nuts_sampler_kwargs={"chain_method": method, **(kernel if is_flat else {"nuts_kwargs": kernel})},
        )
    steps = int(samples.sample_stats["n_steps"].sum())
    assert steps == draws * chains * _STEPS_PER_DRAW, "a draw turned around early"
    time = float(samples.posterior.attrs["sampling_time"])
    return time, time - sum(_compiling_times), steps


def measure(options: argparse.Namespace) -> None:
    """Measure one side, and print a line of JSON for each number of rows."""
    import synkhronos as synk
    from synkhronos.extensions.pymc import data_parallel

    warnings.simplefilter("ignore")
    if options.side:
        synk.fork(options.side, use_gpu=not options.cpu)
    import pymc  # noqa: F401  # sets the level of its logger

    record_times()
    logging.getLogger("pymc").setLevel(logging.ERROR)
    for rows in options.rows:
        start = perf_counter()
        model = make_logistic(rows, options.columns)
        if options.side:
            model = data_parallel(model)
        draws = options.draws or max(_SHORT_DRAWS + 1, min(_MAX_LONG_DRAWS, _LONG_DRAWS_TIMES_ROWS // rows))
        compiling, short_time, short_steps = sample(model, rows, _SHORT_DRAWS, options.method, options.chains)
        rates: list[float] = []
        while len(rates) < options.rounds and not (rates and perf_counter() - start > options.limit / 2):
            _, time, steps = sample(model, rows, draws, options.method, options.chains)
            if _reduction_times:
                steady = _reduction_times[len(_reduction_times) // 4 :]
                rates.append((len(steady) - 1) / (steady[-1] - steady[0]))
            else:
                rates.append((steps - short_steps) / max(time - short_time, 1e-9))
        print(json.dumps({"rows": rows, "compiling": compiling, "rates": rates}), flush=True)
    synk.close()


def main() -> None:
    """Run the benchmark."""
    parser = make_parser("pymc_samplers", __doc__)
    rows = [10_000, 100_000, 1_000_000, 10_000_000]
    parser.add_argument("--rows", type=int, nargs="+", default=rows, help="(default: 10⁴ to 10⁷)")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[0, 1, 2], help="0 is NumPyro without ranks (default: 0 1 2)"
    )
    parser.add_argument("--columns", type=int, default=20, help="(default: %(default)s)")
    parser.add_argument("--draws", type=int, help="of 31 evaluations (default: 200, fewer of many rows)")
    parser.add_argument("--chains", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--method", choices=["parallel", "vectorized"], default="parallel", help="of several chains")
    parser.add_argument("--rounds", type=int, default=2, help="longer runs of each side (default: %(default)s)")
    parser.add_argument(
        "--limit", type=float, default=120, help="seconds of each side and number of rows (default: %(default)s)"
    )
    parser.add_argument("--cpu", action="store_true", help="on cores, although there are GPUs")
    parser.add_argument("--side", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not (importlib.util.find_spec("pymc") and importlib.util.find_spec("numpyro")):
        print("This benchmark needs PyMC and NumPyro (the extras pymc and pymc-jax): left out.")
        return
    options.cpu = options.cpu or not get_n_gpu()
    if options.side is not None:
        measure(options)
        return
    print_heading(f"NumPyro's NUTS on {'cores' if options.cpu else 'GPUs'}, {options.columns} columns")
    table = Table({"": 10, "rows": 9, "gradients/s": 12, "rounds": 20, "of NumPyro": 10, "compiling": 10})
    alone: dict[int, float] = {}
    for side in options.ranks:
        name = "NumPyro" if not side else f"{side} rank{'s' if side > 1 else ''}"
        command = [sys.executable, "-m", "benchmarks.pymc_samplers", *sys.argv[1:], "--side", str(side)]
        environment = {"JAX_PLATFORMS": "cpu"} if options.cpu else {}
        if not side and not options.cpu:
            environment["CUDA_VISIBLE_DEVICES"] = find_first_gpu()
        try:
            for line in read_command_lines(command, options.limit * len(options.rows), **environment):
                report = json.loads(line)
                rows, rate = report["rows"], median(report["rates"])
                if not side:
                    alone[rows] = rate
                rounds = " ".join(f"{value:.1f}" for value in report["rates"])
                ratio = f"{rate / alone.get(rows, math.nan):.2f}"
                table.print_row(name, str(rows), f"{rate:.1f}", rounds, ratio, format_duration(report["compiling"]))
        except (SideError, ValueError) as error:
            print(f"{name}: {error}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    main()
