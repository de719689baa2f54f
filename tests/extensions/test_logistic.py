"""`simplify_logistic`: values equal to the last bit, and gradients that are finite where a probability rounds to 1."""

import numpy as np
import pytest
from scipy.special import expit

pytensor = pytest.importorskip("pytensor", reason="it is about PyTensor's graphs")
import pytensor.tensor as pt  # noqa: E402
from pytensor.compile.mode import Mode  # noqa: E402
from pytensor.scalar.math import Sigmoid, Softplus  # noqa: E402
from pytensor.tensor.elemwise import Elemwise  # noqa: E402

from synkhronos.extensions.pymc.logistic import simplify_logistic  # noqa: E402

Y = np.array([0, 1, 1, 0, 1, 0])
SCORES = np.array([0.3, -1.7, 36.9, 40.0, -np.inf, -745.5])


def build_terms(success, score):
    p = pt.sigmoid(score)
    return pt.switch(success, pt.log(p), pt.log1p(-p)), pt.and_(pt.all(pt.ge(p, [0])), pt.all(pt.le(p, [1])))


def count(variable, kind):
    nodes = pytensor.graph.traversal.applys_between([], [variable])
    return sum(isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, kind) for node in nodes)


@pytest.mark.parametrize(
    "success", [pt.constant(Y), pt.constant(Y > 0), pytensor.shared(Y)], ids=["int", "bool", "shared"]
)
def test_simplified_values_are_equal(success):
    score = pt.dvector("score")
    terms, _ = build_terms(success, score)
    simplified = simplify_logistic(terms)
    assert count(simplified, Sigmoid) == 0 and count(simplified, Softplus) == 1
    # Rewrites make the logarithms exact, as in PyMC.
    expected, actual = pytensor.function([score], [terms, simplified], mode=Mode("py", "fast_run"))(SCORES)
    np.testing.assert_array_equal(actual, expected)


def test_simplified_gradient_is_finite_where_a_probability_is_one():
    score = pt.dvector("score")
    terms, _ = build_terms(pt.constant(Y), score)
    gradient = pytensor.function([score], pytensor.grad(simplify_logistic(terms).sum(), score))(SCORES)
    sign = 2 * Y - 1.0
    np.testing.assert_allclose(gradient, sign * expit(-sign * SCORES), rtol=1e-14)


@pytest.mark.parametrize("value", [0.5, np.inf, -np.inf, np.nan])
def test_simplified_check_holds_unless_a_score_is_nan(value):
    score = pt.dvector("score")
    _, check = build_terms(pt.constant(Y), score)
    simplified = simplify_logistic(check)
    assert count(simplified, Sigmoid) == 0
    expected, actual = pytensor.function([score], [check, simplified])(np.append(SCORES, value))
    assert expected == actual == (not np.isnan(value))


def test_other_terms_are_unchanged():
    score, other = pt.dvectors("score", "other")
    p, q = pt.sigmoid(score), pt.sigmoid(other)
    for terms in (pt.switch(Y, pt.log(p), pt.log1p(-q)), pt.switch(Y, pt.log1p(-p), pt.log(p)), pt.ge(p, 0.5), p <= 0):
        assert simplify_logistic(terms) is terms
