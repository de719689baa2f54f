"""A logistic regression by PyMC, first by PyMC alone and then by all ranks.

Shows what has to change in a program: two imports, two lines.
"""

from __future__ import annotations

import argparse
from time import perf_counter

import numpy as np

import synkhronos as synk
from synkhronos.extensions.pymc import data_parallel

try:
    import pymc as pm
except ModuleNotFoundError as error:
    raise SystemExit(f"this demo needs {error.name}: pip install 'synkhronos[pymc]'") from None


def build_model(rows: int) -> pm.Model:
    """Return the model: plain PyMC."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 5))
    clicked = rng.random(rows) < 1 / (1 + np.exp(-(x @ [1.0, -1.0, 0.5, 0.0, 0.0] - 0.5)))
    with pm.Model() as model:
        intercept = pm.Normal("intercept", 0, 2)
        slopes = pm.Normal("slopes", 0, 1, shape=5)
        pm.Bernoulli("clicked", logit_p=intercept + x @ slopes, observed=clicked.astype("int64"))
    return model


def sample(model: pm.Model, draws: int) -> tuple[np.ndarray, str]:
    """Return the slopes' means, and the seconds that it took."""
    start = perf_counter()
    with model:
        drawn = pm.sample(draws=draws, tune=draws, chains=2, cores=1, random_seed=1, progressbar=False)
    seconds, sampling = perf_counter() - start, drawn.posterior.attrs["sampling_time"]
    means = drawn.posterior["slopes"].mean(("chain", "draw")).values
    return means, f"{sampling:.1f} s of sampling, and {seconds - sampling:.1f} s of compiling"


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="processes (default: one for each core)")
    parser.add_argument("--rows", type=int, default=100_000, help="(default: %(default)s)")
    parser.add_argument("--draws", type=int, default=200, help="of each chain, and as many to tune")
    options = parser.parse_args()

    n = synk.fork(options.ranks, use_gpu=False)  # first: before there is data
    model = build_model(options.rows)
    alone, alone_seconds = sample(model, options.draws)
    together, seconds = sample(data_parallel(model), options.draws)
    print(f"PyMC alone: slopes {alone.round(2)}, {alone_seconds}")
    print(f"{n} ranks:    slopes {together.round(2)}, {seconds}")
    # Two samples of one posterior; the slopes' own uncertainty is about 2.5 / sqrt(rows).
    np.testing.assert_allclose(together, alone, atol=4 / np.sqrt(options.rows))
    synk.close()


if __name__ == "__main__":
    main()
