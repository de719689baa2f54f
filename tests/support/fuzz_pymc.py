"""Compares random PyMC models on several ranks with PyMC alone: value, gradient, and log-likelihood of each row.

    python tests/support/fuzz_pymc.py --seed 0 --seconds 60

Each case draws a distribution, expressions of its arguments, missing values, censoring and so on, and points near and
far from the initial one.  Models that cannot be split are counted by their reasons.  Exits with 1 if a case differed.
"""

from __future__ import annotations

import argparse
import collections
import os
import pathlib
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("PYTENSOR_FLAGS", "mode=FAST_COMPILE,cxx=,traceback__limit=0")
sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[2]), str(pathlib.Path(__file__).resolve().parent)]

import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ArviZ announces its next version
    import pymc as pm
import pytensor.tensor as pt

import synkhronos as synk
from synkhronos.extensions.pymc import compute_log_likelihood, data_parallel

#: Distributions of each row's value: the kinds of their arguments, and of the value.
FAMILIES: dict[str, tuple[dict[str, str], str]] = {
    "AsymmetricLaplace": ({"kappa": "positive", "mu": "real", "b": "positive"}, "real"),
    "Cauchy": ({"alpha": "real", "beta": "positive"}, "real"),
    "ExGaussian": ({"mu": "real", "sigma": "positive", "nu": "positive"}, "real"),
    "Gumbel": ({"mu": "real", "beta": "positive"}, "real"),
    "Laplace": ({"mu": "real", "b": "positive"}, "real"),
    "Logistic": ({"mu": "real", "s": "positive"}, "real"),
    "Moyal": ({"mu": "real", "sigma": "positive"}, "real"),
    "Normal": ({"mu": "real", "sigma": "positive"}, "real"),
    "SkewNormal": ({"mu": "real", "sigma": "positive", "alpha": "real"}, "real"),
    "SkewStudentT": ({"mu": "real", "sigma": "positive", "a": "positive", "b": "positive"}, "real"),
    "StudentT": ({"nu": "positive", "mu": "real", "sigma": "positive"}, "real"),
    "TruncatedNormal": ({"mu": "real", "sigma": "positive", "lower": "low", "upper": "high"}, "real"),
    "Uniform": ({"lower": "low", "upper": "high"}, "real"),
    "Triangular": ({"lower": "low", "c": "zero", "upper": "high"}, "real"),
    "VonMises": ({"mu": "real", "kappa": "positive"}, "angle"),
    "ChiSquared": ({"nu": "positive"}, "positive"),
    "Exponential": ({"lam": "positive"}, "positive"),
    "Gamma": ({"alpha": "positive", "beta": "positive"}, "positive"),
    "Gamma of mean": ({"mu": "positive", "sigma": "positive"}, "positive"),
    "HalfCauchy": ({"beta": "positive"}, "positive"),
    "HalfNormal": ({"sigma": "positive"}, "positive"),
    "HalfStudentT": ({"nu": "positive", "sigma": "positive"}, "positive"),
    "InverseGamma": ({"alpha": "positive", "beta": "positive"}, "positive"),
    "LogNormal": ({"mu": "real", "sigma": "positive"}, "positive"),
    "Pareto": ({"alpha": "positive", "m": "small"}, "positive"),
    "Rice": ({"nu": "positive", "sigma": "positive"}, "positive"),
    "Rice of ratio": ({"b": "positive", "sigma": "positive"}, "positive"),
    "Wald": ({"mu": "positive", "lam": "positive"}, "positive"),
    "Weibull": ({"alpha": "positive", "beta": "positive"}, "positive"),
    "HurdleGamma": ({"psi": "unit", "alpha": "positive", "beta": "positive"}, "zero or positive"),
    "HurdleLogNormal": ({"psi": "unit", "mu": "real", "sigma": "positive"}, "zero or positive"),
    "Beta": ({"alpha": "positive", "beta": "positive"}, "unit"),
    "Beta of mean": ({"mu": "unit", "nu": "positive"}, "unit"),
    "Kumaraswamy": ({"a": "positive", "b": "positive"}, "unit"),
    "LogitNormal": ({"mu": "real", "sigma": "positive"}, "unit"),
    "Bernoulli": ({"p": "unit"}, "binary"),
    "Bernoulli of logit": ({"logit_p": "real"}, "binary"),
    "BetaBinomial": ({"n": "trials", "alpha": "positive", "beta": "positive"}, "count"),
    "Binomial": ({"n": "trials", "p": "unit"}, "count"),
    "Binomial of logit": ({"n": "trials", "logit_p": "real"}, "count"),
    "DiscreteUniform": ({"lower": "zero", "upper": "trials"}, "count"),
    "DiscreteWeibull": ({"q": "unit", "beta": "positive"}, "count"),
    "Geometric": ({"p": "unit"}, "count from one"),
    "HyperGeometric": ({"N": "population", "k": "trials", "n": "trials"}, "count"),
    "HurdleNegativeBinomial": ({"psi": "unit", "mu": "positive", "alpha": "positive"}, "count"),
    "HurdlePoisson": ({"psi": "unit", "mu": "positive"}, "count"),
    "NegativeBinomial": ({"mu": "positive", "alpha": "positive"}, "count"),
    "NegativeBinomial of n": ({"n": "positive", "p": "unit"}, "count"),
    "Poisson": ({"mu": "positive"}, "count"),
    "ZeroInflatedBinomial": ({"psi": "unit", "n": "trials", "p": "unit"}, "count"),
    "ZeroInflatedNegativeBinomial": ({"psi": "unit", "mu": "positive", "alpha": "positive"}, "count"),
    "ZeroInflatedPoisson": ({"psi": "unit", "mu": "positive"}, "count"),
    "Categorical": ({"p": "simplex"}, "category"),
    "Categorical of logit": ({"logit_p": "vector"}, "category"),
    "OrderedLogistic": ({"eta": "real", "cutpoints": "cutpoints"}, "category"),
    "OrderedProbit": ({"eta": "real", "cutpoints": "cutpoints", "sigma": "positive"}, "category"),
    "Dirichlet": ({"a": "positive vector"}, "simplex"),
    "DirichletMultinomial": ({"n": "five", "a": "positive vector"}, "counts of five"),
    "Multinomial": ({"n": "five", "p": "simplex"}, "counts of five"),
    "MvNormal": ({"mu": "vector", "chol": "factor"}, "vector"),
    "MvStudentT": ({"nu": "positive", "mu": "vector", "scale": "covariance"}, "vector"),
}
#: Families with functions of their cumulative distribution, so that they can be censored.
CENSORED = ["Normal", "Laplace", "Gumbel", "Exponential", "Weibull", "LogNormal", "Logistic", "Poisson", "StudentT"]
WIDTH = 3
NOISES = [0.0, 0.5, 1.0, 2.0, 5.0]


