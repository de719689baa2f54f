"""Lasagne's update rules, such as SGD and Adam, each written as a formula for one parameter."""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from synkhronos.checks import is_number
from synkhronos.graph_libraries import get_library
from synkhronos.training.updates.arguments import as_scalar, check_scalars, parse_params
from synkhronos.training.updates.shared_variables import make_zero_state
from synkhronos.training.updates.update_rule import (
    FormulaContext,
    NewValues,
    RuleUpdates,
    add_docstring_sections,
    format_hyperparameter,
    update_rule,
)
from synkhronos.variable_types import Scalar, SharedVariable, Variable

#: Updates of a rule, or its `param_updates`; functions return the type of their argument.
Updates = TypeVar("Updates", RuleUpdates, "OrderedDict[SharedVariable, Variable]")

DecoratedFunction = TypeVar("DecoratedFunction", bound=Callable[..., Any])

_UPDATES_DOC = """updates : RuleUpdates or OrderedDict
    Result of a rule, or its `param_updates`.  It is not modified.
params : list of shared variables, optional
    Variables that get a velocity.  Default: all variables of `updates`, as in Lasagne.  These include the state of a
    rule such as `adagrad`, so list the parameters after any rule but `sgd`."""
_UPDATES_RETURNS_DOC = """RuleUpdates or OrderedDict
    As `updates`, with the velocities in `param_updates`."""


@update_rule(example="learning_rate=0.25", result=1.5)
def sgd(p: SharedVariable, g: Variable, c: FormulaContext, learning_rate: Scalar) -> NewValues:
    r"""Gradient descent.

    Notes
    -----
    .. math:: p_t = p_{t-1} - \eta\, g_t

    Robbins, H. and Monro, S. (1951): A stochastic approximation method.
    The Annals of Mathematical Statistics 22(3), 400-407.
    """
    return {p: p - c(learning_rate) * g}


def _compute_polyak_step(p: SharedVariable, target: Variable, v: SharedVariable, m: Variable) -> NewValues:
    """Return new values of a parameter and its velocity.  ``target`` is the parameter after a step without velocity."""
    new = m * v + target
    return {p: new, v: new - p}


def _compute_nesterov_step(p: SharedVariable, target: Variable, v: SharedVariable, m: Variable) -> NewValues:
    """Return the new values of a parameter and its velocity, as `_compute_polyak_step` does, by Nesterov's formula."""
    new = m * v + target - p
    return {p: target + m * new, v: new}


@update_rule("learning_rate=0.25", 1.5)
def momentum(
    p: SharedVariable, g: Variable, c: FormulaContext, learning_rate: Scalar, momentum: Scalar = 0.9
) -> NewValues:
    r"""Gradient descent with a velocity.

    Notes
    -----
    .. math::
       v_t &= \mu v_{t-1} - \eta\, g_t \\
       p_t &= p_{t-1} + v_t

    Steps grow by up to :math:`1 / (1 - \mu)` over those of `sgd`.

    Polyak, B. T. (1964): Some methods of speeding up the convergence of iteration methods.
    USSR Computational Mathematics and Mathematical Physics 4(5), 1-17.
    """
    return _compute_polyak_step(p, p - c(learning_rate) * g, c.zeros("velocity"), c(momentum))


@update_rule("learning_rate=0.25", 0.15)
def nesterov_momentum(
    p: SharedVariable, g: Variable, c: FormulaContext, learning_rate: Scalar, momentum: Scalar = 0.9
) -> NewValues:
    r"""Gradient descent with Nesterov's velocity.

    Notes
    -----
    .. math::
       v_t &= \mu v_{t-1} - \eta\, g_t \\
       p_t &= p_{t-1} + \mu v_t - \eta\, g_t

    The method in [1]_ and [2]_ takes the gradient at the point :math:`p + \mu v`.  Here the shared variable
    holds that point, so that the gradient is the one at the parameters.

    References
    ----------
    .. [1] Nesterov, Y. (1983): A method of solving a convex programming problem with convergence rate
       O(1/k^2). Soviet Mathematics Doklady 27, 372-376.
    .. [2] Sutskever, I., Martens, J., Dahl, G. and Hinton, G. (2013): On the importance of initialization and
       momentum in deep learning. ICML, 1139-1147.
    """
    return _compute_nesterov_step(p, p - c(learning_rate) * g, c.zeros("nesterov_velocity"), c(momentum))


