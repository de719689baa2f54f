"""Formulas of the exchange rules in NumPy, with all ranks in one process; references are arXiv numbers.

Every formula takes ``n`` ranks, the ``problem`` (see `rule_programs.compute_gradient`), the first parameters ``x0``, the
name of the ``optimizer`` (see `rule_programs.take_local_step`), its learning rate ``eta``, and a number of ``steps``.  Steps
are numbered from 1.  If ``is_due(number)`` is true, an exchange follows the step.

The result is the parameters before the first step and after each step, of shape (steps + 1, items).  If they differ between
ranks, the first axis is that of the ranks.  `elastic` also returns the centre.
"""

import numpy as np
from rule_programs import compute_gradient, take_local_step


def train(n, problem, x0, optimizer, eta, steps, exchange, is_due):
    """Train with exchanges: ``exchange(xs)`` returns the ranks' new parameters."""
    xs, vs = [x0.copy() for _ in range(n)], [np.zeros_like(x0) for _ in range(n)]
    trace = [list(xs)]
    for step in range(steps):
        for r in range(n):
            xs[r], vs[r] = take_local_step(optimizer, xs[r], vs[r], compute_gradient(problem, r, step, xs[r]), eta)
        if is_due(step + 1):
            xs = list(exchange(xs))
        trace.append(list(xs))
    return np.array(trace).swapaxes(0, 1)


def make_schedule(period):
    """Return the ``is_due`` of exchanges every ``period`` steps."""
    return lambda step: step % period == 0


def bsp(n, problem, x0, optimizer, eta, steps):
    """BSP: each step uses the mean gradient, as one process would."""
    x, v = x0.copy(), np.zeros_like(x0)
    trace = [x]
    for step in range(steps):
        x, v = take_local_step(
            optimizer, x, v, np.mean([compute_gradient(problem, r, step, x) for r in range(n)], axis=0), eta
        )
        trace.append(x)
    return np.array(trace)


def averaging(n, problem, x0, optimizer, eta, steps, is_due):
    """Local SGD: 1805.09767, algorithm 1."""
    return train(n, problem, x0, optimizer, eta, steps, lambda xs: [np.mean(xs, axis=0)] * n, is_due)


def elastic(n, problem, x0, optimizer, eta, steps, is_due, beta):
    """EASGD: 1412.6651, eqs. 5 and 6, with the gradient before the exchange; also return the final centre.

    ``beta`` is the part of the way that the centre moves to the ranks' mean.  Each rank moves ``beta / n`` of the way to
    the centre.
    """
    centre = [x0.copy()]

    def exchange(xs):
        old = centre[0]
        centre[0] = (1 - beta) * old + beta * np.mean(xs, axis=0)
        return [x - beta / n * (x - old) for x in xs]

    return train(n, problem, x0, optimizer, eta, steps, exchange, is_due), centre[0]


def downpour(n, problem, x0, optimizer, eta, steps, is_due):
    """Synchronous Downpour: the steps of all ranks are added."""
    centre = [x0.copy()]

    def exchange(xs):
        centre[0] = centre[0] + sum(x - centre[0] for x in xs)
        return [centre[0]] * n

    return train(n, problem, x0, optimizer, eta, steps, exchange, is_due)


def slow_momentum(n, problem, x0, optimizer, eta, steps, is_due, lr, momentum):
    """SlowMo: 1910.00643, eqs. 2 and 3, whose α and β are ``lr`` and ``momentum``."""
    start, u = [x0.copy()], [np.zeros_like(x0)]

    def exchange(xs):
        u[0] = momentum * u[0] + (start[0] - np.mean(xs, axis=0)) / eta
        start[0] = start[0] - lr * eta * u[0]
        return [start[0]] * n

    return train(n, problem, x0, optimizer, eta, steps, exchange, is_due)


def outer_nesterov(n, problem, x0, optimizer, eta, steps, is_due, lr, momentum):
    """DiLoCo: 2311.08105, algorithm 1."""
    start, v = [x0.copy()], [np.zeros_like(x0)]

    def exchange(xs):
        delta = start[0] - np.mean(xs, axis=0)
        v[0] = momentum * v[0] + delta
        start[0] = start[0] - lr * (delta + momentum * v[0])
        return [start[0]] * n

    return train(n, problem, x0, optimizer, eta, steps, exchange, is_due)


def serial_nesterov(n, problem, x0, eta, steps, momentum):
    """Nesterov's momentum on the mean gradient: x ← x - η (g + µ v)."""
    x, v = x0.copy(), np.zeros_like(x0)
    trace = [x]
    for step in range(steps):
        g = np.mean([compute_gradient(problem, r, step, x) for r in range(n)], axis=0)
        v = momentum * v + g
        x = x - eta * (g + momentum * v)
        trace.append(x)
    return np.array(trace)
