"""PyMC models on all ranks equal the model in one process."""

import _thread
import contextlib
import copy
import importlib.util
import os
import queue
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ArviZ tells of its next version
    pm = pytest.importorskip("pymc", reason="the extra `pymc` is not installed")
import pytensor  # noqa: E402
import pytensor.sparse  # noqa: E402
import pytensor.tensor as pt  # noqa: E402
import scipy.sparse  # noqa: E402
from library import INTERPRETED, XLA, fork_ranks  # noqa: E402
from pymc_sampling import CallbackAfterDraws, build_small_model  # noqa: E402
from pytensor.compile.mode import Mode, predefined_modes  # noqa: E402
from pytensor.graph.replace import vectorize_graph  # noqa: E402

import synkhronos as synk  # noqa: E402
from synkhronos.extensions import sampler_threads  # noqa: E402
from synkhronos.extensions.pymc import data_parallel, data_parallel_model  # noqa: E402
from synkhronos.extensions.rows_sum import SumOverRows  # noqa: E402

N = 60
RNG = np.random.default_rng(3)
X, GROUP = RNG.normal(size=(N, 3)), RNG.integers(0, 4, N)
SUCCESS = RNG.integers(0, 2, N)
COUNTS = RNG.poisson(3, N)
MORE_ROWS = np.random.default_rng(4).normal(size=(2 * N, 3))
KIND, HOURS = RNG.integers(0, 3, N), RNG.uniform(0.5, 3, N)
COMPILE_KWARGS = {"mode": INTERPRETED}  # PyTensor's default mode is JAX when ranks are tested in JAX mode
PLAIN = Mode(linker="py", optimizer=None)  # rewrites would take most of a reference's time

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def compute_centers(a, b, x):
    return a[GROUP] + x @ b


#: Likelihoods: functions of each row's center and of a positive scale.
LIKELIHOODS = {
    "normal": lambda eta, s: pm.Normal("y", eta, s, observed=X[:, 0]),
    "two columns": lambda eta, s: pm.Normal("y", eta[:, None], s, observed=X[:, :2]),
    "student": lambda eta, s: pm.StudentT("y", nu=4, mu=eta, sigma=s, observed=X[:, 0]),
    "skewed": lambda eta, s: pm.AsymmetricLaplace("y", mu=eta, kappa=1 + s, b=s, observed=X[:, 0]),
    "gamma": lambda eta, s: pm.Gamma("y", mu=pt.exp(eta), sigma=s, observed=COUNTS + 0.5),
    "logistic": lambda eta, s: pm.Bernoulli("y", logit_p=eta, observed=SUCCESS),
    "binomial": lambda eta, s: pm.Binomial("y", n=GROUP + 1, logit_p=eta, observed=SUCCESS),
    "beta-binomial": lambda eta, s: pm.BetaBinomial("y", alpha=pt.exp(eta), beta=s, n=20, observed=COUNTS),
    "poisson": lambda eta, s: pm.Poisson("y", pt.exp(eta), observed=COUNTS),
    "negative binomial": lambda eta, s: pm.NegativeBinomial("y", mu=pt.exp(eta), alpha=s, observed=COUNTS),
    "inflated": lambda eta, s: pm.ZeroInflatedPoisson("y", psi=0.7, mu=pt.exp(eta), observed=COUNTS),
    "categories": lambda eta, s: pm.Categorical(
        "y", p=pt.special.softmax(eta[:, None] * pt.arange(4) * s, axis=-1), observed=GROUP
    ),
    "ordered": lambda eta, s: pm.OrderedLogistic("y", eta=eta, cutpoints=np.array([-1.0, 0.0, 1.0]), observed=GROUP),
    "multinomial": lambda eta, s: pm.Multinomial(
        "y", n=4, p=pt.special.softmax(eta[:, None] * pt.arange(2), axis=-1), observed=np.stack([GROUP, 4 - GROUP], 1)
    ),
    "multivariate": lambda eta, s: pm.MvNormal("y", mu=eta[:, None] * pt.ones(3), cov=np.eye(3), observed=X),
    "censored": lambda eta, s: pm.Censored("y", pm.Normal.dist(eta, s), None, 1.0, observed=np.minimum(X[:, 0], 1.0)),
    "truncated": lambda eta, s: pm.TruncatedNormal("y", mu=eta, sigma=s, lower=-5, observed=np.clip(X[:, 0], -4, 9)),
    "mixture": lambda eta, s: pm.NormalMixture(
        "y", w=np.array([0.3, 0.7]), mu=pt.stack([eta, -eta], axis=1), sigma=s, observed=X[:, 0]
    ),
    "one's own": lambda eta, s: pm.CustomDist(
        "y", eta, s, logp=lambda value, eta, s: -(((value - eta) / s) ** 2) - pt.log(s), observed=X[:, 0]
    ),
}


def build_hierarchical_model(likelihood="logistic", **data):
    """Return a model with groups and this likelihood."""
    with pm.Model() as model:
        x = pm.Data("x", X)
        overall, spread = pm.Normal("overall"), pm.HalfNormal("spread")
        a = pm.Normal("a", overall, spread, shape=4)
        b = pm.Normal("b", shape=3)
        scale = pm.HalfNormal("scale")
        LIKELIHOODS[likelihood](pm.Deterministic("eta", compute_centers(a, b, x)), scale)
    return model


def make_points(model, count=2):
    """Return points near the model's initial point."""
    rng = np.random.default_rng(4)
    start = model.initial_point()
    return [{k: v + 0.4 * rng.normal(size=np.shape(v)) for k, v in start.items()} for _ in range(count)]


def check_equal(parallel, model, **compile_kwargs):
    """Compare densities and gradients at some points."""
    kwargs = {**COMPILE_KWARGS, **compile_kwargs}
    for method in ("compile_logp", "compile_dlogp"):
        parallel_f, serial_f = getattr(parallel, method)(**kwargs), getattr(model, method)(mode=PLAIN)
        for point in make_points(model):
            expected = serial_f(point)
            assert np.all(np.isfinite(expected))
            np.testing.assert_allclose(parallel_f(point), expected, rtol=1e-9, atol=1e-9)


def list_names(variables):
    return [variable.name for variable in variables]


def list_rank_inputs(parallel):
    """Return the inputs that the ranks receive at each evaluation."""
    return [param for node in list_nodes(parallel.logp()) if isinstance(node.op, SumOverRows) for param in node.inputs]


def list_nodes(variable):
    return list(pytensor.graph.traversal.applys_between([], [variable]))


# -- split variables ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_data_parallel_logp_and_dlogp_match_the_serial_model(two_ranks_per_test, likelihood):
    model = build_hierarchical_model(likelihood)
    parallel = data_parallel(model)
    assert list_names(parallel.split_RVs) == ["y"] and not parallel.reasons
    check_equal(parallel, model)
    for param in list_rank_inputs(parallel):
        assert N not in param.type.shape and param.name != "eta"


def test_gradient_far_from_the_data_matches_pymc(two_ranks_per_test):
    model = build_hierarchical_model("negative binomial")
    parallel_f, serial_f = (variant.compile_dlogp(**COMPILE_KWARGS) for variant in (data_parallel(model), model))
    rng = np.random.default_rng(7)
    for _ in range(4):
        point = {name: value + 10 * rng.normal(size=np.shape(value)) for name, value in model.initial_point().items()}
        np.testing.assert_allclose(parallel_f(point), serial_f(point), rtol=1e-9)


