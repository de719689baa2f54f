"""Gradient evaluations a second of NumPyro's NUTS, which PyMC calls: in one process, and on ranks.

A hierarchical logistic regression with 10⁴, 10⁵, 10⁶ and 10⁷ rows.  Each side runs in a process of its own.  Every draw
takes the same number of leapfrog steps: the step size is small and fixed, and the depth of the tree is limited.  Each
side samples with few and with more draws; the difference of the two times has no compiling in it.  The last column is
the time of the shorter run, nearly all of it compiling.
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

from benchmarks._measure import Failed, Table, duration, heading, run_alone
from benchmarks.pymc_rows import logistic
from synkhronos import get_n_gpu

#: Depth of the tree, and leapfrog steps of a draw.
_DEPTH = 5
_STEPS = 2**_DEPTH - 1
#: Draws of the shorter run.
_FEW = 4


def sample(model: Any, draws: int, method: str, chains: int) -> tuple[float, int]:
    """Sample; return the sampler's time in seconds and the number of evaluations."""
    import pymc as pm

    with model:
        drawn = pm.sample(
            draws,
            tune=1,
            chains=chains,
            random_seed=1,
            progressbar=False,
            compute_convergence_checks=False,
            nuts_sampler="numpyro",
            nuts_sampler_kwargs={
                "chain_method": method,
                "nuts_kwargs": {
                    "step_size": 1e-5,
                    "adapt_step_size": False,
                    "adapt_mass_matrix": False,
                    "max_tree_depth": _DEPTH,
                },
            },
        )
    steps = int(drawn.sample_stats["n_steps"].sum())
    assert steps == draws * chains * _STEPS, "a draw turned around early"
    return float(drawn.posterior.attrs["sampling_time"]), steps


def measure(options: argparse.Namespace) -> None:
    """Measure one side, and print the result."""
    import synkhronos as synk
    from synkhronos.extensions.pymc import data_parallel

    start = perf_counter()
    warnings.simplefilter("ignore")
    if options.side:
        synk.fork(options.side, use_gpu=not options.cpu)
    import pymc  # noqa: F401  # sets the level of its logger

    logging.getLogger("pymc").setLevel(logging.ERROR)
    model = logistic(options.rows[0], options.columns)
    if options.side:
        model = data_parallel(model)
    sample(model, _FEW, options.method, options.chains)  # the first compiling takes longer
    short, few = sample(model, _FEW, options.method, options.chains)
    rates: list[float] = []
    draws = options.draws
    while len(rates) < options.rounds:
        time, steps = sample(model, draws, options.method, options.chains)
        is_late = perf_counter() - start > options.limit / 2
        if time > 2 * short or is_late:  # else the compiling's variation would be too large a part
            rates.append((steps - few) / max(time - short, 1e-9))
        else:
            draws *= 4
        if is_late:
            break
    print(json.dumps({"compiling": short, "rates": rates}), flush=True)
    synk.close()


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pymc_samplers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    rows = [10_000, 100_000, 1_000_000, 10_000_000]
    parser.add_argument("--rows", type=int, nargs="+", default=rows, help="(default: 10⁴ to 10⁷)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="(default: 1 2)")
    parser.add_argument("--columns", type=int, default=20, help="(default: %(default)s)")
    parser.add_argument("--draws", type=int, default=40, help="of 31 evaluations (default: %(default)s)")
    parser.add_argument("--chains", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--method", choices=["parallel", "vectorized"], default="parallel", help="of several chains")
    parser.add_argument("--rounds", type=int, default=2, help="longer runs of each side (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=120, help="seconds of each side (default: %(default)s)")
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
    heading(f"NumPyro's NUTS on {'cores' if options.cpu else 'GPUs'}, {options.columns} columns")
    table = Table({"rows": 10, "side": 10, "gradients/s": 12, "rounds": 20, "of NumPyro": 10, "compiling": 10})
    environment = {"JAX_PLATFORMS": "cpu"} if options.cpu else {}
    for count in options.rows:
        alone = math.nan
        for side in [0, *options.ranks]:
            name = "NumPyro" if not side else f"{side} rank{'s' if side > 1 else ''}"
            command = [sys.executable, "-m", "benchmarks.pymc_samplers", *sys.argv[1:], "--side", str(side)]
            own = {**environment, **({} if side or options.cpu else {"CUDA_VISIBLE_DEVICES": "0"})}
            try:
                text = run_alone([*command, "--rows", str(count)], options.limit, **own)
                found = json.loads(text.splitlines()[-1])
            except (Failed, ValueError) as error:
                table.row(str(count), name, "failed", "", "", "")
                print(f"  {error}", flush=True)
                continue
            rate = median(found["rates"])
            alone = rate if not side else alone
            rounds = " ".join(f"{each:.1f}" for each in found["rates"])
            table.row(str(count), name, f"{rate:.1f}", rounds, f"{rate / alone:.2f}", duration(found["compiling"]))
            sys.stdout.flush()


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    main()
