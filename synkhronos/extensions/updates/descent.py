"""Gradient descent, and velocities on top of any rule.

`sgd`
    Against the gradient.
`apply_momentum`, `momentum`
    With a velocity: over any rule, and over `sgd`.
`apply_nesterov_momentum`, `nesterov_momentum`
    With a velocity whose next step is taken at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from synkhronos.extensions.updates.checks import check_params, check_scalars
from synkhronos.extensions.updates.flat import Cast, FlatGradient, RuleUpdates, Zeros, as_scalar, zeros_like

#: What a rule returned, or its `param_updates`: the same comes back.
Updates = TypeVar("Updates", RuleUpdates, "OrderedDict[Any, Any]")


def sgd(loss_or_grads: Any, params: Iterable[Any], learning_rate: Any, *, weight: Any = None) -> RuleUpdates:
    r"""Gradient descent.

    Parameters
    ----------
    loss_or_grads : scalar variable, or list of variables
        A loss, or its gradients, one for each parameter.
    params : list of shared variables
        The parameters: shared variables of floats.
    learning_rate : number or symbolic scalar
        Size of a step.
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
    .. math:: p_t = p_{t-1} - \eta\, g_t

    References
    ----------
    .. [1] Robbins, H. and Monro, S. (1951): A stochastic approximation method.
       The Annals of Mathematical Statistics 22(3), 400-407.

    Examples
    --------
    >>> import pytensor
    >>> w = pytensor.shared(3.0)
    >>> grad_updates, param_updates, grad_shared = sgd(w**2, [w], learning_rate=0.25)
    >>> _ = pytensor.function([], updates=grad_updates)()
    >>> _ = pytensor.function([], updates=param_updates)()
    >>> print(w.get_value().round(4))
    1.5
    """
    flat = FlatGradient(loss_or_grads, params, weight, learning_rate=learning_rate)

    def step(p: Any, g: Any, c: Cast, zeros: Zeros) -> Mapping[Any, Any]:
        return {p: p - c(learning_rate) * g}

    return flat.updates(step)


def apply_momentum(updates: Updates, params: Iterable[Any] | None = None, momentum: Any = 0.9) -> Updates:
    r"""Give a rule's steps a velocity.

    Parameters
    ----------
    updates : RuleUpdates or OrderedDict
        What a rule returned, or its `param_updates` alone.  It is left as it is.
    params : list of shared variables, optional
        What to give a velocity; by default, all that `updates` moves.
    momentum : number or symbolic scalar, optional
        How much of the velocity is kept from one step to the next.

    Returns
    -------
    RuleUpdates or OrderedDict
        As `updates`, with the velocities in `param_updates`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not of these kinds; the message names it.

    Notes
    -----
    Where the rule moves the parameter to :math:`\hat p_t`,

    .. math::
       v_t &= \mu v_{t-1} + \hat p_t - p_{t-1} \\
       p_t &= p_{t-1} + v_t

    As in Lasagne, the default of `params` takes in what a rule such as `adagrad` keeps for itself.  Name the
    parameters after any rule but `sgd`.

    References
    ----------
    .. [1] Polyak, B. T. (1964): Some methods of speeding up the convergence of iteration methods.
       USSR Computational Mathematics and Mathematical Physics 4(5), 1-17.

    Examples
    --------
    >>> import pytensor
    >>> w = pytensor.shared(3.0)
    >>> rule = apply_momentum(sgd(w**2, [w], learning_rate=0.25), [w], momentum=0.5)
    >>> gradient = pytensor.function([], updates=rule.grad_updates)
    >>> update = pytensor.function([], updates=rule.param_updates)
    >>> for step in range(2):
    ...     _ = gradient(), update()
    >>> print(w.get_value().round(4))
    0.0
    """

    def velocity(p: Any, target: Any, v: Any, m: Any) -> tuple[Any, Any]:
        new = m * v + target
        return new, new - p

    return _with_velocity(updates, params, momentum, velocity)


def momentum(
    loss_or_grads: Any, params: Iterable[Any], learning_rate: Any, momentum: Any = 0.9, *, weight: Any = None
) -> RuleUpdates:
    r"""Gradient descent with a velocity.

    Parameters
    ----------
    loss_or_grads : scalar variable, or list of variables
        A loss, or its gradients, one for each parameter.
    params : list of shared variables
        The parameters: shared variables of floats.
    learning_rate : number or symbolic scalar
        Size of a step.
    momentum : number or symbolic scalar, optional
        How much of the velocity is kept from one step to the next.
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
       v_t &= \mu v_{t-1} - \eta\, g_t \\
       p_t &= p_{t-1} + v_t

    Steps grow by up to :math:`1 / (1 - \mu)` over those of `sgd`.

    References
    ----------
    .. [1] Polyak, B. T. (1964): Some methods of speeding up the convergence of iteration methods.
       USSR Computational Mathematics and Mathematical Physics 4(5), 1-17.

    Examples
    --------
    >>> import pytensor
    >>> w = pytensor.shared(3.0)
    >>> grad_updates, param_updates, grad_shared = momentum(w**2, [w], learning_rate=0.25)
    >>> _ = pytensor.function([], updates=grad_updates)()
    >>> _ = pytensor.function([], updates=param_updates)()
    >>> print(w.get_value().round(4))
    1.5
    """
    updates = sgd(loss_or_grads, params, learning_rate, weight=weight)
    return apply_momentum(updates, momentum=momentum)


def apply_nesterov_momentum(updates: Updates, params: Iterable[Any] | None = None, momentum: Any = 0.9) -> Updates:
    r"""Give a rule's steps Nesterov's velocity.

    Parameters
    ----------
    updates : RuleUpdates or OrderedDict
        What a rule returned, or its `param_updates` alone.  It is left as it is.
    params : list of shared variables, optional
        What to give a velocity; by default, all that `updates` moves.
    momentum : number or symbolic scalar, optional
        How much of the velocity is kept from one step to the next.

    Returns
    -------
    RuleUpdates or OrderedDict
        As `updates`, with the velocities in `param_updates`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not of these kinds; the message names it.

    Notes
    -----
    Where the rule moves the parameter to :math:`\hat p_t`,

    .. math::
       v_t &= \mu v_{t-1} + \hat p_t - p_{t-1} \\
       p_t &= \hat p_t + \mu v_t

    The method in [1]_ and [2]_ takes the gradient at the point :math:`p + \mu v`.  Here the shared variable
    holds that point, so that the gradient is the one at the parameters.

    As in Lasagne, the default of `params` takes in what a rule such as `adagrad` keeps for itself.  Name the
    parameters after any rule but `sgd`.

    References
    ----------
    .. [1] Nesterov, Y. (1983): A method of solving a convex programming problem with convergence rate
       O(1/k^2). Soviet Mathematics Doklady 27, 372-376.
    .. [2] Sutskever, I., Martens, J., Dahl, G. and Hinton, G. (2013): On the importance of initialization and
       momentum in deep learning. ICML, 1139-1147.

    Examples
    --------
    >>> import pytensor
    >>> w = pytensor.shared(3.0)
    >>> rule = apply_nesterov_momentum(sgd(w**2, [w], learning_rate=0.25), [w], momentum=0.5)
    >>> gradient = pytensor.function([], updates=rule.grad_updates)
    >>> update = pytensor.function([], updates=rule.param_updates)
    >>> for step in range(2):
    ...     _ = gradient(), update()
    >>> print(w.get_value().round(4))
    -0.1875
    """

    def velocity(p: Any, target: Any, v: Any, m: Any) -> tuple[Any, Any]:
        new = m * v + target - p
        return target + m * new, new

    return _with_velocity(updates, params, momentum, velocity)


def nesterov_momentum(
    loss_or_grads: Any, params: Iterable[Any], learning_rate: Any, momentum: Any = 0.9, *, weight: Any = None
) -> RuleUpdates:
    r"""Gradient descent with Nesterov's velocity.

    Parameters
    ----------
    loss_or_grads : scalar variable, or list of variables
        A loss, or its gradients, one for each parameter.
    params : list of shared variables
        The parameters: shared variables of floats.
    learning_rate : number or symbolic scalar
        Size of a step.
    momentum : number or symbolic scalar, optional
        How much of the velocity is kept from one step to the next.
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

    Examples
    --------
    >>> import pytensor
    >>> w = pytensor.shared(3.0)
    >>> grad_updates, param_updates, grad_shared = nesterov_momentum(w**2, [w], learning_rate=0.25)
    >>> _ = pytensor.function([], updates=grad_updates)()
    >>> _ = pytensor.function([], updates=param_updates)()
    >>> print(w.get_value().round(4))
    0.15
    """
    updates = sgd(loss_or_grads, params, learning_rate, weight=weight)
    return apply_nesterov_momentum(updates, momentum=momentum)


def _with_velocity(
    updates: Updates,
    params: Iterable[Any] | None,
    momentum: Any,
    velocity: Callable[[Any, Any, Any, Any], tuple[Any, Any]],
) -> Updates:
    """Replace what `updates` moves the parameters to; ``velocity(p, target, v, m)`` gives the new p and v."""
    if isinstance(updates, tuple) and len(updates) == 3:
        grad_updates, param_updates, grad_shared = updates
        changed = _with_velocity(param_updates, params, momentum, velocity)
        return RuleUpdates(grad_updates, changed, grad_shared)
    if not isinstance(updates, Mapping):
        raise TypeError(
            "updates: expected what a rule returned, or its param_updates, "
            f"got {updates!r} of type {type(updates).__name__}"
        )
    params = check_params(updates if params is None else params)
    check_scalars(params, momentum=momentum)
    changed = OrderedDict(updates)
    for p in params:
        if p not in changed:
            raise ValueError(f"params: expected variables that updates moves, got {p!r}")
        v = zeros_like(p, "velocity")
        changed[p], changed[v] = velocity(p, changed[p], v, as_scalar(momentum, p))
    return changed
