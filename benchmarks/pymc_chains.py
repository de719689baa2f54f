"""Chains of PyMC side by side: plain, each in one process, and data-parallel, each on its share of the ranks.

Each side is one call of ``pm.sample`` with the same seed, in turn, with one BLAS thread for each process.  Gradients
per second are the leapfrog steps of all chains, including tuning, divided by the sampler's own time.  The wall time
includes compiling.  Lines with a star are for gradients without a sampler, in the same number of processes.  The limit
is the rate of PyMC's processes without communication: one for each rank, with its share of a chain's rows.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

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


def sample(model: Any, chains: int, cores: int, draws: int, limit: float) -> tuple[float, float, float, float]:
    """Sample a model; return gradients per second, effective draws per second, wall time in seconds, largest R-hat.

    Sampling is interrupted after ``limit`` seconds; the results are then those of the draws so far.
    """
    import pymc as pm

    start = perf_counter()

    def stop_late(**_: Any) -> None:
        if perf_counter() - start > limit:
            raise KeyboardInterrupt

    with model, threadpool_limits(1):
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
            callback=stop_late,
        )
    wall = perf_counter() - start
    if not hasattr(samples, "posterior"):
        raise ValueError("all draws were for tuning")
    groups = [getattr(samples, name, None) for name in ("warmup_sample_stats", "sample_stats")]
    steps = sum(int(stats["n_steps"].sum()) for stats in groups if stats is not None)
    effective = r_hat = math.nan
    if samples.posterior.sizes["draw"] > 3:
        effective = min(float(ess.min()) for ess in pm.ess(samples).data_vars.values())
        r_hat = max(float(values.max()) for values in pm.rhat(samples).data_vars.values())
    return steps / samples.posterior.attrs["sampling_time"], effective / wall, wall, r_hat


def compare(name: str, build: Callable[[int, int], Any], options: argparse.Namespace) -> None:
    """Measure one model, and print all sides."""
    from synkhronos.extensions.pymc import data_parallel

    size, chains = options.ranks, options.chains
    model = build(options.rows, options.columns)
    sides: dict[str, tuple[Any, int]] = {
        "PyMC": (model, chains),
        "ranks, side by side": (data_parallel(model), chains),
        "ranks, one by one": (data_parallel(model), 1),
    }
    print(f"{name}, {options.rows} rows of {options.columns} columns: {chains} chains, {size} ranks", flush=True)
    table = Table({"": 22, "gradients/s": 11, "of the limit": 12, "effective/s": 11, "wall (s)": 8, "R-hat": 6})
    per_chain = max(1, size // chains)
    evaluators = {
        "limit": (make_evaluator(build(options.rows // per_chain, options.columns)), per_chain * min(chains, size)),
        **{side: (make_evaluator(sides[side][0]), chains) for side in list(sides)[:2]},
    }
    for evaluate, _ in evaluators.values():
        evaluate()  # compiles before chains are forked
    gradients: dict[str, list[float]] = {side: [] for side in evaluators}
    for _ in range(5):
        for side, (evaluate, n_processes) in evaluators.items():
            with threadpool_limits(1):
                gradients[side].append(measure_evaluation_rate(evaluate, n_processes))
    limit = median(gradients.pop("limit")) / per_chain
    table.print_row("limit", f"{limit:.1f}", "1", "", "", "")
    for side, rates in gradients.items():
        rate = median(rates)
        table.print_row(f"{side}*", f"{rate:.1f}", f"{rate / limit:.2f}", "", "", "")
    deadline = perf_counter() + options.limit
    rates_by_side: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(options.rounds):
        for side, (variant, cores) in sides.items():
            remaining = deadline - perf_counter()
            if remaining <= 0:
                print(f"{side}: left out, as {options.limit:.0f} seconds have passed (--limit)", flush=True)
                continue
            try:
                rate, effective, wall, r_hat = sample(variant, chains, cores, options.draws, remaining / 2)
            except ValueError as error:  # also PyMC 5's, if all draws so far were for tuning
                print(f"{side}: no draws within {remaining / 2:.0f} seconds (--limit): {error}", flush=True)
                continue
            rates_by_side[side].append(rate)
            table.print_row(
                side, f"{rate:.1f}", f"{rate / limit:.2f}", f"{effective:.2f}", f"{wall:.1f}", f"{r_hat:.3f}"
            )
    pymc_rates, rank_rates = list(rates_by_side.values())[:2]
    round_ratios = [ranks / pymc for ranks, pymc in zip(rank_rates, pymc_rates, strict=False)]
    if round_ratios:
        rounds = f"rounds {min(round_ratios):.2f} to {max(round_ratios):.2f}"
        print(f"side by side: {median(round_ratios):.2f} times PyMC's gradients ({rounds})\n", flush=True)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pymc_chains",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=count_available_cores(), help="(default: one for each core)")
    parser.add_argument("--chains", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--rows", type=int, default=100_000, help="(default: %(default)s)")
    parser.add_argument("--columns", type=int, default=20, help="(default: %(default)s)")
    parser.add_argument("--draws", type=int, default=100, help="and as many to tune (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="turns of each side (default: %(default)s)")
    parser.add_argument(
        "--limit", type=float, default=240, help="seconds of each model's samplers (default: %(default)s)"
    )
    parser.add_argument("--only", choices=["logistic", "counts"], help="measure one of the models")
    options = parser.parse_args()
    if not prepare_pymc():
        return
    print_heading("PyMC: chains side by side")
    with fork_ranks(options.ranks):
        if options.only != "counts":
            compare("hierarchical logistic regression", make_logistic, options)
        if options.only != "logistic":
            compare("negative binomial", make_negative_binomial, options)


if __name__ == "__main__":
    main()