def _add_velocity(
    updates: Updates,
    params: Iterable[SharedVariable] | None,
    momentum: Scalar,
    compute_step: Callable[[Any, Any, Any, Any], NewValues],
    name: str = "velocity",
) -> Updates:
    """Add velocities: ``compute_step(p, target, v, m)`` returns new values of p and v from the new p in `updates`."""
    if isinstance(updates, tuple) and len(updates) == 3:
        grad_updates, param_updates, grad_shared = updates
        changed = _add_velocity(param_updates, params, momentum, compute_step, name)
        return RuleUpdates(grad_updates, changed, grad_shared)
    if not isinstance(updates, Mapping):
        raise TypeError(
            "updates: expected the result of a rule, or its param_updates, "
            f"got {updates!r} of type {type(updates).__name__}"
        )
    params = parse_params(updates if params is None else params)
    check_scalars(params, momentum=momentum)
    changed = OrderedDict(updates)
    for p in params:
        if p not in changed:
            raise ValueError(f"params: expected variables that have an update, got {p!r}")
        changed.update(compute_step(p, changed[p], make_zero_state(p, name), as_scalar(momentum, p)))
    return changed


def _document_velocity(result: float) -> Callable[[DecoratedFunction], DecoratedFunction]:
    """Return a decorator that adds the sections shared by `apply_momentum` and `apply_nesterov_momentum`."""

    def decorate(function: DecoratedFunction) -> DecoratedFunction:
        lines = [_UPDATES_DOC, format_hyperparameter(inspect.signature(function).parameters["momentum"], {})]
        call = f"{function.__name__}(sgd(w**2, [w], learning_rate=0.25), [w], momentum=0.5)"
        add_docstring_sections(function, lines, _UPDATES_RETURNS_DOC, call, result)
        return function

    return decorate


@_document_velocity(1.5)
def apply_momentum(updates: Updates, params: Iterable[SharedVariable] | None = None, momentum: Scalar = 0.9) -> Updates:
    r"""Add the velocity of `momentum` to the steps of a rule.

    Notes
    -----
    With :math:`\hat p_t` for the rule's new value of the parameter:

    .. math::
       v_t &= \mu v_{t-1} + \hat p_t - p_{t-1} \\
       p_t &= p_{t-1} + v_t
    """
    return _add_velocity(updates, params, momentum, _compute_polyak_step)


@_document_velocity(0.75)
def apply_nesterov_momentum(
    updates: Updates, params: Iterable[SharedVariable] | None = None, momentum: Scalar = 0.9
) -> Updates:
    r"""Add the velocity of `nesterov_momentum` to the steps of a rule.

    Notes
    -----
    With :math:`\hat p_t` for the rule's new value of the parameter:

    .. math::
       v_t &= \mu v_{t-1} + \hat p_t - p_{t-1} \\
       p_t &= \hat p_t + \mu v_t
    """
    return _add_velocity(updates, params, momentum, _compute_nesterov_step, "nesterov_velocity")


@update_rule("learning_rate=0.25", 2.75)
def adagrad(
    p: SharedVariable, g: Variable, c: FormulaContext, learning_rate: Scalar = 1.0, epsilon: Scalar = 1e-6
) -> NewValues:
    r"""Adagrad: steps shrink with the sum of squared gradients.

    Notes
    -----
    .. math::
       a_t &= a_{t-1} + g_t^2 \\
       p_t &= p_{t-1} - \eta\, g_t / \sqrt{a_t + \epsilon}

    Duchi, J., Hazan, E. and Singer, Y. (2011): Adaptive subgradient methods for online learning and
    stochastic optimization. JMLR 12, 2121-2159.
    """
    a = c.zeros("accu")
    a_new = a + g**2
    return {a: a_new, p: p - c(learning_rate) * g / c.tensor.sqrt(a_new + c(epsilon))}


