"""Models of Bambi on all ranks have the density and the gradient of the model."""

import importlib.util
import warnings

import numpy as np
import pytest

if not importlib.util.find_spec("bambi"):
    pytest.skip("Bambi is not installed", allow_module_level=True)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ArviZ announces its next version
    bambi = pytest.importorskip("bambi")
from library import INTERPRETED, fork_ranks  # noqa: E402

import synkhronos as synk  # noqa: E402
from synkhronos.extensions.pymc import data_parallel  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
N = 60
RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.normal(size=N),
    "group": RNG.integers(0, 4, N).astype(str),
    "y": RNG.normal(size=N),
    "success": RNG.integers(0, 2, N),
    "count": np.minimum(RNG.poisson(3, N), 9),
    "trials": np.full(N, 9),
    "part": RNG.uniform(0.1, 0.9, N),
    "time": RNG.gamma(2, 1, N),
    "kind": RNG.integers(0, 3, N).astype(str),
}
MODELS = {
    "normal": ("y ~ x", {}),
    "varying slopes": ("y ~ x + (x|group)", {}),
    "interaction": ("y ~ x*C(group)", {}),
    "spline": ("y ~ bs(x, df=5)", {}),
    "student": ("y ~ x", {"family": "t"}),
    "logistic": ("success ~ x + (1|group)", {"family": "bernoulli"}),
    "binomial": ("p(count, trials) ~ x", {"family": "binomial"}),
    "poisson": ("count ~ x", {"family": "poisson"}),
    "negative binomial": ("count ~ x + (1|group)", {"family": "negativebinomial"}),
    "beta": ("part ~ x", {"family": "beta"}),
    "gamma": ("time ~ x", {"family": "gamma", "link": "log"}),
    "categories": ("kind ~ x", {"family": "categorical"}),
}


@pytest.fixture(scope="module", autouse=True)
def fork_two_ranks():
    fork_ranks(2)
    yield
    synk.close()


@pytest.mark.parametrize("name", MODELS)
def test_data_parallel_bambi_model_matches_the_serial_model(name):
    pandas = pytest.importorskip("pandas")
    formula, options = MODELS[name]
    built = bambi.Model(formula, pandas.DataFrame(DATA), **options)
    parallel = data_parallel(built)
    model = built.backend.model
    assert len(parallel.split_RVs) == 1 and not parallel.reasons
    point = model.initial_point()
    for compile_function in ("compile_logp", "compile_dlogp"):
        parallel_result, expected = (
            getattr(either_model, compile_function)(mode=INTERPRETED)(point) for either_model in (parallel, model)
        )
        np.testing.assert_allclose(parallel_result, expected, rtol=1e-9, atol=1e-9)
