"""Update rules with decoupled weight decay: the decay is a part of the step, not of the gradient.

Formulas, defaults and results are those of optax; names of hyperparameters are those of the other rules here.  ``mask``
is a predicate of a parameter, such as ``lambda p: p.ndim > 1``, which leaves out biases and norms.  It selects the
parameters that decay, but in `muon` the matrices that are updated by Muon.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from synkhronos.training.updates.optimizers import check_decay_rate, make_moments, one_minus_power
from synkhronos.training.updates.shared_variables import get_shape
from synkhronos.training.updates.update_rule import FormulaContext, NewValues, update_rule
from synkhronos.variable_types import Scalar, SharedVariable, Variable

Mask = Callable[[SharedVariable], bool] | None

#: Coefficients of the quintic Newton-Schulz iteration, from Jordan et al. (2024).
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)

_DECAY = "Rate of the decay of parameters, which is multiplied by the learning rate."


@update_rule("learning_rate=0.25, weight_decay=0.1", 2.675, weight_decay=_DECAY)
def adamw(
    p: SharedVariable,
    g: Variable,
    c: FormulaContext,
    learning_rate: Scalar = 0.001,
    beta1: Scalar = 0.9,
    beta2: Scalar = 0.999,
    epsilon: Scalar = 1e-8,
    weight_decay: Scalar = 1e-4,
    mask: Mask = None,
) -> NewValues:
    r"""Adam with decoupled weight decay.

    Notes
    -----
    .. math::
       m_t &= \beta_1 m_{t-1} + (1 - \beta_1)\, g_t \\
       v_t &= \beta_2 v_{t-1} + (1 - \beta_2)\, g_t^2 \\
       \hat m_t &= m_t / (1 - \beta_1^t), \quad \hat v_t = v_t / (1 - \beta_2^t) \\
       p_t &= p_{t-1} - \eta\, (\hat m_t / (\sqrt{\hat v_t} + \epsilon) + \lambda\, p_{t-1})

    :math:`\epsilon` is added to the corrected root, as in optax and PyTorch; `adam` adds it to the uncorrected one.

    Loshchilov, I. and Hutter, F. (2019): Decoupled weight decay regularization. ICLR, arXiv:1711.05101.
    """
    new, step = _adam_step(g, c, beta1, beta2, epsilon)
    return {**new, p: p - c(learning_rate) * _add_decay(p, step, c, weight_decay, mask)}


@update_rule(
    "learning_rate=0.25, weight_decay=0.1",
    2.675,
    weight_decay=_DECAY,
    beta1="Weight of the running mean of gradients in the step; in [0, 1).",
    beta2="Decay of the running mean of gradients, per step; in [0, 1).",
)
def lion(
    p: SharedVariable,
    g: Variable,
    c: FormulaContext,
    learning_rate: Scalar = 1e-4,
    beta1: Scalar = 0.9,
    beta2: Scalar = 0.99,
    weight_decay: Scalar = 1e-3,
    mask: Mask = None,
) -> NewValues:
    r"""Lion: steps by the sign of the interpolated mean gradient.

    Notes
    -----
    .. math::
       p_t &= p_{t-1} - \eta\, (\operatorname{sign}(\beta_1 m_{t-1} + (1 - \beta_1)\, g_t) + \lambda\, p_{t-1}) \\
       m_t &= \beta_2 m_{t-1} + (1 - \beta_2)\, g_t

    Chen, X. et al. (2023): Symbolic discovery of optimization algorithms. arXiv:2302.06675.
    """
    check_decay_rate(beta1, "beta1")
    check_decay_rate(beta2, "beta2")
    m = c.zeros("m")
    sign = getattr(c.tensor, "sign", None) or c.tensor.sgn  # Theano's
    step = sign(c(beta1) * m + c(1 - beta1) * g)
    new = c(beta2) * m + c(1 - beta2) * g
    return {m: new, p: p - c(learning_rate) * _add_decay(p, step, c, weight_decay, mask)}


@update_rule("learning_rate=0.25", 2.25, weight_decay=_DECAY)
def lamb(
    p: SharedVariable,
    g: Variable,
    c: FormulaContext,
    learning_rate: Scalar = 0.001,
    beta1: Scalar = 0.9,
    beta2: Scalar = 0.999,
    epsilon: Scalar = 1e-6,
    weight_decay: Scalar = 0.0,
    mask: Mask = None,
) -> NewValues:
    r"""LAMB: the step of `adamw`, scaled to the norm of each parameter; for large batches.

    Notes
    -----
    With :math:`u_t = \hat m_t / (\sqrt{\hat v_t} + \epsilon) + \lambda\, p_{t-1}` as in `adamw`,

    .. math:: p_t = p_{t-1} - \eta\, \frac{\|p_{t-1}\|}{\|u_t\|}\, u_t

    The ratio is 1 where one of the norms is 0.

    You, Y. et al. (2020): Large batch optimization for deep learning: training BERT in 76 minutes. ICLR,
    arXiv:1904.00962.
    """
    new, step = _adam_step(g, c, beta1, beta2, epsilon)
    step = _add_decay(p, step, c, weight_decay, mask)
    param_norm, step_norm = _norm(p, c), _norm(step, c)
    is_zero, one = c.tensor.eq(param_norm * step_norm, c(0)), c(1)
    ratio = c.tensor.switch(is_zero, one, param_norm / c.tensor.switch(is_zero, one, step_norm))
    return {**new, p: p - c(learning_rate) * ratio * step}


@update_rule(
    "learning_rate=0.25",
    2.75,
    momentum="Decay of the running mean of the gradients of matrices, per step.",
    weight_decay=_DECAY,
    mask="Predicate that selects the matrices updated by Muon, not the parameters that decay.  By default all are.",
)
def muon(
    p: SharedVariable,
    g: Variable,
    c: FormulaContext,
    learning_rate: Scalar = 0.001,
    momentum: Scalar = 0.95,
    beta1: Scalar = 0.9,
    beta2: Scalar = 0.999,
    epsilon: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    mask: Mask = None,
) -> NewValues:
    r"""Muon: matrices step by their orthogonalized momentum, other parameters by `adamw`.

    Notes
    -----
    For a matrix of ``m`` rows (inputs) and ``n`` columns (outputs),

    .. math::
       m_t &= \mu\, m_{t-1} + (1 - \mu)\, g_t \\
       \hat m_t &= \mu\, m_t / (1 - \mu^{t+1}) + (1 - \mu)\, g_t / (1 - \mu^t) \\
       p_t &= p_{t-1} - \eta\, (\sqrt{\max(1, n / m)}\, O(\hat m_t) + \lambda\, p_{t-1})

    where O is five Newton-Schulz iterations
    :math:`X \leftarrow a X + (b\, X X^T + c\, (X X^T)^2) X`, from :math:`\hat m_t / (\|\hat m_t\| + \epsilon)`, with
    (a, b, c) = (3.4445, -4.7750, 2.0315).  Other parameters do not decay.  They step by `adamw`, as in the paper; optax
    adds Nesterov's momentum to it.

    Jordan, K. et al. (2024): Muon: an optimizer for hidden layers in neural networks.
    https://kellerjordan.github.io/posts/muon/
    """
    if p.ndim != 2 or mask is not None and not mask(p):
        new, step = _adam_step(g, c, beta1, beta2, epsilon)
        return {**new, p: p - c(learning_rate) * step}
    m = c.zeros("m")
    new_m = c(momentum) * m + c(1 - momentum) * g
    mean = c(momentum) * new_m / c(one_minus_power(momentum, c.t + 1, "momentum"))
    mean += c(1 - momentum) * g / c(one_minus_power(momentum, c.t, "momentum"))
    n_rows, n_columns = get_shape(p)
    step = c(math.sqrt(max(1, n_columns / max(1, n_rows)))) * _orthogonalize(mean, n_rows > n_columns, c, epsilon)
    return {m: new_m, p: p - c(learning_rate) * _add_decay(p, step, c, weight_decay, None)}


def _adam_step(
    g: Variable, c: FormulaContext, beta1: Scalar, beta2: Scalar, epsilon: Scalar
) -> tuple[NewValues, Variable]:
    """Return new moments, and Adam's step of learning rate 1."""
    new, new_m, new_v = make_moments(g, c, beta1, beta2)
    mean = new_m / c(one_minus_power(beta1, c.t, "beta1"))
    root = c.tensor.sqrt(new_v / c(one_minus_power(beta2, c.t, "beta2")))
    return new, mean / (root + c(epsilon))


def _add_decay(p: SharedVariable, step: Variable, c: FormulaContext, weight_decay: Scalar, mask: Mask) -> Variable:
    """Add the decay of a parameter to its step, unless the mask leaves it out."""
    is_zero = isinstance(weight_decay, int | float) and weight_decay == 0
    return step if is_zero or mask is not None and not mask(p) else step + c(weight_decay) * p


def _norm(value: Variable, c: FormulaContext) -> Variable:
    """Return the Euclidean norm of all elements, accumulated in at least float32, in the parameter's dtype."""
    dtype = str(np.result_type(value.dtype, np.float32))
    return c(c.tensor.sqrt((c.tensor.cast(value, dtype) ** 2).sum()))


def _orthogonalize(x: Variable, is_tall: bool, context: FormulaContext, epsilon: Scalar) -> Variable:
    """Return an approximation of the nearest matrix with orthonormal rows or columns."""
    a, b, c = map(context, _NEWTON_SCHULZ)
    x = x.T if is_tall else x
    x = x / (_norm(x, context) + context(epsilon))
    dot = context.tensor.dot
    for _ in range(5):
        gram = dot(x, x.T)
        x = a * x + dot(b * gram + c * dot(gram, gram), x)
    return x.T if is_tall else x