@pytest.mark.new_ranks
@pytest.mark.skipif(XLA, reason="sets the rewrites of a mode without a compiler")
def test_gradient_of_underflowing_terms_is_finite(fork, monkeypatch):
    """PyTensor's rewrites cancel such terms, or not, depending on the order of the parameters."""
    monkeypatch.setattr(pytensor.config, "mode", INTERPRETED)
    fork(2)
    with pm.Model() as model:
        b, sigma = pm.Normal("b", shape=3), pm.HalfNormal("sigma")
        pm.Rice("y", sigma=HOURS * sigma, nu=pt.softplus(X @ b), observed=COUNTS + 0.5)
    parallel_f, serial_f = (variant.compile_dlogp(**COMPILE_KWARGS) for variant in (data_parallel(model), model))
    point = {"b": np.array([-3.0, 1.0, 2.0]), "sigma_log__": np.array(-6.0)}
    assert np.all(np.isfinite(serial_f(point)))
    np.testing.assert_allclose(parallel_f(point), serial_f(point))


@pytest.mark.new_ranks
@pytest.mark.skipif(XLA, reason="sets the rewrites of a mode without a compiler")
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_gradient_at_a_bound_matches_pymc_with_data(fork, monkeypatch, value):
    """PyTensor rewrites with the values of arrays, but not of `pm.Data`: PyMC's gradients at a bound differ."""
    monkeypatch.setattr(pytensor.config, "mode", INTERPRETED)
    fork(2)
    with pm.Model() as model:
        outcomes, group = pm.Data("outcomes", SUCCESS), pm.Data("group", GROUP)
        p = pm.Flat("p", shape=5)
        pm.Bernoulli("y", p[group], observed=outcomes)
        pm.Binomial("z", pm.Data("n", GROUP + 1), p[4] * pm.Data("ones", np.ones(N)), observed=outcomes)
    point = {"p": np.array([value, 0.5, value, value, value])}
    parallel_gradient, serial_gradient = (
        variant.compile_dlogp(**COMPILE_KWARGS)(point) for variant in (data_parallel(model), model)
    )
    assert not np.isfinite(serial_gradient).all()
    np.testing.assert_allclose(parallel_gradient, serial_gradient)


def get_builder_name(build):
    return build.__name__.removeprefix("build_")


def build_probability_of_zero():
    pm.Categorical("y", p=pm.Dirichlet("p", np.ones(4)), observed=GROUP)
    return [-400.0, 400.0, 0.0]


def build_tail_of_zero():
    pm.SkewNormal("y", mu=X @ pm.Normal("b", shape=3), sigma=pm.HalfNormal("s"), alpha=2, observed=X[:, 0])
    return [30.0, 50.0, 90.0, 0.0]


@pytest.mark.new_ranks
@pytest.mark.skipif(XLA, reason="sets the rewrites of a mode without a compiler")
@pytest.mark.parametrize("build", [build_probability_of_zero, build_tail_of_zero], ids=get_builder_name)
def test_rewrites_of_parameters_match_pymc(fork, monkeypatch, build):
    """From a parameter alone, without its formula, rewrites could not make a result finite."""
    if build is build_probability_of_zero and pm.__version__ >= "6":
        pytest.skip("PyMC 6 needs the prior in the same function: its density of the data alone is minus infinity")
    monkeypatch.setitem(predefined_modes, INTERPRETED, Mode("py", "fast_run"))
    monkeypatch.setattr(pytensor.config, "mode", INTERPRETED)
    fork(2)
    with pm.Model() as model:
        point = build()
    results = []
    for variant in (data_parallel(model), model):
        function = variant.logp_dlogp_function(ravel_inputs=True, **COMPILE_KWARGS)
        function.set_extra_values({})
        results.append(function(np.array(point)))
    for parallel_value, serial_value in zip(*results, strict=True):
        assert not np.any(np.isnan(serial_value))
        np.testing.assert_allclose(parallel_value, serial_value)


@pytest.mark.parametrize("is_mixture", [True, False])
def test_check_that_fails_for_one_row_fails_for_all_rows(two_ranks_per_test, is_mixture):
    """The other component of the mixture has a density.  Without it, rows of the other rank are nan."""
    with pm.Model() as model:
        slope = pm.Normal("slope")
        sigma = 1 - slope * np.linspace(0, 1, N)
        if is_mixture:
            component = pm.Normal.dist(slope, sigma)
            pm.Mixture("y", w=[0.5, 0.5], comp_dists=[pm.Normal.dist(0, 1), component], observed=X[:, 0])
        else:
            pm.Normal("y", pt.sqrt(slope * np.linspace(-1, 1, N)), sigma, observed=X[:, 0])
    parallel, point = data_parallel(model), {"slope": np.array(1.5)}
    for method in ("compile_logp", "compile_dlogp"):
        parallel_value, serial_value = (
            getattr(variant, method)(**COMPILE_KWARGS)(point) for variant in (parallel, model)
        )
        assert not is_mixture or np.all(np.isfinite(serial_value))
        np.testing.assert_allclose(parallel_value, serial_value)


def test_gradient_uses_the_density_rewritten_by_pymc(two_ranks_per_test, monkeypatch):
    """PyMC 6.4 rewrites the graphs of loops and of functions within a density, too."""
    monkeypatch.setattr(data_parallel_model, "rewrite_pregrad", lambda total: 2 * total)
    model = build_small_model(X)
    parallel_f, serial_f = (variant.compile_dlogp(**COMPILE_KWARGS) for variant in (data_parallel(model), model))
    point = make_points(model)[0]
    prior = -point["b"]
    np.testing.assert_allclose(parallel_f(point) - prior, 2 * (serial_f(point) - prior))


@pytest.mark.parametrize("mode", ["CVM", "NUMBA"])
def test_data_parallel_compiles_like_pymc(compiler, two_ranks_per_test, mode):
    with pm.Model() as model:
        b = pm.Normal("b", shape=3)
        pm.Normal("y", X @ b, pm.HalfNormal("s"), observed=X[:, 0])
    check_equal(data_parallel(model), model, mode=mode)


def test_data_parallel_leaves_the_model_unchanged(two_ranks_per_test):
    model = build_hierarchical_model()
    before = {name: list(getattr(model, name)) for name in ("free_RVs", "observed_RVs", "potentials", "deterministics")}
    parallel = data_parallel(model)
    for name, variables in before.items():
        assert getattr(model, name) == getattr(parallel, name) == variables
    assert not any(isinstance(node.op, SumOverRows) for node in list_nodes(model.logp()))


def test_data_parallel_sends_an_array_once(two_ranks_per_test):
    with pm.Model() as model:
        a, b = pm.Normal("a", shape=4), pm.Normal("b", shape=4)
        pm.Normal("y", a[GROUP] + b[GROUP] * HOURS + HOURS ** a[0] + X @ b[:3] + (X @ a[:3])[:], observed=X[:, 0])
    parallel = data_parallel(model)
    (rows,) = parallel.distributed_sums
    assert len(rows.make_local_graph()[2]) == 4  # groups, hours, a matrix and its column
    check_equal(parallel, model)


def test_index_of_the_only_row_is_a_constant(two_ranks_per_test):
    """Numba refuses to broadcast an index whose length of 1 it does not know, in the gradient of common probabilities."""
    with pm.Model() as model:
        p = pm.Uniform("p")
        pm.Categorical("y", p=pt.stack([p, 1 - p]), observed=SUCCESS)
    parallel = data_parallel(model)
    assert all(param.type.ndim == 0 for param in list_rank_inputs(parallel))
    check_equal(parallel, model)


def test_data_parallel_splits_several_observed_variables(two_ranks_per_test):
    with pm.Model() as model:
        b = pm.Normal("b", shape=3)
        pm.Normal("y", X @ b, 1, observed=X[:, 0])
        pm.Poisson("z", pt.exp(b[0]), observed=COUNTS[:7])
    parallel = data_parallel(model)
    assert list_names(parallel.split_RVs) == ["y", "z"]
    check_equal(parallel, model)


