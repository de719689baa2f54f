"""Writes update_rules.json: parameters after each step of each update rule, computed without Synkhronos.

    python -m venv /tmp/tables && /tmp/tables/bin/pip install torch==2.13.0 numpy
    /tmp/tables/bin/python tests/support/tables/make_update_table.py

Where torch.optim has a rule's formula, the numbers are torch's.  Where it differs in the place of epsilon
alone, they are of a plain NumPy loop, written from the paper with Lasagne's epsilon, and the loop is held
against torch with both epsilons at 1e-30, where the place makes no difference.  All of it in float64.
"""

import json
import re
from pathlib import Path

import numpy as np
import torch

STEPS = 10

rng = np.random.default_rng(0)
X = rng.normal(size=(5, 3)).round(3)
Y = rng.normal(size=(5, 2)).round(3)
START = rng.normal(size=8).round(3)


# -- the toy problem: mean((tanh(X W + b) - Y)**2); the first 6 parameters are W, the last 2 are b -------


def compute_gradient(params):
    w, b = params[:6].reshape(3, 2), params[6:]
    predicted = np.tanh(X @ w + b)
    back = 2 * (predicted - Y) / Y.size * (1 - predicted**2)
    return np.concatenate([(X.T @ back).ravel(), back.sum(axis=0)])


def run_torch(optimizer, **kwargs):
    params = torch.tensor(START, dtype=torch.float64, requires_grad=True)
    opt = optimizer([params], **kwargs)
    x, y, rows = torch.tensor(X), torch.tensor(Y), []
    for _ in range(STEPS):
        opt.zero_grad()
        predicted = torch.tanh(x @ params[:6].reshape(3, 2) + params[6:])
        ((predicted - y) ** 2).mean().backward()
        np.testing.assert_allclose(
            params.grad.numpy(), compute_gradient(params.detach().numpy()), rtol=1e-12, atol=1e-15
        )
        opt.step()
        rows.append(params.detach().numpy().copy())
    return np.array(rows)


def run_loop(loop, **kwargs):
    return np.array(list(loop(START.copy(), **kwargs)))


# -- loops -----------------------------------------------------------------------------------------------


def adagrad(p, lr, eps):
    """Duchi et al. 2011; epsilon under the root."""
    total = np.zeros_like(p)
    for _ in range(STEPS):
        g = compute_gradient(p)
        total += g * g
        p = p - lr * g / np.sqrt(total + eps)
        yield p


def adagrad_with_momentum(p, lr, eps, momentum):
    """A velocity (Polyak 1964) gathers Adagrad's steps."""
    total, velocity = np.zeros_like(p), np.zeros_like(p)
    for _ in range(STEPS):
        g = compute_gradient(p)
        total += g * g
        velocity = momentum * velocity - lr * g / np.sqrt(total + eps)
        p = p + velocity
        yield p


def adagrad_with_nesterov(p, lr, eps, momentum):
    """`adagrad_with_momentum`, with the velocity's next step taken at once."""
    total, velocity = np.zeros_like(p), np.zeros_like(p)
    for _ in range(STEPS):
        g = compute_gradient(p)
        total += g * g
        step = -lr * g / np.sqrt(total + eps)
        velocity = momentum * velocity + step
        p = p + step + momentum * velocity
        yield p


def rmsprop(p, lr, rho, eps):
    """Tieleman and Hinton 2012; epsilon under the root."""
    mean_square = np.zeros_like(p)
    for _ in range(STEPS):
        g = compute_gradient(p)
        mean_square = rho * mean_square + (1 - rho) * g * g
        p = p - lr * g / np.sqrt(mean_square + eps)
        yield p


def adam(p, lr, beta1, beta2, eps):
    """Kingma and Ba 2015, section 2, last lines: epsilon beside the uncorrected root."""
    m, v = np.zeros_like(p), np.zeros_like(p)
    for t in range(1, STEPS + 1):
        g = compute_gradient(p)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        rate = lr * np.sqrt(1 - beta2**t) / (1 - beta1**t)
        p = p - rate * m / (np.sqrt(v) + eps)
        yield p


def adamax(p, lr, beta1, beta2, eps):
    """Kingma and Ba 2015, section 7.1; epsilon added to the divisor."""
    m, u = np.zeros_like(p), np.zeros_like(p)
    for t in range(1, STEPS + 1):
        g = compute_gradient(p)
        m = beta1 * m + (1 - beta1) * g
        u = np.maximum(beta2 * u, np.abs(g))
        p = p - lr / (1 - beta1**t) * m / (u + eps)
        yield p


def amsgrad(p, lr, beta1, beta2, eps):
    """Reddi et al. 2018, with Adam's corrections; epsilon beside the uncorrected root."""
    m, v, largest = np.zeros_like(p), np.zeros_like(p), np.zeros_like(p)
    for t in range(1, STEPS + 1):
        g = compute_gradient(p)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        largest = np.maximum(largest, v)
        rate = lr * np.sqrt(1 - beta2**t) / (1 - beta1**t)
        p = p - rate * m / (np.sqrt(largest) + eps)
        yield p


def nesterov_ahead(theta, lr, momentum):
    """Sutskever et al. 2013: the gradient at ``theta + momentum * velocity``; yields that point."""
    velocity = np.zeros_like(theta)
    for _ in range(STEPS):
        velocity = momentum * velocity - lr * compute_gradient(theta + momentum * velocity)
        theta = theta + velocity
        yield theta + momentum * velocity


# -- the table -------------------------------------------------------------------------------------------

columns = []


def add_column(rule, kwargs, source, rows):
    columns.append({"rule": rule, "kwargs": kwargs, "source": source, "params": rows.tolist()})


