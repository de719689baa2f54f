"""Chains of PyMC side by side: plain, each in one process, and data-parallel, each on its share of the ranks.

Each side is one call of ``pm.sample`` with the same seed, in turn, with one BLAS thread for each process.  Gradients
per second are the leapfrog steps of all chains, including tuning, while all chains are sampled.  The wall time includes
compiling.  Lines with a star are for gradients without a sampler, in the same number of processes.  The limit is the
rate of PyMC's processes without communication: one for each rank, with its share of a chain's rows.  It is measured for
both kinds of lines.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks import make_parser
from benchmarks._hierarchical import N_GROUPS
from benchmarks._measure import Table, fork_ranks, prepare_pymc, print_heading
from benchmarks.pymc_rows import make_evaluator, make_logistic
from synkhronos.extensions.chains import measure_evaluation_rate
from synkhronos.ranks import count_available_cores


def make_negative_binomial(rows: int, columns: int) -> Any:
    """Return a regression of counts with varying intercepts; a row takes logarithms of the gamma function."""
    import pymc as pm

    rng = np.random.default_rng(0)
    x, group = rng.normal(size=(rows, columns)), rng.integers(0, N_GROUPS, rows)
    counts = rng.poisson(rng.gamma(2, np.exp(0.5 + x @ np.linspace(-0.2, 0.2, columns)) / 2))
    with pm.Model() as model:
        overall, spread = pm.Normal("overall"), pm.HalfNormal("spread")
        effects = pm.Normal("effects", overall, spread, shape=N_GROUPS)
        slopes = pm.Normal("slopes", shape=columns)
        mean = pm.math.exp(effects[group] + pm.Data("x", x) @ slopes)
        pm.NegativeBinomial("y", mu=mean, alpha=pm.Exponential("alpha", 1), observed=counts)
    return model


def make_student(rows: int, columns: int) -> Any:
    """Return a robust regression on saturating effects; a row takes a hyperbolic tangent of each column."""
    import pymc as pm

    rng = np.random.default_rng(0)
    x, group = rng.normal(size=(rows, columns)), rng.integers(0, N_GROUPS, rows)
    saturating = np.tanh(x * np.linspace(0.5, 2, columns)) @ np.linspace(0.5, 1.5, columns)
    observed = saturating + rng.normal(size=N_GROUPS)[group] + 0.5 * rng.standard_t(4, rows)
    with pm.Model() as model:
        overall, spread = pm.Normal("overall"), pm.HalfNormal("spread")
        effects = pm.Normal("effects", overall, spread, shape=N_GROUPS)
        slopes, scales = pm.Normal("slopes", shape=columns), pm.LogNormal("scales", shape=columns)
        mean = effects[group] + pm.math.tanh(pm.Data("x", x) * scales) @ slopes
        pm.StudentT("y", nu=pm.Gamma("nu", 2, 0.1), mu=mean, sigma=pm.HalfNormal("sigma"), observed=observed)
    return model


#: Name and constructor of each model, by its name on the command line.
MODELS = {
    "logistic": ("hierarchical logistic regression", make_logistic),
    "counts": ("negative binomial", make_negative_binomial),
    "student": ("Student-t with a costly mean", make_student),
}


def sample(
    model: Any, chains: int, cores: int, draws: int, limit: float
) -> tuple[float, float | None, float, float | None]:
    """Sample a model; return gradients per second, effective draws per second, wall time in seconds, largest R-hat.

    Sampling is interrupted ``limit`` seconds after the first draw; the results are then those of the draws so far.  The
    second and the fourth are None if all of them are for tuning.
    """
    import pymc as pm

    begin = perf_counter()
    timed_draws: dict[int, list[tuple[float, float, int]]] = {chain: [] for chain in range(chains)}

    def record(draw: Any, **_: Any) -> None:
        (stats,) = draw.stats
        start = stats["perf_counter_start"]
        timed_draws[draw.chain].append((start, start + stats["perf_counter_diff"], int(stats["tree_size"])))
        if perf_counter() - min(chain[0][0] for chain in timed_draws.values() if chain) > limit:
            raise KeyboardInterrupt

    samples: Any = None
    with model, threadpool_limits(1), contextlib.suppress(ValueError):  # PyMC 5 raises it if all draws are for tuning
        samples = pm.sample(
            draws,
            tune=draws,
            chains=chains,
            cores=cores,
            random_seed=1,
            nuts_sampler="pymc",  # the default of PyMC 6 is nutpie, if installed
            progressbar=False,
            discard_tuned_samples=False,
            compute_convergence_checks=False,
            callback=record,
        )
    wall = perf_counter() - begin
    effective = r_hat = None
    if hasattr(samples, "posterior") and samples.posterior.sizes["draw"] > 3:
        effective = min(float(ess.min()) for ess in pm.ess(samples).data_vars.values()) / wall
        r_hat = max(float(values.max()) for values in pm.rhat(samples).data_vars.values())
    return compute_gradient_rate(list(timed_draws.values()), cores > 1), effective, wall, r_hat


def compute_gradient_rate(timed_draws: list[list[tuple[float, float, int]]], is_parallel: bool) -> float:
    """Return gradients per second without a chain's first draw, in which it starts its ranks; NaN without later draws.

    A draw has its start, its end and its number of leapfrog steps.  The rate of parallel chains is that of the time in
    which all are sampled.
    """
    later_draws = [chain[1:] for chain in timed_draws]
    if is_parallel:
        start = max(chain[0][0] if chain else math.inf for chain in later_draws)
        end = min(chain[-1][1] if chain else math.inf for chain in later_draws)
        steps = [n for chain in later_draws for first, last, n in chain if first >= start and last <= end]
        seconds = end - start
    else:
        steps = [n for chain in later_draws for *_, n in chain]
        seconds = sum(chain[-1][1] - chain[0][0] for chain in later_draws if chain)
    return sum(steps) / seconds if steps else math.nan


def compare(name: str, build: Callable[[int, int], Any], options: argparse.Namespace) -> None:
    """Measure one model, and print all sides."""
    from synkhronos.extensions.pymc import data_parallel

    size, chains = options.ranks, options.chains
    per_chain = max(1, size // chains)
    n_processes = per_chain * min(chains, size)
    model, part = build(options.rows, options.columns), build(options.rows // per_chain, options.columns)
    #: Model, number of chains, number of processes.
    sides: dict[str, tuple[Any, int, int]] = {
        "limit": (part, n_processes, n_processes),
        "PyMC": (model, chains, chains),
        "ranks, side by side": (data_parallel(model), chains, chains),
        "ranks, one by one": (data_parallel(model), chains, 1),
    }
    print(f"{name}, {options.rows} rows of {options.columns} columns: {chains} chains, {size} ranks", flush=True)
    table = Table({"": 22, "gradients/s": 11, "of the limit": 12, "effective/s": 11, "wall (s)": 8, "R-hat": 6})
    evaluators = {side: make_evaluator(sides[side][0]) for side in list(sides)[:3]}
    for evaluate in evaluators.values():
        evaluate()  # compiles before chains are forked
    gradients: dict[str, list[float]] = {side: [] for side in evaluators}
    for _ in range(5):
        for side, evaluate in evaluators.items():
            with threadpool_limits(1):
                gradients[side].append(measure_evaluation_rate(evaluate, sides[side][2]))
    gradients["limit"] = [rate / per_chain for rate in gradients["limit"]]
    for side, rates in gradients.items():
        rate = median(rates)
        table.print_row(f"{side}*", f"{rate:.1f}", f"{rate / median(gradients['limit']):.2f}", "", "", "")
    rates_by_side: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(options.rounds if options.limit else 0):
        for side, (variant, n_chains, cores) in sides.items():
            limit = options.limit / (options.rounds * len(sides))
            rate, effective, wall, r_hat = sample(variant, n_chains, cores, options.draws, limit)
            if side == "limit":
                rate, effective, r_hat = rate / per_chain, None, None
            rates_by_side[side].append(rate)
            table.print_row(
                side,
                f"{rate:.1f}",
                f"{rate / rates_by_side['limit'][-1]:.2f}",
                "" if effective is None else f"{effective:.2f}",
                f"{wall:.1f}",
                "" if r_hat is None else f"{r_hat:.3f}",
            )
    round_ratios = [
        ranks / pymc for ranks, pymc in zip(rates_by_side["ranks, side by side"], rates_by_side["PyMC"], strict=False)
    ]
    if round_ratios:
        rounds = f"rounds {min(round_ratios):.2f} to {max(round_ratios):.2f}"
        print(f"side by side: {median(round_ratios):.2f} times PyMC's gradients ({rounds})\n", flush=True)


def main() -> None:
    """Run the benchmark."""
    parser = make_parser("pymc_chains", __doc__)
    parser.add_argument("--ranks", type=int, default=count_available_cores(), help="(default: one for each core)")
    parser.add_argument("--chains", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--rows", type=int, default=100_000, help="(default: %(default)s)")
    parser.add_argument("--columns", type=int, default=20, help="(default: %(default)s)")
    parser.add_argument("--draws", type=int, default=100, help="and as many to tune (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="turns of each side (default: %(default)s)")
    parser.add_argument(
        "--limit", type=float, default=240, help="seconds of each model's samplers; 0 for none (default: %(default)s)"
    )
    parser.add_argument("--only", choices=list(MODELS), help="measure one of the models")
    options = parser.parse_args()
    if not prepare_pymc():
        return
    print_heading("PyMC: chains side by side")
    with fork_ranks(options.ranks):
        for name in [options.only] if options.only else MODELS:
            compare(*MODELS[name], options)


if __name__ == "__main__":
    main()