def build_varying_slopes():
    chol, _, _ = pm.LKJCholeskyCov("chol", n=3, eta=2, sd_dist=pm.Exponential.dist(1.0))
    slopes = chol @ pm.Normal("z", shape=(3, 4))
    pm.Normal("y", (slopes[:, GROUP] * X.T).sum(axis=0), 1, observed=X[:, 0])


def build_ordered_regression():
    """Add an ordered logistic regression whose cutpoints are unknown."""
    transform = pm.distributions.transforms.ordered
    cuts = pm.Normal("cuts", shape=2, sigma=3, transform=transform, initval=[-0.5, 0.7])
    pm.OrderedLogistic("y", cutpoints=cuts, eta=X @ pm.Normal("b", shape=3), observed=GROUP % 3)


def build_imputed_regression():
    """Add a regression whose missing observations PyMC imputes."""
    missing = np.ma.masked_where(np.arange(N) % 9 == 0, X[:, 0])
    pm.Normal("y", X @ pm.Normal("b", shape=3), pm.HalfNormal("s"), observed=missing)


def build_imputed_predictor():
    column = pm.Normal("column", pm.Normal("mean"), 1, observed=np.ma.masked_where(np.arange(N) % 9 == 0, X[:, 0]))
    pm.Normal("y", pm.Normal("a") + pm.Normal("b") * column, pm.HalfNormal("s"), observed=X[:, 1])


def build_sparse_design():
    design = scipy.sparse.csr_matrix((X > 0) * X)
    effects = pytensor.sparse.structured_dot(design, pm.Normal("b", shape=3)[:, None])[:, 0]
    pm.Bernoulli("y", logit_p=effects, observed=SUCCESS)


def build_observed_in_others():
    b = pm.Normal("b", shape=3)
    first = pm.Normal("first", X @ b, 1, observed=X[:, 0])
    pm.Normal("y", first * b[0], 1, observed=X[:, 1])
    pm.Deterministic("residual", first - X @ b)


def build_model_within_another():
    with pm.Model("within"):
        s = pm.HalfNormal("s")
    pm.StudentT("y", nu=4, mu=X @ pm.Normal("b", shape=3), sigma=s, observed=X[:, 0])


def build_rows_of_vectors():
    p = pm.math.softmax(X @ pm.Normal("b", shape=(3, 2)), axis=-1)
    pm.DirichletMultinomial("y", n=4, a=p, observed=np.stack([GROUP, 4 - GROUP], 1))


def build_series_side_by_side():
    s = pm.HalfNormal("s")
    pm.AR("y", rho=[0.1], sigma=s, init_dist=pm.Normal.dist(shape=(6, 1)), observed=X[:, 0].reshape(6, 10))


def build_part_of_the_rows():
    center = pm.Deterministic("center", X @ pm.Normal("b", shape=3))
    pm.Normal("y", center[np.arange(0, N, 2)], 1, observed=X[::2, 0])


def build_several_groupings_of_data():
    pm.modelcontext(None).add_coords({"row": np.arange(N), "group": list("abcd"), "kind": list("vwx")})
    group, kind = pm.Data("group_of", GROUP, dims="row"), pm.Data("kind_of", KIND, dims="row")
    x = pm.Data("x", X, dims=("row", "column"))
    a, b = pm.Normal("a", dims="group"), pm.ZeroSumNormal("b", dims="kind")
    group_and_kind = pm.Normal("group_and_kind", dims=("group", "kind"))
    eta = a[group] + b[kind] + pm.HalfNormal("s") * group_and_kind[group, kind] + x @ pm.Normal("slopes", shape=3)
    p = pm.Deterministic("p", pm.math.invlogit(eta), dims="row")
    pm.Bernoulli("y", p=p, observed=pm.Data("observed", SUCCESS, dims="row"), dims="row")


def build_counts_with_offset():
    mu = pm.math.exp(pm.Data("log_hours", np.log(HOURS)) + X @ pm.Normal("b", shape=3))
    pm.NegativeBinomial("y", mu=mu, alpha=pm.Exponential("alpha", 1), observed=COUNTS)
    pm.Truncated("t", pm.Poisson.dist(mu), lower=1, observed=COUNTS + 1)


def build_survival_regression():
    """Add a regression of survival times, with the censored ones in a potential and in a censored variable."""
    scale, shape = pm.math.exp(X @ pm.Normal("b", shape=3)), pm.HalfNormal("shape")
    died = SUCCESS > 0
    pm.Weibull("died", shape, scale[died], observed=HOURS[died])
    pm.Potential("alive", -((HOURS[~died] / scale[~died]) ** shape))
    pm.Potential("again", pm.logp(pm.Weibull.dist(shape, scale), HOURS).sum())
    pm.Censored("y", pm.Weibull.dist(shape, scale), None, np.where(died, np.inf, HOURS), observed=HOURS)
    pm.Potential("prior", -(shape**2))  # depends on parameters only


def build_softmax_with_a_reference():
    b = pm.Normal("b", shape=(3, 3))
    pm.Categorical("y", logit_p=pt.concatenate([pt.zeros((N, 1)), X @ b], axis=1), observed=GROUP)


def build_smooth_by_basis():
    cov = pm.HalfNormal("size") ** 2 * pm.gp.cov.Matern52(1, ls=pm.LogNormal("length"))
    pm.Normal("y", pm.gp.HSGP(m=[5], L=[4.0], cov_func=cov).prior("f", X=X[:, :1]), 1, observed=X[:, 1])


def build_mixture_of_regressions():
    weights = pm.math.softmax(X @ pm.Normal("w", shape=(3, 2)), axis=-1)
    parts = [pm.Normal.dist(X @ pm.Normal("b", shape=3), 1), pm.StudentT.dist(nu=3, mu=0, sigma=pm.HalfNormal("s"))]
    pm.Mixture("y", w=weights, comp_dists=parts, observed=X[:, 0])


def build_rows_of_correlated_columns():
    chol = pt.diag(pm.HalfNormal("s", shape=3)) + np.tril(np.ones((3, 3)), -1)
    pm.MvNormal("y", mu=X[:, ::-1] @ pm.Normal("b", shape=(3, 3)), chol=chol, observed=X)


def build_slices_of_rows():
    eta, rho = X @ pm.Normal("b", shape=3), pm.Normal("rho")
    pm.Normal("first", eta[:20], 1, observed=X[:20, 0])
    pm.Normal("rest", eta[20:], 2, observed=X[20:, 0])
    pm.Normal("next", eta[1:] + rho * X[:-1, 0], 1, observed=X[1:, 0])


def build_rows_picked_twice():
    longer = pm.Data("longer", MORE_ROWS)
    first, second = np.arange(2 * N)[::-2], np.arange(N)[::-1]
    b = pm.Normal("b", shape=3)
    pm.Normal("constant", (MORE_ROWS @ b)[first][second], 1, observed=X[:, 0])
    pm.Normal("data", (longer @ b)[first][5:], 1, observed=X[5:, 0])
    picked = pm.Normal("x", 0, 1, observed=np.ma.masked_where(np.arange(N) % 9 == 0, X[:, 0]))
    pm.Normal("y", b[GROUP - 1] * picked[second], 1, observed=X[:, 1])


def build_missing_beside_data():
    """Add rows of data that an index picks, and missing observations."""
    missing = np.ma.masked_where(np.arange(N) % 9 == 0, X[:, 0])
    eta = pm.Data("longer", MORE_ROWS) @ pm.Normal("b", shape=3)
    pm.Normal("y", eta[np.arange(2 * N)[::-2]] + pm.Data("offset", HOURS), pm.HalfNormal("s"), observed=missing)


