"""Growth curves by an equation of one's own, with data that change: a density that costs much for each row.

Each row is a culture that is weighed once.  Its size by then follows from a differential equation, solved by steps of
the midpoint method.  The data are in ``pm.Data``: when new cultures come in, they take the old ones' place.
"""

from __future__ import annotations

import argparse

import numpy as np
import pymc as pm
import pytensor.tensor as pt

import synkhronos as synk
from synkhronos.extensions.pymc import data_parallel

STEPS = 4


def grown(size: pt.TensorVariable, hours: pt.TensorVariable, rate: pt.TensorVariable) -> pt.TensorVariable:
    """Return sizes after some hours: the solution of ``size' = rate * size * (1 - size)``."""
    step = hours / STEPS
    for _ in range(STEPS):
        halfway = size + step / 2 * rate * size * (1 - size)
        size = size + step * rate * halfway * (1 - halfway)
    return size


def weighed(rows: int, rate: float) -> dict[str, np.ndarray]:
    """Return made-up cultures: sizes at first, hours, and sizes by then."""
    rng = np.random.default_rng(rows)
    first, hours = rng.uniform(0.05, 0.3, rows), rng.uniform(1, 3, rows)
    true = 1 / (1 + (1 / first - 1) * np.exp(-rate * hours))
    return {"first": first, "hours": hours, "last": true + 0.05 * rng.normal(size=rows)}


def build(data: dict[str, np.ndarray]) -> pm.Model:
    """Return the model: plain PyMC."""
    with pm.Model() as model:
        first, hours, last = (pm.Data(name, values) for name, values in data.items())
        rate = pm.LogNormal("rate", 0, 1)
        noise = pm.HalfNormal("noise", 1)
        pm.StudentT("weight", nu=5, mu=grown(first, hours, rate), sigma=noise, observed=last)
    return model


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="processes (default: one for each core)")
    parser.add_argument("--rows", type=int, default=20_000, help="(default: %(default)s)")
    options = parser.parse_args()

    n = synk.fork(options.ranks, use_gpu=False)
    parallel = data_parallel(build(weighed(options.rows, rate=0.9)))
    for rate, rows in ((0.9, options.rows), (0.6, options.rows // 2)):
        with parallel:
            pm.set_data(weighed(rows, rate))  # the ranks get the new rows with the next evaluation
            found = float(pm.find_MAP(progressbar=False)["rate"])
        print(f"{n} ranks, {rows} cultures: the rate is {found:.3f}, and was {rate}")
        assert abs(found - rate) < 0.02 + 2 / np.sqrt(rows)  # the method's own error, and the data's
    synk.close()


if __name__ == "__main__":
    main()
