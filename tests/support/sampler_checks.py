"""Checks that PyMC's samplers that XLA compiles return equal draws on all ranks and in one process.

Tests run them in child processes, as they must not start XLA's threads.
"""

import numpy as np

RNG = np.random.default_rng(3)
X, GROUP = RNG.normal(size=(61, 3)), RNG.integers(0, 4, 61)


def build():
    """Return a model with likelihoods of different lengths, which 2 ranks do not divide."""
    import pymc as pm

    with pm.Model() as model:
        a = pm.Normal("a", shape=4)
        b = pm.Normal("b", shape=3)
        pm.Normal("y", a[GROUP] + pm.Data("x", X) @ b, 1, observed=X[:, 0])
        pm.Poisson("z", pm.math.exp(b[0]), observed=np.arange(50) % 4)
        # PyMC checks parameters, here that of a Bernoulli variable, but not in JAX.
        pm.Bernoulli("t", p=(1 + b[1]) / 2, observed=np.ones(400, int))
    return model


def sample(model, sampler, method):
    """Sample two short chains by this sampler of PyMC."""
    import pymc as pm

    with model:
        return pm.sample(
            draws=6,
            tune=4,
            chains=2,
            random_seed=5,
            progressbar=False,
            compute_convergence_checks=False,
            nuts_sampler=sampler,
            # For jitter PyMC would evaluate the density by one XLA program per operation, as `compare_functions` does.
            nuts_sampler_kwargs={"chain_method": method, "jitter": False},
        )


def check_equal(parallel, serial):
    for name, values in serial.posterior.data_vars.items():
        np.testing.assert_allclose(parallel.posterior[name], values, rtol=1e-6, atol=1e-8)
    np.testing.assert_array_equal(parallel.sample_stats.n_steps, serial.sample_stats.n_steps)


def compare_samplers(sampler, method):
    """Check that the draws of several chains equal one process's."""
    from synkhronos.extensions.pymc import data_parallel

    model = build()
    parallel = data_parallel(model)
    expected = sample(model, sampler, method)  # first: ranks start XLA with one device
    check_equal(sample(parallel, sampler, method), expected)


def compare_functions():
    """Check that other functions that JAX compiles, such as optimizers', evaluate sums through Python, of new data too."""
    import jax
    import pymc as pm
    import pymc.sampling.jax as pymc_jax

    from synkhronos.extensions.pymc import data_parallel

    model = build()
    parallel = data_parallel(model)
    point = [jax.numpy.asarray(value) for value in model.initial_point().values()]
    for x in (X, X[::-1].copy()):
        with model:
            pm.set_data({"x": x})
        for transform in (lambda f: f, jax.jit, jax.grad):
            actual, expected = (transform(pymc_jax.get_jaxified_logp(m))(point) for m in (parallel, model))
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), actual, expected)