def build_numbers_from_sums():
    b, weight = pm.Normal("b", shape=3), pm.HalfNormal("weight")
    squares = (HOURS - X @ b) ** 2
    pm.Potential("weighted", -weight * squares.sum())
    pm.Potential("mean", -N * squares.mean())
    pm.Potential("profile", -N / 2 * pt.log(squares.sum()))
    counts = pm.logp(pm.Poisson.dist(pm.math.exp(b[0])), COUNTS[:40])
    pm.Potential("several", 2 * pm.logp(pm.Normal.dist(X @ b), HOURS).sum() + counts.sum() / 3 - (b**2).sum())


def build_constant_trials():
    """Add a likelihood whose check of a constant reads rows that no term needs: PyTensor folds their terms."""
    pm.Binomial("y", n=GROUP + 3, logit_p=pm.Normal("a"), observed=GROUP)


def marginalize(build_terms):
    """Return the log-density of rows, marginalized over three categories, as pymc-extras' `marginalize` computes it."""
    k = pt.tensor("k", dtype="int64", shape=(N,))
    categories = pt.alloc(np.arange(3), N, 3).T
    return pt.logsumexp(vectorize_graph(build_terms(k), {k: categories}), axis=0)


def build_marginalized_categories():
    mu, w, s = pm.Normal("mu", shape=3), pm.Dirichlet("w", np.ones(3)), pm.HalfNormal("s", shape=3)
    p = pm.math.softmax(X @ pm.Normal("b", shape=(3, 3)), axis=-1)
    for name, weights in (("same", w), ("of each row", p)):
        terms = marginalize(
            lambda k, w=weights: pm.logp(pm.Normal.dist(mu[k], s[k]), X[:, 0]) + pm.logp(pm.Categorical.dist(w), k)
        )
        pm.Potential(name, terms)


def build_marginalized_twice():
    mu, effect, w = pm.Normal("mu", shape=3), pm.Normal("effect", shape=2), pm.Dirichlet("w", np.ones(2))

    def marginalize_inner(k):
        terms = pm.logp(pm.Normal.dist(mu[k] + effect[:, None]), X[:, 0])
        return pt.logsumexp(pt.alloc(terms, terms.shape[0], N) + pt.log(w)[:, None], axis=0)

    pm.Potential("y", marginalize(marginalize_inner))


MODELS = [
    build_rows_picked_twice,
    build_missing_beside_data,
    build_constant_trials,
    build_marginalized_categories,
    build_marginalized_twice,
    build_several_groupings_of_data,
    build_counts_with_offset,
    build_survival_regression,
    build_softmax_with_a_reference,
    build_smooth_by_basis,
    build_mixture_of_regressions,
    build_rows_of_correlated_columns,
    build_slices_of_rows,
    build_varying_slopes,
    build_ordered_regression,
    build_imputed_regression,
    build_imputed_predictor,
    build_sparse_design,
    build_observed_in_others,
    build_model_within_another,
    build_rows_of_vectors,
    build_series_side_by_side,
    build_part_of_the_rows,
    build_numbers_from_sums,
]


