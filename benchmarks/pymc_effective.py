"""Effective draws a second of PyMC models: PyMC and nutpie, each alone and with ranks.

Each side samples the same model with the same seed and number of parallel chains, in a separate process with one BLAS
thread.  Sampling is the sampler's own time; the wall time includes compiling.  Effective draws are the smallest
effective sample size (ArviZ's ``ess``) of all parameters.  The last two columns are the largest R-hat of all
parameters, and the largest difference between posterior means and those of the first side, PyMC alone, in standard
errors of the two means, which follow from the effective draws.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import sys
from time import perf_counter
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks import make_parser
from benchmarks._measure import (
    SideError,
    Table,
    fork_ranks,
    format_duration,
    prepare_pymc,
    print_heading,
    read_command_lines,
)
from benchmarks.pymc_chains import MODELS
from synkhronos.ranks import count_available_cores
from synkhronos.ranks.thread_limit import ONE_THREAD

#: For each side the sampler, and whether ranks compute the model.
SIDES = {
    "PyMC": ("pymc", False),
    "PyMC, ranks": ("pymc", True),
    "nutpie": ("nutpie", False),
    "nutpie, ranks": ("nutpie", True),
}


def sample(options: argparse.Namespace) -> dict[str, Any]:
    """Sample one side; return times in seconds, and statistics of the parameters."""
    import pymc as pm

    from synkhronos.extensions.pymc import data_parallel

    sampler, is_parallel = SIDES[options.side]
    _, build = MODELS[options.model]
    model = build(options.rows, options.columns)
    with fork_ranks(options.ranks) if is_parallel else contextlib.nullcontext(), threadpool_limits(1):
        start = perf_counter()
        with data_parallel(model) if is_parallel else model:
            samples = pm.sample(
                options.draws,
                tune=options.draws,
                chains=options.chains,
                cores=options.chains,
                random_seed=1,
                nuts_sampler=sampler,
                progressbar=False,
                compute_convergence_checks=False,
            )
        wall = perf_counter() - start
    posterior = samples["posterior"]
    statistics = {
        # nutpie's draws have transformed variables as well.
        name: np.concatenate([np.ravel(dataset[variable.name].values) for variable in model.free_RVs]).tolist()
        for name, dataset in {
            "ess": pm.ess(samples),
            "r_hat": pm.rhat(samples),
            "mean": posterior.mean(("chain", "draw")),
            "sd": posterior.std(("chain", "draw")),
        }.items()
    }
    return {"wall": wall, "sampling": posterior.attrs.get("sampling_time", math.nan), **statistics}


def compare(model: str, options: argparse.Namespace) -> None:
    """Run all sides of a model, and print them."""
    print(f"{model}, {options.rows} rows of {options.columns} columns, {options.chains} chains, {options.ranks} ranks")
    table = Table(
        {
            "": 14,
            "wall": 8,
            "sampling": 8,
            "effective": 9,
            "a second": 8,
            "and of wall": 11,
            "of PyMC": 7,
            "R-hat": 6,
            "means": 6,
        }
    )
    arguments = [f"--{name}={getattr(options, name)}" for name in ("rows", "columns", "chains", "ranks", "draws")]
    command = [sys.executable, "-m", "benchmarks.pymc_effective", *arguments, "--model", model, "--side"]
    reference: dict[str, Any] = {}
    for side, (sampler, _) in SIDES.items():
        if not importlib.util.find_spec(sampler):
            print(f"{side}: left out, as {sampler} is not installed", flush=True)
            continue
        try:
            lines = list(read_command_lines([*command, side], options.limit, **ONE_THREAD))
        except SideError as error:
            print(f"{side}: {error}", flush=True)
            continue
        report = json.loads(lines[-1])
        mean, sd, ess = (np.array(report[name]) for name in ("mean", "sd", "ess"))
        reference = reference or report | {"rate": ess.min() / report["wall"]}
        errors = np.hypot(sd / np.sqrt(ess), np.array(reference["sd"]) / np.sqrt(reference["ess"]))
        table.print_row(
            side,
            format_duration(report["wall"]),
            format_duration(report["sampling"]),
            f"{ess.min():.0f}",
            f"{ess.min() / report['sampling']:.3g}",
            f"{ess.min() / report['wall']:.3g}",
            f"{ess.min() / report['wall'] / reference['rate']:.2f}",
            f"{max(report['r_hat']):.3f}",
            f"{abs((mean - reference['mean']) / errors).max():.1f}",
        )
    print(flush=True)


def main() -> None:
    """Run the benchmark."""
    parser = make_parser("pymc_effective", __doc__)
    parser.add_argument("--ranks", type=int, default=count_available_cores(), help="(default: one for each core)")
    parser.add_argument("--chains", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--rows", type=int, default=100_000, help="(default: %(default)s)")
    parser.add_argument("--columns", type=int, default=20, help="(default: %(default)s)")
    parser.add_argument("--draws", type=int, default=500, help="and as many to tune (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=600, help="seconds of each side (default: %(default)s)")
    parser.add_argument("--model", choices=list(MODELS), help="measure one of the models")
    parser.add_argument("--side", choices=list(SIDES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not prepare_pymc():
        return
    if options.side:
        print(json.dumps(sample(options)))
        return
    print_heading("PyMC: effective draws a second")
    for model in [options.model] if options.model else MODELS:
        compare(model, options)


if __name__ == "__main__":
    main()