class ModelBuilder:
    """Builds a random model.

    Parameters
    ----------
    seed : int

    Attributes
    ----------
    choices : list of str
        Names of the choices drawn so far.
    model : pymc.Model
    """

    def __init__(self, seed: int):
        self.choices_rng, self.rng = random.Random(seed), np.random.default_rng(seed)
        self.choices: list[str] = []
        self.n_rows = self.choices_rng.randint(2, 12)
        self._counter = 0
        self.group = self.rng.integers(0, 3, self.n_rows)
        self.other_group = self.rng.integers(0, 2, self.n_rows)
        self.x = self.rng.normal(size=(self.n_rows, WIDTH))
        with pm.Model(check_bounds=self.choices_rng.random() < 0.9) as model:
            self.model = model
            if not model.check_bounds:
                self.choices.append("unchecked")
            for number in range(self.choices_rng.choice([1, 1, 2])):
                self._add_likelihood(f"y{number}")
            if not model.continuous_value_vars:
                self._parameter("real")
        if self.choices_rng.random() < 0.1:
            self._intervene()

    def _choose(self, name: str, *options: Any) -> Any:
        """Return one of the options, and record its name and number."""
        number = self.choices_rng.randrange(len(options))
        self.choices.append(f"{name} {number}")
        return options[number]

    def _name(self) -> str:
        self._counter += 1
        return f"v{self._counter}"

    # -- data and parameters -------------------------------------------------------------------------------------

    def _wrap_data(self, values: Any) -> Any:
        """Return data as an array, a constant or ``pm.Data``."""
        kind = self.choices_rng.randrange(3)
        return values if kind == 0 else pt.as_tensor(values) if kind == 1 else pm.Data(self._name(), values)

    def _parameter(self, kind: str, shape: Any = ()) -> Any:
        name, choices_rng = self._name(), self.choices_rng
        if kind == "real":
            if choices_rng.random() < 0.3 and shape:
                center, spread = self._parameter("real"), self._parameter("positive")
                if choices_rng.random() < 0.5:
                    return center + spread * pm.Normal(name, shape=shape)
                return pm.Normal(name, center, spread, shape=shape)
            priors: list[Callable[..., Any]] = [
                lambda: pm.Normal(name, 0, 2, shape=shape),
                lambda: pm.StudentT(name, 4, shape=shape),
                lambda: pm.Cauchy(name, 0, 1, shape=shape),
                lambda: pm.Uniform(name, -4, 4, shape=shape),
            ]
        elif kind == "positive":
            priors = [
                lambda: pm.HalfNormal(name, 1, shape=shape),
                lambda: pm.Exponential(name, 1, shape=shape),
                lambda: pm.Gamma(name, 2, 1, shape=shape),
                lambda: pm.LogNormal(name, 0, 1, shape=shape),
            ]
        else:
            priors = [lambda: pm.Beta(name, 2, 2, shape=shape), lambda: pm.Uniform(name, 0, 1, shape=shape)]
        return choices_rng.choice(priors)()

    # -- expressions with an element for each row, or one for all rows -------------------------------------------

    def _real(self) -> Any:
        x, group = self.x, self.group
        expression = self._choose(
            "real",
            lambda: self._parameter("real"),
            lambda: self._parameter("real", 3)[self._wrap_data(group)],
            lambda: self._parameter("real") + pm.math.dot(self._wrap_data(x), self._parameter("real", WIDTH)),
            lambda: self._parameter("real", 3)[group] + self._parameter("real") * self._wrap_data(x[:, 0]),
            lambda: (self._parameter("real", (3, WIDTH))[group] * self._wrap_data(x)).sum(axis=-1),
            lambda: self._parameter("real", (3, 2))[self._wrap_data(group), self._wrap_data(self.other_group)],
            lambda: pt.switch(self._wrap_data(x[:, 1]) > 0, self._real_of_rows(), self._parameter("real")),
            lambda: self._parameter("real") * self._wrap_data(x[:, 2]) ** 2 - self._real_of_rows(),
            lambda: pt.stack([self._real_of_rows(), self._real_of_rows()], axis=1)[
                np.arange(self.n_rows), self.other_group
            ],
            lambda: pm.math.dot(self._wrap_data(np.concatenate([x, x])), self._parameter("real", WIDTH))[: self.n_rows],
            lambda: pt.concatenate([self._parameter("real", 1), self._parameter("real", 2)])[group],
            lambda: pt.clip(self._real_of_rows(), -3, 3),
            lambda: pm.Deterministic(self._name(), self._real_of_rows()),
            lambda: self._real_of_picked_rows(),
        )()
        return expression

    def _real_of_rows(self) -> Any:
        expression = self._parameter("real", 3)[self.group]
        return expression if self.choices_rng.random() < 0.5 else expression + self.x @ self._parameter("real", WIDTH)

    def _real_of_picked_rows(self) -> Any:
        index = self.rng.integers(0, 2 * self.n_rows, self.n_rows)
        longer = self.rng.normal(size=(2 * self.n_rows, WIDTH))
        return (longer @ self._parameter("real", WIDTH))[index]

    def _positive(self) -> Any:
        expression = self._choose(
            "positive",
            lambda: self._parameter("positive"),
            lambda: self._parameter("positive"),
            lambda: self._parameter("positive", 3)[self._wrap_data(self.group)],
            lambda: pt.exp(self._real()),
            lambda: pt.softplus(self._real()),
            lambda: self._real() ** 2 + 0.1,
            lambda: self._wrap_data(self.rng.gamma(2, size=self.n_rows) + 0.1) * self._parameter("positive"),
            lambda: abs(self._real()),
            lambda: self._parameter("positive") + self._parameter("positive") * self.x[:, 0],  # negative for some rows
        )()
        return expression

    def _unit(self) -> Any:
        return self._choose(
            "unit",
            lambda: self._parameter("unit"),
            lambda: self._parameter("unit", 3)[self.group],
            lambda: pt.sigmoid(self._real()),
            lambda: pm.math.invprobit(self._real()),
            lambda: 1 - pt.exp(-pt.exp(self._real())),
            lambda: 0.5 + self._real_of_rows() / 4,  # beyond 0 and 1 for some rows
        )()

    def _vector(self) -> Any:
        if self.choices_rng.random() < 0.3:
            return self._parameter("real", WIDTH)
        return (
            self._wrap_data(self.x) @ self._parameter("real", (WIDTH, WIDTH))
            + self._parameter("real", (3, WIDTH))[self.group]
        )

    def _argument(self, kind: str) -> Any:
        if kind in ("real", "positive", "unit", "vector"):
            return getattr(self, f"_{kind}")()
        if kind == "low":
            return -3 - self._positive() if self.choices_rng.random() < 0.7 else -3
        if kind == "high":
            return 3 + self._positive() if self.choices_rng.random() < 0.7 else 3
        if kind == "small":
            return 0.05 * self._unit()
        if kind == "trials":
            return self._wrap_data(7 + self.group) if self.choices_rng.random() < 0.5 else 9
        if kind == "cutpoints":
            if self.choices_rng.random() < 0.5:
                return np.array([-1.0, 1.0])
            ordered = pm.distributions.transforms.ordered
            return pm.Normal(self._name(), shape=2, transform=ordered, initval=[-1.0, 1.0])
        if kind == "simplex":
            return self._choose(
                "simplex",
                lambda: pm.Dirichlet(self._name(), np.ones(WIDTH)),
                lambda: pm.Dirichlet(self._name(), np.ones((3, WIDTH)))[self.group],
                lambda: pm.math.softmax(self._vector(), axis=-1),
            )()
        if kind == "positive vector":
            return pt.exp(self._vector()) if self.choices_rng.random() < 0.6 else self._parameter("positive", WIDTH)
        if kind in ("factor", "covariance"):
            factor = np.tril(np.ones((WIDTH, WIDTH)))
            if self.choices_rng.random() < 0.5:
                factor = pt.tril(factor) * self._parameter("positive", WIDTH)[:, None]
            return factor if kind == "factor" else factor @ factor.T + np.eye(WIDTH)
        return {"zero": 0, "five": 5, "population": 30}[kind]

    # -- likelihoods ---------------------------------------------------------------------------------------------

    def _values(self, kind: str) -> Any:
        n, rng = self.n_rows, self.rng
        far = self.choices_rng.choice([1, 1, 5])
        if kind == "simplex":
            return rng.dirichlet(np.ones(WIDTH), n)
        if kind == "counts of five":
            return rng.multinomial(5, np.full(WIDTH, 1 / WIDTH), n)
        positive = rng.gamma(1, size=n) * far + 0.1
        return {
            "real": np.clip(far * rng.normal(size=n), -2.9, 2.9),
            "angle": rng.uniform(-3, 3, n),
            "positive": positive,
            "zero or positive": np.where(rng.random(n) < 0.4, 0, positive),
            "unit": rng.beta(1, 1, n),
            "binary": rng.integers(0, 2, n),
            "count": rng.integers(0, 7, n),
            "count from one": rng.integers(1, 7, n),
            "category": self.group,
            "vector": far * self.x[:, ::-1],
        }[kind]

    def _add_likelihood(self, name: str) -> None:
        family = self.choices_rng.choice(list(FAMILIES))
        kinds, value_kind = FAMILIES[family]
        distribution = getattr(pm, family.split()[0])
        self.choices.append(family)
        order = list(kinds)
        self.choices_rng.shuffle(order)  # the order of parameters decides the order of PyTensor's rewrites
        arguments = {argument: self._argument(kinds[argument]) for argument in order}
        values = self._values(value_kind)
        form = self.choices_rng.random()
        if form < 0.1 and family in CENSORED:
            self.choices.append("censored")
            low, high = np.quantile(values, [0.2, 0.8])
            values = np.clip(values, low, high)
            pm.Censored(name, distribution.dist(**arguments), low, high, observed=values)
        elif form < 0.2 and family in CENSORED:
            self.choices.append("truncated")
            pm.Truncated(name, distribution.dist(**arguments), values.min() - 0.5, None, observed=values)
        elif form < 0.2 and value_kind in ("real", "positive", "count"):
            self.choices.append("mixture")
            others = [self._argument(kind) for kind in kinds.values()]
            components = [distribution.dist(**arguments), distribution.dist(**dict(zip(kinds, others, strict=True)))]
            weights = pm.Dirichlet(self._name(), np.ones(2))
            pm.Mixture(name, w=weights, comp_dists=components, observed=values)
        elif form < 0.3:
            self.choices.append("potential")
            shape = () if value_kind in ("vector", "simplex", "counts of five") else (self.n_rows,)
            terms = pm.logp(distribution.dist(**arguments, **({"shape": shape} if shape else {})), values)
            pm.Potential(name, self._choose("terms", terms, terms.sum(), 2 * terms.mean() - terms.sum() / 3))
        elif form < 0.4 and values.ndim == 1 and value_kind in ("real", "positive", "unit", "count", "binary"):
            self.choices.append("missing")
            mask = self.rng.random(self.n_rows) < 0.3
            mask[0] = True
            distribution(name, **arguments, observed=np.ma.masked_array(values, mask))
        else:
            distribution(name, **arguments, observed=self._wrap_data(values))

    def _intervene(self) -> None:
        free = [variable for variable in self.model.free_RVs if variable.type.ndim == 0]
        if len(self.model.free_RVs) == 1 or any(
            value is not None for value in self.model.rvs_to_initial_values.values()
        ):
            return  # a density needs a parameter, and PyMC cannot change a model with initial values
        if free and self.choices_rng.random() < 0.5:
            self.choices.append("do")
            self.model = pm.do(self.model, {self.choices_rng.choice(free).name: 0.5})
        elif free:
            self.choices.append("observe")
            self.model = pm.observe(self.model, {self.choices_rng.choice(free).name: 0.5})