@pytest.mark.filterwarnings("ignore:Data in .* contains missing values")
@pytest.mark.parametrize("build", MODELS, ids=get_builder_name)
def test_data_parallel_splits_documented_models(two_ranks_per_test, build):
    with pm.Model() as model:
        build()
    parallel = data_parallel(model)
    assert not parallel.reasons
    check_equal(parallel, model)
    assert set(parallel.split_RVs) == {*model.observed_RVs, *model.potentials} - {model.named_vars.get("prior")}
    for param in list_rank_inputs(parallel):
        assert not {N, N // 2, 2 * N, (np.arange(N) % 9 != 0).sum()} & set(param.type.shape)


def test_data_parallel_model_copy_has_its_own_data(two_ranks_per_test):
    with pm.Model() as model:
        x = pm.Data("x", X)
        pm.Normal("y", x @ pm.Normal("b", shape=3), 1, observed=X[:, 0])
    parallel = data_parallel(model)
    for copied in (parallel.copy(), copy.copy(parallel), copy.deepcopy(parallel)):
        assert list_names(copied.split_RVs) == ["y"]
        with copied:
            pm.set_data({"x": X + 1})
        check_equal(parallel, model)
        assert copied.compile_logp(**COMPILE_KWARGS)(make_points(model)[0]) != model.compile_logp(**COMPILE_KWARGS)(
            make_points(model)[0]
        )


def test_data_parallel_model_is_picklable(two_ranks_per_test):
    cloudpickle = pytest.importorskip("cloudpickle")
    model = build_small_model(X)
    parallel = data_parallel(model)
    check_equal(cloudpickle.loads(cloudpickle.dumps(parallel)), model)


def test_logp_out_of_bounds_is_minus_infinity(two_ranks_per_test):
    with pm.Model() as model:
        s = pm.Flat("s")
        pm.Normal("y", X[:, 1], s * X[:, 2] ** 2, observed=X[:, 0])
    parallel = data_parallel(model)
    density = parallel.compile_logp(**COMPILE_KWARGS)
    assert density({"s": -1.0}) == -np.inf
    np.testing.assert_allclose(density({"s": 1.0}), model.compile_logp(**COMPILE_KWARGS)({"s": 1.0}))
    model.check_bounds = False
    assert np.isnan(data_parallel(model).compile_logp(**COMPILE_KWARGS)({"s": -1.0}))


@pytest.mark.parametrize("is_first_rank", [True, False])
def test_check_that_raises_names_the_check_for_rows_of_any_rank(two_ranks_per_test, is_first_rank):
    """PyMC raises an error for bounds that exclude each other, rather than return minus infinity."""
    sign = 1 if is_first_rank else -1
    results = []
    for check_bounds in (True, False):
        with pm.Model(check_bounds=check_bounds) as model:
            upper = 1 + sign * pm.Flat("slope") * np.linspace(-1, 1, N)
            pm.Censored("y", pm.Normal.dist(), -1, upper, observed=np.zeros(N))
        for variant in (data_parallel(model), model):
            with variant:  # PyMC asks the model of the context whether to check
                function = variant.logp_dlogp_function(ravel_inputs=True, **COMPILE_KWARGS)
            function.set_extra_values({})
            if check_bounds:
                with pytest.raises(pm.logprob.utils.ParameterValueError, match="lower_bound <= upper_bound"):
                    function(np.array([4.0]))
            results.append(function(np.array([0.5 if check_bounds else 4.0]))[0])
    np.testing.assert_allclose(results[::2], results[1::2])


def test_gradient_out_of_bounds_matches_pymc(two_ranks_per_test):
    """PyMC checks parameters for the density, but not for its gradient."""
    with pm.Model() as model:
        s = pm.Flat("s")
        pm.Normal("y", X[:, 1], s * X[:, 2] ** 2, observed=X[:, 0])
    for value in (-1.0, 1.0):
        parallel_gradient, serial_gradient = (
            variant.compile_dlogp(**COMPILE_KWARGS)({"s": value}) for variant in (data_parallel(model), model)
        )
        assert np.all(serial_gradient != 0)
        np.testing.assert_allclose(parallel_gradient, serial_gradient)


def test_data_parallel_names_unsplittable_terms(two_ranks_per_test):
    with pm.Model() as model:
        b = pm.Normal("b", shape=3)
        effect = pm.Normal("effect", shape=N)
        pm.Normal("y", X @ b, 1, observed=X[:, 0])
        pm.GaussianRandomWalk("walk", mu=b[0], init_dist=pm.Normal.dist(), observed=X[:, 1])
        pm.Normal("latent", effect, 1, observed=X[:, 2])
        pm.Normal("single", b[0], 1, observed=1.5)
        pm.Potential("curve", -pt.max((X @ b) ** 2))
        pm.Potential("prior", -(b**2))
        pm.Potential("count", -pt.gt(X[:, 0], b[0]).sum())
        pm.Potential("steps", pt.switch(pt.gt(X[:, 0], b[0]), 0, -1))
    with pytest.warns(UserWarning) as caught:
        parallel = data_parallel(model)
    messages = [str(warning.message) for warning in caught if "not split" in str(warning.message)]
    assert len(messages) == 6
    assert re.search("walk is not split by rows, and is computed by this process alone: .* rows", messages[0])
    assert "latent is not" in messages[1] and "'effect' has an element for each row, but is not data" in messages[1]
    assert "single is not" in messages[2] and "the log-density has shape (), and so no rows to share out" in messages[2]
    assert "curve is not" in messages[3] and "one number, and not computed from sums" in messages[3]
    assert "count is not" in messages[4] and "its terms are of dtype bool" in messages[4]
    assert "steps is not" in messages[5] and "its terms are of dtype int8" in messages[5]
    assert list_names(parallel.split_RVs) == ["y"]
    assert list(parallel.reasons) == ["walk", "latent", "single", "curve", "count", "steps"]
    check_equal(parallel, model)


@pytest.mark.filterwarnings("ignore:Data in .* contains missing values")
def test_reason_of_observed_rows_names_what_prevents_a_split():
    with pm.Model() as model:
        pm.Normal("y", pm.Normal("effect", shape=N), 1, observed=np.ma.masked_where(np.arange(N) % 9 == 0, X[:, 0]))
    with pytest.raises(ValueError, match="'effect' has an element for each row, but is not data"):
        data_parallel(model)


def test_data_parallel_splits_joined_blocks_of_rows(two_ranks_per_test):
    """A block of one row, of columns, and of parameters' rows; their order is another one in the observed rows."""
    with pm.Model() as model:
        slopes = pm.Normal("slopes", shape=3)
        center = pt.concatenate([[0.5], pm.Normal("a")[None] * HOURS[1:9], slopes[GROUP[9:] % 3] + X[9:] @ slopes])
        scale = pt.concatenate([pt.full(9, pm.HalfNormal("s")), pt.exp(HOURS[9:] * slopes[0])])
        pm.Normal("y", center[np.argsort(HOURS)], scale, observed=X[:, 0])
        pm.MvNormal("z", pt.concatenate([slopes * X[:20], X[20:]]), np.eye(3), observed=X[::-1])
    check_equal(data_parallel(model), model)


def test_data_parallel_refuses_joined_blocks_whose_lengths_may_change():
    with pm.Model() as model:
        hours = pm.Data("hours", HOURS)
        center = pt.concatenate([pm.Normal("a") * hours[:9], pm.Normal("b") * hours[9:]])
        pm.Normal("y", center, 1, observed=X[:, 0])
    with pytest.raises(ValueError, match="split by rows: y: Join.* mixes rows"):
        data_parallel(model)


def test_data_parallel_refuses_a_series():
    with pm.Model() as model:
        levels = pytensor.scan(
            lambda x, h, rho: rho * h + x,
            sequences=[pt.as_tensor(X[:, 1])],
            outputs_info=[pt.constant(0.0, dtype="float64")],
            non_sequences=[pm.Normal("rho")],
            return_updates=False,
        )
        pm.Normal("y", levels, 1, observed=X[:, 0])
    with pytest.raises(ValueError, match=r"split by rows: y: .*Scan\{.* mixes rows: a row depends on the rows before"):
        data_parallel(model)


@pytest.mark.filterwarnings("ignore:The `pymc.dims` module is experimental")
def test_data_parallel_refuses_variables_of_pymc_dims():
    import pymc.dims as pmd

    with pm.Model(coords={"row": range(N)}) as model:
        pmd.Normal("y", pmd.Normal("a"), 1, observed=pmd.Data("data", X[:, 0], dims="row"))
    with pytest.raises(
        ValueError, match="split by rows: y: it is a variable of pymc.dims; use the distributions of pymc"
    ):
        data_parallel(model)


def test_data_parallel_refuses_a_series_of_vectors():
    with pm.Model() as model:
        levels = pytensor.scan(
            lambda x, h, rho: rho * h + x,
            sequences=[pt.as_tensor(X)],
            outputs_info=[pt.zeros(3)],
            non_sequences=[pm.Normal("rho")],
            return_updates=False,
        )
        pm.MvNormal("y", levels, np.eye(3), observed=X)
    with pytest.raises(ValueError, match=r"split by rows: y: .*Scan\{.* mixes rows: a row depends on the rows before"):
        data_parallel(model)


def test_reasons_of_loops_are_those_of_each_axis():
    with pm.Model() as model:
        variances = pytensor.scan(
            lambda x, v, a: 1 + a * x**2 + a * pt.sort(v),
            sequences=[pm.Data("returns", X)],
            outputs_info=[pt.ones(3)],
            non_sequences=[pm.Beta("a", 2, 5)],
            return_updates=False,
        )
        pm.Normal("y", 0, pt.sqrt(variances), observed=X)
    with pytest.raises(
        ValueError, match="a row depends on the rows before; along axis 1: .*not known to work row by row"
    ):
        data_parallel(model)


def build_variances_side_by_side():
    """Add a GARCH process of each column of data that may change."""
    variances = pytensor.scan(
        lambda x, v, a: 1 + a * x**2 + a * v,
        sequences=[pm.Data("returns", X.T)],
        outputs_info=[pt.ones(N)],
        non_sequences=[pm.Beta("a", 2, 5)],
        return_updates=False,
    )
    pm.Normal("y", 0, pt.sqrt(variances), observed=X.T)


def build_autoregression_of_each_row():
    series = pm.Data("series", X)
    rho, scale = pm.Uniform("rho", -1, 1), pm.HalfNormal("scale")
    levels = pytensor.scan(
        lambda x, h, rho: rho * h + x,
        sequences=[series.T],
        outputs_info=[pt.zeros_like(series[:, 0])],
        non_sequences=[rho],
        return_updates=False,
    )
    pm.Normal("y", levels.T, scale, observed=RNG.normal(size=X.shape))


def build_learned_choices():
    """Add choices between two actions, whose values each row learns at a rate of its own."""
    actions, rewards = (X > 0).astype("int64"), (np.abs(X) > 0.5).astype("float64")
    rate = pm.Beta("rate", pm.Gamma("level", 2, 0.5), 2, shape=N)
    rows = pt.arange(N)

    def learn(action, reward, values, rate):
        error = reward - values[rows, action]
        return pt.set_subtensor(values[rows, action], values[rows, action] + rate * error)

    values = pytensor.scan(
        learn,
        sequences=[pt.as_tensor(actions.T[:-1]), pt.as_tensor(rewards.T[:-1])],
        outputs_info=[pt.full((N, 2), 0.5)],
        non_sequences=[rate],
        return_updates=False,
    )
    scores = values[:, :, 1] - values[:, :, 0]
    pm.Bernoulli("y", logit_p=pm.HalfNormal("sharpness") * scores.T, observed=actions[:, 1:])


def build_sum_of_each_row():
    totals, slopes = pytensor.scan(
        lambda x, hours, rho: [(rho * x).sum() * hours, x[1] - x[0]],
        sequences=[pm.Data("columns", X), pm.Data("hours", HOURS)],
        non_sequences=[pm.Normal("rho")],
        return_updates=False,
    )
    pm.Normal("y", totals + slopes, 1, observed=X[:, 1])


def build_series_as_columns():
    """Add an autoregression whose density PyMC derives from a scan; the rows are the columns, the times axis 0."""

    def simulate(rho, scale, size):
        def step(level, rho, scale):
            following = pm.Normal.dist(rho * level, scale)
            return following, pm.pytensorf.collect_default_updates([following])

        return pytensor.scan(step, outputs_info=[pt.zeros(N)], non_sequences=[rho, scale], n_steps=3)[0]

    pm.CustomDist("y", pm.Normal("rho", shape=N), pm.HalfNormal("scale"), dist=simulate, observed=X.T)


@pytest.mark.filterwarnings("ignore:Scan return signature")
@pytest.mark.parametrize(
    "n, build",
    [
        (1, build_sum_of_each_row),
        (2, build_autoregression_of_each_row),
        (2, build_variances_side_by_side),
        (3, build_series_as_columns),
        (4, build_learned_choices),
    ],
)
def test_data_parallel_splits_loops(fork, n, build):
    fork(n)
    with pm.Model() as model:
        build()
    check_equal(data_parallel(model), model)


@pytest.mark.skipif(XLA, reason="PyTensor's C++ compiler")
def test_data_parallel_splits_a_loop_compiled_as_c(compiler, two_ranks_per_test):
    with pm.Model() as model:
        build_sum_of_each_row()
    check_equal(data_parallel(model), model)


def test_data_parallel_refuses_random_rows():
    x, y = pm.Minibatch(X, X[:, 0], batch_size=5)
    with pm.Model() as model:
        pm.Normal("y", x @ pm.Normal("b", shape=3), 1, observed=y, total_size=N)
    with pytest.raises(ValueError, match="split by rows: y: pm.Minibatch draws other rows at each evaluation"):
        data_parallel(model)


def test_data_parallel_builds_a_model_of_bambi():
    class Model:
        built, backend = False, None

        def build(self):
            self.built, self.backend = True, types.SimpleNamespace(model=build_small_model(X))

    Model.__module__ = "bambi.models"
    bambi_model = Model()
    assert list_names(data_parallel(bambi_model).split_RVs) == ["y"]
    model = bambi_model.backend.model
    data_parallel(bambi_model)
    assert bambi_model.backend.model is model


@pytest.mark.parametrize("case", ["nothing", "no observed", "no model"])
def test_data_parallel_refuses_wrong_arguments(case):
    with pm.Model() as model:
        b = pm.Normal("b")
        if case == "nothing":
            pm.Normal("y", b, 1, observed=0.5)
    error, message = {
        "nothing": (
            ValueError,
            r"model: none of its variables can be split by rows: y: the log-density has shape \(\)",
        ),
        "no observed": (ValueError, "model: it has no observed variables, nor potentials that are computed from data"),
        "no model": (TypeError, "model: expected a pymc.Model, got 'y'"),
    }[case]
    with pytest.raises(error, match=message):
        data_parallel("y" if case == "no model" else model)


def test_set_data_reaches_the_ranks(two_ranks_per_test):
    with pm.Model() as model:
        x, y = pm.Data("x", X), pm.Data("observed", X[:, 0])
        b = pm.Normal("b", shape=3)
        pm.Normal("y", x @ b, 1, observed=y)
    parallel = data_parallel(model)
    check_equal(parallel, model)
    before = model.compile_logp(**COMPILE_KWARGS)(make_points(model)[0])
    with parallel:
        pm.set_data({"x": X[:21] + 1, "observed": X[:21, 1]})
    check_equal(parallel, model)
    assert abs(model.compile_logp(**COMPILE_KWARGS)(make_points(model)[0]) - before) > 1


@pytest.mark.parametrize("is_constant", [False, True])
def test_data_parallel_splits_sums_of_many_columns(two_ranks_per_test, is_constant):
    """PyTensor makes one addition of the columns, and in Python it evaluates at most 31 terms."""
    with pm.Model() as model:
        x = pt.constant(X) if is_constant else pm.Data("x", X)
        b = pm.Normal("b", shape=3)
        pm.Normal("y", b[0] * sum(pt.exp(x[:, i % 3] / (i + 2)) for i in range(40)), 1, observed=X[:, 0])
    with pytensor.config.change_flags(mode="NUMBA"):
        assert list_names(data_parallel(model).split_RVs) == ["y"]


def test_set_data_reaches_rows_that_an_index_picks(two_ranks_per_test):
    with pm.Model() as model:
        x, b = pm.Data("x", MORE_ROWS), pm.Normal("b", shape=3)
        pm.Normal("y", (x @ b)[np.arange(-1, -N - 1, -1)] + x[:N, 0] * b[0], 1, observed=X[:, 0])
    parallel, point = data_parallel(model), make_points(model)[0]
    parallel_f, serial_f = (variant.compile_logp(**COMPILE_KWARGS) for variant in (parallel, model))
    values = []
    for rows in (MORE_ROWS, MORE_ROWS + 1, MORE_ROWS[:-10]):
        with model:
            pm.set_data({"x": rows})
        values.append(serial_f(point))
        np.testing.assert_allclose(parallel_f(point), values[-1], rtol=1e-9)
    model["x"].get_value(borrow=True)[:] = 1  # without `pm.set_data`
    np.testing.assert_allclose(parallel_f(point), serial_f(point), rtol=1e-9)
    assert len(set(map(float, [*values, serial_f(point)]))) == 4


def test_set_data_reaches_functions_of_data(two_ranks_per_test):
    """They are computed when data are sent, and not by the ranks."""
    with pm.Model() as model:
        x, counts = pm.Data("x", X), pm.Data("counts", COUNTS)
        pm.Poisson("y", pt.exp((x - x.mean(axis=0)) / x.std(axis=0) @ pm.Normal("b", shape=3)), observed=counts)
    parallel = data_parallel(model)
    assert not {"Gammaln", "Sqrt"} & {str(node.op) for node in list_nodes(parallel.distributed_sums[0].total)}
    for n in (N, N - 10):
        with parallel:
            pm.set_data({"x": 2 * X[:n] ** 2, "counts": COUNTS[:n] + 1})
        check_equal(parallel, model)
    with model:
        pm.set_data({"counts": COUNTS})
    with pytest.raises(ValueError, match=f"same number of rows for each input, got .*'counts'.*: {N}"):
        parallel.compile_logp(**COMPILE_KWARGS)(make_points(model)[0])


@pytest.mark.parametrize("count", [0, 1])
def test_set_data_accepts_fewer_rows_than_ranks(two_ranks_per_test, count):
    """Without rows the density is the prior's."""
    with pm.Model() as model:
        x, y = pm.Data("x", X), pm.Data("observed", X[:, 0])
        b, s = pm.Normal("b", shape=3), pm.HalfNormal("s")
        pm.Normal("y", x @ b, s, observed=y)
    parallel = data_parallel(model)
    for n in (N, count, N):
        with parallel:
            pm.set_data({"x": X[:n], "observed": X[:n, 0]})
        check_equal(parallel, model)


def test_data_changed_in_place_reach_the_ranks(two_ranks_per_test):
    columns = X.copy()
    with pm.Model() as model:
        y = pm.Data("observed", X[:, 0])
        b = pm.Normal("b", shape=3)
        pm.Normal("y", columns @ b, 1, observed=y)
    parallel = data_parallel(model)
    parallel_f, serial_f, point = (
        parallel.compile_logp(**COMPILE_KWARGS),
        model.compile_logp(**COMPILE_KWARGS),
        make_points(model)[0],
    )
    values = []
    for memory in (np.empty(0), model["observed"].get_value(borrow=True), columns):  # the model shares the array
        memory[:] = 1
        values.append(serial_f(point))
        np.testing.assert_allclose(parallel_f(point), values[-1], rtol=1e-9)
    assert len(set(map(float, values))) == 3


# -- samplers ----------------------------------------------------------------------------------------------------


def sample(model, **kwargs):
    """Sample one chain in this process, in the mode of the other functions here."""
    settings = {"chains": 1, "cores": 1, "random_seed": 5, "progressbar": False, "compute_convergence_checks": False}
    with model:
        return pm.sample(**{**settings, **kwargs}, compile_kwargs=dict(COMPILE_KWARGS))  # a copy: PyMC 5 adds to it


def test_sample_repeats_from_its_seed(two_ranks_per_test):
    model = build_hierarchical_model()
    few = {"draws": 4, "tune": 4, "chains": 2, "discard_tuned_samples": False}
    parallel_draws, serial_draws = sample(data_parallel(model), **few), sample(model, **few)
    for name in ("overall", "spread", "a", "b", "eta"):
        # Rounding grows with each step of a trajectory.
        np.testing.assert_allclose(
            parallel_draws.posterior[name].values[:, :4], serial_draws.posterior[name].values[:, :4], rtol=1e-4
        )


def test_sample_finds_the_posterior(two_ranks_per_test):
    with pm.Model() as model:
        b = pm.Normal("b", shape=2)
        s = pm.HalfNormal("s")
        pm.Normal("y", X[:, :2] @ b, s, observed=X[:, :2] @ [1.0, -1.0] + X[:, 2])
    posteriors = [sample(variant, draws=150, tune=150, chains=2).posterior for variant in (data_parallel(model), model)]
    for name in ("b", "s"):
        parallel_draws, serial_draws = (posterior[name].values.reshape(2, 150, -1) for posterior in posteriors)
        sd = serial_draws.std(axis=(0, 1))
        # Means and standard deviations of 300 correlated draws have errors below a tenth of the sd.
        assert np.all(abs(parallel_draws.mean(axis=(0, 1)) - serial_draws.mean(axis=(0, 1))) < 0.4 * sd)
        assert np.all(abs(parallel_draws.std(axis=(0, 1)) / sd - 1) < 0.4)
        for chains in (parallel_draws, serial_draws):
            variance = chains.var(axis=1).mean(axis=0)
            between = chains.mean(axis=1).var(axis=0, ddof=1)
            assert np.all(np.sqrt(1 + between / variance) < 1.1)  # R-hat


@pytest.mark.skipif(XLA, reason="find_MAP takes PyTensor's default mode, which is JAX in these tests")
def test_find_map_and_advi_equal_one_process(two_ranks_per_test):
    model = build_small_model(X)
    parallel = data_parallel(model)
    points, losses = [], []
    for variant in (parallel, model):
        with variant:
            points.append(pm.find_MAP(progressbar=False))
            losses.append(pm.fit(20, random_seed=6, progressbar=False, compile_kwargs=dict(COMPILE_KWARGS)).hist)
    np.testing.assert_allclose(points[0]["b"], points[1]["b"], rtol=1e-5)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)


