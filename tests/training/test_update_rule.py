"""A user-defined update rule: a formula for one parameter becomes a rule like those of the library."""

import inspect

import numpy as np
import pytest
from library import package
from library import tensor as T

from synkhronos.training import make_train_function, make_train_function_serial
from synkhronos.training.updates import apply_momentum
from synkhronos.training.updates.update_rule import update_rule


# rules begin
@update_rule("learning_rate=0.25", 2.875, most="Limit of the magnitude of the gradient's elements.")
def clipped(p, g, c, learning_rate=0.1, most=0.5):
    """Gradient descent with small steps."""
    return {p: p - c(learning_rate) * c.tensor.clip(g, -c(most), c(most))}


@update_rule("learning_rate=0.25", 2.875, most="Limit of the magnitude of the mean gradient's elements.")
def clipped_mean(p, g, c, learning_rate=0.1, rho=0.9, most=0.5):
    """Gradient descent with small steps, along a moving average of the gradient."""
    m = c.zeros("m")
    m_new = c(rho) * m + c(1 - rho) * g
    return {m: m_new, p: p - c(learning_rate) * c.tensor.clip(m_new, -c(most), c(most))}


# rules end

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(7, 3)), rng.normal(size=7)


def make_model():
    x, y, w = T.dmatrix("x"), T.dvector("y"), package.shared(np.ones(3), "w")
    return x, y, w, ((T.dot(x, w) - y) ** 2).mean()


def compute_clipped_steps(steps, rho=0.0):
    w, m = np.ones(3), np.zeros(3)
    for _ in range(steps):
        m = rho * m + (1 - rho) * 2 * X.T @ (X @ w - Y) / len(X)
        w = w - 0.1 * np.clip(m, -0.5, 0.5)
    return w


@pytest.mark.parametrize(("formula", "rho"), [(clipped, 0.0), (clipped_mean, 0.9)])
def test_own_update_rule_trains_on_all_ranks(formula, rho, two_ranks_per_test):
    for make in (make_train_function, make_train_function_serial):
        x, y, w, loss = make_model()
        train = make(loss, [w], x, y, formula)
        for _ in range(12):
            train(X, Y)
        np.testing.assert_allclose(w.get_value(), compute_clipped_steps(12, rho), rtol=1e-12)


def test_own_update_rule_names_its_state():
    *_, w, loss = make_model()
    updates = clipped_mean(loss, [w]).param_updates
    assert [v.name for v in updates] == ["w_m", "w"]
    # Momentum applies to such a rule.
    assert len(apply_momentum(clipped_mean(loss, [w]), [w]).param_updates) == 3


def test_own_update_rule_is_checked_and_documented():
    *_, w, loss = make_model()
    assert str(inspect.signature(clipped_mean)).startswith("(loss_or_grads")
    assert list(inspect.signature(clipped_mean).parameters)[2:] == ["learning_rate", "rho", "most", "weight"]
    with pytest.raises(TypeError, match="rho: expected a number or a symbolic scalar"):
        clipped_mean(loss, [w], rho="all")
    with pytest.raises(TypeError, match=r"clipped_mean\(\) got an unexpected keyword argument 'rate'"):
        clipped_mean(loss, [w], rate=1)
    for words in (
        "Size of a step.",
        "Limit of the magnitude",
        "Decay of the running mean of squared",
        "Raises\n------",
        "weight : number",
        "2.875",
    ):
        assert words in clipped_mean.__doc__
    with pytest.raises(TypeError, match="expected a description of most"):
        update_rule("", 0)(lambda p, g, c, most: {})