class Case:
    """A random model, on ranks and on PyMC alone."""

    def __init__(self, seed: int):
        self.builder = ModelBuilder(seed)
        self.model = self.builder.model
        self.rng = np.random.default_rng(seed)

    def __str__(self) -> str:
        return ", ".join([f"{self.builder.n_rows} rows", *self.builder.choices])

    def points(self) -> Iterator[tuple[float, dict[str, Any]]]:
        start = self.model.initial_point(random_seed=0)
        for noise in NOISES:
            yield (
                noise,
                {
                    name: value + noise * self.rng.normal(size=np.shape(value)) if value.dtype.kind == "f" else value
                    for name, value in start.items()
                },
            )

    def check(self, checks_value_alone: bool) -> None:
        """Compare value and gradient, and the value that is computed without a gradient."""
        parallel, model = data_parallel(self.model), self.model
        functions = [_compile(variant) for variant in (parallel, model)]
        values = [variant.compile_logp(mode="FAST_COMPILE") for variant in (parallel, model) if checks_value_alone]
        for noise, point in self.points():
            for quantity, results in zip(
                ("value", "gradient"), zip(*[f(point) for f in functions], strict=True), strict=True
            ):
                compare(*results, f"{quantity}: {self}; noise {noise}")
            if values:
                compare(*[function(point) for function in values], f"value alone: {self}; noise {noise}")

    def check_log_likelihood(self) -> None:
        """Compare the log-likelihood of each row."""
        names = [variable.name for variable in self.model.free_RVs]
        draws = pm.draw(self.model.free_RVs, 2, random_seed=1)
        posterior = {name: np.asarray(values)[None] for name, values in zip(names, draws, strict=True)}
        results = []
        for compute in (compute_log_likelihood, pm.compute_log_likelihood):
            idata = make_inference_data(posterior)
            with self.model, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = compute(idata, progressbar=False, extend_inferencedata=False)
            results.append({name: result[name].values for name in result.data_vars})
        assert results[0].keys() == results[1].keys()
        for name, values in results[0].items():
            np.testing.assert_array_equal(values, results[1][name])


