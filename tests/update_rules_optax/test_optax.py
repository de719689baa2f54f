"""Rules and transformations equal optax's, for random problems and options.

The folder runs in a process of its own, since XLA starts in it.  Where optax is not installed,
tests/training/test_transformations.py compares with a table of its numbers.
"""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from library import NAME

from synkhronos.training import make_train_function_serial
from synkhronos.training.updates import (
    adadelta,
    adagrad,
    adam,
    adamax,
    adamw,
    add_decayed_weights,
    chain,
    clip,
    clip_by_global_norm,
    lamb,
    lion,
    momentum,
    muon,
    nesterov_momentum,
    partition,
    rmsprop,
    sgd,
)

if NAME != "pytensor":
    pytest.skip("optax runs in JAX's environments", allow_module_level=True)
import pytensor
import pytensor.tensor as pt

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
jnp = jax.numpy


def is_matrix(p):
    return p.ndim > 1


def mark_matrices(params):
    return jax.tree.map(is_matrix, params)


TINY = 1e-30
PARTS = {"w": "matrix", "b": "other"}
#: Makers of a rule and of optax's, from learning rate, two betas, epsilon, decay of weights and limit of norms.
RULES = {
    "nesterov_momentum": lambda rate, b1, b2, eps, decay, limit: (
        functools.partial(nesterov_momentum, momentum=b1),
        optax.sgd(rate, momentum=b1, nesterov=True),
    ),
    "adagrad": lambda rate, b1, b2, eps, decay, limit: (
        functools.partial(adagrad, epsilon=eps),
        optax.adagrad(rate, initial_accumulator_value=0.0, eps=eps),
    ),
    "rmsprop": lambda rate, b1, b2, eps, decay, limit: (
        functools.partial(rmsprop, rho=b2, epsilon=eps),
        optax.rmsprop(rate, decay=b2, eps=eps),
    ),
    "adadelta": lambda rate, b1, b2, eps, decay, limit: (
        functools.partial(adadelta, rho=b2, epsilon=eps),
        optax.adadelta(rate, rho=b2, eps=eps),
    ),
    # Epsilon has another place in optax, which makes no difference where it is this small.
    "adam": lambda rate, b1, b2, eps, decay, limit: (
        functools.partial(adam, beta1=b1, beta2=b2, epsilon=TINY),
        optax.adam(rate, b1, b2, eps=TINY),
    ),
    "adamax": lambda rate, b1, b2, eps, decay, limit: (
        functools.partial(adamax, beta1=b1, beta2=b2, epsilon=TINY),
        optax.adamax(rate, b1, b2, eps=TINY),
    ),
    "adamw": lambda rate, b1, b2, eps, decay, limit: (
        functools.partial(adamw, beta1=b1, beta2=b2, epsilon=eps, weight_decay=decay, mask=is_matrix),
        optax.adamw(rate, b1, b2, eps, weight_decay=decay, mask=mark_matrices),
    ),
    "lion": lambda rate, b1, b2, eps, decay, limit: (
        functools.partial(lion, beta1=b1, beta2=b2, weight_decay=decay),
        optax.lion(rate, b1, b2, weight_decay=decay),
    ),
    "lamb": lambda rate, b1, b2, eps, decay, limit: (
        functools.partial(lamb, beta1=b1, beta2=b2, epsilon=eps, weight_decay=decay),
        optax.lamb(rate, b1, b2, eps, weight_decay=decay),
    ),
    "muon": lambda rate, b1, b2, eps, decay, limit: (
        functools.partial(muon, momentum=b1, weight_decay=decay),
        optax.partition(
            {
                "matrix": optax.contrib.muon(rate, beta=b1, weight_decay=decay),
                "other": optax.adamw(rate, weight_decay=0),
            },
            PARTS,
        ),
    ),
    "clips": lambda rate, b1, b2, eps, decay, limit: (
        chain(clip(limit), clip_by_global_norm(2 * limit), functools.partial(momentum, momentum=b1)),
        optax.chain(optax.clip(limit), optax.clip_by_global_norm(2 * limit), optax.sgd(rate, momentum=b1)),
    ),
    "partition": lambda rate, b1, b2, eps, decay, limit: (
        chain(add_decayed_weights(decay), partition((is_matrix, functools.partial(adamw, beta1=b1)), sgd)),
        optax.chain(
            optax.add_decayed_weights(decay),
            optax.partition({"matrix": optax.adamw(rate, b1, weight_decay=1e-4), "other": optax.sgd(rate)}, PARTS),
        ),
    ),
}


@pytest.fixture(autouse=True, scope="module")
def float64():
    """Let JAX compute in float64."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 2**32 - 1), st.floats(0.001, 0.3), st.floats(0, 0.95), st.floats(0.5, 0.999),
    st.floats(1e-4, 0.1), st.floats(0, 0.2), st.floats(0.01, 1),
)  # fmt: skip
def test_rules_equal_optax(name, seed, rate, b1, b2, eps, decay, limit):
    rng = np.random.default_rng(seed)
    x_value, y_value, w_value, b_value = (rng.normal(size=size) for size in ((7, 3), (7, 2), (3, 2), 2))
    rule, other = RULES[name](rate, b1, b2, eps, decay, limit)
    x, y, w, b = pt.dmatrix("x"), pt.dmatrix("y"), pytensor.shared(w_value, "w"), pytensor.shared(b_value, "b")
    loss = ((pt.tanh(x @ w + b) - y) ** 2).mean()
    train = make_train_function_serial(loss, [w, b], x, y, rule, learning_rate=rate)
    params = {"w": jnp.array(w_value), "b": jnp.array(b_value)}
    gradient = jax.grad(lambda p: jnp.mean((jnp.tanh(x_value @ p["w"] + p["b"]) - y_value) ** 2))
    state = other.init(params)
    for _ in range(4):
        train(x_value, y_value)
        step, state = other.update(gradient(params), state, params)
        params = optax.apply_updates(params, step)
        for shared in (w, b):
            np.testing.assert_allclose(shared.get_value(), params[shared.name], rtol=1e-6, atol=1e-9)
