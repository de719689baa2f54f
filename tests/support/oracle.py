"""Formulas of the exchange rules in NumPy, with all ranks in one process; references are arXiv numbers."""

import numpy as np
from rule_programs import gradient, local_step


def run(n, problem, x0, kind, eta, steps, exchange, due):
    """Return each rank's parameters after each step; ``exchange(xs, velocities)`` is called after due steps."""
    xs, vs = [x0.copy() for _ in range(n)], [np.zeros_like(x0) for _ in range(n)]
    trace = [list(xs)]
    for step in range(steps):
        for r in range(n):
            xs[r], vs[r] = local_step(kind, xs[r], vs[r], gradient(problem, r, step, xs[r]), eta)
        if due(step + 1):
            xs = list(exchange(xs))
        trace.append(list(xs))
    return np.array(trace).swapaxes(0, 1)


def every(period):
    return lambda step: step % period == 0


def bsp(n, problem, x0, kind, eta, steps):
    """BSP: each step uses the mean gradient, as one process would."""
    x, v = x0.copy(), np.zeros_like(x0)
    trace = [x]
    for step in range(steps):
        x, v = local_step(kind, x, v, np.mean([gradient(problem, r, step, x) for r in range(n)], axis=0), eta)
        trace.append(x)
    return np.array(trace)


def averaging(n, problem, x0, kind, eta, steps, due):
    """Local SGD: 1805.09767, algorithm 1."""
    return run(n, problem, x0, kind, eta, steps, lambda xs: [np.mean(xs, axis=0)] * n, due)


def elastic(n, problem, x0, kind, eta, steps, period, beta):
    """EASGD: 1412.6651, eqs. 5 and 6, with the gradient before the exchange; also return the final centre."""
    centre, alpha = [x0.copy()], beta / n

    def exchange(xs):
        old = centre[0]
        centre[0] = (1 - beta) * old + beta * np.mean(xs, axis=0)
        return [x - alpha * (x - old) for x in xs]

    return run(n, problem, x0, kind, eta, steps, exchange, every(period)), centre[0]


def downpour(n, problem, x0, kind, eta, steps, period):
    """Synchronous Downpour: the steps of all ranks are added."""
    centre = [x0.copy()]

    def exchange(xs):
        centre[0] = centre[0] + sum(x - centre[0] for x in xs)
        return [centre[0]] * n

    return run(n, problem, x0, kind, eta, steps, exchange, every(period))


def slow_momentum(n, problem, x0, kind, eta, steps, period, alpha, beta):
    """SlowMo: 1910.00643, eqs. 2 and 3."""
    start, u = [x0.copy()], [np.zeros_like(x0)]

    def exchange(xs):
        u[0] = beta * u[0] + (start[0] - np.mean(xs, axis=0)) / eta
        start[0] = start[0] - alpha * eta * u[0]
        return [start[0]] * n

    return run(n, problem, x0, kind, eta, steps, exchange, every(period))


def outer_nesterov(n, problem, x0, kind, eta, steps, period, lr, momentum):
    """DiLoCo: 2311.08105, algorithm 1."""
    start, v = [x0.copy()], [np.zeros_like(x0)]

    def exchange(xs):
        delta = start[0] - np.mean(xs, axis=0)
        v[0] = momentum * v[0] + delta
        start[0] = start[0] - lr * (delta + momentum * v[0])
        return [start[0]] * n

    return run(n, problem, x0, kind, eta, steps, exchange, every(period))


def serial_nesterov(n, problem, x0, eta, steps, momentum):
    """Nesterov's momentum on the mean gradient: x ← x - η (g + µ v)."""
    x, v = x0.copy(), np.zeros_like(x0)
    trace = [x]
    for step in range(steps):
        g = np.mean([gradient(problem, r, step, x) for r in range(n)], axis=0)
        v = momentum * v + g
        x = x - eta * (g + momentum * v)
        trace.append(x)
    return np.array(trace)