def _compile(model: pm.Model) -> Callable[[dict[str, Any]], tuple[Any, Any]]:
    """Return a function of value and gradient."""
    function = model.logp_dlogp_function(ravel_inputs=True, mode="FAST_COMPILE")
    names = [variable.name for variable in model.continuous_value_vars]

    def evaluate(point: dict[str, Any]) -> tuple[Any, Any]:
        function.set_extra_values(point)
        value, gradient = function(np.concatenate([np.ravel(point[name]) for name in names]))
        return np.array(value), np.array(gradient)

    return evaluate


def make_inference_data(posterior: dict[str, np.ndarray]) -> Any:
    import arviz

    groups = {"posterior": posterior}
    # ArviZ 1 takes a dict of groups, and earlier versions take them as arguments.
    return arviz.from_dict(groups) if arviz.__version__ >= "1" else arviz.from_dict(**groups)


def compare(parallel: Any, serial: Any, case: str) -> None:
    """Raise AssertionError if results of ranks differ from PyMC's."""
    parallel, serial = np.asarray(parallel), np.asarray(serial)
    is_finite = np.isfinite(serial)
    scale = np.abs(serial[is_finite]).max(initial=1e-3)
    if (case.startswith("gradient") or "unchecked" in case) and not is_finite.all():
        # At points without a density, rewrites with the values of arrays can give nan for infinity, or another sign.
        assert not np.isfinite(parallel[~is_finite]).any() or np.isnan(serial).any(), f"{case}: {parallel} for {serial}"
    else:
        np.testing.assert_array_equal(parallel[~is_finite], serial[~is_finite], err_msg=case)
    np.testing.assert_allclose(parallel[is_finite], serial[is_finite], rtol=1e-7, atol=1e-9 * scale, err_msg=case)


