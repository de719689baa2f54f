"""A small problem of regression, and its parameters after each step of each update rule, in plain NumPy.

The rules are written from their papers, with Lasagne's defaults and Lasagne's places of epsilon.
"""

import numpy as np
from library import package
from library import tensor as T

N_STEPS = 10

_rng = np.random.default_rng(0)
X, Y = _rng.normal(size=(5, 3)).round(3), _rng.normal(size=(5, 2)).round(3)
#: The first 6 parameters are the matrix w, the last 2 are the vector b.
START = _rng.normal(size=8).round(3)


class Problem:
    """The loss ``mean((tanh(X w + b) - Y)**2)`` and its parameters, as the graph library's variables."""

    def __init__(self, dtype="float64", w_dtype=None):
        self.x, self.y = T.matrix("x", dtype=dtype), T.matrix("y", dtype=dtype)
        self.w = package.shared(START[:6].reshape(3, 2).astype(w_dtype or dtype), name="w")
        self.b = package.shared(START[6:].astype(dtype), name="b")
        self.params = [self.w, self.b]
        self.loss = ((T.tanh(T.dot(self.x, self.w) + self.b) - self.y) ** 2).mean()

    def values(self):
        return np.concatenate([p.get_value().ravel() for p in self.params])


def compute_gradient(params):
    """Return the gradient of the problem's loss."""
    w, b = params[:6].reshape(3, 2), params[6:]
    predicted = np.tanh(X @ w + b)
    back = 2 * (predicted - Y) / Y.size * (1 - predicted**2)
    return np.concatenate([(X.T @ back).ravel(), back.sum(axis=0)])


def take_steps(rule, **options):
    """Yield the parameters after each step of a rule: a function of the gradient, the state and the step's number."""
    params, state = START, {}
    for t in range(1, N_STEPS + 1):
        params = params + rule(compute_gradient(params), state, t, **options)
        yield params


def accumulate(state, name, decay, value):
    """Return an accumulator's new value, ``decay`` times the old one plus ``value``."""
    state[name] = decay * state.get(name, 0) + value
    return state[name]


def sgd(g, state, t, learning_rate):
    return -learning_rate * g


def momentum(g, state, t, learning_rate, momentum=0.9):
    """Polyak 1964."""
    return accumulate(state, "velocity", momentum, -learning_rate * g)


def nesterov_momentum(g, state, t, learning_rate, momentum=0.9):
    """Sutskever et al. 2013; the parameters are at the point where the next gradient is taken, as in Lasagne."""
    return momentum * accumulate(state, "velocity", momentum, -learning_rate * g) - learning_rate * g


def adagrad(g, state, t, learning_rate=1.0, epsilon=1e-6):
    """Duchi et al. 2011; epsilon under the root."""
    return -learning_rate * g / np.sqrt(accumulate(state, "total", 1, g * g) + epsilon)


def adagrad_with_momentum(g, state, t, learning_rate, momentum):
    """A velocity accumulates Adagrad's steps."""
    return accumulate(state, "velocity", momentum, adagrad(g, state, t, learning_rate))


def adagrad_with_nesterov_momentum(g, state, t, learning_rate, momentum):
    """`adagrad_with_momentum`, with the velocity's next step taken at once."""
    step = adagrad(g, state, t, learning_rate)
    return step + momentum * accumulate(state, "velocity", momentum, step)


def rmsprop(g, state, t, learning_rate=1.0, rho=0.9, epsilon=1e-6):
    """Tieleman and Hinton 2012; epsilon under the root."""
    return -learning_rate * g / np.sqrt(accumulate(state, "square", rho, (1 - rho) * g * g) + epsilon)


def adadelta(g, state, t, learning_rate=1.0, rho=0.95, epsilon=1e-6):
    """Zeiler 2012; epsilon under both roots."""
    square = accumulate(state, "square", rho, (1 - rho) * g * g)
    step = g * np.sqrt(state.get("step", 0) + epsilon) / np.sqrt(square + epsilon)
    accumulate(state, "step", rho, (1 - rho) * step * step)
    return -learning_rate * step


def adam(g, state, t, learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-8, takes_largest=False):
    """Kingma and Ba 2015, section 2, last lines: epsilon beside the uncorrected root."""
    mean = accumulate(state, "mean", beta1, (1 - beta1) * g)
    square = accumulate(state, "square", beta2, (1 - beta2) * g * g)
    if takes_largest:
        square = state["largest"] = np.maximum(state.get("largest", 0), square)
    return -learning_rate * np.sqrt(1 - beta2**t) / (1 - beta1**t) * mean / (np.sqrt(square) + epsilon)


def amsgrad(g, state, t, **options):
    """Reddi et al. 2018, with Adam's corrections; epsilon beside the uncorrected root."""
    return adam(g, state, t, **options, takes_largest=True)


def adamax(g, state, t, learning_rate=0.002, beta1=0.9, beta2=0.999, epsilon=1e-8):
    """Kingma and Ba 2015, section 7.1; epsilon added to the divisor."""
    mean = accumulate(state, "mean", beta1, (1 - beta1) * g)
    state["largest"] = np.maximum(beta2 * state.get("largest", 0), np.abs(g))
    return -learning_rate / (1 - beta1**t) * mean / (state["largest"] + epsilon)


#: Rule, and its options: the defaults, and an epsilon so large that its place shows.  The last ones of a rule make the
#: larger steps.
_CASES = [
    (sgd, {"learning_rate": 0.5}),
    (momentum, {"learning_rate": 0.3}),
    (momentum, {"learning_rate": 0.5, "momentum": 0.6}),
    (nesterov_momentum, {"learning_rate": 0.3}),
    (nesterov_momentum, {"learning_rate": 0.5, "momentum": 0.6}),
    (adagrad, {}),
    (adagrad, {"learning_rate": 0.1, "epsilon": 0.05}),
    (rmsprop, {}),
    (rmsprop, {"learning_rate": 0.05, "rho": 0.7, "epsilon": 0.05}),
    (adadelta, {}),
    (adadelta, {"learning_rate": 2.0, "rho": 0.7, "epsilon": 0.05}),
    *((rule, {}) for rule in (adam, adamax, amsgrad)),
    *((rule, {"learning_rate": 0.3, "beta1": 0.6, "beta2": 0.8, "epsilon": 0.05}) for rule in (adam, adamax, amsgrad)),
    (adagrad_with_momentum, {"learning_rate": 0.1, "momentum": 0.8}),
    (adagrad_with_nesterov_momentum, {"learning_rate": 0.1, "momentum": 0.8}),
]
#: Name of a rule, its options, and the expected parameters after each step.
REFERENCE_RUNS = [(rule.__name__, options, list(take_steps(rule, **options))) for rule, options in _CASES]