def test_sample_works_with_steps_without_gradients(two_ranks_per_test):
    model = build_hierarchical_model()
    parallel = data_parallel(model)
    draws = []
    for variant in (parallel, model):
        with variant:
            step = pm.Metropolis(compile_kwargs=dict(COMPILE_KWARGS))
        draws.append(sample(variant, step=step, draws=10, tune=0).posterior["b"].values)
    np.testing.assert_allclose(*draws)


def test_functions_other_than_logp_run_in_the_master(two_ranks_per_test):
    model = build_hierarchical_model("normal")
    parallel = data_parallel(model)
    drawn = sample(parallel, draws=3, tune=3)
    np.testing.assert_array_equal(drawn.observed_data["y"], X[:, 0])
    results = []
    synk.close()  # no ranks are needed
    for variant in (parallel, model):
        with variant:
            # A copy each time: PyMC 5 adds to it.
            drawn_again = pm.sample_posterior_predictive(
                drawn, random_seed=1, progressbar=False, compile_kwargs=dict(COMPILE_KWARGS)
            )
            predicted = drawn_again.posterior_predictive["y"]
            densities = pm.compute_log_likelihood(
                drawn, extend_inferencedata=False, progressbar=False, compile_kwargs=dict(COMPILE_KWARGS)
            )["y"]
        assert predicted.shape == densities.shape == (1, 3, N)
        results.append((predicted, densities))
    for parallel_value, serial_value in zip(*results, strict=True):
        np.testing.assert_array_equal(parallel_value, serial_value)


