"""Counts by shops, in a hierarchical Poisson model: found by optimization, and by variational inference.

Shows that whatever PyMC does with a model's density works on all ranks, and which part of a model stays in one process.
"""

from __future__ import annotations

import argparse

import numpy as np

import synkhronos as synk
from synkhronos.extensions.pymc import data_parallel

try:
    import pymc as pm
except ModuleNotFoundError as error:
    raise SystemExit(f"this demo needs {error.name}: pip install 'synkhronos[pymc]'") from None

SHOPS = 20


def build_model(rows: int) -> tuple[pm.Model, np.ndarray]:
    """Return the model, and the shops' true rates."""
    rng = np.random.default_rng(0)
    rates = np.exp(1 + 0.3 * rng.normal(size=SHOPS))
    shop = rng.integers(0, SHOPS, rows)
    hours = rng.uniform(1, 3, rows)
    with pm.Model() as model:
        overall = pm.Normal("overall", 0, 2)
        spread = pm.HalfNormal("spread", 1)
        # Priors are not rows: they stay in this process, with all else that does not grow with the data.
        effects = pm.Normal("effects", overall, spread, shape=SHOPS)
        pm.Poisson("sold", hours * pm.math.exp(effects[shop]), observed=rng.poisson(hours * rates[shop]))
        pm.Normal("audit", overall, 0.5, observed=1.1)  # one number: it can't be split, and is left as it is
    return model, rates


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="processes (default: one for each core)")
    parser.add_argument("--rows", type=int, default=50_000, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5_000, help="of variational inference (default: %(default)s)")
    options = parser.parse_args()

    n = synk.fork(options.ranks, use_gpu=False)
    model, rates = build_model(options.rows)
    parallel = data_parallel(model)  # warns: audit is not split by rows
    print(f"{n} ranks compute {parallel.split_RVs}; not split: {parallel.reasons}")

    with parallel:
        best = pm.find_MAP(progressbar=False)
        fit = pm.fit(options.steps, random_seed=1, progressbar=False)
    errors = best["effects"] - np.log(rates)
    print(f"find_MAP: the shops' effects are off by {abs(errors).mean():.3f} on average")
    print(f"fit: the loss went from {fit.hist[0]:.0f} to {fit.hist[-100:].mean():.0f}")
    assert abs(errors).mean() < 4 / np.sqrt(options.rows / SHOPS)
    assert fit.hist[-100:].mean() < fit.hist[0]

    # The same density as the model's own.
    start = model.initial_point()
    np.testing.assert_allclose(parallel.compile_logp()(start), model.compile_logp()(start))
    synk.close()


if __name__ == "__main__":
    main()
