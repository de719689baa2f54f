"""Gradients per second of a PyMC model on the ranks.

Three models are evaluated by PyMC's own function, with one BLAS thread and with two, and by
`synkhronos.extensions.pymc.data_parallel`, whose ranks have one BLAS thread each; in one process and in turn.  Each
evaluation of the log-density and its gradient is at a new point.

A hierarchical logistic regression
    Products with a matrix of 50 columns: limited by memory bandwidth.
A beta-binomial of groups
    Much computation for each row, without BLAS.
100 rows
    Overhead of a call of the ranks.

With ``--chains N``, N processes evaluate the first two models by PyMC's own function at the same time, like N chains,
with one BLAS thread each.  The ranks evaluate one chain after the other, so that their rate is that of one chain.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks import make_parser
from benchmarks._hierarchical import N_GROUPS, make_data
from benchmarks._measure import (
    Table,
    fork_ranks,
    format_duration,
    print_criterion,
    print_heading,
    time_call,
)
from synkhronos.extensions.chains import measure_evaluation_rate


def make_logistic(rows: int, columns: int) -> Any:
    """Return the hierarchical logistic regression."""
    import pymc as pm

    x, group, y = make_data(rows, columns)
    with pm.Model() as model:
        overall, spread = pm.Normal("overall"), pm.HalfNormal("spread")
        effects = pm.Normal("effects", overall, spread, shape=N_GROUPS)
        slopes = pm.Normal("slopes", shape=columns)
        pm.Bernoulli("y", logit_p=effects[group] + pm.Data("x", x) @ slopes, observed=y.astype("int64"))
    return model


def make_beta_binomial(rows: int) -> Any:
    """Return a model that computes six logarithms of the gamma function for each row."""
    import pymc as pm

    rng = np.random.default_rng(0)
    group, trials = rng.integers(0, N_GROUPS, rows), rng.integers(20, 40, rows)
    with pm.Model() as model:
        overall = pm.Normal("overall")
        effects = pm.Normal("effects", overall, 0.5, shape=N_GROUPS)
        center = pm.math.sigmoid(effects[group])
        size = pm.Gamma("size", 2, 0.1)
        observed = rng.binomial(trials, rng.beta(3, 3, rows))
        pm.BetaBinomial("y", n=trials, alpha=center * size, beta=(1 - center) * size, observed=observed)
    return model


def make_evaluator(model: Any) -> Callable[[], Any]:
    """Return a function that evaluates a model's density and gradient, at a new point in each call."""
    from pymc.blocking import DictToArrayBijection

    function = model.logp_dlogp_function(ravel_inputs=True)
    function.set_extra_values({})
    point = DictToArrayBijection.map(model.initial_point()).data + 0.0
    steps = np.random.default_rng(1).normal(size=(1000, point.size)) * 1e-3
    count = 0

    def evaluate() -> Any:
        nonlocal count
        count += 1
        return function(point + steps[count % 1000])

    return evaluate


def compare(
    name: str, model: Any, calls: int, rounds: int, size: int, at_least: float | None, chains_rate: float | None = None
) -> None:
    """Measure one model, and print it, with the rate of parallel chains by PyMC if it was measured."""
    from synkhronos.extensions.pymc import data_parallel

    pymc_evaluate, ranks_evaluate = make_evaluator(model), make_evaluator(data_parallel(model))
    ranks_result, pymc_result = ranks_evaluate(), pymc_evaluate()
    np.testing.assert_allclose(ranks_result[0], pymc_result[0], rtol=1e-9)
    np.testing.assert_allclose(ranks_result[1], pymc_result[1], rtol=1e-6, atol=1e-6)

    sides: dict[str, tuple[Callable[[], Any], int]] = {
        "PyMC, 1 BLAS thread": (pymc_evaluate, 1),
        "PyMC, 2 BLAS threads": (pymc_evaluate, 2),
        f"{size} ranks": (ranks_evaluate, 1),
    }
    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, (call, threads) in sides.items():
            with threadpool_limits(threads):
                call()
                # Medians: on a busy machine some calls wait for a core.
                times[side].append(median(time_call(call) for _ in range(calls)))
    print(name)
    table = Table({"": 21, "median": 9, "rounds": 30, "a second": 9, "ratio": 6})
    ranks_median = median(times[f"{size} ranks"])
    for side, seconds in times.items():
        middle = median(seconds)
        table.print_row(
            side,
            format_duration(middle),
            " ".join(map(format_duration, seconds)),
            f"{1 / middle:.1f}",
            f"{middle / ranks_median:.2f}",
        )
    # Ratios within a round: the load of the machine was the same.
    ratios = [pymc / ranks for pymc, ranks in zip(times["PyMC, 1 BLAS thread"], times[f"{size} ranks"], strict=True)]
    if at_least is None:
        print(f"the ranks take {1e6 * (ranks_median - median(times['PyMC, 1 BLAS thread'])):.0f} us more")
    else:
        print_criterion(
            f"{size} ranks to 1 BLAS thread (rounds {min(ratios):.2f} to {max(ratios):.2f})",
            median(ratios),
            at_least=at_least,
        )
    if chains_rate is not None:
        ratio = 1 / ranks_median / chains_rate
        print(f"parallel plain chains: {chains_rate:.1f} a second; the ranks: {ratio:.2f} times that")
    print()


def main() -> None:
    """Run the benchmark."""
    parser = make_parser("pymc_rows", __doc__)
    parser.add_argument("--ranks", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the regression (default: %(default)s)")
    parser.add_argument("--columns", type=int, default=50, help="of the regression (default: %(default)s)")
    parser.add_argument("--costly", type=int, default=200_000, help="rows of the other model (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=20, help="evaluations in a turn (default: %(default)s)")
    parser.add_argument("--chains", type=int, metavar="N", help="measure N plain processes side by side, too")
    options = parser.parse_args()
    if not importlib.util.find_spec("pymc"):
        print("This benchmark needs PyMC, which is not installed: left out.")
        return
    print_heading("PyMC: the log-density and its gradient, by PyMC and by the ranks")
    models = {
        f"hierarchical logistic regression, {options.rows} rows of {options.columns} columns": (
            make_logistic(options.rows, options.columns),
            1.8,
        ),
        f"beta-binomial of {N_GROUPS} groups, {options.costly} rows": (make_beta_binomial(options.costly), 1.9),
    }
    calls, rounds, size = options.calls, options.rounds, options.ranks
    with threadpool_limits(1):
        chains = [
            measure_evaluation_rate(make_evaluator(model), options.chains) if options.chains else None
            for model, _ in models.values()
        ]
    with fork_ranks(options.ranks):
        for (name, (model, at_least)), rate in zip(models.items(), chains, strict=True):
            compare(name, model, calls, rounds, size, at_least, rate)
        compare("beta-binomial, 100 rows", make_beta_binomial(100), 100 * calls, rounds, size, None)


if __name__ == "__main__":
    main()