def test_logp_of_some_variables_matches_pymc(two_ranks_per_test):
    with pm.Model() as model:
        b = pm.Normal("b", shape=3)
        pm.Normal("y", X @ b, 1, observed=X[:, 0])
        pm.Normal("single", b[0], 1, observed=1.5)
        pm.Potential("bonus", b[1])
    with pytest.warns(UserWarning, match="single is not split"):
        parallel = data_parallel(model)
    point = make_points(model)[0]
    for chosen in ("y", "single", "b", "bonus", ["y"], ["y", "b"], ["bonus", "y", "single"], []):
        variables = model[chosen] if isinstance(chosen, str) else [model[name] for name in chosen]
        for total in (True, False):
            if not chosen and total:
                continue
            parallel_value, serial_value = (
                variant.compile_logp(variables, sum=total, **COMPILE_KWARGS)(point) for variant in (parallel, model)
            )
            for a, b in (
                zip(np.atleast_1d(parallel_value), np.atleast_1d(serial_value), strict=True)
                if total
                else zip(parallel_value, serial_value, strict=True)
            ):
                np.testing.assert_allclose(a, b)


# -- interrupts, deaths and other processes ----------------------------------------------------------------------


@pytest.mark.parametrize("when", ["between evaluations", "at any moment"])
def test_sample_returns_draws_after_an_interrupt(two_ranks_per_test, when):
    model = build_small_model(X)
    parallel = data_parallel(model)
    interrupt = lambda: os.kill(os.getpid(), signal.SIGINT)  # noqa: E731
    if when == "between evaluations":
        callback = CallbackAfterDraws(20, interrupt)
    else:
        callback = CallbackAfterDraws(20, lambda: threading.Timer(0.2, interrupt).start())
    drawn = sample(parallel, draws=100_000, tune=5, callback=callback)
    assert 10 <= drawn.posterior.sizes["draw"] < 100_000
    check_equal(parallel, model)


@pytest.mark.new_ranks
def test_sample_returns_draws_after_a_death_and_reports_it(fork):
    fork(2)
    model = build_small_model(X)
    parallel = data_parallel(model)
    (pid,) = synk.ranks.get_session().worker_pids.values()
    with pytest.warns(RuntimeWarning, match="stopped early, with the results so far: rank 1 .* SIGKILL"):
        drawn = sample(
            parallel, draws=100_000, tune=5, callback=CallbackAfterDraws(20, lambda: os.kill(pid, signal.SIGKILL))
        )
    assert 10 <= drawn.posterior.sizes["draw"] < 100_000
    with pytest.raises(RuntimeError, match="Call synkhronos.fork"):
        parallel.compile_logp(**COMPILE_KWARGS)(model.initial_point())
    fork_ranks(2)
    check_equal(parallel, model)


@pytest.mark.new_ranks
def test_death_interrupts_waiting_sampler_threads(fork):
    """nutpie waits for its threads, which Python has not started."""
    fork(2)
    parallel, waits, errors = data_parallel(build_small_model(X)), threading.Event(), []
    density, point = parallel.compile_logp(**COMPILE_KWARGS), parallel.initial_point()
    density(point)
    (pid,) = synk.ranks.get_session().worker_pids.values()

    def sampler():
        waits.wait()
        for shift in range(10**6):
            try:
                density({"b": point["b"] + shift})
            except BaseException as error:
                errors.append((time.monotonic(), error))
                if len(errors) == 2:
                    return

    with pytest.warns(RuntimeWarning) as caught:
        _thread.start_new_thread(sampler, ())
        with pytest.raises(KeyboardInterrupt):
            waits.set()
            time.sleep(0.1)
            os.kill(pid, signal.SIGKILL)
            for _ in range(200):
                time.sleep(0.05)
        interrupted = time.monotonic()
        while len(errors) < 2:
            time.sleep(0.05)
    # Only then is the sampler notified, while it is being stopped.
    assert interrupted < errors[0][0] and isinstance(errors[0][1], KeyboardInterrupt)
    assert isinstance(errors[1][1], RuntimeError) and "fork" in str(errors[1][1])
    messages = [str(warning.message) for warning in caught]
    assert any("stopped early, with the results so far: rank 1" in message for message in messages)
    assert any("no density: rank 1" in message and "Call synkhronos.fork" in message for message in messages)


