"""Write optax_rules.json: the parameters after each of ten steps, by optax, on the problem of reference_updates.

Run with optax installed, and with tests/support on PYTHONPATH; tests/training/test_transformations.py compares.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from reference_updates import START, X, Y

jax.config.update("jax_enable_x64", True)
FOLDER = Path(__file__).parent


def mark_matrices(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


BY_PART = {"w": "matrix", "b": "other"}
RULES = {
    "adamw": optax.adamw(0.1, weight_decay=0.05),
    "adamw, other options": optax.adamw(0.3, b1=0.6, b2=0.8, eps=0.05, weight_decay=0.1, mask=mark_matrices),
    "lion": optax.lion(0.05, weight_decay=0.1),
    "lion, other options": optax.lion(0.02, b1=0.5, b2=0.8, weight_decay=0.1, mask=mark_matrices),
    "lamb": optax.lamb(0.1),
    "lamb, other options": optax.lamb(0.1, b1=0.6, b2=0.8, eps=0.05, weight_decay=0.1, mask=mark_matrices),
    # optax's muon has Nesterov's Adam for other parameters.
    "muon": optax.partition(
        {"matrix": optax.contrib.muon(0.1, beta=0.9, weight_decay=0.1), "other": optax.adamw(0.1, weight_decay=0)},
        BY_PART,
    ),
    "clip_by_global_norm": optax.chain(optax.clip_by_global_norm(0.2), optax.adamw(0.1)),
    "clip_by_global_norm, seldom": optax.chain(optax.clip_by_global_norm(0.7), optax.sgd(0.3)),
    "clip": optax.chain(optax.clip(0.1), optax.sgd(0.3, momentum=0.9)),
    "add_decayed_weights": optax.chain(optax.add_decayed_weights(0.2, mask=mark_matrices), optax.sgd(0.3)),
    "all": optax.chain(
        optax.clip(0.3), optax.clip_by_global_norm(0.4), optax.add_decayed_weights(0.1), optax.lion(0.03)
    ),
    "partition": optax.partition({"matrix": optax.adamw(0.2), "other": optax.sgd(0.05)}, BY_PART),
}


def compute_loss(params):
    return jnp.mean((jnp.tanh(X @ params["w"] + params["b"]) - Y) ** 2)


def run_steps(rule):
    params = {"w": jnp.array(START[:6].reshape(3, 2)), "b": jnp.array(START[6:])}
    state = rule.init(params)
    for _ in range(10):
        step, state = rule.update(jax.grad(compute_loss)(params), state, params)
        params = optax.apply_updates(params, step)
        yield [*np.ravel(params["w"]).tolist(), *params["b"].tolist()]


if __name__ == "__main__":
    table = {"optax": optax.__version__, **{name: list(run_steps(rule)) for name, rule in RULES.items()}}
    (FOLDER / "optax_rules.json").write_text(json.dumps(table) + "\n")
