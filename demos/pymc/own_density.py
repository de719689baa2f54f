"""Growth curves with a differential equation: an expensive density per row, and data that change.

Each row is a culture that is weighed once.  Its expected size is the solution of a differential equation by the
midpoint method.  The data are in ``pm.Data``, and are replaced by new data for a second fit.
"""

from __future__ import annotations

import argparse

import numpy as np

import synkhronos as synk
from synkhronos.extensions.pymc import data_parallel

try:
    import pymc as pm
    import pytensor.tensor as pt
except ModuleNotFoundError as error:
    raise SystemExit(f"this demo needs {error.name}: pip install 'synkhronos[pymc]'") from None

STEPS = 4


def compute_final_size(size: pt.TensorVariable, hours: pt.TensorVariable, rate: pt.TensorVariable) -> pt.TensorVariable:
    """Return the sizes after some hours: the solution of ``size' = rate * size * (1 - size)``."""
    step = hours / STEPS
    for _ in range(STEPS):
        halfway = size + step / 2 * rate * size * (1 - size)
        size = size + step * rate * halfway * (1 - halfway)
    return size


def simulate_cultures(n_rows: int, rate: float) -> dict[str, np.ndarray]:
    """Return synthetic cultures: initial sizes, hours, and final sizes."""
    rng = np.random.default_rng(n_rows)
    first, hours = rng.uniform(0.05, 0.3, n_rows), rng.uniform(1, 3, n_rows)
    true = 1 / (1 + (1 / first - 1) * np.exp(-rate * hours))
    return {"first": first, "hours": hours, "last": true + 0.05 * rng.normal(size=n_rows)}


def build_model(data: dict[str, np.ndarray]) -> pm.Model:
    """Return the model, written in plain PyMC."""
    with pm.Model() as model:
        first, hours, last = (pm.Data(name, values) for name, values in data.items())
        rate = pm.LogNormal("rate", 0, 1)
        noise = pm.HalfNormal("noise", 1)
        pm.StudentT("weight", nu=5, mu=compute_final_size(first, hours, rate), sigma=noise, observed=last)
    return model


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="processes (default: one for each core)")
    parser.add_argument("--rows", type=int, default=20_000, help="(default: %(default)s)")
    options = parser.parse_args()

    n = synk.fork(options.ranks, use_gpu=False)
    parallel = data_parallel(build_model(simulate_cultures(options.rows, rate=0.9)))
    for rate, rows in ((0.9, options.rows), (0.6, options.rows // 2)):
        with parallel:
            pm.set_data(simulate_cultures(rows, rate))  # sent to the ranks at the next evaluation
            estimate = float(pm.find_MAP(progressbar=False)["rate"])
        print(f"{n} ranks, {rows} cultures: estimated rate {estimate:.3f}, true rate {rate}")
        assert abs(estimate - rate) < 0.02 + 2 / np.sqrt(rows)  # errors of the midpoint method and of the sample
    synk.close()


if __name__ == "__main__":
    main()