@pytest.mark.skipif(not XLA, reason="needs PyTensor's JAX mode")
def test_ops_without_a_jax_version_are_named(two_ranks_per_test):
    with pm.Model() as model:
        shape = pm.HalfNormal("shape")
        pm.Truncated("y", pm.Gamma.dist(shape, 1), lower=0.1, observed=HOURS)
    with pytest.raises(NotImplementedError, match=r"(?s)y: .* ScalarLoop.* JAX .*fork\(use_gpu=False\)"):
        data_parallel(model).compile_dlogp(**COMPILE_KWARGS)(model.initial_point())


NUTPIE = pytest.mark.skipif(importlib.util.find_spec("nutpie") is None, reason="nutpie is not installed")


@NUTPIE
@pytest.mark.skipif(XLA, reason="nutpie compiles by Numba")
@pytest.mark.parametrize("cores", [1, 2])
def test_nutpie_sampler_equals_one_process(two_ranks_per_test, cores):
    import nutpie

    model = build_small_model(X)
    drawn = [
        nutpie.sample(
            nutpie.compile_pymc_model(variant), draws=20, tune=50, chains=2, cores=cores, seed=1, progress_bar=False
        )
        for variant in (data_parallel(model), model)
    ]
    np.testing.assert_allclose(*[result.posterior["b"].values[:, 0] for result in drawn], rtol=1e-3)


@NUTPIE
@pytest.mark.skipif(XLA, reason="nutpie compiles by Numba")
def test_nutpie_called_by_pymc_equals_one_process(two_ranks_per_test):
    """Each chain has ranks of its own."""
    drawn = []
    model = build_small_model(X)
    for variant in (data_parallel(model), model):
        with variant:
            drawn.append(
                pm.sample(
                    20, tune=50, chains=2, cores=2, random_seed=1, nuts_sampler="nutpie", progressbar=False,
                    compute_convergence_checks=False,
                )
            )  # fmt: skip
    np.testing.assert_allclose(*[result.posterior["b"].values[:, 0] for result in drawn], rtol=1e-3)


@NUTPIE
@pytest.mark.skipif(XLA, reason="nutpie compiles by Numba")
@pytest.mark.new_ranks
def test_nutpie_returns_draws_after_a_death(fork):
    import nutpie

    fork(2)
    compiled = nutpie.compile_pymc_model(data_parallel(build_small_model(X)))
    (pid,) = synk.ranks.get_session().worker_pids.values()
    with pytest.warns(RuntimeWarning, match="stopped early, with the results so far: rank 1 .* SIGKILL"):
        threading.Timer(5, lambda: os.kill(pid, signal.SIGKILL)).start()
        drawn = nutpie.sample(compiled, draws=1_000_000, tune=5, chains=2, cores=2, seed=1, progress_bar=False)
    assert 10 <= drawn.posterior.sizes["draw"] < 1_000_000
    # nutpie treats a failed evaluation as a divergence: chains end at the death.  Some earlier draws diverge, too.
    assert drawn.sample_stats["diverging"].values[:, -10:].sum() < 10


@pytest.mark.new_ranks
@pytest.mark.filterwarnings("ignore:stopped early", "ignore:no density")
def test_evaluations_after_a_death_wait_until_the_sampler_stops(fork, monkeypatch):
    """Otherwise nutpie's threads would record wrong draws, and a second interrupt would lose all draws."""
    fork(2)
    (rows,) = data_parallel(build_small_model(X)).distributed_sums
    rows.compute_value([np.zeros(3)])
    waits, interrupts, errors = [], [], queue.SimpleQueue()
    monkeypatch.setattr(sampler_threads, "time", types.SimpleNamespace(sleep=waits.append))
    monkeypatch.setattr(sampler_threads, "_thread", types.SimpleNamespace(interrupt_main=lambda: interrupts.append(1)))

    def evaluate():
        for number in range(3):
            try:
                rows.compute_value([np.full(3, 1.0 + number)])
            except BaseException as error:
                errors.put(error)

    (pid,) = synk.ranks.get_session().worker_pids.values()
    os.kill(pid, signal.SIGKILL)
    _thread.start_new_thread(evaluate, ())  # no Thread object exists, as for Rust's threads
    assert all("SIGKILL" in str(errors.get(timeout=60)) for _ in range(3))
    assert waits == [sampler_threads._STOP_SECONDS] * 3
    assert interrupts == [1]


@pytest.mark.filterwarnings("ignore:stopped early")
def test_threads_that_fail_at_once_interrupt_the_main_thread_once(monkeypatch):
    interrupts, errors, both_decided = [], queue.SimpleQueue(), threading.Barrier(2)

    def make_reference(failed):
        with contextlib.suppress(threading.BrokenBarrierError):
            both_decided.wait(timeout=0.5)
        return weakref.ref(failed)

    def fail():
        try:
            sampler_threads.stop_sampler(synk.WorkerError("rank 1 has exited", 1), failed)
        except BaseException as error:
            errors.put(error)

    failed = queue.Queue()  # any object that can be referenced weakly
    monkeypatch.setattr(sampler_threads, "_last_failed", None)
    monkeypatch.setattr(sampler_threads, "_STOP_SECONDS", 0)
    monkeypatch.setattr(sampler_threads, "weakref", types.SimpleNamespace(ref=make_reference))
    monkeypatch.setattr(sampler_threads, "_thread", types.SimpleNamespace(interrupt_main=lambda: interrupts.append(1)))
    for _ in range(2):
        _thread.start_new_thread(fail, ())
    for _ in range(2):
        assert isinstance(errors.get(timeout=60), sampler_threads.WorkerExitInterrupt)
    assert interrupts == [1]


@pytest.mark.parametrize("start", [pm.find_MAP, pm.fit, pm.sample, lambda model: model.logp()])
def test_data_parallel_needs_ranks(fork, start):
    """Samplers such as nutpie treat an error of an evaluation as a point without a density."""
    synk.close()
    parallel = data_parallel(build_small_model(X))
    with parallel, pytest.raises(RuntimeError, match=r"[Cc]all synkhronos.fork\(\)"):
        start(model=parallel)


def test_sample_in_other_processes_names_concurrent(two_ranks_per_test):
    """Without the error, pymc-extras would ask for a bug report."""
    pathfinder = {"__name__": "pymc_extras.inference.pathfinder.pathfinder"}
    exec("def fit_pathfinder(model, concurrent): return model.logp()", pathfinder)
    parallel = data_parallel(build_small_model(X))
    assert pathfinder["fit_pathfinder"](parallel, None).type.ndim == 0
    with pytest.raises(ValueError, match="^concurrent: .* pass concurrent=None"):
        pathfinder["fit_pathfinder"](parallel, "process")


def test_import_works_without_pymc():
    """Without PyMC, all other modules can be imported."""
    script = """
        import sys
        sys.modules["pymc"] = None
        import synkhronos.extensions.pymc, synkhronos.extensions.rows_sum, synkhronos.extensions.pymc.rowwise_rules
        try:
            synkhronos.extensions.pymc.data_parallel(None)
        except ImportError as error:
            print("needs", error.name)
    """
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", textwrap.dedent(script)]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100)
    assert result.stdout.strip() == "needs pymc", result.stderr
