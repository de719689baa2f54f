"""Rules by moving averages of the gradient and of its size.

`adam`
    Size: the root of the mean square.
`adamax`
    Size: the largest, which fades.
`amsgrad`
    Size: the largest root of the mean square so far.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from synkhronos.extensions.updates.checks import is_number
from synkhronos.extensions.updates.flat import Cast, FlatGradient, RuleUpdates, Zeros, as_scalar
from synkhronos.graphs import library_of


def adam(
    loss_or_grads: Any,
    params: Iterable[Any],
    learning_rate: Any = 0.001,
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    epsilon: Any = 1e-8,
    *,
    weight: Any = None,
) -> RuleUpdates:
    r"""Adam: the mean gradient over the root of the mean square.

    Parameters
    ----------
    loss_or_grads : scalar variable, or list of variables
        A loss, or its gradients, one for each parameter.
    params : list of shared variables
        The parameters: shared variables of floats.
    learning_rate : number or symbolic scalar, optional
        Size of a step.
    beta1 : number or symbolic scalar, optional
        How much of the mean gradient is kept from one step to the next, from 0 up to but not including 1.
    beta2 : number or symbolic scalar, optional
        The same for the mean square.
    epsilon : number or symbolic scalar, optional
        Keeps the divisor from zero.
    weight : number or symbolic scalar, optional
        How much this rank's gradient counts, such as ``x.shape[0]``.  None: each rank's counts the same.

    Returns
    -------
    RuleUpdates
        ``(grad_updates, param_updates, grad_shared)``; see `synkhronos.extensions.updates`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not of these kinds; the message names it.

    Notes
    -----
    .. math::
       m_t &= \beta_1 m_{t-1} + (1 - \beta_1)\, g_t \\
       v_t &= \beta_2 v_{t-1} + (1 - \beta_2)\, g_t^2 \\
       r_t &= \eta\, \sqrt{1 - \beta_2^t} / (1 - \beta_1^t) \\
       p_t &= p_{t-1} - r_t\, m_t / (\sqrt{v_t} + \epsilon)

    This is the shorter form at the end of the paper's section 2, where :math:`\epsilon` stands beside the
    uncorrected root.

    References
    ----------
    .. [1] Kingma, D. P. and Ba, J. (2015): Adam: A method for stochastic optimization. ICLR, arXiv:1412.6980.

    Examples
    --------
    >>> import pytensor
    >>> w = pytensor.shared(3.0)
    >>> grad_updates, param_updates, grad_shared = adam(w**2, [w], learning_rate=0.25)
    >>> _ = pytensor.function([], updates=grad_updates)()
    >>> _ = pytensor.function([], updates=param_updates)()
    >>> print(w.get_value().round(4))
    2.75
    """
    flat = FlatGradient(
        loss_or_grads, params, weight, learning_rate=learning_rate, beta1=beta1, beta2=beta2, epsilon=epsilon
    )
    t, count = _steps(flat)
    sqrt = flat.tensor.sqrt
    rate = as_scalar(learning_rate, t) * sqrt(_one_minus_power(beta2, t)) / _one_minus_power(beta1, t)

    def step(p: Any, g: Any, c: Cast, zeros: Zeros) -> Mapping[Any, Any]:
        m, v = zeros("m"), zeros("v")
        m_new = c(beta1) * m + c(1 - beta1) * g
        v_new = c(beta2) * v + c(1 - beta2) * g**2
        return {m: m_new, v: v_new, p: p - c(rate) * m_new / (sqrt(v_new) + c(epsilon))}

    return flat.updates(step, also=count)


def adamax(
    loss_or_grads: Any,
    params: Iterable[Any],
    learning_rate: Any = 0.002,
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    epsilon: Any = 1e-8,
    *,
    weight: Any = None,
) -> RuleUpdates:
    r"""Adamax: the mean gradient over its largest size, which fades.

    Parameters
    ----------
    loss_or_grads : scalar variable, or list of variables
        A loss, or its gradients, one for each parameter.
    params : list of shared variables
        The parameters: shared variables of floats.
    learning_rate : number or symbolic scalar, optional
        Size of a step.
    beta1 : number or symbolic scalar, optional
        How much of the mean gradient is kept from one step to the next, from 0 up to but not including 1.
    beta2 : number or symbolic scalar, optional
        The same for the largest size.
    epsilon : number or symbolic scalar, optional
        Keeps the divisor from zero.
    weight : number or symbolic scalar, optional
        How much this rank's gradient counts, such as ``x.shape[0]``.  None: each rank's counts the same.

    Returns
    -------
    RuleUpdates
        ``(grad_updates, param_updates, grad_shared)``; see `synkhronos.extensions.updates`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not of these kinds; the message names it.

    Notes
    -----
    .. math::
       m_t &= \beta_1 m_{t-1} + (1 - \beta_1)\, g_t \\
       u_t &= \max(\beta_2 u_{t-1}, |g_t|) \\
       p_t &= p_{t-1} - \frac{\eta}{1 - \beta_1^t}\, \frac{m_t}{u_t + \epsilon}

    References
    ----------
    .. [1] Kingma, D. P. and Ba, J. (2015): Adam: A method for stochastic optimization. ICLR, arXiv:1412.6980.

    Examples
    --------
    >>> import pytensor
    >>> w = pytensor.shared(3.0)
    >>> grad_updates, param_updates, grad_shared = adamax(w**2, [w], learning_rate=0.25)
    >>> _ = pytensor.function([], updates=grad_updates)()
    >>> _ = pytensor.function([], updates=param_updates)()
    >>> print(w.get_value().round(4))
    2.75
    """
    flat = FlatGradient(
        loss_or_grads, params, weight, learning_rate=learning_rate, beta1=beta1, beta2=beta2, epsilon=epsilon
    )
    t, count = _steps(flat)
    maximum = flat.tensor.maximum
    rate = as_scalar(learning_rate, t) / _one_minus_power(beta1, t)

    def step(p: Any, g: Any, c: Cast, zeros: Zeros) -> Mapping[Any, Any]:
        m, u = zeros("m"), zeros("u")
        m_new = c(beta1) * m + c(1 - beta1) * g
        u_new = maximum(c(beta2) * u, abs(g))
        return {m: m_new, u: u_new, p: p - c(rate) * m_new / (u_new + c(epsilon))}

    return flat.updates(step, also=count)


def amsgrad(
    loss_or_grads: Any,
    params: Iterable[Any],
    learning_rate: Any = 0.001,
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    epsilon: Any = 1e-8,
    *,
    weight: Any = None,
) -> RuleUpdates:
    r"""AMSGrad: Adam with a mean square that never falls.

    Parameters
    ----------
    loss_or_grads : scalar variable, or list of variables
        A loss, or its gradients, one for each parameter.
    params : list of shared variables
        The parameters: shared variables of floats.
    learning_rate : number or symbolic scalar, optional
        Size of a step.
    beta1 : number or symbolic scalar, optional
        How much of the mean gradient is kept from one step to the next, from 0 up to but not including 1.
    beta2 : number or symbolic scalar, optional
        The same for the mean square.
    epsilon : number or symbolic scalar, optional
        Keeps the divisor from zero.
    weight : number or symbolic scalar, optional
        How much this rank's gradient counts, such as ``x.shape[0]``.  None: each rank's counts the same.

    Returns
    -------
    RuleUpdates
        ``(grad_updates, param_updates, grad_shared)``; see `synkhronos.extensions.updates`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not of these kinds; the message names it.

    Notes
    -----
    .. math::
       m_t &= \beta_1 m_{t-1} + (1 - \beta_1)\, g_t \\
       v_t &= \beta_2 v_{t-1} + (1 - \beta_2)\, g_t^2 \\
       \hat v_t &= \max(\hat v_{t-1}, v_t) \\
       r_t &= \eta\, \sqrt{1 - \beta_2^t} / (1 - \beta_1^t) \\
       p_t &= p_{t-1} - r_t\, m_t / (\sqrt{\hat v_t} + \epsilon)

    The paper leaves out the corrections by :math:`1 - \beta^t`; Lasagne has those of `adam`.

    References
    ----------
    .. [1] Reddi, S. J., Kale, S. and Kumar, S. (2018): On the convergence of Adam and beyond. ICLR,
       arXiv:1904.09237.

    Examples
    --------
    >>> import pytensor
    >>> w = pytensor.shared(3.0)
    >>> grad_updates, param_updates, grad_shared = amsgrad(w**2, [w], learning_rate=0.25)
    >>> _ = pytensor.function([], updates=grad_updates)()
    >>> _ = pytensor.function([], updates=param_updates)()
    >>> print(w.get_value().round(4))
    2.75
    """
    flat = FlatGradient(
        loss_or_grads, params, weight, learning_rate=learning_rate, beta1=beta1, beta2=beta2, epsilon=epsilon
    )
    t, count = _steps(flat)
    sqrt, maximum = flat.tensor.sqrt, flat.tensor.maximum
    rate = as_scalar(learning_rate, t) * sqrt(_one_minus_power(beta2, t)) / _one_minus_power(beta1, t)

    def step(p: Any, g: Any, c: Cast, zeros: Zeros) -> Mapping[Any, Any]:
        m, v, v_hat = zeros("m"), zeros("v"), zeros("v_hat")
        m_new = c(beta1) * m + c(1 - beta1) * g
        v_new = c(beta2) * v + c(1 - beta2) * g**2
        v_hat_new = maximum(v_hat, v_new)
        new = p - c(rate) * m_new / (sqrt(v_hat_new) + c(epsilon))
        return {m: m_new, v: v_new, v_hat: v_hat_new, p: new}

    return flat.updates(step, also=count)


def _steps(flat: FlatGradient) -> tuple[Any, Mapping[Any, Any]]:
    """Return the number of this step, from 1, as a symbolic scalar, and the update that counts it."""
    # In float32 the count stays at 2**24, where the corrections have long become 1.
    counter = library_of(flat.shared).shared(np.zeros((), flat.shared.dtype), name="t")
    t = counter + as_scalar(1, counter)
    return t, OrderedDict([(counter, t)])


def _one_minus_power(beta: Any, t: Any) -> Any:
    """``1 - beta**t``, to the last digits of the dtype of `t`.

    Written out, it would lose four digits of float32 to cancellation at beta = 0.999 and t = 1.
    """
    tensor = library_of(t).tensor
    if is_number(beta):
        if not 0 <= beta < 1:
            raise ValueError(f"beta1 and beta2: expected from 0 up to but not including 1, got {beta!r}")
        log = as_scalar(math.log(beta) if beta else -math.inf, t)
    else:
        log = as_scalar(tensor.log(beta), t)
    return -tensor.expm1(t * log)