def main() -> int:
    """Check random cases for ``--seconds``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=10**9)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--optimize", action="store_true", help="use all rewrites, not only those of FAST_COMPILE")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.optimize:
        from pytensor.compile.mode import Mode, predefined_modes

        predefined_modes["FAST_COMPILE"] = Mode("py", "fast_run")
    began, n_split, n_failures = time.monotonic(), 0, 0
    reasons: collections.Counter[str] = collections.Counter()
    for seed in range(options.seed, options.seed + options.cases):
        if time.monotonic() - began > options.seconds:
            break
        if (seed - options.seed) % 50 == 0:
            synk.close()
            synk.fork(2 + seed // 50 % 2, use_gpu=False)
        case = None
        try:
            case = Case(seed)
            case.check(seed % 4 == 0)
            if seed % 10 == 0:
                case.check_log_likelihood()
            n_split += 1
        except ValueError as error:
            if "none of its variables can be split" not in str(error):
                traceback.print_exc()
                n_failures += 1
                print("fails:", seed, case, flush=True)
            reasons[f"{error} [{case}]"] += 1
        except Exception as error:
            n_failures += 1
            print("differs:" if isinstance(error, AssertionError) else "fails:", seed, case, flush=True)
            traceback.print_exc()
    synk.close()
    for reason, count in reasons.most_common():
        print(count, reason)
    print(f"{n_split} models split, {sum(reasons.values())} refused, {n_failures} differences")
    return 1 if n_failures else 0


if __name__ == "__main__":
    sys.exit(main())
