"""Rules that scale each element's step by its past gradients.

`adagrad`
    By the sum of their squares.
`rmsprop`
    By the moving average of their squares.
`adadelta`
    By that, and by the moving average of the squared steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from synkhronos.extensions.updates.flat import Cast, FlatGradient, RuleUpdates, Zeros


def adagrad(
    loss_or_grads: Any,
    params: Iterable[Any],
    learning_rate: Any = 1.0,
    epsilon: Any = 1e-6,
    *,
    weight: Any = None,
) -> RuleUpdates:
    r"""Adagrad: steps shrink with the sum of squared gradients.

    Parameters
    ----------
    loss_or_grads : scalar variable, or list of variables
        A loss, or its gradients, one for each parameter.
    params : list of shared variables
        The parameters: shared variables of floats.
    learning_rate : number or symbolic scalar, optional
        Size of a step.
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
       a_t &= a_{t-1} + g_t^2 \\
       p_t &= p_{t-1} - \eta\, g_t / \sqrt{a_t + \epsilon}

    References
    ----------
    .. [1] Duchi, J., Hazan, E. and Singer, Y. (2011): Adaptive subgradient methods for online learning and
       stochastic optimization. JMLR 12, 2121-2159.

    Examples
    --------
    >>> import pytensor
    >>> w = pytensor.shared(3.0)
    >>> grad_updates, param_updates, grad_shared = adagrad(w**2, [w], learning_rate=0.25)
    >>> _ = pytensor.function([], updates=grad_updates)()
    >>> _ = pytensor.function([], updates=param_updates)()
    >>> print(w.get_value().round(4))
    2.75
    """
    flat = FlatGradient(loss_or_grads, params, weight, learning_rate=learning_rate, epsilon=epsilon)
    sqrt = flat.tensor.sqrt

    def step(p: Any, g: Any, c: Cast, zeros: Zeros) -> Mapping[Any, Any]:
        a = zeros("accu")
        a_new = a + g**2
        return {a: a_new, p: p - c(learning_rate) * g / sqrt(a_new + c(epsilon))}

    return flat.updates(step)


def rmsprop(
    loss_or_grads: Any,
    params: Iterable[Any],
    learning_rate: Any = 1.0,
    rho: Any = 0.9,
    epsilon: Any = 1e-6,
    *,
    weight: Any = None,
) -> RuleUpdates:
    r"""RMSProp: steps scaled by the root of the mean squared gradient.

    Parameters
    ----------
    loss_or_grads : scalar variable, or list of variables
        A loss, or its gradients, one for each parameter.
    params : list of shared variables
        The parameters: shared variables of floats.
    learning_rate : number or symbolic scalar, optional
        Size of a step.
    rho : number or symbolic scalar, optional
        How much of the mean square is kept from one step to the next.
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
       a_t &= \rho\, a_{t-1} + (1 - \rho)\, g_t^2 \\
       p_t &= p_{t-1} - \eta\, g_t / \sqrt{a_t + \epsilon}

    References
    ----------
    .. [1] Tieleman, T. and Hinton, G. (2012): Lecture 6.5: rmsprop. Neural networks for machine
       learning, Coursera.

    Examples
    --------
    >>> import pytensor
    >>> w = pytensor.shared(3.0)
    >>> grad_updates, param_updates, grad_shared = rmsprop(w**2, [w], learning_rate=0.25)
    >>> _ = pytensor.function([], updates=grad_updates)()
    >>> _ = pytensor.function([], updates=param_updates)()
    >>> print(w.get_value().round(4))
    2.2094
    """
    flat = FlatGradient(loss_or_grads, params, weight, learning_rate=learning_rate, rho=rho, epsilon=epsilon)
    sqrt = flat.tensor.sqrt

    def step(p: Any, g: Any, c: Cast, zeros: Zeros) -> Mapping[Any, Any]:
        a = zeros("accu")
        a_new = c(rho) * a + c(1 - rho) * g**2
        return {a: a_new, p: p - c(learning_rate) * g / sqrt(a_new + c(epsilon))}

    return flat.updates(step)


def adadelta(
    loss_or_grads: Any,
    params: Iterable[Any],
    learning_rate: Any = 1.0,
    rho: Any = 0.95,
    epsilon: Any = 1e-6,
    *,
    weight: Any = None,
) -> RuleUpdates:
    r"""Adadelta: steps in the units of the parameter.

    Parameters
    ----------
    loss_or_grads : scalar variable, or list of variables
        A loss, or its gradients, one for each parameter.
    params : list of shared variables
        The parameters: shared variables of floats.
    learning_rate : number or symbolic scalar, optional
        Scale of the steps.  The paper has none, which is 1.
    rho : number or symbolic scalar, optional
        How much of the mean squares is kept from one step to the next.
    epsilon : number or symbolic scalar, optional
        Keeps the divisor from zero, and starts the first step.
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
       a_t &= \rho\, a_{t-1} + (1 - \rho)\, g_t^2 \\
       d_t &= g_t \sqrt{b_{t-1} + \epsilon} / \sqrt{a_t + \epsilon} \\
       b_t &= \rho\, b_{t-1} + (1 - \rho)\, d_t^2 \\
       p_t &= p_{t-1} - \eta\, d_t

    References
    ----------
    .. [1] Zeiler, M. D. (2012): ADADELTA: An adaptive learning rate method. arXiv:1212.5701.

    Examples
    --------
    >>> import pytensor
    >>> w = pytensor.shared(3.0)
    >>> grad_updates, param_updates, grad_shared = adadelta(w**2, [w])
    >>> _ = pytensor.function([], updates=grad_updates)()
    >>> _ = pytensor.function([], updates=param_updates)()
    >>> print(w.get_value().round(4))
    2.9955
    """
    flat = FlatGradient(loss_or_grads, params, weight, learning_rate=learning_rate, rho=rho, epsilon=epsilon)
    sqrt = flat.tensor.sqrt

    def step(p: Any, g: Any, c: Cast, zeros: Zeros) -> Mapping[Any, Any]:
        a, b = zeros("accu"), zeros("delta_accu")
        a_new = c(rho) * a + c(1 - rho) * g**2
        d = g * sqrt(b + c(epsilon)) / sqrt(a_new + c(epsilon))
        b_new = c(rho) * b + c(1 - rho) * d**2
        return {a: a_new, b: b_new, p: p - c(learning_rate) * d}

    return flat.updates(step)