@update_rule("learning_rate=0.25", 2.2094)
def rmsprop(
    p: SharedVariable,
    g: Variable,
    c: FormulaContext,
    learning_rate: Scalar = 1.0,
    rho: Scalar = 0.9,
    epsilon: Scalar = 1e-6,
) -> NewValues:
    r"""RMSProp: steps scaled by the root of the mean squared gradient.

    Notes
    -----
    .. math::
       a_t &= \rho\, a_{t-1} + (1 - \rho)\, g_t^2 \\
       p_t &= p_{t-1} - \eta\, g_t / \sqrt{a_t + \epsilon}

    Tieleman, T. and Hinton, G. (2012): Lecture 6.5: rmsprop. Neural networks for machine
    learning, Coursera.
    """
    a = c.zeros("mean_square")
    a_new = c(rho) * a + c(1 - rho) * g**2
    return {a: a_new, p: p - c(learning_rate) * g / c.tensor.sqrt(a_new + c(epsilon))}


@update_rule(
    "learning_rate=1.0",
    2.9955,
    learning_rate="Scale of the steps; 1 in the paper.",
    rho="Decay of the running means of squared gradients and of squared steps, per step.",
    epsilon="Term that keeps the divisor positive, and makes the first step nonzero.",
)
def adadelta(
    p: SharedVariable,
    g: Variable,
    c: FormulaContext,
    learning_rate: Scalar = 1.0,
    rho: Scalar = 0.95,
    epsilon: Scalar = 1e-6,
) -> NewValues:
    r"""Adadelta: steps in the units of the parameter.

    Notes
    -----
    .. math::
       a_t &= \rho\, a_{t-1} + (1 - \rho)\, g_t^2 \\
       d_t &= g_t \sqrt{b_{t-1} + \epsilon} / \sqrt{a_t + \epsilon} \\
       b_t &= \rho\, b_{t-1} + (1 - \rho)\, d_t^2 \\
       p_t &= p_{t-1} - \eta\, d_t

    Zeiler, M. D. (2012): ADADELTA: An adaptive learning rate method. arXiv:1212.5701.
    """
    a, b, sqrt = c.zeros("accu"), c.zeros("delta_accu"), c.tensor.sqrt
    a_new = c(rho) * a + c(1 - rho) * g**2
    d = g * sqrt(b + c(epsilon)) / sqrt(a_new + c(epsilon))
    b_new = c(rho) * b + c(1 - rho) * d**2
    return {a: a_new, b: b_new, p: p - c(learning_rate) * d}


@update_rule("learning_rate=0.25", 2.75)
def adam(
    p: SharedVariable,
    g: Variable,
    c: FormulaContext,
    learning_rate: Scalar = 0.001,
    beta1: Scalar = 0.9,
    beta2: Scalar = 0.999,
    epsilon: Scalar = 1e-8,
) -> NewValues:
    r"""Adam: the mean gradient over the root of the mean square.

    Notes
    -----
    .. math::
       m_t &= \beta_1 m_{t-1} + (1 - \beta_1)\, g_t \\
       v_t &= \beta_2 v_{t-1} + (1 - \beta_2)\, g_t^2 \\
       r_t &= \eta\, \sqrt{1 - \beta_2^t} / (1 - \beta_1^t) \\
       p_t &= p_{t-1} - r_t\, m_t / (\sqrt{v_t} + \epsilon)

    This is the shorter form at the end of the paper's section 2, where :math:`\epsilon` stands beside the
    uncorrected root.

    Kingma, D. P. and Ba, J. (2015): Adam: A method for stochastic optimization. ICLR, arXiv:1412.6980.
    """
    new, m_new, v_new = make_moments(g, c, beta1, beta2)
    rate = _correct_learning_rate(c, learning_rate, beta1, beta2)
    return {**new, p: p - rate * m_new / (c.tensor.sqrt(v_new) + c(epsilon))}


