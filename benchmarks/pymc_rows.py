"""Gradients per second of a PyMC model on the ranks.

Three models, each by itself and by `synkhronos.extensions.pymc.data_parallel`, in one process and in turn: PyMC's own
function with one BLAS thread and with two, and the ranks, which have one BLAS thread each.  Every evaluation of the
log-density and its gradient is at another point.

A hierarchical logistic regression
    Products of a matrix of 50 columns: bound by the memory.
A beta-binomial of groups
    Costs much for each row, and no BLAS has a part in it.
100 rows
    What a call of the ranks costs.

With ``--chains N`` N processes evaluate the first two models by PyMC's own function at the same time, as N chains do,
each with one BLAS thread.  The ranks evaluate for one chain after the other, so that their rate is that of one chain.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks._hierarchical import GROUPS, make_data
from benchmarks._measure import Table, bar, duration, heading, processes, ranks, seconds


def logistic(rows: int, columns: int) -> Any:
    """Return the regression."""
    import pymc as pm

    x, group, y = make_data(rows, columns)
    with pm.Model() as model:
        overall, spread = pm.Normal("overall"), pm.HalfNormal("spread")
        effects = pm.Normal("effects", overall, spread, shape=GROUPS)
        slopes = pm.Normal("slopes", shape=columns)
        pm.Bernoulli("y", logit_p=effects[group] + pm.Data("x", x) @ slopes, observed=y.astype("int64"))
    return model


def beta_binomial(rows: int) -> Any:
    """Return a model in which each row takes six logarithms of the gamma function."""
    import pymc as pm

    rng = np.random.default_rng(0)
    group, trials = rng.integers(0, GROUPS, rows), rng.integers(20, 40, rows)
    with pm.Model() as model:
        overall = pm.Normal("overall")
        effects = pm.Normal("effects", overall, 0.5, shape=GROUPS)
        center = pm.math.sigmoid(effects[group])
        size = pm.Gamma("size", 2, 0.1)
        observed = rng.binomial(trials, rng.beta(3, 3, rows))
        pm.BetaBinomial("y", n=trials, alpha=center * size, beta=(1 - center) * size, observed=observed)
    return model


def evaluator(model: Any) -> Callable[[], Any]:
    """Return a function that evaluates a model's density and gradient, each time at another point."""
    from pymc.blocking import DictToArrayBijection

    function = model.logp_dlogp_function(ravel_inputs=True)
    function.set_extra_values({})
    at = DictToArrayBijection.map(model.initial_point()).data + 0.0
    steps = np.random.default_rng(1).normal(size=(1000, at.size)) * 1e-3
    count = 0

    def evaluate() -> Any:
        nonlocal count
        count += 1
        return function(at + steps[count % 1000])

    return evaluate


def rate_of_chains(model: Any, chains: int, calls: int) -> float:
    """Return the evaluations a second of processes that evaluate a model side by side, all together."""
    own = evaluator(model)
    context = multiprocessing.get_context("fork")
    start, rates = context.Barrier(chains), context.SimpleQueue()

    def evaluate() -> None:
        with threadpool_limits(1):
            own()
            start.wait()
            # No medians: these would leave out that more processes than cores wait for a core.
            rates.put(calls / seconds(lambda: [own() for _ in range(calls)]))

    own()  # compiles before the processes are forked
    with processes(evaluate, [()] * chains):
        return sum(rates.get() for _ in range(chains))


def compare(
    name: str, model: Any, calls: int, rounds: int, size: int, least: float | None, beside_chains: float | None = None
) -> None:
    """Measure one model, and print it, beside the rate of plain chains where that was measured."""
    from synkhronos.extensions.pymc import data_parallel

    own, shared = evaluator(model), evaluator(data_parallel(model))
    ours, theirs = shared(), own()
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-9)
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-6, atol=1e-6)

    sides: dict[str, tuple[Callable[[], Any], int]] = {
        "PyMC, 1 BLAS thread": (own, 1),
        "PyMC, 2 BLAS threads": (own, 2),
        f"{size} ranks": (shared, 1),
    }
    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, (call, threads) in sides.items():
            with threadpool_limits(threads):
                call()
                # Medians: on a busy machine some calls wait for a core.
                times[side].append(median(seconds(call) for _ in range(calls)))
    print(name)
    table = Table({"": 21, "median": 9, "rounds": 30, "a second": 9, "ratio": 6})
    mine = median(times[f"{size} ranks"])
    for side, each in times.items():
        middle = median(each)
        table.row(side, duration(middle), " ".join(map(duration, each)), f"{1 / middle:.1f}", f"{middle / mine:.2f}")
    # A round's sides met the same machine.
    each = [one / two for one, two in zip(times["PyMC, 1 BLAS thread"], times[f"{size} ranks"], strict=True)]
    if least is None:
        print(f"the ranks take {1e6 * (mine - median(times['PyMC, 1 BLAS thread'])):.0f} us more")
    else:
        bar(
            f"{size} ranks to 1 BLAS thread (rounds {min(each):.2f} to {max(each):.2f})",
            median(each),
            least=least,
        )
    if beside_chains is not None:
        ratio = 1 / mine / beside_chains
        print(f"parallel plain chains: {beside_chains:.1f} a second; the ranks: {ratio:.2f} times that")
    print()


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pymc_rows",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    heading("PyMC: the log-density and its gradient, by PyMC and by the ranks")
    models = {
        f"hierarchical logistic regression, {options.rows} rows of {options.columns} columns": (
            logistic(options.rows, options.columns),
            1.8,
        ),
        f"beta-binomial of {GROUPS} groups, {options.costly} rows": (beta_binomial(options.costly), 1.9),
    }
    calls, rounds, size = options.calls, options.rounds, options.ranks
    chains = [rate_of_chains(model, options.chains, calls) if options.chains else None for model, _ in models.values()]
    with ranks(options.ranks):
        for (what, (model, least)), rate in zip(models.items(), chains, strict=True):
            compare(what, model, calls, rounds, size, least, rate)
        compare("beta-binomial, 100 rows", beta_binomial(100), 100 * calls, rounds, size, None)


if __name__ == "__main__":
    main()