def from_torch(rule, kwargs, optimizer, **torch_kwargs):
    shown = ", ".join(f"{k}={v!r}" for k, v in torch_kwargs.items())
    add_column(
        rule,
        kwargs,
        f"torch.optim.{optimizer.__name__}({shown}), torch {torch.__version__}",
        run_torch(optimizer, **torch_kwargs),
    )


def from_loop(rule, kwargs, loop, loop_kwargs, optimizer, **torch_kwargs):
    """Check the loop against torch where epsilon vanishes, then use it."""
    anchored = run_loop(loop, **{**loop_kwargs, "eps": 1e-30})
    expected = run_torch(optimizer, **torch_kwargs, eps=1e-30)
    np.testing.assert_allclose(anchored, expected, rtol=1e-11)
    add_column(
        rule,
        kwargs,
        f"NumPy loop {loop.__name__}, equal to torch.optim.{optimizer.__name__} of torch {torch.__version__} "
        "to 1e-11 where epsilon is 1e-30",
        run_loop(loop, **loop_kwargs),
    )


from_torch("sgd", {"learning_rate": 0.5}, torch.optim.SGD, lr=0.5)

for lr, mu in [(0.3, 0.9), (0.5, 0.6)]:
    kwargs = {"learning_rate": lr} if mu == 0.9 else {"learning_rate": lr, "momentum": mu}
    from_torch("momentum", kwargs, torch.optim.SGD, lr=lr, momentum=mu)
    from_torch("nesterov_momentum", kwargs, torch.optim.SGD, lr=lr, momentum=mu, nesterov=True)
    # Torch, like Lasagne, keeps the point ahead in the parameters; the older form passes there too.
    np.testing.assert_allclose(run_loop(nesterov_ahead, lr=lr, momentum=mu), columns[-1]["params"], rtol=1e-11)

# Each with its defaults, and with an epsilon so large that its place shows.
for kwargs in [{}, {"learning_rate": 0.1, "epsilon": 0.05}]:
    lr, eps = kwargs.get("learning_rate", 1.0), kwargs.get("epsilon", 1e-6)
    from_loop("adagrad", kwargs, adagrad, {"lr": lr, "eps": eps}, torch.optim.Adagrad, lr=lr)

for kwargs in [{}, {"learning_rate": 0.05, "rho": 0.7, "epsilon": 0.05}]:
    lr, rho, eps = kwargs.get("learning_rate", 1.0), kwargs.get("rho", 0.9), kwargs.get("epsilon", 1e-6)
    from_loop("rmsprop", kwargs, rmsprop, {"lr": lr, "rho": rho, "eps": eps}, torch.optim.RMSprop, lr=lr, alpha=rho)

for kwargs in [{}, {"learning_rate": 2.0, "rho": 0.7, "epsilon": 0.05}]:
    lr, rho, eps = kwargs.get("learning_rate", 1.0), kwargs.get("rho", 0.95), kwargs.get("epsilon", 1e-6)
    from_torch("adadelta", kwargs, torch.optim.Adadelta, lr=lr, rho=rho, eps=eps)

for name, loop, optimizer, default, more in [
    ("adam", adam, torch.optim.Adam, 0.001, {}),
    ("adamax", adamax, torch.optim.Adamax, 0.002, {}),
    ("amsgrad", amsgrad, torch.optim.Adam, 0.001, {"amsgrad": True}),
]:
    for kwargs in [{}, {"learning_rate": 0.3, "beta1": 0.6, "beta2": 0.8, "epsilon": 0.05}]:
        lr, beta1, beta2 = (
            kwargs.get("learning_rate", default),
            kwargs.get("beta1", 0.9),
            kwargs.get("beta2", 0.999),
        )
        loop_kwargs = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": kwargs.get("epsilon", 1e-8)}
        from_loop(name, kwargs, loop, loop_kwargs, optimizer, lr=lr, betas=(beta1, beta2), **more)

by_rule = {(c["rule"], bool(c["kwargs"])): c["params"] for c in columns}
assert by_rule["amsgrad", True] != by_rule["adam", True], "the mean square never fell"

for rule, loop in [
    ("adagrad + apply_momentum", adagrad_with_momentum),
    ("adagrad + apply_nesterov_momentum", adagrad_with_nesterov),
]:
    loop_kwargs = {"lr": 0.1, "eps": 1e-6, "momentum": 0.8}
    # Torch has no such pair; without the momentum it is the loop above.
    np.testing.assert_allclose(
        run_loop(loop, **{**loop_kwargs, "momentum": 0}), run_loop(adagrad, lr=0.1, eps=1e-6), rtol=1e-12
    )
    add_column(
        rule,
        {"learning_rate": 0.1, "momentum": 0.8},
        f"NumPy loop {loop.__name__}, equal to adagrad where the momentum is 0",
        run_loop(loop, **loop_kwargs),
    )

table = {
    "problem": "loss = mean((tanh(x @ w + b) - y)**2), w = start[:6].reshape(3, 2), b = start[6:]; float64",
    "made_by": "tests/support/tables/make_update_table.py",
    "x": X.tolist(),
    "y": Y.tolist(),
    "start": START.tolist(),
    "columns": columns,
}
target = Path(__file__).with_name("update_rules.json")
# One line a step: readable, and a change of one rule shows as a change of its lines.
text = re.sub(r"\[\n[^\[\]]*\]", lambda numbers: json.dumps(json.loads(numbers.group())), json.dumps(table, indent=1))
target.write_text(text + "\n")
print(f"{target}: {len(columns)} columns of {STEPS} steps")