@update_rule(
    "learning_rate=0.25", 2.75, beta2="Decay of the running maximum of the gradients' magnitude, per step; in [0, 1)."
)
def adamax(
    p: SharedVariable,
    g: Variable,
    c: FormulaContext,
    learning_rate: Scalar = 0.002,
    beta1: Scalar = 0.9,
    beta2: Scalar = 0.999,
    epsilon: Scalar = 1e-8,
) -> NewValues:
    r"""Adamax: the mean gradient over a decaying maximum of its magnitude.

    Notes
    -----
    .. math::
       m_t &= \beta_1 m_{t-1} + (1 - \beta_1)\, g_t \\
       u_t &= \max(\beta_2 u_{t-1}, |g_t|) \\
       p_t &= p_{t-1} - \frac{\eta}{1 - \beta_1^t}\, \frac{m_t}{u_t + \epsilon}

    Kingma, D. P. and Ba, J. (2015): Adam: A method for stochastic optimization. ICLR, arXiv:1412.6980.
    """
    m, u = c.zeros("m"), c.zeros("u")
    m_new = c(beta1) * m + c(1 - beta1) * g
    u_new = c.tensor.maximum(c(beta2) * u, abs(g))
    return {m: m_new, u: u_new, p: p - _correct_learning_rate(c, learning_rate, beta1) * m_new / (u_new + c(epsilon))}


@update_rule("learning_rate=0.25", 2.75)
def amsgrad(
    p: SharedVariable,
    g: Variable,
    c: FormulaContext,
    learning_rate: Scalar = 0.001,
    beta1: Scalar = 0.9,
    beta2: Scalar = 0.999,
    epsilon: Scalar = 1e-8,
) -> NewValues:
    r"""AMSGrad: Adam with a mean square that never decreases.

    Notes
    -----
    .. math::
       m_t &= \beta_1 m_{t-1} + (1 - \beta_1)\, g_t \\
       v_t &= \beta_2 v_{t-1} + (1 - \beta_2)\, g_t^2 \\
       \hat v_t &= \max(\hat v_{t-1}, v_t) \\
       r_t &= \eta\, \sqrt{1 - \beta_2^t} / (1 - \beta_1^t) \\
       p_t &= p_{t-1} - r_t\, m_t / (\sqrt{\hat v_t} + \epsilon)

    The paper leaves out the corrections by :math:`1 - \beta^t`; Lasagne has those of `adam`.

    Reddi, S. J., Kale, S. and Kumar, S. (2018): On the convergence of Adam and beyond. ICLR,
    arXiv:1904.09237.
    """
    new, m_new, v_new = make_moments(g, c, beta1, beta2)
    v_hat = c.zeros("v_hat")
    v_hat_new = c.tensor.maximum(v_hat, v_new)
    rate = _correct_learning_rate(c, learning_rate, beta1, beta2)
    return {**new, v_hat: v_hat_new, p: p - rate * m_new / (c.tensor.sqrt(v_hat_new) + c(epsilon))}


def make_moments(g: Variable, c: FormulaContext, beta1: Scalar, beta2: Scalar) -> tuple[NewValues, Variable, Variable]:
    """Return the updates of the running means, the new mean of gradients, and that of their squares."""
    m, v = c.zeros("m"), c.zeros("v")
    m_new = c(beta1) * m + c(1 - beta1) * g
    v_new = c(beta2) * v + c(1 - beta2) * g**2
    return {m: m_new, v: v_new}, m_new, v_new


def _correct_learning_rate(
    c: FormulaContext, learning_rate: Scalar, beta1: Scalar, beta2: Scalar | None = None
) -> Variable:
    """Return the learning rate, corrected for moving averages that start at zero."""
    rate = as_scalar(learning_rate, c.t)
    if beta2 is not None:
        rate = rate * c.tensor.sqrt(one_minus_power(beta2, c.t))
    return c(rate / one_minus_power(beta1, c.t))


def check_decay_rate(beta: Scalar, name: str) -> None:
    """Raise ValueError unless a number is in [0, 1), as the decay of a running mean.  `name` is its argument."""
    if is_number(beta) and not 0 <= beta < 1:
        raise ValueError(f"{name}: expected from 0 up to but not including 1, got {beta!r}")


def one_minus_power(beta: Scalar, t: Variable, name: str = "beta1 and beta2") -> Variable:
    """Return ``1 - beta**t`` in the full precision of the dtype of `t`.  `name` is the argument's name in errors.

    The plain expression would lose four digits of float32 to cancellation at beta = 0.999 and t = 1.
    """
    tensor = get_library(t).tensor
    check_decay_rate(beta, name)
    if is_number(beta):
        log = as_scalar(math.log(beta) if beta else -math.inf, t)
    else:
        log = as_scalar(tensor.log(beta), t)
    return -tensor.expm1(t * log)
